"""msg_ids: never without a reservation, never one twice, whatever the clock does."""

from __future__ import annotations

import asyncio

from msg_harness import until
from plato.core.ids import EPOCH_MS, stamp_ms_of, worker_id_of
from plato.fakes.store import FakeReservationStore, MemoryStore
from plato_msg import metrics
from plato_msg.ids import AHEAD_MS, MsgIds

NOW_MS = EPOCH_MS + 1_000_000


class Clock:
    def __init__(self) -> None:
        self.ms = NOW_MS

    def __call__(self) -> int:
        return self.ms


async def test_r9_out_of_reservation_nothing_is_minted() -> None:
    clock = Clock()
    ids = MsgIds(FakeReservationStore(MemoryStore()), 5, "uid", 1, clock)
    taking = asyncio.create_task(ids.take(3))
    await asyncio.sleep(0)
    assert not taking.done()
    assert await ids.raise_once()
    taken = await taking
    assert {worker_id_of(i) for i in taken} == {5}
    clock.ms += AHEAD_MS  # the reservation passed
    taking = asyncio.create_task(ids.take(1))
    await asyncio.sleep(0)
    assert not taking.done()
    assert await ids.raise_once()
    (later,) = await taking
    assert later > max(taken)


async def test_stamps_stay_near_the_clock_while_one_boot_goes_on() -> None:
    clock = Clock()
    ids = MsgIds(FakeReservationStore(MemoryStore()), 5, "uid", 1, clock)
    for _ in range(10):
        assert await ids.raise_once()
        (taken,) = await ids.take(1)
        assert stamp_ms_of(taken) == clock.ms
        clock.ms += 1_000


async def test_m18_a_clock_that_steps_back_repeats_no_id_and_shows() -> None:
    metrics.ID_LAG_MS.set(0)
    clock = Clock()
    ids = MsgIds(FakeReservationStore(MemoryStore()), 5, "uid", 1, clock)
    assert await ids.raise_once()
    taken = await ids.take(5_000)
    clock.ms -= 5_000
    assert await ids.raise_once()
    taken += await ids.take(5_000)
    assert taken == sorted(set(taken))
    assert metrics.ID_LAG_MS._value.get() >= 5_000


async def test_two_boots_of_one_worker_id_never_give_the_same() -> None:
    clock, memory = Clock(), MemoryStore()
    first = MsgIds(FakeReservationStore(memory), 5, "uid", 1, clock)
    assert await first.raise_once()
    second = MsgIds(FakeReservationStore(memory), 5, "uid", 2, clock)
    assert await second.raise_once()
    assert not set(await first.take(10_000)) & set(await second.take(10_000))
    stranger = MsgIds(FakeReservationStore(memory), 5, "other uid", 3, clock)
    assert not await stranger.raise_once(), "its reservation stands"


async def test_the_reservation_is_raised_again_after_the_store_was_away() -> None:
    memory = MemoryStore()
    ids = MsgIds(FakeReservationStore(memory), 5, "uid", 1)
    memory.away = True
    running = asyncio.create_task(ids.run())
    taking = asyncio.create_task(ids.take(1))
    await asyncio.sleep(0)
    memory.away = False
    await until(taking.done)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
