"""A Kubernetes, as a test sees it: objects are read by the API, everything a person would do is done by kubectl.

Waiting is for words: `wait_for("both gateways are Ready", …)` fails with these words and with what was seen last.
"""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, TypeVar

from kubernetes import config
from kubernetes.dynamic import DynamicClient
from kubernetes.dynamic.exceptions import NotFoundError, ResourceNotFoundError
from plato.api import names

POLL_S: Final = 0.3
FIELD_MANAGER: Final = "plato-e2e"
_GROUPS: Final = {
    "PlatoCluster": "plato.im/v1alpha1",
    "GatewayPool": "plato.im/v1alpha1",
    "StateShard": "plato.im/v1alpha1",
    "StatefulSet": "apps/v1",
    "Deployment": "apps/v1",
    "ReplicaSet": "apps/v1",
    "Job": "batch/v1",
    "Lease": "coordination.k8s.io/v1",
    "PodDisruptionBudget": "policy/v1",
    "CustomResourceDefinition": "apiextensions.k8s.io/v1",
}
"""apiVersion of each kind that is not v1's."""

ROOT: Final = Path(__file__).resolve().parents[2]
DEFINITIONS: Final = tuple(f"{kind}.{names.GROUP}" for kind in ("platoclusters", "gatewaypools", "stateshards"))

Object = dict[str, Any]
T = TypeVar("T")


class NotInTime(AssertionError):
    """What was waited for did not come: the words, and what was seen last."""


def wait_for(
    words: str,
    check: Callable[[], T],
    deadline_s: float,
    *,
    seen: Callable[[], object] | None = None,
    poll_s: float = POLL_S,
) -> T:
    """Returns the first true value of `check`, asked every `poll_s`. Raises NotInTime with `words` and what `seen` says."""
    end = time.monotonic() + deadline_s
    while True:
        value = check()
        if value:
            return value
        if time.monotonic() >= end:
            last = f"; last seen: {seen()}" if seen is not None else ""
            raise NotInTime(f"not within {deadline_s:.0f} s: {words}{last}")
        time.sleep(poll_s)


