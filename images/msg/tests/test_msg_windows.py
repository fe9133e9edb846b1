"""When the members of large groups are told; a fake clock."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from plato_msg.core.windows import FORGET_MS, PULLS_PER_S, Notice, Windows

G = "g:town"


def test_one_message_to_a_quiet_group_is_told_soon() -> None:
    windows = Windows(10, 1_000, 500)
    windows.note(G, 7, 10_000, 5_000)
    assert windows.next_ms() == 5_200
    assert windows.take(5_199, 9) == []
    assert windows.take(5_200, 9) == [Notice(G, 7, 1_000)], "who is online is not known yet: all of them may be"
    windows.done(G, 50)
    windows.note(G, 8, 10_000, 90_000)
    assert windows.take(90_200, 9) == [Notice(G, 8, 200)]


def test_a_stream_costs_the_same_however_fast_it_runs() -> None:
    counts = []
    for every_ms in (100, 10, 1):
        windows, told = Windows(10, 1_000, 500), []
        for now_ms in range(30_000):
            if now_ms % every_ms == 0:
                windows.note(G, now_ms // every_ms + 1, 10_000, now_ms)
            for notice in windows.take(now_ms, 9):
                told.append(notice)
                windows.done(G, 2_000)
        assert [n.within_ms for n in told[-20:]] == [1_000] * 20, "it grew to its bound"
        counts.append(len(told))
    assert max(counts) <= 32


def test_no_more_pull_at_a_time_than_can() -> None:
    windows = Windows(10, 10_000, 500)
    windows.note(G, 1, 600, 0)
    windows.take(100, 9)
    windows.done(G, 3 * PULLS_PER_S)
    windows.note(G, 2, 600, 60_000)
    assert windows.take(60_012, 9) == [Notice(G, 2, 3_000)], "told soon, pulled slowly"
    windows.done(G, 3 * PULLS_PER_S)
    windows.note(G, 3, 600, 61_000)
    assert windows.next_ms() == 63_012, "the next one when those have pulled"


def test_nothing_is_told_twice_at_once_and_nothing_is_forgotten_that_waits() -> None:
    windows = Windows(10, 1_000, 500)
    windows.note(G, 1, 501, 0)
    assert len(windows.take(10, 9)) == 1
    windows.note(G, 2, 501, 11)
    assert windows.take(1_000, 9) == [], "the first one is still going out"
    assert windows.next_ms() is None
    windows.done(G, 5)
    assert [n.seq for n in windows.take(1_010, 9)] == [2]
    for n in range(1_000):
        windows.note(f"g:{n}", 1, 501, 2_000 + FORGET_MS)
    assert len(windows.take(4_000 + FORGET_MS, 2_000)) == 1_000
    windows.done(G, 5)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 300), st.booleans()), max_size=60))
def test_every_message_is_told_within_the_longest_window(steps: list[tuple[int, int, bool]]) -> None:
    windows = Windows(10, 400, 500)
    now_ms, seq = 0, dict.fromkeys(range(3), 0)
    told = dict.fromkeys(range(3), 0)
    waiting: dict[tuple[int, int], int] = {}

    def take() -> None:
        for notice in windows.take(now_ms, 9):
            group = int(notice.conversation_id)
            told[group] = max(told[group], notice.seq)
            windows.done(notice.conversation_id, 50)
        for (group, number), since_ms in list(waiting.items()):
            if number <= told[group]:
                del waiting[group, number]
            else:
                assert now_ms - since_ms <= 400

    for group, pause_ms, quiet in steps:
        for _ in range(pause_ms * (5 if quiet else 1)):
            now_ms += 1
            take()
        seq[group] += 1
        windows.note(str(group), seq[group], 5_000, now_ms)
        waiting[group, seq[group]] = now_ms
    for _ in range(401):
        now_ms += 1
        take()
    assert not waiting
