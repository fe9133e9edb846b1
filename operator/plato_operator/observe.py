"""One look at a cluster: lists, Secrets, reports, the record, the doubtful pods; in this order, all of it fresh.

There is no cache of objects: watches only ring. What a look lists is what the API server has at that moment, so a watch that
broke, hung or lost a deletion costs time (QUIET_MS of the planner), never a wrong picture. The record is read after the
reports, so that no report is ahead of it, and doubtful pods after the record.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import hashlib
import ssl
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Any, Final
from urllib.parse import urlsplit

from plato.api.cluster import AccessKey, Attachments, SecretKey
from plato.api.names import (
    LABEL_CLUSTER,
    MSG_HTTP_PORT,
    STATE_ADMIN_PORT,
    admin_secret_name,
    topology_name,
)
from plato.api.objects import ApiError
from plato.runtime import logs
from plato.topology.record import Topology, TopologyError
from plato.topology.stored import unpack

from plato_operator import reading
from plato_operator.core.snapshot import (
    GATEWAY,
    MSG,
    STATE,
    Child,
    Cluster,
    Memory,
    Pod,
    Pool,
    Shard,
    Snapshot,
    doubts,
    shard_pod,
)  # fmt: skip
from plato_operator.creation import refused_pods
from plato_operator.kube import Kube, KubeError, Object, Refused
from plato_operator.reports import Access, Reports, Target

CHILDREN: Final = (
    "StatefulSet", "Deployment", "Job", "Service", "PodDisruptionBudget", "ServiceAccount", "Role", "RoleBinding",
    "NetworkPolicy",
)  # fmt: skip
SECRETS_S: Final = 5.0
"""How old a look at the Secrets may be. They are not watched: we may only get them by name."""

KEY_SUFFIXES: Final = (".key", ".pem")
"""Of what processes take for a key (plato.adapters.tokens)."""

_log = logs.get("observe")


@dataclass(frozen=True, slots=True)
class View:
    """A snapshot, and the objects behind it by (kind, name), whose resourceVersions later writes carry."""

    snapshot: Snapshot
    objects: Mapping[tuple[str, str], Object]
    topology_text: str = ""


class BadResource(Exception):
    """A resource that the API server took does not fit its type; the text names it."""


@dataclass(slots=True)
class _Secrets:
    """What the last look at the Secrets found, for which cluster. admin is None while there is none of this very cluster.
    cas: the ca.crt of each Secret for internal TLS that the spec names, or that a pod shows."""

    at: float = float("-inf")
    cluster: tuple[str, object] = ("", None)
    missing: tuple[str, ...] = ()
    odd_keys: tuple[str, ...] = ()
    access: Access = field(default_factory=Access)
    cas: Mapping[str, bytes] = field(default_factory=dict)
    admin: Object | None = None
    leads_to: str = ""


class Observer:
    """Looks at one cluster again and again."""

    def __init__(
        self, kube: Kube, reports: Reports, namespace: str, name: str, *, me: str, nodes: bool,
        node_cidrs: tuple[str, ...] = (),
    ) -> None:  # fmt: skip
        self._kube, self._reports = kube, reports
        self._namespace, self._name = namespace, name
        self._me, self._nodes, self._node_cidrs = me, nodes, node_cidrs
        self._topology: Topology | None = None
        self._secrets = _Secrets()
        self._monitored = True  # one look, in case an earlier operator made one that nobody wants now

    def close(self) -> None:
        """Ends what is under way."""
        self._reports.close()

    async def look(self, obj: Object, memory: Memory, refusals: Mapping[tuple[str, str], tuple[str, str]]) -> View:
        """The View of now; obj is the PlatoCluster. Raises KubeError, BadResource."""
        cluster = _read(reading.cluster, "PlatoCluster", obj)
        objects, nodes, others = await self._list(cluster)
        objects["PlatoCluster", cluster.name] = obj
        pools: dict[str, Pool] = {}
        shards: dict[str, Shard] = {}
        for (kind, name), found in objects.items():
            if kind == "GatewayPool":
                pools[name] = _read(reading.pool, kind, found)
            elif kind == "StateShard":
                shards[name] = _read(lambda o: reading.shard(o, cluster.uid), kind, found)
        pods = {name: reading.pod(found, pools, nodes) for (kind, name), found in objects.items() if kind == "Pod"}
        internal = cluster.spec.tls.internal
        targets = _targets(pods, internal.name if internal is not None else reading.SOME)
        shown = frozenset(t.tls for t in targets.values()) - {"", reading.SOME}
        secrets = await self._look_at_secrets(cluster, shown)
        if secrets.admin is not None:
            objects["Secret", admin_secret_name(cluster.name)] = secrets.admin
        reports = await self._reports.refresh(targets, _urgent(self._topology, pods), secrets.access)
        now_ms = int(time.time() * 1000)
        topology, version = await self._record(cluster)
        live = await self._live(doubts(topology, pods))
        refusals = {**await refused_pods(self._kube, self._namespace, objects), **refusals}
        self._topology = topology
        return View(
            Snapshot(
                now_ms=now_ms, me=self._me, cluster=cluster, pools=pools, shards=shards, topology=topology, version=version,
                pods=pods, children=dict(_children(objects)),
                nodes=None if nodes is None else {n: reading.node(found) for n, found in nodes.items()},
                reports=reports, last_connections=self._reports.last_connections(), live=live,
                missing_secrets=secrets.missing, odd_keys=secrets.odd_keys, refusals=refusals,
                node_cidrs=self._node_cidrs or reading.addresses(nodes), memory=memory, shared=_shared(obj, cluster, others),
                leads_to=secrets.leads_to,
            ),
            objects,
        )  # fmt: skip

    async def _list(
        self, cluster: Cluster
    ) -> tuple[dict[tuple[str, str], Object], dict[str, Object] | None, list[Object]]:
        """Everything of the cluster by (kind, name), the nodes where they may be read, the namespace's PlatoClusters."""
        selector = f"{LABEL_CLUSTER}={cluster.name}"
        calls = {kind: self._kube.list(kind, self._namespace) for kind in ("PlatoCluster", "GatewayPool", "StateShard")}
        calls |= {kind: self._kube.list(kind, self._namespace, selector) for kind in ("Pod", *CHILDREN)}
        if cluster.spec.monitoring.pod_monitor or self._monitored:
            calls["PodMonitor"] = self._monitors(selector)
        if self._nodes:
            calls["Node"] = self._kube.list("Node")
        answers = dict(zip(calls, await _all(list(calls.values())), strict=True))
        self._monitored = bool(answers.get("PodMonitor"))
        nodes = {reading.meta(found)["name"]: found for found in answers.pop("Node")} if self._nodes else None
        clusters = answers.pop("PlatoCluster")
        objects = {
            (kind, reading.meta(found)["name"]): found
            for kind, items in answers.items()
            for found in items
            if reading.named(kind, found) == cluster.name
        }
        return objects, nodes, clusters

    async def _monitors(self, selector: str) -> list[Object]:
        """PodMonitors; none where their kind is not installed or not ours to read: an apply then says so."""
        try:
            return await self._kube.list("PodMonitor", self._namespace, selector)
        except Refused as e:
            if e.status in (403, 404):
                return []
            raise

    async def _record(self, cluster: Cluster) -> tuple[Topology | None, str]:
        """The record by a live GET and its resourceVersion. One that cannot be read counts as lost."""
        found = await self._kube.get("ConfigMap", self._namespace, topology_name(cluster.name))
        if found is None:
            return None, ""
        version = str(reading.meta(found).get("resourceVersion", ""))
        try:
            return unpack(found), version
        except TopologyError as e:
            _log.error("the topology record cannot be read", cluster=cluster.name, why=str(e))
            return None, version

    async def _live(self, names: set[str]) -> dict[str, str]:
        """{name: uid by a GET, empty for 404}."""
        order = sorted(names)
        found = await _all([self._kube.get("Pod", self._namespace, name) for name in order])
        return {n: reading.meta(o).get("uid", "") if o is not None else "" for n, o in zip(order, found, strict=True)}

    async def _look_at_secrets(self, cluster: Cluster, shown: frozenset[str]) -> _Secrets:
        """Which Secrets or keys are missing, the report's tokens, the CAs of internal TLS: of the spec, and of those Secrets
        that pods which run were given."""
        seen, of = self._secrets, (cluster.uid, cluster.spec)
        known = seen.admin is not None and shown <= seen.cas.keys()
        if time.monotonic() - seen.at < SECRETS_S and seen.cluster == of and known:
            return seen
        wanted = dict(_wanted_secrets(cluster))
        admin = admin_secret_name(cluster.name)
        names = sorted({*wanted, *shown, admin})
        secrets = dict(
            zip(names, await _all([self._kube.get("Secret", self._namespace, name) for name in names]), strict=True)
        )
        missing = []
        for name, keys in wanted.items():
            found = secrets[name]
            if found is None:
                missing.append(name)
            else:
                missing += [f"{name}/{key}" for key in keys if key not in (found.get("data") or {})]
        odd_keys: tuple[str, ...] = ()
        keys_ref = cluster.spec.auth.keys
        if keys_ref is not None and (found := secrets[keys_ref.name]) is not None:
            held = sorted(found.get("data") or {})
            odd_keys = tuple(key for key in held if PurePath(key).suffix not in KEY_SUFFIXES)
            if len(odd_keys) == len(held):
                missing.append(f"{keys_ref.name}/<kid>.pem or {keys_ref.name}/<kid>.key")
        # One that is not in the spec any more is shown by the pods of before, which are asked until they have rolled.
        internal = cluster.spec.tls.internal
        named = {internal.name} if internal is not None else set()
        cas = {name: _decoded(secrets[name], "ca.crt") for name in sorted(shown | named)}
        tls: dict[str, ssl.SSLContext] = {}
        for name, ca in cas.items():
            there = seen.access.tls.get(name)
            if there is not None and ca in (b"", seen.cas.get(name)):  # gone: what pods show was signed by what it was
                tls[name], cas[name] = there, seen.cas[name]
            elif ca:
                try:
                    tls[name] = ssl.create_default_context(cadata=ca.decode("ascii"))
                except (ssl.SSLError, UnicodeDecodeError, ValueError):
                    missing.append(f"{name}/ca.crt (it is no certificate)")
            elif name not in named:
                missing.append(f"{name}/ca.crt (until the pods that have it mounted are replaced)")
        found = secrets[admin]
        if found is not None and _of_an_earlier(found, cluster):
            found = None  # it is being collected, and its tokens with it
        tokens = tuple(
            _decoded(found, key).decode(errors="replace").strip() for key in sorted((found or {}).get("data") or {})
        )
        uri, url = cluster.spec.database.uri, cluster.spec.store.url
        places = _decoded(secrets[uri.name], uri.key), _decoded(secrets[url.name], url.key)
        # One that is missing for the moment leads nowhere else: no Job is made for that.
        leads_to = _place(*places) if all(places) else seen.leads_to if seen.cluster == of else ""
        self._secrets = _Secrets(
            time.monotonic(), of, tuple(missing), odd_keys, Access(tokens, tls), cas, found, leads_to
        )
        return self._secrets


