"""The CRDs on a real API server: each rule refuses in words that help, everything else is taken, /scale and columns work.

Needs PLATO_E2E_KUBECONFIG (the testbed's admin.kubeconfig, kind's, any cluster's). Works in a namespace of its own; the CRDs
are applied, and removed at the end only if they were not there before.
"""

from __future__ import annotations

import copy
import json
import os
import subprocess
import uuid
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from e2e.frame.kube import wait_for

CRDS = Path(__file__).resolve().parent.parent / "crds"
KUBECONFIG = os.environ.get("PLATO_E2E_KUBECONFIG", "")
NAMES = ("platoclusters.plato.im", "gatewaypools.plato.im", "stateshards.plato.im")

pytestmark = pytest.mark.skipif(not KUBECONFIG, reason="PLATO_E2E_KUBECONFIG names no cluster")

CLUSTER: dict[str, Any] = {
    "version": "0.1.0",
    "database": {"uri": {"name": "demo-db-app"}},
    "store": {"url": {"name": "demo-store"}},
    "auth": {"keys": {"name": "demo-keys"}},
}


def kubectl(*args: str, given: object = None) -> subprocess.CompletedProcess[str]:
    """One call; `given` goes to its standard input as JSON."""
    text = json.dumps(given) if given is not None else None
    return subprocess.run(
        ["kubectl", "--kubeconfig", KUBECONFIG, *args], input=text, capture_output=True, text=True, timeout=60, check=False
    )  # fmt: skip


def succeeds(*args: str) -> bool:
    """Whether a call does."""
    return kubectl(*args).returncode == 0


def done(*args: str, given: object = None) -> str:
    """The output of a call that must succeed."""
    result = kubectl(*args, given=given)
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.fixture(scope="module")
def namespace() -> Iterator[str]:
    """A namespace of this run, with the CRDs established."""
    before = done("get", "crd", "-o", "name")
    done("apply", "-f", str(CRDS))
    for name in NAMES:
        # It fails, and does not wait, where a definition that has just come has no conditions yet.
        wait_for(f"{name} is served", partial(succeeds, "wait", "--for=condition=Established", f"crd/{name}"), 30.0)
    name = f"crds-{uuid.uuid4().hex[:8]}"
    done("create", "namespace", name)
    yield name
    done("delete", "namespace", name, "--wait=false")
    for crd in NAMES:
        if crd not in before:
            done("delete", "crd", crd, "--wait=false")


def resource(kind: str, spec: dict[str, Any], name: str = "demo") -> dict[str, Any]:
    """A resource of plato.im as an object."""
    return {"apiVersion": "plato.im/v1alpha1", "kind": kind, "metadata": {"name": name}, "spec": spec}


def merged(base: dict[str, Any], path: str, value: object) -> dict[str, Any]:
    """`base` with the field at the dotted `path` set, or removed where the value is None."""
    made = copy.deepcopy(base)
    *above, last = path.split(".")
    at = made
    for key in above:
        at = at.setdefault(key, {})
    if value is None:
        at.pop(last, None)
    else:
        at[last] = value
    return made


def refused(namespace: str, given: dict[str, Any], *words: str) -> None:
    """Fails unless the API server refuses `given` with all of these words."""
    result = kubectl("-n", namespace, "apply", "--dry-run=server", "-f", "-", given=given)
    assert result.returncode != 0, f"taken: {given}"
    for word in words:
        assert word in result.stderr


def test_the_smallest_cluster_is_taken_and_gets_its_defaults(namespace: str) -> None:
    """Twelve lines are enough; a part that is given in part gets the rest of its defaults."""
    made = json.loads(
        done("-n", namespace, "apply", "--dry-run=server", "-o", "json", "-f", "-", given=resource("PlatoCluster", CLUSTER))
    )  # fmt: skip
    spec = made["spec"]
    assert spec["bus"] == {"type": "Postgres", "partitions": 64}
    assert spec["state"]["shards"] == 2
    assert spec["gateways"] == {"enabled": True, "initialReplicas": 2}
    assert spec["database"]["uri"]["key"] == "uri"
    partial = merged(CLUSTER, "state", {"shards": 5})
    made = json.loads(
        done("-n", namespace, "apply", "--dry-run=server", "-o", "json", "-f", "-", given=resource("PlatoCluster", partial))
    )  # fmt: skip
    assert made["spec"]["state"]["slotsPerMove"] == 4


