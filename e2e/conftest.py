"""Fixtures of the end-to-end tests: which cluster, its images, its dependencies, and Plato on it.

Without PLATO_E2E_KUBECONFIG everything that needs a cluster is skipped, with words; `make e2e` sets it. Tests marked `nodes`
do things to machines: they need the testbed. When a test fails that uses a namespace, what is in it is collected first.
"""

from __future__ import annotations

import os
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest

from e2e import images as built
from e2e.frame import dependencies as servers
from e2e.frame import evidence
from e2e.frame.dependencies import Dependencies
from e2e.frame.kube import Kube
from e2e.frame.platform import Images
from e2e.testbed.layout import Layout, layout

pytest.register_assert_rewrite("e2e.live.scene", "e2e.live.steps")

NEXT = "0.1.1"
"""The second tag of the same images."""
_KUBES = pytest.StashKey[list[Kube]]()


def pytest_configure(config: pytest.Config) -> None:
    """The list of namespaces in use."""
    config.stash[_KUBES] = []


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Collects evidence while everything still stands."""
    report = yield
    if report.failed:
        here = _testbed()
        for kube in item.config.stash[_KUBES]:
            folder = evidence.folder_of(f"{item.name}-{report.when}-{kube.namespace}")
            evidence.collect(kube, folder, here.audit_log if here is not None else None)
            report.sections.append(("evidence", f"collected in {folder}"))
    return report


def _testbed() -> Layout | None:
    here = layout()
    chosen = os.environ.get("PLATO_E2E_KUBECONFIG", "")
    return here if here.marker.exists() and chosen and Path(chosen).resolve() == here.kubeconfig.resolve() else None


@pytest.fixture(scope="session")
def kubeconfig() -> Path:
    """The cluster's."""
    chosen = os.environ.get("PLATO_E2E_KUBECONFIG", "")
    if not chosen:
        pytest.skip("PLATO_E2E_KUBECONFIG names no cluster; `make e2e` brings one up")
    return Path(chosen)


@pytest.fixture(scope="session")
def testbed(kubeconfig: Path) -> Layout | None:
    """The testbed, or None on another cluster."""
    return _testbed()


@pytest.fixture(autouse=True)
def _only_with_nodes(request: pytest.FixtureRequest) -> None:
    if request.node.get_closest_marker("nodes") and os.environ.get("PLATO_E2E_KUBECONFIG"):
        if _testbed() is None:
            pytest.skip("it does things to nodes, which is done to the testbed's own nodes only")
        if os.environ.get("PLATO_E2E_SHARED"):
            pytest.skip("it does things to nodes, and PLATO_E2E_SHARED says that others use them")


@pytest.fixture(scope="session")
def images(testbed: Layout | None) -> Images:
    """On the testbed they are built and loaded; elsewhere PLATO_E2E_REGISTRY and PLATO_E2E_TAG name them."""
    if testbed is not None:
        for tag in (built.TAG, NEXT):
            built.provide(testbed, tag)
        return Images("localhost", built.TAG, NEXT, "Never")
    registry, tag = os.environ.get("PLATO_E2E_REGISTRY", ""), os.environ.get("PLATO_E2E_TAG", "")
    if not registry or not tag:
        pytest.skip("PLATO_E2E_REGISTRY and PLATO_E2E_TAG do not name images that this cluster finds")
    return Images(registry, tag, os.environ.get("PLATO_E2E_NEXT_TAG", ""), "IfNotPresent")


@pytest.fixture(scope="session")
def dependencies(testbed: Layout | None) -> Iterator[Dependencies]:
    """PostgreSQL and Valkey that pods reach, empty."""
    with servers.named() as found:
        if found is not None:
            yield found
            return
    if testbed is None:
        pytest.skip("PLATO_E2E_DATABASE_URI and PLATO_E2E_STORE_URL do not name servers that this cluster reaches")
    with servers.on_the_bridge() as made:
        yield made


@pytest.fixture(scope="module")
def kube(request: pytest.FixtureRequest, kubeconfig: Path, testbed: Layout | None) -> Iterator[Kube]:
    """A namespace of this module, named by its NAMESPACE or its file; privileged, since gateways use the host's network."""
    name = str(getattr(request.module, "NAMESPACE", "") or request.path.stem.replace("test_", "e2e-").replace("_", "-"))
    made = Kube(kubeconfig, name, testbed.bin if testbed is not None else None)
    made.make_namespace({"pod-security.kubernetes.io/enforce": "privileged"})
    request.config.stash[_KUBES].append(made)
    yield made
    request.config.stash[_KUBES].remove(made)
    if not os.environ.get("PLATO_E2E_KEEP"):
        made.drop_namespace()
