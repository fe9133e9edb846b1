"""A bad peer harms only itself: row M22 of the fault list, and what is refused before the bus."""

from __future__ import annotations

import asyncio
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plato.core import frames
from plato.core.codes import Code
from plato.fakes.bus import FakeBus
from plato.fakes.tokens import FakeTokens
from plato.ports import Fence
from plato.router import Router
from plato.wire.v1 import client_pb2 as pb
from plato.wire.v1 import state_pb2
from plato_state import metrics
from plato_state.core.session import Phase
from plato_state.downlink import Downlink
from plato_state.sessions import Sessions
from plato_state.shard import Shard, Slot
from plato_state.signals import Signals
from plato_state.stream import LinkStream, column_bytes, u32_column, u64_column
from plato_state.uplink import Uplink
from state_harness import (
    BEGIN,
    CLOSED,
    DATA,
    END,
    NAMED,
    OPENED,
    Client,
    Link,
    World,
    command,
    deliver,
    push_frame,
    settings_for,
    up,
)


async def a_bystander(link: Link, world: World) -> Client:
    return await (await link.connect(world.conn_id())).live("bystander", 77)


async def unharmed(client: Client) -> None:
    assert (await client.heartbeat()).code == Code.OK
    assert not client.of(pb.ERROR)
    assert not client.of(pb.KICK)


@pytest.mark.parametrize(
    "payload",
    [
        b"\xff",
        b"\x08",
        b"\x12\x7f\x01",
        pb.MsgCmd(Type=pb.LOGIN, Payload=b"\xff\xff").SerializeToString(),
        pb.MsgCmd(Type=pb.UP, Payload=b"\x0a\x03\x1a\x01\xff").SerializeToString(),  # a conversation_id of bad UTF-8
        pb.MsgCmd(Type=pb.SYNC, Payload=b"\x0a\x7f").SerializeToString(),
        command(pb.LOGIN, pb.LoginMsg(token="fake:alice")),  # no head
        command(pb.LOGIN, pb.LoginMsg(Head=pb.LoginMsgHead(), token="fake:alice")),
    ],
)
async def test_m22_what_cannot_be_read_costs_its_sender_the_socket_and_nobody_else(payload: bytes) -> None:
    world = World()
    async with world.shard() as state, Link(state) as link:
        bystander = await a_bystander(link, world)
        for bad in (await link.connect(world.conn_id()), await (await link.connect(world.conn_id())).live()):
            await bad.send(payload, command(pb.HEARTBEAT, pb.HeartbeatMsg()))
            last = await bad.next(pb.ERROR)
            assert (last.code, last.closes) == (Code.MALFORMED, True)
            assert bad.got[-1] is last, "what came behind it is not handled"
            await link.closed(bad.conn_id)
        await unharmed(bystander)
        assert world.memory.routes["alice", 1].conn_id, "the session may still be resumed"
        assert not await world.bus.records()


async def test_m22_a_frame_that_names_another_connection_is_refused() -> None:
    world = World()
    async with world.shard() as state, Link(state) as link:
        bystander = await a_bystander(link, world)
        await deliver(state, [bystander.conn_id], push_frame())
        bad = await (await link.connect(world.conn_id())).live()
        await bad.send(up("c", 1, conn_id=bystander.conn_id))
        assert (await bad.ack(pb.UP)).code == Code.FOREIGN_CONN_ID
        ack = pb.ACKMsg(Type=pb.PUSH, ConnID=bystander.conn_id, run=bystander.run, push_no=1)
        await bad.send(command(pb.ACK, ack))
        refused = await bad.next(pb.ERROR)
        assert (refused.code, refused.closes) == (Code.FOREIGN_CONN_ID, False)
        pushes = state.shard.connections[bystander.conn_id].pushes
        assert pushes is not None
        assert pushes.frame, "nobody acknowledged it"
        assert not await world.bus.records()
        await bad.send(up("c", 2, conn_id=bad.conn_id))
        assert (await bad.ack(pb.UP)).code == Code.OK
        await unharmed(bystander)


