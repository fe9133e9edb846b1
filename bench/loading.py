"""Runs the load generator on a subject and counts what it cost: work per CPU second of the subject's processes."""

from __future__ import annotations

import contextlib
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from bench.processes import BenchError, Pids, cpus_s, line_of, running, tell
from bench.programs import Programs
from bench.subjects import Subject

Process = subprocess.Popen[str]


@dataclass(frozen=True)
class Options:
    """How long and how much. `quick` is for trying the harness: its figures mean nothing."""

    rounds: int = 5
    seconds: float = 1.5
    connections: int = 1_000
    payload_bytes: int = 100
    fan_out_connections: int = 10_000
    fan_out_bytes: int = 200
    storm_connections: int = 10_000
    storm_window: int = 256
    people: int = 2_000
    storm_people: int = 5_000
    bus: str = "postgres"


@dataclass(frozen=True)
class Run:
    """One run of the generator: how much work was done in how many seconds, and the CPU seconds of each part."""

    count: int
    wall_s: float
    cpu_s: dict[str, float]

    @property
    def per_cpu_s(self) -> float:
        """Work per CPU second of all parts together. Raises BenchError when it was too short to tell."""
        spent_s = sum(self.cpu_s.values())
        if spent_s <= 0 or self.count == 0:
            raise BenchError("the run was too short: no CPU time was seen")
        return self.count / spent_s

    def part_us(self, part: str) -> float:
        """CPU of a part per unit of work, µs."""
        return self.cpu_s[part] / self.count * 1e6


def run(programs: Programs, subject: Subject, mode: str, *arguments: object) -> Run:
    """One run, from its connections to their end."""
    with running([programs.c["load"], subject.dialect, str(subject.port), mode, *map(str, arguments)]) as load:
        expect(load, "ready")
        return timed(load, subject.pids)


def expect(program: Process, word: str) -> list[str]:
    """The words behind `word` of the next line. Raises BenchError when it says something else."""
    line = line_of(program)
    first, *rest = line.split()
    if first != word:
        raise BenchError(f"{word!r} was awaited, {line!r} came")
    return rest


def timed(load: Process, pids: Pids) -> Run:
    """Lets a generator that is ready begin, and waits until it is done."""
    before = cpus_s(pids)
    tell(load)
    count, wall_s = expect(load, "done")
    after = cpus_s(pids)
    tell(load)
    load.wait(30)
    return Run(int(count), float(wall_s), {part: after[part] - before[part] for part in pids})


@contextlib.contextmanager
def folder() -> Iterator[Path]:
    """A folder for sockets and settings: short, since a Unix socket's path is."""
    with tempfile.TemporaryDirectory(prefix="plato-bench-") as made:
        yield Path(made)
