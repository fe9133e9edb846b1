"""A state shard over fakes with its real gRPC server, and a link in the test that speaks for a gateway's workers."""

from __future__ import annotations

import asyncio
import contextlib
from array import array
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import Any

import grpc
import pytest
from plato.core import frames
from plato.core.codes import Code
from plato.core.errors import Unavailable
from plato.core.ids import make_id
from plato.fakes.bus import FakeBus
from plato.fakes.store import FakeReservationStore, FakeRouteStore, FakeSessionStore, MemoryStore
from plato.fakes.tokens import FakeTokens
from plato.fakes.topology import FakeTopology
from plato.ports import Delivery, Payload, Position, Reading, Route, Typing
from plato.runtime.settings import Settings, load
from plato.topology.record import Shard as ShardRecord
from plato.topology.record import SlotRange, Topology
from plato.wire.v1 import client_pb2 as pb
from plato.wire.v1 import state_pb2, state_pb2_grpc
from plato.wire.v1.bus_pb2 import Record
from plato_state.service import Ports, StateShard
from plato_state.shard import ticks
from plato_state.stream import RUN

STAMP_MS = 1_800_000_000_000
WORKER_ID = 7
OPENED, DATA, CLOSED, BEGIN, NAMED, END = range(1, 7)
ALL_SLOTS = b"\xff" * 128


async def until(what: Callable[[], Any], timeout_s: float = 30.0) -> Any:
    """Waits until `what()` is true; returns it. Raises AssertionError at the deadline."""
    deadline = asyncio.get_running_loop().time() + timeout_s
    while not (value := what()):
        if asyncio.get_running_loop().time() > deadline:
            raise AssertionError("the condition did not come true in time")
        await asyncio.sleep(0.005)
    return value


async def passed(state: StateShard, ms: int) -> None:
    """Waits until the shard has counted so many milliseconds, in its own ticks."""
    end = state.shard.now + ticks(ms)
    await until(lambda: state.shard.now >= end, 30 + ms / 100)


@contextlib.contextmanager
def time_stands_still(state: StateShard) -> Iterator[None]:
    """Within, the shard counts no tick: nothing is repeated, filled up again or too late, however slow the machine is."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(state.timers, "turn", lambda now_s: None)
        yield


def settings_for(name: str, uid: str, **flags: Any) -> Settings:
    """Settings of a shard whose times do not count, for a busy machine may take seconds to bring a frame: what is to be too
    late, repeated or too much has its own. Flags like state__heartbeat_ms=200."""
    base: dict[str, Any] = {
        "process.name": name,
        "process.uid": uid,
        "state.login_timeout_ms": 60_000,
        "state.heartbeat_ms": 20_000,
        "state.resume_window_ms": 60_000,
        "state.repeat_min_ms": 20_000,
        "state.pending_ms": 1_000,
        "state.bus_calm_ms": 10_000,
        "state.receipt_calm_ms": 60_000,
    }
    base.update({key.replace("__", "."): value for key, value in flags.items()})
    return load(None, environ={}, flags=base)


def up(
    conversation: str,
    client_id: int,
    *,
    acked: int = 0,
    body: bytes = b"hi",
    conn_id: int = 0,
    client_msg_id: bytes | None = None,
    **more: Any,
) -> bytes:
    """An UP frame's payload; its client_msg_id follows from conversation and client_id."""
    if client_msg_id is None:
        client_msg_id = f"{conversation}/{client_id}".encode().ljust(16, b".")[:16]
    message = pb.UPMsg(
        Head=pb.UPMsgHead(ClientID=client_id, ConnID=conn_id, SessionId=conversation),
        UPMsgBody=body,
        acked=acked,
        client_msg_id=client_msg_id,
        **more,
    )
    return command(pb.UP, message)


def command(kind: pb.CmdType.ValueType, message: Any) -> bytes:
    """A MsgCmd."""
    return pb.MsgCmd(Type=kind, Payload=message.SerializeToString()).SerializeToString()


