"""Keepers: each keeps one process alive, knows whether it serves, and says in one line why it does not.

A process that dies is started again at once, and that is said; one that keeps dying before it served waits longer each
time, at most 2 s, and after the third time its own last words are printed. A keeper whose process was stopped on order
waits until it is wanted.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import signal
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Final

from plato.local import logs, probe
from plato.local.child import Child
from plato.local.registry import Registry
from plato.local.servers import Server, ServerError
from plato.local.specs import Spec

_STEADY_S: Final = 5.0
_LONGEST_BACK_OFF_S: Final = 2.0
_TELL_AFTER: Final = 3
_PAUSE_TIMEOUT_S: Final = 10.0
_LOOK_EVERY_S: Final = 5.0
"""A server that served is asked again this often; it may hang (a stopped process, a dead disk) without an end."""

FULL_DISK_BYTES: Final = 33_554_432
"""Below this much room a commit may fail at any moment: PostgreSQL's WAL grows by files of 16 MiB."""


class Keeper(ABC):
    """Keeps one process. Fields are written by its own tasks only; `changed` is called after each change."""

    def __init__(
        self,
        name: str,
        kind: str,
        say: Callable[[str], None],
        changed: Callable[[], None],
        died: Callable[[str, str], None] = lambda _name, _how: None,
    ) -> None:
        """say: one line to the terminal. died: called with the name and how it ended, of a death that is answered by a
        start at once."""
        self.name = name
        self.kind = kind
        self.restarts = 0
        self.since = time.time()
        """Unix seconds of the last start or stop; for display."""
        self.ready = False
        self.why = "it was not started yet"
        """Why it is not ready; "" when it is."""
        self.bus = ""
        """Why the bus does not answer it, by its own words; "" when it does, or it did not say."""
        self.child: Child | None = None
        self._say = say
        self._changed = changed
        self._died = died
        self._wanted = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._ending: asyncio.Task[int] | None = None

    @property
    def pid(self) -> int | None:
        """The running process, or None."""
        return self.child.pid if self.child is not None and self.child.returncode is None else None

    @property
    def wanted(self) -> bool:
        """Whether it should run."""
        return self._wanted.is_set()

    def begin(self) -> None:
        """Starts to keep the process."""
        self._wanted.set()
        if not self._tasks:
            self._tasks = [asyncio.create_task(self._keep()), asyncio.create_task(self._watch())]

    def pause(self) -> None:
        """Asks the process to end, and does not start it again until `begin`."""
        self._wanted.clear()
        self._turn(False, "it was stopped with `plato stop`")
        if self.child is not None:
            self._ending = asyncio.create_task(self.child.stop(self._stop_signal(), _PAUSE_TIMEOUT_S))

    async def end(self, timeout_s: float) -> None:
        """Stops keeping and ends the process: asked first, killed after `timeout_s`."""
        self._wanted.clear()
        for task in self._tasks:
            task.cancel()
        for task in self._tasks:
            with contextlib.suppress(asyncio.CancelledError):
                await task
        self._tasks = []
        self._turn(False, "it is being stopped")
        if self.child is not None:
            await self.child.stop(self._stop_signal(), timeout_s)
        self._changed()

    async def _keep(self) -> None:
        loop = asyncio.get_running_loop()
        early = 0  # ends in a row before it served
        while True:
            await self._wanted.wait()
            begun = loop.time()
            served, reason = False, ""
            try:
                child = self.child if self._adopted() else await self._start()
                assert child is not None
                served = await self._until_end(child)
                reason = self._reason(child)
            except (ServerError, OSError) as e:
                reason = str(e)
            self._turn(False, f"it ended: {reason}" if self._wanted.is_set() else "it was stopped with `plato stop`")
            if not self._wanted.is_set():
                early = 0
                continue
            self.restarts += 1
            early = 0 if served or loop.time() - begun > _STEADY_S else early + 1
            if early == _TELL_AFTER or (early > _TELL_AFTER and early & (early - 1) == 0):
                self._say(f"{self.name} ended {early} times before it served: {reason}")
            elif early < _TELL_AFTER:
                self._died(self.name, reason)
            if early > 1:
                await asyncio.sleep(min(_LONGEST_BACK_OFF_S, 0.1 * 2.0 ** (early - 2)))

    async def _start(self) -> Child:
        self._turn(False, "it is starting")
        child = await self._spawn()
        self.child = child
        self.since = time.time()
        self._changed()
        if not self._wanted.is_set():  # a stop order came while it was being spawned
            child.send_signal(self._stop_signal())
        return child

    def _adopted(self) -> bool:
        """Whether a process that was started before the keeper still waits to be kept."""
        return self.restarts == 0 and self.pid is not None

    def _turn(self, ready: bool, why: str, bus: str = "") -> None:
        if (ready, why, bus) != (self.ready, self.why, self.bus):
            self.ready, self.why, self.bus = ready, why, bus
            self._changed()

    def _stop_signal(self) -> signal.Signals:
        return signal.SIGTERM

    @abstractmethod
    async def _spawn(self) -> Child:
        """Starts the process. Raises ServerError or OSError."""

    @abstractmethod
    async def _until_end(self, child: Child) -> bool:
        """Waits for its end; returns whether it ever served."""

    @abstractmethod
    async def _watch(self) -> None:
        """Keeps `ready` and `why` true."""

    @abstractmethod
    def _reason(self, child: Child) -> str:
        """Its last words, in one line."""


