"""R1's machine alone, and against every schedule that hypothesis finds, with a bus and a msg that dedups."""

from __future__ import annotations

from collections import deque

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from plato_state.core.batcher import Batcher
from plato_state.core.uplinks import Append, Busy, Expected, Joined, Stage, Ticket, Uplinks


def msg_id(conversation: str, client_id: int) -> bytes:
    return f"{conversation}{client_id}".encode()


def offer(uplinks: Uplinks, client_id: int, acked: int = 0, conversation: str = "c") -> object:
    return uplinks.offer(conversation, client_id, acked, msg_id(conversation, client_id))


def queued(uplinks: Uplinks, client_id: int, acked: int = 0) -> Ticket:
    decision = offer(uplinks, client_id, acked)
    assert isinstance(decision, Append)
    return decision.ticket


def test_the_expected_number_is_appended_and_a_greater_one_is_told_what_comes_next() -> None:
    uplinks = Uplinks(1, 8)
    assert offer(uplinks, 2) == Expected(1)
    queued(uplinks, 1)
    queued(uplinks, 2)
    assert offer(uplinks, 4) == Expected(3)
    queued(uplinks, 3)


def test_acked_counts_where_nothing_is_known() -> None:
    uplinks = Uplinks(1, 8)
    assert offer(uplinks, 9, acked=7) == Expected(8)
    queued(uplinks, 8, acked=7)
    assert offer(uplinks, 10, acked=7) == Expected(9)


def test_a_smaller_number_is_appended_again_since_only_msg_knows_a_duplicate() -> None:
    uplinks = Uplinks(1, 8)
    uplinks.settled(queued(uplinks, 1))
    uplinks.settled(queued(uplinks, 2))
    again = queued(uplinks, 1)
    assert again.client_id == 1
    assert uplinks.expected("c", 0, 1) == 3


def test_a_copy_on_its_way_is_joined_queued_or_in_flight() -> None:
    uplinks = Uplinks(1, 8)
    ticket = queued(uplinks, 1)
    assert offer(uplinks, 1) == Joined(ticket)
    ticket.stage = Stage.IN_FLIGHT
    assert offer(uplinks, 1) == Joined(ticket)
    assert ticket.copies == 3
    assert len(uplinks) == 1


def test_the_same_number_with_another_id_is_no_copy() -> None:
    uplinks = Uplinks(1, 8)
    queued(uplinks, 1)
    assert isinstance(uplinks.offer("c", 1, 0, b"other"), Append)


def test_busy_takes_everything_behind_it_along_and_sets_known_back() -> None:
    uplinks = Uplinks(1, 3)
    uplinks.settled(queued(uplinks, 1))
    behind = [queued(uplinks, 2), queued(uplinks, 3)]
    other = uplinks.offer("other", 1, 0, b"o")
    assert isinstance(other, Append)
    assert offer(uplinks, 1) == Busy(tuple(behind))
    assert [t.stage for t in behind] == [Stage.DROPPED, Stage.DROPPED]
    assert other.ticket.stage is Stage.QUEUED, "another conversation is not behind it"
    assert offer(uplinks, 3) == Expected(1)
    assert offer(uplinks, 2) == Expected(1)


def test_busy_leaves_alone_what_is_in_flight() -> None:
    uplinks = Uplinks(1, 2)
    uplinks.settled(queued(uplinks, 1))
    in_flight, waiting = queued(uplinks, 2), queued(uplinks, 3)
    in_flight.stage = Stage.IN_FLIGHT
    assert offer(uplinks, 1) == Busy((waiting,))


def test_no_room_in_the_batcher_is_busy_too() -> None:
    uplinks = Uplinks(1, 8)
    first = queued(uplinks, 1)
    second = queued(uplinks, 2)
    assert uplinks.busy(second) == Busy(())
    assert second.stage is Stage.DROPPED
    assert offer(uplinks, 3) == Expected(2)
    assert offer(uplinks, 1) == Joined(first)


