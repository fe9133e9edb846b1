"""Puts together what one answer rests on: the record, the board, where everybody is, the override. All of it is in memory.

caller's address ─▸ map ─┐
zone, region of the query ┴▸ spot ─▸ kilometres to each gateway ─▸ board ─▸ ranking ─▸ override ─▸ the list
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from plato.core.errors import Unavailable
from plato.ports import TopologySource
from plato.topology.record import SERVING, Gateway

from plato_ipconfig.core.address import Address, parsed
from plato_ipconfig.core.balance import Filled
from plato_ipconfig.core.distance import Spot, distance_km
from plato_ipconfig.core.override import By, Override
from plato_ipconfig.core.rank import Board, Place, chosen
from plato_ipconfig.geo import Geo
from plato_ipconfig.switch import Switch


@dataclass(frozen=True, slots=True)
class Ranking:
    """One answer with its reasons. places: every gateway of the record, best first; listed: what the caller is told."""

    spot: Spot
    places: list[Place]
    listed: list[Place]
    gateways: Mapping[str, Gateway]
    spots: Mapping[str, Spot]
    override: Override | None


@dataclass(frozen=True, slots=True)
class Atlas:
    """What the settings say of zones: their regions, their places on the map."""

    regions: Mapping[str, str] = field(default_factory=dict)
    places: Mapping[str, tuple[float, float]] = field(default_factory=dict)


class Dispatch:
    """Ranks gateways for a caller."""

    def __init__(
        self,
        topology: TopologySource,
        board: Board,
        geo: Geo,
        switch: Switch,
        atlas: Atlas,
        now_ms: Callable[[], int],
        chance: Callable[[], float] = random.random,
    ) -> None:
        """now_ms: a clock that never goes back."""
        self._topology = topology
        self.board = board
        self.geo = geo
        self.switch = switch
        self._atlas = atlas
        self.now_ms = now_ms
        self._chance = chance
        self._spots: dict[str, Spot] = {}
        self._spots_of: tuple[int, int] = (-1, -1)
        """Epoch of the record and version of the map that `_spots` were made with."""

    def not_ready(self) -> str:
        """Why nothing can be listed; "" when something can."""
        try:
            known = self._topology.current().gateways
        except Unavailable:
            return "no topology was read yet"
        return "" if known else "the topology names no gateway"

    def ranking(self, address: Address | None, zone: str = "", region: str = "") -> Ranking:
        """For a caller there. Before the first topology everything in it is empty."""
        override = self.switch.override
        gateways = self.gateways()
        spots = self._spots
        spot = self._spot(zone, region, self.geo.where(address))
        places = self.board.ranked(
            {name: gateway.state != SERVING for name, gateway in gateways.items()},
            self.now_ms(),
            self._chance,
            {name: distance_km(spot, spots[name]) for name in gateways},
            override.by if override is not None else By.LOAD,
        )
        # Who drains, leaves or is lost would only send a client on, or keep it waiting.
        serving = {name for name, gateway in gateways.items() if gateway.state == SERVING}
        return Ranking(spot, places, chosen(places, serving, override), gateways, spots, override)

    def sent_to(self, name: str) -> None:
        """A client was told to try this gateway first."""
        self.board.sent_to(name)

    def filled(self) -> dict[str, Filled]:
        """How full the gateways are that serve and were heard lately."""
        gateways, heard = self.gateways(), self.board.heard(self.now_ms())
        return {
            name: Filled(load.connections, load.connections_max, gateways[name].zone)
            for name, load in heard.items()
            if name in gateways and gateways[name].state == SERVING and load.serving and load.connections_max > 0
        }

    def gateways(self) -> dict[str, Gateway]:
        """Those of the record, {} before the first one; keeps `_spots` of the same record."""
        try:
            record = self._topology.current()
        except Unavailable:
            return {}
        stamp = record.epoch, self.geo.version
        if stamp != self._spots_of:
            self._spots = {
                name: self._spot(g.zone, "", self._atlas.places.get(g.zone) or self.geo.where(parsed(g.ip)))
                for name, g in record.gateways.items()
            }
            self._spots_of = stamp
        return dict(record.gateways)

    def _spot(self, zone: str, region: str, on_map: tuple[float, float] | None) -> Spot:
        atlas = self._atlas
        return Spot(zone, region or atlas.regions.get(zone, ""), on_map or atlas.places.get(zone))
