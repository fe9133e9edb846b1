"""Fixtures for every test folder: real servers and whole embedded clusters, started only when a test asks for one.

A cluster is `plato up` as a subprocess, in a folder and on ports of its own. What its supervisor prints stands in
<data_dir>.log, what its children say in <data_dir>/logs/.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import structlog
from hypothesis import HealthCheck, settings
from plato.api import names
from plato.local.cluster import LocalCluster
from plato.local.folder import LocalError
from plato.local.servers import PostgresServer, ValkeyServer

from tests.ports import free_port

if TYPE_CHECKING:
    from tests.kafka.broker import Broker

_READY_S = 60.0
_FAILURE_LINES = 40
"""Of what is told of a failure; what was asserted stands at its end."""


def pytest_configure() -> None:
    """Logged tracebacks are plain: pretty ones, with every local variable, cost seconds each. Hypothesis has no clock, and
    draws the same examples for a test each time, so that whether a change passes is no matter of chance; `make search` looks
    for others."""
    plain = structlog.dev.ConsoleRenderer(colors=False, exception_formatter=structlog.dev.plain_traceback)
    structlog.configure(processors=[*structlog.get_config()["processors"][:-1], plain])
    settings.register_profile(
        "plato",
        settings(),
        derandomize=not os.environ.get("PLATO_SEARCH"),
        # How long drawing an example takes says how busy the machine is, and nothing of the product.
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow],
    )
    settings.load_profile("plato")


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """PLATO_FAILURES: a file that every failure's words are added to, so that `.ci/run` can end with those of all steps."""
    file = os.environ.get("PLATO_FAILURES")
    if file and report.failed:
        words = report.longreprtext.splitlines()[-_FAILURE_LINES:]
        with Path(file).open("a", encoding="utf-8") as out:
            out.write("\n".join([f"--- {report.nodeid} ({report.when})", *words, ""]))


@pytest.fixture(scope="session")
def postgres_uri(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The superuser's URI of a fresh PostgreSQL. Make a database or a schema of your own in it."""
    folder: Path = tmp_path_factory.mktemp("postgres")
    server = PostgresServer(folder, free_port())
    asyncio.run(server.start())
    yield server.uri
    asyncio.run(server.stop())


@pytest.fixture(scope="session")
def valkey_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of a fresh Valkey. Use a key prefix of your own, or FLUSHALL in your own fixture."""
    folder: Path = tmp_path_factory.mktemp("valkey")
    server = ValkeyServer(folder, free_port())
    asyncio.run(server.start())
    yield server.url
    asyncio.run(server.stop())


@pytest.fixture(scope="session")
def kafka_broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    """A fresh Kafka broker. Use a topic of your own. Skips, in words, where there is no Java or no Maven."""
    from tests.kafka import broker  # here: what it imports is needed by few

    yield from broker.running(tmp_path_factory.mktemp("kafka"))


def _end(cluster: LocalCluster) -> None:
    try:
        cluster.down()
    except LocalError:
        cluster.kill_supervisor()
        raise


@pytest.fixture(scope="session")
def new_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., LocalCluster]]:
    """new_cluster({"section.key": value}, ready=True) → a running cluster. Each costs a dozen processes until its `down()`;
    what still runs after the last test is stopped then."""
    endings = contextlib.ExitStack()

    def make(settings: Mapping[str, Any] | None = None, *, ready: bool = True) -> LocalCluster:
        # Pollers only where they are asked for: two processes less to start.
        chosen = {"gateway.poll_port": 0, **(settings or {})}
        cluster = LocalCluster.launch(tmp_path_factory.mktemp("plato") / "data", chosen)
        endings.callback(_end, cluster)
        if ready:
            cluster.wait_ready(_READY_S)
        return cluster

    with endings:
        yield make


@pytest.fixture(scope="session")
def cluster(new_cluster: Callable[..., LocalCluster]) -> LocalCluster:
    """One cluster with default settings, shared by every test that leaves it whole."""
    return new_cluster({"gateway.poll_port": names.GATEWAY_POLL_PORT})


@pytest.fixture(scope="session")
def checkout() -> Path:
    """The folder of the project."""
    return Path(__file__).resolve().parent
