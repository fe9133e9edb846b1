"""What Argo CD takes for healthy, by a real Lua, and the order in which it brings things. Needs lua5.4, no cluster."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

from e2e import waves
from e2e.waves import lua_health

ROOT = Path(__file__).resolve().parent.parent
needs_lua = pytest.mark.skipif(waves.lua() is None, reason="there is no lua5.4 on the PATH: apt-get install lua5.4")


def condition(type_: str, status: str, generation: int, reason: str = "", message: str = "") -> dict[str, Any]:
    """A condition of a status."""
    return {"type": type_, "status": status, "reason": reason, "message": message, "observedGeneration": generation}


READY = condition("Ready", "True", 3, "Serving", "clients are served")
OLD_READY = condition("Ready", "True", 2, "Serving", "clients are served")
NOT_READY = condition("Ready", "False", 3, "SecretMissing", "create in this namespace: demo-keys")
UNKNOWN = condition("Ready", "Unknown", 3, "TopologyMissing", "the topology is missing")
STALLED = condition("Stalled", "True", 3, "QuotaExceeded", "exceeded quota")
RECONCILING = condition("Reconciling", "True", 3, "Progressing", "pods or slots are on their way")


def resource(spec: dict[str, Any] | None = None, observed: int | None = 3, **more: Any) -> dict[str, Any]:
    """A resource in its third generation."""
    status = {"observedGeneration": observed, **more} if observed is not None else more
    return {
        "apiVersion": "plato.im/v1alpha1",
        "kind": "PlatoCluster",
        "metadata": {"name": "demo", "generation": 3},
        "spec": spec or {},
        **({"status": status} if status else {}),
    }


@needs_lua
@pytest.mark.parametrize(
    ("found", "status", "words"),
    [
        (resource(observed=None), "Progressing", "said nothing"),
        (resource(), "Progressing", "said nothing"),
        (resource(conditions=[]), "Progressing", "older spec"),
        (resource(conditions=[READY]), "Healthy", "clients are served"),
        (resource(conditions=[READY, RECONCILING]), "Healthy", "clients are served"),
        (resource(observed=2, conditions=[OLD_READY]), "Progressing", "has not seen the newest spec"),
        (resource(conditions=[OLD_READY]), "Progressing", "older spec"),
        (resource(conditions=[UNKNOWN]), "Progressing", "TopologyMissing"),
        (resource(conditions=[NOT_READY]), "Degraded", "SecretMissing: create in this namespace: demo-keys"),
        (resource(conditions=[NOT_READY, RECONCILING]), "Progressing", "SecretMissing"),
        (resource(conditions=[READY, STALLED]), "Degraded", "QuotaExceeded: exceeded quota"),
        (resource({"paused": True}, conditions=[READY]), "Suspended", "spec.paused"),
        (resource({"paused": False}, conditions=[READY]), "Healthy", ""),
        (resource({"rollout": {"paused": True}}, conditions=[READY]), "Suspended", "spec.rollout.paused"),
        (resource({"rollout": {"paused": False}}, conditions=[READY]), "Healthy", ""),
    ],
)
def test_health_comes_from_ready_in_the_newest_generation(found: dict[str, Any], status: str, words: str) -> None:
    """Paused is Suspended, Stalled is Degraded, what speaks of an older spec counts for nothing."""
    said = lua_health(found)
    assert said.status == status, said
    assert words in said.message


@needs_lua
def test_what_is_being_deleted_is_not_healthy() -> None:
    """Though its status still says Ready."""
    found = resource(conditions=[READY])
    found["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    assert lua_health(found).status == "Progressing"


@needs_lua
def test_the_check_needs_no_library_that_argo_cd_leaves_out(tmp_path: Path) -> None:
    """Argo CD opens Lua's base and table only."""
    bare = tmp_path / "bare.lua"
    script = (ROOT / "deploy/argocd/health.lua").read_text(encoding="utf-8")
    bare.write_text(
        "local text = [==["
        + script
        + "]==]\nlocal check = load(text, 'health', 't', {obj = obj, ipairs = ipairs})\nreturn check()",
        encoding="utf-8",
    )
    assert lua_health(resource(conditions=[READY]), bare).status == "Healthy"
    bare.write_text("return nothing.at.all", encoding="utf-8")
    with pytest.raises(subprocess.CalledProcessError):
        lua_health(resource(), bare)


def test_waves_come_in_order_and_kinds_within_them() -> None:
    """Least wave first; a ServiceAccount before its Deployment; what Kubernetes does not know last."""

    def made(kind: str, name: str, wave: str | None = None) -> dict[str, Any]:
        notes = {"annotations": {waves.WAVE: wave}} if wave is not None else {}
        return {"kind": kind, "metadata": {"name": name, **notes}}

    given = [
        made("PlatoCluster", "c"), made("Deployment", "d"), made("Job", "late", "2"), made("ServiceAccount", "s"),
        made("CustomResourceDefinition", "x", "-1"), made("Deployment", "b"),
    ]  # fmt: skip
    order = [(wave, [o["metadata"]["name"] for o in objects]) for wave, objects in waves.in_waves(given)]
    assert order == [(-1, ["x"]), (0, ["s", "b", "d", "c"]), (2, ["late"])]
