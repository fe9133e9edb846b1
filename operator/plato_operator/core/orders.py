"""What one pass orders. The edge carries it out from top to bottom and stops at a refusal; the next pass looks again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from plato.api.cluster import PlatoClusterStatus
from plato.api.pool import GatewayPoolStatus
from plato.api.shard import StateShardStatus
from plato.topology.record import Topology

from plato_operator.core.snapshot import Memory


@dataclass(frozen=True, slots=True)
class Apply:
    """Render this child from the present spec and server-side apply it, with these hashes as annotations.

    replicas is given for a StatefulSet that does not exist yet, and for Deployments.
    """

    kind: str
    name: str
    role: str
    owner_kind: str
    owner: str
    input_hash: str
    template_hash: str = ""
    replicas: int | None = None


@dataclass(frozen=True, slots=True)
class Gate:
    """Set the pod's condition plato.im/serving; precondition: its uid."""

    pod: str
    uid: str
    serving: bool


@dataclass(frozen=True, slots=True)
class Raise:
    """Raise the replicas of a StatefulSet."""

    name: str
    uid: str
    replicas: int


@dataclass(frozen=True, slots=True)
class Scale:
    """Set the replicas of a Deployment, whoever changed them, and nothing else of it; precondition: its uid."""

    name: str
    uid: str
    replicas: int


@dataclass(frozen=True, slots=True)
class Remove:
    """Delete a child that the spec does not ask for any more, and in the background what it owns; precondition: its uid."""

    kind: str
    name: str
    uid: str


@dataclass(frozen=True, slots=True)
class TopologyWrite:
    """Write the record; version is the resourceVersion it must still have, empty: it must not exist."""

    topology: Topology
    version: str


@dataclass(frozen=True, slots=True)
class DeletePod:
    """Delete a pod; precondition: its uid. grace_s None keeps the pod's own."""

    name: str
    uid: str
    why: str
    grace_s: int | None = None


@dataclass(frozen=True, slots=True)
class Lower:
    """Lower the replicas of a StatefulSet; preconditions: its uid and resourceVersion."""

    name: str
    uid: str
    resource_version: str
    replicas: int
    why: str


@dataclass(frozen=True, slots=True)
class DeleteShard:
    """Delete a StateShard that has no slots any more; precondition: its uid."""

    name: str
    uid: str


Act = DeletePod | Lower | DeleteShard


@dataclass(frozen=True, slots=True)
class Event:
    """A Kubernetes event; type Normal or Warning."""

    kind: str
    name: str
    type: str
    reason: str
    message: str


@dataclass(frozen=True, slots=True)
class Plan:
    """One pass: safe applies, then at most one write of the record, then at most one disruptive act, then status.

    events tell of the write, act_events of the act: of what was not done nothing is told, the next pass orders and tells it
    again. memory goes into the next snapshot. requeue_ms: look again after this, whatever happens.
    """

    applies: tuple[Apply | Gate | Raise | Scale | Remove, ...] = ()
    write: TopologyWrite | None = None
    act: Act | None = None
    cluster_status: PlatoClusterStatus | None = None
    pool_status: Mapping[str, GatewayPoolStatus] = field(default_factory=dict)
    shard_status: Mapping[str, StateShardStatus] = field(default_factory=dict)
    events: tuple[Event, ...] = ()
    act_events: tuple[Event, ...] = ()
    memory: Memory = field(default_factory=Memory)
    requeue_ms: int = 10_000
