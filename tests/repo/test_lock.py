"""The lock holds exactly what pyproject.toml pins and what that needs: with hashes, without an address."""

from __future__ import annotations

import re
import tomllib
from typing import Any

from tests.repo.tracked import text

PROJECT: dict[str, Any] = tomllib.loads(text("pyproject.toml"))["project"]
PIN = re.compile(r"^(?P<name>[A-Za-z0-9._-]+)(?:\[[\w,]+\])?==(?P<version>[^;\s]+)")


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _wanted() -> dict[str, str]:
    """{name: version} of every requirement of the project and its extras."""
    requirements = list(PROJECT["dependencies"])
    for extra in PROJECT["optional-dependencies"].values():
        requirements += [r for r in extra if not r.startswith(f"{PROJECT['name']}[")]
    wanted: dict[str, str] = {}
    for requirement in requirements:
        match = PIN.match(requirement)
        assert match, f"{requirement} is not pinned with =="
        name = _normal(match["name"])
        assert wanted.setdefault(name, match["version"]) == match["version"], f"{name} is pinned to two versions"
    return wanted


def _locked() -> dict[str, list[str]]:
    """{name: [version, hash, hash, …]}."""
    locked: dict[str, list[str]] = {}
    name = ""
    for line in text("requirements.lock").splitlines():
        if match := PIN.match(line):
            name = _normal(match["name"])
            locked[name] = [match["version"]]
        elif found := re.search(r"--hash=sha256:[0-9a-f]{64}", line):
            locked[name].append(found[0])
    return locked


def test_the_lock_matches_the_project() -> None:
    locked = {name: entry[0] for name, entry in _locked().items()}
    wanted = _wanted()
    wanted |= {_normal(r.split("==")[0]): r.split("==")[1] for r in _build_requirements()}
    assert {n: locked.get(n) for n in wanted} == wanted, "run `make lock`"


def _build_requirements() -> list[str]:
    return list(tomllib.loads(text("pyproject.toml"))["build-system"]["requires"])


def test_every_locked_package_has_hashes() -> None:
    assert [name for name, entry in _locked().items() if len(entry) < 2] == []


def test_the_lock_holds_no_address() -> None:
    lock = text("requirements.lock")
    assert not re.search(r"https?://|--(?:extra-)?index-url|--find-links|file:|@ ", lock)
