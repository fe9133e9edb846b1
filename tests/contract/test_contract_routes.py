"""RouteStore and the Router above it: fake and Valkey."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from plato.ports import Route
from plato.router import Router

if TYPE_CHECKING:
    from tests.contract.conftest import Stores

DEVICE = (1 << 64) - 1
CONN = (1 << 63) - 1


async def test_unknown_users_have_no_routes(stores: Stores) -> None:
    assert await stores.routes.read_many(["a", "b"]) == [{}, {}]
    assert await stores.routes.read_many([]) == []


async def test_read_many_keeps_the_order_and_repeats(stores: Stores) -> None:
    users = ["alice", "жук", "}{", "alice-2", "a:b"]
    for n, user in enumerate(users):
        assert await stores.routes.compare_and_set(user, n, None, Route(100 + n, 1))
    assert await stores.routes.compare_and_set("alice", DEVICE, None, Route(CONN, 7))
    found = await stores.routes.read_many(["}{", "alice", "nobody", "}{"])
    assert found == [{2: Route(102, 1)}, {0: Route(100, 1), DEVICE: Route(CONN, 7)}, {}, {2: Route(102, 1)}]


async def test_r2_route_commit_is_compare_and_set(stores: Stores) -> None:
    router = Router(stores.routes)
    first = await router.commit("alice", 1, None, 100)
    assert first == Route(100, 1)
    assert await router.commit("alice", 1, None, 101) is None
    second = await router.commit("alice", 1, first, 102)
    assert second == Route(102, 2)
    assert await router.commit("alice", 1, first, 103) is None
    assert await router.read("alice", 1) == second
    assert await router.commit("alice", 2, None, 104) == Route(104, 1)


async def test_r2_of_racing_commits_one_stands(stores: Stores) -> None:
    router = Router(stores.routes)
    seen = await router.commit("alice", 1, None, 1)
    results = await asyncio.gather(*(router.commit("alice", 1, seen, 100 + n) for n in range(20)))
    won = [route for route in results if route is not None]
    assert len(won) == 1
    assert await router.read("alice", 1) == won[0]


async def test_r2_the_end_of_a_session_deletes_nothing(stores: Stores) -> None:
    router = Router(stores.routes)
    mine = await router.commit("alice", 1, None, 100)
    assert mine is not None
    assert await router.end("alice", 1, mine)
    assert await router.read_many(["alice"]) == [{1: Route(0, 2)}]
    assert await router.live(["alice", "bob"]) == [{}, {}]
    assert await router.commit("alice", 1, Route(0, 2), 101) == Route(101, 3)
    assert await router.live(["bob", "alice"]) == [{}, {1: Route(101, 3)}]


async def test_r2_a_late_close_never_removes_a_newer_route(stores: Stores) -> None:
    router = Router(stores.routes)
    old = await router.commit("alice", 1, None, 100)
    assert old is not None
    new = await router.commit("alice", 1, old, 200)
    assert not await router.end("alice", 1, old)
    assert await router.read("alice", 1) == new


async def test_r2_the_end_of_a_missing_route_writes_nothing(stores: Stores) -> None:
    router = Router(stores.routes)
    assert not await router.end("alice", 1, Route(100, 1))
    assert await router.read("alice", 1) is None


async def test_r2_restore_writes_only_a_missing_key(stores: Stores) -> None:
    router = Router(stores.routes)
    mine = await router.commit("alice", 1, None, 100)
    assert mine is not None
    newer = await router.commit("alice", 1, mine, 200)
    assert newer is not None
    assert not await router.restore("alice", 1, mine)
    assert await router.restore("alice", 1, newer)
    await stores.wipe()
    assert await router.restore("alice", 1, mine)
    assert await router.read("alice", 1) == mine
    assert not await router.restore("alice", 1, newer)


async def test_a_repeated_write_is_told_that_it_stands(stores: Stores) -> None:
    """The answer of the first one may have been lost."""
    for _ in range(2):
        assert await stores.routes.compare_and_set("alice", 1, None, Route(100, 1))
    for _ in range(2):
        assert await stores.routes.compare_and_set("alice", 1, Route(100, 1), Route(101, 2))
    assert not await stores.routes.compare_and_set("alice", 1, None, Route(100, 1))


async def test_a_users_record_is_bounded_whatever_device_ids_come(stores: Stores) -> None:
    router = Router(stores.routes)
    live = await router.commit("alice", 1, None, 100, most=4)
    for n in range(2, 60):
        mine = await router.commit("alice", n, None, 100 + n, first_gen=10 * n, most=4)
        assert mine is not None
        assert await router.end("alice", n, mine)
        (devices,) = await stores.routes.read_many(["alice"])
        assert len(devices) <= 4
    assert devices[1] == live, "what lives is never dropped"


async def test_of_a_full_record_only_a_new_device_is_refused(stores: Stores) -> None:
    router = Router(stores.routes)
    routes = [Route(100 + n, 1) for n in range(3)]
    for n, route in enumerate(routes):
        assert await router.commit("alice", n, None, route.conn_id, most=3) == route
    assert await router.commit("alice", 3, None, 200, most=3) is None
    assert await router.floor("alice") == 0
    assert await router.commit("alice", 1, routes[1], 101 + 100, most=3) == Route(201, 2)
    assert await stores.routes.compare_and_set("alice", 2, None, routes[2], 3), "a repeat of what was written"
    assert await router.restore("alice", 4, Route(300, 9)), "a session that lives is written again, room or not"
    assert await router.end("alice", 4, Route(300, 9))
    assert await router.end("alice", 2, routes[2])
    assert await router.commit("alice", 3, None, 200, first_gen=10, most=3) is None, "not above what was dropped"
    assert await router.commit("alice", 3, None, 200, first_gen=11, most=3) == Route(200, 11)
    assert await router.floor("alice") == 10


async def test_r2_what_was_ended_does_not_stand_again_once_its_end_was_dropped(stores: Stores) -> None:
    router = Router(stores.routes)
    kicked = await router.commit("alice", 1, None, 100, first_gen=50, most=1)
    assert kicked is not None
    assert await router.end("alice", 1, kicked)
    assert await router.commit("alice", 2, None, 200, first_gen=50, most=1) is None, "51 was said before"
    assert await stores.routes.read_many(["alice"]) == [{}]
    assert not await router.restore("alice", 1, kicked)
    assert await router.commit("alice", 1, kicked, 101) is None
    floor = await router.floor("alice")
    assert floor == 51
    assert await router.commit("alice", 1, None, 101, first_gen=floor + 1, most=1) == Route(101, 52)
    await stores.wipe()
    assert await router.floor("alice") == 0
