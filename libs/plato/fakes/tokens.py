"""A TokenVerifier without keys: the token of user alice is "fake:alice"."""

from __future__ import annotations

from plato.api import names
from plato.core.codes import Code
from plato.core.conversations import is_user_id
from plato.core.errors import PeerError


class FakeTokens:
    """TokenVerifier in memory. `issue` makes a token, `refuse` has one refused with a code from now on."""

    def __init__(self) -> None:
        self._refused: dict[str, Code] = {}

    def issue(self, user: str) -> str:
        """A token that speaks for `user`."""
        return f"fake:{user}"

    def refuse(self, token: str, code: Code) -> None:
        """Has `verify(token)` raise PeerError(code)."""
        self._refused[token] = code

    def verify(self, token: str) -> str:
        """See the port."""
        if token in self._refused:
            raise PeerError(self._refused[token])
        kind, _, user = token.partition(":")
        if kind != "fake" or not is_user_id(user) or user.startswith(names.GUEST_PREFIX):
            raise PeerError(Code.TOKEN_INVALID)
        return user
