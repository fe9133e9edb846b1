"""Which shards are home to which gateway: in their slots it mints, so they get its new connections.

Worker k of W mints only in slots with slot % W == k, so the homes of a gateway together need a slot of every residue. A
binding changes only if another one is strictly better, hence it is at rest when applied to its own result.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from plato.topology.record import SlotRange

_RESIDUES: Final = 16  # the greatest number of workers; smaller ones (powers of two) fold into it


@dataclass(frozen=True, slots=True)
class Guest:
    """A gateway that needs homes: its number of workers (1, 2, 4, 8 or 16) and the homes it has."""

    workers: int
    homes: tuple[str, ...]


def residues(owners: Iterable[SlotRange]) -> dict[str, int]:
    """{shard: bits of slot % 16 that it has}, from the owners by slot."""
    found: dict[str, int] = {}
    for slot, owner in enumerate(owners):
        found[owner.shard] = found.get(owner.shard, 0) | 1 << slot % _RESIDUES
    return found


def covers(homes: Iterable[str], workers: int, bits: Mapping[str, int]) -> bool:
    """Whether each of `workers` workers finds a slot in these homes."""
    return _folded(homes, workers, bits) == (1 << workers) - 1


def bind(guests: Mapping[str, Guest], bits: Mapping[str, int]) -> dict[str, tuple[str, ...]]:
    """{gateway: homes} over the shards in `bits` (those that may be homes, and the residues of their slots).

    Each shard is home to someone and none to many more than another. Without shards everybody keeps what he has.
    """
    now = {name: guest.homes for name, guest in guests.items()}
    if not guests or not bits:
        return now
    badness = _badness(guests, now, bits)
    # One look gives homes in the order of names, and from its result the next one may find better ones still.
    while badness > (0, 0, 0):
        better = _assigned({name: Guest(guest.workers, now[name]) for name, guest in guests.items()}, bits)
        worth = _badness(guests, better, bits)
        if worth >= badness:
            break
        now, badness = better, worth
    return now


def _badness(
    guests: Mapping[str, Guest], homes: Mapping[str, tuple[str, ...]], bits: Mapping[str, int]
) -> tuple[int, int, int]:
    """(gateways that cannot mint everywhere they should, shards that are nobody's home, unevenness above 1)."""
    wrong = 0
    used = dict.fromkeys(bits, 0)
    for name, guest in guests.items():
        own = homes[name]
        wrong += not own or any(h not in bits for h in own) or not covers(own, _possible(guest.workers, bits), bits)
        for home in own:
            if home in used:
                used[home] += 1
    spread = max(used.values()) - min(used.values())
    return wrong, sum(not n for n in used.values()), max(0, spread - 1)


def _assigned(guests: Mapping[str, Guest], bits: Mapping[str, int]) -> dict[str, tuple[str, ...]]:
    each = -(-len(bits) // len(guests))
    least, extra = divmod(each * len(guests), len(bits))
    used = dict.fromkeys(sorted(bits), 0)
    result: dict[str, list[str]] = {}
    for name in sorted(guests):
        kept: list[str] = []
        for home in guests[name].homes:
            if home in used and len(kept) < each and used[home] < least + (extra > 0):
                extra -= used[home] == least
                used[home] += 1
                kept.append(home)
        result[name] = kept
    for name, own in result.items():
        workers = _possible(guests[name].workers, bits)
        while len(own) < each or not covers(own, workers, bits):
            have = _folded(own, workers, bits)
            missing = len(own) >= each  # only more residues justify more homes
            choice = [h for h in used if h not in own and (not missing or _folded([h], workers, bits) & ~have)]
            home = min(choice, key=lambda h: used[h])
            used[home] += 1
            own.append(home)
    return {name: tuple(own) for name, own in result.items()}


def _folded(homes: Iterable[str], workers: int, bits: Mapping[str, int]) -> int:
    mask = 0
    for home in homes:
        mask |= bits.get(home, 0)
    size = _RESIDUES
    while size > workers:
        size //= 2
        mask = mask >> size | mask & (1 << size) - 1
    return mask


def _possible(workers: int, bits: Mapping[str, int]) -> int:
    """`workers`, or the greatest smaller power of two for which these shards have slots of every residue."""
    while workers > 1 and not covers(bits, workers, bits):
        workers //= 2
    return workers
