"""What Ready and Reconciling say while something planned goes on, and what keeps it from going on, in words to act upon."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import pytest
from plato.api.shared import Condition, Resources
from plato.topology.record import Rest
from plato_operator.core.conditions import MOVING_MS, STARTING_MS, TRYING_MS
from plato_operator.core.orders import Plan
from plato_operator.core.plan import one_pass
from plato_operator.core.snapshot import GATEWAY, MSG, Pod, Snapshot, shard_pod
from world import POOL, World, pool_spec


@pytest.fixture(scope="module")
def settled() -> Snapshot:
    """A cluster that serves. Frozen, so the tests may share it."""
    world = World()
    world.settle()
    return world.snapshot(world.leader)


def told(plan: Plan) -> Mapping[str, Condition]:
    """The PlatoCluster's conditions by type."""
    assert plan.cluster_status is not None
    return {c.type: c for c in plan.cluster_status.conditions}


def passes(world: World, most: int = 200) -> Iterator[Plan]:
    """Pass after pass, until three in a row order nothing."""
    quiet = 0
    for _ in range(most):
        plan = world.act()
        yield plan
        world.tick()
        quiet = quiet + 1 if not plan.applies and plan.write is None and plan.act is None and world.converged() else 0
        if quiet >= 3:
            return
    raise AssertionError("not settled")


# ── slots on their way ───────────────────────────────────────────────────────────────────────────────────────


def test_ready_stays_true_while_slots_move_as_planned() -> None:
    """Links hold what comes for them meanwhile, and nobody reconnects."""
    world = World()
    world.settle()
    world.respec(state=replace(world.cluster.spec.state, shards=3))
    moves = 0
    for plan in passes(world):
        found = told(plan)
        assert (found["Ready"].status, found["SlotsAcquired"].status) == ("True", "True"), found["Ready"].message
        old = (plan.shard_status[name] for name in ("demo-s0", "demo-s1"))
        assert {c.status for status in old for c in status.conditions if c.type in ("Ready", "SlotsAcquired")} == {
            "True"
        }
        moves += world.topology is not None and world.topology.move is not None
    assert moves > 10


def moving() -> Snapshot:
    """An open move, whose target has not said yet that it serves the slots."""
    world = World()
    world.settle()
    world.respec(state=replace(world.cluster.spec.state, shards=3))
    for _ in range(20):
        world.act()
        if world.topology is not None and world.topology.move is not None:
            return world.snapshot(world.leader)
        world.tick()
    raise AssertionError("no move was opened")


def test_a_move_that_takes_longer_than_one_does_is_told() -> None:
    """Ready turns False well before 30 s; so it does at once where the target is down, and after the move was undone."""
    snap = moving()
    assert snap.topology is not None
    move, since = snap.topology.move, snap.memory.move_since_ms
    assert move is not None
    assert told(one_pass(replace(snap, now_ms=since + MOVING_MS - 1)))["Ready"].status == "True"
    late = told(one_pass(replace(snap, now_ms=since + MOVING_MS)))
    assert (late["Ready"].reason, late["SlotsAcquired"].reason) == ("SlotsMissing", "Loading")
    name = shard_pod(move.target)
    down = replace(snap, pods={**snap.pods, name: replace(snap.pods[name], ready=False)})
    assert told(one_pass(down))["Ready"].reason == "SlotsMissing"
    back = replace(snap, topology=replace(snap.topology, move=replace(move, undo=True)))
    assert told(one_pass(back))["Ready"].reason == "SlotsMissing"
    assert MOVING_MS < 30_000


# ── from a change to its end ─────────────────────────────────────────────────────────────────────────────────


def _of_msg(world: World) -> None:
    world.respec(msg=replace(world.cluster.spec.msg, resources=Resources(requests={"cpu": "2"})))


def _of_state(world: World) -> None:
    world.respec(state=replace(world.cluster.spec.state, resources=Resources(requests={"cpu": "2"})))


def _of_all(world: World) -> None:
    world.respec(version="2")


