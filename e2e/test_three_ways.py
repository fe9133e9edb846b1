"""The three ways in, by the commands of docs/kubernetes.md as they stand there: kubectl, helm, Argo CD.

A block below `<!-- run: WAY -->` is run as it is, in this checkout. The commands name public images; on the testbed, which
reaches no registry, its own images are put onto the nodes under these names. Argo CD itself is not there: its Applications
are rendered and applied wave after wave (e2e/waves.py). Each way ends with a message between two users, sent from outside.
"""

from __future__ import annotations

import asyncio
import base64
import os
import re
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml
from plato.adapters.tokens import issue
from plato.client import Client

from e2e import waves
from e2e.frame.dependencies import Dependencies
from e2e.frame.kube import Kube, wait_for
from e2e.frame.platform import pod_ready
from e2e.images.build import Store
from e2e.images.nodes import load
from e2e.images.recipes import SERVICES, recipe
from e2e.testbed.layout import Layout

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "kubernetes.md"
READY_S = 300.0
LOOKS = 3
GATEWAY_PORT = 8900


def blocks(way: str) -> list[str]:
    """The commands of a way, in the page's order."""
    return re.findall(rf"<!-- run: {way} -->\n```sh\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)


def test_each_way_has_its_blocks() -> None:
    """Renaming a mark would leave a way untried."""
    found = set(re.findall(r"<!-- run: (\S+) -->", PAGE.read_text(encoding="utf-8")))
    assert found == {"kubectl", "helm", "upgrade", "helm-uninstall", "kubectl-uninstall", "migrate"}
    assert all(blocks(way) for way in found - {"migrate"})


@pytest.fixture(scope="module")
def public_images(kubeconfig: Path, testbed: Layout | None) -> None:
    """The nodes have what the commands name."""
    if testbed is None:
        if os.environ.get("PLATO_E2E_PUBLIC_IMAGES") != "1":
            pytest.skip("the page names public images; PLATO_E2E_PUBLIC_IMAGES=1 says that this cluster finds them")
        return
    values = yaml.safe_load((ROOT / "charts/plato/values.yaml").read_text(encoding="utf-8"))
    version = yaml.safe_load((ROOT / "charts/plato/Chart.yaml").read_text(encoding="utf-8"))["appVersion"]
    store = Store.of(testbed)
    named = {f"{values['image']['registry']}/plato-{service}:{version}": service for service in SERVICES}
    named |= {values["devDeps"][server]["image"]: server for server in ("postgres", "valkey")}
    load(testbed, store, {name: store.provide(recipe(service)) for name, service in named.items()})


@pytest.fixture
def plato(kubeconfig: Path, testbed: Layout | None, public_images: None) -> Iterator[Kube]:
    """The namespace of the page's commands, not there at first; both of them are gone afterwards."""
    found = Kube(kubeconfig, "plato", testbed.bin if testbed is not None else None)
    system = Kube(kubeconfig, "plato-system", testbed.bin if testbed is not None else None)

    def clear() -> None:
        for each in (found, system):
            each.drop_namespace(180)
        cluster_wide = "plato-operator-nodes-plato-system", "plato-operator-nodes-plato"
        found.done("delete", "clusterrole,clusterrolebinding", *cluster_wide, "--ignore-not-found")

    clear()
    yield found
    if not os.environ.get("PLATO_E2E_KEEP"):
        clear()


def run(kube: Kube, way: str) -> str:
    """Runs a way's blocks, each in a shell of its own; returns what they print."""
    said = ""
    env = {**os.environ, "KUBECONFIG": str(kube.kubeconfig)}
    program = Path(kube.program("kubectl"))
    if program.parent != Path():
        env["PATH"] = f"{program.parent}:{env['PATH']}"
    for block in blocks(way):
        words = ["bash", "-euo", "pipefail", "-c", block]
        done = subprocess.run(words, cwd=ROOT, env=env, capture_output=True, text=True, timeout=1_000, check=False)
        state = "" if done.returncode == 0 else kube.run("get", "platoclusters,pods,events", "-o", "wide").stdout
        assert done.returncode == 0, f"{block}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}\n{state}"
        said += done.stdout + done.stderr
    return said


def difference(diff: Callable[[], subprocess.CompletedProcess[str]]) -> str:
    """What a kubectl diff says, "" for nothing. It reads an object twice, and a status may be written between the two, but
    not each time."""
    for _ in range(LOOKS):
        done = diff()
        if done.returncode == 0 and not done.stdout:
            return ""
    return f"{done.returncode}: {done.stdout}{done.stderr}"


def exchange(kube: Kube, folder: Path, text: str) -> None:
    """One message between two users, through the nodes' own addresses."""
    key = (kube.get("Secret", "plato-keys") or {})["data"]["dev.key"]
    (folder / "dev.key").write_bytes(base64.b64decode(key))

    def hosts() -> list[str]:  # Ready does not wait for a gateway that is just starting, while another one serves
        found = kube.items("Pod", "plato.im/cluster=demo,plato.im/component=gateway")
        return [str(pod["status"]["hostIP"]) for pod in found] if all(map(pod_ready, found)) and len(found) == 2 else []

    addresses = [f"{host}:{GATEWAY_PORT}" for host in wait_for("both gateways are Ready", hosts, 60)]

    async def talk() -> str:
        tokens = {user: issue(folder, "dev", user, "plato", "plato", 600) for user in ("alice", "bob")}
        async with (
            asyncio.timeout(60),
            Client(tokens["alice"], ":memory:", addresses, user="alice") as alice,
            Client(tokens["bob"], ":memory:", addresses, user="bob") as bob,
        ):
            await alice.send(text, to="bob")
            async for message in bob.messages():
                if message.text == text:
                    return message.text
        raise AssertionError("the stream ended")

    assert asyncio.run(talk()) == text


def test_by_kubectl(plato: Kube, tmp_path: Path) -> None:
    """From nothing to a message, and away again; applied a second time nothing changes."""
    said = run(plato, "kubectl")
    assert "platocluster.plato.im/demo condition met" in said
    exchange(plato, tmp_path, "by kubectl")
    before = (plato.get("PlatoCluster", "demo") or {})["metadata"]["generation"]
    for manifest, where in (("deploy/plato.yaml", ()), ("deploy/samples/cluster.yaml", ("-n", "plato"))):
        words = (
            *where,
            "diff",
            "--server-side",
            "--force-conflicts",
            "--field-manager=plato-e2e",
            "-f",
            str(ROOT / manifest),
        )
        command = [plato.program("kubectl"), *words]
        assert difference(lambda command=command: plato.call(command)) == ""  # type: ignore[misc]  # bound now
    assert (plato.get("PlatoCluster", "demo") or {})["metadata"]["generation"] == before
    run(plato, "kubectl-uninstall")
    assert plato.items("PlatoCluster") == []
    wait_for("the pods of the cluster go", lambda: not plato.items("Pod", "plato.im/cluster=demo"), 120)
    assert plato.get("CustomResourceDefinition", "platoclusters.plato.im") is not None


def test_by_helm(plato: Kube, tmp_path: Path) -> None:
    """Installed, tried, a cluster by its own chart, upgraded, uninstalled."""
    said = run(plato, "helm")
    assert "it arrived" in said
    assert "platocluster.plato.im/demo condition met" in said
    exchange(plato, tmp_path, "by helm")
    pods = {pod["metadata"]["uid"] for pod in plato.items("Pod", "plato.im/cluster=demo")}
    run(plato, "upgrade")
    assert {pod["metadata"]["uid"] for pod in plato.items("Pod", "plato.im/cluster=demo")} == pods, (
        "O20: pods were replaced"
    )
    run(plato, "helm-uninstall")
    assert plato.get("Deployment", "plato-operator") is None
    assert plato.get("CustomResourceDefinition", "platoclusters.plato.im") is not None


@pytest.mark.skipif(waves.lua() is None, reason="there is no lua5.4 on the PATH: apt-get install lua5.4")
def test_by_argo_cd(plato: Kube, dependencies: Dependencies, tmp_path: Path) -> None:
    """Rendered, applied in the order of the waves, healthy by health.lua; a second sync changes nothing, a scale stays."""
    apps = ROOT / "deploy" / "argocd" / "apps"
    plato.make_namespace(
        {"pod-security.kubernetes.io/enforce": "privileged"}
    )  # CreateNamespace, managedNamespaceMetadata
    plato.secret("plato-postgres", {"uri": dependencies.database_uri})
    plato.secret("plato-valkey", {"url": dependencies.store_url})
    plato.secret("plato-keys", {"dev.key": os.urandom(32).hex()})
    assert waves.sync(plato, apps, READY_S) == ["plato-crds", "plato-operator", "plato-demo"]
    exchange(plato, tmp_path, "by argo")

    plato.done("scale", "gatewaypool.plato.im", "demo-edge", "--replicas=1")
    objects = [each for app in waves.applications(apps) for each in waves.rendered(app, plato.program("helm"))]
    how = ("--server-side", "--force-conflicts", "--field-manager=argocd-controller")
    for each in objects:
        said = difference(lambda each=each: plato.run("diff", *how, "-f", "-", given=each))  # type: ignore[misc]  # bound now
        assert said == "", f"{each['kind']} {each['metadata']['name']}"
    waves.apply(plato, objects)
    assert (plato.get("GatewayPool", "demo-edge") or {})["spec"]["replicas"] == 1

    plato.patch("platocluster.plato.im", "demo", {"spec": {"paused": True}})
    demo = next(each for each in objects if each["kind"] == "PlatoCluster")
    assert waves.health(waves.live(plato, demo)).status == "Suspended"
    plato.done("delete", "platocluster.plato.im", "demo", "--wait")
