"""R8: one append in flight, the next one fills meanwhile; what failed is repeated, and nothing overtakes it.

Tickets come in with their partition and record; out comes the next append, a portion per partition. One append of a
shard is in flight at a time, so each partition's portions follow one another. An append that failed, or whose outcome
is unknown, is split: each of its partitions is offered again as it was, by itself: the same records in the same order, until
it is known. Until then nothing else of that partition is taken, and all others go on: one without a leader must not
hold up, nor have appended again and again, what others would take.

Memory: ≤ `limit_bytes` of records, queued and in flight together; past it there is no room (BUSY). Partitions that are
repeated by themselves hold at most APART_SHARE of that together.
"""

from __future__ import annotations

from collections import deque

from plato_state.core.uplinks import Stage, Ticket

OVERHEAD_BYTES = 256
"""Charged per record besides its bytes: what a ticket and its places in queues cost in memory."""


APART_SHARE = 0.75
"""Partitions that take no appends may fill this part of the memory; the rest is the others'."""


class Batcher:
    """Queues per partition and the append in flight. `batch_bytes` and `batch_records` bound one append."""

    def __init__(self, limit_bytes: int, batch_bytes: int = 2_097_152, batch_records: int = 4_096) -> None:
        self._limit_bytes = limit_bytes
        self._batch_bytes = batch_bytes
        self._batch_records = batch_records
        self._queues: dict[int, deque[Ticket]] = {}  # by partition; longest unserved first
        self._in_flight: dict[int, list[Ticket]] = {}
        self._apart: set[int] = set()
        """Of these partitions those that are repeated by themselves."""
        self._held: dict[int, int] = {}
        """Bytes that count, by partition."""
        self.held_bytes = 0
        """Bytes that count against the limit."""
        self.queued = 0
        """Places in the queues, without those in flight."""

    def __bool__(self) -> bool:
        return bool(self.queued or self._in_flight)

    @property
    def in_flight(self) -> bool:
        """True from `take` until `done`."""
        return bool(self._in_flight)

    def add(self, ticket: Ticket, partition: int, record: bytes) -> bool:
        """Queues a record behind all others of its partition. False: no room; nothing changed."""
        size = len(record) + OVERHEAD_BYTES
        if self.held_bytes + size > self._limit_bytes:
            return False
        if partition in self._apart:
            apart = sum(self._held[p] for p in self._apart)
            if apart + size > APART_SHARE * self._limit_bytes:
                return False
        ticket.partition, ticket.record = partition, record
        self.held_bytes += size
        self._held[partition] = self._held.get(partition, 0) + size
        self.queued += 1
        queue = self._queues.get(partition)
        if queue is None:
            queue = self._queues[partition] = deque()
        queue.append(ticket)
        return True

    def drop(self, ticket: Ticket) -> None:
        """A queued ticket was dropped by its owner: its record goes now, its place when its turn comes."""
        self._free(ticket.partition, len(ticket.record))
        ticket.record = b""

    def take(self) -> dict[int, list[bytes]] | None:
        """The next append, {partition: records}; None while one is in flight or nothing waits."""
        if not self._queues or self._in_flight.keys() - self._apart:
            return None
        room_bytes, room_records = self._batch_bytes, self._batch_records
        for partition in list(self._queues):
            if partition in self._apart:
                continue
            queue = self._queues.pop(partition)
            portion: list[Ticket] = []
            while queue and room_records > 0 and room_bytes > 0:
                ticket = queue.popleft()
                self.queued -= 1
                if ticket.stage is Stage.DROPPED:
                    self._free(partition, OVERHEAD_BYTES)
                    continue
                ticket.stage = Stage.IN_FLIGHT
                portion.append(ticket)
                room_bytes -= len(ticket.record)
                room_records -= 1
            if portion:
                self._in_flight[partition] = portion
            if queue:
                self._queues[partition] = queue  # goes to the end: each partition has its turn
            if room_records <= 0 or room_bytes <= 0:
                break
        return {p: self.again(p) for p in self._in_flight if p not in self._apart} or None

    def split(self) -> list[int]:
        """The append in flight failed, or its outcome is unknown: its partitions, each of which is repeated by itself."""
        parts = [partition for partition in self._in_flight if partition not in self._apart]
        self._apart.update(parts)
        return parts

    def again(self, partition: int) -> list[bytes]:
        """What is in flight of one partition, as it was: for an append that failed or whose outcome is unknown."""
        return [t.record for t in self._in_flight[partition]]

    def done(self, partition: int | None = None) -> list[Ticket]:
        """The append in flight is durable; or that of one partition which is repeated by itself. Its tickets, each
        partition's in order."""
        parts = [p for p in self._in_flight if p not in self._apart] if partition is None else [partition]
        tickets = []
        for part in parts:
            self._apart.discard(part)
            for ticket in self._in_flight.pop(part):
                self._free(part, len(ticket.record) + OVERHEAD_BYTES)
                ticket.record = b""
                tickets.append(ticket)
        return tickets

    def _free(self, partition: int, size: int) -> None:
        self.held_bytes -= size
        held = self._held[partition] = self._held[partition] - size
        if not held:
            del self._held[partition]
