"""One shard as the link sees it: a bidirectional gRPC stream, opened again and again while the topology names the shard.

    workers' events ─▸ queue ─▸ LinkBatch (≤ 2 untaken; the next fills meanwhile) ─▸ shard
    shard ─▸ StateBatch ─▸ each worker's columns, unopened, to its lane ─▸ taken goes back with the next LinkBatch

Up: an event's credit goes back to its worker when the shard took its batch, so the queue is bounded by credit_bytes per
worker, and a shard that takes nothing stops nobody but itself. Down: a batch counts as taken when the lanes took it; the
shard keeps at most 2 untaken, so memory is bounded by what it sends. A worker that takes nothing for STALL_S loses
frames (R3) instead of stopping the others. When the stream ends, all of this is dropped, and the workers stop reading.
"""

from __future__ import annotations

import asyncio
import random
import time
from array import array
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Protocol

import grpc
from plato.runtime import logs
from plato.runtime.grpc_options import CHANNEL
from plato.runtime.tls import InternalTls
from plato.runtime.tls import channel as new_channel
from plato.wire.v1 import state_pb2, state_pb2_grpc

from .core import lanes
from .core.hold import Serves

MAX_UNTAKEN: Final = 2
BATCH_BYTES: Final = 1_048_576
"""A LinkBatch is closed when it is this large: with one message of FLUSH_BYTES more it stays below gRPC's 4 MiB."""
BACKOFF_MIN_S: Final = 0.05
BACKOFF_MAX_S: Final = 1.0
OPEN_TIMEOUT_S: Final = 2.0
STALL_S: Final = 0.5

_OPTIONS: Final = (
    ("grpc.max_receive_message_length", 64 << 20),
    ("grpc.max_send_message_length", 64 << 20),
    # Each attempt is ours to time: its channel is new, so nothing of an earlier one is waited out.
    *CHANNEL,
)


_STREAM_ERRORS: Final = (grpc.aio.UsageError, asyncio.InvalidStateError, TimeoutError, ConnectionError)

if TYPE_CHECKING:
    _Call = grpc.aio.StreamStreamCall[state_pb2.LinkBatch, state_pb2.StateBatch]


class WorkerPort(Protocol):
    """A worker's lane, as a stream needs it."""

    @property
    def boot(self) -> int:
        """The worker process."""

    def send(self, message: bytes) -> None:
        """Writes a lane message."""

    async def room(self, timeout_s: float) -> bool:
        """Waits until the lane takes more; False: it did not in time (then at once, until it does), or it is closed."""


@dataclass(slots=True)
class Counts:
    """Figures of one shard's stream since the link's start."""

    batches_up: int = 0
    batches_down: int = 0
    bytes_up: int = 0
    events_dropped: int = 0
    frames_dropped: int = 0
    attaches: int = 0
    not_owner_epoch: int = 0
    """The greatest epoch at which the shard said that it lost slots; > the topology's: a newer record is on its way."""


@dataclass(slots=True)
class _Queued:
    index: int
    boot: int
    events: lanes.Events


@dataclass(slots=True)
class _Untaken:
    batch_no: int
    sent_s: float
    costs: dict[tuple[int, int], int] = field(default_factory=dict)
    """(worker index, boot) → bytes of credit that go back."""


