"""The gateway's parent process: starts the workers, the link and the poller, starts again what dies, and ends all of them
with itself.

It does nothing else, so that it has no reason to die. A child that ran for SETTLED_S is started again at once, one that
keeps dying after a delay that doubles up to MAX_DELAY_S. A child that says at its first start that it cannot (exit code
2 or 3: settings, ports), however long that took it, ends the pod with that code. Why it ended a child says in one line
through a pipe of its own. `pids.json` in gateway.run_dir names the processes; it is replaced whole at each change.

SIGTERM or SIGINT ends the pod; with gateway.drain_on_term the link first moves the clients away, and says by SIGUSR1 when
that is over (term.py). A second one, or a link that says nothing long after the deadline, ends it at once.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from plato.runtime import logs
from plato.runtime.settings import Settings

from . import term
from .preflight import CANNOT_START

SETTLED_S: Final = 5.0
MIN_DELAY_S: Final = 0.1
MAX_DELAY_S: Final = 2.0
WORKERS_STOP_S: Final = 2.0
LINK_STOP_S: Final = 1.5
LATE_S: Final = 5.0
"""So long after the deadline of its drain the pod waits for the link's word."""

WORDS_BYTES: Final = 2_048
"""Of what a child says at its end; a pipe takes as much at once."""

_FINAL_CODES = (2, CANNOT_START)


@dataclass(slots=True)
class _Child:
    """One process of the pod, its command, and when it may start again."""

    role: str
    command: list[str]
    process: subprocess.Popen[bytes] | None = None
    started_s: float = 0.0
    start_at_s: float = 0.0
    delay_s: float = MIN_DELAY_S
    ended_code: int | None = None
    """Exit code of its last end, as subprocess counts it."""
    words_fd: int = -1
    """Where the running one says why it ends; -1: none runs."""
    words: str = ""
    """Why the last one ended, by its own words; "": it said nothing."""
    settled: bool = False
    """One of it got through its start: from then on nothing that it says ends the pod, whose sockets live."""


