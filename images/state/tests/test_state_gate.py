"""Who may take slots: the process that the record names; by the shard's name, when nobody proved them; never one that was
replaced. And a record that gives a shard its slots anew, which its clients do not notice."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest
from plato.core.codes import Code
from plato.core.ids import slot_of
from plato.fakes.store import _Slot
from plato.ports import Fence, FenceView, Session
from plato.topology.record import SlotRange, Topology
from plato.wire.v1 import client_pb2 as pb
from plato_state.core.fences import Sightings
from plato_state.ownership import Deposed
from plato_state.shard import TICK_MS
from state_harness import Link, World, kill, main_task, passed, until, up

SHORT: dict[str, Any] = {"state__fence_stale_ms": 1_200, "state__fence_stop_ms": 600}


def held_by(world: World, owner: str, token: str) -> None:
    """Every slot carries another process's fence."""
    for number in range(1024):
        slot = world.memory.slots.setdefault(number, _Slot())
        slot.fence, slot.released = Fence(1, 1_000, token, owner), False


def epoch_in_store(world: World, slot: int) -> int:
    """That of the fence that stands; 0: none does."""
    fence = world.memory.slots[slot].fence
    return fence.epoch if fence is not None else 0


# ── by name, while the operator is away ──────────────────────────────────────────────────────────────────────


async def test_r5_a_restarted_pod_that_nobody_names_serves_when_the_old_fence_stood_unproven() -> None:
    world = World()
    held_by(world, "s0", "the pod before")
    state = await world.start(wait=False, **SHORT)
    state.ownership._uid = "a pod that no operator wrote down"
    try:
        begun = state.shard.now
        await until(lambda: not state.not_ready())
        assert (state.shard.now - begun) * TICK_MS >= 1_000
        async with Link(state) as link:
            client = await (await link.connect(world.conn_id())).live()
            await client.send(up("c", 1))
            assert (await client.ack(pb.UP)).code == Code.OK
            # The operator is back and writes it down: nothing happens to whom it serves.
            world.uids["s0"] = "a pod that no operator wrote down"
            world.publish()
            await until(lambda: state.shard.topology_epoch == world.epoch)
            await client.send(up("c", 2, acked=1))
            assert (await client.ack(pb.UP)).code == Code.OK
    finally:
        await kill(state)


async def test_r5_by_name_nothing_is_taken_from_a_process_that_proves_itself() -> None:
    world = World()
    held_by(world, "s0", "the pod before")
    proves = True

    async def the_pod_before() -> None:
        while proves:
            await world.session_store.prove("s0", "the pod before")
            await asyncio.sleep(0.05)

    proving = asyncio.create_task(the_pod_before())
    state = await world.start(wait=False, **SHORT)
    state.ownership._uid = "another"
    try:
        await passed(state, 2_500)
        assert not state.shard.slots
        assert "'another'" in state.not_ready()
    finally:
        proves = False
        await proving
        await kill(state)


async def test_r5_by_name_what_the_pod_before_released_is_taken_at_once() -> None:
    world = World()
    held_by(world, "s0", "the pod before")
    for slot in world.memory.slots.values():
        slot.released = True
    state = await world.start(wait=False, state__fence_stale_ms=120_000)
    state.ownership._uid = "another"
    try:
        await until(lambda: not state.not_ready())  # long before it could call the fences stale
    finally:
        await kill(state)


async def test_r5_a_third_process_of_our_name_ends_one_that_serves_by_name() -> None:
    world = World()
    held_by(world, "s0", "the pod before")
    state = await world.start(wait=False, **SHORT)
    state.ownership._uid = "another"
    await until(lambda: not state.not_ready())
    world.uids["s0"] = "the pod after"
    world.publish()
    await until(main_task(state).done)
    with pytest.raises(ExceptionGroup) as caught:
        await main_task(state)
    assert caught.group_contains(Deposed)
    await kill(state)


def test_r5_by_name_even_a_slot_without_a_fence_is_watched_first() -> None:
    sightings = Sightings("s0", stale=10, ordered=3)
    nobody = FenceView(None, False, None)
    assert not sightings.may_acquire(1, 2, nobody, 0, named=False)
    assert not sightings.may_acquire(1, 2, nobody, 9, named=False)
    assert sightings.may_acquire(1, 2, nobody, 10, named=False)
    older = FenceView(Fence(1, 1, "t", "s1"), False, 5)
    assert not sightings.may_acquire(2, 2, older, 0, named=False)
    assert not sightings.may_acquire(2, 2, older, 5, named=False), "an order to move is for whom the record names"
    assert sightings.may_acquire(2, 2, older, 10, named=False)


# ── out of the record ────────────────────────────────────────────────────────────────────────────────────────


