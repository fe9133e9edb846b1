"""Who may ask for the list, and how often: a token first, then a limit per user; an address counts only for strangers.

    a valid token         the user's own bucket: one user more behind a NAT costs the others nothing
    a refused token       401, from the address's bucket: so nobody tries tokens for nothing
    none, guests are on   the address's bucket
    none, guests are off  401, likewise

So a house with thousands of phones behind one address is not refused: the address's bucket is made for thousands, and who
shows a valid token does not touch it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from plato.core.codes import Code
from plato.core.errors import PeerError
from plato.ports import TokenVerifier
from starlette.requests import Request

from plato_ipconfig.core import address
from plato_ipconfig.core.address import Address, Network
from plato_ipconfig.core.limits import Buckets


@dataclass(frozen=True, slots=True)
class Caller:
    """Who asks. user "": a guest. address None: not known (a Unix socket, a proxy that writes nonsense)."""

    user: str
    address: Address | None


class Refused(Exception):
    """Not now, or not at all. wait_ms: until it is worth asking again; 0: another token is needed."""

    def __init__(self, code: Code, wait_ms: int = 0) -> None:
        super().__init__(code)
        self.code = code
        self.wait_ms = wait_ms


class Door:
    """Lets callers in. Memory: the two sets of buckets, see core/limits.py."""

    def __init__(
        self,
        tokens: TokenVerifier,
        users: Buckets,
        addresses: Buckets,
        trusted: Sequence[Network],
        *,
        guests: bool,
        now_ms: Callable[[], int],
    ) -> None:
        """trusted: proxies whose X-Forwarded-For counts; guests: callers without a token are answered too."""
        self._tokens = tokens
        self._users = users
        self._addresses = addresses
        self._trusted = trusted
        self._guests = guests
        self._now_ms = now_ms

    def admit(self, request: Request) -> Caller:
        """Raises Refused."""
        peer = request.client.host if request.client is not None else None
        where = address.caller(peer, request.headers.getlist("x-forwarded-for"), self._trusted)
        try:
            user = self._user(request)
        except PeerError as e:
            self._charge_address(where)
            raise Refused(Code(e.code)) from e
        if not user:
            self._charge_address(where)
        elif wait_ms := self._users.take(user, self._now_ms()):
            raise Refused(Code.BUSY, wait_ms)
        return Caller(user, where)

    def _user(self, request: Request) -> str:
        kind, _, token = request.headers.get("authorization", "").partition(" ")
        if not kind and self._guests:
            return ""
        if kind.lower() != "bearer" or not token.strip():
            raise PeerError(Code.TOKEN_INVALID)
        return self._tokens.verify(token.strip())

    def _charge_address(self, where: Address | None) -> None:
        if wait_ms := self._addresses.take(address.limit_key(where), self._now_ms()):
            raise Refused(Code.BUSY, wait_ms)
