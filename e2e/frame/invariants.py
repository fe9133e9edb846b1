"""What must hold at every moment of every scenario, watched while it goes on: each version of the record.

    with Guard(kube, "demo") as guard:
        …
        guard.check()        raises with all that was found wrong since the last check; looks at the owners too

- slot ranges are disjoint and their union is 0..1023;
- no two members of the record share a worker_id, and none has one that still rests;
- a rest is never cut short, and the epoch only rises;
- gateways that we drain, and that should stay, are at most maxUnavailable per pool;
- each child's controller is the living resource of ours, by uid.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from typing import Any, Final

from kubernetes import config
from kubernetes.client.exceptions import ApiException
from kubernetes.dynamic import DynamicClient
from plato.api import names
from plato.topology.record import DRAINING, LEAVING, SLOTS, Topology
from plato.topology.stored import unpack
from urllib3.exceptions import HTTPError

from e2e.frame.kube import Kube, Object

WATCH_S: Final = 3
ORPHANS_S: Final = 15.0
"""Within so many seconds Kubernetes takes away what an owner that has just gone left."""
OUTSIDE: Final = ("Evicted",)
"""Reasons of drains that are not our doing."""
CHILDREN: Final = (
    "StatefulSet", "Deployment", "Job", "Service", "PodDisruptionBudget", "ServiceAccount", "Role", "RoleBinding",
    "ConfigMap",
)  # fmt: skip
OURS: Final = ("PlatoCluster", "GatewayPool", "StateShard")


def children(kube: Kube, cluster: str) -> dict[tuple[str, str], Object]:
    """The objects of a cluster but pods, {(kind, name): object}."""
    found = {(k, o["metadata"]["name"]): o for k in CHILDREN for o in kube.items(k, f"{names.LABEL_CLUSTER}={cluster}")}
    for kind in OURS:
        for o in kube.items(kind):
            its = o["metadata"]["name"] if kind == "PlatoCluster" else o["spec"]["clusterRef"]["name"]
            if its == cluster:
                found[kind, o["metadata"]["name"]] = o
    return found


def versions(kube: Kube, cluster: str) -> dict[tuple[str, str], str]:
    """{object: resourceVersion}."""
    return {key: o["metadata"]["resourceVersion"] for key, o in children(kube, cluster).items()}


class Guard:
    """Watches the record of one cluster in a thread."""

    def __init__(self, kube: Kube, cluster: str) -> None:
        self._kube = Kube(kube.kubeconfig, kube.namespace)  # of this thread's own
        self._cluster = cluster
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._found: list[str] = []
        self._last: Topology | None = None
        self.seen = 0
        """Versions of the record that were looked at."""
        self.drains: dict[int, tuple[str, str]] = {}
        """{id: (gateway, reason)} of all drains that were seen."""

    def __enter__(self) -> Guard:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(WATCH_S + 10)

    def check(self) -> None:
        """Raises AssertionError with what was found wrong since the last check."""
        orphans = self._owners()
        end = time.monotonic() + ORPHANS_S
        while orphans and time.monotonic() < end:  # those of an owner that has just gone are on their way out
            time.sleep(0.3)
            there = {o["metadata"]["uid"] for o in children(self._kube, self._cluster).values()}
            orphans = {uid: words for uid, words in orphans.items() if uid in there}
        found, self._found = [*self._found, *orphans.values()], []
        assert not found, "\n".join(found)

    def _run(self) -> None:
        client = DynamicClient(config.new_client_from_config(str(self._kube.kubeconfig)))  # type: ignore[no-untyped-call]  # the library has no types
        maps = client.resources.get(api_version="v1", kind="ConfigMap")
        name = names.topology_name(self._cluster)
        version = ""
        while not self._stop.is_set():
            try:
                words = {"name": name, "timeout": WATCH_S, **({"resource_version": version} if version else {})}
                events: Any = client.watch(maps, self._kube.namespace, **words)  # type: ignore[no-untyped-call]  # the library has no types
                for event in events:
                    version = event["raw_object"]["metadata"]["resourceVersion"]
                    if event["type"] in ("ADDED", "MODIFIED"):
                        self._look(unpack(event["raw_object"]))
            except (ApiException, HTTPError, OSError):  # HTTPError: a connection that broke in the middle
                version = ""
                self._stop.wait(0.2)  # not at once again; and not longer than the test

    def _look(self, new: Topology) -> None:
        old = self._last
        if old is not None and new.epoch == old.epoch:
            return  # a watch that begins shows the present one again
        self._last = new
        self.seen += 1
        now_ms = int(time.time() * 1000)
        self._found += list(broken(new))
        if old is not None:
            if new.epoch < old.epoch:
                self._found.append(f"the epoch fell from {old.epoch} to {new.epoch}")
            for worker_id, rest in old.resting.items():
                kept = new.resting.get(worker_id)
                if rest.until_ms > now_ms and (kept is None or kept.until_ms < rest.until_ms):
                    self._found.append(
                        f"epoch {new.epoch}: the rest of {worker_id} was cut short by {rest.until_ms - now_ms} ms"
                    )
        away: Counter[str] = Counter()
        for name, gateway in new.gateways.items():
            if gateway.drain is None or gateway.state not in (DRAINING, LEAVING):
                continue
            self.drains[gateway.drain.id] = (name, gateway.drain.reason)
            if gateway.drain.reason not in OUTSIDE:
                away[name.rpartition("-")[0]] += 1
        for pool, count in away.items():
            self._allowed(new, pool, count)

    def _allowed(self, record: Topology, pool: str, count: int) -> None:
        resource = self._kube.get("GatewayPool", pool)
        if resource is None:
            return
        most, wanted = resource["spec"]["rollout"]["maxUnavailable"], resource["spec"]["replicas"]
        going = sum(
            int(name.rpartition("-")[2]) >= wanted and g.state == LEAVING and g.drain is not None
            for name, g in record.gateways.items()
            if name.rpartition("-")[0] == pool
        )
        if count - going > most:
            self._found.append(f"epoch {record.epoch}: {count - going} gateways of {pool} are drained, {most} may be")

    def _owners(self) -> dict[str, str]:
        """{uid: words} of children whose controller is none of ours that lives."""
        found = children(self._kube, self._cluster)
        living = {o["metadata"]["uid"] for (kind, _), o in found.items() if kind in OURS}
        wrong: dict[str, str] = {}
        for key, made in found.items():
            owner = next((o for o in made["metadata"].get("ownerReferences") or () if o.get("controller")), None)
            if key[0] != "PlatoCluster" and (owner is None or owner["uid"] not in living):
                wrong[made["metadata"]["uid"]] = f"{key} is controlled by {owner}"
        return wrong


def broken(record: Topology) -> list[str]:
    """What is wrong with one record."""
    found, expected = [], 0
    for r in sorted(record.slots, key=lambda r: r.first):
        if r.first != expected:
            found.append(f"epoch {record.epoch}: slots {expected} to {r.first - 1} have no owner, or two")
        expected = r.last + 1
    if expected != SLOTS:
        found.append(f"epoch {record.epoch}: the ranges end at {expected - 1}")
    ids = Counter([*(g.worker_id for g in record.gateways.values()), *(m.worker_id for m in record.msgs.values())])
    found += [f"epoch {record.epoch}: {n} members have worker id {i}" for i, n in ids.items() if n > 1]
    now_ms = int(time.time() * 1000)
    found += [
        f"epoch {record.epoch}: worker id {i} is used and rests" for i in ids
        if i in record.resting and record.resting[i].until_ms > now_ms
    ]  # fmt: skip
    return found
