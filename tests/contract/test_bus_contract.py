"""One suite for every bus: the fake, PostgreSQL and Kafka pass the same tests. How PostgreSQL keeps R8 stands here too, how
Kafka does in tests/kafka/test_bus_kafka.py."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol
from urllib.parse import urlsplit
from uuid import uuid4

import asyncpg
import pytest
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition
from plato.adapters import bus_kafka_topic
from plato.adapters.bus_kafka import KafkaBusProducer
from plato.adapters.bus_kafka_reader import KafkaBusReader
from plato.adapters.bus_pg import PgBusProducer, PgBusReader
from plato.adapters.pg import Database
from plato.adapters.schema_pg import migrate
from plato.core.errors import Unavailable
from plato.fakes.bus import FakeBus
from plato.local.servers import PostgresServer
from plato.ports import BusProducer, BusReader

from tests.kafka.broker import Broker
from tests.ports import free_port

PARTITIONS = 8
PATIENCE_S = 30.0
"""Of appends that are to go through, on a machine that is busy."""
BROKEN_S = {"before": 1.5, "after": 3.0}
"""Of an append that cannot go through; where it is to reach the server, on a machine that is busy."""


class Bus(Protocol):
    """What the suite needs of a bus besides its ports."""

    @property
    def producer(self) -> BusProducer: ...

    @property
    def reader(self) -> BusReader: ...

    async def break_before(self) -> None: ...

    async def break_after(self) -> None: ...

    async def gap(self, partition: int) -> None: ...


class Fake:
    def __init__(self) -> None:
        self.bus = FakeBus(PARTITIONS)
        self.producer: BusProducer = self.bus
        self.reader: BusReader = self.bus

    async def break_before(self) -> None:
        self.bus.break_next("before")

    async def break_after(self) -> None:
        self.bus.break_next("after")

    async def gap(self, partition: int) -> None:
        self.bus.skip(partition, 3)


class Relay:
    """TCP between the producer and its server. `cut`: "before" breaks a connection when its client next speaks, "after" when
    the server next answers, so that the command's effect stands and its answer is lost. stays: nobody gets through after a
    cut, until `mend`, since a client may repeat by itself."""

    def __init__(self, host: str, port: int, *, stays: bool = False) -> None:
        self.cut = ""
        self.broken = False
        self._stays = stays
        self._to = (host, port)
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self.port = 0

    def mend(self) -> None:
        self.cut, self.broken = "", False

    async def start(self, port: int = 0) -> None:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", port)
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        assert self._server is not None
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._server.wait_closed()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self.broken:
            writer.close()
            return
        there_reader, there_writer = await asyncio.open_connection(*self._to)
        both = (writer, there_writer)
        for side, source, sink in (("before", reader, there_writer), ("after", there_reader, writer)):
            task = asyncio.create_task(self._pump(side, source, sink, both))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _pump(
        self,
        side: str,
        source: asyncio.StreamReader,
        sink: asyncio.StreamWriter,
        both: tuple[asyncio.StreamWriter, asyncio.StreamWriter],
    ) -> None:
        try:
            while data := await source.read(65_536):
                if self.broken:
                    break
                if self.cut == side:
                    self.cut, self.broken = "", self._stays
                    break
                sink.write(data)
                await sink.drain()
        except OSError:
            pass
        finally:
            for writer in both:
                writer.close()


class Postgres:
    def __init__(self, uri: str, schema: str, relay: Relay) -> None:
        parts = urlsplit(uri)
        relayed = uri.replace(f":{parts.port}/", f":{relay.port}/")
        self.uri, self.schema, self.relay = uri, schema, relay
        self.databases = [Database(relayed, schema), Database(uri, schema)]
        self.producer: BusProducer = PgBusProducer(self.databases[0], PARTITIONS)
        self.reader = PgBusReader(self.databases[1])

    async def break_before(self) -> None:
        self.relay.cut = "before"

    async def break_after(self) -> None:
        self.relay.cut = "after"

    async def gap(self, partition: int) -> None:
        async with self.databases[1].connection() as connection:
            await connection.execute(
                "UPDATE bus_head SET next_position = next_position + 3 WHERE partition = $1", partition
            )


@contextlib.asynccontextmanager
async def postgres_bus(uri: str) -> AsyncIterator[Postgres]:
    schema = f"bus_{uuid4().hex[:12]}"
    await migrate(uri, schema, PARTITIONS)
    parts = urlsplit(uri)
    relay = Relay(str(parts.hostname), int(parts.port or 5432))
    await relay.start()
    bus = Postgres(uri, schema, relay)
    try:
        yield bus
    finally:
        await bus.reader.close()
        for database in bus.databases:
            await database.close()
        await relay.stop()


class Mending:
    """A producer whose relay is mended by the failure of an append: what was broken for long enough is whole again."""

    def __init__(self, producer: KafkaBusProducer, relay: Relay) -> None:
        self.inner, self._relay = producer, relay

    @property
    def partitions(self) -> int:
        return self.inner.partitions

    async def append(self, batches: Mapping[int, Sequence[bytes]]) -> None:
        try:
            await self.inner.append(batches)
        except Unavailable:
            self._relay.mend()
            self.inner.timeout_s = PATIENCE_S
            raise


class Kafka:
    """Breaks stay until the append gave up: a producer's own repeat, under one sequence number, would meet no failure."""

    def __init__(self, broker: Broker, topic: str, relay: Relay) -> None:
        self.broker, self.topic, self.relay = broker, topic, relay
        inner = KafkaBusProducer(broker.config(topic, relayed=True), PARTITIONS, timeout_s=PATIENCE_S)
        self.producer = Mending(inner, relay)
        self.reader = KafkaBusReader(broker.config(topic))

    async def break_before(self) -> None:
        self._break("before")

    async def break_after(self) -> None:
        self._break("after")

    def _break(self, when: str) -> None:
        self.relay.cut = when
        self.producer.inner.timeout_s = BROKEN_S[when]

    async def gap(self, partition: int) -> None:
        """A transaction that was given up leaves a mark in the log, which is no record."""
        at = TopicPartition(self.topic, partition)
        producer = AIOKafkaProducer(bootstrap_servers=self.broker.server.servers, transactional_id=self.topic)
        consumer = AIOKafkaConsumer(bootstrap_servers=self.broker.server.servers)
        await producer.start()
        await consumer.start()
        try:
            end = (await consumer.end_offsets([at]))[at]
            await producer.begin_transaction()
            producer._txn_manager.maybe_add_partition_to_txn(at)
            await producer.abort_transaction()

            async def marked() -> bool:
                return bool((await consumer.end_offsets([at]))[at] > end)

            await until(marked)
        finally:
            await producer.stop()
            await consumer.stop()


