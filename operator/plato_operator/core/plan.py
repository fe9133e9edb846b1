"""One pass of the operator: a snapshot in, orders out. The order of the steps is the order of `one_pass`.

Everything is decided by what is there, nothing by what an earlier pass meant to do; so a pass may be cut off anywhere, and
two passes over the same snapshot order the same. A pass writes the record once at most and does one disruptive act at most.
An act follows only from a record that was already written, never from the write of the same pass.
"""

from __future__ import annotations

from dataclasses import replace

from plato.topology.record import next_epoch
from plato.topology.stored import TooLargeError, pack

from plato_operator.core import conditions, rebuild
from plato_operator.core.children import apply_children
from plato_operator.core.drains import cancel, finish, raise_replicas, start
from plato_operator.core.members import admit, drop_old_rests, gates, note_outside, retire
from plato_operator.core.moves import bind_homes, close_or_undo, open_move, outdo, remove_shard, take_over
from plato_operator.core.orders import Event, Gate, Plan, TopologyWrite
from plato_operator.core.repair import repair
from plato_operator.core.rollout import roll_state
from plato_operator.core.snapshot import Snapshot
from plato_operator.core.work import Work, pool_desks

BUSY_MS = 1_000
QUIET_MS = 10_000
CLAIM_AGAIN_MS = 60_000
"""How long a record that another one claimed after us is left to him."""


def one_pass(snap: Snapshot) -> Plan:
    """The orders of one pass. A cluster that is being deleted gets none: garbage collection does it all."""
    if snap.cluster.deleting:
        return Plan(memory=snap.memory)
    if rebuild.is_lost(snap):
        return _rebuild(snap)
    assert snap.topology is not None  # is_lost() said so
    if snap.topology.writer != snap.me:
        return _claim(snap)
    work = Work.on(replace(snap, memory=replace(snap.memory, missing_since_ms=0)), snap.topology)
    retire(work)
    note_outside(work)
    admit(work)
    close_or_undo(work)
    outdo(work)
    if not snap.cluster.spec.paused:
        apply_children(work)
        desks = pool_desks(work)
        repair(work, desks)
        cancel(work, desks)
        finish(work, desks)
        roll_state(work)
        start(work, desks)
        raise_replicas(work, desks)
        take_over(work)
        open_move(work)
        remove_shard(work)
    bind_homes(work)
    drop_old_rests(work)
    gates(work)
    return _plan(work)


def _claim(snap: Snapshot) -> Plan:
    """After a change of leader nothing but the own name is written: an older leader's write then meets a conflict.

    Whoever writes after our claim does not know our Lease: another release of the operator serves this namespace too. Two
    that claim by turns would write as fast as they can, and each write goes to every pod."""
    assert snap.topology is not None
    if snap.memory.claimed_ms and snap.now_ms - snap.memory.claimed_ms < CLAIM_AGAIN_MS:
        words = f"{snap.topology.writer} writes the topology too: two operators with Leases of their own serve it;"
        told = Event("PlatoCluster", snap.cluster.name, "Warning", "AnotherOperator", f"{words} uninstall one of them")
        return Plan(events=(told,), memory=snap.memory)
    epoch = next_epoch(snap.topology.epoch, snap.now_ms // 1000)
    claimed = replace(snap.topology, writer=snap.me, epoch=epoch)
    memory = replace(snap.memory, claimed_ms=snap.now_ms)
    return Plan(write=TopologyWrite(claimed, snap.version), memory=memory, requeue_ms=0)


def _rebuild(snap: Snapshot) -> Plan:
    """Waits for the processes that still know, then writes what they say."""
    since = snap.memory.missing_since_ms or snap.now_ms
    memory = replace(snap.memory, missing_since_ms=since)
    if rebuild.can_wait_for(snap) and snap.now_ms - since < rebuild.WAIT_MS:
        return Plan(memory=memory, cluster_status=conditions.unknown_status(snap), requeue_ms=BUSY_MS)
    work = Work(snap, rebuild.rebuilt(snap), 0)
    work.epoch = work.topology.epoch
    bind_homes(work)
    had_pods = bool(snap.pods)
    if had_pods:
        work.tell(
            "PlatoCluster",
            snap.cluster.name,
            "TopologyRebuilt",
            "the topology was lost: rebuilt from reports",
            warning=True,
        )
    memory = replace(memory, missing_since_ms=0, rebuilt_epoch=work.epoch if had_pods else 0)
    write = TopologyWrite(work.topology, snap.version)
    return Plan(write=write, events=tuple(work.events), memory=memory, requeue_ms=0)


def _bound(work: Work) -> None:
    """Keeps the observed record where the changed one is too large to be written, and drops what told of the change."""
    if not work.changed or work.snap.topology is None:
        return
    try:
        pack(work.topology)
    except TooLargeError as e:
        work.topology, work.changed, work.too_large = work.snap.topology, False, str(e)
        work.applies = [order for order in work.applies if not isinstance(order, Gate)]
        work.events.clear()


def _plan(work: Work) -> Plan:
    _bound(work)
    topology = work.topology
    busy = (
        work.changed or work.act is not None or bool(work.applies) or topology.move is not None
        or any(g.drain is not None for g in topology.gateways.values()) or bool(work.exhausted)
    )  # fmt: skip
    return Plan(
        applies=tuple(work.applies),
        write=TopologyWrite(topology, work.snap.version) if work.changed else None,
        act=work.act,
        cluster_status=conditions.cluster_status(work),
        pool_status={name: conditions.pool_status(work, pool) for name, pool in sorted(work.snap.pools.items())},
        shard_status={name: conditions.shard_status(work, shard) for name, shard in sorted(work.snap.shards.items())},
        events=tuple(work.events),
        act_events=tuple(work.act_events),
        memory=work.memory,
        requeue_ms=BUSY_MS if busy else QUIET_MS,
    )
