"""What the operator renders, on a real API server: each object is taken without a warning, a second apply changes nothing,
pods are admitted: gateways on the host's network where that is allowed, everything else at the level `restricted`.

Needs PLATO_E2E_KUBECONFIG. No operator runs: this test applies as it would.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from kubernetes.aio import config
from kubernetes.aio.client import Configuration
from manifest_inputs import FULL, FULL_POOL, PLAIN, cluster, orders, snapshot
from plato_operator.core.orders import Apply
from plato_operator.core.snapshot import Snapshot
from plato_operator.creation import refused_pods
from plato_operator.kube import Kube
from plato_operator.manifests import CREATED_ONCE, FIELD_MANAGER, INITIAL_FIELD_MANAGER, initial, render

CRDS = Path(__file__).resolve().parent.parent / "crds"
KUBECONFIG = os.environ.get("PLATO_E2E_KUBECONFIG", "")
LEVEL = "pod-security.kubernetes.io"

pytestmark = pytest.mark.skipif(not KUBECONFIG, reason="PLATO_E2E_KUBECONFIG names no cluster")

SMALL = {"requests": {"cpu": "1m", "memory": "1Mi"}}
"""So that the pods, whose image does not exist, take no room."""
HOST = {
    **PLAIN,
    "version": "none",
    "images": {"pullPolicy": "Never"},
    "networkPolicy": True,
    "state": {"resources": SMALL},
    "msg": {"resources": SMALL},
    "ipconfig": {"resources": SMALL},
    "gateways": {"template": {"resources": SMALL, "ports": {"tcp": 9150, "ws": 9151, "admin": 9159}}},
}
RESTRICTED = {
    **FULL,
    "version": "none",
    "images": {"pullPolicy": "Never", "pullSecrets": [{"name": "pull"}]},
    "state": {"shards": 1, "resources": SMALL},
    "msg": {"resources": SMALL, "placement": {"tolerations": FULL["msg"]["placement"]["tolerations"]}},
    "ipconfig": {"resources": SMALL},
    "gateways": {"template": {**FULL_POOL, "resources": SMALL, "publicAddress": "HostIP"}},
    "monitoring": {},
}


def kubectl(*args: str, given: object = None, warns: bool = False) -> str:
    """Output of a call that must succeed, without a warning unless it `warns`."""
    text = json.dumps(given) if given is not None else None
    result = subprocess.run(
        ["kubectl", "--kubeconfig", KUBECONFIG, *args], input=text, capture_output=True, text=True, timeout=60, check=False
    )  # fmt: skip
    assert result.returncode == 0, f"{' '.join(args)}: {result.stderr}"
    assert warns or "Warning" not in result.stderr, result.stderr
    return result.stdout


def wait_for(what: str, met: Callable[[], bool], seconds: int = 60) -> None:
    """Until it holds."""
    end = time.monotonic() + seconds
    while not met():
        assert time.monotonic() < end, what
        time.sleep(0.5)


@pytest.fixture(scope="module", params=["privileged", "restricted"])
def level(request: pytest.FixtureRequest) -> str:
    """The pod security level of the namespace."""
    return str(request.param)


@pytest.fixture(scope="module")
def world(level: str) -> Iterator[Snapshot]:
    """A namespace with a PlatoCluster, its shards and its default pool, made as the operator makes them."""
    namespace = "op-manifests" if level == "privileged" else "op-restricted"
    have = subprocess.run(
        ["kubectl", "--kubeconfig", KUBECONFIG, "get", "crd", "platoclusters.plato.im"],
        capture_output=True,
        check=False,
    )
    if have.returncode:
        kubectl("apply", "--server-side", "-f", str(CRDS))
    waited = ["wait", "--for=condition=Established", "crd/platoclusters.plato.im", "--timeout=30s"]
    # It fails, and does not wait, where a definition that has just come has no conditions yet.
    words = ["kubectl", "--kubeconfig", KUBECONFIG, *waited]
    wait_for("the definition is served", lambda: not subprocess.run(words, check=False).returncode)
    kubectl("delete", "namespace", namespace, "--ignore-not-found", "--timeout=50s")
    labels = {f"{LEVEL}/{mode}": level for mode in ("enforce", "warn")}
    meta = {"name": namespace, "labels": labels}
    kubectl("create", "-f", "-", given={"apiVersion": "v1", "kind": "Namespace", "metadata": meta})
    spec = HOST if level == "privileged" else RESTRICTED
    meta = {"name": "demo", "namespace": namespace}
    # paused, for an operator that happens to watch all namespaces
    body = {
        "apiVersion": "plato.im/v1alpha1",
        "kind": "PlatoCluster",
        "metadata": meta,
        "spec": {**spec, "paused": True},
    }
    made = json.loads(kubectl("create", "-o", "json", "-f", "-", given=body))
    of = cluster(spec, namespace=namespace, uid=made["metadata"]["uid"])
    snap = snapshot(of)
    uids = {o.name: send(o, snap)["metadata"]["uid"] for o in orders(snap) if o.kind in ("StateShard", "GatewayPool")}
    yield snapshot(of, uids, uids["demo-edge"])
    kubectl("delete", "namespace", namespace, "--wait=false")


def send(order: Apply, snap: Snapshot, *more: str) -> dict[str, Any]:
    """As the operator does it; the object as the API server has it."""
    if order.kind in CREATED_ONCE:
        answer = kubectl("create", "-o", "json", *more, "-f", "-", given=render(order, snap))
    else:
        first = initial(order, snap)
        if first is not None:
            apply_as(INITIAL_FIELD_MANAGER, first, *more)
        answer = apply_as(FIELD_MANAGER, render(order, snap), *more)
    made: dict[str, Any] = json.loads(answer)
    return made


def apply_as(manager: str, body: object, *more: str) -> str:
    """Server-side apply."""
    how = ("--server-side", "--force-conflicts", f"--field-manager={manager}", "-o", "json")
    return kubectl("apply", *how, *more, "-f", "-", given=body)


def test_everything_is_taken_and_taken_again_without_a_change(world: Snapshot) -> None:
    """Dry and real, without a warning; the second time nothing is written."""
    wanted = [o for o in orders(world) if o.kind not in ("StateShard", "GatewayPool", "PodMonitor")]
    assert len({o.kind for o in wanted}) == 10
    for order in wanted:
        send(order, world, "--dry-run=server")
    made = {(o.kind, o.name): send(o, world) for o in wanted}
    for order in wanted:
        if order.kind in CREATED_ONCE:
            continue
        body = render(order, world)
        # A controller may write the status between two of ours, but not each time.
        for _ in range(5):
            first, second = (json.loads(apply_as(FIELD_MANAGER, body))["metadata"] for _ in range(2))
            if first["resourceVersion"] == second["resourceVersion"]:
                break
        else:
            raise AssertionError(f"{order.kind} {order.name} is written again and again")
        assert second.get("generation") == made[order.kind, order.name]["metadata"].get("generation"), order


def test_pods_are_admitted(world: Snapshot) -> None:
    """The namespace's level lets in what controllers make of the templates."""
    for order in orders(world):
        if order.kind in ("StatefulSet", "Deployment"):
            send(order, world)
    get = ("get", "pods", "-n", world.cluster.namespace, "-o", "json")
    pool = world.pools["demo-edge"].spec
    wanted = pool.replicas + world.cluster.spec.state.shards + world.cluster.spec.msg.replicas
    wanted += world.cluster.spec.ipconfig.replicas

    def all_there() -> bool:
        pods = json.loads(kubectl(*get))["items"]
        return len([p for p in pods if p["metadata"]["labels"]["plato.im/component"] != "migrate"]) >= wanted

    wait_for(f"{wanted} pods", all_there)
    pods = {p["metadata"]["name"]: p for p in json.loads(kubectl(*get))["items"]}
    gateway = pods["demo-edge-0"]
    assert gateway["spec"].get("hostNetwork", False) is (pool.network == "Host")
    assert gateway["spec"]["readinessGates"] == [{"conditionType": "plato.im/serving"}]
    ports = {"tcp", "ws", "admin"} | ({"poll"} if pool.ports.poll else set())
    assert {p["name"] for p in gateway["spec"]["containers"][0]["ports"]} == ports


