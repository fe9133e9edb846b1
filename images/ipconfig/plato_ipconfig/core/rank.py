"""Which gateways a client should try, best first (design §11, plain: most room first).

Samples of load come in, a list comes out; there is no clock and no chance here. What is kept: one sample per gateway of
the topology.

Order: gateways heard lately with room, most first; full ones; silent ones, by chance; those that said they are closing.
Within each of these the caller's zone comes first: never a full gateway near by before one with room farther off.
Between two samples a gateway's room shrinks by the clients that were sent there, so that a crowd that asks within one
second is spread instead of sent to one place.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Final

LISTED: Final = 5
"""How many gateways one answer names at most."""


class Group(IntEnum):
    """How a gateway is seen; the smaller one is listed first."""

    ROOM = 0
    FULL = 1
    SILENT = 2
    CLOSING = 3


@dataclass(frozen=True, slots=True)
class Load:
    """What a gateway says of itself. serving: it takes connections; connections_left: until it is full, ≥ 0."""

    serving: bool
    connections: int
    connections_left: int


@dataclass(frozen=True, slots=True)
class Place:
    """A gateway in an answer: its group, the room it is thought to have (0 where unknown), the age of its sample."""

    name: str
    group: Group
    room: int
    age_ms: int | None


@dataclass(slots=True)
class _Sample:
    load: Load
    at_ms: int
    sent: int = 0
    """Clients that were sent there since the sample."""


class Board:
    """Newest sample per gateway. A gateway without a sample for `silent_ms` is silent: its old figures count no more."""

    def __init__(self, silent_ms: int) -> None:
        self._silent_ms = silent_ms
        self._samples: dict[str, _Sample] = {}

    def observe(self, name: str, load: Load, now_ms: int) -> None:
        """A gateway answered."""
        self._samples[name] = _Sample(load, now_ms)

    def keep(self, names: Iterable[str]) -> None:
        """Forgets gateways that the topology no longer names."""
        known = set(names)
        for name in [n for n in self._samples if n not in known]:
            del self._samples[name]

    def place(self, name: str, now_ms: int, closing: bool = False) -> Place:
        """How one gateway is seen now. closing: the topology says that it drains."""
        sample = self._samples.get(name)
        if sample is None or now_ms - sample.at_ms > self._silent_ms:
            age_ms = None if sample is None else now_ms - sample.at_ms
            return Place(name, Group.CLOSING if closing else Group.SILENT, 0, age_ms)
        room = max(0, sample.load.connections_left - sample.sent)
        group = Group.ROOM if room > 0 else Group.FULL
        if closing or not sample.load.serving:
            group = Group.CLOSING
        return Place(name, group, room, now_ms - sample.at_ms)

    def ranked(
        self, closing: Mapping[str, bool], now_ms: int, chance: Callable[[], float], near: Collection[str] = ()
    ) -> list[Place]:
        """Every gateway, best first. closing: {name: whether it drains}; chance: draws from [0, 1) and breaks ties; near:
        those of the caller's zone."""
        places = [self.place(name, now_ms, drains) for name, drains in closing.items()]
        keyed = [(place.group, place.name not in near, -place.room, chance(), place) for place in places]
        keyed.sort(key=lambda item: item[:4])
        return [item[4] for item in keyed]

    def sent_to(self, name: str) -> None:
        """A client was told to try this gateway first."""
        if name in self._samples:
            self._samples[name].sent += 1
