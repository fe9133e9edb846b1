"""Refusals in HTTP: problem+json (RFC 9457) with the code of the wire, so that a client acts on both ways alike.

    {"type": "urn:plato:problem:not-a-member", "title": the code's words, "status": 404, "detail": what is wrong here,
     "code": 425, "retry_ms": 0}

detail never repeats what was asked for: an answer about what exists and is hidden, and one about what does not, are equal to
the byte. retry_ms > 0 comes with Retry-After.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from plato.core.codes import Action, Code, action, text
from plato.core.errors import PeerError, Unavailable, Unstorable
from plato.runtime import logs
from starlette.exceptions import HTTPException
from starlette.requests import Request

MEDIA_TYPE: Final = "application/problem+json"
RETRY_MS: Final = 1_000
_STATUS: Final[Mapping[int, int]] = {
    Code.PENDING: 202,
    Code.TOO_FAST: 429,
    Code.LOGIN_LATER: 429,
    Code.FRAME_SIZE: 413,
    Code.BODY_TOO_LARGE: 413,
    Code.NOT_A_MEMBER: 404,
    Code.GROUP_UNKNOWN: 404,
    Code.MESSAGE_UNKNOWN: 404,
    Code.ATTACHMENT_UNKNOWN: 404,
    Code.GROUP_EXISTS: 409,
    Code.GROUP_FULL: 409,
    Code.TOO_LATE: 409,
    Code.NOT_STORABLE: 409,
    Code.NOT_ALLOWED: 403,
    Code.NOT_WELCOME: 403,
    Code.REFUSED_BY_HOOK: 403,
    Code.KICKED: 403,
}
_TITLES: Final[Mapping[int, str]] = {
    Code.TOKEN_EXPIRED: "the token is expired; ask with a new one",
    Code.TOKEN_NOT_YET_VALID: "the token is not valid yet; ask when it is, or check the clocks",
    Code.TOKEN_INVALID: "no token came with the request, or one that this platform does not take",
    Code.GUESTS_OFF: "guests are not let in here; ask with a token",
    Code.LOGIN_LATER: "too many ask at once; the same again after the time that is told",
    Code.TOO_FAST: "more requests than one user or server may send; the same again after the time that is told",
    Code.MALFORMED: "the request is wrong",
    Code.FRAME_SIZE: "the body is empty or larger than the limit",
    Code.TOO_MANY_CURSORS: "more conversations than one request may name",
    Code.NOT_ALLOWED: "you may not do that",
}
"""Where the words of a code speak of frames, connections and logins."""

SCHEMA: Final[dict[str, Any]] = {
    "title": "Problem",
    "description": "Why it was refused (RFC 9457), with the code of docs/protocol.md, which says what to do.",
    "type": "object",
    "required": ["type", "title", "status", "detail", "code", "retry_ms"],
    "properties": {
        "type": {"type": "string", "description": "urn:plato:problem: and the code's name."},
        "title": {"type": "string", "description": "The code in words."},
        "status": {"type": "integer", "description": "The HTTP status again."},
        "detail": {"type": "string", "description": "What is wrong with this request."},
        "code": {"type": "integer", "description": "The code of the wire."},
        "retry_ms": {"type": "integer", "description": "Ask again after so long; 0: the same again is refused again."},
    },
}
RESPONSES: Final[dict[int | str, dict[str, Any]]] = {
    "default": {
        "description": "Refused.",
        "content": {MEDIA_TYPE: {"schema": {"$ref": "#/components/schemas/Problem"}}},
    }
}
"""For every route of the document; it also says that there is no other form of a refusal."""


class Problem(Exception):
    """Answers the request with a refusal. status 0: the one of the code."""

    def __init__(self, code: int, detail: str = "", *, status: int = 0, retry_ms: int = 0) -> None:
        super().__init__(detail or title(code))
        self.code = code
        self.detail = detail
        self.status = status or status_of(code)
        self.retry_ms = retry_ms


def status_of(code: int) -> int:
    """The HTTP status of a code; 200 of what is no refusal."""
    found = _STATUS.get(code)
    if found is not None:
        return found
    return {Action.NONE: 200, Action.RETRY: 503, Action.RECONNECT: 503, Action.LOGIN: 401, Action.STOP: 400}[
        action(code)
    ]


def title(code: int) -> str:
    """The words of a code, for who asked by HTTP."""
    return _TITLES.get(code) or text(code)


def check(code: int, detail: str = "", *, retry_ms: int = 0) -> None:
    """Raises Problem for a code that is a refusal."""
    if action(code) is not Action.NONE:
        raise Problem(code, detail, retry_ms=retry_ms)


def answer(problem: Problem, headers: Mapping[str, str] | None = None) -> JSONResponse:
    """The answer to a refused request."""
    try:
        name = Code(problem.code).name.lower().replace("_", "-")
    except ValueError:
        name = str(problem.code)
    wait_ms = problem.retry_ms or (RETRY_MS if action(problem.code) is Action.RETRY else 0)
    said = dict(headers or {})
    if wait_ms:
        said["Retry-After"] = str(-(-wait_ms // 1_000))
    if problem.status == 401:
        said["WWW-Authenticate"] = "Bearer"
    body = {
        "type": f"urn:plato:problem:{name}",
        "title": title(problem.code),
        "status": problem.status,
        "detail": problem.detail or title(problem.code),
        "code": int(problem.code),
        "retry_ms": wait_ms,
    }
    return JSONResponse(body, problem.status, {**said, "Cache-Control": "no-store"}, MEDIA_TYPE)


# ── what FastAPI calls ───────────────────────────────────────────────────────────────────────────────────────


async def on_problem(_: Request, error: Exception) -> JSONResponse:
    """Problem."""
    assert isinstance(error, Problem)
    return answer(error)


async def on_peer(_: Request, error: Exception) -> JSONResponse:
    """PeerError: what the core refuses."""
    assert isinstance(error, PeerError)
    return answer(Problem(error.code))


async def on_unavailable(_: Request, error: Exception) -> JSONResponse:
    """Unavailable: the database or the bus is away. Its words are for the log, not for strangers."""
    assert isinstance(error, Unavailable)
    return answer(Problem(Code.UNAVAILABLE))


async def on_unstorable(_: Request, error: Exception) -> JSONResponse:
    """Unstorable: a value that the database cannot hold, and so cannot look for."""
    assert isinstance(error, Unstorable)
    return answer(Problem(Code.MALFORMED, "a value holds a character that no name and no text here can hold"))


async def on_invalid(_: Request, error: Exception) -> JSONResponse:
    """What the route's own description refuses: says the first field that is wrong, and how."""
    assert isinstance(error, RequestValidationError)
    return answer(Problem(Code.MALFORMED, _first(error.errors())))


async def on_http(_: Request, error: Exception) -> JSONResponse:
    """What FastAPI and Starlette refuse: no such path, no such method, a body that is too large or no JSON."""
    assert isinstance(error, HTTPException)
    detail = {
        404: "there is no such path; /openapi.json lists them",
        405: "this path has no such method; /openapi.json lists them",
        413: "the request's body is larger than this path takes",
    }.get(error.status_code, str(error.detail))
    code = Code.BODY_TOO_LARGE if error.status_code == 413 else Code.MALFORMED
    return answer(Problem(code, detail, status=error.status_code), error.headers)


async def on_fault(request: Request, error: Exception) -> JSONResponse:
    """A fault of ours: its words are for the log."""
    logs.get("api").error("fault", path=request.url.path, method=request.method, reason=repr(error), exc_info=error)
    return answer(Problem(Code.UNAVAILABLE, "a fault of this server; its log says more", status=500))


def _first(errors: Sequence[Any]) -> str:
    """The first thing that is wrong, as "query.limit: …"."""
    if not errors:
        return title(Code.MALFORMED)
    first = errors[0]
    where = ".".join(str(part) for part in first.get("loc", ()))
    return f"{where}: {first.get('msg', 'cannot be used')}"
