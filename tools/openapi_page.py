"""Writes docs/openapi.json from the routes of the HTTP API; with --check compares and exits 1 if it is stale."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from plato.fakes.tokens import FakeTokens
from plato.runtime.settings import AttachmentSettings
from plato_msg.api import app, auth, routes
from plato_msg.attachments import Limits

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "openapi.json"


class _Anybody:
    """Stands where nobody is asked: only the routes' descriptions are wanted."""

    limits = Limits.of(AttachmentSettings())


def main() -> int:
    """Entry point; returns the exit code."""
    fresh = page()
    if "--check" not in sys.argv[1:]:
        PAGE.write_text(fresh, encoding="utf-8")
        return 0
    if PAGE.exists() and PAGE.read_text(encoding="utf-8") == fresh:
        return 0
    print(f"{PAGE.relative_to(ROOT)} is stale: run `make openapi-page` and commit the result")
    return 1


def page() -> str:
    """The whole document."""
    nobody: Any = _Anybody()
    parts = routes.Parts(nobody, nobody, nobody, nobody, nobody, nobody, nobody, nobody, nobody, 0)
    door = auth.Door(FakeTokens(), 1, 1, lambda: 0.0)
    document = app.document(app.application(door, routes.routers(parts)))
    return json.dumps(document, indent=1, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    sys.exit(main())
