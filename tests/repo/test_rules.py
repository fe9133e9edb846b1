"""Each rule R1 to R10 has tests named after it, and a mutant that breaks it under one of them."""

from __future__ import annotations

import ast
import re
from functools import cache

import pytest

from tests.repo.tracked import ROOT, python_files, text
from tools import mutants


@cache
def _tests() -> dict[str, str]:
    """{pytest id without parameters: name} of every test function."""
    found = {}
    for name in python_files(tests=True):
        for node in ast.parse(text(name)).body:
            members = node.body if isinstance(node, ast.ClassDef) else [node]
            prefix = f"{name}::{node.name}::" if isinstance(node, ast.ClassDef) else f"{name}::"
            for member in members:
                if isinstance(member, ast.FunctionDef | ast.AsyncFunctionDef) and member.name.startswith("test_"):
                    found[prefix + member.name] = member.name
    return found


@pytest.mark.parametrize("rule", mutants.RULES)
def test_each_rule_has_tests_of_its_name(rule: str) -> None:
    assert [i for i, name in _tests().items() if name.startswith(f"test_{rule.lower()}_")], f"no test of {rule}"


@pytest.mark.parametrize("rule", mutants.RULES)
def test_each_rule_has_a_mutant(rule: str) -> None:
    assert [m for m in mutants.find(ROOT) if m.rule == rule], f"tests/mutants/{rule.lower()}_….patch is missing"


@pytest.mark.parametrize("mutant", mutants.find(ROOT), ids=lambda m: m.path.name)
def test_each_mutant_names_tests_of_its_rule(mutant: mutants.Mutant) -> None:
    for test in mutant.tests:
        plain = re.sub(r"\[.*\]$", "", test)
        assert plain in _tests(), f"{test} is not there"
        assert _tests()[plain].startswith(f"test_{mutant.rule.lower()}_")


@pytest.mark.parametrize("mutant", mutants.find(ROOT), ids=lambda m: m.path.name)
def test_each_mutant_touches_the_product_only(mutant: mutants.Mutant) -> None:
    touched = re.findall(r"^\+\+\+ b/(\S+)", mutant.path.read_text(encoding="utf-8"), re.MULTILINE)
    assert touched
    assert [t for t in touched if "tests/" in t or not t.startswith(("libs/", "images/"))] == []
