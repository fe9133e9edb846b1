"""The operator's edge on a real API server: a real process of it, no data plane. What is written, when, and what is not.

No pod of these clusters runs (their placement names no node), so what is seen is the operator's doing alone. The migration
Job is declared done by hand, since msg and state wait for it.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from e2e.bad_api import GARBAGE, GOOD, HANG, BadApi
from e2e.frame.kube import Kube, Object, wait_for
from e2e.frame.process import Operator

NAMESPACE = "op-edge-e2e"
ROOT = Path(__file__).resolve().parents[1]
CHILDREN = (
    "StatefulSet", "Deployment", "Job", "Service", "PodDisruptionBudget", "ServiceAccount", "Role", "RoleBinding",
    "ConfigMap",
)  # fmt: skip
OURS = ("PlatoCluster", "GatewayPool", "StateShard")
NOWHERE = {"placement": {"nodeSelector": {"plato.im/e2e": "nowhere"}}}
LEASE_S = 15

pytestmark = [
    pytest.mark.skipif(not os.environ.get("PLATO_E2E_KUBECONFIG"), reason="PLATO_E2E_KUBECONFIG names no cluster"),
    pytest.mark.timeout(240),
]


Start = Callable[..., Operator]


@pytest.fixture
def start(tmp_path: Path, kubeconfig: Path) -> Iterator[Start]:
    """Starts operators, which end with the test."""
    started: list[Operator] = []

    def one(config: Path = kubeconfig) -> Operator:
        started.append(Operator(tmp_path, config, NAMESPACE))
        return started[-1]

    yield one
    for each in started:
        each.end()


@pytest.fixture(scope="module", autouse=True)
def secrets(kube: Kube) -> None:
    """CRDs, and the Secrets that each cluster names."""
    kube.define()
    kube.secret("db", {"uri": "postgresql://nowhere"})
    kube.secret("kv", {"url": "redis://nowhere"})


@pytest.fixture(autouse=True)
def clean(kube: Kube) -> Iterator[None]:
    """No cluster is left for the next test."""
    yield
    kube.done("delete", "platocluster", "--all", "--wait=false")
    wait_for("children go with their clusters", lambda: not objects(kube), 60, seen=lambda: sorted(objects(kube)))


def cluster(name: str = "demo", **spec: Any) -> Object:
    """A PlatoCluster whose pods find no node."""
    return {
        "apiVersion": "plato.im/v1alpha1", "kind": "PlatoCluster", "metadata": {"name": name},
        "spec": {
            "version": "0.1.0", "database": {"uri": {"name": "db"}, "schema": name.replace("-", "_")},
            "store": {"url": {"name": "kv"}, "keyPrefix": f"{name}:"},
            "auth": {"guests": True}, "state": NOWHERE, "msg": NOWHERE, "ipconfig": NOWHERE,
            "gateways": {"template": {**NOWHERE, "ports": {"tcp": 9000, "ws": 9001, "admin": 9009}}}, **spec,
        },
    }  # fmt: skip


def objects(kube: Kube, name: str = "") -> dict[tuple[str, str], Object]:
    """The objects of a cluster, or of all of them, but pods."""
    selector = f"plato.im/cluster={name}" if name else "plato.im/cluster"
    found = {(kind, o["metadata"]["name"]): o for kind in CHILDREN for o in kube.items(kind, selector)}
    for kind in OURS:
        for o in kube.items(kind):
            its = o["metadata"]["name"] if kind == "PlatoCluster" else o["spec"]["clusterRef"]["name"]
            if its == name or not name:
                found[kind, o["metadata"]["name"]] = o
    return found


def whole(kube: Kube, name: str = "demo") -> None:
    """Waits until everything was made; says that the migration is done, as its pod would."""

    def migrated() -> bool:
        for job in kube.items("Job", f"plato.im/cluster={name}"):
            if not job.get("status", {}).get("succeeded"):
                change = json.dumps({"status": {"succeeded": 1}})
                kube.done("patch", "job", job["metadata"]["name"], "--subresource=status", "--type=merge", "-p", change)
            return True
        return False

    wait_for("the migration Job is made", migrated, LEASE_S + 30, seen=lambda: sorted(objects(kube, name)))
    wanted = [("StatefulSet", f"{name}-s0"), ("StatefulSet", f"{name}-edge"), ("Deployment", f"{name}-msg")]
    wait_for("all children are made", lambda: objects(kube, name).keys() >= set(wanted), 30,
             seen=lambda: sorted(objects(kube, name)))  # fmt: skip


def versions(kube: Kube, name: str = "demo") -> dict[tuple[str, str], str]:
    """{object: resourceVersion}."""
    return {key: o["metadata"]["resourceVersion"] for key, o in objects(kube, name).items()}


def settled(kube: Kube, operator: Operator) -> dict[tuple[str, str], str]:
    """Waits until nothing changed for longer than a status may have to wait, over two passes and more."""
    last: dict[tuple[str, str], str] = {}
    since, passes = 0.0, 0.0

    def still() -> bool:
        nonlocal last, since, passes
        now = versions(kube)
        if now != last:
            last, since, passes = now, time.monotonic(), operator.metric("plato_operator_passes_total")
        return time.monotonic() - since > 12 and operator.metric("plato_operator_passes_total") >= passes + 2

    wait_for("nothing changes any more", still, 90, seen=lambda: last)
    return last


def stalled(kube: Kube, name: str, reason: str) -> str:
    """Waits for the condition Stalled with this reason; its message."""

    def told() -> str:
        its = kube.condition("PlatoCluster", name, "Stalled")
        return str(its["message"]) if its.get("status") == "True" and its.get("reason") == reason else ""

    return wait_for(f"Stalled={reason}", told, 30, seen=lambda: (kube.get("PlatoCluster", name) or {}).get("status"))


def test_a_cluster_gets_its_children_each_controlled_by_ours(kube: Kube, start: Start) -> None:
    """kubectl apply of twelve lines makes it all; each object goes when its owner goes."""
    operator = start()
    kube.apply(cluster())
    whole(kube)
    made = objects(kube, "demo")
    uids = {o["metadata"]["uid"]: key for key, o in made.items() if key[0] in OURS}
    for key, made_object in made.items():
        if key[0] != "PlatoCluster":
            owners = made_object["metadata"].get("ownerReferences") or []
            assert next(o["uid"] for o in owners if o.get("controller")) in uids, key
    assert {name for kind, name in made if kind == "StateShard"} == {"demo-s0", "demo-s1"}
    assert kube.get("Secret", "demo-admin") is not None
    assert operator.ready()
    assert operator.get("/healthz") == (200, "ok\n")


@pytest.mark.apiserver
def test_o07_a_quiet_cluster_sees_no_write_and_then_a_change_acts_within_10_s(kube: Kube, start: Start) -> None:
    """Three and more passes change no resourceVersion; the process counts no write either."""
    operator = start()
    kube.apply(cluster())
    whole(kube)
    before = settled(kube, operator)
    was = objects(kube, "demo")
    passes, writes = operator.metric("plato_operator_passes_total"), operator.metric("plato_operator_writes_total")
    wait_for("three more passes", lambda: operator.metric("plato_operator_passes_total") >= passes + 3, 45)
    now = objects(kube, "demo")
    changed = {key: (was[key], o) for key, o in now.items() if o["metadata"]["resourceVersion"] != before.get(key)}
    assert not changed
    assert operator.metric("plato_operator_writes_total") == writes
    kube.patch("platocluster", "demo", {"spec": {"ipconfig": {"replicas": 3}}})

    def acted() -> bool:
        made = kube.get("Deployment", "demo-ipconfig")
        return made is not None and made["spec"]["replicas"] == 3

    wait_for("the change acts", acted, 10)


@pytest.mark.apiserver
def test_o05_the_leader_that_slept_finds_another_one_and_ends(kube: Kube, start: Start) -> None:
    """Two operators; the stopped one wakes after the other has taken over: it ends, in words, and changed nothing."""
    first = start()
    kube.apply(cluster())
    whole(kube)
    wait_for("the first one leads", first.ready, 20)
    second = start()
    wait_for("the second one waits", lambda: bool(second.lines("waiting for the Lease")), 20)
    assert second.get("/readyz")[0] == 503
    first.process.send_signal(signal.SIGSTOP)
    wait_for("the second one takes over", second.ready, LEASE_S + 15)
    claimed = settled(kube, second)
    first.process.send_signal(signal.SIGCONT)
    assert first.process.wait(20) == 1
    assert first.lines("the Lease is lost, so this process ends")
    assert versions(kube) == claimed


@pytest.mark.apiserver
def test_o20_a_restarted_operator_renders_nothing_again(kube: Kube, start: Start) -> None:
    """kill -9, another start: the record names the new writer, and no other object changed."""
    first = start()
    kube.apply(cluster())
    whole(kube)
    before = settled(kube, first)
    first.process.kill()
    first.process.wait(5)
    second = start()
    wait_for("the new one leads", second.ready, LEASE_S + 15)
    after = settled(kube, second)
    changed = {key for key in before if before[key] != after.get(key)}
    assert changed <= {("ConfigMap", "demo-topology"), ("PlatoCluster", "demo")}, (
        changed
    )  # status.epoch is the record's
    assert not second.lines("applied")


def test_what_a_cluster_cannot_be_is_said_there_and_stops_no_other(kube: Kube, start: Start) -> None:
    """A podOverlay that cannot be rendered; the other cluster of the namespace gets everything, and so does the rest of
    this one; mended, it goes on."""
    start()
    kube.apply(cluster("bad", msg={**NOWHERE, "podOverlay": {"spec": {"hostNetwork": True}}}), cluster("good"))
    whole(kube, "good")
    wait_for("the Job is made", lambda: bool(kube.items("Job", "plato.im/cluster=bad")), 20)
    job = kube.items("Job", "plato.im/cluster=bad")[0]["metadata"]["name"]
    kube.done("patch", "job", job, "--subresource=status", "--type=merge", "-p", '{"status":{"succeeded":1}}')
    assert "hostNetwork" in stalled(kube, "bad", "InvalidOverlay")
    assert kube.get("StatefulSet", "bad-s0") is not None
    assert kube.get("Deployment", "bad-msg") is None
    kube.patch("platocluster", "bad", {"spec": {"msg": {"podOverlay": None}}})
    wait_for("mended, it is made", lambda: kube.get("Deployment", "bad-msg") is not None, 15)
    wait_for(
        "and Stalled is over", lambda: kube.condition("PlatoCluster", "bad", "Stalled").get("status") == "False", 15
    )


def test_a_quota_that_is_used_up_is_said(kube: Kube, start: Start) -> None:
    """The API server's own words, with the reason QuotaExceeded; when there is room, it goes on by itself."""
    quota = {
        "apiVersion": "v1",
        "kind": "ResourceQuota",
        "metadata": {"name": "small"},
        "spec": {"hard": {"services": "1"}},
    }
    kube.apply(quota)
    start()
    try:

        def counted() -> bool:
            return bool((kube.get("ResourceQuota", "small") or {}).get("status", {}).get("hard"))

        wait_for("the quota is counted", counted, 20)
        kube.apply(cluster())
        assert "small" in stalled(kube, "demo", "QuotaExceeded")
    finally:
        kube.done("delete", "resourcequota", "small")
    whole(kube)
    wait_for("Stalled is over", lambda: kube.condition("PlatoCluster", "demo", "Stalled").get("status") == "False", 90)


