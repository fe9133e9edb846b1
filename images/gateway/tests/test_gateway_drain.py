"""A drain, decided: the pace, who is named again, which deadline counts, what takes it back."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plato_gateway.core.drain import AGAIN_MAX_MS, AGAIN_MS, UNSENT_MS, Drain, Mode, Order

STEP_MS = 50


def order(drain_id: int = 9, *, pace_per_s: int = 200, settle_ms: int = 0, deadline_ms: int = 10_000_000) -> Order:
    return Order(drain_id, pace_per_s, settle_ms, deadline_ms)


def draining(count: int, **figures: int) -> Drain:
    drain = Drain()
    drain.recorded(order(**figures), 0)
    drain.here(range(1, count + 1), 0)
    return drain


def run(drain: Drain, from_ms: int, to_ms: int, step_ms: int = STEP_MS) -> list[tuple[int, int]]:
    """(when, conn_id) of everybody who is named."""
    return [(now, c) for now in range(from_ms, to_ms, step_ms) for c in drain.step(now, True)]


def busiest_second(named: list[tuple[int, int]]) -> int:
    times = [t for t, _ in named]
    return max((bisect_left(times, at + 1_000) - n for n, at in enumerate(times)), default=0)


@pytest.mark.planner
def test_o25_ten_thousand_at_two_hundred_a_second_are_named_once_in_fifty_seconds() -> None:
    drain = draining(10_000)
    named: list[tuple[int, int]] = []
    for now in range(0, 52_000, STEP_MS):
        named += [(now, c) for c in drain.step(now, True)]
        if now % 1_000 == 0:  # who was named a second ago is gone
            here = set(range(1, 10_001)) - {c for t, c in named if t < now - 1_000}
            drain.here(here, now)
    assert sorted(c for _, c in named) == list(range(1, 10_001))
    assert busiest_second(named) <= 220
    assert 49_000 <= named[-1][0] <= 51_000
    assert max(Counter(t for t, _ in named).values()) <= 20, "a few at a time, not a second's at once"


@settings(max_examples=30, deadline=None)
@given(pace_per_s=st.integers(10, 500), gaps_ms=st.lists(st.integers(1, 3_000), min_size=5, max_size=30))
def test_however_late_the_steps_come_no_second_sees_more_than_the_pace_and_a_tenth(
    pace_per_s: int, gaps_ms: list[int]
) -> None:
    drain = draining(2_000, pace_per_s=pace_per_s)
    named, now = [], 0
    for gap_ms in gaps_ms:
        now += gap_ms
        named += [(now, c) for c in drain.step(now, True)]
    assert busiest_second(named) <= pace_per_s * 1.1 + 1


def test_a_slow_pace_names_one_now_and_then() -> None:
    assert len(run(draining(50, pace_per_s=1), 0, 20_001)) in (19, 20)


def test_nobody_is_named_before_the_settle_time_nor_all_at_once_after_it() -> None:
    drain = draining(1_000, settle_ms=5_000)
    assert run(drain, 0, 5_000) == []
    assert busiest_second(run(drain, 5_000, 8_000)) <= 220


def test_connections_are_named_without_regard_to_their_slots() -> None:
    conn_ids = [slot + 1024 * n for n in range(10) for slot in range(100)]
    drain = Drain()
    drain.recorded(order(), 0)
    drain.here(conn_ids, 0)
    first = [c % 1024 for _, c in run(drain, 0, 1_000)]
    assert len(set(first)) > 60
    assert first != sorted(first)


def test_who_stays_is_named_again_more_and_more_rarely() -> None:
    drain = draining(1, pace_per_s=100)
    times = [t for t, _ in run(drain, 0, 400_000)]
    gaps = [b - a for a, b in pairwise(times)]
    wanted = [AGAIN_MS, 2 * AGAIN_MS, 4 * AGAIN_MS, 8 * AGAIN_MS]
    assert [round(g, -3) for g in gaps[:4]] == wanted
    assert {round(g, -3) for g in gaps[4:]} == {AGAIN_MAX_MS}


def test_first_everybody_once() -> None:
    drain = draining(3_000, pace_per_s=200)
    named = [c for _, c in run(drain, 0, 14_900)]
    assert len(named) == len(set(named))


def test_who_left_is_not_named_and_a_newcomer_is() -> None:
    drain = draining(10, pace_per_s=10)
    first = [c for _, c in run(drain, 0, 501)]
    assert len(first) == 5
    drain.here([*range(4, 11), 77], 600)
    named = {c for _, c in run(drain, 600, 3_000)}
    assert named == {*range(4, 11), 77} - set(first)


def test_without_a_gateway_to_go_to_nobody_is_named_and_nothing_is_saved_up() -> None:
    drain = draining(1_000)
    assert [c for now in range(0, 5_000, STEP_MS) for c in drain.step(now, False)] == []
    assert busiest_second(run(drain, 5_000, 7_000)) <= 220
    assert drain.mode(20_000) is Mode.REFUSE


def test_who_could_not_be_named_is_tried_soon_and_others_take_the_turn() -> None:
    drain = draining(4, pace_per_s=10)
    (one,) = drain.step(100, True)
    drain.unsent([one], 100)
    named = run(drain, 150, 800)
    assert one not in [c for _, c in named]
    assert len(named) == 3
    assert [c for _, c in run(drain, 800, 100 + UNSENT_MS + 200)] == [one], "once, though it stood in the heap twice"


def test_the_deadline_cuts_and_names_nobody_any_more() -> None:
    drain = draining(1_000, deadline_ms=1_000)
    assert drain.mode(999) is Mode.REFUSE
    assert drain.mode(1_000) is Mode.CUT
    assert drain.step(1_000, True) == []


def test_of_one_drain_the_least_deadline_counts() -> None:
    drain = Drain()
    drain.recorded(order(deadline_ms=5_000), 0)
    drain.recorded(order(deadline_ms=9_000), 10)
    assert drain.order is not None
    assert drain.order.deadline_ms == 5_000
    drain.recorded(order(deadline_ms=3_000), 20)
    assert drain.mode(3_000) is Mode.CUT


def test_another_drain_has_its_own_deadline() -> None:
    drain = Drain()
    drain.recorded(order(9, deadline_ms=5_000), 0)
    drain.recorded(order(12, deadline_ms=9_000), 10)
    assert drain.order is not None
    assert (drain.order.id, drain.order.deadline_ms) == (12, 9_000)


def test_a_sigterm_and_the_record_are_one_drain_with_the_least_deadline() -> None:
    own = order(0, pace_per_s=50, deadline_ms=300_000)
    drain = Drain()
    drain.terminated(own, 0)
    assert drain.order == own
    drain.here([1, 2], 0)
    assert len(run(drain, 0, 1_000)) == 2
    drain.recorded(order(9, pace_per_s=200, deadline_ms=60_000), 1_000)
    assert drain.order == order(9, pace_per_s=200, deadline_ms=60_000)
    assert run(drain, 1_000, AGAIN_MS) == [], "who was named is not named anew"
    drain.recorded(order(9, deadline_ms=900_000), 2_000)
    drain.recorded(None, 3_000)
    assert drain.order == own, "nothing takes a SIGTERM back"


def test_a_cancel_serves_again_and_a_later_drain_begins_anew() -> None:
    drain = draining(10, settle_ms=1_000)
    run(drain, 0, 2_000)
    drain.recorded(None, 2_000)
    assert drain.mode(2_000) is Mode.SERVE
    assert drain.order is None
    drain.here([1, 2, 3], 2_500)
    assert run(drain, 2_500, 3_000) == []
    drain.recorded(order(20, settle_ms=1_000), 5_000)
    drain.here([1, 2, 3], 5_000)
    assert run(drain, 5_000, 6_000) == [], "its settle time counts from its own beginning"
    assert sorted(c for _, c in run(drain, 6_000, 7_000)) == [1, 2, 3]
