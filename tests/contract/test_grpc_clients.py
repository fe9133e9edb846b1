"""ShardClient and MsgClient over gRPC, against servers that come, go, hang and answer nonsense."""

from __future__ import annotations

import asyncio
import struct
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from typing import Any

import grpc
import pytest
from grpc import aio
from plato.adapters.msg_grpc import ATTEMPT_S, TOTAL_S, GrpcMsgs
from plato.adapters.shards_grpc import GrpcShards
from plato.core.errors import Unavailable
from plato.fakes.topology import FakeTopology
from plato.ports import Delivery, Payload, Position, Reading, Typing
from plato.topology.record import Msg, Shard, Topology, even_ranges
from plato.wire.v1 import client_pb2, msg_pb2, msg_pb2_grpc, state_pb2, state_pb2_grpc

from tests.ports import free_port

SHARD = "plato-s0"
SHUT = f"shard {SHARD}: UNAVAILABLE"


def topology(epoch: int, *, shard: int = 0, uid: str = "u", msgs: tuple[int, ...] = (), ip: str = "") -> Topology:
    return Topology(
        "cluster",
        epoch,
        even_ranges([SHARD], 1),
        shards={SHARD: Shard(f"127.0.0.1:{shard}" if shard else "", uid, ip)},
        msgs={f"plato-msg-{i}": Msg(f"{uid}-{i}", i, f"127.0.0.1:{port}") for i, port in enumerate(msgs)},
    )


class ShardServer(state_pb2_grpc.StateServicer):
    """Remembers what it was asked."""

    def __init__(self) -> None:
        self.delivered: list[state_pb2.DeliverRequest] = []
        self.replaced: list[state_pb2.ReplacedRequest] = []
        self.untaken = b""
        self.hang = asyncio.Event()
        self.hang.set()

    async def Deliver(self, request: state_pb2.DeliverRequest, context: Any) -> state_pb2.DeliverReply:
        await self.hang.wait()
        self.delivered.append(request)
        return state_pb2.DeliverReply(untaken=self.untaken, epoch=1)

    async def Dirty(self, request: state_pb2.DirtyRequest, context: Any) -> state_pb2.DirtyReply:
        return state_pb2.DirtyReply(done=request.count - 1)

    async def Replaced(self, request: state_pb2.ReplacedRequest, context: Any) -> state_pb2.ReplacedReply:
        self.replaced.append(request)
        return state_pb2.ReplacedReply()

    def Attach(self, request_iterator: Any, context: Any) -> Any:
        raise NotImplementedError

    def Reserve(self, request: Any, context: Any) -> Any:
        raise NotImplementedError


class MsgServer(msg_pb2_grpc.MsgServicer):
    """Answers with what it was asked, and its own number."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.calls = 0
        self.typed: list[tuple[str, str, bool]] = []
        self.refuse: grpc.StatusCode | None = None
        self.hang = asyncio.Event()
        self.hang.set()

    async def Sync(self, request: msg_pb2.SyncRequest, context: Any) -> client_pb2.SyncedMsg:
        self.calls += 1
        await self.hang.wait()
        if self.refuse is not None:
            await context.abort(self.refuse, "as told")
        return client_pb2.SyncedMsg(ref=request.sync.ref, code=self.number, msg=request.user_id)

    async def Pull(self, request: msg_pb2.PullRequest, context: Any) -> client_pb2.PulledMsg:
        return client_pb2.PulledMsg(ref=request.pull.ref, conversation_id=request.pull.conversation_id)

    async def Read(self, request: msg_pb2.ReadRequest, context: Any) -> msg_pb2.ReadReply:
        results = [msg_pb2.ReadResult(code=len(r.user_id), seq=r.seq + 1) for r in request.reads if r.conversation_id]
        return msg_pb2.ReadReply(results=results)

    async def Typing(self, request: msg_pb2.TypingRequest, context: Any) -> msg_pb2.TypingReply:
        self.typed += [(t.user_id, t.typing.conversation_id, t.typing.stopped) for t in request.typing]
        return msg_pb2.TypingReply()


class Servers:
    """Starts and stops servers on ports of the test's choice."""

    def __init__(self) -> None:
        self._running: dict[int, aio.Server] = {}

    async def start(self, servicer: ShardServer | MsgServer, port: int = 0) -> int:
        size = ("grpc.max_receive_message_length", 64 << 20)
        server = aio.server(options=[("grpc.so_reuseport", 0), size])
        if isinstance(servicer, ShardServer):
            state_pb2_grpc.add_StateServicer_to_server(servicer, server)
        else:
            msg_pb2_grpc.add_MsgServicer_to_server(servicer, server)
        bound = server.add_insecure_port(f"127.0.0.1:{port}")
        await server.start()
        self._running[bound] = server
        return bound

    async def stop(self, port: int) -> None:
        await self._running.pop(port).stop(None)

    async def stop_all(self) -> None:
        for port in list(self._running):
            await self.stop(port)