def test_the_default_pools_replicas_are_its_own(world: Snapshot) -> None:
    """Set at creation, kept by later applies, and by them after somebody scaled."""
    order = next(o for o in orders(world) if o.kind == "GatewayPool")
    where = ("gwpool/demo-edge", "-n", world.cluster.namespace)
    replicas = ("get", *where, "-o", "jsonpath={.spec.replicas}")
    assert kubectl(*replicas) == str(world.cluster.spec.gateways.initial_replicas)
    apply_as(FIELD_MANAGER, render(order, world))
    assert kubectl(*replicas) == str(world.cluster.spec.gateways.initial_replicas)
    kubectl("scale", *where, "--replicas=1")
    apply_as(FIELD_MANAGER, render(order, world))
    assert kubectl(*replicas) == "1"


def test_a_role_lets_pods_read_one_config_map(world: Snapshot) -> None:
    """The record, by its name; nothing else."""
    for order in orders(world):
        if order.kind in ("ServiceAccount", "Role", "RoleBinding"):
            send(order, world)
    account = f"--as=system:serviceaccount:{world.cluster.namespace}:demo"
    for verb in ("get", "list", "watch"):
        words = ("auth", "can-i", verb, "configmaps/demo-topology", account, "-n", world.cluster.namespace)

        def may(words: tuple[str, ...] = words) -> bool:  # the API server learns of a Role a moment after it took it
            asked = subprocess.run(
                ["kubectl", "--kubeconfig", KUBECONFIG, *words], capture_output=True, text=True, timeout=60, check=False
            )
            return asked.stdout.strip() == "yes"

        wait_for(f"it may {verb}", may, 20)


