"""Objects as the snapshot has them, the age of CRDs, the order of a look, the probes."""

from __future__ import annotations

import base64
import copy
import ssl
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import aiohttp
import pytest
import yaml
from plato.topology.record import Gateway, Topology, dumps, even_ranges
from plato_operator import crds, observe, reading
from plato_operator.core.orders import Apply
from plato_operator.core.plan import one_pass
from plato_operator.core.rebuild import rebuilt
from plato_operator.core.snapshot import Child, Endpoint, Memory, Node, Pool, Report, Snapshot
from plato_operator.kube import Kube, Refused, Unreachable
from plato_operator.observe import BadResource, Observer
from plato_operator.probes import SILENT_S, Health
from plato_operator.reports import Access, Reports, Target
from world import pool_spec

CRDS = Path(__file__).resolve().parents[2] / "crds"


def pod_object(name: str = "demo-edge-1", **status: Any) -> dict[str, Any]:
    """A gateway pod as the API server has it."""
    env = {"TCP_PORT": "9000", "WS_PORT": "9001", "ADMIN_PORT": "9009", "WORKERS": "4"}
    return {
        "metadata": {
            "name": name, "namespace": "ns", "uid": "p1", "creationTimestamp": "2026-09-21T14:13:20Z",
            "labels": {
                "plato.im/cluster": "demo", "plato.im/component": "gateway", "plato.im/pool": "demo-edge",
                "topology.kubernetes.io/zone": "z1",
            },
            "annotations": {"plato.im/input-hash": "t1", "plato.im/version": "0.1.0", "plato.im/drain": ""},
        },
        "spec": {
            "nodeName": "n1",
            "containers": [
                {"name": "sidecar"},
                {"name": "gateway", "env": [{"name": f"PLATO_GATEWAY__{k}", "value": v} for k, v in env.items()]},
            ],
        },
        "status": {
            "phase": "Running", "podIP": "10.0.0.5", "hostIP": "10.0.0.1",
            "containerStatuses": [
                {"name": "sidecar", "state": {"running": {}}}, {"name": "gateway", "state": {"running": {}}},
            ],
            "conditions": [
                {"type": "Ready", "status": "True", "lastTransitionTime": "2026-09-21T14:13:21Z"},
                {"type": "plato.im/serving", "status": "False"},
            ],
            **status,
        },
    }  # fmt: skip


def pool_of(**fields: Any) -> Any:
    return {"demo-edge": Pool("demo-edge", "pu", 1, pool_spec(**fields))}


NODE = {
    "metadata": {"name": "n1", "annotations": {"plato.im/public-address": "gw1.example"}},
    "spec": {"unschedulable": True},
    "status": {
        "addresses": [{"type": "InternalIP", "address": "10.0.0.1"}, {"type": "ExternalIP", "address": "192.0.2.1"}],
        "conditions": [{"type": "Ready", "status": "Unknown", "lastTransitionTime": "2026-09-21T14:13:20Z"}],
    },
}


def test_a_gateway_pod_is_read_whole() -> None:
    """Its endpoint by its own template's environment, whatever the pool says now."""
    pod = reading.pod(pod_object(), pool_of(), None)
    assert pod.endpoint == Endpoint("10.0.0.1", 9000, 9001, "10.0.0.5:9009", 4)
    assert (pod.owner, pod.ordinal, pod.zone, pod.node) == ("demo-edge", 1, "z1", "n1")
    assert (pod.template_hash, pod.version, pod.drain_asked) == ("t1", "0.1.0", True)
    assert (pod.ready, pod.running, pod.gate, pod.deleting) == (True, True, False, False)
    assert pod.ready_since_ms - pod.created_ms == 1000


def test_how_a_pod_is_asked_is_what_its_own_template_says() -> None:
    """Not what the spec says now: while tls.internal is set, shards that are still to roll are asked in plain text. Else
    none of them would report its slots, and two could never roll."""
    plain = pod_object()
    assert not reading.pod(plain, pool_of(), None).tls
    plain["spec"]["containers"][1]["env"].append(
        {"name": "PLATO_TLS__INTERNAL_DIR", "value": "/etc/plato/tls/internal"}
    )
    assert reading.pod(plain, pool_of(), None).tls == reading.SOME, "an overlay's volume: by the CA of the spec"
    plain["spec"]["volumes"] = [
        {"name": "tmp", "emptyDir": {}},
        {"name": "tls-internal", "secret": {"secretName": "old"}},
    ]
    assert reading.pod(plain, pool_of(), None).tls == "old"


