"""The six hops in one process: the real parts of gateway, state and msg between sockets and memory.

    Peer ═TCP═ Gateway ──gRPC── StateShard ──▸ FakeBus ──▸ Messages ──▸ StateShard ──gRPC── Gateway ═TCP═ Peer
                  worker's two halves             (fake)      msg's core
                  and a link's ShardStream                    over a dict

Fakes: bus, store, tokens, topology, and the database behind msg. Nothing sleeps: `until` reads the gateway's sockets and
asks its condition again.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any, Final

from plato.core.frames import FrameReader, pack
from plato.core.ids import make_id
from plato.fakes.bus import FakeBus
from plato.fakes.store import FakeReservationStore, FakeRouteStore, FakeSessionStore, MemoryStore
from plato.fakes.tokens import FakeTokens
from plato.fakes.topology import FakeTopology
from plato.ports import Delivery, Payload, Position, Reading, ShardClient, Typing
from plato.runtime.settings import load
from plato.topology.record import Shard, SlotRange, Topology
from plato.wire.v1 import client_pb2 as wire
from plato.wire.v1 import state_pb2
from plato_gateway.core import lanes
from plato_gateway.downlink import Downlink
from plato_gateway.sockets import FRESH, TCP, Sockets
from plato_gateway.stream import ShardStream
from plato_gateway.uplink import Uplink
from plato_msg.core import fanout
from plato_msg.core.batch import Conversation, Decision, Known, Plan, decode, judge, number, wanted
from plato_msg.core.policy import Rules
from plato_state.service import Ports, StateShard

SHARD: Final = "s0"
GATEWAY: Final = 7
PARTITIONS: Final = 4
STAMP_MS: Final = 1_800_000_000_000
FRAME_BYTES: Final = 65_536


class Peer:
    """The far end of a connection: a plain socket, frames out, commands in."""

    def __init__(self, sock: socket.socket, conn_id: int) -> None:
        self.sock = sock
        self.conn_id = conn_id
        self.got: list[wire.MsgCmd] = []
        self._frames = FrameReader()

    def send(self, kind: wire.CmdType.ValueType, body: Any) -> None:
        """Writes one frame."""
        self.sock.sendall(pack(wire.MsgCmd(Type=kind, Payload=body.SerializeToString()).SerializeToString()))

    def read(self) -> None:
        """Takes what the socket has."""
        try:
            data = self.sock.recv(1 << 20)
        except BlockingIOError:
            return
        self.got += map(wire.MsgCmd.FromString, self._frames.feed(data))

    def find(self, kind: wire.CmdType.ValueType, body: Any, **fields: Any) -> list[Any]:
        """The frames of that type with these fields, decoded."""
        found = (body.FromString(cmd.Payload) for cmd in self.got if cmd.Type == kind)
        return [b for b in found if all(getattr(b, name) == value for name, value in fields.items())]


class Gateway:
    """Hops 1 and 6: one worker's tables and halves; to a ShardStream it is the lane (WorkerPort)."""

    boot = 1

    def __init__(self) -> None:
        self.sockets = Sockets()
        stats = lanes.Stats()
        self.downlink = Downlink(self.sockets, stats, 1 << 20)
        self.uplink = Uplink(self.sockets, self.downlink, stats, FRAME_BYTES, self._up)
        self.downlink.sink = self.uplink
        self.events: list[lanes.Events] = []
        """Everything that went up, for a test to look at."""
        self.stream: ShardStream | None = None
        self._from_worker, self._from_link = lanes.LaneReader(), lanes.LaneReader()
        self._minted = 0
        self._listener = socket.create_server(("127.0.0.1", 0))

    def connect(self) -> Peer:
        """A client's socket was accepted and got its conn_id."""
        far = socket.create_connection(self._listener.getsockname())
        near, _ = self._listener.accept()
        near.setblocking(False)
        far.setblocking(False)
        self._minted += 1
        conn_id = make_id(STAMP_MS, GATEWAY, self._minted)
        fd = near.detach()
        self.sockets.add(fd, TCP, ord("t"), FRESH)
        self.sockets.name(fd, conn_id)
        self.uplink.opened(fd, conn_id)
        return Peer(far, conn_id)

    def turn(self) -> None:
        """One round of the worker's loop."""
        for fd in list(self.sockets.fd_of.values()):
            self.uplink.read_tcp(fd)
        self.uplink.flush()

    def close(self) -> None:
        """Ends every socket."""
        for fd in list(self.sockets.fd_of.values()):
            self.sockets.end(fd)
        self.sockets.close_ended()
        self.sockets.epoll.close()
        self._listener.close()

    def _up(self, message: bytes) -> None:
        for events in self._from_worker.feed(message):
            assert isinstance(events, lanes.Events)
            self.events.append(events)
            if self.stream is not None:
                self.stream.push(0, self.boot, events)

    def attach(self) -> None:
        """What the link tells its worker when a shard's stream is up: the slots, and to announce itself (R6)."""
        self.send(lanes.pack_slots(bytes(1024)))
        self.send(lanes.pack_announce(0, self.uplink.attach + 1, 1 << 22))

    def send(self, message: bytes) -> None:
        """A message of the link."""
        for said in self._from_link.feed(message):
            match said:
                case lanes.Slots(groups):
                    self.uplink.set_slots(groups)
                case lanes.Announce(group, attach, credit_bytes):
                    self.uplink.announce(group, attach, credit_bytes)
                case lanes.Credit(group, credit_bytes):
                    self.uplink.credit(group, credit_bytes)
                case lanes.Frames():
                    self.downlink.deliver(said)

    async def room(self, timeout_s: float) -> bool:
        """There is always room."""
        return True


