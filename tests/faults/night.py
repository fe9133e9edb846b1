"""A night: people talk on a real cluster while its processes are killed by -9; what must hold in the morning.

the crowd    50 real clients, half of them on WebSocket, ≥ 20 messages/s in all, from the first kill to the last
the night    each kind of process TIMES times, in a random order that the seed fixes; mostly one at a time, sometimes into
             the last one's repair
the morning  quiet; every client is closed and opened again; the checker reads database, SQLite files and streams
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import pytest
from plato.client import Client
from plato.local.cluster import LocalCluster
from plato.local.folder import LocalError

from tests.faults import doctored, looking
from tests.faults.checker import Kind, check, summary
from tests.faults.load import Crowd, Flight, Transport, latencies_s, quantile
from tests.faults.waiting import until

SETTINGS = {"state.heartbeat_ms": 5_000}
SEED = int(os.environ.get("PLATO_FAULTS_SEED", "20240607"))
KINDS = ("worker", "link", "state", "msg", "ipconfig", "postgres", "valkey")
TIMES = 5
USERS = 50
RATE_PER_S = 24.0
ACK_WITHIN_S = 30.0


@dataclass
class Night:
    """What was killed when. others: {kind: its pid now, 0 while it does not serve}: processes that somebody else keeps."""

    cluster: LocalCluster
    others: Mapping[str, Callable[[], int]] = field(default_factory=dict)
    kills: Counter[str] = field(default_factory=Counter)
    log: list[str] = field(default_factory=list)
    over: bool = False

    @property
    def kinds(self) -> tuple[str, ...]:
        """All that is killed."""
        return (*KINDS, *self.others)

    async def pass_by(self, chance: random.Random) -> None:
        """Kills every kind TIMES times. Waits for readiness as an operator would: four times of five, and not for ever."""
        order = [kind for kind in self.kinds for _ in range(TIMES)]
        chance.shuffle(order)
        began = time.monotonic()
        for kind in order:
            if chance.random() < 0.8:
                with contextlib.suppress(TimeoutError):
                    await until(self._ready, 15.0)
            pid = await until(partial(self._one, kind, chance), 60.0, f"no process of kind {kind} runs")
            os.kill(pid, signal.SIGKILL)
            self.kills[kind] += 1
            self.log.append(f"{time.monotonic() - began:6.1f} s  {kind:<9} pid {pid}")
            await asyncio.sleep(chance.uniform(0.5, 3.5))  # the pace of the night, nothing is waited for
        await until(self._ready, 60.0, "the cluster did not repair itself after the last kill")
        self.over = True

    def _ready(self) -> bool:
        with contextlib.suppress(LocalError):
            return self.cluster.ready() and all(pid() for pid in self.others.values())
        return False

    def _one(self, kind: str, chance: random.Random) -> int:
        if kind in self.others:
            return self.others[kind]()
        with contextlib.suppress(LocalError):
            pids = [pid for pid in self.cluster.pids(kind) if Path(f"/proc/{pid}").exists()]
            return chance.choice(pids) if pids else 0
        return 0


async def spend(
    cluster: LocalCluster,
    folder: Path,
    capsys: pytest.CaptureFixture[str],
    others: Mapping[str, Callable[[], int]] | None = None,
    away_s: Callable[[], float] = lambda: 0.0,
) -> None:
    """One night and its morning; asserts what must hold, and that the checker would see it broken.

    away_s: how long the one of `others` that took longest was away; nothing can be acknowledged meanwhile, and how fast it
    starts is not ours.
    """

    def make(user: str, store: Path, transport: Transport) -> Client:
        return client_of(cluster, user, store, transport)

    night = Night(cluster, others or {})
    async with Crowd([f"u{n:02}" for n in range(USERS)], folder, make) as crowd:
        began = time.monotonic()
        talk = asyncio.create_task(crowd.talk(RATE_PER_S, lambda: night.over, SEED))
        try:
            await night.pass_by(random.Random(SEED))
        finally:
            night.over = True
            await talk
        took_s = time.monotonic() - began
        rested = await crowd.rest(90.0)
        reconnects = sum(p.reconnects for p in crowd.people)
        await crowd.reopen()
        rested = await crowd.rest(30.0) and rested
        history = await crowd.history(lambda: looking.rows(cluster), looking.stored)
        findings = check(history)
        with capsys.disabled():
            print(_table(night, crowd.flights, took_s, reconnects, summary(findings)))
    assert findings == [], _evidence(folder, night, findings)
    assert rested, "some message was never settled or shown, and the checker saw nothing?"
    assert all(night.kills[kind] >= TIMES for kind in night.kinds)
    assert len(crowd.flights) / took_s >= 20.0
    in_time = sum(latency <= ACK_WITHIN_S + away_s() for latency in latencies_s(crowd.flights))
    assert in_time / len(crowd.flights) >= 0.99
    for place in doctored.PLACES:
        kinds = {f.kind for f in check(doctored.lose(history, place))}
        assert Kind.LOST in kinds, place
        kinds = {f.kind for f in check(doctored.double(history, place))}
        assert Kind.DOUBLED in kinds, place
        kinds = {f.kind for f in check(doctored.swap(history, place))}
        assert kinds & {Kind.OUT_OF_ORDER, Kind.UPLINK_ORDER}, place


def client_of(cluster: LocalCluster, user: str, store: Path, transport: Transport) -> Client:
    """A client as an application makes it: by ipconfig, with a token that it can renew."""

    async def token() -> str:
        return cluster.token(user)

    return Client(token, store, ipconfig_url=cluster.ipconfig_url, user=user, transport=transport)


def _table(night: Night, flights: list[Flight], took_s: float, reconnects: int, found: dict[str, int]) -> str:
    waits = latencies_s(flights)
    late = sum(wait > ACK_WITHIN_S for wait in waits)
    lines = [
        "",
        f"kill test, seed {SEED}: {sum(night.kills.values())} kills in {took_s:.0f} s",
        "  " + "  ".join(f"{kind} {night.kills[kind]}" for kind in night.kinds),
        f"  messages {len(flights)} ({len(flights) / took_s:.1f}/s), by {USERS} users; reconnects {reconnects}",
        f"  acknowledged: p50 {quantile(waits, 0.5) * 1000:.0f} ms, p99 {quantile(waits, 0.99) * 1000:.0f} ms, "
        f"max {waits[-1]:.1f} s; later than {ACK_WITHIN_S:.0f} s: {late}",
        "  " + ", ".join(f"{name} {n}" for name, n in found.items()),
    ]
    return "\n".join(lines)


def _evidence(folder: Path, night: Night, findings: Sequence[object]) -> str:
    """The first findings, and a file with all of them and the night's log."""
    path = folder / "findings.json"
    path.write_text(json.dumps({"night": night.log, "findings": [str(f) for f in findings]}, indent=1))
    return "\n".join([f"{len(findings)} findings, see {path}", *map(str, findings[:20]), *night.log])
