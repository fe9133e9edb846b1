"""A whole gateway pod dies under 50 clients, four times: each comes back through the other one, and loses nothing.

Pod, workers and link are killed at once. The supervisor stands still (SIGSTOP) until all clients are back, as a node that
is gone starts nothing again; so the dead gateway is dead for as long as it matters.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

import pytest
from plato.client import Client
from plato.local.cluster import LocalCluster

from tests.faults import looking
from tests.faults.checker import check
from tests.faults.load import Crowd, Person, Transport
from tests.faults.waiting import until

FAULT_SETTINGS = {"state.heartbeat_ms": 5_000}
CLIENTS = 50
WRITERS = {"w0": ("edge-0",), "w1": ("edge-1",)}
"""Two more who know one gateway only, so that one of them stays connected in each round."""
ROUNDS = 4
BACK_WITHIN_S = 2.0
"""What is promised beyond the random delay."""
SHOWN_WITHIN_S = 5.0
STALL_S = 3.0
"""A machine whose cores are busy may stand still for so long, whatever was promised; the figures that are printed tell."""


@contextlib.contextmanager
def supervisor_stands_still(cluster: LocalCluster) -> Iterator[None]:
    """Nothing is started again meanwhile."""
    pid = int(cluster.status()["supervisor_pid"])
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def kill_pod(cluster: LocalCluster, gateway: str) -> set[int]:
    """kill -9 of the pod's process, its workers and its link; returns their pids."""
    pids = {p for g in cluster.pids(gateway) for p in looking.descendants(g)}
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return pids


def whole(cluster: LocalCluster, killed: set[int]) -> bool:
    """Whether everything serves, and the supervisor has seen who died."""
    return cluster.ready() and not killed & {*cluster.pids("gateway"), *cluster.pids("worker"), *cluster.pids("link")}


@pytest.mark.timeout(120)
async def test_clients_of_a_dead_gateway_come_back_through_the_other(
    fault_cluster: LocalCluster, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster = fault_cluster
    names = ("edge-0", "edge-1")
    ports = {(name, way): cluster.ports[f"{name}.{way}"] for name in names for way in ("tcp", "ws")}
    known = list(names[:1])  # all begin at edge-0: they know no other

    def make(user: str, store: Path, transport: Transport) -> Client:
        gateways = [f"127.0.0.1:{ports[n, transport]}" for n in WRITERS.get(user, known)]
        return Client(cluster.token(user), store, gateways, user=user, transport=transport)

    delay_s = cluster.settings.state.reconnect_delay_ms / 1000
    lines = []
    killed: set[int] = set()
    async with Crowd([*(f"u{n:02}" for n in range(CLIENTS)), *WRITERS], tmp_path, make) as crowd:
        known.append(names[1])
        await crowd.reopen()
        clients, writers = crowd.people[:CLIENTS], dict(zip(names, crowd.people[CLIENTS:], strict=True))
        for round_no in range(ROUNDS):
            dead, other = names[round_no % 2], names[1 - round_no % 2]
            await until(partial(whole, cluster, killed), 30.0, "the cluster is not whole")
            here = {ports[dead, "tcp"], ports[dead, "ws"]}
            # Everybody, but for those of the first round whom a busy gateway kept waiting: they went to the other one.
            met = [p for p in clients if p.port in here]
            assert len(met) >= (CLIENTS // 2 if round_no == 0 else CLIENTS), f"not everybody is at {dead}"
            before = [len(p.onlines) for p in met]
            with supervisor_stands_still(cluster):
                killed |= kill_pod(cluster, dead)
                at = time.monotonic()
                # One who noticed nothing writes to each, and each, who knows of nothing yet, to its neighbour.
                readers = {(await crowd.say(writers[other], p.user, b"gap")).sent.client_msg_id: p for p in clients}
                for one, two in zip(clients[::2], clients[1::2], strict=True):
                    readers[(await crowd.say(one, two.user, b"gap too")).sent.client_msg_id] = two
                await until(partial(all_back, met, before), 30.0, "some client did not come back")
                backs = [p.onlines[n] - at for p, n in zip(met, before, strict=True)]
                for person in clients:
                    assert person.port == ports[other, person.transport], person.client.state
                await until(
                    partial(all_shown, readers), SHOWN_WITHIN_S + STALL_S, "a message sent in the gap did not arrive"
                )
            late = sum(back > delay_s + BACK_WITHIN_S for back in backs)
            span = f"{min(backs):.2f} to {max(backs):.2f} s"
            lines.append(f"  {dead} dead: all {len(met)} back via {other} after {span}, {late} later than promised")
            assert max(backs) <= delay_s + BACK_WITHIN_S + STALL_S
        assert await crowd.rest(30.0)
        findings = check(await crowd.history(lambda: looking.rows(cluster), looking.stored))
    with capsys.disabled():
        print("\ngateway death:\n" + "\n".join(lines))
    assert findings == []


def all_back(clients: Sequence[Person], before: Sequence[int]) -> bool:
    return all(len(p.onlines) > n for p, n in zip(clients, before, strict=True))


def all_shown(readers: Mapping[bytes, Person]) -> bool:
    return all(client_msg_id in person.shown_at for client_msg_id, person in readers.items())
