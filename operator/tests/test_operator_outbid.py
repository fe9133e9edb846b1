"""Slots whose fences in the store are newer than the record: assigned anew above them, by no more than it takes, and never
against one who lives.
"""

from __future__ import annotations

import pytest
from plato.topology.record import Topology
from world import World


def epochs(topology: Topology | None) -> list[int]:
    """The epoch of each slot."""
    assert topology is not None
    return [topology.owner(slot).epoch for slot in range(1024)]


def told(world: World, type_: str) -> tuple[str, str, str]:
    """(status, reason, message) of a condition of the cluster."""
    plan = world.plan()
    assert plan.cluster_status is not None
    return next((c.status, c.reason, c.message) for c in plan.cluster_status.conditions if c.type == type_)


@pytest.fixture
def world() -> World:
    """A cluster that serves."""
    made = World()
    made.settle()
    return made


def test_a_record_lost_with_every_shard_and_rebuilt_by_a_clock_that_is_behind_converges(world: World) -> None:
    """Nobody is left to report an epoch, and the store has fences of an hour ahead."""
    world.lose_record()
    world.outbid(range(1024), 3_600)
    for name in list(world.api.pods):
        world.delete_pod(name, force=True)
    world.settle()
    assert min(epochs(world.topology)) > max(world.fences.values()) - 1
    assert "FencesOutdone" in world.events
    before = world.version
    world.tick(30)
    world.act()
    assert world.version == before, "once is enough"


def test_slots_that_another_one_took_and_left_come_back_and_no_other_is_touched(world: World) -> None:
    before = epochs(world.topology)
    world.outbid(range(100, 140), 500)
    world.tick()
    status, reason, words = told(world, "SlotsAcquired")
    assert (status, reason) == ("False", "Outbid")
    assert "40 of them have a fence in the store that is newer than the topology" in words
    assert told(world, "Ready")[1] == "SlotsMissing"
    world.settle()
    after = epochs(world.topology)
    assert [s for s in range(1024) if after[s] != before[s]] == list(range(100, 140))
    assert told(world, "SlotsAcquired")[:2] == ("True", "AllAcquired")


def test_nothing_is_written_against_one_who_lives_and_the_condition_says_that_he_does(world: World) -> None:
    """Two clusters over one store would raise their epochs against each other for ever."""
    world.outbid(range(1024), 500, lives=True)
    before = world.version
    for _ in range(60):
        world.act()
        world.tick()
    assert world.version == before
    assert "another cluster uses this store and key prefix" in told(world, "Ready")[2]
    world.rivals.clear()
    world.settle()


def test_one_shard_of_another_cluster_that_is_away_costs_it_no_slot_of_those_that_live(world: World) -> None:
    """Its fences that nobody proves may be the newest ones; what lives behind older ones stays with whom it is."""
    before = epochs(world.topology)
    world.outbid(range(256), 500, lives=True)
    world.outbid(range(256, 1024), 900)
    for _ in range(30):
        world.act()
        world.tick()
    after = epochs(world.topology)
    assert after[:256] == before[:256]
    assert min(after[256:]) > max(before)
    world.rivals.clear()
    world.settle()


def test_a_report_that_stands_for_an_earlier_assignment_changes_nothing(world: World) -> None:
    """A shard that is behind sees a greater fence wherever its slots went on to others, or were assigned anew."""
    world.outbid(range(10), 500)
    world.tick()
    world.act()
    version, written = world.version, world.topology
    for _ in range(3):
        world.act()  # no time passes: the shards have not read it
    assert (world.version, world.topology) == (version, written)
