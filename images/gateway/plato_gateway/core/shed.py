"""Clients that may go to gateways with more left, decided: which ones, where to, how many a second (`plato rebalance`).

An order counts once: each client is named once, and whoever does not go stays. A new order takes the place of one that
runs; a drain ends it, since then everybody goes anyway. Times are ms of a monotonic clock that the caller reads.
Memory: a number per client that is still to be named.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain, zip_longest
from typing import Final

BURST: Final = 10
"""At most 1/BURST of a second's pace is saved up."""


@dataclass(frozen=True, slots=True)
class Part:
    """So many clients to one gateway."""

    target: str
    clients: int


class Shed:
    """The order of one gateway, or none."""

    def __init__(self) -> None:
        self._parts: tuple[Part, ...] = ()
        """What is ordered and not given to anybody yet."""
        self._due: deque[tuple[int, str]] = deque()
        """(conn_id, gateway to go to), in the order of their turns."""
        self._pace_per_s = 0
        self._budget = 0.0
        self._budget_ms = 0

    @property
    def left(self) -> int:
        """Clients that are still to be named."""
        return len(self._due) + sum(part.clients for part in self._parts)

    @property
    def waits(self) -> bool:
        """Whether it must be told who is here."""
        return bool(self._parts)

    def order(self, parts: Sequence[Part], pace_per_s: int, now_ms: int) -> None:
        """A new order; () ends the one that runs."""
        self._parts = tuple(part for part in parts if part.clients > 0)
        self._due.clear()
        self._pace_per_s = pace_per_s
        self._budget, self._budget_ms = 1.0, now_ms

    def here(self, conn_ids: Iterable[int]) -> None:
        """Who is here now: so many of them as were ordered get their turn, by chance of their ids, one target after the
        other."""
        chosen = iter(sorted(conn_ids, key=_spread))
        turns = [
            [(conn_id, part.target) for _, conn_id in zip(range(part.clients), chosen, strict=False)]
            for part in self._parts
        ]
        self._parts = ()
        self._due.extend(turn for turn in chain.from_iterable(zip_longest(*turns)) if turn is not None)

    def step(self, now_ms: int) -> list[tuple[int, str]]:
        """(conn_id, gateway) to name now, at the pace."""
        passed_ms, self._budget_ms = now_ms - self._budget_ms, now_ms
        self._budget = min(max(1.0, self._pace_per_s / BURST), self._budget + passed_ms * self._pace_per_s / 1000)
        found: list[tuple[int, str]] = []
        while self._budget >= 1 and self._due:
            self._budget -= 1
            found.append(self._due.popleft())
        return found

    def unsent(self, turns: Sequence[tuple[int, str]]) -> None:
        """These could not be named after all: their turn comes again."""
        self._due.extendleft(reversed(turns))
        self._budget += len(turns)


def _spread(conn_id: int) -> int:
    """Orders connections without regard to their age, slot or shard."""
    return (conn_id * 0x9E3779B97F4A7C15) >> 20 & 0xFFFFFFFF
