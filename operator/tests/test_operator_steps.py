"""The steps of a pass, one case each, on the small world."""

from __future__ import annotations

from dataclasses import replace

import pytest
from plato.topology.record import DRAINING, LEAVING, SERVING, Rest, Topology, even_ranges
from plato_operator.core.orders import DeletePod, Lower
from plato_operator.core.plan import one_pass
from plato_operator.core.snapshot import Memory
from world import POOL, World
from world_parts import Process


@pytest.fixture
def world() -> World:
    made = World()
    made.settle()
    return made


def gateway(world: World, ordinal: int) -> str:
    assert world.topology is not None
    return world.topology.gateways[f"{POOL}-{ordinal}"].state


def record(world: World) -> Topology:
    assert world.topology is not None
    return world.topology


def until(world: World, met: object, rounds: int = 120) -> None:
    for _ in range(rounds):
        if met():  # type: ignore[operator]  # a function
            return
        world.act()
        world.check()
        world.tick()
        world.check()
    raise AssertionError("did not come about")


def test_a_new_cluster_comes_up_and_is_quiet(world: World) -> None:
    assert world.topology is not None
    assert {n: g.homes for n, g in world.topology.gateways.items()}.keys() == {f"{POOL}-0", f"{POOL}-1"}
    assert {h for g in world.topology.gateways.values() for h in g.homes} == {"demo-s0", "demo-s1"}
    assert len(world.topology.msgs) == 2
    for _ in range(20):
        world.tick(3)
        plan = world.act()
        assert (plan.applies, plan.write, plan.act) == ((), None, None)
    assert plan.cluster_status is not None
    ready = plan.cluster_status.conditions[0]
    assert (ready.type, ready.status, plan.cluster_status.phase) == ("Ready", "True", "Ready")
    assert plan.requeue_ms == 10_000


def test_the_first_write_is_the_record_and_nothing_else() -> None:
    world = World()
    plan = world.plan()
    assert plan.applies == ()
    assert plan.write is not None
    assert plan.write.version == ""
    assert [(r.first, r.last, r.shard) for r in plan.write.topology.slots] == [
        (0, 511, "demo-s0"),
        (512, 1023, "demo-s1"),
    ]


def test_a_new_leader_claims_before_anything_else(world: World) -> None:
    world.repool(replicas=3)
    world.leader = "op-b"
    plan = world.plan()
    assert plan.applies == ()
    assert plan.act is None
    assert plan.write is not None
    assert plan.write.topology == replace(
        world.topology or pytest.fail("no record"), writer="op-b", epoch=plan.write.topology.epoch
    )


@pytest.mark.planner
def test_o05_two_operators_with_leases_of_their_own_do_not_claim_by_turns(world: World) -> None:
    """Two releases that watch one namespace: the record is not written ten times a second, and an event says so."""
    assert world.topology is not None
    memories = {"op-a": Memory(), "op-b": Memory()}
    writes, told = 0, set()
    for _ in range(120):
        for me, memory in memories.items():
            plan = one_pass(replace(world.snapshot(me), memory=memory))
            memories[me] = plan.memory
            told |= {e.reason for e in plan.events}
            if plan.write is not None:
                writes, world.topology = writes + 1, plan.write.topology
        world.now_ms += 1000
    assert writes <= 6
    assert told == {"AnotherOperator"}


@pytest.mark.planner
def test_o02_a_pending_tail_that_never_registered_goes_at_once(world: World) -> None:
    for node in list(world.api.nodes):
        world.api.nodes[node] = replace(world.api.nodes[node], unschedulable=True)
    world.repool(replicas=3, drain=replace(world.first_pool.drain, on_cordon="Ignore"))
    until(world, lambda: f"{POOL}-2" in world.api.pods)
    world.repool(replicas=2)
    plan = world.act()
    assert isinstance(plan.act, Lower)
    assert plan.act.replicas == 2


def test_scale_down_drains_the_tail_then_lowers(world: World) -> None:
    world.repool(replicas=1)
    world.act()
    assert (gateway(world, 1), gateway(world, 0)) == (DRAINING, SERVING)
    until(world, lambda: gateway(world, 1) == LEAVING)
    assert world.processes[f"{POOL}-1"].conns == 0
    plan = world.act()
    assert isinstance(plan.act, Lower)
    held = world.topology.gateways[f"{POOL}-1"].worker_id if world.topology else -1
    until(world, lambda: f"{POOL}-1" not in (world.topology.gateways if world.topology else {}))
    assert world.topology is not None
    assert world.topology.resting[held].until_ms >= world.now_ms + 10_000


