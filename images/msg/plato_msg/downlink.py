"""Hop 4: committed batches → the shards of their addressees' connections.

    submit → [queue of batches] → routes of the batch's users, read after its commit (R2), one pipeline → parts by shard
           → one lane per shard, in order → ShardClient.deliver → untaken: look at the routes again, three looks in all
           → taken by every shard, or that shard is marked dirty → the batch is settled, `fanned_out` may pass (R7)

What three looks found nowhere because its slot is moving waits beside the lanes until the slot has an owner that took it in.
Messages of large groups go no further than to notify.py, whose notices come back to the lanes page by page, in front of
nobody: a turn takes what else waits, and NOTICE_ENTRIES of theirs; a newer notice takes the place of an unsent one.
A lane never waits for another one. An unreachable shard is tried again shortly, then marked dirty; while it stays away
each turn of its lane tries once. Memory: QUEUE batches before the routes are read (past it, submit waits), LANE_BYTES of
frames and notices per shard (past it, parts are dropped and the shard is marked dirty).
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import islice
from typing import Final, Protocol

from plato.core.errors import Unavailable
from plato.core.ids import slot_of
from plato.ports import Payload, Route, ShardClient, TopologySource
from plato.runtime import logs
from plato.runtime.process import forever
from plato.topology.record import Topology
from plato.topology.slots import members

from plato_msg import metrics
from plato_msg.core.batch import Decision
from plato_msg.core.fanout import Part, parts, users
from plato_msg.core.progress import Ticket
from plato_msg.core.windows import Windows
from plato_msg.notify import Job, MemberReader, Notifier, Targets

QUEUE: Final = 4
PART_BYTES: Final = 2 << 20
LANE_BYTES: Final = 16 << 20
LOOKS: Final = 3
LOOK_PAUSES_S: Final = (0.05, 0.15)
MOVE_LOOKS: Final = LOOKS + 10
MOVE_PAUSE_S: Final = 0.5
"""A new owner waits 3 s for one that is dead; each mark would have it begin new runs for all its sessions instead."""
RETRY_PAUSES_S: Final = (0.05, 0.2)
AWAY_PAUSE_S: Final = 0.2
DELIVER_TIMEOUT_S: Final = 2.0
DIRTY_PERIOD_S: Final = 1.0
UNTAKEN: Final = "nobody took them"
"""Why a shard that answers is marked dirty."""
NOTICE_ENTRIES: Final = 500
"""Of notices in one turn of a lane: a shard takes them within some ms."""
NOTICE_ENTRY_BYTES: Final = 128
_BACK_OFF_S: Final = 0.1


class RouteReader(Protocol):
    """What is asked of plato.router.Router. No route is cached."""

    async def read_many(self, users: Sequence[str]) -> list[dict[int, Route]]:
        """Per user, in order: {device_id: Route}. One pipeline. Raises Unavailable."""


class DirtyStore(Protocol):
    """Where the shards' dirty counters live (plato_msg.store_pg.PgMsgStore)."""

    async def mark_dirty(self, shards: Collection[str]) -> None:
        """Raises the shards' counters. Raises Unavailable."""

    async def dirty(self) -> dict[str, int]:
        """{shard: count} of all that are dirty. Raises Unavailable."""

    async def clear_dirty(self, shard: str, count: int) -> None:
        """Deletes the counter where it is unchanged. Raises Unavailable."""


class _Job:
    """One submitted batch: settled when every part of it is done."""

    def __init__(self, tickets: Sequence[Ticket]) -> None:
        self._tickets = tickets
        self._open = 1  # the dispatcher's own

    def opened(self) -> None:
        self._open += 1

    def done(self) -> None:
        self._open -= 1
        if not self._open:
            metrics.FANOUT_BATCHES.dec()
            for ticket in self._tickets:
                ticket.settle()


