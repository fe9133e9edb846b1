"""Reported faults of operators with real pods on real nodes. A row's number is in its test's name.

One platform with a gateway per node serves all of them; after each test it is whole again and the invariants are looked at
(frame/invariants.py). Gateways take ports 9500, 9501 and 9509 of their nodes. The operator's pod stays off LOSABLE, the only
node that is lost.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import pytest

from e2e.frame.crowd import Crowd
from e2e.frame.dependencies import Dependencies
from e2e.frame.invariants import Guard, versions
from e2e.frame.kube import Kube, Object, wait_for
from e2e.frame.platform import Images, Platform, pod_ready
from e2e.testbed.images import PAUSE
from e2e.testbed.layout import Layout
from e2e.testbed.node import Node, container_pids

NAMESPACE = "e2e-faults"
LOSABLE: Final = "node3"
OPERATOR_AT: Final = "node1"
PORTS: Final = {"tcp": 9500, "ws": 9501, "admin": 9509}
DEADLINE_S: Final = 20
PACE_PER_S: Final = 20
SPEC: Final[Object] = {
    "state": {"shards": 2, "slotsPerMove": 16, "moveIntervalSeconds": 1},
    "gateways": {
        "initialReplicas": 3,
        "template": {
            "workers": 1,
            "ports": PORTS,
            "capacity": {"connections": 400},
            "drain": {"pacePerSecond": PACE_PER_S, "deadlineSeconds": DEADLINE_S, "settleSeconds": 1},
            "rollout": {"minReadySeconds": 0},
        },
    },
}
HELD_S: Final = 15.0
STARTS_S: Final = 90.0
"""A pod is there, named by the record, and serves: on a busy machine."""
NOT_READY_S: Final = 30.0
"""Within so many seconds a platform without msg is no longer Ready."""
NO_SERVICE: Final = "node.kubernetes.io/out-of-service=nodeshutdown:NoExecute"

pytestmark = [pytest.mark.nodes, pytest.mark.timeout(300)]


@dataclass
class Stage:
    """The platform of this module, who watches it, and the machines."""

    platform: Platform
    guard: Guard
    testbed: Layout
    stopped: set[int] = field(default_factory=set)

    @property
    def kube(self) -> Kube:
        """Its namespace."""
        return self.platform.kube

    def gateway(self, ordinal: int) -> Object:
        """A gateway's pod."""
        found = self.kube.get("Pod", f"{self.platform.pool}-{ordinal}")
        assert found is not None
        return found

    def on(self, node: str) -> Object:
        """The gateway of a node."""
        return next(p for p in self.platform.pods("gateway") if p["spec"].get("nodeName") == node)

    def uids(self) -> dict[str, str]:
        """{pod: uid} of the gateways."""
        return {p["metadata"]["name"]: p["metadata"]["uid"] for p in self.platform.pods("gateway")}

    def recorded(self, name: str) -> Object:
        """A gateway's entry in the record, {} if it has none."""
        found: Object = self.platform.topology().get("gateways", {}).get(name, {})
        return found

    def condition(self, name: str) -> Object:
        """A condition of the pool."""
        return self.kube.condition("GatewayPool", self.platform.pool, name)

    def whole(self) -> None:
        """Three gateways serve, and everything is Ready."""
        self.wake()
        self.platform.scale(3)
        self.platform.wait_gateways(3, 2 * STARTS_S)
        self.platform.wait_ready()
        self.platform.wait_settled()  # a test that changed the template and put it back may have begun a roll

    def wake(self) -> None:
        """What was stopped goes on."""
        for pid in self.stopped:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
        self.stopped.clear()

    def change_pool(self, **template: Any) -> None:
        """Changes the template of the default pool."""
        self.platform.patch({"gateways": {"template": template}})

    def events(self, reason: str) -> list[str]:
        """Messages of events."""
        return [e["message"] for e in self.kube.items("Event") if e["reason"] == reason]

    def crowd(self, pod: Object, count: int, prefix: str) -> Crowd:
        """Clients of this gateway."""
        return Crowd(pod["status"]["hostIP"], PORTS["tcp"], self.platform.keys_dir, count, prefix)

    def node_ready(self, name: str) -> bool:
        """The node's condition Ready."""
        node = self.kube.get("Node", name)
        return node is not None and pod_ready(node)


