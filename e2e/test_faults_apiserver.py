"""Reported faults of operators on a real API server with its controllers; pods are objects, what runs in them is played.

A row's number is in its test's name; after each, the invariants are looked at (frame/invariants.py). One cluster serves all
tests of this module but those that begin or end one.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import pytest

from e2e.frame import invariants
from e2e.frame.invariants import Guard
from e2e.frame.kube import Kube, Object, wait_for
from e2e.frame.objects import CONNECTIONS, NOWHERE, ObjectPods
from e2e.frame.process import Operator
from e2e.testbed.audit import writes
from e2e.testbed.layout import Layout

NAMESPACE = "e2e-faults-api"
ROOT: Final = Path(__file__).resolve().parents[1]
DEMO: Final = "demo"
POOL: Final = "demo-edge"
PORTS: Final = {"tcp": 9500, "ws": 9501, "admin": 9509}
DRAIN: Final = {"pacePerSecond": 10, "deadlineSeconds": 10, "settleSeconds": 1}
HOLD: Final = "faults.example.com/hold"

pytestmark = [pytest.mark.apiserver, pytest.mark.timeout(240)]


def cluster(name: str, **spec: Any) -> Object:
    """A PlatoCluster whose pods are objects only."""
    made: Object = {
        "version": "0.1.0", "database": {"uri": {"name": "db"}, "schema": name.replace("-", "_")},
        "store": {"url": {"name": "kv"}, "keyPrefix": f"{name}:"},
        "auth": {"guests": True}, "state": {**NOWHERE, "slotsPerMove": 16, "moveIntervalSeconds": 1},
        "msg": NOWHERE, "ipconfig": NOWHERE,
        "gateways": {
            "initialReplicas": 3,
            "template": {**NOWHERE, "ports": PORTS, "drain": DRAIN, "rollout": {"minReadySeconds": 0}},
        },
        **spec,
    }  # fmt: skip
    return {"apiVersion": "plato.im/v1alpha1", "kind": "PlatoCluster", "metadata": {"name": name}, "spec": made}


def prepare(kube: Kube) -> None:
    """The definitions and the Secrets that each cluster names."""
    kube.define()
    kube.secret("db", {"uri": "postgresql://nowhere"})
    kube.secret("kv", {"url": "redis://nowhere"})


@dataclass
class Stage:
    """The cluster of this module, and who rules it. The operator's process may be another one after a test."""

    kube: Kube
    folder: Path
    pods: ObjectPods
    guard: Guard
    operator: Operator

    def start(self) -> None:
        """Another process of the operator, which takes the Lease at once."""
        self.operator = Operator(self.folder, self.kube.kubeconfig, NAMESPACE, "operator-0")

    def record(self) -> Object:
        """The topology."""
        return record(self.kube, DEMO)

    def gateways(self) -> list[Object]:
        """The pool's pods."""
        return self.kube.items("Pod", f"plato.im/pool={POOL}")

    def serving(self) -> set[str]:
        """uids of gateways that are recorded as serving and Ready."""
        known = {g["uid"] for g in self.record().get("gateways", {}).values() if g["state"] == "serving"}
        return known & {p["metadata"]["uid"] for p in self.gateways() if ready(p)}

    def scale(self, replicas: int) -> None:
        """kubectl scale."""
        self.kube.done("scale", "gatewaypool", POOL, f"--replicas={replicas}")

    def wait_serving(self, count: int, deadline_s: float = 60) -> None:
        """Exactly so many gateways are there, and all serve."""

        def there() -> bool:
            return len(self.serving()) == count == len(self.gateways()) == len(self.record().get("gateways", {}))

        wait_for(f"{count} gateways serve", there, deadline_s, seen=lambda: (self.record(), self.pods.troubles[-3:]))

    def settled(self, replicas: int = 3) -> None:
        """As at the beginning."""
        self.pods.asleep.clear()
        self.pods.stuck.clear()
        if self.operator.process.poll() is not None:
            self.start()
        self.scale(replicas)
        self.wait_serving(replicas)


