"""The race for a gateway: the addresses of one round, each tried a little after the one before; the first that opens wins.

    next ──> started ──> opened: won, the others are given up and come first should the winner be of no use
               │  └────> failed, or took too long: the next one at once
               └ connect_delay without an answer: the next one beside it, AT_ONCE at most

Only on the winner anything is sent, so two logins of one device never race each other. Nothing here opens a socket: the
machine hands numbers and addresses to its edge. Memory: one round's addresses.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from plato.client.core.gateways import Gateways
from plato.client.core.repeats import Timing

AT_ONCE: Final = 3


@dataclass(frozen=True, slots=True)
class _Attempt:
    address: str
    until_ms: int


class Race:
    """The attempts that are under way."""

    def __init__(self, book: Gateways, timing: Timing) -> None:
        self._book = book
        self._timing = timing
        self._running: dict[int, _Attempt] = {}  # by link_no, in the order of starting
        self._next_ms = 0

    @property
    def lost(self) -> bool:
        """Nothing runs, and no address is left."""
        return not self._running and not self._book.left

    def next(self, now_ms: int) -> str | None:
        """The address to try now, beside what runs; None: not yet, or none is left."""
        if self._running and (now_ms < self._next_ms or len(self._running) >= AT_ONCE):
            return None
        return self._book.take()

    def started(self, link_no: int, address: str, now_ms: int) -> None:
        """An attempt begins."""
        self._running[link_no] = _Attempt(address, now_ms + self._timing.connect_timeout_ms)
        self._next_ms = now_ms + self._timing.connect_delay_ms

    def failed(self, link_no: int, now_ms: int) -> bool:
        """An attempt failed: the next one need not wait. False: it is none of ours."""
        if self._running.pop(link_no, None) is None:
            return False
        self._next_ms = now_ms
        return True

    def expire(self, now_ms: int) -> list[int]:
        """The attempts that took too long; they are given up."""
        late = [link_no for link_no, attempt in self._running.items() if attempt.until_ms <= now_ms]
        for link_no in late:
            self.failed(link_no, now_ms)
        return late

    def won(self, link_no: int) -> str | None:
        """An attempt opened; its address. None: it is none of ours. The others are to be given up: see `cancel`."""
        attempt = self._running.pop(link_no, None)
        return attempt.address if attempt is not None else None

    def cancel(self) -> list[int]:
        """Gives up what runs; its addresses are tried first if the round goes on. Returns their numbers."""
        given_up = list(self._running)
        self._book.put_back([attempt.address for attempt in self._running.values()])
        self._running.clear()
        return given_up

    def deadline_ms(self) -> int | None:
        """When there is something to do next."""
        moments = [attempt.until_ms for attempt in self._running.values()]
        if self._running and len(self._running) < AT_ONCE and self._book.left:
            moments.append(self._next_ms)
        return min(moments, default=None)
