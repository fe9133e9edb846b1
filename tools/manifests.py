"""Writes what is derived from `crds/` and from the chart; with --check compares and exits 1 where something is stale.

    crds/*.yaml                → charts/plato/templates/crds/*.yaml
    crds/*.yaml                → charts/plato-cluster/values.schema.json
    charts/plato, by `helm`    → deploy/plato.yaml and deploy/samples/dev-deps.yaml, for those who use no helm

`helm` is found by PATH or in $HELM. Without it, --check compares the digest of the chart that the rendered files name.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

import yaml

ROOT: Final = Path(__file__).resolve().parent.parent
CHART: Final = ROOT / "charts" / "plato"
KINDS: Final = ("platoclusters", "gatewaypools", "stateshards")

_OPEN: Final = "{{- if .Values.crds.install }}\n"
_KEEP: Final = "  annotations:\n    helm.sh/resource-policy: keep\n"
_NAMESPACES: Final = """\
---
# The operator's.
apiVersion: v1
kind: Namespace
metadata:
  name: plato-system
  labels:
    pod-security.kubernetes.io/enforce: restricted
---
# The PlatoClusters'. Gateways use the nodes' own network, which only this level allows.
apiVersion: v1
kind: Namespace
metadata:
  name: plato
  labels:
    pod-security.kubernetes.io/enforce: privileged
"""


def crd_template(text: str, name: str) -> str:
    """A definition as a template: kept when the release goes, left out with crds.install=false."""
    anchor = f"metadata:\n  name: {name}\n"
    if text.count(anchor) != 1 or "{{" in text:
        raise ValueError(
            f"crds/{name}.yaml: one `{anchor!r}` is expected, and nothing that Helm would take for its own"
        )
    return _OPEN + text.replace(anchor, anchor + _KEEP) + "{{- end }}\n"


def json_schema(schema: dict[str, Any]) -> dict[str, Any]:
    """The part of a CRD's schema that JSON Schema knows, closed against unknown fields; rules are left to the API server."""
    if schema.get("x-kubernetes-int-or-string"):
        made: dict[str, Any] = {"type": ["integer", "number", "string"]}
    else:
        kept = (
            "type",
            "enum",
            "minimum",
            "maximum",
            "minLength",
            "maxLength",
            "pattern",
            "required",
            "minItems",
            "maxItems",
        )
        made = {key: schema[key] for key in kept if key in schema}
    if "description" in schema:
        made["description"] = schema["description"]
    if "items" in schema:
        made["items"] = json_schema(schema["items"])
    if "additionalProperties" in schema:
        made["additionalProperties"] = json_schema(schema["additionalProperties"])
    elif made.get("type") == "object" and not schema.get("x-kubernetes-preserve-unknown-fields"):
        made["properties"] = {key: json_schema(field) for key, field in schema.get("properties", {}).items()}
        made["additionalProperties"] = False
    return made


def cluster_schema() -> str:
    """values.schema.json of charts/plato-cluster."""
    cluster, pool = (_spec(kind) for kind in ("platoclusters", "gatewaypools"))
    pool = json_schema(pool)
    # The chart names the cluster itself.
    del pool["properties"]["clusterRef"]
    pool.pop("required", None)
    # Defaults cannot have what must be given. The template says in words what is missing, and `helm lint` finds nothing.
    own = json_schema(cluster)
    own.pop("required")
    labels = {"type": "object", "additionalProperties": {"type": "string"}}
    schema = {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "title": "Values of the chart plato-cluster; written from crds/ by `make manifests`",
        "type": "object",
        "additionalProperties": False,
        "required": ["spec"],
        "properties": {
            "global": {"type": "object", "description": "Helm's own; not used."},
            "name": {"type": "string", "pattern": "^$|^[a-z]([-a-z0-9]*[a-z0-9])?$", "maxLength": 30},
            "labels": labels,
            "annotations": labels,
            "spec": own,
            "pools": {
                "type": "object",
                "description": "Further GatewayPools by name.",
                "propertyNames": {"pattern": "^[a-z0-9]([-a-z0-9]*[a-z0-9])?$", "maxLength": 40},
                "additionalProperties": pool,
            },
        },
    }
    return json.dumps(schema, indent=2) + "\n"