@pytest.mark.apiserver
def test_o09_a_scaled_pool_stays_scaled_and_its_replicas_are_not_ours(kube: Kube, start: Start) -> None:
    """kubectl scale, then a change of the PlatoCluster that renders the pool again."""
    start()
    kube.apply(cluster())
    whole(kube)
    kube.done("scale", "gatewaypool", "demo-edge", "--replicas=4")
    wait_for(
        "the StatefulSet follows", lambda: (kube.get("StatefulSet", "demo-edge") or {})["spec"]["replicas"] == 4, 15
    )
    kube.patch("platocluster", "demo", {"spec": {"gateways": {"template": {"drain": {"pacePerSecond": 100}}}}})

    def rendered() -> bool:
        return bool((kube.get("GatewayPool", "demo-edge") or {})["spec"]["drain"]["pacePerSecond"] == 100)

    wait_for("the pool is rendered again", rendered, 15)
    pool = json.loads(kube.done("get", "gatewaypool", "demo-edge", "-o", "json", "--show-managed-fields"))
    assert pool["spec"]["replicas"] == 4
    for entry in pool["metadata"]["managedFields"]:
        if entry["manager"].startswith("plato-operator"):
            assert "f:replicas" not in entry["fieldsV1"].get("f:spec", {}), entry["manager"]