async def test_a_process_that_the_record_names_no_more_takes_nothing_and_gives_what_went_to_others() -> None:
    world = World(("s0", "s1"))
    state = await world.start("s0")
    try:
        assert len(state.shard.slots) == 512
        # The record lost us and gave the half of our slots away.
        world.owners = [SlotRange(0, 255, "s0", 1), SlotRange(256, 1023, "s1", 2)]
        world.epoch += 1
        records = {"s1": world.topology.current().shards["s1"]}
        world.topology.set(Topology("cluster", world.epoch, tuple(world.owners), records))
        await until(lambda: len(state.shard.slots) == 256)
        assert "names no shard" in state.not_ready()
        assert state.shard.serving, "what no other got is served on"
        # More slots in our name, without our uid: not taken.
        world.owners = [SlotRange(0, 511, "s0", 3), SlotRange(512, 1023, "s1", 2)]
        world.epoch += 1
        world.topology.set(Topology("cluster", world.epoch, tuple(world.owners), records))
        await until(lambda: state.shard.topology_epoch == world.epoch)
        await passed(state, 1_500)
        assert len(state.shard.slots) == 256
        world.publish()
        await until(lambda: len(state.shard.slots) == 512 and not state.not_ready())
    finally:
        await kill(state)


# ── a rebuilt record: the same owner, a greater epoch ────────────────────────────────────────────────────────


async def test_slots_that_are_ours_anew_get_a_greater_fence_and_no_client_notices() -> None:
    world = World()
    async with world.shard() as state, Link(state) as link:
        client = await (await link.connect(world.conn_id())).live()
        number = slot_of(client.conn_id)
        before = state.shard.slots[number].fence
        connection = state.shard.connections[client.conn_id]
        assert connection.pushes is not None
        run = connection.pushes.run
        await client.next(pb.SYNCED)
        got = len(client.got)
        world.owners = [SlotRange(0, 1023, "s0", 9)]
        world.publish()
        await until(lambda: {s.fence.epoch for s in state.shard.slots.values()} == {9})
        fence = state.shard.slots[number].fence
        assert fence.start > before.start
        assert {s.fence for s in world.memory.slots.values()} == {s.fence for s in state.shard.slots.values()}
        assert state.shard.connections[client.conn_id] is connection
        assert connection.pushes.run == run
        assert len(client.got) == got, "not a frame"
        await client.send(up("c", 1))
        assert (await client.ack(pb.UP)).code == Code.OK
        later = await (await link.connect(world.conn_id(number))).live("bob")
        assert world.sessions()[later.conn_id].user == "bob"
        assert not state.not_ready()


async def test_a_commit_that_crosses_the_new_fence_is_written_under_it(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World()
    crossed = asyncio.Event()
    put = world.session_store.put

    async def slow_put(slot: int, fence: Fence, sessions: list[Session]) -> None:
        if not crossed.is_set():
            world.owners = [SlotRange(0, 1023, "s0", 9)]
            world.publish()
            await until(lambda: epoch_in_store(world, slot) == 9)
            crossed.set()
        await put(slot, fence, sessions)

    async with world.shard() as state, Link(state) as link:
        monkeypatch.setattr(world.session_store, "put", slow_put)
        client = await link.connect(world.conn_id())
        await client.login()
        assert (await client.sync()).code == Code.OK, "refused under the old fence, written under the new one"
        assert crossed.is_set()
        assert client.conn_id in world.sessions()


async def test_slots_that_another_took_before_are_not_ours_anew() -> None:
    world = World()
    async with world.shard() as state:
        taken = world.memory.slots[5]
        taken.fence = replace(taken.fence, epoch=8, token="another", owner="s1", start=2**50) if taken.fence else None
        world.owners = [SlotRange(0, 1023, "s0", 9)]
        world.publish()
        await until(lambda: 5 not in state.shard.slots)
        await until(lambda: {s.fence.epoch for s in state.shard.slots.values()} == {9})


async def test_a_store_that_is_away_delays_the_new_fence_only() -> None:
    world = World()
    async with world.shard() as state, Link(state) as link:
        client = await (await link.connect(world.conn_id())).live()
        world.memory.away = True
        world.owners = [SlotRange(0, 1023, "s0", 9)]
        world.publish()
        await until(lambda: state.shard.topology_epoch == world.epoch)
        await passed(state, 500)
        assert {s.fence.epoch for s in state.shard.slots.values()} == {1}
        await client.send(up("c", 1))
        assert (await client.ack(pb.UP)).code == Code.OK
        world.memory.away = False
        await until(lambda: {s.fence.epoch for s in state.shard.slots.values()} == {9})
        await client.send(up("c", 2, acked=1))
        assert (await client.ack(pb.UP)).code == Code.OK
