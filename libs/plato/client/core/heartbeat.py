"""The heartbeat interval, learnt per kind of network: as long as the network lets a flow stand idle, and not longer.

    grow ──> what stood idle for most of the interval was answered then, RISE_AFTER times in a row: half as long again
    drop ──> what stood idle answered nothing, and a new connection came at the first try: the network dropped it,
             two thirds of that idle time; it is not gone near again for `_probe_after` answered beats

Only the client can tell a flow that was dropped for standing idle from a phone in a tunnel: in the tunnel no new connection
comes. A first drop may have had another reason (a gateway died at that moment), so it is soon tried again; each further one
counts sixteen times as long. The server gives the bounds and has the last word on each interval.

Idle is what the network sees: no bytes either way. Memory: NETWORKS_MAX kinds, the ones used last.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from plato.client.core.model import Learnt
from plato.client.core.repeats import Chance, Timing

RISE_AFTER: Final = 3
PROBE_FIRST: Final = 20
"""Answered beats after a first drop until a longer interval is tried again; × 16 per further drop, three times at most."""
UNKNOWN_MS: Final = 30_000
"""At most so long on a network of which nothing is known, whatever was granted for the one before."""
NETWORKS_MAX: Final = 8
NAME_BYTES: Final = 64
_UNSET: Final = -1


def _name(network: str) -> str:
    """A network's name as it is sent and stored: one line, NAME_BYTES at most."""
    return "".join(c for c in network if c.isprintable()).encode()[:NAME_BYTES].decode(errors="ignore")


def _written(learnt: Iterable[Learnt]) -> str:
    """The store's text: a line "interval broken drops network" each, the network used last at the end."""
    return "\n".join(f"{one.interval_ms} {one.broken_ms} {one.drops} {one.network}" for one in learnt)


def read(text: str) -> Iterable[Learnt]:
    """What `take` gave."""
    for line in text.splitlines():
        interval, broken, drops, network = line.split(" ", 3)
        yield Learnt(network, int(interval), int(broken), int(drops))


class Heartbeat:
    """What is known of every kind of network, and the connection that stands: its idle times."""

    def __init__(self, learnt: Iterable[Learnt], network: str, timing: Timing, chance: Chance) -> None:
        """network: the kind that the device is in now, as its application names it."""
        self.network = _name(network)
        self._known = {one.network: one for one in learnt}
        self._now = Learnt("")
        self._timing = timing
        self._chance = chance
        self._wished_ms = 0  # by the last Login, ReConn or Heartbeat
        self._active_ms = _UNSET  # when the last bytes went either way; unset: no connection stands
        self._asked_ms = 0  # the longest idle time before anything that was sent since something came
        self._good = 0  # answers in a row after an idle time near the interval
        self._suspect_ms = 0  # the idle time after which the last connection fell silent
        self._changed = False  # something is to be written

    def wish(self) -> int:
        """The interval to wish for on this network; 0: nothing is known of it. For a frame that is sent now."""
        self._wished_ms = self._now.interval_ms
        return self._wished_ms

    def next_ms(self, now_ms: int) -> int:
        """When to beat next: up to a tenth earlier than need be, so that clients do not beat in step. Whoever learnt to beat
        faster need not wait until it is granted."""
        interval_ms = min(self._timing.heartbeat_ms, self._now.interval_ms or UNKNOWN_MS)
        return now_ms + int(interval_ms * (1 - self._chance() / 10))

    def take(self) -> str | None:
        """What is to be written since it was asked last; `read` reads it. None: nothing."""
        changed, self._changed = self._changed, False
        return _written(self._known.values()) if changed else None

    def move(self, network: str) -> bool:
        """The device is in this kind of network now. False: as before."""
        before, self.network = self.network, _name(network)
        return before != self.network

    def enter(self, way: str) -> None:
        """A connection was made in this way ("tcp", "ws", "poll"): proxies have rules of their own, polls are never idle."""
        key = f"{way} {self.network}"
        if key != self._now.network:
            self._suspect_ms = 0
            self._now = self._known.get(key) or Learnt(key)

    def granted(self) -> None:
        """Login, ReConn or Heartbeat was answered: `timing` has what stands. It has the last word on what was wished for."""
        if self._now.interval_ms == self._wished_ms and self._now.interval_ms != self._timing.heartbeat_ms:
            self._now.interval_ms, self._good = self._timing.heartbeat_ms, 0

    def begin(self, now_ms: int, *, at_once: bool) -> None:
        """A connection is committed. at_once: no round of attempts had failed since the last one was lost."""
        if at_once and self._suspect_ms:
            self._dropped(self._suspect_ms)
        self._suspect_ms = self._asked_ms = self._good = 0
        self._active_ms = now_ms

    def heard(self, now_ms: int) -> None:
        """Bytes came."""
        if self._active_ms != _UNSET:
            self._survived(max(self._asked_ms, now_ms - self._active_ms))
            self._active_ms, self._asked_ms = now_ms, 0

    def spoke(self, now_ms: int) -> None:
        """Bytes are sent."""
        if self._active_ms != _UNSET:
            self._asked_ms = max(self._asked_ms, now_ms - self._active_ms)
            self._active_ms = now_ms

    def lost(self, *, silent: bool) -> None:
        """The connection is gone. silent: it just stopped answering, or was reset; nobody said why."""
        if self._active_ms != _UNSET and silent:
            self._suspect_ms = self._asked_ms
        self._active_ms = _UNSET

    def _survived(self, idle_ms: int) -> None:
        now = self._now
        if idle_ms * 5 < self._timing.heartbeat_ms * 4:
            return
        if now.broken_ms and idle_ms >= now.broken_ms:
            now.broken_ms = now.drops = 0  # it had another reason
        self._good += 1
        now.beats += 1
        if self._good < RISE_AFTER or now.interval_ms != self._timing.heartbeat_ms:
            return
        longer_ms = min(now.interval_ms * 3 // 2, self._timing.heartbeat_ceiling_ms)
        if longer_ms <= now.interval_ms:
            return
        if now.broken_ms and longer_ms * 4 > now.broken_ms * 3 and now.beats < self._probe_after:
            return
        self._set(longer_ms)

    def _dropped(self, idle_ms: int) -> None:
        now, floor_ms = self._now, self._timing.heartbeat_floor_ms
        if idle_ms < floor_ms:
            return  # no idleness that could be shortened
        now.broken_ms = min(idle_ms, now.broken_ms or idle_ms)
        now.drops += 1
        self._set(max(floor_ms, min(now.interval_ms, idle_ms * 2 // 3)))

    @property
    def _probe_after(self) -> int:
        return PROBE_FIRST << 4 * (min(self._now.drops, 4) - 1)

    def _set(self, interval_ms: int) -> None:
        now = self._now
        now.interval_ms, now.beats, self._good = interval_ms, 0, 0
        self._known.pop(now.network, None)
        self._known[now.network] = now
        while len(self._known) > NETWORKS_MAX:
            del self._known[next(iter(self._known))]
        self._changed = True
