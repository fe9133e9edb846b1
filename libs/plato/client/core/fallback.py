"""Sockets or long polling: which way the next link to a gateway is opened. Pure; times are the caller's clock, ms.

    SOCKETS ── KILLED_MAX in a row could not be opened, were killed soon, or fell silent soon ──> POLLS, if one opens
       ^                                                                                            │
       └── the trial stood ── TRIAL: one socket beside the polls, when its time has come ───────────┘
                                └─ it failed: the next one after twice the time

A link is judged when it ends. `quiet`: nothing was heard from it for so long that its end is the network's work, whoever
closed it. A gateway that closes with a code says so in a frame, just before; that tells nothing about the network.
"""

from __future__ import annotations

from enum import Enum
from typing import Final

from plato.client.core.repeats import Chance, jittered_ms

KILLED_MAX: Final = 3
"""So many sockets in a row that came to nothing: the network may let HTTP through."""
SOON_MS: Final = 60_000
"""A socket that stood so long is not what the network kills."""
QUIET_MS: Final = 4_000
SLOW_MS: Final = 1_000
"""An attempt that is given up after less was only slower than another one."""
POLLS_FAILED_MAX: Final = 2
RETURN_MIN_MS: Final = 30_000
RETURN_MAX_MS: Final = 1_800_000


class Way(Enum):
    """How a link is made."""

    SOCKET = "socket"
    POLL = "poll"


class Fallback:
    """Of one client in one network; `forget` when the network is another one."""

    def __init__(self, chance: Chance) -> None:
        self._chance = chance
        self.forget()

    def forget(self) -> None:
        """What was learnt does not hold any more. Polls that stand are counted on."""
        self._killed = 0  # sockets in a row
        self._polling = False
        self._polls_failed = 0  # in a row
        self._trial = False
        self._returns = 0  # trials in a row that failed
        self._return_ms: int | None = None  # when the next trial is due
        self._standing = getattr(self, "_standing", 0)  # polls that are open

    def choose(self, can_poll: bool) -> Way:
        """The way to open a link now. can_poll: the gateway is known to take polls."""
        if not can_poll or self._trial:
            return Way.SOCKET
        return Way.POLL if self._polling or self._killed >= KILLED_MAX else Way.SOCKET

    def opened(self, way: Way, now_ms: int) -> None:
        """A link stands."""
        if way is Way.POLL:
            self._standing += 1
            self._polls_failed = 0
            if not self._polling or self._return_ms is None:
                self._polling = True
                self._plan(now_ms)

    def failed(self, way: Way, now_ms: int, after_ms: int, given_up: bool) -> None:
        """A link could not be opened. given_up: nobody waited for it any more."""
        if given_up and after_ms < SLOW_MS:
            self._undecided(now_ms)
        elif way is Way.SOCKET:
            self._bad(now_ms)
        else:
            self._polls_failed += 1
            if not self._polling or self._polls_failed >= POLLS_FAILED_MAX:
                # HTTP does not work either: there is no network, or no gateway. Sockets first, when there is one again.
                self._polling, self._killed, self._polls_failed = False, 0, 0

    def heard(self, way: Way) -> None:
        """The first frame came on a link."""
        if way is Way.SOCKET and self._trial:
            self._polling, self._killed = False, 0

    def ended(self, way: Way, now_ms: int, stood_ms: int, quiet_ms: int, ours: bool) -> None:
        """A link is gone. ours: we closed it, else the other side or the network. quiet_ms: since it was last heard."""
        if way is Way.POLL:
            self._standing -= 1
        elif stood_ms >= SOON_MS:
            self._killed = self._returns = 0
            self._trial = False
        elif not ours or quiet_ms >= QUIET_MS:
            self._bad(now_ms)
        else:
            self._undecided(now_ms)

    def trial_ms(self) -> int | None:
        """When a socket is to be tried beside the polls; None: no polls stand, or one is tried."""
        return self._return_ms if self._standing and not self._trial else None

    def try_socket(self) -> None:
        """The trial begins: what is opened next is a socket."""
        self._trial = True

    def put_off(self, now_ms: int) -> None:
        """The trial could not begin now."""
        self._trial = False
        self._plan(now_ms)

    def _bad(self, now_ms: int) -> None:
        self._killed += 1
        if self._trial:
            self._trial, self._polling = False, True
            self._returns += 1
            self._plan(now_ms)

    def _undecided(self, now_ms: int) -> None:
        if self._trial:
            self._trial = False
            self._plan(now_ms)

    def _plan(self, now_ms: int) -> None:
        self._return_ms = now_ms + jittered_ms(RETURN_MIN_MS, RETURN_MAX_MS, self._returns, self._chance)
