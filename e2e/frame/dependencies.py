"""PostgreSQL and Valkey for the platform under test: real servers on this machine, which the testbed's pods reach over its
bridge; on another cluster those that PLATO_E2E_DATABASE_URI and PLATO_E2E_STORE_URL name.

They lie outside of the cluster on purpose: a database and a store are brought by the user, and what the suite does to nodes
must not be what it does to them. The chart's own development servers are tried by the chart's tests.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import asyncpg
from plato.local.servers import PostgresServer, ValkeyServer
from redis.asyncio import Redis

from e2e.testbed.layout import HOST_IP
from tests.ports import free_port

POD_ADDRESSES: Final = "10.0.0.0/8"
"""Where nodes and pods of the testbed come from."""


@dataclass(frozen=True, slots=True)
class Dependencies:
    """As the pods open them; the suite opens the database in the same way."""

    database_uri: str
    store_url: str


@contextmanager
def named() -> Iterator[Dependencies | None]:
    """Those that the environment names, or None."""
    uri, url = os.environ.get("PLATO_E2E_DATABASE_URI"), os.environ.get("PLATO_E2E_STORE_URL")
    yield Dependencies(uri, url) if uri and url else None


@contextmanager
def on_the_bridge() -> Iterator[Dependencies]:
    """Both servers, on loopback and on the testbed's bridge, in a folder that is removed afterwards."""
    folder = Path(tempfile.mkdtemp(prefix="plato-e2e-"))
    folder.chmod(0o711)  # PostgreSQL runs as another user
    postgres = PostgresServer(
        folder / "postgres", free_port(HOST_IP), listen_addresses=f"127.0.0.1,{HOST_IP}", max_connections="300"
    )
    valkey = ValkeyServer(folder / "valkey", free_port(HOST_IP))
    try:
        asyncio.run(_start(postgres, valkey))
        yield Dependencies(
            postgres.uri.replace("127.0.0.1", HOST_IP),
            valkey.url.replace("127.0.0.1", HOST_IP),
        )
    finally:
        asyncio.run(_stop(postgres, valkey))
        shutil.rmtree(folder, ignore_errors=True)


async def _start(postgres: PostgresServer, valkey: ValkeyServer) -> None:
    await postgres.spawn()
    # initdb lets loopback in; the server reads the file once more when it is told to.
    rules = postgres.data / "pg_hba.conf"
    with rules.open("a", encoding="utf-8") as file:
        file.write(f"host all all {POD_ADDRESSES} scram-sha-256\n")
    await postgres.wait_ready()
    assert postgres.child is not None
    await _reload(postgres.uri)
    await valkey.start()
    client = Redis.from_url(valkey.url)
    try:
        await client.config_set("bind", f"127.0.0.1 {HOST_IP}")
    finally:
        await client.aclose()


async def _reload(uri: str) -> None:
    connection = await asyncpg.connect(uri)
    try:
        await connection.fetchval("SELECT pg_reload_conf()")
    finally:
        await connection.close()


async def _stop(postgres: PostgresServer, valkey: ValkeyServer) -> None:
    await valkey.stop()
    await postgres.stop()
