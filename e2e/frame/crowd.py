"""Many small clients of one gateway, in a thread: each logs in, waits, and notes when it is asked to go elsewhere, or cut.

They follow a Redirect as far as the gateway sees it: they close. Bounded by one connection and one note per client.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from pathlib import Path
from typing import Final

from plato.adapters.tokens import DEV_KID, issue
from plato.wire.v1 import client_pb2 as wire

from tests.faults.raw import Raw

AT_ONCE: Final = 25
ENTER_S: Final = 120.0
TOKEN_S: Final = 3_600


class Crowd:
    """Use as `with Crowd(host, port, keys_dir, count) as crowd:`; all are in when it begins."""

    def __init__(self, host: str, port: int, keys_dir: Path, count: int, prefix: str = "crowd") -> None:
        self._host, self._port, self._keys = host, port, keys_dir
        self._count, self._prefix = count, prefix
        self.redirected: list[float] = []
        """When each was asked to go, time.monotonic()."""
        self.cut: list[float] = []
        """When each lost its connection without having been asked."""
        self._inside = 0
        self._failure: BaseException | None = None
        self._loop = asyncio.new_event_loop()
        self._entered, self._over = threading.Event(), asyncio.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Crowd:
        self._thread.start()
        inside = self._entered.wait(ENTER_S)
        if self._failure is not None or not inside:
            self.__exit__()
            raise AssertionError(f"{self._inside} of {self._count} came in") from self._failure
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(RuntimeError):  # it has ended by itself
            self._loop.call_soon_threadsafe(self._over.set)
        self._thread.join(20)

    @property
    def left(self) -> int:
        """How many are still connected and were not asked to go."""
        return self._count - len(self.redirected) - len(self.cut)

    def _run(self) -> None:
        try:
            with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
                runner.run(self._all())
        except BaseException as e:
            self._failure = e
            self._entered.set()

    async def _all(self) -> None:
        turns = asyncio.Semaphore(AT_ONCE)
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(self._one(n, turns)) for n in range(self._count)]
            await self._over.wait()
            for task in tasks:
                task.cancel()

    async def _one(self, number: int, turns: asyncio.Semaphore) -> None:
        token = issue(self._keys, DEV_KID, f"{self._prefix}{number:05}", "plato", "plato", TOKEN_S)
        async with turns:
            raw = await Raw.open(self._host, self._port)
            try:
                await raw.enter(token)
            except BaseException:
                raw.writer.transport.abort()
                raise
        async with raw:
            self._inside += 1
            if self._inside == self._count:
                self._entered.set()
            while (cmd := await raw.receive(TOKEN_S)) is not None:
                if cmd.Type == wire.REDIRECT:
                    self.redirected.append(time.monotonic())
                    return
            self.cut.append(time.monotonic())
