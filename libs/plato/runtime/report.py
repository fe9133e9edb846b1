"""GET /v1/report: what a process says of itself to the operator, behind bearer tokens that lie as files in a folder.

Each file of process.admin_tokens_dir is one token that is valid now, so that a new one can be put beside the old one. The
folder is looked at once a second at most, while requests come. Without that setting a caller from loopback is answered,
and nobody else. Memory: the tokens.
"""

from __future__ import annotations

import hmac
import ipaddress
import os
import secrets
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Final

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from plato.runtime import logs
from plato.runtime.settings import Settings

PATH: Final = "/v1/report"
LOOK_S: Final = 1.0
MOST_BYTES: Final = 4_096
"""Of a token's file; a longer one is none."""


class BearerTokens:
    """The tokens in a folder."""

    def __init__(self, folder: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._folder = folder
        self._clock = clock
        self._looked_at = float("-inf")
        self._tokens: tuple[bytes, ...] = ()
        self._trouble = ""

    def valid(self, given: str) -> bool:
        """Whether that is one of the tokens. Takes as long whichever it is, and wherever it differs."""
        now = self._clock()
        if now - self._looked_at >= LOOK_S:
            self._looked_at = now
            self._read()
        said = given.encode()
        found = False
        for token in self._tokens:
            found |= hmac.compare_digest(token, said)
        return found

    def _read(self) -> None:
        tokens = []
        try:
            # Kubernetes keeps the files of a Secret behind links of names with two dots before.
            for path in sorted(p for p in self._folder.iterdir() if not p.name.startswith(".")):
                with path.open("rb") as file:
                    token = file.read(MOST_BYTES + 1).strip()
                if 0 < len(token) <= MOST_BYTES:
                    tokens.append(token)
        except OSError as e:
            if str(e) != self._trouble:
                logs.get("report").warning("the tokens cannot be read; those of before stand", error=str(e))
            self._trouble = str(e)
            return
        self._trouble = ""
        self._tokens = tuple(tokens)


def route(settings: Settings, report: Callable[[], Mapping[str, Any]]) -> Route:
    """The route. `report`: what this process says, called for each answer; uid, boot and name are added to it."""
    refusal = guard(settings)
    boot = secrets.token_hex(8)

    async def answer(request: Request) -> Response:
        refused = refusal(request)
        if refused is not None:
            return refused
        said = {
            "name": settings.process.name,
            "uid": settings.process.uid,
            "boot": boot,
            "pid": os.getpid(),
            **report(),
        }
        return JSONResponse(said, headers={"Cache-Control": "no-store"})

    return Route(PATH, answer)


def guard(settings: Settings) -> Callable[[Request], Response | None]:
    """What answers those who may not: 401 without a valid token, 404 for who is not on loopback where there are none; None
    lets the request through."""
    folder = settings.process.admin_tokens_dir
    tokens = BearerTokens(folder) if folder is not None else None

    def refusal(request: Request) -> Response | None:
        if tokens is None:
            return None if _from_loopback(request) else JSONResponse({"error": "not found"}, status_code=404)
        kind, _, given = request.headers.get("authorization", "").partition(" ")
        if kind.lower() == "bearer" and tokens.valid(given.strip()):
            return None
        return JSONResponse(
            {"error": "a valid bearer token is needed"}, status_code=401, headers={"WWW-Authenticate": "Bearer"}
        )

    return refusal


def ranges(numbers: Iterable[int]) -> list[list[int]]:
    """Sorted [first, last] pairs of whole numbers."""
    found: list[list[int]] = []
    for number in sorted(numbers):
        if found and number == found[-1][1] + 1:
            found[-1][1] = number
        else:
            found.append([number, number])
    return found


def _from_loopback(request: Request) -> bool:
    try:
        return request.client is not None and ipaddress.ip_address(request.client.host).is_loopback
    except ValueError:
        return False
