"""Rows of the faults list about one client and its connection: M5 to M9 and M19, on one real cluster with short timers."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from contextlib import AsyncExitStack
from itertools import pairwise
from pathlib import Path

import pytest
from plato.client import Phase
from plato.core.codes import Code
from plato.core.conversations import dialogue_id
from plato.core.ids import worker_id_of
from plato.local.cluster import LocalCluster
from plato.wire.v1 import client_pb2 as wire

from tests.faults import looking, relay
from tests.faults.load import Person
from tests.faults.people import Listener, person
from tests.faults.raw import Raw
from tests.faults.relay import Relay
from tests.faults.waiting import until

FAULT_SETTINGS = {
    "state.heartbeat_ms": 1_000,
    "state.resume_window_ms": 20_000,
    "state.reconnect_delay_ms": 200,
    "state.repeat_min_ms": 300,
    "state.repeat_max_ms": 2_000,
}
pytestmark = pytest.mark.timeout(90)


def host_port(address: str) -> tuple[str, int]:
    host, port = address.rsplit(":", 1)
    return host, int(port)


async def say(sender: Person, to: str, words: list[str]) -> None:
    """Sends the words in order and waits until each has its place."""
    tickets = [await sender.client.send(w, to=to) for w in words]
    for ticket in tickets:
        await asyncio.wait_for(ticket.settled(), 20)


def shown(reader: Person) -> list[str]:
    return [row.body.decode() for row in reader.shown]


async def test_m05_a_gap_is_pulled_from_the_cursor_up(fault_cluster: LocalCluster, tmp_path: Path) -> None:
    """The row's page of 24 is the platform's page here: 10 held, then more than two pages newer."""
    gateway = host_port(fault_cluster.gateways[0])
    store = tmp_path / "reader"
    async with person(fault_cluster, "m05-writer", tmp_path / "writer") as writer:
        async with person(fault_cluster, "m05-reader", store) as reader:
            await say(writer, "m05-reader", [f"{n}" for n in range(1, 11)])
            await until(lambda: len(reader.shown) == 10)
        newer = [f"{n}" for n in range(11, 261)]
        await say(writer, "m05-reader", newer)
        async with Relay(*gateway) as line:
            line.down_rule = line.up_rule = lambda _: relay.PASS
            async with person(fault_cluster, "m05-reader", store, [f"{line.host}:{line.port}"]) as reader:
                await until(lambda: len(reader.shown) >= len(newer), 20)
    assert shown(reader) == newer
    asked = Counter(
        wire.PullMsg.FromString(relay.command(payload).Payload).ref
        for way, payload in line.frames
        if way == "up" and relay.command(payload).Type == wire.PULL
    )
    pages = [
        wire.PulledMsg.FromString(relay.command(payload).Payload)
        for way, payload in line.frames
        if way == "down" and relay.command(payload).Type == wire.PULLED
    ]
    # A pull that is not answered in time is asked again under its ref (R3), and each asking may be answered; so a page that
    # comes twice is no second pull of the same rows: that would have a ref of its own.
    answered = Counter(page.ref for page in pages)
    assert all(answered[ref] <= asked[ref] for ref in answered), (asked, answered)
    first = {page.ref: page for page in reversed(pages)}
    ranges = [(page.rows[0].seq, page.rows[-1].seq) for page in reversed(first.values()) if page.rows]
    assert len(ranges) >= 2, ranges
    assert ranges[0][0] == 11
    assert all(second[0] == first[1] + 1 for first, second in pairwise(ranges)), ranges
    assert ranges[-1][1] == 260


async def test_m06_a_frozen_client_gets_everything_when_it_thaws(fault_cluster: LocalCluster, tmp_path: Path) -> None:
    """Three minutes at a heartbeat of 30 s are six missed ones; so here six seconds at one second, and some."""
    listener = await Listener.start(fault_cluster, "m06-frozen", tmp_path / "frozen")
    try:
        async with person(fault_cluster, "m06-writer", tmp_path / "writer") as writer:
            await say(writer, "m06-frozen", ["before"])
            await until(lambda: listener.bodies == ["before"])
            listener.freeze()
            words = [f"while frozen {n}" for n in range(20)]
            await say(writer, "m06-frozen", words)
            await asyncio.sleep(8.0)  # the fault itself: time that passes without the client
            listener.thaw()
            # The row's 5 s, and three for which a busy machine may stand still.
            await until(lambda: listener.bodies == ["before", *words], 8.0, f"8 s after the thaw: {listener.bodies}")
            await say(writer, "m06-frozen", ["after"])
            await until(lambda: listener.bodies == ["before", *words, "after"])
    finally:
        await listener.stop()


async def test_m07_a_late_timeout_leaves_the_newer_connection(fault_cluster: LocalCluster, tmp_path: Path) -> None:
    first, second = fault_cluster.gateways
    store = tmp_path / "moving"
    async with (
        person(fault_cluster, "m07-writer", tmp_path / "writer") as writer,
        Relay(*host_port(first)) as line,
        AsyncExitStack() as stack,
    ):
        through_line = f"{line.host}:{line.port}"
        async with person(fault_cluster, "m07-moving", store, [through_line]):
            pass  # it has been here: the next start begins here again
        moving = await stack.enter_async_context(person(fault_cluster, "m07-moving", store, [through_line, second]))
        assert moving.port == line.port
        line.refuse = True
        assert line.cut() == 1  # no FIN: gateway 1 and its state hear nothing
        await until(lambda: moving.port == host_port(second)[1] and len(moving.onlines) == 2, 20)
        route = (await looking.routes(fault_cluster, ["m07-moving"]))[0]
        (through,) = route.values()
        gateway = looking.topology(fault_cluster).gateway_by_worker_id(worker_id_of(through.conn_id))
        assert gateway is not None
        assert gateway[0] == "edge-1"
        # Gateway 1 times the old one out, or is told to close it; either way the newer one stays.
        await until(lambda: "down" in line.ended, 20, "the old connection was never closed")
        await say(writer, "m07-moving", ["still there"])
        await until(lambda: shown(moving) == ["still there"])
        assert moving.client.state.phase is Phase.ONLINE
        assert len(moving.onlines) == 2
        assert (await looking.routes(fault_cluster, ["m07-moving"]))[0] == route


async def test_m08_a_late_closed_leaves_the_newer_route(fault_cluster: LocalCluster, tmp_path: Path) -> None:
    host, port = host_port(fault_cluster.gateways[0])
    token = fault_cluster.token("m08-user")
    async with Relay(host, port) as line, person(fault_cluster, "m08-writer", tmp_path / "writer") as writer:
        line.close_delay_s = 3.0
        old = await Raw.open(line.host, line.port)
        await old.enter(token, 808)
        old.writer.close()  # gateway 1 hears of it 3 s later
        async with await Raw.open(*host_port(fault_cluster.gateways[1])) as new:
            await new.enter(token, 808)
            route = (await looking.routes(fault_cluster, ["m08-user"]))[0][808]
            assert route.conn_id == new.conn_id
            end = time.monotonic() + 15.0
            while line.live:  # the client beats on meanwhile, as one does
                assert time.monotonic() < end, "the old connection was not closed"
                assert (await new.heartbeat()).Code == Code.OK
                await asyncio.sleep(0.2)
            for _ in range(3):  # by now state has met the late close
                assert (await new.heartbeat()).Code == Code.OK
            await say(writer, "m08-user", ["still there"])
            push = await new.until(wire.PUSH, wire.PushMsg)
            assert push.Content == b"still there"
            assert (await looking.routes(fault_cluster, ["m08-user"]))[0][808].conn_id == new.conn_id


async def test_m09_of_two_with_one_device_one_stays_away(fault_cluster: LocalCluster, tmp_path: Path) -> None:
    """The row's 60 s are 10 s here: with delays of 200 ms two quarrelling clients would log in some thirty times."""
    async with Relay(*host_port(fault_cluster.gateways[0])) as line:
        line.up_rule = line.down_rule = lambda _: relay.PASS
        here = [f"{line.host}:{line.port}"]
        async with (
            person(fault_cluster, "m09-user", tmp_path / "one", here, device_id=909) as one,
            person(fault_cluster, "m09-user", tmp_path / "two", here, device_id=909) as two,
        ):
            await until(lambda: one.client.state.phase is Phase.STOPPED, 20, "the first one was not told to stop")
            assert one.client.state.code == Code.REPLACED
            begun = time.monotonic()
            while time.monotonic() - begun < 8.0:
                assert one.client.state.phase is Phase.STOPPED
                assert two.client.state.phase is Phase.ONLINE
                await asyncio.sleep(0.1)
        kinds = [(way, relay.command(payload).Type) for way, payload in line.frames]
    logins = sum(way == "up" and kind in (wire.LOGIN, wire.RECONN) for way, kind in kinds)
    kicks = sum(way == "down" and kind == wire.KICK for way, kind in kinds)
    assert logins <= 2
    assert kicks == 1


