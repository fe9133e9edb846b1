"""Slots on their way between shards: close or undo the open move, take over from a lost node, open the next, bind homes.

The data plane finishes a move alone; safety is the fence in the store. Here is only who should own what, one move at a time.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from plato.api.names import shard_name
from plato.topology.homes import Guest, bind, covers, residues
from plato.topology.record import SERVING, SLOTS, Move, Topology
from plato.topology.slots import Step, counts, members, next_step, reassigned

from plato_operator.core.orders import DeleteShard
from plato_operator.core.snapshot import shard_pod
from plato_operator.core.work import Work

UNDO_AFTER_MS: Final = 20_000
"""A target that is not ready for this long loses the move, if the source is."""
TAKE_OVER_AFTER_MS: Final = 60_000
EARLY_MS: Final = 200
"""Passes come each second or so: one that is a little early must not put a move off to the next."""


def close_or_undo(work: Work) -> None:
    """Closes the open move when its owner reports all its slots; gives them back when the target is down for long."""
    move = work.topology.move
    if move is None:
        return
    shard = work.topology.shards.get(move.owner)
    report = work.report(shard_pod(move.owner), shard.uid) if shard is not None else None
    slots = members(move.slots)
    if report is not None and report.epoch_seen >= move.epoch and slots <= members(report.acquired):
        work.change(move=None)
        return
    if work.memory.move_id != move.id:
        work.memory = replace(work.memory, move_id=move.id, move_since_ms=work.snap.now_ms)
    late = work.snap.now_ms - work.memory.move_since_ms >= UNDO_AFTER_MS
    if late and not move.undo and not work.shard_ready(move.target) and work.shard_ready(move.source):
        changes = {slot: move.source for slot in slots if work.topology.owner(slot).shard == move.target}
        work.change(
            slots=reassigned(work.topology.owners, changes, work.epoch),
            move=replace(move, undo=True, epoch=work.epoch),
        )
        work.tell(
            "StateShard", move.target, "MoveUndone",
            f"shard {move.target} did not take its slots; they go back to {move.source}", warning=True,
        )  # fmt: skip


def outbid(work: Work, record: Topology) -> dict[str, set[int]]:
    """{shard: its slots by the record whose fences are newer than that}, by reports that stand for its assignment."""
    found, owners = {}, record.owners
    for name in counts(record):
        shard = record.shards.get(name)
        report = work.report(shard_pod(name), shard.uid) if shard is not None else None
        if report is None or not report.outbid:
            continue
        own = {s for s in members(report.outbid) if owners[s].shard == name and owners[s].epoch <= report.epoch_seen}
        if own:
            found[name] = own
    return found


def outdo(work: Work) -> None:
    """Assigns slots anew, to whom they belong, above fences that are newer than the record: it was lost and rebuilt by a
    clock that is behind, or somebody else wrote to the store. Only slots behind whose fence nobody lives, so we outdo no
    other cluster that serves, while one of its shards is away either; and only the Lease's holder writes our record."""
    changes: dict[int, str] = {}
    for name, slots in outbid(work, work.topology).items():
        report = work.snap.reports[shard_pod(name)]
        deserted = slots & members(report.deserted)
        below = {slot for slot in deserted if work.topology.owner(slot).epoch < report.fence}
        if below:
            changes |= dict.fromkeys(below, name)
            work.epoch = max(work.epoch, report.fence + 1)
    if changes:
        work.change(slots=reassigned(work.topology.owners, changes, work.epoch))
        words = f"{len(changes)} slots had fences newer than the topology: they are assigned anew, above those"
        work.tell("PlatoCluster", work.snap.cluster.name, "FencesOutdone", words, warning=True)


def lost_shards(work: Work) -> set[str]:
    """Shards whose node is lost for so long that others may take their slots, where the spec says TakeOver."""
    if work.snap.cluster.spec.state.on_node_loss != "TakeOver":
        return set()
    found = set()
    for name in counts(work.topology):
        pod = work.snap.pods.get(shard_pod(name))
        long = pod is not None and work.snap.now_ms - work.lost_since_ms(pod) >= TAKE_OVER_AFTER_MS
        if long and pod is not None and work.lost(pod):
            found.add(name)
    return found


