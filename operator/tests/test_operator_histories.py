"""Random histories: people, faults and two operators at work on the small world; the invariants hold after every event, and
when the faults end the cluster becomes what its resources say, and quiet.

PLATO_PLANNER_HISTORIES=2000 runs that many histories of 60 events; the default is a small number of shorter ones.
"""

from __future__ import annotations

import os
from dataclasses import replace

from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from plato.topology.record import Topology
from plato_operator.core.orders import Plan
from world import POOL, World

HISTORIES = int(os.environ.get("PLATO_PLANNER_HISTORIES", "0"))


class Histories(RuleBasedStateMachine):
    """One cluster and whatever happens to it."""

    def __init__(self) -> None:
        super().__init__()
        self.world = World()
        self.frozen: tuple[str, Plan] | None = None
        self.backup: Topology | None = None

    @initialize(replicas=st.integers(1, 4), most=st.integers(1, 2), settled=st.booleans())
    def begin(self, replicas: int, most: int, settled: bool) -> None:
        self.world = World(replicas=replicas, max_unavailable=most)
        if settled:
            self.world.settle()
        else:
            self.world.act()
            self.world.act()

    @rule(stale=st.integers(0, 4), stop_after=st.sampled_from([0, 1, 2, 3, 99, 99, 99]))
    def one_pass(self, stale: int, stop_after: int) -> None:
        self.world.act(stale=stale, stop_after=stop_after)

    @rule(rounds=st.integers(1, 8))
    def several_passes(self, rounds: int) -> None:
        for _ in range(rounds):
            self.world.act()
            self.world.check()
            self.world.tick()
            self.world.check()

    @rule(seconds=st.sampled_from([1, 2, 5, 20]))
    def time(self, seconds: int) -> None:
        for _ in range(seconds):
            self.world.tick()
            self.world.check()

    @precondition(lambda self: POOL in self.world.api.pools)
    @rule(replicas=st.integers(0, 4))
    def scale(self, replicas: int) -> None:
        self.world.repool(replicas=replicas)

    @rule(version=st.sampled_from(["1", "2", "3"]))
    def roll(self, version: str) -> None:
        self.world.respec(version=version)

    @rule(shards=st.integers(1, 3))
    def reshard(self, shards: int) -> None:
        self.world.respec(state=replace(self.world.cluster.spec.state, shards=shards))

    @rule(data=st.data(), weight=st.sampled_from([0, 50, 100]))
    def weigh(self, data: st.DataObject, weight: int) -> None:
        shards = self.world.api.shards
        if shards:
            name = data.draw(st.sampled_from(sorted(shards)))
            shards[name] = replace(shards[name], spec=replace(shards[name].spec, weight=weight))

    @rule(works=st.booleans())
    def migration(self, works: bool) -> None:
        self.world.migrates = works

    @rule(paused=st.booleans())
    def pause(self, paused: bool) -> None:
        self.world.respec(paused=paused)

    @rule(data=st.data(), unschedulable=st.booleans())
    def cordon(self, data: st.DataObject, unschedulable: bool) -> None:
        nodes = self.world.api.nodes
        name = data.draw(st.sampled_from(sorted(nodes)))
        nodes[name] = replace(nodes[name], unschedulable=unschedulable)

    @rule(data=st.data(), how=st.sampled_from(["cut", "heal", "fence"]))
    def lose_node(self, data: st.DataObject, how: str) -> None:
        world = self.world
        if how == "cut" and len(world.cut_off) < 2:
            up = [n for n in sorted(world.api.nodes) if n not in world.cut_off]
            world.cut(data.draw(st.sampled_from(up)))
        elif how != "cut" and world.cut_off:
            node = data.draw(st.sampled_from(sorted(world.cut_off)))
            if how == "fence":
                world.fence(node)
            world.heal(node)

    @rule(data=st.data(), force=st.booleans())
    def delete_pod(self, data: st.DataObject, force: bool) -> None:
        if self.world.api.pods:
            self.world.delete_pod(data.draw(st.sampled_from(sorted(self.world.api.pods))), force=force)

    @rule(data=st.data(), silent=st.booleans())
    def silence(self, data: st.DataObject, silent: bool) -> None:
        if silent and self.world.api.pods:
            self.world.silent.add(data.draw(st.sampled_from(sorted(self.world.api.pods))))
        else:
            self.world.silent.clear()

    @rule(data=st.data(), asked=st.booleans())
    def drain_by_hand(self, data: st.DataObject, asked: bool) -> None:
        pods = self.world.api.pods
        gateways = sorted(n for n, p in pods.items() if p.component == "gateway")
        if gateways:
            name = data.draw(st.sampled_from(gateways))
            pods[name] = replace(pods[name], drain_asked=asked)

    @rule()
    def break_the_present_revision(self) -> None:
        sts = self.world.api.children.get(("StatefulSet", POOL))
        if sts is not None:
            self.world.bad_hashes.add(sts.template_hash)

    @rule(stale=st.integers(0, 4))
    def freeze_the_leader(self, stale: int) -> None:
        """A pass is planned and the process stops; another operator takes the lease."""
        self.frozen = (self.world.leader, self.world.plan(stale=stale))
        self.world.other_leader()

    @precondition(lambda self: self.frozen is not None)
    @rule()
    def wake_the_old_leader(self) -> None:
        """What it had planned meets a newer record, or a lease that has run out."""
        assert self.frozen is not None
        operator, plan = self.frozen
        self.frozen = None
        world = self.world
        claimed = world.topology is not None and world.topology.writer == world.leader
        if operator != world.leader and claimed:
            before = world.version
            world.carry_out(operator, plan)
            assert world.version == before, "the write of an old leader was taken"

    @precondition(lambda self: self.world.topology is not None)
    @rule()
    def lose_the_record(self) -> None:
        self.world.lose_record()

    @precondition(lambda self: self.world.topology is not None)
    @rule(restore=st.booleans())
    def back_up_the_record(self, restore: bool) -> None:
        world = self.world
        if not restore or self.backup is None:
            self.backup = world.topology
        else:
            world.lose_record(replace(self.backup, writer=world.leader))

    @rule(first=st.integers(0, 1023), number=st.sampled_from([1, 40, 1024]), ahead=st.sampled_from([0, 1, 90_000]))
    def somebody_else_takes_slots(self, first: int, number: int, ahead: int) -> None:
        """In our store, and dies."""
        self.world.outbid(range(first, min(1024, first + number)), ahead)

    @invariant()
    def all_holds(self) -> None:
        self.world.check()

    def teardown(self) -> None:
        """The faults end; the cluster gets what it asks for."""
        world = self.world
        for node in list(world.cut_off):
            world.heal(node)
        for name, machine in world.api.nodes.items():
            world.api.nodes[name] = replace(machine, unschedulable=False)
        for name, pod in world.api.pods.items():
            world.api.pods[name] = replace(pod, drain_asked=False)
        world.silent.clear()
        world.bad_hashes.clear()
        world.migrates = True
        weights = [s.spec.weight for s in world.api.shards.values()]
        for name, shard in world.api.shards.items():
            world.api.shards[name] = replace(
                shard, spec=replace(shard.spec, weight=100 if 0 in weights else shard.spec.weight)
            )
        world.respec(paused=False)
        world.settle()
        plan = world.act()
        assert (plan.applies, plan.write, plan.act) == ((), None, None)
        assert plan.cluster_status is not None
        ready = plan.cluster_status.conditions[0]
        assert (ready.type, ready.status) == ("Ready", "True"), ready


Histories.TestCase.settings = settings(
    max_examples=HISTORIES or 30,
    stateful_step_count=60 if HISTORIES else 30,
    deadline=None,
    phases=(Phase.explicit, Phase.generate, *((Phase.shrink,) if HISTORIES else ())),  # shrinking takes minutes
    suppress_health_check=list(HealthCheck),
    print_blob=True,
)
TestHistories = Histories.TestCase
