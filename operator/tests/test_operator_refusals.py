"""What a pass does when the API server refuses a part of it: what is told, by which condition, and when."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import MutableMapping
from typing import Any, cast

import aiohttp
import prometheus_client
import pytest
import structlog
from plato.topology.record import Topology, even_ranges
from plato_operator import metrics, reconcile
from plato_operator.apply import Stopped
from plato_operator.core.orders import Act, DeletePod, Event, Plan, TopologyWrite
from plato_operator.core.snapshot import Cluster, Snapshot
from plato_operator.kube import Kube, KubeError, Refused
from plato_operator.lease import Lease
from plato_operator.observe import View
from plato_operator.probes import Health
from plato_operator.reconcile import PATIENCE, Loop, Means
from world import START_MS, cluster_spec


class Held:
    me = "me"

    def check(self) -> None:
        """Always."""


class Api:
    """A PlatoCluster and a pod; remembers reasons of events and conditions, and refuses what `fails` holds."""

    def __init__(self) -> None:
        self.fails: dict[str, Refused] = {}
        self.events: list[str] = []
        self.ready: list[tuple[str, str]] = []
        self.gone = False

    def _may(self, what: str) -> None:
        if what in self.fails:
            raise self.fails[what]

    async def get(self, kind: str, namespace: str, name: str) -> Any:
        if self.gone:
            return None
        meta = {"name": name, "namespace": namespace, "uid": "cu", "generation": 1, "resourceVersion": "3"}
        return {"metadata": meta, "spec": {}}

    async def create(self, kind: str, namespace: str, body: Any) -> Any:
        if kind == "Event":
            self.events.append(body["reason"])
        self._may(f"create {kind}")
        return {}

    async def replace(self, kind: str, namespace: str, name: str, body: Any) -> Any:
        self._may(f"replace {kind}")
        return {}

    async def delete(self, kind: str, namespace: str, name: str, **how: Any) -> None:
        self._may(f"delete {kind}")

    async def merge(self, kind: str, namespace: str, name: str, body: Any, sub: str = "") -> Any:
        if sub == "status":
            (ready,) = [c for c in body["status"]["conditions"] if c["type"] == "Ready"]
            self.ready.append((ready["status"], ready["reason"]))
        return {}


class Observer:
    """Sees one pod, or fails."""

    fails: KubeError | None = None

    def close(self) -> None:
        """Nothing is under way."""

    async def look(self, *_: Any) -> View:
        if self.fails is not None:
            raise self.fails
        snap = Snapshot(START_MS, "me", Cluster("demo", "ns", "cu", 1, cluster_spec()), topology=TOPOLOGY, version="7")
        pod = {"metadata": {"name": "demo-edge-0", "uid": "p0", "resourceVersion": "5"}}
        return View(snap, {("Pod", "demo-edge-0"): pod})


TOPOLOGY = Topology("cu", 5, even_ranges(["demo-s0"], 5))
DELETE = DeletePod("demo-edge-0", "p0", "broken")


def refused(status: int) -> Refused:
    return Refused(status, "", 'cannot delete resource "pods"', "DELETE /x")


class Rig:
    """A loop whose plan the test gives; `passes` makes so many of them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, session: aiohttp.ClientSession) -> None:
        self.api, self.observer, self.health = Api(), Observer(), Health()
        means = Means(cast(Kube, self.api), session, cast(Lease, Held()), self.health, False)
        self.loop = Loop(means, "ns", "demo")
        self.loop._observer = cast(Any, self.observer)
        self.plan = Plan()
        monkeypatch.setattr(reconcile, "one_pass", lambda _: self.plan)
        monkeypatch.setattr("plato_operator.statuses.EVERY_S", 0.0)

    async def passes(self, number: int = 1) -> None:
        for _ in range(number):
            assert await self.loop._guarded() is not None


@pytest.fixture
async def rig(monkeypatch: pytest.MonkeyPatch) -> Any:
    async with aiohttp.ClientSession() as session:
        yield Rig(monkeypatch, session)


def told(reason: str) -> Event:
    return Event("Pod", "demo-edge-0", "Normal", reason, "words")


def planned(write: bool, act: Act | None) -> Plan:
    return Plan(
        write=TopologyWrite(TOPOLOGY, "7") if write else None, act=act,
        events=(told("DrainStarted"),) if write else (), act_events=(told("Replaced"),) if act else (),
    )  # fmt: skip


