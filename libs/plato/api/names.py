"""Default ports (defaults.md's table, copied into docs/settings), fixed names, and what a cluster's children are called."""

from __future__ import annotations

from typing import Final

GATEWAY_TCP_PORT: Final = 8900
GATEWAY_WS_PORT: Final = 8901
STATE_PORT: Final = 8902
MSG_HTTP_PORT: Final = 8903
IPCONFIG_PORT: Final = 8904
IPCONFIG_INTERNAL_PORT: Final = 8905
STATE_ADMIN_PORT: Final = 8906
MSG_GRPC_PORT: Final = 8907
POSTGRES_PORT: Final = 8908
GATEWAY_ADMIN_PORT: Final = 8909
GATEWAY_POLL_PORT: Final = 8914
LOCAL_WEB_PORT: Final = 8915
OPERATOR_PORT: Final = 8910
MSG_API_PORT: Final = 8911
"""The API for people at a msg pod; elsewhere msg.api_port has no default."""
VALKEY_PORT: Final = 8928

LOCAL_PORT_STEP: Final = 10
"""A second local instance of a service listens this much higher."""

WS_PATH: Final = "/ws"
POLL_PATH: Final = "/poll"
GUEST_PREFIX: Final = "guest:"
ADMIN_USER: Final = "admin"
"""from_user of what administrators, and servers with authority, do. No token and no header may name it."""

GROUP: Final = "plato.im"
VERSION: Final = "v1alpha1"

LABEL_CLUSTER: Final = "plato.im/cluster"
LABEL_COMPONENT: Final = "plato.im/component"
"""gateway, state, msg or ipconfig."""
LABEL_POOL: Final = "plato.im/pool"
LABEL_SHARD: Final = "plato.im/shard"

ANNOTATION_INPUT_HASH: Final = "plato.im/input-hash"
"""On a pod template: hash of the inputs that it was rendered from."""
ANNOTATION_VERSION: Final = "plato.im/version"
"""On a pod template: the version that the spec asked for, whatever image an override names."""
ANNOTATION_RESTARTED_AT: Final = "kubectl.kubernetes.io/restartedAt"
ANNOTATION_DRAIN: Final = "plato.im/drain"
"""On a gateway pod, put by a person: drain it; removing it cancels."""
ANNOTATION_PUBLIC_ADDRESS: Final = "plato.im/public-address"
"""On a node: address of its gateways that clients are told, with publicAddress NodeAnnotation."""
ANNOTATION_ADOPT: Final = "plato.im/adopt"
"""On a PlatoCluster, put by a person: "<namespace>/<name>" of the one whose database schema and store it takes over."""
GATE_SERVING: Final = "plato.im/serving"
"""Readiness gate of gateway pods, set by the operator."""


EXIT_NOT_ALONE: Final = 3
"""Exit code of `plato db migrate`, msg and state where schema or store belong to another PlatoCluster."""
ENV_CLUSTER: Final = "PLATO_CLUSTER"
"""Variable with the identity of the PlatoCluster that msg, state and the migration run for. No setting: an older image,
which would refuse one that it does not know, passes it over."""


def cluster_identity(namespace: str, cluster: str) -> str:
    """How a PlatoCluster marks its database schema and its store."""
    return f"{namespace}/{cluster}"


def topology_name(cluster: str) -> str:
    """ConfigMap that holds the topology record."""
    return f"{cluster}-topology"


def admin_secret_name(cluster: str) -> str:
    """Secret with the bearer tokens of /v1/report."""
    return f"{cluster}-admin"


def api_service_name(cluster: str) -> str:
    """Service by which people reach the HTTP API."""
    return f"{cluster}-api"


def default_pool_name(cluster: str) -> str:
    """The GatewayPool that a PlatoCluster makes by itself."""
    return f"{cluster}-edge"


def shard_name(cluster: str, index: int) -> str:
    """StateShard number `index` (0 …) of a cluster; its StatefulSet has the same name."""
    return f"{cluster}-s{index}"


def shard_index(cluster: str, shard: str) -> int | None:
    """The number in a name made by `shard_name`; None: the name is not of that form."""
    number = shard.removeprefix(f"{cluster}-s")
    return int(number) if number != shard and number.isdecimal() and str(int(number)) == number else None


def shard_addr(cluster: str, shard: str, namespace: str) -> str:
    """host:port of a shard's only pod, by the headless Service `<cluster>-state`."""
    return f"{shard}-0.{cluster}-state.{namespace}.svc:{STATE_PORT}"


def is_taken(cluster: str, pool: str) -> bool:
    """Whether a GatewayPool of this name would make objects that are named like the cluster's own ones."""
    return (
        pool in {f"{cluster}-{part}" for part in ("state", "msg", "ipconfig")} or shard_index(cluster, pool) is not None
    )
