"""One child process: spawned through `launch`, watched by a pidfd, its output appended to a file.

A child belongs to no event loop: it may be started in one `asyncio.run` and stopped in another. It must be spawned by a
thread that lives as long as the child should, since Linux ties the parent-death signal to the *thread* that forked.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from plato.local import launch


@dataclass(frozen=True, slots=True)
class Identity:
    """Which user a child runs as. map_uid: the number that our own user gets in a user namespace; become: (uid, gid) by
    setuid; neither: as ourselves."""

    map_uid: int | None = None
    become: tuple[int, int] | None = None

    def options(self) -> list[str]:
        """As arguments of `launch`."""
        if self.map_uid is not None:
            return ["--map", str(self.map_uid)]
        if self.become is not None:
            return ["--become", f"{self.become[0]}:{self.become[1]}"]
        return []


OURSELVES = Identity()


def launch_command(
    argv: Sequence[str], identity: Identity = OURSELVES, death_signal: int = signal.SIGKILL
) -> list[str]:
    """`argv` wrapped so that it gets `death_signal` when the calling thread's process ends."""
    return [
        sys.executable,
        "-I",
        "-S",
        launch.__file__,
        "--parent",
        str(os.getpid()),
        "--signal",
        str(int(death_signal)),
        *identity.options(),
        "--",
        *argv,
    ]


class Child:
    """A running (or ended) child process."""

    def __init__(
        self,
        argv: Sequence[str],
        *,
        log: Path,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        identity: Identity = OURSELVES,
        death_signal: int = signal.SIGKILL,
    ) -> None:
        """Spawns. argv[0] is an absolute path. Raises OSError (the log cannot be written, no process can be made)."""
        self.log = log
        self._log_from = log.stat().st_size if log.exists() else 0
        with log.open("ab") as out:
            # A session of its own: Ctrl-C in the terminal reaches the supervisor alone, which stops children in order.
            self._popen = subprocess.Popen(
                launch_command(argv, identity, death_signal),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                env=None if env is None else dict(env),
                cwd=cwd,
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        """The process id; launch execs, so it stays the program's."""
        return self._popen.pid

    @property
    def returncode(self) -> int | None:
        """None while it runs; negative: ended by that signal."""
        return self._popen.poll()

    async def wait(self) -> int:
        """Waits for the end; returns the exit code (negative: the signal)."""
        if (code := self._popen.poll()) is not None:
            return code
        ended = asyncio.Event()
        loop = asyncio.get_running_loop()
        fd = os.pidfd_open(self.pid)
        try:
            loop.add_reader(fd, ended.set)
            await ended.wait()
        finally:
            loop.remove_reader(fd)
            os.close(fd)
        return self._popen.wait()

    def send_signal(self, number: int) -> None:
        """Sends a signal, if it still runs."""
        if self._popen.poll() is None:
            self._popen.send_signal(number)

    async def stop(self, number: int = signal.SIGTERM, timeout_s: float = 10.0) -> int:
        """Asks it to end, and kills it after `timeout_s`. Returns its exit code."""
        self.send_signal(number)
        try:
            async with asyncio.timeout(timeout_s):
                return await self.wait()
        except TimeoutError:
            self.send_signal(signal.SIGKILL)
            return await self.wait()

    def output(self, limit: int = 8_192) -> str:
        """What it has written since it was spawned, at most the last `limit` bytes."""
        try:
            size = self.log.stat().st_size
            with self.log.open("rb") as file:
                file.seek(max(self._log_from, size - limit))
                return file.read().decode("utf-8", "replace")
        except OSError:
            return ""
