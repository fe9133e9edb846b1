"""Several namespaces: one that goes takes the operator's role in it with it, and must cost the others nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, cast

import aiohttp
import pytest
from plato_operator import handlers, reconcile
from plato_operator.handlers import WatchEnded, follow
from plato_operator.kube import Kube, Refused, Unreachable
from plato_operator.lease import Lease
from plato_operator.probes import SILENT_S, Health
from plato_operator.reconcile import Clusters, Means


class Api:
    """A PlatoCluster `demo` in each namespace that is not gone; the others forbid everything."""

    def __init__(self) -> None:
        self.gone: set[str] = set()

    async def list(self, kind: str, namespace: str = "", selector: str = "") -> Any:
        if namespace in self.gone:
            raise Refused(403, "Forbidden", f"cannot list {kind} in {namespace}", "GET /x")
        return [{"metadata": {"namespace": namespace, "name": "demo"}}] if kind == "PlatoCluster" else []


async def until(met: Callable[[], bool]) -> None:
    loop = asyncio.get_running_loop()
    end_s = loop.time() + 10
    while not met():
        assert loop.time() < end_s
        await asyncio.sleep(0.001)


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> tuple[Api, list[tuple[str, ...]]]:
    """An API server, and the namespaces of each watch that was begun; one with a namespace that is gone ends."""
    api, begun = Api(), list[tuple[str, ...]]()

    async def watch(namespaces: Sequence[str], *_: Any, **__: Any) -> None:
        begun.append(tuple(namespaces))
        await until(lambda: bool(api.gone & set(namespaces)))
        raise WatchEnded("forbidden")

    monkeypatch.setattr(handlers, "watch", watch)
    monkeypatch.setattr(handlers, "LOOK_S", 0.001)
    return api, begun


async def test_watches_go_on_without_a_namespace_that_was_deleted(watched: tuple[Api, list[tuple[str, ...]]]) -> None:
    """A process that ends for it would end again after each start, and serve nobody any more."""
    api, begun = watched
    rung: list[tuple[str, str]] = []
    running = asyncio.create_task(follow(cast(Kube, api), ("a", "b"), lambda *at: rung.append(at), nodes=False))
    await until(lambda: begun == [("a", "b")])
    api.gone = {"b"}
    await until(lambda: begun[1:] == [("a",)])
    assert rung == [("", "")]
    api.gone = set()
    await until(lambda: begun[2:] == [("a", "b")])
    api.gone = {"a", "b"}
    with pytest.raises(WatchEnded):
        await running


async def test_a_watch_that_ends_for_another_reason_ends_the_process(
    watched: tuple[Api, list[tuple[str, ...]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def garbage(*_: Any, **__: Any) -> None:
        raise WatchEnded("garbage")

    monkeypatch.setattr(handlers, "watch", garbage)
    with pytest.raises(WatchEnded, match="garbage"):
        await follow(cast(Kube, watched[0]), ("a", "b"), lambda *_: None, nodes=False)


async def test_a_deleted_namespace_ends_its_clusters_and_makes_nobody_ill(monkeypatch: pytest.MonkeyPatch) -> None:
    """The words are on /readyz; without a life-sign of the round the kubelet would kill the process every two minutes."""
    api, running, now = Api(), set[str](), [0.0]
    health = Health(lambda: now[0])

    class Loop:
        def __init__(self, _: Means, namespace: str, name: str) -> None:
            self.namespace, self.name = namespace, name

        def ring(self) -> None:
            """Nobody listens."""

        async def run(self) -> None:
            running.add(self.namespace)
            try:
                await asyncio.Event().wait()
            finally:
                running.remove(self.namespace)

    async def nothing(_: object) -> str:
        return ""

    monkeypatch.setattr(reconcile, "Loop", Loop)
    monkeypatch.setattr(reconcile, "LATEST_S", 0.001)
    monkeypatch.setattr("plato_operator.crds.lacking", nothing)
    async with aiohttp.ClientSession() as session:
        means = Means(cast(Kube, api), session, cast(Lease, None), health, False)
        finding = asyncio.create_task(Clusters(means, ("a", "b")).run())
        await until(lambda: running == {"a", "b"})
        api.gone = {"b"}
        await until(lambda: running == {"a"})
        now[0] += SILENT_S + 1
        await until(lambda: not health.ill())
        assert "cannot list PlatoCluster in b" in health.not_ready()
        api.gone = set()
        await until(lambda: running == {"a", "b"} and not health.not_ready())
        api.gone = {"a", "b"}
        await until(lambda: "in a" in health.not_ready())
        now[0] += SILENT_S + 1
        assert "round" in health.ill()
        finding.cancel()
        await asyncio.wait([finding])


async def test_a_pool_or_shard_whose_cluster_is_not_there_says_so_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clusterRef with a slip cannot be changed, and no cluster's pass looks at it. What a cluster made is collected."""
    written: list[tuple[str, str, str]] = []
    looks = 0

    def resource(kind: str, name: str, of: str, **meta: Any) -> dict[str, Any]:
        return {
            "metadata": {"namespace": "a", "name": name, "uid": f"{kind}/{name}", "resourceVersion": "1", **meta},
            "spec": {"clusterRef": {"name": of}},
        }

    owner = [{"uid": "gone", "controller": True}]
    objects: dict[str, list[dict[str, Any]]] = {
        "PlatoCluster": [{"metadata": {"namespace": "a", "name": "demo"}}],
        "GatewayPool": [resource("p", "demo-edge", "demo"), resource("p", "slip", "dmeo")],
        "StateShard": [resource("s", "x", "dmeo"), resource("s", "y", "old", ownerReferences=owner)],
    }

    class Kubernetes:
        async def list(self, kind: str, namespace: str = "", selector: str = "") -> Any:
            nonlocal looks
            looks += kind == "StateShard"
            return objects[kind]

        async def merge(self, kind: str, namespace: str, name: str, body: Any, sub: str = "") -> Any:
            (ready,) = [c for c in body["status"]["conditions"] if c["type"] == "Ready"]
            written.append((kind, name, ready["reason"]))
            (obj,) = [o for o in objects[kind] if o["metadata"]["name"] == name]
            obj["status"] = body["status"]

    class Loop:
        def __init__(self, _: Means, namespace: str, name: str) -> None:
            self.namespace, self.name = namespace, name

        async def run(self) -> None:
            await asyncio.Event().wait()

    class Held:
        def check(self) -> None:
            """Always."""

    async def nothing(_: object) -> str:
        return ""

    monkeypatch.setattr(reconcile, "Loop", Loop)
    monkeypatch.setattr(reconcile, "LATEST_S", 0.001)
    monkeypatch.setattr("plato_operator.crds.lacking", nothing)
    async with aiohttp.ClientSession() as session:
        means = Means(cast(Kube, Kubernetes()), session, cast(Lease, Held()), Health(), False)
        finding = asyncio.create_task(Clusters(means, ("a",)).run())
        await until(lambda: looks > 3)
        finding.cancel()
        await asyncio.wait([finding])
    assert written == [("GatewayPool", "slip", "NoCluster"), ("StateShard", "x", "NoCluster")]


