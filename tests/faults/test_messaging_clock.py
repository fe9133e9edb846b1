"""Row M18: the clock steps back 5 s while ids are given. No id twice, no crash; what is not granted waits.

A clock of a whole process cannot be stepped here (that takes libfaketime, which no package of this project brings), so the
step is made where clocks enter: in the readings that the gateway's and msg's own minting code gets. The store is a real one.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator

import pytest
from plato.adapters.valkey import ValkeyStore
from plato.core.ids import ConnIdMinter, OutOfReservation
from plato_gateway.core.grants import Grants
from plato_msg.ids import AHEAD_MS, MsgIds

NOW_MS = 1_800_000_000_000
STEP_BACK_MS = 5_000
BOOTS = 8
SECONDS = 12


class Clock:
    """Readings of a wall clock that a test turns."""

    def __init__(self) -> None:
        self.ms = NOW_MS

    def __call__(self) -> int:
        return self.ms


@pytest.fixture
async def store(valkey_url: str) -> AsyncIterator[ValkeyStore]:
    made = await ValkeyStore.connect(valkey_url, "m18:")
    yield made
    await made.close()


async def test_m18_msg_gives_no_id_twice(store: ValkeyStore) -> None:
    """Eight lives of one msg process, each with a step back in its middle."""
    clock = Clock()
    given: set[int] = set()
    waited = 0
    for boot in range(1, BOOTS + 1):
        ids = MsgIds(store.reservations, 18, "pod", boot, clock)
        for second in range(SECONDS):
            clock.ms += -STEP_BACK_MS if second == SECONDS // 2 else 1_000
            assert await ids.raise_once()
            try:
                taken = await asyncio.wait_for(ids.take(500), 0.05)
            except TimeoutError:
                waited += 1
                continue
            assert taken == sorted(taken)
            assert not given & set(taken)
            given.update(taken)
    assert len(given) >= BOOTS * SECONDS * 500 * 0.5, f"the service stood still {waited} times"


async def test_m18_a_gateway_gives_no_conn_id_twice(store: ValkeyStore) -> None:
    """Two workers of one pod, restarted one by one below one link, and links that come and go."""
    clock = Clock()
    chance = random.Random(18)
    given: set[int] = set()
    refused = 0
    lags = []
    worker_boot = 0
    for link_boot in range(1, BOOTS + 1):
        grants = Grants()
        for index in (0, 1):
            minter = ConnIdMinter()
            worker_boot += 1
            for second in range(SECONDS):
                clock.ms += -STEP_BACK_MS if second == SECONDS // 2 else 1_000
                window = await store.reservations.reserve(19, "pod", link_boot, clock.ms, AHEAD_MS)
                assert window is not None
                grants.reserved(window.from_ms, window.until_ms)
                minter.assign(19, tuple(range(index, 1024, 2)))
                minter.grant(*grants.window(index, worker_boot))
                for _ in range(chance.randrange(3_000)):
                    try:
                        made = minter.mint(clock.ms)
                    except OutOfReservation:
                        refused += 1
                        break
                    assert made not in given
                    given.add(made)
                lags.append(minter.lag_ms)
    assert len(given) >= 50_000, f"only {len(given)} ids, {refused} refusals"
    assert max(lags) > 5, "a step back must show in the reading that the metric shows"


async def test_m18_a_twin_waits_and_the_owner_goes_on(store: ValkeyStore) -> None:
    """A force-deleted pod's twin, whose clock lies 5 s behind, gets nothing before the reservation has passed."""
    first = await store.reservations.reserve(20, "pod-1", 1, NOW_MS, AHEAD_MS)
    assert first is not None
    assert await store.reservations.reserve(20, "pod-2", 1, NOW_MS - STEP_BACK_MS, AHEAD_MS) is None
    again = await store.reservations.reserve(20, "pod-1", 1, NOW_MS - STEP_BACK_MS, AHEAD_MS)
    assert again is not None
    assert again.from_ms == again.until_ms == first.until_ms
    later = await store.reservations.reserve(20, "pod-2", 1, first.until_ms, AHEAD_MS)
    assert later is not None
    assert later.from_ms >= first.until_ms
