"""The public client: frames as it encodes them, byte for byte, where the switch lets it in."""

from __future__ import annotations

from typing import Any

from plato.core.codes import Code
from plato.ports import Route
from plato.wire.v1 import client_pb2 as pb
from plato.wire.v1.suffix import varint
from state_harness import Client, Link, World, command, deliver, nth_gen, passed, push_frame, until

GUESTS: dict[str, Any] = {"auth__guests": True}

LOGIN = bytes.fromhex("12040a02087b")  # MsgCmd{Type 0, Payload LoginMsg{Head{DeviceID 123}}}
HEARTBEAT = bytes.fromhex("080112020a00")
PUSH_ACK = bytes.fromhex("08031202") + b"\x18\x04"  # ACKMsg{Type UP}: what it says on a push


def field(number: int, value: bytes) -> bytes:
    return bytes([number << 3 | 2]) + varint(len(value)) + value


def public_up(client_id: int, conn_id: int, session: bytes, body: bytes) -> bytes:
    """UPMsg{Head{ClientID, ConnID, SessionId}, UPMsgBody}; a zero ClientID is not on the wire."""
    head = (b"\x08" + varint(client_id) if client_id else b"") + b"\x10" + varint(conn_id) + field(3, session)
    return b"\x08\x04" + field(2, field(1, head) + field(2, body))


def public_reconn(conn_id: int) -> bytes:
    return b"\x08\x02" + field(2, field(1, b"\x08" + varint(conn_id)))


async def guest(link: Link, conn_id: int) -> Client:
    client = await link.connect(conn_id)
    await client.send(LOGIN)
    ack = (await client.ack(pb.LOGIN)).message
    assert (ack.Code, ack.ConnID, ack.user_id) == (Code.OK, conn_id, f"guest:{conn_id}")
    return client


async def test_guests_are_off_by_default() -> None:
    world = World()
    async with world.shard() as state, Link(state) as link:
        client = await link.connect(world.conn_id())
        await client.send(LOGIN)
        assert (await client.ack(pb.LOGIN)).code == Code.GUESTS_OFF


async def test_the_public_client_logs_in_sends_and_is_acknowledged() -> None:
    world = World()
    async with world.shard(**GUESTS) as state, Link(state) as link:
        client = await guest(link, world.conn_id())
        assert not world.memory.routes, "its login has no effect"
        await client.send(
            public_up(0, client.conn_id, b"123", b"first"), public_up(1, client.conn_id, b"123", b"second")
        )
        for n in (0, 1):
            ack = (await client.ack(pb.UP)).message
            assert (ack.Code, ack.ClientID, ack.ConnID) == (Code.OK, n, client.conn_id)
        user = f"guest:{client.conn_id}"
        assert world.memory.routes[user, 123] == Route(client.conn_id, nth_gen(state, 1))
        first, second = await world.bus.records()
        assert (first.from_user, first.conversation_id, first.body, first.guest) == (user, "123", b"first", True)
        assert len(first.client_msg_id) == 16
        assert first.client_msg_id != second.client_msg_id
        assert {r.kind for r in client.got} == {pb.ACK}, "no type above 5, and no answer to a Sync it never sent"


async def test_its_first_frame_of_any_type_commits() -> None:
    world = World()
    async with world.shard(**GUESTS) as state, Link(state) as link:
        client = await guest(link, world.conn_id())
        await client.send(HEARTBEAT)
        assert (await client.ack(pb.HEARTBEAT)).code == Code.OK
        assert world.memory.routes[f"guest:{client.conn_id}", 123] == Route(client.conn_id, nth_gen(state, 1))


async def test_client_ids_begin_where_it_likes_then_go_on_by_one_and_a_repeat_has_the_same_id() -> None:
    world = World()
    async with world.shard(**GUESTS) as state, Link(state) as link:
        client = await guest(link, world.conn_id())
        await client.send(public_up(5, client.conn_id, b"a", b"x"), public_up(7, client.conn_id, b"a", b"x"))
        for _ in range(2):
            await client.ack(pb.UP)
        await client.send(public_up(5, client.conn_id, b"a", b"x"), public_up(6, client.conn_id, b"a", b"y"))
        await until(lambda: len([r for r in client.of(pb.ACK) if r.message.Type == pb.UP]) == 4)
        codes = sorted((r.message.ClientID, r.code) for r in client.of(pb.ACK) if r.message.Type == pb.UP)
        assert codes == [(5, Code.OK), (5, Code.OK), (6, Code.OK), (7, Code.EXPECTED)]
        records = await world.bus.records()
        assert [r.client_id for r in records] == [5, 5, 6]
        assert records[0].client_msg_id == records[1].client_msg_id
        await client.send(public_up(0, client.conn_id, b"d:secret", b"x"))
        await client.next(pb.ACK, lambda r: r.code == Code.BAD_CONVERSATION)


