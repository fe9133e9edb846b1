"""One thread through a shard: log in, sync, send, be acknowledged; and a push the other way."""

from __future__ import annotations

from plato.core.codes import Code
from plato.ports import Route
from plato.wire.v1 import client_pb2 as pb
from state_harness import Link, World, deliver, nth_gen, push_frame, until
from state_harness import up as uplink


async def test_login_sync_up_and_ack_then_deliver_and_push() -> None:
    world = World()
    async with world.shard() as state, Link(state) as link:
        client = await link.connect(world.conn_id())
        answer = (await client.login()).message
        assert answer.ConnID == client.conn_id
        assert answer.user_id == "alice"
        assert answer.secret
        assert answer.heartbeat_ms == 20_000
        assert answer.max_body_bytes == 65_536 - 2_048
        assert not world.memory.routes, "a login has no effect on others"

        committed = (await client.sync(ref=5)).message
        assert (committed.Code, committed.ref, committed.push_no) == (Code.OK, 5, 0)
        assert committed.run > 0
        assert world.memory.routes["alice", 1] == Route(client.conn_id, nth_gen(state, 1))
        assert world.sessions()[client.conn_id].user == "alice"
        assert (await client.next(pb.SYNCED)).message.ref == 5

        trace_id = b"t" * 16
        await client.send(uplink("c", 1, body=b"\x00\xff", to_user="bob", trace_id=trace_id))
        ack = (await client.ack(pb.UP)).message
        assert (ack.Code, ack.ClientID, ack.conversation_id) == (Code.OK, 1, "c")
        (record,) = await world.bus.records()
        assert (record.conversation_id, record.from_user, record.device_id) == ("c", "alice", 1)
        assert (record.body, record.to_user, record.client_id) == (b"\x00\xff", "bob", 1)
        assert record.trace_id == trace_id
        assert record.client_msg_id == ack.client_msg_id

        assert await deliver(state, [client.conn_id, 4711], push_frame(b"hello")) == [1]
        push = await client.next(pb.PUSH)
        assert (push.command.run, push.command.push_no) == (committed.run, 1)
        assert push.message.Content == b"hello"
        await client.send(
            pb.MsgCmd(
                Type=pb.ACK,
                Payload=pb.ACKMsg(Type=pb.PUSH, run=committed.run, push_no=1).SerializeToString(),
            ).SerializeToString()
        )
        connection = state.shard.connections[client.conn_id]
        assert connection.pushes is not None
        await until(lambda: connection.pushes is not None and not connection.pushes.frame)
