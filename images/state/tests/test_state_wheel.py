"""The timing wheel: due keys, bounded work, nothing left behind; and the pacer that counts turns instead of time."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from plato_state.core.wheel import Pacer, Wheel, spread


def run(wheel: Wheel[int], count: int, limit: int = 100) -> dict[int, list[int]]:
    """Ticks `count` times; {tick: keys due then}."""
    out: dict[int, list[int]] = {}
    for _ in range(count):
        if due := wheel.advance(limit):
            out[wheel.now] = sorted(due)
    return out


def test_a_key_is_due_at_its_tick_once() -> None:
    wheel: Wheel[int] = Wheel(8)
    wheel.arm(1, 3)
    wheel.arm(2, 3)
    wheel.arm(3, 20)
    assert run(wheel, 30) == {3: [1, 2], 20: [3]}
    assert len(wheel) == 0


def test_a_deadline_moves_both_ways() -> None:
    wheel: Wheel[int] = Wheel(8)
    wheel.arm(1, 3)
    wheel.arm(1, 9)
    wheel.arm(2, 9)
    wheel.arm(2, 4)
    assert run(wheel, 20) == {4: [2], 9: [1]}


def test_a_cancelled_key_is_never_due_and_leaves_nothing_behind() -> None:
    wheel: Wheel[int] = Wheel(8)
    for key in range(1_000):
        wheel.arm(key, 5 + key % 30)
        wheel.cancel(key)
    assert len(wheel) == 0
    assert not wheel._due
    assert not wheel._placed
    assert not any(wheel._buckets)
    assert run(wheel, 50) == {}


def test_a_passed_deadline_is_due_at_the_next_tick() -> None:
    wheel: Wheel[int] = Wheel(8)
    run(wheel, 5)
    wheel.arm(1, 2)
    assert run(wheel, 3) == {6: [1]}


def test_work_per_tick_is_bounded_and_the_rest_follows() -> None:
    wheel: Wheel[int] = Wheel(8)
    for key in range(25):
        wheel.arm(key, 2)
    assert [len(wheel.advance(10)) for _ in range(6)] == [0, 10, 10, 5, 0, 0]


def test_a_key_that_waits_beyond_the_bound_can_still_be_moved_or_cancelled() -> None:
    wheel: Wheel[int] = Wheel(8)
    for key in range(4):
        wheel.arm(key, 1)
    first = wheel.advance(2)
    left = [k for k in range(4) if k not in first]
    wheel.cancel(left[0])
    wheel.arm(left[1], 9)
    assert run(wheel, 12, limit=2) == {9: [left[1]]}


@given(st.lists(st.tuples(st.integers(0, 20), st.one_of(st.none(), st.integers(0, 60)), st.booleans()), max_size=200))
def test_any_history_of_arms_and_cancels_agrees_with_a_plain_table(
    history: list[tuple[int, int | None, bool]],
) -> None:
    wheel: Wheel[int] = Wheel(16)
    table: dict[int, int] = {}
    for key, after, ticks in history:
        if after is None:
            wheel.cancel(key)
            table.pop(key, None)
        else:
            wheel.arm(key, wheel.now + after)
            table[key] = max(wheel.now + after, wheel.now + 1)
        if ticks:
            due = wheel.advance(1_000)
            expected = {k for k, t in table.items() if t <= wheel.now}
            assert set(due) == expected
            assert len(due) == len(expected)
            for k in expected:
                del table[k]
    assert len(wheel) == len(table)
    assert {k: wheel.due_of(k) for k in table} == table


def test_a_size_that_is_no_power_of_two_is_refused() -> None:
    with pytest.raises(ValueError, match="12"):
        Wheel(12)


def test_the_pacer_counts_turns_and_never_time_that_was_slept_through() -> None:
    pacer = Pacer(0.025)
    assert pacer.credit(100.0) == 0
    assert pacer.credit(100.03) == 1
    assert pacer.credit(100.056) == 1, "the rest of a broken tick stands over"
    assert pacer.credit(3_700.0) == 2, "an hour of SIGSTOP is worth two ticks"
    assert pacer.credit(3_700.01) == 0
    assert pacer.credit(3_700.03) == 1


def test_spread_is_even_and_the_same_for_one_key() -> None:
    places = [spread(1_000_000 + 4_096 * n, 100) for n in range(10_000)]
    assert places == [spread(1_000_000 + 4_096 * n, 100) for n in range(10_000)]
    assert set(places) == set(range(100))
    assert max(places.count(p) for p in range(100)) < 200
    assert spread(5, 0) == 0
