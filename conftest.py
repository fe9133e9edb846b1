"""Fixtures for every test folder: real servers, started once per session and only when a test asks for one."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from plato.local.servers import PostgresServer, ValkeyServer


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@pytest.fixture(scope="session")
def postgres_uri(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The superuser's URI of a fresh PostgreSQL. Make a database or a schema of your own in it."""
    folder: Path = tmp_path_factory.mktemp("postgres")
    server = PostgresServer(folder, _free_port())
    asyncio.run(server.start())
    yield server.uri
    asyncio.run(server.stop())


@pytest.fixture(scope="session")
def valkey_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of a fresh Valkey. Use a key prefix of your own, or FLUSHALL in your own fixture."""
    folder: Path = tmp_path_factory.mktemp("valkey")
    server = ValkeyServer(folder, _free_port())
    asyncio.run(server.start())
    yield server.url
    asyncio.run(server.stop())