async def test_m19_a_dropped_ack_stores_and_shows_once(fault_cluster: LocalCluster, tmp_path: Path) -> None:
    async with Relay(*host_port(fault_cluster.gateways[0])) as line:
        async with (
            person(fault_cluster, "m19-reader", tmp_path / "reader") as reader,
            await Raw.open(line.host, line.port) as sender,
        ):
            await sender.enter(fault_cluster.token("m19-sender"))
            line.down_rule = relay.drop_first(1, relay.is_ack_of(wire.UP))
            conversation = dialogue_id("m19-sender", "m19-reader")
            key = await sender.up(conversation, 1, b"once", to_user="m19-reader")
            first = await sender.until(wire.RECEIPT, wire.ReceiptMsg, client_msg_id=key)
            await sender.up(conversation, 1, b"once", to_user="m19-reader", key=key)
            ack = await sender.accepted(1)
            again = await sender.until(wire.RECEIPT, wire.ReceiptMsg, client_msg_id=key)
            assert ack.Code in (Code.OK, Code.DUPLICATE)
            assert (again.msg_id, again.seq) == (first.msg_id, first.seq)
            # A second message through the same path comes after everything about the first.
            await sender.up(conversation, 2, b"next", to_user="m19-reader", acked=1)
            await until(lambda: len(reader.shown) >= 2)
        assert shown(reader) == ["once", "next"]
        pushes = [f for w, f in line.frames if w == "down" and relay.command(f).Type == wire.ACK]
        assert pushes, "the relay saw no ACK at all"
    rows = [r for r in await looking.rows(fault_cluster) if r.conversation_id == conversation]
    assert [r.body for r in rows] == [b"once", b"next"]


async def test_m19_the_real_client_repeats_by_itself(fault_cluster: LocalCluster, tmp_path: Path) -> None:
    async with Relay(*host_port(fault_cluster.gateways[0])) as line:
        line.down_rule = relay.drop_first(4, lambda cmd: cmd.Type == wire.RECEIPT or relay.is_ack_of(wire.UP)(cmd))
        async with (
            person(fault_cluster, "m19b-reader", tmp_path / "reader") as reader,
            person(fault_cluster, "m19b-sender", tmp_path / "sender", [f"{line.host}:{line.port}"]) as sender,
        ):
            await say(sender, "m19b-reader", ["one", "two", "three"])
            await until(lambda: min(len(reader.shown), len(sender.shown)) >= 3)
            assert shown(reader) == shown(sender) == ["one", "two", "three"]
