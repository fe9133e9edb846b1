"""`make test`: every test, in two pytest runs side by side, so that both cores have something to do while one waits.

    APART             the faults, which wait most of the time (for kills, time-outs, repairs), and as much more as makes both
                      runs end together
    everything else   short and busy
    OTHERWISE         left out: make targets of their own run them
    PRODUCT           what `make test-product` runs (`run_tests.py --product`), in two runs as well
    OPERATOR          what `make test-operator` runs (`run_tests.py --operator`), likewise

The first run's output is shown live, the second's when it has ended; the last line adds the two up as pytest would say it.
With arguments one pytest gets them all. Exit code 0 when both runs passed. What is started ends with this process.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import IO

ROOT = Path(__file__).resolve().parent.parent
_OF_MSG = (
    *("again", "api", "api_port", "attachments", "changes", "devices", "feed", "friends"),
    *("gates", "lists", "operations", "retention", "search", "userstate"),
)
PRODUCT = (
    "tests/product",
    "tests/contract/test_contract_blobs.py",
    *(f"images/msg/tests/test_msg_{noun}.py" for noun in _OF_MSG),
    *(f"libs/plato/tests/test_{noun}.py" for noun in ("chat_product", "client_product", "client_shared", "local_web")),
)
"""Groups to chat page: most of it on whole clusters and on a real database."""
PRODUCT_APART = ("tests/product/test_[a-o]*.py", "tests/product/test_r*.py")
"""Those of them that wait most of the time."""
OPERATOR = (
    "operator/tests",
    *(f"libs/plato/tests/test_{noun}.py" for noun in ("kubectl_plugin", "topology_kube")),
    *(f"tests/faults/test_{noun}.py" for noun in ("drain", "messaging_dispatch", "slot_moves")),
)
"""The operator's planner and edge against a played API server; and on real clusters what it orders, moves of slots and
drains, and where clients are sent meanwhile."""
OPERATOR_APART = (
    "operator/tests",
    *(f"libs/plato/tests/test_{noun}.py" for noun in ("kubectl_plugin", "topology_kube")),
)
OTHERWISE = ("tests/kafka", *PRODUCT, *OPERATOR)
"""What `make test-kafka`, `make test-product` and `make test-operator` run."""
APART = (("tests/faults", "libs/plato/tests/test_local_supervisor.py", "images/gateway/tests"),)
"""Paths, or patterns of them; a later list leaves out what an earlier one has."""


def lists() -> list[list[str]]:
    """The arguments of each run, the busy one first."""
    taken: list[str] = []
    runs = []
    for patterns in APART:
        here = [str(p.relative_to(ROOT)) for pattern in patterns for p in sorted(ROOT.glob(pattern))]
        if here:  # without a path pytest would run everything
            ignored = [path for path in (*taken, *OTHERWISE) if any(path.startswith(f"{own}/") for own in here)]
            runs.append(["-p", "no:cacheprovider", *(f"--ignore={path}" for path in ignored), *here])
        taken += here
    return [[f"--ignore={path}" for path in (*OTHERWISE, *taken)], *runs]


def halves(of: Sequence[str], apart: Sequence[str]) -> list[list[str]]:
    """`lists`, of a group's tests: `of` without `apart`, and `apart`."""
    waiting = [str(p.relative_to(ROOT)) for pattern in apart for p in sorted(ROOT.glob(pattern))]
    busy = [path for path in of if path not in waiting]
    return [[*busy, *(f"--ignore={path}" for path in waiting)], ["-p", "no:cacheprovider", *waiting]]


GROUPS = {"--product": (PRODUCT, PRODUCT_APART), "--operator": (OPERATOR, OPERATOR_APART)}


SLOWEST = ("--durations=12", "--durations-min=2.0")

_COUNTS = re.compile(r"(\d+) (passed|failed|errors?|skipped)")


def summary(output: str) -> Counter[str]:
    """What pytest's last line counts, e.g. {"passed": 12, "failed": 1}; {} where it did not come to one."""
    lines = [line for line in output.splitlines() if re.search(r" in \d+\.\d+s", line)]
    counts: Counter[str] = Counter()
    for number, word in _COUNTS.findall(lines[-1]) if lines else ():
        counts["error" if word.startswith("error") else word] += int(number)
    return counts


def pytest(arguments: Sequence[str], output: IO[str] | int | None) -> subprocess.Popen[str]:
    """Starts one run."""
    command = [sys.executable, "-m", "pytest", *arguments]
    return subprocess.Popen(
        command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, text=True
    )


def main(arguments: Sequence[str]) -> int:
    """Entry point; returns the exit code."""
    group = GROUPS.get(arguments[0]) if arguments else None
    arguments = arguments[group is not None :]
    if arguments:
        os.chdir(ROOT)
        os.execv(sys.executable, [sys.executable, "-m", "pytest", *arguments])
    began = time.monotonic()
    runs: list[subprocess.Popen[str]] = []

    def stop(number: int, _: object) -> None:
        for run in runs:
            run.send_signal(number)
        sys.exit(128 + number)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stop)
    counts: Counter[str] = Counter()
    with ExitStack() as files:
        busy, *waiting = halves(*group) if group else lists()
        rests = [files.enter_context(tempfile.TemporaryFile("w+", encoding="utf-8")) for _ in waiting]
        runs.append(pytest([*SLOWEST, *busy], subprocess.PIPE))
        runs.extend(pytest([*SLOWEST, *given], rest) for given, rest in zip(waiting, rests, strict=True))
        shown = []
        live = runs[0].stdout
        assert live is not None
        with live:
            for line in live:
                print(line, end="", flush=True)
                shown.append(line)
        codes = [run.wait() for run in runs]
        outputs = ["".join(shown)]
        for rest in rests:
            rest.seek(0)
            outputs.append(rest.read())
            print(outputs[-1], end="")
    for output in outputs:
        counts += summary(output)
    words = [f"{counts[word]} {word}" for word in ("failed", "passed", "skipped", "error") if counts[word]]
    print(f"===== {', '.join(words) or 'no result'} in {time.monotonic() - began:.2f}s =====")
    return max(codes)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