class ServerKeeper(Keeper):
    """Keeps PostgreSQL or Valkey, which were started once already."""

    def __init__(
        self,
        server: Server,
        say: Callable[[str], None],
        changed: Callable[[], None],
        died: Callable[[str, str], None] = lambda _name, _how: None,
        look_every_s: float = _LOOK_EVERY_S,
    ) -> None:
        super().__init__(server.name, server.name, say, changed, died)
        self._look_every_s = look_every_s
        self._serving: Child | None = None
        self.server = server
        self.child = server.child

    async def _spawn(self) -> Child:
        return await self.server.spawn()

    async def _until_end(self, child: Child) -> bool:
        try:
            await self.server.wait_ready()
        except ServerError:
            await child.stop(self._stop_signal(), 5)
            raise
        self._serving = child
        if self._wanted.is_set():
            self._turn(True, "")
        await child.wait()
        return True

    async def _watch(self) -> None:
        """Asks again, from its first answer to its end, and looks whether its disk has room."""
        while True:
            await asyncio.sleep(self._look_every_s)
            child = self._serving
            if child is None or child is not self.child or child.returncode is not None or not self._wanted.is_set():
                continue
            why = await self._not_serving()
            if child is self.child and child.returncode is None and self._wanted.is_set():
                self._turn(not why, why)

    async def _not_serving(self) -> str:
        try:
            if not await self.server.answers():
                return "it does not answer"
            free = shutil.disk_usage(self.server.folder).free
        except (ServerError, OSError) as e:
            return str(e)
        if free < FULL_DISK_BYTES:
            return f"its disk is full: {free / 2**20:.0f} MiB are free, so commits fail or soon will; make room"
        return ""

    def _stop_signal(self) -> signal.Signals:
        return self.server.stop_signal

    def _reason(self, child: Child) -> str:
        code = child.returncode
        return f"signal {-code}" if code is not None and code < 0 else self.server.reason()


class ServiceKeeper(Keeper):
    """Keeps one of our own processes; asks its /readyz."""

    def __init__(
        self,
        spec: Spec,
        registry: Registry,
        say: Callable[[str], None],
        changed: Callable[[], None],
        died: Callable[[str, str], None] = lambda _name, _how: None,
    ) -> None:
        super().__init__(spec.name, spec.kind, say, changed, died)
        self.spec = spec
        self._registry = registry
        self._served = False
        self._first_uid: str | None = None

    def name_first(self, uid: str) -> None:
        """The uid that the topology already holds for the first start: all records are written at once."""
        self._first_uid = uid

    async def _spawn(self) -> Child:
        uid, self._first_uid = self._first_uid, None
        if uid is None:
            uid = self._registry.renew([self.name])[self.name]
        self._served = False
        logs.rotate(self.spec.log)
        if self.spec.pids is not None:
            self.spec.pids.unlink(missing_ok=True)  # the pids in it may be somebody else's by now
        return Child(self.spec.argv, log=self.spec.log, env=self.spec.environment(uid))

    async def _until_end(self, child: Child) -> bool:
        await child.wait()
        return self._served

    async def _watch(self) -> None:
        """Asks often while it does not serve, each second while it does."""
        admin = self.spec.admin
        while True:
            child = self.child
            if child is not None and child.returncode is None and self._wanted.is_set():
                why, bus = await probe.ask(admin.host, admin.port)
                if self.child is child and child.returncode is None and self._wanted.is_set():
                    self._served = self._served or not why
                    self._turn(not why, why, bus)
            await asyncio.sleep(1.0 if self.ready else 0.1)

    def _reason(self, child: Child) -> str:
        code = child.returncode
        return f"signal {-code}" if code is not None and code < 0 else logs.reason(child.output())
