"""The loops: one over the namespaces, which finds clusters, and one per cluster, which passes over it again and again.

A pass: look → plan → carry out → statuses, at most one per second, at the latest when the plan asked for it; a ring of a
watch makes it sooner. Clusters share nothing but the Lease: what fails in one is said in its conditions and delays no other.
After a plan that was not carried out, or any error, nothing is remembered: the next pass starts from what is there. What
the API server refuses for the moment is told by a condition only when it has gone on for PATIENCE passes.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import aiohttp
from plato.api.names import ANNOTATION_PUBLIC_ADDRESS
from plato.runtime import logs
from plato.topology.record import DRAINING, LEAVING

from plato_operator import crds, metrics, reading
from plato_operator.apply import Hands, Stopped
from plato_operator.core.orders import Event, Plan
from plato_operator.core.plan import one_pass
from plato_operator.core.snapshot import Memory, Snapshot
from plato_operator.events import Events
from plato_operator.kube import Kube, KubeError, Object, Refused
from plato_operator.lease import Lease, LeaseLost
from plato_operator.observe import BadResource, Observer, View
from plato_operator.probes import Health
from plato_operator.reports import Reports
from plato_operator.statuses import Status, Statuses

PACE_S: Final = 1.0
LATEST_S: Final = 10.0
REFUSED_S: Final = 5.0
"""A plan whose every order waits after a refusal is looked at again after this."""
PASS_S: Final = 60.0
FAILED_S: Final = (1.0, 2.0, 5.0, 10.0)
PATIENCE: Final = 4
"""Passes; 18 s, where no ring makes them sooner."""
CRDS_S: Final = 60.0

_log = logs.get("reconcile")


@dataclass(frozen=True, slots=True)
class Means:
    """What all clusters work with."""

    kube: Kube
    session: aiohttp.ClientSession
    lease: Lease
    health: Health
    nodes: bool
    node_cidrs: tuple[str, ...] = ()


class Loop:
    """The passes over one cluster."""

    def __init__(self, means: Means, namespace: str, name: str) -> None:
        self._means, self.namespace, self.name = means, namespace, name
        self._label = f"cluster {namespace}/{name}"
        reports = Reports(means.session, namespace, name)
        self._observer = Observer(
            means.kube, reports, namespace, name, me=means.lease.me, nodes=means.nodes, node_cidrs=means.node_cidrs
        )
        self._hands = Hands(means.kube, means.lease, namespace, name)
        self._statuses = Statuses(means.kube)
        self._events = Events(means.kube, namespace, means.lease.me)
        self._memory, self._uid = Memory(), ""
        self._rung = asyncio.Event()
        self._fails = 0
        self._told = ""
        """Why it is stalled, by the last log line."""

    def ring(self) -> None:
        """Something changed: look soon."""
        self._rung.set()

    async def run(self) -> None:
        """Passes until the cluster is gone. Raises LeaseLost."""
        logs.bind(
            namespace=self.namespace, cluster=self.name
        )  # `kubectl plato report` leaves other clusters' lines out
        self._means.health.expect(self._label)
        try:
            while True:
                self._means.lease.check()
                started = time.monotonic()
                self._rung.clear()
                wait_s = await self._guarded()
                if wait_s is None:
                    _log.info("the cluster is gone", cluster=self.name, namespace=self.namespace)
                    return
                least_s = started + (PACE_S if wait_s else 0.1) - time.monotonic()
                if least_s > 0:
                    await asyncio.sleep(least_s)
                await _rung(self._rung, started + wait_s - time.monotonic())
        finally:
            self._observer.close()
            self._means.health.drop(self._label)
            metrics.forget(self.namespace, self.name)

    async def _guarded(self) -> float | None:
        """One pass whose errors are this cluster's only. Returns in how many seconds the next one is due; None: never."""
        obj: Object | None = None
        try:
            with metrics.PASS_SECONDS.time():
                async with asyncio.timeout(PASS_S):
                    obj = await self._means.kube.get("PlatoCluster", self.namespace, self.name)
                    if obj is None:
                        return None
                    if self._uid != (uid := reading.meta(obj)["uid"]):
                        self._uid, self._memory = uid, Memory()
                    wait_s = await self._pass(obj)
        except Stopped as e:
            return await self._refused(obj, e.reason, str(e))
        except BadResource as e:
            return await self._stalled(obj, "BadResource", str(e))
        except Refused as e:
            lasting = "Forbidden" if e.status == 403 else "ApiRefused"
            return await self._refused(obj, "" if e.passing else lasting, str(e))
        except (KubeError, TimeoutError) as e:
            _log.warning(
                "no look at the cluster", cluster=self.name, why=str(e) or f"the pass took over {PASS_S:.0f} s"
            )
            self._means.health.trouble(self._label, str(e) or "the pass took too long")
            return self._failed("failed", None)
        except LeaseLost:
            raise
        except Exception as e:
            _log.exception("the pass failed", cluster=self.name)
            return await self._stalled(obj, "PassFailed", f"{type(e).__name__}: {e}")
        self._fails, self._told = 0, ""
        metrics.PASSES.labels(self.namespace, self.name, "done").inc()
        self._means.health.sign(self._label)
        self._means.health.trouble(self._label, "")
        return wait_s

    async def _pass(self, obj: Object) -> float:
        view = await self._observer.look(obj, self._memory, self._hands.refusals)
        plan = one_pass(view.snapshot)
        before = dict(self._hands.refusals)
        try:
            tried = await self._hands.carry_out(plan, view)
        except Stopped as e:
            await self._tell(plan.events if e.written else (), view)
            raise
        self._memory = plan.memory
        await self._tell((*plan.events, *plan.act_events, *addressless(view.snapshot)), view)
        self._count(plan, view)
        wait_s = min(plan.requeue_ms / 1000, LATEST_S)
        if plan.applies and not tried:
            wait_s = max(wait_s, REFUSED_S)
        if before != self._hands.refusals:
            wait_s = min(wait_s, PACE_S)  # the condition that tells it
        status_s = await self._write_statuses(plan, view)
        return min(wait_s, max(status_s, PACE_S)) if status_s else wait_s

    async def _tell(self, events: Iterable[Event], view: View) -> None:
        for event in events:
            await self._events.tell(event, view.objects)

    async def _write_statuses(self, plan: Plan, view: View) -> float:
        """Returns in how many seconds a status that had to wait is due; 0: none waits."""
        now_ms = view.snapshot.now_ms
        due: list[tuple[str, str, Status]] = []
        if plan.cluster_status is not None:
            due.append(("PlatoCluster", self.name, plan.cluster_status))
        due += [("GatewayPool", name, status) for name, status in plan.pool_status.items()]
        due += [("StateShard", name, status) for name, status in plan.shard_status.items()]
        waits = []
        for kind, name, status in due:
            obj = view.objects.get((kind, name))
            if obj is not None:
                self._means.lease.check()
                waits.append(await self._statuses.write(kind, obj, status, now_ms))
        self._statuses.keep(reading.meta(obj).get("uid", "") for obj in view.objects.values())
        return min([wait for wait in waits if wait > 0], default=0)

    def _count(self, plan: Plan, view: View) -> None:
        labels = (self.namespace, self.name)
        topology = plan.write.topology if plan.write is not None else view.snapshot.topology
        if topology is not None:
            metrics.DRAINS.labels(*labels).set(sum(g.state in (DRAINING, LEAVING) for g in topology.gateways.values()))
            metrics.MOVES.labels(*labels).set(topology.move is not None)
            old = view.snapshot.topology
            if old is not None and topology.move is not None and (old.move is None or old.move.id != topology.move.id):
                metrics.MOVES_OPENED.labels(*labels).inc()
        started = sum(event.reason == "DrainStarted" for event in plan.events)
        if started:
            metrics.DRAINS_STARTED.labels(*labels).inc(started)
        if plan.cluster_status is not None:
            ready = any(c.type == "Ready" and c.status == "True" for c in plan.cluster_status.conditions)
            metrics.READY.labels(*labels).set(ready)

    def _failed(self, result: str, seen: Object | None) -> float:
        """A pass that ended early. It is a life-sign only if the API server answered."""
        metrics.PASSES.labels(self.namespace, self.name, result).inc()
        if seen is not None:
            self._means.health.sign(self._label)
        wait_s = FAILED_S[min(self._fails, len(FAILED_S) - 1)]
        self._fails += 1
        return wait_s

    async def _refused(self, obj: Object | None, reason: str, message: str) -> float:
        """The API server did not do what was asked. reason is empty for what may pass by itself, which is told late."""
        if reason or self._fails >= PATIENCE:
            return await self._stalled(obj, reason or "ApiRefused", message)
        self._memory = Memory()
        _log.info("not carried out", cluster=self.name, why=message)
        return self._failed("refused", obj)

    async def _stalled(self, obj: Object | None, reason: str, message: str) -> float:
        """Tells why nothing is done: by a condition; where that is refused too, by a log line and in the end by dying."""
        self._memory = Memory()
        self._means.health.trouble(self._label, message)
        if message != self._told:
            _log.error("stalled", cluster=self.name, namespace=self.namespace, reason=reason, why=message)
            self._told = message
        told = None
        if obj is not None:
            try:
                self._means.lease.check()
                await self._statuses.stalled("PlatoCluster", obj, reason, message, int(time.time() * 1000))
                told = obj
            except KubeError as e:
                _log.error("the condition was not written", cluster=self.name, why=str(e))
        metrics.READY.labels(self.namespace, self.name).set(0)
        return self._failed("failed", told)


