"""Which pods should go for a newer template, in which order, and how many gateways may be away at one time.

Order over the cluster: msg, then state one shard at a time, then ipconfig, then gateways; within a pool the highest ordinal
first. Pods are compared with the present template only, so a spec that went A → B → C never passes through B.
"""

from __future__ import annotations

import re
from typing import Final

from plato.topology.record import DRAINING, LEAVING
from plato.topology.slots import counts, members

from plato_operator.core.orders import DeletePod
from plato_operator.core.snapshot import Child, Pod, shard_pod
from plato_operator.core.work import PoolDesk, Work, is_lost, record_of

YOUNG_MS: Final = 600_000
"""A pod that is not ready and younger than this may be the successor of one that we drained; older, it broke by itself."""

_NO_NODE: Final = re.compile(r"0/(\d+) nodes are available: (.*?)(?:preemption:|$)", re.DOTALL)
_TAKEN: Final = re.compile(r"(\d+) node\(s\) didn't have free ports")
_TAINTED: Final = re.compile(r"(\d+) node\(s\) had untolerated taint")
"""The scheduler's words; it gives one reason per node."""


def outdated(desk: PoolDesk, pod: Pod) -> bool:
    """Whether the rollout wants this gateway to go. Waits for the StatefulSet's controller to know the template."""
    rollout = desk.pool.spec.rollout
    return desk.observed and not rollout.paused and pod.ordinal >= rollout.partition and not desk.current(pod)


def away(work: Work, desk: PoolDesk, *, but: int, rolling: bool) -> int:
    """Gateways of the pool, without ordinal `but`, that are away or may be so by our doing.

    rolling counts more strictly: a successor that is not ready yet, however long, and not for minReadySeconds. Pods that
    scale-down takes anyway count only while their clients are moved: their absence is what is wanted. What a lost node
    takes with it counts never, neither the pod on it nor the successor that finds no node once it is fenced; and not one
    more than there are nodes: it takes the node of the next one to go.
    """
    found = 0
    for ordinal in range(desk.replicas):
        pod = desk.pods.get(ordinal)
        if ordinal == but:
            continue
        if pod is None:
            found += ordinal < desk.wanted
            continue
        record = record_of(work, pod)
        if is_lost(record) or no_node_left(work, pod):
            continue
        if record is not None and record.state == LEAVING and ordinal >= desk.wanted:
            continue  # it goes when it is the last; else those above it could never be drained
        if pod.deleting or (record is not None and record.state in (DRAINING, LEAVING)):
            found += 1
        elif ordinal >= desk.wanted:
            continue
        elif not pod.ready:
            found += rolling or work.snap.now_ms - pod.created_ms < YOUNG_MS
        elif rolling:
            found += work.snap.now_ms - pod.ready_since_ms < desk.pool.spec.rollout.min_ready_seconds * 1000
    return found


def no_node_left(work: Work, pod: Pod) -> bool:
    """Whether a pod waits because each node has a gateway already, is lost, or never takes one. With any other reason, such
    as a cordon or a taint of a node that serves, it may be the successor of one that we drained."""
    said = _NO_NODE.match(pod.unschedulable)
    if said is None:
        return False
    taken, tainted = (sum(int(n) for n in reason.findall(said[2])) for reason in (_TAKEN, _TAINTED))
    return taken + tainted == int(said[1]) and tainted <= work.closed_nodes()


def may_go(work: Work, desk: PoolDesk, ordinal: int, *, rolling: bool) -> bool:
    """Whether one more gateway of the pool may be drained now."""
    return away(work, desk, but=ordinal, rolling=rolling) < desk.pool.spec.rollout.max_unavailable


def msg_done(work: Work) -> bool:
    """Whether every msg pod runs the present template."""
    return _deployment_done(work, f"{work.snap.cluster.name}-msg")


def ipconfig_done(work: Work) -> bool:
    """Whether every ipconfig pod runs the present template."""
    return _deployment_done(work, f"{work.snap.cluster.name}-ipconfig")


def _deployment_done(work: Work, name: str) -> bool:
    found = work.snap.children.get(("Deployment", name))
    return found is not None and found.observed and found.updated >= found.replicas and found.ready >= found.replicas


def outdated_shards(work: Work) -> list[str]:
    """Shards whose pod does not run its StatefulSet's template, by name."""
    found = []
    for (kind, name), child in work.snap.children.items():
        pod = work.snap.pods.get(shard_pod(name))
        if kind == "StatefulSet" and name in work.topology.shards and pod is not None and _differs(pod, child):
            found.append(name)
    return sorted(found)


def _differs(pod: Pod, child: Child) -> bool:
    return (pod.template_hash, pod.restarted_at) != (child.template_hash, child.restarted_at)


def state_done(work: Work) -> bool:
    """Whether every shard's pod runs the present template and serves all its slots."""
    return not outdated_shards(work) and all(settled(work, name) for name in counts(work.topology))


def settled(work: Work, shard: str) -> bool:
    """Whether a shard is ready and reports every slot that the record gives it."""
    pod = work.shard_pod(shard)
    report = work.report(pod.name, pod.uid) if pod is not None else None
    if pod is None or not work.shard_ready(shard) or report is None:
        return False
    have = members(report.acquired)
    return all(set(range(r.first, r.last + 1)) <= have for r in work.topology.slots if r.shard == shard)


def roll_state(work: Work) -> None:
    """Deletes one shard's pod for a newer template: when msg is done, no move is open and all other shards serve. One
    that does not serve by itself goes first: it has nothing to lose."""
    if work.act is not None or work.topology.move is not None or not msg_done(work):
        return
    old = outdated_shards(work)
    down = [name for name in counts(work.topology) if not settled(work, name)]
    for name in sorted(old, key=lambda n: (n not in down, n)):
        pod, child = work.snap.pods[shard_pod(name)], work.snap.children[("StatefulSet", name)]
        if child.observed and not pod.deleting and not set(down) - {name}:
            work.do(DeletePod(pod.name, pod.uid, f"shard {name} gets a newer template"))
            return


def gateways_turn(work: Work) -> bool:
    """Whether msg, state and ipconfig are done, so that gateways may roll."""
    return msg_done(work) and state_done(work) and ipconfig_done(work)
