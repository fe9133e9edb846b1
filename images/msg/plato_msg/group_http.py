"""Groups over the admin port, for whoever may read /v1/report:

    POST /admin/v1/groups            {"name", "members", "key"?}              makes one
    POST /admin/v1/groups/members    {"name", "add"?, "remove"?, "key"?}      changes one: removes, then adds
    GET  /admin/v1/groups?name=&after=&limit=                                 shows one, a page of its members by id

Answers: 200 with {"conversation_id", "code", "message", "pending"}; 202 where some of it is pending; 400, 404, 409; 503,
also until database and store were found to be ours.
A key names the order: repeated with the same key it is done once.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final

from plato.core.codes import Code, text
from plato.core.conversations import GROUP_PREFIX, is_conversation_id, is_user_id
from plato.core.errors import Unavailable
from plato.runtime import report
from plato.runtime.settings import Settings
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from plato_msg.groups import ChangeKind, Done, Groups

PATH: Final = "/admin/v1/groups"
MEMBERS_PATH: Final = "/admin/v1/groups/members"
PAGE: Final = 1_000
MOST_BYTES: Final = 8 << 20
_STATUS: Final = {Code.GROUP_EXISTS: 409, Code.GROUP_FULL: 409, Code.GROUP_UNKNOWN: 404}


class _Bad(Exception):
    """The request is wrong; says how."""


def routes(settings: Settings, groups: Groups, not_ready: Callable[[], str]) -> list[Route]:
    """The routes, behind the admin tokens. not_ready: why neither database nor bus may be used yet; "" once they may."""
    guard = report.guard(settings)

    def guarded(answer: Callable[[Request], Awaitable[Response]]) -> Callable[[Request], Awaitable[Response]]:
        async def answered(request: Request) -> Response:
            refused = guard(request)
            if refused is not None:
                return refused
            if why := not_ready():
                return _later(why)
            try:
                return await answer(request)
            except _Bad as e:
                return JSONResponse({"error": str(e)}, status_code=400)
            except Unavailable as e:
                return _later(str(e))

        return answered

    async def create(request: Request) -> Response:
        body = await _body(request)
        conversation_id = _group(body.get("name"))
        return _answer(conversation_id, [await _order(groups, conversation_id, "create", body, "members")])

    async def change(request: Request) -> Response:
        body = await _body(request)
        conversation_id = _group(body.get("name"))
        body.setdefault("key", uuid.uuid4().hex)
        done = []
        kinds: tuple[ChangeKind, ...] = ("remove", "add")
        for kind in kinds:
            if kind in body:
                done.append(await _order(groups, conversation_id, kind, body, kind))
        if not done:
            raise _Bad("neither add nor remove is there")
        return _answer(conversation_id, done)

    async def show(request: Request) -> Response:
        conversation_id = _group(request.query_params.get("name"))
        limit = request.query_params.get("limit", str(PAGE))
        if not limit.isdecimal() or len(limit) > 4 or not 1 <= int(limit) <= PAGE:
            raise _Bad(f"limit must be 1 to {PAGE}")
        found = await groups.show(conversation_id, request.query_params.get("after", ""), int(limit))
        if found is None:
            return JSONResponse({"error": text(Code.GROUP_UNKNOWN)}, status_code=404)
        count, last_seq, page = found
        return JSONResponse({"conversation_id": conversation_id, "count": count, "last_seq": last_seq, "members": page})

    return [
        Route(PATH, guarded(create), methods=["POST"]),
        Route(PATH, guarded(show), methods=["GET"]),
        Route(MEMBERS_PATH, guarded(change), methods=["POST"]),
    ]


def _later(why: str) -> JSONResponse:
    return JSONResponse({"error": f"try again: {why}"}, status_code=503, headers={"Retry-After": "1"})


async def _body(request: Request) -> dict[str, Any]:
    raw = bytearray()
    async for chunk in request.stream():
        raw += chunk
        if len(raw) > MOST_BYTES:
            raise _Bad(f"the request has more than {MOST_BYTES} bytes")
    try:
        body = json.loads(raw)
    except (ValueError, RecursionError):
        raise _Bad("the request is no JSON") from None
    if not isinstance(body, dict):
        raise _Bad("the request is no JSON object")
    return body


def _group(name: object) -> str:
    conversation_id = f"{GROUP_PREFIX}{name}"
    if not isinstance(name, str) or not name or not is_conversation_id(conversation_id):
        raise _Bad("name must be 1 to 62 bytes of UTF-8 without control characters")
    return conversation_id


async def _order(groups: Groups, conversation_id: str, kind: ChangeKind, body: dict[str, Any], field: str) -> Done:
    users, key = body.get(field, []), body.get("key") or uuid.uuid4().hex
    if not isinstance(users, list) or not all(isinstance(user, str) and is_user_id(user) for user in users):
        raise _Bad(f"{field} must be a list of user_ids")
    if not isinstance(key, str):
        raise _Bad("key must be text")
    return await groups.order(conversation_id, kind, list(dict.fromkeys(users)), f"{kind}\n{key}")


def _answer(conversation_id: str, done: Sequence[Done]) -> Response:
    code = next((d.code for d in done if d.code), int(Code.OK))
    pending = sum(d.pending for d in done)
    body = {"conversation_id": conversation_id, "code": code, "message": text(code), "pending": pending}
    if code:
        return JSONResponse({**body, "error": text(code)}, status_code=_STATUS.get(Code(code), 409))
    return JSONResponse(body, status_code=202 if pending else 200)
