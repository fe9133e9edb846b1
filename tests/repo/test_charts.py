"""The charts without helm: derived files are fresh, rights and names are those of the code, unknown values are refused."""

from __future__ import annotations

import ast
import json
import re
from typing import Any

import pytest
import yaml
from plato.api import names

from tests.repo.tracked import files, text
from tools import manifests

CHART_FILES = [f for f in files() if f.startswith("charts/")]


def values() -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load(text("charts/plato/values.yaml"))
    return loaded


def schema(chart: str) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads(text(f"charts/{chart}/values.schema.json"))
    return loaded


@pytest.mark.parametrize("path", sorted(manifests.derived()), ids=lambda p: p.name)
def test_what_comes_from_the_crds_is_fresh(path: Any) -> None:
    assert path.read_text(encoding="utf-8") == manifests.derived()[path], "run `make manifests`"


def test_rendered_manifests_name_this_chart() -> None:
    assert manifests.unmarked() == [], "run `make manifests` with helm on the PATH"


def test_rendered_manifests_hold_the_crds_as_they_are() -> None:
    rendered = {d["metadata"]["name"]: d for d in yaml.safe_load_all(text("deploy/plato.yaml"))}
    for plural in manifests.KINDS:
        crd = yaml.safe_load(text(f"crds/{plural}.plato.im.yaml"))
        found = rendered[crd["metadata"]["name"]]
        assert found["spec"] == crd["spec"]
        assert found["metadata"]["annotations"] == {"helm.sh/resource-policy": "keep"}


def test_a_crd_that_helm_would_change_is_not_taken() -> None:
    with pytest.raises(ValueError, match="Helm"):
        manifests.crd_template("metadata:\n  name: x\n# {{ no }}\n", "x")


def _open_objects(at: object, path: str = "") -> list[str]:
    """Paths of the objects in a schema that take any key."""
    if not isinstance(at, dict):
        return []
    found = [path] if at.get("type") == "object" and "additionalProperties" not in at else []
    for key, field in at.get("properties", {}).items():
        found += _open_objects(field, f"{path}.{key}")
    for key in ("items", "additionalProperties"):
        found += _open_objects(at.get(key), f"{path}[]")
    return found


@pytest.mark.parametrize("chart", ["plato", "plato-cluster"])
def test_an_unknown_value_is_an_error_everywhere(chart: str) -> None:
    """Open are only Kubernetes' own structures, which the API server checks."""
    allowed = re.compile(r"^\.global$|[aA]ffinity$|tolerations\[\]$|topologySpreadConstraints\[\]$|podOverlay$")
    assert [p for p in _open_objects(schema(chart)) if not allowed.search(p)] == []


def _undeclared(given: object, at: dict[str, Any], path: str = "") -> list[str]:
    """Keys of the values that the schema does not name, and the other way round."""
    if not isinstance(given, dict) or "properties" not in at:
        return []
    differ = set(given) ^ set(at["properties"]) - {"global"}
    found = [f"{path}.{key}" for key in sorted(differ - {"global"})]
    for key in set(given) & set(at["properties"]):
        found += _undeclared(given[key], at["properties"][key], f"{path}.{key}")
    return found


def test_each_value_has_a_default_and_a_schema() -> None:
    differ = _undeclared(values(), schema("plato"))
    # Maps that are empty by default.
    assert [p for p in differ if not re.search(r"\.resources\.|\.affinity\.|^\.test\.images\.", p)] == []


def test_versions_agree() -> None:
    version = re.search(r'^version = "(.+)"$', text("pyproject.toml"), re.MULTILINE)
    assert version
    for chart in ("plato", "plato-cluster"):
        assert yaml.safe_load(text(f"charts/{chart}/Chart.yaml"))["appVersion"] == version[1]


