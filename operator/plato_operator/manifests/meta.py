"""What every object carries: name, labels, hashes, and the owner whose end is its end."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from plato.api.cluster import PlatoClusterSpec
from plato.api.names import (
    ANNOTATION_INPUT_HASH,
    GROUP,
    LABEL_CLUSTER,
    LABEL_COMPONENT,
    LABEL_POOL,
    LABEL_SHARD,
    VERSION,
)

from plato_operator.core.orders import Apply
from plato_operator.core.snapshot import Snapshot

COMMON_LABELS: Final = {"app.kubernetes.io/managed-by": "plato-operator", "app.kubernetes.io/part-of": "plato"}
"""Not app.kubernetes.io/instance: Argo CD takes what carries it for its own, and would prune it."""

API_VERSIONS: Final[Mapping[str, str]] = {
    "Secret": "v1", "ServiceAccount": "v1", "Service": "v1",
    "Role": "rbac.authorization.k8s.io/v1", "RoleBinding": "rbac.authorization.k8s.io/v1",
    "PodDisruptionBudget": "policy/v1", "NetworkPolicy": "networking.k8s.io/v1",
    "PodMonitor": "monitoring.coreos.com/v1", "Job": "batch/v1",
    "StatefulSet": "apps/v1", "Deployment": "apps/v1",
    "StateShard": f"{GROUP}/{VERSION}", "GatewayPool": f"{GROUP}/{VERSION}",
}  # fmt: skip


class OwnerMissingError(LookupError):
    """The owner of a child is not in the snapshot yet; the next pass has it."""


@dataclass(frozen=True, slots=True)
class Ask:
    """One order with what it is rendered from."""

    order: Apply
    snap: Snapshot

    @property
    def cluster(self) -> str:
        """Name of the PlatoCluster."""
        return self.snap.cluster.name

    @property
    def spec(self) -> PlatoClusterSpec:
        """spec of the PlatoCluster."""
        return self.snap.cluster.spec

    def labels(self) -> dict[str, str]:
        """Labels of the object and of its pods."""
        return {**COMMON_LABELS, **self.selector()}

    def selector(self) -> dict[str, str]:
        """Labels that pick the pods of this object, and no others."""
        order = self.order
        found = {LABEL_CLUSTER: self.cluster, LABEL_COMPONENT: COMPONENTS.get(order.role, order.role)}
        if order.owner_kind == "GatewayPool" or order.kind == "GatewayPool":
            found[LABEL_POOL] = order.owner if order.owner_kind == "GatewayPool" else order.name
        if order.owner_kind == "StateShard" or order.kind == "StateShard":
            found[LABEL_SHARD] = order.owner if order.owner_kind == "StateShard" else order.name
        return found

    def base(self) -> dict[str, Any]:
        """The object without what its kind is for."""
        order = self.order
        return {
            "apiVersion": API_VERSIONS[order.kind],
            "kind": order.kind,
            "metadata": {
                "name": order.name,
                "namespace": self.snap.cluster.namespace,
                "labels": self.labels(),
                "annotations": {ANNOTATION_INPUT_HASH: order.input_hash},
                "ownerReferences": [self._owner()],
            },
        }

    def _owner(self) -> dict[str, Any]:
        order, snap = self.order, self.snap
        if order.owner_kind == "PlatoCluster":
            uid = snap.cluster.uid
        else:
            owners: Mapping[str, Any] = snap.pools if order.owner_kind == "GatewayPool" else snap.shards
            if order.owner not in owners:
                raise OwnerMissingError(f"{order.owner_kind} {order.owner}, owner of {order.kind} {order.name}")
            uid = owners[order.owner].uid
        return {
            "apiVersion": f"{GROUP}/{VERSION}", "kind": order.owner_kind, "name": order.owner, "uid": uid,
            "controller": True, "blockOwnerDeletion": True,
        }  # fmt: skip


COMPONENTS: Final = {"members": "cluster", "admin-tokens": "cluster", "default": "gateway", "api": "msg"}
"""{role of an order: label, where the two differ}."""