@pytest.fixture
async def servers() -> AsyncIterator[Servers]:
    made = Servers()
    yield made
    await made.stop_all()


async def reached(call: Callable[[], Awaitable[object]], within_s: float) -> float:
    """Calls until it succeeds; how long that took."""
    begun = time.monotonic()
    while True:
        try:
            await call()
            return time.monotonic() - begun
        except Unavailable:
            if time.monotonic() - begun > within_s:
                raise
            await asyncio.sleep(0.01)


# ── shards ───────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
async def source() -> FakeTopology:
    return FakeTopology()


@pytest.fixture
async def shards(source: FakeTopology) -> AsyncIterator[GrpcShards]:
    made = GrpcShards(source)
    yield made
    await made.close()


async def test_deliver_carries_columns_and_returns_what_was_not_taken(
    servers: Servers, source: FakeTopology, shards: GrpcShards
) -> None:
    server = ShardServer()
    source.set(topology(1, shard=await servers.start(server)))
    payloads = [Payload(b"one", b"t" * 16), Payload(b"", b"")]
    entries = [Delivery(1, 0), Delivery((1 << 63) - 1, 1), Delivery(77, 0)]
    server.untaken = struct.pack("<2I", 0, 2)
    assert await shards.deliver(SHARD, payloads, entries) == [0, 2]
    (request,) = server.delivered
    assert list(request.payloads) == [b"one", b""]
    assert list(request.trace_ids) == [b"t" * 16, b""]
    assert request.conn_ids == struct.pack("<3Q", 1, (1 << 63) - 1, 77)
    assert request.payload_index == struct.pack("<3I", 0, 1, 0)
    server.untaken = b""
    assert await shards.deliver(SHARD, [], []) == []


async def test_dirty_and_replaced(servers: Servers, source: FakeTopology, shards: GrpcShards) -> None:
    server = ShardServer()
    source.set(topology(1, shard=await servers.start(server)))
    assert await shards.dirty(SHARD, 42) == 41
    await shards.replaced(SHARD, 1, 2, 402)
    assert server.replaced == [state_pb2.ReplacedRequest(conn_id=1, by_conn_id=2, code=402)]


async def test_a_batch_of_many_megabytes_passes(servers: Servers, source: FakeTopology, shards: GrpcShards) -> None:
    server = ShardServer()
    source.set(topology(1, shard=await servers.start(server)))
    payloads = [Payload(bytes(60_000), b"") for _ in range(150)]  # more than twice what gRPC lets pass untold
    assert await shards.deliver(SHARD, payloads, [Delivery(n, n) for n in range(150)]) == []