def addressless(snap: Snapshot) -> Iterator[Event]:
    """What to tell of gateways that run and are not admitted, since no address is known that clients could be told."""
    for name, pod in snap.pods.items():
        pool = snap.pools.get(pod.owner)
        if pod.endpoint is None or pod.endpoint.ip or not pod.ip or not pod.running or pool is None:
            continue
        told = pool.spec.public_address
        lacks = {
            "NodeExternalIP": f"node {pod.node} has no ExternalIP",
            "NodeAnnotation": f"node {pod.node} has no annotation {ANNOTATION_PUBLIC_ADDRESS}",
        }.get(told, "the pod has no host address")
        why = lacks if snap.nodes is not None else "the operator may not read nodes (rbac.nodes of the chart)"
        message = f"publicAddress of {pool.name} is {told}, but {why}: no client is sent here"
        yield Event("Pod", name, "Warning", "AddressUnknown", message)


async def _rung(bell: asyncio.Event, within_s: float) -> bool:
    """Waits for a ring. Not by asyncio.wait_for: in Python 3.11 that loses a cancellation that comes with the ring."""
    try:
        async with asyncio.timeout(max(0.0, within_s)):
            await bell.wait()
    except TimeoutError:
        return False
    return True


class Clusters:
    """All clusters of the namespaces that are served."""

    def __init__(self, means: Means, namespaces: Sequence[str]) -> None:
        self._means = means
        self._namespaces = [""] if "*" in namespaces else list(namespaces)
        self._loops: dict[tuple[str, str], Loop] = {}
        self._tasks: dict[tuple[str, str], asyncio.Task[None]] = {}
        self._shut: set[str] = set()
        """Namespaces that forbid us to list their PlatoClusters, while others do not: they were deleted, with our role."""
        self._age_known = False
        """Whether the last answer about the CRDs was one; while it was not, no cluster is told that they are too old."""
        self._listed: list[str] = []
        """Of which the last round knows every PlatoCluster."""
        self._strays = Statuses(means.kube)
        self._rung = asyncio.Event()

    def ring(self, namespace: str, name: str) -> None:
        """Looks at a cluster soon, at all for empty texts; at the list too if it is a new one."""
        if not name:
            for loop in self._loops.values():
                loop.ring()
        elif (found := self._loops.get((namespace, name))) is not None:
            found.ring()
        else:
            self._rung.set()

    async def run(self) -> None:
        """Finds clusters, for as long as the process lives. Raises LeaseLost."""
        self._means.health.expect("round")
        try:
            await self._find()
        finally:
            self._means.health.drop("round")

    async def _find(self) -> None:
        checked_at = float("-inf")
        lacking = ""
        async with asyncio.TaskGroup() as group:
            while True:
                self._rung.clear()
                if lacking or time.monotonic() - checked_at >= CRDS_S:
                    lacking = await self._lacking(lacking)
                    checked_at = time.monotonic()
                    self._means.health.trouble("start", lacking)
                found = await self._round()
                for key in self._loops:
                    if key[0] in self._shut:
                        self._tasks[key].cancel()
                for namespace, name in found:
                    if lacking:
                        if self._age_known:
                            await self._refuse(found[namespace, name], lacking)
                    elif (namespace, name) not in self._loops:
                        loop = self._loops[namespace, name] = Loop(self._means, namespace, name)
                        made = group.create_task(self._one(loop), name=f"{namespace}/{name}")
                        self._tasks[namespace, name] = made
                if not lacking:
                    await self._tell_strays(found)
                if lacking and self._loops:
                    raise RuntimeError(f"the CRDs were replaced: {lacking}")
                if await _rung(self._rung, LATEST_S):
                    await asyncio.sleep(0.2)  # rings come in bursts

    async def _one(self, loop: Loop) -> None:
        try:
            await loop.run()
        finally:
            self._loops.pop((loop.namespace, loop.name), None)
            self._tasks.pop((loop.namespace, loop.name), None)

    async def _lacking(self, before: str) -> str:
        """Whether the CRDs fit. While that cannot be asked, the last answer stands; the first has to come."""
        try:
            found = await crds.lacking(self._means.kube)
        except KubeError as e:
            self._age_known = False
            _log.warning("the CRDs' age is not known", why=str(e))
            return before if self._loops else f"the CRDs' age is not known: {e}"
        self._age_known = True
        if found and found != before:
            _log.error("does not run", why=found)
        return found

    async def _round(self) -> dict[tuple[str, str], Object]:
        """The PlatoClusters that are there. A namespace that cannot be listed does not stop the others: one that was deleted
        forbids it from then on, and no restart helps against that."""
        found: dict[tuple[str, str], Object] = {}
        words, shut = [], set()
        self._listed = []
        for namespace in self._namespaces:
            try:
                for obj in await self._means.kube.list("PlatoCluster", namespace):
                    meta = reading.meta(obj)
                    found[meta["namespace"], meta["name"]] = obj
                self._listed.append(namespace)
            except KubeError as e:
                words.append(str(e))
                if isinstance(e, Refused) and e.status == 403:
                    shut.add(namespace)
        self._shut = shut if len(shut) < len(self._namespaces) else set()
        if words:
            _log.warning("not all clusters are known", why="; ".join(words))
        if len(words) == len(self._shut):
            self._means.health.sign("round")
        self._means.health.trouble("round", "; ".join(words))
        return found

    async def _tell_strays(self, found: Mapping[tuple[str, str], Object]) -> None:
        """Says on GatewayPools and StateShards that their clusterRef names nobody: no loop looks at them. What a
        PlatoCluster made goes with it."""
        uids: list[str] = []
        for namespace in self._listed:
            for kind in ("GatewayPool", "StateShard"):
                try:
                    for obj in await self._means.kube.list(kind, namespace):
                        meta, of = reading.meta(obj), reading.named(kind, obj)
                        if (meta["namespace"], of) in found or reading.controller(obj) or "deletionTimestamp" in meta:
                            continue
                        words = f"there is no PlatoCluster {of} in this namespace: create it, or delete this {kind}"
                        self._means.lease.check()
                        uids.append(meta["uid"])
                        await self._strays.stalled(kind, obj, "NoCluster", words, int(time.time() * 1000))
                except KubeError as e:
                    _log.warning("not told whose cluster is missing", kind=kind, why=str(e))
        self._strays.keep(uids)

    async def _refuse(self, obj: Object, why: str) -> None:
        """Says on a cluster that we do not run it."""
        try:
            self._means.lease.check()
            await Statuses(self._means.kube).stalled("PlatoCluster", obj, "CRDTooOld", why, int(time.time() * 1000))
        except KubeError as e:
            _log.warning("the condition was not written", why=str(e))
