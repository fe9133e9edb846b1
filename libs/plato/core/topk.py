"""The heaviest keys of a stream in bounded memory: the Space-Saving sketch (Metwally, Agrawal, El Abbadi 2005), by rounds.

A key that is not among the `size` counted ones takes the place of the least counted, with its count as its error. So a
key's count is too great by its error at most, and a key that came more than n/size times of n is always among them. Counts
of one round and of the one before are looked at, so that yesterday's heat is forgotten.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)


class SpaceSaving(Generic[K]):
    """Counts of at most `size` keys."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._counts: dict[K, list[int]] = {}
        """{key: [count, error]}."""

    def add(self, key: K) -> None:
        """Counts one."""
        held = self._counts.get(key)
        if held is not None:
            held[0] += 1
        elif len(self._counts) < self._size:
            self._counts[key] = [1, 0]
        else:
            least = min(self._counts, key=lambda k: self._counts[k][0])
            count = self._counts.pop(least)[0]
            self._counts[key] = [count + 1, count]

    def least(self, key: K) -> int:
        """How often `key` came, at least."""
        count, error = self._counts.get(key, (0, 0))
        return count - error

    def top(self) -> list[tuple[K, int, int]]:
        """(key, count, error), the greatest count first."""
        return sorted(((k, c, e) for k, (c, e) in self._counts.items()), key=lambda kept: -kept[1])


class Hot(Generic[K]):
    """Keys that come at least `times` per round of `round_ms`. `now_ms`: of one clock, never less than before."""

    def __init__(self, times: int, round_ms: int = 1_000, size: int = 64) -> None:
        self._times, self._round_ms, self._size = times, round_ms, size
        self._now: SpaceSaving[K] = SpaceSaving(size)
        self._before: SpaceSaving[K] = SpaceSaving(size)
        self._round_ends_ms = round_ms

    def seen(self, key: K, now_ms: int) -> bool:
        """Counts one; whether the key is hot: in this round already, or in the last one."""
        self._turn(now_ms)
        self._now.add(key)
        return self._now.least(key) >= self._times or self._before.least(key) >= self._times

    def hot(self, now_ms: int) -> list[K]:
        """The keys that are hot now."""
        self._turn(now_ms)
        found = [
            k
            for sketch in (self._now, self._before)
            for k, count, error in sketch.top()
            if count - error >= self._times
        ]
        return list(dict.fromkeys(found))

    def _turn(self, now_ms: int) -> None:
        if now_ms < self._round_ends_ms:
            return
        fresh: SpaceSaving[K] = SpaceSaving(self._size)
        self._before = self._now if now_ms < self._round_ends_ms + self._round_ms else fresh
        self._now = SpaceSaving(self._size)
        self._round_ends_ms = now_ms + self._round_ms