class FakeMsg:
    """MsgClient: answers empty pages, or those of `on_sync`; what was asked stands in `asked`."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, str, int]] = []
        self.away = False
        self.gate: asyncio.Event | None = None
        self.on_sync: Callable[[str], pb.SyncedMsg] = lambda _: pb.SyncedMsg()
        self.on_read: Callable[[Reading], Position] = lambda reading: Position(0, reading.seq)
        self.readings: list[list[Reading]] = []
        """What was asked in one request each."""
        self.typed: list[list[Typing]] = []

    async def sync(self, user: str, sync: bytes) -> bytes:
        request = pb.SyncMsg.FromString(sync)
        self.asked.append(("sync", user, request.ref))
        if self.gate is not None:
            await self.gate.wait()
        if self.away:
            raise Unavailable("msg is away")
        page = self.on_sync(user)
        page.ref = request.ref
        return page.SerializeToString()

    async def pull(self, user: str, pull: bytes) -> bytes:
        request = pb.PullMsg.FromString(pull)
        self.asked.append(("pull", user, request.ref))
        if self.gate is not None:
            await self.gate.wait()
        if self.away:
            raise Unavailable("msg is away")
        return pb.PulledMsg(ref=request.ref, conversation_id=request.conversation_id).SerializeToString()

    async def read(self, reads: Sequence[Reading]) -> list[Position]:
        self.readings.append(list(reads))
        if self.gate is not None:
            await self.gate.wait()
        if self.away:
            raise Unavailable("msg is away")
        return [self.on_read(reading) for reading in reads]

    async def typing(self, signals: Sequence[Typing]) -> None:
        self.typed.append(list(signals))
        if self.gate is not None:
            await self.gate.wait()
        if self.away:
            raise Unavailable("msg is away")


class FakeShards:
    """ShardClient: calls the other shards of the test in memory; hints may be kept from arriving."""

    def __init__(self) -> None:
        self.states: dict[str, StateShard] = {}
        self.lose_hints = False
        self.told: list[tuple[str, int, int, int]] = []

    async def deliver(self, shard: str, payloads: Sequence[Payload], entries: Sequence[Delivery]) -> list[int]:
        state = self.states[shard]
        return state.downlink.deliver(
            [p.frame for p in payloads], [e.conn_id for e in entries], [e.payload for e in entries]
        )

    async def dirty(self, shard: str, count: int) -> int:
        raise Unavailable("not asked of another shard")

    async def replaced(self, shard: str, conn_id: int, by_conn_id: int, code: int) -> None:
        self.told.append((shard, conn_id, by_conn_id, code))
        if not self.lose_hints and shard in self.states:
            self.states[shard].sessions.replaced(conn_id, by_conn_id, Code(code))


class GatedRoutes(FakeRouteStore):
    """Routes whose compare-and-set can be held, and broken off before or after its effect."""

    def __init__(self, memory: MemoryStore) -> None:
        super().__init__(memory)
        self.gate: asyncio.Event | None = None
        self.waiting = 0
        self.break_next = ""
        self.reads = 0
        self.read_gate: asyncio.Event | None = None

    async def read_many(self, users: Sequence[str]) -> list[dict[int, Route]]:
        self.reads += 1
        if self.read_gate is not None:
            await self.read_gate.wait()
        return await super().read_many(users)

    async def compare_and_set(
        self, user: str, device_id: int, expected: Route | None, new: Route, most: int = 0
    ) -> bool:
        if self.gate is not None:
            self.waiting += 1
            await self.gate.wait()
            self.waiting -= 1
        broken, self.break_next = self.break_next, ""
        if broken == "before":
            raise Unavailable("nothing was written")
        done = await super().compare_and_set(user, device_id, expected, new, most)
        if broken == "after":
            raise Unavailable("the answer was lost")
        return done


class GatedBus(FakeBus):
    """A bus whose appends can be held; every call that arrived stands in `calls`."""

    def __init__(self, partitions: int) -> None:
        super().__init__(partitions)
        self.gate: asyncio.Event | None = None
        self.calls: list[dict[int, list[bytes]]] = []

    async def append(self, batches: Any) -> None:
        self.calls.append({p: list(records) for p, records in batches.items()})
        if self.gate is not None:
            await self.gate.wait()
        await super().append(batches)

    async def records(self) -> list[Record]:
        """Every record that is on the bus, by partition and position."""
        out = []
        for partition in range(self.partitions):
            out += [Record.FromString(r.value) for r in await self.read(partition, 0, 100_000)]
        return out


class World:
    """Store, bus, topology and msg of one test; shards come and go in it."""

    def __init__(self, shards: tuple[str, ...] = ("s0",)) -> None:
        self.memory = MemoryStore()
        self.session_store = FakeSessionStore(self.memory)
        self.routes = GatedRoutes(self.memory)
        self.bus = GatedBus(4)
        self.tokens = FakeTokens()
        self.msg = FakeMsg()
        self.shards = FakeShards()
        self.uids = {name: f"{name}-uid-1" for name in shards}
        cuts = [1024 * i // len(shards) for i in range(len(shards) + 1)]
        self.owners = [SlotRange(cuts[i], cuts[i + 1] - 1, n, 1) for i, n in enumerate(shards)]
        self.epoch = 0
        self.topology = FakeTopology()
        self.publish()
        self._next = 0

    def publish(self) -> None:
        """Writes the topology with the uids and owners of now."""
        self.epoch += 1
        records = {name: ShardRecord("", uid) for name, uid in self.uids.items()}
        self.topology.set(Topology("cluster", self.epoch, tuple(self.owners), records))

    def conn_id(self, slot: int | None = None) -> int:
        """A new conn_id of the test's gateway, in `slot` (any by default)."""
        self._next += 1
        return make_id(STAMP_MS + self._next, WORKER_ID, (self._next if slot is None else slot) % 1024)

    def sessions(self) -> dict[int, Any]:
        """Stored sessions by conn_id."""
        return {c: s for slot in self.memory.slots.values() for c, s in slot.sessions.items()}

    @contextlib.asynccontextmanager
    async def shard(self, name: str = "s0", **flags: Any) -> AsyncIterator[StateShard]:
        """A running shard; killed (nothing is released) when the block ends, unless it was stopped."""
        state = await self.start(name, **flags)
        try:
            yield state
        finally:
            await kill(state)

    async def start(self, name: str = "s0", wait: bool = True, **flags: Any) -> StateShard:
        """Starts a shard and waits until it serves."""
        state = StateShard(
            settings_for(name, self.uids[name], **flags),
            Ports(
                sessions=self.session_store,
                routes=self.routes,
                reservations=FakeReservationStore(self.memory),
                bus=self.bus,
                tokens=self.tokens,
                topology=self.topology,
                shards=self.shards,
                msg=self.msg,
            ),
        )
        state.bind(0)
        self.shards.states[name] = state
        _MAINS[id(state)] = asyncio.create_task(state.main(), name=f"shard-{name}")
        if wait:
            await until(lambda: not state.not_ready() or _MAINS[id(state)].done())
            if _MAINS[id(state)].done():
                await _MAINS[id(state)]
        return state


