"""A TokenVerifier without keys: the token of user alice is "fake:alice", with a scope "fake+server:alice"."""

from __future__ import annotations

from plato.core.codes import Code
from plato.core.conversations import why_no_person
from plato.core.errors import PeerError
from plato.ports import Claims


class FakeTokens:
    """TokenVerifier in memory. `issue` makes a token, `refuse` has one refused with a code from now on."""

    def __init__(self) -> None:
        self._refused: dict[str, Code] = {}

    def issue(self, user: str, scope: str = "") -> str:
        """A token that speaks for `user`. scope: words of it, separated by +."""
        return f"fake{'+' if scope else ''}{scope}:{user}"

    def refuse(self, token: str, code: Code) -> None:
        """Has `verify(token)` raise PeerError(code)."""
        self._refused[token] = code

    def verify(self, token: str) -> str:
        """See the port."""
        return self.claims(token).user

    def claims(self, token: str) -> Claims:
        """See the port."""
        if token in self._refused:
            raise PeerError(self._refused[token])
        kind, _, user = token.partition(":")
        kind, *scope = kind.split("+")
        if kind != "fake" or why_no_person(user):
            raise PeerError(Code.TOKEN_INVALID)
        return Claims(user, frozenset(scope))
