"""What is rendered: the golden files, the contract with the pods, and the rule that equal hashes mean equal objects.

The golden files are written anew by `PLATO_GOLDEN=write pytest operator/tests/test_operator_manifests.py`.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from manifest_inputs import FULL, KAFKA, PLAIN, PRODUCT, cluster, orders, rendered, snapshot
from plato.api.names import ANNOTATION_INPUT_HASH
from plato.api.pool import DrainSpec
from plato.cli.app import app
from plato.runtime.settings import load
from plato_operator.core.orders import Apply
from plato_operator.core.snapshot import Child, Snapshot
from plato_operator.manifests import CREATED_ONCE, OwnerMissingError, initial, render
from typer.main import get_command

GOLDEN = Path(__file__).parent / "golden"
WRITE = os.environ.get("PLATO_GOLDEN") == "write"
PARTS = ("gateway", "state", "msg", "ipconfig")


class _Plain(yaml.SafeDumper):
    """YAML without anchors: parts that several objects share are written out."""

    def ignore_aliases(self, data: object) -> bool:
        return True


def objects(spec: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """{kind/name: object}."""
    return {f"{o['kind']}/{o['metadata']['name']}": o for o in rendered(snapshot(cluster(spec)))}


def templates(found: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """{component: pod template}, of the first object with it."""
    made: dict[str, Any] = {}
    for each in found.values():
        if "template" in each["spec"] if "spec" in each else False:
            made.setdefault(each["metadata"]["labels"]["plato.im/component"], each["spec"]["template"])
    return {k: v for k, v in made.items() if "metadata" in v}


@pytest.mark.parametrize(("name", "spec"), [("plain", PLAIN), ("full", FULL), ("kafka", KAFKA), ("product", PRODUCT)])
@pytest.mark.planner
def test_o20_a_render_changes_only_with_its_hash(name: str, spec: dict[str, Any]) -> None:
    """An operator that renders otherwise under the same hash would leave running clusters as they are until something
    else changes, and then roll pods for no reason that their owner knows of."""
    path, now = GOLDEN / f"{name}.yaml", objects(spec)
    if WRITE:
        path.parent.mkdir(exist_ok=True)
        path.write_text(yaml.dump_all(now.values(), Dumper=_Plain, sort_keys=True, width=120))
    with path.open() as file:
        before = {f"{o['kind']}/{o['metadata']['name']}": o for o in yaml.safe_load_all(file)}
    for key, old in before.items():
        assert key in now, f"{key} is not rendered any more, or has another name"
        if old != now[key]:
            same = old["metadata"]["annotations"] == now[key]["metadata"]["annotations"]
            raise AssertionError(
                f"{key} is rendered otherwise from the same input"
                + (", and its hash is the same: objects of running clusters stay as they are" if same else "")
                + ". If running clusters must get it, count it up in RENDERING of core/children.py, which rolls its pods; if"
                " the next change of their inputs is soon enough, do not. Then write the golden files anew."
            )
    assert now.keys() == before.keys()


@pytest.mark.parametrize("spec", [PLAIN, FULL, KAFKA, PRODUCT])
def test_what_pods_get_by_environment_are_settings(spec: dict[str, Any]) -> None:
    for part, template in templates(objects(spec)).items():
        container = template["spec"]["containers"][0]
        env = {e["name"]: e.get("value", "x") for e in container["env"]}
        for secret in ("PLATO_DATABASE__URI", "PLATO_STORE__URL"):
            assert (secret in env) == (part in ("state", "msg", "migrate"))
        # Whoever is led to a database or store by a Secret knows whose mark it must find there.
        assert env.get("PLATO_CLUSTER") == ("im/demo" if "PLATO_STORE__URL" in env else None)
        assert env.get("PLATO_ADOPT") is None
        read = load(Path("/dev/null"), environ=env)  # an unknown name, or a value out of bounds, is an error
        if part != "migrate":
            assert (read.process.name, read.process.uid) == ("demo-s0" if part == "state" else "x", "x")
            assert read.topology.config_map == "demo-topology"
            assert str(read.process.admin_tokens_dir) == "/etc/plato/admin"
        if part == "gateway":
            port = {p["name"]: p["containerPort"] for p in container["ports"]}
            polls = {"poll": read.gateway.poll_port} if read.gateway.poll_port else {}
            ports = {"tcp": read.gateway.tcp_port, "ws": read.gateway.ws_port, "admin": read.gateway.admin_port}
            assert port == ports | polls
            assert read.gateway.max_bytes_per_s == (250_000_000 if spec is FULL else 0)


@pytest.mark.parametrize("spec", [PLAIN, FULL, KAFKA, PRODUCT])
def test_each_file_that_a_setting_names_is_mounted(spec: dict[str, Any]) -> None:
    for template in templates(objects(spec)).values():
        container = template["spec"]["containers"][0]
        mounted = {m["mountPath"]: m["name"] for m in container["volumeMounts"]}
        volumes = {v["name"] for v in template["spec"]["volumes"]}
        assert set(mounted.values()) == volumes
        for variable in container["env"]:
            value = variable.get("value", "")
            if value.startswith("/"):
                assert any(value == path or value.startswith(f"{path}/") for path in mounted), variable


@pytest.mark.parametrize("spec", [PLAIN, FULL])
def test_pods_meet_restricted_but_for_the_hosts_network(spec: dict[str, Any]) -> None:
    for part, template in templates(objects(spec)).items():
        pod = template["spec"]
        assert pod.get("hostNetwork", False) == (part == "gateway" and spec is PLAIN)
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["securityContext"]["runAsUser"] == 65532
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        for container in pod["containers"]:
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}, "readOnlyRootFilesystem": True,
            }  # fmt: skip
            for port in container.get("ports", []):
                assert ("hostPort" in port) == pod.get("hostNetwork", False)


def test_kafka_is_named_to_those_who_use_it_and_by_a_file() -> None:
    """Its password stands in no variable, and a changed one reaches pods that run."""
    for part, template in templates(objects(KAFKA)).items():
        pod = template["spec"]
        env = {e["name"]: e.get("value", "x") for e in pod["containers"][0]["env"]}
        used = part in ("state", "msg", "migrate")
        assert ("PLATO_BUS__TYPE" in env) == used
        assert [v["secret"]["secretName"] for v in pod["volumes"] if v["name"] == "bus"] == ["demo-kafka"] * used
        if used:
            bus = load(Path("/dev/null"), environ=env).bus
            assert (bus.type, bus.topic) == ("kafka", "chat")
            assert str(bus.properties_file) == "/etc/plato/bus/client.properties"


def test_another_kafka_rolls_those_who_use_it_and_migrates_anew() -> None:
    before, after = (snapshot(cluster(_with(KAFKA, ("bus", "kafka", "topic"), t))) for t in ("chat", "other"))
    assert changed(before, after)[1] == {"Deployment/demo-msg", "StatefulSet/demo-s0", "StatefulSet/demo-s1"}
    assert {o.name for o in orders(before) if o.kind == "Job"} != {o.name for o in orders(after) if o.kind == "Job"}


@pytest.mark.parametrize(
    "other",
    [
        {"cluster": cluster(PLAIN, namespace="shop")},
        {"cluster": replace(cluster(PLAIN), adopts="shop/demo")},
        {"cluster": cluster({**PLAIN, "database": {"uri": {"name": "demo-db-app"}, "schema": "other"}})},
        {"cluster": cluster({**PLAIN, "store": {"url": {"name": "other"}}})},
        {"cluster": cluster({**PLAIN, "store": {"url": {"name": "demo-store"}, "keyPrefix": "other:"}})},
        {"leads_to": "elsewhere"},
    ],
)
def test_whose_schema_and_store_it_is_is_asked_again_where_one_of_them_is_another(other: dict[str, Any]) -> None:
    """By a Job of another name, which has the PlatoCluster's identity and both places. An image that does not know the
    variables passes them over: they are no settings, of which it would refuse one that it does not know."""

    def job(snap: Snapshot) -> dict[str, Any]:
        (found,) = (o for o in rendered(snap) if o["kind"] == "Job")
        return found

    before, snap = job(snapshot(cluster(PLAIN))), replace(snapshot(cluster(PLAIN)), **other)
    assert job(snap)["metadata"]["name"] != before["metadata"]["name"]
    env = {e["name"]: e.get("value") for e in job(snap)["spec"]["template"]["spec"]["containers"][0]["env"]}
    assert env["PLATO_CLUSTER"] == f"{snap.cluster.namespace}/demo"
    assert env.get("PLATO_ADOPT", "") == snap.cluster.adopts
    assert env.get("PLATO_STORE__KEY_PREFIX", "") == snap.cluster.spec.store.key_prefix


def test_one_try_of_the_migration_ends_in_time_to_be_quoted() -> None:
    """A condition quotes what the Job's pod ended with: a wrong host is told within 30 s, its start and the pass included.
    Its program takes the option."""
    (job,) = (o for o in rendered(snapshot(cluster(PLAIN))) if o["kind"] == "Job")
    command = job["spec"]["template"]["spec"]["containers"][0]["command"]
    assert command[:3] == ["python3", "-m", "plato.cli"]
    at: Any = get_command(app)
    for part in command[3:5]:
        at = at.commands[part]
    assert 1 <= at.make_context("migrate", command[5:]).params["wait_s"] <= 20


def test_probes_ask_the_admin_port_and_by_https_with_internal_tls() -> None:
    for spec, scheme in ((PLAIN, "HTTP"), (FULL, "HTTPS")):
        made = templates(objects(spec))
        for part in PARTS:
            container = made[part]["spec"]["containers"][0]
            assert container["name"] == part
            assert "admin" in {p["name"] for p in container["ports"]}
            for probe, path in (
                ("livenessProbe", "/healthz"),
                ("startupProbe", "/healthz"),
                ("readinessProbe", "/readyz"),
            ):
                assert container[probe]["httpGet"] == {"path": path, "port": "admin", "scheme": scheme}


def test_a_shard_may_wait_an_hour_for_its_store() -> None:
    probe = templates(objects(PLAIN))["state"]["spec"]["containers"][0]["startupProbe"]
    assert probe["periodSeconds"] * probe["failureThreshold"] >= 3600


def test_only_gateways_have_the_gate_and_the_long_grace() -> None:
    made = templates(objects(PLAIN))
    assert [p for p in PARTS if "readinessGates" in made[p]["spec"]] == ["gateway"]
    grace = {p: made[p]["spec"]["terminationGracePeriodSeconds"] for p in ("gateway", "msg", "state")}
    assert grace == {"gateway": 360, "msg": 60, "state": 30}


def test_each_object_is_found_by_its_cluster_and_ends_with_its_owner() -> None:
    for key, made in objects(FULL).items():
        meta = made["metadata"]
        owner = meta["ownerReferences"][0]
        assert meta["labels"]["plato.im/cluster"] == "demo", key
        assert owner["controller"] is owner["blockOwnerDeletion"] is True
        kind = {"demo-edge": "GatewayPool", "demo-s0": "StateShard"}.get(meta["name"], "PlatoCluster")
        if made["kind"] in ("GatewayPool", "StateShard"):
            kind = "PlatoCluster"
        assert (owner["kind"], owner["uid"]) == (
            kind, {"GatewayPool": "uid-pool", "StateShard": "uid-demo-s0", "PlatoCluster": "uid-cluster"}[kind],
        ), key  # fmt: skip


def test_selectors_pick_their_own_pods_only() -> None:
    found = objects({**PLAIN, "state": {"shards": 2}})
    pods = {key: made["spec"]["template"]["metadata"]["labels"] for key, made in found.items() if key.split("/")[0] in (
        "StatefulSet", "Deployment", "Job")}  # fmt: skip

    def picked(by: Mapping[str, str]) -> set[str]:
        return {key for key, labels in pods.items() if by.items() <= labels.items()}

    for key in pods:
        if not key.startswith("Job/"):
            assert picked(found[key]["spec"]["selector"]["matchLabels"]) == {key}
    shards = {"StatefulSet/demo-s0", "StatefulSet/demo-s1"}
    for name, wanted in (
        ("demo-state", shards),
        ("demo-edge", {"StatefulSet/demo-edge"}),
        ("demo-msg", {"Deployment/demo-msg"}),
    ):
        assert picked(found[f"Service/{name}"]["spec"]["selector"]) == wanted
        assert picked(found[f"PodDisruptionBudget/{name}"]["spec"]["selector"]["matchLabels"]) == wanted
    assert found["StatefulSet/demo-s0"]["spec"]["serviceName"] == "demo-state"


def test_a_service_finds_its_ports_in_the_pods() -> None:
    for spec in (PLAIN, FULL):
        found = objects(spec)
        for key in ("demo-state", "demo-edge", "demo-msg", "demo-ipconfig"):
            service = found[f"Service/{key}"]
            part = service["metadata"]["labels"]["plato.im/component"]
            have = {p["name"]: p["containerPort"] for p in templates(found)[part]["spec"]["containers"][0]["ports"]}
            assert {have[p["targetPort"]] for p in service["spec"]["ports"]} <= set(have.values())
            assert all(have[p["targetPort"]] == p["port"] for p in service["spec"]["ports"])


def test_hashes_stand_where_they_are_read() -> None:
    snap = snapshot(cluster(PLAIN))
    for order in orders(snap):
        made = render(order, snap)
        assert made["metadata"]["annotations"][ANNOTATION_INPUT_HASH] == order.input_hash
        if order.template_hash:
            assert made["spec"]["template"]["metadata"]["annotations"][ANNOTATION_INPUT_HASH] == order.template_hash


def changed(before: Snapshot, after: Snapshot) -> tuple[set[str], set[str]]:
    """Names of workloads whose input hash changed, and of those whose template hash did."""
    old, new = ({(o.kind, o.name): o for o in orders(s)} for s in (before, after))
    inputs = {f"{k}/{n}" for (k, n), o in new.items() if (k, n) in old and old[k, n].input_hash != o.input_hash}
    rolls = {f"{k}/{n}" for (k, n), o in new.items() if (k, n) in old and old[k, n].template_hash != o.template_hash}
    return inputs, rolls


@pytest.mark.planner
def test_o20_drain_settings_reach_the_pods_and_roll_none() -> None:
    before = snapshot(cluster(PLAIN))
    pool = before.pools["demo-edge"]
    for drain in (DrainSpec(deadline_seconds=60), DrainSpec(pace_per_second=7), DrainSpec(settle_seconds=1)):
        after = replace(before, pools={"demo-edge": replace(pool, spec=replace(pool.spec, drain=drain))})
        assert changed(before, after) == ({"StatefulSet/demo-edge"}, set())
    ignored = replace(
        before, pools={"demo-edge": replace(pool, spec=replace(pool.spec, drain=DrainSpec(on_cordon="Ignore")))}
    )
    assert changed(before, ignored) == (set(), set())


def _leaves(value: Mapping[str, Any], at: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    found: list[tuple[str, ...]] = []
    for key, inner in value.items():
        deeper = isinstance(inner, dict) and key not in (
            "overrides",
            "podOverlay",
            "labels",
            "requests",
            "limits",
            "nodeSelector",
        )
        found += _leaves(inner, (*at, key)) if deeper else [(*at, key)]
    return found


def _at(value: Any, field: tuple[str, ...]) -> Any:
    for key in field:
        value = value[key]
    return value


def _with(spec: Mapping[str, Any], field: tuple[str, ...], value: Any) -> dict[str, Any]:
    first, *rest = field
    return {**spec, first: _with(spec.get(first, {}), tuple(rest), value) if rest else value}


def _template(made: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = made.get("spec", {}).get("template", {})
    return found if "metadata" in found else {}


def _compared(made: dict[str, Any]) -> dict[str, Any]:
    """Without hashes, and without replicas, which others move."""
    found = copy.deepcopy(made)
    for each in (found, _template(found)):
        if each:
            each["metadata"].get("annotations", {}).pop(ANNOTATION_INPUT_HASH, None)
    if found.get("kind") in ("StatefulSet", "Deployment"):
        del found["spec"]["replicas"]
    return found


OPTIONAL: dict[str, Any] = {**PLAIN, "networkPolicy": True, "monitoring": {"podMonitor": True}}
"""So that the optional objects are among those that are compared."""


def _by_name(spec: Mapping[str, Any]) -> dict[str, tuple[Apply, dict[str, Any]]]:
    snap = snapshot(cluster(spec))
    return {f"{o.kind}/{o.name}": (o, render(o, snap)) for o in orders(snap) if o.kind not in CREATED_ONCE}


@pytest.fixture(scope="module")
def base() -> dict[str, tuple[Apply, dict[str, Any]]]:
    return _by_name(OPTIONAL)


@pytest.mark.parametrize("field", [".".join(f) for f in _leaves(FULL)])
def test_a_field_that_changes_an_object_changes_its_hash(
    field: str, base: dict[str, tuple[Apply, dict[str, Any]]]
) -> None:
    """Each field of FULL alone. What reaches pods changes the template's hash too, so that they roll."""
    path = tuple(field.split("."))
    found = _by_name(_with(OPTIONAL, path, _at(FULL, path)))
    for key, (order, made) in found.items():
        if key not in base:
            continue
        old, was = base[key]
        if _compared(made) != _compared(was):
            assert order.input_hash != old.input_hash, key
        if _compared(_template(made)) != _compared(_template(was)):
            assert (order.template_hash != old.template_hash) == (".drain." not in field), key
        else:
            assert order.template_hash == old.template_hash, f"{key} rolls for nothing"


