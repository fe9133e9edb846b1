"""The charts by helm, on a real API server: linted, installed, tried, upgraded, rolled back, uninstalled, what they keep.

CRDs are one per cluster and others may use them: nothing here deletes them. What needs definitions of several versions
works on copies, under names and a group of their own.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from e2e import images as built
from e2e.frame.kube import Kube, wait_for
from e2e.frame.platform import Images
from e2e.testbed.layout import Layout
from tools import manifests

ROOT = Path(__file__).resolve().parent.parent
CHART = ROOT / "charts" / "plato"
CLUSTER_CHART = ROOT / "charts" / "plato-cluster"
NAMESPACE = "charts-check"
RELEASE = "check"
KEPT = tuple(f"{kind}.plato.im" for kind in manifests.KINDS)


def helm(kube: Kube, *words: str, timeout_s: float = 900) -> subprocess.CompletedProcess[str]:
    """helm in our namespace, whatever comes of it."""
    return kube.call([kube.program("helm"), "-n", NAMESPACE, *words], timeout_s=timeout_s)


@pytest.fixture(scope="module")
def values(kube: Kube, images: Images, testbed: Layout | None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a user of this cluster would put into a file: where the images are."""
    given: dict[str, Any] = {
        "image": {"registry": images.registry, "tag": images.tag, "pullPolicy": images.pull_policy},
        "rbac": {"nodes": False},
        "devDeps": {"enabled": True},
        "test": {"version": images.tag, "images": {"pullPolicy": images.pull_policy}, "timeoutSeconds": 240},
    }
    if testbed is not None:
        servers = built.references(services=("postgres", "valkey"))
        for name, image in servers.items():
            given["devDeps"][name] = {"image": image, "pullPolicy": images.pull_policy}
    path = tmp_path_factory.mktemp("values") / "values.yaml"
    path.write_text(yaml.safe_dump(given), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def release(kube: Kube, values: Path) -> Iterator[str]:
    """The chart, installed beside definitions that others may have applied."""
    kube.helm(
        "install", RELEASE, str(CHART), "--values", str(values), "--take-ownership", "--force-conflicts",
        "--wait", "--timeout", "180s", timeout_s=240,
    )  # fmt: skip
    yield RELEASE
    helm(kube, "uninstall", RELEASE, "--no-hooks", "--ignore-not-found")


def definitions(kube: Kube) -> dict[str, str]:
    """uid of each definition."""
    return {name: kube.get("CustomResourceDefinition", name)["metadata"]["uid"] for name in KEPT}  # type: ignore[index]  # None fails the test as it should


def secrets(kube: Kube) -> dict[str, Any]:
    """The generated Secrets."""
    names = [f"{RELEASE}-{part}" for part in ("postgres", "valkey", "keys")]
    return {name: (kube.get("Secret", name) or {}).get("data") for name in names}


def cluster(name: str = "left") -> dict[str, Any]:
    """A PlatoCluster that will wait for its Secrets."""
    return {
        "apiVersion": "plato.im/v1alpha1",
        "kind": "PlatoCluster",
        "metadata": {"name": name},
        "spec": {
            "version": "0.1.0",
            "database": {"uri": {"name": "absent"}},
            "store": {"url": {"name": "absent"}},
            "auth": {"guests": True},
            "gateways": {"template": {"ports": {"tcp": 9300, "ws": 9301, "admin": 9309}}},
        },
    }


def test_both_charts_are_clean(kube: Kube) -> None:
    """helm lint --strict finds nothing."""
    kube.helm("lint", "--strict", str(CHART))
    kube.helm("lint", "--strict", str(CLUSTER_CHART))
    kube.helm("lint", "--strict", str(CLUSTER_CHART), "--values", str(ROOT / "deploy/samples/cluster-values.yaml"))


def test_a_cluster_without_what_it_needs_is_refused_in_words(kube: Kube) -> None:
    """All of it at once, and where an example is."""
    result = helm(kube, "template", "x", str(CLUSTER_CHART), "--set", "spec.auth.guests=true")
    assert result.returncode != 0
    assert "the values lack spec.version, spec.database, spec.store; a whole example is deploy/samples" in result.stderr


def test_what_is_rendered_for_kubectl_is_fresh(kube: Kube) -> None:
    """deploy/ is what the chart renders to now."""
    stale = [path.name for path, text in manifests.rendered(kube.program("helm")).items() if path.read_text() != text]
    assert stale == [], "run `make manifests`"


@pytest.mark.parametrize(
    ("chart", "given", "words"),
    [
        (CHART, "opreator.logLevel=debug", "additional properties 'opreator' not allowed"),
        (CHART, "operator.loglevel=debug", "additional properties 'loglevel' not allowed"),
        (CHART, "devDeps.postgres.sorage=1Gi", "additional properties 'sorage' not allowed"),
        (CHART, "operator.logLevel=loud", "value must be one of 'debug', 'info', 'warning', 'error'"),
        (CLUSTER_CHART, "spec.statee.shards=3", "additional properties 'statee' not allowed"),
        (CLUSTER_CHART, "spec.state.shards=65", "maximum: got 65, want 64"),
        (CLUSTER_CHART, "pools.x.clusterRef.name=y", "additional properties 'clusterRef' not allowed"),
    ],
)
def test_an_unknown_value_is_an_error_in_words(kube: Kube, chart: Path, given: str, words: str) -> None:
    """Before anything is sent to the API server."""
    more = ["--values", str(ROOT / "deploy/samples/cluster-values.yaml")] if chart == CLUSTER_CHART else []
    result = helm(kube, "template", "x", str(chart), *more, "--set", given)
    assert result.returncode != 0
    assert words in result.stderr


def test_dev_servers_away_from_their_cluster_are_refused_in_words(kube: Kube) -> None:
    """A PlatoCluster reads Secrets of its own namespace only."""
    result = helm(kube, "template", "x", str(CHART), "--set", "devDeps.enabled=true,watchNamespaces={elsewhere}")
    assert result.returncode != 0
    assert "a PlatoCluster reads only its own" in result.stderr


def test_dev_servers_are_fine_where_every_namespace_is_watched(kube: Kube) -> None:
    """The release's own is one of them."""
    result = helm(
        kube, "template", "x", str(CHART), "--set", "devDeps.enabled=true", "--set-json", 'watchNamespaces=["*"]'
    )
    assert result.returncode == 0, result.stderr


def test_the_samples_are_taken(kube: Kube, release: str) -> None:
    """Each sample passes the API server's checks."""
    for sample in sorted((ROOT / "deploy" / "samples").glob("*.yaml")):
        if sample.name in ("cluster-values.yaml", "dev-deps.yaml", "namespace.yaml"):
            continue  # values; of the namespace plato; a namespace
        kube.done("apply", "--dry-run=server", "-f", str(sample))


def test_installed_it_works_and_its_rights_are_those_of_its_namespace(kube: Kube, release: str) -> None:
    """The operator is ready; its account can do what it must here and nothing elsewhere."""
    deployment = kube.get("Deployment", f"{RELEASE}-operator")
    assert deployment is not None
    assert deployment["status"].get("readyReplicas") == 1
    account = f"--as=system:serviceaccount:{NAMESPACE}:{RELEASE}-operator"

    def may(*words: str) -> bool:
        return kube.run("auth", "can-i", *words, account).stdout.strip() == "yes"

    assert may("create", "statefulsets.apps")
    assert may("patch", "pods", "--subresource=status")
    assert not may("list", "secrets")
    assert not may("get", "statefulsets.apps", "-n", "default")
    assert not may("list", "nodes")


@pytest.mark.apiserver
def test_a_second_release_is_told_to_leave_the_definitions_to_the_first(kube: Kube, release: str, values: Path) -> None:
    """Before Helm's own words about ownership metadata, and also where it was told to take ownership."""
    words = (
        "install",
        "second",
        str(CHART),
        "--values",
        str(values),
        "--dry-run=server",
        "--set",
        "devDeps.enabled=false",
    )
    for more in ((), ("--take-ownership",)):
        result = helm(kube, *words, *more)
        assert result.returncode != 0
        assert f"belong to the release {RELEASE} in the namespace {NAMESPACE}" in result.stderr
        assert "--set crds.install=false" in result.stderr
    taken = helm(kube, *words, "--set", "crds.install=false")
    assert taken.returncode == 0, taken.stderr


@pytest.mark.apiserver
def test_o11_applied_again_nothing_changes(kube: Kube, release: str, values: Path) -> None:
    """A second upgrade with the same values keeps every object and the drawn passwords; the manifest has an empty diff."""
    before, passwords = definitions(kube), secrets(kube)
    pods = {p["metadata"]["uid"] for p in kube.items("Pod", f"app.kubernetes.io/instance={RELEASE}")}
    generation = (kube.get("Deployment", f"{RELEASE}-operator") or {})["metadata"]["generation"]
    kube.helm("upgrade", RELEASE, str(CHART), "--values", str(values), "--wait", "--timeout", "180s")
    assert None not in passwords.values()
    assert secrets(kube) == passwords
    assert definitions(kube) == before
    assert {p["metadata"]["uid"] for p in kube.items("Pod", f"app.kubernetes.io/instance={RELEASE}")} == pods
    assert (kube.get("Deployment", f"{RELEASE}-operator") or {})["metadata"]["generation"] == generation
    manifest = kube.helm("get", "manifest", RELEASE)
    how = ("--server-side", "--force-conflicts", "--field-manager=plato-e2e")
    diff = subprocess.run(
        [kube.program("kubectl"), "-n", NAMESPACE, "diff", *how, "-f", "-"],
        input=manifest, env={**os.environ, "KUBECONFIG": str(kube.kubeconfig)}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (diff.returncode, diff.stdout) == (0, ""), diff.stderr


def test_an_upgrade_is_taken_back_by_rollback(kube: Kube, release: str, values: Path) -> None:
    """A changed value reaches the operator's pod, and leaves it."""

    def level() -> str:
        found = kube.get("Deployment", f"{RELEASE}-operator") or {}
        env = found["spec"]["template"]["spec"]["containers"][0]["env"]
        return str(next(e["value"] for e in env if e["name"] == "PLATO_LOG__LEVEL"))

    passwords = secrets(kube)
    revision = json.loads(kube.helm("status", RELEASE, "-o", "json"))["version"]
    louder = ("--set", "operator.logLevel=debug")
    kube.helm("upgrade", RELEASE, str(CHART), "--values", str(values), *louder, "--wait", "--timeout", "180s")
    assert level() == "debug"
    kube.helm("rollback", RELEASE, str(revision), "--wait", "--timeout", "180s")
    assert level() == "info"
    assert secrets(kube) == passwords


def test_helm_test_sends_a_message_through_a_cluster_of_its_own(kube: Kube, release: str) -> None:
    """It leaves nothing behind."""
    result = helm(kube, "test", RELEASE, "--timeout", "10m", "--logs")
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr
    assert "it arrived" in result.stdout
    assert kube.run("get", "platoclusters,gatewaypools,stateshards", "-o", "name").stdout == ""


@pytest.mark.apiserver
def test_o12_uninstall_is_refused_while_a_cluster_is_left_and_keeps_definitions(
    kube: Kube, release: str, values: Path
) -> None:
    """In words; after the cluster is deleted it goes, and the definitions stay."""
    before = definitions(kube)
    kube.apply(cluster())
    refused = helm(kube, "uninstall", RELEASE, "--timeout", "120s")
    assert refused.returncode != 0
    said = refused.stdout + refused.stderr
    assert f"kubectl -n {NAMESPACE} delete platocluster left" in said, said
    assert "--no-hooks" in said
    assert kube.get("Deployment", f"{RELEASE}-operator") is not None, "the operator is gone all the same"

    kube.done("delete", "platocluster", "left", "--wait", timeout_s=60)
    kube.helm("uninstall", RELEASE, "--wait", "--timeout", "120s")
    wait_for("the operator's pods are gone", lambda: not kube.items("Pod", "app.kubernetes.io/component=operator"), 60)
    assert definitions(kube) == before
    assert kube.items("Job") == []


# ── several versions of the definitions, under a group of our own ────────────────────────────────────────────


def renamed(tag: str, text: str) -> str:
    """A text about our kinds, about copies of them: other names and another group, so that no kubectl mixes them up."""
    for kind in ("PlatoCluster", "GatewayPool", "StateShard"):
        text = text.replace(kind, f"{tag.upper()}{kind}").replace(kind.lower(), f"{tag}{kind.lower()}")
    text = text.replace("plato.im", group_of(tag))
    return re.sub(r"    (shortNames|categories):\n(      - .*\n)+", "", text)


def group_of(tag: str) -> str:
    """The group of a test's copies."""
    return f"{tag}.plato-test.example"


def copies(tag: str) -> list[str]:
    """Names of a test's copies of the definitions."""
    return [f"{tag}{kind}.{group_of(tag)}" for kind in manifests.KINDS]


def copied(tag: str, name: str) -> dict[str, Any]:
    """A resource of the copied kind."""
    return cluster(name) | {"apiVersion": f"{group_of(tag)}/v1alpha1", "kind": f"{tag.upper()}PlatoCluster"}


def chart_of_definitions(folder: Path, tag: str, without: str = "") -> Path:
    """A copy of the chart that has nothing but its definitions, renamed; `without`: a field of their spec left out."""
    copy = folder / f"plato-{'older' if without else 'newer'}"
    shutil.copytree(CHART, copy)
    for template in (copy / "templates").rglob("*.yaml"):
        if template.parent.name != "crds":
            template.unlink()
    (copy / "templates" / "NOTES.txt").unlink()
    for template in (copy / "templates" / "crds").iterdir():
        text = renamed(tag, template.read_text(encoding="utf-8"))
        if without:
            bare = text.removeprefix("{{- if .Values.crds.install }}\n").removesuffix("{{- end }}\n")
            crd = yaml.safe_load(bare)
            spec = crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]
            spec["properties"].pop(without, None)
            text = yaml.safe_dump(crd)
        template.write_text(text, encoding="utf-8")
    return copy


@pytest.fixture
def drop_definitions(kube: Kube) -> Iterator[list[str]]:
    """Tags of copies that are deleted afterwards."""
    tags: list[str] = []
    yield tags
    for tag in tags:
        kube.run("delete", "crd", *copies(tag), "--ignore-not-found", "--timeout=60s")


@pytest.mark.apiserver
def test_o18_a_field_of_the_newer_chart_is_kept_after_an_upgrade(
    kube: Kube, tmp_path: Path, drop_definitions: list[str]
) -> None:
    """With chart n-1 the field is unknown; helm upgrade brings definitions, not only the first install; then it is kept."""
    tag = "o18"
    drop_definitions.append(tag)
    definition = copies(tag)[0]
    given = copied(tag, "upgraded")
    wanted = {**given, "spec": {**given["spec"], "networkPolicy": True}}
    kube.helm("install", "definitions", str(chart_of_definitions(tmp_path, tag, "networkPolicy")), "--wait")
    kube.established(definition)
    wait_for("the kind is served", lambda: kube.run("get", definition).returncode == 0, 30)
    refused = kube.run("apply", "-f", "-", given=wanted)
    assert refused.returncode != 0
    assert 'unknown field "spec.networkPolicy"' in refused.stderr
    kube.done("apply", "-f", "-", given=given)

    kube.helm("upgrade", "definitions", str(chart_of_definitions(tmp_path, tag)), "--wait")
    wait_for(
        "the field of the newer definitions is taken",
        lambda: kube.run("apply", "-f", "-", given=wanted).returncode == 0,
        30,
    )
    assert kube.done("get", definition, "upgraded", "-o", "jsonpath={.spec.networkPolicy}") == "true"

    kube.helm("uninstall", "definitions")
    assert kube.get("CustomResourceDefinition", definition) is not None, "uninstall took the definitions"
    assert kube.done("get", definition, "upgraded", "-o", "jsonpath={.spec.networkPolicy}") == "true"


def _migration() -> list[str]:
    """The guide's commands, as docs/kubernetes.md has them."""
    page = (ROOT / "docs" / "kubernetes.md").read_text(encoding="utf-8")
    found = re.findall(r"<!-- run: migrate -->\n   ```sh\n(.*?)   ```", page, re.DOTALL)
    assert len(found) == 2
    return found


@pytest.mark.apiserver
def test_o24_the_migration_guide_leads_from_one_version_to_the_next(
    kube: Kube, tmp_path: Path, drop_definitions: list[str]
) -> None:
    """On a copy: a second version is added and stored, objects are written once, the first version goes; nothing is lost."""
    tag = "o24"
    drop_definitions.append(tag)
    definition = copies(tag)[0]

    def definitions_of(*versions: str) -> list[dict[str, Any]]:
        made = []
        for kind in manifests.KINDS:
            crd = yaml.safe_load(renamed(tag, (ROOT / "crds" / f"{kind}.plato.im.yaml").read_text(encoding="utf-8")))
            [only] = crd["spec"]["versions"]
            crd["spec"]["versions"] = [
                {**only, "name": v, "served": True, "storage": v == versions[-1]} for v in versions
            ]
            made.append(crd)
        return made

    def run(command: str) -> None:
        words = ["bash", "-euo", "pipefail", "-c", renamed(tag, command)]
        env = {**os.environ, "KUBECONFIG": str(kube.kubeconfig), "NEW": "v1beta1"}
        env["PATH"] = f"{Path(kube.program('kubectl')).parent}:{env['PATH']}"
        done = subprocess.run(words, env=env, capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 0, done.stderr

    kube.apply(*definitions_of("v1alpha1"))
    for name in copies(tag):
        kube.established(name)
    kube.done("apply", "-f", "-", given=copied(tag, "old"))
    spec = kube.done("get", definition, "old", "-o", "jsonpath={.spec}")

    kube.apply(*definitions_of("v1alpha1", "v1beta1"))
    only_new = definitions_of("v1beta1")
    early = kube.run("apply", "--server-side", "--field-manager=plato-e2e", "-f", "-", given=only_new[0])
    assert early.returncode != 0, "the first version could be dropped while objects are stored in it"
    assert "status.storedVersions" in early.stderr

    for command in _migration():
        run(command)
    kube.apply(*only_new)
    served = definition.replace(".", ".v1beta1.", 1)
    wait_for("the newer version serves the object", lambda: kube.run("get", served, "old").returncode == 0, 30)
    assert kube.done("get", served, "old", "-o", "jsonpath={.spec}") == spec
