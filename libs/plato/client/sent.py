"""Handles of messages on their way: what `send` returns."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Iterable

from plato.client.api import ClientError, Receipt, Refused
from plato.client.core.model import Accepted, Entry, RefusedMessage, Settled
from plato.client.store import Store


class Sent:
    """A message in the durable outbox. It is sent and settled whether or not this handle is kept."""

    __slots__ = ("_accepted", "_outcome", "_woken", "client_id", "client_msg_id", "conversation_id")

    def __init__(self, conversation_id: str, client_id: int, client_msg_id: bytes) -> None:
        self.conversation_id = conversation_id
        self.client_id = client_id
        self.client_msg_id = client_msg_id
        """16 bytes, a UUID. (client_id: the message's number on its way; 0 of one that was settled before this start.)"""
        self._accepted = False
        self._outcome: Receipt | ClientError | None = None
        self._woken: asyncio.Event | None = None

    async def accepted(self) -> None:
        """Returns when the platform holds the message durably. Raises Refused, or Stopped if the client stops before."""
        while not self._accepted:
            if isinstance(self._outcome, ClientError):
                raise self._outcome
            await self._wait()
        if isinstance(self._outcome, Refused):
            raise self._outcome

    async def settled(self) -> Receipt:
        """Returns the message's place in its conversation. Raises Refused, or Stopped if the client stops before."""
        while self._outcome is None:
            await self._wait()
        if isinstance(self._outcome, ClientError):
            raise self._outcome
        return self._outcome

    @property
    def done(self) -> bool:
        """Whether `settled` would return or raise at once."""
        return self._outcome is not None

    def note_accepted(self) -> None:
        """The client's call."""
        self._accepted = True
        self._wake()

    def note_outcome(self, outcome: Receipt | ClientError) -> None:
        """The client's call. A receipt implies the acceptance."""
        if self._outcome is None:
            self._outcome = outcome
            self._accepted = self._accepted or isinstance(outcome, Receipt)
            self._wake()

    async def _wait(self) -> None:
        if self._woken is None:
            self._woken = asyncio.Event()
        await self._woken.wait()

    def _wake(self) -> None:
        if self._woken is not None:
            self._woken.set()
            self._woken = None


class Handles:
    """The handles whose outcome was not told yet, and those who wait for the disk. Memory: as many as the outbox holds, and
    those of the rounds that are being written."""

    def __init__(self, entries: Iterable[Entry]) -> None:
        """entries: the outbox at start."""
        self._open = {e.client_msg_id: Sent(e.conversation_id, e.client_id, e.client_msg_id) for e in entries}
        self._unwritten: dict[bytes, asyncio.Future[None]] = {}

    def add(self, entry: Entry) -> Sent:
        """The handle of a new entry, not yet durable."""
        sent = self._open[entry.client_msg_id] = Sent(entry.conversation_id, entry.client_id, entry.client_msg_id)
        self._unwritten[entry.client_msg_id] = asyncio.get_running_loop().create_future()
        return sent

    def before(self, conversation_id: str, user: str | None, key: bytes, store: Store) -> Sent | None:
        """The handle of what this device sent with this key, as `user`; None: nothing. Raises ValueError."""
        sent = self._open.get(key)  # until its outcome is durable; from then on the store knows it
        if sent is not None:
            if sent.conversation_id != conversation_id:
                raise ValueError(f"client_msg_id {uuid.UUID(bytes=key)}: used in conversation {sent.conversation_id!r}")
            return sent
        sent = Sent(conversation_id, 0, key)
        # As long as nobody said who we are, no row can be ours.
        row = store.own(conversation_id, user, key) if user is not None else None
        if row is not None:
            sent.note_outcome(Receipt(conversation_id, key, row.msg_id, row.seq))
            return sent
        for entry, code, detail in store.refused(conversation_id):
            if entry.client_msg_id == key:
                sent.note_outcome(Refused(code, detail))
                return sent
        return None

    async def durable(self, key: bytes) -> None:
        """Returns when this entry is on the disk. Raises Stopped."""
        if (unwritten := self._unwritten.get(key)) is not None:
            await asyncio.shield(unwritten)  # several calls of one key may wait for it

    def written(self, keys: Iterable[bytes]) -> None:
        """These entries are durable."""
        for key in keys:
            unwritten = self._unwritten.pop(key, None)
            if unwritten is not None:
                unwritten.set_result(None)

    def tell(self, notice: Accepted | Settled | RefusedMessage) -> None:
        """News of a message of ours, durable."""
        if isinstance(notice, Accepted):
            if (sent := self._open.get(notice.client_msg_id)) is not None:
                sent.note_accepted()
        elif (sent := self._open.pop(notice.client_msg_id, None)) is None:
            return
        elif isinstance(notice, Settled):
            sent.note_outcome(Receipt(notice.conversation_id, notice.client_msg_id, notice.msg_id, notice.seq))
        else:
            sent.note_outcome(Refused(notice.code, notice.detail))

    def fail(self, error: ClientError) -> None:
        """The client stopped: nobody waits for ever. What is in the outbox stays there for the next start."""
        for sent in self._open.values():
            sent.note_outcome(error)
        self._open.clear()
        for unwritten in self._unwritten.values():
            unwritten.set_exception(error)
            unwritten.exception()  # a call that was cancelled does not look at it
        self._unwritten.clear()