async def test_while_the_age_of_the_crds_cannot_be_asked_no_cluster_is_told_that_they_are_too_old(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An operator that starts beside a slow API server must not flip Ready. It waits, and acts when it knows."""
    asked, running, written = 0, asyncio.Event(), list[str]()

    class Kubernetes(Api):
        async def merge(self, kind: str, *_: Any) -> Any:
            written.append(kind)

    class Loop:
        def __init__(self, _: Means, namespace: str, name: str) -> None:
            self.namespace, self.name = namespace, name

        async def run(self) -> None:
            running.set()
            await asyncio.Event().wait()

    class Held:
        def check(self) -> None:
            """Always."""

    async def slow(_: object) -> str:
        nonlocal asked
        asked += 1
        if asked < 4:
            raise Unreachable("no answer")
        return ""

    monkeypatch.setattr(reconcile, "Loop", Loop)
    monkeypatch.setattr(reconcile, "LATEST_S", 0.001)
    monkeypatch.setattr("plato_operator.crds.lacking", slow)
    async with aiohttp.ClientSession() as session:
        means = Means(cast(Kube, Kubernetes()), session, cast(Lease, Held()), Health(), False)
        finding = asyncio.create_task(Clusters(means, ("a",)).run())
        await until(running.is_set)
        finding.cancel()
        await asyncio.wait([finding])
    assert asked == 4
    assert written == []