@pytest.mark.parametrize("change", [_of_msg, _of_state, _of_all])
def test_reconciling_is_true_from_the_first_look_at_a_change_to_its_last_pod(change: Callable[[World], None]) -> None:
    """So `kubectl wait --for=condition=Reconciling=false` after `kubectl apply` ends when the change is done, not before."""
    world = World()
    world.settle()
    before = {pod.uid for pod in world.api.pods.values()}
    change(world)
    plans = list(passes(world))
    said = [told(plan)["Reconciling"] for plan in plans]
    assert said[0].observed_generation == world.cluster.generation
    statuses = [condition.status for condition in said]
    assert statuses[0] == "True"
    assert statuses == sorted(statuses, reverse=True), "once it is done it stays so"
    assert statuses[-1] == "False"
    assert {pod.uid for pod in world.api.pods.values()} != before
    assert "GatewaysMissing" not in {told(plan)["Ready"].reason for plan in plans}


def test_a_cluster_that_is_being_made_is_not_ready_before_all_its_gateways_are(settled: Snapshot) -> None:
    """Only the successor of one that went may be on its way, and not for long."""
    assert settled.topology is not None
    pod = replace(settled.pods[f"{POOL}-1"], ready=False, created_ms=settled.now_ms)
    new = replace(settled, pods={**settled.pods, pod.name: pod}, topology=replace(settled.topology, resting={}))
    assert told(one_pass(new))["Ready"].reason == "GatewaysMissing"
    old = replace(new, topology=replace(settled.topology, resting=rest(settled)))
    assert told(one_pass(old))["Ready"].status == "True"
    assert told(one_pass(old))["Reconciling"].status == "True"
    late = replace(old, now_ms=old.now_ms + STARTING_MS)
    late = replace(late, topology=replace(settled.topology, resting=rest(late)))
    assert told(one_pass(late))["Ready"].reason == "GatewaysMissing"


def rest(snap: Snapshot) -> dict[int, Rest]:
    """A worker id that rests."""
    return {1000: Rest("gone", snap.now_ms + 60_000)}


def test_what_one_pool_may_spare_does_not_make_up_for_what_another_lacks() -> None:
    """A pool that rolls with more to spare than it uses; meanwhile another one, its own clients', has no gateway at all."""
    world = World(replicas=3, max_unavailable=3)
    world.settle()
    snap = world.snapshot(world.leader)
    other = replace(snap.pools[POOL], name="other", uid="other-uid", spec=pool_spec(2))
    pod = replace(snap.pods[f"{POOL}-2"], template_hash="old")
    rolls = replace(snap, pods={**snap.pods, pod.name: pod})
    assert told(one_pass(rolls))["Ready"].status == "True"
    lacks = replace(rolls, pools={**rolls.pools, "other": other})
    assert told(one_pass(lacks))["Ready"].reason == "GatewaysMissing"


def test_reconciling_lasts_as_long_as_a_restart_of_gateways(settled: Snapshot) -> None:
    """`kubectl rollout restart statefulset` changes no hash of ours, and between two gateways nothing drains."""
    sts = replace(settled.children["StatefulSet", POOL], restarted_at="2026-11-30T12:00:00Z")
    pod = replace(settled.pods[f"{POOL}-1"], restarted_at=sts.restarted_at, ready_since_ms=settled.now_ms)
    half = replace(
        settled, children={**settled.children, ("StatefulSet", POOL): sts}, pods={**settled.pods, pod.name: pod}
    )
    pools = replace(settled.pools[POOL].spec.rollout, min_ready_seconds=60)
    half = replace(
        half, pools={POOL: replace(settled.pools[POOL], spec=replace(settled.pools[POOL].spec, rollout=pools))}
    )
    plan = one_pass(half)
    assert plan.write is None, "it waits for minReadySeconds"
    assert told(plan)["Reconciling"].status == "True"
    assert of_pool(plan)["Reconciling"].status == "True"


def of_pool(plan: Plan) -> Mapping[str, Condition]:
    """The pool's conditions by type."""
    return {c.type: c for c in plan.pool_status[POOL].conditions}


def test_a_pool_s_reconciling_is_true_from_the_first_look_at_its_change() -> None:
    """A canary is a change of a pool alone: the PlatoCluster's generation stays, so people wait for the pool."""
    world = World()
    world.settle()
    world.repool(version="2")
    said = [of_pool(plan)["Reconciling"] for plan in passes(world)]
    assert said[0].observed_generation == world.api.pools[POOL].generation
    statuses = [condition.status for condition in said]
    assert statuses[0] == "True"
    assert statuses == sorted(statuses, reverse=True), "once it is done it stays so"
    assert statuses[-1] == "False"


