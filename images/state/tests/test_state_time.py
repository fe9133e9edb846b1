"""R10 on a running shard: deadlines count ticks of a loop that has drained its input."""

from __future__ import annotations

import time
from typing import Any

from plato.core.codes import Code
from plato.ports import Route
from plato.wire.v1 import client_pb2 as pb
from plato_state.core.session import Phase
from state_harness import Client, Link, World, command, nth_gen, passed, until


async def test_r10_a_stopped_process_that_wakes_does_not_kill_its_sessions() -> None:
    world = World()
    async with world.shard(state__heartbeat_ms=20_000) as state, Link(state) as link:  # silent for 50 s: closed
        clients = [await (await link.connect(world.conn_id())).live(f"user{n}") for n in range(5)]
        clock = state.timers._clock
        time.sleep(0.1)  # noqa: ASYNC251  # the whole loop stands still, as under SIGSTOP
        state.timers._clock = lambda: clock() + 120.0  # and for so long
        for client in clients:
            assert (await client.heartbeat()).code == Code.OK
        assert all(state.shard.connections[c.conn_id].phase is Phase.LIVE for c in clients)
        assert not any(c.of(pb.ERROR) for c in clients)


async def test_r10_a_silent_client_is_closed_waits_and_ends() -> None:
    world = World()
    flags: dict[str, Any] = {"state__heartbeat_ms": 200, "state__resume_window_ms": 1_000}
    async with (
        world.shard(**flags, state__fence_stale_ms=1_000, state__fence_stop_ms=900) as state,
        Link(state) as link,
    ):
        client = await (await link.connect(world.conn_id())).live()
        last = await client.next(pb.ERROR)
        assert (last.code, last.closes) == (Code.HEARTBEAT_TIMEOUT, True)
        assert state.shard.connections[client.conn_id].phase is Phase.WAITING
        await link.closed(client.conn_id)
        await until(lambda: not state.shard.connections)
        assert world.memory.routes["alice", 1] == Route(0, nth_gen(state, 2))
        assert not world.sessions()
        assert len(state.shard.life) == len(state.shard.repeats) == 0, "no timer is left behind"


async def test_r10_sessions_of_a_gateway_whose_stream_is_down_do_not_age() -> None:
    world = World()
    async with world.shard(state__heartbeat_ms=400, state__resume_window_ms=60_000) as state:
        link = await Link(state).open()
        client = await (await link.connect(world.conn_id())).live()
        await link.close()
        await passed(state, 1_500)  # more than the silence that a live stream would allow
        assert state.shard.connections[client.conn_id].phase is Phase.LIVE
        again = Link(state)
        again.attach_no = link.attach_no
        await again.open(announce=[client.conn_id])
        speaks = Client(again, client.conn_id)
        assert (await speaks.heartbeat()).code == Code.OK
        last = await speaks.next(pb.ERROR)
        assert last.code == Code.HEARTBEAT_TIMEOUT, "with its stream up it ages again"
        await again.close()


async def test_r10_until_the_resume_window_has_passed() -> None:
    world = World()
    flags: dict[str, Any] = {"state__heartbeat_ms": 200, "state__resume_window_ms": 1_500}
    async with world.shard(**flags, state__fence_stale_ms=1_000, state__fence_stop_ms=900) as state:
        link = await Link(state).open()
        client = await (await link.connect(world.conn_id())).live()
        begun = state.shard.now  # before: state may notice the end in the midst of it
        await link.close()
        await until(lambda: client.conn_id not in state.shard.connections)
        assert state.shard.now - begun >= 1_500 // 25
        assert world.memory.routes["alice", 1] == Route(0, nth_gen(state, 2))


async def test_r10_any_frame_shows_that_a_client_lives() -> None:
    world = World()
    async with world.shard(state__heartbeat_ms=400) as state, Link(state) as link:
        client = await (await link.connect(world.conn_id())).live()
        begun = state.shard.now
        while state.shard.now < begun + 60:
            await client.send(command(pb.ACK, pb.ACKMsg(Type=pb.PUSH, run=1, push_no=1)))
            await passed(state, 25)
        assert state.shard.connections[client.conn_id].phase is Phase.LIVE
