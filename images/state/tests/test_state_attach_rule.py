"""R6 on a running shard: attaching announces, and only an attached worker may say "gone"."""

from __future__ import annotations

from plato.core.codes import Code
from plato.wire.v1 import client_pb2 as pb
from plato_state.core.session import Phase
from state_harness import ALL_SLOTS, BEGIN, CLOSED, DATA, END, NAMED, Client, Link, World, command, until, up


async def again(link: Link, *, boot: int | None = None) -> Link:
    """A new stream of the same gateway, not announced yet."""
    new = Link(link.state, link.worker_id, link.boot if boot is None else boot)
    new.attach_no = link.attach_no
    return await new.open(announce=None)


async def test_r6_at_the_end_mark_what_was_not_named_counts_as_closed() -> None:
    world = World()
    async with world.shard() as state:
        link = await Link(state).open()
        stays = await (await link.connect(world.conn_id())).live("alice")
        goes = await (await link.connect(world.conn_id())).live("bob")
        fresh = await link.connect(world.conn_id())
        await link.close()
        link = await again(link)
        link.attach_no += 1
        await link.events([(BEGIN, 0, ALL_SLOTS), (NAMED, stays.conn_id, b"t")])
        assert state.shard.connections[goes.conn_id].phase is Phase.LIVE, "the announcement is not complete"
        await link.events([(END, 0, b"")])
        assert state.shard.connections[stays.conn_id].phase is Phase.LIVE
        assert state.shard.connections[goes.conn_id].phase is Phase.WAITING
        assert fresh.conn_id not in state.shard.connections
        client = Client(link, stays.conn_id)
        await client.send(up("c", 1))
        assert (await client.ack(pb.UP)).code == Code.OK
        await link.close()


async def test_r6_unknown_named_connections_get_a_login_timer_and_are_sent_to_login() -> None:
    world = World()
    conn_id = world.conn_id()
    async with world.shard(state__login_timeout_ms=400) as state:
        link = await Link(state).open(announce=[conn_id])
        client = Client(link, conn_id)
        await client.send(command(pb.HEARTBEAT, pb.HeartbeatMsg()), up("c", 1))
        # In any order: the time-out may come while these two are on their way.
        told = sorted([((await client.next(pb.ERROR)).code) for _ in range(3)])
        assert told == sorted([Code.LOGIN_FIRST, Code.LOGIN_FIRST, Code.LOGIN_TIMEOUT])
        assert [r.code for r in client.got if r.closes] == [Code.LOGIN_TIMEOUT]
        await link.close()


async def test_r6_a_frame_of_a_connection_that_a_loaded_slot_does_not_know_is_answered_login() -> None:
    world = World()
    async with world.shard() as state, Link(state) as link:
        client = Client(link, world.conn_id())
        for payload in (up("c", 1), command(pb.HEARTBEAT, pb.HeartbeatMsg()), command(pb.SYNC, pb.SyncMsg(ref=1))):
            await client.send(payload)
            refused = await client.next(pb.ERROR)
            assert (refused.code, refused.closes) == (Code.LOGIN_FIRST, False)
        assert not state.shard.connections


async def test_r6_events_of_an_older_attach_are_dropped() -> None:
    world = World()
    async with world.shard() as state, Link(state) as link:
        client = await (await link.connect(world.conn_id())).live()
        old = link.attach_no
        await link.announce([client.conn_id])
        await link.events([(CLOSED, client.conn_id, b"\0\0")], attach=old)
        assert state.shard.connections[client.conn_id].phase is Phase.LIVE
        await link.events([(CLOSED, client.conn_id, b"\0\0")], attach=link.attach_no + 5)
        assert state.shard.connections[client.conn_id].phase is Phase.LIVE, "an attach begins with BEGIN"
        await link.closed(client.conn_id)
        assert state.shard.connections[client.conn_id].phase is Phase.WAITING


async def test_r6_only_an_attached_worker_may_say_gone() -> None:
    world = World()
    async with world.shard() as state:
        link = await Link(state).open()
        client = await (await link.connect(world.conn_id())).live()
        await link.close()
        link = await again(link)
        await link.events([(CLOSED, client.conn_id, b"\0\0")])
        await link.events([(DATA, client.conn_id, b"\0\0\0\x01\x08")])
        assert state.shard.connections[client.conn_id].phase is Phase.LIVE
        await link.close()


async def test_r6_another_boot_cannot_tell_what_died_with_the_old_one() -> None:
    world = World()
    async with world.shard() as state:
        link = await Link(state).open()
        client = await (await link.connect(world.conn_id())).live()
        await link.close()
        link = await again(link, boot=100)
        await link.announce([])
        assert state.shard.connections[client.conn_id].phase is Phase.LIVE, "it ages instead"
        assert state.shard.stream_down_ms(client.conn_id) is None
        await link.close()


async def test_r6_an_announcement_covers_its_own_slots_only() -> None:
    world = World()
    async with world.shard() as state, Link(state) as link:
        one = await (await link.connect(world.conn_id(slot=1))).live("alice")
        two = await (await link.connect(world.conn_id(slot=2))).live("bob")
        await link.announce([], slots=b"\x02" + bytes(127))
        assert state.shard.connections[one.conn_id].phase is Phase.WAITING
        assert state.shard.connections[two.conn_id].phase is Phase.LIVE


async def test_r6_the_newest_stream_of_a_gateway_ends_the_one_before() -> None:
    world = World()
    async with world.shard() as state:
        first = await Link(state).open()
        client = await (await first.connect(world.conn_id())).live()
        second = Link(state)
        second.attach_no = first.attach_no
        await second.open(announce=[client.conn_id])
        await until(first.ended.is_set)
        speaks = Client(second, client.conn_id)
        await speaks.send(up("c", 1))
        assert (await speaks.ack(pb.UP)).code == Code.OK
        await second.close()


async def test_r6_of_two_workers_each_speaks_for_its_own() -> None:
    world = World()
    async with world.shard() as state:
        link = await Link(state, workers=2).open(announce=None)
        await link.announce([], worker=0)
        even = await (await link.connect(world.conn_id(slot=2))).live()
        down = state.shard.stream_down_ms(world.conn_id(slot=3))
        assert down is not None, "worker 1 has not announced itself"
        await link.announce([], worker=1)
        assert state.shard.connections[even.conn_id].phase is Phase.LIVE
        assert state.shard.stream_down_ms(world.conn_id(slot=3)) is None
        await link.close()
