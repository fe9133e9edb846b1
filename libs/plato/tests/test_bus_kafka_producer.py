"""The producing side of the Kafka bus (R8) before a broker of the test's own: what it refuses, and how the repeat goes."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from aiokafka.errors import MessageSizeTooLargeError, ProducerClosed
from plato.adapters import bus_kafka
from plato.adapters.bus_kafka import KafkaBusProducer
from plato.adapters.bus_kafka_config import KafkaConfig
from plato.core.errors import Unavailable
from plato.runtime.settings import BusSettings

PARTITIONS = 4


class Batch:
    """As aiokafka's: takes records up to its size, and a first one whatever its size."""

    def __init__(self, most_bytes: int) -> None:
        self.most_bytes = most_bytes
        self.records: list[bytes] = []

    @property
    def size_bytes(self) -> int:
        """Of its values."""
        return sum(map(len, self.records))

    def append(self, *, key: None, value: bytes, timestamp: None) -> object | None:
        """None: it is full."""
        if self.records and self.size_bytes + len(value) > self.most_bytes:
            return None
        self.records.append(value)
        return object()

    def close(self) -> None:
        """Nothing more goes in."""


class Broker:
    """One topic, and a limit of what one batch may hold."""

    def __init__(self, partitions: int = PARTITIONS, most_bytes: int = 1_048_588) -> None:
        self.partitions = partitions
        self.most_bytes = most_bytes
        self.log: list[tuple[int, bytes]] = []
        self.mute = False
        """It answers nothing."""
        self.asked = 0
        self.futures: dict[int, asyncio.Future[None]] = {}

    def producer(self, *, max_batch_size: int, **_: Any) -> Any:
        """In place of AIOKafkaProducer."""
        return Producer(self, max_batch_size)

    def of(self, partition: int) -> list[bytes]:
        """The records of a partition."""
        return [value for p, value in self.log if p == partition]


class Producer:
    """As aiokafka's, as far as it is used."""

    def __init__(self, broker: Broker, batch_bytes: int) -> None:
        self.broker = broker
        self.waiting: list[asyncio.Future[None]] = []
        self.batch_bytes = batch_bytes
        self._sender = SimpleNamespace(sender_task=None)
        self._message_accumulator = SimpleNamespace(_batches={}, _pending_batches=set(), fail_all=lambda _: None)

    async def start(self) -> None:
        """Connects."""

    async def stop(self) -> None:
        """Whoever waits is told."""
        for future in self.waiting:
            if not future.done():
                future.set_exception(ProducerClosed())

    async def partitions_for(self, topic: str) -> set[int]:
        """See aiokafka."""
        return set(range(self.broker.partitions))

    def create_batch(self) -> Batch:
        """See aiokafka."""
        return Batch(self.batch_bytes)

    async def send_batch(self, batch: Batch, topic: str, *, partition: int) -> asyncio.Future[None]:
        """See aiokafka."""
        future = asyncio.get_running_loop().create_future()
        self.broker.asked += 1
        self.broker.futures[partition] = future
        self.waiting.append(future)
        if self.broker.mute:
            pass
        elif batch.size_bytes > self.broker.most_bytes:
            future.set_exception(MessageSizeTooLargeError())
        else:
            self.broker.log += [(partition, record) for record in batch.records]
            future.set_result(None)
        return future


@pytest.fixture
def config() -> KafkaConfig:
    return KafkaConfig(BusSettings(type="kafka", servers="127.0.0.1:1", partitions=PARTITIONS))


@pytest.fixture
def muted(config: KafkaConfig, monkeypatch: pytest.MonkeyPatch) -> tuple[Broker, KafkaBusProducer]:
    """A broker that takes batches and answers none, and a producer that waits 0.2 s for it."""
    broker = Broker()
    broker.mute = True
    monkeypatch.setattr(bus_kafka, "AIOKafkaProducer", broker.producer)
    return broker, KafkaBusProducer(config, PARTITIONS, timeout_s=0.2)


async def appended(producer: KafkaBusProducer, partition: int, records: Sequence[bytes]) -> None:
    """Repeats the same records until it is known, as state does."""
    for _ in range(20):
        try:
            return await producer.append({partition: records})
        except Unavailable:
            pass
    raise AssertionError("the same append is refused for ever: its partition stands still")


async def test_r8_a_topic_that_takes_one_message_takes_a_full_append_too(
    config: KafkaConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The start lets a topic in whose max.message.bytes holds one message; then batches must not be larger."""
    broker = Broker(most_bytes=73_728)
    monkeypatch.setattr(bus_kafka, "AIOKafkaProducer", broker.producer)
    producer = KafkaBusProducer(config, PARTITIONS)
    records = [b"%06d" % n + bytes(1_000) for n in range(600)]
    await appended(producer, 1, records)
    assert list(dict.fromkeys(broker.of(1))) == records
    before = len(broker.log)
    await producer.append({2: records})
    assert len(broker.log) - before == len(records), "what was learnt holds for the next append"
    await producer.close()


async def test_a_topic_that_was_made_anew_with_fewer_partitions_takes_nothing(
    config: KafkaConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A broker that makes topics by itself gives it one: what went into it would lie where msg never looks again."""
    broker = Broker(partitions=1)
    monkeypatch.setattr(bus_kafka, "AIOKafkaProducer", broker.producer)
    producer = KafkaBusProducer(config, PARTITIONS)
    with pytest.raises(Unavailable, match=f"has partitions 1, not {PARTITIONS}"):
        await producer.append({0: [b"x"]})
    assert broker.log == []
    await producer.close()


async def test_appends_that_wait_for_their_turn_are_told_in_time_while_no_broker_answers(
    muted: tuple[Broker, KafkaBusProducer],
) -> None:
    """Each before it takes its whole time: the hundredth caller of the HTTP API would wait for a hundred times that."""
    broker, producer = muted
    found = await asyncio.gather(*(producer.append({0: [b"%d" % n]}) for n in range(20)), return_exceptions=True)
    assert all(isinstance(one, Unavailable) for one in found)
    assert broker.asked < 10, "most were told while they waited"
    broker.mute = False
    producer.timeout_s = 30.0
    await producer.append({0: [b"x"]})
    assert broker.log == [(0, b"x")]
    await producer.close()


async def test_a_partition_that_takes_nothing_ends_no_append_of_another(
    muted: tuple[Broker, KafkaBusProducer],
) -> None:
    broker, producer = muted
    stuck = asyncio.create_task(producer.append({0: [b"x"]}))
    async with asyncio.timeout(10):
        while 0 not in broker.futures:  # noqa: ASYNC110 - the producer says it by what it sends
            await asyncio.sleep(0)
    producer.timeout_s = 30.0
    other = asyncio.create_task(producer.append({1: [b"y"]}))
    with pytest.raises(Unavailable):
        await stuck
    await asyncio.sleep(0.05)  # nothing is waited for: that the other one is not ended is what is looked at
    assert not other.done()
    broker.futures[1].set_result(None)
    await other
    assert not producer._uses
    await producer.close()
