"""How often somebody may ask: one bucket per key, filled at a pace, with a burst to begin with.

Kept as the time at which the bucket is full again (the generic cell rate algorithm), so a key is one number. A bucket that
nobody took from for a round is full and needs no entry: entries live for one to two rounds. Above MOST_KEYS everything is
forgotten: who comes with so many keys is not stopped by a limit per key, and others must not pay for it.
"""

from __future__ import annotations

from collections.abc import Hashable
from math import ceil
from typing import Final

MOST_KEYS: Final = 200_000


class Buckets:
    """Buckets of one kind. Times are ms of a clock that never goes back."""

    def __init__(self, per_s: float, burst: int, most_keys: int = MOST_KEYS) -> None:
        """per_s: how many a second in the long run; burst: how many at once, after a rest."""
        self._interval_ms = 1000.0 / per_s
        self._depth_ms = burst * self._interval_ms
        self._most_keys = most_keys
        self._young: dict[Hashable, float] = {}
        self._old: dict[Hashable, float] = {}
        self._round_ends_ms = float("-inf")

    def __len__(self) -> int:
        return len(self._young) + len(self._old)

    def take(self, key: Hashable, now_ms: int) -> int:
        """0: go on. Else refused, and so many ms until it is worth asking again; a refusal costs nothing."""
        if now_ms >= self._round_ends_ms:
            self._old = self._young if now_ms < self._round_ends_ms + self._depth_ms else {}
            self._young = {}
            self._round_ends_ms = now_ms + self._depth_ms
        full_at = self._young.get(key)
        if full_at is None:
            full_at = self._old.get(key, 0.0)
        after = max(full_at, float(now_ms)) + self._interval_ms
        over_ms = after - now_ms - self._depth_ms
        if over_ms > 1e-6:
            return ceil(over_ms)
        if len(self) >= self._most_keys and key not in self._young:
            self._young.clear()
            self._old.clear()
        self._young[key] = after
        return 0
