"""Slot moves, worker ids, homes and the stored form of the record: the parts that the operator plans with."""

from __future__ import annotations

import base64
import gzip
import json
import random
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from plato.topology.homes import Guest, bind, covers, residues
from plato.topology.record import (
    DRAINING,
    Drain,
    Gateway,
    Move,
    Msg,
    Rest,
    Shard,
    SlotRange,
    Topology,
    TopologyError,
    dumps,
    even_ranges,
    loads,
)
from plato.topology.slots import counts, left, members, next_step, reassigned, spans, spread, targets
from plato.topology.stored import KEY, PACKED_KEY, PLAIN_BYTES, TooLargeError, pack, unpack
from plato.topology.worker_ids import free, rest_until, rested

NAMES = tuple(f"demo-s{i}" for i in range(6))
weights = st.dictionaries(st.sampled_from(NAMES), st.integers(0, 100), min_size=1)


def owned_by(owner_of: list[str]) -> Topology:
    owners = [SlotRange(slot, slot, name, 1) for slot, name in enumerate(owner_of)]
    return Topology("c", 1, reassigned(owners, {}, 1))


layouts = st.one_of(
    st.lists(st.sampled_from(NAMES), min_size=1, max_size=8).map(
        lambda names: [names[i % len(names)] for i in range(1024)]
    ),
    st.lists(st.sampled_from(NAMES), min_size=1, max_size=8).map(
        lambda names: sorted(names[i % len(names)] for i in range(1024))
    ),
).map(owned_by)


@settings(deadline=None)
@given(layouts, weights)
def test_targets_use_all_slots_and_follow_the_weights(topology: Topology, share: dict[str, int]) -> None:
    want = targets(counts(topology), share)
    assert sum(want.values()) == 1024
    if total := sum(share.values()):
        for name, slots in want.items():
            assert abs(slots - 1024 * share.get(name, 0) / total) < 1
            assert share.get(name, 0) > 0 or slots == 0


@settings(max_examples=12, deadline=None)
@given(layouts, weights, st.integers(8, 16))
def test_steps_come_closer_each_time_and_end(topology: Topology, share: dict[str, int], limit: int) -> None:
    far = left(topology, share)
    epoch = 1
    while step := next_step(topology, share, limit, givers=NAMES, takers=NAMES):
        moved = members(step.slots)
        assert 1 <= len(moved) <= limit
        assert all(topology.owner(slot).shard == step.source != step.target for slot in moved)
        epoch += 1
        before = topology
        topology = replace(topology, slots=reassigned(topology.owners, dict.fromkeys(moved, step.target), epoch))
        for slot in range(1024):
            assert topology.owner(slot).epoch == (epoch if slot in moved else before.owner(slot).epoch)
        assert left(topology, share) == far - len(moved)
        far -= len(moved)
    assert far == 0
    want = targets(counts(topology), share)
    assert {n: c for n, c in want.items() if c} == counts(topology)


def test_a_move_takes_slots_beside_those_of_the_target() -> None:
    topology = Topology("c", 1, even_ranges(["demo-s0", "demo-s1"], 1))
    step = next_step(topology, {"demo-s0": 1, "demo-s1": 3}, 16, givers=NAMES, takers=NAMES)
    assert step is not None
    assert step.slots == ((496, 511),)
    back = next_step(topology, {"demo-s0": 3, "demo-s1": 1}, 16, givers=NAMES, takers=NAMES)
    assert back is not None
    assert back.slots == ((512, 527),)


def test_an_evacuated_shard_gives_first_and_a_silent_one_takes_nothing() -> None:
    topology = Topology("c", 1, spread(NAMES[:3], {NAMES[0]: 60, NAMES[1]: 20, NAMES[2]: 20}, 1))
    share = {NAMES[0]: 1, NAMES[1]: 0, NAMES[2]: 1}
    step = next_step(topology, share, 4, givers=NAMES, takers=NAMES)
    assert step is not None
    assert (step.source, step.target) == (NAMES[1], NAMES[2])
    assert next_step(topology, share, 4, givers=NAMES, takers=[NAMES[0]]) is None
    assert next_step(topology, dict.fromkeys(NAMES, 0), 4, givers=NAMES, takers=NAMES) is None


@settings(deadline=None)
@given(st.sets(st.integers(0, 1023)))
def test_spans_and_members_are_inverse(slots: set[int]) -> None:
    assert members(spans(slots)) == slots
    assert all(a[1] + 1 < b[0] for a, b in zip(spans(slots), spans(slots)[1:], strict=False))