class ShardStream:
    """One shard's stream. `workers`: index → lane, kept by the link. `on_change(self)`: it attached or detached;
    `on_serves(self)`: it said which slots it serves."""

    def __init__(
        self,
        name: str,
        group: int,
        addr: str,
        uid: str,
        hello: state_pb2.LinkHello,
        workers: Mapping[int, WorkerPort],
        on_change: Callable[[ShardStream], None],
        on_serves: Callable[[ShardStream], None] = lambda _: None,
        tls: InternalTls | None = None,
    ) -> None:
        self.name = name
        self.group = group
        self.addr = addr
        self.uid = uid
        """The shard's process, by the newest topology."""
        self._at = addr
        """Where the topology saw that process; `addr` is its name."""
        self._tries = 0
        """Attempts since it was last attached."""
        self._again = asyncio.Event()
        """The topology has news of the shard: no back-off stands in the way."""
        self.attached = False
        self.serves: Serves | None = None
        """What the shard said last of the slots that it serves; None: nothing yet on this stream."""
        self.counts = Counts()
        self._hello = hello
        self._tls = tls
        self._workers = workers
        self._on_change = on_change
        self._on_serves = on_serves
        self._log = logs.get("stream").bind(shard=name)
        self._queue: deque[_Queued] = deque()
        self._redirect: list[int] = []
        """conn_ids to name to the shard with the next batch; one batch's worth at a time."""
        self._shed: state_pb2.Shed | None = None
        """Who is asked to go elsewhere with the next batch; likewise."""
        self._untaken: deque[_Untaken] = deque()
        self._batch_no = 0
        self._taken = 0
        self._taken_sent = 0
        self._wake = asyncio.Event()
        self._channel: grpc.aio.Channel | None = None

    def push(self, index: int, boot: int, events: lanes.Events) -> None:
        """Queues a worker's events. Without a stream they are dropped: their attach will never be current again."""
        if not self.attached:
            self.counts.events_dropped += len(events.kinds)
            return
        self._queue.append(_Queued(index, boot, events))
        self._wake.set()

    def responds(self, within_s: float) -> bool:
        """Whether the stream is up and no batch of ours has waited longer than that."""
        return self.attached and (not self._untaken or time.monotonic() - self._untaken[0].sent_s < within_s)

    @property
    def idle(self) -> bool:
        """Nothing waits to be sent or taken."""
        return not self._queue and not self._untaken

    def redirect(self, conn_ids: list[int]) -> bool:
        """Names connections whose clients are to go elsewhere. False: the stream is down, or the last ones still wait."""
        if not self.attached or self._redirect:
            return False
        self._redirect = conn_ids
        self._wake.set()
        return True

    def shed(self, conn_ids: list[int], to: tuple[str, ...]) -> bool:
        """Names connections whose clients may go to the gateways `to`. False: as for `redirect`."""
        if not self.attached or self._shed is not None:
            return False
        self._shed = state_pb2.Shed(conn_ids=array("Q", conn_ids).tobytes(), to=to)
        self._wake.set()
        return True

    async def reserve(self, request: state_pb2.ReserveRequest, timeout_s: float) -> state_pb2.ReserveReply | None:
        """Asks this shard for a reservation; None: it did not answer."""
        if self._channel is None:
            return None
        try:
            reply: state_pb2.ReserveReply = await state_pb2_grpc.StateStub(self._channel).Reserve(
                request, timeout=timeout_s
            )
        except (grpc.aio.AioRpcError, *_STREAM_ERRORS):
            return None
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            return None  # the stream ended meanwhile, and its channel took this call with it
        return reply

    def seen(self, uid: str, at: str) -> None:
        """The topology names this process at this address: one that is waited for is tried at once."""
        if (uid, at) != (self.uid, self._at):
            self.uid, self._at, self._tries = uid, at, 0
            self._again.set()

    async def run(self) -> None:
        """Opens the stream, again with back-off whenever it ends, until cancelled."""
        backoff_s = BACKOFF_MIN_S
        while True:
            why = "ended by the shard"
            heard = self.counts.batches_down
            try:
                await self._attach_once()
            except grpc.aio.AioRpcError as e:
                why = e.details() or str(e.code())
            except _STREAM_ERRORS as e:
                why = str(e) or type(e).__name__
            finally:
                self._detach()
                await self._close_channel()
            if self.counts.batches_down > heard:
                backoff_s = BACKOFF_MIN_S
            self._log.info("the stream is down", addr=self.addr, reason=why, again_in_s=backoff_s)
            try:
                async with asyncio.timeout(backoff_s * random.uniform(0.75, 1.0)):
                    await self._again.wait()
                backoff_s = BACKOFF_MIN_S
            except TimeoutError:
                backoff_s = min(2 * backoff_s, BACKOFF_MAX_S)

    async def _attach_once(self) -> None:
        self._again.clear()
        # By turns: the name may be older than the topology, and the topology older than the name.
        addr = self._at if self._tries % 2 == 0 else self.addr
        self._tries += 1
        channel = self._channel = new_channel(self._tls, addr, _OPTIONS)
        async with asyncio.timeout(OPEN_TIMEOUT_S):
            await self._open(channel)
        # The stubs do not know that requests may be written instead of iterated.
        call = state_pb2_grpc.StateStub(channel).Attach()  # type: ignore[call-arg]
        self._batch_no = self._taken = self._taken_sent = 0
        writer = asyncio.create_task(self._write_all(call), name=f"up-{self.name}")
        reader = asyncio.create_task(self._read_all(call), name=f"down-{self.name}")
        try:
            done, _ = await asyncio.wait((reader, writer), return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                if not task.cancelled():  # gRPC cancels a reader whose call the other side cancelled
                    task.result()
        finally:
            for task in (reader, writer):
                task.cancel()
            await asyncio.gather(reader, writer, return_exceptions=True)
            call.cancel()

    async def _open(self, channel: grpc.aio.Channel) -> None:
        """Waits until it is connected. Raises TimeoutError when the topology has news: whom we wait for may be gone."""
        opening, news = asyncio.create_task(_connect(channel)), asyncio.create_task(self._again.wait())
        try:
            done, _ = await asyncio.wait((opening, news), return_when=asyncio.FIRST_COMPLETED)
            if opening not in done:
                raise TimeoutError("the topology has news of it")
            opening.result()
        finally:
            for task in (opening, news):
                task.cancel()
            await asyncio.gather(opening, news, return_exceptions=True)

    def _detach(self) -> None:
        was = self.attached
        self.attached = False
        self.serves = None
        self.counts.events_dropped += sum(len(q.events.kinds) for q in self._queue)
        self._queue.clear()
        self._redirect = []
        self._shed = None
        self._untaken.clear()
        if was:
            self._on_change(self)

    async def _close_channel(self) -> None:
        channel, self._channel = self._channel, None
        if channel is not None:
            await channel.close(None)

    # ── up ───────────────────────────────────────────────────────────────────────────────────────────────────

    async def _write_all(self, call: _Call) -> None:
        await call.write(state_pb2.LinkBatch(hello=self._hello))
        self.attached = True
        self._tries = 0
        self.counts.attaches += 1
        self._on_change(self)
        while True:
            await self._wake.wait()
            self._wake.clear()
            while True:
                if self._queue and len(self._untaken) < MAX_UNTAKEN:
                    batch = self._next_batch()
                elif self._taken > self._taken_sent or self._redirect or self._shed is not None:
                    batch = state_pb2.LinkBatch()
                else:
                    break
                if self._redirect:
                    batch.redirect = array("Q", self._redirect).tobytes()
                    self._redirect = []
                if self._shed is not None:
                    batch.shed.CopyFrom(self._shed)
                    self._shed = None
                batch.taken = self._taken_sent = self._taken
                await call.write(batch)

    def _next_batch(self) -> state_pb2.LinkBatch:
        """Whatever waits, up to BATCH_BYTES; what one attach of one worker said in a row becomes one set of columns."""
        self._batch_no += 1
        untaken = _Untaken(self._batch_no, time.monotonic())
        batch = state_pb2.LinkBatch(batch_no=self._batch_no)
        joined: dict[tuple[int, int, int], list[lanes.Events]] = {}
        queue, size_bytes = self._queue, 0
        while queue and size_bytes < BATCH_BYTES:
            queued = queue.popleft()
            events = queued.events
            joined.setdefault((queued.index, queued.boot, events.attach), []).append(events)
            cost_bytes = lanes.cost(events)
            size_bytes += cost_bytes
            key = queued.index, queued.boot
            untaken.costs[key] = untaken.costs.get(key, 0) + cost_bytes
        for (index, boot, attach), parts in joined.items():
            if len(parts) == 1:
                (e,) = parts
                batch.events.add(
                    worker=index,
                    boot=boot,
                    attach=attach,
                    kinds=e.kinds,
                    conn_ids=e.conn_ids,
                    lengths=e.lengths,
                    data=e.data,
                )
            else:
                batch.events.add(
                    worker=index,
                    boot=boot,
                    attach=attach,
                    kinds=b"".join([e.kinds for e in parts]),
                    conn_ids=b"".join([e.conn_ids for e in parts]),
                    lengths=b"".join([e.lengths for e in parts]),
                    data=b"".join([e.data for e in parts]),
                )
        self._untaken.append(untaken)
        self.counts.batches_up += 1
        self.counts.bytes_up += size_bytes
        return batch

    def _taken_by_shard(self, batch_no: int) -> None:
        freed = False
        while self._untaken and self._untaken[0].batch_no <= batch_no:
            freed = True
            for (index, boot), cost_bytes in self._untaken.popleft().costs.items():
                worker = self._workers.get(index)
                if worker is not None and worker.boot == boot:
                    worker.send(lanes.pack_credit(self.group, cost_bytes))
        if freed and self._queue:
            self._wake.set()

    # ── down ─────────────────────────────────────────────────────────────────────────────────────────────────

    async def _read_all(self, call: _Call) -> None:
        while True:
            batch = await call.read()
            if not isinstance(batch, state_pb2.StateBatch):
                return  # EOF: the status says why
            self.counts.batches_down += 1
            if batch.taken:
                self._taken_by_shard(batch.taken)
            if batch.not_owner_epoch > self.counts.not_owner_epoch:
                self.counts.not_owner_epoch = batch.not_owner_epoch
                self._log.info("the shard lost slots", at_epoch=batch.not_owner_epoch)
            if batch.serves:
                self.serves = batch.serves_epoch, int.from_bytes(batch.serves, "little")
                self._on_serves(self)
            for columns in batch.frames:
                worker = self._workers.get(columns.worker)
                if worker is None or not await worker.room(STALL_S):
                    self.counts.frames_dropped += len(columns.flags)
                    continue
                worker.send(
                    lanes.pack_frames(
                        batch.payload_lengths,
                        batch.payload_data,
                        columns.conn_ids,
                        columns.payload_index,
                        columns.suffix_lengths,
                        columns.suffix_data,
                        columns.flags,
                    )
                )
            if batch.batch_no:
                self._taken = batch.batch_no
                self._wake.set()


async def _connect(channel: grpc.aio.Channel) -> None:
    """Waits until the channel is connected. Raises ConnectionError at the first failure: when to try again is ours."""
    state = channel.get_state(try_to_connect=True)
    while state != grpc.ChannelConnectivity.READY:
        if state in (grpc.ChannelConnectivity.TRANSIENT_FAILURE, grpc.ChannelConnectivity.SHUTDOWN):
            raise ConnectionError("it does not answer")
        await channel.wait_for_state_change(state)
        state = channel.get_state()
