"""How the Kafka bus keeps R8 when its broker is killed or stopped, and R11: what is promised, refused, and what stops."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from uuid import uuid4

import pytest
from aiokafka import TopicPartition
from aiokafka.admin import AIOKafkaAdminClient, NewTopic, RecordsToDelete
from plato.adapters import bus_kafka_topic
from plato.adapters.bus_kafka import KafkaBusProducer
from plato.adapters.bus_kafka_config import KafkaConfig, TopicGone
from plato.adapters.bus_kafka_reader import KafkaBusReader
from plato.core.errors import OutOfRange, Unavailable
from plato.local.kafka import KafkaServer
from plato.runtime.settings import BusSettings, SettingsError

from tests.faults.waiting import until
from tests.kafka.broker import PASSWORD, Broker, freeze, thaw

PARTITIONS = 4
FRAME_BYTES = 65_536
PATIENCE_S = 30.0
SHORT_S = 1.0
"""Of an append that cannot go through."""


class Pair:
    """Both sides of the bus over a topic of their own."""

    def __init__(self, broker: Broker, topic: str) -> None:
        self.broker, self.topic = broker, topic
        self.config = broker.config(topic, partitions=PARTITIONS)
        self.producer = KafkaBusProducer(self.config, PARTITIONS, timeout_s=PATIENCE_S)
        self.reader = KafkaBusReader(self.config, timeout_s=PATIENCE_S)

    async def values(self, partition: int) -> list[bytes]:
        return [r.value for r in await self.reader.read(partition, 0, 1_000_000)]

    async def repeat(self, batches: dict[int, list[bytes]]) -> int:
        """Appends as R8 says; how often it failed."""
        failed = 0
        while True:
            try:
                await self.producer.append(batches)
                return failed
            except Unavailable:
                failed += 1
                assert failed < 60


@pytest.fixture
async def pair(kafka_broker: Broker) -> AsyncIterator[Pair]:
    topic = f"r8-{uuid4().hex[:12]}"
    await bus_kafka_topic.make_sure(kafka_broker.config(topic), PARTITIONS, FRAME_BYTES)
    made = Pair(kafka_broker, topic)
    yield made
    await made.producer.close()
    await made.reader.close()


@pytest.fixture
def server(kafka_broker: Broker) -> Iterator[KafkaServer]:
    """The session's broker, for a test that does things to it; it runs again afterwards."""
    yield kafka_broker.server
    thaw(kafka_broker.server)
    if kafka_broker.server.pid is None:
        asyncio.run(kafka_broker.server.start())


def firsts(values: Sequence[bytes]) -> list[bytes]:
    """Each value where it stands first: what msg makes of copies."""
    return list(dict.fromkeys(values))


# ── R8 ───────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_r8_appends_to_a_partition_follow_one_another_and_a_failed_one_holds_up_nobody(
    pair: Pair, server: KafkaServer
) -> None:
    """Those of one partition wait for their turn, while the broker is stopped too; those of others do not wait for them."""
    await pair.producer.append({0: [b"0"], 1: [b"0"]})
    freeze(server)
    first = asyncio.create_task(pair.producer.append({0: [b"1", b"2"], 1: [b"1"]}))
    second = asyncio.create_task(pair.producer.append({1: [b"2"], 0: [b"3"]}))
    other = asyncio.create_task(pair.producer.append({3: [b"x"]}))
    done, _ = await asyncio.wait([first, second, other], timeout=0.5)
    assert not done, "the broker was stopped"
    thaw(server)
    await asyncio.gather(first, second, other)
    assert await pair.values(0) == [b"0", b"1", b"2", b"3"]
    assert await pair.values(1) == [b"0", b"1", b"2"]
    assert await pair.values(3) == [b"x"]


async def test_r8_a_broker_stopped_in_mid_flight_leaves_the_append_unknown_and_its_repeat_keeps_order(
    pair: Pair, server: KafkaServer
) -> None:
    """What the stopped broker had in its sockets lands late, as copies; nothing stands before what it was appended after."""
    await pair.producer.append({0: [b"0"], 1: [b"0"]})
    freeze(server)
    pair.producer.timeout_s = SHORT_S
    for _ in range(2):
        with pytest.raises(Unavailable):
            await pair.producer.append({0: [b"1", b"2"], 1: [b"1"]})
    pair.producer.timeout_s = PATIENCE_S
    thaw(server)
    await pair.repeat({0: [b"1", b"2"], 1: [b"1"]})
    await pair.repeat({0: [b"3"], 1: [b"2"]})
    await pair.repeat({0: [b"4"]})
    assert firsts(await pair.values(0)) == [b"0", b"1", b"2", b"3", b"4"]
    assert firsts(await pair.values(1)) == [b"0", b"1", b"2"]