_MAINS: dict[int, asyncio.Task[None]] = {}


def main_task(state: StateShard) -> asyncio.Task[None]:
    """The task that runs a shard."""
    return _MAINS[id(state)]


async def kill(state: StateShard) -> None:
    """Ends a shard as a crash would: nothing is released, nothing is said."""
    task = _MAINS.pop(id(state), None)
    if task is None:
        return
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    state.shard.silence("killed")
    await state.server.stop(0)


class Received:
    """One frame that a connection got."""

    def __init__(self, payload: bytes, closes: bool) -> None:
        self.command = pb.MsgCmd.FromString(payload)
        self.raw = payload
        self.closes = closes
        kinds: dict[int, Any] = {
            pb.ACK: pb.ACKMsg,
            pb.PUSH: pb.PushMsg,
            pb.SYNCED: pb.SyncedMsg,
            pb.PULLED: pb.PulledMsg,
            pb.NOTIFY: pb.NotifyMsg,
            pb.RECEIPT: pb.ReceiptMsg,
            pb.KICK: pb.KickMsg,
            pb.ERROR: pb.ErrorMsg,
            pb.READ: pb.ReadMsg,
            pb.TYPING: pb.TypingMsg,
            pb.STATE: pb.StateMsg,
        }
        self.kind = self.command.Type
        self.message: Any = kinds[self.kind].FromString(self.command.Payload)
        self.code: int = getattr(self.message, "Code", getattr(self.message, "code", -1))

    def __repr__(self) -> str:
        return f"{pb.CmdType.Name(self.kind)}({self.message!s}, closes={self.closes})".replace("\n", " ")