class Downlink:
    """The fan-out of one msg process. `run` does everything; `submit` feeds it."""

    def __init__(
        self,
        topology: TopologySource,
        routes: RouteReader,
        shards: ShardClient,
        dirty: DirtyStore,
        *,
        lane_bytes: int = LANE_BYTES,
        members: MemberReader | None = None,
        windows: Windows | None = None,
    ) -> None:
        """members, windows: for large groups; without them there are none."""
        self.topology = topology
        self._routes = routes
        self.shards = shards
        self._dirty = dirty
        self._lane_bytes = lane_bytes
        self._queue: asyncio.Queue[tuple[Sequence[Decision], Sequence[Ticket]]] = asyncio.Queue(QUEUE)
        self._lanes: dict[str, _Lane] = {}
        self._tasks: asyncio.TaskGroup | None = None
        self._marked = asyncio.Event()
        self._moving_bytes = 0
        self._notifier = Notifier(self, members, windows) if members is not None and windows is not None else None
        self._log = logs.get("downlink")

    async def submit(self, decisions: Sequence[Decision], tickets: Sequence[Ticket]) -> None:
        """Hands over a batch whose transaction has committed. Waits while QUEUE batches wait."""
        metrics.FANOUT_BATCHES.inc()
        await self._queue.put((decisions, tickets))

    async def run(self) -> None:
        """Runs until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            self._tasks = tasks
            tasks.create_task(forever("dirty", self._clean()), name="dirty")
            if self._notifier is not None:
                tasks.create_task(forever("notify", self._notifier.run()), name="notify")
            while True:
                decisions, tickets = await self._queue.get()
                job = _Job(tickets)
                routes = await self.read_routes(users(decisions))
                for shard, part in parts(decisions, routes, self.topology.current(), PART_BYTES):
                    self.hand_over(shard, part, [job], look=1)
                await self._note_large(decisions, job)
                job.done()

    async def _note_large(self, decisions: Iterable[Decision], job: _Job) -> None:
        newest: dict[str, tuple[int, int]] = {}
        for d in decisions:
            if d.large and d.outcome.seq and not d.repeated:
                conversation_id = d.uplink.conversation_id
                newest[conversation_id] = max(newest.get(conversation_id, (0, 0)), (d.outcome.seq, d.large))
        for conversation_id, (seq, size) in newest.items():
            assert self._notifier is not None
            await self._notifier.note(conversation_id, seq, size, job)

    def topology_now(self) -> Topology:
        """The record that routes are judged by."""
        return self.topology.current()

    def notify(self, shard: str, conversation_id: str, payload: Payload, targets: Targets, jobs: Sequence[Job]) -> None:
        """Puts a notice on a shard's lane, or joins it with an unsent one of that conversation; the jobs wait for it."""
        for job in jobs:
            job.opened()
        self._lane(shard).notify(conversation_id, payload, targets, jobs)

    def hand_over(self, shard: str, part: Part, jobs: Sequence[Job], look: int) -> None:
        """Puts a part on a shard's lane; the jobs that it is of wait for it."""
        for job in jobs:
            job.opened()
        self._lane(shard).add(part, jobs, look)

    def _lane(self, shard: str) -> _Lane:
        lane = self._lanes.get(shard)
        if lane is None:
            assert self._tasks is not None
            lane = self._lanes[shard] = _Lane(shard, self, self._lane_bytes)
            self._tasks.create_task(forever(f"lane {shard}", lane.run()), name=f"lane {shard}")
        return lane

    async def mark_dirty(self, shards: Collection[str], entries: int, why: str) -> None:
        """Marks shards dirty; returns when that is durable. why: for the log."""
        metrics.FANOUT.labels("dirty").inc(entries)
        self._log.warning("marked dirty", shards=sorted(shards), entries=entries, why=why)
        while True:
            try:
                await self._dirty.mark_dirty(shards)
            except Unavailable:
                await asyncio.sleep(_BACK_OFF_S)
            else:
                self._marked.set()
                return

    async def look_again(self, addressees: Iterable[tuple[str, int]]) -> dict[tuple[str, int], int]:
        """{(user, device_id): conn_id} as of now, for those that are connected. Raises Unavailable."""
        devices = set(addressees)
        names = sorted({user for user, _ in devices})
        routes = dict(zip(names, await self._routes.read_many(names), strict=True))
        return {
            (user, device_id): route.conn_id
            for user, device_id in devices
            if (route := routes[user].get(device_id)) is not None and route.conn_id
        }

    def wait_for_move(self, part: Part, jobs: Sequence[Job], look: int) -> bool:
        """Keeps a part whose slots are moving for a later look; False: there is no room."""
        if self._moving_bytes + part.size_bytes > self._lane_bytes:
            return False
        assert self._tasks is not None
        self._moving_bytes += part.size_bytes
        for job in jobs:
            job.opened()
        self._tasks.create_task(self._after_move(part, jobs, look), name="moving")
        return True

    async def _after_move(self, part: Part, jobs: Sequence[Job], look: int) -> None:
        await asyncio.sleep(MOVE_PAUSE_S)
        while True:
            try:
                found = await self.look_again(part.addressees)
                break
            except Unavailable:
                await asyncio.sleep(MOVE_PAUSE_S)
        topology = self.topology.current()
        by_shard: dict[str, Part] = {}
        for entry, addressee in zip(part.entries, part.addressees, strict=True):
            conn_id = found.get(addressee)
            if conn_id is not None:
                owner = topology.owner(slot_of(conn_id)).shard
                by_shard.setdefault(owner, Part()).add(part.payloads[entry.payload], conn_id, addressee)
        for shard, theirs in by_shard.items():
            self.hand_over(shard, theirs, jobs, look)
        self._moving_bytes -= part.size_bytes
        for job in jobs:
            job.done()

    async def read_routes(self, names: list[str]) -> Mapping[str, Mapping[int, Route]]:
        """Of all of them; tries until it can."""
        while True:
            try:
                return dict(zip(names, await self._routes.read_many(names), strict=True))
            except Unavailable as e:
                self._log.warning("routes cannot be read", reason=str(e))
                await asyncio.sleep(_BACK_OFF_S)

    async def _clean(self) -> None:
        """Sends the dirty shards their counters until they are done."""
        while True:
            try:
                dirty = await self._dirty.dirty()
                metrics.DIRTY.set(len(dirty))
                await asyncio.gather(*(self._clean_one(shard, count) for shard, count in dirty.items()))
            except Unavailable:
                pass
            self._marked.clear()
            try:
                async with asyncio.timeout(DIRTY_PERIOD_S):
                    await self._marked.wait()
            except TimeoutError:
                pass

    async def _clean_one(self, shard: str, count: int) -> None:
        topology = self.topology.current()
        if shard not in topology.shards and all(r.shard != shard for r in topology.slots):
            # It is gone, its slots were loaded by others, and that began new runs.
            await self._dirty.clear_dirty(shard, count)
            return
        try:
            async with asyncio.timeout(DELIVER_TIMEOUT_S):
                done = await self.shards.dirty(shard, count)
        except (Unavailable, TimeoutError):
            return
        if done >= count:
            await self._dirty.clear_dirty(shard, count)


