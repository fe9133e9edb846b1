"""Token buckets by key: how much of something each user, connection or address may do, and how long it is to wait else.

A bucket holds `burst` tokens and gains `per_s` a second. It is kept as the one moment at which it will be full again (the
generic cell rate algorithm): a full bucket is no entry at all. Memory: one dict entry per key that was charged within
the last two rounds; a round is as long as an empty bucket takes to fill.
"""

from __future__ import annotations

import math
from collections.abc import Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)


class Buckets(Generic[K]):
    """Buckets of one size. `now_ms`: of one clock, never less than before."""

    def __init__(self, per_s: float, burst: int) -> None:
        self._token_ms = 1_000 / per_s
        self._burst_ms = burst * self._token_ms
        self._young: dict[K, float] = {}
        self._old: dict[K, float] = {}
        self._round_ends_ms: float = -math.inf

    def __len__(self) -> int:
        return len(self._young) + len(self._old)

    def wait_ms(self, key: K, now_ms: float, count: int = 1) -> int:
        """How long until `count` tokens are there; 0: now. Takes none. More than `burst` at once never are."""
        full_at = self._young.get(key)
        if full_at is None:
            full_at = self._old.get(key, now_ms)
        return max(0, math.ceil(max(full_at, now_ms) + count * self._token_ms - self._burst_ms - now_ms))

    def charge(self, key: K, now_ms: float, count: int = 1) -> None:
        """Takes `count` tokens, there or not."""
        if now_ms >= self._round_ends_ms:
            self._old = self._young if now_ms < self._round_ends_ms + self._burst_ms else {}
            self._young = {}
            self._round_ends_ms = now_ms + self._burst_ms
        full_at = self._young.get(key)
        if full_at is None:
            full_at = self._old.get(key, now_ms)
        self._young[key] = max(full_at, now_ms) + count * self._token_ms
