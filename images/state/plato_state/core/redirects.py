"""Where the clients of a draining gateway may go: the other ones that serve, those of its zone first."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from plato.topology.record import SERVING, Gateway, Topology

NAMED: Final = 5
"""How many gateways one REDIRECT names at most, as the list of gateways does."""


def candidates(topology: Topology, leaving: str, chance: Callable[[], float]) -> list[tuple[str, Gateway]]:
    """Gateways to go to from `leaving`, (name, record). Each zone's stand in a random order, so that not all clients go to
    one. chance: draws from [0, 1)."""
    own = topology.gateways.get(leaving)
    zone = own.zone if own is not None else ""
    others = [(name, g) for name, g in topology.gateways.items() if name != leaving and g.state == SERVING]
    return sorted(others, key=lambda item: (item[1].zone != zone, chance()))[:NAMED]