def _rights(rules: list[dict[str, Any]]) -> dict[tuple[str, str], set[str]]:
    made: dict[tuple[str, str], set[str]] = {}
    for rule in rules:
        for group in rule["apiGroups"]:
            for resource in rule["resources"]:
                made.setdefault((group, resource), set()).update(rule["verbs"])
    return made


def test_the_operator_gets_exactly_the_rights_of_the_table() -> None:
    table = text("ARCHITECTURE.md").split("**The operator's rights**")[1].split("\n\n")[1]
    wanted: dict[tuple[str, str], set[str]] = {}
    for groups, resources, verbs in re.findall(r"^\| ([^|]+) \| ([^|]+) \| ([^|]+) \|$", table, re.MULTILINE)[1:]:
        for group in groups.split(", "):
            for resource in resources.split(", "):
                words = re.split(r"[:;]", verbs)[0].split(", ")
                wanted.setdefault(("" if group == "core" else group, resource), set()).update(w.strip() for w in words)
    given = _rights(yaml.safe_load(text("charts/plato/files/role.yaml")))
    lease = {
        (r["metadata"]["name"]): r["rules"]
        for r in yaml.safe_load_all(text("deploy/plato.yaml"))
        if r["kind"] == "Role" and r["metadata"]["name"] == "plato-operator-lease"
    }
    assert given | _rights(lease["plato-operator-lease"]) == wanted
    assert all("*" not in verbs and "*" not in resource for (_, resource), verbs in given.items())


def test_the_rendered_role_is_that_file() -> None:
    [role] = [
        d
        for d in yaml.safe_load_all(text("deploy/plato.yaml"))
        if d["kind"] == "Role" and d["metadata"]["name"] == "plato-operator"
    ]
    assert role["metadata"]["namespace"] == "plato"
    assert role["rules"] == yaml.safe_load(text("charts/plato/files/role.yaml"))


def test_the_uninstall_job_runs_where_the_operator_may() -> None:
    """On tainted nodes, or under a quota that asks for resources, it would never start, and no uninstall end."""
    hook = text("charts/plato/templates/hooks/uninstall.yaml")
    for field in ("resources", "nodeSelector", "tolerations"):
        assert f".Values.operator.{field}" in hook


def test_names_from_outside_are_quoted() -> None:
    """A namespace may be called 2024, and YAML would take it for a number."""
    bare = re.compile(r":\s+\{\{ \$?(\.Release\.(Name|Namespace)|namespace|pool) \}\}")
    found = [
        f"{f}: {line}"
        for f in CHART_FILES
        if f.endswith((".yaml", ".tpl"))
        for line in text(f).splitlines()
        if bare.search(line)
    ]
    assert found == []


def test_the_operators_account_is_not_named_as_a_cluster_would_be() -> None:
    """Pods of a PlatoCluster run under the account of its name. One that is called like the release would have the
    operator's rights, and would take the operator's account with it when it is deleted."""
    accounts = [d["metadata"] for d in yaml.safe_load_all(text("deploy/plato.yaml")) if d["kind"] == "ServiceAccount"]
    assert [a["name"] for a in accounts] == ["plato-operator"]
    assert '(printf "%s-operator" (include "plato.name" .))' in text("charts/plato/templates/_helpers.tpl")


def test_the_operator_pod_is_restricted() -> None:
    [deployment] = [d for d in yaml.safe_load_all(text("deploy/plato.yaml")) if d["kind"] == "Deployment"]
    spec = deployment["spec"]
    assert (spec["replicas"], spec["strategy"]) == (1, {"type": "Recreate"})
    pod = spec["template"]["spec"]
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    [container] = pod["containers"]
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert container["ports"] == [{"name": "admin", "containerPort": names.OPERATOR_PORT}]


def test_each_variable_of_the_operator_is_a_setting() -> None:
    from plato.runtime.settings import Settings

    for section, key in re.findall(r"name: PLATO_([A-Z]+)__([A-Z_]+)", text("charts/plato/templates/deployment.yaml")):
        annotation = Settings.model_fields[section.lower()].annotation
        assert annotation is not None
        assert key.lower() in getattr(annotation, "model_fields", {}), f"{section}.{key}"


