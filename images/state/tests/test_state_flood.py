"""Invariant 9: whoever sends more than anybody could serve harms its own connection, and the loop turns on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from plato.core import frames
from plato.core.codes import Code
from plato.ports import TokenVerifier
from plato.wire.v1 import client_pb2 as pb
from plato.wire.v1.state_pb2 import LinkBatch
from plato_state.core.pace import BURST_FRAMES, LIMIT_FRAMES
from plato_state.core.session import Phase
from plato_state.service import StateShard
from plato_state.stream import LinkStream
from state_harness import DATA, Client, Link, World, command, passed, time_stands_still, until, up

HEARTBEAT = command(pb.HEARTBEAT, pb.HeartbeatMsg())
LOGIN = command(pb.LOGIN, pb.LoginMsg(Head=pb.LoginMsgHead(DeviceID=1), token="fake:alice"))
KINDS = {
    "heartbeat": HEARTBEAT,
    "unknown": b"\x08\x63",
    "login": LOGIN,
    "ack": command(pb.ACK, pb.ACKMsg(Type=pb.PUSH)),
    "up": up("c", 1),
    "sync": command(pb.SYNC, pb.SyncMsg(ref=1)),
    "pull": command(pb.PULL, pb.PullMsg(ref=1, conversation_id="c")),
    "reconn": command(pb.RECONN, pb.ReConnMsg(Head=pb.ReConnMsgHead(ConnID=5))),
}


def runs(payload: bytes, count: int) -> list[bytes]:
    """So many frames, in runs as a worker reads them."""
    frame = frames.pack(payload)
    each = max(1, 16_384 // len(frame))
    return [frame * min(each, count - i) for i in range(0, count, each)]


async def flood(link: Link, conn_id: int, payload: bytes, count: int, *, settle: bool = True) -> None:
    """One LinkBatch of them."""
    await link.events([(DATA, conn_id, run) for run in runs(payload, count)], settle=settle)


@asynccontextmanager
async def turns_of_others(state: StateShard, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[list[int]]:
    """How often the loop turned to others while each batch was handled. A count, since no time fits every machine."""
    turns, within = 0, list[int]()
    handle = state.uplink.handle

    async def count() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    async def counted(link: LinkStream, batch: LinkBatch) -> None:
        before = turns
        await handle(link, batch)
        within.append(turns - before)

    monkeypatch.setattr(state.uplink, "handle", counted)
    task = asyncio.create_task(count())
    try:
        yield within
    finally:
        task.cancel()


@pytest.mark.parametrize("kind", sorted(KINDS))
async def test_a_flood_of_any_type_blocks_nobody_and_ends_its_own_connection(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World()
    async with world.shard() as state, Link(state) as link:
        bad = await (await link.connect(world.conn_id())).live("bad")
        good = await (await link.connect(world.conn_id())).live("good", 2)
        async with turns_of_others(state, monkeypatch) as within:
            await flood(link, bad.conn_id, KINDS[kind], 60_000, settle=False)
            assert (await good.heartbeat()).code == Code.OK
            await until(lambda: any(r.closes for r in bad.got))
            await until(lambda: max(within, default=0) >= 2)  # a large batch is worked off in slices
        connection = state.shard.connections.get(bad.conn_id)
        assert connection is not None
        assert connection.phase is Phase.WAITING, "the session may resume"
        last = next(r for r in bad.got if r.closes)
        if kind != "login" and kind != "reconn":  # these two are broken from a live connection of another device
            assert (last.kind, last.code) == (pb.ERROR, Code.FLOODING)
        assert len(bad.got) < BURST_FRAMES + 1_000, "what was served, and a BUSY per piece beyond"
        again = await link.connect(world.conn_id())
        assert (await again.reconn(bad.conn_id, bad.secret)).code == Code.OK


async def test_beyond_the_burst_it_is_busy_once_per_run_and_served_again_later() -> None:
    world = World()
    async with world.shard() as state, Link(state) as link:
        client = await (await link.connect(world.conn_id())).live()
        with time_stands_still(state):  # else the bucket drains while a slow machine works them off
            await flood(link, client.conn_id, HEARTBEAT, BURST_FRAMES + 300)
        await client.next(pb.ERROR)
        told = client.of(pb.ERROR)
        assert {(r.code, r.message.type) for r in told} == {(Code.BUSY, pb.HEARTBEAT)}
        assert len(told) <= 5
        assert state.shard.connections[client.conn_id].phase is Phase.LIVE
        await passed(state, 1_500)
        assert (await client.heartbeat()).code == Code.OK
        assert not any(r.closes for r in client.got)


async def test_a_batch_is_taken_only_when_all_of_it_is_done() -> None:
    world = World()
    async with world.shard() as state, Link(state) as link:
        clients = [await (await link.connect(world.conn_id())).live(f"u{i}", i + 1) for i in range(3)]
        (stream,) = state.shard.links.values()
        before = stream.handled
        answered_early = []
        seen = asyncio.create_task(until(lambda: any(len(c.of(pb.ACK)) > 100 for c in clients)))
        seen.add_done_callback(lambda _: answered_early.append(stream.handled))
        events = [(DATA, c.conn_id, run) for c in clients for run in runs(HEARTBEAT, 3_000)]
        await link.events(events)
        await seen
        assert stream.handled == before + 1
        for client in clients:
            await until(lambda client=client: len(client.of(pb.ACK)) >= 3_000)  # type: ignore[misc]  # a default binds it


async def test_order_holds_within_a_run_of_many_pieces() -> None:
    world = World()
    async with world.shard(state__max_uplinks_per_connection=1_000) as state, Link(state) as link:
        client = await (await link.connect(world.conn_id())).live()
        await link.events(
            [
                (DATA, client.conn_id, b"".join(frames.pack(up("c", n)) for n in range(first, first + 250)))
                for first in range(1, 1_001, 250)
            ]
        )
        await until(lambda: len([r for r in client.of(pb.ACK) if r.message.Type == pb.UP and not r.code]) >= 1_000)
        assert [r.client_id for r in await world.bus.records()] == list(range(1, 1_001))


async def test_a_flood_before_login_and_from_a_stranger_is_closed_too() -> None:
    world = World()
    async with world.shard() as state, Link(state) as link:
        opened, stranger = await link.connect(world.conn_id()), Client(link, world.conn_id())
        for client in (opened, stranger):
            with time_stands_still(state):
                await flood(link, client.conn_id, HEARTBEAT, LIMIT_FRAMES + 500)
            last = await client.next(pb.ERROR, lambda r: r.closes)
            assert last.code == Code.FLOODING
            assert client.conn_id not in state.shard.connections


async def test_a_guest_that_floods_is_told_in_its_own_words() -> None:
    world = World()
    async with world.shard(auth__guests=True) as state, Link(state) as link:
        client = await link.connect(world.conn_id())
        await client.send(command(pb.LOGIN, pb.LoginMsg(Head=pb.LoginMsgHead(DeviceID=123))))
        await client.ack(pb.LOGIN)
        await client.heartbeat()
        await until(lambda: state.shard.connections[client.conn_id].phase is Phase.LIVE)
        with time_stands_still(state):
            await flood(link, client.conn_id, HEARTBEAT, LIMIT_FRAMES + 500)
        await until(lambda: any(r.closes for r in client.got))
        assert {r.kind for r in client.got} == {pb.ACK}
        assert client.got[-1].code == Code.FLOODING
        assert state.shard.connections[client.conn_id].phase is Phase.WAITING


class CountingTokens:
    """Counts checks."""

    def __init__(self, inner: TokenVerifier) -> None:
        self.inner = inner
        self.checks = 0

    def verify(self, token: str) -> str:
        self.checks += 1
        return self.inner.verify(token)


async def test_a_live_connection_that_repeats_its_login_costs_no_signature_check() -> None:
    world = World()
    counting = CountingTokens(world.tokens)
    world.tokens = counting  # type: ignore[assignment]  # it is one for whoever asks
    async with world.shard() as state, Link(state) as link:
        client = await (await link.connect(world.conn_id())).live()
        assert counting.checks == 1
        secret = client.secret
        for _ in range(3):
            assert (await client.login()).message.secret == secret
        assert counting.checks == 1
        await client.send(command(pb.LOGIN, pb.LoginMsg(Head=pb.LoginMsgHead(DeviceID=1), token="fake:mallory")))
        await until(lambda: any(r.closes for r in client.got))
        assert counting.checks == 2, "another token is looked at"
        assert state.shard.connections[client.conn_id].session is not None


async def test_at_most_one_route_check_per_connection_is_under_way() -> None:
    world = World()
    async with world.shard() as state, Link(state) as link:
        client = await (await link.connect(world.conn_id())).live()
        world.routes.read_gate = asyncio.Event()
        reads = world.routes.reads
        await flood(link, client.conn_id, HEARTBEAT, 2_000)
        await until(lambda: len(client.of(pb.ACK)) >= 2_000)
        assert world.routes.reads == reads + 1
        assert len(state.sessions._reads) == 0
        world.routes.read_gate.set()
        await until(lambda: not state.sessions._checking)
        await client.heartbeat()
        await until(lambda: world.routes.reads == reads + 2)


async def test_logins_that_wait_for_the_store_hold_one_question_per_connection() -> None:
    world = World()
    async with world.shard() as state, Link(state) as link:
        client = await link.connect(world.conn_id())
        world.routes.read_gate = asyncio.Event()
        await flood(link, client.conn_id, LOGIN, 100)
        assert len(state.sessions._reads) <= 1
        world.routes.read_gate.set()
        assert (await client.ack(pb.LOGIN)).code == Code.OK
        assert (await client.sync()).code == Code.OK