@pytest.mark.parametrize("untaken", [b"\x00", struct.pack("<I", 1), struct.pack("<I", 0xFFFFFFFF)])
async def test_nonsense_is_unavailable(
    servers: Servers, source: FakeTopology, shards: GrpcShards, untaken: bytes
) -> None:
    server = ShardServer()
    server.untaken = untaken
    source.set(topology(1, shard=await servers.start(server)))
    with pytest.raises(Unavailable, match="a shard answered"):
        await shards.deliver(SHARD, [Payload(b"x", b"")], [Delivery(1, 0)])


async def test_an_unknown_or_absent_shard_is_unavailable_at_once(source: FakeTopology, shards: GrpcShards) -> None:
    with pytest.raises(Unavailable):
        await shards.dirty(SHARD, 1)
    source.set(topology(1))
    for name in (SHARD, "plato-s9"):
        with pytest.raises(Unavailable, match=f"shard {name} is not in the topology"):
            await shards.dirty(name, 1)
    source.set(topology(2, shard=free_port()))
    told: list[str] = []
    while not told or (SHUT not in told[-1] and len(told) < 3):  # again, where a busy machine stood still
        with pytest.raises(Unavailable) as caught:
            await shards.dirty(SHARD, 1)
        told.append(str(caught.value))
    assert SHUT in told[-1], "refused is known at once; it waits for no time-out, which would be told in other words"


async def test_a_restarted_shard_is_reached_quickly(servers: Servers, source: FakeTopology, shards: GrpcShards) -> None:
    port = await servers.start(ShardServer())
    source.set(topology(1, shard=port))
    await shards.dirty(SHARD, 1)
    took_s: list[float] = []
    while not took_s or (took_s[-1] >= 1.0 and len(took_s) < 2):  # once more, where a busy machine stood still
        await servers.stop(port)
        begun = time.monotonic()
        while time.monotonic() - begun < 2:  # long enough down for gRPC's usual back-off to grow past a second
            with pytest.raises(Unavailable):
                await shards.dirty(SHARD, 1)
            await asyncio.sleep(0.02)
        await servers.start(ShardServer(), port)
        took_s.append(await reached(lambda: shards.dirty(SHARD, 1), 10))
    assert min(took_s) < 1.0  # 0.15 s on a quiet machine; gRPC's usual back-off has grown past a second


async def test_a_new_process_in_the_topology_gets_a_new_channel(
    servers: Servers, source: FakeTopology, shards: GrpcShards
) -> None:
    first, second = ShardServer(), ShardServer()
    source.set(topology(1, shard=await servers.start(first), uid="a"))
    await shards.replaced(SHARD, 1, 2, 402)
    source.set(topology(2, shard=await servers.start(second), uid="b"))
    await shards.replaced(SHARD, 3, 4, 402)
    assert [r.conn_id for r in first.replaced] == [1]
    assert [r.conn_id for r in second.replaced] == [3]


async def test_a_hung_shard_is_unavailable_after_two_seconds(
    servers: Servers, source: FakeTopology, shards: GrpcShards
) -> None:
    server = ShardServer()
    source.set(topology(1, shard=await servers.start(server)))
    server.hang.clear()
    begun = time.monotonic()
    calls = [shards.deliver(SHARD, [Payload(b"x", b"")], [Delivery(1, 0)]) for _ in range(5)]
    results = await asyncio.gather(*calls, return_exceptions=True)
    assert all(isinstance(r, Unavailable) for r in results)
    assert 1.9 < time.monotonic() - begun < 8, "five time-outs one after the other"
    server.hang.set()
    assert await shards.deliver(SHARD, [Payload(b"x", b"")], [Delivery(1, 0)]) == []


async def test_close_fails_calls_on_their_way_and_cancels_nobody(
    servers: Servers, source: FakeTopology, shards: GrpcShards
) -> None:
    server = ShardServer()
    source.set(topology(1, shard=await servers.start(server)))
    await shards.dirty(SHARD, 1)
    server.hang.clear()
    waiting = asyncio.create_task(shards.deliver(SHARD, [Payload(b"x", b"")], [Delivery(1, 0)]))
    await asyncio.sleep(0.05)
    await shards.close()
    with pytest.raises(Unavailable):
        await waiting
    with pytest.raises(Unavailable, match="closed"):
        await shards.dirty(SHARD, 1)
    await shards.close()
    server.hang.set()


