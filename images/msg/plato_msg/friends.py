"""Friends: an act → one transaction → STATE to the devices of both who see a change → the answer.

What a device missed it gets by its version (UserStates), so an answer means committed and handed on. Nobody is told that he
is blocked: his acts are answered, and shown on his devices, as if he were not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple, Protocol

from plato.core.codes import Code
from plato.core.conversations import is_user_id
from plato.core.errors import PeerError
from plato.wire.v1 import client_pb2 as wire

from plato_msg.core.friendship import Act
from plato_msg.friends_pg import Friend, PgFriends

WORDS_MAX: Final = 256
"""Characters of a request's words."""


class Told(Protocol):
    """Who tells devices what was committed (plato_msg.userstate.UserStates)."""

    async def changed(self, told: Mapping[str, Sequence[wire.StateMsg]]) -> None:
        """{user: STATEs, in order}."""


class MySettings(NamedTuple):
    """friends_only: what holds; chosen: by the user; None: he left it to the platform."""

    friends_only: bool
    chosen: bool | None


class Friends:
    """The friends of everybody, one act at a time. Raises PeerError (Impossible among them) and Unavailable."""

    def __init__(self, store: PgFriends, told: Told, *, friends_only: bool) -> None:
        """friends_only: for users who did not choose."""
        self._store = store
        self._told = told
        self._friends_only = friends_only

    async def act(self, act: Act, user: str, other: str, words: str = "") -> Friend:
        """What the user sees of the other afterwards."""
        if not is_user_id(other) or other == user:
            raise PeerError(Code.BAD_TO_USER, "name another user")
        if len(words) > WORDS_MAX or "\x00" in words:
            raise PeerError(Code.BAD_OPERATION, f"words may have {WORDS_MAX} characters")
        seen = await self._store.act(act, user, other, words)
        await self._told.changed(
            {
                name: [wire.StateMsg(version=f.version, prev_version=f.version - 1, friends=[f.state()])]
                for name, f in seen.items()
                if f.version
            }
        )
        return seen[user]

    async def friend(self, user: str, other: str) -> Friend | None:
        """What the user sees of one other; None: nothing."""
        return await self._store.friend(user, other)

    async def page(self, user: str, status: int | None, after: str, limit: int) -> list[Friend]:
        """See PgFriends."""
        return await self._store.page(user, status, after, limit)

    async def settings(self, user: str) -> MySettings:
        """What holds for a user."""
        chosen = await self._store.friends_only(user)
        return MySettings(self._friends_only if chosen is None else chosen, chosen)

    async def choose(self, user: str, friends_only: bool | None) -> MySettings:
        """Changes it."""
        await self._store.set_friends_only(user, friends_only)
        return MySettings(self._friends_only if friends_only is None else friends_only, friends_only)