def take_over(work: Work) -> None:
    """Gives the slots of lost shards to ready ones, in one write: nobody is there to hand them over one by one."""
    lost = lost_shards(work)
    takers = sorted(name for name, weight in work.weights().items() if weight > 0 and work.shard_ready(name))
    if not lost or not takers:
        return
    owned = counts(work.topology)
    changes: dict[int, str] = {}
    for slot in range(SLOTS):
        if work.topology.owner(slot).shard in lost:
            taker = min(takers, key=lambda n: (owned.get(n, 0), n))
            owned[taker] = owned.get(taker, 0) + 1
            changes[slot] = taker
    move = work.topology.move
    if move is not None and move.owner in lost:
        move = None
    work.change(slots=reassigned(work.topology.owners, _in_runs(changes), work.epoch), move=move)
    for name in sorted(lost):
        work.tell(
            "StateShard",
            name,
            "SlotsTakenOver",
            f"the node of {name} is lost: other shards took its slots",
            warning=True,
        )


def _in_runs(changes: dict[int, str]) -> dict[int, str]:
    """The same number of slots for each taker, but neighbours together, so that ranges stay few."""
    order = sorted(changes)
    return dict(zip(order, sorted(changes.values()), strict=True))


def wanted_weights(work: Work) -> dict[str, int]:
    """The weights that targets follow: those of the spec, none for lost shards."""
    lost = lost_shards(work)
    return {name: 0 if name in lost else weight for name, weight in work.weights().items()}


def open_move(work: Work) -> None:
    """Opens the next move, if none is open and the interval has passed; after the gateways that would lose a residue
    by it have got other homes (`bind_homes` looks ahead in the same way)."""
    state = work.snap.cluster.spec.state
    if work.topology.move is not None or state.reshard_paused:
        return
    if work.snap.now_ms - work.memory.last_move_ms < state.move_interval_seconds * 1000 - EARLY_MS:
        return
    step = _next(work)
    if step is None:
        return
    now, then = _homely(work, None), _homely(work, step)
    for guest in _guests(work).values():
        stripped = covers(guest.homes, guest.workers, now) and not covers(guest.homes, guest.workers, then)
        if stripped and covers(then, guest.workers, then):
            return
    changes = dict.fromkeys(members(step.slots), step.target)
    work.change(
        slots=reassigned(work.topology.owners, changes, work.epoch),
        move=Move(work.epoch, step.slots, step.source, step.target, work.epoch),
    )
    now_ms = work.snap.now_ms
    work.memory = replace(work.memory, last_move_ms=now_ms, move_id=work.epoch, move_since_ms=now_ms)


def bind_homes(work: Work) -> None:
    """Gives each serving gateway its homes among the shards that stay, so that the next move strips none of them."""
    homes = bind(_guests(work), _homely(work, _next(work) if work.topology.move is None else None))
    gateways = dict(work.topology.gateways)
    for name, own in homes.items():
        if gateways[name].homes != own:
            gateways[name] = replace(gateways[name], homes=own)
    if gateways != work.topology.gateways:
        work.change(gateways=gateways)


def _next(work: Work) -> Step | None:
    """The step towards the target. Who should have no slots gives them even when silent; the fence makes that safe."""
    weights = wanted_weights(work)
    ready = {name for name in weights if work.shard_ready(name)}
    givers = ready | {name for name in counts(work.topology) if not weights.get(name, 0)}
    limit = work.snap.cluster.spec.state.slots_per_move
    return next_step(work.topology, weights, limit, givers=givers, takers=ready)


def _guests(work: Work) -> dict[str, Guest]:
    return {n: Guest(g.workers, g.homes) for n, g in work.topology.gateways.items() if g.state == SERVING}


def _homely(work: Work, step: Step | None) -> dict[str, int]:
    """{shard: residues that it has now and after `step`} of the shards that may be homes: those that should keep slots;
    all of them if there is none."""
    weights = wanted_weights(work)
    bits = residues(work.topology.owners)
    if step is not None:
        gone = members(step.slots)
        kept = [s for s, r in enumerate(work.topology.owners) if r.shard == step.source and s not in gone]
        bits[step.source] = sum(1 << residue for residue in {slot % 16 for slot in kept})
    return {name: mask for name, mask in bits.items() if mask and weights.get(name, 0)} or bits


def remove_shard(work: Work) -> None:
    """Deletes one StateShard that is not wanted any more and has given all its slots away."""
    if work.act is not None or work.topology.move is not None:
        return
    owned, weights = counts(work.topology), work.weights()
    homes = {home for g in work.topology.gateways.values() for home in g.homes if g.state == SERVING}
    cluster = work.snap.cluster
    wanted = {shard_name(cluster.name, i) for i in range(cluster.spec.state.shards)}
    for name, shard in sorted(work.snap.shards.items()):
        unwanted = shard.owned and name in weights and name not in wanted
        if unwanted and not owned.get(name, 0) and name not in homes and not shard.deleting:
            work.do(DeleteShard(name, shard.uid))
            return
