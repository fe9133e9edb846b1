"""What the edge writes, against an API server in memory: order, preconditions, refusals, throttles, events."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any, cast

import pytest
from plato.api.cluster import PlatoClusterStatus
from plato.api.shared import Condition
from plato.topology.record import Shard, Topology, even_ranges
from plato_operator import manifests
from plato_operator.apply import FIRST_RETRY_S, Hands, Stopped
from plato_operator.core.conditions import MOST_WORDS
from plato_operator.core.orders import Apply, DeletePod, Event, Gate, Lower, Plan, Raise, Remove, Scale, TopologyWrite
from plato_operator.core.snapshot import Child, Cluster, Snapshot
from plato_operator.events import AGAIN_S, FORGET_S, Events
from plato_operator.kube import Kube, Refused, Unreachable
from plato_operator.lease import Lease, LeaseLost
from plato_operator.observe import View
from plato_operator.statuses import EVERY_S, Statuses
from world import START_MS, cluster_spec


class Api:
    """Records each write as (verb, kind, name, body); raises what `fails` holds for (verb, kind)."""

    def __init__(self) -> None:
        self.writes: list[tuple[str, str, str, Any]] = []
        self.fails: dict[tuple[str, str], Exception] = {}
        self.there: dict[tuple[str, str], dict[str, Any]] = {}

    async def get(self, kind: str, namespace: str, name: str) -> dict[str, Any] | None:
        return self.there.get((kind, name))

    def _write(self, verb: str, kind: str, name: str, body: Any) -> dict[str, Any]:
        self.writes.append((verb, kind, name, body))
        if (verb, kind) in self.fails:
            raise self.fails[verb, kind]
        return {}

    async def create(self, kind: str, namespace: str, body: Any) -> dict[str, Any]:
        return self._write("create", kind, body["metadata"]["name"], body)

    async def replace(self, kind: str, namespace: str, name: str, body: Any, sub: str = "") -> dict[str, Any]:
        return self._write("replace", kind + sub, name, body)

    async def apply(self, kind: str, namespace: str, name: str, body: Any, manager: str = "") -> dict[str, Any]:
        return self._write("apply", kind, name, {**body, "manager": manager})

    async def merge(self, kind: str, namespace: str, name: str, body: Any, sub: str = "") -> dict[str, Any]:
        return self._write("merge", f"{kind}/{sub}" if sub else kind, name, body)

    async def delete(self, kind: str, namespace: str, name: str, **how: Any) -> None:
        self._write("delete", kind, name, how)

    @property
    def verbs(self) -> list[str]:
        return [f"{verb} {kind} {name}" for verb, kind, name, _ in self.writes]


class Held:
    """A Lease that is valid for so many more checks."""

    def __init__(self) -> None:
        self.checks = 1_000

    def check(self) -> None:
        self.checks -= 1
        if self.checks < 0:
            raise LeaseLost("lost")


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Desk:
    """Hands over an API in memory."""

    def __init__(self) -> None:
        self.api, self.lease, self.clock = Api(), Held(), Clock()
        self.hands = Hands(cast(Kube, self.api), cast(Lease, self.lease), "ns", "demo", self.clock)

    async def carry_out(self, plan: Plan, view: View) -> bool:
        return await self.hands.carry_out(plan, view)


TOPOLOGY = Topology("cluster-uid", 5, even_ranges(["demo-s0"], 5))
SERVICE = Apply("Service", "demo-msg", "msg", "PlatoCluster", "demo", "h1")
BUDGET = Apply("PodDisruptionBudget", "demo-msg", "msg", "PlatoCluster", "demo", "h2")


def view(**fields: Any) -> View:
    snap = Snapshot(
        START_MS, "me", Cluster("demo", "ns", "cluster-uid", 1, cluster_spec()), topology=TOPOLOGY, version="7"
    )
    sts = Child("StatefulSet", "demo-edge", "sts-uid", replicas=3, resource_version="40")
    pod = {"metadata": {"name": "demo-edge-2", "uid": "pod-uid", "resourceVersion": "50"}}
    children = {("StatefulSet", "demo-edge"): sts}
    return View(replace(snap, children=children, **fields), {("Pod", "demo-edge-2"): pod})


def refused(status: int, message: str = "no", reason: str = "") -> Refused:
    return Refused(status, reason, message, "PATCH /x")


async def test_a_plan_is_done_from_top_to_bottom_with_its_preconditions() -> None:
    """Applies, then the record by its version, then the act by uid and version; nothing overtakes."""
    desk = Desk()
    plan = Plan(
        applies=(
            SERVICE, Raise("demo-edge", "sts-uid", 4), Gate("demo-edge-2", "pod-uid", False),
            Remove("NetworkPolicy", "demo", "np-uid"),
        ),
        write=TopologyWrite(TOPOLOGY, "7"),
        act=DeletePod("demo-edge-2", "pod-uid", "drained", 30),
    )  # fmt: skip
    assert await desk.carry_out(plan, view())
    assert desk.api.verbs == [
        "apply Service demo-msg", "merge StatefulSet demo-edge", "merge Pod/status demo-edge-2",
        "delete NetworkPolicy demo", "replace ConfigMap demo-topology", "delete Pod demo-edge-2",
    ]  # fmt: skip
    bodies = [body for _, _, _, body in desk.api.writes]
    assert bodies[0]["manager"] == manifests.FIELD_MANAGER
    assert bodies[1]["metadata"] == {"uid": "sts-uid", "resourceVersion": "40"}
    assert bodies[1]["spec"] == {"replicas": 4}
    assert bodies[2]["metadata"] == {"uid": "pod-uid"}
    assert bodies[2]["status"]["conditions"][0]["status"] == "False"
    assert bodies[3]["uid"] == "np-uid"
    assert bodies[4]["metadata"]["resourceVersion"] == "7"
    assert bodies[4]["metadata"]["ownerReferences"][0]["uid"] == "cluster-uid"
    assert bodies[5] == {"uid": "pod-uid", "version": "50", "grace_s": 30}


async def test_a_record_that_must_not_exist_is_created_and_a_lowering_has_its_version() -> None:
    """Preconditions of the two other writes."""
    desk = Desk()
    plan = Plan(write=TopologyWrite(TOPOLOGY, ""), act=Lower("demo-edge", "sts-uid", "40", 2, "drained"))
    await desk.carry_out(plan, view())
    assert desk.api.verbs == ["create ConfigMap demo-topology", "merge StatefulSet demo-edge"]
    assert desk.api.writes[1][3]["metadata"] == {"uid": "sts-uid", "resourceVersion": "40"}


async def test_the_default_pool_gets_its_replicas_once_by_another_manager() -> None:
    """Later applies do not own them."""
    desk = Desk()
    order = Apply("GatewayPool", "demo-edge", "default", "PlatoCluster", "demo", "h", replicas=2)
    await desk.carry_out(Plan(applies=(order,)), view())
    first, then = (body for _, _, _, body in desk.api.writes)
    assert (first["manager"], first["spec"]["replicas"]) == (manifests.INITIAL_FIELD_MANAGER, 2)
    assert then["manager"] == manifests.FIELD_MANAGER
    assert "replicas" not in then["spec"]


@pytest.mark.parametrize("error", [refused(409), refused(500), refused(429), Unreachable("no answer")])
@pytest.mark.parametrize("at", [("apply", "Service"), ("replace", "ConfigMap")])
async def test_a_conflict_or_no_answer_drops_the_rest_of_the_plan(at: tuple[str, str], error: Exception) -> None:
    """Whether it was done is unknown, or the picture was old: nothing after it is done."""
    desk = Desk()
    desk.api.fails[at] = error
    act = DeletePod("demo-edge-2", "pod-uid", "drained")
    with pytest.raises(Stopped):
        await desk.carry_out(Plan((SERVICE, BUDGET), TopologyWrite(TOPOLOGY, "7"), act), view())
    assert desk.api.writes[-1][:2] == at


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (refused(403, 'exceeded quota: small, requested: services=1'), "QuotaExceeded"),
        (refused(403, 'cannot patch resource "services"'), "Forbidden"),
        (refused(422, "metadata.name: must be no more than 63 characters"), "ApplyRefused"),
    ],
)  # fmt: skip
async def test_a_refusal_for_what_it_says_stops_nobody_else_and_waits_longer_each_time(
    error: Refused, reason: str
) -> None:
    """The words are kept for a condition; another spec is tried at once; what is taken is forgotten."""
    desk = Desk()
    desk.api.fails["apply", "Service"] = error
    plan = Plan((SERVICE, BUDGET), TopologyWrite(TOPOLOGY, "7"))
    await desk.carry_out(plan, view())
    assert desk.api.verbs[1:] == ["apply PodDisruptionBudget demo-msg", "replace ConfigMap demo-topology"]
    assert desk.hands.refusals == {("Service", "demo-msg"): (reason, error.message)}
    tries = []
    for second in range(60):
        desk.clock.now = float(second)
        desk.api.writes.clear()
        await desk.carry_out(Plan((SERVICE,)), view())
        if desk.api.writes:
            tries.append(second)
    assert tries == [5, 15, 35]
    desk.api.writes.clear()
    await desk.carry_out(Plan((replace(SERVICE, input_hash="h9"),)), view())
    assert desk.api.writes
    del desk.api.fails["apply", "Service"]
    desk.clock.now += FIRST_RETRY_S
    await desk.carry_out(Plan((replace(SERVICE, input_hash="h9"),)), view())
    assert not desk.hands.refusals


@pytest.mark.parametrize(
    ("order", "at"),
    [
        (Raise("demo-edge", "sts-uid", 50), ("merge", "StatefulSet")),
        (Scale("demo-msg", "dep-uid", 50), ("merge", "Deployment")),
        (Remove("NetworkPolicy", "demo", "np-uid"), ("delete", "NetworkPolicy")),
    ],
)
async def test_a_scale_that_a_policy_denies_holds_up_neither_the_record_nor_others(
    order: Raise | Scale | Remove, at: tuple[str, str]
) -> None:
    """More replicas than somebody's policy lets: pods that restart are admitted, drains go on, the words are shown."""
    desk = Desk()
    desk.api.fails[at] = refused(403, "admission webhook denied the request: at most 20 replicas")
    plan = Plan((order, SERVICE), TopologyWrite(TOPOLOGY, "7"))
    assert await desk.carry_out(plan, view())
    assert desk.api.verbs[1:] == ["apply Service demo-msg", "replace ConfigMap demo-topology"]
    ((reason, message),) = desk.hands.refusals.values()
    assert reason == "ApplyRefused"
    assert "at most 20 replicas" in message
    desk.api.writes.clear()
    await desk.carry_out(Plan((order,)), view())
    assert not desk.api.writes  # not at each pass
    desk.clock.now += FIRST_RETRY_S
    del desk.api.fails[at]
    await desk.carry_out(Plan((order,)), view())
    assert not desk.hands.refusals


