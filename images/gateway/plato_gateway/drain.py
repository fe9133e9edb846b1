"""The drain of this gateway, done: what the record and a SIGTERM order goes to the workers and, connection by connection,
to the shards; what they answer says how much is left.

    record, <run_dir>/term ─▸ core/drain ─▸ mode ─▸ workers ─▸ HELD: who is here
                                  └─▸ named, a few each STEP_S ─▸ each one's shard ─▸ REDIRECT to its client

Drained: every worker refuses newcomers and holds nobody, and no shard's stream has anything under way. A worker or a link
that starts again in between is told, or reads, the same orders. After a SIGTERM `on_over` is called, again and again,
when the pod may end: drained; the record is gone; or, where no other gateway can come (a record in a file), there is none.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, Protocol

from plato.core.ids import slot_of
from plato.runtime import logs
from plato.runtime.settings import Settings
from plato.topology.record import SERVING, Gateway, Topology

from . import term
from .core import drain, lanes
from .core.drain import Mode, Order

STEP_S: Final = 0.05
LOOK_S: Final = 0.25
LOOK_AT_MANY_S: Final = 1.0
MANY: Final = 2_000
"""Above so many connections workers are asked more rarely who is here."""


class Lane(Protocol):
    """A worker's lane, as a drain needs it."""

    index: int
    boot: int

    def send(self, message: bytes) -> None:
        """Writes a lane message."""


class Stream(Protocol):
    """A shard's stream, as a drain needs it."""

    group: int

    @property
    def idle(self) -> bool:
        """Nothing waits to be sent or taken."""

    def redirect(self, conn_ids: list[int]) -> bool:
        """Names connections to the shard. False: not now."""


class _Worker:
    """What one worker process said last."""

    def __init__(self, boot: int, connections: int) -> None:
        self.boot = boot
        self.mode = -1
        """The mode that it confirmed; -1: none yet."""
        self.conn_ids: list[int] = []
        self.connections = connections