@pytest.fixture(scope="module")
def module_stage(
    kube: Kube,
    images: Images,
    dependencies: Dependencies,
    testbed: Layout | None,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Stage]:
    """The platform, Ready."""
    assert testbed is not None
    platform = Platform(kube, "faults", images, dependencies, tmp_path_factory.mktemp("faults"))
    platform.install_operator({r"operator.nodeSelector.kubernetes\.io/hostname": OPERATOR_AT})
    platform.create(SPEC)
    with Guard(kube, "faults") as guard:
        yield Stage(platform, guard, testbed)


@pytest.fixture
def stage(module_stage: Stage) -> Iterator[Stage]:
    """The same before each test; afterwards what must hold."""
    module_stage.whole()
    yield module_stage
    module_stage.guard.check()


def test_o25_a_drain_keeps_its_pace_for_hundreds_of_clients(stage: Stage) -> None:
    """kubectl scale: nobody is cut, and nobody is asked faster than the pace says."""
    pod, clients = stage.gateway(2), 300
    with stage.crowd(pod, clients, "pace") as crowd:
        stage.platform.scale(2)
        wait_for("everybody was asked to go", lambda: not crowd.left, DEADLINE_S + 15, seen=lambda: crowd.left)
        asked = sorted(crowd.redirected)
        assert len(asked) == clients, f"{len(crowd.cut)} were cut"
        for n, at in enumerate(asked):
            assert n + 1 <= 1.1 * PACE_PER_S * (at - asked[0] + 1.0), f"{n + 1} within {at - asked[0]:.2f} s"
        assert asked[-1] - asked[0] >= clients / (1.1 * PACE_PER_S) - 1.0
    wait_for("the pod is gone", lambda: len(stage.platform.pods("gateway")) == 2, 30)
    assert not stage.events("DrainForced")


def test_o25_a_pod_deleted_by_hand_is_unready_first_and_lives_to_the_end(stage: Stage) -> None:
    """kubectl delete pod --grace-period=30: it leaves the Services while its clients are on it; none of them is cut."""
    pod, clients = stage.gateway(2), 150
    name, uid = pod["metadata"]["name"], pod["metadata"]["uid"]
    with stage.crowd(pod, clients, "deleted") as crowd:
        stage.kube.done("delete", "pod", name, "--grace-period=30", "--wait=false")

        def unready() -> bool:
            found = stage.kube.get("Pod", name)
            return found is not None and found["metadata"]["uid"] == uid and not pod_ready(found)

        wait_for("it is not Ready, and there", unready, 10)
        assert crowd.left > 0, "its clients are served still"
        assert not crowd.cut
        wait_for("everybody was asked to go", lambda: not crowd.left, 30, seen=lambda: crowd.left)
        assert not crowd.cut, f"{len(crowd.cut)} of {clients} were cut"
    wait_for("a successor is there", lambda: stage.uids().get(name, uid) != uid, 40)
    drains = [reason for gateway, reason in stage.guard.drains.values() if gateway == name]
    assert drains[-1] == "Evicted"


def test_o25_a_grace_that_is_too_short_for_the_pace_is_warned_of(stage: Stage) -> None:
    """capacity 400 at 20 per second takes the 20 s of the deadline exactly; one connection more does not fit."""
    sts = stage.kube.get("StatefulSet", stage.platform.pool) or {}
    assert sts["spec"]["template"]["spec"]["terminationGracePeriodSeconds"] >= 400 / PACE_PER_S + 60
    assert stage.condition("ConfigurationWarning")["status"] == "False"
    stage.change_pool(capacity={"connections": 401})

    def warned() -> bool:
        its = stage.condition("ConfigurationWarning")
        return bool(its["status"] == "True" and its["reason"] == "DrainTooSlow")

    try:
        wait_for("the condition warns", warned, 20)
    finally:
        stage.change_pool(capacity={"connections": 400})


