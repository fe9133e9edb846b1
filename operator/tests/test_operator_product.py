"""What a PlatoCluster says of the product, as Service, settings and files; and nothing where it says nothing."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from manifest_inputs import PLAIN, PRODUCT, cluster, orders, snapshot
from plato.api.names import ANNOTATION_INPUT_HASH
from plato.runtime.settings import Settings, load
from plato_operator.core.orders import Apply, Remove
from plato_operator.core.plan import one_pass
from plato_operator.core.snapshot import Child, Pool
from plato_operator.manifests import CREATED_ONCE, render
from plato_operator.observe import _wanted_secrets
from test_operator_crds import filled, refuse, root_of
from test_operator_manifests import changed, objects, templates

ROOT = Path(__file__).resolve().parents[2]
NEW = ("origins", "api", "attachments", "hooks", "messages", "events")
SERVICE = "Service/demo-api"


def settings(spec: Mapping[str, Any], part: str = "msg") -> Settings:
    """As the pods of a part read them."""
    container = templates(objects(spec))[part]["spec"]["containers"][0]
    return load(Path("/dev/null"), environ={e["name"]: e.get("value", "x") for e in container["env"]})


def leaves(value: Mapping[str, Any], at: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    """Fields, each Secret key and the annotations whole."""
    found: list[tuple[str, ...]] = []
    for key, inner in value.items():
        deeper = isinstance(inner, dict) and key not in ("annotations", "accessKey", "secretKey", "secret")
        found += leaves(inner, (*at, key)) if deeper else [(*at, key)]
    return found


def without(spec: Mapping[str, Any], field: tuple[str, ...]) -> dict[str, Any]:
    first, *rest = field
    if rest:
        return {**spec, first: without(spec[first], tuple(rest))}
    return {key: value for key, value in spec.items() if key != first}


def rendered(spec: Mapping[str, Any]) -> dict[str, tuple[Apply, dict[str, Any]]]:
    """{kind/name: (order, object)}, without hashes in the objects."""
    snap = snapshot(cluster(spec))
    found = {}
    for order in orders(snap):
        if order.kind not in CREATED_ONCE:
            made = render(order, snap)
            for each in (made, made.get("spec", {}).get("template", {})):
                each.get("metadata", {}).get("annotations", {}).pop(ANNOTATION_INPUT_HASH, None)
            found[f"{order.kind}/{order.name}"] = (order, made)
    return found


# ── who says nothing ─────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.planner
def test_o20_a_cluster_that_sets_nothing_of_the_product_is_planned_as_before() -> None:
    """Whether the definitions fill the defaults in or, being older, know no such fields: an upgrade of the operator rolls
    nothing. That the hashes are those of the versions before is what the golden files say."""
    fields = root_of("PlatoCluster")["properties"]["spec"]["properties"]
    defaulted = {**PLAIN, **{name: fields[name]["default"] for name in NEW}}
    assert all(defaulted[name] != {} for name in NEW)
    before, after = snapshot(cluster(PLAIN)), snapshot(cluster(defaulted))
    assert changed(before, after) == (set(), set())
    assert {(o.kind, o.name) for o in orders(before)} == {(o.kind, o.name) for o in orders(after)}
    assert not any(o.name == "demo-api" for o in orders(after))


def test_without_it_msg_listens_as_ever_and_shows_no_client_certificate() -> None:
    made = templates(objects({**PLAIN, "tls": {"client": {"name": "edge-tls"}}}))["msg"]["spec"]
    assert [p["name"] for p in made["containers"][0]["ports"]] == ["grpc", "admin"]
    assert "tls-client" not in {v["name"] for v in made["volumes"]}
    assert settings(PLAIN).msg.api_port == 0


def test_a_client_certificate_still_rolls_gateways_alone() -> None:
    before, after = (snapshot(cluster({**PLAIN, "tls": tls})) for tls in ({}, {"client": {"name": "edge-tls"}}))
    assert changed(before, after)[1] == {"StatefulSet/demo-edge"}


# ── who does ─────────────────────────────────────────────────────────────────────────────────────────────────


def test_every_field_is_a_setting_of_msg() -> None:
    read = settings(PRODUCT)
    msg, files = read.msg, read.attachments
    assert (msg.api_host, msg.api_port, msg.api_settle_ms, msg.api_connections) == ("0.0.0.0", 8911, 5_000, 500)
    assert (msg.api_user_per_s, msg.api_server_per_s) == (20, 4_000)
    assert msg.http_origins == ("https://chat.example.org", "https://localhost:8443")
    assert str(read.tls.client_dir) == "/etc/plato/tls/client"
    assert files.s3_url == "https://store.example.org/chat-files/demo"
    assert files.s3_region == "eu-1"
    assert str(files.s3_access_key_file) == "/etc/plato/attachments/access-key"
    assert str(files.s3_secret_key_file) == "/etc/plato/attachments/secret-key"
    assert (files.bytes_max, files.types) == (1_048_576, ("image/png", "audio/*"))
    assert (files.keep_unused_s, files.unused_bytes_max) == (3_600, 8_388_608)
    assert msg.hook_url == "https://app.example.org/before"
    assert (msg.hook_timeout_ms, msg.hook_on_failure) == (200, "refuse")
    assert (msg.after_url, msg.push_url) == ("https://app.example.org/after", "https://app.example.org/push")
    assert str(msg.hook_secret_file) == "/etc/plato/hooks/secret"
    assert (msg.recall_limit_s, msg.edit_limit_s, msg.message_retention_days) == (0, 60, 365)
    assert (msg.group_members_max, msg.friends_only, msg.search) == (500, True, False)
    assert (msg.events, msg.events_retention_h) == (True, 24)


def test_pages_may_connect_everywhere_or_nowhere() -> None:
    """A page that may ask the API and not the gateways, or the other way round, is of no use."""
    origins = tuple(PRODUCT["origins"])
    assert settings(PRODUCT).msg.http_origins == origins
    for part in ("gateway", "ipconfig"):
        assert settings(PRODUCT, part).gateway.ws_origins == origins
        assert settings(PLAIN, part).gateway.ws_origins == ()
    before, after = (snapshot(cluster({**PLAIN, "origins": o})) for o in ([], ["https://a.example"]))
    assert changed(before, after)[1] == {"StatefulSet/demo-edge", "Deployment/demo-msg", "Deployment/demo-ipconfig"}


def test_people_reach_msg_by_a_service_of_their_own_which_leads_to_no_other_port() -> None:
    found = objects(PRODUCT)
    made = found[SERVICE]
    assert made["spec"]["type"] == "LoadBalancer"
    (port,) = made["spec"]["ports"]
    assert port == {"name": "api", "port": 443, "targetPort": "api", "protocol": "TCP", "appProtocol": "https"}
    assert made["metadata"]["annotations"]["example.org/pool"] == "public"
    pod = templates(found)["msg"]
    assert made["spec"]["selector"].items() <= pod["metadata"]["labels"].items()
    assert {p["name"]: p["containerPort"] for p in pod["spec"]["containers"][0]["ports"]}["api"] == 8911
    open_ports = [p["port"] for rule in found["NetworkPolicy/demo"]["spec"]["ingress"] for p in rule["ports"]]
    assert 8911 in open_ports
    closed = objects({**PLAIN, "networkPolicy": True})["NetworkPolicy/demo"]["spec"]["ingress"]
    assert 8911 not in [p["port"] for rule in closed for p in rule["ports"]]


def test_an_ingress_may_speak_tls_before_the_api() -> None:
    spec = {**PRODUCT, "api": {**PRODUCT["api"], "tls": "None"}}
    found = objects(spec)
    assert found[SERVICE]["spec"]["ports"][0]["appProtocol"] == "http"
    assert settings(spec).tls.client_dir is None
    assert str(settings(spec, "gateway").tls.client_dir) == "/etc/plato/tls/client"


def test_what_is_said_of_the_service_rolls_no_pod() -> None:
    for field, value in (("port", 8443), ("serviceType", "NodePort"), ("annotations", {})):
        before, after = (snapshot(cluster(s)) for s in (PRODUCT, {**PRODUCT, "api": {**PRODUCT["api"], field: value}}))
        assert changed(before, after) == ({SERVICE}, set()), field


@pytest.fixture(scope="module")
def product() -> dict[str, tuple[Apply, dict[str, Any]]]:
    return rendered(PRODUCT)


@pytest.mark.parametrize("field", [".".join(f) for name in NEW for f in leaves({name: PRODUCT[name]})])
def test_a_field_that_changes_an_object_changes_its_hash(
    field: str, product: dict[str, tuple[Apply, dict[str, Any]]]
) -> None:
    """Each field of PRODUCT taken back alone; those that must be there, for another value."""
    path = tuple(field.split("."))
    spec = without(PRODUCT, path)
    if path[:2] == ("attachments", "s3") and path[2] not in ("prefix", "region"):
        other: Any = {"name": "others"} if path[2] in ("accessKey", "secretKey") else "https://other.example"
        spec["attachments"] = {**PRODUCT["attachments"], "s3": {**PRODUCT["attachments"]["s3"], path[2]: other}}
    was, now = product, rendered(spec)
    differ = {key for key in was if key in now and was[key][1] != now[key][1]}
    assert differ or was.keys() != now.keys(), "the field reaches nothing"
    for key in was.keys() & now.keys():
        (old, before), (new, after) = was[key], now[key]
        assert (old.input_hash != new.input_hash) == (before != after), key
        templates_ = [each.get("spec", {}).get("template") for each in (before, after)]
        assert (old.template_hash != new.template_hash) == (templates_[0] != templates_[1]), key


@pytest.mark.parametrize(
    "api",
    [{"tls": "None"}, {"maxConnections": 7}, {"port": 1}, {"serviceType": "NodePort"}, {"annotations": {"a": "b"}}],
)
def test_a_door_that_is_shut_rolls_nothing_however_it_is_painted(api: dict[str, Any]) -> None:
    before, after = snapshot(cluster(PLAIN)), snapshot(cluster({**PLAIN, "api": api}))
    assert changed(before, after) == (set(), set())


# ── Secrets ──────────────────────────────────────────────────────────────────────────────────────────────────


def test_each_secret_and_key_that_the_product_names_is_asked_for() -> None:
    """What is lacking of them is told by DependenciesReady, as of every other one."""
    wanted = dict(_wanted_secrets(cluster(PRODUCT)))
    assert wanted["store-keys"] == ("AWS_SECRET_ACCESS_KEY", "accessKey")
    assert wanted["hook-key"] == ("secret",)
    assert not {"store-keys", "hook-key"} & dict(_wanted_secrets(cluster(PLAIN))).keys()


def test_a_missing_secret_is_told_in_words_and_rolls_nothing() -> None:
    snap = snapshot(cluster(PRODUCT))
    lacking = one_pass(replace(snap, missing_secrets=("hook-key", "store-keys/accessKey")))
    assert lacking.cluster_status is not None
    (said,) = [c for c in lacking.cluster_status.conditions if c.type == "DependenciesReady"]
    assert (said.status, said.reason) == ("False", "SecretMissing")
    assert said.message == "create in this namespace: hook-key, store-keys/accessKey"
    assert lacking.applies == one_pass(snap).applies


def test_secrets_come_as_files_that_a_change_reaches_without_a_restart() -> None:
    """No variable, which is of the start, and no subPath, which is never written again."""
    pod = templates(objects(PRODUCT))["msg"]["spec"]
    container = pod["containers"][0]
    volumes = {v["name"]: v for v in pod["volumes"]}
    folders = {m["mountPath"]: m for m in container["volumeMounts"]}
    found = {}
    for variable in container["env"]:
        folder, _, file = variable.get("value", "").rpartition("/")
        if variable["name"].endswith(("KEY_FILE", "SECRET_FILE")):
            assert "subPath" not in folders[folder]
            for source in volumes[folders[folder]["name"]]["projected"]["sources"]:
                for item in source["secret"]["items"]:
                    if item["path"] == file:
                        found[variable["name"]] = (source["secret"]["name"], item["key"])
    assert found == {
        "PLATO_ATTACHMENTS__S3_ACCESS_KEY_FILE": ("store-keys", "accessKey"),
        "PLATO_ATTACHMENTS__S3_SECRET_KEY_FILE": ("store-keys", "AWS_SECRET_ACCESS_KEY"),
        "PLATO_MSG__HOOK_SECRET_FILE": ("hook-key", "secret"),
    }
    for part in ("gateway", "state", "ipconfig", "migrate"):
        assert "hook" not in json.dumps(templates(objects(PRODUCT))[part])


# ── the sample ───────────────────────────────────────────────────────────────────────────────────────────────


def test_the_sample_is_what_the_definitions_take_and_the_page_quotes_it() -> None:
    """Its Secrets and keys are those of the sample of Secrets."""
    sample = (ROOT / "deploy" / "samples" / "api.yaml").read_text(encoding="utf-8")
    spec = yaml.safe_load(sample)["spec"]
    schema = root_of("PlatoCluster")["properties"]["spec"]
    assert refuse(schema, filled(schema, spec), "spec") == []
    page = (ROOT / "docs" / "kubernetes.md").read_text(encoding="utf-8")
    (quoted,) = re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)
    assert quoted in sample
    made = yaml.safe_load_all((ROOT / "deploy" / "samples" / "secrets.yaml").read_text(encoding="utf-8"))
    there = {secret["metadata"]["name"]: secret["stringData"] for secret in made}
    wanted = dict(_wanted_secrets(cluster(spec)))
    del wanted["chat-tls"]
    for name, keys in wanted.items():
        assert set(keys) <= there[name].keys()
    assert len(there["plato-hooks"]["secret"]) >= 32


# ── taking it back ───────────────────────────────────────────────────────────────────────────────────────────


def removals(spec: Mapping[str, Any], there: Child, *, pool: str = "") -> list[Remove]:
    snap = snapshot(cluster(spec))
    if pool:
        snap = replace(snap, pools={**snap.pools, pool: Pool(pool, "u", 1, snap.pools["demo-edge"].spec)})
    found = one_pass(replace(snap, children={(there.kind, there.name): there}))
    return [o for o in found.applies if isinstance(o, Remove)]


def test_the_service_goes_when_nobody_wants_it_and_only_ours() -> None:
    ours = Child("Service", "demo-api", "u", input_hash="abc")
    assert removals(PLAIN, ours) == [Remove("Service", "demo-api", "u")]
    assert removals(PRODUCT, ours) == []
    assert removals(PLAIN, replace(ours, input_hash="")) == []  # somebody's own, with our labels copied
    assert removals(PLAIN, ours, pool="demo-api") == []  # the one of a pool of that name
