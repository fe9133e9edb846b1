"""The outbox: what this device sent and the platform has not settled yet, per conversation in client_id order (R1, R3).

An entry leaves only by a receipt, its own row in a pull, or a refusal; an ACK merely stops its timer. Each conversation
is sent in order with a bounded number of entries in flight. After any trouble (busy, expected, no answer) it goes back to
the entry in question and sends that one alone until it is answered, so that a burst of equal answers causes one repeat.
client_ids are given once and never again: going back re-sends, it never re-numbers.

Memory: at most `MAX_ENTRIES` entries and `MAX_BYTES` of bodies.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum
from typing import Final

from plato.client.api import OutboxFull
from plato.client.core.model import Entry
from plato.client.core.repeats import UNANSWERED_MAX, Chance, Timing
from plato.core.codes import Action, Code, action

MAX_ENTRIES: Final = 10_000
MAX_BYTES: Final = 64 * 1024 * 1024
WINDOW: Final = 32
"""Entries in flight over all conversations; below the server's cap per connection (64)."""
TOLD_MAX_MS: Final = 60_000
"""The platform may tell us to wait for so long, and no longer."""


@dataclass(slots=True)
class Lane:
    """One conversation's uplink. Entries from `next_send` on are to be sent; `flying` ones were sent and await an ACK."""

    next_client_id: int = 1
    entries: dict[int, Entry] = field(default_factory=dict)  # by client_id, rising
    next_send: int = 1
    flying: dict[int, None] = field(default_factory=dict)  # rising
    probing: bool = False  # after trouble: one at a time, until one is accepted
    later: int = 0  # "busy" answers in a row
    unanswered: int = 0  # time-outs in a row
    not_before_ms: int = 0
    due_ms: int = 0  # when the oldest flying one counts as unanswered

    @property
    def acked(self) -> int:
        """The greatest n for which every client_id ≤ n is settled."""
        return next(iter(self.entries), self.next_client_id) - 1

    @property
    def unsent(self) -> bool:
        """Whether something is to be sent."""
        return self.next_send < self.next_client_id and bool(self.entries)


class Verdict(Enum):
    """What an answer to an UP means to the caller."""

    NOTHING = "nothing"
    ACCEPTED = "accepted"
    REFUSED = "refused"
    ELSEWHERE = "elsewhere"  # its code concerns the connection


