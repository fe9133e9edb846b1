"""Slots move between shards while people talk: nobody reconnects, nothing is lost, doubled or out of order.

quiet     moves only, as many as the operator makes at most, for half a minute
rough     moves all the time, and in their midst the old owner dies, the new one, both, a link, the store; one is stopped
empty     a shard gives every slot away, and gets its first one back
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
import time
from collections.abc import Callable, Coroutine
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from plato.client import Client
from plato.core.ids import SLOTS
from plato.local.cluster import LocalCluster
from plato.local.folder import LocalError
from plato_msg.downlink import UNTAKEN

from tests.faults import checker, looking, movers
from tests.faults.checker import check, summary
from tests.faults.load import Crowd, Transport, latencies_s, quantile
from tests.faults.movers import Moved
from tests.faults.people import person
from tests.faults.waiting import until

FAULT_SETTINGS = {"local.shards": 3, "state.heartbeat_ms": 5_000}
SEED = int(os.environ.get("PLATO_FAULTS_SEED", "20240607"))
USERS = 50
RATE_PER_S = 25.0
QUIET_S = 30.0
SLOTS_PER_S = 16
NIGHT_S = 60.0
STOPPED_S = 6.0
MOVED_WITHIN_S = 1.0
TRIES = 3
"""A busy machine may stand still once; what the shard does too slowly it does so each time."""
EMPTY = "plato-s2"

Reports = pytest.CaptureFixture[str]


def maker(cluster: LocalCluster) -> Callable[[str, Path, Transport], Client]:
    """Clients as an application makes them."""

    def make(user: str, store: Path, transport: Transport) -> Client:
        async def token() -> str:
            return cluster.token(user)

        return Client(token, store, ipconfig_url=cluster.ipconfig_url, user=user, transport=transport)

    return make


async def rows_of(cluster: LocalCluster, crowd: Crowd) -> list[checker.Row]:
    """What is stored of this crowd's: the tests of this module share a cluster."""
    users = {p.user for p in crowd.people}
    return [row for row in await looking.rows(cluster) if row.from_user in users]


async def settled(cluster: LocalCluster) -> None:
    """Every slot is with the shard that the record names, and loaded."""

    def all_loaded() -> bool:
        record = looking.topology(cluster)
        with contextlib.suppress(OSError, LocalError):
            return all(
                looking.metrics(cluster, name)['plato_state_slots{state="loaded"}'] == len(record.slots_of(name))
                for name in record.shards
            )
        return False

    await until(all_loaded, 30.0, "some slot is not loaded by its shard")


@pytest.mark.timeout(180)
async def test_nobody_notices_that_slots_move(fault_cluster: LocalCluster, tmp_path: Path, capsys: Reports) -> None:
    cluster, chance = fault_cluster, random.Random(SEED)
    moves: list[Moved] = []
    async with Crowd([f"q{n:02}" for n in range(USERS)], tmp_path, maker(cluster)) as crowd:
        hot = await movers.hot_slots(cluster, crowd.people)
        dirty_before = dirty_marks(cluster)
        over = False
        talk = asyncio.create_task(crowd.talk(RATE_PER_S, lambda: over, SEED))
        began = time.monotonic()
        try:
            # For so long, and on a busy machine until the operator made as many.
            while time.monotonic() < began + QUIET_S or sum(len(m.slots) for m in moves) < SLOTS_PER_S * (QUIET_S - 5):
                moves.append(movers.order(cluster, *movers.pick(cluster, chance, hot, SLOTS_PER_S)))
                await asyncio.sleep(1.0)  # the operator's pace
        finally:
            over = True
            await talk
        rested = await crowd.rest(60.0)
        reconnects = sum(p.reconnects for p in crowd.people)
        waits, gaps = latencies_s(crowd.flights), movers.gaps_s(crowd.flights, moves, hot, MOVED_WITHIN_S)
        findings = check(await crowd.history(partial(rows_of, cluster, crowd), looking.stored))
        dirty = dirty_marks(cluster) - dirty_before
        with capsys.disabled():
            print(f"\nmoves alone, seed {SEED}: reconnects {reconnects}, {summary(findings)}")
            print(movers.figures(crowd, waits, gaps, moves))
    await settled(cluster)
    assert findings == []
    assert rested
    assert reconnects == 0
    assert len(gaps) >= len(moves) // 4, "the moves met too few messages to say anything"
    assert quantile(gaps, 0.5) <= MOVED_WITHIN_S
    assert dirty == 0, "a move asked a whole shard to sync"