@pytest.mark.planner
def test_o03_a_silent_gateway_is_forced_after_the_deadline_and_the_status_says_why(world: World) -> None:
    world.silent.add(f"{POOL}-1")
    world.repool(replicas=1)
    world.act()
    world.tick()
    plan = world.act()
    blocked = {c.type: c for c in plan.pool_status[POOL].conditions}["DrainBlocked"]
    assert (blocked.status, blocked.reason) == ("True", "ReportTimeout")
    until(world, lambda: "DrainForced" in world.events)
    assert gateway(world, 1) == LEAVING


def test_a_drain_nobody_wants_any_more_is_cancelled_before_leaving(world: World) -> None:
    world.repool(replicas=1)
    world.act()
    assert gateway(world, 1) == DRAINING
    world.repool(replicas=2)
    world.act()
    assert gateway(world, 1) == SERVING
    assert world.events[-1] == "DrainCancelled"
    world.settle()


def test_a_raise_after_leaving_finishes_the_exit_and_the_ordinal_returns(world: World) -> None:
    world.repool(replicas=1)
    until(world, lambda: gateway(world, 1) == LEAVING)
    uid = world.api.pods[f"{POOL}-1"].uid
    world.repool(replicas=2)
    plan = world.act()
    assert isinstance(plan.act, DeletePod)
    world.settle()
    assert world.api.pods[f"{POOL}-1"].uid != uid


def test_rolling_goes_from_the_highest_ordinal_and_one_at_a_time(world: World) -> None:
    world.respec(version="2")
    seen: list[str] = []
    for _ in range(200):
        plan = world.act()
        if isinstance(plan.act, DeletePod):
            seen.append(plan.act.name)
        world.check()
        world.tick()
        world.check()
    world.settle()
    assert seen == ["demo-s0-0", "demo-s1-0", f"{POOL}-1", f"{POOL}-0"]


@pytest.mark.planner
def test_o01_a_broken_revision_is_replaced_without_a_hand(world: World) -> None:
    world.respec(version="bad")
    old = world.api.children[("StatefulSet", "demo-s0")].template_hash
    until(world, lambda: world.api.children[("StatefulSet", "demo-s0")].template_hash != old)
    world.bad_hashes = {
        world.api.children[("StatefulSet", name)].template_hash for name in ("demo-s0", "demo-s1", POOL)
    }
    good = [p.uid for p in world.api.pods.values() if p.component == "gateway"]
    until(world, lambda: any(not p.running and p.component == "state" for p in world.api.pods.values()))
    for _ in range(30):
        world.act()
        world.tick()
    # The broken shard holds the roll: gateways were not touched.
    assert [p.uid for p in world.api.pods.values() if p.component == "gateway"] == good
    world.respec(version="1")
    world.settle()
    assert [p.uid for p in world.api.pods.values() if p.component == "gateway"] == good
    assert "BrokenRevisionRepaired" in world.events


@pytest.mark.planner
def test_o01_a_broken_gateway_revision_holds_and_is_repaired(world: World) -> None:
    world.repool(version="bad")
    world.act()
    world.bad_hashes = {world.api.children[("StatefulSet", POOL)].template_hash}
    until(world, lambda: not world.api.pods.get(f"{POOL}-1") or not world.api.pods[f"{POOL}-1"].running)
    healthy = world.api.pods[f"{POOL}-0"].uid
    for _ in range(60):
        world.act()
        world.check()
        world.tick()
    assert world.api.pods[f"{POOL}-0"].uid == healthy
    world.repool(version="")
    until(world, lambda: "BrokenRevisionRepaired" in world.events)
    degraded = {c.type: c for c in world.plan().pool_status[POOL].conditions}["Degraded"]
    assert (degraded.status, degraded.reason) == ("True", "BrokenRevisionRepaired")
    world.settle()
    assert world.api.pods[f"{POOL}-0"].uid == healthy