@contextlib.asynccontextmanager
async def kafka_bus(broker: Broker) -> AsyncIterator[Kafka]:
    topic = f"bus-{uuid4().hex[:12]}"
    await bus_kafka_topic.make_sure(broker.config(topic), PARTITIONS, 65_536)
    relay = Relay("127.0.0.1", broker.relayed_port, stays=True)
    await relay.start(broker.relay_port)
    bus = Kafka(broker, topic, relay)
    try:
        yield bus
    finally:
        await bus.producer.inner.close()
        await bus.reader.close()
        await relay.stop()


@pytest.fixture(params=["fake", "postgres", "kafka"])
def bus_server(request: pytest.FixtureRequest) -> str | Broker | None:
    """The real server; None: the fake. Not async, since the session's server starts in a loop of its own."""
    if request.param == "fake":
        return None
    found: str | Broker = request.getfixturevalue({"postgres": "postgres_uri", "kafka": "kafka_broker"}[request.param])
    return found


@pytest.fixture
async def bus(bus_server: str | Broker | None) -> AsyncIterator[Bus]:
    if bus_server is None:
        yield Fake()
    elif isinstance(bus_server, str):
        async with postgres_bus(bus_server) as of_postgres:
            yield of_postgres
    else:
        async with kafka_bus(bus_server) as of_kafka:
            yield of_kafka


