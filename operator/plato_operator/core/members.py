"""Who is in the record: pods that went leave it (their ids rest), pods that came enter it (with ids that nobody has).

Done even while the cluster is paused: maintenance must not turn a pod's restart into an outage.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Final

from plato.api.names import MSG_GRPC_PORT, shard_addr
from plato.topology.record import DRAINING, LOST, SERVING, Drain, Gateway, Msg, Rest, Shard
from plato.topology.slots import counts
from plato.topology.worker_ids import free, held, rest_until, rested

from plato_operator.core.orders import Gate
from plato_operator.core.snapshot import ENDED, GATEWAY, MSG, STATE, Pod
from plato_operator.core.work import Work, pool_desks, record_of

MSG_GRACE_S: Final = 60
"""A msg pod's grace period: how long one may outlive its object."""
EVICTION_MARGIN_MS: Final = 10_000
"""A deleted gateway ends its drain this long before it would be killed."""


def retire(work: Work) -> None:
    """Takes out pods that a GET did not find, or found with another uid, and those that ended; their ids rest.

    An evicted pod of a Deployment stays as Failed until somebody deletes it: its processes are gone for good."""
    gateways, msgs, resting = dict(work.topology.gateways), dict(work.topology.msgs), dict(work.topology.resting)
    for name, gateway in work.topology.gateways.items():
        if work.snap.live.get(name, gateway.uid) != gateway.uid or _ended(work, name, gateway.uid):
            pod = Pod(name, gateway.uid, GATEWAY, owner=name.rpartition("-")[0])
            until = rest_until(work.snap.now_ms, work.drain_spec(pod).deadline_seconds)
            until = max(until, rest_until(gateway.drain.deadline_ms, 0) if gateway.drain is not None else 0)
            resting = rested(resting, gateway.worker_id, gateway.uid, until)
            del gateways[name]
    for name, msg in work.topology.msgs.items():
        if work.snap.live.get(name, msg.uid) != msg.uid or _ended(work, name, msg.uid):
            resting = rested(resting, msg.worker_id, msg.uid, rest_until(work.snap.now_ms, MSG_GRACE_S))
            del msgs[name]
    if resting != work.topology.resting:
        work.change(gateways=gateways, msgs=msgs, resting=resting)


def _ended(work: Work, name: str, uid: str) -> bool:
    """Whether this very pod has run to its end."""
    pod = work.snap.pods.get(name)
    return pod is not None and pod.uid == uid and pod.phase in ENDED


def note_outside(work: Work) -> None:
    """Records what happened to pods without us: deleted ones are draining at once, those of lost nodes are lost."""
    gateways = dict(work.topology.gateways)
    for name, gateway in work.topology.gateways.items():
        pod = work.snap.pods.get(name)
        if pod is None or pod.uid != gateway.uid:
            continue
        if gateway.state == SERVING and pod.deleting:
            gateway = replace(gateway, state=DRAINING, drain=eviction(work, pod))
            work.tell("Pod", name, "DrainStarted", "the pod is being deleted: its clients are moved while it lasts")
        lost = work.lost(pod)
        if lost and gateway.state != LOST:  # one that is leaving too: its pod may never go, and would hold up a roll
            gateway = replace(gateway, state=LOST)
            work.tell(
                "Pod", name, "NodeLost", f"node {pod.node} is lost; the gateway keeps its worker_id", warning=True
            )
        elif not lost and gateway.state == LOST and work.snap.nodes is not None and (pod.ready or pod.running):
            gateway = replace(gateway, state=SERVING if gateway.drain is None else DRAINING)
        gateways[name] = gateway
    if gateways != work.topology.gateways:
        work.change(gateways=gateways)


def eviction(work: Work, pod: Pod) -> Drain:
    """The drain of a pod that somebody else deletes."""
    spec = work.drain_spec(pod)
    deadline_ms = work.snap.now_ms + spec.deadline_seconds * 1000
    if pod.delete_at_ms:
        deadline_ms = min(deadline_ms, max(work.snap.now_ms, pod.delete_at_ms - EVICTION_MARGIN_MS))
    within_ms = deadline_ms - work.snap.now_ms
    return Drain(work.epoch, "Evicted", spec.pace_per_second, spec.settle_seconds, deadline_ms, within_ms)


def admit(work: Work) -> None:
    """Enters pods that have no record, in one batch, while ids last; and brings the shards' uids up to date."""
    _refresh_shards(work)
    _refresh_addresses(work)
    _replace_contested(work)
    newcomers = list(_newcomers(work))
    if not newcomers:
        return
    gateways, msgs, resting = dict(work.topology.gateways), dict(work.topology.msgs), dict(work.topology.resting)
    ids = free(held(work.topology), resting, work.snap.now_ms)
    for pod in newcomers:
        worker_id = next(ids, None)
        if worker_id is None:
            work.exhausted += 1
            continue
        resting.pop(worker_id, None)
        if pod.component == MSG:
            msgs[pod.name] = msg_record(pod, worker_id)
        else:
            gateways[pod.name] = gateway_record(pod, worker_id)
    if len(gateways) + len(msgs) > len(work.topology.gateways) + len(work.topology.msgs):
        work.change(gateways=gateways, msgs=msgs, resting=resting)


def gateway_record(pod: Pod, worker_id: int) -> Gateway:
    """A serving gateway without homes; `bind` gives them before the record is written."""
    at = pod.endpoint
    assert at is not None  # admissible() asked
    return Gateway(
        pod.uid, worker_id, at.workers, (), at.ip, at.tcp, at.ws, at.admin, SERVING, pod.zone, pod.node, poll=at.poll
    )  # fmt: skip