@pytest.mark.parametrize(
    ("fields", "nodes", "ip"),
    [
        ({}, None, "10.0.0.1"),
        ({"network": "Pod"}, None, "10.0.0.5"),
        ({"public_address": "NodeExternalIP"}, {"n1": NODE}, "192.0.2.1"),
        ({"public_address": "NodeAnnotation"}, {"n1": NODE}, "gw1.example"),
        ({"public_address": "NodeExternalIP"}, None, ""),
        ({"public_address": "NodeAnnotation"}, {"n1": {"metadata": {"name": "n1"}}}, ""),
    ],
)
def test_clients_are_told_the_address_that_the_pool_asks_for(fields: Any, nodes: Any, ip: str) -> None:
    """Empty where it is not known: such a pod is not admitted."""
    pod = reading.pod(pod_object(), pool_of(**fields), nodes)
    assert pod.endpoint is not None
    assert pod.endpoint.ip == ip


def test_a_pod_that_waits_or_goes_says_so() -> None:
    """Unschedulable in the scheduler's words; a sidecar that runs does not make the gateway run."""
    waiting = pod_object(
        phase="Pending", containerStatuses=[{"name": "sidecar", "state": {"running": {}}}],
        conditions=[{"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/3 nodes"}],
    )  # fmt: skip
    waiting["metadata"]["deletionTimestamp"] = "2026-09-21T14:14:20Z"
    pod = reading.pod(waiting, pool_of(), None)
    assert (pod.unschedulable, pod.running, pod.ready, pod.gate) == ("0/3 nodes", False, False, None)
    assert pod.deleting
    assert pod.delete_at_ms - pod.created_ms == 60_000


def test_a_node_is_lost_since_its_condition_changed() -> None:
    """And cordoned by its spec."""
    assert reading.node(NODE) == Node("n1", True, reading.unix_ms("2026-09-21T14:13:20Z"))
    ready = {"metadata": {"name": "n2"}, "status": {"conditions": [{"type": "Ready", "status": "True"}]}}
    assert reading.node(ready) == Node("n2")
    assert reading.node({"metadata": {"name": "n3"}}).not_ready_since_ms == 1
    for key, barred in (("node.kubernetes.io/out-of-service", True), ("node.kubernetes.io/unreachable", False)):
        assert reading.node({"metadata": {"name": "n4"}, "spec": {"taints": [{"key": key}]}}).barred is barred
    assert reading.addresses({"n1": NODE}) == ("10.0.0.1/32",)


def test_children_are_read_with_their_hashes_and_counts() -> None:
    """observed follows the generation; a Job has its outcome."""
    raw = {
        "metadata": {
            "name": "demo-msg", "uid": "d", "generation": 3, "resourceVersion": "9",
            "annotations": {"plato.im/input-hash": "i"},
        },
        "spec": {
            "replicas": 2,
            "template": {
                "metadata": {"annotations": {"plato.im/input-hash": "t", "kubectl.kubernetes.io/restartedAt": "now"}}
            },
        },
        "status": {"observedGeneration": 2, "readyReplicas": 1, "updatedReplicas": 2},
    }  # fmt: skip
    child = reading.child("Deployment", raw)
    assert (child.input_hash, child.template_hash, child.restarted_at) == ("i", "t", "now")
    assert (child.replicas, child.ready, child.updated, child.observed) == (2, 1, 2, False)
    job = reading.child("Job", {"metadata": {"name": "j", "uid": "j"}, "status": {"failed": 2, "succeeded": 1}})
    assert (job.failed, job.succeeded, job.observed) == (2, 1, True)