class Kube:
    """One namespace of one cluster."""

    def __init__(self, kubeconfig: Path, namespace: str, folder: Path | None = None) -> None:
        """folder: where kubectl and helm are looked for first."""
        self.kubeconfig = kubeconfig
        self.namespace = namespace
        self._folder = folder
        self._client: Any = None

    # ── reading ──────────────────────────────────────────────────────────────────────────────────────────────

    def get(self, kind: str, name: str, namespace: str | None = None) -> Object | None:
        """The object, or None. A broken connection is tried again."""
        try:
            found: Object = self._resource(kind).get(name=name, namespace=namespace or self.namespace).to_dict()
        except NotFoundError:
            return None
        return found

    def items(self, kind: str, selector: str = "", namespace: str | None = None) -> list[Object]:
        """The namespace's objects of a kind that have these labels."""
        found = self._resource(kind).get(namespace=namespace or self.namespace, label_selector=selector or None)
        return list(found.to_dict()["items"])

    def _resource(self, kind: str) -> Any:
        if self._client is None:
            self._client = self._connect()
        try:
            return self._client.resources.get(api_version=_GROUPS.get(kind, "v1"), kind=kind)
        except ResourceNotFoundError:  # a definition that came after we looked
            self._client = self._connect()
            return self._client.resources.get(api_version=_GROUPS.get(kind, "v1"), kind=kind)

    def _connect(self) -> Any:
        # The library says that it is typed, and these two are not.
        return DynamicClient(config.new_client_from_config(str(self.kubeconfig)))  # type: ignore[no-untyped-call]

    def condition(self, kind: str, name: str, condition: str) -> Object:
        """A condition of an object, {} while there is none."""
        found = self.get(kind, name) or {}
        return next((c for c in found.get("status", {}).get("conditions") or () if c["type"] == condition), {})

    def established(self, *definitions: str) -> None:
        """Waits until the API server serves each of these, e.g. "stateshards.plato.im". `kubectl wait` fails where one that
        has just come has no conditions yet."""

        def served() -> bool:
            found = (self.condition("CustomResourceDefinition", name, "Established") for name in definitions)
            return all(its.get("status") == "True" for its in found)

        wait_for(f"{', '.join(definitions)}: served", served, 30.0)

    def define(self) -> None:
        """The definitions of crds/, served when it returns."""
        self.done("apply", "--server-side", "--force-conflicts", "-f", str(ROOT / "crds"))
        self.established(*DEFINITIONS)

    def holds(self, kind: str, name: str, condition: str, status: str = "True") -> bool:
        """Whether the condition has this status for the newest generation."""
        found = self.get(kind, name) or {}
        conditions = found.get("status", {}).get("conditions") or ()
        its = next((c for c in conditions if c["type"] == condition), None)
        current = found.get("metadata", {}).get("generation")
        return its is not None and its["status"] == status and its.get("observedGeneration") == current

    # ── doing ────────────────────────────────────────────────────────────────────────────────────────────────

    def program(self, name: str) -> str:
        """kubectl or helm: the testbed's, else the one on the path."""
        own = self._folder / name if self._folder is not None else None
        return str(own) if own is not None and own.exists() else name

    def run(self, *words: str, given: object = None, timeout_s: float = 120.0) -> subprocess.CompletedProcess[str]:
        """kubectl with these words, in our namespace; `given` goes to its standard input as JSON."""
        return self.call([self.program("kubectl"), "-n", self.namespace, *words], given=given, timeout_s=timeout_s)

    def done(self, *words: str, given: object = None, timeout_s: float = 120.0) -> str:
        """The same, and it must succeed; returns its output."""
        result = self.run(*words, given=given, timeout_s=timeout_s)
        assert result.returncode == 0, f"kubectl {' '.join(words)}: {result.stderr.strip()}"
        return result.stdout

    def helm(self, *words: str, timeout_s: float = 300.0) -> str:
        """helm with these words, in our namespace; it must succeed."""
        result = self.call([self.program("helm"), "-n", self.namespace, *words], timeout_s=timeout_s)
        assert result.returncode == 0, f"helm {' '.join(words)}: {result.stderr.strip()}"
        return result.stdout

    def call(
        self, words: Sequence[str], *, given: object = None, timeout_s: float = 120.0
    ) -> subprocess.CompletedProcess[str]:
        """Any program, with KUBECONFIG set."""
        return subprocess.run(
            list(words),
            input=json.dumps(given) if given is not None else None,
            env={**os.environ, "KUBECONFIG": str(self.kubeconfig)},
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )

    def apply(self, *objects: Mapping[str, Any]) -> None:
        """Server-side apply, under a field manager of our own."""
        for each in objects:
            self.done("apply", "--server-side", f"--field-manager={FIELD_MANAGER}", "-f", "-", given=each)

    def patch(self, kind: str, name: str, change: Mapping[str, Any]) -> None:
        """A merge patch."""
        self.done("patch", kind, name, "--type=merge", "-p", json.dumps(change))

    def secret(self, name: str, values: Mapping[str, str]) -> None:
        """Makes or changes a Secret."""
        self.apply({"apiVersion": "v1", "kind": "Secret", "metadata": {"name": name}, "stringData": dict(values)})

    def make_namespace(self, labels: Mapping[str, str]) -> None:
        """Makes our namespace, anew if there is one of that name."""
        self.drop_namespace()
        given = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": self.namespace, "labels": dict(labels)}}
        self.done("create", "-f", "-", given=given)

    def drop_namespace(self, deadline_s: float = 120.0) -> None:
        """Deletes our namespace and waits until it is gone."""
        self.done("delete", "namespace", self.namespace, "--ignore-not-found", "--wait=false")
        wait_for(
            f"the namespace {self.namespace} is gone",
            lambda: self.get("Namespace", self.namespace) is None,
            deadline_s,
            seen=lambda: self.run("get", "all,platoclusters,gatewaypools,stateshards").stdout,
        )
