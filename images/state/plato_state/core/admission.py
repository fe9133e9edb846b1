"""Which new uplinks are let in: what one connection and one user may send, and what the parts behind bear.

    per connection, per user   token buckets; past them TOO_FAST; what a connection has read is a bucket of its own
    the way to the bus         an adaptive limiter over uplinks that wait for the bus's answer; past it BUSY
    the way through msg        the same over uplinks that the bus has and whose receipt did not come by yet: what the bus
                               takes and nobody works off would only grow old there
    the bus itself             a breaker: once its appends fail for long, new uplinks are refused by chance, BUSY

Syncs and Pulls have a limiter too, so that what clients ask does not wait in line here for longer than they would wait.
Each refusal carries a time to wait. Nothing of this decides order or duplicates (R1): a refused uplink goes the way of one
that found no room. Work behind the bus is measured by probes, in this process alone: of some uplinks the frame that brings
their outcome is waited for, and all that the bus took before them counts as done with it. Such a frame may be lost (R4), and
then tells nothing: so one uplink per TRICKLE_MS is let in though msg seems late, as the probe that shows whether it is.

Memory: two entries per connection and user that sent lately, the limiters', and MAX_PROBES × MAX_PROBES_EACH probes.
"""

from __future__ import annotations

from collections import deque
from typing import Final, NamedTuple

from plato.core.breaker import Breaker
from plato.core.codes import Code
from plato.core.limiter import RETRY_MIN_MS, Limiter
from plato.core.rates import Buckets

BURST_S: Final = 4
"""What may be sent at once: as much as in so many seconds."""
FLOOR: Final = 256
"""Uplinks that are let in whatever happened before: half a dozen clients with full windows."""
READ_CALM_MS: Final = 1_000
MAX_PROBES: Final = 256
"""Connections with probes."""
MAX_PROBES_EACH: Final = 24
PROBE_EVERY_MS: Final = 25
PROBE_EACH_MS: Final = 250
"""So one connection's probes reach back six seconds."""
TRICKLE_MS: Final = 100


class Refusal(NamedTuple):
    """Why an uplink is not let in now, and when the same may come again."""

    code: Code
    retry_ms: int
    why: str
    """connection, user, bus, msg, breaker or memory; for the metric."""


class Admission:
    """The door of one shard. `now_ms`: of one clock, never less than before."""

    def __init__(
        self, connection_per_s: int, user_per_s: int, bus_calm_ms: int, receipt_calm_ms: int, floor: int = FLOOR
    ) -> None:
        self._connections: Buckets[int] = Buckets(connection_per_s, connection_per_s * BURST_S)
        self._users: Buckets[str] = Buckets(user_per_s, user_per_s * BURST_S)
        self._signals: Buckets[int] = Buckets(connection_per_s, connection_per_s * BURST_S)
        self.bus = Limiter(bus_calm_ms, floor)
        self.msg = Limiter(receipt_calm_ms, floor)
        self.reads = Limiter(READ_CALM_MS, floor)
        """Syncs and Pulls on their way to msg and back."""
        self.breaker = Breaker()
        self.probes: dict[int, deque[tuple[int, bytes, int]]] = {}
        """{conn_id: (made_ms, client_msg_id, how many the bus had taken with it), oldest first}."""
        self._probe_at_ms = 0
        self._trickle_at_ms = 0

    def refusal(self, conn_id: int, user: str, now_ms: int, chance: float) -> Refusal | None:
        """None: the uplink is let in, if there is memory for it; then `begin` it. chance: from [0, 1)."""
        wait_ms = self._connections.wait_ms(conn_id, now_ms)
        if wait_ms:
            return Refusal(Code.TOO_FAST, wait_ms, "connection")
        wait_ms = self._users.wait_ms(user, now_ms)
        if wait_ms:
            return Refusal(Code.TOO_FAST, wait_ms, "user")
        # While the oldest waits no longer than usual, a failed append is one that is repeated, and nobody is told.
        if self.bus.oldest_ms(now_ms) > self.bus.calm_ms and chance < self.breaker.chance_of_refusal(now_ms):
            return Refusal(Code.BUSY, self.bus.retry_ms(now_ms), "breaker")
        if not self.bus.admits(now_ms):
            return Refusal(Code.BUSY, self.bus.retry_ms(now_ms), "bus")
        if not self.msg.admits(now_ms):
            if now_ms < self._trickle_at_ms:
                return Refusal(Code.BUSY, self.msg.retry_ms(now_ms), "msg")
            self._trickle_at_ms = now_ms + TRICKLE_MS
        return None

    def full(self, now_ms: int) -> Refusal:
        """There was no memory for an uplink that would have been let in."""
        return Refusal(Code.BUSY, max(RETRY_MIN_MS, self.bus.retry_ms(now_ms)), "memory")

    def begin(self, conn_id: int, user: str, now_ms: int) -> None:
        """An uplink waits for the bus."""
        self._connections.charge(conn_id, now_ms)
        self._users.charge(user, now_ms)
        self.bus.begin(now_ms)

    def signal(self, conn_id: int, now_ms: int) -> int:
        """A READ: 0, and it is let in; else how long to wait."""
        wait_ms = self._signals.wait_ms(conn_id, now_ms)
        if not wait_ms:
            self._signals.charge(conn_id, now_ms)
        return wait_ms

    def read(self, now_ms: int) -> int:
        """A Sync or Pull: 0, and it is let in (`reads.done` when it ended); else how long to wait."""
        if self.reads.admits(now_ms):
            self.reads.begin(now_ms)
            return 0
        return self.reads.retry_ms(now_ms)

    def dropped(self, count: int = 1) -> None:
        """Uplinks that waited for the bus do so no more."""
        self.bus.cancel(count)

    def appended(self, count: int, now_ms: int) -> None:
        """The bus took uplinks; now they wait for msg."""
        self.breaker.accepted(now_ms)
        self.bus.done(now_ms, count)
        self.msg.begin(now_ms, count)

    def append_failed(self, now_ms: int) -> None:
        """An append failed; it is repeated."""
        self.breaker.failed(now_ms)

    def wants_probe(self, now_ms: int) -> bool:
        """Whether the last uplink that was appended should be a probe."""
        return now_ms >= self._probe_at_ms

    def probe(self, conn_id: int, client_msg_id: bytes, now_ms: int) -> None:
        """The uplink that was appended last is a probe: `arrived` is to be told of the frames to its sender."""
        probes = self.probes.get(conn_id)
        if probes is None:
            if len(self.probes) >= MAX_PROBES:
                del self.probes[next(iter(self.probes))]  # its receipt may go elsewhere; a later one tells as much
            probes = self.probes[conn_id] = deque(maxlen=MAX_PROBES_EACH)
        elif now_ms - probes[-1][0] < PROBE_EACH_MS:
            return
        self._probe_at_ms = now_ms + PROBE_EVERY_MS
        probes.append((now_ms, client_msg_id, self.msg.begun))

    def arrived(self, conn_id: int, frame: bytes, now_ms: int) -> None:
        """A frame of msg for a connection that has a probe."""
        probes = self.probes[conn_id]
        for place, (_, client_msg_id, upto) in enumerate(probes, 1):
            if client_msg_id in frame:
                self.msg.done_upto(now_ms, upto)
                for _ in range(place):  # those before it were lost, or are still to come and tell nothing new
                    probes.popleft()
                if not probes:
                    del self.probes[conn_id]
                return