@pytest.fixture
async def postgres(postgres_uri: str) -> AsyncIterator[Postgres]:
    async with postgres_bus(postgres_uri) as made:
        yield made


async def until(condition: Callable[[], Awaitable[bool]], deadline_s: float = 10.0) -> None:
    async with asyncio.timeout(deadline_s):
        while not await condition():  # noqa: ASYNC110 - the database has no event for this
            await asyncio.sleep(0.01)


async def values(bus: Bus, partition: int) -> list[bytes]:
    records = await bus.reader.read(partition, 0, 1_000_000)
    positions = [r.position for r in records]
    assert positions == sorted(set(positions))
    assert all(r.partition == partition and r.position >= 1 for r in records)
    return [r.value for r in records]


async def repeat_until_known(bus: Bus, batches: dict[int, list[bytes]]) -> int:
    """Appends as R8 says: the same again until known. How often it failed."""
    failed = 0
    while True:
        try:
            await bus.producer.append(batches)
            return failed
        except Unavailable:
            failed += 1
            assert failed < 20


async def test_records_come_back_in_the_order_of_the_append(bus: Bus) -> None:
    assert bus.producer.partitions == PARTITIONS
    await bus.producer.append({3: [b"a", b"b"], 1: [b"x"]})
    await bus.producer.append({3: [b"c", b"\x00\xff"], 7: []})
    assert await values(bus, 3) == [b"a", b"b", b"c", b"\x00\xff"]
    assert await values(bus, 1) == [b"x"]
    assert await values(bus, 7) == []


async def test_read_goes_on_after_a_position_and_stops_at_the_limit(bus: Bus) -> None:
    await bus.producer.append({0: [b"%d" % i for i in range(10)]})
    seen: list[bytes] = []
    after = 0
    while page := await bus.reader.read(0, after, 3):
        assert len(page) <= 3
        seen += [r.value for r in page]
        after = page[-1].position
    assert seen == [b"%d" % i for i in range(10)]


async def test_read_many_is_read_for_several_partitions(bus: Bus) -> None:
    await bus.producer.append({0: [b"a", b"b", b"c"], 2: [b"d"], 5: [b"e"]})
    first = (await bus.reader.read(0, 0, 1))[0].position
    found = await bus.reader.read_many({5: 0, 0: first, 2: 0, 6: 0}, 1, 1_000)
    assert [(r.partition, r.value) for r in found] == [(0, b"b"), (2, b"d"), (5, b"e")]
    assert await bus.reader.read_many({}, 1, 1_000) == []


async def test_read_many_bounds_bytes_but_always_gives_the_first(bus: Bus) -> None:
    await bus.producer.append({0: [b"x" * 50, b"y" * 50, b"z"], 1: [b"w" * 500, b"v"]})
    found = await bus.reader.read_many({0: 0, 1: 0}, 10, 100)
    assert [r.value[:1] for r in found] == [b"x", b"y", b"w"]


async def test_an_unknown_partition_is_the_callers_mistake(bus: Bus) -> None:
    for partition in (-1, PARTITIONS):
        with pytest.raises(ValueError, match="partition"):
            await bus.producer.append({0: [b"a"], partition: [b"x"]})
    assert await values(bus, 0) == []


async def test_wait_is_woken_by_an_append_and_says_where(bus: Bus) -> None:
    await bus.reader.wait([1, 2], 0.01)  # the first may hint everything: nobody listened before
    assert await bus.reader.wait([1, 2], 0.01) == set()
    waiting = asyncio.create_task(bus.reader.wait([1, 2], 30.0))
    await bus.producer.append({0: [b"other"], 2: [b"x"]})
    async with asyncio.timeout(20):
        assert await waiting == {2}
    assert await bus.reader.wait([1, 2], 0.01) == set()
    assert await bus.reader.wait([0], 5.0) == {0}, "a hint is kept until its partition is asked for"


