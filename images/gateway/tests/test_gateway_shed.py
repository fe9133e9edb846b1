"""Clients that are asked to go to emptier gateways: which ones, where to, at which pace; and what stops it."""

from __future__ import annotations

import json
import time
from array import array
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plato.runtime.settings import Settings
from plato_gateway.core import lanes
from plato_gateway.core.shed import Part, Shed
from plato_gateway.shed import GatewayShed, parse

MakeSettings = Callable[..., Settings]


@settings(deadline=None, max_examples=60)
@given(
    st.sets(st.integers(1, 2**63), max_size=60),
    st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 30)), max_size=3, unique_by=lambda part: part[0]),
    st.integers(1, 500),
    st.lists(st.integers(0, 500), max_size=400),
)
def test_each_client_is_named_once_so_many_as_ordered_and_never_above_the_pace(
    here: set[int], parts: list[tuple[str, int]], pace_per_s: int, steps: list[int]
) -> None:
    shed = Shed()
    shed.order([Part(*part) for part in parts], pace_per_s, 0)
    ordered = sum(clients for _, clients in parts)
    assert (shed.left, shed.waits) == (ordered, ordered > 0)
    shed.here(here)
    assert shed.left == min(ordered, len(here))
    named: list[tuple[int, str]] = []
    now, times = 0, []
    for passed in [*steps, *[1_000] * 70]:
        now += passed
        found = shed.step(now)
        named += found
        times += [now] * len(found)
    assert len(named) == len({conn_id for conn_id, _ in named})
    assert {conn_id for conn_id, _ in named} <= here
    for i, at in enumerate(times):
        within = sum(at <= t < at + 1_000 for t in times[i:])
        assert within <= pace_per_s * 1.1 + 1
    if now >= 1_000 * 70 and pace_per_s >= 60:
        sent = Counter(target for _, target in named)
        assert all(sent[target] <= clients for target, clients in parts)
        assert sum(sent.values()) == min(ordered, len(here))


def test_targets_take_turns_and_what_could_not_be_named_keeps_its_place() -> None:
    shed = Shed()
    shed.order([Part("a", 2), Part("b", 3), Part("c", 0)], 1_000, 0)
    shed.here(range(100, 200))
    first = shed.step(10)
    assert [target for _, target in first] == ["a", "b", "a", "b", "b"]
    shed.unsent(first[2:])
    assert shed.step(10) == first[2:]
    assert shed.left == 0


def test_a_new_order_takes_the_place_of_the_one_that_runs() -> None:
    shed = Shed()
    shed.order([Part("a", 50)], 10, 0)
    shed.here(range(1, 100))
    shed.order([Part("b", 1)], 10, 0)
    shed.here(range(1, 100))
    assert [target for _, target in shed.step(60_000)] == ["b"]
    shed.order([Part("b", 5)], 10, 0)
    shed.order((), 10, 0)
    assert shed.left == 0


class Lane:
    boot = 1

    def __init__(self, index: int) -> None:
        self.index = index


class Stream:
    def __init__(self, group: int) -> None:
        self.group = group
        self.takes = True
        self.named: list[tuple[int, tuple[str, ...]]] = []

    def shed(self, conn_ids: list[int], to: tuple[str, ...]) -> bool:
        if self.takes:
            self.named += [(conn_id, to) for conn_id in conn_ids]
        return self.takes


class Rig:
    """A GatewayShed between fakes: slots below 512 are shard 0's."""

    def __init__(self, settings: Settings) -> None:
        self.lanes = {0: Lane(0), 1: Lane(1)}
        self.streams = {"s0": Stream(0), "s1": Stream(1)}
        self.asked = 0
        self.why = ""
        self.shed = GatewayShed(
            settings, self.lanes, self.streams, lambda slot: slot // 512, self._ask, lambda: self.why
        )

    def _ask(self) -> None:
        self.asked += 1

    def held(self, index: int, *conn_ids: int) -> None:
        self.shed.held(self.lanes[index], lanes.Held(0, 0, array("Q", conn_ids)))

    @property
    def named(self) -> list[int]:
        return sorted(conn_id for stream in self.streams.values() for conn_id, _ in stream.named)

    def steps(self, done: Callable[[], Any]) -> None:
        end_s = time.monotonic() + 10
        while not done():
            assert time.monotonic() < end_s
            self.shed.step()
            time.sleep(0.001)


def test_it_waits_for_every_worker_then_names_each_client_to_its_own_shard(make_settings: MakeSettings) -> None:
    rig = Rig(make_settings())
    rig.held(0, 99)  # nobody asked: an answer to a drain
    rig.shed.order([Part("edge-1", 3), Part("edge-0", 100)], 10_000)
    assert rig.asked == 1
    rig.held(0, 1, 513)
    for _ in range(3):
        rig.shed.step()
    assert rig.named == [], "the other worker has not said who is there"
    rig.held(1, 2)
    rig.steps(lambda: len(rig.named) == 3)
    assert [conn_id for conn_id, _ in rig.streams["s1"].named] == [513]
    assert {to for stream in rig.streams.values() for _, to in stream.named} == {("edge-1",)}, "nobody to itself"


def test_a_shard_that_takes_nothing_now_is_named_them_later(make_settings: MakeSettings) -> None:
    rig = Rig(make_settings())
    rig.streams["s0"].takes = False
    rig.shed.order([Part("edge-1", 2)], 10_000)
    rig.held(0, 1, 513)
    rig.held(1)
    rig.steps(lambda: rig.named == [513])
    rig.streams["s0"].takes = True
    rig.steps(lambda: rig.named == [1, 513])


def test_a_drain_ends_it(make_settings: MakeSettings) -> None:
    rig = Rig(make_settings())
    rig.shed.order([Part("edge-1", 2)], 1)
    rig.held(0, 1, 2)
    rig.held(1)
    rig.why = "draining"
    for _ in range(5):
        rig.shed.step()
    rig.why = ""
    for _ in range(5):
        rig.shed.step()
    assert rig.named == []


@pytest.mark.parametrize(
    "body",
    [
        b"", b"[]", b"{}", b'{"shifts": 1}', b'{"shifts": [1]}', b'{"shifts": [{"to": 1, "clients": 1}]}',
        b'{"shifts": [{"to": "a", "clients": -1}]}', b'{"shifts": [{"to": "a", "clients": true}]}',
        b'{"shifts": [], "pace_per_s": 10001}', b'{"shifts": [], "pace_per_s": "fast"}',
    ],
)  # fmt: skip
def test_a_body_that_is_no_order_is_refused(body: bytes) -> None:
    with pytest.raises(ValueError, match=r"must be|a shift is"):
        parse(body, 200)


def test_an_order_without_a_pace_has_the_drains() -> None:
    shifts = [{"to": "edge-1", "clients": 7}]
    assert parse(json.dumps({"shifts": shifts}).encode(), 200) == ([Part("edge-1", 7)], 200)
    assert parse(json.dumps({"shifts": shifts, "pace_per_s": 9}).encode(), 200)[1] == 9
