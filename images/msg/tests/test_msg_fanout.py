"""Who gets which frame, and what a lane does with them; without a database."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msg_harness import until
from plato.core.codes import Code
from plato.core.errors import Unavailable
from plato.core.ids import make_id, slot_of
from plato.fakes.shards import FakeShards
from plato.fakes.topology import FakeTopology
from plato.ports import Route
from plato.topology.record import Move, Shard, Topology, even_ranges
from plato.topology.slots import reassigned
from plato.wire.v1 import client_pb2 as wire
from plato_msg import downlink
from plato_msg.core.batch import Decision, Outcome, Uplink
from plato_msg.core.fanout import parts, session_id, users
from plato_msg.core.progress import Progress
from plato_msg.downlink import LANE_BYTES, LOOKS, Downlink

TOPOLOGY = Topology(
    "test", 1, even_ranges(["s0", "s1"], 1), shards={"s0": Shard("a:1", "u0"), "s1": Shard("b:1", "u1")}
)


def conn(number: int, shard: str = "s0") -> int:
    return make_id(1_800_000_000_000 + number, 1, number % 512 + (0 if shard == "s0" else 512))


def decision(
    seq: int,
    *,
    from_user: str = "alice",
    device_id: int = 1,
    members: Sequence[str] = ("alice", "bob"),
    guest: bool = False,
    repeated: bool = False,
    code: int = 0,
    body: bytes = b"x",
    joined: int = 0,
) -> Decision:
    u = Uplink(0, seq, "c", from_user, device_id, seq, seq.to_bytes(16, "big"), "", 1, body, b"t", guest)
    outcome = Outcome(code, seq + 1_000, seq, seq - 1, 5) if code == 0 else Outcome(code)
    return Decision(u, outcome, repeated, dict.fromkeys(members, joined))


def laid_out(
    decisions: Sequence[Decision], routes: dict[str, dict[int, Route]], part_bytes: int = 1 << 20
) -> dict[int, list[tuple[str, int]]]:
    """{conn_id: [("push" | "receipt", seq or code)]}."""
    found: dict[int, list[tuple[str, int]]] = {}
    for shard, part in parts(decisions, routes, TOPOLOGY, part_bytes):
        assert len(part.entries) == len(part.addressees)
        assert part.size_bytes == sum(len(p.frame) for p in part.payloads)
        for entry, (user, device_id) in zip(part.entries, part.addressees, strict=True):
            assert routes[user][device_id].conn_id == entry.conn_id
            assert TOPOLOGY.owner(entry.conn_id & 0x3FF).shard == shard
            cmd = wire.MsgCmd.FromString(part.payloads[entry.payload].frame)
            if cmd.Type == wire.PUSH:
                found.setdefault(entry.conn_id, []).append(("push", wire.PushMsg.FromString(cmd.Payload).seq))
            else:
                receipt = wire.ReceiptMsg.FromString(cmd.Payload)
                found.setdefault(entry.conn_id, []).append(("receipt", receipt.seq or receipt.code))
    return found


ROUTES = {
    "alice": {1: Route(conn(1), 1), 2: Route(conn(2, "s1"), 1), 3: Route(0, 4)},
    "bob": {1: Route(conn(3, "s1"), 2), 9: Route(conn(4), 1)},
}


def test_the_sending_device_gets_a_receipt_every_other_device_the_push() -> None:
    assert laid_out([decision(1), decision(2, from_user="bob", device_id=9)], ROUTES) == {
        conn(1): [("receipt", 1), ("push", 2)],
        conn(2, "s1"): [("push", 1), ("push", 2)],
        conn(3, "s1"): [("push", 1), ("push", 2)],
        conn(4): [("push", 1), ("receipt", 2)],
    }


def test_a_push_to_many_is_in_a_request_to_a_shard_once() -> None:
    names = [f"u{n}" for n in range(400)]
    routes = {name: {1: Route(conn(n, "s0" if n % 2 else "s1"), 1)} for n, name in enumerate(names)}
    found = parts([decision(1, members=names, from_user="nobody", body=b"b" * 10_000)], routes, TOPOLOGY, 1 << 20)
    assert sorted((shard, len(part.payloads), len(part.entries)) for shard, part in found) == [
        ("s0", 1, 200),
        ("s1", 1, 200),
    ]


def test_a_refusal_and_a_repetition_reach_the_sending_device_only() -> None:
    refused, repeated = decision(1, code=Code.NOT_A_MEMBER), decision(2, repeated=True)
    assert laid_out([refused, repeated], ROUTES) == {conn(1): [("receipt", Code.NOT_A_MEMBER), ("receipt", 2)]}
    assert users([refused]) == ["alice"]
    assert set(users([decision(1)])) == {"alice", "bob"}


def test_who_joined_later_or_is_not_connected_gets_nothing() -> None:
    late = replace_members(decision(5), {"alice": 0, "bob": 5})
    assert laid_out([late], ROUTES) == {conn(1): [("receipt", 5)], conn(2, "s1"): [("push", 5)]}
    assert laid_out([decision(1)], {"alice": {}, "bob": {}}) == {}


def replace_members(d: Decision, members: dict[str, int]) -> Decision:
    return Decision(d.uplink, d.outcome, d.repeated, members)


def test_a_guest_gets_pushes_and_its_shard_hears_of_what_was_refused() -> None:
    routes = {"guest:1": {123: Route(conn(5), 1)}, "bob": ROUTES["bob"]}
    sent = decision(1, from_user="guest:1", device_id=123, members=["guest:1", "bob"], guest=True)
    again = decision(1, from_user="guest:1", device_id=123, members=["guest:1", "bob"], guest=True, repeated=True)
    refused = decision(2, from_user="guest:1", device_id=123, guest=True, code=Code.NOT_A_MEMBER)
    assert laid_out([sent], routes)[conn(5)] == [("push", 1)]
    assert laid_out([again], routes) == {conn(5): [("push", 1)]}
    refused_again = decision(2, from_user="guest:1", device_id=123, guest=True, code=Code.NOT_A_MEMBER, repeated=True)
    for refusal in (refused, refused_again):
        assert laid_out([refusal], routes) == {conn(5): [("receipt", Code.NOT_A_MEMBER)]}


@given(st.lists(st.integers(0, 900), min_size=1, max_size=30), st.integers(1, 3_000))
def test_parts_are_bound_and_keep_the_order(bodies: list[int], part_bytes: int) -> None:
    decisions = [decision(i + 1, body=b"b" * n) for i, n in enumerate(bodies)]
    for _, part in parts(decisions, ROUTES, TOPOLOGY, part_bytes):
        assert part.size_bytes <= part_bytes or len(part.payloads) == 1
    found = laid_out(decisions, ROUTES, part_bytes)
    assert all([seq for _, seq in got] == list(range(1, len(bodies) + 1)) for got in found.values())


def test_session_id_is_the_number_where_the_id_is_one() -> None:
    assert [session_id(c) for c in ("42", "0", "18446744073709551615", "18446744073709551616", "x", "", "-1", "٣")] == [
        42,
        0,
        (1 << 64) - 1,
        0,
        0,
        0,
        0,
        0,
    ]


# ── lanes ────────────────────────────────────────────────────────────────────────────────────────────────────


class Routes:
    def __init__(self) -> None:
        self.away = False
        self.table = ROUTES

    async def read_many(self, names: Sequence[str]) -> list[dict[int, Route]]:
        if self.away:
            raise Unavailable("no routes")
        return [self.table.get(name, {}) for name in names]


class Dirty:
    def __init__(self) -> None:
        self.counts: dict[str, int] = {}
        self.marked: list[str] = []
        self.cleared: list[tuple[str, int]] = []
        self.away = False

    async def mark_dirty(self, shards: Collection[str]) -> None:
        if self.away:
            raise Unavailable("no database")
        self.marked += shards
        for shard in shards:
            self.counts[shard] = self.counts.get(shard, 0) + 1

    async def dirty(self) -> dict[str, int]:
        return dict(self.counts)

    async def clear_dirty(self, shard: str, count: int) -> None:
        self.cleared.append((shard, count))
        if self.counts.get(shard) == count:
            del self.counts[shard]


class Running:
    """A Downlink with its fakes, as a context."""

    def __init__(self, lane_bytes: int = LANE_BYTES) -> None:
        self.shards, self.routes, self.dirty = FakeShards(), Routes(), Dirty()
        self.topology = FakeTopology(TOPOLOGY)
        self.downlink = Downlink(self.topology, self.routes, self.shards, self.dirty, lane_bytes=lane_bytes)
        self.progress = Progress(0)

    async def __aenter__(self) -> Running:
        self._task = asyncio.create_task(self.downlink.run())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def submit(self, *decisions: Decision) -> None:
        await self.downlink.submit(decisions, [self.progress.open(decisions[-1].uplink.position)])

    def seqs(self, conn_id: int) -> list[int]:
        cmds = [wire.MsgCmd.FromString(p.frame) for p in self.shards.taken[conn_id]]
        return [wire.PushMsg.FromString(c.Payload).seq for c in cmds if c.Type == wire.PUSH]


async def test_r7_marks_wait_for_every_part_of_a_batch_that_moved_to_another_lane() -> None:
    async with Running() as r:
        bob = conn(3, "s1")
        r.shards.untaken.add(bob)  # s1 lost the slot
        r.shards.hanging.add("s0")

        def move(shard: str) -> None:
            r.topology.set(replace(TOPOLOGY, epoch=2, slots=even_ranges(["s1", "s0"], 2)))

        r.shards.on_deliver = move
        routes_of_bob = {"bob": {1: ROUTES["bob"][1]}}
        r.routes.table = routes_of_bob
        await r.submit(decision(1, members=["bob"], from_user="nobody"))
        await until(lambda: r.shards.calls == [("s1", 1)])
        assert r.progress.fanned_out == 0
        await until(lambda: r.progress.fanned_out == 1)
        assert r.dirty.marked == ["s0"], "the lane that it moved to hung, and was marked before the mark passed"


async def test_r7_a_slot_on_the_move_waits_beside_its_lane_and_marks_nobody() -> None:
    async with Running() as r:
        bob = conn(3, "s1")
        slot = slot_of(bob)
        move = Move(2, ((slot, slot),), "s1", "s0", 2)
        slots = reassigned(TOPOLOGY.owners, {slot: "s0"}, 2)
        r.topology.set(replace(TOPOLOGY, epoch=2, slots=slots, move=move))
        r.shards.untaken.add(bob)  # s0 has not loaded it yet
        r.routes.table = {"bob": {1: Route(bob, 1)}, "carol": {1: Route(conn(4), 1)}}
        looks = r.shards.calls
        await r.submit(decision(1, members=["bob"], from_user="nobody"))
        await until(lambda: len(looks) >= LOOKS)
        await r.submit(decision(2, members=["carol"], from_user="nobody"))
        await until(lambda: r.seqs(conn(4)) == [2])  # the lane is free
        await until(lambda: len(looks) > LOOKS + 1)  # and the part is looked at again
        assert r.progress.fanned_out == 0
        r.shards.untaken.clear()
        await until(lambda: r.progress.fanned_out == 2)
        assert r.seqs(bob) == [1]
        assert r.dirty.marked == []
        r.topology.set(replace(TOPOLOGY, epoch=3))  # no open move: nobody knows bob
        r.shards.untaken.add(bob)
        await r.submit(decision(3, members=["bob"], from_user="nobody"))
        await until(lambda: r.progress.fanned_out == 3)
        assert r.dirty.marked == ["s1"]


async def test_r7_a_lane_that_is_full_drops_and_marks_instead_of_stopping_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with Running(lane_bytes=3_000) as r:
        gate = asyncio.Event()
        reach = r.shards._reach

        async def slow(shard: str) -> None:
            if shard == "s1":
                await gate.wait()
            await reach(shard)

        monkeypatch.setattr(r.shards, "_reach", slow)
        monkeypatch.setattr(downlink, "DELIVER_TIMEOUT_S", 60.0)  # the lane is full meanwhile, and is not given up
        for i in range(1, 30):
            await r.submit(decision(i, body=b"b" * 1_000))
            await until(lambda i=i: len(r.seqs(conn(4))) == i)  # type: ignore[misc]  # mypy: a lambda's default
        assert r.progress.fanned_out == 0
        gate.set()
        await until(lambda: r.progress.fanned_out == 29)
        assert set(r.dirty.marked) == {"s1"}
        got = r.seqs(conn(3, "s1"))
        assert len(got) < 29, "some were dropped"
        assert got == sorted(set(got))


async def test_r7_a_mark_that_cannot_be_written_is_tried_until_it_is() -> None:
    async with Running() as r:
        r.shards.away.add("s1")
        r.dirty.away = True
        await r.submit(decision(1))
        await until(lambda: bool(r.shards.taken[conn(1)]))
        for _ in range(20):
            await asyncio.sleep(0.02)
            assert r.progress.fanned_out == 0
        r.dirty.away = False
        await until(lambda: r.progress.fanned_out == 1)


async def test_routes_that_cannot_be_read_hold_the_batches_and_lose_none() -> None:
    async with Running() as r:
        r.routes.away = True
        submitting = asyncio.create_task(submit_all(r, 20))
        for _ in range(10):
            await asyncio.sleep(0.02)
            assert not submitting.done(), "the queue is bounded: the pipeline waits"
        r.routes.away = False
        await submitting
        await until(lambda: r.progress.fanned_out == 20)
        assert r.seqs(conn(3, "s1")) == list(range(1, 21))


async def submit_all(r: Running, count: int) -> None:
    for i in range(1, count + 1):
        await r.submit(decision(i))


async def test_an_away_shard_is_tried_again_shortly_before_it_is_marked() -> None:
    async with Running() as r:
        tries: list[str] = []

        def flaky(shard: str) -> None:
            if shard == "s1":
                tries.append(shard)
                if len(tries) < 3:
                    raise Unavailable("not yet")

        r.shards.on_deliver = flaky
        await r.submit(decision(1))
        await until(lambda: r.progress.fanned_out == 1)
        assert len(tries) == 3
        assert not r.dirty.marked
        assert r.seqs(conn(3, "s1")) == [1]


async def test_order_per_connection_is_kept_while_an_entry_is_looked_at_again() -> None:
    async with Running() as r:
        bob = conn(3, "s1")
        r.shards.untaken.add(bob)
        refused: list[int] = []

        def later(shard: str) -> None:
            if shard == "s1":
                refused.append(1)
                if len(refused) == 2:
                    r.shards.untaken.clear()

        r.shards.on_deliver = later
        for i in range(1, 8):
            await r.submit(decision(i))
        await until(lambda: r.progress.fanned_out == 7)
        assert r.seqs(bob) == list(range(1, 8))


async def test_a_shard_that_is_no_more_needs_no_cleaning() -> None:
    async with Running() as r:
        await r.dirty.mark_dirty(["s9"])
        await r.dirty.mark_dirty(["s1"])
        r.shards.done["s1"] = 0
        await r.downlink.mark_dirty([], 0, "")  # wakes the loop
        await until(lambda: r.dirty.counts == {"s1": 1})