def test_a_cordon_drains_and_an_uncordon_cancels(world: World) -> None:
    node = world.api.pods[f"{POOL}-0"].node
    world.api.nodes[node] = replace(world.api.nodes[node], unschedulable=True)
    world.act()
    assert gateway(world, 0) == DRAINING
    world.api.nodes[node] = replace(world.api.nodes[node], unschedulable=False)
    world.act()
    assert gateway(world, 0) == SERVING


@pytest.mark.planner
def test_o15_an_eviction_is_one_drain_recorded_at_once(world: World) -> None:
    world.delete_pod(f"{POOL}-0", grace_s=40)
    world.act()
    assert world.topology is not None
    drain = world.topology.gateways[f"{POOL}-0"].drain
    assert drain is not None
    assert drain.reason == "Evicted"
    assert drain.deadline_ms <= world.now_ms + 30_000
    world.tick()
    world.act()
    assert world.topology.gateways[f"{POOL}-0"].drain == drain
    world.settle()


def test_the_only_gateway_of_two_is_held_until_another_serves(world: World) -> None:
    world.silent.add(f"{POOL}-1")
    world.bad_hashes.add(world.api.children[("StatefulSet", POOL)].template_hash)
    world.delete_pod(f"{POOL}-1", force=True)
    until(world, lambda: f"{POOL}-1" in world.api.pods)
    world.now_ms += 700_000  # so old that its state is no successor's any more
    world.api.pods[f"{POOL}-0"] = replace(world.api.pods[f"{POOL}-0"], drain_asked=True)
    plan = world.act()
    blocked = {c.type: c for c in plan.pool_status[POOL].conditions}["DrainBlocked"]
    assert (blocked.status, blocked.reason) == ("True", "NoTarget")
    assert gateway(world, 0) == SERVING


def test_a_manual_drain_replaces_the_pod(world: World) -> None:
    old = world.api.pods[f"{POOL}-0"]
    world.api.pods[f"{POOL}-0"] = replace(old, drain_asked=True)
    until(world, lambda: f"{POOL}-0" in world.api.pods and world.api.pods[f"{POOL}-0"].uid != old.uid)
    world.settle()


@pytest.mark.planner
def test_o17_a_lost_node_keeps_its_ids_until_the_pod_is_gone(world: World) -> None:
    node = world.api.pods[f"{POOL}-0"].node
    assert world.topology is not None
    worker_id = world.topology.gateways[f"{POOL}-0"].worker_id
    world.cut(node)
    world.tick(11)
    plan = world.act()
    assert gateway(world, 0) == "lost"
    assert {c.type: c.status for c in plan.pool_status[POOL].conditions}["NodeLost"] == "True"
    world.delete_pod(f"{POOL}-0")
    for _ in range(200):
        world.tick()
        world.act()
    assert world.topology.gateways[f"{POOL}-0"].worker_id == worker_id
    world.fence(node)
    world.act()
    assert world.topology.resting[worker_id].until_ms == world.now_ms + 18_000
    world.settle()
    assert world.topology.gateways[f"{POOL}-0"].worker_id != worker_id


def test_a_node_that_comes_back_serves_again_under_its_id(world: World) -> None:
    node = world.api.pods[f"{POOL}-0"].node
    assert world.topology is not None
    before = world.topology.gateways[f"{POOL}-0"].worker_id
    world.cut(node)
    world.tick(11)
    world.act()
    world.heal(node)
    world.settle()
    assert world.topology.gateways[f"{POOL}-0"].worker_id == before


def test_a_shard_is_added_and_removed_by_moves(world: World) -> None:
    world.respec(state=replace(world.cluster.spec.state, shards=3))
    world.settle()
    assert world.topology is not None
    assert sorted(len(world.topology.slots_of(f"demo-s{i}")) for i in range(3)) == [341, 341, 342]
    assert {h for g in world.topology.gateways.values() for h in g.homes} == {"demo-s0", "demo-s1", "demo-s2"}
    world.respec(state=replace(world.cluster.spec.state, shards=2))
    until(world, lambda: "demo-s2" not in world.api.shards, rounds=300)
    world.settle()
    assert set(world.topology.shards) == {"demo-s0", "demo-s1"}
    assert "demo-s2-0" not in world.api.pods


