"""What belongs to the repository: tracked files, or in a tree without git every file that is no by-product."""

from __future__ import annotations

import subprocess
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
_BY_PRODUCTS = {".venv", ".git", ".plato", "__pycache__", ".mypy_cache", ".ruff_cache", ".pytest_cache"}


@cache
def files() -> tuple[str, ...]:
    """Paths below the root, sorted; files that are deleted but not committed are left out."""
    if (ROOT / ".git").exists():
        listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True).stdout.decode()
        names = [n for n in listed.split("\0") if n]
    else:
        found = (p.relative_to(ROOT) for p in ROOT.rglob("*") if p.is_file())
        names = [str(p) for p in found if not _BY_PRODUCTS & set(p.parts)]
    return tuple(sorted(n for n in names if (ROOT / n).is_file()))


def python_files(*, tests: bool) -> list[str]:
    """Hand-written Python files: those of the product, or those of the tests."""
    return [f for f in files() if f.endswith(".py") and "_pb2" not in f and ("tests" in Path(f).parts) == tests]


def text(name: str) -> str:
    """A tracked file's text."""
    return (ROOT / name).read_text(encoding="utf-8")


def is_text(name: str) -> bool:
    """Whether a tracked file is text, by git's own rule: no zero byte in its first 8,000."""
    with (ROOT / name).open("rb") as file:
        return b"\0" not in file.read(8_000)
