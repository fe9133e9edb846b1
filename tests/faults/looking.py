"""What the tests look up behind a running cluster's back: rows, routes, metrics, memory, file descriptors."""

from __future__ import annotations

import contextlib
import re
import sqlite3
import urllib.request
from collections.abc import Collection, Sequence
from pathlib import Path

import asyncpg
from plato.adapters.valkey import ValkeyStore
from plato.local.cluster import LocalCluster
from plato.local.folder import LocalError
from plato.ports import Route
from plato.topology.record import Topology, loads

from tests.faults import checker


async def rows(cluster: LocalCluster) -> list[checker.Row]:
    """Every row of im_message."""
    return await rows_of(cluster.database_uri, cluster.settings.database.schema_name)


async def rows_of(database_uri: str, schema: str) -> list[checker.Row]:
    """Every row of im_message of a schema."""
    connection = await asyncpg.connect(database_uri)
    try:
        found = await connection.fetch(
            f"SELECT conversation_id, seq, prev_seq, msg_id, from_user, client_msg_id, body FROM {schema}.im_message"
        )
    finally:
        await connection.close()
    return [checker.Row(*record) for record in found]


async def count(cluster: LocalCluster, table: str) -> int:
    """How many rows a table of the cluster's schema has."""
    connection = await asyncpg.connect(cluster.database_uri)
    try:
        found = await connection.fetchval(f"SELECT count(*) FROM {cluster.settings.database.schema_name}.{table}")
    finally:
        await connection.close()
    return int(found)


async def routes(cluster: LocalCluster, users: Sequence[str]) -> list[dict[int, Route]]:
    """Per user {device_id: Route}, ended sessions (conn_id 0) included."""
    store = await ValkeyStore.connect(cluster.store_url, cluster.settings.store.key_prefix)
    try:
        return await store.routes.read_many(users)
    finally:
        await store.close()


async def online(cluster: LocalCluster, users: Sequence[str]) -> int:
    """How many devices of these users have a route."""
    return sum(route.conn_id != 0 for found in await routes(cluster, users) for route in found.values())


def topology(cluster: LocalCluster) -> Topology:
    """The record as its processes read it."""
    return loads(cluster.folder.topology.read_text(encoding="utf-8"))


def back(cluster: LocalCluster, target: str, dead: Collection[int]) -> bool:
    """Whether everything of that name or kind serves, and none of it is one of the dead: right after a kill the supervisor
    may not know of it yet, and `ready` speaks of before."""
    with contextlib.suppress(LocalError):
        return cluster.ready(target) and not {*dead} & {*cluster.pids(target)}
    return False


def stored(path: Path) -> list[checker.Row]:
    """The messages in a client's SQLite file."""
    with sqlite3.connect(f"file:{path}?mode=ro", uri=True) as connection:
        found = connection.execute(
            "SELECT conversation_id, seq, prev_seq, msg_id, from_user, client_msg_id, body FROM message"
        ).fetchall()
    connection.close()
    return [checker.Row(*record) for record in found]


def metrics(cluster: LocalCluster, process: str, port: str = "admin") -> dict[str, float]:
    """{name with its labels: value} of one process's /metrics. Raises OSError while it does not answer."""
    with urllib.request.urlopen(f"http://127.0.0.1:{cluster.ports[f'{process}.{port}']}/metrics", timeout=5) as answer:
        lines = answer.read().decode().splitlines()
    pairs = (line.rsplit(" ", 1) for line in lines if line and not line.startswith("#"))
    return {name: float(value) for name, value in pairs}


def metric(cluster: LocalCluster, process: str, name: str, port: str = "admin") -> float:
    """One metric of one process, its labels added up; 0.0 when it is not there."""
    found = metrics(cluster, process, port)
    return sum(value for key, value in found.items() if re.split(r"[{ ]", key)[0] == name)


def descriptors(pid: int) -> int:
    """Open file descriptors of a process."""
    return sum(1 for _ in Path(f"/proc/{pid}/fd").iterdir())


def resident_bytes(pid: int) -> int:
    """Resident memory of a process."""
    status = Path(f"/proc/{pid}/status").read_text(encoding="ascii")
    match = re.search(r"^VmRSS:\s+(\d+) kB", status, re.MULTILINE)
    return int(match[1]) * 1024 if match else 0


def descendants(pid: int) -> list[int]:
    """A process and all below it."""
    found = [pid]
    for parent in found:
        for task in Path(f"/proc/{parent}/task").glob("*/children"):
            found += [int(child) for child in task.read_text(encoding="ascii").split()]
    return found