def test_o03_a_gateway_whose_link_stands_still_is_forced_and_the_event_tells_how_many_were_cut(stage: Stage) -> None:
    """SIGSTOP: the drain's end is never reported; DrainBlocked, then it goes without its word."""
    pod, clients = stage.gateway(2), 12
    name = pod["metadata"]["name"]
    with stage.crowd(pod, clients, "stopped"):
        wait_for("they are counted", lambda: _connections(stage) >= clients, 30, seen=lambda: _connections(stage))
        for pid in processes(pod, b"link"):
            os.kill(pid, signal.SIGSTOP)
            stage.stopped.add(pid)
        assert stage.stopped, "no process of the link was found"
        began = time.monotonic()
        stage.platform.scale(2)

        def blocked() -> bool:
            its = stage.condition("DrainBlocked")
            return its.get("status") == "True" and its.get("reason") == "ReportTimeout" and name in its["message"]

        wait_for("DrainBlocked", blocked, 20, seen=lambda: stage.condition("DrainBlocked"))
        wait_for("it is forced", lambda: bool(stage.events("DrainForced")), DEADLINE_S + 40)
        assert time.monotonic() - began >= DEADLINE_S + 10, "before its deadline"
        assert stage.events("DrainForced")[-1].endswith(f"connections cut: {clients}, by its last report")
        wait_for("the pod is gone", lambda: len(stage.platform.pods("gateway")) == 2, 60, seen=stage.platform.state)
    wait_for("DrainBlocked is over", lambda: stage.condition("DrainBlocked").get("status") == "False", 20)


def _connections(stage: Stage) -> int:
    return int((stage.kube.get("GatewayPool", stage.platform.pool) or {}).get("status", {}).get("connections") or 0)


def processes(pod: Object, word: bytes) -> list[int]:
    """Processes of a pod with a word in their command, by the pod's uid in the name of their cgroup."""
    found = []
    for pid in container_pids():
        with contextlib.suppress(OSError):
            ours = pod["metadata"]["uid"] in Path(f"/proc/{pid}/cgroup").read_text(encoding="ascii")
            if ours and word in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0"):
                found.append(pid)
    return found


def test_o01_an_image_that_does_not_exist_and_then_the_good_one(stage: Stage) -> None:
    """The first replaced pod never starts, the roll stops there; the good version is set: it converges without a hand."""
    before, name = stage.uids(), f"{stage.platform.pool}-2"
    stage.change_pool(version="0.0.0-none")

    def stuck() -> bool:
        pod = stage.kube.get("Pod", name)
        states = (pod or {}).get("status", {}).get("containerStatuses") or ()
        return any("Image" in str(s.get("state", {}).get("waiting", {}).get("reason", "")) for s in states)

    wait_for("the pod waits for its image", stuck, STARTS_S, seen=stage.platform.state)
    time.sleep(5)  # the roll stands still: that nothing happens is what is looked at
    assert {n: u for n, u in stage.uids().items() if n != name} == {n: u for n, u in before.items() if n != name}
    stage.change_pool(version=None)
    stage.platform.wait_gateways(3, STARTS_S)
    after = stage.uids()
    assert {n: u for n, u in after.items() if n != name} == {n: u for n, u in before.items() if n != name}

    def told() -> bool:
        its = stage.condition("Degraded")
        return its.get("status") == "True" and its["reason"] == "BrokenRevisionRepaired" and name in its["message"]

    wait_for("the repair is told", told, 15, seen=lambda: stage.condition("Degraded"))


def test_o02_o16_one_more_than_nodes_waits_is_explained_and_goes_at_once(stage: Stage) -> None:
    """3 → 4 on three nodes: the condition names port and nodes, the rest serves; back to 3: nobody waits for an answer."""
    before = stage.platform.topology()["gateways"]
    stage.platform.scale(4)
    said = wait_for("Unschedulable", lambda: _unschedulable(stage), 30, seen=stage.platform.state)
    assert str(PORTS["tcp"]) in said
    assert "4 are wanted on 3 nodes" in said
    assert len(stage.platform.serving()) == 3
    began = time.monotonic()
    stage.platform.scale(3)
    wait_for("it is gone", lambda: len(stage.platform.pods("gateway")) == 3, 8)
    print(f"gone after {time.monotonic() - began:.1f} s")
    assert stage.platform.topology()["gateways"] == before


def _unschedulable(stage: Stage) -> str:
    its = stage.condition("Unschedulable")
    return str(its["message"]) if its.get("status") == "True" else ""