async def test_a_cancelled_caller_is_cancelled(servers: Servers, source: FakeTopology, shards: GrpcShards) -> None:
    server = ShardServer()
    source.set(topology(1, shard=await servers.start(server)))
    server.hang.clear()
    waiting = asyncio.create_task(shards.deliver(SHARD, [Payload(b"x", b"")], [Delivery(1, 0)]))
    await asyncio.sleep(0.05)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    server.hang.set()


# ── msg ──────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_an_address_that_is_old_is_passed_over_for_the_name(
    servers: Servers, source: FakeTopology, shards: GrpcShards
) -> None:
    """The record may be older than the process: nobody is at 127.0.0.2, the name leads to it."""
    port = await servers.start(ShardServer())
    source.set(topology(1, shard=port, ip="127.0.0.2"))
    await reached(lambda: shards.dirty(SHARD, 4), 5)
    for _ in range(3):  # and it stays there
        assert await shards.dirty(SHARD, 4) == 3


async def test_a_name_that_is_old_is_passed_over_for_the_address(
    servers: Servers, source: FakeTopology, shards: GrpcShards
) -> None:
    """Caches of names keep a replaced pod's address for half a minute; the record has the new one."""
    port = await servers.start(ShardServer())
    newer = topology(2, shard=port, ip="127.0.0.1")
    source.set(replace(newer, shards={SHARD: Shard(f"127.0.0.2:{port}", "u", "127.0.0.1")}))
    assert await shards.dirty(SHARD, 4) == 3


@pytest.fixture
async def msgs(source: FakeTopology) -> AsyncIterator[GrpcMsgs]:
    made = GrpcMsgs(source)
    yield made
    await made.close()


def sync_msg(ref: int = 7) -> bytes:
    return client_pb2.SyncMsg(
        ref=ref, cursors=[client_pb2.Cursor(conversation_id="c" * 60, seq=n) for n in range(200)]
    ).SerializeToString()


async def asked(msgs: GrpcMsgs) -> int:
    """The number of the process that answered."""
    synced = client_pb2.SyncedMsg.FromString(await msgs.sync("жук", sync_msg()))
    assert (synced.ref, synced.msg) == (7, "жук")
    return synced.code


async def test_sync_and_pull_pass_their_bytes_through(servers: Servers, source: FakeTopology, msgs: GrpcMsgs) -> None:
    source.set(topology(1, msgs=(await servers.start(MsgServer(3)),)))
    assert await asked(msgs) == 3
    pull = client_pb2.PullMsg(ref=9, conversation_id="d:x").SerializeToString()
    assert client_pb2.PulledMsg.FromString(await msgs.pull("alice", pull)).conversation_id == "d:x"
    assert client_pb2.PulledMsg.FromString(await msgs.pull("alice", b"")).ref == 0