@pytest.mark.parametrize(
    ("path", "value", "word"),
    [
        ("version", "", "spec.version"),
        ("version", None, "spec.version"),
        ("database", None, "spec.database"),
        ("auth", {}, "auth needs keys, or guests: true"),
        ("bus.type", "Kafka", "bus.kafka must be given with type Kafka and only then"),
        ("bus.kafka", {"config": {"name": "k"}}, "bus.kafka must be given with type Kafka and only then"),
        ("bus.partitions", 0, "spec.bus.partitions"),
        ("state.shards", 65, "spec.state.shards"),
        ("state.onNodeLoss", "Maybe", "spec.state.onNodeLoss"),
        ("images.overrides", {"gatway": "x"}, "overrides may name gateway, state, msg and ipconfig only"),
        ("gateways.template", {"ports": {"tcp": 8901}}, "ports tcp, ws and admin must differ"),
        ("gateways.template", {"ports": {"poll": 8909}}, "port poll must differ"),
        ("gateways.template", {"workers": 3}, "spec.gateways.template.workers"),
        ("state.resources", {"requests": {"cpu": "lots"}}, "spec.state.resources.requests.cpu"),
        ("origins", ["https://chat.example/page"], "spec.origins"),
        ("api", {"tls": "Internal"}, "spec.api.tls"),
        ("attachments", {"s3": {"endpoint": "https://s", "bucket": "files"}}, "spec.attachments.s3.accessKey"),
        ("attachments", {"folder": "/files"}, "spec.attachments.folder"),
        ("hooks", {"pushUrl": "https://app.example"}, "hooks need secret"),
        ("nonsense", 1, "spec.nonsense"),
    ],
)
def test_a_wrong_cluster_is_refused_in_words(namespace: str, path: str, value: object, word: str) -> None:
    """The message names the field or says what to do."""
    refused(namespace, resource("PlatoCluster", merged(CLUSTER, path, value)), word)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("auth", {"guests": True}),
        ("bus", {"type": "Kafka", "kafka": {"config": {"name": "k"}}}),
        ("images.overrides", {"gateway": "example.org/g@sha256:0", "msg": "m"}),
        ("gateways.template", {"network": "Pod", "workers": 16, "ports": {"tcp": 1}}),
        ("state.resources", {"requests": {"cpu": 1, "memory": "1.5Gi"}, "limits": {"cpu": "500m"}}),
        ("state.podOverlay", {"spec": {"containers": [{"name": "x", "image": "y"}]}}),
        ("msg.placement", {"tolerations": [{"key": "a", "operator": "Exists"}], "affinity": {"nodeAffinity": {}}}),
        ("tls", {"client": {"name": "c"}}),
        ("origins", ["https://chat.example", "http://localhost:8080"]),
        ("api", {"enabled": True, "serviceType": "LoadBalancer", "annotations": {"example.org/a": "b"}, "tls": "None"}),
        (
            "attachments",
            {
                "s3": {
                    "endpoint": "https://s:9000",
                    "bucket": "files",
                    "prefix": "a/b",
                    "accessKey": {"name": "k"},
                    "secretKey": {"name": "k"},
                },
                "types": ["image/png", "audio/*"],
            },
        ),
        ("hooks", {"pushUrl": "https://app.example/push", "secret": {"name": "k"}}),
        ("monitoring", {"podMonitor": True, "labels": {"release": "prom"}}),
    ],
)
def test_what_a_cluster_may_be_is_taken_and_kept(namespace: str, path: str, value: object) -> None:
    """Nothing of it is pruned."""
    given = resource("PlatoCluster", merged(CLUSTER, path, value))
    made = json.loads(done("-n", namespace, "apply", "--dry-run=server", "-o", "json", "-f", "-", given=given))
    at = made["spec"]
    for key in path.split("."):
        at = at[key]
    if not isinstance(value, dict):
        assert at == value
        return
    assert isinstance(at, dict)
    assert value.keys() <= at.keys()


def test_names_are_bounded_since_other_names_are_made_of_them(namespace: str) -> None:
    """Pods, Services and labels get longer names."""
    refused(namespace, resource("PlatoCluster", CLUSTER, "a" * 31), "at most 30 characters")
    refused(namespace, resource("PlatoCluster", CLUSTER, "1a"), "must begin with a letter")
    pool = {"clusterRef": {"name": "demo"}}
    refused(namespace, resource("GatewayPool", pool, "a" * 41), "at most 40 characters")
    refused(namespace, resource("StateShard", pool, "a" * 41), "at most 40 characters")
    done("-n", namespace, "apply", "--dry-run=server", "-f", "-", given=resource("PlatoCluster", CLUSTER, "a" * 30))


@pytest.mark.parametrize(
    ("path", "value", "word"),
    [
        ("drain", {"deadlineSeconds": 5}, "spec.drain.deadlineSeconds"),
        ("drain", {"pacePerSecond": 10_001}, "spec.drain.pacePerSecond"),
        ("replicas", 501, "spec.replicas"),
        ("rollout", {"maxUnavailable": 0}, "spec.rollout.maxUnavailable"),
        ("ports", {"ws": 8900}, "ports tcp, ws and admin must differ"),
        ("ports", {"poll": 8901}, "port poll must differ"),
        ("clusterRef", None, "spec.clusterRef"),
        ("clusterRef.namespace", "other", "spec.clusterRef.namespace"),
    ],
)
def test_a_wrong_pool_is_refused(namespace: str, path: str, value: object, word: str) -> None:
    """Bounds and rules of a GatewayPool; no reference crosses namespaces."""
    refused(namespace, resource("GatewayPool", merged({"clusterRef": {"name": "demo"}}, path, value)), word)