def test_the_record_says_where_each_shard_is_and_follows_it(world: World) -> None:
    assert world.topology is not None
    assert {shard.ip for shard in world.topology.shards.values()} == {"10.0.0.1"}
    pod = world.api.pods["demo-s0-0"]
    world.api.pods["demo-s0-0"] = replace(pod, ip="10.0.0.9")
    world.settle()
    assert world.topology is not None
    assert world.topology.shards["demo-s0"].ip == "10.0.0.9"
    assert world.topology.shards["demo-s0"].at == "10.0.0.9:8902"


def test_a_pass_that_is_a_little_early_opens_the_next_move_all_the_same(world: World) -> None:
    world.respec(state=replace(world.cluster.spec.state, shards=3))
    until(world, lambda: world.topology is not None and world.topology.move is not None)
    moves = set()
    for early_ms in (0, 60) * 5:
        world.tick(1)
        world.now_ms -= early_ms
        world.act()
        world.now_ms += early_ms
        assert world.topology is not None
        assert world.topology.move is not None
        moves.add(world.topology.move.id)
    assert len(moves) == 10


def test_a_hand_deleted_shard_returns_with_its_name_and_slots(world: World) -> None:
    assert world.topology is not None
    before = world.topology.slots
    world.api.shards["demo-s1"] = replace(world.api.shards["demo-s1"], deleting=True)
    world.tick(3)
    world.settle()
    assert world.topology.slots == before
    assert "demo-s1" in world.api.shards


def test_a_move_whose_target_dies_is_undone_once_and_closed(world: World) -> None:
    world.api.shards["demo-s1"] = replace(
        world.api.shards["demo-s1"], spec=replace(world.api.shards["demo-s1"].spec, weight=50)
    )  # fmt: skip
    world.api.shards["demo-s0"] = replace(
        world.api.shards["demo-s0"], spec=replace(world.api.shards["demo-s0"].spec, weight=100)
    )
    until(world, lambda: world.topology is not None and world.topology.move is not None)
    assert world.topology is not None
    move = world.topology.move
    assert move is not None
    assert (move.source, move.target) == ("demo-s1", "demo-s0")
    world.bad_hashes.add(world.api.pods["demo-s0-0"].template_hash)
    world.delete_pod("demo-s0-0", force=True)
    # demo-s0 never saw its new slots.
    until(world, lambda: "MoveUndone" in world.events)
    until(world, lambda: world.topology is not None and world.topology.move is None)
    assert {world.topology.owner(first).shard for first, _ in move.slots} == {"demo-s1"}


def test_take_over_gives_a_lost_shards_slots_to_the_others_but_only_if_asked(world: World) -> None:
    assert world.topology is not None
    node = world.api.pods["demo-s1-0"].node
    world.api.pods["demo-s0-0"] = replace(world.api.pods["demo-s0-0"], node="elsewhere")
    world.processes["demo-s0-0"].node = "elsewhere"
    world.api.nodes["elsewhere"] = replace(world.api.nodes[node], name="elsewhere")
    world.cut(node)
    world.tick(70)
    world.act()
    assert len(world.topology.slots_of("demo-s1")) == 512
    world.respec(state=replace(world.cluster.spec.state, on_node_loss="TakeOver"))
    world.act()
    assert world.topology.slots_of("demo-s1") == {}
    assert "SlotsTakenOver" in world.events


def test_paused_admits_and_does_nothing_else(world: World) -> None:
    world.respec(paused=True, version="2")
    world.repool(replicas=3)
    old = world.api.pods[f"{POOL}-0"].uid
    world.delete_pod(f"{POOL}-0", force=True)
    until(world, lambda: f"{POOL}-0" in world.api.pods and world.api.pods[f"{POOL}-0"].ready)
    assert world.api.pods[f"{POOL}-0"].uid != old
    assert f"{POOL}-2" not in world.api.pods
    plan = world.act()
    assert plan.act is None
    assert plan.cluster_status is not None
    assert plan.cluster_status.phase == "Paused"


def test_a_lost_record_is_rebuilt_as_the_processes_tell(world: World) -> None:
    assert world.topology is not None
    before = world.topology
    world.topology = None
    world.settle()
    world.topology = record(world)
    assert world.topology.epoch > before.epoch
    assert [(r.first, r.last, r.shard) for r in world.topology.slots] == [
        (r.first, r.last, r.shard) for r in before.slots
    ]
    assert {n: g.worker_id for n, g in world.topology.gateways.items()} == {
        n: g.worker_id for n, g in before.gateways.items()
    }
    assert "TopologyRebuilt" in world.events