def dirty_marks(cluster: LocalCluster) -> int:
    """Entries of the fan-out that nobody took, so that their shard was marked, so far. One that does not answer in time is
    marked too; that is no move's doing, but that of a machine that stands still."""
    logs = [
        (cluster.data_dir / "logs" / f"{p['name']}.log").read_text(encoding="utf-8") for p in cluster.processes("msg")
    ]
    marks = [json.loads(line) for log in logs for line in log.splitlines() if '"marked dirty"' in line]
    return sum(int(mark["entries"]) for mark in marks if mark["why"] == UNTAKEN)


class Night:
    """What goes wrong in the midst of moves, in turn."""

    def __init__(self, cluster: LocalCluster, chance: random.Random) -> None:
        self.cluster = cluster
        self.moves: list[Moved] = []
        self._stopped = ""
        self.done: list[str] = []
        self._chance = chance
        self.faults: dict[str, Callable[[Moved], Coroutine[Any, Any, None]]] = {
            "old owner killed": lambda m: self._kill(m.source),
            "new owner killed": lambda m: self._kill(m.target),
            "both killed": lambda m: self._kill(m.source, m.target),
            "link killed": lambda _: self._kill("link"),
            "old owner stopped": lambda m: self._stop(m.source),
            "store killed": lambda _: self._kill("valkey"),
        }

    async def _kill(self, *targets: str) -> None:
        for target in targets:
            with contextlib.suppress(LocalError):
                pid = self._chance.choice(self.cluster.pids(target))
                os.kill(pid, signal.SIGKILL)

    async def _stop(self, target: str) -> None:
        (pid,) = self.cluster.pids(target)
        os.kill(pid, signal.SIGSTOP)
        self._stopped = target
        try:
            await asyncio.sleep(STOPPED_S)  # longer than the new owner waits for it
        finally:
            os.kill(pid, signal.SIGCONT)
            self._stopped = ""

    async def pass_by(self, hot: dict[int, set[str]]) -> None:
        """Moves each half second between shards that answer, as the operator does; each fault twice, right after a move."""
        order = list(self.faults) * 2
        self._chance.shuffle(order)
        began = time.monotonic()
        for n, fault in enumerate(order):
            while time.monotonic() < began + n * NIGHT_S / len(order):
                self._move(hot)
                await asyncio.sleep(0.5)
            move = await until(lambda: self._move(hot), 30.0, "no two shards answer")
            await asyncio.sleep(self._chance.uniform(0.0, 0.3))
            await self._while_moving(self.faults[fault](move), hot)
            self.done.append(f"{move.at - began:5.1f} s  {fault} ({move.source} to {move.target})")

    async def _while_moving(self, fault: Coroutine[Any, Any, None], hot: dict[int, set[str]]) -> None:
        task = asyncio.create_task(fault)
        while not task.done():
            await asyncio.sleep(0.5)
            self._move(hot)
        await task

    def _move(self, hot: dict[int, set[str]]) -> Moved | None:
        with contextlib.suppress(LocalError):
            answering = [
                p["name"] for p in self.cluster.processes("state") if p["ready"] and p["name"] != self._stopped
            ]
            if len(answering) > 1:
                chosen = movers.pick(self.cluster, self._chance, hot, SLOTS_PER_S, answering)
                self.moves.append(movers.order(self.cluster, *chosen))
                return self.moves[-1]
        return None


