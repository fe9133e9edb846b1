"""Plato as a user runs it: the operator by its chart, one PlatoCluster, its gateways reached from outside the cluster.

Everything lies in one namespace: Secrets for the database, the store and the signing key, the operator, the cluster.
"""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from plato.adapters.tokens import make_dev_key
from plato.api import names

from e2e.frame.dependencies import Dependencies
from e2e.frame.kube import Kube, Object, wait_for
from e2e.live.plan import Plan
from tests.faults import checker, looking

ROOT: Final = Path(__file__).resolve().parents[2]
RELEASE: Final = "plato"
OPERATOR_LABEL: Final = "app.kubernetes.io/component=operator"
READY_S: Final = 240.0


@dataclass(frozen=True, slots=True)
class Images:
    """Where the nodes find the images: <registry>/plato-<service>:<tag>."""

    registry: str
    tag: str
    next_tag: str
    """The same images under another name, "" when there is none: what a rollout goes to."""
    pull_policy: str


def merge(base: Mapping[str, Any], change: Mapping[str, Any]) -> Object:
    """`base` with `change` laid over it, field by field."""
    made = dict(base)
    for key, value in change.items():
        below = made.get(key)
        made[key] = merge(below, value) if isinstance(below, Mapping) and isinstance(value, Mapping) else value
    return made


