"""The objects that the operator applies, as dicts: an order and the snapshot in, one whole object out; nothing is called.

`render` is for server-side apply by field manager FIELD_MANAGER, with force. Two exceptions, both so that nobody's choice
is undone: objects of CREATED_ONCE are posted (409: it is there, all is well), and a default pool that does not exist is
first made from `initial`, by INITIAL_FIELD_MANAGER, then applied as every other object. A StatefulSet that exists is
rendered with its resourceVersion: 409 means that the snapshot was stale, and the next pass tries again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from plato_operator.core.orders import Apply
from plato_operator.core.snapshot import Snapshot
from plato_operator.manifests import access, network, resources, workloads
from plato_operator.manifests.meta import API_VERSIONS, Ask, OwnerMissingError
from plato_operator.manifests.overlay import OverlayError

__all__ = [
    "API_VERSIONS", "CREATED_ONCE", "FIELD_MANAGER", "INITIAL_FIELD_MANAGER", "OverlayError", "OwnerMissingError", "initial",
    "render",
]  # fmt: skip

FIELD_MANAGER: Final = "plato-operator"
INITIAL_FIELD_MANAGER: Final = "plato-operator-initial"
CREATED_ONCE: Final = frozenset({"Secret", "Job", "StateShard"})

_BUILDERS: Final[dict[str, Callable[[Ask], dict[str, Any]]]] = {
    "Secret": access.secret,
    "ServiceAccount": access.service_account,
    "Role": access.role,
    "RoleBinding": access.role_binding,
    "Service": network.service,
    "PodDisruptionBudget": network.budget,
    "NetworkPolicy": network.network_policy,
    "PodMonitor": network.pod_monitor,
    "Job": workloads.job,
    "StateShard": resources.state_shard,
    "StatefulSet": workloads.stateful_set,
    "GatewayPool": resources.gateway_pool,
    "Deployment": workloads.deployment,
}


def render(order: Apply, snapshot: Snapshot) -> dict[str, Any]:
    """The whole object of an order. Raises OverlayError for a podOverlay that cannot be, OwnerMissingError when its owner
    is not in the snapshot."""
    return _BUILDERS[order.kind](Ask(order, snapshot))


def initial(order: Apply, snapshot: Snapshot) -> dict[str, Any] | None:
    """What is applied before `render`'s object, by INITIAL_FIELD_MANAGER; None for all but a new default pool."""
    if order.kind != "GatewayPool" or order.replicas is None:
        return None
    return resources.new_gateway_pool(Ask(order, snapshot))
