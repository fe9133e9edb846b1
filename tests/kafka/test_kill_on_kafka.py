"""The night of tests/faults, with the uplinks on Kafka and its broker killed as often as everything else."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from plato.local.cluster import LocalCluster
from plato.local.kafka import KafkaServer

from tests.faults import night
from tests.kafka import broker


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KafkaServer]:
    """A broker of our own."""
    (made,) = broker.brokers(tmp_path_factory.mktemp("kafka"), 1)
    asyncio.run(made.start())
    yield made
    made.kill()
    asyncio.run(made.stop())


@pytest.fixture(scope="module")
def cluster_on_kafka(server: KafkaServer, new_cluster: Callable[..., LocalCluster]) -> Iterator[LocalCluster]:
    """`plato up` with bus.type kafka."""
    cluster = new_cluster({**night.SETTINGS, "bus.type": "kafka", "bus.servers": server.servers})
    yield cluster
    cluster.down()


class Kept:
    """Starts the broker again whenever it died, as whoever runs a Kafka does."""

    def __init__(self, server: KafkaServer) -> None:
        self._server = server
        self._serves = True
        self._longest_s = 0.0

    def away_s(self) -> float:
        """The longest time from a death until it served again."""
        return self._longest_s

    def pid(self) -> int:
        """Of the broker that serves now; 0 while none does."""
        return (self._server.pid or 0) if self._serves else 0

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            assert self._server.child is not None
            await self._server.child.wait()
            died = time.monotonic()
            self._serves = False
            await self._server.start()
            self._serves = True
            self._longest_s = max(self._longest_s, time.monotonic() - died)


def test_plato_up_says_what_a_single_broker_promises(cluster_on_kafka: LocalCluster) -> None:
    said = cluster_on_kafka.status()["durability"]
    assert "Kafka: single node (replication 1): promises process crashes only; database: single node" in said


@pytest.mark.timeout(600)
async def test_nothing_is_lost_while_everything_is_killed_and_the_broker_too(
    cluster_on_kafka: LocalCluster, server: KafkaServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kept = Kept(server)
    keeper = asyncio.create_task(kept.run())
    try:
        await night.spend(cluster_on_kafka, tmp_path, capsys, {"kafka": kept.pid}, kept.away_s)
    finally:
        keeper.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await keeper
