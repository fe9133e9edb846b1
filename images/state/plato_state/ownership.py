"""Which slots are ours: fences taken, proven, looked at, and given back (R5).

    topology ─▸ assigned slots ─▸ look ─▸ may we? (fences) ─▸ acquire ─▸ recovery.load ─▸ served
    each second: prove ─▸ proven: serve · unproven for fence_stop_ms of own ticks: answer nothing, close the streams
                 look at a part of the slots ─▸ mine · wiped: write all again · lost: drop

A process whose uid the record carries takes at once what is free; once it was named, another uid there means that a newer
process has our name: this one ends. While the record carries the uid of a process before us, since nobody renews it, a
shard takes by its name what stood unproven for fence_stale_ms. A record that names nobody any more has it take nothing; it
keeps what no other got. A record that gives us our slots anew, under a greater epoch, has their fences follow, under
living connections. Memory: one sighting per slot that is wanted and not held.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Iterable, Mapping
from typing import Final

from plato.core.errors import Fenced, Unavailable
from plato.ports import Fence, SessionStore, TopologySource
from plato.runtime import logs
from plato.runtime.process import forever
from plato.topology.record import Topology

from plato_state import metrics
from plato_state.core.fences import Outbid, Sightings, Standing, standing
from plato_state.recovery import Recovery
from plato_state.shard import TICK_MS, Background, Shard, ticks
from plato_state.uplink import unix_ms

PROVE_S: Final = 1.0
"""How often owners prove themselves; more often where fence_stop_ms is short."""
RETRY_S: Final = 0.2
ORDER_LOOK_S: Final = 0.05
"""How often a slot that was ordered to move here is looked at, until its old owner released it: clients wait meanwhile."""
RELEASE_TRIES: Final = 50
"""A slot that moved away is released so often, RETRY_S apart, while the store is away. The fence bounds it, not this."""
MOVING_MS: Final = 5_000
"""A slot that comes while we serve makes the shard unready only when it is not loaded by then."""
LOOK_PART: Final = 32
"""Slots that are looked at each second; 512 slots are seen within 16 s."""


class Deposed(Exception):
    """The topology names another process for this shard: a newer one has our name."""


class Ownership:
    """Holds the slots of one shard. `main()` is the loops that belong to it; `not_ready` says why it does not serve."""

    def __init__(
        self, shard: Shard, uid: str, recovery: Recovery, store: SessionStore, topology: TopologySource
    ) -> None:
        self._shard = shard
        self._uid = uid
        self._recovery = recovery
        self._store = store
        self._topology = topology
        self._token = secrets.token_hex(16)
        self._log = logs.get("ownership")
        self._sightings = Sightings(
            shard.name, ticks(shard.settings.fence_stale_ms), ticks(shard.settings.fence_stop_ms)
        )
        self._outbid = Outbid(ticks(shard.settings.fence_stale_ms))
        self._stop_ticks = ticks(shard.settings.fence_stop_ms)
        self._prove_s = min(PROVE_S, shard.settings.fence_stop_ms / 3_000)
        self._proven: int | None = None
        self._background = Background(metrics.ERRORS.inc)
        self._suspects: set[int] = set()
        self._turn = 0
        self._looked = 0
        self._tasks: asyncio.TaskGroup | None = None
        self._coming: dict[int, int] = {}
        """Slots that were assigned while we serve, by the tick of that."""
        self.released: set[int] = set()
        """Slots that moved away and that the store knows to be free."""
        self._named = False
        """The record carried our uid once."""
        self._before: str | None = None
        """The other uid that it carried when we came."""
        self._may_take = False
        self._look_now = asyncio.Event()
        self._why = "no topology was read yet"
        self.started = asyncio.Event()
        """Set once every slot that could be taken at the start is loaded."""

    @property
    def token(self) -> str:
        """This process's own mark in its fences."""
        return self._token

    def not_ready(self) -> str:
        """Why this shard does not serve now; "" when it does."""
        if self._why:
            return self._why
        shard = self._shard
        if not shard.serving:
            return "the fences are not proven: the store does not answer"
        late = shard.now - ticks(MOVING_MS)
        missing = [
            s
            for s in shard.assigned
            if (s not in shard.slots or not shard.slots[s].loaded) and self._coming.get(s, late) <= late
        ]
        if missing:
            words = f"{len(missing)} of {len(shard.assigned)} slots are not loaded yet"
            outbid = len(self.outbid()[0])
            return f"{words}; {outbid} have a fence that is newer than the topology" if outbid else words
        return ""

    def outbid(self) -> tuple[list[int], list[int], int]:
        """(slots that are ours by the record and cannot be taken, since their fences are newer than it; those of them behind
        whose fence nobody lives; the greatest epoch of these, 0 for none)."""
        return self._outbid.told(self._shard.assigned)

    def suspect(self, slot: int) -> None:
        """A write of this slot was refused: look at it now."""
        self._suspects.add(slot)
        self._look_now.set()

    def tick(self) -> None:
        """Refuses oneself when the fences are unproven for too long, counted in own ticks."""
        shard = self._shard
        if self._proven is None:
            return
        lag = shard.now - self._proven
        metrics.PROOF_LAG.set(lag * TICK_MS / 1000)
        if shard.serving and lag >= self._stop_ticks:
            self._log.error("the fences are unproven: this shard answers nothing until they are", lag_ms=lag * TICK_MS)
            shard.silence("the shard's fences are unproven")

    async def main(self) -> None:
        """Follows the topology, proves, looks; until cancelled. Raises Deposed."""
        async with asyncio.TaskGroup() as group:
            self._tasks = group
            group.create_task(forever("slots", self._hold()), name="slots")
            group.create_task(forever("prove", self._prove()), name="prove")
            group.create_task(forever("topology", self._follow()), name="topology")

    async def release(self) -> None:
        """Gives every slot back, so that a successor need not wait. For the end of the process."""
        shard = self._shard
        shard.silence("the shard is closing")
        fences = {s.number: s.fence for s in shard.slots.values()}
        try:
            async with asyncio.timeout(2.0):
                await self._store.release(fences)
        except (Unavailable, TimeoutError) as e:
            self._log.info("the slots could not be released", error=str(e))

    # ── proofs ───────────────────────────────────────────────────────────────────────────────────────────────

    async def _prove(self) -> None:
        while True:
            before = self._shard.now
            try:
                known = await self._store.prove(self._shard.name, self._token)
            except Unavailable as e:
                self._log.debug("the fences could not be proven", error=str(e))
                await asyncio.sleep(min(RETRY_S, self._prove_s))
                continue
            first, self._proven = self._proven is None, before
            if not first and not known:
                self._log.error("the store lost our proofs: it was wiped; everything is written again")
                self._suspects.update(self._shard.slots)
                self._look_now.set()
            elif first or (self.started.is_set() and not self._shard.serving):
                self._look_now.set()
            await asyncio.sleep(self._prove_s)

    # ── slots ────────────────────────────────────────────────────────────────────────────────────────────────

    async def _follow(self) -> None:
        epoch = -1
        while True:
            topology = await self._topology.changed(epoch)
            epoch = topology.epoch
            # Before anything that waits for the store: what went to others stops at once.
            if (named := self._read()) is not None:
                self._assign(named)
            self._look_now.set()

    async def _hold(self) -> None:
        while True:
            ordered = self._sightings.ordered()
            try:
                async with asyncio.timeout(ORDER_LOOK_S if ordered else self._prove_s):
                    await self._look_now.wait()
            except TimeoutError:
                pass
            whole = self._look_now.is_set() or self._shard.now - self._looked >= ticks(int(self._prove_s * 1000))
            self._look_now.clear()
            try:
                await (self._round() if whole or not ordered else self._take(ordered))
            except Unavailable as e:
                self._log.warning("slots could not be looked at", error=str(e))
                await asyncio.sleep(RETRY_S)
                self._look_now.set()

    async def _round(self) -> None:
        """One look at the topology and the store. Raises Unavailable, Deposed."""
        shard = self._shard
        self._looked = shard.now
        topology = self._read()
        if topology is None or self._proven is None:
            return
        self._assign(topology)
        await self._renew()
        await self._take(list(shard.assigned))
        if self._before is not None and shard.slots:
            self._why = ""
        if not self.started.is_set() and not self._why:
            self.started.set()
            shard.serving = True
            self._log.info("serving", slots=len(shard.slots), wanted=len(shard.assigned))
            return
        was_silent = not shard.serving
        await self._check(set(shard.slots) if was_silent else self._part())
        if was_silent and shard.now - self._proven < self._stop_ticks:
            shard.serving = True
            self._log.info("serving again: the fences are proven")

    def _read(self) -> Topology | None:
        try:
            topology = self._topology.current()
        except Unavailable:
            self._why = "no topology was read yet"
            return None
        record = topology.shards.get(self._shard.name)
        unnamed = f"the topology names no shard {self._shard.name!r} with uid {self._uid!r}"
        if record is None:
            self._may_take, self._why = False, unnamed
            return topology if self._shard.slots else None
        if record.uid == self._uid:
            self._named = self._may_take = True
            self._why = ""
            return topology
        if self._named or self._before not in (None, record.uid):
            raise Deposed(f"the topology names another process for {self._shard.name}")
        self._before, self._may_take = record.uid, True
        held = bool(self._shard.slots)
        self._why = "" if held else f"{unnamed}; its slots are taken when nobody proved them for some time"
        return topology

    def _assign(self, topology: Topology) -> None:
        """Takes the topology's word: slots that it gave to others are released and dropped."""
        shard = self._shard
        if topology.epoch == shard.topology_epoch:
            return
        shard.topology_epoch = topology.epoch
        before, shard.assigned = shard.assigned, topology.slots_of(shard.name)
        self._sightings.keep(shard.assigned)
        if self.started.is_set():
            self._coming = {
                n: self._coming.get(n, shard.now) for n in shard.assigned if n in self._coming or n not in before
            }
        # What is ours again, under a greater epoch, is kept: `_renew` has its fence follow.
        moved = {n: s.fence for n, s in shard.slots.items() if n not in shard.assigned}
        if moved:
            self._log.info("slots moved away", slots=len(moved), epoch=topology.epoch)
            self._lose(moved)
            for link in shard.links.values():
                link.not_owner(topology.epoch)
            self._background.start(self._release(moved))
        shard.tell_links()

    async def _release(self, fences: Mapping[int, Fence]) -> None:
        for _ in range(RELEASE_TRIES):
            try:
                await self._store.release(fences)
                self.released.update(n for n in fences if n not in self._shard.slots)
                return
            except Unavailable as e:
                self._log.info("slots could not be released; their new owner waits", error=str(e))
                await asyncio.sleep(RETRY_S)

    async def _take(self, slots: Iterable[int]) -> None:
        """Acquires and loads which of `slots` are assigned, not held, and free to take. Raises Unavailable."""
        shard = self._shard
        wanted = [s for s in slots if s in shard.assigned and s not in shard.slots]
        if not wanted or not self._may_take:
            return
        views = await self._store.look(wanted)
        now = shard.now
        free = {
            slot: view.fence
            for slot, view in zip(wanted, views, strict=True)
            if slot in shard.assigned
            and not self._outbid.see(slot, shard.assigned[slot], view, now)
            and self._sightings.may_acquire(slot, shard.assigned[slot], view, now, named=self._named)
        }
        if not free:
            return
        start = unix_ms()
        fences = {slot: Fence(shard.assigned[slot], start, self._token, shard.name) for slot in free}
        acquired = await self._store.acquire(fences, free)
        self.released.difference_update(acquired)
        for slot in acquired:
            self._sightings.forget(slot)
        self._log.info("slots acquired", slots=len(acquired), wanted=len(wanted))
        # The record may have gone on meanwhile: what it gave to others, or to us anew, is given back.
        stale = {slot: fence for slot, fence in acquired.items() if shard.assigned.get(slot) != fence.epoch}
        if stale:
            self._background.start(self._release(stale))
            self._look_now.set()
        mine = {slot: fence for slot, fence in acquired.items() if slot not in stale}
        if not mine:
            return
        if self.started.is_set():
            assert self._tasks is not None
            self._tasks.create_task(self._recovery.load(mine), name="load")  # others may come and go meanwhile
        else:
            await self._recovery.load(mine)

    async def _renew(self) -> None:
        """Slots that the record gave us anew: the store's fence gets the greater epoch, so that no other's older order holds
        against it. Connections and runs stay. Raises Unavailable; what the store then did shows at the next look."""
        shard = self._shard
        if not self._may_take:
            return
        older = {n: slot for n, slot in shard.slots.items() if slot.fence.epoch < shard.assigned.get(n, 0)}
        if not older:
            return
        now_ms, over = unix_ms(), asyncio.Event()
        seen: dict[int, Fence | None] = {n: slot.fence for n, slot in older.items()}
        fences = {
            n: Fence(shard.assigned[n], max(now_ms, slot.fence.start + 1), self._token, shard.name)
            for n, slot in older.items()
        }
        for slot in older.values():
            slot.renewal = over
        try:
            acquired = await self._store.acquire(fences, seen)
            for n, fence in acquired.items():
                older[n].fence = fence
        finally:
            for slot in older.values():
                slot.renewal = None
            over.set()
        self._suspects.update(n for n in older if n not in acquired and n in shard.slots)
        self._log.info("slots are ours anew", slots=len(acquired), of=len(older))
        moved = {n: fence for n, fence in acquired.items() if shard.slots.get(n) is not older[n]}
        if moved:
            self._background.start(self._release(moved))  # the record gave them to others meanwhile

    def _part(self) -> set[int]:
        """The slots to look at in this round: a rotating part, and those under suspicion."""
        held = sorted(self._shard.slots)
        if not held:
            return set()
        begin = self._turn % len(held)
        self._turn = begin + LOOK_PART
        part = {*held[begin : begin + LOOK_PART], *self._suspects}
        return part & set(held)

    async def _check(self, numbers: set[int]) -> None:
        """Looks at slots that are held. Raises Unavailable."""
        shard = self._shard
        slots = [shard.slots[n] for n in sorted(numbers | (self._suspects & set(shard.slots)))]
        if not slots:
            self._suspects.clear()
            return
        views = await self._store.look([s.number for s in slots])
        wiped: dict[int, Fence | None] = {}
        lost: list[int] = []
        for slot, view in zip(slots, views, strict=True):
            if shard.slots.get(slot.number) is not slot:
                continue
            match standing(slot.fence, view):
                case Standing.WIPED:
                    wiped[slot.number] = view.fence
                case Standing.LOST:
                    lost.append(slot.number)
        if lost:
            self._log.error("slots have a newer owner", slots=len(lost))
            self._lose(lost)
        if wiped and self._may_take:
            await self._write_again(wiped)
        self._suspects.difference_update(s.number for s in slots)

    async def _write_again(self, seen: Mapping[int, Fence | None]) -> None:
        shard = self._shard
        now_ms = unix_ms()
        fences = {
            n: Fence(shard.slots[n].fence.epoch, max(now_ms, shard.slots[n].fence.start + 1), self._token, shard.name)
            for n in seen
        }
        acquired = await self._store.acquire(fences, seen)
        raced = [n for n in seen if n not in acquired]
        if raced:
            self._suspects.update(raced)  # somebody wrote meanwhile: the next look says who
            self._look_now.set()
        try:
            await self._recovery.rewrite({n: f for n, f in acquired.items() if n in shard.slots})
        except Fenced:
            self._suspects.update(acquired)
            self._look_now.set()

    def _lose(self, numbers: Mapping[int, Fence] | list[int]) -> None:
        self._shard.lose(numbers)
        self._suspects.difference_update(numbers)