async def test_a_namespace_that_refuses_pods_is_quoted(world: Snapshot) -> None:
    """A pool on the host's network where only restricted pods may be, and a quota of no pods where all may."""
    namespace = world.cluster.namespace
    send(next(o for o in orders(world) if o.kind == "ServiceAccount"), world)
    order = next(o for o in orders(world) if o.kind == "StatefulSet" and o.role == "gateway")
    made = render(order, world)
    made["metadata"] = {"name": "refused", "namespace": namespace}
    made["spec"]["replicas"] = 1
    made["spec"]["selector"] = {"matchLabels": {"refused": "yes"}}
    made["spec"]["template"]["metadata"] = {"labels": {"refused": "yes"}}
    restricted = world.pools["demo-edge"].spec.network == "Pod"
    if restricted:
        made["spec"]["template"]["spec"] |= {"hostNetwork": True}
        made["spec"]["template"]["spec"]["containers"][0]["ports"] = []
    else:
        spec = {"hard": {"pods": "0"}}
        quota = {
            "apiVersion": "v1",
            "kind": "ResourceQuota",
            "metadata": {"name": "none", "namespace": namespace},
            "spec": spec,
        }
        kubectl("create", "-f", "-", given=quota)
        # Until it is counted, pods are refused in other words.
        hard = ("get", "resourcequota", "none", "-n", namespace, "-o", "jsonpath={.status.hard.pods}")
        wait_for("the quota is counted", lambda: kubectl(*hard) == "0")
    sts = json.loads(kubectl("create", "-o", "json", "-f", "-", given=made, warns=restricted))
    found_at = Configuration()
    await config.load_kube_config(KUBECONFIG, client_configuration=found_at)  # type: ignore[no-untyped-call]  # as generated
    kube = Kube(found_at)
    try:
        end = time.monotonic() + 60
        while not (found := await refused_pods(kube, namespace, {("StatefulSet", "refused"): sts})):
            assert time.monotonic() < end, "nothing is said"
            await asyncio.sleep(0.5)
    finally:
        await kube.close()
    reason, message = found["StatefulSet", "refused"]
    assert reason == ("Forbidden" if restricted else "QuotaExceeded")
    assert ("violates PodSecurity" if restricted else "exceeded quota: none") in message
