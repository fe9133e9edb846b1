"""Parts that several Plato resources share. What each field means stands in `crds/`; names and defaults agree (tested)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Ref:
    """An object of the same namespace."""

    name: str


@dataclass(frozen=True, slots=True)
class Resources:
    """requests and limits of one container: {resource: quantity as number or text}."""

    requests: Mapping[str, Any] = field(default_factory=dict)
    limits: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Placement:
    """Where pods may run; affinity, constraints and tolerations have the shape they have in a pod."""

    node_selector: Mapping[str, str] = field(default_factory=dict)
    tolerations: tuple[Mapping[str, Any], ...] = ()
    affinity: Mapping[str, Any] = field(default_factory=dict)
    topology_spread_constraints: tuple[Mapping[str, Any], ...] = ()
    priority_class_name: str = ""


@dataclass(frozen=True, slots=True)
class Condition:
    """One entry of status.conditions. The time is RFC 3339 text and moves only when `status` does."""

    type: str
    status: str
    reason: str
    message: str
    observed_generation: int = 0
    last_transition_time: str = ""
