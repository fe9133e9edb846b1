"""Two PlatoClusters over one database schema and one store, in namespaces and with operators of their own, so that no name
tells it: the second is refused in words by the marks of the first, which keeps its slots; and takes its place when asked.
Then a Secret of it is edited, and leads to what is somebody else's.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import pytest
from plato.adapters.owner import Owner
from plato.adapters.valkey import ValkeyStore
from plato.api.names import EXIT_NOT_ALONE
from redis import Redis

from e2e.frame.dependencies import Dependencies
from e2e.frame.kube import Kube, Object, wait_for
from e2e.frame.platform import Images, Platform, pod_ready
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
    wait_for("the first one is Ready", first.is_ready, 30.0, seen=first.state)
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


@pytest.mark.timeout(600)
def test_a_pod_that_an_edited_secret_leads_to_somebody_elses_store_ends_before_it_writes_there(
    second: Platform,
) -> None:
    """It says whose that is, and so does the PlatoCluster; with the Secret mended the cluster serves again."""
    ours = second.dependencies.store_url
    theirs = urlunsplit(urlsplit(ours)._replace(path="/1"))
    asyncio.run(_mark(theirs, f"{second.schema}:", "shop/demo"))
    held = _keys(theirs)
    assert len(held) == 1
    second.kube.secret("two-store", {"url": theirs})
    pod = second.pods("state")[0]["metadata"]
    second.kube.done("delete", "pod", pod["name"], "--wait=false")

    def ended() -> str:
        found = second.kube.get("Pod", pod["name"])
        if found is None or found["metadata"]["uid"] == pod["uid"]:
            return ""
        states = (s.get(key) for s in found["status"].get("containerStatuses") or () for key in ("state", "lastState"))
        last: Object = next((each["terminated"] for each in states if each and "terminated" in each), {})
        assert last.get("exitCode", EXIT_NOT_ALONE) == EXIT_NOT_ALONE, last
        return str(last.get("message", ""))

    assert "belongs to PlatoCluster shop/demo" in wait_for("the pod ends", ended, 120, seen=second.state)

    def told() -> bool:
        its = second.kube.condition("PlatoCluster", "two", "Ready")
        return its.get("reason") == "NotAlone" and "shop/demo" in its["message"]

    wait_for("the PlatoCluster says whose store it is", told, 60, seen=second.state)
    assert _keys(theirs) == held
    second.kube.secret("two-store", {"url": ours})
    second.kube.done("delete", "pod", pod["name"], "--wait=false")  # at once, and not when its next try is due
    wait_for(
        "it serves again",
        lambda: (
            second.pods("state")
            and all(map(pod_ready, second.pods("state")))
            and dependencies_of(second)["status"] == "True"
        ),
        180,
        seen=second.state,
    )
    assert _keys(theirs) == held


async def _mark(url: str, prefix: str, cluster: str) -> None:
    store = await ValkeyStore.connect(url, prefix)
    await store.claim(Owner(cluster))
    await store.close()


def _keys(url: str) -> list[bytes]:
    with Redis.from_url(url) as client:
        return sorted(client.keys("*"))