async def test_gaps_are_legal(bus: Bus) -> None:
    await bus.producer.append({4: [b"a"]})
    await bus.gap(4)
    await bus.producer.append({4: [b"b"]})
    first, second = await bus.reader.read(4, 0, 10)
    assert (first.value, second.value) == (b"a", b"b")
    assert second.position > first.position + 1
    assert await bus.reader.read(4, first.position + 1, 10) == [second]


async def test_trim_deletes_the_old_up_to_a_position(bus: Bus) -> None:
    await bus.producer.append({0: [b"a", b"b", b"c"], 1: [b"x"]})
    second = (await bus.reader.read(0, 0, 10))[1].position
    assert await bus.reader.trim(0, second, 3_600) == 0, "none is an hour old"
    assert await bus.reader.trim(0, second, 0) == 2
    assert await values(bus, 0) == [b"c"]
    assert await values(bus, 1) == [b"x"]
    await bus.producer.append({0: [b"d"]})
    assert await values(bus, 0) == [b"c", b"d"]


@pytest.mark.parametrize("when", ["before", "after"])
async def test_r8_an_append_of_unknown_outcome_is_repeated_and_keeps_its_order(bus: Bus, when: str) -> None:
    await bus.producer.append({0: [b"0"], 1: [b"0"]})
    await (bus.break_before() if when == "before" else bus.break_after())
    failed = await repeat_until_known(bus, {0: [b"1", b"2"], 1: [b"1"]})
    assert failed >= 1, "the break was not met"
    await bus.producer.append({0: [b"3"], 1: [b"2"]})
    again = 1 if when == "before" else 2
    assert await values(bus, 0) == [b"0", *([b"1", b"2"] * again), b"3"]
    assert await values(bus, 1) == [b"0", *([b"1"] * again), b"2"]


async def test_r8_a_reader_that_follows_misses_nothing_of_concurrent_appenders(bus: Bus) -> None:
    appenders, rounds = 4, 25

    async def append(name: int) -> None:
        for i in range(rounds):
            # The partitions in different orders: must not deadlock.
            order = [0, 1, 2] if name % 2 else [2, 1, 0]
            await bus.producer.append({p: [b"%d:%d:%d" % (name, i, k) for k in range(2)] for p in order})

    seen: dict[int, list[bytes]] = {0: [], 1: [], 2: []}
    after = dict.fromkeys(seen, 0)
    tasks = [asyncio.create_task(append(n)) for n in range(appenders)]
    total = appenders * rounds * 2

    async def follow() -> bool:
        for record in await bus.reader.read_many(after, 50, 1_000_000):
            after[record.partition] = record.position
            seen[record.partition].append(record.value)
        return all(len(v) >= total for v in seen.values()) or all(t.done() for t in tasks)

    await until(follow, 60.0)
    await asyncio.gather(*tasks)
    while await bus.reader.read_many(after, 50, 1_000_000):
        await follow()
    for partition, got in seen.items():
        assert got == await values(bus, partition)
        for name in range(appenders):
            mine = [v for v in got if v.startswith(b"%d:" % name)]
            assert mine == [b"%d:%d:%d" % (name, i, k) for i in range(rounds) for k in range(2)]


# ── PostgreSQL only: how it keeps the rule ───────────────────────────────────────────────────────────────────


