"""R1: the order of one connection's uplinks, from memory alone. Only msg decides what is a duplicate.

An UP (conversation, client_id, acked, client_msg_id) comes in; out comes what to do with it. Per conversation `known`
is the greatest client_id that is in a batch or queue (or was, or was refused for good in its turn):

    expected = max(known, acked) + 1
      client_id > expected    answer EXPECTED with that number; nothing changes
      client_id = expected    append; known = client_id
      client_id < expected    append again: msg finds the first one and repeats its outcome
      a copy on its way       join it: both get its answer, nothing is appended
      no room                 BUSY, also to everything of the conversation queued behind it; known = client_id − 1
      refused for good        known = client_id, only if it was the expected one

Forgetting a number is safe at any time: expected falls to acked + 1, so the client is asked for more than needed and
msg finds the copies. So numbers are capped per connection, and nothing of this is ever stored.

A guest sends no `acked` and begins where it likes: a conversation without `known` expects what comes first.

Memory per connection: ≤ `max_numbers` numbers and ≤ `max_waiting` tickets.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

MAX_CLIENT_ID = (1 << 63) - 1
"""Greatest client_id that is accepted: what a signed 64-bit column holds."""


class Stage(IntEnum):
    """Where a ticket is."""

    QUEUED = 0
    IN_FLIGHT = 1
    SETTLED = 2
    DROPPED = 3


class Ticket:
    """One uplink on its way to the bus."""

    __slots__ = (
        "armed",
        "client_id",
        "client_msg_id",
        "conn_id",
        "conversation",
        "copies",
        "owner",
        "partition",
        "record",
        "stage",
        "trace_id",
    )

    def __init__(
        self,
        owner: Uplinks,
        conversation: str,
        client_id: int,
        client_msg_id: bytes,
    ) -> None:
        self.owner = owner
        self.conn_id = owner.conn_id
        self.conversation = conversation
        self.client_id = client_id
        self.client_msg_id = client_msg_id
        self.copies = 1
        """How many UPs get this ticket's answer: itself and those that joined."""
        self.stage = Stage.QUEUED
        self.armed = False
        """True while a PENDING deadline of this ticket stands; written by the edge."""
        self.partition = 0
        self.record = b""
        """The bus record; written and cleared by the batcher."""
        self.trace_id = b""


@dataclass(frozen=True, slots=True)
class Append:
    """Put this ticket's record into the batcher; if it has no room, call `busy(ticket)`."""

    ticket: Ticket


@dataclass(frozen=True, slots=True)
class Joined:
    """The same uplink is on its way already; this copy gets its answer too."""

    ticket: Ticket


@dataclass(frozen=True, slots=True)
class Expected:
    """Refuse with EXPECTED and this number."""

    number: int


@dataclass(frozen=True, slots=True)
class Busy:
    """Refuse this uplink with BUSY, and each of `behind` (out of the batcher first)."""

    behind: tuple[Ticket, ...]


Decision = Append | Joined | Expected | Busy


class Uplinks:
    """The order of one connection. `max_waiting` tickets at a time; `max_numbers` > `max_waiting` conversations."""

    __slots__ = ("_guest", "_known", "_max_numbers", "_max_waiting", "_waiting", "conn_id")

    def __init__(self, conn_id: int, max_waiting: int, guest: bool = False, max_numbers: int | None = None) -> None:
        self.conn_id = conn_id
        self._guest = guest
        self._max_waiting = max_waiting
        self._max_numbers = max(max_waiting + 1, max_numbers or 2 * max_waiting)
        self._known: dict[str, int] = {}  # least recently used first
        self._waiting: dict[tuple[str, int, bytes], Ticket] = {}  # by order of arrival

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def numbers(self) -> int:
        """How many conversations are remembered."""
        return len(self._known)

    def expected(self, conversation: str, acked: int, first: int) -> int:
        """The client_id that comes next; `first` is what a guest's unknown conversation begins with."""
        known = self._known.get(conversation)
        if self._guest:
            return first if known is None else known + 1
        return max(known or 0, acked) + 1

    def offer(self, conversation: str, client_id: int, acked: int, client_msg_id: bytes) -> Decision:
        """What to do with an UP whose form was checked."""
        key = (conversation, client_id, client_msg_id)
        on_its_way = self._waiting.get(key)
        if on_its_way is not None:
            on_its_way.copies += 1
            return Joined(on_its_way)
        expected = self.expected(conversation, acked, client_id)
        if client_id > expected:
            return Expected(expected)
        if len(self._waiting) >= self._max_waiting:
            return Busy(self._busy(conversation, client_id))
        if client_id == expected:
            self._know(conversation, client_id)
        else:
            self._touch(conversation)
        ticket = Ticket(self, conversation, client_id, client_msg_id)
        self._waiting[key] = ticket
        return Append(ticket)

    def busy(self, ticket: Ticket) -> Busy:
        """The batcher had no room for `ticket`: it is dropped, and so is what was queued behind it."""
        self._drop(ticket)
        return Busy(self._busy(ticket.conversation, ticket.client_id))

    def refused(self, conversation: str, client_id: int, acked: int) -> None:
        """An UP was refused for good before the bus: its number is used up, if it was its turn."""
        if client_id == self.expected(conversation, acked, client_id):
            self._know(conversation, client_id)

    def settled(self, ticket: Ticket) -> None:
        """The bus holds the ticket's record durably."""
        ticket.stage = Stage.SETTLED
        self._waiting.pop((ticket.conversation, ticket.client_id, ticket.client_msg_id), None)

    def abandon(self) -> tuple[Ticket, ...]:
        """The slot is lost: what is queued is dropped (out of the batcher too); what is in flight may land late."""
        queued = tuple(t for t in self._waiting.values() if t.stage is Stage.QUEUED)
        for ticket in queued:
            self._drop(ticket)
        return queued

    def _busy(self, conversation: str, client_id: int) -> tuple[Ticket, ...]:
        behind = tuple(
            t
            for t in self._waiting.values()
            if t.conversation == conversation and t.client_id > client_id and t.stage is Stage.QUEUED
        )
        for ticket in behind:
            self._drop(ticket)
        if self._guest and conversation not in self._known:
            return behind
        self._know(conversation, client_id - 1)
        return behind

    def _drop(self, ticket: Ticket) -> None:
        ticket.stage = Stage.DROPPED
        self._waiting.pop((ticket.conversation, ticket.client_id, ticket.client_msg_id), None)

    def _know(self, conversation: str, number: int) -> None:
        known = self._known
        known.pop(conversation, None)
        known[conversation] = number
        if len(known) > self._max_numbers:
            # One more number than can have tickets, so one without any is always found.
            busy = {t.conversation for t in self._waiting.values()}
            for candidate in known:
                if candidate not in busy and candidate != conversation:
                    del known[candidate]
                    break

    def _touch(self, conversation: str) -> None:
        if conversation in self._known:
            self._known[conversation] = self._known.pop(conversation)