def test_what_is_refused_for_ever_is_not_reconciled_for_ever(settled: Snapshot) -> None:
    monitoring = replace(settled.cluster.spec.monitoring, pod_monitor=True)
    cluster = replace(settled.cluster, spec=replace(settled.cluster.spec, monitoring=monitoring))
    asked = replace(settled, cluster=cluster)
    assert told(one_pass(asked))["Reconciling"].status == "True"
    refused = replace(asked, refusals={("PodMonitor", "demo"): ("ApplyRefused", "no such kind")})
    assert told(one_pass(refused))["Reconciling"].status == "False"
    there = replace(settled.children["Service", "demo-msg"], kind="PodMonitor", name="demo")
    unwanted = replace(settled, children={**settled.children, ("PodMonitor", "demo"): there})
    assert told(one_pass(unwanted))["Reconciling"].status == "True"
    kept = replace(unwanted, refusals={("PodMonitor", "demo"): ("Forbidden", "not yours to delete")})
    assert told(one_pass(kept))["Reconciling"].status == "False"


def test_while_paused_reconciling_does_not_say_that_all_is_done(settled: Snapshot) -> None:
    """A wait for it ends, since nothing goes on; the reason says why."""
    spec = replace(settled.cluster.spec, paused=True, version="2")
    plan = one_pass(replace(settled, cluster=replace(settled.cluster, spec=spec)))
    for found in (told(plan)["Reconciling"], of_pool(plan)["Reconciling"]):
        assert (found.status, found.reason) == ("False", "Paused")
    waits = told(plan)["DependenciesReady"]
    assert (waits.status, waits.reason) == ("Unknown", "Paused"), "no migration runs"
    assert told(plan)["Ready"].status == "True"


@pytest.mark.parametrize(
    ("hold", "reason", "words"),
    [
        (
            {"paused": True},
            "RolloutPaused",
            "2 pods of demo-edge keep an older template until spec.rollout.paused is false",
        ),
        (
            {"partition": 1},
            "Partitioned",
            "1 pods of demo-edge keep an older template since spec.rollout.partition is 1",
        ),
    ],
)
def test_a_roll_that_a_person_holds_is_not_reconciled_for_ever(hold: dict[str, Any], reason: str, words: str) -> None:
    """A wait for it ends once what is not held is done, and the reason says who has to act; then it goes on."""
    world = World()
    world.settle()
    rollout = world.api.pools[POOL].spec.rollout
    world.repool(version="2", rollout=replace(rollout, **hold))
    said = []
    for _ in range(80):
        plan = world.act()
        said.append((of_pool(plan)["Reconciling"].status, told(plan)["Reconciling"].status))
        world.tick()
    assert said[0][0] == "True"
    assert said == sorted(said, reverse=True), "once it is done it stays so"
    for found in (of_pool(plan)["Reconciling"], told(plan)["Reconciling"]):
        assert (found.status, found.reason) == ("False", reason)
        assert words in found.message
    assert plan.cluster_status is not None
    assert plan.cluster_status.phase == "Ready"
    world.repool(rollout=rollout)
    last = list(passes(world))
    assert of_pool(last[0])["Reconciling"].reason == told(last[0])["Reconciling"].reason == "Progressing"
    assert of_pool(last[-1])["Reconciling"].reason == "Settled"


def test_slots_that_a_person_holds_are_not_reconciled_for_ever() -> None:
    """A new shard is waited for all the same; then the wait ends, and what is left is told. It goes on when it is let go."""
    world = World()
    world.settle()
    state = world.cluster.spec.state
    world.respec(state=replace(state, shards=3, reshard_paused=True))
    said = []
    for _ in range(30):
        plan = world.act()
        said.append(told(plan)["Reconciling"])
        world.tick()
    assert said[0].status == "True"
    assert [c.status for c in said] == sorted((c.status for c in said), reverse=True)
    assert (said[-1].status, said[-1].reason) == ("False", "ReshardPaused")
    assert "341 slots wait for spec.state.reshardPaused to be false" in said[-1].message
    assert told(plan)["Resharding"].reason == "Paused"
    world.respec(state=replace(state, shards=3))
    last = list(passes(world))
    assert told(last[0])["Reconciling"].status == "True"
    assert told(last[-1])["Reconciling"].reason == "Settled"


