"""The gRPC service of a shard: gateway streams (Attach), reservations, and what msg and other shards ask.

    Attach   hello ─▸ LinkStream ─▸ reader: LinkBatch ─▸ uplink      writer: next_batch ─▸ StateBatch
    Deliver  columns ─▸ downlink.deliver ─▸ untaken entries
    Dirty    count ─▸ a new run for every session ─▸ done
    Replaced a hint ─▸ sessions

A stream is found by its attach, not by the topology: the newest hello of a worker_id ends the one before. Memory: one
LinkBatch in hand per stream; what goes out is bounded in `stream`.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from typing import Any, Final

import grpc
from plato.core.codes import Code
from plato.core.errors import Unavailable
from plato.ports import ReservationStore
from plato.runtime import logs
from plato.runtime.grpc_options import SERVER
from plato.runtime.tls import InternalTls, add_port
from plato.wire.v1 import state_pb2, state_pb2_grpc

from plato_state.downlink import Downlink
from plato_state.sessions import Sessions
from plato_state.shard import Shard
from plato_state.stream import LinkStream, column_bytes, u32_column, u64_column
from plato_state.uplink import Uplink, unix_ms

HELLO_S: Final = 5.0
MESSAGE_BYTES: Final = 64 << 20
MAX_AHEAD_MS: Final = 60_000

OPTIONS: Final = (
    ("grpc.max_receive_message_length", MESSAGE_BYTES),
    ("grpc.max_send_message_length", MESSAGE_BYTES),
    # A gateway's machine that vanished without a word is noticed; its sessions stop ageing then (R10).
    *SERVER,
)


class StateService(state_pb2_grpc.StateServicer):
    """Serves plato.wire.v1.State."""

    def __init__(
        self, shard: Shard, uplink: Uplink, sessions: Sessions, downlink: Downlink, reservations: ReservationStore
    ) -> None:
        self._shard = shard
        self._uplink = uplink
        self._sessions = sessions
        self._downlink = downlink
        self._reservations = reservations
        self._log = logs.get("server")

    async def Attach(  # type: ignore[override]  # the stub's union of iterators has no coroutine form
        self,
        request_iterator: AsyncIterator[state_pb2.LinkBatch],
        context: grpc.aio.ServicerContext[state_pb2.LinkBatch, state_pb2.StateBatch],
    ) -> None:
        """One gateway stream, from its hello to its end."""
        try:
            async with asyncio.timeout(HELLO_S):
                first: Any = await context.read()
        except TimeoutError:
            await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, "no hello came")
        if not isinstance(first, state_pb2.LinkBatch) or not first.HasField("hello"):
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "the first batch carries no hello")
        if not self._shard.serving:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "this shard does not serve now")
        link = self._attach(first.hello)
        tasks = [
            asyncio.create_task(self._read(context, link, first), name="attach-read"),
            asyncio.create_task(self._write(context, link), name="attach-write"),
        ]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._detach(link)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        for task in done:
            if not task.cancelled() and task.exception() is not None and not link.closed_why:
                self._log.info("a gateway's stream broke", gateway=link.gateway, error=repr(task.exception()))
        if link.closed_why:
            await context.abort(grpc.StatusCode.UNAVAILABLE, link.closed_why)

    async def Reserve(self, request: state_pb2.ReserveRequest, context: Any) -> state_pb2.ReserveReply:
        """Raises a worker_id's reservation."""
        if not 1 <= request.ahead_ms <= MAX_AHEAD_MS or request.worker_id > 1023 or not request.uid:
            return state_pb2.ReserveReply(ok=False, msg="the request is out of bounds")
        try:
            window = await self._reservations.reserve(
                request.worker_id, request.uid, request.boot, unix_ms(), request.ahead_ms
            )
        except Unavailable as e:
            await context.abort(grpc.StatusCode.UNAVAILABLE, str(e))
            raise
        if window is None:
            held = f"worker_id {request.worker_id} is reserved by another process; it may be taken when that has passed"
            return state_pb2.ReserveReply(ok=False, msg=held)
        return state_pb2.ReserveReply(ok=True, from_ms=window.from_ms, until_ms=window.until_ms)

    async def Deliver(self, request: state_pb2.DeliverRequest, context: Any) -> state_pb2.DeliverReply:
        """Hands frames to connections of this shard."""
        if not self._shard.serving:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "this shard does not serve now")
        try:
            conn_ids, indexes = u64_column(request.conn_ids), u32_column(request.payload_index)
            untaken = self._downlink.deliver(request.payloads, conn_ids, indexes, request.trace_ids)
        except ValueError:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "the columns do not fit together")
            raise
        column = u32_column(b"")
        column.extend(untaken)
        return state_pb2.DeliverReply(untaken=column_bytes(column), epoch=self._shard.topology_epoch)

    async def Dirty(self, request: state_pb2.DirtyRequest, context: Any) -> state_pb2.DirtyReply:
        """Begins a new run for every session, once per count. Slots that load later begin theirs anyway."""
        if not self._shard.serving:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "this shard does not serve now")
        if request.count > self._shard.dirty_done:
            self._log.info("pushes may have been lost: every session begins a new run", count=request.count)
            self._downlink.doubt_all()
            self._shard.dirty_done = request.count
        return state_pb2.DirtyReply(done=self._shard.dirty_done)

    async def Replaced(self, request: state_pb2.ReplacedRequest, context: Any) -> state_pb2.ReplacedReply:
        """A newer session stands: the old connection is closed."""
        try:
            code = Code(request.code)
        except ValueError:
            code = Code.REPLACED
        self._sessions.replaced(request.conn_id, request.by_conn_id, code)
        return state_pb2.ReplacedReply()

    def _attach(self, hello: state_pb2.LinkHello) -> LinkStream:
        shard = self._shard
        before = shard.links.get(hello.worker_id)
        if before is not None:
            before.close("a newer stream of this gateway attached")
            shard.detached(before)
        link = shard.links[hello.worker_id] = LinkStream(hello)
        link.serves(shard.topology_epoch, shard.serves())
        self._log.info("a gateway attached", gateway=hello.gateway, worker_id=hello.worker_id, workers=hello.workers)
        return link

    def _detach(self, link: LinkStream) -> None:
        shard = self._shard
        link.close(link.closed_why)
        if shard.links.get(link.worker_id) is link:
            shard.detached(link)
            self._log.info("a gateway detached", gateway=link.gateway, worker_id=link.worker_id)

    async def _read(self, context: Any, link: LinkStream, batch: Any) -> None:
        while isinstance(batch, state_pb2.LinkBatch):  # else EOF
            # A stream that was superseded or silenced speaks for nobody any more.
            if link.closed_why or self._shard.links.get(link.worker_id) is not link:
                return
            await self._uplink.handle(link, batch)
            batch = await context.read()

    async def _write(self, context: Any, link: LinkStream) -> None:
        while True:
            await link.wake.wait()
            link.wake.clear()
            if link.closed_why:
                return
            while (batch := link.next_batch()) is not None:
                await context.write(batch)


def make_server(
    service: StateService, host: str, port: int, tls: InternalTls | None = None
) -> tuple[grpc.aio.Server, int]:
    """A server that is bound and not started. Returns it and its port (port 0: one is chosen). Raises OSError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:  # gRPC itself would not say why a port cannot be taken
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind((host, port))
    server = grpc.aio.server(options=OPTIONS)
    state_pb2_grpc.add_StateServicer_to_server(service, server)
    address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    try:
        bound = add_port(tls, server, address)
    except RuntimeError as e:
        raise OSError(f"{address} cannot be bound: {e}") from e
    if not bound:
        raise OSError(f"{address} cannot be bound")
    return server, bound
