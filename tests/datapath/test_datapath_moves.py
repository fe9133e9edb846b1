"""A slot goes from shard to shard under an open socket: a real worker process and link, two real shards over fakes.

Nobody here repeats a frame that was not refused: what the hold promises must be seen without the help of R3.
"""

from __future__ import annotations

import asyncio
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from plato.core.codes import Code
from plato.core.conversations import dialogue_id
from plato.core.ids import SLOTS, slot_of
from plato.fakes.bus import FakeBus
from plato.fakes.store import FakeReservationStore, FakeRouteStore, FakeSessionStore, MemoryStore
from plato.fakes.tokens import FakeTokens
from plato.fakes.topology import FakeTopology
from plato.runtime.settings import Settings, dump, load
from plato.topology.record import Gateway, Shard, Topology, even_ranges
from plato.topology.slots import reassigned
from plato.wire.v1 import client_pb2 as wire
from plato.wire.v1.bus_pb2 import Record
from plato_gateway.core.hold import HOLD_S
from plato_gateway.link import Link
from plato_state.service import Ports, StateShard

from tests.datapath.road import PARTITIONS, Messages, Peer, Shards
from tests.ports import free_ports

NAMES = ("s0", "s1")
ALICE = dialogue_id("alice", "bob")


class Place:
    """Everything, put together by `open_place`."""

    def __init__(self, settings: Settings, topology: FakeTopology, states: dict[str, StateShard]) -> None:
        self.settings, self.topology, self.states = settings, topology, states
        self.bus: FakeBus
        self.tokens: FakeTokens
        self.link: Link
        self.peers: list[Peer] = []

    async def until(self, condition: Any, deadline_s: float = 40.0, why: str = "") -> Any:
        """The condition's first true value, while every peer reads."""
        try:
            async with asyncio.timeout(deadline_s):
                while True:
                    for peer in self.peers:
                        peer.read()
                    if value := condition():
                        return value
                    await asyncio.sleep(0.002)
        except TimeoutError:
            raise AssertionError(why or "the condition did not come true in time") from None

    def move(self, slot: int) -> str:
        """One write: the slot goes to the other shard, whose name is returned."""
        record = self.topology.current()
        target = next(n for n in NAMES if n != record.owner(slot).shard)
        epoch = record.epoch + 1
        self.topology.set(replace(record, epoch=epoch, slots=reassigned(record.owners, {slot: target}, epoch)))
        return target

    async def enter(self, user: str, device_id: int) -> tuple[Peer, int]:
        """Connects by a socket, logs in and commits; returns the peer and its slot."""
        sock = socket.create_connection(("127.0.0.1", self.settings.gateway.tcp_port), 5)
        sock.setblocking(False)
        peer = Peer(sock, 0)
        self.peers.append(peer)
        head = wire.LoginMsgHead(DeviceID=device_id)
        peer.send(wire.LOGIN, wire.LoginMsg(Head=head, token=self.tokens.issue(user)))
        (ack,) = await self.until(lambda: peer.find(wire.ACK, wire.ACKMsg, Type=wire.LOGIN))
        peer.send(wire.SYNC, wire.SyncMsg(ref=1))
        await self.until(lambda: peer.find(wire.ACK, wire.ACKMsg, Type=wire.SYNC, Code=Code.OK))
        peer.conn_id = ack.ConnID
        return peer, slot_of(ack.ConnID)

    async def appended(self) -> list[int]:
        """The client_ids of alice's records on the bus, in order."""
        found = []
        for partition in range(PARTITIONS):
            records = [Record.FromString(r.value) for r in await self.bus.read(partition, 0, 100_000)]
            found += [r.client_id for r in records if r.from_user == "alice"]
        return found


def up(client_id: int, acked: int) -> wire.UPMsg:
    """A message of alice's."""
    return wire.UPMsg(
        Head=wire.UPMsgHead(ClientID=client_id, SessionId=ALICE),
        UPMsgBody=b"x",
        client_msg_id=client_id.to_bytes(16, "big"),
        to_user="bob",
        acked=acked,
    )


