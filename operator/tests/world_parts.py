"""What the small world of the planner's tests consists of: processes, the API server's objects, a refusal."""

from __future__ import annotations

from dataclasses import dataclass, field

from plato.topology.record import Topology
from plato_operator.core.snapshot import Child, Node, Pod, Pool, Shard


@dataclass
class Process:
    """What runs in a pod, or outlives it."""

    uid: str
    name: str
    component: str
    owner: str
    node: str
    seen: Topology | None = None
    worker_id: int | None = None
    lease: bool | None = None
    conns: float = 0
    cut: int = 0
    drained: int = 0  # id of the drain that is over
    acquired: set[int] = field(default_factory=set)
    gone_by_ms: int = 0  # a ghost's end
    forgotten: bool = (
        False  # the record that told of its id was lost; only the store's reservation keeps others from it
    )


@dataclass
class Api:
    """What the API server holds, except for the record."""

    pods: dict[str, Pod] = field(default_factory=dict)
    children: dict[tuple[str, str], Child] = field(default_factory=dict)
    shards: dict[str, Shard] = field(default_factory=dict)
    pools: dict[str, Pool] = field(default_factory=dict)
    nodes: dict[str, Node] = field(default_factory=dict)

    def copy(self) -> Api:
        return Api(dict(self.pods), dict(self.children), dict(self.shards), dict(self.pools), dict(self.nodes))


class Refused(Exception):
    """The API server refused an order; the operator drops the rest of its plan."""
