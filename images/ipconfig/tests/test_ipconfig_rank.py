"""The ranking: most room first, silent ones last, closing ones behind them, crowds spread."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable

from hypothesis import given
from hypothesis import strategies as st
from plato_ipconfig.core.rank import Board, Group, Load

SILENT_MS = 3_000

names = st.text("abcdef", min_size=1, max_size=4)
loads = st.builds(Load, st.booleans(), st.integers(0, 10), st.integers(0, 10))


def no_chance() -> float:
    return 0.0


def board_of(samples: dict[str, tuple[Load, int]]) -> Board:
    board = Board(SILENT_MS)
    for name, (load, at_ms) in samples.items():
        board.observe(name, load, at_ms)
    return board


@given(
    st.dictionaries(names, st.tuples(loads, st.integers(0, 10_000)), max_size=8), st.sets(names, max_size=8), st.data()
)
def test_every_gateway_is_ranked_once_in_the_order_of_the_rules(
    samples: dict[str, tuple[Load, int]], unknown: set[str], data: st.DataObject
) -> None:
    board = board_of(samples)
    known = sorted({*samples, *unknown})
    draining = {name: data.draw(st.booleans()) for name in known}
    ranked = board.ranked(draining, 10_000, no_chance)
    assert sorted(place.name for place in ranked) == known
    keys = [(place.group, -place.room) for place in ranked]
    assert keys == sorted(keys)
    for place in ranked:
        sample = samples.get(place.name)
        fresh = sample is not None and 10_000 - sample[1] <= SILENT_MS
        if draining[place.name]:
            assert place.group is Group.CLOSING
        elif not fresh:
            assert (place.group, place.room) == (Group.SILENT, 0)
        else:
            assert sample is not None
            load = sample[0]
            wanted = Group.ROOM if load.connections_left else Group.FULL
            assert place.group is (wanted if load.serving else Group.CLOSING)
            assert place.room == load.connections_left


@given(st.lists(st.integers(0, 20), min_size=1, max_size=6), st.integers(0, 60))
def test_a_crowd_between_two_samples_leaves_the_room_even(rooms: list[int], crowd: int) -> None:
    board = board_of({str(i): (Load(True, 0, room), 0) for i, room in enumerate(rooms)})
    draining = {str(i): False for i in range(len(rooms))}
    sent: Counter[str] = Counter()
    for _ in range(min(crowd, sum(rooms))):
        best = board.ranked(draining, 0, no_chance)[0]
        assert best.group is Group.ROOM
        board.sent_to(best.name)
        sent[best.name] += 1
    left = {name: rooms[int(name)] - sent[name] for name in draining}
    assert min(left.values()) >= 0, "somebody was sent to a full gateway"
    touched = [left[name] for name in sent]
    assert not touched or max(left.values()) - min(touched) <= 1


def test_a_new_sample_takes_the_place_of_the_guess() -> None:
    board = board_of({"a": (Load(True, 0, 5), 0)})
    for _ in range(3):
        board.sent_to("a")
    assert board.place("a", 0).room == 2
    board.observe("a", Load(True, 1, 4), 100)
    assert board.place("a", 100).room == 4


def test_a_gateway_is_silent_one_moment_after_its_time_and_back_with_its_next_word() -> None:
    board = board_of({"a": (Load(True, 0, 5), 1_000)})
    assert board.place("a", 1_000 + SILENT_MS).group is Group.ROOM
    assert board.place("a", 1_001 + SILENT_MS).group is Group.SILENT
    board.observe("a", Load(True, 0, 5), 9_000)
    assert board.place("a", 9_000).group is Group.ROOM


def test_what_the_topology_no_longer_names_is_forgotten() -> None:
    board = board_of({"a": (Load(True, 0, 5), 0), "b": (Load(True, 0, 5), 0)})
    board.keep(["b"])
    assert board.place("a", 0).age_ms is None
    assert board.place("b", 0).age_ms == 0


def test_nothing_known_gives_every_order_by_chance() -> None:
    board = Board(SILENT_MS)
    draw: Callable[[], float] = random.Random(7).random
    first = Counter(board.ranked({"a": False, "b": False, "c": False}, 0, draw)[0].name for _ in range(300))
    assert set(first) == {"a", "b", "c"}
    assert min(first.values()) > 60
