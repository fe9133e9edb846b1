"""A mean over the last seconds in which newer samples weigh more, kept up by adding and taking away (design §11).

A sample's weight falls in a straight line, from 1 when it is new to 0 when it is `span_ms` old. With x the values, t their
times and s the span, the mean at `now` is

    Σ x·(s − now + t) / Σ (s − now + t)  =  ((s − now)·Σx + Σx·t) / ((s − now)·n + Σt)

so four sums are all that a reader needs. They are whole numbers: nothing drifts, however long it runs.
Memory: the samples of one span.
"""

from __future__ import annotations

from collections import deque
from typing import Final

SPAN_MS: Final = 5_000


class Window:
    """One series of whole numbers. Times are ms of a clock that never goes back."""

    def __init__(self, span_ms: int = SPAN_MS) -> None:
        self._span_ms = span_ms
        self._samples: deque[tuple[int, int]] = deque()
        """(value, time), oldest first."""
        self._values = self._times = self._products = 0

    def add(self, value: int, at_ms: int) -> None:
        """A sample came."""
        self._forget(at_ms)  # here too: nobody may ask for days
        self._samples.append((value, at_ms))
        self._values += value
        self._times += at_ms
        self._products += value * at_ms

    def mean(self, now_ms: int) -> float | None:
        """The weighted mean; None when every sample is older than the span."""
        self._forget(now_ms)
        samples = self._samples
        if not samples:
            return None
        rest_ms = self._span_ms - now_ms
        return (rest_ms * self._values + self._products) / (rest_ms * len(samples) + self._times)

    def _forget(self, now_ms: int) -> None:
        samples = self._samples
        while samples and now_ms - samples[0][1] >= self._span_ms:
            value, at_ms = samples.popleft()
            self._values -= value
            self._times -= at_ms
            self._products -= value * at_ms
