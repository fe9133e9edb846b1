"""Ids and minters: unique whatever the clock does."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from plato.core import ids
from plato.core.ids import EPOCH_MS, ConnIdMinter, MsgIdMinter, OutOfReservation

NOW = EPOCH_MS + 1_000_000_000


@given(
    stamp_ms=st.integers(EPOCH_MS, EPOCH_MS + (1 << 41) - 1),
    worker_id=st.integers(0, 1023),
    sequence=st.integers(0, 4095),
)
def test_an_id_holds_its_parts(stamp_ms: int, worker_id: int, sequence: int) -> None:
    made = ids.make_id(stamp_ms, worker_id, sequence)
    assert 0 <= made <= ids.MAX_ID
    assert ids.stamp_ms_of(made) == stamp_ms
    assert ids.worker_id_of(made) == worker_id
    assert ids.slot_of(made) == sequence % 1024


def test_the_layout_is_the_documented_one() -> None:
    assert ids.make_id(EPOCH_MS + 1, 0, 0) == 1 << 22
    assert ids.make_id(EPOCH_MS, 1, 0) == 1 << 12
    assert ids.make_id(EPOCH_MS + (1 << 41) - 1, 1023, 4095) == ids.MAX_ID == (1 << 63) - 1


# ── msg_ids ──────────────────────────────────────────────────────────────────────────────────────────────────


def test_without_a_window_nothing_is_minted() -> None:
    with pytest.raises(OutOfReservation):
        MsgIdMinter(1).mint(NOW)


def test_a_stamp_gives_4096_ids_then_the_next_one() -> None:
    minter = MsgIdMinter(7)
    minter.grant(NOW, NOW + 10)
    made = [minter.mint(NOW) for _ in range(4097)]
    assert made == sorted(set(made))
    assert [ids.stamp_ms_of(m) for m in (made[0], made[4095], made[4096])] == [NOW, NOW, NOW + 1]
    assert {ids.worker_id_of(m) for m in made} == {7}


def test_a_window_gives_all_its_ids_and_no_more() -> None:
    minter = MsgIdMinter(7)
    minter.grant(NOW, NOW + 2)
    made = {minter.mint(NOW - 5_000) for _ in range(2 * 4096)}
    assert len(made) == 2 * 4096
    assert {ids.stamp_ms_of(m) for m in made} == {NOW, NOW + 1}
    with pytest.raises(OutOfReservation):
        minter.mint(NOW)


def test_a_window_that_goes_on_extends_and_one_behind_a_gap_replaces() -> None:
    minter = MsgIdMinter(7)
    minter.grant(NOW, NOW + 3_000)
    minter.grant(NOW + 3_000, NOW + 4_000)
    assert ids.stamp_ms_of(minter.mint(NOW + 10)) == NOW + 10
    minter.grant(NOW + 5_000, NOW + 6_000)
    assert ids.stamp_ms_of(minter.mint(NOW + 11)) == NOW + 5_000


def test_lag_shows_how_far_the_clock_stepped_back() -> None:
    minter = MsgIdMinter(7)
    minter.grant(NOW, NOW + 3_000)
    minter.mint(NOW + 500)
    assert minter.lag_ms == 0
    minter.mint(NOW + 400)
    assert minter.lag_ms == 100


def test_a_clock_that_leaps_and_comes_back_stops_nothing() -> None:
    for minter in (MsgIdMinter(7), conn_minter(7, (3,))):
        minter.grant(NOW, NOW + 3_000)
        with pytest.raises(OutOfReservation):
            minter.mint(NOW + 3_600_000)
        assert ids.stamp_ms_of(minter.mint(NOW + 20)) == NOW + 20


def test_a_clock_before_the_epoch_makes_no_negative_id() -> None:
    for minter in (MsgIdMinter(7), conn_minter(7, (3,))):
        minter.grant(0, 3_000)
        with pytest.raises(OutOfReservation):
            minter.mint(10)


clocks = st.lists(
    st.tuples(st.integers(-3_000, 3_000), st.integers(0, 2_500), st.integers(0, 30)), min_size=1, max_size=30
)


@given(steps=clocks)
def test_no_msg_id_is_given_twice_and_all_rise(steps: list[tuple[int, int, int]]) -> None:
    minter = MsgIdMinter(7)
    now, until, last = NOW, NOW, 0
    windows: list[tuple[int, int]] = []
    for step, gap, count in steps:
        now += step
        window = (until + (gap if gap % 3 == 0 else 0), until + gap + 1)
        if window[0] < window[1]:
            minter.grant(*window)
            windows.append(window)
            until = window[1]
        for _ in range(count):
            try:
                made = minter.mint(now)
            except OutOfReservation:
                break
            assert made > last
            assert any(begin <= ids.stamp_ms_of(made) < stop for begin, stop in windows)
            last = made


# ── conn_ids ─────────────────────────────────────────────────────────────────────────────────────────────────


def conn_minter(worker_id: int, slots: tuple[int, ...]) -> ConnIdMinter:
    minter = ConnIdMinter()
    minter.assign(worker_id, slots)
    return minter


def test_without_slots_nothing_is_minted() -> None:
    minter = conn_minter(1, ())
    minter.grant(NOW, NOW + 1_000)
    with pytest.raises(OutOfReservation):
        minter.mint(NOW)


def test_a_stamp_gives_four_ids_per_slot_evenly() -> None:
    slots = (5, 7, 1023)
    minter = conn_minter(3, slots)
    minter.grant(NOW, NOW + 10)
    made = [minter.mint(NOW) for _ in range(12)]
    assert len(set(made)) == 12
    assert {ids.stamp_ms_of(m) for m in made} == {NOW}
    assert sorted(ids.slot_of(m) for m in made) == sorted(slots * 4)
    assert ids.stamp_ms_of(minter.mint(NOW)) == NOW + 1


def test_ids_go_round_the_slots() -> None:
    minter = conn_minter(3, tuple(range(100)))
    minter.grant(NOW, NOW + 1_000)
    made = [ids.slot_of(minter.mint(NOW + n)) for n in range(200)]
    assert sorted(made) == sorted([*range(100)] * 2)


conn_steps = st.lists(
    st.tuples(
        st.integers(-2_000, 2_000),  # the clock
        st.integers(0, 40),  # how many are minted
        st.none() | st.tuples(st.integers(0, 2), st.sets(st.integers(0, 1023), max_size=5)),  # another assignment
        st.integers(0, 1_500),  # how much is granted
    ),
    max_size=30,
)


@given(steps=conn_steps)
def test_no_conn_id_is_given_twice_whatever_is_assigned(
    steps: list[tuple[int, int, tuple[int, set[int]] | None, int]],
) -> None:
    minter = conn_minter(0, (0, 1))
    worker_id, slots = 0, {0, 1}
    now, until = NOW, NOW
    seen: set[int] = set()
    for step, count, assignment, granted in steps:
        now += step
        minter.grant(until, until + granted)
        until += granted
        if assignment is not None:
            worker_id, slots = assignment
            minter.assign(worker_id, tuple(sorted(slots)))
        for _ in range(count):
            try:
                made = minter.mint(now)
            except OutOfReservation:
                break
            assert made not in seen
            assert ids.worker_id_of(made) == worker_id
            assert ids.slot_of(made) in slots
            assert NOW <= ids.stamp_ms_of(made) < until
            seen.add(made)


@given(workers=st.sampled_from([1, 2, 4, 8, 16]), count=st.integers(1, 200))
def test_workers_of_a_pod_never_collide(workers: int, count: int) -> None:
    """One worker_id, one window, disjoint slots."""
    seen: set[int] = set()
    for k in range(workers):
        minter = conn_minter(9, tuple(slot for slot in range(128) if slot % workers == k))
        minter.grant(NOW, NOW + 1_000)
        made = {minter.mint(NOW) for _ in range(count)}
        assert len(made) == count
        assert not made & seen
        seen |= made
