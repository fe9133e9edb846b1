"""The desk of one pass: the snapshot, the record as changed so far, and the orders collected so far."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

from plato.api.names import is_taken, shard_index, shard_name
from plato.api.pool import DrainSpec
from plato.topology.record import LOST, SERVING, Gateway, Topology, next_epoch

from plato_operator.core.orders import Act, Apply, Event, Gate, Raise, Remove, Scale
from plato_operator.core.snapshot import GATEWAY, STATE, Memory, Node, Pod, Pool, Report, Snapshot, shard_pod

LOST_AFTER_MS: Final = 10_000
"""A node that is not ready for this long counts as lost (its pods are told to nobody any more)."""


@dataclass(slots=True)
class Work:
    """What the steps share. The record starts as observed; `changed` tells whether a write is due."""

    snap: Snapshot
    topology: Topology
    epoch: int
    changed: bool = False
    applies: list[Apply | Gate | Raise | Scale | Remove] = field(default_factory=list)
    act: Act | None = None
    events: list[Event] = field(default_factory=list)
    """What the change of the record is told as."""
    act_events: list[Event] = field(default_factory=list)
    """What the act is told as."""
    memory: Memory = field(default_factory=Memory)
    exhausted: int = 0
    """Pods that wait for a worker_id."""
    too_large: str = ""
    """Why the changed record cannot be written; then the old one stays."""
    held: dict[str, str] = field(default_factory=dict)
    """{pool: why its drains are held}."""

    @classmethod
    def on(cls, snap: Snapshot, topology: Topology) -> Work:
        """A desk for this pass."""
        return cls(snap, topology, next_epoch(topology.epoch, snap.now_ms // 1000), memory=snap.memory)

    def change(self, **fields: Any) -> None:
        """Replaces fields of the record; the write gets one new epoch, however many changes there are."""
        self.topology = replace(self.topology, epoch=self.epoch, **fields)
        self.changed = True

    def tell(self, kind: str, name: str, reason: str, message: str, *, warning: bool = False) -> None:
        """Adds an event about a change of the record."""
        self.events.append(Event(kind, name, "Warning" if warning else "Normal", reason, message))

    def do(self, act: Act, *events: Event) -> None:
        """Orders the act of this pass, and what is told once it is done."""
        self.act = act
        self.act_events.extend(events)

    def report(self, name: str, uid: str) -> Report | None:
        """The report of process `uid`; another one's answer (a reused host port) is nobody's."""
        found = self.snap.reports.get(name)
        return found if found is not None and found.uid == uid else None

    def lost(self, pod: Pod) -> bool:
        """Whether the pod's node is gone or long not ready; never without the right to read nodes."""
        if self.snap.nodes is None or not pod.node:
            return False
        node = self.snap.nodes.get(pod.node)
        return node is None or self._lost_node(node)

    def _lost_node(self, node: Node) -> bool:
        return bool(node.not_ready_since_ms) and self.snap.now_ms - node.not_ready_since_ms >= LOST_AFTER_MS

    def closed_nodes(self) -> int:
        """How many nodes can hold no gateway, though nobody was drained for it: lost and barred ones."""
        return sum(node.barred or self._lost_node(node) for node in (self.snap.nodes or {}).values())

    def lost_since_ms(self, pod: Pod) -> int:
        """When the node of a lost pod was last ready; 0 for a node that is gone."""
        node = (self.snap.nodes or {}).get(pod.node)
        return node.not_ready_since_ms if node is not None else 0

    def drain_spec(self, pod: Pod) -> DrainSpec:
        """The drain settings of a pod's pool; the defaults once the pool is gone."""
        pool = self.snap.pools.get(pod.owner)
        return pool.spec.drain if pool is not None else DrainSpec()

    def shard_pod(self, shard: str) -> Pod | None:
        """The pod that is this shard by the record: same uid, not being deleted."""
        pod = self.snap.pods.get(shard_pod(shard))
        record = self.topology.shards.get(shard)
        known = pod is not None and record is not None and pod.uid == record.uid and pod.component == STATE
        return pod if known and pod is not None and not pod.deleting else None

    def shard_ready(self, shard: str) -> bool:
        """Whether the shard serves: its recorded pod is ready and its node is not lost."""
        pod = self.shard_pod(shard)
        return pod is not None and pod.ready and not self.lost(pod)

    def weights(self) -> dict[str, int]:
        """{shard: weight}: wanted ones by their resource (100 before it exists), unwanted ones 0, no foreign ones."""
        cluster = self.snap.cluster
        found: dict[str, int] = {}
        for i in range(cluster.spec.state.shards):
            name = shard_name(cluster.name, i)
            resource = self.snap.shards.get(name)
            found[name] = resource.spec.weight if resource is not None and resource.owned else 100
        for name, resource in self.snap.shards.items():
            if resource.owned and shard_index(cluster.name, name) is not None:
                found.setdefault(name, 0)
        return found

    def gateway_pods(self) -> Mapping[str, Pod]:
        """{name: pod} of the gateways."""
        return {name: pod for name, pod in self.snap.pods.items() if pod.component == GATEWAY}

    def serving_elsewhere(self, name: str) -> bool:
        """Whether another gateway could take the clients of `name`."""
        for other, record in self.topology.gateways.items():
            pod = self.snap.pods.get(other)
            mine = other != name and record.state == SERVING and pod is not None and pod.uid == record.uid
            if mine and pod is not None and pod.ready and not pod.deleting:
                return True
        return False


@dataclass(slots=True)
class PoolDesk:
    """One pool during a pass: what its StatefulSet is, and its pods by ordinal."""

    pool: Pool
    sts_uid: str
    sts_version: str
    replicas: int
    observed: bool
    template_hash: str
    restarted_at: str
    pods: dict[int, Pod]

    @property
    def wanted(self) -> int:
        """Gateways that the spec wants."""
        return self.pool.spec.replicas

    def name_of(self, ordinal: int) -> str:
        """Pod name."""
        return f"{self.pool.name}-{ordinal}"

    def current(self, pod: Pod) -> bool:
        """Whether a pod runs what its StatefulSet's template says."""
        return pod.template_hash == self.template_hash and pod.restarted_at == self.restarted_at


def pool_desks(work: Work) -> list[PoolDesk]:
    """The pools that are not being deleted and have a StatefulSet, by name. One that is called like a shard has none: that
    StatefulSet is the shard's."""
    pods: dict[str, dict[int, Pod]] = {}
    for pod in work.gateway_pods().values():
        pods.setdefault(pod.owner, {})[pod.ordinal] = pod
    found = []
    for name, pool in sorted(work.snap.pools.items()):
        sts = work.snap.children.get(("StatefulSet", name))
        if sts is not None and not pool.deleting and not is_taken(work.snap.cluster.name, name):
            found.append(
                PoolDesk(
                    pool, sts.uid, sts.resource_version, sts.replicas, sts.observed, sts.template_hash,
                    sts.restarted_at, pods.get(name, {}),
                )
            )  # fmt: skip
    return found


def record_of(work: Work, pod: Pod) -> Gateway | None:
    """The record that belongs to this very pod."""
    found = work.topology.gateways.get(pod.name)
    return found if found is not None and found.uid == pod.uid else None


def is_lost(record: Gateway | None) -> bool:
    """Whether the record says that its node is lost."""
    return record is not None and record.state == LOST
