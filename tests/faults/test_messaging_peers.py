"""Rows of the faults list about peers that are many, mute, slow or broken: M10, M11, M21, M22, M23 and M27.

One real cluster with short timers for all of them; each row looks at the gateway and the shards before and after itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import struct
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest
from plato.core.codes import Code
from plato.core.conversations import dialogue_id
from plato.core.frames import pack
from plato.local.cluster import LocalCluster
from plato.wire.v1 import client_pb2 as wire

from tests.faults import looking
from tests.faults.load import quantile
from tests.faults.people import person
from tests.faults.raw import Raw, frame
from tests.faults.waiting import until

LOGIN_TIMEOUT_S = 2.0
HEARTBEAT_S = 1.0
RESUME_S = 3.0
FAULT_SETTINGS = {
    "gateway.login_timeout_ms": int(LOGIN_TIMEOUT_S * 1000),
    "gateway.send_queue_bytes": 262_144,
    "state.login_timeout_ms": int(LOGIN_TIMEOUT_S * 1000),
    "state.heartbeat_ms": int(HEARTBEAT_S * 1000),
    "state.resume_window_ms": int(RESUME_S * 1000),
    "state.reconnect_delay_ms": 200,
    "state.repeat_min_ms": 300,
    "state.repeat_max_ms": 2_000,
}
pytestmark = pytest.mark.timeout(110)
MIB = 1 << 20


def gateway(cluster: LocalCluster) -> tuple[str, int]:
    host, port = cluster.gateways[0].rsplit(":", 1)
    return host, int(port)


def connections(cluster: LocalCluster) -> float:
    """Sockets of clients at both gateways."""
    return sum(looking.metric(cluster, name, "plato_gateway_connections") for name in ("edge-0", "edge-1"))


def holders(cluster: LocalCluster) -> dict[int, str]:
    """{pid: name} of everything that holds something per connection."""
    found = (entry for kind in ("worker", "link", "state") for entry in cluster.processes(kind))
    return {int(entry["pid"]): str(entry["name"]) for entry in found}


@dataclass(frozen=True)
class Held:
    """What the holders held before something was done to them."""

    names: dict[int, str]
    descriptors: dict[int, int]
    resident_bytes: dict[int, int]

    @classmethod
    def by(cls, cluster: LocalCluster) -> Held:
        names = holders(cluster)
        return cls(
            names,
            {pid: looking.descriptors(pid) for pid in names},
            {pid: looking.resident_bytes(pid) for pid in names},
        )

    async def again(self, cluster: LocalCluster, growth_bytes: int) -> None:
        """The same processes hold no more than then: every descriptor is closed, memory grew by less than that."""
        assert holders(cluster) == self.names, "a process died"
        for pid, name in self.names.items():
            # One more is a poll or a probe that is under way.
            await until(partial(closed_down_to, pid, self.descriptors[pid] + 1), 20, f"descriptors of {name} stay open")
            grown = looking.resident_bytes(pid) - self.resident_bytes[pid]
            assert grown < growth_bytes, f"{name} grew by {grown / MIB:.1f} MiB"


def closed_down_to(pid: int, descriptors: int) -> bool:
    """Whether a process holds no more descriptors than that."""
    return looking.descriptors(pid) <= descriptors


async def served(cluster: LocalCluster, user: str) -> float:
    """Seconds that a newcomer needs to log in, send to itself's friend and get the answer: the rest is served."""
    began = time.monotonic()
    async with await Raw.open(*gateway(cluster)) as raw:
        await raw.enter(cluster.token(user))
        await raw.up(dialogue_id(user, "nobody"), 1, b"x", to_user="nobody")
        assert (await raw.accepted(1)).Code == Code.OK
        await raw.logout()
    return time.monotonic() - began


async def many(count: int, make: Callable[[int], Awaitable[Raw]], at_once: int = 100) -> list[Raw]:
    """Makes many connections, some at a time."""
    made: list[Raw] = []
    for first in range(0, count, at_once):
        made += await asyncio.gather(*(make(n) for n in range(first, min(count, first + at_once))))
    return made


