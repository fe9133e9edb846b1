"""The drain of a gateway: serving → draining → (drained | forced) → leaving → gone.

In the record are draining and leaving; drained is the gateway's report, forced is the lack of one long after the deadline.
Until `leaving` a drain can be cancelled; after it there is no return, and its last act (lower the StatefulSet, or delete the
pod) is repeated until the pod is gone. A pass finishes at most one and starts at most one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Final

from plato.topology.record import DRAINING, LEAVING, SERVING, Drain, Gateway

from plato_operator.core.orders import DeletePod, Lower, Raise
from plato_operator.core.rollout import gateways_turn, may_go, outdated
from plato_operator.core.snapshot import Pod
from plato_operator.core.work import PoolDesk, Work, is_lost, record_of

FORCE_AFTER_MS: Final = 15_000
"""Without a report this long after its deadline a gateway is deleted all the same."""
FORCED_GRACE_S: Final = 30

CORDONED, SCALE_DOWN, ROLLOUT, MANUAL = "NodeCordoned", "ScaleDown", "Rollout", "Manual"
PRIORITY: Final = (CORDONED, SCALE_DOWN, ROLLOUT, MANUAL)


def reasons(work: Work, desk: PoolDesk, pod: Pod) -> set[str]:
    """Why this gateway should go now; empty: it should stay."""
    found = set()
    node = (work.snap.nodes or {}).get(pod.node)
    if node is not None and node.unschedulable and desk.pool.spec.drain.on_cordon == "Drain":
        found.add(CORDONED)
    if pod.ordinal >= desk.wanted:
        found.add(SCALE_DOWN)
    if outdated(desk, pod):
        found.add(ROLLOUT)
    if pod.drain_asked:
        found.add(MANUAL)
    return found


def cancel(work: Work, desks: list[PoolDesk]) -> None:
    """Back to serving: drains that nobody wants any more, of pods that nobody is deleting."""
    gateways = dict(work.topology.gateways)
    for desk, pod, record in _recorded(work, desks):
        if record.state == DRAINING and not pod.deleting and not reasons(work, desk, pod):
            gateways[pod.name] = replace(record, state=SERVING, drain=None)
            work.tell("Pod", pod.name, "DrainCancelled", "the gateway stays: it serves again")
    if gateways != work.topology.gateways:
        work.change(gateways=gateways)


def finish(work: Work, desks: list[PoolDesk]) -> None:
    """The last act of one gateway that is leaving; and the word `leaving` for one whose drain is over."""
    for desk in desks:
        if work.act is None:
            _lower_unregistered(work, desk)
    for desk, pod, record in _recorded(work, desks):
        if work.act is None and record.state == LEAVING and not pod.deleting:
            _part(work, desk, pod, record)
    for _, pod, record in _recorded(work, desks):
        if record.state == DRAINING and not pod.deleting and _over(work, pod, record):
            work.change(gateways={**work.topology.gateways, pod.name: replace(record, state=LEAVING)})
            return


def start(work: Work, desks: list[PoolDesk]) -> None:
    """Orders one drain, the most urgent that the pool's maxUnavailable allows."""
    turn = gateways_turn(work)
    candidates: list[tuple[int, str, int, PoolDesk, Pod, Gateway]] = []
    for desk, pod, record in _recorded(work, desks):
        if record.state == SERVING and not pod.deleting and pod.ordinal < desk.replicas:
            why = reasons(work, desk, pod) - (set() if turn else {ROLLOUT})
            if why:
                rank = min(PRIORITY.index(reason) for reason in why)
                candidates.append((rank, desk.pool.name, -pod.ordinal, desk, pod, record))
    for rank, pool, _, desk, pod, record in sorted(candidates, key=lambda c: c[:3]):
        reason = PRIORITY[rank]
        if not may_go(work, desk, pod.ordinal, rolling=reason == ROLLOUT):
            continue
        if _alone(work, desk, pod):
            work.held[pool] = f"{pod.name} is the only gateway that serves; its drain ({reason}) waits for another one"
            continue
        spec = desk.pool.spec.drain
        within_ms = spec.deadline_seconds * 1000
        deadline_ms = work.snap.now_ms + within_ms
        drain = Drain(work.epoch, reason, spec.pace_per_second, spec.settle_seconds, deadline_ms, within_ms)
        gateways = {**work.topology.gateways, pod.name: replace(record, state=DRAINING, drain=drain)}
        work.change(gateways=gateways)
        work.tell(
            "Pod", pod.name, "DrainStarted", f"{reason}: its clients are moved, {spec.pace_per_second} per second"
        )
        return


