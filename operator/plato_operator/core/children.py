"""Which objects a cluster consists of, and the hashes of what they are rendered from.

Two hashes each: of all inputs (another one: apply again) and of what the pods depend on (another one: pods roll). A drain's
deadline or a replica count changes the first only. What equals its first default is left out of a hash, so a field that a
newer version adds changes no hash while nobody sets it, and an upgrade of the operator rolls nothing.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from plato.api.cluster import (
    ApiSpec,
    Attachments,
    Auth,
    Bus,
    Database,
    Events,
    Gateways,
    Hooks,
    Images,
    IpconfigSpec,
    Messages,
    Monitoring,
    MsgSpec,
    StateSpec,
    Store,
    Tls,
    UriKey,
    UrlKey,
)  # fmt: skip
from plato.api.names import admin_secret_name, api_service_name, default_pool_name, is_taken, shard_name
from plato.api.objects import to_object
from plato.api.pool import DrainSpec, GatewayPoolSpec, PoolTemplate, Ports
from plato.api.shared import Ref
from plato.topology.slots import counts

from plato_operator.core.orders import Apply, Remove, Scale
from plato_operator.core.rollout import msg_done, state_done
from plato_operator.core.snapshot import API, GATEWAY, IPCONFIG, MSG, STATE, Child
from plato_operator.core.work import Work

_OF_THE_SERVICE: Final = ("port", "serviceType", "annotations")
"""Fields of spec.api that reach its Service and no pod."""
_ALWAYS: Final = ("userRequestsPerSecond", "serverRequestsPerSecond")
"""Those that count without a port of its own, too."""
_ROLLS_NOTHING: Final = ("drain", "rollout", "replicas", "clusterRef", "publicAddress")
"""Fields of a pool that reach pods by the record, or not at all."""

RENDERING: Final[Mapping[str, int]] = {}
"""{kind/role: how often what is rendered for it has changed so that running clusters must get it}. Counting up changes the
hash: an upgrade of the operator then applies these objects again, and their pods roll. The golden files tell when to ask."""

TLS_VOLUME: Final = "tls-internal"
"""Volume of pods with the Secret of tls.internal."""
MIGRATION_WAIT_S: Final = 15
"""How long one try of the migration waits for a database or a bus that does not answer: its end is what a condition can
quote, and the Job tries again for three quarters of an hour."""


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


def _common(work: Work, part: str) -> dict[str, Any]:
    """What reaches the pods of every part: images without other parts' overrides, the certificates that this one shows, and
    the pages that may connect where pages do."""
    spec = work.snap.cluster.spec
    own = {name: ref for name, ref in spec.images.overrides.items() if name == part}
    shown = spec.tls.client if part == GATEWAY else spec.api_certificate if part == MSG else None
    tls = stripped(replace(spec.tls, client=shown), Tls())
    pages = {"origins": list(spec.origins)} if spec.origins and part != STATE else {}
    return {"images": stripped(replace(spec.images, overrides=own), Images()), "tls": tls, **pages}


def _product(work: Work) -> dict[str, Any]:
    """What reaches the pods of msg alone. Without what is not used: clusters that set nothing of it keep their hashes."""
    spec = work.snap.cluster.spec
    unseen = (*_OF_THE_SERVICE, "tls")  # of tls the certificate is what pods see
    found = {
        "api": {
            k: v
            for k, v in stripped(spec.api, ApiSpec()).items()
            if k in _ALWAYS or (spec.api.enabled and k not in unseen)
        },
        "attachments": stripped(spec.attachments, Attachments()),
        "hooks": stripped(spec.hooks, Hooks()),
        "messages": stripped(spec.messages, Messages()),
        "events": stripped(spec.events, Events()),
    }
    return {part: own for part, own in found.items() if own}


def _back(work: Work) -> dict[str, Any]:
    """What reaches the pods of msg and state."""
    spec = work.snap.cluster.spec
    return {
        "database": stripped(spec.database, Database(UriKey(""))), "store": stripped(spec.store, Store(UrlKey(""))),
        "bus": stripped(spec.bus, Bus()), "auth": stripped(spec.auth, Auth()),
    }  # fmt: skip


def migration(work: Work) -> str:
    """Name of the Job that brings the database to what the present spec asks for, and marks it and the store as this
    cluster's; another one for each set of inputs."""
    cluster, back = work.snap.cluster, _back(work)
    claim = [cluster.identity, cluster.adopts, back["store"], work.snap.leads_to]
    lent = job_overlay(cluster.spec.msg.pod_overlay)
    inputs = [
        cluster.spec.version,
        _common(work, MSG)["images"],
        back["database"],
        back["bus"],
        claim,
        *([lent] if lent else []),
    ]
    return f"{_migrations(work)}{hashed(inputs)[:8]}"


