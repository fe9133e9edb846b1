"""R5: when a slot may be taken, and what a look at one's own slot means. Time lets an attempt begin; the store decides.

    never owned, wiped, or released                          at once
    held under my name, and the topology names my process    at once: the supervisor knows that the old one is gone
    held by another, an order to move stands                 3 s after the order was first seen
    held by another                                          its fence and proof were seen unchanged for 10 s

    the topology names another process by our name           at once if released; else 10 s unchanged, whoever held it, or
    (nobody tells it of us: the operator is away)            nobody: that process may live, and would take it at once

A look at a slot that is mine: the same fence stands → mine; none or a smaller one → the store lost it, write all again;
anything else → a newer owner exists, drop it.

A slot whose fence has a greater epoch than our assignment cannot be taken, however dead its owner is: the record was
lost, or somebody else wrote to the store. Whoever writes the record must assign it anew, above that fence; he is told the
fence once nobody lives behind it, so that two who live never outbid each other by turns.

Ticks are the caller's own. Memory: one sighting per slot that is wanted and not held.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass
from enum import IntEnum

from plato.ports import Fence, FenceView


class Standing(IntEnum):
    """What a look at one's own slot shows."""

    MINE = 0
    WIPED = 1
    LOST = 2


def standing(mine: Fence, view: FenceView) -> Standing:
    """Compares what stands in the store with the fence that this process holds."""
    stored = view.fence
    if stored == mine:
        return Standing.MINE
    if stored is None or (stored.epoch, stored.start) < (mine.epoch, mine.start):
        return Standing.WIPED
    return Standing.LOST


@dataclass(slots=True)
class _Sighting:
    fence: Fence | None
    proof: int | None
    since: int  # the tick at which exactly this was seen first
    epoch: int  # that of the assignment under which we want it
    ordered_since: int | None  # the tick at which this very order to move was seen first


class Sightings:
    """What was seen in slots that this process wants. stale, ordered: ticks to wait, as above."""

    def __init__(self, name: str, stale: int, ordered: int) -> None:
        self._name = name
        self._stale = stale
        self._ordered = ordered
        self._seen: dict[int, _Sighting] = {}

    def may_acquire(self, slot: int, epoch: int, view: FenceView, now: int, named: bool = True) -> bool:
        """True if `slot`, assigned to this shard at `epoch`, may be tried now. `view` was looked up now. named: the topology
        names this process for the shard."""
        fence = view.fence
        if view.released or (named and (fence is None or fence.owner == self._name)):
            self._seen.pop(slot, None)
            return True
        ordered = named and fence is not None and fence.epoch < epoch
        seen = self._seen.get(slot)
        same = seen is not None and (seen.fence, seen.proof) == (fence, view.proof)
        since = seen.since if seen is not None and same else now
        # Another assignment is another order: the owner of now has not heard it for as long.
        ordered_since = seen.ordered_since if ordered and seen is not None and seen.epoch == epoch else None
        if ordered and ordered_since is None:
            ordered_since = now
        self._seen[slot] = _Sighting(fence, view.proof, since, epoch, ordered_since)
        if now - since >= self._stale:
            return True
        return ordered_since is not None and now - ordered_since >= self._ordered

    def ordered(self) -> list[int]:
        """Slots that wait for their old owner's release, because an order to move stands."""
        return [slot for slot, seen in self._seen.items() if seen.ordered_since is not None]

    def keep(self, wanted: Container[int]) -> None:
        """Forgets the slots that are not among these."""
        for slot in [s for s in self._seen if s not in wanted]:
            del self._seen[slot]

    def forget(self, slot: int) -> None:
        """The slot was acquired, or is wanted no more."""
        self._seen.pop(slot, None)


@dataclass(slots=True)
class _Outbid:
    fence: Fence
    proof: int | None
    since: int  # the tick at which exactly this was seen first
    dead: bool  # it was released, or stood unproven for long when it was looked at last


class Outbid:
    """Slots that we were assigned under an epoch below their fence. stale: ticks without a proof after which nobody lives
    behind a fence."""

    def __init__(self, stale: int) -> None:
        self._stale = stale
        self._seen: dict[int, _Outbid] = {}

    def see(self, slot: int, epoch: int, view: FenceView, now: int) -> bool:
        """True if `slot`, assigned at `epoch`, is outbid by what was looked up now: a try would be refused."""
        fence = view.fence
        if fence is None or fence.epoch <= epoch:
            self._seen.pop(slot, None)
            return False
        seen = self._seen.get(slot)
        since = seen.since if seen is not None and (seen.fence, seen.proof) == (fence, view.proof) else now
        self._seen[slot] = _Outbid(fence, view.proof, since, view.released or now - since >= self._stale)
        return True

    def told(self, assigned: Mapping[int, int]) -> tuple[list[int], list[int], int]:
        """(the outbid slots, those of them behind whose fence nobody lives, the greatest epoch of these; 0: there is none),
        under the assignments of now, {slot: epoch}."""
        for slot in [n for n, seen in self._seen.items() if seen.fence.epoch <= assigned.get(n, seen.fence.epoch)]:
            del self._seen[slot]
        deserted = {slot: seen.fence.epoch for slot, seen in self._seen.items() if seen.dead}
        return sorted(self._seen), sorted(deserted), max(deserted.values(), default=0)
