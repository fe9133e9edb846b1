"""Carries a plan out from top to bottom: applies, the record, the one act. Stops at the first conflict or doubt.

What of the applies the API server refuses for what it says (quota, rights, a field, a policy), or what cannot be rendered,
is put down as a refusal, shown by a condition and tried again later; it stops nobody else's, and never the record. Conflict
or no answer means that the picture was old or is unknown: the rest of the plan is dropped, as it is where another write is
refused. Each write needs a valid Lease, and carries a precondition or is one that any order of repeats leaves the same.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final

from plato.api.names import GATE_SERVING, GROUP, LABEL_CLUSTER, VERSION, topology_name
from plato.runtime import logs
from plato.topology.stored import TooLargeError, pack

from plato_operator import manifests, metrics
from plato_operator.core.orders import Act, Apply, DeletePod, Gate, Lower, Plan, Raise, Remove, Scale, TopologyWrite
from plato_operator.kube import MANAGER, Kube, KubeError, Object, Refused
from plato_operator.lease import Lease
from plato_operator.observe import View
from plato_operator.reading import controller, labels

Change = Apply | Raise | Scale | Remove

FIRST_RETRY_S: Final = 5.0
LAST_RETRY_S: Final = 60.0

_log = logs.get("apply")


class Taken(Exception):
    """An object of that name is there and is somebody else's."""


class Stopped(Exception):
    """The plan was not carried out to its end; look again. reason: that of a condition, empty for what may be gone by
    then. written: the record was, so the plan's events have happened."""

    def __init__(self, words: str, reason: str = "") -> None:
        super().__init__(words)
        self.reason = reason
        self.written = False


@dataclass(slots=True)
class _Refusal:
    """What could not be done to a child: with which inputs, why, when to try again, after how long the time after that."""

    inputs: str
    reason: str
    message: str
    retry_at: float
    wait_s: float


