"""R8: one append in flight, the next one fills meanwhile; what failed is repeated, and nothing overtakes it.

Tickets come in with their partition and record; out comes the next append, a portion per partition. One append of a
shard is in flight at a time, so each partition's portions follow one another. An append that failed, or whose outcome
is unknown, is offered again as it was: the same records in the same order, until it is known.

Memory: ≤ `limit_bytes` of records, queued and in flight together; past it there is no room (BUSY).
"""

from __future__ import annotations

from collections import deque

from plato_state.core.uplinks import Stage, Ticket

OVERHEAD_BYTES = 256
"""Charged per record besides its bytes: what a ticket and its places in queues cost in memory."""


class Batcher:
    """Queues per partition and the append in flight. `batch_bytes` and `batch_records` bound one append."""

    def __init__(self, limit_bytes: int, batch_bytes: int = 2_097_152, batch_records: int = 4_096) -> None:
        self._limit_bytes = limit_bytes
        self._batch_bytes = batch_bytes
        self._batch_records = batch_records
        self._queues: dict[int, deque[Ticket]] = {}  # by partition; longest unserved first
        self._in_flight: dict[int, list[Ticket]] = {}
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
        ticket.partition, ticket.record = partition, record
        self.held_bytes += size
        self.queued += 1
        queue = self._queues.get(partition)
        if queue is None:
            queue = self._queues[partition] = deque()
        queue.append(ticket)
        return True

    def drop(self, ticket: Ticket) -> None:
        """A queued ticket was dropped by its owner: its record goes now, its place when its turn comes."""
        self.held_bytes -= len(ticket.record)
        ticket.record = b""

    def take(self) -> dict[int, list[bytes]] | None:
        """The next append, {partition: records}; None while one is in flight or nothing waits."""
        if self._in_flight or not self._queues:
            return None
        room_bytes, room_records = self._batch_bytes, self._batch_records
        for partition in list(self._queues):
            queue = self._queues.pop(partition)
            portion: list[Ticket] = []
            while queue and room_records > 0 and room_bytes > 0:
                ticket = queue.popleft()
                self.queued -= 1
                if ticket.stage is Stage.DROPPED:
                    self.held_bytes -= OVERHEAD_BYTES
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
        return self.again() or None

    def again(self) -> dict[int, list[bytes]]:
        """The append in flight once more, as it was: for one that failed or whose outcome is unknown."""
        return {partition: [t.record for t in tickets] for partition, tickets in self._in_flight.items()}

    def done(self) -> list[Ticket]:
        """The append in flight is durable. Its tickets, each partition's in order."""
        tickets = [t for portion in self._in_flight.values() for t in portion]
        for ticket in tickets:
            self.held_bytes -= len(ticket.record) + OVERHEAD_BYTES
            ticket.record = b""
        self._in_flight = {}
        return tickets
