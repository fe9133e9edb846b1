"""A gateway drains under 60 people who write to each other: all go to the other one, nobody notices, nothing is lost.

Real processes, the record written by the supervisor as the operator would write it. One history per test, each from a
cluster that is whole again.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from plato.client import Client, Phase
from plato.core.codes import Code
from plato.local.cluster import LocalCluster
from plato.wire.v1 import client_pb2 as pb

from tests.faults import checker, looking
from tests.faults.checker import check
from tests.faults.load import Crowd, Person, Transport
from tests.faults.people import person
from tests.faults.raw import Raw
from tests.faults.waiting import until

FAULT_SETTINGS = {
    "state.heartbeat_ms": 5_000,
    "auth.guests": True,
    "gateway.drain_on_term": True,
    "gateway.drain_pace_per_s": 100,
    "gateway.drain_settle_s": 0,
    "gateway.drain_deadline_s": 20,
}
CLIENTS = 60
PACE_PER_S = 20
SETTLE_S = 1
pytestmark = pytest.mark.timeout(150)


def ready(cluster: LocalCluster, name: str) -> tuple[int, str]:
    """(status, reason) of a gateway's /readyz; (0, "") while nobody answers."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{cluster.ports[f'{name}.admin']}/readyz", timeout=5) as answer:
            return int(answer.status), ""
    except urllib.error.HTTPError as e:
        with e:
            return e.code, str(json.loads(e.read())["reason"])
    except OSError:
        return 0, ""


def report(cluster: LocalCluster, name: str) -> dict[str, Any] | None:
    """`drain` of a gateway's /v1/report."""
    url = f"http://127.0.0.1:{cluster.ports[f'{name}.admin']}/v1/report"
    with urllib.request.urlopen(url, timeout=5) as answer:
        found: dict[str, Any] | None = json.loads(answer.read())["drain"]
    return found


def drained(cluster: LocalCluster, name: str) -> bool:
    status = report(cluster, name)
    return status is not None and status["phase"] == "drained"


@asynccontextmanager
async def whole(cluster: LocalCluster) -> AsyncIterator[None]:
    """Begins when everything serves, and leaves no drain behind."""
    await until(cluster.ready, 30.0, "the cluster is not whole")
    try:
        yield
    finally:
        for name in ("edge-0", "edge-1"):
            cluster.undrain(name)


@asynccontextmanager
async def talking(cluster: LocalCluster, folder: Path, users: Sequence[str]) -> AsyncIterator[Crowd]:
    """A crowd that writes all the time; half of them at each gateway, half of those over WebSocket. At the end everything
    is shown everywhere, once and in order."""
    ports = {way: [cluster.ports[f"edge-{n}.{way}"] for n in (0, 1)] for way in ("tcp", "ws")}
    first = dict(zip(users, [0, 0, 1, 1] * len(users), strict=False))

    def make(user: str, store: Path, transport: Transport) -> Client:
        order = ports[transport] if first[user] == 0 else ports[transport][::-1]
        gateways = [f"127.0.0.1:{port}" for port in order[:known]]
        return Client(cluster.token(user), store, gateways, user=user, transport=transport)

    async def rows() -> list[checker.Row]:
        return [row for row in await looking.rows(cluster) if row.from_user in first]

    known = 1
    async with Crowd(users, folder, make) as crowd:
        known = 2  # and begin again at the one that served last
        await crowd.reopen()
        for one in crowd.people:
            one.onlines.clear()
        done = asyncio.Event()
        talk = asyncio.create_task(crowd.talk(80, done.is_set, seed=5))
        try:
            yield crowd
        finally:
            done.set()
            await talk
        assert await crowd.rest(40.0)
        assert check(await crowd.history(rows, looking.stored)) == []


def at(cluster: LocalCluster, people: Sequence[Person], name: str) -> list[Person]:
    """Those who are connected to this gateway."""
    ports = {cluster.ports[f"{name}.tcp"], cluster.ports[f"{name}.ws"]}
    return [p for p in people if p.port in ports]


