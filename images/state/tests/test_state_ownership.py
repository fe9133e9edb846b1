"""R5 on running shards: who owns a slot, what an owner that cannot prove it does, and what a wiped store costs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import grpc
import pytest
from plato.core.codes import Code
from plato.core.errors import Unavailable
from plato.core.ids import slot_of
from plato.fakes.store import _Slot
from plato.ports import Fence, Route, Session
from plato.topology.record import SlotRange
from plato.wire.v1 import client_pb2 as pb
from plato.wire.v1 import state_pb2, state_pb2_grpc
from plato_state.core.session import Phase
from plato_state.ownership import Deposed
from plato_state.shard import TICK_MS
from state_harness import Client, Link, World, command, deliver, kill, main_task, nth_gen, passed, push_frame, until, up

SHORT: dict[str, Any] = {"state__fence_stale_ms": 1_200, "state__fence_stop_ms": 600}


def own(world: World, owner: str, slots: range = range(1024)) -> None:
    """Writes another owner's fences into the store."""
    for slot in slots:
        held = world.memory.slots.setdefault(slot, _Slot())
        held.fence, held.released = Fence(1, 1_000, f"token of {owner}", owner), False


async def test_r5_a_restarted_shard_takes_its_slots_at_once_and_its_clients_notice_nothing() -> None:
    world = World()
    conn_id = world.conn_id()
    async with world.shard() as state, Link(state) as link:
        before = await (await link.connect(conn_id)).live()
        old = state.shard.slots[slot_of(conn_id)].fence
    world.uids["s0"] = "s0-uid-2"
    world.publish()
    async with world.shard(state__fence_stale_ms=120_000) as state:  # it need not wait so long for itself
        fence = state.shard.slots[slot_of(conn_id)].fence
        assert (fence.epoch, fence.start) > (old.epoch, old.start)
        assert fence.token != old.token
        link = await Link(state).open(announce=[conn_id])
        client = Client(link, conn_id)
        await client.send(up("c", 1))
        assert (await client.ack(pb.UP)).code == Code.OK
        resumed = await link.connect(world.conn_id())
        assert (await resumed.reconn(conn_id, before.secret)).code == Code.OK
        await link.close()


async def test_r5_without_its_uid_in_the_topology_a_process_takes_nothing() -> None:
    world = World()
    world.uids["s0"] = "of the process before"
    world.publish()
    state = await world.start(wait=False)
    state.ownership._uid = "mine"
    await passed(state, 500)
    assert "mine" in state.not_ready()
    assert not state.shard.slots
    assert not any(s.fence for s in world.memory.slots.values())
    world.uids["s0"] = "mine"
    world.publish()
    await until(lambda: not state.not_ready())
    await kill(state)


async def test_r5_a_process_whose_name_went_to_another_ends() -> None:
    world = World()
    state = await world.start()
    world.uids["s0"] = "a newer process"
    world.publish()
    await until(main_task(state).done)
    with pytest.raises(ExceptionGroup) as caught:
        await main_task(state)
    assert caught.group_contains(Deposed)
    await kill(state)


@asynccontextmanager
async def s9_proves(world: World) -> AsyncIterator[None]:
    """Meanwhile s9 proves its fences again and again, as one that lives does."""
    alive = True

    async def prove() -> None:
        while alive:
            await world.session_store.prove("s9", "token of s9")
            await asyncio.sleep(0.05)

    proving = asyncio.create_task(prove())
    try:
        yield
    finally:
        alive = False
        await proving


async def test_r5_anothers_slots_are_taken_only_after_they_stood_unproven_for_the_whole_time() -> None:
    world = World()
    own(world, "s9")
    async with s9_proves(world):
        state = await world.start(wait=False, **SHORT)
        await passed(state, 2_500)
        assert not state.shard.slots, "its owner proves itself"
    begun = state.shard.now
    await until(lambda: not state.not_ready())
    assert (state.shard.now - begun) * TICK_MS >= 1_000, "unchanged for fence_stale_ms"
    await kill(state)


async def test_r5_an_order_to_move_is_carried_out_when_the_old_owner_released() -> None:
    world = World(("s0", "s1"))
    slot = 100
    async with world.shard("s0") as s0, world.shard("s1") as s1, Link(s0) as link0:
        client = await (await link0.connect(world.conn_id(slot=slot))).live()
        world.owners = [SlotRange(0, 99, "s0", 1), SlotRange(100, 511, "s1", 9), SlotRange(512, 1023, "s1", 1)]
        world.publish()
        await until(lambda: slot in s1.shard.slots and s1.shard.slots[slot].loaded)
        assert slot not in s0.shard.slots
        assert client.conn_id not in s0.shard.connections
        await until(lambda: any(b.not_owner_epoch == world.epoch for b in link0.batches))
        before = len(link0.batches)
        await client.send(up("c", 1))
        assert any(b.not_owner_epoch == world.epoch for b in link0.batches[before:]), "the link hears it again"
        assert await deliver(s0, [client.conn_id], push_frame()) == [0]
        link1 = await Link(s1).open(announce=[client.conn_id])
        moved = Client(link1, client.conn_id)
        await moved.send(up("c", 1))
        assert (await moved.ack(pb.UP)).code == Code.OK
        (hint,) = await until(lambda: moved.of(pb.NOTIFY))  # before or behind the ACK
        assert hint.command.run > client.run
        await link1.close()


