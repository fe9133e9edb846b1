"""tools/run_tests.py adds its pytest runs up, and passes only where all did."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools import run_tests


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


def test_each_test_is_in_one_run_only() -> None:
    busy, *apart = run_tests.lists()
    paths = [word for run in apart for word in run if not word.startswith("-") and word != "no:cacheprovider"]
    assert len(paths) == len(set(paths))
    assert busy == [f"--ignore={path}" for path in (*run_tests.OTHERWISE, *paths)]
    for n, run in enumerate(apart):
        before = [word for other in apart[:n] for word in other if word in paths]
        assert [word for word in run if word.startswith("--ignore")] == [f"--ignore={path}" for path in before]


def test_what_is_run_otherwise_exists_and_the_product_is_run_once() -> None:
    for path in run_tests.PRODUCT:
        assert (run_tests.ROOT / path).exists(), path
    busy, apart = run_tests.product()
    paths = {word for word in apart if word.endswith(".py")}
    assert paths
    assert {word.removeprefix("--ignore=") for word in busy if word.startswith("--ignore")} == paths
