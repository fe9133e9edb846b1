"""R1 and R8 on a running shard: what is appended, in which order, and what is answered."""

from __future__ import annotations

import asyncio

import pytest
from plato.core.codes import Code
from plato.core.conversations import partition_of
from plato.core.errors import Unavailable
from plato.wire.v1 import client_pb2 as pb
from state_harness import Client, Link, World, until, up


async def ids(world: World) -> list[int]:
    return [r.client_id for r in await world.bus.records()]


async def answer(client: Client, client_id: int, code: Code) -> pb.ACKMsg:
    """Waits for this answer to this UP."""

    def look() -> pb.ACKMsg | None:
        for r in client.of(pb.ACK):
            if (r.message.Type, r.message.ClientID, r.message.Code) == (pb.UP, client_id, code):
                return r.message  # type: ignore[no-any-return]  # Received.message is of many kinds
        return None

    found: pb.ACKMsg = await until(look)
    return found


async def test_r1_only_msg_decides_duplicates() -> None:
    """What state has seen and forgotten nothing of is appended again, and acknowledged like the first time."""
    world = World()
    async with world.shard() as state, Link(state) as link:
        client = await (await link.connect(world.conn_id())).live()
        for n in (1, 2, 1, 2):
            await client.send(up("c", n))
            assert (await client.ack(pb.UP)).code == Code.OK
        assert await ids(world) == [1, 2, 1, 2]
        await client.send(up("c", 3))
        assert (await client.ack(pb.UP)).code == Code.OK


async def test_r1_state_remembers_nothing_over_a_restart_and_acked_says_where_to_go_on() -> None:
    world = World()
    conn_id = world.conn_id()
    async with world.shard() as state, Link(state) as link:
        client = await (await link.connect(conn_id)).live()
        await client.send(up("c", 1), up("c", 2))
        await answer(client, 2, Code.OK)
    world.uids["s0"] = "s0-uid-2"
    world.publish()
    async with world.shard() as state:
        link = await Link(state).open(announce=[conn_id])
        client = Client(link, conn_id)
        await client.send(up("c", 4, acked=2))
        refused = (await client.ack(pb.UP)).message
        assert (refused.Code, refused.expected) == (Code.EXPECTED, 3)
        await client.send(up("c", 2, acked=1), up("c", 3, acked=2))
        await answer(client, 3, Code.OK)
        assert await ids(world) == [1, 2, 2, 3]
        await link.close()


async def test_r1_a_skipped_number_is_refused_with_the_one_that_comes_next() -> None:
    world = World()
    async with world.shard() as state, Link(state) as link:
        client = await (await link.connect(world.conn_id())).live()
        await client.send(up("c", 2))
        refused = (await client.ack(pb.UP)).message
        assert (refused.Code, refused.expected, refused.ClientID) == (Code.EXPECTED, 1, 2)
        assert await ids(world) == []
        await client.send(up("c", 1), up("c", 2), up("other", 1))
        for _ in range(3):
            assert (await client.ack(pb.UP)).code == Code.OK


async def test_r1_a_copy_on_its_way_is_joined_and_both_are_answered() -> None:
    world = World()
    async with world.shard() as state, Link(state) as link:
        client = await (await link.connect(world.conn_id())).live()
        world.bus.gate = asyncio.Event()
        await client.send(up("c", 1))
        await until(lambda: len(world.bus.calls) == 1)
        await client.send(up("c", 1), up("c", 2), up("c", 2))
        assert not client.of(pb.ERROR)
        world.bus.gate.set()
        codes = [((await client.ack(pb.UP)).message.ClientID) for _ in range(4)]
        assert codes == [1, 1, 2, 2]
        assert await ids(world) == [1, 2]


async def test_r1_busy_takes_what_is_queued_behind_it_along() -> None:
    world = World()
    async with world.shard(state__max_uplinks_per_connection=3) as state, Link(state) as link:
        client = await (await link.connect(world.conn_id())).live()
        await client.send(up("c", 1))
        await answer(client, 1, Code.OK)
        world.bus.gate = asyncio.Event()
        await client.send(up("c", 2))
        await until(lambda: len(world.bus.calls) == 2)
        await client.send(up("c", 3), up("c", 4))
        await client.send(up("c", 1))
        for n in (1, 3, 4):
            await answer(client, n, Code.BUSY)
        world.bus.gate.set()
        await answer(client, 2, Code.OK)
        assert await ids(world) == [1, 2], "what was answered busy never takes effect"
        await client.send(up("c", 4))
        assert (await answer(client, 4, Code.EXPECTED)).expected == 1
        await client.send(up("c", 3, acked=2))
        await answer(client, 3, Code.OK)


