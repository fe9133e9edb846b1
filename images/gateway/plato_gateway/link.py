"""The link: one asyncio process per gateway that knows the cluster, so that workers need not.

    workers ═lane═ Link ═gRPC stream═ shards          topology ─▸ groups, slots, homes, streams
                     └ reservation each second ─▸ windows ─▸ workers

It may be killed and started again under live sockets: workers keep them, connect again, and name what lives on each new
attach (R6). Attach numbers are given here, after the greatest that the worker has taken; events that carry another one
than the last given are dropped. Memory: per worker and shard at most credit_bytes up; see stream.py for down.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from plato.core.ids import SLOTS
from plato.ports import TopologySource
from plato.runtime import admin, logs, report, tls
from plato.runtime.process import forever
from plato.runtime.settings import Settings
from plato.topology.record import Gateway, Shard, Topology
from plato.wire.v1 import state_pb2
from prometheus_client import REGISTRY
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from .core import homes, lanes
from .core.grants import Grants
from .core.hold import Holds
from .drain import GatewayDrain
from .lane import BUFFER_BYTES, address
from .load import LinkCollector, Load
from .preflight import StartError, port_error, run_dir_error
from .shed import GatewayShed
from .stream import ShardStream

RESERVE_EVERY_S: Final = 1.0
RESERVE_AHEAD_MS: Final = 3_000
RESERVE_TIMEOUT_S: Final = 0.8
RESERVE_AGAIN_S: Final = 0.1
HOME_SILENT_S: Final = 2.0
TICK_S: Final = 0.25
LANE_HIGH_BYTES: Final = 4_194_304


class WorkerLane(asyncio.Protocol):
    """The link's end of one worker's lane."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._reader = lanes.LaneReader()
        self._transport: asyncio.Transport | None = None
        self._writable = asyncio.Event()
        self._writable.set()
        self._stalled = False
        self.index = -1
        """-1 before HELLO."""
        self.boot = 0
        self.attach = 0
        """The last attach number that was given or taken."""
        self.expected: dict[int, int] = {}
        """Group → the attach number whose events count."""
        self.config: lanes.Config | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See asyncio."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._link.on_lane(self)
        transport.set_write_buffer_limits(high=LANE_HIGH_BYTES)
        sock = transport.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER_BYTES)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, BUFFER_BYTES)

    def data_received(self, data: bytes) -> None:
        """See asyncio."""
        try:
            for message in self._reader.feed(data):
                self._link.on_message(self, message)
        except lanes.LaneError as e:
            self._link.log.error("a worker sent what is no lane message", worker=self.index, error=str(e))
            self.close()

    def connection_lost(self, exc: Exception | None) -> None:
        """See asyncio."""
        self._transport = None
        self._writable.set()
        self._link.on_lane_lost(self)

    def pause_writing(self) -> None:
        """See asyncio."""
        self._writable.clear()

    def resume_writing(self) -> None:
        """See asyncio."""
        self._writable.set()
        self._stalled = False

    def send(self, message: bytes) -> None:
        """Writes a lane message."""
        if self._transport is not None:
            self._transport.write(message)

    async def room(self, timeout_s: float) -> bool:
        """Waits until the lane takes more; False: it did not in time (from then on at once), or it is closed."""
        if not self._writable.is_set():
            if self._stalled:
                return False
            try:
                async with asyncio.timeout(timeout_s):
                    await self._writable.wait()
            except TimeoutError:
                self._stalled = True
                return False
        return self._transport is not None

    def announce(self, group: int, credit_bytes: int) -> None:
        """The group's stream is up."""
        self.attach += 1
        self.expected[group] = self.attach
        self.send(lanes.pack_announce(group, self.attach, credit_bytes))

    def suspend(self, group: int) -> None:
        """The group's stream is down."""
        if self.expected.pop(group, None) is not None:
            self.send(lanes.pack_suspend(group))

    def configure(self, config: lanes.Config) -> None:
        """Sends what changed of who mints, where and when."""
        if config != self.config:
            self.config = config
            self.send(lanes.pack_config(config))

    def close(self) -> None:
        """Ends the lane."""
        if self._transport is not None:
            self._transport.abort()


