"""The store in memory: what flows through here is what Valkey would hold (sessions, fences, routes, reservations).

One MemoryStore is the server; any number of fake stores over it are its clients, so two shards in one test share it.
Every method is one atomic step, as a script is in Valkey. Memory: what the test puts in.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from plato.core.errors import Fenced, Unavailable
from plato.core.ids import slot_of
from plato.ports import Fence, FenceView, Route, Session, Window


@dataclass(slots=True)
class _Slot:
    fence: Fence | None = None
    released: bool = False
    sessions: dict[int, Session] = field(default_factory=dict)


@dataclass(slots=True)
class _Proofs:
    raised: int = 0  # over all tokens of this owner, so that the one raised last is the greatest
    by_token: dict[str, int] = field(default_factory=dict)


@dataclass(slots=True)
class _Reservation:
    uid: str
    boot: int
    until_ms: int


class MemoryStore:
    """The server behind the fakes. Set `away` to have every call raise Unavailable; `wipe()` is FLUSHALL."""

    def __init__(self) -> None:
        self.away = False
        self.slots: dict[int, _Slot] = {}
        self.proofs: dict[str, _Proofs] = {}
        self.routes: dict[tuple[str, int], Route] = {}
        self.floors: dict[str, int] = {}
        self.reservations: dict[int, _Reservation] = {}
        self.counters: dict[str, tuple[int, int]] = {}
        """{conversation: (last number, run of the server)}."""
        self.run = 1
        """Raise it to play a restart or a failover."""

    def wipe(self) -> None:
        """Loses everything."""
        self.slots.clear()
        self.proofs.clear()
        self.routes.clear()
        self.floors.clear()
        self.reservations.clear()
        self.counters.clear()

    def check(self) -> None:
        """Raises Unavailable while the store is away."""
        if self.away:
            raise Unavailable("the store is away")


class FakeSessionStore:
    """SessionStore over a MemoryStore."""

    def __init__(self, memory: MemoryStore) -> None:
        self._memory = memory

    async def look(self, slots: Sequence[int]) -> list[FenceView]:
        """See the port."""
        self._memory.check()
        views = []
        for number in slots:
            slot = self._memory.slots.get(number, _Slot())
            proof = None
            if slot.fence is not None and (proofs := self._memory.proofs.get(slot.fence.owner)) is not None:
                proof = proofs.by_token.get(slot.fence.token)
            views.append(FenceView(slot.fence, slot.released, proof))
        return views

    async def acquire(self, fences: Mapping[int, Fence], seen: Mapping[int, Fence | None]) -> dict[int, Fence]:
        """See the port."""
        self._memory.check()
        acquired = {}
        for number, fence in fences.items():
            slot = self._memory.slots.setdefault(number, _Slot())
            stored = slot.fence
            if stored != seen[number] or (stored is not None and fence.epoch < stored.epoch):
                continue
            if stored is not None:
                fence = replace(fence, start=max(stored.start + 1, fence.start))
            slot.fence, slot.released = fence, False
            acquired[number] = fence
        return acquired

    async def release(self, fences: Mapping[int, Fence]) -> None:
        """See the port."""
        self._memory.check()
        for number, fence in fences.items():
            slot = self._memory.slots.get(number)
            if slot is not None and slot.fence == fence:
                slot.released = True

    async def prove(self, owner: str, token: str) -> bool:
        """See the port."""
        self._memory.check()
        proofs = self._memory.proofs.setdefault(owner, _Proofs())
        known = token in proofs.by_token
        proofs.raised += 1
        proofs.by_token[token] = proofs.raised
        return known

    async def load(self, slot: int) -> list[Session]:
        """See the port."""
        self._memory.check()
        return list(self._memory.slots.get(slot, _Slot()).sessions.values())

    async def put(self, slot: int, fence: Fence, sessions: Sequence[Session]) -> None:
        """See the port."""
        held = self._held(slot, fence)
        for session in sessions:
            held.sessions[session.conn_id] = session

    async def remove(self, slot: int, fence: Fence, conn_ids: Sequence[int]) -> None:
        """See the port."""
        held = self._held(slot, fence)
        for conn_id in conn_ids:
            held.sessions.pop(conn_id, None)

    async def get(self, conn_id: int) -> Session | None:
        """See the port."""
        self._memory.check()
        return self._memory.slots.get(slot_of(conn_id), _Slot()).sessions.get(conn_id)

    def _held(self, number: int, fence: Fence) -> _Slot:
        self._memory.check()
        slot = self._memory.slots.get(number)
        if slot is None or slot.fence != fence:
            raise Fenced(f"slot {number}: {fence} is not the fence that stands")
        return slot


class FakeRouteStore:
    """RouteStore over a MemoryStore."""

    def __init__(self, memory: MemoryStore) -> None:
        self._memory = memory

    async def read_many(self, users: Sequence[str]) -> list[dict[int, Route]]:
        """See the port."""
        self._memory.check()
        found: dict[str, dict[int, Route]] = {user: {} for user in users}
        for (user, device_id), route in self._memory.routes.items():
            if user in found:
                found[user][device_id] = route
        return [dict(found[user]) for user in users]

    async def compare_and_set(
        self, user: str, device_id: int, expected: Route | None, new: Route, most: int = 0
    ) -> bool:
        """See the port."""
        self._memory.check()
        routes, floors = self._memory.routes, self._memory.floors
        stored = routes.get((user, device_id))
        if stored not in (expected, new):
            return False
        if stored is None:
            theirs = {key: route for key, route in routes.items() if key[0] == user} if most else {}
            if most and len(theirs) >= most:
                for key, route in theirs.items():
                    if not route.conn_id:
                        del routes[key]
                        floors[user] = max(floors.get(user, 0), route.gen)
                if sum(bool(route.conn_id) for route in theirs.values()) >= most:
                    return False
            if new.gen <= floors.get(user, 0):
                return False
        routes[user, device_id] = new
        return True

    async def floor(self, user: str) -> int:
        """See the port."""
        self._memory.check()
        return self._memory.floors.get(user, 0)


class FakeReservationStore:
    """ReservationStore over a MemoryStore."""

    def __init__(self, memory: MemoryStore) -> None:
        self._memory = memory

    async def reserve(self, worker_id: int, uid: str, boot: int, now_ms: int, ahead_ms: int) -> Window | None:
        """See the port."""
        self._memory.check()
        held = self._memory.reservations.get(worker_id)
        if held is None:
            window = Window(now_ms, now_ms + ahead_ms)
        elif (held.uid, held.boot) == (uid, boot):
            window = Window(held.until_ms, max(held.until_ms, now_ms + ahead_ms))
        elif held.uid != uid and now_ms < held.until_ms:
            return None
        else:
            begin = max(held.until_ms, now_ms)
            window = Window(begin, begin + ahead_ms)
        self._memory.reservations[worker_id] = _Reservation(uid, boot, window.until_ms)
        return window


class FakeSeqCounters:
    """SeqCounters in memory."""

    def __init__(self, memory: MemoryStore) -> None:
        self._memory = memory

    async def take(self, wanted: Mapping[str, tuple[int, int]]) -> dict[str, int]:
        """See the port."""
        self._memory.check()
        counters, run = self._memory.counters, self._memory.run
        return self._add({c: w for c, w in wanted.items() if c in counters and counters[c][1] == run})

    async def begin(self, wanted: Mapping[str, tuple[int, int]]) -> dict[str, int]:
        """See the port."""
        self._memory.check()
        return self._add(wanted)

    def _add(self, wanted: Mapping[str, tuple[int, int]]) -> dict[str, int]:
        firsts = {}
        for conversation, (count, above) in wanted.items():
            last = max(self._memory.counters.get(conversation, (0, 0))[0], above)
            self._memory.counters[conversation] = (last + count, self._memory.run)
            firsts[conversation] = last + 1
        return firsts