@pytest.mark.timeout(300)
async def test_deaths_in_the_midst_of_moves_lose_nothing(
    fault_cluster: LocalCluster, tmp_path: Path, capsys: Reports
) -> None:
    cluster = fault_cluster
    night = Night(cluster, random.Random(SEED))
    async with Crowd([f"r{n:02}" for n in range(USERS)], tmp_path, maker(cluster)) as crowd:
        hot = await movers.hot_slots(cluster, crowd.people)
        over = False
        talk = asyncio.create_task(crowd.talk(RATE_PER_S, lambda: over, SEED))
        try:
            await night.pass_by(hot)
            await until(partial(ready, cluster), 60.0, "the cluster did not repair itself")
        finally:
            over = True
            await talk
        rested = await crowd.rest(90.0)
        reconnects = sum(p.reconnects for p in crowd.people)
        waits, gaps = latencies_s(crowd.flights), movers.gaps_s(crowd.flights, night.moves, hot, MOVED_WITHIN_S)
        findings = check(await crowd.history(partial(rows_of, cluster, crowd), looking.stored))
        with capsys.disabled():
            print(f"\nmoves and deaths, seed {SEED}: reconnects {reconnects}, {summary(findings)}")
            print(movers.figures(crowd, waits, gaps, night.moves))
            print("  " + "\n  ".join(night.done))
    await settled(cluster)
    assert findings == [], "\n".join([*map(str, findings[:20]), *night.done])
    assert rested
    assert len(night.done) == 2 * len(night.faults)


def ready(cluster: LocalCluster) -> bool:
    """Whether everything serves."""
    with contextlib.suppress(LocalError):
        return cluster.ready()
    return False


@pytest.mark.timeout(120)
async def test_a_shard_gives_everything_away_and_gets_its_first_slot_at_once(
    fault_cluster: LocalCluster, tmp_path: Path, capsys: Reports
) -> None:
    cluster = fault_cluster
    await until(partial(ready, cluster), 30.0)
    async with person(cluster, "ann", tmp_path / "ann") as ann, person(cluster, "ben", tmp_path / "ben") as ben:
        hot = await movers.hot_slots(cluster, [ann])
        (home,) = hot
        movers.order(cluster, set(looking.topology(cluster).slots_of("plato-s0")), "plato-s1")  # all at once
        while slots := sorted(looking.topology(cluster).slots_of(EMPTY)):
            movers.order(cluster, set(slots[:64]), "plato-s1")
        await settled(cluster)
        await said(ann, "ben", "all is with one shard")
        tries: list[float] = []
        while not tries or (tries[-1] >= MOVED_WITHIN_S and len(tries) < TRIES):
            if tries:
                movers.order(cluster, {home}, "plato-s1")
                await settled(cluster)
            moved = movers.order(cluster, {home}, EMPTY)
            tries.append(await said(ann, "ben", "the first slot of an empty shard"))
        rest = await said(ann, "ben", "and once more")
        with capsys.disabled():
            print(f"\nfirst slot of an empty shard: acknowledged after {tries} s, then after {rest:.3f} s")
        assert looking.topology(cluster).slots_of(EMPTY).keys() == moved.slots == {home}
        assert min(tries) < MOVED_WITHIN_S
        slots = sorted(looking.topology(cluster).slots_of("plato-s1"))
        movers.order(cluster, set(slots[: SLOTS // 3]), "plato-s0")
        movers.order(cluster, set(slots[SLOTS // 3 : 2 * SLOTS // 3]), EMPTY)
        await settled(cluster)
        await said(ann, "ben", "spread again")
        assert (ann.reconnects, ben.reconnects) == (0, 0)
        await until(lambda: len(ben.shown) == 3 + len(tries))


async def said(sender: Any, to: str, text: str) -> float:
    """Sends, waits for the acceptance; returns the seconds it took."""
    began = time.monotonic()
    ticket = await sender.client.send(text.encode(), to=to)
    await asyncio.wait_for(ticket.accepted(), 20)
    return time.monotonic() - began
