"""Who mints under which worker_id. An id rests after its pod object is gone, since a process may outlive the object."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Final

from plato.topology.record import WORKER_IDS, Rest, Topology

RESERVATION_MS: Final = 3_000
"""How far ahead ids are reserved in the store (settings: reservation)."""
SKEW_MS: Final = 5_000
"""How far clocks of nodes may be apart."""


def held(topology: Topology) -> set[int]:
    """Ids of gateways and msg processes in the record."""
    return {g.worker_id for g in topology.gateways.values()} | {m.worker_id for m in topology.msgs.values()}


def rest_until(gone_ms: int, deadline_s: int) -> int:
    """End of the rest (Unix ms) of an id whose pod object was gone at gone_ms and that could take deadline_s to drain."""
    return gone_ms + deadline_s * 1000 + RESERVATION_MS + SKEW_MS


def rested(resting: Mapping[int, Rest], worker_id: int, uid: str, until_ms: int) -> dict[int, Rest]:
    """`resting` with one more; an end never comes nearer."""
    old = resting.get(worker_id)
    until_ms = until_ms if old is None else max(until_ms, old.until_ms)
    return {**resting, worker_id: Rest(uid, until_ms)}


def free(used: Collection[int], resting: Mapping[int, Rest], now_ms: int) -> Iterator[int]:
    """Ids that may be given now: first those that nobody had lately, lowest first, then by the end of their rest."""
    yield from (i for i in range(WORKER_IDS) if i not in used and i not in resting)
    over = sorted((r.until_ms, i) for i, r in resting.items() if r.until_ms <= now_ms and i not in used)
    yield from (i for _, i in over)
