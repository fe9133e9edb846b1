"""Rows of the faults list about parts that die or stop under load: M12, M24 and M26, on one real cluster."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager
from pathlib import Path

import pytest
import redis.asyncio as redis
from plato.local.cluster import LocalCluster

from tests.faults import looking
from tests.faults.load import Person
from tests.faults.people import person
from tests.faults.waiting import until

FAULT_SETTINGS = {
    "state.heartbeat_ms": 2_000,
    "state.reconnect_delay_ms": 200,
    "state.repeat_min_ms": 500,
    "state.repeat_max_ms": 3_000,
    "msg.allocator": "redis",  # the one with most parts that may die
}
pytestmark = pytest.mark.timeout(110)
MIB = 1 << 20


async def send(sender: Person, to: str, first: int, count: int) -> list[asyncio.Task[object]]:
    """Sends numbered messages as fast as the client takes them; returns what waits for each one's place."""
    tickets = [await sender.client.send(f"{n}", to=to) for n in range(first, first + count)]
    return [asyncio.ensure_future(ticket.settled()) for ticket in tickets]


def numbers(reader: Person) -> list[int]:
    return [int(row.body) for row in reader.shown]


async def rows_of(cluster: LocalCluster, user: str) -> list[int]:
    """The bodies that a user sent, by seq."""
    rows = sorted((r for r in await looking.rows(cluster) if r.from_user == user), key=lambda r: r.seq)
    return [int(r.body) for r in rows]


async def test_m12_msg_killed_half_way_through_a_thousand(fault_cluster: LocalCluster, tmp_path: Path) -> None:
    async with (
        person(fault_cluster, "m12-a", tmp_path / "a") as a,
        person(fault_cluster, "m12-b", tmp_path / "b", transport="ws") as b,
    ):
        settled = await send(a, "m12-b", 0, 700)
        await until(lambda: len(b.shown) >= 300, 30, "half-way was not reached")
        fault_cluster.kill("msg")
        settled += await send(a, "m12-b", 700, 300)  # however many were shown between two looks: these it meets
        await asyncio.wait_for(asyncio.gather(*settled), 60)
        await until(lambda: len(b.shown) >= 1_000 and len(a.shown) >= 1_000, 30)
        assert numbers(a) == numbers(b) == list(range(1_000))
    assert await rows_of(fault_cluster, "m12-a") == list(range(1_000))
    await until(fault_cluster.ready, 30)


@contextmanager
def database_stands_still(cluster: LocalCluster) -> Iterator[int]:
    """Every process of PostgreSQL is stopped; yields the postmaster's pid. They go on afterwards, if they still live."""
    (postmaster,) = cluster.pids("postgres")
    stopped = looking.descendants(postmaster)
    for pid in stopped:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield postmaster
    finally:
        for pid in stopped:
            try:
                os.kill(pid, signal.SIGCONT)
            except ProcessLookupError:
                continue


async def test_m24_a_bus_that_stalls_and_then_dies(fault_cluster: LocalCluster, tmp_path: Path) -> None:
    """10 s of standstill instead of 30 s, then kill -9. Uplinks are answered all the time and nobody gives up."""
    shards = {pid: looking.resident_bytes(pid) for pid in fault_cluster.pids("state")}
    async with (
        person(fault_cluster, "m24-a", tmp_path / "a") as a,
        person(fault_cluster, "m24-b", tmp_path / "b") as b,
    ):
        first = await send(a, "m24-b", 0, 100)
        await asyncio.wait_for(asyncio.gather(*first), 20)
        onlines = (len(a.onlines), len(b.onlines))
        with database_stands_still(fault_cluster) as postmaster:
            later = await send(a, "m24-b", 100, 500)
            loop = asyncio.get_running_loop()
            end = loop.time() + 10.0
            while loop.time() < end:
                grown = max(looking.resident_bytes(pid) - was for pid, was in shards.items())
                assert grown < 64 * MIB, f"a shard grew by {grown} bytes"
                await asyncio.sleep(0.2)
            assert not any(task.done() for task in later)
            # Pending and busy answers keep the connection alive: nobody reconnects because the bus is slow.
            assert (len(a.onlines), len(b.onlines)) == onlines
            os.kill(postmaster, signal.SIGKILL)
        await asyncio.wait_for(asyncio.gather(*later), 60)
        await until(lambda: len(b.shown) >= 600 and len(a.shown) >= 600, 30)
        assert numbers(a) == numbers(b) == list(range(600))
    assert await rows_of(fault_cluster, "m24-a") == list(range(600))
    await until(fault_cluster.ready, 30)


async def test_m26_the_store_forgets_its_scripts_and_restarts(fault_cluster: LocalCluster, tmp_path: Path) -> None:
    async with AsyncExitStack() as stack:
        a = await stack.enter_async_context(person(fault_cluster, "m26-a", tmp_path / "a"))
        b = await stack.enter_async_context(person(fault_cluster, "m26-b", tmp_path / "b"))
        settled = await send(a, "m26-b", 0, 50)
        store = redis.Redis.from_url(fault_cluster.store_url)
        try:
            await store.script_flush()
            settled += await send(a, "m26-b", 50, 50)
            # A login right after the flush meets no script, and must not see that.
            c = await stack.enter_async_context(person(fault_cluster, "m26-c", tmp_path / "c"))
            await store.client_kill_filter(_type="normal", skipme=True)
            settled += await send(a, "m26-b", 100, 50)
            settled += await send(c, "m26-b", 0, 1)
        finally:
            await store.aclose()
        fault_cluster.kill("valkey")
        settled += await send(a, "m26-b", 150, 50)
        d = await stack.enter_async_context(person(fault_cluster, "m26-d", tmp_path / "d"))
        settled += await send(d, "m26-b", 0, 1)
        await asyncio.wait_for(asyncio.gather(*settled), 30)
        await until(lambda: len(b.shown) >= 202, 20)
        assert [int(r.body) for r in b.shown if r.from_user == "m26-a"] == list(range(200))
        assert len(a.onlines) == len(b.onlines) == 1, "the store's troubles are none of a live connection's"
    assert await rows_of(fault_cluster, "m26-a") == list(range(200))
    await until(fault_cluster.ready, 30)
