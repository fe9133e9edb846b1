"""An image holds its service, the library and what they need, in the versions of requirements.lock, and nothing else."""

from __future__ import annotations

import re
import tomllib
from importlib.metadata import requires
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from e2e.images.recipes import DEVELOPMENT, LEFT_OUT, SERVICES, recipe
from tests.repo.tracked import text

PROJECT: dict[str, Any] = tomllib.loads(text("pyproject.toml"))["project"]
ALL = (*SERVICES, *DEVELOPMENT)
ENTRY = re.compile(r"^(?P<name>[A-Za-z0-9._-]+)==(?P<version>[^;\s\\]+)(?: *; *(?P<marker>[^\\]+))?")


def _entries(lock: str) -> dict[str, tuple[str, str, frozenset[str]]]:
    """{name: (version, marker, hashes)}."""
    found: dict[str, tuple[str, str, set[str]]] = {}
    name = ""
    for line in text(lock).splitlines():
        if match := ENTRY.match(line):
            name = canonicalize_name(match["name"])
            found[name] = (match["version"], (match["marker"] or "").strip(), set())
        elif digest := re.search(r"--hash=(sha256:[0-9a-f]{64})", line):
            found[name][2].add(digest[1])
        else:
            raise AssertionError(f"{lock}: what is this line? {line}")
    return {name: (version, marker, frozenset(hashes)) for name, (version, marker, hashes) in found.items()}


def _lock(service: str) -> str:
    return f"{recipe(service).folder}/requirements.lock"


def _needed(wanted: list[str]) -> set[str]:
    """Names of these requirements and of all that they need here, by what is installed."""
    needed: set[str] = set()
    seen: set[tuple[str, str]] = set()
    left = [Requirement(each) for each in wanted]
    while left:
        requirement = left.pop()
        name = canonicalize_name(requirement.name)
        needed.add(name)
        for extra in ("", *requirement.extras):
            if (name, extra) in seen:
                continue
            seen.add((name, extra))
            for more in map(Requirement, requires(name) or []):
                if more.marker is None or more.marker.evaluate({"extra": extra}):
                    left.append(more)
    return needed


@pytest.mark.parametrize("service", SERVICES)
def test_a_lock_holds_what_the_service_needs_and_no_more(service: str) -> None:
    entries = _entries(_lock(service))
    needed = _needed([*PROJECT["dependencies"], *PROJECT["optional-dependencies"][service]])
    unconditional = {name for name, (_, marker, _) in entries.items() if not marker}
    assert needed <= set(entries), "run `make lock`"
    assert unconditional <= needed, "run `make lock`"


@pytest.mark.parametrize("service", ALL)
def test_a_lock_agrees_with_the_projects(service: str) -> None:
    project = _entries("requirements.lock")
    for name, (version, _, hashes) in _entries(_lock(service)).items():
        assert project[name][0] == version, f"{name}: run `make lock`"
        assert hashes, f"{name} has no hash"
        assert hashes <= project[name][2], f"{name}: run `make lock`"


@pytest.mark.parametrize("service", ALL)
def test_a_lock_holds_no_address(service: str) -> None:
    assert not re.search(r"https?://|--(?:extra-)?index-url|--find-links|file:|@ ", text(_lock(service)))


@pytest.mark.parametrize("service", SERVICES)
def test_an_image_holds_the_library_and_its_own_service_only(service: str) -> None:
    folder = recipe(service).folder
    assert recipe(service).sources() == [f"{folder}/requirements.lock", "libs/plato", f"{folder}/plato_{service}"]
    files = recipe(service).files()
    assert f"{folder}/plato_{service}/__init__.py" in files
    assert not [name for name in files if "/tests/" in name or name.endswith(".pyc")]


@pytest.mark.parametrize("service", SERVICES)
def test_dockerfiles_differ_in_the_services_name_alone(service: str) -> None:
    def general(one: str) -> str:
        found = text(f"{recipe(one).folder}/Dockerfile").replace(f"plato_{one}", "PACKAGE")
        lines = found.replace(f"plato-{one}", "NAME").replace(recipe(one).folder, "FOLDER").splitlines()[1:]
        return "\n".join(line for line in lines if "image.description" not in line)

    assert general(service) == general("gateway")


def test_the_build_context_leaves_out_what_the_recipes_leave_out() -> None:
    lines = [line for line in text(".dockerignore").splitlines() if line and not line.startswith("#")]
    assert lines[0] == "*"
    assert [line.removeprefix("**/") for line in lines if line.startswith("**/")] == list(LEFT_OUT)
    let_in = tuple(line.removeprefix("!") for line in lines if line.startswith("!"))
    copied = {source for service in ALL for source in recipe(service).sources()}
    assert not [source for source in copied if not source.startswith(let_in)]
