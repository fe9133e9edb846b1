"""Starting and ending processes by pid files, and waiting for conditions.

A pid file holds the pid and the process's start time in kernel ticks, so that a number given anew to a stranger is never
taken for ours. What our processes start in turn (containerd's shims) has no pid file; it carries layout.MARK in its
environment.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from e2e.testbed.layout import MARK, Layout, TestbedError

POLL_S: Final = 0.05
PATH: Final = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
"""Search path of the started processes: containerd looks for runc and its shim, kubelet for mount and nft."""


def run(command: Sequence[str | Path], *, quiet: bool = False, stdin: str | None = None) -> str:
    """Run to the end and return the output; raises TestbedError with the program's own words. `quiet` accepts failure."""
    words = [str(word) for word in command]
    done = subprocess.run(words, input=stdin, capture_output=True, text=True, check=False)
    if done.returncode and not quiet:
        raise TestbedError(f"{' '.join(words)} failed: {(done.stderr or done.stdout).strip()[-1500:]}")
    return done.stdout


def as_flags(values: Mapping[str, object]) -> list[str]:
    """`{"name": value}` as `--name=value` words, in order."""
    return [f"--{name}={value}" for name, value in values.items()]


def until(
    condition: Callable[[], bool], within_s: float, what: str, *, log: Path | None = None, poll_s: float = POLL_S
) -> None:
    """Return once the condition holds; after `within_s` raise TestbedError that names it and shows the log's end."""
    deadline = time.monotonic() + within_s
    while not condition():
        if time.monotonic() > deadline:
            raise TestbedError(f"{what}: not within {within_s:.0f} s{_tail(log)}")
        time.sleep(poll_s)


def _tail(log: Path | None) -> str:
    if log is None or not log.exists():
        return ""
    lines = log.read_text(errors="replace").splitlines()[-8:]
    return f"; {log} ends with\n" + "\n".join(f"    {line[:400]}" for line in lines)


def _started_at(pid: int) -> int | None:
    """The process's start in kernel ticks; None when it is gone or only waits to be reaped."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] in "ZX" else int(fields[19])


@dataclass(frozen=True)
class Daemon:
    """A long-running process of the testbed, known by its name: pid file and log bear it."""

    layout: Layout
    name: str

    @property
    def log(self) -> Path:
        """Where its output goes; each start appends."""
        return self.layout.logs / f"{self.name}.log"

    @property
    def _file(self) -> Path:
        return self.layout.pids / self.name

    @property
    def pid(self) -> int | None:
        """The pid, or None when it does not run."""
        try:
            pid, started_at = map(int, self._file.read_text().split())
        except (FileNotFoundError, ValueError):
            return None
        with contextlib.suppress(ChildProcessError):  # not our child, the usual case
            os.waitpid(pid, os.WNOHANG)
        return pid if _started_at(pid) == started_at else None

    def start(self, command: Sequence[str | Path]) -> None:
        """Start it in a session of its own, detached; raises TestbedError if it ends at once."""
        words = [str(word) for word in command]
        with self.log.open("ab") as log:
            child = subprocess.Popen(
                words,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd="/",
                env={"PATH": PATH, "HOME": str(self.layout.state), MARK: str(self.layout.state)},
                start_new_session=True,
            )
        started_at = _started_at(child.pid)
        child.returncode = 0  # it outlives us on purpose: Popen must not warn about that
        if started_at is None:
            raise TestbedError(f"{self.name} ended at once{_tail(self.log)}")
        self._file.write_text(f"{child.pid} {started_at}\n")

    def wait(self, condition: Callable[[], bool], within_s: float, what: str) -> None:
        """As `until`, but give up as soon as the process has ended."""

        def answered() -> bool:
            if condition():
                return True
            if self.pid is None:
                raise TestbedError(f"{self.name} has ended{_tail(self.log)}")
            return False

        until(answered, within_s, what, log=self.log)

    def signal(self, number: signal.Signals) -> None:
        """Send it a signal; nothing happens when it does not run."""
        pid = self.pid
        if pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def stop(self, grace_s: float = 5.0) -> None:
        """SIGTERM, then after the grace SIGKILL; returns when it is gone."""
        if grace_s > 0:
            self.signal(signal.SIGTERM)
            deadline = time.monotonic() + grace_s
            while self.pid is not None and time.monotonic() < deadline:
                time.sleep(POLL_S)
        self.signal(signal.SIGKILL)
        until(lambda: self.pid is None, 10, f"{self.name} to end")
        self._file.unlink(missing_ok=True)


def daemons(layout: Layout) -> list[Daemon]:
    """All that have a pid file, running or not, in order of name."""
    if not layout.pids.is_dir():
        return []
    return [Daemon(layout, file.name) for file in sorted(layout.pids.iterdir())]


def marked(layout: Layout) -> set[int]:
    """Pids of all processes that this state folder's testbed started, directly or not."""
    mark = f"{MARK}={layout.state}".encode()
    found: set[int] = set()
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        with contextlib.suppress(OSError):  # ended meanwhile
            if mark in (entry / "environ").read_bytes().split(b"\0") and _started_at(int(entry.name)) is not None:
                found.add(int(entry.name))
    return found - {os.getpid(), os.getppid()}


def kill_all(pids: Iterable[int]) -> None:
    """SIGKILL each; those that are gone are passed over."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