async def test_r8_positions_are_drawn_under_the_partitions_lock_and_held_to_commit(postgres: Postgres) -> None:
    """An append that drew its positions first commits first: nobody overtakes it within the partition."""
    connection = await asyncpg.connect(postgres.uri, server_settings={"search_path": postgres.schema})
    try:
        transaction = connection.transaction()
        await transaction.start()
        await connection.execute("SELECT bus_append($1, $2, 'c')", [0], [b"slow"])
        await postgres.producer.append({1: [b"elsewhere"]})  # other partitions go on
        overtaking = asyncio.create_task(postgres.producer.append({0: [b"fast"]}))
        await until(lambda: waits_for_a_lock(postgres))
        assert not overtaking.done()
        assert await values(postgres, 0) == []
        await transaction.commit()
        await overtaking
    finally:
        await connection.close()
    assert await values(postgres, 0) == [b"slow", b"fast"]


async def waits_for_a_lock(postgres: Postgres) -> bool:
    async with postgres.databases[1].connection() as connection:
        return bool(await blocked_pids(connection))


async def blocked_pids(connection: asyncpg.Connection[asyncpg.Record]) -> list[int]:
    rows = await connection.fetch(
        "SELECT pid FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND query LIKE '%bus_append%'"
    )
    return [row["pid"] for row in rows]


async def test_r8_a_backend_killed_in_mid_append_leaves_nothing_and_the_repeat_keeps_order(postgres: Postgres) -> None:
    await postgres.producer.append({0: [b"0"]})
    connection = await asyncpg.connect(postgres.uri, server_settings={"search_path": postgres.schema})
    try:
        async with connection.transaction():
            await connection.execute("SELECT 1 FROM bus_head WHERE partition = 1 FOR UPDATE")
            appending = asyncio.create_task(postgres.producer.append({0: [b"1", b"2"], 1: [b"1"]}))
            await until(lambda: waits_for_a_lock(postgres))  # partition 0 is locked, 1 is awaited
            for pid in await blocked_pids(connection):
                await connection.execute("SELECT pg_terminate_backend($1)", pid)
            with pytest.raises(Unavailable):
                await appending
    finally:
        await connection.close()
    assert await values(postgres, 0) == [b"0"]
    await postgres.producer.append({0: [b"1", b"2"], 1: [b"1"]})
    assert await values(postgres, 0) == [b"0", b"1", b"2"]
    assert await values(postgres, 1) == [b"1"]


async def test_what_was_acknowledged_survives_kill_9_and_the_same_objects_go_on(tmp_path: Path) -> None:
    server = PostgresServer(tmp_path / "pg", free_port())
    await server.start()
    try:
        await migrate(server.uri, "plato", PARTITIONS)
        database = Database(server.uri, "plato")
        producer, reader = PgBusProducer(database, PARTITIONS), PgBusReader(database)
        await reader.wait([0], 0.1)
        acknowledged: list[bytes] = []
        server_dies = asyncio.Event()

        async def append() -> None:
            number = 0
            while True:
                value = b"%d" % number
                try:
                    await producer.append({0: [value], 1: [value]})
                except Unavailable:
                    return
                acknowledged.append(value)
                number += 1
                if number == 50:
                    server_dies.set()

        appending = asyncio.create_task(append())
        await server_dies.wait()
        server.kill()
        assert server.child is not None
        await server.child.wait()
        await appending
        assert len(acknowledged) >= 50
        with pytest.raises(Unavailable):
            await producer.append({0: [b"while it is down"]})
        await server.start()
        await producer.append({0: [b"back"]})  # at once, through the same object
        for partition in (0, 1):
            stored = [r.value for r in await reader.read(partition, 0, 1_000_000)]
            stored = [v for v in stored if v not in (b"back", b"while it is down")]
            assert stored[: len(acknowledged)] == acknowledged
            assert len(stored) <= len(acknowledged) + 1, "at most the one in flight was not acknowledged"
        # Listens again by itself.
        assert await reader.wait([0], 10.0) == {0}
        waiting = asyncio.create_task(reader.wait([0], 30.0))
        await producer.append({0: [b"heard"]})
        async with asyncio.timeout(20):
            assert await waiting == {0}
        await reader.close()
        await database.close()
    finally:
        await server.stop()