async def test_everybody_goes_over_unnoticed_and_a_cancel_lets_them_in_again(
    fault_cluster: LocalCluster, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster = fault_cluster
    users = [f"d{n:02}" for n in range(CLIENTS)]
    async with whole(cluster), talking(cluster, tmp_path, users) as crowd:
        here = at(cluster, crowd.people, "edge-0")
        # Half of them, but for those whom a busy gateway kept waiting: they went to the other one.
        assert len(here) >= CLIENTS // 4
        began = time.monotonic()
        cluster.drain("edge-0", pace_per_s=PACE_PER_S, settle_s=SETTLE_S, deadline_s=60)
        await until(lambda: ready(cluster, "edge-0") == (503, "draining"))
        # Newcomers are told so at once, in words, while the others are still here.
        async with await Raw.open("127.0.0.1", cluster.ports["edge-0.tcp"]) as newcomer:
            assert (await newcomer.until(pb.ERROR, pb.ErrorMsg)).code == Code.GATEWAY_CLOSING
        went: dict[str, float] = {}

        def all_went() -> bool:
            for p in here:
                if p.client.moves:
                    went.setdefault(p.user, time.monotonic())
            return len(went) == len(here)

        await until(all_went, 30.0, "not everybody went over")
        await until(lambda: drained(cluster, "edge-0"), 10.0, "it does not say that it is drained")
        status = report(cluster, "edge-0")
        assert status is not None
        assert (status["remaining"], status["cut"]) == (0, 0)
        # A client's state is told when its session is durable: a moment after the move.
        await until(lambda: at(cluster, crowd.people, "edge-1") == crowd.people, 10.0, "somebody is elsewhere")
        assert [p.user for p in crowd.people if p.onlines] == [], "a redirected client's state stays online"
        assert all(p.client.moves == (p in here) for p in crowd.people)
        times = sorted(went.values())
        # A busy machine shows a move later than it was, never earlier: so each is held to its place since the order, and how
        # many come within some second says nothing here.
        for n, moment in enumerate(times, 1):
            assert moment - began >= SETTLE_S + (n - 3) / (PACE_PER_S * 1.1), f"number {n} went ahead of the pace"
        cluster.undrain("edge-0")
        await until(lambda: ready(cluster, "edge-0")[0] == 200, 10.0, "it does not serve again")
        assert report(cluster, "edge-0") is None
        address = f"127.0.0.1:{cluster.ports['edge-0.tcp']}"
        async with person(cluster, "late", tmp_path / "late.sqlite", [address]) as late:
            assert late.port == cluster.ports["edge-0.tcp"]
        assert at(cluster, crowd.people, "edge-1") == crowd.people, "who went stays"
    with capsys.disabled():
        print(f"\ndrain: {len(here)} went over in {times[-1] - times[0]:.2f} s at {PACE_PER_S} a second, 0 reconnects")


async def test_a_sigterm_drains_first_and_then_ends(fault_cluster: LocalCluster, tmp_path: Path) -> None:
    cluster = fault_cluster
    async with whole(cluster), talking(cluster, tmp_path, [f"t{n:02}" for n in range(20)]) as crowd:
        here = at(cluster, crowd.people, "edge-0")
        (pid,) = cluster.pids("edge-0")
        os.kill(pid, signal.SIGTERM)
        await until(lambda: all(p.client.moves for p in here), 15.0, "not everybody went over")
        await until(lambda: pid not in cluster.pids("edge-0"), 15.0, "it does not end though nobody is left")
        assert [p.user for p in crowd.people if p.onlines] == []
        await until(cluster.ready, 30.0, "its successor does not serve")


async def test_who_does_not_go_is_cut_at_the_deadline(fault_cluster: LocalCluster, tmp_path: Path) -> None:
    cluster = fault_cluster
    port = cluster.ports["edge-0.tcp"]
    async with whole(cluster), await Raw.open("127.0.0.1", port) as raw:
        await raw.enter(cluster.token("stays"))
        began = time.monotonic()
        cluster.drain("edge-0", pace_per_s=100, settle_s=0, deadline_s=3)
        named = await raw.until(pb.REDIRECT, pb.RedirectMsg)
        assert [(g.name, g.port) for g in named.gateways] == [("edge-1", cluster.ports["edge-1.tcp"])]
        assert (await raw.until(pb.ERROR, pb.ErrorMsg)).code == Code.GATEWAY_CLOSING
        assert 2.0 < time.monotonic() - began < 15.0
        assert await raw.ended() == []
        await until(lambda: drained(cluster, "edge-0"), 10.0)
        status = report(cluster, "edge-0")
        assert status is not None
        assert status["cut"] == 1


async def test_guests_and_who_has_no_session_are_closed_plainly(fault_cluster: LocalCluster) -> None:
    cluster = fault_cluster
    port = cluster.ports["edge-0.tcp"]
    async with (
        whole(cluster),
        await Raw.open("127.0.0.1", port) as guest,
        await Raw.open("127.0.0.1", port) as stranger,
    ):
        assert (await guest.login("")).Code == 0
        assert (await guest.heartbeat()).Code == 0  # a guest's first frame commits
        await stranger.login(cluster.token("stranger"))  # and no Sync
        cluster.drain("edge-0", pace_per_s=100, settle_s=0, deadline_s=30)
        (last,) = await guest.ended()
        ack = pb.ACKMsg.FromString(last.Payload)
        assert (last.Type, ack.Type, ack.Code) == (pb.ACK, pb.LOGIN, Code.GATEWAY_CLOSING), "a type that guests know"
        (last,) = await stranger.ended()
        assert (last.Type, pb.ErrorMsg.FromString(last.Payload).code) == (pb.ERROR, Code.GATEWAY_CLOSING)
        await until(lambda: drained(cluster, "edge-0"), 10.0)
        status = report(cluster, "edge-0")
        assert status is not None
        assert status["cut"] == 0


async def test_link_and_workers_that_start_again_go_on_with_the_drain(
    fault_cluster: LocalCluster, tmp_path: Path
) -> None:
    cluster = fault_cluster
    async with whole(cluster), talking(cluster, tmp_path, [f"k{n:02}" for n in range(24)]) as crowd:
        here = at(cluster, crowd.people, "edge-0")
        cluster.drain("edge-0", pace_per_s=4, settle_s=0, deadline_s=60)
        await until(lambda: any(p.client.moves for p in here), 10.0)
        cluster.kill("edge-0/link")
        await until(lambda: ready(cluster, "edge-0") == (503, "draining"), 10.0, "the new link knows of no drain")
        await until(lambda: sum(p.client.moves > 0 for p in here) >= 6, 15.0, "the new link names nobody")
        cluster.kill("edge-0/worker-0")  # its clients were cut, and come back: not to the one that drains
        await until(lambda: at(cluster, crowd.people, "edge-1") == crowd.people, 30.0, "somebody is still at edge-0")
        await until(lambda: drained(cluster, "edge-0"), 10.0)


async def test_shards_that_start_again_name_everybody_again(fault_cluster: LocalCluster, tmp_path: Path) -> None:
    cluster = fault_cluster
    async with whole(cluster), talking(cluster, tmp_path, [f"s{n:02}" for n in range(24)]) as crowd:
        here = at(cluster, crowd.people, "edge-0")
        cluster.drain("edge-0", pace_per_s=6, settle_s=0, deadline_s=60)
        await until(lambda: any(p.client.moves for p in here), 10.0)
        cluster.kill("state")
        await until(lambda: all(p.client.moves for p in here), 40.0, "not everybody went over")
        await until(lambda: drained(cluster, "edge-0"), 10.0)
        assert [p.user for p in crowd.people if p.onlines] == [], "a shard's start is no client's business"


async def test_without_another_gateway_nobody_is_named_until_there_is_one(
    fault_cluster: LocalCluster, tmp_path: Path
) -> None:
    cluster = fault_cluster
    async with whole(cluster):
        cluster.drain("edge-1", pace_per_s=100, settle_s=0, deadline_s=120)
        address = f"127.0.0.1:{cluster.ports['edge-0.tcp']}"
        async with person(cluster, "alone", tmp_path / "alone.sqlite", [address]) as alone:
            cluster.drain("edge-0", pace_per_s=100, settle_s=0, deadline_s=120)
            await until(lambda: ready(cluster, "edge-0") == (503, "draining"))
            named = redirects(cluster)
            with pytest.raises(TimeoutError):  # thirty steps of a drain that could name it
                await until(lambda: redirects(cluster) > named, 1.5)
            cluster.undrain("edge-1")
            await until(partial(moved, alone), 15.0, "it did not go when there was somewhere to go")
            await until(lambda: alone.client.state.phase is Phase.ONLINE)
            assert not alone.reconnects


def redirects(cluster: LocalCluster) -> float:
    """How many clients were named so far."""
    return sum(looking.metric(cluster, f"plato-s{n}", "plato_state_redirects_total") for n in (0, 1))


def moved(one: Person) -> bool:
    return bool(one.client.moves)