@pytest.mark.parametrize("how", ["410", "403", "404", "500", GARBAGE, HANG])
@pytest.mark.apiserver
def test_o21_watches_that_are_answered_badly_do_not_hide_a_change(
    kube: Kube, start: Start, kubeconfig: Path, tmp_path: Path, how: str
) -> None:
    """It lists on its own, or ends and is started again, as a kubelet would do; a change made meanwhile acts in time."""
    with BadApi(kubeconfig, tmp_path) as api:
        operator = start(api.kubeconfig)
        kube.apply(cluster())
        whole(kube)
        api.answer(how)
        kube.patch("platocluster", "demo", {"spec": {"ipconfig": {"replicas": 3}}})

        def acted() -> bool:
            nonlocal operator
            if operator.process.poll() is not None:
                assert operator.process.returncode == 1
                assert operator.lines("a watch ended, so this process ends")
                operator = start(api.kubeconfig)
            made = kube.get("Deployment", "demo-ipconfig")
            return made is not None and made["spec"]["replicas"] == 3

        wait_for("the change acts", acted, 45)
        asked = api.watched
        api.answer(GOOD)

        def watches() -> bool:
            nonlocal operator
            if operator.process.poll() is not None:
                operator = start(api.kubeconfig)
            return operator.ready() and api.watched > asked

        wait_for("it watches again", watches, 100)
        operator.end()  # while it can still give back its Lease


