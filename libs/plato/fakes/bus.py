"""The bus in memory: FakeBus is producer and reader at once, over one list of records per partition.

Memory: everything that was appended and not trimmed. `break_next` makes the coming append fail before or after its effect,
so that a caller meets both kinds of an unknown outcome.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

from plato.core.errors import OutOfRange, Unavailable
from plato.ports import BusRecord


class FakeBus:
    """BusProducer and BusReader in memory. Set `away` to have every call raise Unavailable."""

    def __init__(self, partitions: int) -> None:
        self._partitions = partitions
        self._records: list[list[tuple[BusRecord, float]]] = [[] for _ in range(partitions)]
        self._next = [1] * partitions
        self._hinted: set[int] = set()
        self._appended = asyncio.Condition()
        self._break_next: Literal["before", "after"] | None = None
        self.away = False
        self.stopped: dict[int, str] = {}
        """Set {partition: why} to have a partition be out of range."""

    @property
    def partitions(self) -> int:
        """See the port."""
        return self._partitions

    def break_next(self, when: Literal["before", "after"]) -> None:
        """The next append raises Unavailable, having written nothing ("before") or all ("after")."""
        self._break_next = when

    def skip(self, partition: int, count: int) -> None:
        """Leaves a gap of `count` positions, as a rolled back append of another kind of bus does."""
        self._next[partition] += count

    async def append(self, batches: Mapping[int, Sequence[bytes]]) -> None:
        """See the port."""
        for partition in batches:
            if not 0 <= partition < self._partitions:
                raise ValueError(f"partition {partition} is outside 0..{self._partitions - 1}")
        broken, self._break_next = self._break_next, None
        if self.away or broken == "before":
            raise Unavailable("the bus is away")
        async with self._appended:
            for partition, values in batches.items():
                for value in values:
                    record = BusRecord(partition, self._next[partition], value)
                    self._records[partition].append((record, time.monotonic()))
                    self._next[partition] += 1
                if values:
                    self._hinted.add(partition)
            self._appended.notify_all()
        if broken == "after":
            raise Unavailable("the answer was lost")

    async def read(self, partition: int, after: int, limit: int) -> list[BusRecord]:
        """See the port."""
        if self.away:
            raise Unavailable("the bus is away")
        if partition in self.stopped:
            raise OutOfRange(self.stopped[partition])
        return [record for record, _ in self._records[partition] if record.position > after][:limit]

    def newest(self, partition: int) -> int | None:
        """See the port."""
        return self._next[partition] - 1

    async def read_many(self, after: Mapping[int, int], limit: int, limit_bytes: int) -> list[BusRecord]:
        """See the port."""
        found: list[BusRecord] = []
        for partition, position in sorted(after.items()):
            if partition in self.stopped:
                continue
            size = 0
            for nth, record in enumerate(await self.read(partition, position, limit)):
                size += len(record.value)
                if nth and size > limit_bytes:
                    break
                found.append(record)
        return found

    async def wait(self, partitions: Iterable[int], timeout_s: float) -> set[int]:
        """See the port."""
        wanted = set(partitions)
        try:
            async with asyncio.timeout(timeout_s), self._appended:
                await self._appended.wait_for(lambda: bool(self._hinted & wanted))
        except TimeoutError:
            return set()
        hinted = self._hinted & wanted
        self._hinted -= hinted
        return hinted

    async def trim(self, partition: int, upto: int, older_than_s: int) -> int:
        """See the port."""
        if self.away:
            raise Unavailable("the bus is away")
        limit = time.monotonic() - older_than_s
        kept = [(r, at) for r, at in self._records[partition] if r.position > upto or at >= limit]
        deleted = len(self._records[partition]) - len(kept)
        self._records[partition] = kept
        return deleted