async def test_processes_are_asked_by_turns(
    servers: Servers, source: FakeTopology, msgs: GrpcMsgs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("plato.adapters.msg_grpc.ATTEMPT_S", 20.0)  # nobody is passed over as too slow
    monkeypatch.setattr("plato.adapters.msg_grpc.TOTAL_S", 20.0)
    source.set(topology(1, msgs=tuple([await servers.start(MsgServer(n)) for n in range(3)])))
    assert sorted([await asked(msgs) for _ in range(6)]) == [0, 0, 1, 1, 2, 2]


async def test_the_next_process_is_asked_when_one_is_gone(
    servers: Servers, source: FakeTopology, msgs: GrpcMsgs
) -> None:
    source.set(topology(1, msgs=(free_port(), await servers.start(MsgServer(1)))))
    begun = time.monotonic()
    assert [await asked(msgs) for _ in range(20)] == [1] * 20
    assert time.monotonic() - begun < 2 * ATTEMPT_S, "more than one call waited for the one that is gone"


async def test_a_hung_process_costs_one_call_only(servers: Servers, source: FakeTopology, msgs: GrpcMsgs) -> None:
    hung, good = MsgServer(0), MsgServer(1)
    source.set(topology(1, msgs=(await servers.start(hung), await servers.start(good))))
    hung.hang.clear()
    begun = time.monotonic()
    assert [await asked(msgs) for _ in range(2)] == [1, 1]
    assert [await asked(msgs) for _ in range(10)] == [1] * 10
    assert time.monotonic() - begun > 1.9
    assert hung.calls == 1
    hung.hang.set()


async def test_a_call_outlives_a_restart_of_the_only_process(
    servers: Servers, source: FakeTopology, msgs: GrpcMsgs
) -> None:
    port = await servers.start(MsgServer(5))
    source.set(topology(1, msgs=(port,)))
    assert await asked(msgs) == 5
    await servers.stop(port)
    waiting = asyncio.create_task(asked(msgs))
    done, _ = await asyncio.wait([waiting], timeout=0.5)
    assert not done
    await servers.start(MsgServer(6), port)
    async with asyncio.timeout(10):
        assert await waiting == 6


async def test_a_call_follows_the_topology(servers: Servers, source: FakeTopology, msgs: GrpcMsgs) -> None:
    source.set(topology(1, msgs=(free_port(),)))
    waiting = asyncio.create_task(asked(msgs))
    done, _ = await asyncio.wait([waiting], timeout=0.3)
    assert not done
    source.set(topology(2, uid="v", msgs=(await servers.start(MsgServer(8)),)))
    async with asyncio.timeout(10):
        assert await waiting == 8


async def test_nobody_answers_is_unavailable_before_five_seconds(source: FakeTopology, msgs: GrpcMsgs) -> None:
    source.set(topology(1))
    begun = time.monotonic()
    with pytest.raises(Unavailable, match="names no msg process"):
        await asked(msgs)
    assert TOTAL_S < 5
    assert TOTAL_S - 0.5 < time.monotonic() - begun < TOTAL_S + 5


async def test_a_refusal_is_not_asked_again(servers: Servers, source: FakeTopology, msgs: GrpcMsgs) -> None:
    refusing = MsgServer(0)
    refusing.refuse = grpc.StatusCode.INTERNAL
    source.set(topology(1, msgs=(await servers.start(refusing),)))
    with pytest.raises(Unavailable, match="INTERNAL: as told"):
        await asked(msgs)
    assert refusing.calls == 1


async def test_read_positions_come_back_in_order(servers: Servers, source: FakeTopology, msgs: GrpcMsgs) -> None:
    source.set(topology(1, msgs=(await servers.start(MsgServer(0)),)))
    reads = [Reading("u" * n, "g:x", n << 60) for n in (1, 2, 3)]
    assert await msgs.read(reads) == [Position(n, (n << 60) + 1) for n in (1, 2, 3)]
    with pytest.raises(Unavailable, match="1 positions of 2"):
        await msgs.read([Reading("u", "g:x", 1), Reading("u", "", 1)])


async def test_typing_is_told_once_and_lost_with_the_process_that_is_gone(
    servers: Servers, source: FakeTopology, msgs: GrpcMsgs
) -> None:
    source.set(topology(1))
    with pytest.raises(Unavailable, match="names no msg process"):
        await msgs.typing([Typing("alice", "g:x", False)])
    good = MsgServer(1)
    source.set(topology(2, msgs=(free_port(), await servers.start(good))))
    lost = 0
    for n in range(6):
        try:
            await msgs.typing([Typing("alice", f"g:{n}", True)])
        except Unavailable:
            lost += 1
    assert lost == 1, "who is gone is asked last"
    assert len(good.typed) == 5
    assert good.typed[-1] == ("alice", "g:5", True)
