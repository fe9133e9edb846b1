"""Moves of slots in the embedded cluster, as the operator orders them: one write of the record each, nothing waited for."""

from __future__ import annotations

import random
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from plato.core.ids import slot_of
from plato.local.cluster import LocalCluster

from tests.faults import looking
from tests.faults.load import Crowd, Flight, Person, quantile


@dataclass(frozen=True, slots=True)
class Moved:
    """One move. at: time.monotonic() of the write."""

    at: float
    slots: frozenset[int]
    source: str
    target: str


def order(cluster: LocalCluster, slots: Collection[int], target: str) -> Moved:
    """Writes one move; its slots must belong to one shard."""
    source = looking.topology(cluster).owner(min(slots)).shard
    at = time.monotonic()
    moved = cluster.move(",".join(map(str, sorted(slots))), target)
    return Moved(at, frozenset(moved), source, target)


async def hot_slots(cluster: LocalCluster, people: Sequence[Person]) -> dict[int, set[str]]:
    """{slot: users whose connection lives there}."""
    users = [p.user for p in people]
    found: dict[int, set[str]] = {}
    for user, devices in zip(users, await looking.routes(cluster, users), strict=True):
        for route in devices.values():
            if route.conn_id:
                found.setdefault(slot_of(route.conn_id), set()).add(user)
    return found


def pick(
    cluster: LocalCluster, chance: random.Random, hot: Collection[int], most: int, shards: Collection[str] = ()
) -> tuple[set[int], str]:
    """Up to `most` slots of one shard, half of them such as people live in, and another shard to take them; both of `shards`
    (none: of all)."""
    record = looking.topology(cluster)
    chosen = sorted(shards or record.shards)
    source = chance.choice([s for s in chosen if record.slots_of(s)])
    target = chance.choice([s for s in chosen if s != source])
    own = record.slots_of(source)
    lived = sorted(own.keys() & set(hot))
    slots = set(chance.sample(lived, min(len(lived), most // 2)))
    rest = sorted(own.keys() - slots)
    return slots | set(chance.sample(rest, min(len(rest), most - len(slots)))), target


def gaps_s(
    flights: Sequence[Flight], moves: Sequence[Moved], homes: dict[int, set[str]], within_s: float
) -> list[float]:
    """Per move: the longest time from a send to its acceptance, of messages by people who live in its slots and that were
    on their way at some time within `within_s` of it; sorted. Moves that met no message are left out."""
    found: list[float] = []
    for move in moves:
        users = {user for slot in move.slots for user in homes.get(slot, ())}
        waits = [
            (f.accepted if f.accepted is not None else float("inf")) - f.began
            for f in flights
            if f.sent.user in users and f.began <= move.at + within_s and (f.accepted is None or f.accepted >= move.at)
        ]
        if waits:
            found.append(max(waits))
    return sorted(found)


def pushed_s(flights: Sequence[Flight], people: Sequence[Person]) -> list[float]:
    """Per message and person that was shown it: seconds from the send; sorted."""
    began = {f.sent.client_msg_id: (f.sent.user, f.began) for f in flights}
    return sorted(
        at - began[key][1]
        for person in people
        for key, at in person.shown_at.items()
        if key in began and began[key][0] != person.user
    )


def figures(crowd: Crowd, waits: Sequence[float], gaps: Sequence[float], moves: Sequence[Moved]) -> str:
    """The lines of figures that the tests print."""
    shown = pushed_s(crowd.flights, crowd.people)
    return (
        f"  {len(moves)} moves of {sum(len(m.slots) for m in moves)} slots; {len(crowd.flights)} messages, acknowledged: "
        f"p50 {quantile(waits, 0.5) * 1000:.0f} ms, p99 {quantile(waits, 0.99) * 1000:.0f} ms, max {waits[-1]:.2f} s\n"
        f"  shown to the other side: p50 {quantile(shown, 0.5) * 1000:.0f} ms, p99 {quantile(shown, 0.99) * 1000:.0f} ms, "
        f"max {shown[-1] if shown else 0:.2f} s\n"
        f"  longest wait of each move that met one ({len(gaps)}): p50 {quantile(gaps, 0.5) * 1000:.0f} ms, "
        f"p90 {quantile(gaps, 0.9) * 1000:.0f} ms, max {gaps[-1] if gaps else 0:.2f} s"
    )
