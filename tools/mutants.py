"""Runs the mutants: proves that each rule's test fails when the rule is broken.

A mutant is a unified diff in tests/mutants/ with a header:

    # rule: R1
    # breaks: state answers "duplicate" for what it only remembers
    # test: images/state/tests/test_state_uplink.py::test_r1_only_msg_decides

In order: copy the tracked files to a temporary folder, run every named test there unpatched (all must pass), then per mutant
apply the patch, run its tests with PYTHONPATH at the copy, take the patch back. A mutant is killed when a named test fails;
an error while collecting or in a fixture proves nothing, and a patch that no longer applies is an error of its own.
Exit code 0 when all are killed. Memory and disk: one copy per job.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
import xml.etree.ElementTree as ET
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

ROOT = Path(__file__).resolve().parent.parent
RULES = tuple(f"R{n}" for n in range(1, 11))
_TEST_TIMEOUT_S = 120
_RUN_TIMEOUT_S = 420


class MutantError(Exception):
    """A mutant that cannot be judged; says why in one line."""


@dataclass(frozen=True, slots=True)
class Mutant:
    """One patch: the rule it breaks, how, and the pytest ids (relative to the root) of which one must fail."""

    path: Path
    rule: str
    breaks: str
    tests: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Verdict:
    """How a run of some tests ended: ids by result, in pytest's own words."""

    passed: tuple[str, ...]
    failed: tuple[str, ...]
    broken: tuple[str, ...]
    output: str


def read(path: Path) -> Mutant:
    """Reads a patch and its header. Raises MutantError."""
    fields: dict[str, list[str]] = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        if not line.startswith("#"):
            break
        if match := re.match(r"# (rule|breaks|test): (.+)$", line):
            fields.setdefault(match[1], []).append(match[2].strip())
    for name in ("rule", "breaks", "test"):
        if name not in fields:
            raise MutantError(f"{path.name}: the header lacks `# {name}: …`")
    rule = fields["rule"][0]
    if rule not in RULES or not path.name.startswith(f"{rule.lower()}_"):
        raise MutantError(f"{path.name}: `# rule: {rule}` and the file's name must name one of R1 to R10 alike")
    return Mutant(path, rule, " ".join(fields["breaks"]), tuple(fields["test"]))


def find(root: Path) -> list[Mutant]:
    """All mutants of a tree, by rule. Raises MutantError."""
    mutants = [read(p) for p in (root / "tests" / "mutants").glob("*.patch")]
    return sorted(mutants, key=lambda m: (int(m.rule[1:]), m.path.name))


