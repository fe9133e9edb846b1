"""Kubernetes objects as the snapshot has them. Pure: dicts in, dataclasses out; what is absent takes the default."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import Any, Final

from plato.api.cluster import PlatoClusterSpec
from plato.api.names import (
    ANNOTATION_ADOPT,
    ANNOTATION_DRAIN,
    ANNOTATION_INPUT_HASH,
    ANNOTATION_PUBLIC_ADDRESS,
    ANNOTATION_RESTARTED_AT,
    ANNOTATION_VERSION,
    GATE_SERVING,
    GATEWAY_ADMIN_PORT,
    GATEWAY_TCP_PORT,
    GATEWAY_WS_PORT,
    LABEL_CLUSTER,
    LABEL_COMPONENT,
    LABEL_POOL,
    LABEL_SHARD,
)
from plato.api.objects import from_object
from plato.api.pool import GatewayPoolSpec
from plato.api.shard import StateShardSpec

from plato_operator.core.children import TLS_VOLUME
from plato_operator.core.snapshot import GATEWAY, Child, Cluster, Endpoint, Node, Pod, Pool, Shard

Object = Mapping[str, Any]

LABEL_JOB: Final = "batch.kubernetes.io/job-name"
LABEL_ZONE: Final = "topology.kubernetes.io/zone"
SOME: Final = "?"
"""In Pod.tls: by some CA, of no Secret."""
BARRING: Final = ("node-role.kubernetes.io/control-plane", "node.kubernetes.io/out-of-service")
"""Taints: of nodes that no gateway was placed on, and of those that a person has declared dead."""


def unix_ms(text: str | None) -> int:
    """An RFC 3339 time in Unix ms; 0 for none."""
    return int(datetime.fromisoformat(text).timestamp() * 1000) if text else 0


def meta(obj: Object) -> Object:
    """Its metadata."""
    found: Object = obj.get("metadata") or {}
    return found


def labels(obj: Object) -> Mapping[str, str]:
    """Its labels."""
    found: Mapping[str, str] = meta(obj).get("labels") or {}
    return found


def notes(obj: Object) -> Mapping[str, str]:
    """Its annotations."""
    found: Mapping[str, str] = meta(obj).get("annotations") or {}
    return found


def named(kind: str, obj: Object) -> str:
    """Name of the cluster that one of our resources, or a child of one, belongs to; empty: of none."""
    if kind == "PlatoCluster":
        return str(meta(obj).get("name", ""))
    if kind in ("GatewayPool", "StateShard"):
        return str(((obj.get("spec") or {}).get("clusterRef") or {}).get("name", ""))
    return labels(obj).get(LABEL_CLUSTER, "")


def cluster(obj: Object) -> Cluster:
    """A PlatoCluster. Raises ApiError."""
    m = meta(obj)
    return Cluster(
        m["name"], m["namespace"], m["uid"], m.get("generation", 0),
        from_object(PlatoClusterSpec, obj.get("spec"), "spec"), "deletionTimestamp" in m,
        adopts=notes(obj).get(ANNOTATION_ADOPT, ""),
    )  # fmt: skip


def pool(obj: Object) -> Pool:
    """A GatewayPool. Raises ApiError."""
    m = meta(obj)
    spec = from_object(GatewayPoolSpec, obj.get("spec"), "spec")
    return Pool(m["name"], m["uid"], m.get("generation", 0), spec, "deletionTimestamp" in m)


def shard(obj: Object, cluster_uid: str) -> Shard:
    """A StateShard. Raises ApiError."""
    m = meta(obj)
    spec = from_object(StateShardSpec, obj.get("spec"), "spec")
    return Shard(
        m["name"], m["uid"], m.get("generation", 0), spec, controller(obj) == cluster_uid, "deletionTimestamp" in m
    )


def controller(obj: Object) -> str:
    """uid of its controlling owner; empty: none."""
    owners = meta(obj).get("ownerReferences") or ()
    return next((str(o["uid"]) for o in owners if o.get("controller")), "")


def child(kind: str, obj: Object) -> Child:
    """An object that the operator rendered."""
    m, spec, status = meta(obj), obj.get("spec") or {}, obj.get("status") or {}
    template = notes(spec.get("template") or {}) if kind in ("StatefulSet", "Deployment") else {}
    replicas = spec.get("replicas", 1) if kind in ("StatefulSet", "Deployment", "GatewayPool") else 0
    return Child(
        kind, m["name"], m["uid"],
        input_hash=notes(obj).get(ANNOTATION_INPUT_HASH, ""),
        template_hash=template.get(ANNOTATION_INPUT_HASH, ""),
        restarted_at=template.get(ANNOTATION_RESTARTED_AT, ""),
        replicas=replicas, ready=status.get("readyReplicas", 0), updated=status.get("updatedReplicas", 0),
        observed=kind not in ("StatefulSet", "Deployment") or status.get("observedGeneration", 0) >= m.get("generation", 0),
        resource_version=m.get("resourceVersion", ""),
        succeeded=status.get("succeeded", 0), failed=status.get("failed", 0), orphan=not controller(obj),
    )  # fmt: skip


def node(obj: Object) -> Node:
    """A node."""
    ready = _condition(obj, "Ready")
    since = 0 if ready.get("status") == "True" else unix_ms(ready.get("lastTransitionTime")) or 1
    spec = obj.get("spec") or {}
    barred = any(taint.get("key") in BARRING for taint in spec.get("taints") or ())
    return Node(meta(obj)["name"], bool(spec.get("unschedulable")), since, barred)


def pod(obj: Object, pools: Mapping[str, Pool], nodes: Mapping[str, Object] | None) -> Pod:
    """A pod of a cluster. nodes are objects, where they may be read."""
    m, spec, status = meta(obj), obj.get("spec") or {}, obj.get("status") or {}
    own = labels(obj)
    component = own.get(LABEL_COMPONENT, "")
    owner = own.get(LABEL_POOL) or own.get(LABEL_SHARD, "")
    ready, scheduled, gate = (_condition(obj, t) for t in ("Ready", "PodScheduled", GATE_SERVING))
    number = m["name"].rpartition("-")[2] if owner else ""
    at_node = spec.get("nodeName", "")
    host = (nodes or {}).get(at_node, {})
    stuck = scheduled.get("status") == "False" and scheduled.get("reason") == "Unschedulable"
    return Pod(
        name=m["name"], uid=m["uid"], component=component, owner=owner or own.get(LABEL_JOB, ""),
        ordinal=int(number) if number.isdecimal() else -1,
        node=at_node, zone=own.get(LABEL_ZONE) or labels(host).get(LABEL_ZONE, ""),
        ip=status.get("podIP", ""), phase=status.get("phase", "Pending"), running=_runs(obj, component),
        ready=ready.get("status") == "True",
        ready_since_ms=unix_ms(ready.get("lastTransitionTime")) if ready.get("status") == "True" else 0,
        created_ms=unix_ms(m.get("creationTimestamp")), deleting="deletionTimestamp" in m,
        delete_at_ms=unix_ms(m.get("deletionTimestamp")),
        template_hash=notes(obj).get(ANNOTATION_INPUT_HASH, ""),
        restarted_at=notes(obj).get(ANNOTATION_RESTARTED_AT, ""),
        gate=None if not gate else gate.get("status") == "True",
        drain_asked=ANNOTATION_DRAIN in notes(obj),
        unschedulable=scheduled.get("message", "") or "Unschedulable" if stuck else "",
        endpoint=_endpoint(obj, pools.get(owner), host) if component == GATEWAY else None,
        version=notes(obj).get(ANNOTATION_VERSION, ""), trouble=_trouble(obj, component),
        exit_code=int(_ended(obj, component).get("exitCode", 0)),
        tls=_internal_secret(obj) if "PLATO_TLS__INTERNAL_DIR" in _env(obj, component) else "",
    )  # fmt: skip


def addresses(nodes: Mapping[str, Object] | None) -> tuple[str, ...]:
    """One CIDR per node: its internal addresses, sorted."""
    found: set[str] = set()
    for obj in (nodes or {}).values():
        for address in (obj.get("status") or {}).get("addresses") or ():
            if address.get("type") == "InternalIP":
                found.add(f"{address['address']}/{128 if ':' in address['address'] else 32}")
    return tuple(sorted(found))


def _endpoint(obj: Object, of: Pool | None, host: Object) -> Endpoint:
    """ip is empty while the address that clients are told is not known."""
    status = obj.get("status") or {}
    env = _env(obj, GATEWAY)
    told = of.spec.public_address if of is not None else "HostIP"
    if told == "NodeAnnotation":
        ip = notes(host).get(ANNOTATION_PUBLIC_ADDRESS, "")
    elif told == "NodeExternalIP":
        listed = (host.get("status") or {}).get("addresses") or ()
        ip = next((str(a["address"]) for a in listed if a.get("type") == "ExternalIP"), "")
    elif of is not None and of.spec.network == "Pod":
        ip = status.get("podIP", "")  # nothing listens on the node's address
    else:
        ip = status.get("hostIP", "")
    admin_ip = status.get("podIP", "")
    if ":" in admin_ip:
        admin_ip = f"[{admin_ip}]"
    return Endpoint(
        ip=ip, tcp=_number(env, "TCP_PORT", GATEWAY_TCP_PORT), ws=_number(env, "WS_PORT", GATEWAY_WS_PORT),
        admin=f"{admin_ip}:{_number(env, 'ADMIN_PORT', GATEWAY_ADMIN_PORT)}" if admin_ip else "",
        workers=_number(env, "WORKERS", 2), poll=_number(env, "POLL_PORT", 0),
    )  # fmt: skip


def _env(obj: Object, container: str) -> Mapping[str, str]:
    """Plain environment of the container of that name, else of the first one."""
    containers: list[Object] = (obj.get("spec") or {}).get("containers") or []
    main = next((c for c in containers if c.get("name") == container), containers[0] if containers else {})
    return {e["name"]: e["value"] for e in main.get("env") or () if isinstance(e.get("value"), str)}


def _internal_secret(obj: Object) -> str:
    """Name of the Secret that it has mounted for internal TLS; SOME where an overlay put another kind of volume there."""
    volumes: Iterable[Object] = (obj.get("spec") or {}).get("volumes") or ()
    found = (v.get("secret") or {} for v in volumes if v.get("name") == TLS_VOLUME)
    return next((str(secret.get("secretName", "")) for secret in found), "") or SOME


def _number(env: Mapping[str, str], name: str, default: int) -> int:
    text = env.get(f"PLATO_GATEWAY__{name}", "")
    return int(text) if text.isdecimal() else default


def _runs(obj: Object, component: str) -> bool:
    """Whether its main container runs now."""
    return "running" in (_main(obj, component).get("state") or {})


def _main(obj: Object, component: str) -> Object:
    """Status of its main container."""
    found: Iterable[Object] = (obj.get("status") or {}).get("containerStatuses") or ()
    by_name: dict[str, Object] = {c.get("name", ""): c for c in found}
    return by_name.get(component, {})


def _trouble(obj: Object, component: str) -> str:
    """What it waits with, and the last line of the container that ended."""
    waiting = (_main(obj, component).get("state") or {}).get("waiting") or {}
    said = str(_ended(obj, component).get("message", "")).strip().splitlines()
    words = [str(waiting.get(key, "")) for key in ("reason", "message")]
    if words == ["ContainerCreating", ""]:
        words = []
    return ": ".join(word for word in (*words, *said[-1:]) if word)


def _ended(obj: Object, component: str) -> Object:
    """How its main container ended, the last time that it did."""
    status = _main(obj, component)
    for state in ("state", "lastState"):
        found: Object = (status.get(state) or {}).get("terminated") or {}
        if found:
            return found
    return {}


def _condition(obj: Object, type_: str) -> Object:
    for condition in (obj.get("status") or {}).get("conditions") or ():
        if condition.get("type") == type_:
            found: Object = condition
            return found
    return {}