async def test_r8_what_was_acknowledged_survives_kill_9_of_the_broker_and_the_same_objects_go_on(
    pair: Pair, server: KafkaServer
) -> None:
    await pair.reader.wait([0, 1], 0.1)
    acknowledged: list[bytes] = []
    dies = asyncio.Event()
    ends = asyncio.Event()

    async def append() -> None:
        number = 0
        while not ends.is_set():
            value = b"%d" % number
            await pair.repeat({0: [value, value + b"+"], 1: [value]})
            acknowledged.append(value)
            number += 1
            if number == 50:
                dies.set()

    appending = asyncio.create_task(append())
    await dies.wait()
    server.kill()
    assert server.child is not None
    await server.child.wait()
    before = len(acknowledged)
    pair.producer.timeout_s = SHORT_S
    await server.start()
    pair.producer.timeout_s = PATIENCE_S
    async with asyncio.timeout(60):
        while len(acknowledged) < before + 20:  # noqa: ASYNC110 - the appender has no event for it
            await asyncio.sleep(0.01)
    ends.set()
    await appending
    stored = [await pair.values(partition) for partition in (0, 1)]
    assert firsts(stored[1]) == acknowledged
    assert firsts(stored[0]) == [v for value in acknowledged for v in (value, value + b"+")]
    # It follows again by itself, from where it was.
    async with asyncio.timeout(30):
        while 1 not in await pair.reader.wait([0, 1], 1.0):
            pass
        waiting = asyncio.create_task(pair.reader.wait([2], 30.0))
        await waiting
        heard = asyncio.create_task(pair.reader.wait([2], 30.0))
        await pair.repeat({2: [b"heard"]})
        assert await heard == {2}


# ── who we are there ─────────────────────────────────────────────────────────────────────────────────────────


async def test_tls_and_a_password_by_a_file_of_properties(pair: Pair, tmp_path: Path) -> None:
    broker = pair.broker
    broker.ca.cert_pem.write_to_path(str(tmp_path / "ca.crt"))
    path = tmp_path / "client.properties"

    def secured(password: str) -> KafkaConfig:
        said = password.replace('"', '\\\\"')
        path.write_text(
            f"bootstrap.servers=127.0.0.1:{broker.secure_port}\nsecurity.protocol=SASL_SSL\nsasl.mechanism=PLAIN\n"
            'sasl.jaas.config=org.apache.kafka.common.security.plain.PlainLoginModule required username="plato"'
            f' password="{said}";\nssl.ca.location={tmp_path}/ca.crt\n'
        )
        return KafkaConfig(BusSettings(type="kafka", properties_file=path, topic=pair.topic))

    config = secured(PASSWORD)
    topic = await bus_kafka_topic.look(config, PARTITIONS, FRAME_BYTES)
    assert topic.partitions == PARTITIONS
    producer, reader = KafkaBusProducer(config, PARTITIONS), KafkaBusReader(config)
    try:
        await producer.append({0: [b"a"]})
        assert [r.value for r in await reader.read(0, 0, 10)] == [b"a"]
        secured("wrong")
        for refused in (bus_kafka_topic.look(config, PARTITIONS, FRAME_BYTES), KafkaBusReader(config).read(0, 0, 1)):
            with pytest.raises(Unavailable, match=r"[Ii]nvalid username or password") as caught:
                await refused
            assert "wrong" not in str(caught.value)
    finally:
        await producer.close()
        await reader.close()


# ── R11: what a topic promises ───────────────────────────────────────────────────────────────────────────────


async def test_r11_a_single_broker_says_that_it_promises_process_crashes_only(pair: Pair) -> None:
    topic = await bus_kafka_topic.look(pair.config, PARTITIONS, FRAME_BYTES)
    assert topic.durability.level == "process"
    assert "single node (replication 1): promises process crashes only" in topic.durability.promise
    assert topic.warnings == [], "a topic that we make keeps everything until msg is done with it"


# ── R11: what is refused at start ────────────────────────────────────────────────────────────────────────────


async def make(broker: Broker, partitions: int = PARTITIONS, **config: str) -> str:
    """A topic that somebody else made; its name."""
    name = f"theirs-{uuid4().hex[:12]}"
    admin = AIOKafkaAdminClient(bootstrap_servers=broker.server.servers)
    await admin.start()
    try:
        settings = {key.replace("_", "."): value for key, value in config.items()}
        await admin.create_topics([NewTopic(name, partitions, 1, topic_configs=settings)])

        async def told() -> bool:
            """The controller makes it, and the broker hears of it a moment later."""
            (topic,) = await admin.describe_topics([name])
            return not topic["error_code"] and all(p["leader"] >= 0 for p in topic["partitions"])

        await until(told, 30)
    finally:
        await admin.close()
    return name


async def test_a_topic_that_is_missing_is_waited_for_and_made_once(kafka_broker: Broker) -> None:
    config = kafka_broker.config(f"new-{uuid4().hex[:12]}")
    with pytest.raises(TopicGone, match="plato db migrate"):
        await bus_kafka_topic.look(config, PARTITIONS, FRAME_BYTES)
    made = await asyncio.gather(*(bus_kafka_topic.make_sure(config, PARTITIONS, FRAME_BYTES) for _ in range(3)))
    assert len({topic.identity for topic in made}) == 1
    assert made[0].partitions == PARTITIONS