@pytest.mark.apiserver
def test_o22_a_right_that_is_missing_is_named_in_the_condition(kube: Kube, start: Start, tmp_path: Path) -> None:
    """The chart's role without one verb: the condition names verb and resource, the probes say it, and given back it
    goes on."""
    role = yaml.safe_load((ROOT / "charts" / "plato" / "files" / "role.yaml").read_text())
    lease = {
        "apiGroups": ["coordination.k8s.io"],
        "resources": ["leases"],
        "verbs": ["get", "create", "update", "patch"],
    }
    without = [
        {**rule, "verbs": [v for v in rule["verbs"] if v != "list"]}
        if "poddisruptionbudgets" in rule["resources"]
        else rule
        for rule in role
    ]
    config = _limited(kube, tmp_path, [*without, lease])
    operator = start(config)
    kube.apply(cluster())
    words = stalled(kube, "demo", "Forbidden")
    assert "list" in words
    assert "poddisruptionbudgets" in words
    assert kube.condition("PlatoCluster", "demo", "Ready")["status"] == "Unknown"
    _limited(kube, tmp_path, [*role, lease])
    whole(kube)
    assert operator.process.poll() is None
    wait_for("it goes on", lambda: kube.condition("PlatoCluster", "demo", "Stalled")["status"] == "False", 30)


def _limited(kube: Kube, folder: Path, rules: list[Any]) -> Path:
    """A kubeconfig of a ServiceAccount with these rights in our namespace."""
    api = "rbac.authorization.k8s.io"
    subject = {"kind": "ServiceAccount", "name": "limited", "namespace": NAMESPACE}
    kube.apply(
        {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": "limited"}},
        {"apiVersion": f"{api}/v1", "kind": "Role", "metadata": {"name": "limited"}, "rules": rules},
        {
            "apiVersion": f"{api}/v1", "kind": "RoleBinding", "metadata": {"name": "limited"}, "subjects": [subject],
            "roleRef": {"apiGroup": api, "kind": "Role", "name": "limited"},
        },
    )  # fmt: skip
    made = yaml.safe_load(kube.kubeconfig.read_text())
    token = kube.done("create", "token", "limited", "--duration=1h").strip()
    made["users"] = [{"name": each["name"], "user": {"token": token}} for each in made["users"]]
    path = folder / "limited.kubeconfig"
    path.write_text(yaml.safe_dump(made))
    return path
