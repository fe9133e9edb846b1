"""Writes docs/settings.md from the settings model; with --check compares and exits 1 if the page is stale."""

from __future__ import annotations

import json
import sys
import types
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

from annotated_types import Ge, Le, MinLen
from plato.runtime.settings import Settings
from pydantic.fields import FieldInfo

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "settings.md"

_HEAD = """\
# Settings

Written from the settings model by `make settings-page`; do not edit. One `plato.yaml` configures every process:

```yaml
gateway:
  max_connections: 20000
state:
  heartbeat_ms: 60000
```

A value is looked up in this order: a command's flag, then the environment variable `PLATO_SECTION__KEY` (for example
`PLATO_GATEWAY__MAX_CONNECTIONS=20000`; lists as JSON), then `plato.yaml` (in the working folder, or the file named by
`--settings` or `PLATO_SETTINGS`), then the default. An empty variable counts as unset. All of it is checked at start: an
unknown key, a key written twice, a wrong type or a value out of bounds ends the process with one line that names the key,
the value and the flag, variable or file that it came from. Nothing is read again while a process runs.

`plato settings` prints the values in force in the running cluster of this folder (of another one with `--data-dir`); where
none runs, or a file is named by `--settings`, those that a start would use. `plato settings --schema` prints their JSON
schema. The embedded cluster (`plato up`) decides `process`, `topology`, `auth.keys_dir`, `gateway.run_dir`,
`ipconfig.override_path`, `database.uri` and `store.url` itself, and says so where you set one; a second instance of a
service listens 10 ports higher, and `local.port_offset` moves all ports.
"""

_UNITS = {"_ms": "ms", "_s": "s", "_bytes": "bytes"}


def main() -> int:
    """Entry point; returns the exit code."""
    fresh = page()
    if "--check" not in sys.argv[1:]:
        PAGE.parent.mkdir(exist_ok=True)
        PAGE.write_text(fresh, encoding="utf-8")
        return 0
    if PAGE.exists() and PAGE.read_text(encoding="utf-8") == fresh:
        return 0
    print(f"{PAGE.relative_to(ROOT)} is stale: run `make settings-page` and commit the result")
    return 1


def page() -> str:
    """The whole page."""
    parts = [_HEAD]
    for section, info in Settings.model_fields.items():
        model: Any = info.annotation
        parts.append(f"## {section}\n\n{model.__doc__}\n")
        rows = ["| key | default | unit, values | what it is for |", "|---|---|---|---|"]
        for key, field in model.model_fields.items():
            rows.append(f"| `{key}` | {_default(field)} | {_values(key, field)} | {_cell(field.description or '')} |")
        parts.append("\n".join(rows) + "\n")
    return "\n".join(parts)


def _default(field: FieldInfo) -> str:
    value = field.get_default()
    if value is None:
        return "–"
    if value in ("", (), {}):
        return "empty"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if isinstance(value, int):
        return f"`{value}`"
    return f"`{_cell(value if isinstance(value, str) else str(value))}`"


def _values(key: str, field: FieldInfo) -> str:
    unit = next((unit for ending, unit in _UNITS.items() if key.endswith(ending)), "")
    bounds = _bounds(field)
    return ", ".join(part for part in (unit or _kind(field.annotation), bounds) if part)


def _kind(annotation: Any) -> str:
    origin = get_origin(annotation)
    if origin is Literal:
        return " or ".join(f"`{value}`" for value in get_args(annotation))
    if origin in (Union, types.UnionType):
        return _kind(next(a for a in get_args(annotation) if a is not type(None)))
    if origin is tuple:
        return "list of text"
    if origin is dict:
        return "object"
    return {bool: "`true` or `false`", int: "number", str: "text", Path: "path"}[annotation]


def _bounds(field: FieldInfo) -> str:
    least: Any = None
    most: Any = None
    for rule in _flat(field.metadata):
        if isinstance(rule, Ge):
            least = rule.ge
        elif isinstance(rule, Le):
            most = rule.le
        elif isinstance(rule, MinLen):
            return "not empty"
        elif pattern := getattr(rule, "pattern", None):
            return f"fits `{_cell(pattern)}`"
        elif why := getattr(getattr(rule, "func", None), "__doc__", None):
            return str(why).rstrip(".")
    if least is not None and most is not None:
        return f"{least} to {most}"
    return f"at least {least}" if least is not None else f"at most {most}" if most is not None else ""


def _flat(metadata: list[Any]) -> list[Any]:
    """Rules, with those inside of an Annotated type's own Field."""
    found = []
    for rule in metadata:
        found += _flat(rule.metadata) if isinstance(rule, FieldInfo) else [rule]
    return found


def _cell(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1].replace("|", "\\|")


if __name__ == "__main__":
    raise SystemExit(main())