async def test_r5_an_order_to_move_is_carried_out_over_a_hung_owner_after_fence_stop_ms() -> None:
    world = World(("s0",))
    own(world, "s9")  # says nothing, releases nothing
    world.owners = [SlotRange(0, 1023, "s0", 2)]
    world.publish()
    state = await world.start(wait=False, state__fence_stop_ms=600, state__fence_stale_ms=120_000)
    await until(lambda: not state.not_ready())  # sooner than without an order
    assert state.shard.now * TICK_MS >= 600
    await kill(state)


async def test_r5_an_owner_that_cannot_prove_its_fences_answers_nothing_and_closes_its_streams() -> None:
    world = World()
    conn_id = world.conn_id()
    async with world.shard(**SHORT) as state:
        link = await Link(state).open()
        await (await link.connect(conn_id)).live()
        world.memory.away = True
        await until(link.ended.is_set)
        assert "proven" in state.not_ready()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await deliver(state, [conn_id], push_frame())
        assert caught.value.code() == grpc.StatusCode.UNAVAILABLE
        refused = await Link(state).open(announce=None)
        await until(refused.ended.is_set)
        await refused.close()
        await link.close()
        world.memory.away = False
        await until(lambda: not state.not_ready())
        again = Link(state)
        again.attach_no = link.attach_no
        await again.open(announce=[conn_id])
        client = Client(again, conn_id)
        await client.send(up("c", 1))
        assert (await client.ack(pb.UP)).code == Code.OK
        await again.close()


async def test_r5_a_wiped_store_is_written_again_by_its_live_owner_and_a_new_run_begins() -> None:
    world = World()
    async with world.shard(**SHORT) as state, Link(state) as link:
        clients = [await (await link.connect(world.conn_id())).live(f"user{n}") for n in range(3)]
        sessions, routes = world.sessions(), dict(world.memory.routes)
        old = state.shard.slots[slot_of(clients[0].conn_id)].fence
        world.memory.wipe()
        await until(lambda: world.sessions() == sessions)
        await until(lambda: world.memory.routes == routes)
        await until(lambda: sum(1 for s in world.memory.slots.values() if s.fence) == 1024)
        fence = state.shard.slots[slot_of(clients[0].conn_id)].fence
        assert (fence.epoch, fence.start) > (old.epoch, old.start)
        for client in clients:
            assert (await client.next(pb.NOTIFY)).command.run > client.run
            assert not client.of(pb.KICK)
        fourth = await (await link.connect(world.conn_id())).live("dora")
        assert fourth.conn_id in world.sessions()


async def test_r5_a_commit_on_a_wiped_slot_is_refused_until_the_slot_was_written_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = World()
    async with world.shard() as state, Link(state) as link:
        client = await link.connect(world.conn_id(slot=1_000))  # the rotating look comes there last
        await client.login()

        async def notices_nothing(owner: str, token: str) -> bool:
            return True

        monkeypatch.setattr(world.session_store, "prove", notices_nothing)  # else a proof may be before the commit
        world.memory.wipe()
        refused = await client.sync()
        assert refused.code == Code.UNAVAILABLE
        assert not world.memory.routes
        await until(lambda: world.memory.slots[slot_of(client.conn_id)].fence is not None)
        assert (await client.sync()).code == Code.OK
        assert state.shard.connections[client.conn_id].phase is Phase.LIVE


async def test_r5_a_smaller_fence_of_a_store_that_went_back_is_raised_again() -> None:
    world = World()
    async with world.shard(**SHORT) as state, Link(state) as link:
        client = await (await link.connect(world.conn_id())).live()
        slot = slot_of(client.conn_id)
        held = world.memory.slots[slot]
        assert held.fence is not None
        mine = held.fence
        held.fence = replace(mine, start=mine.start - 5_000)
        held.sessions.clear()
        world.memory.routes["alice", 1] = Route(4711, 0)
        state.ownership.suspect(slot)
        await until(lambda: client.conn_id in world.sessions())
        assert world.memory.slots[slot].fence is not None
        await until(lambda: world.memory.routes["alice", 1] == Route(client.conn_id, nth_gen(state, 1)))
        assert state.shard.slots[slot].fence.start > mine.start


async def test_r5_an_owner_whose_slot_was_taken_writes_nothing_and_drops_it() -> None:
    world = World()
    async with world.shard() as state, Link(state) as link:
        client = await link.connect(world.conn_id())
        await client.login()
        slot = slot_of(client.conn_id)
        mine = state.shard.slots[slot].fence
        theirs = Fence(mine.epoch, mine.start + 1, "token of s9", "s9")
        world.memory.slots[slot].fence = theirs
        await client.send(command(pb.SYNC, pb.SyncMsg(ref=1)))
        await until(lambda: slot not in state.shard.slots)
        assert client.conn_id not in state.shard.connections
        assert not world.sessions()
        assert not world.memory.routes
        assert world.memory.slots[slot].fence == theirs
        await client.send(up("c", 1))
        assert (await client.next(pb.ERROR)).code == Code.NOT_READY