def record(kube: Kube, name: str) -> Object:
    """The topology of a cluster, {} while there is none."""
    found = kube.get("ConfigMap", f"{name}-topology") or {}
    text = (found.get("data") or {}).get("topology.json")
    return dict(json.loads(text)) if text else {}


def ready(pod: Object) -> bool:
    """The condition Ready."""
    return any(c["type"] == "Ready" and c["status"] == "True" for c in pod["status"].get("conditions") or ())


def phase(kube: Kube, name: str) -> str:
    """Of a PlatoCluster."""
    return str((kube.get("PlatoCluster", name) or {}).get("status", {}).get("phase", ""))


@pytest.fixture(scope="module")
def module_stage(kube: Kube, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    """The operator, the played data plane, and a cluster that serves."""
    prepare(kube)
    folder = tmp_path_factory.mktemp("faults")
    with ObjectPods(kube.kubeconfig, NAMESPACE, DEMO, PORTS["admin"]) as pods, Guard(kube, DEMO) as guard:
        stage = Stage(kube, folder, pods, guard, Operator(folder, kube.kubeconfig, NAMESPACE, "operator-0"))
        try:
            kube.apply(cluster(DEMO))
            wait_for("the cluster is Ready", lambda: phase(kube, DEMO) == "Ready", 120,
                     seen=lambda: ((kube.get("PlatoCluster", DEMO) or {}).get("status"), pods.troubles[-3:]))  # fmt: skip
            yield stage
        finally:
            stage.operator.end()


@pytest.fixture
def stage(module_stage: Stage) -> Iterator[Stage]:
    """The same, with three gateways that serve before each test, and what must hold after it."""
    module_stage.settled()
    yield module_stage
    module_stage.guard.check()


def test_o02_a_gateway_that_never_registered_goes_at_once(stage: Stage) -> None:
    """Scale 3 to 4 where the fourth finds no node; back to 3: nobody asks it anything, and no id was lost by it."""
    stage.pods.stuck.add(f"{POOL}-3")
    stage.scale(4)
    wait_for("the fourth is there", lambda: len(stage.gateways()) == 4, 20)
    ids = {g["worker_id"] for g in stage.record()["gateways"].values()}
    stage.scale(3)
    wait_for("it is gone", lambda: len(stage.gateways()) == 3, 8)
    assert {g["worker_id"] for g in stage.record()["gateways"].values()} == ids
    assert f"{POOL}-3" not in {name for name, _ in stage.guard.drains.values()}


def test_o02_the_id_of_one_that_registered_rests(stage: Stage) -> None:
    """The third goes by its drain; its id is held back for longer than anything of it may live."""
    its = stage.record()["gateways"][f"{POOL}-2"]
    stage.scale(2)
    stage.wait_serving(2)
    resting = stage.record().get("resting", {})
    uid, until_ms = resting[str(its["worker_id"])]
    assert uid == its["uid"]
    assert until_ms > time.time() * 1000


def test_o03_a_drain_that_is_not_answered_is_blocked_then_forced_and_the_count_is_told(stage: Stage) -> None:
    """The process sleeps; the condition says so, and after the deadline the pod goes, with an event."""
    name = f"{POOL}-2"
    wait_for("its clients are known", lambda: _connections(stage) >= 3 * CONNECTIONS, 20)
    stage.pods.asleep.add(name)
    stage.scale(2)

    def blocked() -> bool:
        its = stage.kube.condition("GatewayPool", POOL, "DrainBlocked")
        return its.get("status") == "True" and its.get("reason") == "ReportTimeout" and name in its["message"]

    wait_for("DrainBlocked", blocked, 15)
    stage.wait_serving(2, 45)
    told = [e["message"] for e in stage.kube.items("Event") if e["reason"] == "DrainForced"]
    assert told
    assert told[-1].endswith(f"connections cut: {CONNECTIONS}, by its last report"), told


def _connections(stage: Stage) -> int:
    return int((stage.kube.get("GatewayPool", POOL) or {}).get("status", {}).get("connections") or 0)


def test_o04_a_pod_deleted_and_back_within_a_second_gets_another_id(stage: Stage) -> None:
    """Again and again: the StatefulSet makes it at once, the id before it rests."""
    name, used = f"{POOL}-1", []
    for _ in range(4):
        before = stage.record()["gateways"][name]
        used.append(before["worker_id"])
        stage.kube.done("delete", "pod", name, "--force", "--grace-period=0", "--wait=false")

        def back(uid: str = before["uid"]) -> bool:
            pod = stage.kube.get("Pod", name)
            return pod is not None and pod["metadata"]["uid"] != uid

        began = time.monotonic()
        wait_for("the pod is back", back, 5)
        print(f"back after {time.monotonic() - began:.2f} s")
        stage.wait_serving(3)
    assert stage.record()["gateways"][name]["worker_id"] not in used
    assert len(set(used)) == len(used)


def test_o04_fifty_at_once_come_back_under_other_ids(stage: Stage) -> None:
    """All pods of a pool of fifty are deleted in one call."""

    def fifty() -> dict[str, Object]:
        known = stage.record().get("gateways", {})
        return {name: g for name, g in known.items() if name.startswith("fifty-")}

    rested: dict[int, str] = {}

    def serving(but: frozenset[str] = frozenset()) -> bool:
        rested.update({int(i): uid for i, (uid, _) in stage.record().get("resting", {}).items()})
        pods = {p["metadata"]["uid"] for p in stage.kube.items("Pod", "plato.im/pool=fifty") if ready(p)}
        return len({g["uid"] for g in fifty().values()} & pods - but) == 50

    stage.kube.apply(_pool("fifty", 50, deadline_s=300))  # so long do ids rest, at least
    try:
        wait_for("fifty more serve", serving, 120, seen=lambda: len(fifty()))
        before = fifty()
        uids = frozenset(g["uid"] for g in before.values())
        stage.kube.done("delete", "pod", "-l", "plato.im/pool=fifty", "--wait=false")
        wait_for("fifty others serve", lambda: serving(uids), 120, seen=lambda: len(fifty()))
        serving(uids)  # what rests was read before what serves
        old, new = ({g["worker_id"] for g in each.values()} for each in (before, fifty()))
        assert len(old) == len(new) == 50
        assert not old & new
        assert {i: rested.get(i) for i in old} == {g["worker_id"]: g["uid"] for g in before.values()}
    finally:
        stage.kube.done("delete", "gatewaypool", "fifty", "--wait=false")
    wait_for("they leave the record", lambda: not fifty(), 60)


def test_o06_an_operator_killed_again_and_again_finishes_each_move_once(stage: Stage) -> None:
    """A third shard is added; the process is killed by -9 while the record changes, each time at another point."""
    moves: dict[int, set[bool]] = {}
    stage.kube.patch("platocluster", DEMO, {"spec": {"state": {"shards": 3}}})
    kills = 0

    def spread() -> bool:
        now = stage.record()
        if now.get("move"):
            moves.setdefault(now["move"]["id"], set()).add(bool(now["move"].get("undo")))
        owned = sum(last - first + 1 for first, last, shard, _ in now["slots"] if shard == f"{DEMO}-s2")
        return owned >= 1024 // 3 and not now.get("move")

    for wait_s in (0.0, 0.1, 0.25, 0.45, 0.7, 1.0):
        before = stage.record()["epoch"]

        def goes_on(before: int = before) -> bool:
            return spread() or stage.record()["epoch"] > before + 1

        wait_for("a move goes on", goes_on, 40)
        if spread():
            break
        time.sleep(wait_s)  # not waited for anything: where it is killed shall differ
        stage.operator.kill()
        kills += 1
        stage.guard.check()
        stage.start()
    wait_for("the slots are spread", spread, 120, seen=stage.record)
    assert kills >= 3
    assert sorted(moves) == list(moves), "a move that was over was begun again"
    stage.kube.patch("platocluster", DEMO, {"spec": {"state": {"shards": 2}}})

    def two() -> bool:
        now = stage.record()
        return not now.get("move") and {shard for _, _, shard, _ in now["slots"]} == {f"{DEMO}-s0", f"{DEMO}-s1"}

    wait_for("and back", two, 120, seen=stage.record)
    wait_for("the shard is gone", lambda: stage.kube.get("StateShard", f"{DEMO}-s2") is None, 30)


def test_o07_a_minute_and_twenty_forced_passes_write_nothing(stage: Stage, testbed: Layout | None) -> None:
    """A pod's label that means nothing rings the operator each time; no child changes, the log of writes shows the Lease."""
    _still(stage)
    before = invariants.versions(stage.kube, DEMO)
    since = datetime.now(UTC).isoformat().replace("+00:00", "Z")
    passes = stage.operator.metric("plato_operator_passes_total")
    end = time.monotonic() + 60
    for n in range(20):
        stage.kube.done("label", "pod", f"{POOL}-0", f"faults.example.com/ring=n{n}", "--overwrite")

        def looked(least: float = passes + n) -> bool:
            return stage.operator.metric("plato_operator_passes_total") > least

        wait_for("the operator looks", looked, 20)
    time.sleep(max(0.0, end - time.monotonic()))  # nothing is waited for: that nothing happens is what is looked at
    assert invariants.versions(stage.kube, DEMO) == before
    if testbed is not None:
        by = [w for w in writes(testbed, since) if w.agent.startswith("plato-operator") and w.namespace == NAMESPACE]
        assert by
        assert {w.resource for w in by} == {"leases"}
    stage.scale(4)
    wait_for("a change acts", lambda: len(stage.gateways()) == 4, 10)


def _still(stage: Stage, quiet_s: float = 12) -> None:
    """Waits until nothing changed for so long: by default two passes in a row and a status' pace."""
    last: dict[tuple[str, str], str] = {}
    since = time.monotonic()

    def still() -> bool:
        nonlocal last, since
        now = invariants.versions(stage.kube, DEMO)
        if now != last:
            last, since = now, time.monotonic()
        return time.monotonic() - since > quiet_s

    wait_for("nothing changes any more", still, 90)


def test_o08_while_counters_move_a_status_is_written_each_five_seconds_at_most(stage: Stage) -> None:
    """A drain at one per second; each version of the pool's status is looked at as it comes."""
    stage.kube.patch("gatewaypool", POOL, {"spec": {"drain": {"pacePerSecond": 1, "deadlineSeconds": 60}}})
    _still(stage, 6)  # longer than a status waits, so that the change above has been told
    seen: list[tuple[float, float, Object]] = []
    looked = time.monotonic()
    stage.scale(2)
    end = time.monotonic() + 60
    while time.monotonic() < end and not (len(seen) > 3 and len(stage.gateways()) == 2):
        before, looked = looked, time.monotonic()
        status = (stage.kube.get("GatewayPool", POOL) or {})["status"]
        if not seen or seen[-1][2] != status:
            seen.append((before, time.monotonic(), status))
        time.sleep(0.2)  # how often is looked, and nothing else
    assert len(seen) > 3, "the drain was too short to judge"
    assert len({s["drains"][0].get("remaining") for _, _, s in seen if s.get("drains")}) > 2, "no counter moved"
    # At most: a status was written after the look before the one that saw it, however late looks are.
    gaps = [b[1] - a[0] for a, b in pairwise(seen[1:])]
    assert min(gaps) >= 4.5, gaps  # 5 s between two writes
    for (_, _, a), (_, _, b) in pairwise(seen):
        old = {c["type"]: c for c in a["conditions"]}
        for c in b["conditions"]:
            moved = c["lastTransitionTime"] != old[c["type"]]["lastTransitionTime"]
            assert moved == (c["status"] != old[c["type"]]["status"]), (old[c["type"]], c)
    stage.kube.patch("gatewaypool", POOL, {"spec": {"drain": DRAIN}})


def _pool(name: str, replicas: int = 1, deadline_s: int = 10) -> Object:
    drain = {**DRAIN, "deadlineSeconds": deadline_s}
    return {
        "apiVersion": "plato.im/v1alpha1", "kind": "GatewayPool", "metadata": {"name": name},
        "spec": {"clusterRef": {"name": DEMO}, "replicas": replicas, "drain": drain, "ports": PORTS, **NOWHERE},
    }  # fmt: skip


def test_o10_the_selector_of_scale_matches_the_pools_pods_and_no_others(stage: Stage) -> None:
    """Another pool of the same cluster is there too."""
    stage.kube.apply(_pool("other"))
    wait_for("the other pool has its pod", lambda: bool(stage.kube.items("Pod", "plato.im/pool=other")), 30)
    for name, count in ((POOL, 3), ("other", 1)):

        def selector(name: str = name) -> str:
            path = f"/apis/plato.im/v1alpha1/namespaces/{NAMESPACE}/gatewaypools/{name}/scale"
            return str(json.loads(stage.kube.done("get", "--raw", path))["status"].get("selector", ""))

        words = wait_for("the selector is written", selector, 20)
        found = {p["metadata"]["name"] for p in stage.kube.items("Pod", words)}
        assert found == {f"{name}-{i}" for i in range(count)}
    stage.kube.done("delete", "gatewaypool", "other", "--wait=false")
    wait_for("the other pool is gone", lambda: not stage.kube.items("Pod", "plato.im/pool=other"), 30)


def test_o13_a_foreign_finalizer_is_left_to_its_owner(stage: Stage) -> None:
    """It stays while we write statuses; deleted, the pool waits for it; removed by its owner, the pool goes."""
    stage.kube.apply(_pool("held"))
    stage.kube.patch("gatewaypool", "held", {"metadata": {"finalizers": [HOLD]}})

    def written() -> bool:
        pool = stage.kube.get("GatewayPool", "held") or {}
        return bool(pool.get("status", {}).get("selector"))

    wait_for("its status is written", written, 30)
    for replicas in (2, 1, 2):
        stage.kube.done("scale", "gatewaypool", "held", f"--replicas={replicas}")

        def followed(replicas: int = replicas) -> bool:
            return bool((stage.kube.get("GatewayPool", "held") or {})["status"].get("replicas") == replicas)

        wait_for("the operator follows", followed, 40)
        assert (stage.kube.get("GatewayPool", "held") or {})["metadata"]["finalizers"] == [HOLD]
    stage.kube.done("delete", "gatewaypool", "held", "--wait=false")
    passes = stage.operator.metric("plato_operator_passes_total")
    wait_for("passes go on", lambda: stage.operator.metric("plato_operator_passes_total") >= passes + 2, 30)
    held = stage.kube.get("GatewayPool", "held")
    assert held is not None
    assert [f for f in held["metadata"]["finalizers"] if f != "foregroundDeletion"] == [HOLD]
    stage.kube.patch("gatewaypool", "held", {"metadata": {"finalizers": None}})
    wait_for("it is gone", lambda: stage.kube.get("GatewayPool", "held") is None, 10)
    wait_for("so are its pods", lambda: not stage.kube.items("Pod", "plato.im/pool=held"), 30)


def test_o14_a_restart_by_kubectl_is_paced_by_drains_and_keeps_its_annotation(stage: Stage) -> None:
    """rollout restart of the StatefulSet; one gateway after the other, and our later applies leave the annotation."""
    before = {p["metadata"]["uid"] for p in stage.gateways()}
    known = set(stage.guard.drains)
    stage.kube.done("rollout", "restart", f"statefulset/{POOL}")
    asked = _restarted_at(stage)
    assert asked

    def restarted() -> bool:
        return not before & {p["metadata"]["uid"] for p in stage.gateways()} and len(stage.serving()) == 3

    wait_for("each was replaced", restarted, 120, seen=stage.record)
    drains = [stage.guard.drains[i] for i in sorted(set(stage.guard.drains) - known)]
    assert drains == [(f"{POOL}-{i}", "Rollout") for i in (2, 1, 0)]
    stage.kube.patch("gatewaypool", POOL, {"spec": {"drain": {"deadlineSeconds": 11}}})
    wait_for("the operator applied it again", lambda: _grace_s(stage) == 71, 20, seen=lambda: _grace_s(stage))
    assert _restarted_at(stage) == asked
    stage.kube.patch("gatewaypool", POOL, {"spec": {"drain": DRAIN}})


def _template(stage: Stage) -> Object:
    found: Object = (stage.kube.get("StatefulSet", POOL) or {})["spec"]["template"]
    return found


def _restarted_at(stage: Stage) -> str:
    return str((_template(stage)["metadata"].get("annotations") or {}).get("kubectl.kubernetes.io/restartedAt", ""))


def _grace_s(stage: Stage) -> int:
    return int(_template(stage)["spec"]["terminationGracePeriodSeconds"])


# ── beginnings and ends ──────────────────────────────────────────────────────────────────────────────────────


def migrated(kube: Kube, name: str) -> bool:
    """Says that the migration is done, as its pod would; False while there is no Job."""
    jobs = kube.items("Job", f"plato.im/cluster={name}")
    for job in jobs:
        change = json.dumps({"status": {"succeeded": 1}})
        kube.done("patch", "job", job["metadata"]["name"], "--subresource=status", "--type=merge", "-p", change)
    return bool(jobs)


@pytest.fixture
def other_namespace(kubeconfig: Path, testbed: Layout | None) -> Iterator[Kube]:
    """A namespace for one test."""
    made = Kube(kubeconfig, f"{NAMESPACE}-other", testbed.bin if testbed is not None else None)
    made.make_namespace({})
    prepare(made)
    yield made
    made.drop_namespace()


def test_o06_killed_between_the_record_and_the_first_pod_a_new_cluster_comes_up_with_o20_no_pod_deleted(
    stage: Stage, other_namespace: Kube, tmp_path: Path
) -> None:
    """kill -9 as soon as the record is there, and once more when the first pods are; none of these is replaced."""
    kube = other_namespace
    operator = Operator(tmp_path, kube.kubeconfig, kube.namespace, "operator-0")
    try:
        with Guard(kube, "young") as guard:
            kube.apply(cluster("young"))
            wait_for("the record is written", lambda: bool(record(kube, "young")), 30)
            operator.kill()
            first = record(kube, "young")
            operator = Operator(tmp_path, kube.kubeconfig, kube.namespace, "operator-0")
            wait_for("the migration is done", lambda: migrated(kube, "young"), 60)
            wait_for("there are pods", lambda: bool(kube.items("Pod", "plato.im/component=state")), 60)
            operator.kill()
            pods = {p["metadata"]["uid"] for p in kube.items("Pod", "plato.im/component in (state, gateway)")}
            operator = Operator(tmp_path, kube.kubeconfig, kube.namespace, "operator-0")
            wait_for(
                "all of it is made", lambda: len(kube.items("Pod", "plato.im/component in (state, gateway)")) == 5, 60
            )
            wait_for("the operator rests", lambda: operator.metric("plato_operator_passes_total") >= 3, 30)
            now = {p["metadata"]["uid"] for p in kube.items("Pod", "plato.im/component in (state, gateway)")}
            assert pods <= now
            assert [s[:3] for s in record(kube, "young")["slots"]] == [s[:3] for s in first["slots"]]
            assert len(kube.items("StateShard")) == 2
            guard.check()
    finally:
        operator.end()


def test_o12_without_an_operator_cluster_and_namespace_go_in_seconds_and_one_that_comes_finds_nothing(
    stage: Stage, kubeconfig: Path, testbed: Layout | None, tmp_path: Path
) -> None:
    """There is no finalizer to wait for, and no webhook stays."""
    kube = Kube(kubeconfig, f"{NAMESPACE}-gone", testbed.bin if testbed is not None else None)
    kube.make_namespace({})
    prepare(kube)
    operator = Operator(tmp_path, kubeconfig, kube.namespace, "operator-0")
    try:
        kube.apply(cluster("young"))
        wait_for("there are pods", lambda: len(kube.items("Pod", "plato.im/component=gateway")) == 3, 60)
        operator.kill()
        kube.done("delete", "platocluster", "young", "--wait=false")
        wait_for("the resource is gone", lambda: kube.get("PlatoCluster", "young") is None, 5)
        kube.drop_namespace(60)
        operator = Operator(tmp_path, kubeconfig, kube.namespace, "operator-0")
        wait_for("it looks for the Lease", lambda: operator.get("/healthz")[0] == 200, 20)
        assert kube.get("Namespace", kube.namespace) is None
        hooks = kube.done("get", "validatingwebhookconfigurations,mutatingwebhookconfigurations", "-o", "name")
        assert "plato" not in hooks
    finally:
        operator.end()
        kube.drop_namespace()