async def test_an_overlay_that_cannot_be_is_a_refusal_in_words() -> None:
    """Nothing is sent for it."""
    desk = Desk()
    spec = replace(cluster_spec(), msg=replace(cluster_spec().msg, pod_overlay={"spec": {"hostNetwork": True}}))
    order = Apply("Deployment", "demo-msg", "msg", "PlatoCluster", "demo", "h", "t", 2)
    await desk.carry_out(Plan((order,)), view(cluster=Cluster("demo", "ns", "cluster-uid", 1, spec)))
    assert not desk.api.writes
    reason, message = desk.hands.refusals["Deployment", "demo-msg"]
    assert reason == "InvalidOverlay"
    assert "hostNetwork" in message
    await desk.carry_out(Plan(), view())
    assert not desk.hands.refusals  # nobody wants it any more


async def test_what_is_made_once_and_is_there_is_no_trouble() -> None:
    """Somebody was faster; another 409 is a conflict."""
    desk = Desk()
    desk.api.fails["create", "Job"] = refused(409, reason="AlreadyExists")
    await desk.carry_out(Plan((Apply("Job", "demo-migrate-1", "migrate", "PlatoCluster", "demo", "h"),)), view())
    assert not desk.hands.refusals


ACCOUNT = Apply("ServiceAccount", "demo", "members", "PlatoCluster", "demo", "h")
SHARD = Apply("StateShard", "demo-s0", "state", "PlatoCluster", "demo", "h")