@asynccontextmanager
async def open_place(folder: Path) -> AsyncIterator[Place]:
    """Two shards that serve, and a gateway whose link and worker are attached to both."""
    tcp, ws, admin = free_ports(3)
    settings = load(
        environ={},
        flags={
            "process.name": "edge-0",
            "process.uid": "g",
            "gateway.tcp_port": tcp,
            "gateway.ws_port": ws,
            "gateway.admin_port": admin,
            "gateway.run_dir": str(folder / "run"),
            "gateway.workers": 1,
        },
    )
    memory, bus, tokens, shards = MemoryStore(), FakeBus(PARTITIONS), FakeTokens(), Shards()
    topology = FakeTopology()
    messages = Messages(bus, FakeRouteStore(memory), topology, shards)
    place = Place(settings, topology, {})
    place.bus, place.tokens = bus, tokens
    records: dict[str, Shard] = {}
    async with AsyncExitStack() as stack:
        for name in NAMES:
            state = StateShard(
                load(environ={}, flags={"process.name": name, "process.uid": f"uid of {name}"}),
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
            records[name] = Shard(f"127.0.0.1:{state.bind(0)}", f"uid of {name}")
            place.states[name] = state
            task = asyncio.create_task(state.main())
            stack.push_async_callback(state.stop)
            stack.push_async_callback(_ended, task)
        gateway = Gateway("g", 7, 1, NAMES, "127.0.0.1", tcp, ws, f"127.0.0.1:{admin}")
        topology.set(Topology("c", 1, even_ranges(NAMES, 1), records, {"edge-0": gateway}))
        place.link = Link(settings, topology)
        await place.link.start()
        stack.push_async_callback(place.link.stop)
        stack.push_async_callback(_ended, asyncio.create_task(place.link.run()))
        file = folder / "plato.yaml"
        file.write_text(dump(settings))
        command = [sys.executable, "-m", "plato_gateway", "--settings", str(file), "--role", "worker"]
        worker = await asyncio.create_subprocess_exec(*command)
        stack.push_async_callback(worker.wait)
        stack.callback(worker.kill)
        await place.until(lambda: not place.link.not_ready())
        await place.until(lambda: all(7 in s.shard.links and s.shard.links[7].announced for s in place.states.values()))
        yield place
        for peer in place.peers:
            peer.sock.close()


async def _ended(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


@pytest.fixture
async def place(tmp_path: Path) -> AsyncIterator[Place]:
    async with open_place(tmp_path) as opened:
        yield opened


async def two(place: Place) -> tuple[Peer, int, Peer]:
    """Alice, her slot, and bob, who lives in another one."""
    alice, slot = await place.enter("alice", 1)
    bob, other = await place.enter("bob", 2)
    while other == slot:
        bob, other = await place.enter("bob", 2)
    return alice, slot, bob


async def held(place: Place, slot: int, bob: Peer) -> None:
    """Waits until the worker holds the slot: what the link says comes in order, so bob's answer comes after the order."""
    epoch = place.topology.current().epoch
    await place.until(lambda: place.link._topology is not None and place.link._topology.epoch == epoch)
    before = len(bob.find(wire.ACK, wire.ACKMsg, Type=wire.HEARTBEAT))
    bob.send(wire.HEARTBEAT, wire.HeartbeatMsg())  # and nobody else waits
    await place.until(lambda: len(bob.find(wire.ACK, wire.ACKMsg, Type=wire.HEARTBEAT)) > before)


async def test_a_connection_goes_with_its_slot_and_is_answered_by_each_owner_in_turn(place: Place) -> None:
    alice, slot, bob = await two(place)
    runs: list[int] = []

    def answered() -> int:
        return len(alice.find(wire.ACK, wire.ACKMsg, Type=wire.UP, Code=Code.OK))

    for n in range(1, 9):
        target = place.move(slot)
        await held(place, slot, bob)
        alice.send(wire.UP, up(n, n - 1))
        # Sooner than a hold that nobody lifts is given up.
        await place.until(
            lambda: answered() > len(runs), HOLD_S - 0.5, f"{n} was not answered after the move to {target}"
        )
        assert alice.conn_id in place.states[target].shard.connections
        runs.append(place.states[target].shard.slots[slot].run)
    assert await place.appended() == list(range(1, 9))
    assert runs == sorted(set(runs)), "each acquisition begins a greater run (R4)"
    assert alice.find(wire.ERROR, wire.ErrorMsg) == []
    assert alice.find(wire.ACK, wire.ACKMsg, Code=Code.EXPECTED) == []


async def test_frames_that_wait_come_in_order_and_none_twice(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    alice, slot, bob = await two(place)
    gate = asyncio.Event()
    target = next(n for n in NAMES if n != place.topology.current().owner(slot).shard)
    store = place.states[target].ownership._store
    acquire = store.acquire

    async def slow(*args: Any) -> Any:
        await gate.wait()
        return await acquire(*args)

    monkeypatch.setattr(store, "acquire", slow)  # the new owner is kept from its slot for a while
    assert place.move(slot) == target
    await held(place, slot, bob)
    for n in range(1, 51):
        alice.send(wire.UP, up(n, 0))
    await held(place, slot, bob)
    assert await place.appended() == []
    assert alice.find(wire.ERROR, wire.ErrorMsg) == []
    gate.set()
    await place.until(lambda: len(alice.find(wire.ACK, wire.ACKMsg, Type=wire.UP, Code=Code.OK)) == 50)
    assert await place.appended() == list(range(1, 51))
    assert not place.link._held


async def test_new_connections_are_not_minted_in_a_slot_that_waits(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, slot = await place.enter("alice", 1)

    def minted() -> tuple[int, ...]:
        config = place.link.lanes[0].config
        return config.slots if config is not None else ()

    async def never(*_: Any) -> dict[int, Any]:
        return {}

    await place.until(lambda: len(minted()) == SLOTS)
    target = next(n for n in NAMES if n != place.topology.current().owner(slot).shard)
    monkeypatch.setattr(place.states[target].ownership._store, "acquire", never)
    place.move(slot)
    await place.until(lambda: minted() == tuple(s for s in range(SLOTS) if s != slot))