def test_a_rebuild_waits_for_silent_processes_but_not_for_ever(world: World) -> None:
    world.silent.add("demo-s1-0")
    world.topology = None
    assert world.act().write is None
    world.tick(39)
    assert world.act().write is None
    world.tick(2)
    plan = world.act()
    assert plan.write is not None
    assert [(r.first, r.last, r.shard) for r in plan.write.topology.slots] == [
        (0, 511, "demo-s0"),
        (512, 1023, "demo-s1"),
    ]


def test_a_record_that_was_set_back_rises_above_what_was_seen(world: World) -> None:
    assert world.topology is not None
    seen = world.topology.epoch
    world.topology = replace(world.topology, epoch=seen - 1000, slots=even_ranges(["demo-s1", "demo-s0"], 5))
    world.settle()
    assert world.topology.epoch > seen
    assert world.topology.owner(0).shard == "demo-s0"


def test_a_stale_cache_retires_nobody_and_turns_no_shard_back(world: World) -> None:
    world.delete_pod("demo-s0-0", force=True)
    world.delete_pod(f"{POOL}-0", force=True)
    world.tick()
    world.settle()
    assert world.topology is not None
    shard, pods = world.topology.shards["demo-s0"], world.topology.gateways
    old = world.api.copy()
    old.pods.pop(f"{POOL}-1")  # a cache that has not seen it
    old.pods["demo-s0-0"] = replace(old.pods["demo-s0-0"], uid="before")
    world.history = [old, world.api.copy()]
    world.act(stale=1)
    assert world.topology.shards["demo-s0"] == shard
    assert world.topology.gateways == pods


def test_an_address_of_ip6_is_bracketed_before_its_port(world: World) -> None:
    """Else it reads as a longer address without a port."""
    snap = world.snapshot(world.leader)
    topology = replace(record(world), msgs={})
    pods = {n: replace(p, ip="fd00::5") if p.component == "msg" else p for n, p in snap.pods.items()}
    plan = one_pass(replace(snap, topology=topology, pods=pods))
    assert plan.write is not None
    assert {m.addr for m in plan.write.topology.msgs.values()} == {"[fd00::5]:8907"}


def test_another_public_address_reaches_clients_by_the_record(world: World) -> None:
    """spec.publicAddress or a node's annotation was changed: no pod rolls for it. One that is not known any more stays."""
    snap = world.snapshot(world.leader)
    name = f"{POOL}-0"
    at = snap.pods[name].endpoint
    assert at is not None
    for ip, told in (("192.0.2.7", "192.0.2.7"), ("", at.ip)):
        pods = {**snap.pods, name: replace(snap.pods[name], endpoint=replace(at, ip=ip))}
        plan = one_pass(replace(snap, pods=pods))
        written = plan.write.topology if plan.write is not None else record(world)
        assert written.gateways[name].ip == told
        assert (plan.act, plan.applies) == (None, ())


@pytest.mark.planner
def test_o04_an_evicted_pod_that_stays_as_failed_leaves_the_record(world: World) -> None:
    """A node under pressure evicts a msg pod, and nobody deletes the object: its id would be held for ever, its address
    asked by every shard. Its id rests first, and its version is nobody's."""
    snap = world.snapshot(world.leader)
    name, msg = next(iter(record(world).msgs.items()))
    pods = {**snap.pods, name: replace(snap.pods[name], phase="Failed", running=False, ready=False)}
    plan = one_pass(replace(snap, pods=pods))
    assert plan.write is not None
    written = plan.write.topology
    assert name not in written.msgs
    assert written.resting[msg.worker_id].uid == msg.uid
    old = {**pods, name: replace(pods[name], version="0")}
    again = one_pass(replace(snap, pods=old, topology=written))
    assert again.cluster_status is not None
    assert again.cluster_status.version == snap.cluster.spec.version
    assert again.write is None
    assert again.applies == ()


