"""What people and tools read: the status of each resource, from the same desk that the orders come from.

Conditions come without a time: `kept_times` carries the old ones over where the status is the same. Nothing reads a status
to decide.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from datetime import UTC, datetime
from typing import Final

from plato.api.cluster import PlatoClusterStatus, Reshard, SlotCounts, WorkerIdCounts
from plato.api.names import EXIT_NOT_ALONE, LABEL_POOL, is_taken, shard_index, shard_name
from plato.api.pool import DrainStatus, GatewayPoolStatus
from plato.api.shard import SlotSpan, StateShardStatus
from plato.api.shared import Condition
from plato.topology.record import DRAINING, LEAVING, LOST, SLOTS, Gateway
from plato.topology.slots import counts, left, members, spans
from plato.topology.worker_ids import held

from plato_operator.core import holds
from plato_operator.core.children import MIGRATION_WAIT_S, migrated, migration, migration_job, wanted
from plato_operator.core.drains import FORCE_AFTER_MS
from plato_operator.core.moves import outbid, wanted_weights
from plato_operator.core.orders import Apply, Gate, Remove
from plato_operator.core.repair import repaired
from plato_operator.core.rollout import ipconfig_done, msg_done, outdated_shards, settled, state_done
from plato_operator.core.snapshot import ENDED, IPCONFIG, MSG, STATE, Pod, Pool, Shard, Snapshot, shard_pod
from plato_operator.core.unplaced import unplaced
from plato_operator.core.work import Work, is_lost, record_of

STALE_AFTER_S = 30
"""A gateway whose epoch is older than the record's by this many seconds is behind (epochs are Unix seconds)."""
MOST_DRAINS = 50
MOST_QUOTED = 300
MOST_TOLD = 1_500
"""Of the words of a program that say what to do."""
MOST_WORDS = 2_000
"""Of a condition's message: a field of 100 KB that is quoted must not make a status that is refused, pass after pass."""
REFUSALS = ("InvalidOverlay", "QuotaExceeded", "Forbidden", "CRDTooOld", "NameTaken", "ApplyRefused")
UNNEEDED = ("PodMonitor",)
"""Kinds without which clients are served all the same: one that is refused is a warning."""
MOVING_MS: Final = 10_000
"""Slots of a move count as served for so long: links hold what comes for them while the one shard lets go (at most 3 s),
the other one loads, and a report tells it. One that takes longer, is undone or goes to a shard that is down is trouble."""
TRYING_MS: Final = 10_000
"""A migration that has nothing to do and finds its database ends sooner."""
STARTING_MS: Final = 60_000
"""How long the successor of a gateway that went may take to get ready, within maxUnavailable."""
NOT_STALLED = ("NotStalled", "everything that was asked for could be applied")


