"""A slot comes to this shard, or the store lost it: sessions are read, or written, before anything is answered.

    load     acquired ─▸ every session of the slot ─▸ connections, timers, a new run ─▸ served
    rewrite  wiped ─▸ acquire again ─▸ every session and route of the slot ─▸ a new run

Loaded sessions have a socket that nobody has spoken for yet; their worker's announcement says whether it lives (R6).
Each of them is owed an empty Notify of the new run, paced by `downlink` (R4). Memory: LOAD_AT_ONCE slots' sessions
beyond the tables.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Final

from plato.core.errors import Unavailable
from plato.core.ids import slot_of
from plato.ports import Fence, Route, Session, SessionStore
from plato.router import Router
from plato.runtime import logs

from plato_state.core.pushes import first_run
from plato_state.core.session import Connection, Phase
from plato_state.downlink import Downlink
from plato_state.sessions import Sessions
from plato_state.shard import Shard, Slot
from plato_state.uplink import Uplink

LOAD_AT_ONCE: Final = 32
RETRY_S: Final = 0.2
ROUTES_PER_READ: Final = 500


class Recovery:
    """Loads and rewrites slots."""

    def __init__(
        self,
        shard: Shard,
        uplink: Uplink,
        sessions: Sessions,
        downlink: Downlink,
        store: SessionStore,
        router: Router,
    ) -> None:
        self._shard = shard
        self._uplink = uplink
        self._sessions = sessions
        self._downlink = downlink
        self._store = store
        self._router = router
        self._log = logs.get("recovery")

    async def load(self, fences: Mapping[int, Fence]) -> None:
        """Takes slots in that were acquired under these fences; returns when all are served. Repeats what is away."""
        shard = self._shard
        slots = [Slot(number, fence, shard.now) for number, fence in fences.items()]
        for slot in slots:
            shard.slots[slot.number] = slot
        room = asyncio.Semaphore(LOAD_AT_ONCE)
        counts = await asyncio.gather(*(self._load(slot, room) for slot in slots))
        self._log.info("slots loaded", slots=len(slots), sessions=sum(counts))

    async def _load(self, slot: Slot, room: asyncio.Semaphore) -> int:
        shard = self._shard
        while shard.slots.get(slot.number) is slot:
            try:
                async with room:
                    sessions = await self._store.load(slot.number)
            except Unavailable as e:
                self._log.warning("a slot could not be loaded; it is tried again", slot=slot.number, error=str(e))
                await asyncio.sleep(RETRY_S)
                continue
            if shard.slots.get(slot.number) is slot:
                self._take_in(slot, sessions)
                return len(sessions)
        return 0

    def _take_in(self, slot: Slot, sessions: Sequence[Session]) -> None:
        for session in sessions:
            connection = Connection(session.conn_id, self._shard.rules)
            self._shard.connections[session.conn_id] = connection
            self._sessions.run(connection, connection.loaded(session, slot.run))
            self._downlink.owe(connection)
        slot.loaded = True
        for said in self._shard.attaches.loaded_slot(slot.number):
            self._uplink.announced(said)
        self._shard.tell_links()

    async def rewrite(self, fences: Mapping[int, Fence]) -> None:
        """The store lost these slots and they were acquired again under `fences`: everything that is known is written.
        Raises Unavailable or Fenced; what was not written is found wanting at the next look."""
        shard = self._shard
        by_slot: dict[int, list[Connection]] = {number: [] for number in fences}
        for connection in shard.connections.of_slots(by_slot):
            if connection.session is not None:
                by_slot[slot_of(connection.conn_id)].append(connection)
        for number, fence in fences.items():
            slot = shard.slots.get(number)
            if slot is None:
                continue
            slot.fence = fence
        written = 0
        for number, connections in by_slot.items():
            sessions = [c.session for c in connections if c.session is not None and c.phase is not Phase.ENDED]
            if sessions:
                await self._store.put(number, fences[number], sessions)
                written += len(sessions)
        everybody = [c for connections in by_slot.values() for c in connections]
        for begin in range(0, len(everybody), ROUTES_PER_READ):
            await self._restore_routes(everybody[begin : begin + ROUTES_PER_READ])
        for connection in everybody:
            if connection.pushes is not None and connection.phase is Phase.LIVE:
                self._downlink.doubt(connection)
                run = first_run(fences[slot_of(connection.conn_id)].start)
                connection.pushes.begin(max(run, connection.pushes.run))
        self._log.warning("slots were written again", slots=len(fences), sessions=written)

    async def _restore_routes(self, connections: Sequence[Connection]) -> None:
        owed = [(c, c.session) for c in connections if c.session is not None and c.phase in (Phase.LIVE, Phase.WAITING)]
        if not owed:
            return
        routes = await self._router.read_many([session.user for _, session in owed])
        for (connection, session), devices in zip(owed, routes, strict=True):
            stored = devices.get(session.device_id)
            mine = Route(session.conn_id, session.gen)
            # What waits for its client is no better than a present statement, even an older one: its client comes anyway.
            behind = stored is not None and stored.gen < mine.gen and connection.phase is Phase.LIVE
            if behind or (stored is None and connection.phase in (Phase.LIVE, Phase.WAITING)):
                await self._router.restore(session.user, session.device_id, mine, stored)
