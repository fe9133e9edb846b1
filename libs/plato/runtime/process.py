"""Start and stop of a process: settings errors in one line, a signal asks to stop, tasks that die end the process."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import ctypes
import gc
import os
import resource
import signal
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from plato.api.names import EXIT_NOT_ALONE
from plato.runtime import logs
from plato.runtime.settings import NotAlone, Settings, SettingsError, load

_PR_SET_PDEATHSIG = 1

GC_AFTER = 20_000
"""New objects between two looks for garbage in cycles."""

CANNOT_START = 4
"""Exit code: a port, a folder or another thing of this machine is not as the settings say."""


class StartError(Exception):
    """This machine cannot do what the settings say: one line that names the setting and the way out."""


class PartEnded(RuntimeError):
    """A part of a process that works for as long as the process lives has ended by itself."""


async def forever(name: str, work: Coroutine[Any, Any, object]) -> NoReturn:
    """Runs a part that never ends by itself: raises PartEnded if it does, though it were by a CancelledError that nobody
    sent to this task (gRPC raises one from a call whose channel was closed). A TaskGroup takes such a child's end for a
    wish and goes on without it; with this it ends the process, and the supervisor starts a whole one."""
    try:
        await work
    except asyncio.CancelledError as e:
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        raise PartEnded(f"{name}: cancelled from within") from e
    raise PartEnded(f"{name}: it returned")


def die_with_parent(signal_number: int = signal.SIGKILL) -> None:
    """Asks the kernel to send `signal_number` when the parent ends, so that a killed supervisor leaves no orphans."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_PDEATHSIG, int(signal_number), 0, 0, 0)


async def stop_signal() -> None:
    """Returns at the first SIGTERM or SIGINT."""
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopped.set)
    await stopped.wait()


async def until_stopped(
    tasks: list[asyncio.Task[Any]], last: Callable[[], Coroutine[Any, Any, Any]] | None = None
) -> int:
    """Waits for a stop signal (returns 0) or for the end of any task (logs it, returns 1): a service never runs on with
    a part of it dead. A SettingsError or StartError of a task is raised: only that task could find it, after waiting.
    last: is done after the signal, while all tasks still run."""
    log = logs.get("process")
    waiter: asyncio.Task[Any] = asyncio.create_task(stop_signal())
    done, _ = await asyncio.wait([waiter, *tasks], return_when=asyncio.FIRST_COMPLETED)
    if done == {waiter} and last is not None:
        waiter = asyncio.create_task(last())
        done, _ = await asyncio.wait([waiter, *tasks], return_when=asyncio.FIRST_COMPLETED)
    code = 0
    words: BaseException | None = None
    for task in done - {waiter}:
        code = 1
        error = None if task.cancelled() else task.exception()
        if isinstance(error, (SettingsError, StartError)):
            words = error
            continue
        log.error("a task ended", task=task.get_name(), cancelled=task.cancelled(), exc_info=error)
    waiter.cancel()
    for task in tasks:
        task.cancel()
    for task in [waiter, *tasks]:
        with contextlib.suppress(asyncio.CancelledError, Exception):
            await task
    if words is not None:
        raise words
    return code


def own_machine() -> None:
    """What a process asks of its kernel at the start: as many open files as it may have, and, as a container's first
    process, that nobody waits for the orphans that fall to it. For services that start no children of their own."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):  # an unlimited one may be more than the kernel's own bound
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    if os.getpid() == 1:
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)


def _interrupted(number: int, frame: FrameType | None) -> None:
    """Ends a process that does not listen to its loop yet."""
    raise SystemExit(0)


def collect_rarely() -> None:
    """Has the garbage collector look for cycles after GC_AFTER new objects instead of 700, and never at what was imported.

    A batch makes thousands of objects that live for the batch, and next to no cycles: looking at them took an eighth of msg.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(GC_AFTER, 20, 20)


def run(name: str, main: Callable[[Settings], Coroutine[Any, Any, int]]) -> int:
    """Runs a service's main: parses --settings, loads, configures logs, runs. Returns the exit code.

    A SettingsError (2; NotAlone: EXIT_NOT_ALONE) and a StartError (CANNOT_START) are one line on standard error.
    """
    # A container's first process gets no signal that it has not asked for: without this, one before the loop is lost.
    signal.signal(signal.SIGTERM, _interrupted)
    own_machine()
    parser = argparse.ArgumentParser(prog=name)
    parser.add_argument("--settings", type=Path, default=None, help="settings file (default: ./plato.yaml)")
    arguments = parser.parse_args()
    try:
        settings = load(arguments.settings)
        logs.configure(settings.process.name or name, settings.log.level)
        collect_rarely()
        return asyncio.run(main(settings))
    except SettingsError as e:
        print(f"{name}: {e}", file=sys.stderr)
        return EXIT_NOT_ALONE if isinstance(e, NotAlone) else 2
    except StartError as e:
        print(f"{name}: {e}", file=sys.stderr)
        return CANNOT_START
    except KeyboardInterrupt:
        return 130
