"""Adaptive throttling toward a dependency, by the client alone (Site Reliability Engineering, chapter 21):

    a request is refused here, unsent, with probability max(0, (requests − K × accepts) / (requests + 1))

both counted over a window that slides by buckets. A dependency that answers half of what it is asked is not throttled
(K = 2); one that answers nothing is soon asked ten times a second. Added to the book's: one request per PROBE_MS goes
through in any case, and RECOVERED accepted ones in a row end the throttling, so that an outage is over when it is over. A
request that was sent counts when its outcome is known: a crowd that comes at once is in flight, which says nothing against
the dependency. Chance is passed in.
"""

from __future__ import annotations

from collections import deque
from typing import Final

K: Final = 2.0
BUCKET_MS: Final = 500
BUCKETS: Final = 20
"""A window of 10 s."""
PROBE_MS: Final = 100
RECOVERED: Final = 5


class Breaker:
    """One dependency. `now_ms`: of one clock, never less than before."""

    def __init__(self, k: float = K) -> None:
        self._k = k
        self._buckets: deque[list[int]] = deque()
        """[number, requests, accepts], oldest first."""
        self._requests = self._accepts = 0
        self._in_a_row = 0
        self._probe_at_ms = 0

    def chance_of_refusal(self, now_ms: int) -> float:
        """The probability by which the next request is refused."""
        first = now_ms // BUCKET_MS - BUCKETS
        while self._buckets and self._buckets[0][0] <= first:
            _, requests, accepts = self._buckets.popleft()
            self._requests -= requests
            self._accepts -= accepts
        return max(0.0, (self._requests - self._k * self._accepts) / (self._requests + 1))

    def admits(self, now_ms: int, chance: float) -> bool:
        """Whether one request is to be sent; then `accepted` or `failed` follows. chance: from [0, 1)."""
        if chance < self.chance_of_refusal(now_ms) and now_ms < self._probe_at_ms:
            self._count(now_ms)
            return False
        self._probe_at_ms = now_ms + PROBE_MS
        return True

    def accepted(self, now_ms: int) -> None:
        """A request that was sent was answered, whatever the answer was."""
        self._count(now_ms)
        self._bucket(now_ms)[2] += 1
        self._accepts += 1
        self._in_a_row += 1
        if self._in_a_row >= RECOVERED and self._requests > self._k * self._accepts:
            self._buckets.clear()
            self._requests = self._accepts = 0

    def failed(self, now_ms: int) -> None:
        """A request that was sent got no answer, or none in time."""
        self._count(now_ms)
        self._in_a_row = 0

    def _count(self, now_ms: int) -> None:
        self._bucket(now_ms)[1] += 1
        self._requests += 1

    def _bucket(self, now_ms: int) -> list[int]:
        number = now_ms // BUCKET_MS
        if not self._buckets or self._buckets[-1][0] != number:
            self.chance_of_refusal(now_ms)  # drops what has left the window
            self._buckets.append([number, 0, 0])
        return self._buckets[-1]
