"""What one user may know of conversations, for the HTTP API: what they are, who is in them, one message by its msg_id.

Every method takes the asking user and gives None where that user is a stranger to the conversation, whether it exists or
not. `user` None is the application itself, which sees every conversation there is. Rows of history come from History.pull,
lists of conversations from History.sync. Always from the primary; no memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from plato_msg.store_pg import Message, PgMsgStore


class Info(NamedTuple):
    """A conversation as its asker may see it."""

    conversation_id: str
    kind: str
    """'dialogue', 'group' or 'open'."""
    title: str
    """A group's; of one that the asker left: as it was then."""
    owner: str
    """A group's; "" where it has none, and for who left."""
    members: int
    """How many; 0 for who left."""
    role: int
    """The asker's: content.proto Role; 0 for the application."""
    joined_seq: int
    """The asker reads what comes after it."""
    newest_seq: int
    """Of who left: the seq of the leave."""
    left: bool
    peer: str
    """A dialogue's other user; with oneself: oneself; "" for the application."""


class Member(NamedTuple):
    """One of a conversation's members."""

    user: str
    role: int
    joined_seq: int


class Found(NamedTuple):
    """A message and where it stands."""

    conversation_id: str
    message: Message


class Conversations:
    """Reads for the HTTP API. Every method raises Unavailable."""

    def __init__(self, store: PgMsgStore) -> None:
        self._store = store

    async def info(self, user: str | None, conversation_id: str) -> Info | None:
        """One conversation, also one that the user left."""
        row = await self._store.info(user, conversation_id)
        return Info(conversation_id, *row) if row is not None else None

    async def members(self, user: str | None, conversation_id: str, after: str, limit: int) -> Sequence[Member] | None:
        """A page of the members that come after `after`, by id's bytes, at most `limit`. None as well for who left."""
        rows = await self._store.roll(user, conversation_id, after, limit)
        return [Member(*row) for row in rows] if rows is not None else None

    async def message(self, user: str | None, msg_id: int) -> Found | None:
        """One message, wherever it is, if the user may read it."""
        found = await self._store.message(user, msg_id)
        return Found(*found) if found is not None else None
