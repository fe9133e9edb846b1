"""R8 and R11 on three brokers: the node that leads a partition is killed, or stopped and wakes up again, in mid-flight."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from uuid import uuid4

import pytest
from aiokafka.client import AIOKafkaClient
from aiokafka.structs import TopicPartition
from plato.adapters import bus_kafka_topic
from plato.adapters.bus_kafka import KafkaBusProducer
from plato.adapters.bus_kafka_config import KafkaConfig
from plato.adapters.bus_kafka_reader import KafkaBusReader
from plato.core.errors import Unavailable
from plato.local.kafka import KafkaServer
from plato.runtime.settings import BusSettings

from tests.kafka import broker

PARTITIONS = 6
FRAME_BYTES = 65_536


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[KafkaServer]]:
    """Three brokers of one cluster."""
    made = broker.brokers(tmp_path_factory.mktemp("kafka"), 3)

    async def start() -> None:
        for server in made:
            await server.spawn()  # each needs another one to have a leader
        await asyncio.gather(*(server.wait_ready() for server in made))

    asyncio.run(start())
    yield made
    for server in made:
        broker.thaw(server)
        server.kill()
        asyncio.run(server.stop())


class Talk:
    """One appender that repeats until known, one reader that follows, and who leads what."""

    def __init__(self, servers: list[KafkaServer], topic: str) -> None:
        self.config = KafkaConfig(
            BusSettings(type="kafka", servers=",".join(s.servers for s in servers), topic=topic, partitions=PARTITIONS)
        )
        self.topic = topic
        self.producer = KafkaBusProducer(self.config, PARTITIONS, timeout_s=5.0)
        self.reader = KafkaBusReader(self.config, timeout_s=5.0)
        self.acknowledged: list[bytes] = []
        self.seen: dict[int, list[bytes]] = {p: [] for p in range(PARTITIONS)}
        self._after = dict.fromkeys(range(PARTITIONS), 0)

    async def append(self) -> None:
        """Numbers, each to every partition, one after the other, until cancelled."""
        number = 0
        while True:
            value = b"%d" % number
            with contextlib.suppress(Unavailable):
                await self.producer.append({p: [value] for p in range(PARTITIONS)})
                self.acknowledged.append(value)
                number += 1

    async def follow(self) -> None:
        """What msg does with a bus, until cancelled."""
        while True:
            with contextlib.suppress(Unavailable):
                for record in await self.reader.read_many(self._after, 100, 1_000_000):
                    self._after[record.partition] = record.position
                    self.seen[record.partition].append(record.value)
                await self.reader.wait(range(PARTITIONS), 0.1)

    async def leader(self, servers: list[KafkaServer]) -> KafkaServer:
        """The broker that leads partition 0 now."""
        client = AIOKafkaClient(bootstrap_servers=[s.servers for s in servers])
        await client.bootstrap()
        try:
            await client._wait_on_metadata(self.topic)
            node = client.cluster.leader_for_partition(TopicPartition(self.topic, 0))
        finally:
            await client.close()
        return next(s for s in servers if s.node_id == node)

    async def reaches(self, count: int) -> None:
        """Waits for that many acknowledged numbers."""
        async with asyncio.timeout(90):
            while len(self.acknowledged) < count:  # noqa: ASYNC110 - the appender has no event for it
                await asyncio.sleep(0.01)


@pytest.fixture
async def talk(servers: list[KafkaServer]) -> AsyncIterator[Talk]:
    made = Talk(servers, f"three-{uuid4().hex[:12]}")
    topic = await bus_kafka_topic.make_sure(made.config, PARTITIONS, FRAME_BYTES)
    assert topic.durability.level == "node"
    assert topic.durability.promise == "Kafka: replication 3, min.insync.replicas 2: survives the loss of one node"
    tasks = [asyncio.create_task(made.append()), asyncio.create_task(made.follow())]
    yield made
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await made.producer.close()
    await made.reader.close()


async def kill(server: KafkaServer) -> None:
    server.kill()
    assert server.child is not None
    await server.child.wait()


async def stop(server: KafkaServer) -> None:
    broker.freeze(server)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("harm", [kill, stop])
async def test_r8_r11_what_was_acknowledged_outlives_the_node_that_led_it_in_its_order(
    talk: Talk, servers: list[KafkaServer], harm: Callable[[KafkaServer], Awaitable[None]]
) -> None:
    await talk.reaches(30)
    victim = await talk.leader(servers)
    await harm(victim)
    before = len(talk.acknowledged)
    await talk.reaches(before + 30)  # while it is away
    if victim.pid is None:
        await victim.start()
    broker.thaw(victim)  # it still holds requests of a time when it led
    await talk.reaches(len(talk.acknowledged) + 30)
    acknowledged = list(talk.acknowledged)
    async with asyncio.timeout(60):
        while any(acknowledged[-1] not in seen for seen in talk.seen.values()):  # noqa: ASYNC110 - as above
            await asyncio.sleep(0.05)
    for seen in talk.seen.values():
        firsts = list(dict.fromkeys(seen))
        assert firsts[: len(acknowledged)] == acknowledged
    assert talk.reader.stopped == {}