async def test_m10_half_dropped_half_closed_leave_nothing(fault_cluster: LocalCluster) -> None:
    """600 instead of 2,000. A socket that says nothing more is what a drop without FIN looks like from the server."""
    count = 600
    users = [f"m10-{n}" for n in range(count)]
    await served(fault_cluster, "m10-first")
    await until(lambda: connections(fault_cluster) == 0)
    before = Held.by(fault_cluster)

    async def enter(n: int) -> Raw:
        raw = await Raw.open(*gateway(fault_cluster))
        await raw.enter(fault_cluster.token(users[n]))
        entered.append(raw)
        return raw

    async with AsyncExitStack() as stack:
        entered: list[Raw] = []
        # Who is in beats until all are: how long that takes is the machine's business.
        beating = asyncio.create_task(beat_all(entered))
        raws = await many(count, enter, 25)
        beating.cancel()
        for raw in raws:
            await stack.enter_async_context(raw)
        assert await looking.online(fault_cluster, users) == count
        for raw in raws[count // 2 :]:
            raw.writer.close()
        began = time.monotonic()
        await until(lambda: connections(fault_cluster) == 0, 3 * HEARTBEAT_S + 10, "mute connections stay open")

        async def nobody() -> bool:
            return await looking.online(fault_cluster, users) == 0

        await until(nobody, 3 * HEARTBEAT_S + RESUME_S + 10, "routes stay")
        assert time.monotonic() - began >= RESUME_S, "sessions must wait for their clients"
    found = await looking.routes(fault_cluster, users)
    assert all(route.gen >= 2 for routes in found for route in routes.values()), "a route is ended, not deleted"
    # 10 % of what 2,000 connections take would be the row's; a small process moves by its allocator's arenas.
    await before.again(fault_cluster, 8 * MIB)


async def beat_all(raws: Sequence[Raw]) -> None:
    """Sends heartbeats of all and reads no answer."""
    while True:
        for raw in raws:
            raw.post(wire.HEARTBEAT, wire.HeartbeatMsg(Head=wire.HeartbeatMsgHead()))
        await asyncio.sleep(HEARTBEAT_S / 2)


async def beat_on(raw: Raw) -> None:
    """Sends heartbeats and reads no answer, until the socket is gone."""
    with contextlib.suppress(OSError):
        while True:
            await raw.send(wire.HEARTBEAT, wire.HeartbeatMsg(Head=wire.HeartbeatMsgHead()))
            await asyncio.sleep(HEARTBEAT_S / 2)


async def test_m11_a_slow_reader_is_closed_and_pulls_the_rest(fault_cluster: LocalCluster, tmp_path: Path) -> None:
    """2,000 messages of 8 KB instead of 100,000 of 1 KB: past the cap and both kernels' buffers all the same."""
    count, size = 2_000, 8 * 1024
    queue = FAULT_SETTINGS["gateway.send_queue_bytes"]
    workers = {pid: looking.resident_bytes(pid) for pid in fault_cluster.pids("worker")}
    slow_before = looking.metric(fault_cluster, "edge-0", "plato_gateway_slow_closed_total")
    token = fault_cluster.token("m11-slow")
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
    sock.connect(gateway(fault_cluster))
    sock.setblocking(False)
    reader, writer = await asyncio.open_connection(sock=sock, limit=4_096)
    async with Raw(reader, writer) as slow:
        await slow.enter(token, 1111)
        writer.transport.pause_reading()  # type: ignore[attr-defined]  # a socket's transport has it
        # It beats all the while: it is slow, not silent.
        beating = asyncio.create_task(beat_on(slow))
        async with (
            person(fault_cluster, "m11-writer", tmp_path / "writer") as sender,
            person(fault_cluster, "m11-one", tmp_path / "one") as one,
            person(fault_cluster, "m11-two", tmp_path / "two") as two,
        ):
            tickets, waits, peak = [], [], 0
            for n in range(count):
                tickets.append(await sender.client.send(b"%06d" % n + b"x" * size, to="m11-slow"))
                if n % 100 == 99:
                    at = time.monotonic()
                    ticket = await one.client.send(f"{n}", to="m11-two")
                    await until(partial(two.shown_at.get, ticket.client_msg_id), 10, "others wait")
                    waits.append(two.shown_at[ticket.client_msg_id] - at)
                    await tickets[-50].settled()  # the sender's own outbox is no part of this row
                    peak = max(peak, *(looking.resident_bytes(pid) - was for pid, was in workers.items()))
            for ticket in tickets:
                await ticket.settled()
            assert peak <= 16 * MIB + queue, f"a worker grew by {peak} bytes"
            # Some ten ms each; with twenty of them this is the longest, and a busy machine may stand still for once.
            assert quantile(sorted(waits), 0.9) < 2.0, waits
            assert max(waits) < 5.0, waits

            def closed() -> bool:
                return looking.metric(fault_cluster, "edge-0", "plato_gateway_slow_closed_total") > slow_before

            await until(closed, 20, "the slow reader was not closed")
        beating.cancel()
        writer.transport.resume_reading()  # type: ignore[attr-defined]  # a socket's transport has it
        last = (await slow.ended(20))[-3:]
        codes = [wire.ErrorMsg.FromString(cmd.Payload).code for cmd in last if cmd.Type == wire.ERROR]
        assert codes in ([Code.SLOW_READER], []), "the last word, if it still fitted into the socket"
    async with person(fault_cluster, "m11-slow", tmp_path / "slow", device_id=1111) as back:
        await until(lambda: len(back.shown) >= count, 60, "it does not pull everything")
        assert [int(row.body[:6]) for row in back.shown] == list(range(count))


async def test_m21_mute_and_half_spoken_sockets_are_closed_in_time(fault_cluster: LocalCluster) -> None:
    """600 of each instead of 1,000."""
    count = 600
    began = time.monotonic()

    async def half(n: int) -> Raw:
        raw = await Raw.open(*gateway(fault_cluster))
        if n % 2:
            await raw.write(b"\0\0")
        return raw

    async with AsyncExitStack() as stack:
        raws = await many(2 * count, half, 200)
        for raw in raws:
            await stack.enter_async_context(raw)
        opened = time.monotonic()
        assert await served(fault_cluster, "m21-other") < LOGIN_TIMEOUT_S + 3, "the rest is not served meanwhile"
        for raw in raws:
            await raw.ended(max(1.0, opened + LOGIN_TIMEOUT_S + 6 - time.monotonic()))
    assert time.monotonic() - began >= LOGIN_TIMEOUT_S
    await until(lambda: connections(fault_cluster) == 0)


def nonsense(seed: int) -> bytes:
    """A frame of random bytes."""
    chance = random.Random(seed)
    return pack(chance.randbytes(chance.randrange(1, 300)))


def login(token: str = "", **head: int) -> bytes:
    return frame(wire.LOGIN, wire.LoginMsg(Head=wire.LoginMsgHead(**head) if head else None, token=token))


BAD_FIRST = {
    "a header of 0x7FFFFFFF": struct.pack(">I", 0x7FFFFFFF) + b"x",
    "a length of zero": b"\0\0\0\0",
    "a length beyond the limit": struct.pack(">I", 65_537) + b"x",
    "random bytes as a frame": nonsense(22),
    "a login without a head": login("no token"),
    "a login without a token": login(DeviceID=1),
    "a body that is no protobuf": pack(wire.MsgCmd(Type=wire.LOGIN, Payload=b"\xff\xff\xff").SerializeToString()),
    "a UP before any login": frame(wire.UP, wire.UPMsg(UPMsgBody=b"x")),
    "an empty frame of a type that is not known": pack(b"\x08\x63"),
}


@pytest.mark.parametrize("what", BAD_FIRST)
async def test_m22_broken_peers_harm_themselves_only(fault_cluster: LocalCluster, what: str) -> None:
    before = Held.by(fault_cluster)

    async def bad(_: int) -> Raw:
        raw = await Raw.open(*gateway(fault_cluster))
        await raw.write(BAD_FIRST[what])
        return raw

    async with AsyncExitStack() as stack:
        for raw in await many(100, bad):
            await stack.enter_async_context(raw)
        await served(fault_cluster, "m22-other")
    await before.again(fault_cluster, 10 * MIB)


async def test_m22_a_foreign_connection_cannot_be_acknowledged_or_named(fault_cluster: LocalCluster) -> None:
    async with (
        await Raw.open(*gateway(fault_cluster)) as good,
        await Raw.open(*gateway(fault_cluster)) as bad,
    ):
        committed = await good.enter(fault_cluster.token("m22-good"))
        await bad.enter(fault_cluster.token("m22-bad"))
        # An ACK for somebody else's connection: the other's unacknowledged push must still be repeated.
        await bad.up(dialogue_id("m22-bad", "m22-good"), 1, b"hello", to_user="m22-good")
        assert (await bad.accepted(1)).Code == Code.OK
        push = await good.receive()
        while push is not None and push.Type != wire.PUSH:
            push = await good.receive()
        assert push is not None
        forged = wire.ACKMsg(Type=wire.PUSH, ConnID=good.conn_id, run=push.run, push_no=push.push_no)
        await bad.send(wire.ACK, forged)
        repeated = await good.receive()
        assert repeated is not None
        assert (repeated.Type, repeated.run, repeated.push_no) == (wire.PUSH, push.run, push.push_no)
        assert committed.run <= push.run

    async with await Raw.open(*gateway(fault_cluster)) as other, await Raw.open(*gateway(fault_cluster)) as worse:
        await other.enter(fault_cluster.token("m22-other"))
        await worse.enter(fault_cluster.token("m22-worse"))
        conversation = dialogue_id("m22-worse", "m22-other")
        await worse.up(conversation, 1, b"under a foreign name", to_user="m22-other", conn_id=other.conn_id)
        assert (await worse.accepted(1)).Code == Code.FOREIGN_CONN_ID
        assert (await other.heartbeat()).Code == Code.OK
    assert not [r for r in await looking.rows(fault_cluster) if r.body == b"under a foreign name"]


async def test_m23_cycles_leave_no_timer_and_no_memory(fault_cluster: LocalCluster) -> None:
    """4,000 cycles instead of 100,000, after 1,000 that warm every allocator up."""

    async def cycle(_: int) -> Raw:
        raw = await Raw.open(*gateway(fault_cluster))
        await raw.send(wire.HEARTBEAT, wire.HeartbeatMsg(Head=wire.HeartbeatMsgHead()))
        await raw.receive()
        raw.writer.transport.abort()
        return raw

    await many(1_000, cycle)
    await until(lambda: connections(fault_cluster) == 0)
    before = Held.by(fault_cluster)
    await many(4_000, cycle)
    await until(lambda: connections(fault_cluster) == 0)
    await before.again(fault_cluster, 6 * MIB)
    for shard in ("plato-s0", "plato-s1"):
        for name in ("plato_state_connections", "plato_state_timers"):
            nothing = partial(is_zero, fault_cluster, shard, name)
            await until(nothing, RESUME_S + 15, f"{name} of {shard} does not come down to the live connections: none")


def is_zero(cluster: LocalCluster, process: str, name: str) -> bool:
    return looking.metric(cluster, process, name) == 0


async def test_m27_frames_in_pieces_and_in_heaps_are_read_alike(fault_cluster: LocalCluster) -> None:
    async with (
        await Raw.open(*gateway(fault_cluster)) as reader,
        await Raw.open(*gateway(fault_cluster)) as raw,
    ):
        await reader.enter(fault_cluster.token("m27-reader"))
        raw.device_id = 27
        head = wire.LoginMsgHead(DeviceID=27)
        entry = frame(wire.LOGIN, wire.LoginMsg(Head=head, token=fault_cluster.token("m27-sender")))
        for at in range(len(entry)):  # split at every byte
            await raw.write(entry[at : at + 1])
            if at % 16 == 0:
                await asyncio.sleep(0)
        assert (await raw.until(wire.ACK, wire.ACKMsg, Type=wire.LOGIN)).Code == Code.OK
        assert (await raw.sync())[0].Code == Code.OK
        conversation = dialogue_id("m27-sender", "m27-reader")
        ups = [
            frame(
                wire.UP,
                wire.UPMsg(
                    Head=wire.UPMsgHead(ClientID=n, SessionId=conversation),
                    UPMsgBody=b"%d" % n,
                    client_msg_id=n.to_bytes(16, "big"),
                    to_user="m27-reader",
                ),
            )
            for n in range(1, 61)
        ]
        await raw.write(b"".join(ups[:10]))  # ten in one packet
        joined = b"".join(ups[10:])
        for at in range(0, len(joined), 7):  # pieces that end anywhere
            await raw.write(joined[at : at + 7])
        acks = [(await raw.accepted(n)).Code for n in range(1, 61)]
        assert acks == [Code.OK] * 60
        got: list[bytes] = []
        while len(got) < 60:
            cmd = await reader.receive()
            assert cmd is not None
            if cmd.Type == wire.PUSH:
                await reader.send(wire.ACK, wire.ACKMsg(Type=wire.PUSH, run=cmd.run, push_no=cmd.push_no))
                push = wire.PushMsg.FromString(cmd.Payload)
                if push.Content not in got:
                    got.append(push.Content)
        assert got == [b"%d" % n for n in range(1, 61)]


async def test_m27_one_connection_stays_in_order_under_load(fault_cluster: LocalCluster, tmp_path: Path) -> None:
    async with (
        person(fault_cluster, "m27-a", tmp_path / "a") as a,
        person(fault_cluster, "m27-b", tmp_path / "b", transport="ws") as b,
    ):
        tickets = [await a.client.send(f"{n}", to="m27-b") for n in range(500)]
        for ticket in tickets:
            await ticket.settled()
        await until(lambda: len(b.shown) >= 500, 20)
        assert [row.body for row in b.shown] == [b"%d" % n for n in range(500)]
        assert [row.seq for row in b.shown] == list(range(1, 501))