def _wanted_secrets(cluster: Cluster) -> Iterator[tuple[str, tuple[str, ...]]]:
    """(name, keys) of the Secrets that the spec names; one name may come once only, so keys are gathered."""
    spec = cluster.spec
    found: dict[str, set[str]] = {}
    found.setdefault(spec.database.uri.name, set()).add(spec.database.uri.key)
    found.setdefault(spec.store.url.name, set()).add(spec.store.url.key)
    if spec.bus.kafka is not None:
        found.setdefault(spec.bus.kafka.config.name, set()).add(spec.bus.kafka.config.key)
    if spec.auth.keys is not None:
        found.setdefault(spec.auth.keys.name, set())
    for ref_key in (*_of_attachments(spec.attachments), spec.hooks.secret):
        if ref_key is not None:
            found.setdefault(ref_key.name, set()).add(ref_key.key)
    for ref, keys in ((spec.tls.internal, ("tls.crt", "tls.key", "ca.crt")), (spec.tls.client, ("tls.crt", "tls.key"))):
        if ref is not None:
            found.setdefault(ref.name, set()).update(keys)
    for name, wanted in found.items():
        yield name, tuple(sorted(wanted))


def _of_attachments(files: Attachments) -> tuple[AccessKey | SecretKey, ...]:
    return (files.s3.access_key, files.s3.secret_key) if files.s3 is not None else ()


