"""Group commit: what one client's rounds want written becomes durable in as few transactions as the disk allows.

Rounds queue up while a commit runs; the next commit takes all of them as one transaction, and only then are their effects
released, in order. Commits run on a small pool of threads that every client of the process shares, one at a time per
client; a store in memory is written at once. A commit that fails (a full disk) is repeated until it succeeds, and nothing
is released meanwhile; `backlog` tells the client to stop reading, which bounds the queue.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from plato.client.core.model import Effects, Writes
from plato.client.store import Store

THREADS: Final = 4
BACKLOG: Final = 64
"""Queued rounds past which the client reads no further."""
REPEAT_S: Final = 1.0
_log = logging.getLogger("plato.client")
_pool: ThreadPoolExecutor | None = None


def _threads() -> ThreadPoolExecutor:
    global _pool
    if _pool is None:
        _pool = ThreadPoolExecutor(THREADS, thread_name_prefix="plato-store")
    return _pool


class Writer:
    """The order of one client's rounds: durable first, then released."""

    def __init__(self, store: Store, release: Callable[[Effects], None]) -> None:
        self._store = store
        self._release = release
        self._loop = asyncio.get_running_loop()
        self._queue: deque[Effects] = deque()
        self._committing = 0  # how many of the queue's first rounds the running commit holds
        self._idle = asyncio.Event()  # nothing is queued
        self._idle.set()
        self._marks: deque[tuple[int, asyncio.Future[None]]] = deque()  # who waits for the first so many of the queue
        self._quiet = asyncio.Event()  # no thread works on the store
        self._quiet.set()
        self._abandoned = False
        self._retry: asyncio.TimerHandle | None = None

    @property
    def backlog(self) -> bool:
        """Whether so much waits for the disk that no more should be read."""
        return len(self._queue) >= BACKLOG

    def put(self, effects: Effects) -> None:
        """Queues a round."""
        if self._abandoned:
            return
        if not self._queue and not effects.writes:
            self._release(effects)
            return
        self._queue.append(effects)
        self._idle.clear()
        if not self._committing and self._retry is None:
            self._commit()

    async def drain(self, timeout_s: float) -> bool:
        """Waits until all is durable and released. False: it took too long."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True

    async def caught_up(self, timeout_s: float) -> bool:
        """Waits until what is queued now is durable and released, whatever is queued after it. False: it is not, after
        that time or for ever."""
        if not self._queue or self._abandoned:
            return not self._queue
        mark = self._loop.create_future()
        self._marks.append((len(self._queue), mark))
        try:
            async with asyncio.timeout(timeout_s):
                await mark
        except TimeoutError:
            return False
        return not self._abandoned

    async def abandon(self) -> None:
        """Nothing more is written or released; returns when no thread works on the store any more."""
        self._abandoned = True
        for _, mark in self._marks:
            if not mark.done():
                mark.set_result(None)  # the asker looks for itself what became of the client
        if self._retry is not None:
            self._retry.cancel()
        await self._quiet.wait()

    def _commit(self) -> None:
        self._retry = None
        writes = Writes()
        for effects in self._queue:
            writes.join(effects.writes)
        self._committing = len(self._queue)
        if self._store.in_memory or not writes:
            error: BaseException | None = None
            try:
                if writes:
                    self._store.apply(writes)
            except Exception as e:  # as a thread's future would hold it
                error = e
            self._committed(error)
            return
        self._quiet.clear()
        future = self._loop.run_in_executor(_threads(), self._store.apply, writes)
        future.add_done_callback(lambda f: self._committed(f.exception()))

    def _committed(self, error: BaseException | None) -> None:
        self._quiet.set()
        count, self._committing = self._committing, 0
        if self._abandoned:
            return
        if error is not None:
            _log.warning("the store could not be written, trying again: %s", error)
            self._retry = self._loop.call_later(REPEAT_S, self._commit)
            return
        for _ in range(count):
            self._release(self._queue.popleft())
        marks, self._marks = self._marks, deque()
        for left, mark in marks:
            if left > count:
                self._marks.append((left - count, mark))
            elif not mark.done():
                mark.set_result(None)
        if self._queue:
            self._commit()
        else:
            self._idle.set()