async def test_it_gets_one_push_at_a_time_and_the_next_after_any_ack() -> None:
    world = World()
    async with world.shard(**GUESTS) as state, Link(state) as link:
        client = await guest(link, world.conn_id())
        await client.send(HEARTBEAT)
        await client.ack(pb.HEARTBEAT)
        notify = command(pb.NOTIFY, pb.NotifyMsg())
        receipt = command(pb.RECEIPT, pb.ReceiptMsg(msg_id=1))
        pushes = [push_frame(b"%d" % n) for n in range(3)]
        assert await deliver(state, [client.conn_id], pushes[0], notify, receipt, *pushes[1:]) == []
        for n in range(3):
            got = await client.next(pb.PUSH)
            assert got.message.Content == b"%d" % n
            assert (got.command.run, got.command.push_no) == (0, 0), "its ACK names no number, so none is sent"
            await client.send(HEARTBEAT)
            assert len(client.of(pb.PUSH)) == n + 1
            await client.send(PUSH_ACK)
        assert {r.kind for r in client.got} == {pb.ACK, pb.PUSH}
        assert len(state.shard.repeats) == 0


async def test_a_push_without_an_ack_is_repeated_then_the_next_one_comes() -> None:
    world = World()
    quick = {**GUESTS, "state__repeat_min_ms": 100, "state__repeat_max_ms": 200}
    async with world.shard(**quick) as state, Link(state) as link:
        client = await guest(link, world.conn_id())
        await client.send(HEARTBEAT)
        await client.ack(pb.HEARTBEAT)
        await deliver(state, [client.conn_id], push_frame(b"0"), push_frame(b"1"))
        await until(lambda: len(client.of(pb.PUSH)) >= 5)
        assert [r.message.Content for r in client.of(pb.PUSH)][:5] == [b"0"] * 4 + [b"1"]


async def test_it_survives_its_reconn_without_a_secret() -> None:
    world = World()
    async with world.shard(**GUESTS) as state, Link(state) as link:
        old = await guest(link, world.conn_id())
        await old.send(public_up(0, old.conn_id, b"123", b"before"))
        await old.ack(pb.UP)
        await link.closed(old.conn_id)
        new = await link.connect(world.conn_id())
        await new.send(public_reconn(old.conn_id))
        ack = (await new.ack(pb.RECONN)).message
        assert (ack.Code, ack.ConnID, ack.user_id) == (Code.OK, new.conn_id, f"guest:{old.conn_id}")
        await new.send(
            public_up(0, old.conn_id, b"123", b"raced its answer"), public_up(1, new.conn_id, b"123", b"after")
        )
        for _ in range(2):
            assert (await new.ack(pb.UP)).code == Code.OK
        records = await world.bus.records()
        assert {r.from_user for r in records} == {f"guest:{old.conn_id}"}
        assert len({r.client_msg_id for r in records}) == 3
        assert world.memory.routes[f"guest:{old.conn_id}", 123] == Route(new.conn_id, nth_gen(state, 2))


async def test_a_user_cannot_be_resumed_as_a_guest() -> None:
    world = World()
    async with world.shard(**GUESTS) as state, Link(state) as link:
        user = await (await link.connect(world.conn_id())).live()
        thief = await link.connect(world.conn_id())
        await thief.send(public_reconn(user.conn_id))
        assert (await thief.ack(pb.RECONN)).code == Code.SECRET_WRONG


async def test_after_a_restart_a_guest_goes_on_without_hints_it_could_not_read() -> None:
    world = World()
    conn_id = world.conn_id()
    async with world.shard(**GUESTS) as state, Link(state) as link:
        client = await guest(link, conn_id)
        await client.send(HEARTBEAT)
        await client.ack(pb.HEARTBEAT)
    world.uids["s0"] = "s0-uid-2"
    world.publish()
    async with world.shard(**GUESTS) as state:
        link = await Link(state).open(announce=[conn_id])
        client = Client(link, conn_id)
        await client.send(public_up(9, conn_id, b"123", b"x"))
        assert (await client.ack(pb.UP)).code == Code.OK
        await deliver(state, [conn_id], push_frame(b"p"))
        await client.next(pb.PUSH)
        await passed(state, 300)
        assert {r.kind for r in client.got} == {pb.ACK, pb.PUSH}
        await link.close()
