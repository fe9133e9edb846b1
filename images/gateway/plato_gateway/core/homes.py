"""Where a gateway mints, and which group each slot belongs to, from one topology."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from plato.core.ids import SLOTS
from plato.topology.record import Topology

from .lanes import NO_GROUP


@dataclass(slots=True)
class Groups:
    """The link's small numbers for shards: 0, 1, 2 …, kept as long as the shard is there, then given again."""

    of: dict[str, int] = field(default_factory=dict)

    def keep(self, shards: Collection[str]) -> None:
        """Gives numbers to new shards and takes those of gone ones. At most 255 shards have one."""
        for name in [n for n in self.of if n not in shards]:
            del self.of[name]
        free = (n for n in range(NO_GROUP) if n not in set(self.of.values()))
        for name in shards:
            if name not in self.of:
                number = next(free, None)
                if number is not None:
                    self.of[name] = number


def slot_table(topology: Topology, groups: Mapping[str, int]) -> bytes:
    """1024 bytes: the group of each slot's shard."""
    return bytes(groups.get(topology.owner(slot).shard, NO_GROUP) for slot in range(SLOTS))


def home_slots(topology: Topology, homes: Collection[str], live: Collection[str]) -> tuple[int, ...]:
    """The slots to mint in: those of the live homes; with no live home those of the other live shards; sorted."""
    mint_at = [h for h in homes if h in live] or list(live)
    return tuple(slot for slot in range(SLOTS) if topology.owner(slot).shard in mint_at)


def slots_for_worker(slots: Collection[int], index: int, workers: int) -> tuple[int, ...]:
    """Those that worker `index` of `workers` mints in."""
    return tuple(slot for slot in slots if slot % workers == index)
