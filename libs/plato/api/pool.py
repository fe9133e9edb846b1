"""GatewayPool: the spec and the status, as in crds/gatewaypools.plato.im.yaml."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from plato.api.names import GATEWAY_ADMIN_PORT, GATEWAY_TCP_PORT, GATEWAY_WS_PORT
from plato.api.shared import Condition, Placement, Ref, Resources


@dataclass(frozen=True, slots=True)
class Ports:
    """Ports of each gateway pod. poll 0: no long polling."""

    tcp: int = GATEWAY_TCP_PORT
    ws: int = GATEWAY_WS_PORT
    admin: int = GATEWAY_ADMIN_PORT
    poll: int = 0


@dataclass(frozen=True, slots=True)
class Capacity:
    """What one gateway accepts, and what its network carries: bytes_per_second, 0 where nobody said."""

    connections: int = 50_000
    bytes_per_second: int = 0


@dataclass(frozen=True, slots=True)
class DrainSpec:
    """Pace and bounds of a drain; on_cordon is Drain or Ignore."""

    pace_per_second: int = 200
    deadline_seconds: int = 300
    settle_seconds: int = 5
    on_cordon: str = "Drain"


@dataclass(frozen=True, slots=True)
class RolloutSpec:
    """How changes reach the pods."""

    max_unavailable: int = 1
    partition: int = 0
    min_ready_seconds: int = 10
    paused: bool = False


@dataclass(frozen=True, slots=True)
class PoolTemplate:
    """What a GatewayPool and the template of the default pool share. network: Host or Pod; version empty: the cluster's."""

    version: str = ""
    workers: int = 2
    network: str = "Host"
    ports: Ports = Ports()
    public_address: str = "HostIP"
    capacity: Capacity = Capacity()
    drain: DrainSpec = DrainSpec()
    rollout: RolloutSpec = RolloutSpec()
    resources: Resources = field(default_factory=Resources)
    placement: Placement = field(default_factory=Placement)
    pod_overlay: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayPoolSpec(PoolTemplate):
    """spec of a GatewayPool."""

    cluster_ref: Ref
    replicas: int = 2


@dataclass(frozen=True, slots=True)
class DrainStatus:
    """One drain under way. remaining is None without a report; deadline_at is RFC 3339 text."""

    pod: str
    reason: str
    phase: str
    uid: str = ""
    deadline_at: str | None = None
    remaining: int | None = None


@dataclass(frozen=True, slots=True)
class GatewayPoolStatus:
    """status of a GatewayPool; counts are pods, draining ones included in `replicas`."""

    observed_generation: int = 0
    replicas: int = 0
    ready_replicas: int = 0
    updated_replicas: int = 0
    draining_replicas: int = 0
    selector: str = ""
    connections: int = 0
    drains: tuple[DrainStatus, ...] = ()
    conditions: tuple[Condition, ...] = ()