def document(lacking: str = "") -> dict[str, Any]:
    """The OpenAPI document that an API server makes of our CRDs, without the field at a dotted path."""
    schemas = {}
    for file in CRDS.glob("*.yaml"):
        crd = yaml.safe_load(file.read_text())
        kind = crd["spec"]["names"]["kind"]
        schema = copy.deepcopy(crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"])
        if lacking.startswith(f"{kind}."):
            *above, last = lacking.split(".")[1:]
            at = schema["properties"]
            for key in above:
                at = at[key].get("properties") or at[key]["items"]["properties"]
            del at[last]
        gvk = {"group": "plato.im", "version": "v1alpha1", "kind": kind}
        schemas[f"im.plato.v1alpha1.{kind}"] = {**schema, "x-kubernetes-group-version-kind": [gvk]}
    return {"components": {"schemas": schemas}}


def test_our_crds_are_new_enough_and_a_newer_one_is_no_harm() -> None:
    """Fields that we do not know are passed over."""
    assert crds.judged(document()) == ""
    newer = document()
    schema = newer["components"]["schemas"]["im.plato.v1alpha1.GatewayPool"]
    schema["properties"]["spec"]["properties"]["later"] = {"type": "string"}
    assert crds.judged(newer) == ""


@pytest.mark.parametrize(
    "field",
    [
        "PlatoCluster.spec.networkPolicy", "PlatoCluster.spec.gateways.template.drain.onCordon",
        "PlatoCluster.spec.bus.kafka.topic", "GatewayPool.spec.capacity.bytesPerSecond",
        "GatewayPool.status.drains.deadlineAt", "StateShard.status.podUID",
    ],
)  # fmt: skip
@pytest.mark.planner
def test_o18_an_older_crd_is_named_with_the_field_that_it_lacks(field: str) -> None:
    """At any depth, of spec and status."""
    assert field in crds.judged(document(field))


@pytest.mark.planner
async def test_o24_a_group_that_is_not_served_is_refused() -> None:
    """Another version alone is a set that we do not know."""

    class Gone:
        async def call(self, method: str, at: str) -> Any:
            raise Refused(404, "NotFound", "", at)

    assert "plato.im/v1alpha1" in await crds.lacking(cast(Kube, Gone()))
    assert "PlatoCluster" in crds.judged({})


class Server:
    """Lists and gets from a dict {(kind, name): object}, and remembers the order of what was asked."""

    def __init__(self) -> None:
        self.objects: dict[tuple[str, str], dict[str, Any]] = {}
        self.asked: list[str] = []
        self.fails: dict[str, Exception] = {}

    async def list(self, kind: str, namespace: str = "", selector: str = "") -> Any:
        self.asked.append(f"list {kind}")
        if kind in self.fails:
            raise self.fails[kind]
        return [o for (k, _), o in self.objects.items() if k == kind]

    async def get(self, kind: str, namespace: str, name: str) -> Any:
        self.asked.append(f"get {kind} {name}")
        return self.objects.get((kind, name))


CLUSTER: dict[str, Any] = {
    "metadata": {"name": "demo", "namespace": "ns", "uid": "cu", "generation": 1},
    "spec": {
        "version": "1", "database": {"uri": {"name": "db"}}, "store": {"url": {"name": "kv"}},
        "auth": {"keys": {"name": "keys"}}, "tls": {"internal": {"name": "tls"}},
    },
}  # fmt: skip


def secret(**values: str) -> dict[str, Any]:
    return {"data": {k.replace("_", "."): base64.b64encode(v.encode()).decode() for k, v in values.items()}}


def gateway(uid: str, worker_id: int) -> Gateway:
    return Gateway(uid, worker_id, 2, (), "10.0.0.1", 9000, 9001, "10.0.0.1:9009")


async def test_a_look_gets_the_record_after_the_lists_and_doubtful_pods_after_the_record() -> None:
    """A recorded pod that no list shows is asked for by name: only that retires its id."""
    server = Server()
    topology = Topology(
        "cu",
        5,
        even_ranges(["demo-s0"], 5),
        gateways={"demo-edge-1": gateway("p1", 1), "demo-edge-7": gateway("p7", 2)},
    )
    server.objects = {
        ("ConfigMap", "demo-topology"): {
            "metadata": {"resourceVersion": "12"},
            "data": {"topology.json": dumps(topology)},
        },
        ("Secret", "db"): secret(uri="x"),
        ("Secret", "kv"): secret(other="x"),
        ("Secret", "tls"): secret(tls_crt="x", tls_key="x", ca_crt="no certificate"),
    }
    async with aiohttp.ClientSession() as session:
        observer = Observer(cast(Kube, server), Reports(session, "ns", "demo"), "ns", "demo", me="me", nodes=False)
        view = await observer.look(CLUSTER, Memory(), {})
    snap = view.snapshot
    assert (snap.version, snap.topology and snap.topology.epoch) == ("12", 5)
    assert snap.live == {"demo-edge-1": "", "demo-edge-7": ""}
    assert sorted(snap.missing_secrets) == ["keys", "kv/url", "tls/ca.crt (it is no certificate)"]
    assert snap.nodes is None
    record = server.asked.index("get ConfigMap demo-topology")
    assert all(server.asked.index(f"list {kind}") < record for kind in ("Pod", "StatefulSet", "GatewayPool"))
    assert all(i > record for i, what in enumerate(server.asked) if what.startswith("get Pod"))


async def looked(server: Server, cluster: dict[str, Any]) -> Snapshot:
    async with aiohttp.ClientSession() as session:
        observer = Observer(cast(Kube, server), Reports(session, "ns", "demo"), "ns", "demo", me="me", nodes=False)
        return (await observer.look(cluster, Memory(), {})).snapshot


class Asked:
    """Reports that keeps how whom it is to ask."""

    def __init__(self) -> None:
        self.targets: dict[str, Target] = {}
        self.access = Access()

    async def refresh(self, targets: dict[str, Target], urgent: Any, access: Access) -> dict[str, Report]:
        self.targets, self.access = targets, access
        return {}

    def last_connections(self) -> dict[str, int]:
        return {}


async def test_pods_of_a_tls_that_the_spec_has_no_more_are_asked_by_an_operator_that_starts_meanwhile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The roll that takes tls.internal away, or gives it another Secret with another CA, goes by what pods report: one that
    nobody can ask would stop it for ever. Which CA signed what a pod shows, its own template says."""
    contexts: dict[str, ssl.SSLContext] = {}

    def context(cadata: str) -> ssl.SSLContext:
        return contexts.setdefault(cadata, ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT))

    monkeypatch.setattr(ssl, "create_default_context", context)
    server = Server()
    pods = {}
    for name, of in (
        ("demo-edge-0", "old"),
        ("demo-edge-1", "tls"),
        ("demo-edge-2", ""),
        ("demo-edge-3", reading.SOME),
    ):
        pods[name] = pod_object(name)
        if of:
            inside = {"name": "PLATO_TLS__INTERNAL_DIR", "value": "/etc/plato/tls/internal"}
            pods[name]["spec"]["containers"][1]["env"].append(inside)
        if of not in ("", reading.SOME):
            pods[name]["spec"]["volumes"] = [{"name": "tls-internal", "secret": {"secretName": of}}]
    server.objects = {
        ("Secret", "old"): secret(ca_crt="CA of old"),
        ("Secret", "tls"): secret(tls_crt="x", tls_key="x", ca_crt="CA of tls"),
        ("Secret", "demo-admin"): {**secret(token="t"), "metadata": {"name": "demo-admin", "uid": "s"}},
        **{("Pod", name): pod for name, pod in pods.items()},
    }
    gone = {**CLUSTER, "spec": {k: v for k, v in CLUSTER["spec"].items() if k != "tls"}}
    for cluster, some in ((gone, reading.SOME), (CLUSTER, "tls")):
        asked = Asked()
        observer = Observer(cast(Kube, server), cast(Reports, asked), "ns", "demo", me="me", nodes=False)
        snap = (await observer.look(cluster, Memory(), {})).snapshot
        assert [asked.targets[name].tls for name in sorted(pods)] == ["old", "tls", "", some]
        assert asked.access.tls == {"old": contexts["CA of old"], "tls": contexts["CA of tls"]}
        assert not [m for m in snap.missing_secrets if "ca.crt" in m]
    monkeypatch.setattr(observe, "SECRETS_S", 0.0)
    del server.objects["Secret", "old"]
    snap = (await observer.look(CLUSTER, Memory(), {})).snapshot
    assert asked.access.tls["old"] is contexts["CA of old"], "known from before"
    assert not [m for m in snap.missing_secrets if "old" in m]
    observer = Observer(cast(Kube, server), cast(Reports, asked), "ns", "demo", me="me", nodes=False)
    snap = (await observer.look(gone, Memory(), {})).snapshot
    assert asked.access.tls.keys() == {"tls"}
    assert "old/ca.crt (until the pods that have it mounted are replaced)" in snap.missing_secrets


@pytest.mark.parametrize(
    ("keys", "missing", "odd"),
    [
        ({"a.pem": "x", "b.key": "x"}, False, ()),
        ({"a.pem": "x", "public": "x", "c.pub": "x"}, False, ("c.pub", "public")),
        ({"token": "x"}, True, ("token",)),
        ({}, True, ()),
    ],
)
async def test_a_secret_of_keys_has_one_whose_name_says_its_kid(
    keys: dict[str, str], missing: bool, odd: tuple[str, ...]
) -> None:
    """Without one it is as good as missing: no process would start."""
    server = Server()
    server.objects = {("Secret", name): secret(uri="x", url="x") for name in ("db", "kv")}
    server.objects["Secret", "keys"] = {"data": {k: base64.b64encode(v.encode()).decode() for k, v in keys.items()}}
    spec = {k: v for k, v in CLUSTER["spec"].items() if k != "tls"}
    snap = await looked(server, {**CLUSTER, "spec": spec})
    assert list(snap.missing_secrets) == (["keys/<kid>.pem or keys/<kid>.key"] if missing else [])
    assert snap.odd_keys == odd


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({}, "keyPrefix are those of PlatoCluster first"),
        ({"store": {"url": {"name": "kv"}, "keyPrefix": "b:"}}, "schema are those of PlatoCluster first"),
        (
            {"store": {"url": {"name": "kv2"}}, "database": {"uri": {"name": "db"}, "schema": "b"}},
            "",
        ),
    ],
)
async def test_a_second_cluster_over_the_first_ones_store_or_schema_is_held(fields: dict[str, Any], words: str) -> None:
    """Its shards would have greater fences, and take every slot from the first one's: an outage by a copied manifest."""
    server = Server()
    first = {
        **CLUSTER,
        "metadata": {**CLUSTER["metadata"], "name": "first", "uid": "fu", "creationTimestamp": "2026-01-01T00:00:00Z"},
    }
    spec = {**{k: v for k, v in CLUSTER["spec"].items() if k != "tls"}, **fields}
    second = {"metadata": {**CLUSTER["metadata"], "creationTimestamp": "2026-02-01T00:00:00Z"}, "spec": spec}
    server.objects = {("PlatoCluster", "first"): first, ("PlatoCluster", "demo"): second}
    snap = await looked(server, second)
    assert words in snap.shared
    assert bool(words) is bool(snap.shared)
    there = {
        ("ServiceAccount", "demo"): Child("ServiceAccount", "demo", "sa"),
        ("Secret", "demo-admin"): Child("Secret", "x", "s"),
    }
    snap = replace(snap, topology=replace(rebuilt(snap), writer="me"), children=there)
    plan = one_pass(snap)
    assert bool([o for o in plan.applies if isinstance(o, Apply) and o.kind == "Job"]) is not bool(words)
    assert plan.cluster_status is not None
    told = {c.type: c.reason for c in plan.cluster_status.conditions}
    assert (told["Stalled"] == "NotAlone") is bool(words)
    assert not (await looked(server, first)).shared


async def test_where_the_secrets_lead_is_known_and_no_password_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another place has to be migrated and marked; a rotated password rolls nothing and runs nothing."""
    server, found = Server(), []
    spec = {k: v for k, v in CLUSTER["spec"].items() if k != "tls"}
    for uri, url in (
        ("postgresql://plato:a@db:5432/plato", "redis://:a@kv:6379/0"),
        ("postgresql://app:b@db:5432/plato", "redis://kv:6379/0"),
        ("postgresql://plato:a@db2:5432/plato", "redis://:a@kv:6379/0"),
        ("postgresql://plato:a@db:5432/plato", "redis://:a@kv:6379/1"),
        ("postgresql://[", "redis://:a@kv:6379/0"),
    ):
        server.objects = {("Secret", "db"): secret(uri=uri), ("Secret", "kv"): secret(url=url)}
        found.append((await looked(server, {**CLUSTER, "spec": spec})).leads_to)
    assert found[0] == found[1]
    assert len(set(found)) == 4
    monkeypatch.setattr("plato_operator.observe.SECRETS_S", 0.0)
    server.objects = {("Secret", "db"): secret(uri="postgresql://db/plato"), ("Secret", "kv"): secret(url="redis://kv")}
    async with aiohttp.ClientSession() as session:
        observer = Observer(cast(Kube, server), Reports(session, "ns", "demo"), "ns", "demo", me="me", nodes=False)
        known = (await observer.look({**CLUSTER, "spec": spec}, Memory(), {})).snapshot.leads_to
        del server.objects["Secret", "kv"]
        snap = (await observer.look({**CLUSTER, "spec": spec}, Memory(), {})).snapshot
    assert "kv" in snap.missing_secrets
    assert snap.leads_to == known, "one that is missing for the moment leads nowhere else"


def test_the_last_words_of_a_migration_and_how_it_ended_are_read() -> None:
    """Its pods are not started again: what they ended with is their present state."""
    ended = {"exitCode": 3, "message": "plato: trying\nplato: it belongs to PlatoCluster im/demo\n"}
    labels = {"plato.im/component": "migrate", "batch.kubernetes.io/job-name": "demo-migrate-1"}
    obj = {
        "metadata": {"name": "demo-migrate-1-x2", "uid": "u", "labels": labels},
        "status": {"phase": "Failed", "containerStatuses": [{"name": "migrate", "state": {"terminated": ended}}]},
    }
    found = reading.pod(obj, {}, None)
    assert (found.owner, found.ordinal, found.exit_code) == ("demo-migrate-1", -1, 3)
    assert found.trouble == "plato: it belongs to PlatoCluster im/demo"
    named = {"metadata": {**CLUSTER["metadata"], "annotations": {"plato.im/adopt": "im/demo"}}, "spec": CLUSTER["spec"]}
    assert (reading.cluster(named).adopts, reading.cluster(named).identity) == ("im/demo", "ns/demo")


async def test_the_tokens_of_a_cluster_that_had_this_name_before_are_not_ours() -> None:
    """Its Secret is still being collected: pods wait for ours, nobody is asked with the old ones. What somebody else made
    under that name is good."""
    server = Server()
    spec = {k: v for k, v in CLUSTER["spec"].items() if k != "tls"}
    owner = {"kind": "PlatoCluster", "uid": "earlier", "controller": True}
    for owners, ours in (
        ([owner], False),
        ([{**owner, "uid": "cu"}], True),
        ([{**owner, "kind": "Sealed"}], True),
        ([], True),
    ):
        server.objects["Secret", "demo-admin"] = {
            **secret(token="t"), "metadata": {"name": "demo-admin", "uid": "s", "ownerReferences": owners},
        }  # fmt: skip
        snap = await looked(server, {**CLUSTER, "spec": spec})
        assert (("Secret", "demo-admin") in snap.children) is ours
        account = {("ServiceAccount", "demo"): Child("ServiceAccount", "demo", "sa")}
        snap = replace(snap, topology=replace(rebuilt(snap), writer="me"), children={**snap.children, **account})
        pods = [o for o in one_pass(snap).applies if isinstance(o, Apply) and o.template_hash]
        assert bool(pods) is ours


async def test_a_record_that_cannot_be_read_counts_as_lost_and_keeps_its_version() -> None:
    """So that it is written over, not beside."""
    server = Server()
    server.objects["ConfigMap", "demo-topology"] = {
        "metadata": {"resourceVersion": "12"},
        "data": {"topology.json": "{"},
    }
    async with aiohttp.ClientSession() as session:
        observer = Observer(cast(Kube, server), Reports(session, "ns", "demo"), "ns", "demo", me="me", nodes=False)
        snap = (await observer.look(CLUSTER, Memory(), {})).snapshot
    assert (snap.topology, snap.version) == (None, "12")


async def test_of_two_failures_the_forbidden_one_is_told() -> None:
    """It names verb and resource; a time-out names nothing."""
    server = Server()
    server.fails = {"Pod": Unreachable("slow"), "Service": Refused(403, "Forbidden", "cannot list services", "GET")}
    async with aiohttp.ClientSession() as session:
        observer = Observer(cast(Kube, server), Reports(session, "ns", "demo"), "ns", "demo", me="me", nodes=False)
        with pytest.raises(Refused, match="cannot list services"):
            await observer.look(CLUSTER, Memory(), {})
        with pytest.raises(BadResource, match=r"PlatoCluster demo: spec\.version"):
            await observer.look({**CLUSTER, "spec": {}}, Memory(), {})


@pytest.mark.planner
def test_o21_health_fails_when_a_part_gave_no_sign_for_two_minutes() -> None:
    """With its trouble in words; a cluster's trouble does not make the operator unready, others are served."""
    now = 0.0
    health = Health(lambda: now)
    assert health.not_ready() == "starting"
    health.trouble("start", "")
    health.expect("round")
    health.expect("cluster ns/a")
    health.trouble("cluster ns/a", "cannot list services")
    now = SILENT_S
    health.sign("round")
    assert (health.ill(), health.not_ready()) == ("", "")
    now += 1
    assert health.ill() == "cluster ns/a: no sign of life for 121 s (cannot list services)"
    health.drop("cluster ns/a")
    assert health.ill() == ""
    health.trouble("lease", "waiting for the Lease")
    assert health.not_ready() == "waiting for the Lease"
