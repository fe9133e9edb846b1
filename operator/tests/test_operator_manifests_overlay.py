"""podOverlay: what it can add, and what it is refused in words."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from manifest_inputs import PLAIN, cluster, orders, snapshot
from plato_operator.core.children import job_overlay
from plato_operator.manifests import OverlayError, render
from plato_operator.manifests.overlay import overlaid


def template(part: str, overlay: dict[str, Any] | None = None) -> dict[str, Any]:
    """Pod template of a part, with its overlay set in the spec."""
    over = {"podOverlay": overlay} if overlay is not None else {}
    spec = {**PLAIN, **({"gateways": {"template": over}} if part == "gateway" else {part: over})}
    snap = snapshot(cluster(spec))
    kind = "Deployment" if part in ("msg", "ipconfig") else "StatefulSet"
    order = next(o for o in orders(snap) if o.kind == kind and o.role == part)
    made: dict[str, Any] = render(order, snap)["spec"]["template"]
    del made["metadata"]["annotations"]["plato.im/input-hash"]
    return made


PARTS = ("gateway", "state", "msg", "ipconfig")
BASE = {part: template(part) for part in PARTS}


@pytest.mark.parametrize("part", PARTS)
def test_a_sidecar_a_volume_labels_and_annotations_are_added(part: str) -> None:
    sidecar = {"name": "log", "image": "log:1", "volumeMounts": [{"name": "tmp", "mountPath": "/tmp"}]}
    made = template(part, {
        "metadata": {"labels": {"team": "chat"}, "annotations": {"a": "b"}},
        "spec": {"containers": [sidecar], "volumes": [{"name": "more", "emptyDir": {}}], "runtimeClassName": "gvisor"},
    })  # fmt: skip
    base = BASE[part]
    assert made["spec"]["containers"] == [*base["spec"]["containers"], sidecar]
    assert made["spec"]["volumes"] == [*base["spec"]["volumes"], {"name": "more", "emptyDir": {}}]
    assert made["spec"]["runtimeClassName"] == "gvisor"
    assert made["metadata"]["labels"] == {**base["metadata"]["labels"], "team": "chat"}
    assert made["metadata"]["annotations"] == {**base["metadata"]["annotations"], "a": "b"}


def job(overlay: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """Name and pod spec of the migration's Job."""
    snap = snapshot(cluster({**PLAIN, "msg": {"podOverlay": overlay}}))
    order = next(o for o in orders(snap) if o.kind == "Job")
    return order.name, render(order, snap)["spec"]["template"]["spec"]


def test_the_migration_takes_of_the_overlay_of_msg_what_opening_a_database_and_a_store_may_need() -> None:
    """A private authority's certificate, above all: the Job opens the same two."""
    plain, base = job({})
    ca = {"name": "ca", "secret": {"secretName": "our-ca"}}
    mount, variable = {"name": "ca", "mountPath": "/ca"}, {"name": "SSL_CERT_FILE", "value": "/ca/ca.crt"}
    sidecar = {"name": "log", "image": "log:1", "volumeMounts": [{"name": "logs", "mountPath": "/logs"}]}
    main = {
        "name": "msg",
        "env": [variable],
        "volumeMounts": [mount, {"name": "run", "mountPath": "/more"}],
        "ports": [],
    }
    name, made = job({"spec": {"volumes": [ca, {"name": "logs", "emptyDir": {}}], "containers": [main, sidecar]}})
    assert name != plain
    (container,) = made["containers"]
    (before,) = base["containers"]
    assert made["volumes"] == [*base["volumes"], ca]
    assert container == {**before, "env": [*before["env"], variable], "volumeMounts": [*before["volumeMounts"], mount]}
    assert job({"spec": {"containers": [sidecar]}, "metadata": {"labels": {"team": "chat"}}}) == (plain, base)


@given(st.dictionaries(st.sampled_from(["volumes", "containers", "env"]), st.recursive(
    st.none() | st.integers() | st.sampled_from(["msg", "ca"]),
    lambda inner: st.lists(inner, max_size=3)
    | st.dictionaries(st.sampled_from(["name", "env", "envFrom", "volumeMounts", "mountPath"]), inner, max_size=3),
)))  # fmt: skip
def test_an_odd_overlay_of_msg_is_refused_where_its_own_pod_is_made(spec: dict[str, Any]) -> None:
    lent = job_overlay({"spec": spec})
    assert set(lent) <= {"spec"}


def test_lists_are_merged_by_their_key() -> None:
    main = {
        "name": "state", "env": [{"name": "PLATO_LOG__LEVEL", "value": "debug"}],
        "ports": [{"containerPort": 9, "name": "x"}],
        "resources": {"limits": {"memory": "2Gi"}}, "securityContext": {"capabilities": {"add": ["NET_BIND_SERVICE"]}},
    }  # fmt: skip
    made = template("state", {"spec": {"containers": [main]}})["spec"]["containers"]
    base = BASE["state"]["spec"]["containers"][0]
    assert len(made) == 1
    assert made[0]["env"] == [*base["env"], {"name": "PLATO_LOG__LEVEL", "value": "debug"}]
    assert made[0]["ports"] == [*base["ports"], {"containerPort": 9, "name": "x"}]
    assert made[0]["resources"] == {**base["resources"], "limits": {"memory": "2Gi"}}
    assert made[0]["securityContext"]["capabilities"] == {"drop": ["ALL"], "add": ["NET_BIND_SERVICE"]}


def test_tolerations_are_put_behind_ours() -> None:
    more = {"key": "spot", "operator": "Exists"}
    made = template("msg", {"spec": {"tolerations": [more]}})
    assert made["spec"]["tolerations"] == [*BASE["msg"]["spec"]["tolerations"], more]


