"""Argo CD's way with Applications, as far as a test needs it: render, apply wave after wave, wait for health in between.

    Applications of a folder → by their wave → rendered by helm or read → by the wave, kind and name of each object
    → server-side apply as argocd-controller → healthy? → the next wave

The health of plato.im's kinds is what deploy/argocd/health.lua says, run by a real Lua; that of the others is Argo CD's
own rule.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Final

import yaml

from e2e.frame.kube import Kube, Object, wait_for

ROOT: Final = Path(__file__).resolve().parent.parent
HEALTH: Final = ROOT / "deploy" / "argocd" / "health.lua"
WAVE: Final = "argocd.argoproj.io/sync-wave"
KINDS: Final = (
    "Namespace", "NetworkPolicy", "ResourceQuota", "LimitRange", "PodDisruptionBudget", "ServiceAccount", "Secret",
    "ConfigMap", "StorageClass", "PersistentVolume", "PersistentVolumeClaim", "CustomResourceDefinition", "ClusterRole",
    "ClusterRoleBinding", "Role", "RoleBinding", "Service", "DaemonSet", "Pod", "ReplicaSet", "Deployment", "StatefulSet",
    "Job", "CronJob", "Ingress",
)  # fmt: skip
"""The order within a wave; other kinds come last."""


@dataclass(frozen=True, slots=True)
class Health:
    """Healthy, Progressing, Degraded or Suspended, and why."""

    status: str
    message: str


def wave_of(found: Object) -> int:
    """The wave of an Application or an object."""
    return int(found["metadata"].get("annotations", {}).get(WAVE, "0"))


def in_waves(objects: Iterable[Object]) -> Iterator[tuple[int, list[Object]]]:
    """(wave, its objects in the order of their kinds and names), least wave first."""

    def order(found: Object) -> tuple[int, int, str]:
        kind = found["kind"]
        return wave_of(found), KINDS.index(kind) if kind in KINDS else len(KINDS), found["metadata"]["name"]

    for wave, group in groupby(sorted(objects, key=order), key=wave_of):
        yield wave, list(group)


def applications(folder: Path) -> list[Object]:
    """The Applications that lie in a folder."""
    return [yaml.safe_load(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*.yaml"))]


def rendered(application: Object, helm: str) -> list[Object]:
    """What an Application applies, away from any cluster, as Argo CD renders it."""
    source = application["spec"]["source"]
    path = ROOT / source["path"]
    if "helm" in source:
        words = [
            helm, "template", source["helm"]["releaseName"], str(path), "--no-hooks", "--values", "-",
            "--namespace", application["spec"]["destination"]["namespace"],
        ]  # fmt: skip
        given = json.dumps(source["helm"].get("valuesObject", {}))
        text = subprocess.run(words, input=given, check=True, capture_output=True, text=True).stdout
        return [made for made in yaml.safe_load_all(text) if made]
    texts = [file.read_text(encoding="utf-8") for file in sorted(path.glob("*.yaml"))]
    return [made for text in texts for made in yaml.safe_load_all(text) if made]


def lua() -> str | None:
    """The interpreter, or None."""
    return shutil.which("lua5.4") or shutil.which("lua")


def _lua_value(value: object) -> str:
    """A value as Lua writes it; Kubernetes' null is what is not there."""
    if isinstance(value, dict):
        return "{" + ",".join(f"[{_lua_value(str(k))}]={_lua_value(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list):
        return "{" + ",".join(_lua_value(v) for v in value) + "}"
    if value is None or isinstance(value, bool):
        return {None: "nil", True: "true", False: "false"}[value]
    if isinstance(value, int | float):
        return repr(value)
    return '"' + "".join(f"\\{byte:03d}" for byte in str(value).encode()) + '"'


def lua_health(found: Object, script: Path = HEALTH) -> Health:
    """What the script says of a resource. Raises CalledProcessError, with Lua's words in stderr."""
    program = lua()
    assert program is not None, "no lua5.4 on the PATH: apt-get install lua5.4"
    code = f"obj={_lua_value(found)}\nlocal hs=dofile({_lua_value(str(script))})\nio.write(hs.status,'\\n',hs.message or '')"
    # By a file on standard input: an object may be longer than an argument.
    said = subprocess.run([program, "-"], input=code, check=True, capture_output=True, text=True).stdout
    status, _, message = said.partition("\n")
    return Health(status, message)


def health(found: Object | None) -> Health:
    """Of an object as it is on the API server."""
    if found is None:
        return Health("Progressing", "it is not there yet")
    kind, status, generation = found["kind"], found.get("status") or {}, found["metadata"].get("generation")
    if found["apiVersion"].startswith("plato.im/"):
        return lua_health(found)
    if kind == "CustomResourceDefinition":
        held = {c["type"] for c in status.get("conditions") or () if c["status"] == "True"}
        return Health("Healthy" if "Established" in held else "Progressing", "")
    if kind == "Deployment":
        wanted = found["spec"].get("replicas", 1)
        done = status.get("observedGeneration") == generation and wanted == status.get("updatedReplicas", 0)
        done = done and status.get("availableReplicas", 0) == wanted == status.get("replicas", 0)
        return Health(
            "Healthy" if done else "Progressing", f"{status.get('availableReplicas', 0)} of {wanted} available"
        )
    return Health("Healthy", "")


def sync(kube: Kube, folder: Path, deadline_s: float) -> list[str]:
    """Brings all Applications of a folder, in the order of their waves; returns their names in that order.

    Each has to be healthy before the next one begins. Raises NotInTime with what was said last.
    """
    order = []
    for _, apps in in_waves(applications(folder)):
        for application in apps:
            for _, objects in in_waves(rendered(application, kube.program("helm"))):
                apply(kube, objects)
                wait_healthy(kube, application["metadata"]["name"], objects, deadline_s)
            order.append(str(application["metadata"]["name"]))
    return order


def apply(kube: Kube, objects: Iterable[Object], *how: str) -> str:
    """Server-side apply of a wave, as Argo CD does it; returns what kubectl says."""
    words = ("apply", "--server-side", "--force-conflicts", "--field-manager=argocd-controller", *how, "-f", "-")
    return "".join(kube.done(*words, given=each) for each in objects)


def wait_healthy(kube: Kube, name: str, objects: list[Object], deadline_s: float) -> None:
    """Waits until each of the objects is Healthy."""

    def ill() -> list[str]:
        states = {f"{each['kind']} {each['metadata']['name']}": health(live(kube, each)) for each in objects}
        return [f"{what}: {h.status} {h.message}" for what, h in states.items() if h.status != "Healthy"]

    wait_for(f"the Application {name} is healthy", lambda: not ill(), deadline_s, seen=ill)


def live(kube: Kube, wanted: Object) -> Object | None:
    """The object as it is now."""
    group = wanted["apiVersion"].rpartition("/")[0]
    kind = f"{wanted['kind']}.{group}" if group else wanted["kind"]
    found = kube.run("get", kind.lower(), wanted["metadata"]["name"], "-o", "json")
    if found.returncode:
        assert re.search(r"NotFound|the server doesn't have a resource type", found.stderr), found.stderr
        return None
    loaded: Object = json.loads(found.stdout)
    return loaded
