"""What ruff and mypy do not see: exceptions without a reason, machine paths, registry addresses, loose scripts."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from tests.repo.tracked import ROOT, files, is_text, python_files, text

HAND_WRITTEN = python_files(tests=False) + python_files(tests=True)
# Addresses of one machine. /tmp, /proc, /dev, /var/lib/plato and the like are every machine's.
MACHINE_PATH = re.compile(r"(?<![\w.$}/-])/(?:root|work|home/[a-z]|Users/[A-Za-z])[/\w]")
EXCEPTION = re.compile(r"#\s*(?:noqa|type:\s*ignore|pragma:\s*no cover|fmt:\s*(?:off|skip))\b(?P<rest>.*)")
BARE = re.compile(r"#\s*(?:noqa(?!:)|type:\s*ignore(?!\[))")


def _texts() -> list[str]:
    return [f for f in files() if is_text(f) and Path(f).suffix != ".lock" and f != "tests/repo/test_source.py"]


@pytest.mark.parametrize("name", HAND_WRITTEN)
def test_each_exception_names_its_rule_and_its_reason(name: str) -> None:
    if name == "tests/repo/test_source.py":
        return
    for number, line in enumerate(text(name).splitlines(), 1):
        match = EXCEPTION.search(line)
        if match is None or "fmt:" in match[0]:
            continue
        where = f"{name}:{number}: {line.strip()}"
        assert not BARE.search(line), f"name the rule that is excepted: {where}"
        reason = re.sub(r"^(?::\s*[A-Z0-9, ]+?(?=\s{1,2}[^A-Z0-9,]|$)|\[[\w, -]+\])", "", match["rest"])
        before = text(name).splitlines()[number - 2].strip() if number > 1 else ""
        assert len(reason.strip(" #()—:-")) >= 6 or before.startswith("#"), f"say why: {where}"


@pytest.mark.parametrize("name", HAND_WRITTEN)
def test_each_module_says_what_it_is(name: str) -> None:
    docstring = ast.get_docstring(ast.parse(text(name)))
    if name.endswith("conftest.py") or Path(name).name != "__init__.py":
        assert docstring, "the first lines of a module say what flows through it"


def waits(source: str) -> list[int]:
    """Lines with asyncio.wait_for: on Python 3.11 it loses a cancellation that comes when what it waits for is done."""
    found = []
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Attribute(value=ast.Name(id="asyncio"), attr="wait_for", lineno=line):
                found.append(line)
            case ast.ImportFrom(module="asyncio", names=names, lineno=line) if any(n.name == "wait_for" for n in names):
                found.append(line)
    return found


@pytest.mark.parametrize(
    "name", [f for f in python_files(tests=False) if f.startswith(("libs/", "images/", "operator/"))]
)
def test_a_time_is_set_by_asyncio_timeout(name: str) -> None:
    assert waits(text(name)) == [], f"{name}: write `async with asyncio.timeout(…)`"


def test_the_search_for_wait_for_bites() -> None:
    assert waits("import asyncio\nawait asyncio.wait_for(x, 1)\n") == [2]
    assert waits("from asyncio import wait_for, sleep\n") == [1]
    assert waits("await condition.wait_for(x)\n") == []


def test_no_docstring_rule_is_switched_off_for_the_product() -> None:
    ruff = text("pyproject.toml").split("[tool.ruff.lint]")[1]
    ignored = set(re.findall(r'"(D1\d*)"', ruff.split("ignore = [")[1].split("]")[0]))
    assert '"D1"' in ruff.split("ignore")[0]
    assert ignored <= {"D105", "D107"}
    for pattern in re.findall(r'^"([^"]+)" = \[[^\]]*"D1', ruff, re.MULTILINE):
        assert "tests" in pattern, f"{pattern} is no test"


def test_no_machine_path_is_written_down() -> None:
    bad = [
        f"{name}:{number}: {line.strip()[:120]}"
        for name in _texts()
        for number, line in enumerate(text(name).splitlines(), 1)
        if MACHINE_PATH.search(line)
    ]
    assert bad == []


def test_the_machine_path_pattern_bites() -> None:
    # "~" stands for the slash, so that this file itself names no machine's folder.
    for bad in ("see ~root~x", "'~home~joe~plato'", "(~work~main)", "~Users~Joe~x"):
        assert MACHINE_PATH.search(bad.replace("~", "/")), bad
    for good in ("net~work~x", "$HOME~work~x", "https:~~host~work~x", "~homepage", ".~work~x"):
        assert not MACHINE_PATH.search(good.replace("~", "/")), good


@pytest.mark.parametrize("name", [f for f in files() if f.endswith(".sh") or f == ".ci/run"])
def test_scripts_are_strict(name: str) -> None:
    lines = text(name).splitlines()
    assert lines[0] == "#!/usr/bin/env bash"
    assert "set -euo pipefail" in lines
    assert lines[1].startswith("# "), "the second line says what the script does"


def test_the_ci_script_may_be_executed() -> None:
    assert (ROOT / ".ci/run").stat().st_mode & 0o100


def test_files_carry_no_licence_header() -> None:
    """The licence stands in LICENSE and pyproject.toml, once."""
    assert [f for f in HAND_WRITTEN if re.search(r"^# *(?:Copyright|SPDX-)", text(f), re.MULTILINE)] == []
