"""A drain, decided: whom to name when, when the rest is cut, how often somebody who stays is named again.

    serve ◂──── record: serving, no SIGTERM ────┐
      │ record: draining · SIGTERM              │
      ▾                                         │
    settle ─ settle_s ─▸ move: so many a second, ─ deadline ─▸ cut
             (new ones   first everybody once,
             refused)    then again after AGAIN_MS, doubling

A record's order and a SIGTERM's are one drain: the record's pace and settle time count before the pod's own, and the least
deadline counts. A deadline is Unix ms in the record; from when it was learnt a monotonic clock keeps it, so a clock that
steps neither cuts early nor late. While there is no gateway to go to nobody is named; the deadline stands.

Times are ms of a monotonic clock that the caller reads. Memory: two numbers and a heap entry per connection.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum
from typing import Final

AGAIN_MS: Final = 5_000
AGAIN_MAX_MS: Final = 60_000
UNSENT_MS: Final = 1_000
"""Who could not be named (its shard is down) is tried again after this."""
BURST: Final = 10
"""At most 1/BURST of a second's pace is saved up: a second never sees more than 110 %."""


class Mode(IntEnum):
    """What the workers do."""

    SERVE = 0
    REFUSE = 1
    CUT = 2


@dataclass(frozen=True, slots=True)
class Order:
    """How a drain is to be done. id: 0 for the pod's own; deadline_ms: of the caller's monotonic clock."""

    id: int
    pace_per_s: int
    settle_ms: int
    deadline_ms: int


class Drain:
    """The drain of one gateway, or none."""

    def __init__(self) -> None:
        self._recorded: Order | None = None
        self._own: Order | None = None
        self._since_ms = 0
        self._attempts: dict[int, int] = {}
        """conn_id → how often it was named, of those that are here."""
        self._when: dict[int, int] = {}
        """conn_id → when it is named next."""
        self._due: list[tuple[int, int, int]] = []
        """Heap of (due, spread, conn_id); an entry that is not what `_when` says is skipped when its turn comes."""
        self._budget = 0.0
        self._budget_ms = 0

    # ── orders ───────────────────────────────────────────────────────────────────────────────────────────────

    def recorded(self, order: Order | None, now_ms: int) -> None:
        """What the newest record says; None: this gateway serves. The same id again: its least deadline counts."""
        known = self._recorded
        if order is not None and known is not None and order.id == known.id:
            deadline_ms = min(order.deadline_ms, known.deadline_ms)
            order = Order(order.id, order.pace_per_s, order.settle_ms, deadline_ms)
        self._set(order, self._own, now_ms)

    def terminated(self, order: Order, now_ms: int) -> None:
        """SIGTERM came: the pod's own order, which nothing takes back."""
        if self._own is None:
            self._set(self._recorded, order, now_ms)

    def _set(self, recorded: Order | None, own: Order | None, now_ms: int) -> None:
        before = self.order is not None
        self._recorded, self._own = recorded, own
        if self.order is None:
            self._attempts.clear()
            self._when.clear()
            self._due.clear()
        elif not before:
            self._since_ms = now_ms
            self._budget, self._budget_ms = 0.0, now_ms

    @property
    def order(self) -> Order | None:
        """The drain that runs, or None."""
        orders = [order for order in (self._recorded, self._own) if order is not None]
        if not orders:
            return None
        first = orders[0]
        return Order(first.id, first.pace_per_s, first.settle_ms, min(order.deadline_ms for order in orders))

    def mode(self, now_ms: int) -> Mode:
        """What the workers do now."""
        order = self.order
        if order is None:
            return Mode.SERVE
        return Mode.CUT if now_ms >= order.deadline_ms else Mode.REFUSE

    # ── connections ──────────────────────────────────────────────────────────────────────────────────────────

    def here(self, conn_ids: Iterable[int], now_ms: int) -> None:
        """Every connection that is here now: new ones are to be named, those that left are forgotten."""
        if self.order is None:
            return
        present = set(conn_ids)
        for conn_id in [c for c in self._attempts if c not in present]:
            del self._attempts[conn_id], self._when[conn_id]
        for conn_id in present - self._attempts.keys():
            self._attempts[conn_id] = 0
            self._at(conn_id, now_ms)

    def step(self, now_ms: int, targets: bool) -> list[int]:
        """Whom to name now, at the pace. targets: there is another gateway that serves."""
        order = self.order
        passed_ms, self._budget_ms = now_ms - self._budget_ms, now_ms
        if order is None or now_ms < self._since_ms + order.settle_ms or now_ms >= order.deadline_ms or not targets:
            self._budget = 0.0
            return []
        most = max(1.0, order.pace_per_s / BURST)
        self._budget = min(most, self._budget + passed_ms * order.pace_per_s / 1000)
        named: list[int] = []
        while self._budget >= 1 and self._due and self._due[0][0] <= now_ms:
            due_ms, _, conn_id = heapq.heappop(self._due)
            if self._when.get(conn_id) != due_ms:
                continue
            self._budget -= 1
            times = self._attempts[conn_id]
            self._attempts[conn_id] = times + 1
            self._at(conn_id, now_ms + min(AGAIN_MAX_MS, AGAIN_MS << min(times, 10)))
            named.append(conn_id)
        return named

    def unsent(self, conn_ids: Iterable[int], now_ms: int) -> None:
        """These could not be named after all: they are soon tried again, and others take their turn."""
        for conn_id in conn_ids:
            if conn_id in self._attempts:
                self._attempts[conn_id] -= 1
                self._budget += 1
                self._at(conn_id, now_ms + UNSENT_MS)

    def _at(self, conn_id: int, due_ms: int) -> None:
        self._when[conn_id] = due_ms
        heapq.heappush(self._due, (due_ms, _spread(conn_id), conn_id))


def _spread(conn_id: int) -> int:
    """Orders connections without regard to their age, slot or shard."""
    return (conn_id * 0x9E3779B97F4A7C15) >> 20 & 0xFFFFFFFF
