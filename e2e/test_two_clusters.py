"""Two PlatoClusters over one database schema and one store, in namespaces and with operators of their own, so that no name
tells it: the second is refused in words by the marks of the first, which keeps its slots; and takes its place when asked.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from e2e.frame.dependencies import Dependencies
from e2e.frame.kube import Kube, Object, wait_for
from e2e.frame.platform import Images, Platform
from e2e.testbed.layout import Layout

NAMESPACE = "e2e-alone"
OTHER = "e2e-alone-other"
SPEC: dict[str, Any] = {
    "state": {"shards": 1},
    "msg": {"replicas": 1},
    "ipconfig": {"replicas": 1},
    "gateways": {"initialReplicas": 1, "template": {"workers": 1, "ports": {"tcp": 9700, "ws": 9701, "admin": 9709}}},
}
SECOND: dict[str, Any] = {**SPEC, "gateways": {"enabled": False}}
REFUSED_S = 180.0


@pytest.fixture(scope="module")
def first(kube: Kube, images: Images, dependencies: Dependencies, tmp_path_factory: pytest.TempPathFactory) -> Platform:
    """The one whose schema and store it is."""
    made = Platform(kube, "one", images, dependencies, tmp_path_factory.mktemp("one"))
    made.install_operator()
    made.create(SPEC)
    return made


@pytest.fixture(scope="module")
def second(
    first: Platform,
    kubeconfig: Path,
    testbed: Layout | None,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Platform]:
    """Another operator in another namespace, and Secrets of other names that lead to the same place."""
    kube = Kube(kubeconfig, OTHER, testbed.bin if testbed is not None else None)
    kube.make_namespace({"pod-security.kubernetes.io/enforce": "privileged"})
    made = Platform(kube, "two", first.images, first.dependencies, tmp_path_factory.mktemp("two"))
    made.schema = first.schema
    made.install_operator()
    made.make_secrets()
    yield made
    kube.drop_namespace()


def dependencies_of(platform: Platform) -> Object:
    """Its condition DependenciesReady."""
    return platform.kube.condition("PlatoCluster", platform.name, "DependenciesReady")


def slots(platform: Platform) -> Any:
    """Whose slots they are by the record, and since which epoch."""
    return platform.topology()["slots"]


@pytest.mark.timeout(900)
def test_a_second_cluster_is_refused_in_words_keeps_off_and_takes_over_when_the_first_is_gone(
    first: Platform, second: Platform
) -> None:
    """Its shards would have greater fences, and the first one's users would be out."""
    before, pods = slots(first), {p["metadata"]["uid"] for p in first.pods("state")}
    second.kube.apply(second.manifest(SECOND))
    wait_for(
        "the second one says whose schema it is",
        lambda: dependencies_of(second).get("reason") == "NotAlone",
        REFUSED_S,
        seen=second.state,
    )
    owner, here = f"{NAMESPACE}/one", f"{OTHER}/two"
    for type_ in ("DependenciesReady", "Ready", "Stalled"):
        said = second.kube.condition("PlatoCluster", "two", type_)
        assert said["reason"] == "NotAlone", said
        for words in (f"belongs to PlatoCluster {owner}", f"give {here} another", f"plato.im/adopt={owner}"):
            assert words in said["message"], said
        assert first.dependencies.database_uri not in said["message"]
    assert not second.pods("state")
    assert not second.pods("msg")
    assert first.is_ready(), first.state()
    assert slots(first) == before
    assert {p["metadata"]["uid"] for p in first.pods("state")} == pods

    first.kube.done("delete", "platocluster", "one", "--wait=true")
    wait_for("the first one's pods are gone", lambda: not first.pods("state") and not first.pods("msg"), 120.0)
    second.kube.done("annotate", "platocluster", "two", f"plato.im/adopt={owner}")
    wait_for(
        "the second one serves every slot",
        lambda: (
            dependencies_of(second).get("status") == "True"
            and second.kube.holds("PlatoCluster", "two", "SlotsAcquired")
        ),
        300.0,
        seen=second.state,
    )