def _shared(obj: Object, cluster: Cluster, others: list[Object]) -> str:
    """What an earlier PlatoCluster of this namespace has in common with ours that two must not, in words; empty: nothing."""

    def age(of: Object) -> tuple[str, str]:
        return str(reading.meta(of).get("creationTimestamp", "")), str(reading.meta(of).get("name", ""))

    for other in sorted(others, key=age):
        if age(other) >= age(obj) or reading.meta(other).get("uid") == cluster.uid:
            continue
        try:
            mine, its = cluster.spec, reading.cluster(other).spec
        except (ApiError, KeyError):
            continue  # its own pass says so
        name = reading.meta(other)["name"]
        if mine.store == its.store:
            return f"store.url and store.keyPrefix are those of PlatoCluster {name}: give this one another keyPrefix"
        if mine.database == its.database:
            return f"database.uri and database.schema are those of PlatoCluster {name}: give this one another schema"
        if mine.bus.kafka is not None and mine.bus.kafka == its.bus.kafka:
            return f"bus.kafka is that of PlatoCluster {name}: give this one another topic"
    return ""


def _of_an_earlier(secret: Object, cluster: Cluster) -> bool:
    """Whether it belongs to a PlatoCluster that had this name before. One that somebody else made is as good as ours."""
    owners = reading.meta(secret).get("ownerReferences") or ()
    return any(owner.get("kind") == "PlatoCluster" and owner.get("uid") != cluster.uid for owner in owners)


