"""How even the gateways are filled, and whom to move so that they are.

A gateway's share is connections / what it holds. `imbalance` is the greatest share over that of all together: 1 is even, 2
means that one is twice as full as the whole. `plan` is what `plato rebalance` does: within a zone the surplus of those above
the zone's share goes to those below it, most first.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

LEAST: Final = 10
"""A surplus of fewer clients stays where it is."""


@dataclass(frozen=True, slots=True)
class Filled:
    """One gateway that takes clients in. most: connections that it holds when it is full, > 0."""

    connections: int
    most: int
    zone: str = ""


@dataclass(frozen=True, slots=True)
class Shift:
    """So many clients of one gateway are to go to another."""

    source: str
    target: str
    clients: int


def imbalance(gateways: Mapping[str, Filled]) -> float:
    """≥ 1; 1 where nobody is connected."""
    connections, most = sum(g.connections for g in gateways.values()), sum(g.most for g in gateways.values())
    if not connections:
        return 1.0
    return max(g.connections / g.most for g in gateways.values()) * most / connections


def plan(gateways: Mapping[str, Filled], least: int = LEAST) -> list[Shift]:
    """The fewest moves that leave each gateway of a zone as full as the zone; none is filled above that, none is emptied
    below it."""
    found: list[Shift] = []
    for zone in sorted({g.zone for g in gateways.values()}):
        found += _zone({name: g for name, g in gateways.items() if g.zone == zone}, least)
    return found


def _zone(gateways: Mapping[str, Filled], least: int) -> list[Shift]:
    connections, most = sum(g.connections for g in gateways.values()), sum(g.most for g in gateways.values())
    over, under = {}, {}
    for name, g in gateways.items():
        fair = connections * g.most // most
        if g.connections - fair > 0:
            over[name] = g.connections - fair
        elif fair - g.connections > 0:
            under[name] = fair - g.connections
    found: list[Shift] = []
    while over and under:
        source, target = max(over, key=lambda n: (over[n], n)), max(under, key=lambda n: (under[n], n))
        clients = min(over[source], under[target])
        if clients < least:
            break
        found.append(Shift(source, target, clients))
        for left, name in ((over, source), (under, target)):
            left[name] -= clients
            if not left[name]:
                del left[name]
    return found
