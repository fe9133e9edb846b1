"""A timing wheel: keys and the ticks at which they are due.

In goes (key, tick), out come the keys that are due, in bounded portions. A tick is whatever the caller counts; here it
is a turn of a loop that has drained its input (R10), so a process that was stopped does not find all its deadlines
passed. Memory: two dict entries and a set entry per key, and nothing is left behind by a key that was cancelled.

    buckets[t % size] holds the keys that will be looked at in turn t. A deadline that moves later costs one dict write:
    its key stays where it is and is placed anew when its bucket comes up. Only a deadline that moves earlier is moved.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)


class Wheel(Generic[K]):
    """Deadlines of many keys, one per key. `size` is a power of two, in ticks; longer deadlines go round."""

    def __init__(self, size: int = 4096) -> None:
        if size & (size - 1):
            raise ValueError(f"wheel size {size} is no power of two")
        self._mask = size - 1
        self._buckets: list[set[K]] = [set() for _ in range(size)]
        self._due: dict[K, int] = {}
        self._placed: dict[K, int] = {}  # the tick whose bucket holds the key; ≤ its due tick
        self._now = 0
        self._late: deque[K] = deque()  # taken out of passed buckets, not handed out yet: work per tick is bounded

    def __len__(self) -> int:
        return len(self._due)

    @property
    def now(self) -> int:
        """The last tick that was begun."""
        return self._now

    def arm(self, key: K, due: int) -> None:
        """Sets or moves the deadline of `key` to tick `due`; a passed one is due at the next tick."""
        due = max(due, self._now + 1)
        placed = self._placed.get(key)
        self._due[key] = due
        if placed is not None:
            if placed <= due:
                return
            self._buckets[placed & self._mask].discard(key)
        self._place(key, due)

    def cancel(self, key: K) -> None:
        """Forgets the deadline of `key`, if it has one."""
        if self._due.pop(key, None) is None:
            return
        placed = self._placed.pop(key, None)
        if placed is not None:
            self._buckets[placed & self._mask].discard(key)

    def due_of(self, key: K) -> int | None:
        """The tick at which `key` is due; None: not armed."""
        return self._due.get(key)

    def advance(self, limit: int) -> list[K]:
        """Begins the next tick; returns ≤ `limit` keys that are due, disarmed. The others follow at the next ticks."""
        self._now += 1
        bucket = self._buckets[self._now & self._mask]
        if bucket:
            self._buckets[self._now & self._mask] = set()
            for key in bucket:
                del self._placed[key]
                self._late.append(key)
        if not self._late:
            return []
        out: list[K] = []
        looked = 0
        late = self._late
        while late and len(out) < limit and looked < 4 * limit:
            key = late.popleft()
            looked += 1
            due = self._due.get(key)
            if due is None or key in self._placed:  # cancelled, or armed again meanwhile
                continue
            if due > self._now:
                self._place(key, due)
            else:
                del self._due[key]
                out.append(key)
        return out

    def _place(self, key: K, due: int) -> None:
        self._placed[key] = due
        self._buckets[due & self._mask].add(key)


class Pacer:
    """How many ticks a reading of a steady clock is worth: at most `most` per turn, whatever passed meanwhile (R10).

    A process that was stopped for an hour gets `most` ticks for it; so time that nobody could have used to be heard
    never counts against a client.
    """

    def __init__(self, tick_s: float, most: int = 2) -> None:
        self._tick_s = tick_s
        self._most = most
        self._last_s: float | None = None

    def credit(self, now_s: float) -> int:
        """Ticks to count now; the rest of a broken tick stands over to the next reading."""
        if self._last_s is None:
            self._last_s = now_s
            return 0
        ticks = int((now_s - self._last_s) / self._tick_s)
        if ticks > self._most:
            self._last_s = now_s
            return self._most
        self._last_s += ticks * self._tick_s
        return ticks


def spread(key: int, range_ticks: int) -> int:
    """0..range_ticks-1, even over keys and the same for one key: keeps what began together from ending together."""
    if range_ticks <= 0:
        return 0
    return ((key * 0x9E3779B97F4A7C15) >> 24 & 0xFFFFFFFF) % range_ticks