def test_a_refusal_uses_up_its_number_only_in_its_turn() -> None:
    uplinks = Uplinks(1, 8)
    uplinks.refused("c", 2, 0)
    assert uplinks.expected("c", 0, 1) == 1
    uplinks.refused("c", 1, 0)
    assert uplinks.expected("c", 0, 1) == 2
    uplinks.refused("c", 1, 0)
    assert uplinks.expected("c", 0, 1) == 2
    uplinks.refused("c", 5, 4)
    assert uplinks.expected("c", 4, 1) == 6


def test_numbers_are_capped_and_the_oldest_without_tickets_is_forgotten() -> None:
    uplinks = Uplinks(1, 2, max_numbers=3)
    keep = uplinks.offer("keep", 1, 0, b"k")
    assert isinstance(keep, Append)
    for name in ("a", "b", "d"):
        decision = uplinks.offer(name, 1, 0, b"x")
        assert isinstance(decision, Append)
        uplinks.settled(decision.ticket)
    assert uplinks.numbers == 3
    assert uplinks.expected("keep", 0, 1) == 2, "it has a ticket"
    assert uplinks.expected("a", 0, 1) == 1, "forgotten: asked for more than needed"
    assert uplinks.expected("d", 0, 1) == 2


def test_a_forgotten_number_joins_its_copy_instead_of_repeating_it() -> None:
    uplinks = Uplinks(1, 4)
    ticket = queued(uplinks, 6, acked=5)
    uplinks._known.clear()
    assert offer(uplinks, 6, acked=5) == Joined(ticket)


@pytest.mark.parametrize("first", [0, 1, 17])
def test_a_guest_begins_where_it_likes_then_goes_on_by_one(first: int) -> None:
    uplinks = Uplinks(1, 8, guest=True)
    queued(uplinks, first)
    assert offer(uplinks, first + 2) == Expected(first + 1)
    queued(uplinks, first + 1)


def test_a_guest_that_was_told_busy_begins_again_with_that_number() -> None:
    uplinks = Uplinks(1, 8, guest=True)
    assert uplinks.busy(queued(uplinks, 0)) == Busy(())
    assert offer(uplinks, 1) == Expected(0)
    queued(uplinks, 0)


def test_a_lost_slot_drops_what_is_queued_only() -> None:
    uplinks = Uplinks(1, 8)
    in_flight, waiting = queued(uplinks, 1), queued(uplinks, 2)
    in_flight.stage = Stage.IN_FLIGHT
    assert uplinks.abandon() == (waiting,)
    assert waiting.stage is Stage.DROPPED


class _Connection:
    """A client's connection: frames on their way to one shard, in order."""

    def __init__(self, batcher: Batcher, max_waiting: int) -> None:
        self.pipe: deque[tuple[str, int, int]] = deque()
        self.uplinks = Uplinks(1, max_waiting, max_numbers=max_waiting + 1)
        self.batcher = batcher


LAST = 6
CONVERSATIONS = ("a", "b")
REFUSED = {("a", 3), ("b", 2)}
"""What state refuses for good before the bus."""