def test_spread_gives_nothing_to_weight_zero_but_all_zero_is_even() -> None:
    assert spread(["a", "b"], {"a": 0, "b": 5}, 3) == (SlotRange(0, 1023, "b", 3),)
    assert spread(["a", "b"], {"a": 0, "b": 0}, 3) == even_ranges(["a", "b"], 3)


@settings(deadline=None)
@given(
    st.sets(st.integers(0, 1023)),
    st.dictionaries(st.integers(0, 1023), st.integers(0, 100)),
    st.integers(0, 100),
)
def test_free_ids_are_neither_used_nor_inside_their_rest(used: set[int], until: dict[int, int], now_ms: int) -> None:
    resting = {i: Rest("u", t) for i, t in until.items()}
    given_ = list(free(used, resting, now_ms))
    assert len(set(given_)) == len(given_)
    assert set(given_) == {i for i in range(1024) if i not in used and (i not in until or until[i] <= now_ms)}


def test_a_rest_never_shortens_and_covers_drain_reservation_and_skew() -> None:
    assert rest_until(1_000, 300) == 1_000 + 300_000 + 3_000 + 5_000
    resting = rested({}, 7, "a", 500)
    assert rested(resting, 7, "b", 400) == {7: Rest("b", 500)}
    assert rested(resting, 7, "b", 600) == {7: Rest("b", 600)}


@settings(max_examples=60, deadline=None)
@given(
    layouts,
    st.lists(
        st.tuples(st.sampled_from([1, 2, 4, 8, 16]), st.lists(st.sampled_from(NAMES), max_size=3, unique=True)),
        max_size=9,
    ),
    st.sets(st.sampled_from(NAMES), max_size=5),
)
@example(  # g5 had to move once more
    owned_by([NAMES[i % 2] for i in range(1024)]),
    [(1, []), (1, []), (2, []), (1, []), (2, [NAMES[1]]), (1, [NAMES[0]])],
    set(),
)
def test_homes_let_every_worker_mint_and_rest_once_bound(
    topology: Topology, pods: list[tuple[int, list[str]]], leaving: set[str]
) -> None:
    bits = {name: mask for name, mask in residues(topology.owners).items() if name not in leaving}
    guests = {f"g{i}": Guest(workers, tuple(homes)) for i, (workers, homes) in enumerate(pods)}
    bound = bind(guests, bits)
    again = bind({name: replace(guest, homes=bound[name]) for name, guest in guests.items()}, bits)
    assert again == bound
    if bits:
        for name, guest in guests.items():
            assert set(bound[name]) <= set(bits)
            assert covers(bound[name], guest.workers, bits) or not covers(bits, guest.workers, bits)
        if guests:
            assert {home for own in bound.values() for home in own} == set(bits)


def test_homes_stay_when_they_are_good_and_move_to_a_new_shard() -> None:
    bits = residues(even_ranges(NAMES[:2], 1)[i // 512] for i in range(1024))
    guests = {f"g{i}": Guest(2, (NAMES[i % 2],)) for i in range(6)}
    assert bind(guests, bits) == {name: guest.homes for name, guest in guests.items()}
    third = {**bits, NAMES[2]: 0xFFFF}
    bound = bind(guests, third)
    assert sorted(home for own in bound.values() for home in own) == sorted(NAMES[:3] * 2)
    assert sum(bound[name] != guest.homes for name, guest in guests.items()) == 2


OPERATED = Topology(
    "c",
    9,
    even_ranges(NAMES[:2], 9),
    shards={NAMES[0]: Shard("a:1", "u0")},
    gateways={
        "edge-0": Gateway(
            "u1", 17, 2, (NAMES[0],), "10.0.0.1", 8900, 8901, "10.0.0.1:8909", DRAINING, "z", "n1",
            Drain(9, "ScaleDown", 200, 5, 1_790_000_400_000),
        )
    },
    msgs={"msg-x": Msg("u2", 600, "10.0.0.2:8907")},
    writer="op-1",
    resting={18: Rest("u9", 1_790_000_400_000)},
    move=Move(9, ((508, 511),), NAMES[0], NAMES[1], 9),
)  # fmt: skip


def test_what_the_operator_writes_is_read_back() -> None:
    for topology in (
        OPERATED,
        replace(OPERATED, move=Move(9, ((508, 511), (1, 1)), NAMES[0], NAMES[1], 12, undo=True)),
    ):
        assert loads(dumps(topology)) == topology
        assert loads(dumps(topology, indent=None)) == topology
    raw = json.loads(dumps(OPERATED))
    assert raw["resting"] == {"18": ["u9", 1_790_000_400_000]}
    assert raw["move"] == {"id": 9, "slots": [[508, 511]], "from": NAMES[0], "to": NAMES[1], "epoch": 9, "undo": False}
    assert raw["gateways"]["edge-0"]["drain"]["deadline_ms"] == 1_790_000_400_000


def test_a_record_without_the_operators_fields_has_none_of_their_keys() -> None:
    """Byte for byte what the local supervisor always wrote."""
    gateway = Gateway("u", 1, 2, (NAMES[0],), "127.0.0.1", 8900, 8901, "127.0.0.1:8909")
    raw = json.loads(dumps(Topology("c", 1, even_ranges(NAMES[:1], 1), gateways={"g": gateway})))
    assert set(raw) == {"format", "cluster_uid", "epoch", "slots", "shards", "gateways", "msgs"}
    assert set(raw["gateways"]["g"]) == {
        "uid",
        "worker_id",
        "workers",
        "homes",
        "ip",
        "tcp",
        "ws",
        "admin",
        "state",
        "zone",
    }


def test_the_move_names_who_should_acquire() -> None:
    move = Move(1, ((0, 3),), "a", "b", 1)
    assert move.owner == "b"
    assert replace(move, undo=True).owner == "a"


def test_an_id_cannot_rest_and_be_held() -> None:
    with pytest.raises(TopologyError, match="worker_id 17 of edge-0 is resting"):
        replace(OPERATED, resting={17: Rest("u", 1)})


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("move", "undo"), 1),
        (("move", "slots"), [[1]]),
        (("resting", "18"), ["u"]),
        (("gateways", "edge-0", "drain", "id"), "x"),
    ],
)
def test_a_broken_field_is_refused(path: tuple[str, ...], value: object) -> None:
    raw = at = json.loads(dumps(OPERATED))
    for key in path[:-1]:
        at = at[key]
    at[path[-1]] = value
    with pytest.raises(TopologyError):
        loads(json.dumps(raw))


