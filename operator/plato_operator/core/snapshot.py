"""What one pass looks at: resources, children, pods, nodes, reports and the record, all as they were observed.

Made by the edge; nothing in it is asked for again during the pass. Times are Unix ms. Lists of pods, children and nodes may
be stale: the edge has no cache, but API servers do. Reports come after them, the record after the reports, so that no report
is ahead of it, and `live` is what a GET said last.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from plato.api.cluster import PlatoClusterSpec
from plato.api.names import cluster_identity
from plato.api.pool import GatewayPoolSpec
from plato.api.shard import StateShardSpec
from plato.topology.record import Topology
from plato.topology.slots import Span

GATEWAY, STATE, MSG, IPCONFIG = "gateway", "state", "msg", "ipconfig"
API = "api"
"""Role of the Service by which people reach msg."""
ENDED = ("Failed", "Succeeded")
"""Phases that a pod never leaves."""


@dataclass(frozen=True, slots=True)
class Cluster:
    """The PlatoCluster of this pass. adopts: its annotation plato.im/adopt, the "<namespace>/<name>" of each PlatoCluster
    whose schema or store it takes over, with commas between."""

    name: str
    namespace: str
    uid: str
    generation: int
    spec: PlatoClusterSpec
    deleting: bool = False
    adopts: str = ""

    @property
    def identity(self) -> str:
        """How it marks its database schema and its store."""
        return cluster_identity(self.namespace, self.name)


@dataclass(frozen=True, slots=True)
class Pool:
    """A GatewayPool of the cluster."""

    name: str
    uid: str
    generation: int
    spec: GatewayPoolSpec
    deleting: bool = False


@dataclass(frozen=True, slots=True)
class Shard:
    """A StateShard that names the cluster. owned: the PlatoCluster is its controller; others are foreign."""

    name: str
    uid: str
    generation: int
    spec: StateShardSpec
    owned: bool = True
    deleting: bool = False


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where a gateway pod is reached, as its own template says: ip for clients, admin as host:port; poll 0: no long
    polling."""

    ip: str
    tcp: int
    ws: int
    admin: str
    workers: int
    poll: int = 0


@dataclass(frozen=True, slots=True)
class Pod:
    """A pod of the cluster.

    owner is the pool, the shard or the migration's Job (empty for msg and ipconfig), ordinal its number there.
    running: its main container runs now. gate: the condition plato.im/serving, None while unset. delete_at_ms: when a
    deleted pod is killed. version: its annotation plato.im/version. trouble: why its main container does not run, by
    its status: the reason and message that it waits with, and the last words of the one before (all have
    terminationMessagePolicy FallbackToLogsOnError). exit_code: what that one ended with. tls: where its admin
    port speaks TLS, as its own template says, the Secret whose ca.crt signed what it shows ("?": of none); else empty.
    """

    name: str
    uid: str
    component: str
    owner: str = ""
    ordinal: int = -1
    node: str = ""
    zone: str = ""
    ip: str = ""
    phase: str = "Running"
    running: bool = True
    ready: bool = False
    ready_since_ms: int = 0
    created_ms: int = 0
    deleting: bool = False
    delete_at_ms: int = 0
    template_hash: str = ""
    restarted_at: str = ""
    gate: bool | None = None
    drain_asked: bool = False
    unschedulable: str = ""
    endpoint: Endpoint | None = None
    version: str = ""
    trouble: str = ""
    exit_code: int = 0
    tls: str = ""


@dataclass(frozen=True, slots=True)
class Child:
    """A child object as it is. input_hash: annotation on the object; template_hash: on its pod template.

    observed: its controller has seen the newest spec. ready and updated count pods (Deployments), succeeded and failed too
    (Jobs). orphan: nothing owns it, since its PlatoCluster was deleted with --cascade=orphan and made anew.
    """

    kind: str
    name: str
    uid: str
    input_hash: str = ""
    template_hash: str = ""
    restarted_at: str = ""
    replicas: int = 0
    ready: int = 0
    updated: int = 0
    observed: bool = True
    resource_version: str = ""
    succeeded: int = 0
    failed: int = 0
    orphan: bool = False


@dataclass(frozen=True, slots=True)
class Node:
    """A node. not_ready_since_ms is 0 while it is ready. barred: by a taint that no gateway is placed against, that of the
    control plane or that of a node out of service."""

    name: str
    unschedulable: bool = False
    not_ready_since_ms: int = 0
    barred: bool = False