async def test_r1_the_ack_goes_out_after_the_bus_answered() -> None:
    world = World()
    async with world.shard() as state, Link(state) as link:
        client = await (await link.connect(world.conn_id())).live()
        world.bus.gate = asyncio.Event()
        await client.send(up("c", 1))
        await until(lambda: len(world.bus.calls) == 1)
        await client.heartbeat()
        assert not [r for r in client.of(pb.ACK) if r.message.Type == pb.UP]
        world.bus.gate.set()
        await answer(client, 1, Code.OK)


async def test_r1_a_refusal_uses_up_its_number_only_in_its_turn() -> None:
    world = World()
    large = bytes(70_000)
    async with world.shard() as state, Link(state) as link:
        client = await (await link.connect(world.conn_id())).live()
        await client.send(up("c", 2, body=large))
        await answer(client, 2, Code.BODY_TOO_LARGE)
        await client.send(up("c", 3))
        assert (await answer(client, 3, Code.EXPECTED)).expected == 1
        await client.send(up("c", 1, body=large), up("c", 2))
        await answer(client, 1, Code.BODY_TOO_LARGE)
        await answer(client, 2, Code.OK)
        assert await ids(world) == [2]


async def test_r8_one_append_is_in_flight_and_the_next_one_fills_meanwhile() -> None:
    world = World()
    async with world.shard() as state, Link(state) as link:
        client = await (await link.connect(world.conn_id())).live()
        world.bus.gate = asyncio.Event()
        await client.send(up("c", 1))
        await until(lambda: len(world.bus.calls) == 1)
        await client.send(up("c", 2), up("c", 3))
        await client.heartbeat()
        assert len(world.bus.calls) == 1
        world.bus.gate.set()
        await answer(client, 3, Code.OK)
        assert [[len(r) for r in call.values()] for call in world.bus.calls] == [[1], [2]]
        assert await ids(world) == [1, 2, 3]


async def test_r8_an_unknown_append_is_repeated_as_it_was_and_nothing_overtakes_it() -> None:
    world = World()
    async with world.shard() as state, Link(state) as link:
        client = await (await link.connect(world.conn_id())).live()
        world.bus.gate = asyncio.Event()
        world.bus.break_next("after")
        await client.send(up("c", 1), up("c", 2))
        await until(lambda: len(world.bus.calls) == 1)
        await client.send(up("c", 3))
        world.bus.gate.set()
        for n in (1, 2, 3):
            await answer(client, n, Code.OK)
        assert world.bus.calls[0] == world.bus.calls[1]
        assert await ids(world) == [1, 2, 1, 2, 3]


async def test_r8_a_partition_without_a_leader_holds_up_no_other_and_its_uplinks_are_appended_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As Kafka has it while some brokers are away: each append that names such a partition fails."""
    world = World()
    append, away = world.bus.append, partition_of("c", 4)

    async def without_leader(batches: dict[int, list[bytes]]) -> None:
        if away in batches:
            raise Unavailable("no leader")
        await append(batches)

    other = next(c for c in map(str, range(99)) if partition_of(c, 4) != away)
    async with world.shard() as state, Link(state) as link:
        client = await (await link.connect(world.conn_id())).live()
        monkeypatch.setattr(world.bus, "append", without_leader)
        await client.send(up("c", 1), up(other, 1))
        await answer(client, 1, Code.OK)
        for n in (2, 3):
            await client.send(up(other, n))
            await answer(client, n, Code.OK)
        await client.send(up("c", 2))
        assert [r.conversation_id for r in await world.bus.records()] == [other] * 3, "no copies of it for each failure"
        monkeypatch.undo()
        await until(lambda: not state.shard.batcher)
        assert [(r.conversation_id, r.client_id) for r in await world.bus.records() if r.conversation_id == "c"] == [
            ("c", 1),
            ("c", 2),
        ]


async def test_r8_a_bus_that_is_away_is_waited_for_within_bounds_and_loses_nothing() -> None:
    world = World()
    async with world.shard(state__bus_queue_bytes=1_048_576, state__pending_ms=200) as state, Link(state) as link:
        client = await (await link.connect(world.conn_id())).live()
        world.bus.away = True
        body = bytes(60_000)
        for n in range(1, 25):
            await client.send(up("c", n, body=body))
        await answer(client, 1, Code.PENDING)
        busy = await until(lambda: [r for r in client.of(pb.ACK) if r.code == Code.BUSY])
        first_busy = busy[0].message.ClientID
        assert 10 < first_busy < 20
        assert state.shard.batcher.held_bytes <= 1_048_576
        late = [r.message for r in client.of(pb.ACK) if r.message.ClientID > first_busy]
        assert late
        assert all((r.Code, r.expected) == (Code.EXPECTED, first_busy) for r in late), "nothing overtakes what was busy"
        world.bus.away = False
        await answer(client, first_busy - 1, Code.OK)
        for n in range(first_busy, 25):
            await client.send(up("c", n, body=body))
            await answer(client, n, Code.OK)
        assert await ids(world) == list(range(1, 25))
        assert state.shard.batcher.held_bytes == 0