def raise_replicas(work: Work, desks: list[PoolDesk]) -> None:
    """StatefulSets that are smaller than their pool get what is missing; nothing has to wait for it."""
    for desk in desks:
        if desk.replicas < desk.wanted:
            work.applies.append(Raise(desk.pool.name, desk.sts_uid, desk.wanted))


def _alone(work: Work, desk: PoolDesk, pod: Pod) -> bool:
    """Whether the clients would have nowhere to go although there should be another gateway. A cluster that wants just one
    is let go: no other will ever come, and its clients return to its successor."""
    wanted = sum(pool.spec.replicas for pool in work.snap.pools.values() if not pool.deleting)
    return wanted > (0 if pod.ordinal >= desk.wanted else 1) and not work.serving_elsewhere(pod.name)


def _over(work: Work, pod: Pod, record: Gateway) -> bool:
    """Whether the drain is over: by the gateway's word, because no process is left, or by force."""
    drain = record.drain
    if drain is None or not pod.running:
        return True
    report = work.report(pod.name, pod.uid)
    if (
        report is not None
        and report.drain is not None
        and report.drain.id == drain.id
        and report.drain.phase == "drained"
    ):
        if report.drain.cut:
            work.tell(
                "Pod", pod.name, "DrainCut",
                f"{report.drain.cut} connections were still there at the deadline and were closed", warning=True,
            )  # fmt: skip
        return True
    if work.snap.now_ms < drain.deadline_ms + FORCE_AFTER_MS:
        return False
    last = work.snap.last_connections.get(pod.uid)
    if report is not None:
        known = str(report.drain.remaining if report.drain is not None else report.connections)
    else:
        known = "unknown" if last is None else f"{last}, by its last report"
    work.tell(
        "Pod", pod.name, "DrainForced",
        f"no report of the drain's end {FORCE_AFTER_MS // 1000} s after its deadline; connections cut: {known}",
        warning=True,
    )  # fmt: skip
    return True


def _part(work: Work, desk: PoolDesk, pod: Pod, record: Gateway) -> None:
    """Lowers the StatefulSet if this is its last pod and one too many, else deletes the pod; a successor comes by itself."""
    report = work.report(pod.name, pod.uid)
    told = report is not None and report.drain is not None and report.drain.phase == "drained"
    why = f"drained ({record.drain.reason})" if told and record.drain is not None else "its drain was forced"
    if pod.ordinal >= desk.wanted:
        if pod.ordinal == desk.replicas - 1:
            work.do(Lower(desk.pool.name, desk.sts_uid, desk.sts_version, desk.replicas - 1, why))
    elif pod.ordinal < desk.replicas and (desk.observed or record.drain is None or record.drain.reason != ROLLOUT):
        work.do(DeletePod(pod.name, pod.uid, why, None if told else FORCED_GRACE_S))


def _lower_unregistered(work: Work, desk: PoolDesk) -> None:
    """Tail ordinals that never were in the record, or whose node is lost, have no client to move: away with them at once."""
    to = desk.replicas
    while to > desk.wanted:
        record = work.topology.gateways.get(desk.name_of(to - 1))
        pod = desk.pods.get(to - 1)
        unrecorded = record is None and (pod is None or not pod.ready)
        if not unrecorded and not is_lost(record):
            break
        to -= 1
    if to < desk.replicas:
        work.do(Lower(desk.pool.name, desk.sts_uid, desk.sts_version, to, "pods without clients"))


def _recorded(work: Work, desks: list[PoolDesk]) -> Iterator[tuple[PoolDesk, Pod, Gateway]]:
    """Pods with their record, by pool, the highest ordinal first. The record is as changed so far."""
    for desk in desks:
        for ordinal in sorted(desk.pods, reverse=True):
            pod = desk.pods[ordinal]
            record = record_of(work, pod)
            if record is not None:
                yield desk, pod, record
