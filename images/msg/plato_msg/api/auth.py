"""Who asks: a bearer token, the same as for a gateway.

    a person's token     acts for its `sub`, and for nobody else
    scope "server"       an application server: acts for whom the header Plato-User names; without it with authority, on the
                         routes that allow that

A limit per person (msg.api_user_per_s), and per server (msg.api_server_per_s); it is charged before anything is read.
What is read for one user is read READS_AT_ONCE at a time (`in_turn`, on every route): the others wait, or are refused.
Memory: the buckets, see plato.core.rates, and an entry per user who is answered now.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Annotated, Final

from fastapi import Depends, Header, Security
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from plato.core.codes import Code
from plato.core.conversations import why_no_person
from plato.core.errors import PeerError
from plato.core.rates import Buckets
from plato.ports import TokenVerifier
from starlette.requests import Request

from plato_msg.api.problems import Problem
from plato_msg.turns import TooMany, Turns

SERVER_SCOPE: Final = "server"
BURST_S: Final = 4
"""So many seconds' worth of requests may come at once."""
READS_AT_ONCE: Final = 2
READS_IN_ALL: Final = 16
"""Reads for one user: under way, and with those that wait. There are more connections than READS_AT_ONCE."""
RETRY_MS: Final = 500
WAITS: Final = "/v1/events"


@dataclass(frozen=True, slots=True)
class Caller:
    """Who asks. user: for whom; "" where a server acts with authority. server: the token is an application server's."""

    user: str
    server: bool = False

    @property
    def authority(self) -> bool:
        """It acts for no person: roles and membership do not bind it."""
        return self.server and not self.user


class Door:
    """Lets callers in. now_ms: of a clock that never goes back."""

    def __init__(self, tokens: TokenVerifier, user_per_s: int, server_per_s: int, now_ms: Callable[[], float]) -> None:
        self._tokens = tokens
        self._users: Buckets[str] = Buckets(user_per_s, user_per_s * BURST_S)
        self._servers: Buckets[str] = Buckets(server_per_s, server_per_s * BURST_S)
        self._now_ms = now_ms
        self.reads = Turns(READS_AT_ONCE, READS_IN_ALL, RETRY_MS)

    def admit(self, token: str, acts_for: str) -> Caller:
        """Raises Problem."""
        if not token:
            raise Problem(Code.TOKEN_INVALID, "send a token: Authorization: Bearer …")
        try:
            claims = self._tokens.claims(token)
        except PeerError as e:
            raise Problem(e.code) from e
        server = SERVER_SCOPE in claims.scope
        self._charge(self._servers if server else self._users, claims.user)
        if not server:
            if acts_for not in ("", claims.user):
                raise Problem(Code.NOT_ALLOWED, "this token acts for its own user only; Plato-User is for servers")
            return Caller(claims.user)
        if acts_for and (why := why_no_person(acts_for)):
            raise Problem(Code.MALFORMED, f"Plato-User {why}")
        return Caller(acts_for, True)

    def look(self, token: str) -> None:
        """Raises Problem for who would not be let in now. Charges nothing: `admit` does."""
        if not token:
            raise Problem(Code.TOKEN_INVALID, "send a token: Authorization: Bearer …")
        try:
            claims = self._tokens.claims(token)
        except PeerError as e:
            raise Problem(e.code) from e
        buckets = self._servers if SERVER_SCOPE in claims.scope else self._users
        if wait_ms := buckets.wait_ms(claims.user, self._now_ms()):
            raise Problem(Code.TOO_FAST, retry_ms=wait_ms)

    @staticmethod
    def spoken(header: str) -> str:
        """A header's value as text: servers hand on its bytes as Latin-1, user_ids are UTF-8."""
        try:
            return header.encode("latin-1").decode()
        except UnicodeError:
            return header

    def _charge(self, buckets: Buckets[str], key: str) -> None:
        now_ms = self._now_ms()
        if wait_ms := buckets.wait_ms(key, now_ms):
            raise Problem(Code.TOO_FAST, retry_ms=wait_ms)
        buckets.charge(key, now_ms)


_READS: Final = frozenset({"GET", "HEAD"})
_BEARER: Final = HTTPBearer(auto_error=False, description="A token as for a gateway: docs/http-api.md.")


async def caller(
    request: Request,
    credentials: Annotated[HTTPAuthorizationCredentials | None, Security(_BEARER)],
    plato_user: Annotated[str, Header(description="Servers only: the user_id that this request acts for.")] = "",
) -> Caller:
    """The dependency behind the others. Raises Problem: 401, 403, 429."""
    door: Door = request.app.state.door
    return door.admit(credentials.credentials if credentials is not None else "", door.spoken(plato_user))


AnyCaller = Annotated[Caller, Depends(caller)]
"""A person, or a server, for somebody or with authority."""


async def in_turn(request: Request, who: AnyCaller) -> AsyncIterator[None]:
    """Around every route: reads of one user take turns. Not those of a server that acts for nobody, and not where a request
    waits for events. Raises Problem: 429."""
    if request.method not in _READS or not who.user or request.scope["path"] == WAITS:
        yield
        return
    door: Door = request.app.state.door
    async with AsyncExitStack() as stack:
        try:
            await stack.enter_async_context(door.reads.of(who.user))
        except TooMany as e:
            raise Problem(e.code, e.words, retry_ms=e.retry_ms) from e
        yield


async def person(who: AnyCaller) -> str:
    """Raises Problem where a server says not for whom it acts."""
    if not who.user:
        raise Problem(Code.MALFORMED, "name the user that this request acts for in the header Plato-User")
    return who.user


Person = Annotated[str, Depends(person)]
"""The user_id that the request acts for."""


async def server(who: AnyCaller) -> Caller:
    """Raises Problem for who is no server."""
    if not who.server:
        raise Problem(Code.NOT_ALLOWED, "this path is for tokens with scope: server")
    return who


Server = Annotated[Caller, Depends(server)]
"""An application server."""
