"""Writes docs/crds.md from crds/*.yaml; with --check compares and exits 1 if the page is stale."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "crds.md"
ORDER = ("platoclusters", "gatewaypools", "stateshards")

_HEAD = """\
# Resources

Written from `crds/` by `make crds-page`; do not edit. `kubectl explain platocluster.spec.state` tells the same on a
terminal, and `kubectl get plato-all` lists all three kinds.

The smallest cluster that works, with a database and a store that exist already:

```yaml
apiVersion: plato.im/v1alpha1
kind: PlatoCluster
metadata:
  name: demo
spec:
  version: 0.1.0
  database:
    uri: {name: demo-db-app}
  store:
    url: {name: demo-store}
  auth:
    keys: {name: demo-keys}
```
"""


def main() -> int:
    """Entry point; returns the exit code."""
    fresh = page()
    if "--check" not in sys.argv[1:]:
        PAGE.parent.mkdir(exist_ok=True)
        PAGE.write_text(fresh, encoding="utf-8")
        return 0
    if PAGE.exists() and PAGE.read_text(encoding="utf-8") == fresh:
        return 0
    print(f"{PAGE.relative_to(ROOT)} is stale: run `make crds-page` and commit the result")
    return 1


def page() -> str:
    """The whole page."""
    parts = [_HEAD]
    for plural in ORDER:
        crd = yaml.safe_load((ROOT / "crds" / f"{plural}.plato.im.yaml").read_text(encoding="utf-8"))
        parts.append(_kind(crd["spec"]))
    return "\n".join(parts)


def _kind(spec: dict[str, Any]) -> str:
    names, version = spec["names"], spec["versions"][0]
    root = version["schema"]["openAPIV3Schema"]
    lines = [f"## {names['kind']}", "", root["description"], ""]
    lines.append(f"`{spec['group']}/{version['name']}`, short name `{names['shortNames'][0]}`.")
    for rule in root.get("x-kubernetes-validations", []):
        lines.append(f"Refused otherwise: {rule['message']}.")
    for part in ("spec", "status"):
        schema = root["properties"][part]
        rows = ["| field | type | default | values | what it is for |", "|---|---|---|---|---|"]
        rows += [_row(path, field, needed) for path, field, needed in _fields(schema, "")]
        lines += ["", f"### {names['kind']} {part}", "", schema["description"], "", *rows]
    return "\n".join(lines) + "\n"


def _fields(schema: dict[str, Any], path: str) -> Iterator[tuple[str, dict[str, Any], bool]]:
    """(path, schema, required) of each field, parents first."""
    for key, field in schema.get("properties", {}).items():
        here = f"{path}.{key}" if path else key
        yield here, field, key in schema.get("required", [])
        inner = field.get("items", field)
        yield from _fields(inner, here + ("[]" if "items" in field else ""))


def _row(path: str, field: dict[str, Any], needed: bool) -> str:
    words = [field["description"], *(f"Refused: {r['message']}." for r in field.get("x-kubernetes-validations", []))]
    return f"| `{path}` | {_type(field)} | {_default(field, needed)} | {_values(field)} | {_cell(' '.join(words))} |"


def _type(field: dict[str, Any]) -> str:
    if "items" in field:
        return f"list of {_type(field['items'])}"
    if "additionalProperties" in field:
        return f"map to {_type(field['additionalProperties'])}"
    kind = str(field.get("type", "quantity"))
    return {"integer": "number", "string": "text"}.get(kind, kind)


def _default(field: dict[str, Any], needed: bool) -> str:
    if needed:
        return "required"
    if "default" not in field or "properties" in field:
        return "–"  # the fields of an object show their own
    value = field["default"]
    return "empty" if value in ("", [], {}) and value is not False else f"`{json.dumps(value)}`".replace('"', "")


def _values(field: dict[str, Any]) -> str:
    if "enum" in field:
        return " or ".join(f"`{value}`" for value in field["enum"])
    least, most = field.get("minimum"), field.get("maximum")
    if least is not None and most is not None:
        return f"{least} to {most}"
    if least is not None:
        return f"at least {least}"
    if "maxItems" in field:
        return f"at most {field['maxItems']}"
    return f"fits `{_cell(field['pattern'])}`" if "pattern" in field else ""


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")


if __name__ == "__main__":
    raise SystemExit(main())