class Messages:
    """Hops 3 and 4: msg's decisions over a dict instead of a database, in the order of a real batch."""

    def __init__(self, bus: FakeBus, routes: FakeRouteStore, topology: FakeTopology, shards: ShardClient) -> None:
        self._bus, self._routes, self._topology, self._shards = bus, routes, topology, shards
        self.conversations: dict[str, Conversation] = {}
        self.known = Known({}, self.conversations)
        self.rows: list[Decision] = []
        self._positions = dict.fromkeys(range(PARTITIONS), 0)
        self._ids = iter(range(1, 1 << 30))

    async def decide(self) -> list[Decision]:
        """Hop 3: what is on the bus gets its place, once."""
        records = await self._bus.read_many(self._positions, 100, 1 << 20)
        self._positions.update({r.partition: r.position for r in records})
        judged = judge([decode(r, PARTITIONS) for r in records], self.known, Rules(guests=False))
        plan = number(judged, self.known, dict.fromkeys(wanted(judged), 1), self._ids, STAMP_MS)
        self._store(plan)
        return plan.decisions

    def _store(self, plan: Plan) -> None:
        self.rows += plan.messages
        self.known.outcomes = {**self.known.outcomes, **{d.uplink.key: d.outcome for d in plan.outcomes}}
        for conversation_id, (kind, last_seq) in plan.conversations.items():
            held = self.conversations.get(conversation_id)
            members = dict(held.members) if held else {}
            members |= {user: seq for c, user, seq, _ in plan.joins if c == conversation_id}
            self.conversations[conversation_id] = Conversation(kind, last_seq, members)

    async def fan_out(self, decisions: list[Decision]) -> list[tuple[str, fanout.Part]]:
        """Hop 4: each decision to the devices of its members, by the routes of now."""
        names = fanout.users(decisions)
        routes = dict(zip(names, await self._routes.read_many(names), strict=True))
        parts = fanout.parts(decisions, routes, self._topology.current(), 1 << 20)
        for shard, part in parts:
            assert await self._shards.deliver(shard, part.payloads, part.entries) == []
        return parts

    # MsgClient, for state

    async def sync(self, user: str, sync: bytes) -> bytes:
        """An empty page: these tests are about what is pushed."""
        return wire.SyncedMsg(ref=wire.SyncMsg.FromString(sync).ref).SerializeToString()

    async def pull(self, user: str, pull: bytes) -> bytes:
        """An empty page."""
        return wire.PulledMsg(ref=wire.PullMsg.FromString(pull).ref).SerializeToString()

    async def read(self, reads: Sequence[Reading]) -> list[Position]:
        """All of it stands."""
        return [Position(0, reading.seq) for reading in reads]

    async def typing(self, signals: Sequence[Typing]) -> None:
        """Nobody is told here."""


