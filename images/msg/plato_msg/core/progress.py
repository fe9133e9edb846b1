"""How far a partition is fanned out: batches settle in any order, the mark passes them in order only."""

from __future__ import annotations

from collections import deque


class Progress:
    """The mark `fanned_out` of one partition. Memory: one entry per batch that is not settled, and those behind it."""

    def __init__(self, fanned_out: int) -> None:
        self.fanned_out = fanned_out
        """Every record up to here was taken by its shards, or they are marked dirty."""
        self._batches: deque[Ticket] = deque()

    def open(self, position: int) -> Ticket:
        """A batch whose last record stands at `position` goes out. Positions rise from call to call."""
        ticket = Ticket(self, position)
        self._batches.append(ticket)
        return ticket

    @property
    def settled(self) -> bool:
        """Nothing is on its way."""
        return not self._batches

    def advance(self) -> None:
        """Moves the mark over the settled batches at the front."""
        while self._batches and self._batches[0].settled:
            self.fanned_out = self._batches.popleft().position


class Ticket:
    """One batch on its way."""

    __slots__ = ("_progress", "position", "settled")

    def __init__(self, progress: Progress, position: int) -> None:
        self._progress = progress
        self.position = position
        self.settled = False

    def settle(self) -> None:
        """Each target shard took the batch or is marked dirty."""
        self.settled = True
        self._progress.advance()
