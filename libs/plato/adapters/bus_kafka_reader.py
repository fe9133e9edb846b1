"""The bus on Kafka, the consuming side: partitions by assign(), positions from the caller, no group and no commits (R7).

    follower   one consumer, assigned to the partitions that are asked for; a task moves what it fetches into a tail each
    wait       ← a tail got records          read ← from the tail; what is not there is fetched first
    asker      a second consumer, for questions (ends of the log, times): the follower's connections are taken up by fetches
               that wait at the broker for news

A position is offset + 1, so that "after 0" is the beginning and "after p" is offset p. A position outside of what the log
holds stops its partition, loudly: nothing is skipped; it goes on by itself once the log holds the position again, and with
the record before it the one that was read there. If that is another one, the log was set back and has grown anew: what was
acknowledged meanwhile lies before the position, so only another position helps.
Memory: TAILS_BYTES of fetched values in all, and one fetch; a full tail's partition is paused at its consumer.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Awaitable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Final
from zlib import crc32

from aiokafka import AIOKafkaConsumer, TopicPartition
from aiokafka.admin import AIOKafkaAdminClient, RecordsToDelete
from aiokafka.errors import KafkaError, OffsetOutOfRangeError

from plato.adapters.bus_kafka_config import KafkaConfig, translated
from plato.core.errors import OutOfRange, Unavailable
from plato.ports import BusRecord
from plato.runtime import logs

TIMEOUT_S: Final = 8.0
TAILS_BYTES: Final = 16 << 20
FETCH_BYTES: Final = 8 << 20
PARTITION_FETCH_BYTES: Final = 1 << 20
FETCH_WAIT_MS: Final = 100
"""How long a fetch waits at the broker. Positions that are set meanwhile are fetched after it."""
GRACE_S: Final = 0.3
"""Once there is something to give, brokers that do not answer are waited for no longer than this."""
_PUMP_S: Final = 0.5
_LOOK_S: Final = 0.1
"""Marks of transactions move a consumer on and are no news."""


@dataclass(slots=True, eq=False)
class Tail:
    """What was fetched of one partition and not yet passed by its reader: offsets from the first record to `next`."""

    next: int | None = None
    """Offset that is fetched next; None: not known yet."""
    records: deque[tuple[int, bytes]] = field(default_factory=deque)
    begin: int | None = None
    """Every record with an offset ≥ begin and < next is in `records`."""
    held_bytes: int = 0
    paused: bool = False
    stopped: str = ""
    """Why it cannot be read on; "" while it can."""
    stopped_at: int | None = None
    """The offset that was next then."""
    set_back: bool = False
    """The log is another one than that which was read up to there."""
    passed: tuple[int, int] | None = None
    """Offset and checksum of the last record that was passed."""
    proving: bool = False
    """The record before the offset where it stopped is fetched first, to be compared with the one that was passed."""

    def place(self, offset: int) -> None:
        """Begins anew at `offset`, without records."""
        self.pass_by(offset)
        self.records.clear()
        self.held_bytes = 0
        self.proving = bool(self.stopped) and self.passed is not None and self.passed[0] == offset - 1
        self.next = self.begin = offset - self.proving
        self.paused = False

    def proven(self, offset: int, value: bytes) -> bool:
        """Whether the record before the offset where it stopped is the one that was read there."""
        self.proving, self.next = False, self.stopped_at
        self.set_back = (offset, crc32(value)) != self.passed
        return not self.set_back

    def holds(self, offset: int) -> bool:
        """Whether reading on from `offset` is reading on from here."""
        return self.next is not None and self.begin is not None and self.begin <= offset <= self.next

    def pass_by(self, offset: int) -> None:
        """Forgets what lies before `offset`."""
        last = None
        while self.records and self.records[0][0] < offset:
            last = self.records.popleft()
            self.held_bytes -= len(last[1])
        if last is not None:
            self.passed = last[0], crc32(last[1])
        self.begin = offset

    def add(self, offset: int, value: bytes) -> None:
        """One fetched record more."""
        self.records.append((offset, value))
        self.held_bytes += len(value)
        self.next = offset + 1


class KafkaBusReader:
    """BusReader on Kafka. Connects at the first use, and anew after a failure."""

    def __init__(self, config: KafkaConfig, *, timeout_s: float = TIMEOUT_S) -> None:
        self._config = config
        self._timeout_s = timeout_s
        self._tails: dict[int, Tail] = {}
        self._trimmed: dict[int, int] = {}
        """Where our own `trim` had logs begin. Whoever asks for what lies before gets what is left, as on any bus."""
        self._hinted: set[int] = set()
        self._news = asyncio.Event()
        """Set at each arrival and each stop."""
        self._follower: AIOKafkaConsumer | None = None
        self._asker: AIOKafkaConsumer | None = None
        self._pump: asyncio.Task[None] | None = None
        self._opening = asyncio.Lock()
        self._stale = False
        """What is there does not arrive: the follower is made anew, from the bootstrap servers on."""
        self.away = ""
        """Why the last `read_many` that had to ask got no answer; "" when it got one, or nothing is read. For display."""
        self._log = logs.get("bus")

    # ── the port ─────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def stopped(self) -> Mapping[int, str]:
        """See the port."""
        return {partition: tail.stopped for partition, tail in self._tails.items() if tail.stopped}

    @property
    def held_bytes(self) -> int:
        """Values that were fetched and not passed yet."""
        return sum(tail.held_bytes for tail in self._tails.values())

    def newest(self, partition: int) -> int | None:
        """The newest position of a partition that the last fetch saw; None: none saw it yet. Asks nobody."""
        if self._follower is None or partition not in self._tails:
            return None
        with contextlib.suppress(KafkaError, AssertionError):
            highwater = self._follower.highwater(self._at(partition))
            return int(highwater) if highwater is not None else None
        return None

    async def read(self, partition: int, after: int, limit: int) -> list[BusRecord]:
        """See the port."""
        await self._follow({partition: after})
        tail = self._tails[partition]
        found = await self._ends([partition])
        if partition not in found:
            raise Unavailable(f"{self._config.where()} does not say where partition {partition} ends")
        await self._arrived({partition: found[partition]}, limit)
        if tail.stopped:
            raise OutOfRange(tail.stopped)
        return _records(partition, tail, limit)

    async def read_many(self, after: Mapping[int, int], limit: int, limit_bytes: int) -> list[BusRecord]:
        """See the port."""
        if not after:
            return []
        try:
            found = await self._read_many(after, limit, limit_bytes)
        except Unavailable as e:
            self.away = str(e)
            raise
        self.away = ""
        return found

    async def _read_many(self, after: Mapping[int, int], limit: int, limit_bytes: int) -> list[BusRecord]:
        await self._follow(after)
        lacking = [p for p in after if not self._tails[p].records]
        if lacking:
            ends = await self._ends(lacking, hasty=len(lacking) < len(after))
            wanted = {p: end for p, end in ends.items() if end > after[p]}
            await self._arrived(wanted, limit, hasty=len(lacking) < len(after))
        found: list[BusRecord] = []
        for partition in sorted(after):
            size = 0
            for nth, record in enumerate(_records(partition, self._tails[partition], limit)):
                size += len(record.value)
                if nth and size > limit_bytes:
                    break
                found.append(record)
        return found

    async def wait(self, partitions: Iterable[int], timeout_s: float) -> set[int]:
        """See the port."""
        wanted = set(partitions)
        if not wanted:
            self.away = ""
            await asyncio.sleep(timeout_s)
            return set()
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        try:
            if new := wanted - self._tails.keys():
                await self._follow_from_the_end(wanted, new)
                return wanted  # of what came before nobody was told
            self._forget(self._tails.keys() - wanted)
            await self._open()
        except Unavailable:
            await asyncio.sleep(max(0.0, deadline - loop.time()))
            return set()
        while not self._hinted & wanted:
            self._news.clear()
            try:
                async with asyncio.timeout_at(deadline):
                    await self._news.wait()
            except TimeoutError:
                break
        hinted = self._hinted & wanted
        self._hinted -= hinted
        return hinted

    async def trim(self, partition: int, upto: int, older_than_s: int) -> int:
        """See the port. Up to the first record that is younger: what is deleted of a log is its beginning."""
        asker, at = await self._ask(), self._at(partition)
        with translated(f"trim of {self._config.topic}, {self._config.where()}"):
            begin = (await asker.beginning_offsets([at]))[at]
            before = min(upto, (await asker.end_offsets([at]))[at])
            if older_than_s > 0:
                since_ms = round((time.time() - older_than_s) * 1000)
                younger = (await asker.offsets_for_times({at: since_ms}))[at]
                if younger is not None:
                    before = min(before, younger.offset)
            if before <= begin:
                return 0
            admin = AIOKafkaAdminClient(**self._config.options_again(), request_timeout_ms=self._timeout_ms)
            try:
                await admin.start()
                done = await admin.delete_records({at: RecordsToDelete(before)}, timeout_ms=self._timeout_ms)
            finally:
                await admin.close()
        self._trimmed[partition] = int(done[at])
        return max(0, self._trimmed[partition] - int(begin))

    async def close(self) -> None:
        """Ends the consumers."""
        await self._end_follower()
        if self._asker is not None:
            await self._forget_asker(self._asker)

    # ── following ────────────────────────────────────────────────────────────────────────────────────────────

    async def _follow(self, after: Mapping[int, int]) -> None:
        """Has each of these partitions followed from its position on. Raises Unavailable."""
        consumer = await self._open()
        new = after.keys() - self._tails.keys()
        moved: list[int] = []
        for partition, asked in after.items():
            position = max(asked, self._trimmed.get(partition, 0))
            tail = self._tails.setdefault(partition, Tail())
            if not tail.holds(position) or tail.stopped:
                # One that is stopped is asked for again: the log may hold the position by now.
                if tail.stopped_at != position:
                    tail.stopped, tail.set_back = "", False
                if tail.set_back:
                    continue
                tail.place(position)
                moved.append(partition)
            else:
                tail.pass_by(position)
        if new:
            self._assign(consumer)
        else:
            for partition in moved:
                self._place(consumer, partition)
        self._resume(consumer)

    async def _follow_from_the_end(self, wanted: set[int], new: Collection[int]) -> None:
        """Begins to follow partitions that nobody read yet. Raises Unavailable."""
        consumer = await self._open()
        for partition, end in (await self._ends(new)).items():
            self._tails.setdefault(partition, Tail()).place(end)
        self._forget(self._tails.keys() - wanted)
        self._assign(consumer)

    def _forget(self, partitions: Collection[int]) -> None:
        """Stops following partitions that are not waited for any more."""
        if not partitions:
            return
        for partition in list(partitions):
            del self._tails[partition]
            self._hinted.discard(partition)
        if self._follower is not None and self._tails:
            self._assign(self._follower)

    def _assign(self, consumer: AIOKafkaConsumer) -> None:
        """Assigns what is followed, each from where its tail ends: an assignment forgets the positions of the last one."""
        consumer.assign([self._at(partition) for partition in self._tails])
        for partition in self._tails:
            self._place(consumer, partition)

    def _place(self, consumer: AIOKafkaConsumer, partition: int) -> None:
        tail = self._tails[partition]
        at = self._at(partition)
        consumer.seek(at, tail.next)
        (consumer.pause if tail.paused else consumer.resume)(at)

    def _resume(self, consumer: AIOKafkaConsumer) -> None:
        most = TAILS_BYTES // max(1, len(self._tails))
        for partition, tail in self._tails.items():
            if tail.paused and not tail.stopped and tail.held_bytes <= most // 2:
                tail.paused = False
                consumer.resume(self._at(partition))

    async def _run(self, consumer: AIOKafkaConsumer) -> None:
        """Moves what arrives into the tails, until cancelled."""
        while True:
            try:
                fetched = await consumer.getmany(timeout_ms=round(_PUMP_S * 1000))
            except OffsetOutOfRangeError as e:
                for at, offset in e.args[0].items():
                    self._stop(consumer, at.partition, offset)
                continue
            except KafkaError as e:
                self._log.error("the bus cannot be read; it is tried again", reason=f"{type(e).__name__}: {e}")
                await asyncio.sleep(_PUMP_S)
                continue
            most = TAILS_BYTES // max(1, len(self._tails))
            for at, records in fetched.items():
                tail = self._tails.get(at.partition)
                if tail is None or not records or records[0].offset < (tail.next or 0):
                    continue  # it was placed elsewhere while this was on its way
                if tail.proving:
                    if not tail.proven(records[0].offset, records[0].value or b""):
                        self._set_back(consumer, at.partition)
                        continue
                    del records[0]
                if tail.stopped:
                    self._log.warning("a partition that was stopped goes on", partition=at.partition)
                    tail.stopped = ""
                for record in records:
                    tail.add(record.offset, record.value or b"")
                self._hinted.add(at.partition)
                if tail.held_bytes > most and not tail.paused:
                    tail.paused = True
                    consumer.pause(at)
            if fetched:
                self._news.set()

    def _stop(self, consumer: AIOKafkaConsumer, partition: int, offset: int) -> None:
        tail = self._tails.get(partition)
        if tail is None or tail.next != offset:
            return
        if not tail.proving:
            tail.stopped_at = offset
        # Where its beginning is now, our last `trim` does not say any more.
        self._trimmed.pop(partition, None)
        why = (
            f"partition {partition} of topic {self._config.topic} is stopped: position {tail.stopped_at} is next, and the"
            " log does not hold it (records were deleted before they were taken, or the topic was made anew); see"
            " docs/kafka.md"
        )
        tail.paused = True
        consumer.pause(self._at(partition))
        if tail.stopped != why:  # each look tries it again; it is told once
            tail.stopped = why
            self._log.error(why, partition=partition, position=tail.stopped_at)
        self._news.set()

    def _set_back(self, consumer: AIOKafkaConsumer, partition: int) -> None:
        tail = self._tails[partition]
        tail.stopped = (
            f"partition {partition} of topic {self._config.topic} is stopped: position {tail.stopped_at} is next, and the"
            " log was set back and has grown anew: what was appended since lies before that position; see docs/kafka.md"
        )
        tail.paused = True
        consumer.pause(self._at(partition))
        self._log.error(tail.stopped, partition=partition, position=tail.stopped_at)
        self._news.set()

    # ── asking ───────────────────────────────────────────────────────────────────────────────────────────────

    async def _ends(self, partitions: Collection[int], *, hasty: bool = False) -> dict[int, int]:
        """Where the logs end, of those whose broker answers. hasty: there is something to give without it.

        Raises Unavailable when none answers."""
        asker = await self._ask()
        cluster = asker._client.cluster
        by_leader: dict[int | None, list[TopicPartition]] = {}
        for partition in partitions:
            at = self._at(partition)
            by_leader.setdefault(cluster.leader_for_partition(at), []).append(at)
        found: dict[int, int] = {}

        async def ask(group: list[TopicPartition]) -> bool:
            with translated(f"read of {self._config.topic}, {self._config.where()}"):
                found.update({at.partition: end for at, end in (await asker.end_offsets(group)).items()})
            return True

        try:
            await _most([ask(group) for group in by_leader.values()], self._timeout_s, hasty=hasty)
        except Unavailable:
            await self._forget_asker(asker)
            if not hasty:
                raise
        return found

    async def _arrived(self, ends: Mapping[int, int], limit: int, *, hasty: bool = False) -> None:
        """Waits until the tails reach `ends`, or hold enough, or cannot go on. Raises Unavailable when none does in time."""

        def lacks(partition: int) -> bool:
            tail = self._tails.get(partition)
            if tail is None or tail.stopped or tail.paused or len(tail.records) >= limit:
                return False
            return (tail.next or 0) < ends[partition] and self._position(partition) < ends[partition]

        loop = asyncio.get_running_loop()
        deadline = loop.time() + (GRACE_S if hasty else self._timeout_s)
        missing = [p for p in ends if lacks(p)]
        while missing:
            self._news.clear()
            try:
                async with asyncio.timeout_at(min(deadline, loop.time() + _LOOK_S)):
                    await self._news.wait()
            except TimeoutError:
                if loop.time() >= deadline:
                    break
            still = [p for p in missing if lacks(p)]
            if len(still) < len(ends):
                deadline = min(deadline, loop.time() + GRACE_S)
            missing = still
        if missing and len(missing) == len(ends) and not hasty:
            self._stale = True
            raise Unavailable(f"{self._config.where()}: what partitions {missing} hold does not arrive")

    def _position(self, partition: int) -> int:
        """Where the consumer stands: past marks of transactions, which are in the log and no records."""
        if self._follower is None:
            return 0
        with contextlib.suppress(KafkaError, AssertionError):
            state = self._follower._subscription.subscription.assignment.state_value(self._at(partition))
            return int(state.position) if state.has_valid_position else 0
        return 0

    # ── clients ──────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def _timeout_ms(self) -> int:
        return max(1, round(self._timeout_s * 1000))

    def _at(self, partition: int) -> TopicPartition:
        return TopicPartition(self._config.topic, partition)

    async def _open(self) -> AIOKafkaConsumer:
        async with self._opening:
            if self._follower is None or self._pump is None or self._pump.done() or self._stale:
                await self._end_follower()
                consumer = self._follower = await self._consumer()
                if self._tails:
                    self._assign(consumer)
                self._pump = asyncio.create_task(self._run(consumer), name="kafka follower")
            return self._follower

    async def _end_follower(self) -> None:
        pump, self._pump = self._pump, None
        follower, self._follower = self._follower, None
        self._stale = False
        if pump is not None:
            pump.cancel()
            await asyncio.wait([pump])
            if not pump.cancelled() and (fault := pump.exception()) is not None:
                self._log.error("the follower of the bus ended; it begins anew", reason=repr(fault))
        if follower is not None:
            await _end(follower)

    async def _ask(self) -> AIOKafkaConsumer:
        async with self._opening:
            if self._asker is None:
                asker = await self._consumer()
                try:
                    with translated(f"read of {self._config.topic}, {self._config.where()}"):
                        async with asyncio.timeout(self._timeout_s):
                            await asker._client._wait_on_metadata(self._config.topic)
                except BaseException:
                    await _end(asker)
                    raise
                self._asker = asker
            return self._asker

    async def _forget_asker(self, asker: AIOKafkaConsumer) -> None:
        """The next question begins with the bootstrap servers: brokers may have other addresses by now."""
        if self._asker is asker:
            self._asker = None
            await _end(asker)

    async def _consumer(self) -> AIOKafkaConsumer:
        consumer = AIOKafkaConsumer(
            **self._config.options_again(),
            group_id=None,
            enable_auto_commit=False,
            auto_offset_reset="none",
            fetch_max_wait_ms=FETCH_WAIT_MS,
            fetch_max_bytes=FETCH_BYTES,
            max_partition_fetch_bytes=PARTITION_FETCH_BYTES,
            request_timeout_ms=self._timeout_ms,
            retry_backoff_ms=50,
        )
        try:
            with translated(self._config.where()):
                async with asyncio.timeout(self._timeout_s):
                    await consumer.start()
        except BaseException:
            await _end(consumer)
            raise
        return consumer


def _records(partition: int, tail: Tail, limit: int) -> list[BusRecord]:
    return [BusRecord(partition, offset + 1, value) for offset, value in islice(tail.records, limit)]


async def _most(questions: list[Awaitable[bool]], timeout_s: float, *, hasty: bool) -> None:
    """Asks side by side. Once one is answered (or at once, if hasty) the others have GRACE_S left. Raises Unavailable, of
    one of them, when none is answered."""
    tasks = {asyncio.ensure_future(question) for question in questions}
    waiting, answered = set(tasks), hasty
    loop = asyncio.get_running_loop()
    deadline = loop.time() + (GRACE_S if hasty else timeout_s)
    try:
        while waiting and loop.time() < deadline:
            done, waiting = await asyncio.wait(
                waiting, timeout=deadline - loop.time(), return_when=asyncio.FIRST_COMPLETED
            )
            if not answered and any(t.exception() is None for t in done):
                answered, deadline = True, min(deadline, loop.time() + GRACE_S)
    finally:
        for task in waiting:
            task.cancel()
        if waiting:
            await asyncio.wait(waiting)
    failed = [t for t in tasks if not t.cancelled() and t.exception() is not None]
    if len(failed) + len(waiting) == len(tasks) and not hasty:
        raise Unavailable(str(failed[0].exception()) if failed else "Kafka did not answer in time")


async def _end(consumer: AIOKafkaConsumer) -> None:
    with contextlib.suppress(Exception):
        await consumer.stop()
