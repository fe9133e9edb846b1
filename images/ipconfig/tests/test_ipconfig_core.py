"""The small parts of the core, each by its rule: window, distance, limits, addresses, the order of an override."""

from __future__ import annotations

from ipaddress import ip_address
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ipconfig_harness import BERLIN, FRANKFURT, NEW_YORK, SYDNEY
from plato_ipconfig.core.address import caller, limit_key, networks, parsed
from plato_ipconfig.core.distance import AWAY_KM, REGION_KM, Spot, distance_km, great_circle_km, nearness
from plato_ipconfig.core.limits import Buckets
from plato_ipconfig.core.override import By, Override, kept, ordered
from plato_ipconfig.core.window import Window

few = settings(deadline=None, max_examples=50)

# ── the window ───────────────────────────────────────────────────────────────────────────────────────────────


@few
@given(
    st.lists(st.tuples(st.integers(0, 10**12), st.integers(0, 2_000)), min_size=1, max_size=40), st.integers(0, 6_000)
)
def test_the_mean_kept_by_four_sums_is_the_weighted_mean_of_the_last_five_seconds(
    steps: list[tuple[int, int]], wait: int
) -> None:
    window, now, seen = Window(), 10**12, []
    for value, passed in steps:
        now += passed
        window.add(value, now)
        seen.append((value, now))
        if value % 3 == 0:
            window.mean(now)
    now += wait
    weights = [(5_000 - (now - at), value) for value, at in seen if now - at < 5_000]
    mean = window.mean(now)
    if not weights:
        assert mean is None
    else:
        assert mean == pytest.approx(sum(w * v for w, v in weights) / sum(w for w, _ in weights), rel=1e-12, abs=1e-12)


def test_newer_samples_weigh_more_and_old_ones_nothing() -> None:
    window = Window()
    for second, value in enumerate([0, 0, 0, 0, 100]):
        window.add(value, second * 1_000)
    assert window.mean(4_000) == pytest.approx(100 * 5 / (5 + 4 + 3 + 2 + 1))
    window.add(100, 5_000)
    assert window.mean(5_000) == pytest.approx(100 * 9 / 15)
    assert window.mean(9_999) == pytest.approx(100)
    assert window.mean(10_000) is None


# ── distance ─────────────────────────────────────────────────────────────────────────────────────────────────


def test_known_ways_over_the_ground() -> None:
    assert great_circle_km(FRANKFURT, BERLIN) == pytest.approx(424, rel=0.02)
    assert great_circle_km(FRANKFURT, NEW_YORK) == pytest.approx(6_200, rel=0.02)
    assert great_circle_km(NEW_YORK, SYDNEY) == pytest.approx(15_990, rel=0.02)
    assert great_circle_km((0.0, 0.0), (0.0, 180.0)) == pytest.approx(20_015, rel=0.01)
    assert great_circle_km(SYDNEY, SYDNEY) == 0


def test_a_zone_is_nearest_then_its_region_then_the_map_and_an_unknown_caller_is_equally_far_from_all() -> None:
    here = Spot("a", "eu", FRANKFURT)
    assert distance_km(here, Spot("a", "eu", SYDNEY)) == 0
    assert distance_km(here, Spot("b", "eu", SYDNEY)) == REGION_KM
    assert distance_km(here, Spot("c", "us", BERLIN)) == pytest.approx(424, rel=0.02)
    assert distance_km(here, Spot("c")) == AWAY_KM
    assert distance_km(Spot(), Spot("a", "eu", FRANKFURT)) is None
    assert distance_km(Spot(region="eu"), Spot("", "eu")) == REGION_KM
    assert distance_km(Spot(map=BERLIN), Spot("", "")) == AWAY_KM, "no empty zone is anybody's"


@few
@given(st.floats(0, 20_000), st.floats(0, 20_000))
def test_farther_is_never_worth_more(a: float, b: float) -> None:
    assert (nearness(a) >= nearness(b)) == (a <= b) or a == pytest.approx(b)
    assert 0 < nearness(a) <= nearness(None) == 1


# ── limits ───────────────────────────────────────────────────────────────────────────────────────────────────


@few
@given(st.integers(1, 50), st.integers(1, 20), st.lists(st.integers(0, 400), max_size=200))
def test_never_more_than_the_burst_and_the_pace_and_who_waits_as_told_is_let_in(
    per_s: int, burst: int, steps: list[int]
) -> None:
    buckets, now = Buckets(per_s, burst), 0
    for taken, passed in enumerate(steps, 1):
        now += passed
        wait = buckets.take("a", now)
        if wait:
            now += wait
            assert buckets.take("a", now) == 0
        assert taken <= burst + now * per_s / 1000 + 1e-6


def test_the_pace_is_given_in_full_to_who_asks_all_the_time() -> None:
    buckets = Buckets(10, 5)
    assert sum(buckets.take("a", now) == 0 for now in range(0, 60_001, 10)) == 5 + 600