def _spec(plural: str) -> dict[str, Any]:
    crd = yaml.safe_load((ROOT / "crds" / f"{plural}.plato.im.yaml").read_text(encoding="utf-8"))
    spec: dict[str, Any] = crd["spec"]["versions"][-1]["schema"]["openAPIV3Schema"]["properties"]["spec"]
    return spec


def derived() -> dict[Path, str]:
    """What helm is not needed for: file → its text."""
    files = {ROOT / "charts" / "plato-cluster" / "values.schema.json": cluster_schema()}
    for plural in KINDS:
        name = f"{plural}.plato.im"
        text = (ROOT / "crds" / f"{name}.yaml").read_text(encoding="utf-8")
        files[CHART / "templates" / "crds" / f"{name}.yaml"] = crd_template(text, name)
    return files


def digest() -> str:
    """Of everything that deploy/plato.yaml is rendered from."""
    made = hashlib.sha256(_NAMESPACES.encode())
    for file in sorted(CHART.rglob("*")):
        if file.is_file():
            made.update(f"{file.relative_to(CHART)}\0".encode() + file.read_bytes() + b"\0")
    return made.hexdigest()


def _template(helm: str, namespace: str, *options: str) -> str:
    """The chart's objects without hooks, managed by no Helm. Raises CalledProcessError."""
    command = [helm, "template", "plato", str(CHART), "--namespace", namespace, "--no-hooks", "--skip-tests", *options]
    text = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    return text.replace("app.kubernetes.io/managed-by: Helm", "app.kubernetes.io/managed-by: kubectl")


def operator_manifest(helm: str) -> str:
    """deploy/plato.yaml: the operator in plato-system, serving the namespace plato."""
    return _NAMESPACES + _template(helm, "plato-system", "--set", "watchNamespaces={plato}", "--set", "rbac.nodes=true")


def dev_manifest(helm: str) -> str:
    """deploy/samples/dev-deps.yaml: a PostgreSQL and a Valkey, without their Secrets, which nobody keeps in a file."""
    parts = _template(helm, "plato", "--set", "devDeps.enabled=true").split("\n---\n")
    kept = [part for part in parts if "templates/devdeps/" in part and "\nkind: Secret\n" not in part]
    return "---\n" + "\n---\n".join(part.removeprefix("---\n").rstrip("\n") for part in kept) + "\n"


RENDERED: Final = {
    ROOT / "deploy" / "plato.yaml": operator_manifest,
    ROOT / "deploy" / "samples" / "dev-deps.yaml": dev_manifest,
}


def _mark() -> str:
    return f"# chart: sha256:{digest()}\n"


def rendered(helm: str) -> dict[Path, str]:
    """What helm is needed for: file → its text. Raises CalledProcessError."""
    head = "# Written from charts/plato by `make manifests`; do not edit.\n" + _mark()
    return {path: head + write(helm) for path, write in RENDERED.items()}


def unmarked() -> list[Path]:
    """Rendered files that another chart than this one was rendered to."""
    return [path for path in RENDERED if not path.exists() or _mark() not in path.read_text(encoding="utf-8")]


def main() -> int:
    """Entry point; returns the exit code."""
    check = "--check" in sys.argv[1:]
    helm = os.environ.get("HELM") or shutil.which("helm")
    stale = _settle(derived(), check)
    if helm:
        stale += _settle(rendered(helm), check)
    elif check:
        stale += unmarked()
    elif unmarked():
        print("deploy/ is stale, and there is no helm to write it: put it on the PATH, or name it in $HELM")
        return 1
    for path in stale:
        print(f"{path.relative_to(ROOT)} is stale: run `make manifests` and commit the result")
    return 1 if stale else 0


def _settle(files: dict[Path, str], check: bool) -> list[Path]:
    """Writes what differs, or with `check` returns it."""
    stale = [path for path, text in files.items() if _differs(path, text)]
    if check:
        return stale
    for path in stale:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(files[path], encoding="utf-8")
    return []


def _differs(path: Path, text: str) -> bool:
    return not path.exists() or path.read_text(encoding="utf-8") != text


if __name__ == "__main__":
    raise SystemExit(main())
