"""Sync and Pull as state asks them: History behind an adaptive limiter. What cannot be read in time is answered BUSY, with
a time to wait, before anything was spent on it. Memory: the limiter's, and what is let in.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

from plato.core.codes import Code, text
from plato.core.limiter import Limiter
from plato.wire.v1 import client_pb2 as wire

from plato_msg import metrics
from plato_msg.history import History

FLOOR: Final = 16
"""Reads that are let in whatever happened before; the database's connections for reads are a quarter of it."""


class Reads:
    """The door to History. Raises Unavailable."""

    def __init__(self, history: History, calm_ms: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._history = history
        self._clock = clock
        self.limiter = Limiter(calm_ms, FLOOR)

    async def sync(self, user: str, sync: wire.SyncMsg) -> wire.SyncedMsg:
        """See History."""
        if retry_ms := self._refused("sync"):
            return wire.SyncedMsg(ref=sync.ref, code=Code.BUSY, msg=text(Code.BUSY), retry_ms=retry_ms)
        with self._in_flight():
            return await self._history.sync(user, sync)

    async def pull(self, user: str, pull: wire.PullMsg) -> wire.PulledMsg:
        """See History."""
        if retry_ms := self._refused("pull"):
            return wire.PulledMsg(
                ref=pull.ref,
                conversation_id=pull.conversation_id,
                code=Code.BUSY,
                msg=text(Code.BUSY),
                retry_ms=retry_ms,
            )
        with self._in_flight():
            return await self._history.pull(user, pull)

    def measure(self) -> None:
        """Sets the gauges."""
        now_ms = self._now_ms()
        metrics.READS_AGE.set(self.limiter.oldest_ms(now_ms) / 1_000)
        metrics.READS_IN_FLIGHT.set(self.limiter.in_flight)
        metrics.READS_LIMIT.set(self.limiter.limit(now_ms))
        metrics.HOT.set(len(self._history.hot_conversations()))

    def _refused(self, kind: str) -> int:
        """0: it is let in. Else how long to wait."""
        now_ms = self._now_ms()
        if self.limiter.admits(now_ms):
            return 0
        metrics.READS.labels(kind, "busy").inc()
        return self.limiter.retry_ms(now_ms)

    @contextmanager
    def _in_flight(self) -> Iterator[None]:
        self.limiter.begin(self._now_ms())
        try:
            yield
        finally:
            self.limiter.done(self._now_ms())

    def _now_ms(self) -> int:
        return int(self._clock() * 1_000)
