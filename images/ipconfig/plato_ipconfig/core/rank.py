"""Which gateways a client should try, best first (design §11). Samples of load come in, a list comes out; there is no clock
and no chance here.

    what is left, of each gateway: the weighted mean of the last five seconds (core/window.py)
        active   bandwidth left, in GB/s × nearness, rounded to two decimals
        static   connections left × nearness
        blend    below LOW of either: the harmonic mean of both shares that are left × nearness

    ROOM     most active first; where active ties, most static; then by chance
    LOW      less than LOW of the bandwidth or of the connections is left: the greatest blend first
    SILENT   nothing heard for silent_ms: the nearest first, by chance. Left out while anybody above has room
    FULL     nothing is left of either
    CLOSING  it drains, or says that it takes nobody in

A gateway without a limit of bandwidth counts as the one that has most left, so that only connections tell them apart.
Between two samples a gateway's connections left shrink by the clients that were sent there, so that a crowd that asks
within one second is spread. Each sample is kept as "left, had nobody been sent since the start", so that clients who are
sent and arrive leave the mean where it is.

Memory: one window of samples per gateway of the topology.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Final

from plato_ipconfig.core.distance import nearness
from plato_ipconfig.core.override import By, Override
from plato_ipconfig.core.window import Window

LISTED: Final = 5
"""How many gateways one answer names at most."""
LOW: Final = 0.1
"""Near exhaustion: less than this share of the connections or of the bandwidth is left."""
GB: Final = 1e9


class Group(IntEnum):
    """How a gateway is seen; the smaller one is listed first."""

    ROOM = 0
    LOW = 1
    SILENT = 2
    FULL = 3
    CLOSING = 4


@dataclass(frozen=True, slots=True)
class Load:
    """What a gateway says of itself. serving: it takes connections; connections_left: until it is full; bytes_left: of
    bytes_max a second, both ways together, None where it has no limit. Nothing is below 0."""

    serving: bool
    connections: int
    connections_left: int
    bytes_left: int | None = None
    bytes_max: int = 0

    @property
    def connections_max(self) -> int:
        """What it holds when it is full."""
        return self.connections + self.connections_left


@dataclass(frozen=True, slots=True)
class Place:
    """A gateway in an answer, with all that its rank rests on. room: connections left; gb_left: None without a limit or
    unknown; the scores are 0 where they do not count. age_ms, km: None where unknown."""

    name: str
    group: Group
    room: int
    age_ms: int | None
    gb_left: float | None = None
    active: float = 0.0
    static: float = 0.0
    blend: float = 0.0
    km: float | None = None


@dataclass(slots=True)
class _Seen:
    uid: str
    load: Load
    at_ms: int
    newest: int
    """connections_left + sent, at the newest sample."""
    sent: int = 0
    """Clients that were ever sent there."""
    connections: Window = field(default_factory=Window)
    """Of connections_left + sent."""
    bytes: Window = field(default_factory=Window)


@dataclass(frozen=True, slots=True)
class _Left:
    """What one gateway has left now. shares: of its limits; gb: None without a limit."""

    room: float
    share: float
    gb: float | None
    gb_share: float


class Board:
    """What the gateways said lately. One without a sample for `silent_ms` is silent: its old figures count no more."""

    def __init__(self, silent_ms: int) -> None:
        self._silent_ms = silent_ms
        self._seen: dict[str, _Seen] = {}

    # ── what comes in ────────────────────────────────────────────────────────────────────────────────────────

    def observe(self, name: str, load: Load, now_ms: int, uid: str = "") -> None:
        """A gateway answered. Another uid is another process: what was known of the one before is forgotten. So are
        the figures from before it served: it had nothing left then, and a mean with those sends new clients past it.
        """
        seen = self._seen.get(name)
        if seen is None or seen.uid != uid or (load.serving and not seen.load.serving):
            sent = 0 if seen is None or seen.uid != uid else seen.sent
            seen = self._seen[name] = _Seen(uid, load, now_ms, 0, sent)
        seen.load, seen.at_ms = load, now_ms
        seen.newest = load.connections_left + seen.sent
        seen.connections.add(seen.newest, now_ms)
        if load.bytes_left is None:
            seen.bytes = Window()
        else:
            seen.bytes.add(load.bytes_left, now_ms)

    def keep(self, names: Iterable[str]) -> None:
        """Forgets gateways that the topology no longer names."""
        known = set(names)
        for name in [n for n in self._seen if n not in known]:
            del self._seen[name]

    def sent_to(self, name: str) -> None:
        """A client was told to try this gateway first."""
        if name in self._seen:
            self._seen[name].sent += 1

    # ── what goes out ────────────────────────────────────────────────────────────────────────────────────────

    def heard(self, now_ms: int) -> dict[str, Load]:
        """The newest figures of those that are not silent."""
        return {name: s.load for name, s in self._seen.items() if now_ms - s.at_ms <= self._silent_ms}

    def ranked(
        self,
        closing: Mapping[str, bool],
        now_ms: int,
        chance: Callable[[], float],
        km: Mapping[str, float | None] | None = None,
        by: By = By.LOAD,
    ) -> list[Place]:
        """Every gateway, best first. closing: {name: whether the topology has it drain}; chance: draws from [0, 1); km:
        the caller's distances, unknown where left out; by: what orders those that take clients in."""
        far = km or {}
        left = {name: self._left(name, now_ms) for name in closing}
        known_gb = [found.gb for found in left.values() if found is not None and found.gb is not None]
        most_gb = max(known_gb, default=0.0)
        places = [
            self._place(name, left[name], most_gb, now_ms, drains, far.get(name)) for name, drains in closing.items()
        ]
        keyed = [(_key(place, by), chance(), place) for place in places]
        keyed.sort(key=lambda item: item[:2])
        return [item[2] for item in keyed]

    def _left(self, name: str, now_ms: int) -> _Left | None:
        """None: it is silent."""
        seen = self._seen.get(name)
        if seen is None or now_ms - seen.at_ms > self._silent_ms:
            return None
        load = seen.load
        mean = seen.connections.mean(now_ms)
        # Longer silence than the window is allowed: then the newest sample is all there is.
        room = max(0.0, (seen.newest if mean is None else mean) - seen.sent)
        if seen.newest <= seen.sent:
            room = 0.0
        share = min(1.0, room / load.connections_max) if load.connections_max else 0.0
        if load.bytes_left is None or not load.bytes_max:
            return _Left(room, share, None, 1.0)
        bytes_mean = seen.bytes.mean(now_ms)
        bytes_left = load.bytes_left if bytes_mean is None else bytes_mean
        return _Left(room, share, bytes_left / GB, min(1.0, bytes_left / load.bytes_max))

    def _place(
        self, name: str, left: _Left | None, most_gb: float, now_ms: int, drains: bool, km: float | None
    ) -> Place:
        seen = self._seen.get(name)
        age_ms = None if seen is None else now_ms - seen.at_ms
        if seen is None or left is None:
            return Place(name, Group.CLOSING if drains else Group.SILENT, 0, age_ms, km=km)
        near = nearness(km)
        active = round((most_gb if left.gb is None else left.gb) * near, 2)
        static, blend = left.room * near, 0.0
        if drains or not seen.load.serving:
            group = Group.CLOSING
        elif left.share <= 0 or left.gb_share <= 0:
            group = Group.FULL
        elif min(left.share, left.gb_share) < LOW:
            group = Group.LOW
            blend = near * 2 * left.share * left.gb_share / (left.share + left.gb_share)
        else:
            group = Group.ROOM
        return Place(name, group, int(left.room), age_ms, left.gb, active, static, blend, km)


