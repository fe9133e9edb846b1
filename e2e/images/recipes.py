"""What an image is made of: its Dockerfile and the files that its COPY lines name. All of it read, nothing done."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Final

from e2e.testbed.layout import TestbedError

ROOT: Final = Path(__file__).resolve().parents[2]
SERVICES: Final = ("gateway", "state", "msg", "ipconfig", "operator")
DEVELOPMENT: Final = {"postgres": "plato-tb-postgres:18", "valkey": "plato-tb-valkey:9"}
"""Stand-ins for the public images of the two servers, for a testbed that reaches no registry."""

REGISTRY: Final = "localhost"
LEFT_OUT: Final = ("tests", "__pycache__", "*.pyc", "README.md")
"""Names that .dockerignore leaves out at any depth; tests/repo/test_images.py compares the two."""


@dataclass(frozen=True)
class Recipe:
    """One image: `service`, and its Dockerfile's folder below the checkout."""

    service: str
    folder: str

    @property
    def dockerfile(self) -> Path:
        """Where its Dockerfile lies."""
        return ROOT / self.folder / "Dockerfile"

    def reference(self, tag: str) -> str:
        """Its name on the nodes."""
        name = DEVELOPMENT.get(self.service) or f"plato-{self.service}:{tag}"
        return f"{REGISTRY}/{name}"

    def sources(self) -> list[str]:
        """What the Dockerfile copies from the checkout: files and folders, relative to the root."""
        found: list[str] = []
        for line in self.dockerfile.read_text().splitlines():
            words = line.split()
            if words[:1] == ["COPY"] and not any(word.startswith("--from") for word in words):
                found += words[1:-1]
        return found

    def files(self) -> dict[str, bytes]:
        """{path relative to the root: content} of the build's context, sorted; raises TestbedError for a missing one."""
        found: dict[str, bytes] = {f"{self.folder}/Dockerfile": self.dockerfile.read_bytes()}
        for source in self.sources():
            top = ROOT / source
            if not top.exists():
                raise TestbedError(f"{self.folder}/Dockerfile copies {source}, which is not there")
            for path in [top] if top.is_file() else _below(top):
                found[path.relative_to(ROOT).as_posix()] = path.read_bytes()
        return dict(sorted(found.items()))


def recipe(service: str) -> Recipe:
    """The recipe of a service or development server; raises TestbedError for another name."""
    if service in DEVELOPMENT:
        return Recipe(service, f"e2e/images/{service}")
    if service not in SERVICES:
        raise TestbedError(f"there is no image {service!r}; there are {', '.join((*SERVICES, *DEVELOPMENT))}")
    return Recipe(service, "operator" if service == "operator" else f"images/{service}")


def hash_of(files: dict[str, bytes], *more: str) -> str:
    """16 hex digits that name the content."""
    digest = hashlib.sha256("\0".join(more).encode())
    for name, content in files.items():
        digest.update(f"\0{name}\0{len(content)}\0".encode() + content)
    return digest.hexdigest()[:16]


def _below(top: Path) -> Iterator[Path]:
    for folder, folders, names in os.walk(top):
        folders[:] = sorted(name for name in folders if not _left_out(name))
        yield from (Path(folder, name) for name in sorted(names) if not _left_out(name))


def _left_out(name: str) -> bool:
    return any(PurePosixPath(name).match(pattern) for pattern in LEFT_OUT)