class Pod:
    """The children of one gateway. `run` returns the exit code."""

    def __init__(self, settings: Settings, arguments: Sequence[str]) -> None:
        """`arguments` are those that give a child its settings."""
        self._run_dir = settings.gateway.run_dir
        self._drains = settings.gateway.drain_on_term
        self._drain_s = settings.gateway.drain_deadline_s + LATE_S
        self._end_s: float | None = None
        """SIGTERM came: until then the drain may take."""
        self._log = logs.get("pod")
        self._pids_stale = False
        """pids.json could not be written; it is tried again each second."""
        base = [sys.executable, "-m", "plato_gateway", *arguments, "--pod-pid", str(os.getpid())]
        self._workers = [
            _Child(f"worker {k}", [*base, "--role", "worker", "--index", str(k)])
            for k in range(settings.gateway.workers)
        ]
        self._link = _Child("link", [*base, "--role", "link"])
        self._others = [self._link]
        """All but the workers; they end after them."""
        if settings.gateway.poll_port:
            self._others.append(_Child("poller", [*base, "--role", "poller"]))

    def run(self) -> int:
        """Keeps the children alive until SIGTERM or SIGINT; ends them; returns the exit code."""
        wanted = {signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGUSR1}
        # Blocked and taken one by one: nothing is lost between looking and waiting. Children unblock them (__main__).
        signal.pthread_sigmask(signal.SIG_BLOCK, wanted)
        code = 0
        term.forget(self._run_dir)
        while True:
            self._start_due()
            if self._pids_stale:
                self._write_pids()
            taken = signal.sigtimedwait(wanted, self._wait_s())
            if self._ends(taken.si_signo if taken is not None else 0):
                break
            final = self._reap()
            if final:
                code = final
                break
        self._stop()
        return code

    def _ends(self, number: int) -> bool:
        """Whether the pod ends now. number: of the signal that came, or 0."""
        if number in (signal.SIGTERM, signal.SIGINT):
            if self._end_s is not None or not self._drains:
                return True
            now_s = time.monotonic()
            try:
                term.ask(self._run_dir, int(now_s * 1000))
            except OSError as e:
                self._log.error("the link cannot be asked to drain: the clients are closed", error=str(e))
                return True
            self._end_s = now_s + self._drain_s
            self._log.info("asked to end: the clients are moved away first", at_most_s=self._drain_s)
        if self._end_s is None:
            return False
        return number == signal.SIGUSR1 or time.monotonic() >= self._end_s

    def _children(self) -> list[_Child]:
        return [*self._others, *self._workers]

    def _wait_s(self) -> float:
        now_s = time.monotonic()
        due = [c.start_at_s - now_s for c in self._children() if c.process is None]
        return max(0.01, min([1.0, *due]))

    def _start_due(self) -> None:
        started = False
        for child in self._children():
            if child.process is None and time.monotonic() >= child.start_at_s:
                child.process = _spawn(child)
                child.started_s = time.monotonic()
                started = True
        if started:
            self._write_pids()

    def _reap(self) -> int:
        """Looks which children ended; returns an exit code that ends the pod, else 0."""
        ended = False
        for child in self._children():
            if child.process is None or child.process.poll() is None:
                continue
            code, child.process, ended = child.process.returncode, None, True
            child.ended_code = code
            child.words, child.words_fd = _last_words(child.words_fd), -1
            now_s = time.monotonic()
            # These codes are of a start alone, and a start may be slow: how long it ran says nothing then.
            if code in _FINAL_CODES and not child.settled:
                self._log.error("cannot start", role=child.role, code=code, error=child.words)
                return code
            if now_s - child.started_s >= SETTLED_S:
                child.settled = True
            if now_s - child.started_s >= SETTLED_S:
                child.delay_s = MIN_DELAY_S
                child.start_at_s = now_s
            else:
                # The first death of a young process is answered at once too: something may have killed it.
                child.start_at_s = now_s if child.delay_s == MIN_DELAY_S else now_s + child.delay_s
                child.delay_s = min(2 * child.delay_s, MAX_DELAY_S)
            self._log.warning("a process of the gateway ended", role=child.role, code=code, reason=child.words)
        if ended:
            self._write_pids()
        self._bury_orphans()
        return 0

    def _bury_orphans(self) -> None:
        """As a container's first process: what others left to it ended, and nobody else will ask how."""
        own = {c.process.pid for c in self._children() if c.process is not None}
        while True:
            try:
                ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                return
            if ended is None or ended.si_pid in own:
                return  # a child of ours that ended since the look above: the next look takes it, and goes on here
            with contextlib.suppress(ChildProcessError):
                os.waitpid(ended.si_pid, 0)

    def _stop(self) -> None:
        """Workers first: their last words go through the link to the shards, and through the poller to its clients."""
        self._end(self._workers, WORKERS_STOP_S)
        self._end(self._others, LINK_STOP_S)
        (self._run_dir / "pids.json").unlink(missing_ok=True)

    def _end(self, children: list[_Child], timeout_s: float) -> None:
        alive = [c.process for c in children if c.process is not None]
        for process in alive:
            process.terminate()
        end_s = time.monotonic() + timeout_s
        for process in alive:
            try:
                process.wait(max(0.0, end_s - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def _write_pids(self) -> None:
        try:
            write_pids(
                self._run_dir,
                os.getpid(),
                {c.role: c.process.pid if c.process is not None else 0 for c in self._others},
                [c.process.pid if c.process is not None else 0 for c in self._workers],
                {c.role.replace(" ", "-"): c.ended_code for c in self._children() if c.ended_code is not None},
                {c.role.replace(" ", "-"): c.words for c in self._children() if c.words},
            )
            self._pids_stale = False
        except OSError as e:  # the file is for display: a full disk must not cost the sockets
            if not self._pids_stale:
                self._log.warning("pids.json cannot be written", error=str(e))
            self._pids_stale = True


def _spawn(child: _Child) -> subprocess.Popen[bytes]:
    """A process group of its own: Ctrl-C in a terminal asks the pod, which asks its children in order."""
    child.words_fd, its_fd = os.pipe()
    os.set_blocking(child.words_fd, False)
    try:
        return subprocess.Popen([*child.command, "--words-fd", str(its_fd)], process_group=0, pass_fds=(its_fd,))
    finally:
        os.close(its_fd)


def _last_words(fd: int) -> str:
    """What an ended child said; the pipe is closed."""
    try:
        return os.read(fd, WORDS_BYTES).decode(errors="replace").strip()
    except OSError:
        return ""
    finally:
        os.close(fd)


def write_pids(
    run_dir: Path, pod: int, others: dict[str, int], workers: list[int], ended: dict[str, int], words: dict[str, str]
) -> None:
    """Replaces <run_dir>/pids.json: {"pod": pid, "link": pid, "poller": pid, "workers": [pid, …], "ended": {"link": -9},
    "words": {"worker-1": "why"}}; pid 0: not running at the moment; ended and words: exit code of the last end, of those
    that ended, and why, of those that said it. others: link and poller."""
    fresh = run_dir / "pids.json.new"
    said = {"pod": pod, **others, "workers": workers, "ended": ended, "words": words}
    fresh.write_text(json.dumps(said) + "\n", encoding="utf-8")
    fresh.replace(run_dir / "pids.json")
