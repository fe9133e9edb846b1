"""One peer says as much as the wire takes and comes back whenever it is cut: the others do not notice (invariant 9)."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest
from plato.core.codes import Code
from plato.local.cluster import LocalCluster
from plato.wire.v1 import client_pb2 as wire

from tests.faults import looking
from tests.faults.load import quantile
from tests.faults.people import person
from tests.faults.raw import Raw, frame
from tests.faults.waiting import until

pytestmark = pytest.mark.timeout(110)
MIB = 1 << 20
FLOOD_S = 3.0
OTHERS = 8
ROUNDS = 2
"""A second one where the first was too slow: a busy machine may stand still in one of them."""
P99_S = 1.5
"""Without the bounds it was 1.4 s to 10 s in every round; with them some hundred ms at most on two busy cores."""

# A process of its own, so that what it costs to flood is not measured as what it costs to be flooded.
FLOODER = """
import socket, sys, threading, time
host, port, hello, said = sys.argv[1], int(sys.argv[2]), bytes.fromhex(sys.argv[3]), bytes.fromhex(sys.argv[4])
block = said * (200_000 // len(said) + 1)

def read(sock):
    try:
        while sock.recv(1 << 20):
            pass
    except OSError:
        pass

def enter():
    sock = socket.create_connection((host, port))
    sock.sendall(hello)
    sock.recv(1)
    sock.recv(1 << 16)
    threading.Thread(target=read, args=(sock,), daemon=True).start()
    return sock

sock, cuts = enter(), 0
print("ready", flush=True)
sys.stdin.readline()
end = time.monotonic() + float(sys.argv[5])
while time.monotonic() < end:
    try:
        sock.sendall(block)
    except OSError:
        cuts += 1
        try:
            sock = enter()
        except OSError:
            time.sleep(0.05)
print(cuts, flush=True)
"""


def said(kind: str, token: str) -> bytes:
    """The frame that is repeated."""
    head = wire.LoginMsgHead(DeviceID=9)
    up = wire.UPMsg(Head=wire.UPMsgHead(ClientID=1, SessionId="c"), client_msg_id=b"k" * 16, to_user="x")
    large = wire.UPMsg(UPMsgBody=b"x" * 20_000)
    large.MergeFrom(up)
    frames = {
        "unknown": frame(77, wire.LogoutMsg()),  # type: ignore[arg-type]  # a type that nobody knows
        "login": frame(wire.LOGIN, wire.LoginMsg(Head=head, token=token)),
        "forged": frame(wire.LOGIN, wire.LoginMsg(Head=head, token=token[:-8] + "AAAAAAAA")),
        "reconn": frame(wire.RECONN, wire.ReConnMsg(Head=wire.ReConnMsgHead(ConnID=1), secret=b"s" * 16)),
        "ack": frame(wire.ACK, wire.ACKMsg(Type=wire.PUSH)),
        "heartbeat": frame(wire.HEARTBEAT, wire.HeartbeatMsg()),
        "up": frame(wire.UP, up),
        "large": frame(wire.UP, large),
        "sync": frame(wire.SYNC, wire.SyncMsg(ref=1)),
        "pull": frame(wire.PULL, wire.PullMsg(ref=1, conversation_id="c")),
    }
    return frames[kind]


def launch(*arguments: str) -> subprocess.Popen[str]:
    """The flooder's process."""
    command = ["nice", sys.executable, "-c", FLOODER, *arguments]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


@asynccontextmanager
async def flooding(cluster: LocalCluster, kind: str) -> AsyncIterator[subprocess.Popen[str]]:
    """A flooder at the first gateway: live when the block begins, then flooding for FLOOD_S."""
    host, port = cluster.gateways[0].split(":")
    token = cluster.token("flooder")
    hello = frame(wire.LOGIN, wire.LoginMsg(Head=wire.LoginMsgHead(DeviceID=9), token=token))
    hello += frame(wire.SYNC, wire.SyncMsg(ref=1))
    process = launch(host, port, hello.hex(), said(kind, token).hex(), str(FLOOD_S))
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        assert await asyncio.to_thread(process.stdout.readline) == "ready\n"
        process.stdin.write("go\n")
        process.stdin.flush()
        yield process
    finally:
        process.kill()
        process.wait()
        process.stdin.close()
        process.stdout.close()


async def echoes(raws: list[Raw], seconds: float) -> list[float]:
    """Heartbeats of everybody for so long; how long each answer took, s, sorted."""
    loop = asyncio.get_running_loop()
    end, out = loop.time() + seconds, []

    async def beat(raw: Raw) -> None:
        while loop.time() < end:
            begun = loop.time()
            await raw.heartbeat()
            out.append(loop.time() - begun)
            await asyncio.sleep(0.05)

    await asyncio.gather(*map(beat, raws))
    return sorted(out)


KINDS = ["unknown", "login", "forged", "reconn", "ack", "heartbeat", "up", "large", "sync", "pull"]


@pytest.mark.parametrize("kind", KINDS)
async def test_a_flooder_starves_nobody(fault_cluster: LocalCluster, kind: str) -> None:
    host, port = fault_cluster.gateways[0].split(":")
    before = {pid: looking.resident_bytes(pid) for pid in fault_cluster.pids("state")}
    async with AsyncExitStack() as stack:
        others = []
        for n in range(OTHERS):
            raw = await stack.enter_async_context(await Raw.open(host, int(port)))
            await raw.enter(fault_cluster.token(f"calm-{n}"))
            others.append(raw)
        cuts, took = 0, [P99_S]
        for _ in range(ROUNDS):
            if quantile(took, 0.99) < P99_S:
                break
            async with flooding(fault_cluster, kind) as process:
                took = await echoes(others, FLOOD_S + 1)
                assert process.stdout is not None
                cuts += int(await asyncio.to_thread(process.stdout.readline))
        assert quantile(took, 0.99) < P99_S, f"p50 {quantile(took, 0.5)}, worst {took[-1]}"
        # Large frames are few: their share of the credit holds them, below the pace at which a connection is closed.
        assert cuts or kind == "large", "it was never closed"
    grown = max(looking.resident_bytes(pid) - was for pid, was in before.items())
    assert grown < 64 * MIB, f"a shard grew by {grown} bytes"


async def test_a_flooder_reads_why_it_was_closed(fault_cluster: LocalCluster) -> None:
    host, port = fault_cluster.gateways[0].split(":")
    async with await Raw.open(host, int(port)) as raw:
        await raw.enter(fault_cluster.token("told"))
        beats = frame(wire.HEARTBEAT, wire.HeartbeatMsg()) * 20_000
        raw.writer.write(beats)
        seen = await raw.ended(20)
        errors = [wire.ErrorMsg.FromString(cmd.Payload) for cmd in seen if cmd.Type == wire.ERROR]
        assert errors[-1].code == Code.FLOODING
        assert {e.code for e in errors[:-1]} <= {Code.BUSY}
        conn_id, secret = raw.conn_id, raw.secret
    async with await Raw.open(host, int(port)) as raw:
        assert (await raw.reconn(conn_id, secret)).Code == 0, "its session waited"


async def test_an_honest_burst_of_two_thousand_is_no_flood(fault_cluster: LocalCluster, tmp_path: Path) -> None:
    def dropped() -> float:
        shards = looking.topology(fault_cluster).shards
        return sum(
            value
            for shard in shards
            for name, value in looking.metrics(fault_cluster, shard).items()
            if name.startswith("plato_state_dropped_total") and "flooding" in name
        )

    async with (
        person(fault_cluster, "burst-a", tmp_path / "a") as a,
        person(fault_cluster, "burst-b", tmp_path / "b") as b,
    ):
        before = dropped()
        tickets = [await a.client.send(f"{n}", to="burst-b") for n in range(2_000)]
        await asyncio.wait_for(asyncio.gather(*(t.settled() for t in tickets)), 60)
        await until(lambda: len(b.shown) >= 2_000, 30)
        assert [int(row.body) for row in b.shown] == list(range(2_000))
        assert len(a.onlines) == len(b.onlines) == 1
        assert dropped() == before
