"""The pages say what is there: commands exist, links lead somewhere, tables name files that are."""

from __future__ import annotations

import re
import shlex
import tomllib
from pathlib import Path

import pytest
import typer.main

from tests.repo.tracked import ROOT, files, text

PAGES = [f for f in files() if f.endswith(".md")]
TOP_PAGES = ("README.md", "CONTRIBUTING.md", "ARCHITECTURE.md", "CHANGELOG.md")


def _commands(page: str) -> list[str]:
    """The lines of a page's shell blocks, and its inline `make …` and `plato …`."""
    whole = text(page)
    lines = [
        line.strip().removeprefix("$ ")
        for block in re.findall(r"```(?:sh|bash|console)\n(.*?)```", whole, re.DOTALL)
        for line in re.sub(r"\\\n\s*", "", block).splitlines()
    ]
    prose = re.sub(r"```.*?```", "", whole, flags=re.DOTALL)
    return [x for x in [*lines, *re.findall(r"`((?:make|plato) [^`]+)`", prose)] if x and not x.startswith("#")]


def _make_targets() -> set[str]:
    phony = re.search(r"^\.PHONY:((?:.*\\\n)*.*)$", text("Makefile"), re.MULTILINE)
    assert phony
    return set(phony[1].replace("\\\n", " ").split())


def _plato_commands() -> set[str]:
    from plato.cli.app import app

    command = typer.main.get_command(app)
    return set(getattr(command, "commands", {}))


@pytest.mark.parametrize("page", [p for p in PAGES if p in TOP_PAGES or p.startswith("docs/")])
def test_each_command_on_a_page_exists(page: str) -> None:
    for command in _commands(page):
        words = shlex.split(command, comments=True)
        if words[:1] == ["make"]:
            targets = [w for w in words[1:] if "=" not in w and not w.startswith("-")]
            assert not (set(targets) - _make_targets()), f"{page}: {command}"
        elif words and Path(words[0]).name == "plato":
            names = [w for w in words[1:] if not w.startswith("-")]
            assert not names or names[0] in _plato_commands(), f"{page}: {command}"


@pytest.mark.parametrize("page", [p for p in PAGES if p.startswith("docs/") or p == "README.md"])
def test_commands_are_written_as_they_can_be_typed(page: str) -> None:
    whole = text(page)
    blocks = [
        *re.findall(r"```(?:sh|bash|console)?\n(.*?)```", whole, re.DOTALL),
        *re.findall(r"^(?: {4}.*\n)+", whole, re.MULTILINE),
    ]
    bare = [line for block in blocks for line in block.splitlines() if re.match(r"\s*(?:\$ )?plato [a-z]", line)]
    assert bare == [], "plato is in .venv/bin, not on the PATH"


def test_the_readme_shows_the_two_commands_and_the_path() -> None:
    readme = text("README.md")
    assert "make up" in _commands("README.md")
    assert any("plato chat" in c for c in _commands("README.md"))
    assert re.search(r"client .*gateway .*state .*bus .*msg .*state .*gateway .*client", readme), (
        "the picture of the path"
    )


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    prose = re.sub(r"```.*?```|`[^`\n]*`", "", text(page), flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", prose):
        if not re.match(r"[a-z]+:", target):
            assert (ROOT / page).parent.joinpath(target).exists(), f"{page} links to {target}"


def test_make_help_names_every_target() -> None:
    help_text = text("Makefile").split("help:\n")[1].split("\n\n")[0]
    missing = {t for t in _make_targets() - {"help"} if not re.search(rf"\b{re.escape(t)}\b", help_text)}
    assert missing == set()


def test_the_changelog_begins_with_this_version() -> None:
    version = tomllib.loads(text("pyproject.toml"))["project"]["version"]
    heads = re.findall(r"^## (.+)$", text("CHANGELOG.md"), re.MULTILINE)
    assert heads
    assert version in heads[0]


def test_architecture_ends_with_concept_to_file() -> None:
    page = text("ARCHITECTURE.md")
    heads = re.findall(r"^## (.+)$", page, re.MULTILINE)
    assert heads[-1] == "Concept → file"
    rows = re.findall(r"^\|(.+)\|(.+)\|$", page.split("## Concept → file")[1], re.MULTILINE)[2:]
    assert len(rows) >= 20, "the table leaves most concepts out"
    for concept, place in rows:
        named = re.findall(r"`([^`]+)`", place)
        assert named, f"{concept.strip()} names no file"
        for name in named:
            assert list(ROOT.glob(name)), f"{concept.strip()}: {name} is not there"


def test_design_rules_are_explained() -> None:
    page = text("ARCHITECTURE.md")
    assert [n for n in range(1, 12) if f"**R{n} " not in page] == []