def _place(*uris: bytes) -> str:
    """Digest of where URIs lead: without user and password, which change while the place stays."""
    places = []
    for uri in uris:
        text = uri.decode(errors="replace").strip()
        try:
            parts = urlsplit(text)
        except ValueError:
            places.append(text)  # whoever uses it says what is wrong with it
        else:
            places.append(parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl())
    return hashlib.sha256("\n".join(places).encode()).hexdigest()[:16]


def _decoded(secret: Object | None, key: str) -> bytes:
    try:
        return base64.b64decode(((secret or {}).get("data") or {}).get(key, ""), validate=True)
    except (binascii.Error, ValueError):
        return b""


def _targets(pods: Mapping[str, Pod], internal: str) -> dict[str, Target]:
    """Whom to ask: processes that run and answer /v1/report. internal: the Secret of the spec, by whose CA those are asked
    whose own template names none."""
    found = {}
    for name, pod in pods.items():
        host = f"[{pod.ip}]" if ":" in pod.ip else pod.ip
        if not pod.running or not pod.ip:
            continue
        tls = internal if pod.tls == reading.SOME else pod.tls
        if pod.component == GATEWAY and pod.endpoint is not None and pod.endpoint.admin:
            found[name] = Target(pod.uid, pod.endpoint.admin, tls)
        elif pod.component == STATE:
            found[name] = Target(pod.uid, f"{host}:{STATE_ADMIN_PORT}", tls)
        elif pod.component == MSG:
            found[name] = Target(pod.uid, f"{host}:{MSG_HTTP_PORT}", tls)
    return found


def _urgent(topology: Topology | None, pods: Mapping[str, Pod]) -> set[str]:
    """Who is asked at each pass: parties to a drain or a move, who is not ready, and everybody while there is no record."""
    if topology is None:
        return set(pods)
    found = {name for name, pod in pods.items() if not pod.ready or pod.deleting}
    found |= {name for name, gateway in topology.gateways.items() if gateway.drain is not None}
    if topology.move is not None:
        found |= {shard_pod(topology.move.source), shard_pod(topology.move.target)}
    return found


def _children(objects: Mapping[tuple[str, str], Object]) -> Iterator[tuple[tuple[str, str], Child]]:
    for (kind, name), found in objects.items():
        if kind not in ("Pod", "PlatoCluster"):
            yield (kind, name), reading.child(kind, found)


def _read(how: Any, kind: str, obj: Object) -> Any:
    try:
        return how(obj)
    except (ApiError, KeyError, TypeError, ValueError) as e:
        raise BadResource(f"{kind} {reading.meta(obj).get('name', '?')}: {e}") from e


async def _all(calls: list[Any]) -> list[Any]:
    """The results of all calls, or the first error: one that forbids tells more than one that timed out."""
    results = await asyncio.gather(*calls, return_exceptions=True)
    errors = [r for r in results if isinstance(r, BaseException)]
    for error in sorted(errors, key=lambda e: (isinstance(e, KubeError), not isinstance(e, Refused))):
        raise error
    return list(results)
