"""StateShard: the spec and the status, as in crds/stateshards.plato.im.yaml."""

from __future__ import annotations

from dataclasses import dataclass

from plato.api.shared import Condition, Ref


@dataclass(frozen=True, slots=True)
class StateShardSpec:
    """spec of a StateShard; weight 0 evacuates."""

    cluster_ref: Ref
    weight: int = 100


@dataclass(frozen=True, slots=True)
class SlotSpan:
    """Slots first..last, both included."""

    first: int
    last: int


@dataclass(frozen=True, slots=True)
class StateShardStatus:
    """status of a StateShard."""

    observed_generation: int = 0
    phase: str = "Pending"
    pod: str = ""
    pod_uid: str = ""
    slots: tuple[SlotSpan, ...] = ()
    slot_count: int = 0
    epoch: int = 0
    connections: int = 0
    conditions: tuple[Condition, ...] = ()
