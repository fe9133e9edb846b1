"""One factory per port: the fake and the real thing, for every contract test."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass

import pytest
from plato.adapters.valkey import ValkeyStore
from plato.adapters.valkey.client import Client, command
from plato.fakes.store import FakeReservationStore, FakeRouteStore, FakeSessionStore, MemoryStore
from plato.ports import ReservationStore, RouteStore, SessionStore


@dataclass
class Stores:
    """Three ports over one store, and a way to lose everything in it."""

    sessions: SessionStore
    routes: RouteStore
    reservations: ReservationStore
    wipe: Callable[[], Awaitable[None]]


@pytest.fixture(params=["fake", "valkey"])
def store_url(request: pytest.FixtureRequest) -> str | None:
    """The real store's URL; None: the fake. Not async, since the session's server starts in a loop of its own."""
    if request.param == "fake":
        return None
    url: str = request.getfixturevalue("valkey_url")
    return url


@pytest.fixture
async def stores(store_url: str | None) -> AsyncIterator[Stores]:
    """Empty stores."""
    if store_url is None:
        memory = MemoryStore()

        async def wipe_memory() -> None:
            memory.wipe()

        yield Stores(FakeSessionStore(memory), FakeRouteStore(memory), FakeReservationStore(memory), wipe_memory)
        return
    admin = Client(store_url)

    async def flush() -> None:
        await admin.run([command("FLUSHALL")])

    await flush()
    store = await ValkeyStore.connect(store_url, f"t{secrets.token_hex(4)}:")
    yield Stores(store.sessions, store.routes, store.reservations, flush)
    await store.close()
    await admin.close()
