"""gRPC between the parts: a peer that vanished without a word is noticed by both sides; an idle one is not left."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import grpc
from plato.runtime.grpc_options import CHANNEL, KEEPALIVE_TIME_MS, KEEPALIVE_TIMEOUT_MS, SERVER
from plato.wire.v1 import state_pb2, state_pb2_grpc

NOTICED_S = (KEEPALIVE_TIME_MS + KEEPALIVE_TIMEOUT_MS) / 1000 + 5
IDLE_S = 22.0
"""Four pings: gRPC's default for servers ends a connection at the third that it finds too early."""


class Shard(state_pb2_grpc.StateServicer):
    """Streams that say nothing; it keeps when each of them ended, by gateway."""

    def __init__(self) -> None:
        self.began: set[str] = set()
        """Gateways whose first answer was written."""
        self.ended: dict[str, float] = {}

    async def Attach(  # type: ignore[override]  # the stub's union of iterators has no coroutine form
        self, request_iterator: Any, context: Any
    ) -> None:
        first = await context.read()
        await context.write(state_pb2.StateBatch())
        self.began.add(first.hello.gateway)
        try:
            await asyncio.Event().wait()
        finally:
            self.ended[first.hello.gateway] = time.monotonic()

    async def Reserve(self, request: Any, context: Any) -> state_pb2.ReserveReply:
        raise NotImplementedError

    async def Deliver(self, request: Any, context: Any) -> state_pb2.DeliverReply:
        raise NotImplementedError

    async def Dirty(self, request: Any, context: Any) -> state_pb2.DirtyReply:
        raise NotImplementedError

    async def Replaced(self, request: Any, context: Any) -> state_pb2.ReplacedReply:
        raise NotImplementedError


class Wire:
    """A TCP relay that can fall silent without closing anything."""

    def __init__(self, port: int) -> None:
        self._target = port
        self._tasks: set[asyncio.Task[None]] = set()
        self._writers: list[asyncio.StreamWriter] = []
        self.silent = False

    async def listen(self) -> int:
        self._server = await asyncio.start_server(self._join, "127.0.0.1", 0)
        return int(self._server.sockets[0].getsockname()[1])

    async def _join(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection("127.0.0.1", self._target)
        self._writers += writer, back
        for source, sink in ((reader, back), (there, writer)):
            self._tasks.add(asyncio.create_task(self._carry(source, sink)))

    async def _carry(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        while data := await source.read(65_536):
            if not self.silent:
                sink.write(data)

    async def close(self) -> None:
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for writer in self._writers:
            writer.transport.abort()
        await asyncio.gather(*(w.wait_closed() for w in self._writers), return_exceptions=True)


async def ends(addr: str, gateway: str) -> float:
    """Holds a stream that says nothing until it ends; when that was."""
    async with grpc.aio.insecure_channel(addr, options=CHANNEL) as channel:
        stub: Any = state_pb2_grpc.StateStub(channel)
        call = stub.Attach()
        await call.write(state_pb2.LinkBatch(hello=state_pb2.LinkHello(gateway=gateway)))
        try:
            await call.read()
            await call.read()
        except grpc.aio.AioRpcError:
            pass
        return time.monotonic()


async def test_a_dead_wire_is_noticed_and_an_idle_one_is_kept() -> None:
    shard = Shard()
    server = grpc.aio.server(options=SERVER)
    state_pb2_grpc.add_StateServicer_to_server(shard, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    wire = Wire(port)
    tasks = [
        asyncio.create_task(ends(f"127.0.0.1:{await wire.listen()}", "cut")),
        asyncio.create_task(ends(f"127.0.0.1:{port}", "idle")),
    ]
    cut, idle = tasks
    try:
        async with asyncio.timeout(10):
            while shard.began != {"cut", "idle"}:  # noqa: ASYNC110 - of gRPC's own tasks
                await asyncio.sleep(0.01)
        begun = time.monotonic()
        wire.silent = True
        async with asyncio.timeout(NOTICED_S + 5):
            ended = await cut
            while "cut" not in shard.ended:  # noqa: ASYNC110 - of gRPC's own tasks
                await asyncio.sleep(0.05)
        assert ended - begun < NOTICED_S
        assert ended - begun > KEEPALIVE_TIMEOUT_MS / 1000, "it was the wire, and not a refusal"
        assert shard.ended["cut"] - begun < NOTICED_S
        await asyncio.wait([idle], timeout=begun + IDLE_S - time.monotonic())
        assert not idle.done()
        assert "idle" not in shard.ended
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await wire.close()
        await server.stop(None)