class EveryScheduleMachine(RuleBasedStateMachine):
    """A client with 6 uplinks in each of 2 conversations, ≤ 4 connections over 2 shards, one bus, one msg that dedups."""

    @initialize()
    def begin(self) -> None:
        self.batchers = [Batcher(1_500), Batcher(1_500)]
        self.connections = [_Connection(self.batchers[0], 3)]
        self.bus: list[tuple[str, int]] = []
        self.on_the_bus: set[tuple[str, int]] = set()
        self.effects: dict[str, list[int]] = {c: [] for c in CONVERSATIONS}
        self.processed = 0
        self.settled: dict[str, set[int]] = {c: set() for c in CONVERSATIONS}

    def acked(self, conversation: str) -> int:
        n = 0
        while n + 1 in self.settled[conversation]:
            n += 1
        return n

    @rule(conversation=st.sampled_from(CONVERSATIONS), client_id=st.integers(1, LAST))
    def send(self, conversation: str, client_id: int) -> None:
        self.connections[-1].pipe.append((conversation, client_id, self.acked(conversation)))

    @rule(conversation=st.sampled_from(CONVERSATIONS))
    def send_all(self, conversation: str) -> None:
        for client_id in range(self.acked(conversation) + 1, LAST + 1):
            self.send(conversation, client_id)

    @rule(which=st.integers(0, 3))
    def lose_a_frame(self, which: int) -> None:
        pipe = self.connections[which % len(self.connections)].pipe
        if pipe:
            pipe.popleft()

    @rule(which=st.integers(0, 3), many=st.integers(1, 8), size=st.sampled_from([10, 400, 900]))
    def arrive(self, which: int, many: int, size: int) -> None:
        connection = self.connections[which % len(self.connections)]
        for _ in range(min(many, len(connection.pipe))):
            self._arrive(connection, size)

    def _arrive(self, connection: _Connection, size: int) -> None:
        conversation, client_id, acked = connection.pipe.popleft()
        uplinks, batcher = connection.uplinks, connection.batcher
        if (conversation, client_id) in REFUSED:
            uplinks.refused(conversation, client_id, acked)
            if connection is self.connections[-1]:
                self.settled[conversation].add(client_id)
            return
        decision = uplinks.offer(conversation, client_id, acked, msg_id(conversation, client_id))
        if isinstance(decision, Append) and not batcher.add(decision.ticket, 0, bytes(size)):
            decision = uplinks.busy(decision.ticket)
        if isinstance(decision, Busy):
            for behind in decision.behind:
                batcher.drop(behind)

    @rule(which=st.integers(0, 1))
    def take(self, which: int) -> None:
        self.batchers[which].take()

    @rule(which=st.integers(0, 1), lands=st.booleans(), known=st.booleans())
    def append(self, which: int, lands: bool, known: bool) -> None:
        batcher = self.batchers[which]
        if not batcher.in_flight:
            return
        tickets = [t for portion in batcher._in_flight.values() for t in portion]
        if lands:
            self.bus += [(t.conversation, t.client_id) for t in tickets]
            self.on_the_bus.update(self.bus)
        if lands and known:
            for ticket in [*batcher.done(), *(t for p in list(batcher._in_flight) for t in batcher.done(p))]:
                ticket.owner.settled(ticket)
                assert (ticket.conversation, ticket.client_id) in self.on_the_bus, "acknowledged means durable"
        else:
            for partition in batcher.split():
                batcher.again(partition)

    @precondition(lambda self: len(self.connections) < 4)
    @rule(which=st.integers(0, 1))
    def reconnect(self, which: int) -> None:
        self.connections.append(_Connection(self.batchers[which], 3))

    @rule(which=st.integers(0, 3))
    def forget_numbers(self, which: int) -> None:
        self.connections[which % len(self.connections)].uplinks._known.clear()

    @rule()
    def msg_takes_over(self) -> None:
        for conversation, client_id in self.bus[self.processed :]:
            if client_id not in self.effects[conversation]:
                self.effects[conversation].append(client_id)
        self.processed = len(self.bus)

    @rule(conversation=st.sampled_from(CONVERSATIONS), many=st.integers(1, LAST))
    def receipts_arrive(self, conversation: str, many: int) -> None:
        self.settled[conversation].update(self.effects[conversation][:many])

    @invariant()
    def effects_are_in_order_and_once(self) -> None:
        for conversation in CONVERSATIONS:
            effects = getattr(self, "effects", {}).get(conversation, [])
            wanted = [n for n in range(1, LAST + 1) if (conversation, n) not in REFUSED]
            assert effects == wanted[: len(effects)]

    def teardown(self) -> None:
        """After any history a client that repeats what is unsettled ends with everything, in order."""
        if not hasattr(self, "effects"):
            return
        connection = _Connection(self.batchers[0], 3)
        self.connections.append(connection)
        for _ in range(4 * LAST):
            for conversation in CONVERSATIONS:
                self.send_all(conversation)
                while connection.pipe:
                    self._arrive(connection, 10)
            for which in (0, 1):
                self.take(which)
                self.append(which, True, True)
            self.msg_takes_over()
            for conversation in CONVERSATIONS:
                self.receipts_arrive(conversation, LAST)
        self.effects_are_in_order_and_once()
        assert all(self.acked(c) == LAST for c in CONVERSATIONS)


EveryScheduleMachine.TestCase.settings = settings(
    max_examples=120, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
test_r1_no_schedule_breaks_order_or_repeats_an_effect = EveryScheduleMachine.TestCase