async def test_another_number_of_partitions_is_refused_in_words(kafka_broker: Broker) -> None:
    name = await make(kafka_broker, partitions=3)
    for refused in (bus_kafka_topic.look, bus_kafka_topic.make_sure):
        with pytest.raises(SettingsError, match=rf"bus.partitions: 4 cannot be used: topic {name} has 3"):
            await refused(kafka_broker.config(name), PARTITIONS, FRAME_BYTES)


async def test_topics_that_would_lose_records_or_refuse_them_are_refused_in_words(kafka_broker: Broker) -> None:
    compacted = kafka_broker.config(await make(kafka_broker, cleanup_policy="compact"))
    with pytest.raises(SettingsError, match=r"cleanup\.policy is compact"):
        await bus_kafka_topic.look(compacted, PARTITIONS, FRAME_BYTES)
    narrow = kafka_broker.config(await make(kafka_broker, max_message_bytes="20000"))
    with pytest.raises(SettingsError, match=r"max\.message\.bytes is 20000, and a message may need 73728"):
        await bus_kafka_topic.look(narrow, PARTITIONS, FRAME_BYTES)
    short = await bus_kafka_topic.look(
        kafka_broker.config(await make(kafka_broker, retention_ms="3600000")), PARTITIONS, FRAME_BYTES
    )
    assert "is lost" in short.warnings[0]


# ── R11: an offset out of range ──────────────────────────────────────────────────────────────────────────────


async def delete_before(pair: Pair, partition: int, offset: int) -> None:
    """Deletes records behind msg's back, as a retention that is too short does."""
    admin = AIOKafkaAdminClient(bootstrap_servers=pair.broker.server.servers)
    await admin.start()
    try:
        await admin.delete_records({TopicPartition(pair.topic, partition): RecordsToDelete(offset)})
    finally:
        await admin.close()


async def test_r11_a_position_that_the_log_lost_stops_its_partition_and_no_other(pair: Pair) -> None:
    await pair.producer.append({0: [b"a", b"b", b"c"], 1: [b"x"]})
    await delete_before(pair, 0, 2)
    found = await pair.reader.read_many({0: 1, 1: 0}, 10, 1_000)
    assert [(r.partition, r.value) for r in found] == [(1, b"x")], "c must not be taken: b was never seen"
    assert "position 1 is next, and the log does not hold it" in pair.reader.stopped[0]
    with pytest.raises(OutOfRange, match="partition 0"):
        await pair.reader.read(0, 1, 10)
    assert await pair.reader.read(0, 2, 10), "whoever gives the lost record up goes on"
    async with asyncio.timeout(30):
        while pair.reader.stopped:  # noqa: ASYNC110 - it is heard of by the next fetch
            await asyncio.sleep(0.01)


async def test_r11_a_position_beyond_the_end_stops_its_partition_until_the_log_has_it(pair: Pair) -> None:
    """A topic that was made anew, or a log that lost its end."""
    await pair.producer.append({0: [b"a"], 1: [b"x"]})
    assert await pair.reader.read_many({0: 5}, 10, 1_000) == []
    async with asyncio.timeout(30):
        while 0 not in pair.reader.stopped:
            await pair.reader.read_many({0: 5, 1: 0}, 10, 1_000)
    assert [r.value for r in await pair.reader.read_many({0: 5, 1: 0}, 10, 1_000)] == [b"x"]
    await pair.producer.append({0: [b"%d" % n for n in range(6)]})
    async with asyncio.timeout(30):
        while not (found := await pair.reader.read_many({0: 5}, 10, 1_000)):
            pass
    assert [r.value for r in found] == [b"4", b"5"]
    assert pair.reader.stopped == {}


async def test_memory_of_what_was_fetched_is_bounded_and_everything_arrives(
    pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reader that is slow: its partitions are paused, and resumed as it reads."""
    monkeypatch.setattr("plato.adapters.bus_kafka_reader.TAILS_BYTES", 200_000)
    monkeypatch.setattr("plato.adapters.bus_kafka_reader.PARTITION_FETCH_BYTES", 50_000)
    sent = [b"%06d" % n + bytes(994) for n in range(1_000)]
    await pair.producer.append({0: sent})
    await pair.reader.wait([0], 0.01)
    seen: list[bytes] = []
    after, most = 0, 0
    async with asyncio.timeout(30):
        while len(seen) < len(sent):
            for record in await pair.reader.read_many({0: after}, 20, 1_000_000):
                seen.append(record.value)
                after = record.position
            most = max(most, pair.reader.held_bytes)
    assert seen == sent
    assert most <= 200_000 + 2 * 524_288, "a fetch always brings a whole batch"