class Hands:
    """What carries out the plans of one cluster; remembers what was refused."""

    def __init__(
        self, kube: Kube, lease: Lease, namespace: str, cluster: str, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._kube, self._lease, self._clock = kube, lease, clock
        self._namespace, self._cluster = namespace, cluster
        self._refused: dict[tuple[str, str, str], _Refusal] = {}
        """By kind, name and what was to be done."""

    @property
    def refusals(self) -> Mapping[tuple[str, str], tuple[str, str]]:
        """{(kind, name): (reason, message)} of what is refused at present."""
        return {key[:2]: (r.reason, r.message) for key, r in self._refused.items()}

    async def carry_out(self, plan: Plan, view: View) -> bool:
        """Does it all. Returns whether anything was tried. Raises Stopped, LeaseLost."""
        wanted = {_key(order) for order in plan.applies if not isinstance(order, Gate)}
        for key in self._refused.keys() - wanted:
            del self._refused[key]  # nobody wants it any more, or it is there
        tried = False
        for order in plan.applies:
            self._lease.check()
            if isinstance(order, Gate):
                tried = True
                await self._do("Pod", order.pod, self._gate(order))
            else:
                tried |= await self._change(order, view)
        if plan.write is not None:
            tried = True
            await self._write(plan.write, view)
        if plan.act is not None:
            tried = True
            self._lease.check()
            try:
                await self._act(plan.act, view)
            except Stopped as e:
                e.written = True
                raise
        return tried

    async def _do(self, kind: str, name: str, call: Awaitable[object]) -> None:
        """A write with a precondition. Raises Stopped at any refusal."""
        try:
            await call
        except KubeError as e:
            metrics.REFUSALS.labels(kind).inc()
            lasting = isinstance(e, Refused) and not e.passing and e.status != 404  # 404: it went meanwhile
            raise Stopped(f"{kind} {name}: {e}", refusal(e)[0] if isinstance(e, Refused) and lasting else "") from e
        metrics.WRITES.labels(kind).inc()

    async def _change(self, order: Change, view: View) -> bool:
        """Applies, scales or removes a child. Returns whether it was tried: what was refused waits longer each time."""
        key = _key(order)
        kind, name, _ = key
        inputs = order.input_hash if isinstance(order, Apply) else repr(order)
        old = self._refused.get(key)
        same = old is not None and old.inputs == inputs
        if old is not None and same and self._clock() < old.retry_at:
            return False
        try:
            await self._send(order, view)
        except manifests.OwnerMissingError as e:
            _log.debug("waits for its owner", kind=kind, name=name, owner=str(e))
            return False
        except manifests.OverlayError as e:
            reason, message = "InvalidOverlay", str(e)
        except Taken as e:
            reason, message = "NameTaken", str(e)
        except KubeError as e:
            gone = isinstance(e, Refused) and e.status == 404 and not isinstance(order, Apply)
            if not isinstance(e, Refused) or e.passing or gone:
                metrics.REFUSALS.labels(kind).inc()
                raise Stopped(f"{kind} {name}: {e}") from e
            reason, message = refusal(e)
        else:
            self._refused.pop(key, None)
            metrics.WRITES.labels(kind).inc()
            return True
        wait_s = min(old.wait_s * 2, LAST_RETRY_S) if old is not None and same else FIRST_RETRY_S
        self._refused[key] = _Refusal(inputs, reason, message, self._clock() + wait_s, wait_s)
        metrics.REFUSALS.labels(kind).inc()
        if old is None or not same or old.reason != reason:
            _log.warning("refused", cluster=self._cluster, kind=kind, name=name, reason=reason, why=message)
        return True

    async def _send(self, order: Change, view: View) -> None:
        if isinstance(order, Apply):
            await self._render_and_send(order, view)
            _log.info("applied", cluster=self._cluster, kind=order.kind, name=order.name, hash=order.input_hash)
        elif isinstance(order, Raise):
            await self._scale(order.name, order.uid, order.replicas, view)
        elif isinstance(order, Scale):
            body: Object = {"metadata": {"uid": order.uid}, "spec": {"replicas": order.replicas}}
            await self._kube.merge("Deployment", self._namespace, order.name, body)
        else:
            _log.info("removes", cluster=self._cluster, kind=order.kind, name=order.name)
            await self._kube.delete(order.kind, self._namespace, order.name, uid=order.uid)

    async def _render_and_send(self, order: Apply, view: View) -> None:
        made = manifests.render(order, view.snapshot)
        if order.kind in manifests.CREATED_ONCE:
            try:
                await self._kube.create(order.kind, self._namespace, made)
            except Refused as e:
                if e.reason != "AlreadyExists":
                    raise
                if order.kind != "Secret":  # one that somebody else made is as good as ours
                    await self._check_owner(order, made)
            return
        if (order.kind, order.name) not in view.objects:
            await self._check_owner(order, made)  # an apply by force would take it over, and delete it with the cluster
        first = manifests.initial(order, view.snapshot)
        if first is not None:
            await self._kube.apply(order.kind, self._namespace, order.name, first, manifests.INITIAL_FIELD_MANAGER)
        await self._kube.apply(order.kind, self._namespace, order.name, made, manifests.FIELD_MANAGER)

    async def _check_owner(self, order: Apply, made: Object) -> None:
        """Raises Taken if an object of this name is there that neither carries our label nor has our owner."""
        found = await self._kube.get(order.kind, self._namespace, order.name)
        self._lease.check()  # the answer may have taken as long as a Lease is valid
        if found is None:
            return
        owner = made["metadata"]["ownerReferences"][0]["uid"]
        if labels(found).get(LABEL_CLUSTER) != self._cluster and controller(found) != owner:
            raise Taken(
                f"one of this name is there and is not this PlatoCluster's: remove it, or give the {order.owner_kind}"
                " another name"
            )

    async def _scale(self, name: str, uid: str, replicas: int, view: View) -> Object:
        """By a patch, not by an apply: an apply without the rest of the object would take the rest away."""
        child = view.snapshot.children["StatefulSet", name]
        metadata = {"uid": uid, "resourceVersion": child.resource_version}
        return await self._kube.merge(
            "StatefulSet", self._namespace, name, {"metadata": metadata, "spec": {"replicas": replicas}}
        )

    async def _gate(self, order: Gate) -> Object:
        condition = {
            "type": GATE_SERVING, "status": "True" if order.serving else "False",
            "reason": "Serving" if order.serving else "NotServing",
            "lastTransitionTime": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        }  # fmt: skip
        body: Object = {"metadata": {"uid": order.uid}, "status": {"conditions": [condition]}}
        return await self._kube.merge("Pod", self._namespace, order.pod, body, "status")

    async def _write(self, write: TopologyWrite, view: View) -> None:
        """The record, if it still has the version that the plan saw."""
        name, cluster = topology_name(self._cluster), view.snapshot.cluster
        try:
            packed = pack(write.topology)
        except TooLargeError as e:
            raise Stopped(str(e), "TooLarge") from e
        body: Object = {
            "apiVersion": "v1", "kind": "ConfigMap",
            "metadata": {
                "name": name, "namespace": self._namespace,
                "labels": {LABEL_CLUSTER: self._cluster, "app.kubernetes.io/managed-by": MANAGER},
                "ownerReferences": [{
                    "apiVersion": f"{GROUP}/{VERSION}", "kind": "PlatoCluster", "name": cluster.name, "uid": cluster.uid,
                    "controller": True, "blockOwnerDeletion": True,
                }],
            },
            **packed,
        }  # fmt: skip
        self._lease.check()
        if write.version:
            body["metadata"]["resourceVersion"] = write.version
            await self._do("ConfigMap", name, self._kube.replace("ConfigMap", self._namespace, name, body))
        else:
            await self._do("ConfigMap", name, self._kube.create("ConfigMap", self._namespace, body))

    async def _act(self, act: Act, view: View) -> None:
        if isinstance(act, Lower):
            _log.info("lowers", cluster=self._cluster, name=act.name, replicas=act.replicas, why=act.why)
            await self._do("StatefulSet", act.name, self._scale(act.name, act.uid, act.replicas, view))
            return
        kind = "Pod" if isinstance(act, DeletePod) else "StateShard"
        seen = view.objects.get((kind, act.name), {}).get("metadata", {})
        version = str(seen.get("resourceVersion", "")) if seen.get("uid") == act.uid else ""
        grace_s = act.grace_s if isinstance(act, DeletePod) else None
        _log.info(
            "deletes", cluster=self._cluster, kind=kind, name=act.name, why=getattr(act, "why", "no slots are left")
        )
        await self._do(
            kind, act.name,
            self._kube.delete(kind, self._namespace, act.name, uid=act.uid, version=version, grace_s=grace_s),
        )  # fmt: skip


def refusal(e: Refused) -> tuple[str, str]:
    """(reason, message) of a condition for an apply that the API server refused."""
    if e.status == 403 and "exceeded quota" in e.message:
        return "QuotaExceeded", e.message
    if e.status == 403 and "admission webhook" not in e.message:
        return "Forbidden", e.message or str(e)
    if e.status == 404:
        return "ApplyRefused", f"the API server does not know this kind or namespace: {e.message}"
    return "ApplyRefused", e.message or str(e)


def _key(order: Change) -> tuple[str, str, str]:
    """(kind, name, what is done to it)."""
    kinds = {"Raise": "StatefulSet", "Scale": "Deployment"}
    what = order.__class__.__name__
    return (order.kind if isinstance(order, (Apply, Remove)) else kinds[what]), order.name, what
