"""Snapshots to render from, and the orders that passes make of them: of a twelve-line cluster, and one with everything."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from plato.api.cluster import PlatoClusterSpec
from plato.api.objects import from_object
from plato.api.pool import GatewayPoolSpec
from plato.api.shard import StateShardSpec
from plato.api.shared import Ref
from plato_operator.core import rebuild
from plato_operator.core.orders import Apply
from plato_operator.core.plan import one_pass
from plato_operator.core.snapshot import Child, Cluster, Pool, Shard, Snapshot
from plato_operator.manifests import render

ME = "op-1"
PLAIN: dict[str, Any] = {
    "version": "0.1.0",
    "database": {"uri": {"name": "demo-db-app"}},
    "store": {"url": {"name": "demo-store"}},
    "auth": {"keys": {"name": "demo-keys"}},
}
KAFKA: dict[str, Any] = {
    **PLAIN,
    "bus": {"type": "Kafka", "kafka": {"config": {"name": "demo-kafka", "key": "client.properties"}, "topic": "chat"}},
}
PRODUCT: dict[str, Any] = {
    **PLAIN,
    "tls": {"client": {"name": "edge-tls"}},
    "origins": ["https://chat.example.org", "https://localhost:8443"],
    "api": {
        "enabled": True, "port": 443, "serviceType": "LoadBalancer", "annotations": {"example.org/pool": "public"},
        "maxConnections": 500, "userRequestsPerSecond": 20, "serverRequestsPerSecond": 4_000,
    },
    "attachments": {
        "s3": {
            "endpoint": "https://store.example.org", "bucket": "chat-files", "prefix": "demo", "region": "eu-1",
            "accessKey": {"name": "store-keys"}, "secretKey": {"name": "store-keys", "key": "AWS_SECRET_ACCESS_KEY"},
        },
        "maxBytes": 1_048_576, "types": ["image/png", "audio/*"], "keepUnusedSeconds": 3_600, "unusedMaxBytes": 8_388_608,
    },
    "hooks": {
        "beforeUrl": "https://app.example.org/before", "beforeTimeoutMilliseconds": 200, "beforeOnFailure": "Refuse",
        "afterUrl": "https://app.example.org/after", "pushUrl": "https://app.example.org/push",
        "secret": {"name": "hook-key"},
    },
    "messages": {
        "recallSeconds": 0, "editSeconds": 60, "retentionDays": 365, "groupMembers": 500, "friendsOnly": True,
        "search": False,
    },
    "events": {"enabled": True, "retentionHours": 24},
    "networkPolicy": True,
}  # fmt: skip
FULL_POOL: dict[str, Any] = {
    "workers": 4,
    "network": "Pod",
    "ports": {"tcp": 9000, "ws": 9001, "admin": 9009, "poll": 9014},
    "publicAddress": "NodeExternalIP",
    "capacity": {"connections": 1000, "bytesPerSecond": 250_000_000},
    "drain": {"pacePerSecond": 50, "deadlineSeconds": 120, "settleSeconds": 2},
    "rollout": {"maxUnavailable": 2},
    "resources": {"requests": {"cpu": "10m"}, "limits": {"memory": "128Mi"}},
    "placement": {
        "nodeSelector": {"kubernetes.io/os": "linux"},
        "tolerations": [{"key": "edge", "operator": "Exists"}],
    },
    "podOverlay": {
        "metadata": {"annotations": {"example.org/team": "chat"}},
        "spec": {
            "tolerations": [{"key": "spot", "operator": "Exists"}],
            "volumes": [{"name": "geo", "emptyDir": {}}],
            "containers": [
                {
                    "name": "gateway",
                    "env": [{"name": "PLATO_LOG__LEVEL", "value": "debug"}],
                    "volumeMounts": [{"name": "geo", "mountPath": "/geo"}],
                },
            ],
        },
    },
}
FULL: dict[str, Any] = {
    "version": "0.2.0",
    "images": {
        "registry": "registry.example.org/chat", "pullPolicy": "Always", "pullSecrets": [{"name": "pull"}],
        "overrides": {"ipconfig": "registry.example.org/own/ipconfig@sha256:" + "0" * 64},
    },
    "database": {"uri": {"name": "db", "key": "dsn"}, "schema": "chat"},
    "store": {"url": {"name": "kv", "key": "dsn"}, "keyPrefix": "chat:"},
    "bus": {"partitions": 16},
    "auth": {"issuer": "https://id.example.org", "audience": "chat", "guests": True},
    "tls": {"client": {"name": "edge-tls"}, "internal": {"name": "inside-tls"}},
    "state": {"shards": 1, "resumeWindowSeconds": 60, "resources": {"limits": {"memory": "1Gi"}}},
    "msg": {
        "replicas": 1,
        "placement": {
            "priorityClassName": "chat",
            "tolerations": [
                {
                    "key": "node.kubernetes.io/unreachable", "operator": "Exists", "effect": "NoExecute",
                    "tolerationSeconds": 60,
                }
            ],
        },
    },
    "ipconfig": {"replicas": 3, "serviceType": "LoadBalancer"},
    "gateways": {"initialReplicas": 3, "template": FULL_POOL},
    "monitoring": {"podMonitor": True, "labels": {"release": "prometheus"}},
    "networkPolicy": True,
}  # fmt: skip


def cluster(spec: Mapping[str, Any], *, namespace: str = "im", uid: str = "uid-cluster") -> Cluster:
    """A PlatoCluster `demo`."""
    return Cluster("demo", namespace, uid, 1, from_object(PlatoClusterSpec, spec))


def default_pool(of: Cluster, uid: str = "uid-pool") -> Pool:
    """Its default pool as the API server fills it in."""
    template = of.spec.gateways.template
    fields = {name: getattr(template, name) for name in template.__dataclass_fields__}
    spec = GatewayPoolSpec(**fields, cluster_ref=Ref(of.name), replicas=of.spec.gateways.initial_replicas)
    return Pool(f"{of.name}-edge", uid, 1, spec)


def snapshot(of: Cluster, shard_uids: Mapping[str, str] | None = None, pool_uid: str = "uid-pool") -> Snapshot:
    """Owners are there, nothing else of it."""
    names = [f"{of.name}-s{i}" for i in range(of.spec.state.shards)]
    shards = {n: Shard(n, (shard_uids or {}).get(n, f"uid-{n}"), 1, StateShardSpec(Ref(of.name))) for n in names}
    pool = default_pool(of, pool_uid)
    snap = Snapshot(1_790_000_000_000, ME, of, pools={pool.name: pool}, shards=shards, version="1")
    return replace(snap, topology=replace(rebuild.rebuilt(snap), writer=ME))


def orders(snap: Snapshot) -> list[Apply]:
    """All applies until everything is there, each child being there with its hash as soon as it was ordered."""
    found: dict[tuple[str, str], Apply] = {}
    while new := [o for o in one_pass(snap).applies if isinstance(o, Apply)]:
        found |= {(o.kind, o.name): o for o in new}
        there = {
            (o.kind, o.name): Child(
                o.kind, o.name, f"uid-{o.name}", o.input_hash, o.template_hash, succeeded=o.kind == "Job"
            )
            for o in new
        }
        snap = replace(snap, children={**snap.children, **there})
    return list(found.values())


def rendered(snap: Snapshot) -> list[dict[str, Any]]:
    """All objects. The Secret's token, another one each time, is left out."""
    found = [render(order, snap) for order in orders(snap)]
    for made in found:
        if made["kind"] == "Secret":
            made["data"] = {"token": "random"}
    return found