def test_no_template_asks_what_the_cluster_can() -> None:
    """Argo CD renders away from the cluster."""
    assert [f for f in CHART_FILES if "/templates/" in f and ".Capabilities" in text(f)] == []


def _metrics() -> set[str]:
    """Names of the metrics that the code makes, as Prometheus stores them."""
    made = set()
    for name in files():
        if name.endswith(".py") and "/tests/" not in name and name.startswith(("images/", "operator/", "libs/")):
            for node in ast.walk(ast.parse(text(name))):
                if isinstance(node, ast.Constant) and isinstance(node.value, str):
                    made.update(re.findall(r"^plato_[a-z_]+$", node.value))
    return made | {f"{m}{end}" for m in made for end in ("_bucket", "_sum", "_count")}


@pytest.mark.parametrize("name", ["rules.yaml", "dashboard.json"])
def test_each_metric_that_is_looked_at_is_made(name: str) -> None:
    loaded = yaml.safe_load(text(f"charts/plato/files/{name}"))
    whole = json.dumps(loaded)
    expressions = re.findall(r'"expr": "((?:[^"\\]|\\.)*)"', whole)
    assert len(expressions) >= 8
    used = {m for e in expressions for m in re.findall(r"\bplato_[a-z_]+", e)}
    assert used - _metrics() == set()


def _applications() -> dict[int, dict[str, Any]]:
    loaded = [yaml.safe_load(text(f)) for f in files() if f.startswith("deploy/argocd/apps/")]
    return {int(a["metadata"]["annotations"]["argocd.argoproj.io/sync-wave"]): a for a in loaded}


def test_argo_brings_definitions_then_operator_then_cluster() -> None:
    paths = [a["spec"]["source"]["path"] for _, a in sorted(_applications().items())]
    assert paths == ["crds", "charts/plato", "charts/plato-cluster"]


def test_argo_never_prunes_definitions() -> None:
    assert _applications()[-2]["spec"]["syncPolicy"]["automated"]["prune"] is False


def test_the_snippet_of_argocd_cm_holds_the_health_check_as_it_is() -> None:
    data = yaml.safe_load(text("deploy/argocd/argocd-cm.yaml"))["data"]
    lua = text("deploy/argocd/health.lua")
    for kind in ("PlatoCluster", "GatewayPool", "StateShard"):
        assert data[f"resource.customizations.health.plato.im_{kind}"] == lua


def test_the_smallest_sample_has_twelve_lines() -> None:
    assert len(text("deploy/samples/cluster.yaml").splitlines()) == 12


def test_the_samples_name_one_set_of_secrets() -> None:
    """Those of the sample of Secrets; the throw-away servers of the page and of the release `plato` are called so too. A
    person who fills in one file and applies another must not have to rename anything."""
    made = {s["metadata"]["name"]: s["stringData"] for s in yaml.safe_load_all(text("deploy/samples/secrets.yaml"))}
    specs = {f: yaml.safe_load(text(f)).get("spec", {}) for f in files() if f.startswith("deploy/samples/")
             if f.rpartition("/")[2] in ("api.yaml", "cluster-values.yaml", "cluster.yaml", "production.yaml")}  # fmt: skip
    specs["argo"] = _applications()[0]["spec"]["source"]["helm"]["valuesObject"]["spec"]
    assert len(specs) == 5
    for where, spec in specs.items():
        names_of = {
            part: spec[part][key]["name"] for part, key in (("database", "uri"), ("store", "url"), ("auth", "keys"))
        }
        assert names_of == {"database": "plato-postgres", "store": "plato-valkey", "auth": "plato-keys"}, where
    assert (set(made["plato-postgres"]), set(made["plato-valkey"])) == ({"uri"}, {"url"})
    created = re.findall(r"create secret generic ([\w-]+)", _shell("docs/kubernetes.md"))
    assert created == ["plato-postgres", "plato-valkey", "plato-keys"]
    for name, end in (("postgres", "postgres"), ("valkey", "valkey"), ("keys", "keys")):
        assert f'printf "%s-{end}" (include "plato.name" .)' in text(f"charts/plato/templates/devdeps/{name}.yaml")


