"""What is done to a platform while people talk on it: each step acts as a person would, and waits until all is well again.

Each is a mark in the report. A deadline is what a busy machine with two cores needs, not what Plato promises; the promises
(nobody reconnects unannounced, nothing lost, acknowledged in time) are held by the report of the whole run.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final

from plato.api import names

from e2e.frame.kube import wait_for
from e2e.frame.platform import OPERATOR_LABEL, Platform, pod_ready
from e2e.live.driver import LiveLoad
from e2e.testbed.audit import writes
from e2e.testbed.layout import Layout
from e2e.testbed.node import Node

SPEC: Final = {
    "state": {"shards": 2, "slotsPerMove": 16, "moveIntervalSeconds": 1},
    "gateways": {
        "initialReplicas": 2,
        "template": {
            "workers": 1,
            "drain": {"pacePerSecond": 100, "deadlineSeconds": 60, "settleSeconds": 2},
            "rollout": {"minReadySeconds": 3},
        },
    },
}
"""What the live platform has other than the defaults: short drains, and 16 slots per second."""
ACTS_S: Final = 10.0
QUIET_S: Final = 60.0


@dataclass(frozen=True)
class Stage:
    """A platform, the people on it, and the machines under it (None: another cluster's)."""

    platform: Platform
    load: LiveLoad
    testbed: Layout | None

    @contextlib.contextmanager
    def step(self, name: str) -> Iterator[None]:
        """A mark; at the end the platform is Ready and everybody is online."""
        print(f"{datetime.now(UTC):%H:%M:%S} {name}", flush=True)
        self.load.check_alive()
        with self.load.step(name):
            yield
            self.platform.wait_ready(120)
            self.wait_online(60)

    def wait_online(self, deadline_s: float) -> None:
        """Everybody is online."""
        wait_for(
            "every client is online",
            lambda: not self.load.so_far().offline,
            deadline_s,
            seen=lambda: sorted(self.load.so_far().offline)[:10],
        )

    def moved(self, since: float) -> Counter[str]:
        """{cause: how many} of the reconnects since then (time.monotonic())."""
        return Counter(c.cause for c in self.load.so_far().connected if c.at >= since and c.cause != "start")

    def node(self, name: str) -> Node:
        """A node of the testbed."""
        assert self.testbed is not None
        return Node(self.testbed, self.testbed.node(name))


def scale_up(stage: Stage) -> None:
    """2 → 3 gateways: nobody has to move."""
    began = time.monotonic()
    with stage.step("scale 2 to 3"):
        stage.platform.scale(3)
        stage.platform.wait_gateways(3, 120)
    assert not stage.moved(began), "a gateway more disturbed somebody"


def roll(stage: Stage) -> None:
    """The same images under another tag: every pod is replaced, gateways one by one after their clients went."""
    platform, began = stage.platform, time.monotonic()
    tag = platform.images.next_tag
    with stage.step("roll the image"):
        counts = {each: len(platform.pods(each)) for each in ("gateway", "state", "msg", "ipconfig")}
        platform.patch({"version": tag})

        def rolled() -> bool:
            found = {each: platform.pods(each) for each in counts}
            images = {c["image"] for pods in found.values() for p in pods for c in p["spec"]["containers"]}
            there = all(len(pods) >= counts[each] for each, pods in found.items())  # none is missing for a moment
            return there and all(image.endswith(f":{tag}") for image in images) and platform.is_ready()

        wait_for(f"every pod runs {tag}", rolled, 360, seen=platform.state)
        platform.wait_gateways(counts["gateway"], 60)  # the last one's new pod may not serve yet
    assert stage.moved(began)["redirect"] > 0, "nobody was on a gateway that was replaced"


def scale_down(stage: Stage) -> None:
    """3 → 2 gateways: the last one's clients are asked to go first."""
    began = time.monotonic()
    with stage.step("scale 3 to 2"):
        stage.platform.scale(2)
        stage.platform.wait_gateways(2, 150)
    assert stage.moved(began)["redirect"] > 0, "nobody was on the gateway that went"


def drain_node(stage: Stage) -> None:
    """kubectl drain of a node with a gateway, then uncordon."""
    platform, began = stage.platform, time.monotonic()
    node = sorted(platform.nodes_of("gateway"))[-1]
    words = ["--ignore-daemonsets", "--delete-emptydir-data", "--timeout=240s"]
    if stage.testbed is None or os.environ.get("PLATO_E2E_SHARED"):
        words.append(f"--pod-selector={names.LABEL_CLUSTER}={platform.name}")  # other people's pods stay
    try:
        with stage.step(f"drain {node}"):
            platform.kube.done("drain", node, *words, timeout_s=270)
            platform.wait_gateways(2, 120)
            assert node not in platform.nodes_of("gateway")
    finally:
        platform.kube.done("uncordon", node)
    assert stage.moved(began)["redirect"] > 0, "nobody was on the gateway of the drained node"


def kill_kubelet(stage: Stage) -> None:
    """A node's kubelet dies and comes back: its pods go on, its gateway's clients may only be asked to go elsewhere."""
    platform = stage.platform
    name = sorted(platform.nodes_of("gateway") - platform.nodes_of("state") or platform.nodes_of("gateway"))[-1]
    node = stage.node(name)
    with stage.step(f"kill the kubelet of {name}"):
        node.stop_kubelet()
        try:
            wait_for(f"{name} is not Ready", lambda: not _node_ready(platform, name), 90)
            wait_for(
                f"the pods of {name} are given up",
                lambda: any("deletionTimestamp" in p["metadata"] for p in platform.pods("gateway")),
                90,
                seen=platform.state,
            )
        finally:
            node.start_kubelet()
        wait_for(f"{name} is Ready again", lambda: _node_ready(platform, name), 120)
        platform.wait_gateways(2, 180)


def lose_node(stage: Stage) -> None:
    """Power loss of a node with a gateway, then it boots again. Connections to it may break until it is back."""
    platform = stage.platform
    platform.scale(3)
    platform.wait_gateways(3, 120)
    spared = platform.nodes_of("state")
    name = sorted(platform.nodes_of("gateway") - spared)[-1]
    node = stage.node(name)
    with stage.step(f"lose {name}"):
        excuse = stage.load.excuse(node.names.ip, f"{name} lost its power")
        node.lose()
        try:
            wait_for(f"{name} is not Ready", lambda: not _node_ready(platform, name), 90)
            stage.wait_online(120)
        finally:
            node.recover()
        wait_for(f"{name} is Ready again", lambda: _node_ready(platform, name), 120)
        platform.wait_gateways(3, 240)
        excuse.ends(time.monotonic())
    with stage.step("scale 3 to 2 again"):
        platform.scale(2)
        platform.wait_gateways(2, 150)


def restart_shards(stage: Stage) -> None:
    """Every shard's pod is deleted, one after the other."""
    platform = stage.platform
    for pod in platform.pods("state"):
        name, uid = pod["metadata"]["name"], pod["metadata"]["uid"]

        def back(name: str = name, uid: str = uid) -> bool:
            found = platform.kube.get("Pod", name)
            return found is not None and found["metadata"]["uid"] != uid and pod_ready(found)

        with stage.step(f"restart {name}"):
            platform.kube.done("delete", "pod", name, "--wait=false")
            wait_for(f"{name} is back", back, 120, seen=platform.state)


def add_and_remove_a_shard(stage: Stage) -> None:
    """2 → 3 → 2 shards: a third of the slots moves, and back."""
    platform = stage.platform

    def slots() -> dict[str, int]:
        record, found = platform.topology(), Counter[str]()
        for first, last, shard, _ in record.get("slots", ()):
            found[shard] += last - first + 1
        return {} if record.get("move") else dict(found)

    for shards in (3, 2):
        with stage.step(f"{shards} shards"):
            platform.patch({"state": {"shards": shards}})

            def spread(shards: int = shards) -> bool:
                counts = slots()
                return len(counts) == shards == len(platform.pods("state")) and min(counts.values()) >= 1024 // shards

            wait_for(f"the slots are spread over {shards} shards", spread, 240, seen=slots)


def restart_operator(stage: Stage) -> None:
    """The operator's pod is deleted; afterwards a new one acts on what changes."""
    platform = stage.platform
    with stage.step("restart the operator"):
        before = {p["metadata"]["uid"] for p in platform.kube.items("Pod", OPERATOR_LABEL)}
        platform.kube.done("delete", "pod", "-l", OPERATOR_LABEL, "--wait=false")

        def another() -> bool:
            pods = platform.kube.items("Pod", OPERATOR_LABEL)
            return any(p["metadata"]["uid"] not in before and pod_ready(p) for p in pods)

        wait_for("another operator is Ready", another, 120, seen=platform.state)


def quiet(stage: Stage) -> None:
    """A minute in which nothing changes: the operator writes nothing but its Lease; then it acts upon a change in time.

    A probe that a busy machine answers late is a change, so there are some minutes for the quiet one.
    """
    platform = stage.platform
    with stage.step("a quiet minute"):
        time.sleep(QUIET_S)  # nothing is waited for: that nothing happens is what is looked at
        wait_for(
            "a minute passes in which the operator writes nothing but its Lease",
            lambda: not _written(stage, QUIET_S),
            3 * QUIET_S,
            seen=lambda: _written(stage, QUIET_S),
            poll_s=5.0,
        )
    with stage.step("a change after the quiet"):
        platform.scale(3)
        wait_for("the operator acts", lambda: _wanted(platform) == 3, ACTS_S, seen=lambda: _wanted(platform))
        platform.wait_gateways(3, 120)


def _wanted(platform: Platform) -> int:
    found = platform.kube.get("StatefulSet", platform.pool) or {}
    return int(found.get("spec", {}).get("replicas", 0))


def _written(stage: Stage, last_s: float) -> list[str]:
    """Writes by the operator in the last seconds, less its Lease."""
    assert stage.testbed is not None
    since = datetime.fromtimestamp(time.time() - last_s, UTC).isoformat().replace("+00:00", "Z")
    who = f"system:serviceaccount:{stage.platform.kube.namespace}:"
    return [
        f"{w.at} {w.user} {w.verb} {w.resource} {w.name} {w.code}"
        for w in writes(stage.testbed, since)
        if w.user.startswith(who) and w.resource != "leases"
    ]


def _node_ready(platform: Platform, name: str) -> bool:
    node = platform.kube.get("Node", name)
    return node is not None and pod_ready(node)
