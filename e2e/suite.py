"""`make e2e`: a real Kubernetes, Plato's images on it, every end-to-end test one after the other, and nothing left.

    the testbed comes up (or runs already, or PLATO_E2E_KUBECONFIG names another cluster)
    images are built and loaded
    pytest runs e2e/: what is about definitions first, the live run last
    the figures are printed; the testbed goes down again, whatever happened

Exit code: 0 all passed, 1 something failed, 2 this machine cannot run it, with the reason in words.

    --fast             the subset of each change: a live run with real pods, a scale, a roll, a drain
    PLATO_E2E_KEEP=1   the testbed stays up, with what failed in it
    PLATO_E2E_SHARED=1 the cluster is shared with others: nothing is done to nodes, only to our own pods
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Final

from e2e.frame import evidence
from e2e.testbed.layout import Layout, layout

ROOT: Final = Path(__file__).resolve().parents[1]
FIRST: Final = ("test_crds", "test_live_driver")
"""What everything after it stands on."""
LAST: Final = ("test_live_fast", "test_live")
"""The longest, and hardest on the machine."""
FAST: Final = ("test_live_fast",)
CANNOT: Final = 2


class CannotRun(Exception):
    """The suite cannot run here: says why, and what helps."""


class StepFailed(Exception):
    """Something that the tests stand on did not succeed: which."""


def main() -> int:
    """Entry point; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m e2e.suite", description="The end-to-end tests, with all set-up.")
    parser.add_argument("--fast", action="store_true", help="the subset that runs for each change")
    parser.add_argument("pytest", nargs="*", help="arguments for pytest instead of the usual files")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, _interrupt)
    began = time.monotonic()
    try:
        with cluster() as (kubeconfig, here):
            if here is not None:
                _step("images", [sys.executable, "-m", "e2e.images", "load"])
            nodes = here is not None and not os.environ.get("PLATO_E2E_SHARED")
            words = arguments.pytest or [str(path) for path in files(arguments.fast, nodes)]
            code = tests(kubeconfig, words)
    except CannotRun as error:
        print(f"e2e: {error}", file=sys.stderr)
        return CANNOT
    except StepFailed as error:
        print(f"e2e: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("e2e: interrupted", file=sys.stderr)
        return 130
    print(f"e2e: {'passed' if code == 0 else 'FAILED'} in {time.monotonic() - began:.0f} s", flush=True)
    return code


def files(fast: bool, nodes: bool) -> list[Path]:
    """The test files in the order in which they run. nodes: they may be cut and killed; the long live run needs that, and
    holds all that the fast one does."""
    found = {path.stem: path for path in sorted((ROOT / "e2e").glob("test_*.py"))}
    if fast:
        return [found[name] for name in FAST]
    middle = [name for name in found if name not in (*FIRST, *LAST)]
    last = [name for name in LAST if not nodes or name not in FAST]
    return [found[name] for name in (*FIRST, *middle, *last) if name in found]


@contextmanager
def cluster() -> Iterator[tuple[Path, Layout | None]]:
    """(kubeconfig, the testbed or None): the one that is named, the testbed that runs, or one that goes down afterwards.

    Raises CannotRun.
    """
    named = os.environ.get("PLATO_E2E_KUBECONFIG")
    here = layout()
    if named and (not here.marker.exists() or Path(named).resolve() != here.kubeconfig.resolve()):
        if not Path(named).is_file():
            raise CannotRun(f"PLATO_E2E_KUBECONFIG names {named}, and there is no such file")
        if shutil.which("kubectl") is None or shutil.which("helm") is None:
            raise CannotRun("kubectl and helm have to be on the path for a cluster that is not the testbed")
        yield Path(named), None
        return
    if os.geteuid() != 0:
        raise CannotRun(
            "it starts a Kubernetes on this machine, which only root can: run `sudo make e2e`, or name a cluster of yours "
            "with PLATO_E2E_KUBECONFIG (docs/e2e.md)"
        )
    if here.marker.exists() and _quietly("status"):
        print("e2e: the testbed runs already; it is used, and stays", flush=True)
        yield here.kubeconfig, here
        return
    try:
        _step("testbed", [sys.executable, "-m", "e2e.testbed", "up"])
        yield here.kubeconfig, here
    finally:
        if os.environ.get("PLATO_E2E_KEEP"):
            print("e2e: the testbed stays (PLATO_E2E_KEEP); `make testbed-down` ends it", flush=True)
        elif here.marker.exists():
            with _undisturbed():
                _run([sys.executable, "-m", "e2e.testbed", "down"])


def tests(kubeconfig: Path, words: Sequence[str]) -> int:
    """Runs pytest; prints the figures that the tests kept. Returns its exit code."""
    os.environ.setdefault("PLATO_E2E_ARTIFACTS", str(evidence.folder_of("").resolve()))
    kept = Path(os.environ["PLATO_E2E_ARTIFACTS"])
    for old in kept.iterdir():
        shutil.rmtree(old) if old.is_dir() else old.unlink()
    code = _run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-v", "--durations=15", *words],
        env={**os.environ, "PLATO_E2E_KUBECONFIG": str(kubeconfig)},
    )
    for report in sorted(kept.glob("*/report.txt")):
        print(f"\n{report.parent.name}:\n{report.read_text()}", flush=True)
    print(f"evidence and figures are in {kept}", flush=True)
    return min(code, 1)


def _step(name: str, words: Sequence[str]) -> None:
    """A command without which the rest makes no sense."""
    began = time.monotonic()
    print(f"e2e: {name} …", flush=True)
    code = _run(words)
    if code == CANNOT:
        raise CannotRun(f"{name}: this machine cannot do it; see above")
    if code != 0:
        raise StepFailed(f"{name} did not succeed; see above")
    print(f"e2e: {name} took {time.monotonic() - began:.0f} s", flush=True)


def _run(words: Sequence[str], env: dict[str, str] | None = None) -> int:
    """Runs it to its end, also when we are interrupted meanwhile: it gets the same signal and cleans up."""
    process = subprocess.Popen(list(words), cwd=ROOT, env=env, stdin=subprocess.DEVNULL)
    try:
        return process.wait()
    except KeyboardInterrupt:
        process.send_signal(signal.SIGINT)
        process.wait()
        raise


def _quietly(command: str) -> bool:
    words = [sys.executable, "-m", "e2e.testbed", command]
    return subprocess.run(words, cwd=ROOT, capture_output=True, check=False).returncode == 0


def _interrupt(_: int, __: FrameType | None) -> None:
    raise KeyboardInterrupt


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Signals wait until the tear-down is done."""
    before = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


if __name__ == "__main__":
    sys.exit(main())