@pytest.mark.parametrize("order", [ACCOUNT, SHARD])
@pytest.mark.parametrize("labels", [{}, {"plato.im/cluster": "other"}])
async def test_what_is_somebody_elses_is_never_taken_over(order: Apply, labels: dict[str, str]) -> None:
    """A cluster that is named like the account of another program would lend its pods that one's rights, and have it
    deleted with itself."""
    desk = Desk()
    desk.api.fails["create", order.kind] = refused(409, reason="AlreadyExists")
    desk.api.there[order.kind, order.name] = {"metadata": {"name": order.name, "uid": "x", "labels": labels}}
    await desk.carry_out(Plan((order, SERVICE)), view())
    assert desk.api.verbs[-1] == "apply Service demo-msg"
    assert f"apply {order.kind} {order.name}" not in desk.api.verbs
    reason, message = desk.hands.refusals[order.kind, order.name]
    assert reason == "NameTaken"
    assert "is not this PlatoCluster's" in message


@pytest.mark.parametrize(
    "meta",
    [
        {"labels": {"plato.im/cluster": "demo"}},
        {"ownerReferences": [{"uid": "cluster-uid", "controller": True}]},
    ],
)
async def test_what_lost_its_label_or_its_owner_is_still_ours(meta: dict[str, Any]) -> None:
    desk = Desk()
    desk.api.there["ServiceAccount", "demo"] = {"metadata": {"name": "demo", "uid": "x", **meta}}
    await desk.carry_out(Plan((ACCOUNT,)), view())
    assert desk.api.verbs == ["apply ServiceAccount demo"]


