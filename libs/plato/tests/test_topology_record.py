"""The topology record: read back as written, and refused in words."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from plato.topology.record import (
    Gateway,
    Msg,
    Shard,
    SlotRange,
    Topology,
    TopologyError,
    dumps,
    even_ranges,
    loads,
    next_epoch,
    with_process,
)

names = st.text(max_size=10)
numbers = st.integers(0, 1 << 50)


@st.composite
def topologies(draw: st.DrawFn) -> Topology:
    cuts = sorted(draw(st.sets(st.integers(1, 1023), max_size=5)))
    edges = [0, *cuts, 1024]
    slots = tuple(SlotRange(a, b - 1, draw(names), draw(numbers)) for a, b in pairwise(edges))
    worker_ids = draw(st.lists(st.integers(0, 1023), unique=True, max_size=6))
    cut = draw(st.integers(0, len(worker_ids)))
    gateways = {
        f"g{w}": Gateway(
            uid=draw(names), worker_id=w, workers=draw(numbers), homes=tuple(draw(st.lists(names, max_size=3))),
            ip=draw(names), tcp=draw(numbers), ws=draw(numbers), admin=draw(names), state=draw(names), zone=draw(names),
        )
        for w in worker_ids[:cut]
    }  # fmt: skip
    return Topology(
        cluster_uid=draw(names),
        epoch=draw(numbers),
        slots=slots,
        shards=draw(st.dictionaries(names, st.builds(Shard, names, names), max_size=3)),
        gateways=gateways,
        msgs={f"m{w}": Msg(draw(names), w, draw(names)) for w in worker_ids[cut:]},
    )


def gateway(worker_id: int) -> Gateway:
    return Gateway("u", worker_id, 2, ("plato-s0",), "127.0.0.1", 8900, 8901, "127.0.0.1:8909")


BASE = Topology("c", 1, even_ranges(["plato-s0", "plato-s1"], 1))


@given(topology=topologies())
def test_what_is_written_is_read(topology: Topology) -> None:
    assert loads(dumps(topology)) == topology


@given(topology=topologies())
def test_every_slot_has_one_owner(topology: Topology) -> None:
    for r in topology.slots:
        assert all(topology.owner(slot) == r for slot in (r.first, r.last))
    shards = {r.shard for r in topology.slots}
    owned = [slot for shard in shards for slot in topology.slots_of(shard)]
    assert sorted(owned) == list(range(1024))
    assert topology.slots_of("nobody at all") == {}


@pytest.mark.parametrize("count", [1, 2, 3, 16, 1024])
def test_even_ranges_are_even(count: int) -> None:
    ranges = even_ranges([f"s{i}" for i in range(count)], 7)
    sizes = [r.last - r.first + 1 for r in ranges]
    assert sum(sizes) == 1024
    assert max(sizes) - min(sizes) <= 1
    assert {r.epoch for r in ranges} == {7}
    Topology("c", 1, ranges)


def test_a_topology_needs_a_shard() -> None:
    with pytest.raises(TopologyError, match="at least one shard"):
        even_ranges([], 1)


@pytest.mark.parametrize(
    ("slots", "words"),
    [
        ((SlotRange(0, 1022, "a", 1),), "slot 1023 has no owner"),
        ((SlotRange(0, 600, "a", 1), SlotRange(600, 1023, "b", 1)), "slot 600 has two owners"),
        ((SlotRange(0, 1024, "a", 1),), "0-1024 is outside"),
        ((SlotRange(-1, 1023, "a", 1),), "-1-1023 is outside"),
        ((SlotRange(5, 4, "a", 1),), "5-4 is outside"),
        ((), "slot 0 has no owner"),
    ],
)
def test_slots_have_exactly_one_owner(slots: tuple[SlotRange, ...], words: str) -> None:
    with pytest.raises(TopologyError, match=words):
        Topology("c", 1, slots)


def test_a_worker_id_belongs_to_one_process() -> None:
    with pytest.raises(TopologyError, match="worker_id 3 belongs to edge-0 and to plato-msg-0"):
        replace(BASE, gateways={"edge-0": gateway(3)}, msgs={"plato-msg-0": Msg("u", 3, "x")})
    with pytest.raises(TopologyError, match="worker_id 4 belongs to edge-0 and to edge-1"):
        replace(BASE, gateways={"edge-0": gateway(4), "edge-1": gateway(4)})
    for outside in (-1, 1024):
        with pytest.raises(TopologyError, match="outside 0-1023"):
            replace(BASE, gateways={"edge-0": gateway(outside)})


def test_a_gateway_is_found_by_its_worker_id() -> None:
    topology = replace(BASE, gateways={"edge-0": gateway(3), "edge-1": gateway(900)})
    assert topology.gateway_by_worker_id(900) == ("edge-1", gateway(900))
    assert topology.gateway_by_worker_id(4) is None


def test_with_process_replaces_and_adds_and_keeps_the_rest() -> None:
    first = with_process(BASE, 2, shards={"plato-s0": Shard("a:1", "u1")}, msgs={"m": Msg("u", 9, "b:1")})
    second = with_process(first, 3, shards={"plato-s0": Shard("a:2", "u2")}, gateways={"edge-0": gateway(3)})
    assert (BASE.epoch, first.epoch, second.epoch) == (1, 2, 3)
    assert BASE.shards == {}
    assert second.shards == {"plato-s0": Shard("a:2", "u2")}
    assert second.msgs == first.msgs
    assert second.slots == BASE.slots


@pytest.mark.parametrize(("last", "now", "epoch"), [(5, 3, 6), (5, 5, 6), (5, 9, 9)])
def test_an_epoch_rises_whatever_the_clock_says(last: int, now: int, epoch: int) -> None:
    assert next_epoch(last, now) == epoch


FULL = json.loads(
    dumps(
        with_process(
            BASE, 2, shards={"plato-s0": Shard("a", "b")}, gateways={"edge-0": gateway(3)}, msgs={"m": Msg("u", 9, "b")}
        )
    )
)


def paths(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    found = [path] if path else []
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        found += paths(item, (*path, key))
    return found


OPTIONAL = {("gateways", "edge-0", "state"), ("gateways", "edge-0", "zone")}
NAMES = {("shards", "plato-s0"), ("gateways", "edge-0"), ("msgs", "m"), ("gateways", "edge-0", "homes", 0)}


WAYS: dict[str, Any] = {"missing": None, "null": None, "list": [[]], "number": 1.5, "infinite": float("inf")}
BROKEN = [
    pytest.param(path, how, id=f"{'.'.join(map(str, path))}-{how}")
    for path in paths(FULL)
    for how in WAYS
    if how != "missing" or path not in OPTIONAL | NAMES
]


@pytest.mark.parametrize(("path", "how"), BROKEN)
def test_a_broken_record_is_refused_in_words(path: tuple[Any, ...], how: str) -> None:
    broken = json.loads(json.dumps(FULL))
    parent = broken
    for key in path[:-1]:
        parent = parent[key]
    if how == "missing":
        del parent[path[-1]]
    else:
        parent[path[-1]] = WAYS[how]
    with pytest.raises(TopologyError):
        loads(json.dumps(broken))


@given(text=st.text() | st.recursive(st.none() | st.integers() | st.text(), st.lists).map(json.dumps))
def test_any_text_raises_nothing_but_topology_error(text: str) -> None:
    with pytest.raises(TopologyError):
        loads(text)


def test_deep_text_is_refused() -> None:
    with pytest.raises(TopologyError):
        loads("[" * 200_000)


def test_another_format_says_so() -> None:
    with pytest.raises(TopologyError, match="format 2 is not 1"):
        loads(json.dumps({**FULL, "format": 2}))


def test_unknown_keys_of_a_newer_writer_do_no_harm() -> None:
    assert loads(json.dumps({**FULL, "more": 1})) == loads(json.dumps(FULL))