def rfc3339(unix_ms: int) -> str:
    """A time as Kubernetes writes it, whole seconds."""
    return datetime.fromtimestamp(unix_ms // 1000, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def bounded(message: str) -> str:
    """A message that a person reads to its end."""
    return message if len(message) <= MOST_WORDS else f"{message[: MOST_WORDS - 1]}…"


def kept_times(old: Iterable[Condition], new: Iterable[Condition], now_ms: int) -> tuple[Condition, ...]:
    """`new` with lastTransitionTime: that of the old condition of the type while its status is the same, else now."""
    times = {c.type: (c.status, c.last_transition_time) for c in old}
    found = []
    for condition in new:
        status, time = times.get(condition.type, ("", ""))
        same = status == condition.status and time
        found.append(replace(condition, last_transition_time=time if same else rfc3339(now_ms)))
    return tuple(found)


class _Sheet:
    """Conditions of one object, Ready first."""

    def __init__(self, generation: int) -> None:
        self._generation = generation
        self._found: list[Condition] = []

    def add(self, type_: str, holds: bool | None, reason: str, message: str) -> None:
        status = "Unknown" if holds is None else "True" if holds else "False"
        self._found.append(Condition(type_, status, reason, bounded(message), self._generation))

    def done(self) -> tuple[Condition, ...]:
        return tuple(sorted(self._found, key=lambda c: c.type != "Ready"))


def cluster_status(work: Work) -> PlatoClusterStatus:
    """Status of the PlatoCluster."""
    snap, topology = work.snap, work.topology
    spec, sheet = snap.cluster.spec, _Sheet(snap.cluster.generation)
    acquired = _acquired(work)
    missing = SLOTS - len(acquired | _on_their_way(work))
    ready_shards = [n for i in range(spec.state.shards) if work.shard_ready(n := shard_name(snap.cluster.name, i))]
    pools = [p for p in snap.pools.values() if not p.deleting]
    gateways_wanted = sum(p.spec.replicas for p in pools)
    gateways_ready = sum(_ready(work, p) for p in pools)
    move, to_move = topology.move, left(topology, wanted_weights(work))
    msgs_ready = sum(pod.ready and not pod.deleting for pod in snap.pods.values() if pod.component == MSG)
    rolling = (
        not (migrated(work) and msg_done(work) and state_done(work) and ipconfig_done(work))
        or any(holds.rolling(work, p) for p in pools)
        or _applies(work)
    )
    down = [n for n in counts(topology) if not work.shard_ready(n)]

    sheet.add("SlotsAcquired", not missing, *(
        ("AllAcquired", "every slot is served, or on its way between two shards") if not missing
        else ("Outbid", f"{missing} slots are not served; {newer}") if (newer := _outbid(work))
        else ("ShardDown", f"{missing} slots are not served; not ready: {', '.join(down)}") if down
        else ("Loading", f"{missing} slots are being loaded")
    ))  # fmt: skip
    sheet.add("Resharding", move is not None or to_move > 0, *_resharding(work, to_move))
    sheet.add("WorkerIdsAvailable", not work.exhausted, *(
        ("Exhausted", f"{work.exhausted} pods wait for one of {1024} worker ids; they are held or rest after their pod went")
        if work.exhausted else ("Available", "every pod has its worker id")
    ))  # fmt: skip
    sheet.add("TopologyHealthy", not work.too_large, *(
        ("TooLarge", f"{work.too_large}: the last one stays, nobody is added or drained; run fewer gateways and shards")
        if work.too_large
        else ("Rebuilt", "the record was lost and has been rebuilt from what pods reported")
        if snap.memory.rebuilt_epoch else ("Written", "the record is what this operator wrote")
    ))  # fmt: skip
    sheet.add("DependenciesReady", *_dependencies(work))
    sheet.add("Paused", spec.paused, *(
        ("Paused", "spec.paused is true: restarted pods are admitted, nothing else is changed") if spec.paused
        else ("Running", "changes are carried out")
    ))  # fmt: skip
    warnings = list(_warnings(work))
    sheet.add("ConfigurationWarning", bool(warnings), *(
        (warnings[0][0], "; ".join(words for _, words in warnings)) if warnings else ("None", "nothing to warn about")
    ))  # fmt: skip
    stalled = refusal(work)
    sheet.add("Stalled", bool(stalled), *(stalled or NOT_STALLED))
    why = _not_ready(work, missing, msgs_ready, gateways_ready, gateways_wanted, pools)
    busy = (
        rolling
        or move is not None
        or (to_move > 0 and holds.of_slots(work, to_move) is None)
        or any(g.drain for g in topology.gateways.values())
        or work.act is not None
        or gateways_ready != gateways_wanted
    )
    sheet.add("Ready", not why, *(why or ("Serving", "clients are served")))
    sheet.add("Reconciling", busy and not spec.paused, *(
        ("Paused", "spec.paused is true: what was asked for since waits") if spec.paused
        else ("Progressing", "pods or slots are on their way") if busy
        else holds.of_cluster(work, to_move) or ("Settled", "nothing to do")
    ))  # fmt: skip
    phase = (
        "Paused"
        if spec.paused
        else "Ready"
        if not why and not busy
        else "Degraded"
        if why and not rolling
        else "Progressing"
    )
    if not snap.pods:
        phase = "Pending"
    return PlatoClusterStatus(
        observed_generation=snap.cluster.generation, phase=phase, version=_version(work, rolling), epoch=topology.epoch,
        slots=SlotCounts(SLOTS, len(acquired), len(members(move.slots)) if move is not None else 0),
        worker_ids=WorkerIdCounts(len(held(topology)), sum(r.until_ms > snap.now_ms for r in topology.resting.values())),
        shards=f"{len(ready_shards)}/{spec.state.shards}", gateways=f"{gateways_ready}/{gateways_wanted}",
        connections=sum(_connections(work, p) for p in pools),
        reshard=Reshard(move.source if move else "", move.target if move else "", to_move) if move or to_move else None,
        conditions=sheet.done(),
    )  # fmt: skip


def _warnings(work: Work) -> Iterator[tuple[str, str]]:
    """(reason, message) of each thing that was asked for and is not as it was meant, the gravest first."""
    snap = work.snap
    spec = snap.cluster.spec
    foreign = [n for n, s in snap.shards.items() if not s.owned or shard_index(snap.cluster.name, n) is None]
    if foreign:
        yield "ForeignShard", f"not made by this PlatoCluster and passed over: {', '.join(sorted(foreign))}"
    if not any(work.weights().values()):
        yield (
            "NoWeight",
            "every StateShard has weight 0, so slots have nowhere to go and no shard is removed: give one a weight",
        )
    if snap.odd_keys and spec.auth.keys is not None:
        named = f"keys of Secret {spec.auth.keys.name} must be named <kid>.pem or <kid>.key"
        yield "KeysPassedOver", f"{named}; passed over: {', '.join(sorted(snap.odd_keys))}"
    for (kind, name), (_, message) in sorted(snap.refusals.items()):
        if kind in UNNEEDED:
            remedy = "install its CRD (Prometheus Operator) or set spec.monitoring.podMonitor to false"
            yield f"{kind}Refused", f"{kind} {name}: {message}; {remedy}"


def _not_ready(
    work: Work, missing: int, msgs: int, ready: int, wanted: int, pools: list[Pool]
) -> tuple[str, str] | None:
    """(reason, message) of what keeps clients from being served well; None: nothing."""
    holds, reason, message = _dependencies(work)
    if holds is False:
        return reason, message
    stalled = refusal(work)
    if stalled is not None:
        return stalled
    if holds is None and not any(pod.component == MSG for pod in work.snap.pods.values()):
        return reason, message
    if not msgs:
        words = "no msg pod is ready: messages are accepted at most until queues are full, and none is delivered"
        return "MsgDown", words + _trouble(pod for pod in work.snap.pods.values() if pod.component == MSG)
    if missing:
        shards = (pod for pod in work.snap.pods.values() if pod.component == STATE and not pod.ready)
        why = f"; {newer}" if (newer := _outbid(work)) else _trouble(shards)
        return "SlotsMissing", f"{missing} of {SLOTS} slots are not served{why}"
    ipconfig = work.snap.children.get(("Deployment", f"{work.snap.cluster.name}-ipconfig"))
    if ipconfig is None or not ipconfig.ready:
        words = "no ipconfig pod is ready: clients do not learn of gateways"
        return "IpconfigDown", words + _trouble(pod for pod in work.snap.pods.values() if pod.component == IPCONFIG)
    # Pool by pool: what one may spare while it rolls does not make up for what another one lacks.
    short = any(_ready(work, p) < p.spec.replicas - _spare(work, p) for p in pools)
    if short or (wanted and not ready):
        gateways = (pod for pod in work.gateway_pods().values() if not pod.ready)
        return "GatewaysMissing", f"{ready} of {wanted} gateways are ready{_trouble(gateways)}"
    return None


def _outbid(work: Work) -> str:
    """In words, that slots cannot be taken since the store has newer fences; empty: none."""
    record = work.snap.topology or work.topology  # as it was observed: a pass that assigns them anew says so too
    slots = sum(len(own) for own in outbid(work, record).values())
    if not slots:
        return ""
    return (
        f"{slots} of them have a fence in the store that is newer than the topology: once nobody has proved it for 10 s"
        " they are assigned anew; while somebody does, another cluster uses this store and key prefix: end one of the two"
    )


def _trouble(pods: Iterable[Pod]) -> str:
    """The first thing that Kubernetes itself says about one of the pods, to put behind a message."""
    for pod in sorted(pods, key=lambda p: p.name):
        words = " ".join((pod.unschedulable or pod.trouble).split())
        if words:
            return f"; {pod.name}: {words[:MOST_QUOTED]}"
    return ""


def _dependencies(work: Work) -> tuple[bool | None, str, str]:
    """(holds, reason, message) of the Secrets and the database's schema."""
    missing, job = work.snap.missing_secrets, migration_job(work)
    if not missing and (trying := _trying(work)):
        return None, "Migrating", trying
    if missing:
        return False, "SecretMissing", f"create in this namespace: {', '.join(sorted(missing))}"
    if alone := _not_alone(work):
        return False, "NotAlone", alone
    if migrated(work):
        return True, "Found", "the named Secrets and keys exist, and the database has this version's schema"
    if job is not None and job.failed:
        logs = f"kubectl logs -n {work.snap.cluster.namespace} job/{job.name}"
        words = f"the migration of the database failed {job.failed} times: see `{logs}`; it is tried some 12 times, and anew"
        said = f" Its last words: {_last_try(work)[1][:MOST_QUOTED]}" if _last_try(work)[1] else ""
        return False, "MigrationFailed", f"{words} when the Job is deleted. Running pods keep what they run.{said}"
    if job is None and work.snap.cluster.spec.paused:
        return None, "Paused", "spec.paused is true: the database's migration waits, running pods keep what they run"
    return None, "Migrating", "the database is being brought to this version's schema; msg and state wait for it"


def _last_try(work: Work) -> tuple[int, str]:
    """(exit code, last words) of the newest pod of the migration's Job that failed; (0, "") for none."""
    job = migration_job(work)
    failed = [p for p in work.snap.pods.values() if job is not None and p.owner == job.name and p.exit_code]
    newest = max(failed, key=lambda p: (p.created_ms, p.name), default=None)
    return (newest.exit_code, " ".join(newest.trouble.removeprefix("plato: ").split())) if newest else (0, "")


def _not_alone(work: Work) -> str:
    """In words, whose the database schema or the store is, where that is another PlatoCluster; empty: nobody else's. What
    two clusters name alike in one namespace is seen beforehand, the rest by the marks that the migration finds, or a pod
    that started before it has looked."""
    if work.snap.shared:
        return work.snap.shared
    code, words = (0, "") if migrated(work) else _last_try(work)
    told = "the migration found the mark of another PlatoCluster; its log names it"
    return f"{(words or told)[:MOST_TOLD]}; {_anew(work)}" if code == EXIT_NOT_ALONE else _led_astray(work)


def _anew(work: Work) -> str:
    """How to go on once the cause of a failed migration is mended."""
    delete = f"kubectl delete job -n {work.snap.cluster.namespace} {migration(work)}"
    return (
        "a change of the spec, of that annotation or of the host, port or database in a Secret is tried at once, by a new"
        f" Job; for what was mended elsewhere, delete the failed one: `{delete}`"
    )


def _led_astray(work: Work) -> str:
    """The last words of a pod of msg or state that found another's mark and does not run since; empty: of none. It says
    "last": once the mark or the Secret is mended, Kubernetes may take five minutes to start it again."""
    for pod in sorted(work.snap.pods.values(), key=lambda p: p.name):
        if pod.component in (MSG, STATE) and pod.exit_code == EXIT_NOT_ALONE and not (pod.running or pod.deleting):
            _, said, words = pod.trouble.rpartition(f"plato-{pod.component}: ")
            told = " ".join(words.split()) if said else "the mark of another PlatoCluster; its log names it"
            return f"{pod.name} found, when it was started last: {told}"
    return ""


def refusal(work: Work, kind: str = "PlatoCluster", name: str = "") -> tuple[str, str] | None:
    """(reason, message) of the first child that was refused, of a pool or a shard only its own; None: all were taken."""
    if kind == "PlatoCluster" and (alone := _not_alone(work)):
        return "NotAlone", alone
    if not work.snap.refusals:
        return None
    owners = {(c.kind, c.name): (c.owner_kind, c.owner) for c in wanted(work)}
    for child, (reason, message) in sorted(work.snap.refusals.items()):
        if child[0] in UNNEEDED:
            continue
        if kind == "PlatoCluster" or (kind, name) in (child, owners.get(child)):
            known = reason if reason in REFUSALS else "ApplyRefused"
            return known, f"{child[0]} {child[1]}: {message}"
    return None


def _trying(work: Work) -> str:
    """Of a migration that has not ended for a while: where its words are meanwhile. Only the end of a pod is told to us."""
    job = migration_job(work)
    if job is None or job.succeeded or job.failed:
        return ""
    pods = [p for p in work.snap.pods.values() if p.name.startswith(f"{job.name}-") and p.phase not in ENDED]
    if waits := _trouble(pods):
        return f"the migration of the database waits{waits}"
    long = next((p.name for p in pods if p.running and work.snap.now_ms - p.created_ms >= TRYING_MS), "")
    if not long:
        return ""
    words = "the migration of the database has not ended yet: it may have much to do, or the database does not answer, which"
    logs = f"kubectl logs -n {work.snap.cluster.namespace} {long}"
    return f"{words} is tried again for {MIGRATION_WAIT_S} s; `{logs}` says which"


def _version(work: Work, rolling: bool) -> str:
    """The version that every pod runs; while they differ, the one before. Pools with a version of their own don't count."""
    cluster = work.snap.cluster
    canaries = {p.name for p in work.snap.pools.values() if p.spec.version}
    living = [pod for pod in work.snap.pods.values() if pod.phase not in ENDED]
    found = {pod.version for pod in living if pod.version and pod.owner not in canaries}
    before = sorted(found - {cluster.spec.version})
    if before:
        return before[0]
    return cluster.spec.version if found or (work.snap.pods and not rolling) else ""


def unknown_status(snap: Snapshot) -> PlatoClusterStatus:
    """Status while the record is missing and those who still know are asked: nothing is judged."""
    sheet = _Sheet(snap.cluster.generation)
    sheet.add("Ready", None, "TopologyMissing", "the topology is missing: what pods report is being gathered")
    sheet.add("Reconciling", True, "Progressing", "the topology is being rebuilt")
    return PlatoClusterStatus(observed_generation=snap.cluster.generation, phase="Progressing", conditions=sheet.done())


def _resharding(work: Work, to_move: int) -> tuple[str, str]:
    move, state = work.topology.move, work.snap.cluster.spec.state
    if move is not None:
        slots = len(members(move.slots))
        if move.undo:
            return "Undoing", f"{slots} slots go back to {move.source}, since {move.target} does not take them"
        return "Moving", f"{slots} slots go from {move.source} to {move.target}; {to_move} are left after them"
    if not to_move:
        return "Settled", "every slot is where the weights want it"
    if state.reshard_paused:
        return "Paused", f"{to_move} slots wait for spec.state.reshardPaused to be false"
    return "Moving", f"{to_move} slots are left to move, as soon as both shards are ready"


def pool_status(work: Work, pool: Pool) -> GatewayPoolStatus:
    """Status of one GatewayPool."""
    snap, sheet, spec = work.snap, _Sheet(pool.generation), pool.spec
    pods = [pod for pod in work.gateway_pods().values() if pod.owner == pool.name]
    records = [(pod, record_of(work, pod)) for pod in sorted(pods, key=lambda p: p.ordinal)]
    draining = [(p, r) for p, r in records if r is not None and r.state in (DRAINING, LEAVING)]
    sts = snap.children.get(("StatefulSet", pool.name))
    updated = sum(
        sts is not None and p.template_hash == sts.template_hash and p.restarted_at == sts.restarted_at for p in pods
    )
    ready = _ready(work, pool)

    reasons = sorted({r.drain.reason for _, r in draining if r.drain is not None})
    sheet.add(
        "Draining", bool(draining), reasons[0] if reasons else "NoDrain", f"{len(draining)} gateways are being drained"
    )
    blocked = _blocked(work, pool, draining)
    sheet.add("DrainBlocked", blocked is not None, *(blocked or ("NotBlocked", "no drain waits")))
    stuck = [p for p in pods if p.unschedulable]
    sheet.add(
        "Unschedulable",
        bool(stuck),
        *(unplaced(work, pool, stuck) if stuck else ("Scheduled", "every pod has a node")),
    )
    broken = repaired(work, pool.name)
    sheet.add("Degraded", broken is not None, *(
        ("BrokenRevisionRepaired", f"{broken} ran a revision that never got ready and was replaced") if broken
        else ("NotDegraded", "no repair was needed")
    ))  # fmt: skip
    lost = [p.name for p, r in records if is_lost(r)]
    sheet.add("NodeLost", bool(lost), *(
        ("NodeLost", f"on lost nodes, worker ids stay theirs until the pod objects go: {', '.join(lost)}") if lost
        else ("NodesReady", "no gateway is on a lost node")
    ))  # fmt: skip
    need_s = -(-spec.capacity.connections // spec.drain.pace_per_second)
    slow = need_s > spec.drain.deadline_seconds
    sheet.add("ConfigurationWarning", slow, *(
        ("DrainTooSlow", f"a full gateway needs {need_s} s at {spec.drain.pace_per_second} per second, the deadline is "
         f"{spec.drain.deadline_seconds} s: raise drain.pacePerSecond or drain.deadlineSeconds") if slow
        else ("None", "nothing to warn about")
    ))  # fmt: skip
    good = ready >= max(spec.replicas - _spare(work, pool), min(1, spec.replicas))
    stalled = refusal(work, "GatewayPool", pool.name)
    if is_taken(snap.cluster.name, pool.name):
        stalled = (
            "NameTaken",
            f"{snap.cluster.name} has objects of its own that are named {pool.name}: use another name",
        )
    sheet.add("Stalled", bool(stalled), *(stalled or NOT_STALLED))
    words = f"{ready} of {spec.replicas} gateways are ready{'' if good else _trouble(p for p in pods if not p.ready)}"
    sheet.add("Ready", good and not stalled, *(stalled or ("Serving" if good else "GatewaysMissing", words)))
    busy = holds.rolling(work, pool) or len(pods) != spec.replicas or ready != spec.replicas or holds.behind(work, pool)
    paused = snap.cluster.spec.paused
    held = None if paused or busy else holds.of_pool(work, pool)
    updates = f"{updated} of {len(pods)} pods run the present template"
    sheet.add("Reconciling", busy and not paused, *(
        held if held
        else ("Paused" if paused else "Progressing" if busy else "Settled", updates)
    ))  # fmt: skip
    return GatewayPoolStatus(
        observed_generation=pool.generation, replicas=len(pods), ready_replicas=ready, updated_replicas=updated,
        draining_replicas=len(draining), selector=f"{LABEL_POOL}={pool.name}", connections=_connections(work, pool),
        drains=tuple(_drain(work, p, r) for p, r in draining[:MOST_DRAINS]),
        conditions=sheet.done(),
    )  # fmt: skip


def _blocked(work: Work, pool: Pool, draining: list[tuple[Pod, Gateway]]) -> tuple[str, str] | None:
    """(reason, message) of a drain that cannot go on by itself."""
    if pool.name in work.held:
        return "NoTarget", work.held[pool.name]
    for pod, record in draining:
        report = work.report(pod.name, pod.uid)
        if report is None and pod.running:
            by = record.drain.deadline_ms + FORCE_AFTER_MS if record.drain is not None else 0
            return (
                "ReportTimeout",
                f"{pod.name} does not answer /v1/report; it is deleted at {rfc3339(by)} all the same",
            )
        behind = report is not None and report.epoch_seen < work.topology.epoch - STALE_AFTER_S
        if behind and report is not None and record.drain is not None and report.epoch_seen < record.drain.id:
            return "TopologyStale", f"{pod.name} has not seen its drain yet: it is at epoch {report.epoch_seen}"
    return None


def _drain(work: Work, pod: Pod, record: Gateway) -> DrainStatus:
    report, drain = work.report(pod.name, pod.uid), record.drain
    told = report.drain if report is not None else None
    mine = told is not None and drain is not None and told.id == drain.id
    phase = "Draining"
    if record.state == LEAVING:
        phase = "Leaving" if mine and told is not None and told.phase == "drained" else "Forced"
    elif mine and told is not None and told.phase == "drained":
        phase = "Drained"
    return DrainStatus(
        pod=pod.name, reason=drain.reason if drain is not None else "Manual", phase=phase, uid=pod.uid,
        deadline_at=rfc3339(drain.deadline_ms) if drain is not None else None,
        remaining=told.remaining if mine and told is not None else None,
    )  # fmt: skip


def shard_status(work: Work, shard: Shard) -> StateShardStatus:
    """Status of one StateShard."""
    snap, sheet = work.snap, _Sheet(shard.generation)
    own = [r for r in work.topology.slots if r.shard == shard.name]
    number = sum(r.last - r.first + 1 for r in own)
    pod = snap.pods.get(shard_pod(shard.name))
    weight = work.weights().get(shard.name, 0)
    lost = pod is not None and work.lost(pod)
    has_all = settled(work, shard.name)
    serves = has_all or _serves_but_those_on_their_way(work, shard.name)
    ready = work.shard_ready(shard.name)
    stalled = refusal(work, "StateShard", shard.name)
    if shard.name not in work.weights():
        stalled = "ForeignShard", "only a PlatoCluster makes StateShards: delete this one, raise spec.state.shards"
    sheet.add("Stalled", bool(stalled), *(stalled or NOT_STALLED))
    sheet.add("ConfigurationWarning", False, "None", "nothing to warn about")
    sheet.add("Ready", ready and serves and not stalled, *(
        stalled if stalled
        else ("Serving", "every slot of this shard is served") if ready and serves
        else ("Loading", "its slots are being loaded") if ready
        else ("PodNotReady", f"pod {shard_pod(shard.name)} is not ready{_trouble([pod] if pod is not None else [])}")
    ))  # fmt: skip
    sheet.add("SlotsAcquired", serves, "AllAcquired" if serves else "Loading", f"{number} slots are assigned")
    sheet.add("Evacuating", not weight and number > 0, *(
        ("Evacuating", f"{number} slots are left to move away") if not weight and number
        else ("Evacuated", "no slot is left") if not weight else ("NotAsked", "the weight is above 0")
    ))  # fmt: skip
    sheet.add("NodeLost", lost, *(
        ("NodeLost", "its node is lost; " + (
            "others take its slots after 60 s" if _takes_over(work) else "its slots wait for the pod"
        ))
        if lost else ("NodeReady", "its node is not lost")
    ))  # fmt: skip
    rolling = shard.name in outdated_shards(work)
    sheet.add(
        "Reconciling",
        rolling or not has_all,
        "Progressing" if rolling or not has_all else "Settled",
        f"weight {weight}",
    )
    phase = "NodeLost" if lost else "Pending" if not ready else "Evacuating" if not weight and number else (
        "Evacuated" if not weight else "Serving" if serves else "Loading"
    )  # fmt: skip
    report = work.report(pod.name, pod.uid) if pod is not None else None
    merged = spans(slot for r in own for slot in range(r.first, r.last + 1))
    return StateShardStatus(
        observed_generation=shard.generation, phase=phase, pod=pod.name if pod is not None else "",
        pod_uid=pod.uid if pod is not None else "", slots=tuple(SlotSpan(a, b) for a, b in merged), slot_count=number,
        epoch=max((r.epoch for r in own), default=0), connections=report.connections if report is not None else 0,
        conditions=sheet.done(),
    )  # fmt: skip


def _takes_over(work: Work) -> bool:
    return work.snap.cluster.spec.state.on_node_loss == "TakeOver"


def _acquired(work: Work) -> set[int]:
    """Slots that their owner by the record reports as served."""
    found: set[int] = set()
    for name in counts(work.topology):
        pod = work.shard_pod(name)
        report = work.report(pod.name, pod.uid) if pod is not None and work.shard_ready(name) else None
        if report is not None:
            found |= {slot for slot in members(report.acquired) if work.topology.owner(slot).shard == name}
    return found


def _on_their_way(work: Work) -> set[int]:
    """Slots of the open move, while it takes no longer than one does and its target is up."""
    move, memory = work.topology.move, work.memory
    if move is None or move.undo or memory.move_id != move.id or not work.shard_ready(move.target):
        return set()
    return members(move.slots) if work.snap.now_ms - memory.move_since_ms < MOVING_MS else set()


def _serves_but_those_on_their_way(work: Work, shard: str) -> bool:
    """Whether a shard is ready and reports every slot that is its own and not on its way to it."""
    pod = work.shard_pod(shard)
    report = work.report(pod.name, pod.uid) if pod is not None and work.shard_ready(shard) else None
    own = {slot for r in work.topology.slots if r.shard == shard for slot in range(r.first, r.last + 1)}
    return report is not None and own <= members(report.acquired) | _on_their_way(work)


def _applies(work: Work) -> bool:
    """Whether this pass changes a child. One that is refused is told elsewhere, and may be so for ever."""
    changes = [order for order in work.applies if not isinstance(order, Gate)]
    return any(not isinstance(o, Apply | Remove) or (o.kind, o.name) not in work.snap.refusals for o in changes)


def _spare(work: Work, pool: Pool) -> int:
    """How many gateways may be away by our doing: those of a rollout, and the successors of those that went."""
    if holds.rolling(work, pool):
        return pool.spec.rollout.max_unavailable
    if not work.topology.resting:
        return 0  # none went: a cluster that is being made has all its gateways before it is ready
    pods = [pod for pod in work.gateway_pods().values() if pod.owner == pool.name]
    young = sum(not pod.ready and work.snap.now_ms - pod.created_ms < STARTING_MS for pod in pods)
    return min(pool.spec.rollout.max_unavailable, young + max(0, pool.spec.replicas - len(pods)))


def _ready(work: Work, pool: Pool) -> int:
    found = 0
    for pod in work.gateway_pods().values():
        record = record_of(work, pod) if pod.owner == pool.name else None
        found += record is not None and pod.ready and not pod.deleting and record.state not in (DRAINING, LEAVING, LOST)
    return found


def _connections(work: Work, pool: Pool) -> int:
    pods = (pod for pod in work.gateway_pods().values() if pod.owner == pool.name)
    return sum(report.connections for pod in pods if (report := work.report(pod.name, pod.uid)) is not None)