async def test_without_the_lease_nothing_is_written() -> None:
    """It is asked before each write, so it may end within a plan."""
    desk = Desk()
    desk.lease.checks = 2  # one more after the look for somebody else's object
    with pytest.raises(LeaseLost):
        await desk.carry_out(Plan((SERVICE, BUDGET), TopologyWrite(TOPOLOGY, "7")), view())
    assert desk.api.verbs == ["apply Service demo-msg"]


async def test_a_record_that_is_too_large_is_said_and_not_written() -> None:
    """The condition's reason is TooLarge."""
    desk = Desk()
    noise = random.Random(1)
    big = replace(TOPOLOGY, shards={f"demo-s{i}": Shard(noise.randbytes(60_000).hex(), "") for i in range(20)})
    with pytest.raises(Stopped) as stopped:
        await desk.carry_out(Plan(write=TopologyWrite(big, "7")), view())
    assert not desk.api.writes
    assert (stopped.value.reason, stopped.value.written) == ("TooLarge", False)


STATUS = PlatoClusterStatus(1, "Ready", conditions=(Condition("Ready", "True", "Serving", "ok", 1),))


def resource(status: Any) -> dict[str, Any]:
    meta = {"name": "demo", "namespace": "ns", "uid": "u", "resourceVersion": "3", "generation": 1}
    return {"apiVersion": "plato.im/v1alpha1", "kind": "PlatoCluster", "metadata": meta, "spec": {}, "status": status}