def big(gateways: int) -> Topology:
    """Every slot its own range, all ids used or resting: the largest record there is."""
    chance = random.Random(1)
    names = [f"production-s{i}" for i in range(64)]
    owners = [SlotRange(s, s, chance.choice(names), 1_790_000_000 + s) for s in range(1024)]
    pods = {
        f"production-edge-{i}": Gateway(
            f"{chance.getrandbits(128):032x}", i, 8, tuple(names[i % 60 : i % 60 + 4]), f"10.{i}.0.1", 8900, 8901,
            f"10.{i}.0.1:8909", zone="eu-west-1a", node=f"node-{i}.internal",
        )
        for i in range(gateways)
    }  # fmt: skip
    resting = {i: Rest(f"{chance.getrandbits(128):032x}", 1_790_000_400_000 + i) for i in range(gateways, 1024)}
    shards = {n: Shard(f"{n}-0.production-state.plato-im.svc:8902", f"{chance.getrandbits(128):032x}") for n in names}
    return Topology("c", 1, tuple(owners), shards, pods, writer="w", resting=resting)


def test_small_records_are_stored_plain_and_large_ones_packed() -> None:
    assert unpack(pack(OPERATED)) == OPERATED
    assert set(pack(OPERATED)) == {"data"}
    large = big(500)
    stored = pack(large)
    assert set(stored) == {"binaryData"}
    assert stored == pack(large)
    assert len(stored["binaryData"][PACKED_KEY]) < 96 * 1024
    assert len(dumps(large, indent=None)) > PLAIN_BYTES
    assert unpack({"metadata": {}, **stored}) == large


def test_what_does_not_fit_or_cannot_be_unpacked_says_so() -> None:
    chance = random.Random(2)
    shards = {f"{chance.getrandbits(4096):x}": Shard("a", "u") for _ in range(800)}
    with pytest.raises(TooLargeError, match="bytes, more than 524288"):
        pack(replace(OPERATED, shards=shards))
    bad: list[dict[str, Any]] = [{}, {"data": None, "binaryData": None}, {"binaryData": {PACKED_KEY: "%"}}]
    bad.append({"binaryData": {PACKED_KEY: base64.b64encode(b"junk").decode()}})
    whole = base64.b64decode(pack(big(500))["binaryData"][PACKED_KEY])
    bad.append({"binaryData": {PACKED_KEY: base64.b64encode(whole[:-9]).decode()}})
    bomb = gzip.compress(b" " * (9 << 20))
    bad.append({"binaryData": {PACKED_KEY: base64.b64encode(bomb).decode()}})
    bad.append({"data": {KEY: "{}"}})
    for config_map in bad:
        with pytest.raises(TopologyError):
            unpack(config_map)