@pytest.mark.planner
def test_o04_no_id_returns_inside_its_rest_and_exhaustion_waits(world: World) -> None:
    assert world.topology is not None
    held = {g.worker_id for g in world.topology.gateways.values()} | {m.worker_id for m in world.topology.msgs.values()}
    until_ms = world.now_ms + 100_000
    resting = {i: Rest("gone", until_ms) for i in range(1024) if i not in held}
    world.topology = replace(world.topology, resting=resting)
    world.repool(replicas=3)
    for _ in range(20):
        plan = world.act()
        world.tick()
    assert f"{POOL}-2" not in world.topology.gateways
    assert plan.cluster_status is not None
    ids = {c.type: c for c in plan.cluster_status.conditions}["WorkerIdsAvailable"]
    assert (ids.status, ids.reason) == ("False", "Exhausted")
    world.now_ms = until_ms
    world.settle()


def test_a_contested_id_rests_and_the_newcomer_gets_another(world: World) -> None:
    world.repool(replicas=3)
    until(world, lambda: world.topology is not None and f"{POOL}-2" in world.topology.gateways)
    assert world.topology is not None
    contested = world.topology.gateways[f"{POOL}-2"].worker_id
    world.reservations[contested] = "someone"
    world.ghosts.append(
        Process("someone", "x", "gateway", POOL, "n0", worker_id=contested, gone_by_ms=world.now_ms + 10**9)
    )
    world.settle()
    assert world.topology.gateways[f"{POOL}-2"].worker_id != contested
    assert contested in world.topology.resting


def test_a_single_gateway_is_still_rolled() -> None:
    world = World(replicas=1)
    world.settle()
    old = world.api.pods[f"{POOL}-0"].uid
    world.respec(version="2")
    world.settle()
    assert world.api.pods[f"{POOL}-0"].uid != old


@pytest.mark.planner
def test_o20_a_drain_deadline_rolls_nothing(world: World) -> None:
    uids = {n: p.uid for n, p in world.api.pods.items()}
    world.repool(drain=replace(world.api.pools[POOL].spec.drain, deadline_seconds=20, pace_per_second=7))
    world.settle()
    assert {n: p.uid for n, p in world.api.pods.items()} == uids


@pytest.mark.planner
def test_o16_more_replicas_than_nodes_says_so_and_still_rolls() -> None:
    world = World(nodes=2, replicas=3)
    until(world, lambda: f"{POOL}-2" in world.api.pods and world.api.pods[f"{POOL}-2"].unschedulable != "")
    until(world, lambda: sum(p.ready for p in world.api.pods.values() if p.component == "gateway") == 2)
    stuck = {c.type: c for c in world.plan().pool_status[POOL].conditions}["Unschedulable"]
    assert stuck.status == "True"
    assert "8900" in stuck.message
    assert "2 nodes" in stuck.message
    world.respec(version="2")
    until(
        world,
        lambda: all(
            p.template_hash == world.api.children[("StatefulSet", POOL)].template_hash
            for p in world.api.pods.values()
            if p.component == "gateway"
        ),
        rounds=300,
    )


def test_a_broken_pod_is_not_replaced_while_it_may_have_clients(world: World) -> None:
    snap, name = world.snapshot(world.leader), f"{POOL}-1"
    old = replace(snap.pods[name], ready=False, template_hash="old")
    broken = replace(snap, pods={**snap.pods, name: old})
    silent = replace(broken, reports={n: r for n, r in snap.reports.items() if n != name})
    empty = replace(broken, reports={**snap.reports, name: replace(snap.reports[name], connections=0)})
    stopped = replace(silent, pods={**snap.pods, name: replace(old, running=False)})
    assert [one_pass(s).act for s in (broken, silent)] == [None, None]
    for plan in (one_pass(empty), one_pass(stopped)):
        assert isinstance(plan.act, DeletePod)
        assert plan.act.uid == old.uid


def test_scale_to_zero_goes_on_when_a_lower_ordinal_leaves_first() -> None:
    world = World(replicas=3)
    world.settle()
    world.api.pods[f"{POOL}-0"] = replace(world.api.pods[f"{POOL}-0"], drain_asked=True)
    until(world, lambda: gateway(world, 0) == DRAINING)
    world.repool(replicas=0)
    world.settle()
    assert world.api.children[("StatefulSet", POOL)].replicas == 0
