"""What an application looks at beside messages: conversations, unread counts, who is in, friends; and who reads and writes.

From the store and the machine's memory; nothing here waits for the platform.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator
from dataclasses import replace

from plato.client.api import Change, Conversation, Delivery, Friend, Message, Stopped
from plato.client.changes import ChangeStream
from plato.client.content import Quote, Role
from plato.client.core.inbox import Thread
from plato.client.core.model import Entry, Row
from plato.client.core.session import Machine
from plato.client.store import Store


class Views(ABC):
    """A part of the client."""

    _machine: Machine
    _store: Store

    def __init__(self) -> None:
        self._changes: list[ChangeStream] = []

    @abstractmethod
    def _check_open(self, stopped_too: bool = True) -> None:
        """Raises Stopped."""

    @abstractmethod
    def _poke(self) -> None:
        """A round is due."""

    @abstractmethod
    def _now_ms(self) -> int:
        """The loop's clock."""

    # ── what there is ────────────────────────────────────────────────────────────────────────────────────

    def conversations(self) -> list[Conversation]:
        """Every conversation that this device knows, in no order."""
        self._check_open(stopped_too=False)
        return [self._conversation(thread) for thread in self._machine.threads()]

    def conversation(self, conversation_id: str) -> Conversation | None:
        """One conversation; None: this device does not know it."""
        self._check_open(stopped_too=False)
        thread = self._machine.thread(conversation_id)
        return self._conversation(thread) if thread is not None else None

    def message(self, conversation_id: str, seq: int) -> Message | None:
        """The stored message of this place, as it is now."""
        self._check_open(stopped_too=False)
        return self._found(self._store.at(conversation_id, seq))

    def message_of(self, msg_id: int) -> Message | None:
        """The stored message of this id, as it is now."""
        self._check_open(stopped_too=False)
        return self._found(self._store.message(msg_id))

    def reply_of(self, message: Message) -> Quote | None:
        """What a message answers, as it may be shown: a quote is a copy, and loses its words here once that was recalled."""
        reply = message.rich.reply if message.rich is not None else None
        if reply is None:
            return None
        stored = self.message(message.conversation_id, reply.seq)
        return replace(reply, text="") if stored is not None and stored.recalled else reply

    def members(self, conversation_id: str) -> dict[str, Role]:
        """A group's members and their roles, as far as this device saw them join: all, if it was in from the beginning."""
        self._check_open(stopped_too=False)
        return {user: Role(role) for user, role in self._store.members(conversation_id).items()}

    def friends(self) -> list[Friend]:
        """Users with whom something is, or was, by name."""
        self._check_open(stopped_too=False)
        return self._store.friends()

    def unread(self, conversation_id: str) -> int:
        """How many stored messages are behind the read position: of others, not recalled, not hidden, no operations."""
        self._check_open(stopped_too=False)
        shared = self._machine.shared.of(conversation_id)
        return self._store.unread(conversation_id, self._machine.user or "", shared.position)

    def unsettled(self, conversation_id: str) -> list[Message]:
        """Own messages of this device that have no place yet, in order: queued or accepted."""
        self._check_open(stopped_too=False)
        return [
            self._own(entry, Delivery.ACCEPTED if entry.accepted else Delivery.QUEUED)
            for entry in self._machine.unsettled(conversation_id)
        ]

    def refused(self, conversation_id: str) -> list[Message]:
        """Own messages of this device that were refused for good, oldest first; the newest 1,000 of all are kept."""
        self._check_open(stopped_too=False)
        return [
            self._own(entry, Delivery.REFUSED, code, detail)
            for entry, code, detail in self._store.refused(conversation_id)
        ]

    # ── reading and writing ──────────────────────────────────────────────────────────────────────────────

    def read(self, conversation_id: str, seq: int | None = None) -> None:
        """This user has read up to here; None: to the end of what is stored. It is noted durably and told to the platform
        until that has it, also by the next start; the other devices follow. A position below the known one is nothing."""
        self._check_open(stopped_too=False)
        self._machine.read(conversation_id, (1 << 63) - 1 if seq is None else seq)
        self._poke()

    def typing(self, conversation_id: str, stopped: bool = False) -> None:
        """This user writes, or stopped to. Call it at each key: it is told once in three seconds, and only to who is online.
        Offline nobody is told, then or later."""
        self._check_open(stopped_too=False)
        self._machine.typing(conversation_id, stopped, self._now_ms())
        self._poke()

    def changes(self) -> AsyncIterator[Change]:
        """What happens to what was shown already, from this call on: messages edited, recalled, hidden; conversations
        renamed, read, pinned, muted; others who read or write; friends. Several readers may look; each that is done calls
        `aclose()`. It ends like `messages()`."""
        self._check_open(stopped_too=False)
        stream = ChangeStream(self._changes.remove)
        self._changes.append(stream)
        return stream

    def _tell_change(self, change: Change) -> None:
        for stream in self._changes:
            stream.put(change)

    def _end_changes(self, error: Stopped | None) -> None:
        for stream in self._changes:
            stream.end(error)

    # ── rows as messages ─────────────────────────────────────────────────────────────────────────────────

    def _conversation(self, thread: Thread) -> Conversation:
        shared = self._machine.shared.of(thread.conversation_id)
        some = thread.cursor > shared.position  # else there is nothing to count
        return Conversation(
            thread.conversation_id,
            thread.peer,
            max(thread.cursor, 0),
            max(thread.newest_seq, thread.cursor, 0),
            len(self._machine.unsettled(thread.conversation_id)),
            thread.title,
            thread.members,
            thread.left,
            shared.position,
            self.unread(thread.conversation_id) if some else 0,
            shared.pinned_at_ms,
            shared.muted_until_ms,
            shared.peer_read_seq,
            shared.cleared_seq,
        )

    def _found(self, found: tuple[Row, bool] | None) -> Message | None:
        return self._message(*found) if found is not None else None

    def _message(self, row: Row, hidden: bool = False) -> Message:
        return Message(
            row.conversation_id,
            row.seq,
            row.prev_seq,
            row.msg_id,
            row.from_user,
            row.msg_type,
            row.body,
            row.client_msg_id,
            row.server_at_ms,
            row.from_user == self._machine.user,
            changed_seq=row.changed_seq,
            recalled=row.recalled,
            hidden=hidden,
        )

    def _own(self, entry: Entry, delivery: Delivery, code: int = 0, detail: str = "") -> Message:
        return Message(
            entry.conversation_id,
            0,
            0,
            0,
            self._machine.user or "",
            entry.msg_type,
            entry.body,
            entry.client_msg_id,
            0,
            True,
            delivery,
            code,
            detail=detail,
        )