@pytest.mark.parametrize(
    ("payload", "code"),
    [
        (up("c", 1, client_msg_id=b"short"), Code.BAD_CLIENT_MSG_ID),
        (up("c", 0), Code.BAD_CLIENT_ID),
        (up("", 1), Code.BAD_CONVERSATION),
        (up("x" * 65, 1), Code.BAD_CONVERSATION),
        (up("c", 1, to_user="y" * 65), Code.BAD_TO_USER),
        (up("c", 1, body=bytes(63_489)), Code.BODY_TOO_LARGE),
    ],
)
async def test_r9_ids_and_lengths_are_refused_before_the_bus(payload: bytes, code: Code) -> None:
    world = World()
    async with world.shard() as state, Link(state) as link:
        client = await (await link.connect(world.conn_id())).live()
        await client.send(payload)
        assert (await client.ack(pb.UP)).code == code
        assert not await world.bus.records()


async def test_a_body_with_nul_and_bad_utf_8_is_carried_as_it_is() -> None:
    world = World()
    async with world.shard() as state, Link(state) as link:
        client = await (await link.connect(world.conn_id())).live()
        body = b"\x00\xff\xfe\x80" + bytes(range(256))
        await client.send(up("c", 1, body=body))
        assert (await client.ack(pb.UP)).code == Code.OK
        assert (await world.bus.records())[0].body == body


@pytest.mark.parametrize(
    "code", [Code.TOKEN_EXPIRED, Code.TOKEN_NOT_YET_VALID, Code.TOKEN_INVALID], ids=lambda c: c.name.lower()
)
async def test_a_refused_token_is_told_on_a_socket_that_may_try_another_one(code: Code) -> None:
    world = World()
    world.tokens.refuse("fake:alice", code)
    async with world.shard() as state, Link(state) as link:
        client = await link.connect(world.conn_id())
        refused = await client.login()
        assert (refused.code, refused.closes) == (code, False)
        await client.live("bob")


async def test_unknown_types_and_fields_do_no_harm() -> None:
    world = World()
    async with world.shard() as state, Link(state) as link:
        client = await (await link.connect(world.conn_id())).live()
        unknown_field = b"\xfa\x3f\x03abc"
        await client.send(
            b"\x08\x63\x12\x01x",
            command(pb.READ, pb.LogoutMsg()),
            up("c", 1) + unknown_field,
        )
        assert (await client.ack(pb.UP)).code == Code.OK
        await unharmed(client)


async def test_a_connection_has_a_bounded_number_of_uplinks_and_questions_on_their_way() -> None:
    world = World()
    async with world.shard(state__max_uplinks_per_connection=5) as state, Link(state) as link:
        client = await (await link.connect(world.conn_id())).live()
        await client.next(pb.SYNCED)
        world.bus.away = True
        await client.send(*(up("c", n) for n in range(1, 9)))
        busy = await client.ack(pb.UP)
        assert (busy.code, busy.message.ClientID) == (Code.BUSY, 6)
        world.msg.gate = asyncio.Event()
        await client.send(*(command(pb.PULL, pb.PullMsg(ref=n, conversation_id="c")) for n in range(1, 9)))
        refused = await client.ack(pb.PULL)
        assert (refused.code, refused.message.ref) == (Code.BUSY, 5)
        world.msg.gate.set()