class Link:
    """A gateway's link: one stream to a shard, one worker (0 of 1)."""

    def __init__(self, state: StateShard, worker_id: int = WORKER_ID, boot: int = 99, workers: int = 1) -> None:
        self.state = state
        self.worker_id = worker_id
        self.boot = boot
        self.workers = workers
        self.attach_no = 0
        self.got: dict[int, list[Received]] = {}
        self.batches: list[state_pb2.StateBatch] = []
        self.hold_taken = False
        self.ended = asyncio.Event()
        self._batch_no = 0
        self._taken = 0
        self._shard_took = 0
        self._writing = asyncio.Lock()  # gRPC takes one write at a time
        self._channel: grpc.aio.Channel | None = None
        self._reader: asyncio.Task[None] | None = None

    async def open(self, announce: Sequence[int] | None = (), link_boot: int = 1) -> Link:
        """Opens the stream; announces all slots with these live conn_ids (None: announces nothing)."""
        self._channel = grpc.aio.insecure_channel(
            f"127.0.0.1:{self.state.port}", options=(("grpc.use_local_subchannel_pool", 1),)
        )
        stub: Any = state_pb2_grpc.StateStub(self._channel)
        self._call: Any = stub.Attach()
        hello = state_pb2.LinkHello(
            gateway="edge-0", uid="g", worker_id=self.worker_id, workers=self.workers, link_boot=link_boot, runs=True
        )
        await self._write(state_pb2.LinkBatch(hello=hello))
        self._reader = asyncio.create_task(self._read())
        if announce is not None:
            await self.announce(announce)
        return self

    async def announce(self, live: Sequence[int] = (), slots: bytes = ALL_SLOTS, worker: int = 0) -> None:
        """A new attach of the worker: BEGIN, NAMED …, END."""
        self.attach_no += 1
        events = [(BEGIN, 0, slots), *((NAMED, c, b"t127.0.0.1") for c in live), (END, 0, b"")]
        await self.events(events, worker=worker)

    async def events(
        self,
        events: Sequence[tuple[int, int, bytes]],
        *,
        worker: int = 0,
        attach: int | None = None,
        boot: int | None = None,
        settle: bool = True,
    ) -> None:
        """One LinkBatch of one worker's events; by default waits until the shard took it."""
        number = self._batch_no = self._batch_no + 1
        batch = state_pb2.LinkBatch(batch_no=number, taken=self._taken)
        batch.events.add(
            worker=worker,
            boot=self.boot if boot is None else boot,
            attach=self.attach_no if attach is None else attach,
            kinds=bytes(k for k, _, _ in events),
            conn_ids=array("Q", [c for _, c, _ in events]).tobytes(),
            lengths=array("I", [len(d) for _, _, d in events]).tobytes(),
            data=b"".join(d for _, _, d in events),
        )
        await self._write(batch)
        if settle:
            await until(lambda: self._shard_took >= number or self.ended.is_set())

    async def connect(self, conn_id: int) -> Client:
        """A socket opens."""
        await self.events([(OPENED, conn_id, b"t127.0.0.1")])
        return Client(self, conn_id)

    async def data(self, conn_id: int, *payloads: bytes) -> None:
        """Frames of one connection."""
        await self.events([(DATA, conn_id, b"".join(frames.pack(p) for p in payloads))])

    async def closed(self, conn_id: int) -> None:
        """A socket is gone."""
        await self.events([(CLOSED, conn_id, b"\x00\x00")])

    async def hold(self) -> None:
        """Takes no batch from now on, and the shard knows that it took all before."""
        stream = self.state.shard.links[self.worker_id]
        await until(lambda: stream._taken == stream._batch_no)
        self.hold_taken = True

    async def take(self) -> None:
        """Tells the shard which batches were taken."""
        await self._write(state_pb2.LinkBatch(taken=self._taken))

    async def close(self) -> None:
        """The stream ends, as when the link dies."""
        if self._reader is not None:
            self._reader.cancel()
            await asyncio.gather(self._reader, return_exceptions=True)
        self._call.cancel()
        if self._channel is not None:
            await self._channel.close(None)
        await until(lambda: self.worker_id not in self.state.shard.links or not self.state.shard.serving)

    async def __aenter__(self) -> Link:
        return await self.open()

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def _write(self, batch: state_pb2.LinkBatch) -> None:
        async with self._writing:
            await self._call.write(batch)

    async def _read(self) -> None:
        with contextlib.suppress(grpc.aio.AioRpcError):
            while isinstance(batch := await self._call.read(), state_pb2.StateBatch):
                self.batches.append(batch)
                self._shard_took = max(self._shard_took, batch.taken)
                for conn_id, frame, closes in unpack(batch):
                    self.got.setdefault(conn_id, []).append(Received(frame, closes))
                if batch.batch_no and not self.hold_taken:
                    self._taken = batch.batch_no
                    await self._write(state_pb2.LinkBatch(taken=self._taken))
        self.ended.set()


