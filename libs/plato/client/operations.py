"""What an application does to conversations: make groups and change them, recall and edit messages.

Each is a message of its own, in the durable outbox like any other: it keeps its order among this device's messages of the
conversation, and is sent whenever there is a connection. Whether it is allowed the platform decides; a refusal is the
outcome of `Sent.settled()`.
"""

from __future__ import annotations

import uuid
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import replace

from plato.client.api import Message, Receipt
from plato.client.content import TITLE_BYTES, USERS, MsgType, Operation, Rich, Role
from plato.client.sent import Sent
from plato.core.conversations import group_id, is_user_id
from plato.core.visible import plain


class Operations(ABC):
    """A part of the client."""

    @abstractmethod
    async def _post(
        self, conversation_id: str, msg_type: int, body: bytes, to: str = "", key: uuid.UUID | None = None
    ) -> Sent:
        """Puts a message into the durable outbox. Raises ValueError, Refused, OutboxFull, Stopped."""

    @abstractmethod
    async def _who(self) -> str:
        """This client's user. Raises Stopped."""

    @abstractmethod
    def message_of(self, msg_id: int) -> Message | None:
        """The stored message of this id."""

    async def create_group(
        self, title: str, users: Iterable[str] = (), *, client_msg_id: uuid.UUID | None = None
    ) -> Sent:
        """Makes a group of this user, who becomes its owner, and others. Its id is known at once: the handle's
        conversation_id; messages may be sent there, they stand behind it. client_msg_id: as in `send`.
        Raises ValueError, OutboxFull, Stopped."""
        others = _users(users)
        key = client_msg_id or uuid.uuid4()
        me = await self._who()
        conversation_id = group_id(me, key.bytes)
        first, rest = others[:USERS], others[USERS:]
        body = Operation(MsgType.GROUP_CREATE, title=_title(title), users=first).encode()
        sent = await self._post(conversation_id, MsgType.GROUP_CREATE, body, key=key)
        await self._change(conversation_id, MsgType.GROUP_ADD, rest, key=key)
        return sent

    async def add(self, conversation_id: str, users: Iterable[str]) -> Sent:
        """Adds members; they see what comes from here on. Raises ValueError, OutboxFull, Stopped."""
        return await self._several(conversation_id, MsgType.GROUP_ADD, users)

    async def remove(self, conversation_id: str, users: Iterable[str]) -> Sent:
        """Removes members; they keep what they could see so far. Raises ValueError, OutboxFull, Stopped."""
        return await self._several(conversation_id, MsgType.GROUP_REMOVE, users)

    async def leave(self, conversation_id: str) -> Sent:
        """Leaves a group. Its owner's place goes to another member. Raises ValueError, OutboxFull, Stopped."""
        return await self._post(conversation_id, MsgType.GROUP_LEAVE, Operation(MsgType.GROUP_LEAVE).encode())

    async def rename(self, conversation_id: str, title: str) -> Sent:
        """Gives a group another title. Raises ValueError, OutboxFull, Stopped."""
        body = Operation(MsgType.GROUP_RENAME, title=_title(title)).encode()
        return await self._post(conversation_id, MsgType.GROUP_RENAME, body)

    async def give_role(self, conversation_id: str, user: str, role: Role) -> Sent:
        """Makes somebody an administrator, or a plain member again, or the owner in this user's place.
        Raises ValueError, OutboxFull, Stopped."""
        body = Operation(MsgType.GROUP_ROLE, users=_users([user]), role=Role(role)).encode()
        return await self._post(conversation_id, MsgType.GROUP_ROLE, body)

    async def recall(self, what: Message | Receipt | int, *, conversation_id: str | None = None) -> Sent:
        """Takes a message back: its place stays, its body goes, for everybody. what: the message, the receipt of it, or its
        msg_id; with the latter conversation_id where this device has not stored it.
        Raises ValueError, OutboxFull, Stopped."""
        msg_id, where = self._meant(what, conversation_id)
        return await self._post(where, MsgType.RECALL, Operation(MsgType.RECALL, msg_id=msg_id).encode())

    async def edit(
        self, what: Message | Receipt | int, content: str | Rich, *, conversation_id: str | None = None
    ) -> Sent:
        """Gives a message another content. A new text of a rich message that is stored here leaves what it answers, attaches
        and mentions as it is. what, conversation_id: as in `recall`. Raises ValueError, Refused (too large), OutboxFull,
        Stopped."""
        msg_id, where = self._meant(what, conversation_id)
        stored = self.message_of(msg_id)
        if isinstance(content, str) and stored is not None and stored.rich is not None:
            content = replace(stored.rich, text=content)
        kind = MsgType.RICH if isinstance(content, Rich) else MsgType.TEXT
        operation = Operation(MsgType.EDIT, msg_id=msg_id, msg_type=kind, body=content.encode())
        return await self._post(where, MsgType.EDIT, operation.encode())

    def _meant(self, what: Message | Receipt | int, conversation_id: str | None) -> tuple[int, str]:
        """(msg_id, conversation_id)."""
        if not isinstance(what, int):
            return what.msg_id, what.conversation_id
        if conversation_id is not None:
            return what, conversation_id
        stored = self.message_of(what)
        if stored is None:
            raise ValueError(f"msg_id {what}: not stored on this device; name its conversation_id")
        return what, stored.conversation_id

    async def _several(self, conversation_id: str, kind: MsgType, users: Iterable[str]) -> Sent:
        named = _users(users)
        if not named:
            raise ValueError("name at least one user")
        sent = await self._change(conversation_id, kind, named)
        assert sent is not None  # at least one user
        return sent

    async def _change(
        self, conversation_id: str, kind: MsgType, users: Sequence[str], key: uuid.UUID | None = None
    ) -> Sent | None:
        """In as many operations as it takes; returns the last one's handle."""
        sent = None
        for n in range(0, len(users), USERS):
            body = Operation(kind, users=tuple(users[n : n + USERS])).encode()
            each = uuid.uuid5(key, str(n)) if key is not None else None
            sent = await self._post(conversation_id, kind, body, key=each)
        return sent


def _users(users: Iterable[str]) -> tuple[str, ...]:
    """Each once, as they came. Raises ValueError."""
    if isinstance(users, str):
        raise ValueError(f"users {users!r}: a list of user_ids, not one")
    named = tuple(dict.fromkeys(users))
    for user in named:
        if not is_user_id(user):
            raise ValueError(f"user {user!r}: 1 to 64 bytes of UTF-8 without control or invisible characters")
    return named


def _title(title: str) -> str:
    """Without what shows nothing or turns the text: the platform refuses it."""
    title = plain(title)
    if title.isspace():
        raise ValueError("a title of white space alone")
    if len(title.encode()) > TITLE_BYTES:
        raise ValueError(f"a title of {len(title.encode())} bytes: at most {TITLE_BYTES}")
    return title