class Copy:
    """The tracked files of `root` as they stand now, in a folder of their own; tests that run there see no other code."""

    def __init__(self, root: Path, folder: Path) -> None:
        self.root, self.folder = root, folder
        folder.mkdir(parents=True)
        listed = subprocess.run(["git", "ls-files", "-z"], cwd=root, check=True, capture_output=True).stdout
        for name in filter(None, listed.decode().split("\0")):
            source = root / name
            if source.is_file():  # a file that was deleted but not yet committed is not there
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(source, folder / name)
        packages = tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))
        listed_packages = packages["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
        self.packages = [Path(p).name for p in listed_packages]
        self.paths = [str(folder / Path(p).parent) for p in listed_packages]
        self.environ = {k: v for k, v in os.environ.items() if not k.startswith(("GIT_", "PYTEST_", "PLATO_"))}
        self.environ |= {"PYTHONPATH": os.pathsep.join(dict.fromkeys(self.paths)), "PYTHONDONTWRITEBYTECODE": "1"}
        self._verify()

    def _verify(self) -> None:
        """An editable install of the project must not win over the copy."""
        code = (
            f"import {', '.join(self.packages)}; print(*(m.__file__ for m in ({', '.join(self.packages)},)), sep='\\n')"
        )
        run = subprocess.run(
            [sys.executable, "-c", code], cwd=self.folder, env=self.environ, capture_output=True, text=True, check=False
        )
        strangers = [f for f in run.stdout.split() if not Path(f).resolve().is_relative_to(self.folder.resolve())]
        if run.returncode or strangers:
            raise MutantError(f"the copy's code is not what would run: {strangers or run.stderr.strip()}")

    def apply(self, mutant: Mutant, *, back: bool = False) -> None:
        """Applies a patch, or takes it back. Raises MutantError when it does not fit, without leaving a trace."""
        command = ["git", "apply", "--whitespace=nowarn", *(["--reverse"] if back else []), str(mutant.path)]
        environ = {**self.environ, "GIT_CEILING_DIRECTORIES": str(self.folder.parent)}
        run = subprocess.run(command, cwd=self.folder, env=environ, capture_output=True, text=True, check=False)
        if run.returncode:
            raise MutantError(f"{mutant.path.name} no longer applies: {' '.join(run.stderr.split())}")

    def run(self, tests: Sequence[str]) -> Verdict:
        """Runs pytest on `tests`. Raises MutantError when pytest itself did not come to a result."""
        with tempfile.TemporaryDirectory(dir=self.folder.parent) as scratch:
            report = Path(scratch) / "report.xml"
            options = ["-q", "-p", "no:cacheprovider", f"--timeout={_TEST_TIMEOUT_S}", f"--junitxml={report}"]
            options += ["-o", "junit_family=xunit1", f"--basetemp={scratch}/base"]
            command = [sys.executable, "-m", "pytest", *options, *tests]
            try:
                run = subprocess.run(
                    command,
                    cwd=self.folder,
                    env=self.environ,
                    stdin=subprocess.DEVNULL,
                    capture_output=True,
                    text=True,
                    timeout=_RUN_TIMEOUT_S,
                    check=False,
                )
            except subprocess.TimeoutExpired as e:
                raise MutantError(f"pytest did not end within {_RUN_TIMEOUT_S} s") from e
            if not report.exists():
                raise MutantError(f"pytest ended with code {run.returncode}:\n{run.stdout}{run.stderr}")
            return _verdict(report, run.stdout)


def _verdict(report: Path, output: str) -> Verdict:
    passed, failed, broken = [], [], []
    for case in ET.parse(report).getroot().iter("testcase"):
        name = f"{case.get('file')}::{case.get('name')}"
        if case.find("error") is not None or case.find("skipped") is not None:
            broken.append(name)
        elif case.find("failure") is not None:
            failed.append(name)
        else:
            passed.append(name)
    return Verdict(tuple(passed), tuple(failed), tuple(broken), output)


def judge(copy: Copy, mutant: Mutant) -> str:
    """Which test killed the mutant. Raises MutantError when it survived or could not be judged."""
    copy.apply(mutant)
    try:
        verdict = copy.run(mutant.tests)
    finally:
        copy.apply(mutant, back=True)
    if verdict.failed:
        return verdict.failed[0]
    if verdict.broken or not verdict.passed:
        raise MutantError(f"{mutant.path.name}: the tests broke instead of failing\n{verdict.output}")
    raise MutantError(
        f"{mutant.path.name} survived: {mutant.breaks}; these passed all the same: {', '.join(mutant.tests)}"
    )


def check_unpatched(copy: Copy, mutants: Sequence[Mutant]) -> None:
    """Each named test must exist and pass as the code stands. Raises MutantError."""
    tests = list(dict.fromkeys(t for m in mutants for t in m.tests))
    verdict = copy.run(tests)
    if verdict.failed or verdict.broken or len(verdict.passed) < len(tests):
        raise MutantError(f"not every named test passes without a mutant, so no verdict is possible\n{verdict.output}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("rules", nargs="*", metavar="RULE", help="only these, e.g. R1 R7 (default: all)")
    parser.add_argument("--root", type=Path, default=ROOT, help="the tree to judge")
    parser.add_argument("--jobs", type=int, default=2, help="mutants at one time")
    options = parser.parse_args(arguments)
    try:
        mutants = [m for m in find(options.root) if not options.rules or m.rule in options.rules]
    except MutantError as e:
        print(f"mutants: {e}")
        return 1
    if not mutants:
        print("mutants: there are none to run")
        return 1
    with tempfile.TemporaryDirectory(prefix="plato-mutants-") as base:
        return _run(options.root, Path(base), mutants, max(1, min(options.jobs, len(mutants))))


def _run(root: Path, base: Path, mutants: Sequence[Mutant], jobs: int) -> int:
    copies: SimpleQueue[Copy] = SimpleQueue()
    try:
        first = Copy(root, base / "copy0" / "tree")
        check_unpatched(first, mutants)
        copies.put(first)
        for n in range(1, jobs):
            copies.put(Copy(root, base / f"copy{n}" / "tree"))
    except MutantError as e:
        print(f"mutants: {e}")
        return 1

    def one(mutant: Mutant) -> tuple[bool, str]:
        copy = copies.get()
        began = time.monotonic()
        try:
            killer = judge(copy, mutant)
            return True, f"{mutant.rule:<3} killed in {time.monotonic() - began:.1f} s: {mutant.breaks} ({killer})"
        except MutantError as e:
            return False, f"{mutant.rule:<3} NOT KILLED: {e}"
        finally:
            copies.put(copy)

    good = 0
    with ThreadPoolExecutor(jobs) as pool:
        for killed, words in pool.map(one, mutants):
            good += killed
            print(words, flush=True)
    print(f"mutants: {good} passed, {len(mutants) - good} failed")
    return 0 if good == len(mutants) else 1


if __name__ == "__main__":
    raise SystemExit(main())