def job_overlay(overlay: Mapping[str, Any]) -> dict[str, Any]:
    """What the migration's pod takes of msg's podOverlay, since both open the same database and store: variables of its
    container, and its mounts with their volumes, such as a private authority's certificate. Sidecars and what else is for
    pods that stay, are left out."""
    spec = overlay.get("spec")
    if not isinstance(spec, Mapping):
        return {}
    volumes, main = _named(spec.get("volumes")), _named(spec.get("containers")).get(MSG, {})
    mounts = [m for m in _entries(main.get("volumeMounts")) if m.get("name") in volumes]
    lent = {"volumeMounts": mounts, **{key: _entries(main.get(key)) for key in ("env", "envFrom")}}
    kept = [volumes[name] for name in dict.fromkeys(m["name"] for m in mounts)]
    found = {"volumes": kept, "containers": [{"name": "migrate", **{k: v for k, v in lent.items() if v}}]}
    return {"spec": {key: found[key] for key in found if kept or key != "volumes"}} if any(lent.values()) else {}


def _entries(raw: Any) -> list[Mapping[str, Any]]:
    """Those of a list that have the shape of one; what has another is refused where msg's own pod is made."""
    return [entry for entry in raw if isinstance(entry, Mapping)] if isinstance(raw, list) else []


def _named(raw: Any) -> dict[Any, Mapping[str, Any]]:
    return {name: entry for entry in _entries(raw) if isinstance(name := entry.get("name"), str)}


def _migrations(work: Work) -> str:
    return f"{work.snap.cluster.name}-migrate-"


def migration_job(work: Work) -> Child | None:
    """That Job as it is."""
    return work.snap.children.get(("Job", migration(work)))


def migrated(work: Work) -> bool:
    """Whether the database is ready for the present spec, and it and the store are this cluster's."""
    job = migration_job(work)
    return job is not None and job.succeeded > 0


def wanted(work: Work) -> Iterator[Wanted]:
    """All objects, in the order of their creation: what others need comes first."""
    name, spec = work.snap.cluster.name, work.snap.cluster.spec
    back = _back(work)
    yield Wanted("Secret", admin_secret_name(name), "admin-tokens", {}, once=True)
    for kind in ("ServiceAccount", "Role", "RoleBinding"):
        yield Wanted(kind, name, "members", {})
    for part in (STATE, MSG):
        yield Wanted("Service", f"{name}-{part}", part, {})
        yield Wanted("PodDisruptionBudget", f"{name}-{part}", part, {})
    yield Wanted("Service", f"{name}-ipconfig", IPCONFIG, {"serviceType": spec.ipconfig.service_type})
    yield Wanted("PodDisruptionBudget", f"{name}-ipconfig", IPCONFIG, {})
    if spec.api.enabled:
        own = stripped(spec.api, ApiSpec())
        door = {k: v for k, v in own.items() if k in _OF_THE_SERVICE}
        door |= {"tls": True} if spec.api_certificate is not None else {}
        yield Wanted("Service", api_service_name(name), API, door)
    if spec.network_policy:
        nodes = {"nodes": list(work.snap.node_cidrs)} if work.snap.node_cidrs else {}
        people = {"api": True} if spec.api.enabled else {}
        yield Wanted("NetworkPolicy", name, "members", {**nodes, **people})
    if spec.monitoring.pod_monitor:
        tls = {"internal": to_object(spec.tls.internal)} if spec.tls.internal is not None else {}
        yield Wanted("PodMonitor", name, "members", {**stripped(spec.monitoring, Monitoring()), **tls})
    yield Wanted("Job", migration(work), "migrate", {}, once=True)
    yield from _state(work, {"version": spec.version, **_common(work, STATE), **back})
    if spec.gateways.enabled:
        template = stripped(spec.gateways.template, Gateways().template)
        yield Wanted(
            "GatewayPool", default_pool_name(name), "default", template, replicas=spec.gateways.initial_replicas
        )
    for pool in sorted(work.snap.pools.values(), key=lambda p: p.name):
        if not pool.deleting and not is_taken(name, pool.name):
            yield from _pool(
                pool.name, pool.spec, {"version": pool.spec.version or spec.version, **_common(work, GATEWAY)}
            )
    pods = {"version": spec.version, **_common(work, MSG), **back}
    msg = {**pods, **_product(work), "msg": {**stripped(spec.msg, MsgSpec()), "replicas": None}}
    yield Wanted("Deployment", f"{name}-msg", MSG, {}, msg, replicas=spec.msg.replicas)
    ipconfig = {"version": spec.version, **_common(work, IPCONFIG), "auth": back["auth"]}
    ipconfig["ipconfig"] = {**stripped(spec.ipconfig, IpconfigSpec()), "replicas": None, "serviceType": None}
    yield Wanted("Deployment", f"{name}-ipconfig", IPCONFIG, {}, ipconfig, replicas=spec.ipconfig.replicas, late=True)


def _state(work: Work, pods: dict[str, Any]) -> Iterator[Wanted]:
    """A StateShard and a StatefulSet for each wanted shard, and for each that still has slots."""
    cluster = work.snap.cluster
    state = stripped(cluster.spec.state, StateSpec())
    for planned in ("shards", "slotsPerMove", "moveIntervalSeconds", "reshardPaused", "onNodeLoss"):
        state.pop(planned, None)
    names = {shard_name(cluster.name, i) for i in range(cluster.spec.state.shards)} | set(counts(work.topology))
    names |= {n for n, shard in work.snap.shards.items() if shard.owned and not shard.deleting}
    for shard in sorted(names):
        yield Wanted("StateShard", shard, STATE, {}, once=True)
        yield Wanted(
            "StatefulSet",
            shard,
            STATE,
            {},
            {**pods, "state": state},
            replicas=1,
            owner_kind="StateShard",
            owner=shard,
        )


