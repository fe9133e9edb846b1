"""Which objects a cluster consists of, and the hashes of what they are rendered from.

Two hashes each: of all inputs (another one: apply again) and of what the pods depend on (another one: pods roll). A drain's
deadline or a replica count changes the first only. What equals its first default is left out of a hash, so a field that a
newer version adds changes no hash while nobody sets it, and an upgrade of the operator rolls nothing.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from plato.api.cluster import Bus, Gateways, Images, IpconfigSpec, Monitoring, MsgSpec, StateSpec, Tls
from plato.api.names import admin_secret_name, default_pool_name, shard_name
from plato.api.objects import to_object
from plato.api.pool import GatewayPoolSpec, PoolTemplate
from plato.api.shared import Ref
from plato.topology.slots import counts

from plato_operator.core.orders import Apply
from plato_operator.core.rollout import msg_done, state_done
from plato_operator.core.work import Work

_ROLLS_NOTHING: Final = ("drain", "rollout", "replicas", "clusterRef", "publicAddress")
"""Fields of a pool that reach pods by the record, or not at all."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """One object that should exist. template holds the inputs of its pods, other the rest. late: an existing one is
    rendered again only after msg and state have rolled. once: never applied again."""

    kind: str
    name: str
    role: str
    other: Mapping[str, Any]
    template: Mapping[str, Any] | None = None
    replicas: int | None = None
    owner_kind: str = "PlatoCluster"
    owner: str = ""
    late: bool = False
    once: bool = False


def hashed(inputs: object) -> str:
    """16 hex digits of the canonical JSON of `inputs`."""
    text = json.dumps(inputs, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def stripped(value: object, first_default: object) -> Any:
    """The YAML shape of a dataclass without what equals its first default, at any depth."""
    return _stripped(to_object(value), to_object(first_default))


def _stripped(value: Any, default: Any) -> Any:
    if not isinstance(value, dict) or not isinstance(default, dict):
        return value
    return {k: _stripped(v, default.get(k)) for k, v in value.items() if v != default.get(k) and v not in ({}, [])}


def wanted(work: Work) -> Iterator[Wanted]:
    """All objects, in the order of their creation: what others need comes first."""
    cluster = work.snap.cluster
    name, spec = cluster.name, cluster.spec
    common = {"images": stripped(spec.images, Images()), "tls": stripped(spec.tls, Tls())}
    back = {
        "database": to_object(spec.database), "store": to_object(spec.store), "bus": stripped(spec.bus, Bus()),
        "auth": to_object(spec.auth),
    }  # fmt: skip
    yield Wanted("Secret", admin_secret_name(name), "admin-tokens", {}, once=True)
    for kind in ("ServiceAccount", "Role", "RoleBinding"):
        yield Wanted(kind, name, "members", {})
    for part in ("state", "msg"):
        yield Wanted("Service", f"{name}-{part}", part, {})
        yield Wanted("PodDisruptionBudget", f"{name}-{part}", part, {})
    yield Wanted("Service", f"{name}-ipconfig", "ipconfig", {"serviceType": spec.ipconfig.service_type})
    yield Wanted("PodDisruptionBudget", f"{name}-ipconfig", "ipconfig", {})
    if spec.network_policy:
        yield Wanted("NetworkPolicy", name, "members", {})
    if spec.monitoring.pod_monitor:
        yield Wanted("PodMonitor", name, "members", stripped(spec.monitoring, Monitoring()))
    yield Wanted("Job", f"{name}-migrate-{hashed([spec.version, common, back])[:8]}", "migrate", {}, once=True)
    yield from _state(work, {"version": spec.version, **common, **back})
    if spec.gateways.enabled:
        template = stripped(spec.gateways.template, Gateways().template)
        yield Wanted(
            "GatewayPool", default_pool_name(name), "default", template, replicas=spec.gateways.initial_replicas
        )
    for pool in sorted(work.snap.pools.values(), key=lambda p: p.name):
        if not pool.deleting:
            yield from _pool(pool.name, pool.spec, {"version": pool.spec.version or spec.version, **common})
    pods = {"version": spec.version, **common, **back}
    msg = {**pods, "msg": {**stripped(spec.msg, MsgSpec()), "replicas": None}}
    yield Wanted("Deployment", f"{name}-msg", "msg", {}, msg, replicas=spec.msg.replicas)
    ipconfig = {"version": spec.version, **common, "auth": back["auth"]}
    ipconfig["ipconfig"] = {**stripped(spec.ipconfig, IpconfigSpec()), "replicas": None, "serviceType": None}
    yield Wanted("Deployment", f"{name}-ipconfig", "ipconfig", {}, ipconfig, replicas=spec.ipconfig.replicas, late=True)


def _state(work: Work, pods: dict[str, Any]) -> Iterator[Wanted]:
    """A StateShard and a StatefulSet for each wanted shard, and for each that still has slots."""
    cluster = work.snap.cluster
    state = stripped(cluster.spec.state, StateSpec())
    for planned in ("shards", "slotsPerMove", "moveIntervalSeconds", "reshardPaused", "onNodeLoss"):
        state.pop(planned, None)
    names = {shard_name(cluster.name, i) for i in range(cluster.spec.state.shards)} | set(counts(work.topology))
    names |= {n for n, shard in work.snap.shards.items() if shard.owned and not shard.deleting}
    for shard in sorted(names):
        yield Wanted("StateShard", shard, "state", {}, once=True)
        yield Wanted(
            "StatefulSet",
            shard,
            "state",
            {},
            {**pods, "state": state},
            replicas=1,
            owner_kind="StateShard",
            owner=shard,
        )


def _pool(name: str, spec: GatewayPoolSpec, common: dict[str, Any]) -> Iterator[Wanted]:
    own = stripped(spec, GatewayPoolSpec(**_plain(PoolTemplate()), cluster_ref=Ref("")))
    other = {"deadline": spec.drain.deadline_seconds}
    template = {**common, "pool": {k: v for k, v in own.items() if k not in (*_ROLLS_NOTHING, "version")}}
    budget = {"maxUnavailable": spec.rollout.max_unavailable}
    yield Wanted("Service", name, GATEWAY_ROLE, {}, owner_kind="GatewayPool", owner=name)
    yield Wanted("PodDisruptionBudget", name, GATEWAY_ROLE, budget, owner_kind="GatewayPool", owner=name)
    yield Wanted(
        "StatefulSet", name, GATEWAY_ROLE, other, template, replicas=spec.replicas, owner_kind="GatewayPool", owner=name
    )  # fmt: skip


GATEWAY_ROLE: Final = "gateway"


def _plain(template: PoolTemplate) -> dict[str, Any]:
    return {name: getattr(template, name) for name in PoolTemplate.__dataclass_fields__}


def apply_children(work: Work) -> None:
    """Orders what is missing or was rendered from other inputs; a quiet cluster gets no order."""
    ipconfig_turn = msg_done(work) and state_done(work)
    for child in wanted(work):
        template_hash = hashed(child.template) if child.template is not None else ""
        # A StatefulSet's replicas move by drains, a default pool's by its owner: only Deployments follow the spec here.
        followed = child.replicas if child.kind == "Deployment" else None
        input_hash = hashed([child.other, template_hash, followed])
        there = work.snap.children.get((child.kind, child.name))
        if there is not None and (child.once or there.input_hash == input_hash):
            continue
        if there is not None and child.late and there.template_hash != template_hash and not ipconfig_turn:
            continue
        replicas = child.replicas if there is None or child.kind == "Deployment" else None
        work.applies.append(
            Apply(
                child.kind, child.name, child.role, child.owner_kind, child.owner or work.snap.cluster.name,
                input_hash, template_hash, replicas,
            )
        )  # fmt: skip
