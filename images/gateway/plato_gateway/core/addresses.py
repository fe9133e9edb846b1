"""How many connections one address has, and how fast new ones come: both bounded per address, where bounds are set.

A mobile operator puts tens of thousands of phones behind one address, so no bound is a good default; a bound is for whoever
is flooded. An IPv6 address counts by its first 64 bits, which one subscriber has for itself. Refused ones count for
nothing, so an address that hammers gets its share and no less.

Memory: a number per address that has connections, another one per address that connected within the last BURST_S.
"""

from __future__ import annotations

from ipaddress import IPv6Address, ip_address
from math import ceil, sqrt
from typing import Final

BURST_S: Final = 10
"""So many seconds' worth of connects may come at once."""
FULL_RETRY_MS: Final = 30_000
"""When an address that has all its connections may try again: nobody knows when one of them ends."""


def key_of(host: str) -> str:
    """What counts as one address."""
    try:
        parsed = ip_address(host.partition("%")[0])
    except ValueError:
        return host
    if not isinstance(parsed, IPv6Address):
        return str(parsed)
    if parsed.ipv4_mapped is not None:
        return str(parsed.ipv4_mapped)
    return f"{parsed.packed[:8].hex()}/64"


def part_of(most: int, workers: int) -> int:
    """What each worker lets in of `most` connections of an address. The kernel spreads them by chance, so a bare share would
    refuse some of an address that has fewer than `most`; three standard deviations more do not."""
    share = most / workers
    return min(most, ceil(share + 3 * sqrt(share)))


class Addresses:
    """The addresses of one worker's connections. most: connections of one; per_s: its connects; 0: not bounded."""

    def __init__(self, most: int, per_s: float) -> None:
        self._most = most
        self._step_ms = 1_000 / per_s if per_s else 0.0
        self._burst_ms = max(BURST_S * 1_000.0, self._step_ms)
        self._open: dict[str, int] = {}
        self._free_ms: dict[str, float] = {}  # when its next connect would be due at an even pace; in the past: room
        self._sweep_ms = 0.0

    def __len__(self) -> int:
        return len(self._open) + len(self._free_ms)

    def came(self, key: str, now_ms: int) -> int:
        """A connection came. 0: it counts, until `gone`; else it is refused, for so many ms at least."""
        if self._most and self._open.get(key, 0) >= self._most:
            return FULL_RETRY_MS
        if self._step_ms:
            self._sweep(now_ms)
            due_ms = max(self._free_ms.get(key, 0.0), now_ms - self._burst_ms + self._step_ms)
            if due_ms > now_ms:
                return int(due_ms - now_ms) + 1
            self._free_ms[key] = due_ms + self._step_ms
        self._open[key] = self._open.get(key, 0) + 1
        return 0

    def gone(self, key: str) -> None:
        """A connection that counted ended."""
        left = self._open[key] - 1
        if left:
            self._open[key] = left
        else:
            del self._open[key]

    def _sweep(self, now_ms: int) -> None:
        """Once per burst: whoever has its whole burst again is forgotten."""
        if now_ms >= self._sweep_ms:
            self._sweep_ms = now_ms + self._burst_ms
            whole_ms = now_ms - self._burst_ms + self._step_ms
            self._free_ms = {key: due for key, due in self._free_ms.items() if due > whole_ms}