def test_an_existing_stateful_set_keeps_its_replicas_and_says_which_version_they_are_from() -> None:
    snap = snapshot(cluster(PLAIN))
    order = replace(next(o for o in orders(snap) if (o.kind, o.name) == ("StatefulSet", "demo-edge")), replicas=None)
    there = Child("StatefulSet", "demo-edge", "u", replicas=7, resource_version="42")
    made = render(order, replace(snap, children={("StatefulSet", "demo-edge"): there}))
    assert (made["spec"]["replicas"], made["metadata"]["resourceVersion"]) == (7, "42")


def test_the_default_pools_replicas_come_once_and_by_another_manager() -> None:
    snap = snapshot(cluster({**PLAIN, "gateways": {"initialReplicas": 5}}))
    order = next(o for o in orders(snap) if o.kind == "GatewayPool")
    first = initial(order, snap)
    assert first is not None
    assert first["spec"] == {"clusterRef": {"name": "demo"}, "network": "Host", "replicas": 5}
    assert render(order, snap)["spec"] == {"clusterRef": {"name": "demo"}}
    assert initial(replace(order, replicas=None), snap) is None


def test_the_token_is_long_and_another_one_each_time() -> None:
    snap = snapshot(cluster(PLAIN))
    order = next(o for o in orders(snap) if o.kind == "Secret")
    first, second = (render(order, snap)["data"]["token"] for _ in range(2))
    assert first != second
    assert len(first) >= 43
    assert "Secret" in CREATED_ONCE


