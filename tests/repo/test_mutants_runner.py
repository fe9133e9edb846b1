"""tools/mutants.py itself: it must see a killed, a surviving, a stale and a broken mutant apart."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tools import mutants

PYPROJECT = """
[tool.hatch.build.targets.wheel]
packages = ["libs/sample_pkg"]
[tool.pytest.ini_options]
addopts = "--import-mode=importlib"
asyncio_default_fixture_loop_scope = "function"
"""
CODE = "def double(n: int) -> int:\n    return 2 * n\n"
TESTS = """
import subprocess, sys
from sample_pkg import double

def test_double():
    assert double(3) == 6

def test_double_in_a_child():
    out = subprocess.run([sys.executable, "-c", "import sample_pkg; print(sample_pkg.double(3))"], capture_output=True)
    assert out.stdout.strip() == b"6"

def test_blind():
    assert True
"""


def patch(old: str, new: str, *, test: str, rule: str = "R1") -> str:
    lines = CODE.splitlines()
    at = lines.index(old)
    body = [f"-{old}" if n == at else f" {line}" for n, line in enumerate(lines)]
    body.insert(at + 1, f"+{new}")
    head = f"# rule: {rule}\n# breaks: something\n# test: tests/test_sample.py::{test}\n"
    files = "--- a/libs/sample_pkg/__init__.py\n+++ b/libs/sample_pkg/__init__.py\n@@ -1,2 +1,2 @@\n"
    return head + files + "\n".join(body) + "\n"


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    root = tmp_path / "project"
    for name, text in {
        "pyproject.toml": PYPROJECT,
        "libs/sample_pkg/__init__.py": CODE,
        "tests/test_sample.py": TESTS,
        "tests/mutants/keep": "",
    }.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    subprocess.run(["git", "init", "-q", "."], cwd=root, check=True)
    subprocess.run(["git", "add", "."], cwd=root, check=True)
    return root


def run(root: Path, name: str, text: str) -> int:
    (root / "tests" / "mutants" / name).write_text(text)
    return mutants.main(["--root", str(root)])


@pytest.mark.parametrize("test", ["test_double", "test_double_in_a_child"])
def test_a_killed_mutant(tree: Path, capsys: pytest.CaptureFixture[str], test: str) -> None:
    assert run(tree, "r1_x.patch", patch("    return 2 * n", "    return 3 * n", test=test)) == 0
    assert "mutants: 1 passed, 0 failed" in capsys.readouterr().out
    assert (tree / "libs/sample_pkg/__init__.py").read_text() == CODE, "the tree itself stays as it is"


def test_a_surviving_mutant(tree: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(tree, "r1_x.patch", patch("    return 2 * n", "    return 3 * n", test="test_blind")) == 1
    assert "survived" in capsys.readouterr().out


def test_a_patch_that_no_longer_applies(tree: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = patch("    return 2 * n", "    return 3 * n", test="test_double")
    (tree / "libs/sample_pkg/__init__.py").write_text(CODE.replace("2 * n", "n + n"))
    assert run(tree, "r1_x.patch", text) == 1
    assert "no longer applies" in capsys.readouterr().out


def test_a_syntax_error_is_no_kill(tree: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(tree, "r1_x.patch", patch("    return 2 * n", "    return 2 *", test="test_double")) == 1
    assert "broke instead of failing" in capsys.readouterr().out


def test_a_named_test_that_is_not_there(tree: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(tree, "r1_x.patch", patch("    return 2 * n", "    return 3 * n", test="test_gone")) == 1
    assert "NOT KILLED" not in capsys.readouterr().out


def test_a_test_that_fails_without_a_mutant(tree: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tree / "tests/test_sample.py").write_text("def test_double():\n    assert False\n")
    assert run(tree, "r1_x.patch", patch("    return 2 * n", "    return 3 * n", test="test_double")) == 1
    assert "not every named test passes" in capsys.readouterr().out


@pytest.mark.parametrize("gone", ["rule", "breaks", "test"])
def test_an_incomplete_header(tree: Path, capsys: pytest.CaptureFixture[str], gone: str) -> None:
    text = patch("    return 2 * n", "    return 3 * n", test="test_double").replace(f"# {gone}:", "# other:")
    assert run(tree, "r1_x.patch", text) == 1
    assert f"# {gone}:" in capsys.readouterr().out


def test_a_name_of_another_rule(tree: Path) -> None:
    assert run(tree, "r2_x.patch", patch("    return 2 * n", "    return 3 * n", test="test_double")) == 1


def test_no_mutants_is_no_success(tree: Path) -> None:
    assert mutants.main(["--root", str(tree)]) == 1
