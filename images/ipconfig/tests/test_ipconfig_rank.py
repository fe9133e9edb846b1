"""The ranking: active, then static, blended when little is left, silent and full ones last, crowds spread."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from plato_ipconfig.core.balance import Filled, imbalance, plan
from plato_ipconfig.core.override import By, Override
from plato_ipconfig.core.rank import LOW, Board, Group, Load, Place, chosen

few = settings(deadline=None, max_examples=50)

SILENT_MS = 3_000
GB = 1_000_000_000

names = st.text("abcdef", min_size=1, max_size=4)
loads = st.builds(
    lambda serving, connections, left, gb: Load(serving, connections, left, gb, GB if gb is not None else 0),
    st.booleans(),
    st.integers(0, 100),
    st.integers(0, 100),
    st.none() | st.integers(0, GB),
)


def no_chance() -> float:
    return 0.0


def board_of(samples: dict[str, Load]) -> Board:
    board = Board(SILENT_MS)
    for name, load in samples.items():
        board.observe(name, load, 0)
    return board


def ranked(
    board: Board, *names: str, now: int = 0, km: dict[str, float | None] | None = None, by: By = By.LOAD
) -> list[Place]:
    return board.ranked(dict.fromkeys(names, False), now, no_chance, km, by)


def order(samples: dict[str, Load], km: dict[str, float | None] | None = None) -> list[str]:
    return [place.name for place in ranked(board_of(samples), *samples, km=km)]


def load(left: int = 1_000, gb: float | None = None, *, of: int = 10_000, gb_of: float = 1.0) -> Load:
    """A gateway with so many connections left of `of`, and so many GB/s of `gb_of`."""
    return Load(True, of - left, left, None if gb is None else round(gb * GB), 0 if gb is None else round(gb_of * GB))


def test_more_bandwidth_left_stands_first_in_steps_of_a_hundredth_of_a_gigabyte_then_more_connections_left() -> None:
    assert order({"a": load(9_000, 0.50), "b": load(2_000, 0.52)}) == ["b", "a"]
    # 4 MB/s more are within one step of rounding: connections decide.
    assert order({"a": load(9_000, 0.501), "b": load(2_000, 0.504)}) == ["a", "b"]
    assert order({"a": load(2_000), "b": load(9_000)}) == ["b", "a"], "without limits of bandwidth, connections alone"


def test_a_gateway_without_a_limit_counts_as_the_one_with_most_bandwidth_left() -> None:
    places = ranked(board_of({"a": load(5_000), "b": load(4_000, 0.7), "c": load(9_000, 0.3)}), "a", "b", "c")
    assert [(p.name, p.active, p.gb_left) for p in places] == [("a", 0.7, None), ("b", 0.7, 0.7), ("c", 0.3, 0.3)]


def test_who_has_little_left_of_either_stands_behind_who_has_not_and_by_the_blend_of_both() -> None:
    found = ranked(
        board_of(
            {
                "few connections": load(50, 0.99),
                "little bandwidth": load(9_000, 0.09),
                "both": load(900, 0.09),
                "plenty": load(1_000, 0.1),
            }
        ),
        "few connections",
        "little bandwidth",
        "both",
        "plenty",
    )
    assert [(p.name, p.group) for p in found] == [
        ("plenty", Group.ROOM),
        ("little bandwidth", Group.LOW),
        ("both", Group.LOW),
        ("few connections", Group.LOW),
    ]
    assert found[1].blend == pytest.approx(2 * 0.9 * 0.09 / 0.99)


def test_nothing_left_of_either_ranks_last() -> None:
    samples = {"no bandwidth": load(9_000, 0.0), "no connections": load(0, 0.9), "a little": load(1, 0.01)}
    found = ranked(board_of(samples), *samples, "silent")
    assert [p.name for p in found[:2]] == ["a little", "silent"]
    assert {p.group for p in found[2:]} == {Group.FULL}


def test_near_stands_before_far_until_it_has_so_much_less_left() -> None:
    km: dict[str, float | None] = {"near": 0.0, "far": 1_000.0}
    assert order({"near": load(5_100), "far": load(10_000)}, km) == ["near", "far"]
    assert order({"near": load(4_900), "far": load(10_000)}, km) == ["far", "near"]
    assert order({"near": load(9_000, 0.36), "far": load(9_000, 0.7)}, km) == ["near", "far"]
    assert order({"near": load(9_000, 0.30), "far": load(9_000, 0.7)}, km) == ["far", "near"]


@few
@given(loads, loads, st.floats(0, 20_000), st.integers(1, GB))
def test_more_left_of_anything_or_nearer_is_never_worse(mine: Load, other: Load, km: float, more: int) -> None:
    """Whoever stands before the other still does with more left, and when it is nearer."""
    assume(mine.serving)
    better = [
        (replace(mine, connections_left=mine.connections_left + 1, connections=max(0, mine.connections - 1)), km),
        (mine, km / 2),
    ]
    if mine.bytes_left is not None:
        better.append((replace(mine, bytes_left=min(GB, mine.bytes_left + more)), km))

    def before(load: Load, km: float) -> bool:
        return order({"mine": load, "other": other}, {"mine": km, "other": 500.0})[0] == "mine"

    if before(mine, km):
        for load, distance in better:
            assert before(load, distance), (load, distance)


@few
@given(st.dictionaries(names, loads, max_size=8), st.sets(names, max_size=8), st.data())
def test_every_gateway_is_ranked_once_in_the_order_of_the_groups(
    samples: dict[str, Load], unknown: set[str], data: st.DataObject
) -> None:
    board = board_of(samples)
    known = sorted({*samples, *unknown})
    draining = {name: data.draw(st.booleans()) for name in known}
    places = board.ranked(draining, 10, no_chance)
    assert sorted(place.name for place in places) == known
    groups = [place.group for place in places]
    assert groups == sorted(groups)
    for place in places:
        found = samples.get(place.name)
        if draining[place.name] or (found is not None and not found.serving):
            assert place.group is Group.CLOSING
        elif found is None:
            assert place.group is Group.SILENT
        else:
            shares = [found.connections_left / found.connections_max if found.connections_max else 0]
            shares += [found.bytes_left / GB] if found.bytes_left is not None else []
            wanted = Group.FULL if min(shares) <= 0 else Group.LOW if min(shares) < LOW else Group.ROOM
            assert place.group is wanted
            assert place.room == found.connections_left


# ── crowds ───────────────────────────────────────────────────────────────────────────────────────────────────


@few
@given(st.lists(st.integers(0, 40), min_size=1, max_size=6), st.integers(0, 120))
def test_a_crowd_between_two_samples_leaves_the_connections_even_and_nobody_beyond_full(
    rooms: list[int], crowd: int
) -> None:
    board = board_of({str(i): Load(True, 40 - room, room) for i, room in enumerate(rooms)})
    names = [str(i) for i in range(len(rooms))]
    sent: Counter[str] = Counter()
    for _ in range(min(crowd, sum(rooms))):
        best = ranked(board, *names)[0]
        assert best.group <= Group.LOW
        board.sent_to(best.name)
        sent[best.name] += 1
    left = {name: rooms[int(name)] - sent[name] for name in names}
    assert min(left.values()) >= 0, "somebody was sent to a full gateway"
    touched = [left[name] for name in sent]
    assert not touched or max(left.values()) - min(touched) <= 1


def test_clients_who_were_sent_and_come_leave_the_mean_where_it_is() -> None:
    """A mean over five seconds alone would see them only by and by, and send the next ones there too."""
    board = Board(SILENT_MS)
    here, held = 0, 1_000
    for second in range(20):
        board.observe("a", Load(True, here, held - here), second * 1_000)
        assert ranked(board, "a", now=second * 1_000)[0].static == held - here
        for _ in range(30):
            board.sent_to("a")
            here += 1
        assert ranked(board, "a", now=second * 1_000)[0].static == held - here


def test_clients_who_were_sent_and_never_come_count_for_five_seconds_at_most() -> None:
    board = board_of({"a": Load(True, 0, 100)})
    for _ in range(100):
        board.sent_to("a")
    assert ranked(board, "a")[0].group is Group.FULL
    for second in range(1, 6):
        board.observe("a", Load(True, 0, 100), second * 1_000)
    assert ranked(board, "a", now=5_000)[0].room == 100


def test_a_burst_of_one_second_does_not_turn_the_order_but_five_do() -> None:
    board = Board(SILENT_MS)
    for second in range(10):
        board.observe("a", load(9_000, 0.9), second * 1_000)
        board.observe("b", load(9_000, 0.6), second * 1_000)
    board.observe("a", load(9_000, 0.3), 10_000)
    board.observe("b", load(9_000, 0.6), 10_000)
    assert ranked(board, "a", "b", now=10_000)[0].name == "a"
    for second in range(11, 15):
        board.observe("a", load(9_000, 0.3), second * 1_000)
        board.observe("b", load(9_000, 0.6), second * 1_000)
    assert ranked(board, "a", "b", now=14_000)[0].name == "b"


# ── silence, unknown, override ───────────────────────────────────────────────────────────────────────────────


def test_a_gateway_is_silent_one_moment_after_its_time_and_back_with_its_next_word() -> None:
    board = Board(SILENT_MS)
    board.observe("a", Load(True, 0, 5), 1_000)
    assert ranked(board, "a", now=1_000 + SILENT_MS)[0].group is Group.ROOM
    assert ranked(board, "a", now=1_001 + SILENT_MS)[0].group is Group.SILENT
    assert board.heard(1_001 + SILENT_MS) == {}
    board.observe("a", Load(True, 0, 5), 9_000)
    assert ranked(board, "a", now=9_000)[0].group is Group.ROOM


def test_what_the_topology_no_longer_names_is_forgotten_and_so_is_another_process_of_the_name() -> None:
    board = board_of({"a": Load(True, 0, 5), "b": Load(True, 0, 5)})
    board.keep(["b"])
    assert [p.age_ms for p in ranked(board, "a", "b")] == [0, None]
    for _ in range(3):
        board.sent_to("b")
    board.observe("b", Load(True, 0, 50), 0, uid="another")
    assert ranked(board, "b")[0].room == 50


def test_what_a_gateway_said_before_it_served_does_not_weigh() -> None:
    """It had nothing left then: a mean with that would send new clients past the gateway that came for them."""
    board = Board(SILENT_MS)
    board.observe("old", Load(True, 10, 90), 0)
    board.observe("new", Load(False, 0, 0), 0)
    board.observe("old", Load(True, 10, 90), 1_000)
    board.observe("new", Load(True, 0, 100), 1_000)
    assert [(p.name, p.room) for p in ranked(board, "old", "new", now=1_000)] == [("new", 100), ("old", 90)]


def test_stale_inputs_leave_distance_alone_and_no_inputs_chance_alone() -> None:
    board = board_of({"a": load(9_000), "b": load(1_000), "c": load(5_000)})
    km: dict[str, float | None] = {"a": 900.0, "b": 5.0, "c": 40.0}
    assert [p.name for p in ranked(board, "a", "b", "c", now=60_000, km=km)] == ["b", "c", "a"]
    draw: Callable[[], float] = random.Random(7).random
    first = Counter(Board(SILENT_MS).ranked(dict.fromkeys("abc", False), 0, draw)[0].name for _ in range(300))
    assert set(first) == {"a", "b", "c"}
    assert min(first.values()) > 60


def test_a_silent_one_is_left_out_while_somebody_has_room() -> None:
    board = board_of({"a": load(9_000), "full": load(0)})
    places = ranked(board, "a", "full", "silent")
    assert [p.name for p in chosen(places, {"a", "full", "silent"}, None)] == ["a", "full"]
    assert [p.name for p in chosen(places, {"full", "silent"}, None)] == ["silent", "full"]


def test_an_override_puts_first_leaves_out_and_orders_otherwise_but_never_empties_the_list() -> None:
    board = board_of({"a": load(9_000), "b": load(5_000), "c": load(0)})
    serving = {"a", "b", "c", "silent"}
    places = ranked(board, *sorted(serving))

    def listed(override: Override, places: list[Place] = places) -> list[str]:
        return [p.name for p in chosen(places, serving, override)]

    assert listed(Override(first=("c", "b", "not there"))) == ["c", "b", "a"]
    assert listed(Override(never=("a",))) == ["b", "c"]
    assert listed(Override(first=("a",), never=("a",))) == ["b", "c"]
    assert listed(Override(never=("a", "b", "c", "silent"))) == ["a", "b", "c"]
    km: dict[str, float | None] = {"a": 900.0, "b": 500.0, "c": 100.0, "silent": 1.0}
    far = ranked(board, *sorted(serving), km=km, by=By.DISTANCE)
    assert listed(Override(By.DISTANCE), far) == ["silent", "c", "b", "a"]
    draw = random.Random(3).random
    drawn = {
        tuple(p.name for p in board.ranked(dict.fromkeys("abc", False), 0, draw, by=By.CHANCE)) for _ in range(200)
    }
    assert len(drawn) == 6


# ── balance ──────────────────────────────────────────────────────────────────────────────────────────────────

filled = st.builds(
    lambda most, part, zone: Filled(int(most * part), most, zone),
    st.integers(1, 5_000),
    st.floats(0, 1),
    st.sampled_from("xy"),
)


def test_imbalance_is_the_fullest_share_over_the_whole() -> None:
    assert imbalance({}) == imbalance({"a": Filled(0, 10)}) == 1
    assert imbalance({"a": Filled(50, 100), "b": Filled(500, 1_000)}) == 1
    assert imbalance({"a": Filled(1_000, 2_000), "b": Filled(0, 2_000)}) == 2
    assert imbalance({"a": Filled(10, 10), "b": Filled(100, 1_000)}) == pytest.approx(1010 / 110)


@few
@given(st.dictionaries(names, filled, min_size=1, max_size=8))
def test_a_plan_evens_each_zone_and_nobody_is_filled_above_its_fair_part(gateways: dict[str, Filled]) -> None:
    after = {name: g.connections for name, g in gateways.items()}
    for shift in plan(gateways, least=1):
        assert gateways[shift.source].zone == gateways[shift.target].zone
        after[shift.source] -= shift.clients
        after[shift.target] += shift.clients
    for name, g in gateways.items():
        zone = [n for n in gateways if gateways[n].zone == g.zone]
        fair = sum(gateways[n].connections for n in zone) * g.most / sum(gateways[n].most for n in zone)
        assert 0 <= after[name] <= g.most
        assert abs(after[name] - fair) <= len(zone), "whole clients: what rounding leaves"
    assert plan({name: replace(g, connections=after[name]) for name, g in gateways.items()}, least=10) == []


def test_m15_a_fourth_gateway_takes_its_part_of_the_new_and_a_rebalance_evens_the_rest() -> None:
    """3 → 4 gateways with 3,000 idle connections, then 1,000 new ones: the new one takes ≥ 25 % of them."""
    board, here = Board(SILENT_MS), {"a": 1_000, "b": 1_000, "c": 1_000, "new": 0}
    before, now = dict(here), 0
    for client in range(1_000):
        if client % 100 == 0:  # a second: new figures, after everybody who was sent has come
            now += 1_000
            for name, count in here.items():
                board.observe(name, Load(True, count, 50_000 - count), now)
        best = board.ranked(dict.fromkeys(here, False), now, no_chance)[0].name
        board.sent_to(best)
        here[best] += 1
    assert (here["new"] - before["new"]) / 1_000 >= 0.25
    assert sum(here.values()) == 4_000
    shifts = plan({name: Filled(count, 50_000) for name, count in here.items()})
    for shift in shifts:
        here[shift.source] -= shift.clients
        here[shift.target] += shift.clients
    assert max(here.values()) - min(here.values()) <= 10
