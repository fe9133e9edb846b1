"""Which msg process should own which partition, and who is alive. Only plans: the epoch in the database decides (R7)."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence


def assign(live: Collection[str], owners: Sequence[str]) -> list[str]:
    """The uid that should own each partition; "" for all if nobody lives.

    owners: who owns partition 0, 1, … now ("": nobody). Shares differ by one at most; who lives keeps what it has up to its
    share, so nothing moves without need, and everybody who sees the same gets the same.
    """
    if not live:
        return [""] * len(owners)
    held: dict[str, list[int]] = {uid: [] for uid in sorted(live)}
    for partition, owner in enumerate(owners):
        if owner in held:
            held[owner].append(partition)
    share, more = divmod(len(owners), len(held))
    # Those who hold most may keep one more.
    ranked = sorted(held, key=lambda uid: (-len(held[uid]), uid))
    room = {uid: share + (place < more) for place, uid in enumerate(ranked)}
    target = [""] * len(owners)
    for uid, partitions in held.items():
        for partition in partitions[: room[uid]]:
            target[partition] = uid
            room[uid] -= 1
    heirs = (uid for uid in held for _ in range(room[uid]))
    return [uid or next(heirs) for uid in target]


class Liveness:
    """Who lives, by beat counters: a member that is named by the topology and whose counter moved within `stale_ticks`
    observations. Counts observations, not time: a process that was frozen meanwhile has observed nothing."""

    def __init__(self, stale_ticks: int) -> None:
        self._stale_ticks = stale_ticks
        self._seen: dict[str, tuple[int, int]] = {}  # uid → (beat, observations since it moved)

    def observe(self, beats: Mapping[str, int], named: Collection[str]) -> set[str]:
        """One observation: {uid: beat} of all members; `named`: the uids of the topology. Returns who lives."""
        seen = {}
        for uid, beat in beats.items():
            known = self._seen.get(uid)
            seen[uid] = (beat, known[1] + 1 if known is not None and known[0] == beat else 0)
        self._seen = seen
        return {uid for uid, (_, ticks) in seen.items() if uid in named and ticks < self._stale_ticks}

    def gone(self, named: Collection[str]) -> list[str]:
        """Members that are neither named nor have moved for long: their rows may be deleted."""
        return [uid for uid, (_, ticks) in self._seen.items() if uid not in named and ticks >= self._stale_ticks]