def msg_record(pod: Pod, worker_id: int) -> Msg:
    """A msg process, and where its gRPC listens."""
    host = f"[{pod.ip}]" if ":" in pod.ip else pod.ip
    return Msg(pod.uid, worker_id, f"{host}:{MSG_GRPC_PORT}")


def admissible(work: Work, pod: Pod) -> bool:
    """Whether a pod can get a record: it runs, has an address, is not going, and no GET says that it is another."""
    if pod.deleting or pod.phase != "Running" or work.snap.live.get(pod.name, pod.uid) != pod.uid:
        return False
    return pod.endpoint is not None and bool(pod.endpoint.ip) if pod.component == GATEWAY else bool(pod.ip)


def _newcomers(work: Work) -> Iterator[Pod]:
    """Pods to admit: msg first (without it nothing works), then gateways by name; none that scale-down takes anyway."""
    over = {d.pool.name: d.wanted for d in pool_desks(work) if d.replicas > d.wanted}
    gone = {rest.uid for rest in work.topology.resting.values()}
    for component, records in ((MSG, work.topology.msgs), (GATEWAY, work.topology.gateways)):
        for name, pod in sorted(work.snap.pods.items()):
            if pod.component != component or name in records or pod.uid in gone or not admissible(work, pod):
                continue
            # A ready one serves by an older record: it has clients, so it gets its record and then its drain.
            if component == MSG or pod.ready or pod.ordinal < over.get(pod.owner, pod.ordinal + 1):
                yield pod


def _replace_contested(work: Work) -> None:
    """A newcomer whose id the store has reserved for another process gets another one; the contested id rests."""
    gateways, msgs, resting = dict(work.topology.gateways), dict(work.topology.msgs), dict(work.topology.resting)
    contested: list[tuple[str, int]] = []
    for name, worker_id, uid in [
        *((n, g.worker_id, g.uid) for n, g in gateways.items() if g.state == SERVING),
        *((n, m.worker_id, m.uid) for n, m in msgs.items()),
    ]:
        pod, report = work.snap.pods.get(name), work.report(name, uid)
        if report is None or report.lease is not False or report.worker_id != worker_id:
            continue
        if pod is not None and pod.uid == uid and not pod.ready:
            contested.append((name, worker_id))
    if not contested:
        return
    ids = free(held(work.topology), resting, work.snap.now_ms)
    for name, worker_id in contested:
        other = next(ids, None)
        if other is None:
            work.exhausted += 1
            continue
        resting.pop(other, None)
        deadline_s = MSG_GRACE_S if name in msgs else work.drain_spec(work.snap.pods[name]).deadline_seconds
        resting = rested(resting, worker_id, "", rest_until(work.snap.now_ms, deadline_s))
        if name in msgs:
            msgs[name] = replace(msgs[name], worker_id=other)
        else:
            gateways[name] = replace(gateways[name], worker_id=other)
    work.change(gateways=gateways, msgs=msgs, resting=resting)


def _refresh_shards(work: Work) -> None:
    """Each wanted or owning shard has an entry; its uid follows the pod, but only on a GET's word: a stale list that shows
    the pod before would make the living one stop for ever. Entries without slots and resource go."""
    cluster, shards = work.snap.cluster, dict(work.topology.shards)
    owning = counts(work.topology)
    kept = {*owning, *work.weights()}
    for name in kept - shards.keys():
        shards[name] = Shard(shard_addr(cluster.name, name, cluster.namespace), "")
    for name in shards.keys() - kept:
        del shards[name]
    for pod in work.snap.pods.values():
        if pod.component != STATE or pod.owner not in shards:
            continue
        shard = shards[pod.owner]
        if work.snap.live.get(pod.name) == pod.uid:
            shards[pod.owner] = replace(shard, uid=pod.uid, ip=pod.ip)
        elif shard.uid == pod.uid and pod.ip and pod.ip != shard.ip:
            shards[pod.owner] = replace(shard, ip=pod.ip)  # it got its address after its uid was written
    if shards != work.topology.shards:
        work.change(shards=dict(sorted(shards.items())))


def _refresh_addresses(work: Work) -> None:
    """Which address clients are told follows the pool's publicAddress and the node: no pod rolls for it. What is not known
    at the moment stays as it was."""
    gateways = dict(work.topology.gateways)
    for name, pod in work.gateway_pods().items():
        record = record_of(work, pod)
        if record is not None and pod.endpoint is not None and pod.endpoint.ip not in ("", record.ip):
            gateways[name] = replace(record, ip=pod.endpoint.ip)
    if gateways != work.topology.gateways:
        work.change(gateways=gateways)


def gates(work: Work) -> None:
    """Sets the readiness gate of each recorded gateway: true while it serves. So a wedged one leaves its Services."""
    for name, pod in work.gateway_pods().items():
        record = record_of(work, pod)
        if record is not None and pod.gate != (record.state == SERVING):
            work.applies.append(Gate(name, pod.uid, record.state == SERVING))


def drop_old_rests(work: Work) -> None:
    """Forgets rests that are over, when the record is written anyway: a quiet cluster sees no write."""
    if work.changed:
        now = work.snap.now_ms
        kept: dict[int, Rest] = {i: r for i, r in work.topology.resting.items() if r.until_ms > now}
        if len(kept) != len(work.topology.resting):
            work.change(resting=kept)