class Shards:
    """ShardClient without a network."""

    def __init__(self) -> None:
        self.state: StateShard

    async def deliver(self, shard: str, payloads: Sequence[Payload], entries: Sequence[Delivery]) -> list[int]:
        """Straight into the shard's hop 5."""
        frames, conn_ids = [p.frame for p in payloads], [e.conn_id for e in entries]
        return self.state.downlink.deliver(frames, conn_ids, [e.payload for e in entries])

    async def dirty(self, shard: str, count: int) -> int:
        """Nothing is ever dirty here."""
        return count

    async def replaced(self, shard: str, conn_id: int, by_conn_id: int, code: int) -> None:
        """No device comes twice here."""


class Road:
    """Everything, put together by `open_road`."""

    def __init__(
        self,
        gateway: Gateway,
        state: StateShard,
        bus: FakeBus,
        messages: Messages,
        tokens: FakeTokens,
        topology: FakeTopology,
    ) -> None:
        self.gateway, self.state, self.bus, self.messages, self.tokens = gateway, state, bus, messages, tokens
        self.topology = topology
        self.peers: list[Peer] = []

    async def until(self, condition: Callable[[], Any], deadline_s: float = 40.0) -> Any:
        """The condition's first true value. Raises TimeoutError."""
        async with asyncio.timeout(deadline_s):
            while True:
                self.gateway.turn()
                for peer in self.peers:
                    peer.read()
                if value := condition():
                    return value
                await asyncio.sleep(0.002)

    async def enter(self, user: str, device_id: int) -> Peer:
        """A client connects, logs in and commits."""
        peer = self.gateway.connect()
        self.peers.append(peer)
        head = wire.LoginMsgHead(DeviceID=device_id)
        peer.send(wire.LOGIN, wire.LoginMsg(Head=head, token=self.tokens.issue(user)))
        (ack,) = await self.until(lambda: peer.find(wire.ACK, wire.ACKMsg, Type=wire.LOGIN))
        assert ack.Code == 0, ack
        peer.send(wire.SYNC, wire.SyncMsg(ref=1))
        (ack,) = await self.until(lambda: peer.find(wire.ACK, wire.ACKMsg, Type=wire.SYNC))
        assert ack.Code == 0, ack
        return peer


@asynccontextmanager
async def open_road() -> AsyncIterator[Road]:
    """A shard that serves, a gateway attached to it, and msg behind both."""
    memory, bus, tokens, shards = MemoryStore(), FakeBus(PARTITIONS), FakeTokens(), Shards()
    topology = FakeTopology(Topology("c", 1, (SlotRange(0, 1023, SHARD, 1),), {SHARD: Shard("", "uid")}))
    messages = Messages(bus, FakeRouteStore(memory), topology, shards)
    state = shards.state = StateShard(
        load(environ={}, flags={"process.name": SHARD, "process.uid": "uid"}),
        Ports(
            sessions=FakeSessionStore(memory),
            routes=FakeRouteStore(memory),
            reservations=FakeReservationStore(memory),
            bus=bus,
            tokens=tokens,
            topology=topology,
            shards=shards,
            msg=messages,
        ),
    )
    port = state.bind(0)
    main = asyncio.create_task(state.main())
    gateway = Gateway()
    road = Road(gateway, state, bus, messages, tokens, topology)
    hello = state_pb2.LinkHello(gateway="edge-0", uid="g", worker_id=GATEWAY, workers=1, link_boot=1, runs=True)

    def changed(stream: ShardStream) -> None:
        if stream.attached:
            gateway.attach()

    gateway.stream = ShardStream(SHARD, 0, f"127.0.0.1:{port}", "uid", hello, {0: gateway}, changed)
    link = asyncio.create_task(gateway.stream.run())
    try:
        await road.until(lambda: GATEWAY in state.shard.links and state.shard.links[GATEWAY].announced)
        yield road
    finally:
        for task in (link, main):
            task.cancel()
        await asyncio.gather(link, main, return_exceptions=True)
        await state.stop()
        gateway.close()
        for peer in road.peers:
            peer.sock.close()
