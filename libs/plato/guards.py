"""Breakers on what many callers ask of a dependency at once: a call that would most likely not be answered is refused here.

Guarded are calls that a crowd of clients causes (routes and sessions at login, reads of history). What a process does for
itself, one after the other and with a back-off of its own (fences, proofs, reservations, fan-out), is not: it is the probe
of last resort and must never be refused by chance.
"""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Generic, Protocol, TypeVar

from plato.core.breaker import Breaker
from plato.core.errors import Unavailable
from plato.ports import Fence, FenceView, Route, RouteStore, Session, SessionStore

C_co = TypeVar("C_co", covariant=True)


def _nothing() -> None:
    pass


class Guard:
    """The breaker toward one dependency. `refused` is called for each call that is not made."""

    def __init__(
        self,
        toward: str,
        refused: Callable[[], None] = _nothing,
        clock: Callable[[], float] = time.monotonic,
        chance: Callable[[], float] = random.random,
    ) -> None:
        self.toward = toward
        self._refused = refused
        self._clock = clock
        self._chance = chance
        self._breaker = Breaker()

    @property
    def refusal_ratio(self) -> float:
        """The share of calls that is refused now."""
        return self._breaker.chance_of_refusal(self._now_ms())

    @contextlib.contextmanager
    def call(self) -> Iterator[None]:
        """Around one call. Raises Unavailable instead of making it; what it raises itself goes through."""
        if not self._breaker.admits(self._now_ms(), self._chance()):
            self._refused()
            raise Unavailable(f"{self.toward} does not answer, and is asked only now and then")
        try:
            yield
        except Unavailable:
            self._breaker.failed(self._now_ms())
            raise
        except Exception:
            self._breaker.accepted(self._now_ms())  # refused or not, it was answered
            raise
        else:
            self._breaker.accepted(self._now_ms())

    def _now_ms(self) -> int:
        return int(self._clock() * 1_000)


class GuardedRoutes:
    """A RouteStore behind a guard."""

    def __init__(self, routes: RouteStore, guard: Guard) -> None:
        self._routes = routes
        self._guard = guard

    async def read_many(self, users: Sequence[str]) -> list[dict[int, Route]]:
        """See the port."""
        with self._guard.call():
            return await self._routes.read_many(users)

    async def compare_and_set(
        self, user: str, device_id: int, expected: Route | None, new: Route, most: int = 0
    ) -> bool:
        """See the port."""
        with self._guard.call():
            return await self._routes.compare_and_set(user, device_id, expected, new, most)

    async def floor(self, user: str) -> int:
        """See the port."""
        with self._guard.call():
            return await self._routes.floor(user)


class GuardedSessions:
    """A SessionStore whose sessions are behind a guard; its fences and proofs are not."""

    def __init__(self, sessions: SessionStore, guard: Guard) -> None:
        self._sessions = sessions
        self._guard = guard

    async def look(self, slots: Sequence[int]) -> list[FenceView]:
        """See the port."""
        return await self._sessions.look(slots)

    async def acquire(self, fences: Mapping[int, Fence], seen: Mapping[int, Fence | None]) -> dict[int, Fence]:
        """See the port."""
        return await self._sessions.acquire(fences, seen)

    async def release(self, fences: Mapping[int, Fence]) -> None:
        """See the port."""
        await self._sessions.release(fences)

    async def prove(self, owner: str, token: str) -> bool:
        """See the port."""
        return await self._sessions.prove(owner, token)

    async def load(self, slot: int) -> list[Session]:
        """See the port."""
        return await self._sessions.load(slot)

    async def put(self, slot: int, fence: Fence, sessions: Sequence[Session]) -> None:
        """See the port."""
        with self._guard.call():
            await self._sessions.put(slot, fence, sessions)

    async def remove(self, slot: int, fence: Fence, conn_ids: Sequence[int]) -> None:
        """See the port."""
        with self._guard.call():
            await self._sessions.remove(slot, fence, conn_ids)

    async def get(self, conn_id: int) -> Session | None:
        """See the port."""
        with self._guard.call():
            return await self._sessions.get(conn_id)


class Connections(Protocol[C_co]):
    """Where connections to a database come from (plato.adapters.pg.Database)."""

    def connection(self) -> AbstractAsyncContextManager[C_co]:
        """A connection for the time of the block. Raises Unavailable."""


C = TypeVar("C")


class GuardedConnections(Generic[C]):
    """A database behind a guard."""

    def __init__(self, database: Connections[C], guard: Guard) -> None:
        self._database = database
        self._guard = guard

    @contextlib.asynccontextmanager
    async def connection(self) -> AsyncIterator[C]:
        """A connection for the time of the block. Raises Unavailable."""
        with self._guard.call():
            async with self._database.connection() as connection:
                yield connection