@dataclass(frozen=True, slots=True)
class DrainReport:
    """How far a gateway says it is: phase draining or drained; remaining connections; cut at the deadline."""

    id: int
    phase: str
    remaining: int = 0
    cut: int = 0


@dataclass(frozen=True, slots=True)
class Report:
    """A fresh answer of /v1/report. Its absence means unknown, never yes or no.

    lease: True: the store's reservation names this process; False: another one; None: not known. outbid: slots that are the
    shard's by the record and that it cannot take, since their fences are newer; deserted: those of them behind whose
    fence nobody lives; fence: the greatest epoch of these, 0 for none.
    """

    uid: str
    epoch_seen: int = 0
    worker_id: int | None = None
    lease: bool | None = None
    acquired: tuple[Span, ...] = ()
    drain: DrainReport | None = None
    connections: int = 0
    outbid: tuple[Span, ...] = ()
    fence: int = 0
    deserted: tuple[Span, ...] = ()


@dataclass(frozen=True, slots=True)
class Memory:
    """What this process remembers from its earlier passes; all zero at its start, which only makes it wait longer.

    missing_since_ms: since when the record is missing or behind its readers. last_move_ms: when a move was opened. move_id,
    move_since_ms: the open move and since when it is known. rebuilt_epoch: of the record that was rebuilt. repairs:
    (pool, pod, when) of broken pods that were replaced, shown by a condition for a while. claimed_ms: when the record was
    claimed last.
    """

    missing_since_ms: int = 0
    last_move_ms: int = 0
    move_id: int = 0
    move_since_ms: int = 0
    rebuilt_epoch: int = 0
    repairs: tuple[tuple[str, str, int], ...] = ()
    claimed_ms: int = 0


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Everything of one cluster at one moment.

    me: holder name of our Lease, another one at each start of a process (a claim shows by it). version:
    resourceVersion of the record's ConfigMap, empty if there is none. live: {pod name: uid by a GET of this moment,
    empty for 404}, of the names that `doubts` asked for. last_connections: {pod uid: what its last report said, however
    old}, to be told and never decided by. nodes: None without the right to read them. missing_secrets:
    "name" or "name/key" of what the spec names and is not there. odd_keys: keys of the Secret auth.keys whose names say
    no kid; no process takes them. refusals: {(kind, name) of a child: (reason, message)} of
    the last try to apply it, while it fails; reason InvalidOverlay, QuotaExceeded, Forbidden, CRDTooOld,
    NameTaken or ApplyRefused.
    node_cidrs: where nodes' addresses lie, for the NetworkPolicy; empty: not known. shared: in words, what an earlier
    PlatoCluster has that must be one's own; empty: nothing. leads_to: digest of which database and store the Secrets name,
    whatever the password is.
    """

    now_ms: int
    me: str
    cluster: Cluster
    pools: Mapping[str, Pool] = field(default_factory=dict)
    shards: Mapping[str, Shard] = field(default_factory=dict)
    topology: Topology | None = None
    version: str = ""
    pods: Mapping[str, Pod] = field(default_factory=dict)
    children: Mapping[tuple[str, str], Child] = field(default_factory=dict)
    nodes: Mapping[str, Node] | None = None
    reports: Mapping[str, Report] = field(default_factory=dict)
    live: Mapping[str, str] = field(default_factory=dict)
    missing_secrets: Collection[str] = ()
    odd_keys: Collection[str] = ()
    refusals: Mapping[tuple[str, str], tuple[str, str]] = field(default_factory=dict)
    node_cidrs: tuple[str, ...] = ()
    last_connections: Mapping[str, int] = field(default_factory=dict)
    memory: Memory = field(default_factory=Memory)
    shared: str = ""
    leads_to: str = ""


def shard_pod(shard: str) -> str:
    """Name of a shard's only pod."""
    return f"{shard}-0"


def doubts(topology: Topology | None, pods: Mapping[str, Pod]) -> set[str]:
    """Names of pods to GET before the pass: recorded, but missing in the list or there with another uid.

    A stale list may lack a live pod or show a dead one; only a GET retires an id or replaces a shard's uid.
    """
    if topology is None:
        return set()
    recorded = {name: g.uid for name, g in topology.gateways.items()}
    recorded |= {name: m.uid for name, m in topology.msgs.items()}
    found = {name for name, uid in recorded.items() if name not in pods or pods[name].uid != uid}
    for pod in pods.values():
        if pod.component == STATE:
            shard = topology.shards.get(pod.owner)
            if shard is None or shard.uid != pod.uid:
                found.add(pod.name)
    return found
