"""How much work in flight a service bears, learnt from what it did: as TCP BBR and Sentinel's system rule do it.

    limit = greatest throughput × min(GAIN × least latency, calm_ms)      over a window of WINDOW_BUCKETS × BUCKET_MS

(Little's law), so that an overload that outlasts the window does not teach it that long latencies are usual. While the
oldest work in flight is younger than `calm_ms`, everything is let in: a service that answers in time is not overloaded,
whatever it has in flight. Beyond it new work is let in only below the limit. So a queue never grows much longer than what
is worked off in `calm_ms`, and a dependency that hangs is left with as much as it used to bear, and no more.
GAIN is BBR's for congestion windows: work that is done in batches comes back in batches.

Who is refused is told when to come again: each has a turn of its own, so many a second as are RETURN_SHARE of what is
done. So a crowd comes back spread out, the later the larger it is, and refusing, which has its price too, stays cheap.

Work counts as first-in first-out. Memory: the window's buckets, and one mark per MARK_MS of work in flight.
"""

from __future__ import annotations

from collections import deque
from typing import Final

BUCKET_MS: Final = 500
WINDOW_BUCKETS: Final = 20
MARK_MS: Final = 10
GAIN: Final = 2.0
RETRY_MIN_MS: Final = 250
RETRY_MAX_MS: Final = 10_000
RETURN_SHARE: Final = 0.2


class Limiter:
    """One kind of work. `now_ms`: of one clock, never less than before."""

    def __init__(self, calm_ms: int, floor: int, lost_ms: int = 60_000) -> None:
        """calm_ms: a latency that is no sign of overload. floor: work in flight that is always borne. lost_ms: work that
        was begun so long ago counts as lost, and no more as in flight."""
        self.calm_ms = calm_ms
        self._floor = floor
        self._lost_ms = lost_ms
        self.in_flight = 0
        self.begun = 0
        """Of all time, without what was cancelled. What ended, or was lost: `begun` − `in_flight`."""
        self._marks: deque[list[int]] = deque()
        """[begun_ms, count], oldest first; the counts add up to `in_flight`."""
        self._buckets: deque[list[int]] = deque(maxlen=WINDOW_BUCKETS)
        """[number, done, milliseconds that they took together], oldest first."""
        self._turn_ms = 0.0
        """When the next one that is refused has its turn, at the earliest."""

    def admits(self, now_ms: int) -> bool:
        """Whether one more is let in now; if so, `begin` it. If not, tell it `retry_ms`."""
        if self.oldest_ms(now_ms) <= self.calm_ms or self.in_flight < self._floor:
            return True
        return self.in_flight < self.limit(now_ms)

    def begin(self, now_ms: int, count: int = 1) -> None:
        """Work was begun."""
        self.in_flight += count
        self.begun += count
        if self._marks and now_ms - self._marks[-1][0] < MARK_MS:
            self._marks[-1][1] += count
        else:
            self._marks.append([now_ms, count])

    def done(self, now_ms: int, count: int = 1) -> None:
        """The oldest work in flight ended."""
        number = now_ms // BUCKET_MS
        if not self._buckets or self._buckets[-1][0] != number:
            self._buckets.append([number, 0, 0])
        bucket = self._buckets[-1]
        while count > 0 and self._marks:
            mark = self._marks[0]
            part = min(count, mark[1])
            bucket[1] += part
            bucket[2] += part * max(1, now_ms - mark[0])
            self.in_flight -= part
            count -= part
            mark[1] -= part
            if not mark[1]:
                self._marks.popleft()

    def cancel(self, count: int = 1) -> None:
        """Work that was begun last was given up; says nothing about latency."""
        while count and self._marks:
            mark = self._marks[-1]
            part = min(count, mark[1])
            self.in_flight -= part
            self.begun -= part
            count -= part
            mark[1] -= part
            if not mark[1]:
                self._marks.pop()

    def done_upto(self, now_ms: int, number: int) -> None:
        """All work ended up to where `begun` was `number`."""
        self.done(now_ms, number - (self.begun - self.in_flight))

    def oldest_ms(self, now_ms: int) -> int:
        """How long the oldest work in flight takes by now."""
        marks = self._marks
        while marks and now_ms - marks[0][0] > self._lost_ms:
            self.in_flight -= marks.popleft()[1]
        return now_ms - marks[0][0] if marks else 0

    def limit(self, now_ms: int) -> int:
        """How much may be in flight, once it does not end in time."""
        per_ms, least_ms = self._best(now_ms)
        return max(self._floor, int(per_ms * min(GAIN * least_ms, self.calm_ms)))

    def retry_ms(self, now_ms: int) -> int:
        """Gives one that is refused its turn: when it should come again, at the earliest."""
        per_ms = max(RETURN_SHARE * self._best(now_ms)[0], 1 / RETRY_MIN_MS)
        self._turn_ms = min(max(self._turn_ms, now_ms + RETRY_MIN_MS) + 1 / per_ms, now_ms + RETRY_MAX_MS)
        return int(self._turn_ms) - now_ms

    def _best(self, now_ms: int) -> tuple[float, float]:
        """Of the window's buckets: the greatest throughput per ms, the least latency in ms."""
        first = now_ms // BUCKET_MS - WINDOW_BUCKETS
        most, least_ms = 0, 0.0
        for number, done, took_ms in self._buckets:
            if number > first and done:
                most = max(most, done)
                least_ms = min(least_ms or took_ms / done, took_ms / done)
        return most / BUCKET_MS, least_ms
