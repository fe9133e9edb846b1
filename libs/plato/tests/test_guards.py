"""Breakers on the ports: what a crowd asks of a dead dependency is refused here; what a process needs itself never is."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

import pytest
from plato.core.errors import Fenced, Unavailable
from plato.fakes.store import FakeRouteStore, FakeSessionStore, MemoryStore
from plato.guards import Guard, GuardedConnections, GuardedRoutes, GuardedSessions
from plato.ports import Fence, Route

FENCE = Fence(1, 1, "t", "o")


class Rig:
    def __init__(self) -> None:
        self.now_s = 0.0
        self.refused = 0
        self.memory = MemoryStore()
        self.guard = Guard("the store", self._refuse, lambda: self.now_s, lambda: 0.5)
        self.routes = GuardedRoutes(FakeRouteStore(self.memory), self.guard)
        self.sessions = GuardedSessions(FakeSessionStore(self.memory), self.guard)

    def _refuse(self) -> None:
        self.refused += 1

    async def crowd(self, count: int, step_s: float = 0.001) -> int:
        """So many ask; how many got an answer."""
        answered = 0
        for _ in range(count):
            self.now_s += step_s
            with contextlib.suppress(Unavailable):
                await self.routes.read_many(["a"])
                answered += 1
        return answered


async def test_a_crowd_before_a_dead_store_is_refused_here_and_a_process_s_own_needs_are_not() -> None:
    rig = Rig()
    assert await rig.crowd(100) == 100
    rig.memory.away = True
    await rig.crowd(1_000)
    assert rig.refused >= 600
    rig.memory.away = False
    before = rig.refused
    # Still throttled: guarded calls may be refused, these may not.
    assert await rig.sessions.prove("o", "t") is False
    await rig.sessions.acquire({1: FENCE}, {1: None})
    assert len(await rig.sessions.look([1])) == 1
    assert await rig.sessions.load(1) == []
    assert rig.refused == before
    await rig.crowd(1_000)
    assert await rig.crowd(1_000) == 1_000, "it is over when it is over"
    assert rig.guard.refusal_ratio == 0


async def test_a_refusal_of_the_store_is_an_answer() -> None:
    rig = Rig()
    await rig.sessions.acquire({1: FENCE}, {1: None})
    for _ in range(100):
        rig.now_s += 0.001
        with pytest.raises(Fenced):
            await rig.sessions.put(1, Fence(0, 0, "x", "x"), [])
        assert not await rig.routes.compare_and_set("a", 1, Route(1, 1), Route(2, 2))
        assert await rig.sessions.get(7) is None
    await rig.sessions.remove(1, FENCE, [7])
    await rig.sessions.release({1: FENCE})
    assert rig.refused == 0


async def test_a_database_is_guarded_from_its_opening_to_the_end_of_the_block() -> None:
    class Database:
        asked = 0

        @contextlib.asynccontextmanager
        async def connection(self) -> AsyncIterator[int]:
            self.asked += 1
            yield 5

    now = [0.0]
    database = Database()
    guarded = GuardedConnections(database, Guard("the database", clock=lambda: now[0], chance=lambda: 0.5))
    for _ in range(100):
        now[0] += 0.001
        with contextlib.suppress(Unavailable):
            async with guarded.connection() as connection:
                assert connection == 5
                raise Unavailable("in the middle")
    assert database.asked <= 10
