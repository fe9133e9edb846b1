"""The bus on Kafka, the producing side: one append in flight per partition, in order, until it is known (R8).

    append → its partitions' turns → batches, one per partition and round → acks=all, idempotent → known, or Unavailable

A round puts at most one batch of each partition on its way and waits for all of them, so a batch that is lost has
nothing behind it that could arrive before its repeat. With idempotence aiokafka repeats a batch for ever under one
sequence number; an append therefore ends by its own time-out. After any failure the producer is thrown away, with what
it still held, once no other append is under way on it, and the next append begins with a fresh one: the old one's
sequence may have a gap that no repeat can close. What the old one had on its way may land late. Those are copies of
records that are repeated anyway, and msg decides about copies (R1).
Memory: one append's records per call, and their encoding.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping, Sequence
from typing import Any, Final

from aiokafka import AIOKafkaProducer
from aiokafka.errors import MessageSizeTooLargeError, ProducerClosed, UnknownTopicOrPartitionError

from plato.adapters.bus_kafka_config import KafkaConfig, translated
from plato.core.errors import Unavailable

APPEND_TIMEOUT_S: Final = 8.0
"""Longer than a broker's fail-over usually takes; shorter than people wait for an answer."""
BATCH_BYTES: Final = 524_288
"""Of one batch; a single larger record still goes, alone. Half of what brokers take by default (message.max.bytes)."""
LEAST_BATCH_BYTES: Final = 8_192
"""A topic may take less, as long as it takes one message: batches that it refuses are halved, down to this."""
_CLOSE_TRIES: Final = 40


class KafkaBusProducer:
    """BusProducer on Kafka. Connects at the first append, and anew after each failure."""

    def __init__(self, config: KafkaConfig, partitions: int, *, timeout_s: float = APPEND_TIMEOUT_S) -> None:
        self._config = config
        self._partitions = partitions
        self.timeout_s = timeout_s
        """After this an append counts as unknown. What is changed holds for the next one."""
        self.away = ""
        """Why the last append that ended is not known to be taken; "" when it is. For display."""
        self._batch_bytes = BATCH_BYTES
        self._turns = [asyncio.Lock() for _ in range(partitions)]
        self._opening = asyncio.Lock()
        self._producer: AIOKafkaProducer | None = None
        self._uses: dict[AIOKafkaProducer, int] = {}
        """Appends under way on each; also on one that was thrown away."""
        self._closings: set[asyncio.Task[None]] = set()

    @property
    def partitions(self) -> int:
        """See the port."""
        return self._partitions

    async def append(self, batches: Mapping[int, Sequence[bytes]]) -> None:
        """See the port."""
        for partition in batches:
            if not 0 <= partition < self._partitions:
                raise ValueError(f"partition {partition} is outside 0..{self._partitions - 1}")
        portions = {partition: records for partition, records in sorted(batches.items()) if records}
        if not portions:
            return
        try:
            await self._append(portions)
        except Unavailable as e:
            self.away = str(e)
            raise
        self.away = ""

    async def _append(self, portions: Mapping[int, Sequence[bytes]]) -> None:
        async with contextlib.AsyncExitStack() as turns:
            with translated(f"append to {self._config.topic}, {self._config.where()}"):
                # While no broker answers, each one before this takes its whole time: nobody waits for all of theirs.
                async with asyncio.timeout(self.timeout_s):
                    for partition in portions:  # in ascending order, so that two appends never wait for each other
                        await turns.enter_async_context(self._turns[partition])
                async with asyncio.timeout(self.timeout_s):
                    producer = await self._open()
                    self._uses[producer] = self._uses.get(producer, 0) + 1
                    try:
                        await self._send(producer, portions)
                    except BaseException as e:
                        if isinstance(e, MessageSizeTooLargeError):  # the same again would be refused for ever
                            self._batch_bytes = max(LEAST_BATCH_BYTES, self._batch_bytes // 2)
                        self._discard(producer)
                        raise
                    finally:
                        self._left(producer)

    async def close(self) -> None:
        """Ends the producer; what is on its way may or may not arrive."""
        producers = {*self._uses, *([self._producer] if self._producer is not None else [])}
        self._producer = None
        for producer in producers:
            self._begin_end(producer)
        while self._closings:
            await asyncio.wait(self._closings)

    async def _open(self) -> AIOKafkaProducer:
        async with self._opening:
            if self._producer is None:
                producer = AIOKafkaProducer(
                    **self._config.options_again(),
                    enable_idempotence=True,
                    acks="all",
                    max_batch_size=self._batch_bytes,
                    request_timeout_ms=max(1, round(self.timeout_s * 1000)),
                    retry_backoff_ms=50,
                )
                try:
                    await producer.start()
                except BaseException:
                    self._discard(producer)
                    raise
                self._producer = producer
            return self._producer

    async def _send(self, producer: AIOKafkaProducer, portions: Mapping[int, Sequence[bytes]]) -> None:
        topic = self._config.topic
        known = await producer.partitions_for(topic)
        if not set(range(self._partitions)) <= set(known):  # even if it has those of now: somebody else made it anew
            raise UnknownTopicOrPartitionError(f"topic {topic} has partitions {len(known)}, not {self._partitions}")
        waiting = {partition: _batches(producer, records) for partition, records in portions.items()}
        while waiting:
            # Nothing in this loop waits before all are handed over, so they share a request.
            sent = [
                await producer.send_batch(batches[0], topic, partition=partition)
                for partition, batches in waiting.items()
            ]
            for result in await asyncio.gather(*sent, return_exceptions=True):
                if isinstance(result, BaseException):
                    raise result
            waiting = {partition: batches[1:] for partition, batches in waiting.items() if batches[1:]}

    def _discard(self, producer: AIOKafkaProducer) -> None:
        """No append begins with it any more."""
        if self._producer is producer:
            self._producer = None
        if producer not in self._uses:
            self._begin_end(producer)

    def _left(self, producer: AIOKafkaProducer) -> None:
        self._uses[producer] -= 1
        if not self._uses[producer]:
            del self._uses[producer]
            if producer is not self._producer:
                self._begin_end(producer)

    def _begin_end(self, producer: AIOKafkaProducer) -> None:
        task = asyncio.create_task(_end(producer), name="kafka producer ends")
        self._closings.add(task)
        task.add_done_callback(self._closings.discard)


def _batches(producer: AIOKafkaProducer, records: Sequence[bytes]) -> list[Any]:
    batches = [producer.create_batch()]
    for record in records:
        if batches[-1].append(key=None, value=record, timestamp=None) is None:
            batches.append(producer.create_batch())
            batches[-1].append(key=None, value=record, timestamp=None)
    for batch in batches:
        batch.close()
    return batches


async def _end(producer: AIOKafkaProducer) -> None:
    """Ends a producer without sending what it holds: its own stop() first waits until all of it arrived, which with
    idempotence may be never. So its sending task goes first (a first cancel has it wait for its requests, a second ends
    those), then whoever still waits for a batch is told."""
    sender = producer._sender.sender_task
    for _ in range(_CLOSE_TRIES):
        if sender is None or sender.done():
            break
        sender.cancel()
        await asyncio.wait([sender], timeout=0.05)
    accumulator = producer._message_accumulator
    batches = [batch for queue in accumulator._batches.values() for batch in queue] + list(accumulator._pending_batches)
    accumulator.fail_all(ProducerClosed())
    for batch in batches:
        for future in (batch.future, batch._drain_waiter):
            if future.done() and not future.cancelled():
                future.exception()  # seen: an unseen one would be reported when the future is collected
    with contextlib.suppress(Exception):
        await producer.stop()
