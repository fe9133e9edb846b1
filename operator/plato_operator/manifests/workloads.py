"""What makes pods: a StatefulSet per pool and shard, Deployments of msg and ipconfig, the Job that migrates."""

from __future__ import annotations

from typing import Any, Final

from plato_operator.core.snapshot import GATEWAY, MSG
from plato_operator.manifests import pods
from plato_operator.manifests.meta import Ask

KEPT_REVISIONS: Final = 3
MIGRATION_TRIES: Final = 12
"""Three quarters of an hour with the Job controller's back-off: a database may come up later than we do."""


def stateful_set(ask: Ask) -> dict[str, Any]:
    """StatefulSet of a pool or a shard. Nothing but the operator replaces a pod, so that each is drained first.

    Replicas move by drains: those of an existing object are repeated (without them the API server would set 1), under
    the precondition that it is the version they were read from.
    """
    order = ask.order
    gateway = order.role == GATEWAY
    made = ask.base()
    there = ask.snap.children.get((order.kind, order.name))
    replicas = order.replicas
    if replicas is None and there is not None:
        replicas = there.replicas
        if there.resource_version:
            made["metadata"]["resourceVersion"] = there.resource_version
    spec = {
        "replicas": replicas if replicas is not None else 1,
        "serviceName": order.owner if gateway else f"{ask.cluster}-state",
        "podManagementPolicy": "Parallel",
        "updateStrategy": {"type": "OnDelete"},
        "revisionHistoryLimit": KEPT_REVISIONS,
        "selector": {"matchLabels": ask.selector()},
        "template": pods.gateway_pod(ask) if gateway else pods.state_pod(ask),
    }
    return {**made, "spec": spec}


def deployment(ask: Ask) -> dict[str, Any]:
    """Deployment of msg or ipconfig: a new pod is ready before an old one goes."""
    return {
        **ask.base(),
        "spec": {
            "replicas": ask.order.replicas if ask.order.replicas is not None else 1,
            "revisionHistoryLimit": KEPT_REVISIONS,
            "strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0}},
            "selector": {"matchLabels": ask.selector()},
            "template": pods.msg_pod(ask) if ask.order.role == MSG else pods.ipconfig_pod(ask),
        },
    }


def job(ask: Ask) -> dict[str, Any]:
    """The Job of one set of inputs; it stays, since msg waits for its outcome. Failed pods stay too, for their logs."""
    return {**ask.base(), "spec": {"backoffLimit": MIGRATION_TRIES, "template": pods.migrate_pod(ask)}}
