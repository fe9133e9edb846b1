"""Routes of users' devices: read many, set by compare-and-set, end without deleting. Used by state and msg.

A route says where a device is: (conn_id, gen). It changes three ways only, each one atomic step of the store:

    commit   what was read at Login or ReConn → (conn_id, gen + 1)   the first Sync (R2); lost: somebody was faster
    end      mine → (0, gen + 1)                                     a late close finds a newer route and leaves it
    restore  nothing, or an older gen → mine                         after the store was wiped or went back, by its owner

A first statement's gen is not 1 but what the caller gives: the start of the fence under which it is made. So statements of
before and after a wipe can be compared: fences are taken anew after it, with a greater start, and a session of before, which
nobody heard of the new one, finds the greater gen and does not write its route over it.

Nothing is cached here, and nothing is deleted but ended routes of a user whose record is full. What those said still
holds: the store keeps their greatest gen as the user's floor, and a first statement at or below it is refused.
"""

from __future__ import annotations

from collections.abc import Sequence

from plato.ports import Route, RouteStore


class Router:
    """The logic above a RouteStore. Every method raises Unavailable; repeating one that was unknown is right."""

    def __init__(self, routes: RouteStore) -> None:
        self._routes = routes

    async def read_many(self, users: Sequence[str]) -> list[dict[int, Route]]:
        """Per user, in order: {device_id: Route}, ended ones included. One pipeline."""
        return await self._routes.read_many(users)

    async def read(self, user: str, device_id: int) -> Route | None:
        """The route of one device; None: it never had one."""
        (devices,) = await self._routes.read_many([user])
        return devices.get(device_id)

    async def live(self, users: Sequence[str]) -> list[dict[int, Route]]:
        """Per user, in order: {device_id: Route} of the devices that have a connection."""
        return [
            {device_id: route for device_id, route in devices.items() if route.conn_id}
            for devices in await self._routes.read_many(users)
        ]

    async def commit(
        self, user: str, device_id: int, seen: Route | None, conn_id: int, first_gen: int = 1, most: int = 0
    ) -> Route | None:
        """Sets (conn_id, gen + 1) if the stored route still is `seen`; (conn_id, first_gen) if none was seen, none is there
        and the user has fewer than `most` live ones (0: any number). The new route, or None: another commit came first, or
        first_gen is not above the `floor`."""
        new = Route(conn_id, seen.gen + 1 if seen is not None else first_gen)
        return new if await self._routes.compare_and_set(user, device_id, seen, new, most) else None

    async def floor(self, user: str) -> int:
        """The greatest gen of the user's routes that were dropped; 0: none was."""
        return await self._routes.floor(user)

    async def end(self, user: str, device_id: int, mine: Route) -> bool:
        """Sets (0, gen + 1) if the stored route is `mine`. False: a newer one stands (or none), and is left alone."""
        return await self._routes.compare_and_set(user, device_id, mine, Route(0, mine.gen + 1))

    async def restore(self, user: str, device_id: int, mine: Route, seen: Route | None = None) -> bool:
        """Writes `mine` where the key is missing, or still is `seen`, an older statement (the store failed over to a
        replica that lagged). True: `mine` stands now; False: another route stands, `seen` is no older one, or what ended
        `mine` was dropped."""
        if seen is not None and seen.gen >= mine.gen:
            return False
        return await self._routes.compare_and_set(user, device_id, seen, mine)