class Link:
    """Made inside a running loop: `start`, `run` until cancelled, `stop`. on_over: called when a SIGTERM's drain is over."""

    def __init__(self, settings: Settings, source: TopologySource, on_over: Callable[[], None] = lambda: None) -> None:
        self.log = logs.get("link")
        self.load = Load(settings.gateway.max_connections, settings.gateway.max_bytes_per_s)
        self.streams: dict[str, ShardStream] = {}
        self.lanes: dict[int, WorkerLane] = {}
        self._settings = settings
        self._source = source
        self._tls = tls.internal(settings.tls.internal_dir)
        self._name = settings.process.name
        self._uid = settings.process.uid
        self._boot = secrets.randbits(63) | 1
        self._all_lanes: set[WorkerLane] = set()
        self._topology: Topology | None = None
        self._own: Gateway | None = None
        self._groups = homes.Groups()
        self._table = bytes([lanes.NO_GROUP]) * 1024
        self._holds = Holds()
        self._held: frozenset[int] = frozenset()
        self._grants = Grants()
        self._minted_for = -1
        """The worker_id of the grants."""
        self._refused = ""
        """Why no shard reserves for us; "" when one does."""
        self._reserve_now = asyncio.Event()
        self._heard_s: dict[str, float] = {}
        """Shard → when it was last seen to respond (monotonic)."""
        self._tasks: dict[str, asyncio.Task[None]] = {}
        """Shard → the task that runs its stream."""
        self._failure: asyncio.Future[BaseException] = asyncio.get_running_loop().create_future()
        self._server: asyncio.Server | None = None
        self._admin: admin.HttpServer | None = None
        self._lane_folder = -1
        self._collector: LinkCollector | None = None
        self.drain = GatewayDrain(
            settings, self.lanes, self.streams, lambda slot: self._table[slot], lambda: source.gone, on_over
        )
        self.shed = GatewayShed(
            settings,
            self.lanes,
            self.streams,
            lambda slot: self._table[slot],
            self.drain.ask_who_is_here,
            self.not_ready,
        )

    # ── start and end ────────────────────────────────────────────────────────────────────────────────────────

    async def start(self) -> None:
        """Opens the lane's socket and the admin port. Raises StartError."""
        gateway = self._settings.gateway
        try:
            sock, self._lane_folder = _listen(gateway.run_dir)
        except OSError as e:
            raise StartError(run_dir_error(gateway, e)) from e
        loop = asyncio.get_running_loop()
        self._server = await loop.create_unix_server(lambda: WorkerLane(self), sock=sock)
        self._collector = LinkCollector(self.load, self.streams, self.drain, self._reserved_ahead_s)
        REGISTRY.register(self._collector)
        routes = [
            Route("/v1/load", self._load_report),
            report.route(self._settings, self.report),
            self.shed.route(report.guard(self._settings)),
        ]
        application = admin.app(self.not_ready, routes)
        self._admin = admin.HttpServer(
            application, gateway.admin_host, gateway.admin_port, self._tls.serve() if self._tls is not None else None
        )
        try:
            await self._admin.start()
        except OSError as e:
            self._admin = None
            raise StartError(port_error("admin_port", gateway.admin_host, gateway.admin_port, e)) from e

    async def run(self) -> None:
        """Follows the topology, reserves, looks after homes, until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(forever("streams", self._watch_streams()), name="streams")
            group.create_task(forever("topology", self._follow_topology()), name="topology")
            group.create_task(forever("reserve", self._reserve()), name="reserve")
            group.create_task(forever("tick", self._tick()), name="tick")
            group.create_task(forever("drain", self.drain.run()), name="drain")
            group.create_task(forever("shed", self.shed.run()), name="shed")

    async def _watch_streams(self) -> None:
        """Raises what ended a stream's task: a link does not run on with a part of it dead."""
        raise await self._failure

    def _on_stream_task(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None and not self._failure.done():
            self._failure.set_result(error)

    async def stop(self) -> None:
        """Ends streams, lanes and the admin port."""
        for name in list(self._tasks):
            await self._end_stream(name)
        if self._server is not None:
            self._server.close()
        for lane in list(self._all_lanes):
            lane.close()
        if self._admin is not None:
            await self._admin.stop()
        if self._collector is not None:
            REGISTRY.unregister(self._collector)
        if self._lane_folder >= 0:
            os.close(self._lane_folder)
            self._lane_folder = -1

    def not_ready(self) -> str:
        """Why this gateway does not serve now; "" when it does."""
        if self.drain.why:
            return self.drain.why
        if self._topology is None:
            return "no topology was read yet"
        if self._own is None:
            return f"the topology names no gateway {self._name!r} with uid {self._uid!r}"
        if self._refused:
            return self._refused
        if not any(stream.attached for stream in self.streams.values()):
            return "no state shard is attached"
        if not self.lanes:
            return "no worker is attached"
        if self._reserved_ahead_s() <= 0:
            return "no stamps are reserved"
        return ""

    def report(self) -> dict[str, Any]:
        """What /v1/report says. lease: whether the store's reservation of our worker_id is ours; None: not known now."""
        own, lease = self._own, None
        if own is not None:
            lease = False if self._refused else True if self._reserved_ahead_s() > 0 else None
        return {
            "epoch_seen": self._topology.epoch if self._topology is not None else 0,
            "worker_id": own.worker_id if own is not None else None,
            "lease": lease,
            "drain": self.drain.status(),
            "connections": self.load.connections,
            "serving": not self.not_ready(),
        }

    async def _load_report(self, _: Request) -> Response:
        return JSONResponse(self.load.report(self._name, self._uid, not self.not_ready()))

    def _reserved_ahead_s(self) -> float:
        return max(0.0, self._grants.until_ms / 1000 - time.time())

    # ── topology ─────────────────────────────────────────────────────────────────────────────────────────────

    async def _follow_topology(self) -> None:
        epoch = 0
        while True:
            topology = await self._source.changed(epoch)
            epoch = topology.epoch
            await self._apply(topology)

    async def _apply(self, topology: Topology) -> None:
        self._topology = topology
        record = topology.gateways.get(self._name)
        own = record if record is not None and record.uid == self._uid else None
        again = own is None or self._own is None or own.worker_id != self._own.worker_id
        self._own = own
        if own is not None and own.worker_id != self._minted_for:
            # What was reserved, or refused, was so for another worker_id.
            self._minted_for, self._grants, self._refused = own.worker_id, Grants(), ""
        self.drain.topology(topology, own)
        shards = {r.shard for r in topology.slots} & set(topology.shards) if own is not None else set()
        for name, stream in list(self.streams.items()):
            shard = topology.shards.get(name)
            if again or name not in shards or shard is None or shard.addr != stream.addr:
                await self._end_stream(name)
            elif shard.uid != stream.uid and stream.attached:
                await self._end_stream(name)  # it may lead to the process that was replaced
            else:
                stream.seen(shard.uid, shard.at)
        table_before = self._table
        self._groups.keep(sorted(shards))
        self._table = homes.slot_table(topology, self._groups.of)
        self._hold(table_before)
        for name in sorted(set(self._groups.of) - set(self.streams)):
            self._begin_stream(name, topology.shards[name])
        self._reserve_now.set()
        self._configure()

    def _hold(self, table_before: bytes | None = None) -> None:
        """Tells the workers which slots wait for their shard, and about new owners. Who changed is held in between, so that
        nothing of it is read before its new shard was told what lives there."""
        assert self._topology is not None
        said = {name: stream.serves for name, stream in self.streams.items() if stream.serves is not None}
        before, self._held = self._held, self._holds.look(self._topology, said, time.monotonic())
        moved = table_before is not None and self._table != table_before
        changed = {s for s in range(SLOTS) if table_before[s] != self._table[s]} if moved and table_before else set()
        for lane in self.lanes.values():
            if moved:
                lane.send(lanes.pack_hold(before | self._held | changed))
                lane.send(lanes.pack_slots(self._table))
            if moved or self._held != before:
                lane.send(lanes.pack_hold(self._held))

    def _on_serves(self, stream: ShardStream) -> None:
        self._hold()
        self._configure()

    def _begin_stream(self, name: str, shard: Shard) -> None:
        assert self._own is not None
        hello = state_pb2.LinkHello(
            gateway=self._name,
            uid=self._uid,
            worker_id=self._own.worker_id,
            workers=self._settings.gateway.workers,
            link_boot=self._boot,
            runs=True,
        )
        self._heard_s[name] = time.monotonic()
        group, lanes_of = self._groups.of[name], self.lanes
        stream = ShardStream(
            name, group, shard.addr, shard.uid, hello, lanes_of, self._on_stream, self._on_serves, self._tls
        )
        stream.seen(shard.uid, shard.at)
        self.streams[name] = stream
        task = self._tasks[name] = asyncio.create_task(forever(f"stream-{name}", stream.run()), name=f"stream-{name}")
        task.add_done_callback(self._on_stream_task)

    async def _end_stream(self, name: str) -> None:
        task = self._tasks.pop(name)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        del self.streams[name]
        self._heard_s.pop(name, None)

    def _on_stream(self, stream: ShardStream) -> None:
        self._heard_s[stream.name] = time.monotonic()
        if stream.attached:
            self.log.info("attached", shard=stream.name, addr=stream.addr)
            self._announce(stream)
            self._reserve_now.set()
        else:
            for lane in self.lanes.values():
                lane.suspend(stream.group)
        self._configure()

    def _announce(self, stream: ShardStream) -> None:
        for lane in self.lanes.values():
            lane.announce(stream.group, self._settings.gateway.credit_bytes)

    # ── lanes ────────────────────────────────────────────────────────────────────────────────────────────────

    def on_lane(self, lane: WorkerLane) -> None:
        """A worker connected; it has not said hello yet."""
        self._all_lanes.add(lane)

    def on_message(self, lane: WorkerLane, message: lanes.Message) -> None:
        """A worker's message. Raises LaneError when it does not belong here."""
        match message:
            case lanes.Events():
                self._on_events(lane, message)
            case lanes.Stats():
                if self.lanes.get(lane.index) is lane:
                    self.load.stats(lane.index, message, time.monotonic())
            case lanes.Held():
                if self.lanes.get(lane.index) is lane:
                    self.drain.held(lane, message)
                    self.shed.held(lane, message)
            case lanes.Hello():
                self._on_hello(lane, message)
            case _:
                raise lanes.LaneError("this message is the link's to send")

    def _on_hello(self, lane: WorkerLane, hello: lanes.Hello) -> None:
        if lane.index >= 0 or not 0 <= hello.index < self._settings.gateway.workers:
            raise lanes.LaneError(f"worker {hello.index} says hello out of place")
        before = self.lanes.get(hello.index)
        if before is not None:
            before.close()
        lane.index, lane.boot, lane.attach = hello.index, hello.boot, hello.attach
        self.lanes[hello.index] = lane
        self.load.hello(hello)
        self.log.info("worker attached", worker=hello.index, pid=hello.pid, connections=hello.connections)
        lane.send(lanes.pack_hold(self._held))
        lane.send(lanes.pack_slots(self._table))
        self.drain.hello(lane, hello)
        self._configure()
        for stream in self.streams.values():
            if stream.attached:
                lane.announce(stream.group, self._settings.gateway.credit_bytes)
        self._reserve_now.set()  # a new process needs stamps that the one before was not granted

    def on_lane_lost(self, lane: WorkerLane) -> None:
        """A lane ended."""
        self._all_lanes.discard(lane)
        if self.lanes.get(lane.index) is lane:
            del self.lanes[lane.index]
            self.load.gone(lane.index)
            self.log.warning("worker detached", worker=lane.index)

    def _on_events(self, lane: WorkerLane, events: lanes.Events) -> None:
        if self.lanes.get(lane.index) is not lane or lane.expected.get(events.group) != events.attach:
            return  # of an older attach (R6)
        for stream in self.streams.values():
            if stream.group == events.group:
                stream.push(lane.index, lane.boot, events)
                return

    # ── minting ──────────────────────────────────────────────────────────────────────────────────────────────

    def _configure(self) -> None:
        """Sends each worker what changed of its worker_id, home slots and window."""
        own, topology = self._own, self._topology
        if topology is None:
            return  # workers go on as the link before this one said
        slots: tuple[int, ...] = ()
        if own is not None:
            since_s = time.monotonic() - HOME_SILENT_S
            live = {
                name
                for name, stream in self.streams.items()
                if stream.responds(HOME_SILENT_S) or (name in own.homes and self._heard_s[name] > since_s)
            }
            slots = homes.home_slots(topology, own.homes, live)
            slots = tuple(s for s in slots if s not in self._held) or slots
        for lane in self.lanes.values():
            from_ms, until_ms = self._grants.window(lane.index, lane.boot)
            mine = homes.slots_for_worker(slots, lane.index, self._settings.gateway.workers)
            lane.configure(lanes.Config(own.worker_id if own else 0, mine, from_ms, until_ms))

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            now_s = time.monotonic()
            for name, stream in self.streams.items():
                if stream.responds(TICK_S):
                    self._heard_s[name] = now_s
            if self._holds.waiting:
                self._hold()
            self._configure()

    async def _reserve(self) -> None:
        turn = 0
        while True:
            turn += 1
            self._reserve_now.clear()
            ok = self._own is not None and await self._reserve_once(turn)
            wait_s = RESERVE_EVERY_S if ok or self._own is None else RESERVE_AGAIN_S
            try:
                async with asyncio.timeout(wait_s):
                    await self._reserve_now.wait()
                    await asyncio.sleep(RESERVE_AGAIN_S / 2)  # several reasons at once need one answer
            except TimeoutError:
                pass

    async def _reserve_once(self, turn: int) -> bool:
        assert self._own is not None
        request = state_pb2.ReserveRequest(
            worker_id=self._own.worker_id, uid=self._uid, boot=self._boot, ahead_ms=RESERVE_AHEAD_MS
        )
        attached = [s for s in self.streams.values() if s.attached]
        for i in range(len(attached)):
            reply = await attached[(turn + i) % len(attached)].reserve(request, RESERVE_TIMEOUT_S)
            if reply is None:
                continue
            if request.worker_id != self._minted_for:
                return False  # the record gave us another one meanwhile
            if not reply.ok:
                if self._refused != reply.msg:
                    self.log.warning("the reservation was refused", reason=reply.msg)
                self._refused = reply.msg or "another process holds the reservation of this worker_id"
                return False
            self._refused = ""
            self._grants.reserved(reply.from_ms, reply.until_ms)
            self._configure()
            return True
        return False


def _listen(run_dir: Path) -> tuple[socket.socket, int]:
    """The lane's listening socket, in place of one that a dead link left; and `address`'s descriptor. Raises OSError."""
    run_dir.mkdir(parents=True, exist_ok=True)
    where, folder = address(run_dir)
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    with contextlib.suppress(FileNotFoundError):
        Path(where).unlink()
    sock.bind(where)
    Path(where).chmod(0o600)
    sock.listen(64)
    sock.setblocking(False)
    return sock, folder
