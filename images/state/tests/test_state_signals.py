"""READ and TYPING on a running shard: merged, answered in time, bounded; and frames of msg that carry no number."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

from plato.core.codes import Code
from plato.ports import Position, Reading, Route, Typing
from plato.wire.v1 import client_pb2 as pb
from plato_state.shard import TICK_MS
from plato_state.signals import TYPED, TYPING_MS
from state_harness import Client, Link, World, command, deliver, push_frame, time_stands_still, until

QUICK: dict[str, Any] = {"state__repeat_min_ms": 100, "state__repeat_max_ms": 400}


def read(conversation: str, seq: int, ref: int = 1) -> bytes:
    return command(pb.READ, pb.ReadMsg(ref=ref, conversation_id=conversation, seq=seq))


def typing(conversation: str, *, stopped: bool = False) -> bytes:
    return command(pb.TYPING, pb.TypingMsg(conversation_id=conversation, stopped=stopped))


async def stands(client: Client) -> tuple[int, int, int]:
    """(code, ref, position) of the next answer to a READ."""
    ack = (await client.ack(pb.READ)).message
    return ack.Code, ack.ref, ack.expected


def under_way(world: World, count: int) -> bool:
    """Whether msg was asked so often."""
    return len(world.msg.readings) == count


async def test_a_read_is_answered_with_the_position_that_stands() -> None:
    world = World()
    async with world.shard() as state, Link(state) as link:
        client = await (await link.connect(world.conn_id())).live()
        world.msg.on_read = lambda reading: Position(Code.OK, min(reading.seq, 7))
        await client.send(read("g:x", 1 << 64 - 1, ref=5))
        assert await stands(client) == (Code.OK, 5, 7)
        world.msg.on_read = lambda reading: Position(Code.NOT_A_MEMBER, 0)
        await client.send(read("g:y", 3, ref=6))
        assert await stands(client) == (Code.NOT_A_MEMBER, 6, 0)


async def test_reads_that_wait_for_msg_are_merged_and_each_is_answered() -> None:
    world = World()
    async with world.shard() as state, Link(state) as link:
        alice = await (await link.connect(world.conn_id())).live("alice", 1)
        tablet = await (await link.connect(world.conn_id())).live("alice", 2)
        world.msg.gate = asyncio.Event()
        for n in range(2):  # both requests that may be on their way
            await alice.send(read("g:first", n + 1, ref=n))
            await until(partial(under_way, world, n + 1))
        await alice.send(*(read("g:x", seq, ref=10 + seq) for seq in (3, 9, 4)))
        await tablet.send(read("g:x", 8, ref=90), read("g:y", 1, ref=91))
        world.msg.gate.set()
        answers = [await stands(alice) for _ in range(5)]
        assert sorted(answers) == [(0, 0, 1), (0, 1, 2), (0, 13, 9), (0, 14, 9), (0, 19, 9)]
        assert [await stands(tablet) for _ in range(2)] == [(0, 90, 9), (0, 91, 1)]
        assert world.msg.readings[2:] == [[Reading("alice", "g:x", 9), Reading("alice", "g:y", 1)]]


async def test_before_the_commit_nothing_is_read_or_typed() -> None:
    world = World()
    async with world.shard() as state, Link(state) as link:
        client = await link.connect(world.conn_id())
        await client.login()
        await client.send(read("g:x", 1, ref=3), typing("g:x"))
        refusals = [(await client.next(pb.ERROR)).message for _ in range(2)]
        assert [(e.code, e.type, e.ref) for e in refusals] == [
            (Code.SYNC_FIRST, pb.READ, 3),
            (Code.SYNC_FIRST, pb.TYPING, 0),
        ]
        await client.sync()
        assert not world.msg.readings
        assert not world.msg.typed


async def test_what_has_the_wrong_form_is_refused_and_a_broken_frame_closes() -> None:
    world = World()
    async with world.shard() as state, Link(state) as link:
        client = await (await link.connect(world.conn_id())).live()
        await client.send(read("", 1, ref=1), read("g:x", 0, ref=2), typing(""))
        assert await stands(client) == (Code.BAD_CONVERSATION, 1, 0)
        assert await stands(client) == (Code.BAD_RANGE, 2, 0)
        await client.send(pb.MsgCmd(Type=pb.READ, Payload=b"\xff").SerializeToString())
        assert (await client.next(pb.ERROR)).closes
        assert not world.msg.readings
        assert not world.msg.typed


async def test_msg_that_is_late_or_away_is_told_and_the_client_repeats() -> None:
    world = World()
    async with world.shard(state__pending_ms=100) as state, Link(state) as link:
        client = await (await link.connect(world.conn_id())).live()
        world.msg.gate = asyncio.Event()
        await client.send(read("g:x", 1))
        assert (await client.ack(pb.READ, pending=True)).code == Code.PENDING
        world.msg.away = True
        world.msg.gate.set()
        assert await stands(client) == (Code.UNAVAILABLE, 1, 0)
        world.msg.away = False
        await client.send(read("g:x", 1))
        assert await stands(client) == (Code.OK, 1, 1)


async def test_a_connection_that_reads_too_fast_is_told_how_long_to_wait() -> None:
    world = World()
    async with world.shard(state__connection_uplinks_per_s=1) as state, Link(state) as link:
        client = await (await link.connect(world.conn_id())).live()
        await client.send(*(read("g:x", n, ref=n) for n in range(1, 9)))
        acks = [(await client.ack(pb.READ)).message for _ in range(8)]
        late = [a for a in acks if a.Code == Code.TOO_FAST]
        assert len(late) in (3, 4), "a burst of four seconds is let in"
        assert all(0 < a.retry_ms <= 5_000 for a in late)


async def test_typing_goes_on_once_per_two_seconds_and_its_end_once() -> None:
    world = World()
    async with world.shard() as state, Link(state) as link:
        client = await (await link.connect(world.conn_id())).live()

        async def told(*frames: bytes) -> list[Typing]:
            before = len(world.msg.typed)
            with time_stands_still(state):  # else two seconds may pass between two of these
                await client.send(*frames)
                await client.heartbeat()
                await until(lambda: not state.signals._typing)
            return [signal for batch in world.msg.typed[before:] for signal in batch]

        assert await told(typing("g:x", stopped=True)) == [], "nothing was begun"
        assert await told(typing("g:x"), typing("g:y")) == [
            Typing("alice", "g:x", False),
            Typing("alice", "g:y", False),
        ]
        assert await told(typing("g:x"), typing("g:x")) == []
        assert await told(typing("g:x", stopped=True)) == [Typing("alice", "g:x", True)]
        assert await told(typing("g:x", stopped=True), typing("g:x")) == []
        assert len(await told(*(typing(f"g:{n}") for n in range(20)))) == TYPED - 2, "memory per connection is bounded"
        typed = state.shard.connections[client.conn_id].typed
        assert typed is not None
        typed["g:x"] = typed["g:x"][0] - TYPING_MS // TICK_MS, typed["g:x"][1]  # two seconds ago
        assert await told(typing("g:x")) == [Typing("alice", "g:x", False)]


async def test_guests_neither_read_nor_type_nor_hear_of_it() -> None:
    world = World()
    async with world.shard(auth__guests=True) as state, Link(state) as link:
        client = await link.connect(world.conn_id())
        await client.login(token="")
        await client.sync()
        await client.send(read("room", 1), typing("room"))
        conn_ids = [client.conn_id]
        assert await deliver(state, conn_ids, read("room", 1), typing("room"), command(pb.STATE, pb.StateMsg())) == []
        await client.heartbeat()
        assert not world.msg.readings
        assert not world.msg.typed
        assert {r.kind for r in client.got} == {pb.ACK}


async def test_r4_read_and_typing_carry_no_number_and_are_never_repeated() -> None:
    world = World()
    async with world.shard(**QUICK) as state, Link(state) as link:
        client = await (await link.connect(world.conn_id())).live()
        first, second = push_frame(b"one"), command(pb.STATE, pb.StateMsg(version=1))
        await deliver(state, [client.conn_id], first, read("g:x", 1), second, typing("g:x"))
        await until(lambda: len(client.of(pb.STATE)) == 4, 10.0)  # the newest numbered frame and its three repeats
        assert [(r.command.run, r.command.push_no) for r in client.of(pb.READ) + client.of(pb.TYPING)] == [(0, 0)] * 2
        assert [r.command.push_no for r in client.of(pb.PUSH) + client.of(pb.STATE)] == [1, 2, 2, 2, 2]


async def test_r4_a_signal_that_nobody_can_take_is_no_doubt() -> None:
    world = World()
    async with world.shard() as state, Link(state) as link:
        client = await (await link.connect(world.conn_id())).live()
        await link.closed(client.conn_id)
        assert await deliver(state, [client.conn_id], read("g:x", 1)) == [], (
            "in the right place, though nobody hears it"
        )
        again = await link.connect(world.conn_id())
        assert (await again.reconn(client.conn_id, client.secret)).code == Code.OK
        ack = (await again.sync()).message
        assert ack.push_no == 0
        await again.heartbeat()
        assert not again.of(pb.NOTIFY)


async def test_a_kick_closes_the_socket_and_ends_the_secret() -> None:
    world = World()
    async with world.shard() as state, Link(state) as link:
        client = await (await link.connect(world.conn_id())).live()
        mine = world.memory.routes["alice", 1]
        world.memory.routes["alice", 1] = Route(0, mine.gen + 1)  # as msg ends it
        state.sessions.replaced(client.conn_id, 0, Code.KICKED)
        kicked = await client.next(pb.KICK)
        assert (kicked.code, kicked.closes) == (Code.KICKED, True)
        again = await link.connect(world.conn_id())
        assert (await again.reconn(client.conn_id, client.secret)).code == Code.SESSION_UNKNOWN


async def test_a_kick_that_no_shard_was_told_of_is_found_by_the_heartbeat_or_the_resume() -> None:
    world = World()
    async with world.shard() as state, Link(state) as link:
        client, away = [await (await link.connect(world.conn_id())).live("alice", n) for n in (1, 2)]
        await link.closed(away.conn_id)
        for n in (1, 2):
            world.memory.routes["alice", n] = Route(0, world.memory.routes["alice", n].gen + 1)
        await client.heartbeat()
        assert (await client.next(pb.KICK)).code == Code.KICKED
        again = await link.connect(world.conn_id())
        assert (await again.reconn(away.conn_id, away.secret)).code == Code.SESSION_UNKNOWN
