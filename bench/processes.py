"""What the kernel says of a process, and children that end with the measurement.

CPU time is user and system time of all its threads, in steps of 10 ms. On loopback the sender's system calls do the
receiver's TCP work too, for every server alike, so ratios hold and absolutes are loopback's.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO

TICK_S = 1 / os.sysconf("SC_CLK_TCK")

Pids = Mapping[str, Sequence[int]]
"""Part of a subject ("worker", "link") → its processes."""


class BenchError(Exception):
    """A measurement cannot be taken; says why, for a person."""


def cpu_s(pid: int) -> float:
    """User and system time of a process, seconds."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(") ", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) * TICK_S


def tree_cpu_s(pid: int) -> float:
    """The same of a process, of all below it, and of those of them that ended. It never falls."""
    spent_s = 0.0
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(") ", 1)[1].split()
        spent_s = sum(map(int, fields[11:15])) * TICK_S
        for task in Path(f"/proc/{pid}/task").iterdir():
            spent_s += sum(tree_cpu_s(int(child)) for child in (task / "children").read_text().split())
    return spent_s


def cpus_s(pids: Pids) -> dict[str, float]:
    """Per part the CPU time of its processes, seconds."""
    return {part: sum(cpu_s(pid) for pid in some) for part, some in pids.items()}


def anonymous_bytes(pid: int) -> int:
    """Memory that the process holds for itself: anonymous pages, swapped ones too. What it maps of files is not counted."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    wanted = ("Anonymous:", "Swap:")
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith(wanted))


@contextlib.contextmanager
def running(
    command: Sequence[str | Path],
    output: IO[bytes] | None = None,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
) -> Iterator[subprocess.Popen[str]]:
    """A child with pipes for its input and output (or the output into a file), killed at the end of the block."""
    process = subprocess.Popen(
        [str(word) for word in command],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE if output is None else output,
        stderr=None if output is None else subprocess.STDOUT,
        text=True,
        env=env,
        cwd=cwd,
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()


def line_of(process: subprocess.Popen[str]) -> str:
    """The next line that it prints. Raises BenchError when it ended instead."""
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise BenchError(f"{process.args!r} ended with {process.wait()}")  # its own words are on stderr
    return line.strip()


def tell(process: subprocess.Popen[str], line: str = "") -> None:
    """Writes a line to its input."""
    assert process.stdin is not None
    process.stdin.write(f"{line}\n")
    process.stdin.flush()