@pytest.mark.apiserver
def test_o19_what_cannot_change_says_so(namespace: str) -> None:
    """Each immutable field, with a message a person acts upon; others change."""
    done("-n", namespace, "apply", "-f", "-", given=resource("PlatoCluster", CLUSTER, "fixed"))
    for path, value, words in [
        ("bus.partitions", 128, "bus.partitions cannot be changed"),
        ("bus", {"type": "Kafka", "kafka": {"config": {"name": "k"}}}, "bus.type cannot be changed"),
        ("gateways.initialReplicas", 3, "use kubectl scale gwpool"),
    ]:
        refused(namespace, resource("PlatoCluster", merged(CLUSTER, path, value), "fixed"), words)
    pool = {"clusterRef": {"name": "fixed"}, "network": "Host"}
    done("-n", namespace, "apply", "-f", "-", given=resource("GatewayPool", pool, "fixed-edge"))
    refused(
        namespace, resource("GatewayPool", merged(pool, "network", "Pod"), "fixed-edge"), "network cannot be changed"
    )
    refused(
        namespace, resource("GatewayPool", merged(pool, "clusterRef.name", "b"), "fixed-edge"), "clusterRef cannot be"
    )  # fmt: skip
    shard = {"clusterRef": {"name": "fixed"}}
    done("-n", namespace, "apply", "-f", "-", given=resource("StateShard", shard, "fixed-s0"))
    refused(
        namespace, resource("StateShard", merged(shard, "clusterRef.name", "b"), "fixed-s0"), "clusterRef cannot be changed"
    )  # fmt: skip
    done("-n", namespace, "apply", "-f", "-", given=resource("StateShard", merged(shard, "weight", 0), "fixed-s0"))
    refused(namespace, resource("StateShard", merged(shard, "weight", 101), "fixed-s0"), "spec.weight")


@pytest.mark.apiserver
def test_o09_scaling_a_pool_survives_another_apply(namespace: str) -> None:
    """A manifest without replicas leaves them to /scale, which also tells the selector."""
    pool = resource("GatewayPool", {"clusterRef": {"name": "demo"}}, "scaled")
    apply = ("-n", namespace, "apply", "--server-side", "--field-manager=gitops", "-f", "-")
    done(*apply, given=pool)
    done("-n", namespace, "scale", "gwpool/scaled", "--replicas=6")
    done(*apply, given=pool)
    assert done("-n", namespace, "get", "gwpool", "scaled", "-o", "jsonpath={.spec.replicas}") == "6"
    status = {"status": {"replicas": 4, "selector": "plato.im/pool=scaled"}}
    done("-n", namespace, "patch", "gwpool", "scaled", "--subresource=status", "--type=merge", "-p", json.dumps(status))
    scale = json.loads(
        done("get", "--raw", f"/apis/plato.im/v1alpha1/namespaces/{namespace}/gatewaypools/scaled/scale")
    )
    assert (scale["spec"]["replicas"], scale["status"]) == (6, {"replicas": 4, "selector": "plato.im/pool=scaled"})


def test_columns_explain_and_the_category(namespace: str) -> None:
    """What kubectl shows to people."""
    done("-n", namespace, "apply", "-f", "-", given=resource("PlatoCluster", CLUSTER, "shown"))
    ready = {
        "type": "Ready", "status": "True", "reason": "Serving", "message": "ok", "observedGeneration": 1,
        "lastTransitionTime": "2026-01-01T00:00:00Z",
    }  # fmt: skip
    status = {"phase": "Ready", "version": "0.1.0", "shards": "2/2", "slots": {"acquired": 1024}, "gateways": "3/3"}
    done(
        "-n", namespace, "patch", "plato", "shown", "--subresource=status", "--type=merge",
        "-p", json.dumps({"status": {**status, "connections": 7, "conditions": [ready]}}),
    )  # fmt: skip
    head, row = done("-n", namespace, "get", "plato", "shown").splitlines()
    assert head.split() == ["NAME", "PHASE", "VERSION", "SHARDS", "SLOTS", "GATEWAYS", "REASON", "AGE"]
    assert row.split()[:7] == ["shown", "Ready", "0.1.0", "2/2", "1024", "3/3", "Serving"]
    assert "CONNS" in done("-n", namespace, "get", "plato", "shown", "-o", "wide")
    assert "platocluster.plato.im/shown" in done("-n", namespace, "get", "plato-all", "-o", "name")
    assert done("-n", namespace, "wait", "--for=condition=Ready", "plato/shown", "--timeout=5s")
    for name, columns in {
        "gwpool": ["Desired", "Pods", "Ready", "Updated", "Draining", "Reason", "Age", "Conns"],
        "sshard": ["Phase", "Slots", "Weight", "Pod", "Reason", "Age", "Conns"],
    }.items():
        crd = {"gwpool": NAMES[1], "sshard": NAMES[2]}[name]
        shown = done("get", "crd", crd, "-o", "jsonpath={.spec.versions[0].additionalPrinterColumns[*].name}")
        assert shown.split() == columns
    for field in ("platocluster.spec.state", "gatewaypool.spec.drain", "stateshard.spec"):
        text = done("explain", field)
        assert "<no description>" not in text
        assert "FIELDS:" in text
