"""R2 on running shards: who is replaced, when, and by what; rows M4, M7, M8 and M9 of the fault list."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from functools import partial

import pytest
from plato.core.codes import Action, Code
from plato.ports import Route
from plato.wire.v1 import client_pb2 as pb
from state_harness import Client, Link, World, command, deliver, nth_gen, passed, push_frame, until, up


def route_is(world: World, route: Route) -> bool:
    return world.memory.routes["alice", 1] == route


def lose_slots(world: World, slots: Iterable[int]) -> None:
    for slot in slots:
        world.memory.slots.pop(slot, None)


async def test_r2_nothing_but_the_first_sync_commits() -> None:
    world = World()
    async with world.shard() as state, Link(state) as link:
        old = await (await link.connect(world.conn_id())).live()
        new = await link.connect(world.conn_id())
        assert (await new.login()).code == Code.OK
        resumed = await link.connect(world.conn_id())
        assert (await resumed.reconn(old.conn_id, old.secret)).code == Code.OK
        assert world.memory.routes["alice", 1] == Route(old.conn_id, nth_gen(state, 1))
        assert set(world.sessions()) == {old.conn_id}

        await new.send(up("c", 1), command(pb.PULL, pb.PullMsg(ref=1, conversation_id="c")))
        assert [(await new.next(pb.ERROR)).code for _ in range(2)] == [Code.SYNC_FIRST] * 2
        assert (await new.heartbeat()).code == Code.OK
        await old.send(up("c", 1))
        assert (await old.ack(pb.UP)).code == Code.OK
        assert not old.of(pb.KICK)

        assert (await new.sync()).code == Code.OK
        kick = await old.next(pb.KICK)
        assert (kick.code, kick.closes) == (Code.REPLACED, True)
        assert world.memory.routes["alice", 1] == Route(new.conn_id, nth_gen(state, 2))
        await new.send(up("c", 1))
        assert (await new.ack(pb.UP)).code == Code.OK


async def test_r2_the_login_time_out_runs_until_the_commit() -> None:
    world = World()
    async with world.shard(state__login_timeout_ms=300) as state, Link(state) as link:
        client = await link.connect(world.conn_id())
        hello = pb.LoginMsg(Head=pb.LoginMsgHead(DeviceID=1), token="fake:alice")
        await client.send(command(pb.LOGIN, hello), *[command(pb.HEARTBEAT, pb.HeartbeatMsg())] * 4)
        last = await client.next(pb.ERROR)
        assert (last.code, last.closes) == (Code.LOGIN_TIMEOUT, True)
        assert client.conn_id not in state.shard.connections


async def test_r2_of_two_that_read_the_same_route_one_commits_and_the_other_tries_again() -> None:
    world = World()
    async with world.shard() as state, Link(state) as link:
        first, second = await link.connect(world.conn_id()), await link.connect(world.conn_id())
        await first.login()
        await second.login()
        assert (await first.sync()).code == Code.OK
        refused = await second.sync(ref=3)
        assert (refused.code, refused.message.ref, refused.closes) == (Code.TRY_AGAIN, 3, False)
        await until(lambda: set(world.sessions()) == {first.conn_id})  # the fresh session was removed
        assert world.memory.routes["alice", 1] == Route(first.conn_id, nth_gen(state, 1))
        assert not first.of(pb.KICK)
        await second.live()
        assert world.memory.routes["alice", 1] == Route(second.conn_id, nth_gen(state, 2))


async def test_r2_commit_first_then_read_the_page() -> None:
    """M4: a login is held between pulling history and registering its route, and a message comes: seen exactly once."""
    world = World()
    rows: list[int] = []
    world.msg.on_sync = lambda _: pb.SyncedMsg(
        items=[pb.SyncedItem(conversation_id="c", newest_seq=max(rows, default=0))]
    )
    async with world.shard() as state, Link(state) as link:
        client = await link.connect(world.conn_id())
        await client.login()
        world.routes.gate = asyncio.Event()
        await client.send(command(pb.SYNC, pb.SyncMsg(ref=1)))
        await until(lambda: world.routes.waiting == 1)
        assert not world.msg.asked, "the page is read after the commit"
        rows.append(1)  # msg stores first, then reads the route: nobody is there
        assert ("alice", 1) not in world.memory.routes
        world.routes.gate.set()
        page = await client.next(pb.SYNCED)
        assert page.message.items[0].newest_seq == 1
        assert not client.of(pb.PUSH)


async def test_r2_a_push_between_commit_and_page_is_counted_or_sent_but_never_lost() -> None:
    world = World()
    async with world.shard() as state, Link(state) as link:
        client = await link.connect(world.conn_id())
        await client.login()
        world.routes.gate = asyncio.Event()
        world.msg.gate = asyncio.Event()
        await client.send(command(pb.SYNC, pb.SyncMsg(ref=1)))
        await until(lambda: world.routes.waiting == 1)
        assert await deliver(state, [client.conn_id], push_frame()) == [], "it may be committed already"
        world.routes.gate.set()
        ack = (await client.ack(pb.SYNC)).message
        assert ack.push_no == 1, "the page that is read from now on covers the first"
        assert await deliver(state, [client.conn_id], push_frame()) == []
        push = (await client.next(pb.PUSH)).command
        assert (push.run, push.push_no) == (ack.run, 2)
        world.msg.gate.set()
        await client.next(pb.SYNCED)
        assert len(client.of(pb.PUSH)) == 1


async def test_r2_a_commit_of_unknown_outcome_is_found_by_the_next_sync() -> None:
    world = World()
    async with world.shard() as state, Link(state) as link:
        client = await link.connect(world.conn_id())
        for when in ("after", "before"):
            await client.login()
            world.routes.break_next = when
            assert (await client.sync()).code == Code.UNAVAILABLE
            assert (await client.sync()).code == Code.OK
            gen = world.memory.routes["alice", 1].gen
            await client.send(command(pb.LOGOUT, pb.LogoutMsg()))
            ended = Route(0, gen + 1)
            await until(partial(route_is, world, ended))
            await link.closed(client.conn_id)
            client = await link.connect(world.conn_id())


async def test_r2_the_end_of_a_session_sets_the_route_to_nowhere_and_deletes_nothing() -> None:
    world = World()
    async with world.shard() as state, Link(state) as link:
        client = await (await link.connect(world.conn_id())).live()
        await client.send(command(pb.LOGOUT, pb.LogoutMsg()))
        last = await client.next(pb.KICK)
        assert (last.code, last.closes) == (Code.LOGGED_OUT, True)
        await until(lambda: not world.sessions())
        assert world.memory.routes["alice", 1] == Route(0, nth_gen(state, 2))
        assert client.conn_id not in state.shard.connections
        again = await link.connect(world.conn_id())
        assert (await again.reconn(client.conn_id, client.secret)).code == Code.SESSION_UNKNOWN
        await again.live()
        assert world.memory.routes["alice", 1] == Route(again.conn_id, nth_gen(state, 3))


async def test_r2_a_late_close_of_the_old_connection_leaves_the_newer_route() -> None:
    """M8: the old connection's "closed" is delayed while a new login comes; even its session's end takes nothing away."""
    world = World(("s0", "s1"))
    world.shards.lose_hints = True
    short = {"state__resume_window_ms": 1_000, "state__fence_stale_ms": 1_000, "state__fence_stop_ms": 900}
    async with world.shard("s0", **short) as s0, world.shard("s1") as s1, Link(s0) as link0, Link(s1) as link1:
        old = await (await link0.connect(world.conn_id(slot=10))).live()
        new = await (await link1.connect(world.conn_id(slot=900))).live()
        await link0.closed(old.conn_id)
        await until(lambda: old.conn_id not in s0.shard.connections)
        await until(lambda: set(world.sessions()) == {new.conn_id})
        assert world.memory.routes["alice", 1] == Route(new.conn_id, nth_gen(s0, 2))
        assert (await new.heartbeat()).code == Code.OK
        assert await deliver(s1, [new.conn_id], push_frame()) == []
        await new.next(pb.PUSH)
        assert not new.of(pb.KICK)


async def test_r2_a_device_that_comes_back_through_another_gateway_keeps_its_route() -> None:
    """M7: gateway 7 loses the device without a FIN; it resumes through gateway 8; then gateway 7 times out."""
    world = World()
    async with world.shard(state__heartbeat_ms=600) as state, Link(state) as link, Link(state, worker_id=8) as other:
        old = await (await link.connect(world.conn_id())).live()
        new = await other.connect(world.conn_id() + (1 << 12))
        assert (await new.reconn(old.conn_id, old.secret)).code == Code.OK
        assert (await new.sync()).code == Code.OK
        await link.closed(old.conn_id)
        for _ in range(8):
            assert (await new.heartbeat()).code == Code.OK
            await passed(state, 200)
        assert world.memory.routes["alice", 1] == Route(new.conn_id, nth_gen(state, 2))
        assert not new.of(pb.KICK)
        assert not new.of(pb.ERROR)


async def test_r2_two_clients_of_one_device_make_one_kick_with_a_final_code() -> None:
    """M9: the loser is told to stay away, whatever it still sends."""
    world = World()
    async with world.shard() as state, Link(state) as link:
        one = await (await link.connect(world.conn_id())).live()
        two = await (await link.connect(world.conn_id())).live()
        kick = await one.next(pb.KICK)
        assert kick.closes
        assert Code(kick.code).action is Action.STOP
        await one.send(up("c", 1))
        again = await one.next(pb.KICK)
        assert (again.code, again.closes) == (Code.REPLACED, True)
        await link.closed(one.conn_id)
        assert (await two.heartbeat()).code == Code.OK
        assert not two.of(pb.KICK)
        assert len(await world.bus.records()) == 0


async def test_r2_a_client_that_did_not_hear_its_commit_resumes_by_the_older_connection() -> None:
    world = World()
    async with world.shard() as state, Link(state) as link:
        first = await (await link.connect(world.conn_id())).live()
        unheard = await link.connect(world.conn_id())
        await unheard.reconn(first.conn_id, first.secret)
        await unheard.sync()
        await link.closed(unheard.conn_id)
        third = await link.connect(world.conn_id())
        assert (await third.reconn(first.conn_id, first.secret)).code == Code.OK
        assert third.secret == first.secret
        assert (await third.sync()).code == Code.OK
        assert world.memory.routes["alice", 1] == Route(third.conn_id, nth_gen(state, 3))


async def test_r2_a_new_login_draws_a_new_secret_and_the_old_one_resumes_nothing() -> None:
    world = World()
    async with world.shard() as state, Link(state) as link:
        one = await (await link.connect(world.conn_id())).live()
        two = await (await link.connect(world.conn_id())).live()
        assert one.secret != two.secret
        third = await link.connect(world.conn_id())
        assert (await third.reconn(one.conn_id, one.secret)).code == Code.SECRET_WRONG
        assert (await third.reconn(two.conn_id, b"")).code == Code.SECRET_WRONG
        assert (await third.reconn(two.conn_id, two.secret)).code == Code.OK


async def test_r2_other_shards_are_told_and_a_lost_word_is_found_by_the_heartbeat() -> None:
    world = World(("s0", "s1"))
    async with world.shard("s0") as s0, world.shard("s1") as s1, Link(s0) as link0, Link(s1) as link1:
        old = await (await link0.connect(world.conn_id(slot=10))).live()
        new = await (await link1.connect(world.conn_id(slot=900))).live()
        assert (await old.next(pb.KICK)).code == Code.REPLACED
        assert world.shards.told == [("s0", old.conn_id, new.conn_id, Code.REPLACED)]

        world.shards.lose_hints = True
        third = await (await link0.connect(world.conn_id(slot=11))).live()
        assert not new.of(pb.KICK)
        assert (await new.heartbeat()).code == Code.OK
        kick = await new.next(pb.KICK)
        assert (kick.code, kick.closes) == (Code.REPLACED, True)
        assert not third.of(pb.KICK)


async def test_r2_a_missing_route_is_written_again_at_a_heartbeat_and_no_other_is_touched() -> None:
    world = World()
    async with world.shard() as state, Link(state) as link:
        client = await (await link.connect(world.conn_id())).live()
        del world.memory.routes["alice", 1]
        await client.heartbeat()
        await until(lambda: world.memory.routes.get(("alice", 1)) == Route(client.conn_id, nth_gen(state, 1)))
        world.memory.routes["alice", 1] = Route(4711, nth_gen(state, 2))
        await client.heartbeat()
        assert (await client.next(pb.KICK)).code == Code.REPLACED
        assert world.memory.routes["alice", 1] == Route(4711, nth_gen(state, 2))


async def test_r2_a_route_is_never_written_again_without_its_session() -> None:
    """A store that failed over to a replica that lagged lost both; else the next owner of the slot would not know it."""
    world = World()
    async with world.shard() as state, Link(state) as link:
        client = await (await link.connect(world.conn_id())).live()
        mine, route = world.sessions()[client.conn_id], world.memory.routes.pop(("alice", 1))
        for slot in world.memory.slots.values():
            slot.sessions.pop(client.conn_id, None)
        await client.heartbeat()
        await until(lambda: world.memory.routes.get(("alice", 1)) == route)
        assert world.sessions() == {client.conn_id: mine}


async def test_r2_a_store_that_is_away_costs_logins_only() -> None:
    world = World()
    async with world.shard(state__fence_stop_ms=5_000, state__fence_stale_ms=10_000) as state, Link(state) as link:
        client = await (await link.connect(world.conn_id())).live()
        other = await link.connect(world.conn_id())
        await other.login("bob")
        world.memory.away = True
        assert (await other.sync()).code == Code.UNAVAILABLE
        third = await link.connect(world.conn_id())
        assert (await third.login("carol")).code == Code.UNAVAILABLE
        assert (await third.reconn(client.conn_id, client.secret)).code == Code.UNAVAILABLE
        await client.send(up("c", 1))
        assert (await client.ack(pb.UP)).code == Code.OK
        assert await deliver(state, [client.conn_id], push_frame()) == []
        await client.next(pb.PUSH)
        assert (await client.heartbeat()).code == Code.OK
        world.memory.away = False
        assert (await other.sync()).code == Code.OK


async def test_logins_of_one_round_are_one_pipeline() -> None:
    world = World()
    async with world.shard() as state, Link(state) as link:
        clients = [await link.connect(world.conn_id()) for _ in range(50)]
        world.routes.read_gate = asyncio.Event()
        reads = world.routes.reads
        for n, client in enumerate(clients):
            message = pb.LoginMsg(Head=pb.LoginMsgHead(DeviceID=1), token=f"fake:user{n}")
            await client.send(command(pb.LOGIN, message))
        world.routes.read_gate.set()
        for client in clients:
            assert isinstance(client, Client)
            assert (await client.ack(pb.LOGIN)).code == Code.OK
        assert world.routes.reads - reads <= 3


@pytest.mark.parametrize("half_open", [False, True])
async def test_r2_a_session_of_before_a_wipe_never_takes_the_route_of_one_that_committed_after_it(
    half_open: bool,
) -> None:
    world = World(("s0", "s1"))
    async with world.shard("s0") as one, world.shard("s1") as two, Link(one) as here, Link(two) as there:
        old = await (await here.connect(world.conn_id(3))).live()
        old = await (await here.connect(world.conn_id(5))).live()  # the device has a history: its gen is not the first
        before = world.memory.routes["alice", 1]
        assert before.conn_id == old.conn_id
        if not half_open:
            await here.closed(old.conn_id)
        # A wipe, as it looks when the new session's shard notices it first.
        world.memory.routes.clear()
        lose_slots(world, range(512, 1024))
        two.ownership.suspect(1000)
        await until(lambda: 1000 in world.memory.slots)
        new = await there.connect(world.conn_id(1000))
        assert (await new.login()).code == Code.OK
        assert (await new.sync()).code == Code.OK
        stands = world.memory.routes["alice", 1]
        assert stands.conn_id == new.conn_id
        assert stands.gen > before.gen
        lose_slots(world, range(512))
        one.ownership.suspect(5)
        await until(lambda: 5 in world.memory.slots and 5 not in one.ownership._suspects)
        if half_open:
            await old.heartbeat()
        await new.heartbeat()
        assert world.memory.routes["alice", 1] == stands
        assert not new.of(pb.KICK)
