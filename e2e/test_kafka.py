"""The bus on Kafka, with real pods: a broker outside the cluster, its properties in a Secret, killed in mid-talk.

PostgreSQL holds history and leases as ever; the uplinks go through the topic that the migration Job makes.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Iterator
from pathlib import Path

import pytest
from plato.adapters.tokens import DEV_KID, issue
from plato.client import Client
from plato.local.kafka import KafkaServer, new_id

from e2e.frame.dependencies import Dependencies
from e2e.frame.kube import Kube, wait_for
from e2e.frame.platform import Images, Platform
from e2e.live import scene
from e2e.testbed.layout import HOST_IP, Layout
from tests.ports import free_port
from tools.kafka_broker import jars

NAMESPACE = "e2e-kafka"
TOPIC = f"e2e-{secrets.token_hex(4)}"
PARTITIONS = 8
SPEC = {
    "state": {"shards": 1},
    "msg": {"replicas": 1},
    "ipconfig": {"replicas": 1},
    "bus": {"type": "Kafka", "partitions": PARTITIONS, "kafka": {"config": {"name": "kafka"}, "topic": TOPIC}},
    "gateways": {
        "initialReplicas": 1,
        "template": {"workers": 1, "ports": {"tcp": 9800, "ws": 9801, "admin": 9809}},
    },
}


@pytest.fixture(scope="module")
def broker(testbed: Layout | None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[KafkaServer]:
    """One, on loopback and on the testbed's bridge."""
    if testbed is None:
        pytest.skip("the broker stands on the testbed's bridge, which no other cluster's pods reach")
    if why := jars.missing():
        pytest.skip(why)
    port, controller = free_port(HOST_IP), free_port(HOST_IP)
    server = KafkaServer(
        tmp_path_factory.mktemp("kafka"),
        port,
        controller,
        jars.jars(),
        cluster_id=new_id(),
        options={
            "listeners": f"PLAIN://0.0.0.0:{port},CONTROLLER://127.0.0.1:{controller}",
            "advertised.listeners": f"PLAIN://{HOST_IP}:{port}",
        },
    )
    asyncio.run(server.start())
    yield server
    asyncio.run(server.stop())


@pytest.fixture(scope="module")
def platform(
    kube: Kube,
    images: Images,
    dependencies: Dependencies,
    broker: KafkaServer,
    tmp_path_factory: pytest.TempPathFactory,
) -> Platform:
    """A small platform on that broker."""
    made = Platform(kube, "kafka", images, dependencies, tmp_path_factory.mktemp("platform"))
    made.install_operator()
    kube.secret("kafka", {"properties": f"bootstrap.servers={HOST_IP}:{broker.port}\n"})
    made.create(SPEC)
    return made


def client(platform: Platform, user: str, store: Path) -> Client:
    """One that asks ipconfig."""
    host = scene.node_addresses(platform.kube)[0]
    token = issue(platform.keys_dir, DEV_KID, user, "plato", "plato", 3_600)
    return Client(token, store, ipconfig_url=platform.ipconfig_url(host), user=user)


@pytest.mark.timeout(400)
def test_a_broker_that_dies_in_the_middle_costs_no_message(
    platform: Platform, broker: KafkaServer, tmp_path: Path
) -> None:
    """What is sent while there is none is settled when it is back, once and in order."""

    async def talk() -> None:
        async with (
            client(platform, "ann", tmp_path / "ann") as ann,
            client(platform, "bob", tmp_path / "bob") as bob,
        ):
            for n in range(5):
                await (await ann.send(f"{n}", to="bob")).settled()
            broker.kill()
            assert broker.child is not None
            await broker.child.wait()
            waiting = [await ann.send(f"{n}", to="bob") for n in range(5, 10)]
            await broker.start()
            for sent in waiting:
                await sent.settled()
            got = []
            async for message in bob.messages():
                got.append(message.text)
                if len(got) == 10:
                    break
            assert got == [f"{n}" for n in range(10)]

    asyncio.run(asyncio.wait_for(talk(), 240))
    platform.wait_ready(120)
    wait_for(
        "what it depends on is ready",
        lambda: platform.kube.holds("PlatoCluster", platform.name, "DependenciesReady"),
        60,
        seen=platform.state,
    )
