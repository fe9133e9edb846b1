"""Reported faults of operators that the planner alone decides: ids, crashes between two orders, what a status tells."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from plato.api.shared import Condition
from plato.topology.record import DRAINING, LEAVING, LOST, SLOTS, Rest
from plato_operator.core import conditions
from plato_operator.core.orders import DeletePod, Plan
from plato_operator.core.plan import one_pass
from plato_operator.core.rollout import no_node_left
from plato_operator.core.work import Work
from world import POOL, World

ROOT = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.planner


@pytest.fixture
def world() -> World:
    made = World()
    made.settle()
    return made


def until(world: World, met: Callable[[], bool], rounds: int = 200) -> None:
    for _ in range(rounds):
        if met():
            return
        world.act()
        world.check()
        world.tick()
        world.check()
    raise AssertionError("did not come about")


def condition(plan: Plan, name: str) -> tuple[str, str, str]:
    found = {c.type: c for c in plan.pool_status[POOL].conditions}[name]
    return found.status, found.reason, found.message


def owned(world: World) -> set[int]:
    assert world.topology is not None
    return {s for r in world.topology.slots for s in range(r.first, r.last + 1)}


def test_o02_what_never_registered_goes_without_a_question_and_ids_of_those_that_did_rest(world: World) -> None:
    for node in list(world.api.nodes):
        world.api.nodes[node] = replace(world.api.nodes[node], unschedulable=True)
    on_cordon = replace(world.first_pool.drain, on_cordon="Ignore")
    world.repool(replicas=4, drain=on_cordon)
    until(world, lambda: f"{POOL}-3" in world.api.pods)
    assert world.topology is not None
    held = world.topology.gateways[f"{POOL}-1"].worker_id
    world.repool(replicas=1, drain=on_cordon)
    plan = world.act()
    assert plan.act is not None
    assert getattr(plan.act, "replicas", None) == 2, "both that never registered go in one step"
    until(world, lambda: world.topology is not None and f"{POOL}-1" not in world.topology.gateways)
    assert world.topology.resting[held].until_ms > world.now_ms


def test_o03_the_event_of_a_forced_drain_tells_the_last_count(world: World) -> None:
    snap, name = world.snapshot(world.leader), f"{POOL}-1"
    assert snap.topology is not None
    world.repool(replicas=1)
    until(world, lambda: world.topology is not None and world.topology.gateways[name].state == DRAINING)
    world.silent.add(name)
    assert world.topology is not None
    drain = world.topology.gateways[name].drain
    assert drain is not None
    world.now_ms = drain.deadline_ms + 15_000
    late = world.snapshot(world.leader)
    uid = late.pods[name].uid
    told = [one_pass(s).events[-1] for s in (late, replace(late, last_connections={uid: 17}))]
    assert [e.reason for e in told] == ["DrainForced", "DrainForced"]
    assert [e.message.rpartition("cut: ")[2] for e in told] == ["unknown", "17, by its last report"]


def test_o04_a_pod_that_is_back_at_once_gets_another_id_and_the_old_one_rests(world: World) -> None:
    assert world.topology is not None
    name = f"{POOL}-0"
    for _ in range(8):
        before = world.topology.gateways[name]
        world.delete_pod(name, force=True)

        def back(uid: str = before.uid) -> bool:
            record = world.topology.gateways.get(name) if world.topology is not None else None
            return record is not None and record.uid != uid

        until(world, back)
        assert world.topology is not None
        assert world.topology.gateways[name].worker_id != before.worker_id
        assert world.topology.resting[before.worker_id].uid == before.uid


def test_o04_many_at_once_come_back_with_ids_that_nobody_has() -> None:
    world = World(nodes=55, replicas=50)
    world.settle()
    assert world.topology is not None
    before = {g.worker_id for g in world.topology.gateways.values()}
    for ordinal in range(50):
        world.delete_pod(f"{POOL}-{ordinal}", force=True)
    until(world, lambda: world.topology is not None and len(before & world.topology.resting.keys()) == 50)
    world.settle()
    after = [g.worker_id for g in world.topology.gateways.values()]
    assert len(after) == len(set(after)) == 50
    assert not before & set(after)


def test_o04_of_two_creates_that_race_one_is_refused(world: World) -> None:
    """Two operators admit from the same picture: the second write meets another version, and no id is given twice."""
    world.repool(replicas=4)
    world.act()
    world.tick(2)
    plan = world.plan()
    assert plan.write is not None
    world.tick()
    world.carry_out(world.leader, plan)
    version, record = world.version, world.topology
    world.carry_out(world.leader, plan)
    assert (world.version, world.topology) == (version, record)
    world.settle()
    assert world.topology is not None
    ids = [g.worker_id for g in world.topology.gateways.values()] + [m.worker_id for m in world.topology.msgs.values()]
    assert len(ids) == len(set(ids))


def test_o04_with_every_id_used_or_resting_newcomers_wait_until_one_has_rested(world: World) -> None:
    assert world.topology is not None
    held = {g.worker_id for g in world.topology.gateways.values()} | {m.worker_id for m in world.topology.msgs.values()}
    late = world.now_ms + 10**7
    resting = {i: Rest("gone", late) for i in range(1024) if i not in held}
    first = next(iter(resting))
    resting[first] = Rest("gone", world.now_ms + 60_000)
    world.topology = replace(world.topology, resting=resting)
    world.repool(replicas=4)
    until(world, lambda: world.topology is not None and len(world.topology.gateways) == 3)
    assert world.now_ms >= resting[first].until_ms
    assert world.topology is not None
    assert first in {g.worker_id for g in world.topology.gateways.values()}
    plan = world.act()
    assert plan.cluster_status is not None
    said = {c.type: c for c in plan.cluster_status.conditions}["WorkerIdsAvailable"]
    assert (said.status, said.message.split()[0]) == ("False", "1")


@pytest.mark.parametrize("orders", range(5))
def test_o06_a_new_cluster_whose_operator_is_killed_after_each_number_of_orders_comes_up(orders: int) -> None:
    """The record is written and no pod is; each start goes on from what is there."""
    world = World()
    for _ in range(40):
        world.act(stop_after=orders)
        world.other_leader()
        world.act()  # the claim
        world.act(stop_after=orders + 1)
        world.check()
        world.tick()
    assert owned(world) == set(range(SLOTS))
    world.settle()


@pytest.mark.parametrize("orders", [0, 1, 2])
def test_o06_a_move_begun_by_a_killed_operator_is_finished_or_undone_by_the_next(world: World, orders: int) -> None:
    """Killed after the write that opens a move, and again and again: each move is opened once, each slot has one owner."""
    world.respec(state=replace(world.cluster.spec.state, shards=3))
    opened: list[int] = []

    def spread() -> bool:
        assert world.topology is not None
        move = world.topology.move
        if move is not None and move.id not in opened:
            opened.append(move.id)
        assert owned(world) == set(range(SLOTS))
        if move is not None:
            world.other_leader()  # nothing is remembered
            world.act()
            assert world.topology is not None
            assert world.topology.move is None or world.topology.move.id == move.id, "a claim opens no move"
        world.act(stop_after=orders)
        return len(world.topology.slots_of("demo-s2")) >= SLOTS // 3 and world.topology.move is None

    until(world, spread, rounds=400)
    assert opened == sorted(set(opened)), "no move was begun again"
    world.settle()


def test_o06_a_target_that_dies_in_the_midst_has_the_move_undone_by_the_next_operator(world: World) -> None:
    world.respec(state=replace(world.cluster.spec.state, shards=3))
    until(world, lambda: world.topology is not None and world.topology.move is not None)
    assert world.topology is not None
    move = world.topology.move
    assert move is not None
    world.bad_hashes.add(world.api.children["StatefulSet", move.target].template_hash)
    world.delete_pod(f"{move.target}-0", force=True)
    world.other_leader()
    until(world, lambda: world.topology is not None and (world.topology.move is None or world.topology.move.undo))
    assert owned(world) == set(range(SLOTS))
    world.bad_hashes.clear()
    world.settle()


def test_o08_a_transition_time_moves_only_with_its_status(world: World) -> None:
    world.repool(replicas=1)
    times: dict[str, tuple[str, str]] = {}
    kept: tuple[Condition, ...] = ()
    for _ in range(30):
        plan = world.act()
        kept = conditions.kept_times(kept, plan.pool_status[POOL].conditions, world.now_ms)
        for c in kept:
            status, time = times.get(c.type, (c.status, c.last_transition_time))
            if c.status == status:
                assert c.last_transition_time == time, c.type
            times[c.type] = (c.status, c.last_transition_time)
        world.tick()
    assert times["Draining"][1] != times["Stalled"][1], "a drain began and ended meanwhile"


def test_o14_a_restart_that_somebody_asks_for_is_paced_by_drains(world: World) -> None:
    """kubectl rollout restart: the annotation is in the template, each pod goes after its own drain."""
    old = {n: p.uid for n, p in world.api.pods.items() if p.component == "gateway"}
    sts = world.api.children["StatefulSet", POOL]
    world.api.children["StatefulSet", POOL] = replace(sts, restarted_at="2026-01-01T00:00:00Z", resource_version="r")
    gone: list[str] = []

    def restarted() -> bool:
        plan = world.plan()
        if isinstance(plan.act, DeletePod):
            process = world.processes.get(plan.act.name)
            assert process is None or process.conns == 0, "nobody was left on it"
            gone.append(plan.act.name)
        return all(
            n in world.api.pods and world.api.pods[n].uid != uid and world.api.pods[n].ready for n, uid in old.items()
        )

    until(world, restarted)
    assert gone == [f"{POOL}-1", f"{POOL}-0"]
    assert world.api.children["StatefulSet", POOL].restarted_at == "2026-01-01T00:00:00Z"
    world.settle()


def test_o15_a_cordon_with_evictions_is_one_drain(world: World) -> None:
    name = f"{POOL}-0"
    node = world.api.pods[name].node
    world.api.nodes[node] = replace(world.api.nodes[node], unschedulable=True)
    drains = set()
    deadline_ms = world.now_ms + 12_000
    uid = world.api.pods[name].uid
    while name in world.api.pods and world.api.pods[name].uid == uid:
        world.act()
        assert world.topology is not None
        record = world.topology.gateways[name]
        if record.drain is not None and record.uid == uid:
            drains.add(record.drain.id)
        world.delete_pod(name)  # again and again: the first one counts
        world.tick()
        assert world.now_ms <= deadline_ms
    assert len(drains) == 1
    world.settle()


def test_o16_a_roll_with_a_node_not_ready_goes_on_with_the_others_and_needs_no_spare_node() -> None:
    """As many gateways as nodes; one node is away the whole time: its gateway is lost, the others get the new version."""
    world = World(nodes=3, replicas=3, max_unavailable=2)
    world.settle()
    lost = world.api.pods[f"{POOL}-1"].node
    world.cut(lost)
    until(world, lambda: world.topology is not None and world.topology.gateways[f"{POOL}-1"].state == LOST)
    world.repool(version="2")

    def rolled() -> bool:
        wanted = world.api.children["StatefulSet", POOL].template_hash
        pods = [world.api.pods.get(f"{POOL}-{i}") for i in (0, 2)]
        return all(p is not None and p.ready and p.template_hash == wanted for p in pods)

    until(world, rolled, rounds=300)
    world.heal(lost)
    world.settle()


def test_o16_a_roll_goes_on_though_the_node_of_a_gateway_dies_that_is_leaving() -> None:
    """Its kubelet died while the last clients were moved: the pod is deleted and never goes. It counts as lost, and says so;
    its id stays its own."""
    world = World(nodes=4, replicas=3)
    world.settle()
    world.repool(workers=4)

    def leaving() -> list[str]:
        gateways = world.topology.gateways if world.topology is not None else {}
        pods = world.api.pods
        return [n for n, g in gateways.items() if g.state == LEAVING and n in pods and pods[n].deleting]

    for _ in range(100):
        world.act()
        if leaving():
            break
        world.tick()
    (gone,) = leaving()
    assert world.topology is not None
    worker_id = world.topology.gateways[gone].worker_id
    node = world.api.pods[gone].node
    world.cut(node)
    for other in [n for n, p in world.api.pods.items() if p.node == node and n != gone]:
        world.delete_pod(other, force=True)  # Kubernetes has them leave the node
    template = world.api.children["StatefulSet", POOL].template_hash
    others = [f"{POOL}-{i}" for i in range(3) if f"{POOL}-{i}" != gone]
    until(world, lambda: all(n in world.api.pods and world.api.pods[n].template_hash == template for n in others))
    assert condition(world.act(), "NodeLost")[0] == "True"
    assert world.topology.gateways[gone].worker_id == worker_id


def test_o16_a_roll_goes_on_when_the_lost_node_is_fenced_and_the_successor_has_no_node() -> None:
    """The pod on the lost node did not count as away, so the one that replaces it does not: no node is left for it. That is
    not our doing, as with a successor that waits for a cordoned node it is."""
    world = World(nodes=3, replicas=3)
    world.settle()
    lost = world.api.pods[f"{POOL}-1"].node
    world.cut(lost)
    until(world, lambda: world.topology is not None and world.topology.gateways[f"{POOL}-1"].state == LOST)
    world.fence(lost)
    until(world, lambda: (p := world.api.pods.get(f"{POOL}-1")) is not None and "taint" in p.unschedulable)
    world.repool(version="2")

    def rolled() -> bool:
        wanted = world.api.children["StatefulSet", POOL].template_hash
        pods = [world.api.pods.get(f"{POOL}-{i}") for i in (0, 2)]
        return all(p is not None and p.ready and p.template_hash == wanted for p in pods)

    until(world, rolled, rounds=300)
    world.heal(lost)
    world.settle()


@pytest.mark.parametrize(
    ("reasons", "left"),
    [
        ("3 node(s) didn't have free ports for the requested pod ports", False),
        ("1 node(s) had untolerated taint {node.kubernetes.io/unreachable: }, 2 node(s) didn't have free ports", False),
        ("1 node(s) had untolerated taint(s), 2 node(s) didn't have free ports for the requested pod ports", False),
        ("2 node(s) had untolerated taint(s), 1 node(s) didn't have free ports for the requested pod ports", True),
        ("1 node(s) were unschedulable, 2 node(s) didn't have free ports for the requested pod ports", True),
        ("1 Insufficient cpu, 2 node(s) didn't have free ports for the requested pod ports", True),
    ],
)
def test_a_successor_counts_as_away_unless_every_node_is_taken_or_lost(reasons: str, left: bool) -> None:
    """Of three nodes one is lost: one taint is explained by that, a second one may be of a node that we drained."""
    world = World(nodes=3, replicas=3)
    world.settle()
    world.cut(next(iter(world.api.nodes)))
    world.now_ms += 60_000
    assert world.topology is not None
    work = Work.on(world.snapshot(world.leader), world.topology)
    said = f"0/3 nodes are available: {reasons}. preemption: 0/3 nodes are available: 3 node(s) didn't have free ports."
    assert no_node_left(work, replace(world.api.pods[f"{POOL}-1"], unschedulable=said)) is not left


def test_o17_slots_of_a_lost_node_stay_with_their_shard(world: World) -> None:
    node = world.api.pods["demo-s1-0"].node
    assert world.topology is not None
    before = world.topology.slots
    world.cut(node)
    for _ in range(200):
        world.tick()
        plan = world.act()
    assert world.topology.slots == before
    lost = {c.type: c for c in plan.shard_status["demo-s1"].conditions}["NodeLost"]
    assert lost.status == "True"
    world.fence(node)
    world.heal(node)
    world.settle()
    assert [(r.first, r.last, r.shard) for r in world.topology.slots] == [(r.first, r.last, r.shard) for r in before]


def test_o23_no_field_names_another_namespace_and_no_rendered_owner_crosses() -> None:
    """References are names; an owner reference has no namespace, so it must lie in its object's own."""

    def fields(schema: object, path: str = "") -> list[str]:
        found: list[str] = []
        if isinstance(schema, dict):
            for key, below in (schema.get("properties") or {}).items():
                found += [f"{path}.{key}", *fields(below, f"{path}.{key}")]
            for key in ("items", "additionalProperties"):
                found += fields(schema.get(key), f"{path}[]")
        return found

    seen = 0
    for file in sorted((ROOT / "crds").glob("*.yaml")):
        for document in yaml.safe_load_all(file.read_text()):
            for version in document["spec"]["versions"]:
                names = fields(version["schema"]["openAPIV3Schema"])
                seen += len(names)
                assert [n for n in names if "namespace" in n.lower()] == []
                assert document["spec"]["scope"] == "Namespaced"
    assert seen > 100
    for file in sorted((ROOT / "operator" / "tests" / "golden").glob("*.yaml")):
        rendered = [o for o in yaml.safe_load_all(file.read_text()) if o]
        assert {o["metadata"]["namespace"] for o in rendered} == {"im"}
        assert set(re.findall(r"namespace: (\S+)", file.read_text())) == {"im"}
        assert all(o["metadata"]["ownerReferences"] for o in rendered)


def test_o25_a_deadline_that_a_full_gateway_cannot_keep_is_warned_of(world: World) -> None:
    """capacity ÷ pace against the deadline; what kubelet waits is that and a margin of 60 s."""
    warned = condition(world.plan(), "ConfigurationWarning")
    assert (warned[0], warned[1]) == ("True", "DrainTooSlow")
    assert "50000 s at 1 per second" in warned[2]
    spec = world.api.pools[POOL].spec
    world.repool(
        capacity=replace(spec.capacity, connections=10_000),
        drain=replace(spec.drain, pace_per_second=200, deadline_seconds=50),
    )
    assert condition(world.plan(), "ConfigurationWarning")[0] == "False"
    world.repool(drain=replace(world.api.pools[POOL].spec.drain, deadline_seconds=49))
    assert condition(world.plan(), "ConfigurationWarning")[0] == "True"
