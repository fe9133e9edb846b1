"""How many devices a user may have: the record stays small whatever device_ids come, and what was dropped stays ended."""

from __future__ import annotations

import asyncio

from plato.core.codes import Code
from plato.fakes.store import FakeRouteStore
from plato.ports import Route
from plato.router import Router
from plato.wire.v1 import client_pb2 as pb
from state_harness import Client, Link, World, command, passed, until, up


def devices_of(world: World, user: str = "alice") -> dict[int, Route]:
    return {device_id: route for (owner, device_id), route in world.memory.routes.items() if owner == user}


async def kick(world: World, device_id: int) -> None:
    """From outside, as msg does it; the hint to the shard gets lost."""
    router = Router(FakeRouteStore(world.memory))
    assert await router.end("alice", device_id, devices_of(world)[device_id])


async def leave(client: Client, world: World) -> None:
    await client.send(command(pb.LOGOUT, pb.LogoutMsg()))
    assert (await client.next(pb.KICK)).code == Code.LOGGED_OUT
    await until(lambda: client.conn_id not in world.sessions())


async def test_fresh_device_ids_do_not_make_a_users_record_grow() -> None:
    world = World()
    async with world.shard(state__max_devices_per_user=3) as state, Link(state) as link:
        stays = await (await link.connect(world.conn_id())).live(device_id=1)
        for n in range(2, 12):
            await leave(await (await link.connect(world.conn_id())).live(device_id=n), world)
            assert len(devices_of(world)) <= 3
        await stays.send(up("c", 1))
        assert (await stays.ack(pb.UP)).code == Code.OK


async def test_one_device_too_many_is_told_at_its_login_and_comes_in_when_another_left() -> None:
    world = World()
    async with world.shard(state__max_devices_per_user=2) as state, Link(state) as link:
        first = await (await link.connect(world.conn_id())).live(device_id=1)
        second = await (await link.connect(world.conn_id())).live(device_id=2)
        third = await link.connect(world.conn_id())
        refused = await third.login(device_id=3)
        assert (refused.code, refused.closes) == (Code.TOO_MANY_DEVICES, False)
        await (await link.connect(world.conn_id())).live("bob", device_id=3)
        again = await (await link.connect(world.conn_id())).live(device_id=2)
        assert (await second.next(pb.KICK)).code == Code.REPLACED
        resumed = await link.connect(world.conn_id())
        assert (await resumed.reconn(again.conn_id, again.secret)).code == Code.OK
        assert (await resumed.sync()).code == Code.OK
        await leave(first, world)
        await third.live(device_id=3)
        assert sorted(devices_of(world)) == [2, 3]


async def test_of_two_new_devices_for_one_place_one_commits_and_the_other_is_told_why() -> None:
    world = World()
    async with world.shard(state__max_devices_per_user=2) as state, Link(state) as link:
        await (await link.connect(world.conn_id())).live(device_id=1)
        one, other = await link.connect(world.conn_id()), await link.connect(world.conn_id())
        assert (await one.login(device_id=2)).code == (await other.login(device_id=3)).code == Code.OK
        assert sorted(await asyncio.gather(code(one), code(other))) == [Code.OK, Code.TRY_AGAIN]
        late, device_id = (one, 2) if 2 not in devices_of(world) else (other, 3)
        assert (await late.login(device_id=device_id)).code == Code.TOO_MANY_DEVICES
        await until(lambda: len(world.sessions()) == 2)


async def code(client: Client) -> int:
    return (await client.sync()).code


async def test_a_kicked_session_does_not_come_back_when_its_end_was_dropped() -> None:
    world = World()
    async with world.shard(state__max_devices_per_user=2) as state, Link(state) as link:
        await (await link.connect(world.conn_id())).live(device_id=1)
        kicked = await (await link.connect(world.conn_id())).live(device_id=2)
        await kick(world, 2)
        await (await link.connect(world.conn_id())).live(device_id=3)
        assert sorted(devices_of(world)) == [1, 3]
        resumed = await link.connect(world.conn_id())
        assert (await resumed.reconn(kicked.conn_id, kicked.secret)).code == Code.SESSION_UNKNOWN
        await kicked.send(command(pb.HEARTBEAT, pb.HeartbeatMsg()))
        last = await kicked.next(pb.KICK)
        assert (last.code, last.closes) == (Code.SESSION_UNKNOWN, True)
        assert sorted(devices_of(world)) == [1, 3]


async def test_a_new_device_is_above_what_was_dropped_whatever_fence_its_shard_has() -> None:
    world = World()
    async with world.shard() as state, Link(state) as link:
        world.memory.floors["alice"] = floor = 1 << 50
        mine = await (await link.connect(world.conn_id())).live(device_id=1)
        assert devices_of(world) == {1: Route(mine.conn_id, floor + 1)}
        assert world.sessions()[mine.conn_id].gen == floor + 1
        await leave(mine, world)
        assert devices_of(world) == {1: Route(0, floor + 2)}


async def test_a_session_that_ends_holds_no_place_whichever_of_its_commits_wrote_the_route() -> None:
    world = World()
    async with (
        world.shard(state__resume_window_ms=1_000, state__fence_stale_ms=1_000, state__fence_stop_ms=900) as state,
        Link(state) as link,
    ):
        client = await link.connect(world.conn_id())
        for written in ("after", "before"):  # the first one lands and its answer is lost, the second one does not
            await client.login()
            world.routes.break_next = written
            assert (await client.sync()).code == Code.UNAVAILABLE
        assert world.memory.routes["alice", 1].conn_id == client.conn_id
        await link.closed(client.conn_id)
        await passed(state, 1_000)
        await until(lambda: not world.sessions())
        assert world.memory.routes["alice", 1].conn_id == 0


async def test_a_commit_that_comes_too_late_for_its_own_earlier_one_leaves_no_route_that_lives() -> None:
    world = World()
    async with world.shard() as state, Link(state) as link:
        client = await link.connect(world.conn_id())
        await client.login()
        world.routes.break_next = "after"
        assert (await client.sync()).code == Code.UNAVAILABLE
        written = world.memory.routes["alice", 1]
        world.memory.routes["alice", 1] = Route(written.conn_id, written.gen - 1)  # as under a fence of before
        assert (await client.sync()).code == Code.TRY_AGAIN
        await link.closed(client.conn_id)
        await until(lambda: not world.sessions())
        assert world.memory.routes["alice", 1] == Route(0, written.gen)
