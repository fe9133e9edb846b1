"""The shard's clock: ticks of a loop that has drained its input (R10), and what each tick does.

    a turn of the loop ─▸ 0, 1 or 2 ticks ─▸ wheel (expiries) · repeats · owed Notifies · PENDING

A tick is counted when the loop turns, never for time in which nobody could have been heard: a process that was stopped
for an hour wakes up one or two ticks later. Work per tick is bounded; what is over waits for the next one.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable
from typing import Final

from plato.guards import Guard

from plato_state import metrics
from plato_state.core.session import Phase
from plato_state.core.wheel import Pacer
from plato_state.downlink import Downlink
from plato_state.sessions import Sessions
from plato_state.shard import TICK_MS, Shard
from plato_state.signals import Signals
from plato_state.uplink import Uplink

EXPIRIES_PER_TICK: Final = 200
GAUGES_EVERY: Final = 40


class Timers:
    """Turns the wheels. `clock` reads seconds that rise steadily."""

    def __init__(
        self,
        shard: Shard,
        uplink: Uplink,
        sessions: Sessions,
        downlink: Downlink,
        on_tick: Callable[[], None],
        guard: Guard,
        signals: Signals,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._shard = shard
        self._uplink = uplink
        self._sessions = sessions
        self._downlink = downlink
        self._on_tick = on_tick
        self._guard = guard
        self._signals = signals
        self._clock = clock
        self._pacer = Pacer(TICK_MS / 1000)

    async def main(self) -> None:
        """Ticks until cancelled."""
        due_s = self._clock()
        while True:
            await asyncio.sleep(TICK_MS / 1000)
            # Once more round the loop: what the sockets brought while we slept is handled before time is counted.
            await asyncio.sleep(0)
            now_s = self._clock()
            metrics.LOOP_LAG.set(max(0.0, now_s - due_s - TICK_MS / 1000))
            due_s = now_s
            self.turn(now_s)

    def turn(self, now_s: float) -> None:
        """One turn of the loop at `now_s`: as many ticks as it is worth."""
        for _ in range(self._pacer.credit(now_s)):
            self.tick()

    def tick(self) -> None:
        """One tick."""
        shard = self._shard
        for conn_id in shard.life.advance(EXPIRIES_PER_TICK):
            connection = shard.connections.get(conn_id)
            if connection is not None:
                actions = connection.expired(shard.stream_down_ms(conn_id), shard.grace_ms(conn_id))
                self._sessions.run(connection, actions)
        self._uplink.pend()
        self._sessions.pend()
        self._signals.pend()
        self._downlink.repeat()
        self._downlink.pay()
        self._on_tick()
        if shard.now % GAUGES_EVERY == 0:
            self._gauges()

    def _gauges(self) -> None:
        shard = self._shard
        phases = Counter(c.phase for c in shard.connections.values())
        shard.live = phases[Phase.LIVE]
        for phase in Phase:
            metrics.CONNECTIONS.labels(phase.name.lower()).set(phases[phase])
        metrics.TIMERS.labels("life").set(len(shard.life))
        metrics.TIMERS.labels("repeat").set(len(shard.repeats))
        metrics.QUEUE_BYTES.set(shard.batcher.held_bytes)
        metrics.LINKS.set(len(shard.links))
        admission, now_ms = shard.admission, shard.now_ms
        for where, limiter in (("bus", admission.bus), ("msg", admission.msg), ("reads", admission.reads)):
            metrics.IN_FLIGHT_AGE.labels(where).set(limiter.oldest_ms(now_ms) / 1000)
            metrics.IN_FLIGHT.labels(where).set(limiter.in_flight)
            metrics.IN_FLIGHT_LIMIT.labels(where).set(limiter.limit(now_ms))
        metrics.BREAKER.labels("bus").set(admission.breaker.chance_of_refusal(now_ms))
        metrics.BREAKER.labels("store").set(self._guard.refusal_ratio)
        loaded = sum(1 for s in shard.slots.values() if s.loaded)
        metrics.SLOTS.labels("loaded").set(loaded)
        metrics.SLOTS.labels("loading").set(len(shard.slots) - loaded)
        metrics.SLOTS.labels("wanted").set(len(shard.assigned))
