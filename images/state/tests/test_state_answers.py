"""R3 on a running shard: everything is answered in time, and a close carries its last frame."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest
from plato.core import frames
from plato.core.codes import Code
from plato.wire.v1 import client_pb2 as pb
from plato.wire.v1 import state_pb2, state_pb2_grpc
from plato_state.shard import TICK_MS
from state_harness import DATA, OPENED, Client, Link, World, command, unpack, until, up

LOGIN = command(pb.LOGIN, pb.LoginMsg(Head=pb.LoginMsgHead(DeviceID=1), token="fake:alice"))


async def answered_in_time(client: Client, kind: Any, ref: int = 0) -> None:
    """PENDING was said within a second of the shard's own time, and the result has not come. What is on its way to us does
    not count."""
    state = client.link.state
    begun, said, send = state.shard.now, list[int](), state.downlink.send

    def noted(conn_id: int, frame: bytes) -> None:
        said.append(state.shard.now)
        send(conn_id, frame)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(state.downlink, "send", noted)
        ack = await client.ack(kind, pending=True)
    assert ack.code == Code.PENDING
    assert ack.message.ref == ref
    assert (said[-1] - begun) * TICK_MS < 1_000


@pytest.mark.parametrize("what", ["up", "login", "reconn", "sync", "page", "pull"])
async def test_r3_what_is_not_settled_within_a_second_is_pending_then_settled(what: str) -> None:
    world = World()
    pending_ms = 1_000 if what == "up" else 300
    async with world.shard(state__pending_ms=pending_ms) as state, Link(state) as link:
        gate = asyncio.Event()
        if what == "up":
            client = await (await link.connect(world.conn_id())).live()
            world.bus.gate = gate
            await client.send(up("c", 1))
            await answered_in_time(client, pb.UP)
            gate.set()
            assert (await client.ack(pb.UP)).code == Code.OK
        elif what in ("login", "reconn"):
            old = await (await link.connect(world.conn_id())).live()
            client = await link.connect(world.conn_id())
            world.routes.read_gate = gate
            resume = pb.ReConnMsg(Head=pb.ReConnMsgHead(ConnID=old.conn_id), secret=old.secret)
            await client.send(LOGIN if what == "login" else command(pb.RECONN, resume))
            kind = pb.LOGIN if what == "login" else pb.RECONN
            await answered_in_time(client, kind)
            gate.set()
            assert (await client.ack(kind)).code == Code.OK
        elif what == "sync":
            client = await link.connect(world.conn_id())
            await client.login()
            world.routes.gate = gate
            await client.send(command(pb.SYNC, pb.SyncMsg(ref=4)))
            await answered_in_time(client, pb.SYNC, 4)
            gate.set()
            assert (await client.ack(pb.SYNC)).code == Code.OK
        else:
            client = await (await link.connect(world.conn_id())).live()
            await client.next(pb.SYNCED)
            world.msg.gate = gate
            if what == "page":
                assert (await client.sync(5)).code == Code.OK
                await answered_in_time(client, pb.SYNC, 5)
                gate.set()
                assert (await client.next(pb.SYNCED)).message.ref == 5
            else:
                await client.send(command(pb.PULL, pb.PullMsg(ref=6, conversation_id="c")))
                await answered_in_time(client, pb.PULL, 6)
                gate.set()
                assert (await client.next(pb.PULLED)).message.ref == 6


async def test_r3_a_copy_that_joins_after_pending_is_pending_in_time_too() -> None:
    world = World()
    async with world.shard(state__pending_ms=200) as state, Link(state) as link:
        client = await (await link.connect(world.conn_id())).live()
        world.bus.gate = asyncio.Event()
        for _ in range(3):
            await client.send(up("c", 1))
            assert (await client.ack(pb.UP, pending=True)).code == Code.PENDING
        world.bus.gate.set()
        for _ in range(3):
            assert (await client.ack(pb.UP)).code == Code.OK


async def test_r3_a_close_carries_its_last_frame_in_one_item_behind_what_was_sent_before() -> None:
    world = World()
    async with world.shard() as state, Link(state) as link:
        client = await (await link.connect(world.conn_id())).live()
        await client.send(up("c", 1))
        await client.ack(pb.UP)
        await client.send(command(pb.HEARTBEAT, pb.HeartbeatMsg()), command(pb.LOGOUT, pb.LogoutMsg()))
        last = await client.next(pb.KICK)
        assert last.closes
        assert last.code == Code.LOGGED_OUT
        assert client.got[-1] is last
        assert [r.closes for r in client.got[:-1]] == [False] * (len(client.got) - 1)
        assert client.got[-2].message.Type == pb.HEARTBEAT


async def test_r3_msg_that_is_away_is_told_and_the_next_question_is_answered() -> None:
    world = World()
    async with world.shard() as state, Link(state) as link:
        client = await (await link.connect(world.conn_id())).live()
        await client.next(pb.SYNCED)
        world.msg.away = True
        assert (await client.sync(2)).code == Code.OK, "the commit stands, its page comes later"
        page = await client.next(pb.SYNCED)
        assert (page.code, page.message.ref) == (Code.UNAVAILABLE, 2)
        await client.send(command(pb.PULL, pb.PullMsg(ref=3, conversation_id="c")))
        rows = await client.next(pb.PULLED)
        assert (rows.code, rows.message.ref, rows.message.conversation_id) == (Code.UNAVAILABLE, 3, "c")
        world.msg.away = False
        await client.sync(4)
        assert (await client.next(pb.SYNCED)).code == Code.OK


async def test_r3_frames_of_one_run_are_handled_in_order() -> None:
    world = World()
    async with world.shard() as state, Link(state) as link:
        client = await (await link.connect(world.conn_id())).live()
        await client.send(*(up("c", n) for n in range(1, 51)))
        assert [(await client.ack(pb.UP)).message.ClientID for _ in range(50)] == list(range(1, 51))
        assert [r.client_id for r in await world.bus.records()] == list(range(1, 51))


async def test_r3_at_most_two_batches_are_untaken_and_the_next_one_fills() -> None:
    world = World()
    async with world.shard() as state, Link(state) as link:
        client = await (await link.connect(world.conn_id())).live()
        await client.next(pb.SYNCED)
        await link.hold()
        before = len([b for b in link.batches if b.batch_no])
        for _ in range(10):
            await client.send(command(pb.HEARTBEAT, pb.HeartbeatMsg()))
        held = [b for b in link.batches if b.batch_no][before:]
        assert len(held) == 2, "what the link did not take bounds what is on its way"
        link.hold_taken = False
        link._taken = held[-1].batch_no
        await link.take()
        await until(lambda: len([r for r in client.of(pb.ACK) if r.message.Type == pb.HEARTBEAT]) == 10)
        rest = [b for b in link.batches if b.batch_no][before + 2 :]
        assert len(list(unpack(rest[0]))) == 8, "one batch carried what waited"


async def test_an_unknown_connection_that_logs_in_is_taken_for_opened() -> None:
    """Its OPENED was lost with a stream: hops are at most once."""
    world = World()
    async with world.shard() as state, Link(state) as link:
        client = Client(link, world.conn_id())
        await client.live()
        assert client.conn_id in world.sessions()


async def test_events_of_several_connections_share_a_batch() -> None:
    world = World()
    async with world.shard() as state, Link(state) as link:
        ids = [world.conn_id() for _ in range(20)]
        await link.events(
            [
                *((OPENED, c, b"t") for c in ids),
                *(
                    (
                        DATA,
                        c,
                        frames.pack(command(pb.LOGIN, pb.LoginMsg(Head=pb.LoginMsgHead(DeviceID=c), token="fake:a"))),
                    )
                    for c in ids
                ),
            ]
        )
        for c in ids:
            assert (await Client(link, c).ack(pb.LOGIN)).message.ConnID == c
        assert len(state.shard.connections) == 20


async def test_a_stream_without_a_hello_is_refused() -> None:
    world = World()
    async with world.shard() as state:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{state.port}") as channel:
            stub: Any = state_pb2_grpc.StateStub(channel)
            call = stub.Attach()
            await call.write(state_pb2.LinkBatch(batch_no=1))
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call.read()
            assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
        assert not state.shard.links
