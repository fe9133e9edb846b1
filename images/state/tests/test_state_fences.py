"""R5's decisions alone: when a slot may be taken, and what a look at one's own says."""

from __future__ import annotations

from plato.ports import Fence, FenceView
from plato_state.core.fences import Outbid, Sightings, Standing, standing

OTHER = Fence(1, 100, "t", "s1")


def view(fence: Fence | None, *, proof: int | None = 1, released: bool = False) -> FenceView:
    return FenceView(fence, released, proof)


def test_never_owned_released_and_my_own_name_are_free_at_once() -> None:
    sightings = Sightings("s0", stale=10, ordered=3)
    assert sightings.may_acquire(1, 1, view(None), 0)
    assert sightings.may_acquire(2, 1, view(OTHER, released=True), 0)
    assert sightings.may_acquire(3, 1, view(Fence(1, 100, "old token", "s0")), 0)


def test_anothers_fence_must_stand_unproven_for_the_whole_time() -> None:
    sightings = Sightings("s0", stale=10, ordered=3)
    assert not sightings.may_acquire(1, 1, view(OTHER, proof=1), 0)
    assert not sightings.may_acquire(1, 1, view(OTHER, proof=1), 9)
    assert not sightings.may_acquire(1, 1, view(OTHER, proof=2), 10), "it proved itself"
    assert not sightings.may_acquire(1, 1, view(OTHER, proof=2), 19)
    assert not sightings.may_acquire(1, 1, view(Fence(1, 101, "u", "s1"), proof=2), 20), "another fence"
    assert not sightings.may_acquire(1, 1, view(Fence(1, 101, "u", "s1"), proof=2), 29)
    assert sightings.may_acquire(1, 1, view(Fence(1, 101, "u", "s1"), proof=2), 30)


def test_after_an_order_to_move_three_seconds_are_enough_though_it_proves_itself() -> None:
    sightings = Sightings("s0", stale=10, ordered=3)
    assert not sightings.may_acquire(1, 2, view(OTHER, proof=1), 0)
    assert not sightings.may_acquire(1, 2, view(OTHER, proof=2), 2)
    assert sightings.may_acquire(1, 2, view(OTHER, proof=3), 3)


def test_r5_each_order_to_move_has_its_own_three_seconds() -> None:
    sightings = Sightings("s0", stale=10, ordered=3)
    assert not sightings.may_acquire(1, 2, view(OTHER, proof=1), 0)
    assert sightings.ordered() == [1]
    taken_back = Fence(3, 200, "t", "s1")  # the order was undone and given again: its owner has just acquired anew
    assert not sightings.may_acquire(1, 4, view(taken_back, proof=4), 4)
    assert sightings.may_acquire(1, 4, view(taken_back, proof=7), 7)
    sightings.keep({2})
    assert sightings.ordered() == []
    assert not sightings.may_acquire(1, 4, view(taken_back, proof=8), 8)


def test_a_forgotten_slot_is_watched_anew() -> None:
    sightings = Sightings("s0", stale=10, ordered=3)
    assert not sightings.may_acquire(1, 1, view(OTHER), 0)
    sightings.forget(1)
    assert not sightings.may_acquire(1, 1, view(OTHER), 10)


def test_a_look_at_ones_own_slot() -> None:
    mine = Fence(2, 100, "t", "s0")
    assert standing(mine, view(mine)) is Standing.MINE
    assert standing(mine, view(None)) is Standing.WIPED
    assert standing(mine, view(Fence(2, 99, "t", "s0"))) is Standing.WIPED
    assert standing(mine, view(Fence(1, 500, "x", "s1"))) is Standing.WIPED, "the epoch goes first"
    assert standing(mine, view(Fence(2, 100, "x", "s1"))) is Standing.LOST, "the same number, another token"
    assert standing(mine, view(Fence(2, 101, "x", "s1"))) is Standing.LOST
    assert standing(mine, view(Fence(3, 1, "x", "s1"))) is Standing.LOST


def test_a_fence_above_the_assignment_is_outbid_and_told_once_nobody_lives_behind_it() -> None:
    outbid, assigned = Outbid(stale=10), {1: 5, 2: 5}
    high = Fence(9, 100, "t", "s0")
    assert not outbid.see(1, 5, view(None), 0)
    assert not outbid.see(1, 5, view(Fence(5, 100, "t", "s0")), 0)
    assert outbid.see(1, 5, view(high, proof=1), 0)
    assert outbid.told(assigned) == ([1], [], 0)
    assert outbid.see(1, 5, view(high, proof=2), 9)
    assert outbid.see(1, 5, view(high, proof=2), 18)
    assert outbid.told(assigned) == ([1], [], 0), "it proved itself; no look, no judgement"
    assert outbid.see(1, 5, view(high, proof=2), 19)
    assert outbid.see(2, 5, view(Fence(8, 100, "u", "s1"), released=True), 19)
    assert outbid.told(assigned) == ([1, 2], [1, 2], 9)
    assert outbid.see(3, 5, view(Fence(7, 100, "v", "s2"), proof=1), 19)
    assert outbid.told({**assigned, 3: 5}) == ([1, 2, 3], [1, 2], 9), "behind one of them somebody lives"
    assert outbid.told({1: 10, 2: 5}) == ([2], [2], 8), "assigned anew, above it"
    assert outbid.told({}) == ([], [], 0)