def test_one_key_takes_nothing_from_another_and_what_is_full_again_is_forgotten() -> None:
    buckets = Buckets(1, 2)
    for key in range(1_000):
        assert buckets.take(key, 0) == 0
    assert [buckets.take(7, 0), buckets.take(7, 0) > 0] == [0, True]
    assert len(buckets) == 1_000
    buckets.take("later", 2_000)
    assert buckets.take(7, 2_000) == 0, "a round later it is remembered, and rested"
    buckets.take("much later", 10_000)
    assert len(buckets) == 1


def test_keys_without_end_take_no_memory_without_end() -> None:
    buckets = Buckets(1, 100, most_keys=50)
    for key in range(10_000):
        assert buckets.take(key, 0) == 0
        assert len(buckets) <= 50


# ── addresses ────────────────────────────────────────────────────────────────────────────────────────────────

TRUSTED = networks(["10.0.0.0/8", "2001:db8:f::1"])


@pytest.mark.parametrize(
    ("peer", "forwarded", "found"),
    [
        ("203.0.113.9", ["1.2.3.4"], "203.0.113.9"),  # a stranger names whom he likes
        ("10.0.0.1", [], "10.0.0.1"),
        ("10.0.0.1", ["203.0.113.9"], "203.0.113.9"),
        ("10.0.0.1", ["6.6.6.6, 203.0.113.9"], "203.0.113.9"),  # what the stranger said to the first proxy
        ("10.0.0.1", ["6.6.6.6", "203.0.113.9, 10.0.0.2"], "203.0.113.9"),  # two headers, two proxies
        ("10.0.0.1", ["10.0.0.3, 10.0.0.2"], "10.0.0.3"),
        ("10.0.0.1", ["nonsense"], "10.0.0.1"),
        ("10.0.0.1", ["6.6.6.6, nonsense, 10.0.0.2"], "10.0.0.2"),
        ("2001:db8:f::1", ["2001:db8:1::7"], "2001:db8:1::7"),
        ("::ffff:10.0.0.1", ["::ffff:203.0.113.9"], "203.0.113.9"),
        ("fe80::1%eth0", [], "fe80::1"),
        (None, ["1.2.3.4"], None),
        ("a socket", [], None),
    ],
)
def test_only_who_is_trusted_says_for_whom_he_speaks(peer: str | None, forwarded: list[str], found: str | None) -> None:
    assert caller(peer, forwarded, TRUSTED) == (None if found is None else ip_address(found))


def test_a_long_chain_is_looked_at_only_so_far() -> None:
    assert caller("10.0.0.1", [", ".join(["9.9.9.9", *["10.0.0.2"] * 100_000])], TRUSTED) == ip_address("10.0.0.2")


def test_a_house_of_ipv6_is_one_caller() -> None:
    keys = {limit_key(parsed(text)) for text in ("2001:db8:1:2::1", "2001:db8:1:2:ffff::9")}
    assert keys == {"2001:db8:1:2::/64"}
    assert limit_key(parsed("203.0.113.9")) != limit_key(parsed("203.0.113.8"))
    assert limit_key(None) == limit_key(parsed("no address"))


# ── overrides ────────────────────────────────────────────────────────────────────────────────────────────────


def test_an_order_becomes_an_override_that_ends_when_it_was_told() -> None:
    found = ordered({"never": ["a", "a", "b"], "for_s": 60, "reason": "disk"}, 1_000_000)
    assert found == Override(By.LOAD, (), ("a", "b"), "disk", 1_060_000)
    assert (found.stands(1_059_999), found.stands(1_060_000)) == (True, False)
    assert kept(found.shown()) == found
    assert ordered({"by": "chance"}, 5).stands(10**15)


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        ([], "JSON object"),
        ({}, "change nothing"),
        ({"by": "load"}, "change nothing"),
        ({"by": "moon"}, "load, distance, chance"),
        ({"by": ["load"]}, "load, distance, chance"),
        ({"never": "edge-1"}, "never: must be a list"),
        ({"first": [1]}, "first: must be a list"),
        ({"nevr": ["a"]}, "nevr is no part"),
        ({"never": ["a"], "for_s": True}, "for_s"),
        ({"never": ["a"], "for_s": -1}, "for_s"),
        ({"never": ["a"], "reason": "x" * 501}, "reason"),
    ],
)
def test_a_wrong_order_is_refused_in_words(raw: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        ordered(raw, 0)


def test_a_window_holds_one_span_though_nobody_asks_for_its_mean() -> None:
    window = Window(5_000)
    for second in range(10_000):
        window.add(second, 1_000 * second)
    assert len(window._samples) == 5
    assert window.mean(9_999_000) == pytest.approx((9_999 * 5 + 9_998 * 4 + 9_997 * 3 + 9_996 * 2 + 9_995) / 15)