class Platform:
    """One PlatoCluster named `name` in the namespace of `kube`."""

    def __init__(self, kube: Kube, name: str, images: Images, dependencies: Dependencies, folder: Path) -> None:
        """folder: for the signing key; it stays with the caller."""
        self.kube = kube
        self.name = name
        self.pool = names.default_pool_name(name)
        self.images = images
        self.dependencies = dependencies
        self.keys_dir = folder / "keys"
        self.schema = f"e2e_{secrets.token_hex(4)}"

    # ── bringing it up ───────────────────────────────────────────────────────────────────────────────────────

    def install_operator(self, more: Mapping[str, str] | None = None) -> None:
        """The definitions and the chart, as the README says; `more` values of it."""
        self.kube.define()
        values = {
            "image.registry": self.images.registry,
            "image.tag": self.images.tag,
            "image.pullPolicy": self.images.pull_policy,
            "crds.install": "false",
            "rbac.nodes": "true",
            "uninstall.refuseWithClusters": "false",
            **(more or {}),
        }
        words = [f"--set={key}={value}" for key, value in values.items()]
        self.kube.helm(
            "upgrade", "--install", RELEASE, str(ROOT / "charts" / "plato"), *words, "--wait", "--timeout=120s"
        )

    def make_secrets(self) -> None:
        """Database, store and the signing key, one key id per entry."""
        self.kube.secret(f"{self.name}-db", {"uri": self.dependencies.database_uri})
        self.kube.secret(f"{self.name}-store", {"url": self.dependencies.store_url})
        key = make_dev_key(self.keys_dir)
        self.kube.secret(f"{self.name}-keys", {key.name: key.read_text(encoding="utf-8")})

    def manifest(self, change: Mapping[str, Any] | None = None) -> Object:
        """The resource; `change` is laid over its spec."""
        spec: Object = {
            "version": self.images.tag,
            "images": {"registry": self.images.registry, "pullPolicy": self.images.pull_policy},
            "database": {"uri": {"name": f"{self.name}-db"}, "schema": self.schema},
            "store": {"url": {"name": f"{self.name}-store"}, "keyPrefix": f"{self.schema}:"},
            "auth": {"keys": {"name": f"{self.name}-keys"}},
            "ipconfig": {"serviceType": "NodePort"},
        }
        return {
            "apiVersion": f"{names.GROUP}/{names.VERSION}",
            "kind": "PlatoCluster",
            "metadata": {"name": self.name},
            "spec": merge(spec, change or {}),
        }

    def create(self, change: Mapping[str, Any] | None = None) -> None:
        """Secrets and resource; Ready at the end."""
        self.make_secrets()
        self.kube.apply(self.manifest(change))
        self.wait_ready()

    def patch(self, spec: Mapping[str, Any]) -> None:
        """Changes the cluster's spec."""
        self.kube.patch("platocluster", self.name, {"spec": spec})

    def is_ready(self) -> bool:
        """Ready is True for the newest generation."""
        return self.kube.holds("PlatoCluster", self.name, "Ready")

    def wait_ready(self, deadline_s: float = READY_S) -> None:
        """Waits for that."""
        wait_for(f"the PlatoCluster {self.name} is Ready", self.is_ready, deadline_s, seen=self.state)

    def wait_settled(self, deadline_s: float = READY_S) -> None:
        """Waits until the operator has nothing to do for the newest generations: no roll and no drain is under way."""

        def settled() -> bool:
            # In this order: a cluster that says so of its newest spec has written the pool's, which is looked at then.
            cluster = self.kube.holds("PlatoCluster", self.name, "Reconciling", "False")
            return cluster and self.kube.holds("GatewayPool", self.pool, "Reconciling", "False")

        wait_for(f"nothing is under way in {self.name}", settled, deadline_s, seen=self.state)

    def state(self) -> str:
        """Conditions and pods, for a message."""
        found = self.kube.get("PlatoCluster", self.name) or {}
        conditions = [
            f"{c['type']}={c['status']} {c.get('reason', '')}: {c.get('message', '')}"
            for c in found.get("status", {}).get("conditions") or ()
        ]
        pods = self.kube.run("get", "pods", "-o", "wide").stdout
        return "\n".join([*conditions, pods])

    # ── its parts ────────────────────────────────────────────────────────────────────────────────────────────

    def pods(self, component: str) -> list[Object]:
        """Pods of a component (gateway, state, msg, ipconfig), by name; those that have ended are left out."""
        selector = f"{names.LABEL_CLUSTER}={self.name},{names.LABEL_COMPONENT}={component}"
        found = [p for p in self.kube.items("Pod", selector) if p["status"].get("phase") not in ("Succeeded", "Failed")]
        return sorted(found, key=lambda pod: str(pod["metadata"]["name"]))

    def serving(self) -> list[Object]:
        """Gateways that are Ready and not about to go."""
        return [pod for pod in self.pods("gateway") if pod_ready(pod) and "deletionTimestamp" not in pod["metadata"]]

    def nodes_of(self, component: str) -> set[str]:
        """Nodes that hold a pod of the component."""
        return {str(pod["spec"].get("nodeName", "")) for pod in self.pods(component)} - {""}

    def topology(self) -> Object:
        """The record as the pods read it, {} while there is none."""
        found = self.kube.get("ConfigMap", names.topology_name(self.name)) or {}
        text = (found.get("data") or {}).get("topology.json")
        return dict(json.loads(text)) if text else {}

    def scale(self, gateways: int) -> None:
        """kubectl scale, as a person does it."""
        self.kube.done("scale", "gwpool", self.pool, f"--replicas={gateways}")

    def wait_gateways(self, count: int, deadline_s: float) -> None:
        """Waits until exactly the first so many gateways are there, and all of them serve.

        By number, as a roll leaves one out for a moment: then as many are there as after a scale that has not begun.
        """
        wanted = set(range(count))

        def there() -> bool:
            return _numbers(self.serving()) == wanted == _numbers(self.pods("gateway"))

        wait_for(f"{count} gateways serve, and no other is left", there, deadline_s, seen=self.state)

    # ── from outside ─────────────────────────────────────────────────────────────────────────────────────────

    def ipconfig_url(self, host: str) -> str:
        """Where a client outside asks for the list: the NodePort of ipconfig's Service on the node at `host`."""
        service = self.kube.get("Service", f"{self.name}-ipconfig")
        assert service is not None, "there is no Service of ipconfig"
        ports = {port["name"]: port.get("nodePort") for port in service["spec"]["ports"]}
        port = ports.get("http") or next(iter(ports.values()))
        return f"http://{host}:{port}"

    def plan(self, folder: Path, ipconfig_url: str, **more: Any) -> Plan:
        """A live load on this platform."""
        return Plan(
            folder=folder,
            keys_dir=self.keys_dir,
            issuer="plato",
            audience="plato",
            ipconfig_url=ipconfig_url,
            **more,
        )

    def rows(self) -> Sequence[checker.Row]:
        """Every message in the database."""
        return asyncio.run(looking.rows_of(self.dependencies.database_uri, self.schema))


def _numbers(pods: Sequence[Object]) -> set[int]:
    """The numbers at the end of a StatefulSet's pods' names."""
    return {int(str(pod["metadata"]["name"]).rpartition("-")[2]) for pod in pods}


def pod_ready(pod: Object) -> bool:
    """The pod's condition Ready."""
    return any(c["type"] == "Ready" and c["status"] == "True" for c in pod["status"].get("conditions") or ())