class GatewayDrain:
    """Lives in the link. `run` until cancelled."""

    def __init__(
        self,
        settings: Settings,
        lanes_by_index: Mapping[int, Lane],
        streams: Mapping[str, Stream],
        group_of_slot: Callable[[int], int],
        gone: Callable[[], bool],
        on_over: Callable[[], None],
    ) -> None:
        """group_of_slot: the link's number for the shard of a slot. gone: the record was removed."""
        self._settings = settings.gateway
        self._name = settings.process.name
        self._others_may_come = bool(settings.topology.config_map)
        self._lanes = lanes_by_index
        self._streams = streams
        self._group_of_slot = group_of_slot
        self._gone = gone
        self._on_over = on_over
        self._log = logs.get("drain")
        self._core = drain.Drain()
        self._workers: dict[int, _Worker] = {}
        self._cuts: dict[tuple[int, int], int] = {}
        """(index, boot) → connections that this worker process closed at the deadline."""
        self._known = False
        """We read whether a drain runs; before, workers keep the mode that the link before this one said."""
        self._targets = False
        self._recorded_id = 0
        """Of the order that the newest record gives; 0: none."""
        self._off_ms = 0
        """How far our clock is before that of who gave it."""
        self._asked_ms: int | None = None
        """When SIGTERM came."""
        self._told: dict[int, tuple[int, int]] = {}
        """Worker index → (boot, mode) that was last sent."""
        self._next_look_ms = 0
        self._shown: tuple[Any, ...] = ()
        self.redirects = 0
        """Connections named to their shards in all drains; one that stays is named again."""
        self.cut = 0
        """Connections that were closed at the deadline in all drains."""

    # ── what the link tells ──────────────────────────────────────────────────────────────────────────────────

    def topology(self, topology: Topology, own: Gateway | None) -> None:
        """A newer record. own: this gateway's, or None where it names none of our uid: nobody takes back an order then."""
        self._targets = any(g.state == SERVING for name, g in topology.gateways.items() if name != self._name)
        if own is not None:
            self._core.recorded(self._order(own), _now_ms())
            self._known = True
        self._step()

    def _order(self, own: Gateway) -> Order | None:
        given = own.drain
        if own.state == SERVING or given is None:
            self._recorded_id = 0
            return None
        left_ms = given.deadline_ms - time.time_ns() // 1_000_000
        if self._recorded_id != given.id:
            # An order that we see come has just begun, whatever our clock says; one that was there before us may be old.
            off_ms = given.within_ms - left_ms if given.within_ms else 0
            self._off_ms = off_ms if self._known else min(0, off_ms)
            self._recorded_id = given.id
        return Order(given.id, given.pace_per_s, given.settle_s * 1000, _now_ms() + left_ms + self._off_ms)

    def hello(self, lane: Lane, hello: lanes.Hello) -> None:
        """A worker's lane is new: it hears the mode before anything that lets it take connections in."""
        self._workers[lane.index] = _Worker(hello.boot, hello.connections)
        if self._known:
            self._tell(lane, self._core.mode(_now_ms()))

    def held(self, lane: Lane, held: lanes.Held) -> None:
        """A worker says who is here."""
        worker = self._workers.get(lane.index)
        if worker is None or worker.boot != lane.boot:
            return
        worker.mode, worker.connections = held.mode, len(held.conn_ids)
        worker.conn_ids = held.conn_ids.tolist()
        if self._core.order is not None:
            self.cut += max(0, held.cut - self._cuts.get((lane.index, lane.boot), 0))
            self._cuts[lane.index, lane.boot] = held.cut
            self._core.here((c for w in self._workers.values() for c in w.conn_ids), _now_ms())

    def ask_who_is_here(self) -> None:
        """Has every worker say it anew; it comes to `held`."""
        for lane in self._lanes.values():
            self._tell(lane, self._core.mode(_now_ms()))

    # ── what it says ─────────────────────────────────────────────────────────────────────────────────────────

    @property
    def why(self) -> str:
        """Why this gateway takes nobody in; "" when no drain runs."""
        return "" if self._core.order is None else "draining"

    @property
    def drained(self) -> bool:
        """Whether a drain runs, and is done."""
        if self._core.order is None:
            return False
        here = [self._workers.get(index) for index in range(self._settings.workers)]
        shut = all(w is not None and w.mode >= Mode.REFUSE and not w.connections for w in here)
        return shut and self._lanes.keys() >= set(range(len(here))) and all(s.idle for s in self._streams.values())

    def status(self) -> dict[str, Any] | None:
        """`drain` of /v1/report: id (0: the pod's own order), phase, remaining, cut. None: no drain runs."""
        order = self._core.order
        if order is None:
            return None
        phase = "drained" if self.drained else "draining"
        return {"id": order.id, "phase": phase, "remaining": self._remaining, "cut": sum(self._cuts.values())}

    @property
    def left_s(self) -> float:
        """Seconds until the rest is closed; 0 without a drain, and after the deadline."""
        order = self._core.order
        return max(0.0, (order.deadline_ms - _now_ms()) / 1000) if order is not None else 0.0

    @property
    def _remaining(self) -> int:
        return sum(worker.connections for worker in self._workers.values())

    # ── what it does ─────────────────────────────────────────────────────────────────────────────────────────

    async def run(self) -> None:
        """Looks for a SIGTERM, names who is to go, and watches for the end."""
        while True:
            self._look_for_term()
            self._step()
            if self._asked_ms is not None and self._over():
                self._on_over()
            await asyncio.sleep(STEP_S)

    def _look_for_term(self) -> None:
        if self._asked_ms is not None:
            return
        asked_ms = self._asked_ms = term.asked_ms(Path(self._settings.run_dir))
        if asked_ms is not None:
            gateway = self._settings
            deadline_ms = asked_ms + gateway.drain_deadline_s * 1000
            own = Order(0, gateway.drain_pace_per_s, gateway.drain_settle_s * 1000, deadline_ms)
            self._core.terminated(own, _now_ms())
            self._known = True

    def _over(self) -> bool:
        return self._gone() or self.drained or not (self._targets or self._others_may_come)

    def _step(self) -> None:
        if not self._known:
            return
        now_ms = _now_ms()
        mode = self._core.mode(now_ms)
        if mode == Mode.SERVE:
            self._cuts.clear()
        look = mode != Mode.SERVE and now_ms >= self._next_look_ms
        if look:
            self._next_look_ms = now_ms + int(1000 * (LOOK_AT_MANY_S if self._remaining > MANY else LOOK_S))
        for lane in self._lanes.values():
            if look or self._told.get(lane.index) != (lane.boot, mode):
                self._tell(lane, mode)
        self._name_some(now_ms)
        self._show(mode)

    def _tell(self, lane: Lane, mode: Mode) -> None:
        self._told[lane.index] = lane.boot, mode
        lane.send(lanes.pack_drain(mode))

    def _name_some(self, now_ms: int) -> None:
        by_group: dict[int, list[int]] = {}
        for conn_id in self._core.step(now_ms, self._targets):
            by_group.setdefault(self._group_of_slot(slot_of(conn_id)), []).append(conn_id)
        streams = {stream.group: stream for stream in self._streams.values()}
        for group, conn_ids in by_group.items():
            stream = streams.get(group)
            if stream is None or not stream.redirect(conn_ids):
                self._core.unsent(conn_ids, now_ms)
            else:
                self.redirects += len(conn_ids)

    def _show(self, mode: Mode) -> None:
        """One log line per change."""
        order = self._core.order
        shown = (mode, order.id if order else 0, self._targets if order else True, self.drained)
        if shown == self._shown or (order is None and not self._shown):
            return
        self._shown = shown
        self._log.info(
            "drain" if order is not None else "no drain: this gateway serves",
            mode=mode.name.lower(),
            id=order.id if order is not None else None,
            left_s=round((order.deadline_ms - _now_ms()) / 1000, 1) if order is not None else None,
            targets=self._targets,
            remaining=self._remaining,
            drained=self.drained,
        )


def _now_ms() -> int:
    return time.monotonic_ns() // 1_000_000
