"""The tree is the one that design §13 and ARCHITECTURE.md draw, and its import rules hold."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.repo.tracked import ROOT, files, python_files, text

SERVICES = ("gateway", "state", "msg", "ipconfig")
ADDRESSED = (
    "pyproject.toml",
    "requirements.lock",
    "Makefile",
    "ARCHITECTURE.md",
    "README.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    "LICENSE",
    ".ci/run",
    "libs/plato/api",
    "libs/plato/wire/v1",
    "libs/plato/core",
    "libs/plato/topology",
    "libs/plato/adapters",
    "libs/plato/fakes",
    "libs/plato/runtime",
    "libs/plato/client",
    "libs/plato/local",
    "libs/plato/cli",
    "libs/plato/ports.py",
    "libs/plato/router.py",
    "docs/protocol.md",
    "tests/contract",
    "tests/datapath",
    "tests/faults",
    "tests/fuzz",
    "tests/repo",
    "tests/mutants",
)
LONGEST_FILE_LINES = 600
LONGER = {  # all transitions of one machine stand in one file
    "images/state/plato_state/core/session.py": 700,
    "libs/plato/client/core/session.py": 775,
}


@pytest.mark.parametrize("name", ADDRESSED)
def test_the_folders_of_the_design_exist(name: str) -> None:
    assert any(f == name or f.startswith(f"{name}/") for f in files()), f"{name} is missing, or holds no tracked file"


@pytest.mark.parametrize("service", SERVICES)
def test_each_service_has_a_core_an_entry_and_tests(service: str) -> None:
    package = f"images/{service}/plato_{service}"
    assert f"{package}/core/__init__.py" in files()
    assert f"{package}/__main__.py" in files()
    assert any(f.startswith(f"images/{service}/tests/test_{service}_") for f in files())


def test_ls_shows_the_six_hops() -> None:
    hops = {f for f in files() if f.startswith("images/") and Path(f).name in ("uplink.py", "downlink.py")}
    wanted = {f"images/{s}/plato_{s}/{d}.py" for s in ("gateway", "state", "msg") for d in ("uplink", "downlink")}
    assert {h for h in hops if "/core/" not in h} == wanted


def test_no_package_shadows_the_standard_library() -> None:
    assert not any(f == "operator/__init__.py" for f in files())


@pytest.mark.parametrize("name", python_files(tests=False))
def test_a_file_is_one_noun(name: str) -> None:
    assert text(name).count("\n") <= LONGER.get(name, LONGEST_FILE_LINES), (
        "a file this long holds several nouns: split it"
    )
    assert Path(name).stem not in ("utils", "util", "helpers", "common", "misc"), "a file is named after what it holds"


def test_test_files_have_unique_names() -> None:
    names = [Path(f).name for f in python_files(tests=True) if Path(f).name.startswith("test_")]
    assert sorted(names) == sorted(set(names))


def test_import_rules() -> None:
    run = subprocess.run(
        [str(Path(sys.executable).parent / "lint-imports"), "--no-cache"],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stdout[-3000:]
    assert " 0 broken" in run.stdout


def test_stubs_are_fresh() -> None:
    run = subprocess.run(
        [sys.executable, "tools/proto.py", "--check"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stdout + run.stderr
