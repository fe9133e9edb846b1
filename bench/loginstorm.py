"""loginstorm: a whole gateway dies under its clients; how long until all are back through the other one.

Pod, workers and link are killed at once, and the supervisor stands still, as a node that is gone starts nothing again. Each
client then does what docs/protocol.md says: waits a random part of the told delay, asks ipconfig for the list, resumes.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator

from plato.local.cluster import LocalCluster

from bench.cluster import answer, cluster, crowd, descendants, order, parts, spent_s
from bench.loading import Options, folder
from bench.programs import Programs
from bench.report import Figure, Result

WITHIN_S = 120


@contextlib.contextmanager
def _standing_still(made: LocalCluster) -> Iterator[None]:
    pid = int(made.status()["supervisor_pid"])
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def measure(programs: Programs, options: Options) -> Result:
    """Runs it: two deaths, each of a fresh cluster, as a second one would meet a cluster that heals."""
    result = Result(
        "loginstorm", f"login storm: {options.storm_people:,} clients after their gateway's death, bus {options.bus}"
    )
    backs: list[list[float]] = []
    costs: dict[str, list[float]] = {}
    settings = {"bus.type": options.bus, "local.gateways": 2, "local.shards": 2}
    for _ in range(min(2, options.rounds)):
        with (
            folder() as where,
            cluster(where, settings) as made,
            crowd(programs, made, where, options.storm_people) as people,
        ):
            order(people, "enter", "ready")
            pids = {k: [p for p in v if p not in dead(made)] for k, v in parts(made).items()}
            before = spent_s(pids)
            with _standing_still(made):
                order(people, f"fall {WITHIN_S}", "waiting")
                for pid in dead(made):
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                backs.append(answer(people, "back"))
            after = spent_s(pids)
            for part in pids:
                costs.setdefault(part, []).append((after[part] - before[part]) / options.storm_people * 1e3)
    fallen = tuple(b[0] for b in backs)
    result.figures += [
        Figure("clients that fell", "", fallen),
        Figure("all are back after", "s", tuple(b[1] for b in backs)),
        Figure("  logins", "per s", tuple(b[0] / b[1] for b in backs)),
        Figure("ipconfig, p50", "ms", tuple(b[2] for b in backs)),
        Figure("ipconfig, p99", "ms", tuple(b[3] for b in backs)),
        Figure("ipconfig, longest", "ms", tuple(b[4] for b in backs)),
        Figure("  not answered within 2 s", "clients", tuple(b[6] for b in backs)),
        Figure("asked to wait", "times", tuple(b[5] for b in backs)),
        *(Figure(f"  {part}", "ms CPU/login", tuple(ms)) for part, ms in costs.items()),
    ]
    delay_ms = 1_000
    result.notes.append(
        f"of it up to {delay_ms / 1000:.0f} s is the delay that each client draws (state.reconnect_delay_ms)"
    )
    result.notes.append("two rounds, not five: each is a cluster of its own")
    return result


def dead(made: LocalCluster) -> list[int]:
    """The processes of edge-0."""
    return [p for pid in made.pids("edge-0") for p in descendants(pid)]
