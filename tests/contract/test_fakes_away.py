"""The fakes' own switch: a store that is away, and comes back with what it held."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import pytest
from plato.core.errors import Unavailable
from plato.fakes.store import FakeReservationStore, FakeRouteStore, FakeSessionStore, MemoryStore
from plato.ports import Fence, Route, Session

FENCE = Fence(1, 1, "t", "plato-s0")
SESSION = Session(17, "alice", 1, b"s", 1, guest=False)

CALLS: dict[str, Callable[[MemoryStore], Awaitable[object]]] = {
    "look": lambda m: FakeSessionStore(m).look([17]),
    "acquire": lambda m: FakeSessionStore(m).acquire({17: FENCE}, {17: None}),
    "release": lambda m: FakeSessionStore(m).release({17: FENCE}),
    "prove": lambda m: FakeSessionStore(m).prove("plato-s0", "t"),
    "load": lambda m: FakeSessionStore(m).load(17),
    "put": lambda m: FakeSessionStore(m).put(17, FENCE, [SESSION]),
    "remove": lambda m: FakeSessionStore(m).remove(17, FENCE, [17]),
    "get": lambda m: FakeSessionStore(m).get(17),
    "read_many": lambda m: FakeRouteStore(m).read_many(["alice"]),
    "compare_and_set": lambda m: FakeRouteStore(m).compare_and_set("alice", 1, Route(1, 1), Route(2, 2)),
    "reserve": lambda m: FakeReservationStore(m).reserve(1, "u", 1, 1, 1),
}


@pytest.mark.parametrize("name", list(CALLS))
async def test_every_call_of_a_store_that_is_away_is_unavailable_and_changes_nothing(name: str) -> None:
    memory = MemoryStore()
    await FakeSessionStore(memory).acquire({17: FENCE}, {17: None})
    await FakeSessionStore(memory).put(17, FENCE, [SESSION])
    await FakeRouteStore(memory).compare_and_set("alice", 1, None, Route(1, 1))
    memory.away = True
    with pytest.raises(Unavailable):
        await CALLS[name](memory)
    memory.away = False
    assert await FakeSessionStore(memory).load(17) == [SESSION]
    assert await FakeRouteStore(memory).read_many(["alice"]) == [{1: Route(1, 1)}]
    assert not (await FakeSessionStore(memory).look([17]))[0].released


async def test_two_fakes_over_one_memory_are_one_store() -> None:
    memory = MemoryStore()
    await FakeSessionStore(memory).acquire({17: FENCE}, {17: None})
    other = Fence(1, 1, "t2", "plato-s1")
    assert await FakeSessionStore(memory).acquire({17: other}, {17: None}) == {}
    memory.wipe()
    assert (await FakeSessionStore(memory).look([17]))[0].fence is None