# ── gateways without a node ──────────────────────────────────────────────────────────────────────────────────


FULL = "node(s) didn't have free ports for the requested pod ports"


@pytest.mark.parametrize(
    ("said", "reason", "words"),
    [
        (f"1 node(s) had untolerated taint(s), 1 {FULL}", "TooFewNodes", "add nodes"),
        (f"2 {FULL}", "PortTaken", "on 1 node(s)"),
        (f"1 Insufficient cpu, 1 Insufficient memory, 1 {FULL}", "NoRoom", "cpu, memory"),
        ("1 Too many pods", "NoRoom", "Too many pods"),
        ("3 node(s) didn't match Pod's node affinity/selector", "Unschedulable", "spec.placement"),
    ],
)
def test_a_gateway_without_a_node_says_what_would_give_it_one(
    settled: Snapshot, said: str, reason: str, words: str
) -> None:
    """One gateway has its node; what the scheduler says of ports beyond that one is somebody else's doing."""
    whole = f"0/3 nodes are available: {said}. preemption: 0/3 nodes are available: 3 Insufficient cpu."
    name = f"{POOL}-1"
    stuck = replace(settled.pods[name], node="", ready=False, running=False, endpoint=None, unschedulable=whole)
    found = one_pass(replace(settled, pods={**settled.pods, name: stuck})).pool_status[POOL].conditions
    condition = next(c for c in found if c.type == "Unschedulable")
    assert (condition.status, condition.reason) == ("True", reason)
    assert condition.message.startswith(f"{name}: ")
    assert words in condition.message
    assert said in condition.message


def test_a_gateway_on_a_node_that_is_cordoned_does_not_hide_that_a_port_is_taken(settled: Snapshot) -> None:
    """The scheduler says of such a node that it is unschedulable, and does not count it among those without free ports."""
    name, at = f"{POOL}-1", settled.pods[f"{POOL}-0"].node
    assert settled.nodes is not None
    said = f"0/5 nodes are available: 1 {FULL}, 1 node(s) were unschedulable, 3 node(s) had untolerated taint(s)."
    stuck = replace(settled.pods[name], node="", ready=False, running=False, endpoint=None, unschedulable=said)
    nodes = {**settled.nodes, at: replace(settled.nodes[at], unschedulable=True)}
    plan = one_pass(replace(settled, nodes=nodes, pods={**settled.pods, name: stuck}))
    assert of_pool(plan)["Unschedulable"].reason == "PortTaken"


# ── a migration that does not end ────────────────────────────────────────────────────────────────────────────


def migrating(snap: Snapshot, **fields: object) -> Snapshot:
    """A cluster at its beginning: no msg yet, the migration's pod as given."""
    ((kind, name),) = [key for key in snap.children if key[0] == "Job"]
    child = replace(snap.children[kind, name], succeeded=0)
    pods = {n: p for n, p in snap.pods.items() if p.component == GATEWAY}
    pod = replace(Pod(f"{name}-x7k2p", "u-migrate", "migrate"), created_ms=snap.now_ms, **fields)  # type: ignore[arg-type]  # any field
    assert not [p for p in pods.values() if p.component == MSG]
    return replace(snap, children={**snap.children, (kind, name): child}, pods={**pods, pod.name: pod})


def test_a_migration_that_does_not_end_says_where_its_words_are(settled: Snapshot) -> None:
    """While the wrong host of a database is tried the Job says nothing; nor is it msg that is down."""
    found = told(one_pass(migrating(settled)))
    assert (found["DependenciesReady"].reason, found["Ready"].reason) == ("Migrating", "Migrating")
    assert "kubectl logs" not in found["Ready"].message
    long = migrating(settled)
    found = told(one_pass(replace(long, now_ms=long.now_ms + TRYING_MS)))
    (name,) = [n for n, p in long.pods.items() if p.component == "migrate"]
    for type_ in ("DependenciesReady", "Ready"):
        assert found[type_].reason == "Migrating"
        assert f"kubectl logs -n ns {name}" in found[type_].message
        assert found[type_].status != "True"


def test_a_migration_that_cannot_start_says_what_it_waits_for(settled: Snapshot) -> None:
    snap = migrating(settled, running=False, trouble="ErrImagePull: no such image")
    assert "ErrImagePull: no such image" in told(one_pass(snap))["Ready"].message
