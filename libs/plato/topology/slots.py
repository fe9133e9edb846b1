"""Which slots a shard should have, and the next few to move there.

The target is a function of the present owners and the weights alone: no plan is stored, so nothing can be left half done.
Each step brings the owners strictly closer to it (tested), so a series of moves ends.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from plato.topology.record import SLOTS, SlotRange, Topology

Span = tuple[int, int]
"""Slots first..last, both included."""


@dataclass(frozen=True, slots=True)
class Step:
    """Slots that should go from one shard to another next."""

    source: str
    target: str
    slots: tuple[Span, ...]


def spans(slots: Iterable[int]) -> tuple[Span, ...]:
    """Sorted ranges (first, last) of these slots."""
    found: list[Span] = []
    for slot in sorted(slots):
        if found and found[-1][1] == slot - 1:
            found[-1] = (found[-1][0], slot)
        else:
            found.append((slot, slot))
    return tuple(found)


def members(ranges: Iterable[Span]) -> set[int]:
    """The slots of these ranges."""
    return {slot for first, last in ranges for slot in range(first, last + 1)}


def counts(topology: Topology) -> dict[str, int]:
    """{shard: number of its slots}, only of those that have one."""
    found: dict[str, int] = {}
    for r in topology.slots:
        found[r.shard] = found.get(r.shard, 0) + r.last - r.first + 1
    return found


def reassigned(owners: Iterable[SlotRange], changes: Mapping[int, str], epoch: int) -> tuple[SlotRange, ...]:
    """New ranges: `owners` by slot, with the slots in `changes` given to another shard under `epoch`."""
    found: list[SlotRange] = []
    for slot, owner in enumerate(owners):
        shard, since = (changes[slot], epoch) if slot in changes else (owner.shard, owner.epoch)
        last = found[-1] if found else None
        if last is not None and last.shard == shard and last.epoch == since:
            found[-1] = SlotRange(last.first, slot, shard, since)
        else:
            found.append(SlotRange(slot, slot, shard, since))
    return tuple(found)


def targets(owned: Mapping[str, int], weights: Mapping[str, int]) -> dict[str, int]:
    """{shard: slots that it should have}: proportional to the weights, whole numbers by largest remainder.

    Where remainders tie, who has more keeps more, so that fewer slots move; then the name. A shard without a weight gets
    none. All weights 0: there is nowhere to go, each keeps what it has.
    """
    total = sum(weights.values())
    if total == 0:
        return {name: owned.get(name, 0) for name in {*owned, *weights}}
    result = dict.fromkeys({*owned, *weights}, 0)
    remainders: dict[str, int] = {}
    for name, weight in weights.items():
        result[name], remainders[name] = divmod(SLOTS * weight, total)
    order = sorted((n for n in weights if remainders[n]), key=lambda n: (-remainders[n], -owned.get(n, 0), n))
    for name in order[: SLOTS - sum(result.values())]:
        result[name] += 1
    return result


def left(topology: Topology, weights: Mapping[str, int]) -> int:
    """How many slots are not where they should be."""
    owned = counts(topology)
    return sum(max(0, owned.get(name, 0) - want) for name, want in targets(owned, weights).items())


def next_step(
    topology: Topology, weights: Mapping[str, int], limit: int, *, givers: Collection[str], takers: Collection[str]
) -> Step | None:
    """The next at most `limit` slots to move; None: all is where it should be, or nobody may give or take.

    Shards that should have none give first, then who has most too many; who lacks most takes.
    """
    owned = counts(topology)
    want = targets(owned, weights)
    excess = {name: owned.get(name, 0) - want[name] for name in want}
    source = min(
        (n for n in excess if excess[n] > 0 and n in givers), key=lambda n: (want[n] > 0, -excess[n], n), default=None
    )
    target = min((n for n in excess if excess[n] < 0 and n in takers), key=lambda n: (excess[n], n), default=None)
    if source is None or target is None:
        return None
    return Step(source, target, spans(_picked(topology, source, target, min(limit, excess[source], -excess[target]))))


def _picked(topology: Topology, source: str, target: str, number: int) -> list[int]:
    """`number` slots of `source`: beside those of `target` where there are such, so that ranges stay few."""
    owners = topology.owners
    runs = list(spans(slot for slot in range(SLOTS) if owners[slot].shard == source))
    picked: list[int] = []
    while len(picked) < number:

        def rank(run: Span) -> tuple[int, int, int]:
            first, last = run
            after = last + 1 < SLOTS and owners[last + 1].shard == target
            before = first > 0 and owners[first - 1].shard == target
            return (0 if after else 1 if before else 2, first - last, first)

        run = min(runs, key=rank)
        runs.remove(run)
        first, last = run
        take = min(number - len(picked), last - first + 1)
        picked += range(first, first + take) if rank(run)[0] == 1 else range(last - take + 1, last + 1)
    return picked


def spread(names: Iterable[str], weights: Mapping[str, int], epoch: int) -> tuple[SlotRange, ...]:
    """All slots over new shards by weight, in the order of `names`; evenly if every weight is 0. Needs one name at least."""
    order = list(names)
    share = {n: weights.get(n, 0) for n in order}
    want = targets({}, share if any(share.values()) else dict.fromkeys(order, 1))
    found, first = [], 0
    for name in order:
        if want[name]:
            found.append(SlotRange(first, first + want[name] - 1, name, epoch))
            first += want[name]
    return tuple(found)