def _pool(name: str, spec: GatewayPoolSpec, common: dict[str, Any]) -> Iterator[Wanted]:
    own = stripped(spec, GatewayPoolSpec(**_plain(PoolTemplate()), cluster_ref=Ref("")))
    drain = stripped(spec.drain, DrainSpec())
    other = {"drain": {k: v for k, v in drain.items() if k != "onCordon"}}
    template = {**common, "pool": {k: v for k, v in own.items() if k not in (*_ROLLS_NOTHING, "version")}}
    budget = {"maxUnavailable": spec.rollout.max_unavailable}
    ports = stripped(spec.ports, Ports())
    yield Wanted("Service", name, GATEWAY, ports, owner_kind="GatewayPool", owner=name)
    yield Wanted("PodDisruptionBudget", name, GATEWAY, budget, owner_kind="GatewayPool", owner=name)
    yield Wanted(
        "StatefulSet", name, GATEWAY, other, template, replicas=spec.replicas, owner_kind="GatewayPool", owner=name
    )  # fmt: skip


def _plain(template: PoolTemplate) -> dict[str, Any]:
    return {name: getattr(template, name) for name in PoolTemplate.__dataclass_fields__}


def hashes(child: Wanted) -> tuple[str, str]:
    """(of all inputs, of the pods' inputs or empty)."""
    rendering = RENDERING.get(f"{child.kind}/{child.role}", 0)
    counted = {"rendering": rendering} if rendering else {}
    template_hash = hashed({**child.template, **counted}) if child.template is not None else ""
    return hashed([{**child.other, **counted}, template_hash]), template_hash


def apply_children(work: Work) -> None:
    """Orders what is missing or was rendered from other inputs; a quiet cluster gets no order."""
    ipconfig_turn, ready_base = msg_done(work) and state_done(work), migrated(work)
    tokens_known = ("Secret", admin_secret_name(work.snap.cluster.name)) in work.snap.children
    account_known = ("ServiceAccount", work.snap.cluster.name) in work.snap.children
    for child in wanted(work):
        input_hash, template_hash = hashes(child)
        there = work.snap.children.get((child.kind, child.name))
        if there is not None and (child.once or (there.input_hash == input_hash and not there.orphan)):
            _scale(work, child, there)
            continue
        if child.owner_kind == "StateShard" and child.owner not in work.snap.shards:
            continue  # its owner is made first; the next pass knows the uid
        if child.owner_kind == "GatewayPool" and child.owner in {a.name for a in work.applies if isinstance(a, Apply)}:
            continue  # its owner's spec changes with this pass; the next one renders from that
        pods = child.template is not None or child.kind == "Job"
        if pods and there is None and (not account_known or work.snap.shared):
            continue  # an account of that name may be somebody else's; shards would take another cluster's slots from it
        if child.template is not None and there is None and not tokens_known:
            continue  # pods would start with the tokens of a cluster of this name before, and refuse us
        if child.template is not None and not ready_base and _waits(child, there, template_hash):
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
    _remove(work)


def _scale(work: Work, child: Wanted, there: Child) -> None:
    """A StatefulSet's replicas move by drains, a default pool's by its owner: only Deployments follow the spec here. Not by
    rendering them again, since a newer operator may render their pods otherwise."""
    if child.kind == "Deployment" and child.replicas is not None and there.replicas != child.replicas:
        work.applies.append(Scale(there.name, there.uid, child.replicas))


def _waits(child: Wanted, there: Child | None, template_hash: str) -> bool:
    """Whether this must wait for the migration: msg and state at all, the others before they change. So pods of a newer
    version never meet an older schema, and the order of a rollout begins after the migration."""
    return child.role in (STATE, MSG) if there is None else there.template_hash != template_hash


def _remove(work: Work) -> None:
    """What the spec does not ask for any more: optional objects, and Jobs of earlier inputs once the present one is done."""
    spec, name = work.snap.cluster.spec, work.snap.cluster.name
    unwanted = [("NetworkPolicy", name)] if not spec.network_policy else []
    unwanted += [("PodMonitor", name)] if not spec.monitoring.pod_monitor else []
    if not spec.api.enabled and api_service_name(name) not in work.snap.pools:  # which has a Service of its own name
        unwanted.append(("Service", api_service_name(name)))
    if migrated(work):
        past = sorted(n for kind, n in work.snap.children if kind == "Job" and n.startswith(_migrations(work)))
        unwanted += [("Job", n) for n in past if n != migration(work)]
    for kind, child in unwanted:
        there = work.snap.children.get((kind, child))
        if there is not None and there.input_hash:  # else somebody else made it, and copied our labels
            work.applies.append(Remove(kind, child, there.uid))