class _Notice:
    """What is to be told to devices of one shard about one conversation."""

    def __init__(self, payload: Payload) -> None:
        self.payload = payload
        self.targets: Targets = {}
        self.jobs: list[Job] = []


class _Lane:
    """Everything on its way to one shard: parts in order, notices beside them."""

    def __init__(self, shard: str, downlink: Downlink, limit_bytes: int) -> None:
        self._shard = shard
        self._downlink = downlink
        self._parts: deque[tuple[Part | None, Sequence[Job], int]] = deque()  # None: dropped for want of room
        self._notices: dict[str, _Notice] = {}
        self._bytes = 0
        self._limit_bytes = limit_bytes
        self._dropped = 0
        self._filled = asyncio.Event()
        self._away = False

    def add(self, part: Part, jobs: Sequence[Job], look: int) -> None:
        if self._bytes + part.size_bytes > self._limit_bytes and self._parts:
            self._dropped += len(part.entries)
            self._parts.append((None, jobs, look))
        else:
            self._bytes += part.size_bytes
            self._parts.append((part, jobs, look))
        self._filled.set()

    def notify(self, conversation_id: str, payload: Payload, targets: Targets, jobs: Sequence[Job]) -> None:
        notice = self._notices.get(conversation_id)
        fresh = len(targets.keys() - notice.targets.keys()) if notice is not None else len(targets)
        if self._bytes + fresh * NOTICE_ENTRY_BYTES > self._limit_bytes and (self._parts or self._notices):
            self._dropped += len(targets)
            self._parts.append((None, jobs, 1))
        else:
            if notice is None:
                notice = self._notices[conversation_id] = _Notice(payload)
            self._bytes += fresh * NOTICE_ENTRY_BYTES
            notice.payload = payload
            notice.targets.update(targets)
            notice.jobs += jobs
        self._filled.set()

    async def run(self) -> None:
        while True:
            await self._filled.wait()
            turn, jobs, look, dropped = self._take()
            if dropped:
                await self._downlink.mark_dirty([self._shard], dropped, "too much waits")
            if turn.entries:
                await self._deliver(turn, jobs, look)
            for job in jobs:
                job.done()
            if self._away:
                await asyncio.sleep(AWAY_PAUSE_S)

    def _take(self) -> tuple[Part, list[Job], int, int]:
        """What waits, joined up to PART_BYTES, and notices; parts that already had a look stay alone."""
        turn, look, dropped = Part(), 1, 0
        jobs: list[Job] = []
        while self._parts:
            part, part_jobs, part_look = self._parts[0]
            full = part is not None and (turn.size_bytes + part.size_bytes > PART_BYTES or part_look != look)
            if full and turn.entries:
                break
            self._parts.popleft()
            jobs += part_jobs
            if part is None:
                dropped, self._dropped = dropped + self._dropped, 0
                continue
            self._bytes -= part.size_bytes
            look = part_look
            for entry, addressee in zip(part.entries, part.addressees, strict=True):
                turn.add(part.payloads[entry.payload], entry.conn_id, addressee)
        if look == 1:
            jobs += self._take_notices(turn)
        if not self._parts and not self._notices:
            self._filled.clear()
        return turn, jobs, look, dropped

    def _take_notices(self, turn: Part) -> list[Job]:
        """Up to NOTICE_ENTRIES, of one conversation after the other; the jobs that are to be done with them."""
        jobs: list[Job] = []
        # A shard that does not answer gets everything in the one try of its turn: else a hanging one would hold the rest.
        room = NOTICE_ENTRIES if not self._away else sum(len(n.targets) for n in self._notices.values())
        while room and self._notices:
            conversation_id = next(iter(self._notices))
            notice = self._notices.pop(conversation_id)
            for addressee in list(islice(notice.targets, room)):
                turn.add(notice.payload, notice.targets.pop(addressee), addressee)
                room -= 1
                self._bytes -= NOTICE_ENTRY_BYTES
            jobs += notice.jobs
            if notice.targets:  # the rest holds the jobs, too, and lets other conversations pass
                for job in notice.jobs:
                    job.opened()
                self._notices[conversation_id] = notice
        return jobs

    async def _deliver(self, part: Part, jobs: Sequence[Job], look: int) -> None:
        """One part to its end: taken, given to another lane, or the shard is dirty."""
        while True:
            untaken = await self._try(part)
            if untaken is None:
                await self._downlink.mark_dirty([self._shard], len(part.entries), "no answer")
                return
            metrics.FANOUT.labels("taken").inc(len(part.entries) - len(untaken))
            if not untaken:
                return
            metrics.FANOUT.labels("untaken").inc(len(untaken))
            if look >= LOOKS:
                await self._give_up(part, untaken, jobs, look)
                return
            await asyncio.sleep(LOOK_PAUSES_S[look - 1])
            look += 1
            rest = await self._look_again(part, untaken, jobs, look)
            if rest is None:
                await self._give_up(part, untaken, jobs, look)
                return
            part = rest
            if not part.entries:
                return

    async def _try(self, part: Part) -> list[int] | None:
        """The entries that were not taken; None: the shard does not answer."""
        for pause_s in (*(() if self._away else RETRY_PAUSES_S), None):
            try:
                async with asyncio.timeout(DELIVER_TIMEOUT_S):
                    untaken = await self._downlink.shards.deliver(self._shard, part.payloads, part.entries)
            except Unavailable:
                if pause_s is not None:
                    await asyncio.sleep(pause_s)
            except TimeoutError:
                break  # it hangs: each further try would hold the lane as long
            else:
                self._away = False
                return untaken
        self._away = True
        return None

    async def _look_again(self, part: Part, untaken: list[int], jobs: Sequence[Job], look: int) -> Part | None:
        """Reads the routes of what was not taken: what still belongs here comes back, the rest goes to its lane. A device
        that has no connection is done: its next Sync reads what is stored. None: the routes cannot be read."""
        try:
            found = await self._downlink.look_again(part.addressees[i] for i in untaken)
        except Unavailable:
            return None
        topology = self._downlink.topology.current()
        here: Part = Part()
        elsewhere: dict[str, Part] = {}
        for i in untaken:
            addressee = part.addressees[i]
            conn_id = found.get(addressee)
            if conn_id is None:
                continue
            shard = topology.owner(slot_of(conn_id)).shard
            target = here if shard == self._shard else elsewhere.setdefault(shard, Part())
            target.add(part.payloads[part.entries[i].payload], conn_id, addressee)
        for shard, moved in elsewhere.items():
            # Which of the joined jobs an entry is of is not kept: all of them wait.
            self._downlink.hand_over(shard, moved, jobs, look)
        return here

    async def _give_up(self, part: Part, untaken: list[int], jobs: Sequence[Job], look: int) -> None:
        """Nobody took these: what is on the move gets later looks, the owners of the other slots are marked dirty."""
        topology = self._downlink.topology.current()
        move = topology.move if look < MOVE_LOOKS else None
        moving = members(move.slots) if move is not None else set()
        rest = Part()
        for i in untaken:
            if slot_of(part.entries[i].conn_id) in moving:
                rest.add(part.payloads[part.entries[i].payload], part.entries[i].conn_id, part.addressees[i])
        if rest.entries and self._downlink.wait_for_move(rest, jobs, look + 1):
            untaken = [i for i in untaken if slot_of(part.entries[i].conn_id) not in moving]
        owners = {topology.owner(slot_of(part.entries[i].conn_id)).shard for i in untaken}
        if owners:
            await self._downlink.mark_dirty(owners, len(untaken), UNTAKEN)
