"""Each reported fault of operators, O1 to O25, is a named test with the marker of where it runs."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from tests.repo.tracked import ROOT, files

ROWS = range(1, 26)
MARKERS = {"planner", "apiserver", "nodes"}


def marked(nodes: list[ast.expr]) -> set[str]:
    """Names X of pytest.mark.X in these expressions."""
    found = [n for node in nodes for n in ast.walk(node) if isinstance(n, ast.Attribute)]
    return {n.attr for n in found if isinstance(n.value, ast.Attribute) and n.value.attr == "mark"}


def rows() -> Iterator[tuple[Path, str, set[str]]]:
    for file in files():
        path = ROOT / file
        if path.suffix != ".py" or not path.name.startswith("test_"):
            continue
        text = path.read_text(encoding="utf-8")
        if "def test_o" not in text:
            continue
        module = ast.parse(text)
        all_of_it = [
            n.value for n in module.body
            if isinstance(n, ast.Assign) and [t.id for t in n.targets if isinstance(t, ast.Name)] == ["pytestmark"]
        ]  # fmt: skip
        for node in module.body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and re.match(r"test_o\d\d_", node.name):
                yield path, node.name, marked([*all_of_it, *node.decorator_list]) & MARKERS


def test_each_row_is_a_named_test_with_a_marker() -> None:
    found = {int(number) for _, name, _ in rows() for number in re.findall(r"(?<=_)o(\d\d)(?=_)", name)}
    assert sorted(set(ROWS) - found) == []
    assert sorted(found - set(ROWS)) == []
    assert [f"{path.name}: {name}" for path, name, markers in rows() if len(markers) != 1] == []