def test_o16_somebody_elses_pod_on_the_port(stage: Stage) -> None:
    """It takes the port of a node first; the gateway waits and says so, and comes when the other one has gone."""
    node = stage.gateway(2)["spec"]["nodeName"]
    stage.platform.scale(2)
    stage.platform.wait_gateways(2, 60)
    stage.kube.apply(
        {
            "apiVersion": "v1", "kind": "Pod", "metadata": {"name": "squatter"},
            "spec": {
                "nodeName": node, "terminationGracePeriodSeconds": 0,
                "containers": [{
                    "name": "pause", "image": PAUSE, "imagePullPolicy": "Never",
                    "ports": [{"containerPort": PORTS["tcp"], "hostPort": PORTS["tcp"]}],
                }],
            },
        }
    )  # fmt: skip
    try:
        stage.platform.scale(3)
        said = wait_for("Unschedulable", lambda: _unschedulable(stage), 30, seen=stage.platform.state)
        assert str(PORTS["tcp"]) in said
        assert "on 3 nodes" in said
        assert len(stage.platform.serving()) == 2
    finally:
        stage.kube.done("delete", "pod", "squatter", "--grace-period=0", "--force")
    stage.platform.wait_gateways(3, STARTS_S)
    wait_for("Unschedulable is over", lambda: not _unschedulable(stage), 20)


def test_o04_a_pod_deleted_by_force_is_back_within_a_second_under_another_id(stage: Stage) -> None:
    """Its process may live on for a while: the store's reservation and the rest keep the two apart."""
    name = f"{stage.platform.pool}-2"
    old = stage.recorded(name)
    stage.kube.done("delete", "pod", name, "--force", "--grace-period=0", "--wait=false")
    began = time.monotonic()
    wait_for("the pod is back", lambda: stage.uids().get(name, old["uid"]) != old["uid"], 5)
    print(f"back after {time.monotonic() - began:.2f} s")
    stage.platform.wait_gateways(3, STARTS_S)
    record = stage.platform.topology()
    assert record["gateways"][name]["worker_id"] != old["worker_id"]
    assert record["resting"][str(old["worker_id"])][0] == old["uid"]


def test_o15_a_cordoned_node_whose_gateway_is_evicted_every_two_seconds_sees_one_drain(stage: Stage) -> None:
    """Evicting it again and again neither begins another drain nor extends it."""
    pod = stage.gateway(1)
    name, uid, node = pod["metadata"]["name"], pod["metadata"]["uid"], pod["spec"]["nodeName"]
    known = set(stage.guard.drains)
    eviction = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": name}}
    path = f"/api/v1/namespaces/{NAMESPACE}/pods/{name}/eviction"
    with stage.crowd(pod, 100, "evicted") as crowd:
        stage.kube.done("cordon", node)
        try:
            began = time.monotonic()
            while stage.uids().get(name) == uid:
                stage.kube.run("create", "--raw", path, "-f", "-", given=eviction)
                assert time.monotonic() - began < DEADLINE_S + 20, stage.platform.state()
                time.sleep(2)  # the row says: every 2 s
            took_s = time.monotonic() - began
        finally:
            stage.kube.done("uncordon", node)
        assert not crowd.cut, f"{len(crowd.cut)} were cut"
    assert took_s < DEADLINE_S + 10
    its = [reason for i, (gateway, reason) in stage.guard.drains.items() if i not in known and gateway == name]
    assert len(its) == 1, its


def test_o14_a_restart_by_kubectl_drains_one_gateway_after_the_other_and_needs_no_spare_node(stage: Stage) -> None:
    """rollout restart of the StatefulSet with a gateway on each node: its annotation stays, every pod is replaced."""
    before, known = stage.uids(), set(stage.guard.drains)
    sts = f"statefulset/{stage.platform.pool}"
    with stage.crowd(stage.gateway(0), 20, "restarted") as crowd:
        stage.kube.done("rollout", "restart", sts)

        def restarted() -> bool:
            return not set(before.values()) & set(stage.uids().values()) and len(stage.platform.serving()) == 3

        wait_for("every gateway was replaced", restarted, 240, seen=stage.platform.state)
        assert not crowd.cut
    drains = [stage.guard.drains[i] for i in sorted(set(stage.guard.drains) - known)]
    assert drains == [(f"{stage.platform.pool}-{i}", "Rollout") for i in (2, 1, 0)]
    asked = stage.kube.done("get", sts, "-o", "jsonpath={.spec.template.metadata.annotations}")
    assert json.loads(asked)["kubectl.kubernetes.io/restartedAt"]