async def test_a_status_is_written_when_it_changed_and_at_most_once_per_5_s() -> None:
    """The times of conditions stay where their status does; what is gone is taken out; the version is named."""
    api, clock = Api(), Clock()
    statuses = Statuses(cast(Kube, api), clock)
    assert await statuses.write("PlatoCluster", resource({"reshard": {"slotsLeft": 3}}), STATUS, START_MS) == 0
    ((_, kind, _, body),) = api.writes
    assert kind == "PlatoCluster/status"
    assert body["metadata"]["resourceVersion"] == "3"
    assert body["status"]["reshard"] is None
    stored = {k: v for k, v in body["status"].items() if v is not None}
    assert await statuses.write("PlatoCluster", resource(stored), STATUS, START_MS + 60_000) == 0
    assert len(api.writes) == 1
    clock.now += 2
    other = replace(STATUS, connections=5)
    assert await statuses.write("PlatoCluster", resource(stored), other, START_MS) == EVERY_S - 2
    assert len(api.writes) == 1
    clock.now += EVERY_S - 2
    assert await statuses.write("PlatoCluster", resource(stored), other, START_MS + 60_000) == 0
    told = api.writes[-1][3]["status"]["conditions"][0]
    assert told["lastTransitionTime"] == stored["conditions"][0]["lastTransitionTime"]


async def test_a_conflict_of_a_status_is_no_harm() -> None:
    """The next pass looks again; other errors are told."""
    api = Api()
    statuses = Statuses(cast(Kube, api), Clock())
    api.fails["merge", "PlatoCluster/status"] = refused(409)
    assert await statuses.write("PlatoCluster", resource({}), STATUS, START_MS) > 0
    api.fails["merge", "PlatoCluster/status"] = refused(403)
    with pytest.raises(Refused):
        await statuses.write("PlatoCluster", resource({}), STATUS, START_MS)


async def test_a_stalled_cluster_keeps_the_rest_of_its_status() -> None:
    """Ready is Unknown, not False: nothing was looked at."""
    api = Api()
    old = {"phase": "Ready", "conditions": [{"type": "Paused", "status": "False", "reason": "r", "message": "m"}]}
    await Statuses(cast(Kube, api), Clock()).stalled(
        "PlatoCluster", resource(old), "Forbidden", "cannot list" + "!" * 100_000, START_MS
    )
    status = api.writes[0][3]["status"]
    assert len(status["conditions"][0]["message"]) == MOST_WORDS
    assert status["phase"] == "Ready"
    assert [(c["type"], c["status"]) for c in status["conditions"]] == [
        ("Ready", "Unknown"), ("Stalled", "True"), ("Paused", "False"),
    ]  # fmt: skip


async def test_an_event_is_one_object_however_often_it_happens() -> None:
    """Told again it counts, at most once a minute; after half an hour it is news."""
    api, clock = Api(), Clock()
    events = Events(cast(Kube, api), "ns", "me", clock)
    event = Event("Pod", "demo-edge-2", "Warning", "NodeLost", "gone")
    for second in range(130):
        clock.now = float(second)
        await events.tell(event, view().objects)
    assert [verb for verb, *_ in api.writes] == ["create", "merge", "merge"]
    assert api.writes[0][3]["regarding"]["uid"] == "pod-uid"
    assert [body["series"]["count"] for verb, _, _, body in api.writes if verb == "merge"] == [
        AGAIN_S + 1,
        2 * AGAIN_S + 1,
    ]
    clock.now += FORGET_S + 1
    await events.tell(event, view().objects)
    assert api.writes[-1][0] == "create"
    await events.tell(Event("Pod", "nobody", "Normal", "X", "y"), view().objects)
    assert len(api.writes) == 4


async def test_a_note_is_cut_by_bytes() -> None:
    """The API server counts those, and would refuse the event."""
    api = Api()
    event = Event("Pod", "demo-edge-2", "Warning", "X", "ä" * 2_000)
    await Events(cast(Kube, api), "ns", "me", Clock()).tell(event, view().objects)
    assert api.writes[0][3]["note"] == "ä" * 512


async def test_an_event_that_cannot_be_written_is_no_trouble() -> None:
    """It is a log line."""
    api = Api()
    api.fails["create", "Event"] = refused(403)
    await Events(cast(Kube, api), "ns", "me", Clock()).tell(
        Event("Pod", "demo-edge-2", "Normal", "X", "y"), view().objects
    )
