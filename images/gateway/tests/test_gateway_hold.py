"""Which slots are held, when, and for how long: R6's clause for slots that moved. Time is a number here."""

from __future__ import annotations

from collections.abc import Iterable

from plato.topology.record import Topology, even_ranges
from plato.topology.slots import reassigned
from plato_gateway.core.hold import HOLD_S, Holds, Serves

FIRST = Topology("c", 1, even_ranges(["a", "b"], 1))
MOVED = Topology("c", 2, reassigned(FIRST.owners, {7: "b"}, 2))
BACK = Topology("c", 3, reassigned(MOVED.owners, {7: "a"}, 3))
A, B = range(512), range(512, 1024)


def said(epoch: int, slots: Iterable[int]) -> Serves:
    return epoch, sum(1 << s for s in slots)


def test_a_shard_that_said_nothing_yet_is_believed() -> None:
    holds = Holds()
    assert holds.look(FIRST, {}, 0.0) == frozenset()
    assert not holds.waiting


def test_a_slot_that_moved_is_held_until_its_new_shard_serves_it_by_the_new_record() -> None:
    holds = Holds()
    holds.look(FIRST, {"a": said(1, A), "b": said(1, B)}, 0.0)
    assert holds.look(MOVED, {"a": said(1, A), "b": said(1, B)}, 0.1) == {7}
    assert holds.look(MOVED, {"a": said(2, [s for s in A if s != 7]), "b": said(2, B)}, 0.2) == {7}
    assert holds.look(MOVED, {"a": said(2, A), "b": said(2, [7, *B])}, 0.3) == frozenset()
    assert not holds.waiting


def test_what_a_shard_served_before_the_slot_left_it_says_nothing_about_its_return() -> None:
    holds = Holds()
    holds.look(FIRST, {"a": said(1, A)}, 0.0)
    assert holds.look(MOVED, {"a": said(1, A)}, 0.1) == {7}
    assert holds.look(BACK, {"a": said(1, A)}, 0.2) == {7}  # it has not even heard of the first move
    assert holds.look(BACK, {"a": said(3, A)}, 0.3) == frozenset()


def test_the_old_shards_word_holds_a_slot_before_the_record_is_here() -> None:
    holds = Holds()
    holds.look(FIRST, {"a": said(1, A)}, 0.0)
    assert holds.look(FIRST, {"a": said(2, [s for s in A if s != 7])}, 0.1) == {7}
    assert holds.look(MOVED, {"b": said(2, [7, *B])}, 0.2) == frozenset()


def test_a_new_shard_that_served_it_before_the_record_came_holds_nothing_up() -> None:
    holds = Holds()
    holds.look(FIRST, {"b": said(1, B)}, 0.0)
    assert holds.look(MOVED, {"b": said(2, [7, *B])}, 0.1) == frozenset()


def test_a_hold_ends_in_time_and_each_move_has_its_own() -> None:
    holds = Holds()
    holds.look(FIRST, {}, 0.0)
    assert holds.look(MOVED, {}, 1.0) == {7}  # the new shard is away
    assert holds.look(MOVED, {}, 1.0 + HOLD_S - 0.01) == {7}
    assert holds.look(MOVED, {}, 1.0 + HOLD_S) == frozenset()
    assert holds.waiting
    assert holds.look(MOVED, {"b": said(2, B)}, 60.0) == frozenset()  # not twice
    assert holds.look(BACK, {}, 61.0) == {7}
    assert holds.look(BACK, {"a": said(3, A)}, 62.0) == frozenset()
    assert not holds.waiting


def test_a_newer_assignment_to_the_same_shard_holds_only_what_it_does_not_serve() -> None:
    holds = Holds()
    holds.look(FIRST, {"a": said(1, A)}, 0.0)
    again = Topology("c", 5, even_ranges(["a", "b"], 5))
    assert holds.look(again, {"a": said(1, A)}, 0.1) == frozenset()
    assert holds.look(again, {"a": said(5, [s for s in A if s != 7])}, 0.2) == {7}