@pytest.mark.timeout(420)
def test_o17_o16_a_lost_node_keeps_ids_and_slots_until_it_is_fenced_and_an_update_needs_no_spare_node(
    stage: Stage,
) -> None:
    """Power loss: its pod terminates for ever and stays in the record; an update takes one of the others at a time, if
    any. The taint out-of-service frees it all; its successor finds no node and says why. With the node back the update
    ends."""
    pod = stage.on(LOSABLE)
    name, uid = pod["metadata"]["name"], pod["metadata"]["uid"]
    its, slots = stage.recorded(name), [s[:3] for s in stage.platform.topology()["slots"]]
    others = {n: u for n, u in stage.uids().items() if n != name}
    node = Node(stage.testbed, stage.testbed.node(LOSABLE))
    node.lose()
    try:
        wait_for("its pod is given up", lambda: _terminating(stage, name, uid), 120, seen=stage.platform.state)
        wait_for("the record says lost", lambda: stage.recorded(name).get("state") == "lost", 30)
        wait_for("NodeLost is told", lambda: stage.condition("NodeLost").get("status") == "True", 20)
        assert name in stage.condition("NodeLost")["message"]
        stage.kube.done("rollout", "restart", f"statefulset/{stage.platform.pool}")
        end = time.monotonic() + HELD_S
        while time.monotonic() < end:  # nothing is waited for: that the rest serves is what is looked at
            assert stage.uids()[name] == uid
            assert len(stage.platform.serving()) >= len(others) - 1, "the update takes one at a time"
            assert stage.recorded(name)["worker_id"] == its["worker_id"]
            assert [s[:3] for s in stage.platform.topology()["slots"]] == slots
            time.sleep(1)
        stage.kube.done("taint", "node", LOSABLE, NO_SERVICE, "--overwrite")
        wait_for("its pod object is gone", lambda: stage.uids().get(name) != uid, 90, seen=stage.platform.state)
        wait_for("its id rests", lambda: str(its["worker_id"]) in stage.platform.topology().get("resting", {}), 20)
        assert stage.platform.topology()["resting"][str(its["worker_id"])][0] == uid
        said = wait_for("Unschedulable", lambda: _unschedulable(stage), 30, seen=stage.platform.state)
        assert str(PORTS["tcp"]) in said
        assert "3 are wanted on 3 nodes" in said
        assert len(stage.platform.serving()) >= len(others) - 1
    finally:
        node.recover()
        stage.kube.run("taint", "node", LOSABLE, NO_SERVICE.partition("=")[0] + "-")
    wait_for(f"{LOSABLE} is Ready again", lambda: stage.node_ready(LOSABLE), 120)

    def rolled() -> bool:
        return not set(others.values()) & set(stage.uids().values()) and len(stage.platform.serving()) == 3

    wait_for("the update ends, without a spare node", rolled, 150, seen=stage.platform.state)
    assert stage.recorded(name)["worker_id"] != its["worker_id"]
    assert [s[:3] for s in stage.platform.topology()["slots"]] == slots


def _terminating(stage: Stage, name: str, uid: str) -> bool:
    pod = stage.kube.get("Pod", name)
    return pod is not None and pod["metadata"]["uid"] == uid and "deletionTimestamp" in pod["metadata"]


def test_ready_turns_false_soon_after_all_msg_stand_still_and_true_again_when_they_go_on(stage: Stage) -> None:
    """SIGSTOP of every msg process; the condition says what that means for people."""

    def ready() -> Object:
        return stage.kube.condition("PlatoCluster", stage.platform.name, "Ready")

    def noticed() -> bool:
        for pid in (pid for pod in stage.platform.pods("msg") for pid in processes(pod, b"plato_msg")):
            with contextlib.suppress(ProcessLookupError):  # kubelet ended it meanwhile
                os.kill(pid, signal.SIGSTOP)  # each time: kubelet may have begun another one
                stage.stopped.add(pid)
        return ready().get("status") == "False"

    began = time.monotonic()
    wait_for("Ready is False without msg", noticed, NOT_READY_S, seen=stage.platform.state)
    print(f"Ready was False {time.monotonic() - began:.0f} s after msg stood still")
    assert stage.stopped, "no process of msg was found"
    assert ready()["reason"] == "MsgDown"
    assert "no msg pod is ready" in ready()["message"]
    stage.wake()
    stage.platform.wait_ready(60)


def test_what_was_done_leaves_a_quiet_cluster(stage: Stage) -> None:
    """Fifteen seconds without a write to any child, after all of the above."""
    last: dict[tuple[str, str], str] = {}
    since = time.monotonic()

    def still() -> bool:
        nonlocal last, since
        now = versions(stage.kube, stage.platform.name)
        if now != last:
            last, since = now, time.monotonic()
        return time.monotonic() - since > 15

    wait_for("nothing changes any more", still, 120)
