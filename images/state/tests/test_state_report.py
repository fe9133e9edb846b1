"""What a shard's /v1/report says of its slots, and which record that stands for."""

from __future__ import annotations

from plato.topology.record import SlotRange
from state_harness import Link, World, kill, until


async def test_slots_are_told_as_ranges_of_the_record_that_was_applied() -> None:
    world = World()
    async with world.shard() as state:
        said = state.report()
        assert said["slots"] == {"acquired": [[0, 1023]], "loading": [], "released": []}
        assert said["epoch_seen"] == world.epoch
        assert said["serving"]


async def test_connections_in_use_are_counted() -> None:
    world = World()
    async with world.shard() as state, Link(state) as link:
        assert state.report()["connections"] == 0
        client = await (await link.connect(world.conn_id())).live()
        await until(lambda: state.report()["connections"] == 1)
        await link.closed(client.conn_id)
        await until(lambda: state.report()["connections"] == 0)


async def test_what_moved_away_is_released_and_not_acquired() -> None:
    world = World()
    async with world.shard() as state:
        world.owners = [SlotRange(0, 999, "s0", 1), SlotRange(1000, 1023, "s1", 2)]
        world.publish()
        await until(lambda: state.report()["slots"]["released"] == [[1000, 1023]])
        assert state.report()["slots"]["acquired"] == [[0, 999]]
        assert state.report()["epoch_seen"] == world.epoch
        world.owners = [SlotRange(0, 999, "s0", 1), SlotRange(1000, 1023, "s0", 3)]
        world.publish()
        await until(lambda: state.report()["slots"]["acquired"] == [[0, 1023]])
        assert state.report()["slots"]["released"] == []


async def test_what_the_store_does_not_give_yet_is_loading() -> None:
    world = World()
    world.memory.away = True
    state = await world.start(wait=False)
    try:
        await until(lambda: state.not_ready() != "")
        said = state.report()
        assert said["slots"]["acquired"] == []
        assert not said["serving"]
        world.memory.away = False
        await until(lambda: state.report()["slots"]["acquired"] == [[0, 1023]])
    finally:
        await kill(state)
