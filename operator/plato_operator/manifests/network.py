"""How pods are found, how many may be evicted at one time, who may reach them, and who scrapes them."""

from __future__ import annotations

from typing import Any

from plato.api.names import (
    IPCONFIG_INTERNAL_PORT,
    IPCONFIG_PORT,
    LABEL_CLUSTER,
    LABEL_COMPONENT,
    MSG_API_PORT,
    MSG_GRPC_PORT,
    MSG_HTTP_PORT,
    STATE_ADMIN_PORT,
    STATE_PORT,
)
from plato.runtime.tls import INTERNAL_NAME

from plato_operator.core.snapshot import API, GATEWAY, IPCONFIG, MSG, STATE
from plato_operator.manifests.meta import Ask


def service(ask: Ask) -> dict[str, Any]:
    """Headless for state and pools, where each pod has a name of its own; an address for msg and ipconfig."""
    role = ask.order.role
    if role == API:
        return _api_service(ask)
    if role == GATEWAY:
        ports = ask.snap.pools[ask.order.owner].spec.ports
        found = [_port("tcp", ports.tcp), _port("ws", ports.ws), _port("admin", ports.admin)]
        if ports.poll:
            found.append(_port("poll", ports.poll))
    else:
        found = {
            STATE: [_port("grpc", STATE_PORT), _port("admin", STATE_ADMIN_PORT)],
            MSG: [_port("grpc", MSG_GRPC_PORT), _port("http", MSG_HTTP_PORT, "admin")],
            IPCONFIG: [_port("http", IPCONFIG_PORT)],
        }[role]
    spec: dict[str, Any] = {"selector": ask.selector(), "ports": found}
    if role in (GATEWAY, STATE):
        # Not ready ones too: a shard that loads and a gateway that waits for its record are asked by name.
        spec |= {"clusterIP": "None", "publishNotReadyAddresses": True}
    else:
        spec["type"] = ask.spec.ipconfig.service_type if role == IPCONFIG else "ClusterIP"
    return {**ask.base(), "spec": spec}


def _api_service(ask: Ask) -> dict[str, Any]:
    """The people's way to msg: a port that has the HTTP API and nothing else."""
    api, made = ask.spec.api, ask.base()
    made["metadata"]["annotations"] = {**api.annotations, **made["metadata"]["annotations"]}
    scheme = "https" if ask.spec.api_certificate is not None else "http"
    port = {**_port("api", api.port), "appProtocol": scheme}  # how an Ingress or a balancer is to speak to it
    return {**made, "spec": {"selector": ask.selector(), "ports": [port], "type": api.service_type}}


def _port(name: str, port: int, target: str = "") -> dict[str, Any]:
    return {"name": name, "port": port, "targetPort": target or name, "protocol": "TCP"}


def budget(ask: Ask) -> dict[str, Any]:
    """PodDisruptionBudget. Pods that are not ready may always be evicted: they serve nobody and block a node's drain."""
    most = ask.snap.pools[ask.order.owner].spec.rollout.max_unavailable if ask.order.role == GATEWAY else 1
    return {
        **ask.base(),
        "spec": {
            "maxUnavailable": most,
            "unhealthyPodEvictionPolicy": "AlwaysAllow",
            "selector": {"matchLabels": ask.selector()},
        },
    }


def network_policy(ask: Ask) -> dict[str, Any]:
    """Who may reach state, msg, ipconfig and the migration.

    Gateways are public and often on the host's network, which no policy sees; so what they send arrives from a node's
    address. Admin ports stay open: kubelets probe them, the operator asks them from another namespace, and the report
    needs its token. Without the nodes' addresses gRPC is open too, and relies on tls.internal. The people's port, where
    there is one, is open to the world.
    """
    own = [{"podSelector": {"matchLabels": {LABEL_CLUSTER: ask.cluster}}}]
    nodes = [{"ipBlock": {"cidr": cidr}} for cidr in ask.snap.node_cidrs]
    grpc: dict[str, Any] = {"ports": _numbers(STATE_PORT, MSG_GRPC_PORT)}
    if nodes:
        grpc["from"] = [*own, *nodes]
    people = [MSG_API_PORT] if ask.spec.api.enabled else []
    public = {"ports": _numbers(MSG_HTTP_PORT, IPCONFIG_PORT, IPCONFIG_INTERNAL_PORT, STATE_ADMIN_PORT, *people)}
    picked = [{"key": LABEL_COMPONENT, "operator": "In", "values": [STATE, MSG, IPCONFIG, "migrate"]}]
    return {
        **ask.base(),
        "spec": {
            "podSelector": {"matchLabels": {LABEL_CLUSTER: ask.cluster}, "matchExpressions": picked},
            "policyTypes": ["Ingress"],
            "ingress": [grpc, public],
        },
    }


def _numbers(*ports: int) -> list[dict[str, Any]]:
    return [{"port": port, "protocol": "TCP"} for port in ports]


def pod_monitor(ask: Ask) -> dict[str, Any]:
    """PodMonitor of the admin ports of every pod, gateways on the host's network too."""
    endpoint: dict[str, Any] = {"port": "admin", "path": "/metrics"}
    internal = ask.spec.tls.internal
    if internal is not None:
        ca = {"secret": {"name": internal.name, "key": "ca.crt"}}
        endpoint |= {"scheme": "https", "tlsConfig": {"ca": ca, "serverName": INTERNAL_NAME}}
    made = ask.base()
    made["metadata"]["labels"] = {**ask.spec.monitoring.labels, **made["metadata"]["labels"]}
    picked = [{"key": LABEL_COMPONENT, "operator": "In", "values": [GATEWAY, STATE, MSG, IPCONFIG]}]
    return {
        **made,
        "spec": {
            "selector": {"matchLabels": {LABEL_CLUSTER: ask.cluster}, "matchExpressions": picked},
            "podTargetLabels": [LABEL_CLUSTER, LABEL_COMPONENT],
            "podMetricsEndpoints": [endpoint],
        },
    }
