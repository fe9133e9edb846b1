"""A small pure Kubernetes with Plato's data plane in it, for the planner to rule.

Time passes in `tick`; each tick moves controllers, kubelets and processes a little. Nodes can be cut off: their
processes live on with what they saw last. Pods deleted by force leave a ghost process behind. The store keeps
reservations and fences, as the real one does. Every change by an operator goes through `carry_out`, which may stop
anywhere and checks what must hold.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from zlib import crc32

from plato.api.cluster import Auth, Database, Gateways, PlatoClusterSpec, StateSpec, Store, UriKey, UrlKey
from plato.api.pool import DrainSpec, GatewayPoolSpec, RolloutSpec
from plato.api.shard import StateShardSpec
from plato.api.shared import Ref
from plato.topology.record import DRAINING, LEAVING, LOST, SERVING, Topology
from plato.topology.slots import members, spans
from plato_operator.core.orders import Apply, DeletePod, DeleteShard, Gate, Lower, Plan, Raise, Remove, Scale
from plato_operator.core.plan import one_pass
from plato_operator.core.snapshot import (
    GATEWAY,
    MSG,
    STATE,
    Child,
    Cluster,
    DrainReport,
    Endpoint,
    Memory,
    Node,
    Pod,
    Pool,
    Report,
    Shard,
    Snapshot,
    doubts,
)  # fmt: skip
from world_parts import Api, Process, Refused

START_MS = 1_790_000_000_000
CONNS = 4
POOL = "demo-edge"
DEADLINE_S = 10
GRACE_S = DEADLINE_S + 60


def cluster_spec(*, shards: int = 2, version: str = "1", slots_per_move: int = 16) -> PlatoClusterSpec:
    return PlatoClusterSpec(
        version=version, database=Database(UriKey("db")), store=Store(UrlKey("kv")), auth=Auth(Ref("keys")),
        state=StateSpec(shards=shards, slots_per_move=slots_per_move, move_interval_seconds=1),
        gateways=Gateways(initial_replicas=2),
    )  # fmt: skip


def pool_spec(replicas: int = 2, max_unavailable: int = 1, **fields: object) -> GatewayPoolSpec:
    spec = GatewayPoolSpec(
        cluster_ref=Ref("demo"), replicas=replicas, drain=DrainSpec(1, DEADLINE_S, 0),
        rollout=RolloutSpec(max_unavailable=max_unavailable, min_ready_seconds=0),
    )  # fmt: skip
    return replace(spec, **fields)  # type: ignore[arg-type]  # any field of the spec


class World:
    """One cluster `demo` with a pool `demo-edge` on some nodes."""

    def __init__(self, *, nodes: int = 5, shards: int = 2, replicas: int = 2, max_unavailable: int = 1) -> None:
        self.now_ms = START_MS
        self.api = Api(nodes={f"n{i}": Node(f"n{i}") for i in range(nodes)})
        self.cluster = Cluster("demo", "ns", "cluster-uid", 1, cluster_spec(shards=shards))
        self.first_pool = pool_spec(replicas, max_unavailable)
        self.topology: Topology | None = None
        self.version = 0
        self.processes: dict[str, Process] = {}
        self.ghosts: list[Process] = []
        self.reservations: dict[int, str] = {}
        self.holders: dict[int, str] = {}  # slot → uid of the state process that owns it in the store
        self.fences: dict[int, int] = {}  # slot → epoch of its fence in the store
        self.rivals: set[int] = set()  # slots behind whose fence a process of somebody else lives
        self.cut_off: set[str] = set()
        self.silent: set[str] = set()
        self.bad_hashes: set[str] = set()
        self.migrates = True
        self.versions: dict[str, str] = {}  # template hash → version of the spec that it was rendered from
        self.leader = "op-1"
        self.memories: dict[str, Memory] = {}
        self.history: list[Api] = []
        self.ours: set[int] = set()  # ordinals of the pool that are away by our doing
        self.highest_epoch = 0
        self.events: list[str] = []
        self._uids = 0

    # what people do

    def respec(self, **fields: object) -> None:
        spec = replace(self.cluster.spec, **fields)  # type: ignore[arg-type]  # any field of the spec
        self.cluster = replace(self.cluster, spec=spec, generation=self.cluster.generation + 1)

    def repool(self, **fields: object) -> None:
        pool = self.api.pools[POOL]
        spec = replace(pool.spec, **fields)  # type: ignore[arg-type]  # any field of the spec
        self.api.pools[POOL] = replace(pool, spec=spec, generation=pool.generation + 1)

    def cut(self, node: str) -> None:
        self.cut_off.add(node)
        self.api.nodes[node] = replace(self.api.nodes[node], not_ready_since_ms=self.now_ms)

    def heal(self, node: str) -> None:
        self.cut_off.discard(node)
        self.api.nodes[node] = replace(self.api.nodes[node], not_ready_since_ms=0)

    def fence(self, node: str) -> None:
        """The machine is off for good (out-of-service taint): its processes are dead, its pod objects go."""
        for name, pod in list(self.api.pods.items()):
            if pod.node == node:
                self._remove(name)
        self.ghosts = [g for g in self.ghosts if g.node != node]

    def delete_pod(self, name: str, *, force: bool = False, grace_s: int = GRACE_S) -> None:
        pod = self.api.pods[name]
        if force:
            process = self.processes.get(name)
            if process is not None and pod.component == GATEWAY:
                process.gone_by_ms = self.now_ms + DEADLINE_S * 1000
                known = self.topology.gateways.get(name) if self.topology is not None else None
                process.forgotten = known is None or known.uid != process.uid
                self.ghosts.append(process)
            self._remove(name)
        elif not pod.deleting:
            self.api.pods[name] = replace(pod, deleting=True, delete_at_ms=self.now_ms + grace_s * 1000)

    def lose_record(self, restored: Topology | None = None) -> None:
        """The ConfigMap is deleted, or set back to an older content. Written once a second at most, its epoch is not ahead
        of the clock by then."""
        self.tick(3)
        self.topology, self.version = restored, self.version + 1
        for ghost in self.ghosts:
            ghost.forgotten = True

    def outbid(self, slots: Iterable[int], ahead: int, *, lives: bool = False) -> None:
        """Somebody else takes slots in our store, whose record is `ahead` of ours; the process behind it lives, or not. Just
        so looks a record that is lost with every process, and rebuilt by a clock that is behind."""
        for slot in slots:
            self.fences[slot] = self.highest_epoch + ahead
            self.holders.pop(slot, None)
            if lives:
                self.rivals.add(slot)
        for process in self.processes.values():
            process.acquired -= {s for s in process.acquired if s not in self.holders}

    def other_leader(self) -> None:
        """The lease goes to another process; each start has a holder name of its own."""
        self.leader = f"op-{self._uid()}"

    # time

    def tick(self, seconds: int = 1) -> None:
        for _ in range(seconds):
            self.now_ms += 1000
            self._controllers()
            self._kubelets()
            self._run()
            self.history.append(self.api.copy())
            del self.history[:-8]

    def _uid(self) -> str:
        self._uids += 1
        return f"u{self._uids}"

    def _remove(self, name: str) -> None:
        self.api.pods.pop(name, None)
        self.processes.pop(name, None)

    def _controllers(self) -> None:
        for (kind, name), child in list(self.api.children.items()):
            if kind == "StatefulSet":
                component = GATEWAY if child.name in self.api.pools else STATE
                for ordinal in range(child.replicas):
                    if f"{name}-{ordinal}" not in self.api.pods:
                        self._create(f"{name}-{ordinal}", component, name, ordinal, child)
                for pod in list(self.api.pods.values()):
                    if pod.owner == name and pod.ordinal >= child.replicas:
                        self.delete_pod(pod.name)
            elif kind == "Deployment":
                self._deployment(name, child)
            elif kind == "Job" and self.migrates:
                self.api.children[(kind, name)] = replace(child, succeeded=1)
        for shard in list(self.api.shards.values()):
            if shard.deleting:
                del self.api.shards[shard.name]
                for kind in ("StateShard", "StatefulSet"):
                    self.api.children.pop((kind, shard.name), None)
                if f"{shard.name}-0" in self.api.pods:
                    self.delete_pod(f"{shard.name}-0", grace_s=1)

    def _deployment(self, name: str, child: Child) -> None:
        component = name.removeprefix("demo-")
        own = [p for p in self.api.pods.values() if p.component == component]
        fresh = [p for p in own if p.template_hash == child.template_hash and not p.deleting]
        old = [p for p in own if p.template_hash != child.template_hash and not p.deleting]
        if len(fresh) < child.replicas:
            self._create(f"{name}-{self._uid()}", component, "", -1, child)
        for pod in old if all(p.ready for p in fresh) and len(fresh) >= child.replicas else ():
            self.delete_pod(pod.name, grace_s=1)
        ready = sum(p.ready for p in fresh)
        self.api.children[("Deployment", name)] = replace(child, ready=ready, updated=len(fresh))

    def _create(self, name: str, component: str, owner: str, ordinal: int, child: Child) -> None:
        self.api.pods[name] = Pod(
            name, self._uid(), component, owner, ordinal, phase="Pending", running=False, created_ms=self.now_ms,
            template_hash=child.template_hash, restarted_at=child.restarted_at,
            version=self.versions.get(child.template_hash, ""),
        )  # fmt: skip

    def _kubelets(self) -> None:
        taken = {p.node for p in self.api.pods.values() if p.component == GATEWAY and p.node}
        for name, pod in list(self.api.pods.items()):
            if not pod.node and not pod.deleting:
                full = taken if pod.component == GATEWAY else set()
                usable = [
                    n.name for n in self.api.nodes.values()
                    if not n.unschedulable and not n.not_ready_since_ms and n.name not in full
                ]  # fmt: skip
                if usable:
                    pod = replace(
                        pod,
                        node=usable[crc32(name.encode()) % len(usable)] if pod.component != GATEWAY else usable[0],
                        unschedulable="",
                    )
                    taken |= {pod.node} if pod.component == GATEWAY else set()
                else:
                    pod = replace(pod, unschedulable=self._scheduler_words())
            elif pod.node and pod.node not in self.cut_off and not pod.running and not pod.deleting:
                if pod.template_hash not in self.bad_hashes:
                    at = Endpoint("10.0.0.1", 8900, 8901, "10.0.0.1:8909", 2) if pod.component == GATEWAY else None
                    pod = replace(pod, running=True, phase="Running", ip="10.0.0.1", endpoint=at)
                    self.processes[name] = Process(pod.uid, name, pod.component, pod.owner, pod.node)
            elif pod.deleting and pod.node not in self.cut_off:
                process = self.processes.get(name)
                if process is None or process.conns <= 0 or self.now_ms >= pod.delete_at_ms:
                    self._remove(name)
                    continue
            ready = pod.running and pod.node not in self.cut_off and self._serves(pod)
            self.api.pods[name] = replace(
                pod, ready=ready, ready_since_ms=pod.ready_since_ms if pod.ready and ready else self.now_ms
            )  # fmt: skip
            if ready and pod.component == GATEWAY and not pod.deleting:
                record = self.topology.gateways.get(name) if self.topology is not None else None
                if record is not None and record.uid == pod.uid and record.state == SERVING:
                    self.ours.discard(pod.ordinal)

    def _scheduler_words(self) -> str:
        """Why no node is left for a gateway: one reason per node, as kube-scheduler 1.37 says it."""
        why = [
            "were unschedulable" if n.unschedulable
            else "had untolerated taint(s)" if n.not_ready_since_ms
            else "didn't have free ports for the requested pod ports"
            for n in self.api.nodes.values()
        ]  # fmt: skip
        reasons = ", ".join(sorted(f"{why.count(each)} node(s) {each}" for each in set(why)))
        after = f"preemption: 0/{len(why)} nodes are available: {len(why)} Preemption is not helpful for scheduling."
        return f"0/{len(why)} nodes are available: {reasons}. no new claims to deallocate, {after}"

    def _serves(self, pod: Pod) -> bool:
        process = self.processes.get(pod.name)
        if process is None:
            return False
        if pod.component == GATEWAY:
            record = process.seen.gateways.get(pod.name) if process.seen is not None else None
            mine = record is not None and record.uid == pod.uid and record.state == SERVING
            return mine and process.lease is True and pod.gate is True
        return pod.component != MSG or process.lease is True

    def _run(self) -> None:
        self.ghosts = [g for g in self.ghosts if self.now_ms < g.gone_by_ms]
        alive = {p.uid for p in (*self.processes.values(), *self.ghosts)}
        for process in self.processes.values():
            newest = self.topology if process.node not in self.cut_off else None
            if newest is not None and (process.seen is None or newest.epoch > process.seen.epoch):
                process.seen = newest
            if process.component == STATE:
                self._state(process, alive)
            elif process.component in (GATEWAY, MSG):
                self._minter(process, alive)

    def _minter(self, process: Process, alive: set[str]) -> None:
        seen, pod = process.seen, self.api.pods[process.name]
        gateway = seen.gateways.get(process.name) if seen is not None else None
        record = gateway or (seen.msgs.get(process.name) if seen is not None else None)
        if record is not None and record.uid == process.uid:
            process.worker_id = record.worker_id
            holder = self.reservations.get(record.worker_id)
            if holder is None or holder == process.uid or holder not in alive:
                self.reservations[record.worker_id] = process.uid
            process.lease = self.reservations[record.worker_id] == process.uid
        if gateway is None or gateway.uid != process.uid:
            process.conns = max(0, process.conns - 1) if pod.deleting else process.conns
            return
        if gateway.state == SERVING and not pod.deleting:
            process.conns = CONNS if pod.ready else process.conns
        else:
            process.conns = max(0, process.conns - 1)
            if gateway.drain is not None:
                if self.now_ms >= gateway.drain.deadline_ms:
                    process.cut, process.conns = int(process.conns), 0
                if process.conns <= 0:
                    process.drained = gateway.drain.id

    def _state(self, process: Process, alive: set[str]) -> None:
        seen = process.seen
        shard = seen.shards.get(process.owner) if seen is not None else None
        mine: set[int] = set()
        if seen is not None and shard is not None and shard.uid == process.uid:
            mine = {s for s, r in enumerate(seen.owners) if r.shard == process.owner}
        for slot in process.acquired - mine:
            if self.holders.get(slot) == process.uid:
                del self.holders[slot]
        process.acquired &= mine
        for slot in mine - process.acquired:
            holder = self.holders.get(slot)
            epoch = seen.owner(slot).epoch if seen is not None else 0
            if epoch < self.fences.get(slot, 0):
                continue
            if holder is None or holder not in alive or holder == process.uid:
                self.holders[slot], self.fences[slot] = process.uid, epoch
                process.acquired.add(slot)
        process.acquired = {s for s in process.acquired if self.holders.get(s) == process.uid}

    # what an operator sees and does

    def reports(self) -> dict[str, Report]:
        found = {}
        for name, p in self.processes.items():
            if name in self.silent or p.node in self.cut_off:
                continue
            record = p.seen.gateways.get(name) if p.seen is not None else None
            drain = record.drain if record is not None and record.uid == p.uid else None
            told = None
            if drain is not None:
                phase = "drained" if p.drained == drain.id else "draining"
                told = DrainReport(drain.id, phase, int(p.conns), p.cut)
            above = self._outbid(p)
            found[name] = Report(
                p.uid, p.seen.epoch if p.seen is not None else 0, p.worker_id, p.lease, spans(p.acquired), told,
                int(p.conns), spans(above), max((self.fences[slot] for slot in above - self.rivals), default=0),
                spans(above - self.rivals),
            )  # fmt: skip
        return found

    def _outbid(self, process: Process) -> set[int]:
        """Slots that it cannot take: their fences are newer than what it has seen."""
        owners = process.seen.owners if process.component == STATE and process.seen is not None else ()
        above = {s for s, r in enumerate(owners) if r.shard == process.owner and r.epoch < self.fences.get(s, 0)}
        return above - process.acquired

    def snapshot(self, operator: str, *, stale: int = 0) -> Snapshot:
        """What `operator` sees, with caches `stale` ticks old."""
        api = self.history[-1 - stale] if 0 < stale < len(self.history) else self.api.copy()
        live = {n: self.api.pods[n].uid if n in self.api.pods else "" for n in doubts(self.topology, api.pods)}
        return Snapshot(
            self.now_ms, operator, self.cluster, api.pools, api.shards, self.topology,
            str(self.version) if self.topology is not None else "", api.pods, api.children, api.nodes, self.reports(), live,
            memory=self.memories.get(operator, Memory()),
        )  # fmt: skip

    def plan(self, operator: str | None = None, *, stale: int = 0) -> Plan:
        return one_pass(self.snapshot(operator or self.leader, stale=stale))

    def act(self, *, stale: int = 0, stop_after: int = 99) -> Plan:
        """One whole pass of the leader, or one that dies after `stop_after` orders."""
        plan = self.plan(stale=stale)
        self.carry_out(self.leader, plan, stop_after=stop_after)
        return plan

    def carry_out(self, operator: str, plan: Plan, *, stop_after: int = 99) -> None:
        orders = [*plan.applies, *([plan.write] if plan.write else []), *([plan.act] if plan.act else [])]
        died = stop_after < len(orders)
        done = 0
        try:
            for order in orders[:stop_after]:
                if operator != self.leader and order is not plan.write:
                    return  # its local lease has run out
                self._order(order)
                done += 1
        except Refused:
            died = True
        self.memories[operator] = Memory() if died else plan.memory
        written = done >= len(orders) - (plan.act is not None) and stop_after >= len(orders)
        self.events += [e.reason for e in plan.events if written] + [e.reason for e in plan.act_events if not died]

    def _order(self, order: object) -> None:
        if order.__class__.__name__ == "TopologyWrite":
            self._write(order.topology, order.version)  # type: ignore[attr-defined]  # named the line before
        elif isinstance(order, Apply):
            self._apply(order)
        elif isinstance(order, Gate):
            pod = self.api.pods.get(order.pod)
            if pod is None or pod.uid != order.uid:
                raise Refused
            self.api.pods[order.pod] = replace(pod, gate=order.serving)
        elif isinstance(order, Raise | Lower):
            key = ("StatefulSet", order.name)
            child = self.api.children.get(key)
            if child is None or child.uid != order.uid:
                raise Refused
            if isinstance(order, Lower):
                if child.resource_version != order.resource_version:
                    raise Refused
                for ordinal in range(order.replicas, child.replicas):
                    self._check_parting(f"{order.name}-{ordinal}")
                    self.ours.discard(ordinal)
            elif child.replicas > order.replicas:
                raise Refused  # raising only
            self.api.children[key] = replace(child, replicas=order.replicas, resource_version=self._uid())
        elif isinstance(order, DeletePod):
            pod = self.api.pods.get(order.name)
            if pod is None or pod.uid != order.uid:
                raise Refused
            if pod.component == GATEWAY:
                if pod.ready or self._record_state(order.name) in (DRAINING, LEAVING):
                    self.ours.add(pod.ordinal)
                if order.grace_s is None:
                    self._check_parting(order.name)
            self.delete_pod(order.name, grace_s=order.grace_s or GRACE_S)
        elif isinstance(order, Scale):
            child = self.api.children[("Deployment", order.name)]
            self.api.children[("Deployment", order.name)] = replace(child, replicas=order.replicas)
        elif isinstance(order, Remove):
            child = self.api.children.get((order.kind, order.name))
            if child is None or child.uid != order.uid:
                raise Refused
            del self.api.children[(order.kind, order.name)]
        elif isinstance(order, DeleteShard):
            shard = self.api.shards.get(order.name)
            if shard is None or shard.uid != order.uid:
                raise Refused
            assert self.topology is not None
            assert not self.topology.slots_of(order.name), "a shard with slots was deleted"
            self.api.shards[order.name] = replace(shard, deleting=True)
        else:
            raise AssertionError(order)

    def _record_state(self, name: str) -> str:
        record = self.topology.gateways.get(name) if self.topology is not None else None
        return record.state if record is not None else ""

    def _check_parting(self, name: str) -> None:
        """Nobody is cut without a drain: a gateway goes by our act only when it is empty, lost, or was forced."""
        process, record = self.processes.get(name), self.topology.gateways.get(name) if self.topology else None
        if process is None or process.node in self.cut_off or (record is not None and record.state == LOST):
            return
        late = record is not None and record.drain is not None and self.now_ms >= record.drain.deadline_ms
        assert process.conns <= 0 or late or self.api.pods[name].deleting, f"{name} goes with {process.conns} clients"

    def _apply(self, order: Apply) -> None:
        key = (order.kind, order.name)
        self.versions.setdefault(order.template_hash, self.cluster.spec.version)
        if order.kind == "GatewayPool":
            if order.name not in self.api.pools:
                self.api.pools[order.name] = Pool(order.name, self._uid(), 1, self.first_pool)
        elif order.kind == "StateShard" and order.name not in self.api.shards:
            self.api.shards[order.name] = Shard(order.name, self._uid(), 1, StateShardSpec(Ref("demo")))
        old = self.api.children.get(key)
        base = old or Child(order.kind, order.name, self._uid(), resource_version="1")
        self.api.children[key] = replace(
            base, input_hash=order.input_hash, template_hash=order.template_hash, resource_version=self._uid(),
            replicas=base.replicas if order.replicas is None else order.replicas,
        )  # fmt: skip

    def _write(self, topology: Topology, version: str) -> None:
        if version != (str(self.version) if self.topology is not None else ""):
            raise Refused
        old = self.topology
        self.check_write(old, topology)
        self.topology, self.version = topology, self.version + 1
        self.highest_epoch = topology.epoch

    # what must always hold

    def check_write(self, old: Topology | None, new: Topology) -> None:
        assert new.epoch > self.highest_epoch, "the epoch must rise"
        assert new.writer == self.leader, "who is not the leader wrote"
        if old is None:
            return
        for worker_id, rest in old.resting.items():
            if rest.until_ms > self.now_ms and new.writer == old.writer:
                told = worker_id in self._reported_ids()
                kept = new.resting.get(worker_id)
                assert told or (kept is not None and kept.until_ms >= rest.until_ms), (
                    f"the rest of {worker_id} was cut short"
                )
        before = {i: n for n, g in old.gateways.items() for i in [(g.uid, g.worker_id)]}
        for name, gateway in new.gateways.items():
            if (gateway.uid, gateway.worker_id) not in before:
                for ghost in self.ghosts:
                    assert ghost.forgotten or ghost.worker_id != gateway.worker_id or ghost.uid == gateway.uid, (
                        f"{name} got the id of a process that still runs"
                    )
        if old.move is not None and new.move is not None and new.move != old.move:
            if new.move.id == old.move.id:
                assert new.move.undo, "an open move may change by an undo only"
                assert not old.move.undo, "a move is undone once"
            else:
                slots = members(old.move.slots)
                taken = any(p.owner == old.move.owner and slots <= p.acquired for p in self.processes.values())
                assert taken, "a move was opened over an open one"
        for r in new.slots:
            assert r.epoch <= new.epoch

    def _reported_ids(self) -> Iterable[int | None]:
        return {p.worker_id for p in self.processes.values()}

    def check(self) -> None:
        """The invariants of every moment."""
        if self.topology is not None:
            ids: dict[int, str] = {}
            for name, process in self.processes.items():
                if process.worker_id is not None and process.lease:
                    assert ids.setdefault(process.worker_id, name) == name, "two living pods mint under one id"
            held: dict[int, str] = {}
            for process in self.processes.values():
                for slot in process.acquired if process.component == STATE else ():
                    assert held.setdefault(slot, process.uid) == process.uid, "a slot is served twice"
        if POOL in self.api.pools:
            ours = {o for o in self.ours if o < self.api.pools[POOL].spec.replicas}
            for name, gateway in (self.topology.gateways if self.topology is not None else {}).items():
                if (
                    gateway.state in (DRAINING, LEAVING)
                    and gateway.drain is not None
                    and gateway.drain.reason != "Evicted"
                ):
                    pod = self.api.pods.get(name)
                    unwanted = pod is not None and pod.ordinal >= self.api.pools[POOL].spec.replicas
                    if pod is not None and pod.uid == gateway.uid and not (unwanted and gateway.state == LEAVING):
                        ours.add(pod.ordinal)
                if gateway.state == LOST:
                    ours.discard(int(name.rpartition("-")[2]))  # what a lost node takes with it is nobody's doing
            sts = self.api.children.get(("StatefulSet", POOL))
            surplus = {p.ordinal for p in self.api.pods.values() if p.unschedulable and "were" not in p.unschedulable}
            ours = {o for o in ours if sts is not None and o < sts.replicas} - surplus
            most = self.api.pools[POOL].spec.rollout.max_unavailable
            assert len(ours) <= most, f"ordinals {sorted(ours)} are away by our doing, {most} may be"

    def acquired(self) -> int:
        return len(set().union(*(p.acquired for p in self.processes.values() if p.component == STATE), set()))

    def settle(self, rounds: int = 400) -> None:
        """Runs whole passes and time until a pass orders nothing; fails if that never comes."""
        quiet = 0
        for _ in range(rounds):
            plan = self.act()
            self.check()
            self.tick()
            self.check()
            quiet = quiet + 1 if not plan.applies and plan.write is None and plan.act is None else 0
            if quiet >= 3 and self.converged():
                return
        raise AssertionError(f"not settled: {self.topology}, {self.api.pods}, last plan {plan}")

    def converged(self) -> bool:
        if self.topology is None or self.acquired() != 1024 or self.topology.move is not None:
            return False
        if len(self.api.shards) != self.cluster.spec.state.shards and any(
            s.spec.weight for s in self.api.shards.values()
        ):
            return False
        pool = self.api.pools[POOL]
        pods = [p for p in self.api.pods.values() if p.component == GATEWAY]
        sts = self.api.children[("StatefulSet", POOL)]
        return (
            len(pods) == pool.spec.replicas == len(self.topology.gateways)
            and all(p.ready and p.template_hash == sts.template_hash for p in pods)
            and all(g.state == SERVING and g.homes for g in self.topology.gateways.values())
        )
