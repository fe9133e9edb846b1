"""tools/run_tests.py adds its pytest runs up, and passes only where all did."""

from __future__ import annotations

import tomllib
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest

from tools import run_tests

TREES: Sequence[str] = tomllib.loads((run_tests.ROOT / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"][
    "testpaths"
]


@pytest.mark.parametrize(
    ("line", "counts"),
    [
        ("===== 12 passed in 3.20s =====", {"passed": 12}),
        ("1 failed, 1017 passed in 328.95s (0:05:28)", {"failed": 1, "passed": 1017}),
        ("= 2 failed, 3 passed, 1 skipped, 2 errors in 9.00s =", {"failed": 2, "passed": 3, "skipped": 1, "error": 2}),
        ("kill test: 35 kills in 76 s", {}),
        ("", {}),
    ],
)
def test_the_last_line_is_read(line: str, counts: dict[str, int]) -> None:
    assert run_tests.summary(f"noise 3 passed in 1.00s\n{line}\n" if counts else line) == counts


@pytest.mark.parametrize(("elsewhere", "faults", "code"), [(True, True, 0), (True, False, 1), (False, True, 1)])
def test_both_runs_count(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    elsewhere: bool,
    faults: bool,
    code: int,
) -> None:
    (tmp_path / "tests" / "faults").mkdir(parents=True)
    (tmp_path / "pyproject.toml").write_text("[tool.pytest.ini_options]\ntestpaths = ['tests']\n")
    (tmp_path / "tests" / "test_one.py").write_text(f"def test_one():\n    assert {elsewhere}\n")
    (tmp_path / "tests" / "faults" / "test_two.py").write_text(f"def test_two():\n    assert {faults}\n")
    monkeypatch.setattr(run_tests, "ROOT", tmp_path)
    monkeypatch.setattr("signal.signal", lambda *_: None)
    assert run_tests.main([]) == code
    out = capfd.readouterr().out
    assert "test_one.py" in out
    assert "test_two.py" in out
    assert out.strip().splitlines()[-1].startswith("===== 2 passed in " if not code else "===== 1 failed, 1 passed in ")


def _files(arguments: Sequence[str]) -> set[str]:
    """The test files that a run takes, as pytest reads its paths and what it is to ignore."""
    paths = [word for word in arguments if not word.startswith("-") and word != "no:cacheprovider"]
    ignored = tuple(word.removeprefix("--ignore=") for word in arguments if word.startswith("--ignore="))
    root = run_tests.ROOT
    found = {
        str(file.relative_to(root))
        for path in paths or TREES
        for file in ([root / path] if path.endswith(".py") else (root / path).rglob("test_*.py"))
    }
    return {file for file in found if not any(file == i or file.startswith(f"{i}/") for i in ignored)}


def test_each_test_is_in_one_run_of_one_target_only() -> None:
    runs = [*run_tests.lists(), *(half for group in run_tests.GROUPS.values() for half in run_tests.halves(*group))]
    files = Counter(file for run in runs for file in _files(run))
    assert [file for file, count in files.items() if count > 1] == []
    assert {file for file in _files([]) - set(files) if not file.startswith("tests/kafka/")} == set()
    assert all(_files(run) for run in runs)


def test_what_is_run_otherwise_exists() -> None:
    for path in run_tests.OTHERWISE:
        assert (run_tests.ROOT / path).exists(), path