def quiet_uplink() -> tuple[Shard, Uplink, LinkStream]:
    """An uplink with its tables and nothing running: what is asked for stays in queues."""
    shard = Shard("s0", settings_for("s0", "u").state, True, 65_536)
    for number in range(8):
        slot = shard.slots[number] = Slot(number, Fence(1, 1, "t", "s0"), 0)
        slot.loaded = True
    world = World()
    downlink = Downlink(shard)
    sessions = Sessions(
        shard, downlink, world.session_store, Router(world.routes), world.shards, world.msg, world.topology
    )
    sessions._background.start = lambda work: work.close()  # type: ignore[method-assign]  # nothing runs in the background
    signals = Signals(shard, downlink, sessions, world.msg)
    uplink = Uplink(shard, downlink, sessions, signals, FakeBus(4), FakeTokens())
    link = shard.links[7] = LinkStream(state_pb2.LinkHello(gateway="g", worker_id=7, workers=1))
    return shard, uplink, link


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from([OPENED, DATA, CLOSED, BEGIN, NAMED, END, 0, 9]),
            st.integers(0, 20),
            st.one_of(
                st.binary(max_size=40),
                st.builds(
                    lambda kind, payload: frames.pack(
                        b"\x08" + bytes([kind]) + b"\x12" + bytes([len(payload)]) + payload
                    ),
                    st.integers(0, 20),
                    st.binary(max_size=60),
                ),
                st.sampled_from(
                    [
                        frames.pack(command(pb.LOGIN, pb.LoginMsg(Head=pb.LoginMsgHead(DeviceID=1), token="fake:a"))),
                        frames.pack(command(pb.LOGIN, pb.LoginMsg(Head=pb.LoginMsgHead(DeviceID=1)))),
                        frames.pack(command(pb.SYNC, pb.SyncMsg(ref=1))),
                        frames.pack(up("c", 1)),
                        b"\xff" * 128,
                    ]
                ),
            ),
        ),
        max_size=30,
    )
)
def test_any_events_of_any_bytes_are_handled_without_an_error_of_ours(
    events: list[tuple[int, int, bytes]],
) -> None:
    shard, uplink, link = quiet_uplink()
    before = metrics.ERRORS._value.get()
    ids, lengths = u64_column(b""), u32_column(b"")
    ids.extend((7 << 12) | (c << 22) | (c % 8) for _, c, _ in events)
    lengths.extend(len(d) for _, _, d in events)
    batch = state_pb2.LinkBatch(batch_no=1)
    for kinds, columns, sizes, data in (
        (bytes([BEGIN, END]), u64_column(bytes(16)), u32_column(b"\x80\0\0\0\0\0\0\0"), b"\xff" * 128),
        (bytes(k for k, _, _ in events), ids, lengths, b"".join(d for _, _, d in events)),
    ):
        batch.events.add(
            worker=0,
            boot=1,
            attach=1,
            kinds=kinds,
            conn_ids=column_bytes(columns),
            lengths=column_bytes(sizes),
            data=data,
        )
    sessions = uplink._sessions
    for _ in range(4):
        asyncio.run(uplink.handle(link, batch))
        # What is asked of the store is answered as an empty one would.
        while sessions._reads:
            connection, ask = sessions._reads.pop(next(iter(sessions._reads)))
            sessions._checking.discard(connection.conn_id)
            sessions.run(connection, connection.route_read(ask.serial, None) if ask else connection.route_checked(None))
        for connection in list(shard.connections.values()):
            if connection.phase is Phase.COMMITTING:
                sessions.run(connection, connection.committed(True, 1))
    assert metrics.ERRORS._value.get() == before
    assert all(i == c.conn_id for i, c in shard.connections.items())
    assert set(shard.life._due) <= set(shard.connections), "timers = connections"


def test_a_link_that_sends_columns_of_wrong_length_is_survived() -> None:
    shard, uplink, link = quiet_uplink()
    rng = random.Random(7)
    for _ in range(200):
        batch = state_pb2.LinkBatch(batch_no=1)
        batch.events.add(
            worker=0,
            boot=1,
            attach=1,
            kinds=bytes([BEGIN, DATA, OPENED]),
            conn_ids=rng.randbytes(rng.randrange(30)),
            lengths=rng.randbytes(rng.randrange(14)),
            data=rng.randbytes(50),
        )
        asyncio.run(uplink.handle(link, batch))
    assert len(shard.connections) <= 200
