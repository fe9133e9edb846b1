"""R11 before a log of the test's own: what the consuming side of the Kafka bus does when the log is not what it was."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from types import SimpleNamespace
from typing import Any

import pytest
from aiokafka import TopicPartition
from aiokafka.errors import OffsetOutOfRangeError
from plato.adapters import bus_kafka_reader
from plato.adapters.bus_kafka_config import KafkaConfig
from plato.adapters.bus_kafka_reader import KafkaBusReader
from plato.ports import BusRecord
from plato.runtime.settings import BusSettings


class Log:
    """Partition 0: records from `begin` on. Others are empty."""

    def __init__(self, *values: bytes) -> None:
        self.begin = 0
        self.values = list(values)
        self.looked: Counter[int] = Counter()
        """How often an offset was fetched from."""

    @property
    def end(self) -> int:
        """The offset of the next record."""
        return self.begin + len(self.values)

    def append(self, *values: bytes) -> None:
        """Records come."""
        self.values += values

    def consumer(self, **_: Any) -> Any:
        """In place of AIOKafkaConsumer."""
        return Consumer(self)


class Consumer:
    """As aiokafka's, as far as it is used."""

    def __init__(self, log: Log) -> None:
        self.log = log
        self.at: dict[TopicPartition, int] = {}
        self.paused: set[TopicPartition] = set()
        self._client = SimpleNamespace(
            cluster=SimpleNamespace(leader_for_partition=lambda _: 0), _wait_on_metadata=self._nothing
        )
        state = SimpleNamespace(has_valid_position=False)
        assignment = SimpleNamespace(state_value=lambda _: state)
        self._subscription = SimpleNamespace(subscription=SimpleNamespace(assignment=assignment))

    async def _nothing(self, *_: object) -> None:
        pass

    start = stop = _nothing

    def assign(self, partitions: Iterable[TopicPartition]) -> None:
        """See aiokafka."""
        self.at, self.paused = dict.fromkeys(partitions, 0), set()

    def seek(self, at: TopicPartition, offset: int) -> None:
        """See aiokafka."""
        self.at[at] = offset

    def pause(self, at: TopicPartition) -> None:
        """See aiokafka."""
        self.paused.add(at)

    def resume(self, at: TopicPartition) -> None:
        """See aiokafka."""
        self.paused.discard(at)

    async def end_offsets(self, partitions: Iterable[TopicPartition]) -> dict[TopicPartition, int]:
        """See aiokafka."""
        return {at: self.log.end if at.partition == 0 else 0 for at in partitions}

    async def getmany(self, timeout_ms: int) -> dict[TopicPartition, list[Any]]:
        """See aiokafka."""
        await asyncio.sleep(0.001)
        for at, offset in self.at.items():
            if at in self.paused or at.partition:
                continue
            self.log.looked[offset] += 1
            if not self.log.begin <= offset <= self.log.end:
                raise OffsetOutOfRangeError({at: offset})
            if offset < self.log.end:
                self.at[at] = self.log.end
                values = enumerate(self.log.values[offset - self.log.begin :], offset)
                return {at: [SimpleNamespace(offset=n, value=value) for n, value in values]}
        return {}


Make = Callable[[Log], Awaitable[KafkaBusReader]]


@pytest.fixture
async def reading(monkeypatch: pytest.MonkeyPatch) -> Any:
    made: list[KafkaBusReader] = []

    async def make(log: Log) -> KafkaBusReader:
        monkeypatch.setattr(bus_kafka_reader, "AIOKafkaConsumer", log.consumer)
        made.append(KafkaBusReader(KafkaConfig(BusSettings(type="kafka", servers="127.0.0.1:1"))))
        return made[-1]

    yield make
    for reader in made:
        await reader.close()


async def until(condition: Callable[[], Any], reader: KafkaBusReader, after: int) -> None:
    """Looks again and again, as msg does."""
    async with asyncio.timeout(20):
        while not condition():
            await reader.read_many({0: after}, 100, 1_000_000)
            await asyncio.sleep(0.001)


def values(records: list[BusRecord]) -> list[bytes]:
    return [record.value for record in records]


async def test_r11_a_log_that_was_set_back_does_not_go_on_when_it_has_grown_past_the_position(reading: Make) -> None:
    """What was acknowledged after it was set back lies before the position, and would be passed over in silence."""
    log = Log(b"a", b"b", b"c")
    reader = await reading(log)
    assert values(await reader.read_many({0: 0}, 100, 1_000_000)) == [b"a", b"b", b"c"]
    log.values = [b"a"]
    await reader.read_many({0: 3}, 100, 1_000_000)
    reader._stale = True  # the connection ended with its broker
    await until(lambda: reader.stopped, reader, 3)
    log.append(b"new 1", b"new 2", b"new 3")
    await until(lambda: "set back" in reader.stopped.get(0, ""), reader, 3)
    looked = log.looked[3]
    for _ in range(20):
        assert await reader.read_many({0: 3}, 100, 1_000_000) == []
        await asyncio.sleep(0.001)
    assert "set back" in reader.stopped[0]
    assert log.looked[3] == looked, "nothing is fetched for nothing"
    await until(lambda: not reader.stopped, reader, 1)
    assert values(await reader.read_many({0: 1}, 100, 1_000_000)) == [b"new 1", b"new 2", b"new 3"], (
        "where a person says"
    )


async def test_r11_a_log_that_was_given_back_goes_on_by_itself(reading: Make) -> None:
    log = Log(b"a", b"b", b"c")
    reader = await reading(log)
    assert len(await reader.read_many({0: 0}, 100, 1_000_000)) == 3
    log.values = [b"a"]
    await reader.read_many({0: 3}, 100, 1_000_000)
    reader._stale = True
    await until(lambda: reader.stopped, reader, 3)
    log.values = [b"a", b"b", b"c", b"d"]
    await until(lambda: not reader.stopped, reader, 3)
    assert values(await reader.read_many({0: 3}, 100, 1_000_000)) == [b"d"]


async def test_a_topic_that_was_made_anew_is_read_from_where_a_person_says_not_from_our_last_trim(
    reading: Make,
) -> None:
    log = Log(b"a", b"b", b"c")
    reader = await reading(log)
    assert len(await reader.read_many({0: 0}, 100, 1_000_000)) == 3
    reader._trimmed[0] = 2
    log.values = []
    await reader.read_many({0: 3}, 100, 1_000_000)
    reader._stale = True
    await until(lambda: reader.stopped, reader, 3)
    log.append(b"new 1", b"new 2", b"new 3", b"new 4")
    await until(lambda: not reader.stopped, reader, 0)
    assert values(await reader.read_many({0: 0}, 100, 1_000_000)) == [b"new 1", b"new 2", b"new 3", b"new 4"]