def test_a_child_of_an_owner_that_is_not_there_is_not_rendered() -> None:
    snap = snapshot(cluster(PLAIN))
    order = next(o for o in orders(snap) if o.name == "demo-s0" and o.kind == "StatefulSet")
    with pytest.raises(OwnerMissingError, match="demo-s0"):
        render(order, replace(snap, shards={}))


def test_a_person_s_toleration_takes_the_place_of_ours() -> None:
    made = templates(objects(FULL))["msg"]["spec"]["tolerations"]
    assert [t["tolerationSeconds"] for t in made if t["key"] == "node.kubernetes.io/unreachable"] == [60]
    assert [t["tolerationSeconds"] for t in made if t["key"] == "node.kubernetes.io/not-ready"] == [10]


def test_a_limit_alone_brings_no_request_above_it() -> None:
    found = templates(objects(FULL))["state"]["spec"]["containers"][0]["resources"]
    assert found == {"requests": {"cpu": "100m"}, "limits": {"memory": "1Gi"}}


def test_the_network_policy_lets_grpc_in_from_own_pods_and_nodes() -> None:
    snap = replace(snapshot(cluster({**PLAIN, "networkPolicy": True})), node_cidrs=("10.0.0.0/16",))
    made = next(render(o, snap) for o in orders(snap) if o.kind == "NetworkPolicy")
    grpc, public = made["spec"]["ingress"]
    assert [p["port"] for p in grpc["ports"]] == [8902, 8907]
    assert grpc["from"] == [
        {"podSelector": {"matchLabels": {"plato.im/cluster": "demo"}}},
        {"ipBlock": {"cidr": "10.0.0.0/16"}},
    ]
    assert "from" not in public
