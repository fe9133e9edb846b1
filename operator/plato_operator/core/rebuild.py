"""A record for a cluster that has none, and another one for a cluster whose record was lost or set back.

What processes report is the truth then: they serve from memory what an earlier record told them. Until each living one has
answered, or 40 s have passed, nothing is written; processes ignore older epochs meanwhile.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from plato.api.names import shard_addr, shard_name
from plato.topology.record import SLOTS, Gateway, Msg, Shard, SlotRange, Topology
from plato.topology.slots import members, reassigned, spread

from plato_operator.core.members import gateway_record, msg_record
from plato_operator.core.snapshot import GATEWAY, IPCONFIG, MSG, STATE, Report, Snapshot

WAIT_MS: Final = 40_000


def is_lost(snap: Snapshot) -> bool:
    """Whether the record is missing, another cluster's, or older than what a living process has seen."""
    topology = snap.topology
    if topology is None or topology.cluster_uid != snap.cluster.uid:
        return True
    return any(report.epoch_seen > topology.epoch for report in _reports(snap).values())


def can_wait_for(snap: Snapshot) -> bool:
    """Whether some process that may hold a part of the truth has not answered yet."""
    reports = _reports(snap)
    return any(
        pod.running and not pod.deleting and name not in reports
        for name, pod in snap.pods.items()
        if pod.component != IPCONFIG
    )


def rebuilt(snap: Snapshot) -> Topology:
    """A new record from what pods report, then from the record as far as there is one, then from the spec.

    Its epoch and that of each slot is greater than any that was seen.
    """
    old = snap.topology if snap.topology is not None and snap.topology.cluster_uid == snap.cluster.uid else None
    reports = _reports(snap)
    said = [max(r.epoch_seen, r.fence) for r in reports.values()]
    seen = max([*said, old.epoch if old is not None else 0])
    epoch = 1 + max(seen, snap.now_ms // 1000)
    slots = _slots(snap, old, reports, epoch)
    gateways, msgs = _members(snap, old, reports)
    resting = dict(old.resting) if old is not None else {}
    for worker_id in [g.worker_id for g in gateways.values()] + [m.worker_id for m in msgs.values()]:
        resting.pop(worker_id, None)
    cluster = snap.cluster
    names = {r.shard for r in slots} | {shard_name(cluster.name, i) for i in range(cluster.spec.state.shards)}
    uids = {pod.owner: pod.uid for name, pod in snap.pods.items() if pod.component == STATE and name in reports}
    if old is not None:
        uids = {**{name: shard.uid for name, shard in old.shards.items()}, **uids}
    shards = {n: Shard(shard_addr(cluster.name, n, cluster.namespace), uids.get(n, "")) for n in sorted(names)}
    return Topology(cluster.uid, epoch, slots, shards, gateways, msgs, writer=snap.me, resting=resting)


def _reports(snap: Snapshot) -> dict[str, Report]:
    """Reports by pod name, of the very processes that the pods are."""
    return {n: r for n, r in snap.reports.items() if n in snap.pods and snap.pods[n].uid == r.uid}


def _slots(snap: Snapshot, old: Topology | None, reports: Mapping[str, Report], epoch: int) -> tuple[SlotRange, ...]:
    """Who says that he has it (the one who has seen most wins), else who had it, else the silent shards in turn."""
    cluster = snap.cluster
    wanted = [shard_name(cluster.name, i) for i in range(cluster.spec.state.shards)]
    weights = {n: snap.shards[n].spec.weight if n in snap.shards else 100 for n in wanted}
    said: dict[int, str] = {}
    talking = [(r.epoch_seen, snap.pods[n].owner, r) for n, r in reports.items() if snap.pods[n].component == STATE]
    for _, shard, report in sorted(talking, key=lambda t: t[:2]):
        said.update(dict.fromkeys(members(report.acquired), shard))
    if old is None and not said:
        return spread(wanted, weights, epoch)
    silent = [n for n in wanted if n not in {shard for _, shard, _ in talking}] or wanted
    owners: list[SlotRange] = []
    for slot in range(SLOTS):
        had = old.owner(slot).shard if old is not None else silent[slot * len(silent) // SLOTS]
        owners.append(SlotRange(slot, slot, said.get(slot, had), epoch))
    return reassigned(owners, {}, epoch)


def _members(
    snap: Snapshot, old: Topology | None, reports: Mapping[str, Report]
) -> tuple[dict[str, Gateway], dict[str, Msg]]:
    """Records of the old one whose pods still are, and of pods that report an id; of two with one id the ready one wins."""
    gateways = dict(old.gateways) if old is not None else {}
    msgs = dict(old.msgs) if old is not None else {}
    takers: dict[int, str] = {}
    told = [(not snap.pods[n].ready, n, r.worker_id) for n, r in reports.items() if r.worker_id is not None]
    for _, name, worker_id in sorted(told):
        if worker_id is not None and snap.pods[name].component in (GATEWAY, MSG):
            takers.setdefault(worker_id, name)
    for name in [n for n, g in gateways.items() if takers.get(g.worker_id, n) != n]:
        del gateways[name]
    for name in [n for n, m in msgs.items() if takers.get(m.worker_id, n) != n]:
        del msgs[name]
    for worker_id, name in takers.items():
        pod = snap.pods[name]
        if pod.component == MSG and pod.ip:
            msgs[name] = msg_record(pod, worker_id)
        elif pod.component == GATEWAY and pod.endpoint is not None and pod.endpoint.ip:
            known = gateways.get(name)
            same = known is not None and known.uid == pod.uid and known.worker_id == worker_id
            gateways[name] = known if same and known is not None else gateway_record(pod, worker_id)
    return gateways, msgs