async def test_r5_every_slot_is_looked_at_in_turn() -> None:
    """A loss that no write meets is found by the rotating look."""
    world = World()
    async with world.shard(state__fence_stop_ms=500, state__fence_stale_ms=10_000) as state:
        for slot in (3, 700, 1023):
            mine = state.shard.slots[slot].fence
            world.memory.slots[slot].fence = replace(mine, start=mine.start + 1, token="t", owner="s9")
        await until(lambda: not {3, 700, 1023} & set(state.shard.slots), 60)
        assert len(state.shard.slots) == 1021


async def test_r5_a_new_owner_ends_no_session_within_the_time_that_others_would_wait() -> None:
    world = World()
    session = Session(world.conn_id(), "alice", 1, b"secret", 1, False)
    world.memory.slots[slot_of(session.conn_id)] = _Slot()
    world.memory.slots[slot_of(session.conn_id)].sessions[session.conn_id] = session
    world.memory.routes["alice", 1] = Route(session.conn_id, 1)
    flags = {**SHORT, "state__heartbeat_ms": 200, "state__resume_window_ms": 1_000, "state__fence_stale_ms": 2_500}
    async with world.shard(**flags) as state:
        since = state.shard.slots[slot_of(session.conn_id)].since
        await until(lambda: not world.sessions())
        assert (state.shard.now - since) * TICK_MS >= 2_500
        assert world.memory.routes["alice", 1] == Route(0, 2)


async def test_r5_frames_of_a_slot_that_still_loads_are_answered_not_ready_then_what_lives_there_is_known() -> None:
    world = World()
    own(world, "s9", range(5, 6))
    session = Session(world.conn_id(slot=5), "alice", 1, b"secret", 1, False)
    world.memory.slots[5].sessions[session.conn_id] = session
    async with s9_proves(world):
        state = await world.start(wait=False, **SHORT)
        await until(lambda: state.shard.serving)
        assert "1 of 1024 slots" in state.not_ready()
        stranger = world.conn_id(slot=5)
        link = await Link(state).open(announce=[session.conn_id, stranger])
        client = Client(link, session.conn_id)
        await client.send(up("c", 1))
        assert (await client.next(pb.ERROR)).code == Code.NOT_READY
        assert await deliver(state, [session.conn_id], push_frame()) == [0]
    await until(lambda: not state.not_ready())
    assert state.shard.connections[session.conn_id].socket, "it was named before its slot was loaded"
    assert state.shard.connections[stranger].phase is Phase.NEW
    await client.send(up("c", 1))
    assert (await client.ack(pb.UP)).code == Code.OK
    await link.close()
    await kill(state)


async def test_r5_a_stopped_shard_gives_its_slots_back() -> None:
    world = World(("s0", "s1"))
    state = await world.start("s0")
    await state.stop()
    assert all(world.memory.slots[s].released for s in range(512))
    await kill(state)
    world.owners = [SlotRange(0, 1023, "s1", 1)]  # no order's waiting time: released is enough
    world.publish()
    async with world.shard("s1") as s1:
        assert len(s1.shard.slots) == 1024


async def test_r5_a_start_waits_for_a_store_that_is_away() -> None:
    world = World()
    world.memory.away = True
    state = await world.start(wait=False)
    await passed(state, 300)
    assert state.not_ready()
    world.memory.away = False
    await until(lambda: not state.not_ready())
    await kill(state)


async def test_a_slot_that_could_not_be_loaded_is_tried_again() -> None:
    world = World()
    broken = 3

    class Broken(type(world.session_store)):  # type: ignore[misc]  # the class of this world's store
        async def load(self, slot: int) -> list[Session]:
            nonlocal broken
            if slot == 17 and broken:
                broken -= 1
                raise Unavailable("this time")
            loaded: list[Session] = await super().load(slot)
            return loaded

    world.session_store = Broken(world.memory)
    async with world.shard() as state:
        assert state.shard.slots[17].loaded
        assert broken == 0


async def test_reservations_pass_through() -> None:
    world = World()
    async with world.shard() as state, grpc.aio.insecure_channel(f"127.0.0.1:{state.port}") as channel:
        stub = state_pb2_grpc.StateStub(channel)

        def ask(uid: str, **more: Any) -> Any:
            return state_pb2.ReserveRequest(**{"worker_id": 5, "uid": uid, "boot": 1, "ahead_ms": 3_000, **more})

        first = await stub.Reserve(ask("a"))
        again = await stub.Reserve(ask("a"))
        assert first.ok
        assert again.ok
        assert first.until_ms - first.from_ms == 3_000
        assert again.from_ms == first.until_ms
        refused = await stub.Reserve(ask("b"))
        assert not refused.ok
        assert "worker_id 5" in refused.msg
        assert not (await stub.Reserve(ask("a", worker_id=1024))).ok
        world.memory.away = True
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Reserve(ask("a"))
        assert caught.value.code() == grpc.StatusCode.UNAVAILABLE