def unpack(batch: state_pb2.StateBatch) -> Iterator[tuple[int, bytes, bool]]:
    """The frames of a StateBatch, as a worker would send them, and whether it then closes."""
    payloads, at = [], 0
    for length in array("I", batch.payload_lengths):
        payloads.append(batch.payload_data[at : at + length])
        at += length
    assert at == len(batch.payload_data)
    for columns in batch.frames:
        ids, indexes = array("Q", columns.conn_ids), array("I", columns.payload_index)
        assert len(ids) == len(indexes) == len(columns.suffix_lengths) == len(columns.flags)
        at = 0
        for conn_id, index, length, flag in zip(ids, indexes, columns.suffix_lengths, columns.flags, strict=True):
            suffix = columns.suffix_data[at : at + length]
            at += length
            if flag != RUN:
                yield conn_id, payloads[index] + suffix, bool(flag)
                continue
            run = frames.FrameReader().feed(payloads[index])
            assert len(run) == int.from_bytes(suffix, "little") > 1
            yield from ((conn_id, frame, False) for frame in run)


class Client:
    """One connection, as its client uses it."""

    def __init__(self, link: Link, conn_id: int) -> None:
        self.link = link
        self.conn_id = conn_id
        self.secret = b""
        self.run = 0
        self._seen = 0

    @property
    def got(self) -> list[Received]:
        """Every frame so far."""
        return self.link.got.get(self.conn_id, [])

    def of(self, kind: pb.CmdType.ValueType) -> list[Received]:
        """The frames of one type so far."""
        return [r for r in self.got if r.kind == kind]

    async def send(self, *payloads: bytes) -> None:
        """Sends frames."""
        await self.link.data(self.conn_id, *payloads)

    async def next(
        self, kind: pb.CmdType.ValueType, fits: Callable[[Received], bool] = lambda _: True, timeout_s: float = 30.0
    ) -> Received:
        """The next frame of a type (that fits) which `next` did not return before."""

        def look() -> Received | None:
            for i in range(self._seen, len(self.got)):
                if self.got[i].kind == kind and fits(self.got[i]):
                    self._seen = i + 1
                    return self.got[i]
            return None

        try:
            return await until(look, timeout_s)  # type: ignore[no-any-return]  # what look found
        except AssertionError:
            raise AssertionError(f"no {pb.CmdType.Name(kind)} came; got {self.got[self._seen :]}") from None

    async def ack(self, kind: pb.CmdType.ValueType, *, pending: bool = False, timeout_s: float = 30.0) -> Received:
        """The next ACK of frames of type `kind`. PENDING, which a busy machine may bring anywhere, counts only if asked."""

        def fits(r: Received) -> bool:
            return bool(r.message.Type == kind) and (pending or r.code != Code.PENDING)

        return await self.next(pb.ACK, fits, timeout_s)

    async def login(self, user: str = "alice", device_id: int = 1, token: str | None = None) -> Received:
        """Login; returns its ACK."""
        said = f"fake:{user}" if token is None else token
        message = pb.LoginMsg(Head=pb.LoginMsgHead(DeviceID=device_id), token=said)
        await self.send(command(pb.LOGIN, message))
        ack = await self.ack(pb.LOGIN)
        self.secret = ack.message.secret or self.secret
        return ack

    async def reconn(self, conn_id: int, secret: bytes) -> Received:
        """ReConn; returns its ACK."""
        message = pb.ReConnMsg(Head=pb.ReConnMsgHead(ConnID=conn_id), secret=secret)
        await self.send(command(pb.RECONN, message))
        ack = await self.ack(pb.RECONN)
        self.secret = ack.message.secret or self.secret
        return ack

    async def sync(self, ref: int = 1) -> Received:
        """Sync; returns its ACK."""
        await self.send(command(pb.SYNC, pb.SyncMsg(ref=ref)))
        ack = await self.ack(pb.SYNC)
        self.run = ack.message.run
        return ack

    async def heartbeat(self, run: int = 0, push_no: int = 0) -> Received:
        """Heartbeat; returns its ACK."""
        await self.send(command(pb.HEARTBEAT, pb.HeartbeatMsg(run=run, push_no=push_no)))
        return await self.ack(pb.HEARTBEAT)

    async def live(self, user: str = "alice", device_id: int = 1) -> Client:
        """Login and Sync, both fine."""
        assert (await self.login(user, device_id)).code == Code.OK
        assert (await self.sync()).code == Code.OK
        return self


def nth_gen(state: StateShard, n: int) -> int:
    """The gen of a device's n-th statement (1, 2 …) in a store that lost none: the first is the fence's start."""
    return next(iter(state.shard.slots.values())).fence.start + n - 1


def push_frame(text: bytes = b"text", seq: int = 1) -> bytes:
    """What msg hands to a shard: a Push without run and push_no."""
    return command(pb.PUSH, pb.PushMsg(MsgID=seq, Content=text, conversation_id="c", seq=seq, prev_seq=seq - 1))


async def deliver(state: StateShard, conn_ids: Sequence[int], *payloads: bytes) -> list[int]:
    """Deliver over gRPC: each payload to each connection; returns the untaken entries."""
    async with grpc.aio.insecure_channel(f"127.0.0.1:{state.port}") as channel:
        reply = await state_pb2_grpc.StateStub(channel).Deliver(
            state_pb2.DeliverRequest(
                payloads=payloads,
                conn_ids=array("Q", [c for _ in payloads for c in conn_ids]).tobytes(),
                payload_index=array("I", [i for i in range(len(payloads)) for _ in conn_ids]).tobytes(),
                trace_ids=[b""] * len(payloads),
            )
        )
    return list(array("I", reply.untaken))