def test_what_a_cluster_has_to_give_is_asked_for_in_words() -> None:
    """By the template: a schema that requires it would find fault with the chart's own default values."""
    crd = yaml.safe_load(text("crds/platoclusters.plato.im.yaml"))
    spec = crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]
    asked = re.search(r"range \$field := list (.*?) \}\}", text("charts/plato-cluster/templates/cluster.yaml"))
    assert asked
    assert sorted(asked[1].replace('"', "").split()) == sorted(spec["required"])
    assert "required" not in schema("plato-cluster")["properties"]["spec"]
    assert schema("plato-cluster")["properties"]["spec"]["properties"]["database"]["required"] == ["uri"]


def test_the_hpa_waits_longer_than_a_drain() -> None:
    crd = yaml.safe_load(text("crds/gatewaypools.plato.im.yaml"))
    spec = crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]
    deadline_s = spec["properties"]["drain"]["default"]["deadlineSeconds"]
    down = yaml.safe_load(text("deploy/samples/hpa.yaml"))["spec"]["behavior"]["scaleDown"]
    assert down["stabilizationWindowSeconds"] >= deadline_s
    assert all(p["type"] == "Pods" and p["periodSeconds"] >= deadline_s for p in down["policies"])


def _shell(page: str) -> str:
    return "\n".join(re.findall(r"```sh\n(.*?)```", text(page), re.DOTALL))


def test_the_readme_shows_the_three_ways_by_commands_of_the_page() -> None:
    """The suite runs those of the page (e2e/test_three_ways.py)."""
    section = text("README.md").split("## On Kubernetes")[1].split("\n## ")[0]
    commands = [line for block in re.findall(r"```sh\n(.*?)```", section, re.DOTALL) for line in block.splitlines()]
    page = _shell("docs/kubernetes.md").splitlines()
    assert len(commands) >= 7
    assert [c for c in commands if c not in page] == []
    for way in ("deploy/plato.yaml", "helm install plato", "deploy/argocd/plato.yaml"):
        assert any(way in c for c in commands)


def test_each_file_that_a_command_names_is_there() -> None:
    named = re.findall(
        r"(?:-f|--values|helm install \w+|helm upgrade \w+) ((?:deploy|charts|crds)[\w/.-]*)",
        _shell("docs/kubernetes.md"),
    )
    assert len(named) >= 8
    assert [n for n in named if not any(f == n or f.startswith(f"{n.rstrip('/')}/") for f in files())] == []


def test_each_reason_that_tells_of_trouble_is_on_the_page() -> None:
    """Those that conditions.py makes, but for those that say that all is well."""
    from plato_operator.core import conditions

    page = text("docs/kubernetes.md").split("## Is it OK?")[1]
    source = text("operator/plato_operator/core/conditions.py")
    known = set(conditions.REFUSALS) | set(re.findall(r'\(?"([A-Z][a-zA-Z]+)", f?"', source)) | {"GatewaysMissing"}
    fine = {
        "AllAcquired", "Available", "Found", "Loading", "Migrating", "Moving", "NoDrain", "NodesReady", "NotBlocked", "None",
        "NotDegraded", "NotStalled", "Progressing", "Rebuilt", "Running", "Scheduled", "Serving", "Settled",
        "TopologyMissing", "Undoing", "Written", "Evacuated", "Evacuating", "NodeReady", "NotAsked",
        "Deployment",  # a kind
    }  # fmt: skip
    assert sorted(r for r in known - fine if f"`{r}`" not in page and r not in page) == []