async def test_events_of_the_record_are_told_though_the_act_after_it_is_refused(rig: Rig) -> None:
    """No later pass would tell them: the record says it already. The act's own are told once, when it is done."""
    rig.plan, rig.api.fails = planned(True, DELETE), {"delete Pod": refused(409)}
    await rig.passes()
    assert rig.api.events == ["DrainStarted"]
    rig.plan = planned(False, DELETE)
    await rig.passes(2)
    assert rig.api.events == ["DrainStarted"]
    rig.api.fails.clear()
    await rig.passes()
    assert rig.api.events == ["DrainStarted", "Replaced"]


async def test_of_a_record_that_is_not_written_nothing_is_told(rig: Rig) -> None:
    """The next pass orders and tells it again."""
    rig.plan, rig.api.fails = planned(True, DELETE), {"replace ConfigMap": refused(409)}
    await rig.passes()
    assert rig.api.events == []
    rig.api.fails.clear()
    await rig.passes()
    assert rig.api.events == ["DrainStarted", "Replaced"]


async def test_an_act_that_may_not_be_done_is_named_by_a_condition(rig: Rig) -> None:
    """A missing right does not come by itself: the operator is no healthy zombie."""
    rig.plan, rig.api.fails = planned(False, DELETE), {"delete Pod": refused(403)}
    await rig.passes()
    assert rig.api.ready == [("Unknown", "Forbidden")]
    assert rig.health._troubles["cluster ns/demo"].endswith('cannot delete resource "pods"')
    rig.api.fails.clear()
    await rig.passes()
    assert "cluster ns/demo" not in rig.health._troubles


@pytest.mark.parametrize("status", [409, 429, 500, 503])
@pytest.mark.parametrize("in_the_look", [True, False])
async def test_what_the_api_server_refuses_for_the_moment_is_told_after_some_passes(
    rig: Rig, status: int, in_the_look: bool
) -> None:
    """It starts again, or is busy: Ready does not flip for that. What goes on is said."""
    if in_the_look:
        rig.observer.fails = refused(status)
    else:
        rig.plan, rig.api.fails = planned(False, DELETE), {"delete Pod": refused(status)}
    await rig.passes(PATIENCE)
    assert rig.api.ready == []
    await rig.passes()
    assert rig.api.ready == [("Unknown", "ApiRefused")]
    rig.observer.fails = None
    rig.api.fails.clear()
    await rig.passes()
    rig.observer.fails = refused(status)
    await rig.passes(PATIENCE)
    assert len(rig.api.ready) == 1


async def test_a_refused_look_for_what_it_asks_is_told_at_once(rig: Rig) -> None:
    rig.observer.fails = refused(403)
    await rig.passes()
    assert rig.api.ready == [("Unknown", "Forbidden")]


def test_a_plan_that_stopped_says_how_far_it_came() -> None:
    assert (Stopped("x").reason, Stopped("x").written) == ("", False)


async def test_a_cluster_that_is_gone_leaves_no_lines_in_the_metrics(rig: Rig) -> None:
    """Namespaces of reviews come and go by thousands."""
    await rig.passes()
    rig.api.fails["merge"] = refused(500)
    rig.observer.fails = refused(500)
    await rig.passes()
    metrics.REPORTS_FAILED.labels("ns", "demo").inc()
    assert b'cluster="demo"' in prometheus_client.generate_latest()

    rig.api.gone = True
    await rig.loop.run()
    assert b'cluster="demo"' not in prometheus_client.generate_latest()


async def test_each_line_of_a_loop_names_the_namespace_too(rig: Rig) -> None:
    """Also those that name nobody, as events do: one operator serves clusters of one name, and a report tells them apart."""
    seen: list[MutableMapping[str, Any]] = []

    def note(_: Any, __: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
        seen.append(dict(event))
        rig.api.gone = True
        rig.loop.ring()
        raise structlog.DropEvent

    rig.plan = Plan(events=(Event("PlatoCluster", "demo", "Normal", "Told", "words"),))
    before = structlog.get_config()["wrapper_class"]
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.INFO))  # another test may want less
    try:
        with structlog.testing.capture_logs(processors=[structlog.contextvars.merge_contextvars, note]):
            await asyncio.create_task(rig.loop.run())
    finally:
        structlog.configure(wrapper_class=before)
    assert seen[0]["event"] == "event"
    assert {(line["namespace"], line["cluster"]) for line in seen} == {("ns", "demo")}