def test_null_and_patch_delete_take_away_what_plato_does_not_need() -> None:
    zones = {"topologyKey": "topology.kubernetes.io/zone", "whenUnsatisfiable": "ScheduleAnyway", "$patch": "delete"}
    made = template("state", {"spec": {"affinity": None, "topologySpreadConstraints": [zones]}})["spec"]
    assert "affinity" not in made
    assert made["topologySpreadConstraints"] == []


CONTAINER = "podOverlay.spec.containers"
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("state", {"containers": []}, "is it spec.containers?"),
    ("state", {"labels": {"a": "b"}}, "is it metadata.labels?"),
    ("state", {"spec": None}, "podOverlay.spec is null"),
    ("state", {"spec": "x"}, "podOverlay.spec is 'x', where a pod template has a mapping"),
    ("state", {"spec": {"containers": {"name": "state"}}}, f"{CONTAINER} is a mapping, where a pod template has a list"),
    ("state", {"spec": {"containers": ["state"]}}, rf"{CONTAINER}\[0\] is 'state'"),
    ("state", {"spec": {"containers": [{"image": "x"}]}}, rf"{CONTAINER}\[0\] needs name"),
    ("state", {"spec": {"tolerations": "all"}}, "podOverlay.spec.tolerations is 'all', where a pod template has a list"),
    ("state", {"spec": {"containers": None}}, r"containers\[state\] cannot be removed: it is Plato itself"),
    ("msg", {"spec": {"containers": [{"name": "msg", "$patch": "delete"}]}}, r"containers\[msg\] cannot be removed"),
    ("msg", {"spec": {"containers": [{"name": "msg", "$patch": "replace"}]}}, r"\$patch: only delete is known"),
    ("msg", {"spec": {"$patch": "replace"}}, "of the directives only"),
    ("msg", {"spec": {"serviceAccountName": "x"}}, "podOverlay.spec.serviceAccountName cannot be changed"),
    ("msg", {"spec": {"hostNetwork": True}}, "podOverlay.spec.hostNetwork cannot be changed: set spec.network"),
    ("gateway", {"spec": {"hostNetwork": None}}, "podOverlay.spec.hostNetwork cannot be changed"),
    ("gateway", {"spec": {"terminationGracePeriodSeconds": 5}}, "follows from drain.deadlineSeconds"),
    ("gateway", {"spec": {"readinessGates": None}}, "readinessGates: plato.im/serving cannot be changed"),
    ("gateway", {"metadata": {"labels": {"plato.im/pool": "x"}}}, "plato.im/pool is Plato's own"),
    ("gateway", {"metadata": {"annotations": None}}, "is Plato's own"),
    ("gateway", {"metadata": {"name": "x"}}, "only labels and annotations"),
    ("gateway", {"spec": {"containers": [{"name": "gateway", "livenessProbe": None}]}}, "livenessProbe cannot be changed"),
    ("gateway", {"spec": {"containers": [{"name": "gateway", "ports": [{"containerPort": 8900, "hostPort": 1}]}]}},
     r"ports: tcp cannot be changed: ports are set in the resource's spec"),
    ("gateway", {"spec": {"containers": [{"name": "x", "ports": [{"containerPort": 8909}]}]}}, "8909 is taken by gateway"),
    ("gateway", {"spec": {"containers": [{"name": "gateway", "env": [{"name": "PLATO_PROCESS__UID", "value": "1"}]}]}},
     r"env: PLATO_PROCESS__UID cannot be changed: the operator sets it"),
    ("state", {"spec": {"volumes": [{"name": "admin", "emptyDir": {}}]}}, "volumes: admin cannot be changed"),
    ("state", {"spec": {"containers": [{"name": "state", "volumeMounts": [{"mountPath": "/tmp", "name": "run"}]}]}},
     "volumeMounts: tmp cannot be changed"),
    ("ipconfig", {"spec": {"enableServiceLinks": True}}, "read as settings"),
]  # fmt: skip


@pytest.mark.parametrize(("part", "overlay", "words"), REFUSED)
def test_what_cannot_be_is_refused_in_words(part: str, overlay: dict[str, Any], words: str) -> None:
    with pytest.raises(OverlayError, match=words):
        template(part, overlay)


def test_only_the_resource_with_the_overlay_is_not_rendered() -> None:
    snap = snapshot(cluster({**PLAIN, "state": {"podOverlay": {"spec": None}}}))
    failed = []
    for order in orders(snap):
        try:
            render(order, snap)
        except OverlayError:
            failed.append(order.name)
    assert failed == ["demo-s0", "demo-s1"]


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(
        st.sampled_from(["name", "env", "ports", "containers", "volumes", "tolerations", "containerPort", "mountPath",
                         "metadata", "spec", "labels", "annotations", "volumeMounts", "$patch", "value", "affinity"]),
        inner, max_size=4),
    max_leaves=20,
)  # fmt: skip


@given(st.dictionaries(st.sampled_from(["spec", "metadata", "other"]), _JSON))
def test_whatever_it_is_it_is_merged_or_refused_and_ours_stays_as_it_was(overlay: dict[str, Any]) -> None:
    base = copy.deepcopy(BASE["gateway"])
    try:
        made = overlaid(base, copy.deepcopy(overlay))
    except OverlayError:
        made = BASE["gateway"]
    assert base == BASE["gateway"]
    main = next(c for c in made["spec"]["containers"] if c["name"] == "gateway")
    for variable in BASE["gateway"]["spec"]["containers"][0]["env"]:
        assert variable in main["env"]
