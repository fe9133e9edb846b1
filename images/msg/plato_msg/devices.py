"""Which devices a user is connected with, ending their sessions, and who is online. From the store: routes and sessions.

    kick   route → (nowhere, gen + 1) by compare-and-set: from then on nothing is pushed to the device and its resume secret
           is worth nothing, whether it is connected or not → the shard is told, which closes the socket with KICKED; a hint,
           since the connection's next heartbeat reads the route as well

A kick ends sessions, not tokens: who still has a valid one may log in again. No memory.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Final, NamedTuple, Protocol

from plato.core.codes import Code
from plato.core.conversations import is_user_id
from plato.core.errors import Unavailable
from plato.core.ids import slot_of, stamp_ms_of
from plato.ports import Route, Session, ShardClient, TopologySource
from plato.runtime import logs

from plato_msg.lists_pg import PgLists
from plato_msg.store_pg import Database

HINTS: Final = 3
HINT_PAUSE_S: Final = 0.1
HINT_S: Final = 2.0
OTHERS: Final = 500


class Device(NamedTuple):
    """A device with a session that lives, or may be resumed."""

    device_id: int
    platform: str
    network: str
    since_ms: int
    """When its connection was opened, Unix ms."""


class Sessions(Protocol):
    """What is asked of the store's sessions (plato.ports.SessionStore)."""

    async def get(self, conn_id: int) -> Session | None:
        """One session. Raises Unavailable."""


class Routes(Protocol):
    """What is asked of plato.router.Router."""

    async def read_many(self, users: Sequence[str]) -> list[dict[int, Route]]:
        """Per user, in order: {device_id: Route}. Raises Unavailable."""

    async def end(self, user: str, device_id: int, mine: Route) -> bool:
        """Sets (nowhere, gen + 1) if the stored route is `mine`. Raises Unavailable."""


class Devices:
    """Devices of users. Every method raises Unavailable: repeat."""

    def __init__(
        self, database: Database, routes: Routes, sessions: Sessions, shards: ShardClient, topology: TopologySource
    ) -> None:
        self._lists = PgLists(database)
        self._routes = routes
        self._sessions = sessions
        self._shards = shards
        self._topology = topology
        self._log = logs.get("devices")

    async def of(self, user: str) -> list[Device]:
        """By device_id."""
        (routes,) = await self._routes.read_many([user])
        live = [(device_id, route.conn_id) for device_id, route in sorted(routes.items()) if route.conn_id]
        found = await asyncio.gather(*(self._sessions.get(conn_id) for _, conn_id in live))
        return [
            Device(device_id, session.platform, session.network, stamp_ms_of(conn_id))
            for (device_id, conn_id), session in zip(live, found, strict=True)
            if session is not None
        ]

    async def kick(self, user: str, device_id: int | None = None, keep: int | None = None) -> list[int]:
        """Ends the session of one device, or of all of them but `keep`. The device_ids whose session ended; a device that
        has none is no error. One that commits at the same moment is met, or has logged in after the kick."""
        ended: dict[int, Route] = {}
        while True:
            (routes,) = await self._routes.read_many([user])
            wanted = {
                d: route
                for d, route in routes.items()
                if route.conn_id and d != keep and (device_id is None or d == device_id) and d not in ended
            }
            if not wanted:
                break
            for d, route in wanted.items():
                if await self._routes.end(user, d, route):
                    ended[d] = route
        if ended:
            self._log.info("kicked", user=user, devices=len(ended))
        await asyncio.gather(*(self._tell(route.conn_id) for route in ended.values()))
        return sorted(ended)

    async def online(self, user: str, others: Sequence[str]) -> dict[str, bool]:
        """Who of them has a session now; of the first OTHERS. Who is no friend and shares no conversation with the user is
        left out; who has blocked the user is never online to him."""
        asked = [other for other in dict.fromkeys(others) if is_user_id(other)][:OTHERS]
        known = await self._lists.acquainted(user, asked) if asked and is_user_id(user) else {}
        routes = await self._routes.read_many(list(known)) if known else []
        return {
            other: shown and any(route.conn_id for route in theirs.values())
            for (other, shown), theirs in zip(known.items(), routes, strict=True)
        }

    async def _tell(self, conn_id: int) -> None:
        for _ in range(HINTS):
            try:
                shard = self._topology.current().owner(slot_of(conn_id)).shard
                async with asyncio.timeout(HINT_S):
                    await self._shards.replaced(shard, conn_id, 0, Code.KICKED)
            except (Unavailable, TimeoutError):
                await asyncio.sleep(HINT_PAUSE_S)
            else:
                return
        self._log.info("a kicked connection's shard does not answer; its heartbeat finds it", conn_id=conn_id)
