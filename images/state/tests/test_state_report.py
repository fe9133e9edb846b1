"""What a shard's /v1/report says of its slots, and which record that stands for."""

from __future__ import annotations

import asyncio

from plato.fakes.store import _Slot
from plato.ports import Fence
from plato.topology.record import SlotRange
from plato_state.shard import TICK_MS
from state_harness import Link, World, kill, until


async def test_slots_are_told_as_ranges_of_the_record_that_was_applied() -> None:
    world = World()
    async with world.shard() as state:
        said = state.report()
        slots = {"acquired": [[0, 1023]], "loading": [], "released": [], "outbid": [], "deserted": [], "fence": 0}
        assert said["slots"] == slots
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


async def test_slots_with_fences_newer_than_the_record_are_told_with_the_greatest_once_nobody_lives_behind_it() -> None:
    """The record was lost while the clock was behind, or somebody else wrote to the store: whoever writes the record has to
    go above that. While a process proves itself there, two of them would outbid each other for ever."""
    world = World()
    for slot in (*range(1000), 1002):
        held = world.memory.slots.setdefault(slot, _Slot())
        held.fence, held.released = Fence(70 + slot // 1002, 5, "token of a rival", "s0"), False
    state = await world.start(wait=False, state__fence_stale_ms=1_200, state__fence_stop_ms=600)
    try:
        rival = asyncio.create_task(_proves(world))
        await until(lambda: state.report()["slots"]["acquired"] == [[1000, 1001], [1003, 1023]])
        beyond = state.shard.now + 2_400 // TICK_MS
        await until(lambda: state.shard.now > beyond)
        assert state.report()["slots"]["outbid"] == [[0, 999], [1002, 1002]]
        assert state.report()["slots"]["fence"] == 0
        assert "1001 have a fence that is newer than the topology" in state.not_ready()
        rival.cancel()
        await until(lambda: state.report()["slots"]["fence"] == 71)
        world.owners = [SlotRange(0, 1023, "s0", 72)]
        world.publish()
        await until(lambda: state.report()["slots"]["acquired"] == [[0, 1023]])
        assert (state.report()["slots"]["outbid"], state.report()["slots"]["fence"]) == ([], 0)
    finally:
        await kill(state)


async def _proves(world: World) -> None:
    while True:
        await world.session_store.prove("s0", "token of a rival")
        await asyncio.sleep(0.1)


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
