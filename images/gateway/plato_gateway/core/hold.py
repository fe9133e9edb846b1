"""Which slots are held: frames of a slot wait in their sockets from its old shard's last word to the new one's first.

    the record names another shard, or the slot's shard says that it serves it no more  held: its connections are not read
    the record's shard says that it serves it, by a topology as new as the order        they are named to it (R6), then read
    HOLD_S passed                                                                       the same: it answers for itself

A shard that said nothing yet is believed, save for a slot that was seen to leave another shard. What is held costs no
memory here: kernel buffers and TCP hold the peers, so order and bounds are those of the sockets.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from plato.core.ids import SLOTS
from plato.topology.record import Topology

HOLD_S: Final = 5.0
"""A client gives a connection up after some ten seconds without an answer; until then an answer must be able to come."""

Serves = tuple[int, int]
"""(epoch of the topology it was said under, slots as bits)."""


class Holds:
    """Remembers who had each slot, and since when a slot waits."""

    def __init__(self) -> None:
        self._owner: list[str] = [""] * SLOTS
        self._moved: set[int] = set()
        """Slots that changed their shard and were not reported by the new one yet."""
        self._since_s: dict[int, float] = {}

    @property
    def waiting(self) -> bool:
        """Whether some slot waits for its shard's word."""
        return bool(self._since_s)

    def look(self, topology: Topology, serves: Mapping[str, Serves], now_s: float) -> frozenset[int]:
        """The slots to hold at `now_s` (any steady clock). serves: what each attached shard said last, if it did."""
        held: list[int] = []
        for slot, owner in enumerate(topology.owners):
            if self._owner[slot] != owner.shard:
                if self._owner[slot]:
                    self._moved.add(slot)
                    self._since_s.pop(slot, None)
                self._owner[slot] = owner.shard
            if self._waits(slot, owner.epoch, serves.get(owner.shard)):
                if now_s - self._since_s.setdefault(slot, now_s) < HOLD_S:
                    held.append(slot)
            else:
                self._since_s.pop(slot, None)
        return frozenset(held)

    def _waits(self, slot: int, epoch: int, said: Serves | None) -> bool:
        if said is None:
            return slot in self._moved
        under, slots = said
        # What a shard said before it knew of the order is about the time when the slot was here last.
        if slots >> slot & 1 and (under >= epoch or slot not in self._moved):
            self._moved.discard(slot)
            return False
        return True