def _key(place: Place, by: By) -> tuple[float, ...]:
    """The smaller one stands first; what is equal is decided by chance."""
    if by is By.CHANCE:
        return (place.group is Group.CLOSING, 0.0, 0.0)
    km = place.km or 0.0
    if by is By.DISTANCE:
        return (place.group is Group.CLOSING, km, 0.0)
    if place.group is Group.ROOM:
        return (place.group, -place.active, -place.static)
    if place.group is Group.LOW:
        return (place.group, -place.blend, 0.0)
    return (place.group, km, 0.0)


def chosen(ranked: Iterable[Place], serving: Collection[str], override: Override | None) -> list[Place]:
    """The places that are listed, best first. serving: the gateways that may be, by the topology.

    Silent ones are left out while somebody who answers has room. What an override would leave nobody of is passed over: a
    slip of the hand must not shut everybody out.
    """
    places = [place for place in ranked if place.name in serving]
    if override is None:
        return _answering(places)[:LISTED]
    allowed = [place for place in places if place.name not in override.never] or places
    by_name = {place.name: place for place in allowed}
    first = [by_name[name] for name in override.first if name in by_name]
    pinned = {place.name for place in first}
    rest = allowed if override.by is not By.LOAD else _answering(allowed)
    return [*first, *(place for place in rest if place.name not in pinned)][:LISTED]


def _answering(places: list[Place]) -> list[Place]:
    if any(place.group <= Group.LOW for place in places):
        return [place for place in places if place.group is not Group.SILENT]
    return places
