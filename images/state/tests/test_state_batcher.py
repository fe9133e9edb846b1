"""R8's machine alone: one append in flight, repeated as it was, bounded."""

from __future__ import annotations

from plato_state.core.batcher import OVERHEAD_BYTES, Batcher
from plato_state.core.uplinks import Append, Stage, Ticket, Uplinks


def tickets(count: int, conversation: str = "c") -> list[Ticket]:
    uplinks = Uplinks(1, 1_000)
    out = []
    for n in range(1, count + 1):
        decision = uplinks.offer(conversation, n, 0, b"%d" % n)
        assert isinstance(decision, Append)
        out.append(decision.ticket)
    return out


def test_the_next_append_fills_while_one_is_in_flight() -> None:
    batcher = Batcher(100_000)
    a, b, c = tickets(3)
    assert batcher.take() is None
    batcher.add(a, 1, b"a")
    assert batcher.take() == {1: [b"a"]}
    batcher.add(b, 1, b"b")
    batcher.add(c, 2, b"c")
    assert batcher.take() is None, "one in flight"
    assert batcher.done() == [a]
    assert batcher.take() == {1: [b"b"], 2: [b"c"]}


def test_a_failed_append_is_repeated_the_same_records_in_the_same_order() -> None:
    batcher = Batcher(100_000)
    a, b, c = tickets(3)
    batcher.add(a, 1, b"a")
    batcher.add(b, 1, b"b")
    first = batcher.take()
    batcher.add(c, 1, b"c")
    assert first == {1: [b"a", b"b"]}
    assert batcher.split() == [1]
    assert batcher.again(1) == first[1]
    assert batcher.take() is None, "nothing overtakes it"
    assert batcher.again(1) == first[1]
    assert batcher.done(1) == [a, b]
    assert batcher.take() == {1: [b"c"]}


def test_a_partition_that_takes_nothing_holds_up_no_other_and_takes_no_others_room() -> None:
    batcher = Batcher(40 * (100 + OVERHEAD_BYTES))
    stuck, others = tickets(40), tickets(40, "other")
    batcher.add(stuck[0], 1, bytes(100))
    batcher.add(others[0], 2, bytes(100))
    assert batcher.take() == {1: [bytes(100)], 2: [bytes(100)]}
    assert sorted(batcher.split()) == [1, 2]
    assert batcher.done(2) == others[:1]
    assert sum(batcher.add(ticket, 1, bytes(100)) for ticket in stuck[1:]) == 29
    assert sum(batcher.add(ticket, 2, bytes(100)) for ticket in others[1:]) == 10
    assert batcher.take() == {2: [bytes(100)] * 10}
    assert batcher.take() is None
    assert batcher.done() == others[1:11]
    assert batcher.take() is None
    assert batcher.done(1) == stuck[:1]
    assert batcher.take() == {1: [bytes(100)] * 29}
    assert batcher.done() == stuck[1:30]
    assert batcher.held_bytes == 0
    assert not batcher._held


def test_past_its_bytes_there_is_no_room_and_settled_records_make_room() -> None:
    batcher = Batcher(2 * (100 + OVERHEAD_BYTES))
    a, b, c = tickets(3)
    assert batcher.add(a, 0, bytes(100))
    assert batcher.add(b, 1, bytes(100))
    assert not batcher.add(c, 0, bytes(1)), "in flight or queued, all counts"
    batcher.take()
    assert not batcher.add(c, 0, bytes(1))
    batcher.done()
    assert batcher.held_bytes == 0
    assert batcher.add(c, 0, bytes(1))


def test_a_dropped_record_frees_its_bytes_at_once_and_is_never_appended() -> None:
    batcher = Batcher(100_000)
    a, b, c = tickets(3)
    for ticket in (a, b, c):
        batcher.add(ticket, 0, bytes(1_000))
    before = batcher.held_bytes
    b.stage = Stage.DROPPED
    batcher.drop(b)
    assert batcher.held_bytes == before - 1_000
    assert batcher.take() == {0: [bytes(1_000)] * 2}
    assert batcher.done() == [a, c]
    assert batcher.held_bytes == 0
    assert batcher.queued == 0
    assert not batcher


def test_a_partition_with_nothing_but_dropped_records_is_no_append() -> None:
    batcher = Batcher(100_000)
    (a,) = tickets(1)
    batcher.add(a, 0, b"x")
    a.stage = Stage.DROPPED
    batcher.drop(a)
    assert batcher.take() is None
    assert batcher.held_bytes == 0


def test_one_append_is_bounded_and_every_partition_has_its_turn() -> None:
    batcher = Batcher(10_000_000, batch_bytes=1_000_000, batch_records=4)
    many, one = tickets(10), tickets(1, "other")
    for ticket in many:
        batcher.add(ticket, 0, b"m")
    batcher.add(one[0], 1, b"o")
    order = []
    while (batch := batcher.take()) is not None:
        order.append({p: len(records) for p, records in batch.items()})
        batcher.done()
    assert order == [{0: 4}, {1: 1, 0: 3}, {0: 3}]


def test_a_large_record_is_appended_alone() -> None:
    batcher = Batcher(10_000_000, batch_bytes=100)
    a, b = tickets(2)
    batcher.add(a, 0, bytes(5_000))
    batcher.add(b, 0, bytes(5_000))
    assert batcher.take() == {0: [bytes(5_000)]}
