"""Gateways and shards of a broken revision: replaced without a drain, since nobody is connected to them.

A StatefulSet waits for ever for a pod whose image does not exist, even after a good one was set; somebody has to delete it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from plato.topology.record import SERVING

from plato_operator.core.orders import DeletePod, Event
from plato_operator.core.rollout import outdated_shards
from plato_operator.core.snapshot import Pod, shard_pod
from plato_operator.core.work import PoolDesk, Work, record_of

SHOWN_MS: Final = 300_000
"""How long the condition Degraded tells of a repair."""


def empty(work: Work, pod: Pod) -> bool:
    """Whether surely nobody is connected: no process runs, or it says so itself. Unknown is no."""
    report = work.report(pod.name, pod.uid)
    return not pod.running or (report is not None and report.connections == 0)


def repaired(work: Work, pool: str) -> str | None:
    """The pod of the pool that was replaced last, for SHOWN_MS after that."""
    recent = [pod for name, pod, at in work.memory.repairs if name == pool and work.snap.now_ms - at < SHOWN_MS]
    return recent[-1] if recent else None


def _remember(work: Work, pool: str, pod: str) -> None:
    recent = tuple(r for r in work.memory.repairs if work.snap.now_ms - r[2] < SHOWN_MS)
    work.memory = replace(work.memory, repairs=(*recent, (pool, pod, work.snap.now_ms)))


def repair(work: Work, desks: list[PoolDesk]) -> None:
    """Deletes one pod that runs an older template, is not ready and holds no connection."""
    if work.act is not None:
        return
    for desk in desks:
        rollout = desk.pool.spec.rollout
        if not desk.observed or rollout.paused:
            continue
        for ordinal in sorted(desk.pods, reverse=True):
            pod = desk.pods[ordinal]
            record = record_of(work, pod)
            if ordinal < rollout.partition or ordinal >= min(desk.replicas, desk.wanted) or desk.current(pod):
                continue
            serving = record is None or record.state == SERVING
            if serving and not pod.ready and not pod.deleting and not work.lost(pod) and empty(work, pod):
                _replace(work, pod, "GatewayPool", desk.pool.name)
                _remember(work, desk.pool.name, pod.name)
                return
    for shard in outdated_shards(work):
        pod = work.snap.pods[shard_pod(shard)]
        child = work.snap.children[("StatefulSet", shard)]
        if child.observed and not pod.ready and not pod.running and not pod.deleting and not work.lost(pod):
            _replace(work, pod, "StateShard", shard)
            return


def _replace(work: Work, pod: Pod, kind: str, owner: str) -> None:
    told = Event(kind, owner, "Normal", "BrokenRevisionRepaired", f"replaced {pod.name}, which never got ready")
    work.do(DeletePod(pod.name, pod.uid, "its revision is broken and a newer one is set"), told)