class Outbox:
    """All lanes of one device."""

    def __init__(
        self, entries: Iterable[Entry], next_client_ids: dict[str, int], timing: Timing, chance: Chance
    ) -> None:
        """entries: by (conversation, client_id). next_client_ids: of every conversation that was ever sent to."""
        self._timing = timing
        self._chance = chance
        self._lanes = {conversation_id: Lane(n) for conversation_id, n in next_client_ids.items() if n > 1}
        self._entries: dict[bytes, Entry] = {}
        self._busy: dict[str, Lane] = {}  # lanes with entries, in turn
        self._bytes = 0
        self._flying = 0
        self._not_before_ms = 0  # nothing is sent before: the platform told us to wait
        for entry in entries:
            lane = self._lanes.setdefault(entry.conversation_id, Lane(entry.client_id + 1))
            lane.entries[entry.client_id] = entry
            self._entries[entry.client_msg_id] = entry
            self._bytes += len(entry.body)
            self._busy[entry.conversation_id] = lane
        self.rewind_all()

    def __len__(self) -> int:
        return len(self._entries)

    def entry(self, client_msg_id: bytes) -> Entry | None:
        """The unsettled entry of this id."""
        return self._entries.get(client_msg_id)

    def at(self, conversation_id: str, client_id: int) -> Entry:
        """The unsettled entry of this place. Raises KeyError."""
        return self._lanes[conversation_id].entries[client_id]

    def entries(self, conversation_id: str) -> list[Entry]:
        """The unsettled entries of a conversation, by client_id."""
        lane = self._busy.get(conversation_id)
        return list(lane.entries.values()) if lane else []

    def next_client_id(self, conversation_id: str) -> int:
        """The client_id that the next message of this conversation gets."""
        lane = self._lanes.get(conversation_id)
        return lane.next_client_id if lane else 1

    def add(self, conversation_id: str, client_msg_id: bytes, to_user: str, msg_type: int, body: bytes) -> Entry:
        """A new entry with the next client_id. Raises OutboxFull."""
        if len(self._entries) >= MAX_ENTRIES or self._bytes + len(body) > MAX_BYTES:
            raise OutboxFull(f"{len(self._entries)} messages ({self._bytes} bytes) wait to be sent; try again later")
        lane = self._lanes.setdefault(conversation_id, Lane())
        entry = Entry(conversation_id, lane.next_client_id, client_msg_id, to_user, msg_type, body)
        lane.next_client_id += 1
        lane.entries[entry.client_id] = entry
        self._entries[client_msg_id] = entry
        self._bytes += len(body)
        self._busy[conversation_id] = lane
        return entry

    def take_ready(self, now_ms: int) -> list[tuple[Entry, int]]:
        """The (entry, acked) to send now, in order; they count as in flight from here on."""
        ready: list[tuple[Entry, int]] = []
        if now_ms < self._not_before_ms:
            return ready
        for conversation_id in list(self._busy):
            if self._flying >= WINDOW:
                break
            lane = self._busy[conversation_id]
            if not lane.unsent or lane.not_before_ms > now_ms:
                continue
            window = 1 if lane.probing else WINDOW
            acked = lane.acked
            lane.next_send = max(lane.next_send, acked + 1)
            while lane.next_send < lane.next_client_id and len(lane.flying) < window and self._flying < WINDOW:
                entry = lane.entries.get(lane.next_send)
                lane.next_send += 1
                if entry is None:
                    continue
                if not lane.flying:
                    lane.due_ms = now_ms + self._timing.backoff_ms(lane.unanswered, self._chance)
                lane.flying[entry.client_id] = None
                self._flying += 1
                ready.append((entry, acked))
            self._busy[conversation_id] = self._busy.pop(conversation_id)  # to the end: lanes take turns
        return ready

    def answer(
        self, conversation_id: str, client_id: int, code: int, expected: int, now_ms: int, retry_ms: int = 0
    ) -> Verdict:
        """An ACK to an UP. REFUSED: the entry is still here, the caller settles it. retry_ms: nothing is sent before, in no
        conversation: it is the connection, the user or the platform that is too busy."""
        lane = self._busy.get(conversation_id)
        if lane is None or client_id not in lane.entries:
            return Verdict.NOTHING
        act = action(code)
        if act in (Action.RECONNECT, Action.LOGIN) or code == Code.SYNC_FIRST:
            return Verdict.ELSEWHERE
        if act is Action.STOP:
            return Verdict.REFUSED
        lane.unanswered = 0
        if code == Code.PENDING:
            lane.due_ms = now_ms + self._timing.backoff_ms(0, self._chance)
            return Verdict.NOTHING
        if act is Action.NONE:
            self._land(lane, client_id)
            lane.due_ms = now_ms + self._timing.backoff_ms(0, self._chance)
            lane.probing, lane.later = False, 0
            lane.entries[client_id].accepted = True
            return Verdict.ACCEPTED
        if client_id not in lane.flying:
            return Verdict.NOTHING  # it answers an earlier send, and its trouble was dealt with already
        lane.probing = True
        if retry_ms:
            wait_ms = min(retry_ms, TOLD_MAX_MS)
            # Later by chance: others were told the same.
            self._not_before_ms = max(self._not_before_ms, now_ms + int(wait_ms * (1 + self._chance() / 4)))
            self._rewind(lane, client_id)
            return Verdict.NOTHING
        if code == Code.EXPECTED and expected < client_id and expected in lane.entries:
            self._rewind(lane, expected)
            return Verdict.NOTHING
        # Busy; or the expected one is settled here, which the server learns by `acked` when what stands before it is.
        self._later(lane, client_id, now_ms)
        return Verdict.NOTHING

    def later(self, now_ms: int) -> None:
        """An uplink was answered "later" without being named: everything in flight goes back and waits."""
        for lane in self._busy.values():
            if lane.flying:
                lane.probing = True
                self._later(lane, next(iter(lane.flying)), now_ms)

    def settle(self, client_msg_id: bytes) -> Entry | None:
        """Takes an entry out: it has its outcome. None: it was settled before, or is not ours."""
        entry = self._entries.pop(client_msg_id, None)
        if entry is None:
            return None
        lane = self._lanes[entry.conversation_id]
        first = next(iter(lane.entries)) == entry.client_id
        del lane.entries[entry.client_id]
        self._land(lane, entry.client_id)
        self._bytes -= len(entry.body)
        if first and lane.probing and not lane.flying:
            lane.not_before_ms = 0  # `acked` moved: what waited for it may go
        if not lane.entries:
            del self._busy[entry.conversation_id]
            lane.next_send, lane.probing, lane.later, lane.unanswered = lane.next_client_id, False, 0, 0
            lane.not_before_ms = 0
        return entry

    def rewind_all(self) -> None:
        """A new connection, or a commit: everything unsettled is to be sent (again), in order."""
        for lane in self._busy.values():
            self._rewind(lane, 0)
            lane.probing, lane.later, lane.unanswered, lane.not_before_ms = False, 0, 0, 0

    def rewind_accepted(self) -> None:
        """A Sync healed a loss on this connection: a lost refusal shows in no pull, so the accepted ones are asked again."""
        for lane in self._busy.values():
            if any(e.accepted and e.client_id not in lane.flying for e in lane.entries.values()):
                self._rewind(lane, 0)

    def expire(self, now_ms: int) -> bool:
        """Goes back to what is unanswered. False: a third time in a row, the connection is dead."""
        for lane in self._busy.values():
            if lane.flying and lane.due_ms <= now_ms:
                lane.unanswered += 1
                if lane.unanswered >= UNANSWERED_MAX:
                    return False
                lane.probing = True
                self._rewind(lane, next(iter(lane.flying)))
        return True

    def deadline_ms(self) -> int | None:
        """When `take_ready` or `expire` has something to do next, as far as time decides it."""
        best: int | None = None
        for lane in self._busy.values():
            if lane.flying:
                due = lane.due_ms
            elif lane.unsent and self._flying < WINDOW:
                due = max(lane.not_before_ms, self._not_before_ms)
            else:
                continue
            best = due if best is None else min(best, due)
        return best

    def _rewind(self, lane: Lane, client_id: int) -> None:
        lane.next_send = min(lane.next_send, max(client_id, next(iter(lane.entries))))
        for flown in [n for n in lane.flying if n >= lane.next_send]:
            self._land(lane, flown)

    def _later(self, lane: Lane, client_id: int, now_ms: int) -> None:
        self._rewind(lane, client_id)
        lane.not_before_ms = now_ms + self._timing.later_ms(lane.later, self._chance)
        lane.later += 1

    def _land(self, lane: Lane, client_id: int) -> None:
        if client_id in lane.flying:
            del lane.flying[client_id]
            self._flying -= 1
