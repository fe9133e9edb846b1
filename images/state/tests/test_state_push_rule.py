"""R4 on a running shard: numbers, repeats, hints; a lost push never goes unnoticed."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
from plato.wire.v1 import client_pb2 as pb
from plato.wire.v1 import state_pb2, state_pb2_grpc
from plato_state import downlink
from plato_state.service import StateShard
from state_harness import Client, Link, Received, World, command, deliver, passed, push_frame, until

QUICK: dict[str, Any] = {"state__repeat_min_ms": 100, "state__repeat_max_ms": 400}


def numbers(received: Received) -> tuple[int, int]:
    return received.command.run, received.command.push_no


async def acknowledge(client: Client, run: int, push_no: int) -> None:
    await client.send(command(pb.ACK, pb.ACKMsg(Type=pb.PUSH, run=run, push_no=push_no)))


async def dirty(state: StateShard, count: int) -> int:
    async with grpc.aio.insecure_channel(f"127.0.0.1:{state.port}") as channel:
        reply = await state_pb2_grpc.StateStub(channel).Dirty(state_pb2.DirtyRequest(count=count))
    return reply.done


async def test_r4_a_push_is_repeated_three_times_then_heartbeats_carry_its_number() -> None:
    world = World()
    async with world.shard(**QUICK) as state, Link(state) as link:
        client = await (await link.connect(world.conn_id())).live()
        await deliver(state, [client.conn_id], push_frame(b"one"), push_frame(b"two"))
        await until(lambda: len(client.of(pb.PUSH)) == 5)
        got = client.of(pb.PUSH)
        assert [r.message.Content for r in got] == [b"one", b"two", b"two", b"two", b"two"], "the newest only"
        assert [numbers(r) for r in got] == [(client.run, 1)] + [(client.run, 2)] * 4
        await passed(state, 600)  # longer than the longest gap: nothing may come
        assert len(client.of(pb.PUSH)) == 5
        beat = (await client.heartbeat()).message
        assert (beat.run, beat.push_no) == (client.run, 2)


async def test_r4_an_acknowledgement_is_cumulative_and_ends_the_repeats() -> None:
    world = World()
    async with world.shard(**QUICK) as state, Link(state) as link:
        client = await (await link.connect(world.conn_id())).live()
        await deliver(state, [client.conn_id], *(push_frame(b"%d" % n) for n in range(3)))
        await until(lambda: len(client.of(pb.PUSH)) >= 3)  # and perhaps the third again
        await acknowledge(client, client.run, 3)
        assert len(state.shard.repeats) == 0
        await deliver(state, [client.conn_id], push_frame(b"next"))
        assert numbers(await client.next(pb.PUSH, lambda r: bool(r.message.Content == b"next"))) == (client.run, 4)
        await client.heartbeat(client.run, 4)
        connection = state.shard.connections[client.conn_id]
        assert connection.pushes is not None
        assert not connection.pushes.frame


async def test_r4_lower_runs_and_numbers_that_were_never_sent_acknowledge_nothing() -> None:
    world = World()
    async with world.shard(**QUICK) as state, Link(state) as link:
        client = await (await link.connect(world.conn_id())).live()
        await deliver(state, [client.conn_id], push_frame(), push_frame())
        for run, push_no in ((client.run - 1, 2), (client.run + 1, 2), (client.run, 1), (client.run, 9)):
            await acknowledge(client, run, push_no)
        await until(lambda: len(client.of(pb.PUSH)) == 5)


async def test_r4_after_a_start_each_session_gets_an_empty_notify_of_a_greater_run() -> None:
    world = World()
    conn_id = world.conn_id()
    async with world.shard() as state, Link(state) as link:
        before = await (await link.connect(conn_id)).live()
        await deliver(state, [conn_id], push_frame())
    world.uids["s0"] = "s0-uid-2"
    world.publish()
    async with world.shard() as state:
        link = await Link(state).open(announce=[conn_id])
        client = Client(link, conn_id)
        hint = await client.next(pb.NOTIFY)
        assert not hint.message.newest
        run, push_no = numbers(hint)
        assert run > before.run
        assert push_no == 1
        assert (await client.sync(2)).message.run == run
        await link.close()


async def test_r4_dirty_begins_a_new_run_for_every_session_once_per_count() -> None:
    world = World()
    async with world.shard() as state, Link(state) as link:
        clients = [await (await link.connect(world.conn_id())).live(f"user{n}") for n in range(5)]
        assert await dirty(state, 3) == 3
        for client in clients:
            run, push_no = numbers(await client.next(pb.NOTIFY))
            assert run > client.run
            assert push_no == 1
        assert await dirty(state, 3) == 3
        assert await dirty(state, 2) == 3
        assert all(len(c.of(pb.NOTIFY)) == 1 for c in clients)
        assert await dirty(state, 4) == 4
        for client in clients:
            await client.next(pb.NOTIFY)


async def test_r4_a_push_of_the_new_run_is_hint_enough() -> None:
    world = World()
    async with world.shard() as state, Link(state) as link:
        client = await (await link.connect(world.conn_id())).live()
        state.downlink.doubt_all()
        state.downlink.push(state.shard.connections[client.conn_id], push_frame())
        run, push_no = numbers(await client.next(pb.PUSH))
        assert run > client.run
        assert push_no == 1
        state.downlink.pay()
        await client.heartbeat()
        assert not client.of(pb.NOTIFY)


async def test_r4_empty_notifies_are_paced() -> None:
    world = World()
    async with world.shard() as state, Link(state) as link:
        many = 3 * downlink.OWED_PER_TICK
        clients = [await link.connect(world.conn_id()) for _ in range(many)]
        await asyncio.gather(*(c.live(f"user{n}") for n, c in enumerate(clients)))
        state.downlink.doubt_all()
        assert state.downlink.owed == many
        state.downlink.pay()
        assert state.downlink.owed == many - downlink.OWED_PER_TICK
        for client in clients:
            await client.next(pb.NOTIFY)


async def test_r4_what_a_stream_has_no_room_for_becomes_a_doubt() -> None:
    world = World()
    async with world.shard() as state, Link(state) as link:
        client = await (await link.connect(world.conn_id())).live()
        await client.next(pb.SYNCED)
        await link.hold()
        for n in range(90):
            assert await deliver(state, [client.conn_id], push_frame(bytes(60_000), seq=n + 1)) == [], (
                "it has its place here"
            )
        stream = state.shard.links[link.worker_id]
        assert stream.queued_bytes < 4_400_000, "memory is bounded"
        assert state.shard.connections[client.conn_id].doubtful
        link.hold_taken = False
        link._taken = max(b.batch_no for b in link.batches)
        await link.take()
        run, _ = numbers(await client.next(pb.NOTIFY))
        assert run > client.run


async def test_r4_a_fan_out_carries_its_payload_once_with_a_suffix_per_connection() -> None:
    world = World()
    async with world.shard() as state, Link(state) as link:
        clients = [await (await link.connect(world.conn_id())).live(f"user{n}") for n in range(10)]
        await deliver(state, [clients[0].conn_id], push_frame(b"first"))
        await clients[0].next(pb.PUSH)
        before = len(link.batches)
        payload = push_frame(b"x" * 5_000)
        await deliver(state, [c.conn_id for c in clients], payload)
        for n, client in enumerate(clients):
            push = await client.next(pb.PUSH)
            assert numbers(push) == (client.run, 2 if n == 0 else 1)
            assert push.message.Content == b"x" * 5_000
        (batch,) = [b for b in link.batches[before:] if b.payload_data]
        assert batch.payload_data == payload


def notify_frame(seq: int, conversation_id: str = "g:town") -> bytes:
    notify = pb.NotifyMsg(newest=[pb.Cursor(conversation_id=conversation_id, seq=seq)], within_ms=200)
    return pb.MsgCmd(Type=pb.NOTIFY, Payload=notify.SerializeToString()).SerializeToString()


def seqs(client: Client) -> list[int]:
    """Of the notices that it got."""
    return [r.message.newest[0].seq for r in client.of(pb.NOTIFY)]


async def test_r4_a_notice_that_is_unsent_is_replaced_by_a_newer_one_under_its_number() -> None:
    world = World()
    async with world.shard() as state, Link(state) as link:
        clients = [await (await link.connect(world.conn_id())).live(f"user{n}") for n in range(3)]
        ids = [c.conn_id for c in clients]
        stream = state.shard.stream_of(ids[0])
        assert stream is not None
        for client in clients:
            await client.next(pb.SYNCED)
        await link.hold()
        while stream._batch_no - stream._taken < 2:  # two are untaken: the next batch fills
            sent = stream._batch_no
            await deliver(state, ids[2:], push_frame(b"first"))
            await until(lambda sent=sent: stream._batch_no > sent)  # type: ignore[misc]  # mypy: a lambda's default
        before = stream.queued_bytes
        await deliver(state, ids, notify_frame(1))
        await deliver(state, ids[1:2], push_frame(b"between"))
        one = stream.queued_bytes - before
        for seq in (3, 2, 400):
            await deliver(state, ids, notify_frame(seq))
        assert stream.queued_bytes - before < one + 200, "it does not grow with what is told"
        link.hold_taken = False
        link._taken = max(b.batch_no for b in link.batches)
        await link.take()
        for n, client in enumerate(clients):
            await until(lambda client=client: seqs(client)[-1:] == [400])  # type: ignore[misc]  # mypy: as above
            # A machine that stood still repeats what is unacknowledged, under its number.
            told = list(dict.fromkeys(zip(seqs(client), map(numbers, client.of(pb.NOTIFY)), strict=True)))
            first = len({numbers(r) for r in client.of(pb.PUSH)}) + 1 if n == 2 else 1
            assert (n, told[-1:] if n == 1 else told) == (n, [(400, (client.run, 3 if n == 1 else first))])
        pushes = state.shard.connections[ids[0]].pushes
        assert pushes is not None
        assert (pushes.push_no, pushes.frame) == (1, notify_frame(400)), "what is repeated is the newest"


async def test_r4_while_nobody_speaks_for_it_the_newest_is_kept_and_sent_when_it_is_named() -> None:
    world = World()
    conn_id = world.conn_id()
    async with world.shard(**QUICK) as state:
        link = await Link(state).open()
        client = await (await link.connect(conn_id)).live()
        await link.close()
        assert await deliver(state, [conn_id], push_frame(b"one"), push_frame(b"two")) == []
        await passed(state, 800)  # repeats must not be used up while nobody hears them
        again = Link(state)
        again.attach_no = link.attach_no
        await again.open(announce=[conn_id])
        push = await Client(again, conn_id).next(pb.PUSH)
        assert push.message.Content == b"two"
        assert numbers(push) == (client.run, 2), "the jump from 0 tells the client to sync"
        await again.close()


async def test_r4_deliver_says_which_entries_have_no_place_here() -> None:
    world = World(("s0", "s1"))
    async with world.shard("s0") as state, Link(state) as link:
        client = await (await link.connect(world.conn_id(slot=3))).live()
        new = await link.connect(world.conn_id(slot=4))
        foreign, unknown = world.conn_id(slot=1000), world.conn_id(slot=5)
        untaken: list[Any] = await deliver(state, [unknown, client.conn_id, foreign, new.conn_id], push_frame())
        assert untaken == [0, 2, 3]
