"""How far a caller is from a gateway: by zone, by region, else by the way over the ground.

    the same zone       0 km
    the same region     REGION_KM
    both on the map     the great circle
    else                AWAY_KM: somewhere else

Of a caller of whom nothing is known every gateway is equally far (None). What distance weighs is `nearness`: 1 beside us,
one half at HALF_KM, a tenth at the other end of the world.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import asin, cos, radians, sin, sqrt
from typing import Final

REGION_KM: Final = 100.0
"""Between the zones of one region."""
AWAY_KM: Final = 2_000.0
"""To a gateway of which nothing is known that could be compared."""
HALF_KM: Final = 1_000.0
"""So far away a gateway counts half: it needs twice as much left to stand before one beside the caller."""
_EARTH_KM: Final = 6_371.0


@dataclass(frozen=True, slots=True)
class Spot:
    """Where somebody is, as far as that is known; empty or None: not known. map: (latitude, longitude) in degrees."""

    zone: str = ""
    region: str = ""
    map: tuple[float, float] | None = None

    @property
    def known(self) -> bool:
        """Whether there is anything to go by."""
        return bool(self.zone or self.region or self.map)


def distance_km(caller: Spot, gateway: Spot) -> float | None:
    """Kilometres, or None where nothing is known of the caller."""
    if not caller.known:
        return None
    if caller.zone and caller.zone == gateway.zone:
        return 0.0
    if caller.region and caller.region == gateway.region:
        return REGION_KM
    if caller.map is not None and gateway.map is not None:
        return great_circle_km(caller.map, gateway.map)
    return AWAY_KM


def nearness(km: float | None) -> float:
    """What a distance is worth, from 1 down to 0; an unknown one 1."""
    return 1.0 if km is None else HALF_KM / (HALF_KM + km)


def great_circle_km(a: tuple[float, float], b: tuple[float, float]) -> float:
    """The shortest way over a ball of the Earth's size, between (latitude, longitude) pairs in degrees."""
    lat_a, lat_b = radians(a[0]), radians(b[0])
    across, along = sin((lat_b - lat_a) / 2), sin(radians(b[1] - a[1]) / 2)
    part = across * across + cos(lat_a) * cos(lat_b) * along * along
    return 2 * _EARTH_KM * asin(sqrt(min(1.0, part)))
