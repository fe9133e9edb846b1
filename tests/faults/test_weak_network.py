"""A real cluster behind a network that forgets idle flows, and a crowd that comes back to it; times are a hundredth."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from plato.client import Client, Phase
from plato.core.codes import Code
from plato.local.cluster import LocalCluster
from plato.wire.v1 import client_pb2 as wire

from tests.faults import looking, relay
from tests.faults.people import person
from tests.faults.relay import Relay
from tests.faults.waiting import until

IDLE_DROP_MS = 700
LOGINS_PER_S = 8
"""So few that a crowd which a busy machine strings out is put off still: 500 ms of room are four of them."""
FAULT_SETTINGS = {
    "local.shards": 1,
    "local.gateways": 1,
    "local.msgs": 1,
    "state.heartbeat_ms": 400,
    "state.heartbeat_floor_ms": 200,
    "state.heartbeat_ceiling_ms": 3_200,
    "state.repeat_min_ms": 100,
    "state.repeat_max_ms": 200,
    "state.reconnect_delay_ms": 50,
    "state.logins_per_s": LOGINS_PER_S,
}
pytestmark = pytest.mark.timeout(90)


def gateway(cluster: LocalCluster) -> tuple[str, int]:
    host, port = cluster.gateways[0].rsplit(":", 1)
    return host, int(port)


def intervals(frames: Sequence[tuple[str, bytes]]) -> list[int]:
    """The intervals that state told, in order."""
    acks = (wire.ACKMsg.FromString(c.Payload) for way, c in opened(frames) if way == "down" and c.Type == wire.ACK)
    return [ack.heartbeat_ms for ack in acks if ack.heartbeat_ms]


def opened(frames: Sequence[tuple[str, bytes]]) -> list[tuple[str, wire.MsgCmd]]:
    return [(way, relay.command(payload)) for way, payload in frames]


async def test_a_network_that_drops_idle_flows_settles_the_heartbeat_below(
    fault_cluster: LocalCluster, tmp_path: Path
) -> None:
    async with Relay(*gateway(fault_cluster)) as line:
        line.up_rule = line.down_rule = lambda _: relay.PASS
        line.idle_drop_s = IDLE_DROP_MS / 1_000
        here = [f"{line.host}:{line.port}"]
        async with person(fault_cluster, "weak", tmp_path / "weak", here) as weak:
            await until(lambda: line.idle_drops, 40, "the interval never grew past what the network allows")
            seen = [0, 0]  # drops, and how many intervals had been told when the last one came

            def settles() -> bool:
                told = intervals(line.frames)
                if line.idle_drops > seen[0]:
                    seen[:] = line.idle_drops, len(told)
                return len(told) - seen[1] >= 4 and weak.client.state.phase is Phase.ONLINE

            await until(settles, 40, "four beats in a row that the network lets through, online")
        told = intervals(line.frames)
    assert max(told) > IDLE_DROP_MS, "it was tried"
    assert 200 <= told[-1] < IDLE_DROP_MS, told


async def test_a_crowd_is_told_when_to_come_and_all_of_it_is_let_in(fault_cluster: LocalCluster) -> None:
    users = [f"crowd-{n}" for n in range(24)]
    async with Relay(*gateway(fault_cluster)) as line, AsyncExitStack() as stack:
        line.up_rule = line.down_rule = lambda _: relay.PASS
        crowd = [
            await stack.enter_async_context(
                Client(fault_cluster.token(user), ":memory:", [f"{line.host}:{line.port}"], user=user)
            )
            for user in users
        ]

        def back() -> bool:
            return all(client.state.phase is Phase.ONLINE for client in crowd)

        await until(back, 30)
        line.frames.clear()
        line.reset()
        await until(lambda: not back(), 10)
        await until(back, 30)
        frames = opened(line.frames)
    acks = [wire.ACKMsg.FromString(c.Payload) for way, c in frames if way == "down" and c.Type == wire.ACK]
    answers = Counter(ack.Code for ack in acks if ack.Type == wire.RECONN)
    assert answers[Code.OK] >= len(users)
    assert answers[Code.LOGIN_LATER] > 0
    assert all(ack.retry_ms > 0 for ack in acks if ack.Code == Code.LOGIN_LATER)
    assert looking.metric(fault_cluster, "plato-s0", "plato_state_logins_put_off_total") >= answers[Code.LOGIN_LATER]


async def test_the_relay_forgets_only_what_stood_idle() -> None:
    """Otherwise the test above would prove nothing."""
    got: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(100):
            got.append(data)
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with Relay("127.0.0.1", server.sockets[0].getsockname()[1]) as line:
        _, writer = await asyncio.open_connection(line.host, line.port)
        writer.write(b"one")
        await until(lambda: got == [b"one"])
        line.idle_drop_s = 1e-9
        writer.write(b"two")
        await until(lambda: line.idle_drops == 1)
        line.idle_drop_s = 0.0
        writer.write(b"three")
        writer.write_eof()
        await until(lambda: line.ended == ["up"])
        assert got == [b"one"]
        assert line.live == 0
        writer.close()
    server.close()
    await server.wait_closed()
