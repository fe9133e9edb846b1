"""The gateway's entry: `python -m plato_gateway [--settings F]` is the pod; it starts itself as worker, link, poller.

Roles import what they need only: a worker loads neither gRPC nor protobuf.
"""

from __future__ import annotations

import plato.runtime.early  # isort: skip  # noqa: F401  # first, and for what its import does

import argparse
import asyncio
import contextlib
import os
import signal
import sys
from pathlib import Path

from plato.runtime import logs
from plato.runtime.process import die_with_parent
from plato.runtime.settings import Settings, SettingsError, load

from . import pod, preflight


def main() -> int:
    """Runs the role that the arguments name. Returns the exit code: 0; 1 a part failed; 2 settings; 3 cannot start here."""
    parser = argparse.ArgumentParser(prog="plato-gateway")
    parser.add_argument("--settings", type=Path, default=None, help="settings file (default: ./plato.yaml)")
    parser.add_argument("--role", choices=("pod", "worker", "link", "poller"), default="pod", help=argparse.SUPPRESS)
    parser.add_argument("--index", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--pod-pid", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--words-fd", type=int, default=-1, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.pod_pid:
        die_with_parent()
        if os.getppid() != arguments.pod_pid:
            return 1  # the pod died before the kernel was asked to tell
        signal.pthread_sigmask(signal.SIG_SETMASK, [])
    code, words = 0, ""
    try:
        code = _role(arguments)
        words = "a part of it ended; its log says why" if code else ""
    except SettingsError as e:
        code, words = 2, str(e)
        print(f"plato-gateway: {e}", file=sys.stderr)
    except preflight.StartError as e:
        code, words = preflight.CANNOT_START, str(e)
        print(f"plato-gateway: {e}", file=sys.stderr)
    except KeyboardInterrupt:
        code = 130
    except Exception as e:
        words = f"{type(e).__name__}: {e}"
        raise
    finally:
        if words and arguments.words_fd >= 0:
            with contextlib.suppress(OSError):  # the pod is gone
                os.write(arguments.words_fd, words.encode()[: pod.WORDS_BYTES])
    return code


def _role(arguments: argparse.Namespace) -> int:
    """Runs it. Raises SettingsError and StartError."""
    settings = load(arguments.settings)
    logs.configure(settings.process.name or "plato-gateway", settings.log.level)
    if arguments.role == "worker":
        from . import worker

        return worker.run(settings, arguments.index)
    if arguments.role == "poller":
        from . import longpoll

        return asyncio.run(longpoll.run(settings))
    if arguments.role == "link":
        return asyncio.run(_run_link(settings, arguments.pod_pid))
    preflight.check(settings.gateway)
    given = ["--settings", str(arguments.settings)] if arguments.settings else []
    return pod.Pod(settings, given).run()


async def _run_link(settings: Settings, pod_pid: int) -> int:
    from plato.adapters.topology import topology_source
    from plato.runtime.process import collect_rarely, forever, until_stopped

    from .link import Link

    def tell_pod() -> None:
        if os.getppid() == pod_pid:
            os.kill(pod_pid, signal.SIGUSR1)

    collect_rarely()
    topology = topology_source(settings.topology)
    link = Link(settings, topology, tell_pod)
    try:
        await link.start()
        parts = {"topology": topology.run(), "link": link.run()}
        return await until_stopped(
            [asyncio.create_task(forever(name, part), name=name) for name, part in parts.items()]
        )
    finally:
        await link.stop()


if __name__ == "__main__":
    sys.exit(main())
