"""What the connection machine asks for is done here: route reads in batches, commits, ends, questions to msg.

    uplink, timers, ownership ─▸ run(connection, actions) ─▸ downlink (frames)
                                          │
                 reads ◂── one pipeline per round, the next one gathers meanwhile
                 resumes, commits, ends, Sync and Pull ◂── tasks, bounded in number

A connection that was forgotten meanwhile gets nothing: every result looks it up again. Memory: an entry per connection
in each queue at most, save `MAX_REQUESTS` questions to msg.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from itertools import islice
from typing import Final, TypeVar

from plato.core.codes import Code
from plato.core.errors import Fenced, Unavailable
from plato.core.ids import slot_of
from plato.ports import MsgClient, Route, Session, SessionStore, ShardClient, TopologySource
from plato.router import Router
from plato.runtime import logs
from plato.runtime.process import forever
from plato.wire.v1.client_pb2 import PULL, SYNC

from plato_state import metrics
from plato_state.core import actions as do
from plato_state.core import answers
from plato_state.core.actions import Action
from plato_state.core.answers import Kind
from plato_state.core.session import Connection, Phase
from plato_state.downlink import Downlink
from plato_state.shard import TICK_MS, Background, Shard, Slot, pending_ticks

READS_PER_ROUND: Final = 500
RESUMES_PER_ROUND: Final = 128
ENDS_PER_ROUND: Final = 256
STORE_TASKS: Final = 64
MSG_TASKS: Final = 128
RETRY_S: Final = 0.5

_Question = TypeVar("_Question")


class Sessions:
    """Runs actions. `main()` is the loops that belong to it."""

    def __init__(
        self,
        shard: Shard,
        downlink: Downlink,
        store: SessionStore,
        router: Router,
        shards: ShardClient,
        msg: MsgClient,
        topology: TopologySource,
    ) -> None:
        self._shard = shard
        self._downlink = downlink
        self._store = store
        self._router = router
        self._shards = shards
        self._msg = msg
        self._topology = topology
        self._log = logs.get("sessions")
        self._background = Background(metrics.ERRORS.inc)
        self._reads: dict[int, tuple[Connection, do.AskRoute | None]] = {}
        """By conn_id; None: a heartbeat's check. A newer question takes the place of one that was not put yet: the
        machine ignores the older one's answer."""
        self._checking: set[int] = set()
        """conn_ids whose route is being asked for by a heartbeat, from the question to its answer: one at a time."""
        self._resumes: dict[int, tuple[Connection, do.AskSession]] = {}
        self._ends: deque[tuple[Connection | None, do.End | do.Remove]] = deque()
        self._work = {name: asyncio.Event() for name in ("reads", "resumes", "ends")}
        self._store_room = asyncio.Semaphore(STORE_TASKS)
        self._msg_room = asyncio.Semaphore(MSG_TASKS)
        self._removing: dict[int, asyncio.Event] = {}
        self._pending: deque[tuple[int, Connection, Kind, int]] = deque()
        self._pending_ticks = pending_ticks(shard.settings.pending_ms)
        self.replay: Callable[[Connection, Iterable[bytes]], None] = lambda _, __: None
        """Handles frames that waited for a guest's commit; set by uplink."""
        self.suspect: Callable[[int], None] = lambda _: None
        """Has ownership look at a slot whose fence was refused; set by ownership."""

    def run(self, connection: Connection, actions: Iterable[Action]) -> None:
        """Does what the machine asks for, in order."""
        conn_id = connection.conn_id
        shard, downlink = self._shard, self._downlink
        for action in actions:
            match action:
                case do.Send():
                    downlink.send(conn_id, action.frame)
                case do.Arm():
                    shard.arm(conn_id, action.after_ms)
                case do.CheckRoute():
                    if conn_id not in self._checking:
                        self._checking.add(conn_id)
                        self._reads.setdefault(conn_id, (connection, None))
                        self._work["reads"].set()
                case do.Close():
                    downlink.close(conn_id, action.frame)
                case do.Forget():
                    shard.forget(connection)
                case do.Await():
                    self._pending.append((shard.now + self._pending_ticks, connection, action.kind, action.ref))
                case do.AskRoute():
                    self._reads[conn_id] = connection, action
                    self._work["reads"].set()
                case do.AskSession():
                    self._resumes[conn_id] = connection, action
                    self._work["resumes"].set()
                case do.Commit():
                    self._background.start(self._commit(connection, action))
                case do.AskSync():
                    self._background.start(self._ask_sync(connection, action))
                case do.AskPull():
                    self._background.start(self._ask_pull(connection, action))
                case do.TellReplaced():
                    self.tell_replaced(action.conn_id, conn_id, Code.REPLACED)
                case do.End():
                    shard.life.cancel(conn_id)
                    shard.repeats.cancel(conn_id)
                    self._ends.append((connection, action))
                    self._work["ends"].set()
                case do.Remove():
                    self._ends.append((None, action))
                    self._work["ends"].set()
                case do.RestoreRoute():
                    self._background.start(self._restore(connection, action))
                case do.Replay():
                    self.replay(connection, action.frames)

    def pend(self) -> None:
        """One tick: what waits for its answer too long is told so (R3)."""
        now = self._shard.now
        while self._pending and self._pending[0][0] <= now:
            _, connection, kind, ref = self._pending.popleft()
            if connection.awaits(kind, ref):
                self._tell_pending(connection, kind, ref)

    def replaced(self, conn_id: int, by_conn_id: int, code: Code) -> None:
        """A newer session of the device of `conn_id`, a connection of ours, committed."""
        connection = self._shard.connections.get(conn_id)
        if connection is not None and (actions := connection.replaced(code)):
            self._log.info("replaced", conn_id=conn_id, by_conn_id=by_conn_id)
            self.run(connection, actions)

    def tell_replaced(self, conn_id: int, by_conn_id: int, code: Code) -> None:
        """Tells the owner of `conn_id` that `by_conn_id` took its place. A hint: its heartbeats find it too."""
        slot = slot_of(conn_id)
        if slot in self._shard.slots:
            self.replaced(conn_id, by_conn_id, code)
            return
        try:
            owner = self._topology.current().owner(slot).shard
        except Unavailable:
            return
        if owner != self._shard.name:
            self._background.start(self._tell_shard(owner, conn_id, by_conn_id, code))

    async def main(self) -> None:
        """Reads routes, finds resumed sessions, ends sessions; until cancelled."""
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(forever("routes", self._read_routes()), name="routes")
                group.create_task(forever("resumes", self._find_sessions()), name="resumes")
                group.create_task(forever("ends", self._end_sessions()), name="ends")
        finally:
            await self._background.stop()

    # ── reads ────────────────────────────────────────────────────────────────────────────────────────────────

    async def _read_routes(self) -> None:
        while True:
            await self._work["reads"].wait()
            self._work["reads"].clear()
            while self._reads:
                batch = _take(self._reads, READS_PER_ROUND)
                try:
                    await self._read_batch(batch)
                finally:
                    self._checking.difference_update([connection.conn_id for connection, _ in batch])

    async def _read_batch(self, batch: list[tuple[Connection, do.AskRoute | None]]) -> None:
        wanted: list[tuple[Connection, do.AskRoute | None, str, int]] = []
        for connection, ask in batch:
            if ask is not None:
                wanted.append((connection, ask, ask.user, ask.device_id))
                continue
            if connection.session is not None:  # a heartbeat's check
                wanted.append((connection, None, connection.session.user, connection.session.device_id))
        if not wanted:
            return
        try:
            routes = await self._router.read_many([user for _, _, user, _ in wanted])
        except Unavailable as e:
            self._log.debug("routes could not be read", error=str(e))
            for connection, ask, _, _ in wanted:
                if ask is not None and self._knows(connection):
                    self.run(connection, connection.unavailable(ask.serial))
            return
        for (connection, ask, _, device_id), devices in zip(wanted, routes, strict=True):
            if not self._knows(connection):
                continue
            route = devices.get(device_id)
            if ask is None:
                self.run(connection, connection.route_checked(route))
            elif route is None and self._crowded(devices):
                self._log.info("a user has too many devices for one more", user=ask.user, devices=len(devices))
                self.run(connection, connection.crowded(ask.serial))
            else:
                self.run(connection, connection.route_read(ask.serial, route))

    def _crowded(self, devices: Mapping[int, Route]) -> bool:
        """Whether a user with these routes has no room for one more device. The commit looks again."""
        most = self._shard.settings.max_devices_per_user
        return len(devices) >= most and sum(bool(route.conn_id) for route in devices.values()) >= most

    async def _find_sessions(self) -> None:
        while True:
            await self._work["resumes"].wait()
            self._work["resumes"].clear()
            while self._resumes:
                batch = _take(self._resumes, RESUMES_PER_ROUND)
                await self._find_batch(batch)

    async def _find_batch(self, batch: list[tuple[Connection, do.AskSession]]) -> None:
        try:
            olds = await self._get_all([ask.conn_id for _, ask in batch])
            users = [old.user if old is not None else "" for old in olds]
            devices = await self._router.read_many([user for user in users if user])
            by_user = iter(devices)
            routes: list[Route | None] = []
            for old in olds:
                routes.append(next(by_user).get(old.device_id) if old is not None else None)
            currents = await self._get_all([route.conn_id if route is not None else 0 for route in routes])
        except Unavailable as e:
            self._log.debug("sessions could not be found", error=str(e))
            for connection, ask in batch:
                if self._knows(connection):
                    self.run(connection, connection.unavailable(ask.serial))
            return
        for (connection, ask), old, route, current in zip(batch, olds, routes, currents, strict=True):
            if self._knows(connection):
                self.run(connection, connection.session_found(ask.serial, old, route, current))

    async def _get_all(self, conn_ids: list[int]) -> list[Session | None]:
        async def get(conn_id: int) -> Session | None:
            return await self._store.get(conn_id) if conn_id else None

        found = await asyncio.gather(*(get(c) for c in conn_ids), return_exceptions=True)
        out: list[Session | None] = []
        for item in found:
            if isinstance(item, BaseException):
                raise item
            out.append(item)
        return out

    # ── commit and end ───────────────────────────────────────────────────────────────────────────────────────

    async def _commit(self, connection: Connection, action: do.Commit) -> None:
        mine = action.session
        slot = self._shard.slots.get(slot_of(mine.conn_id))
        done: bool | None = None
        if slot is not None and slot.loaded:
            removal = self._removing.get(mine.conn_id)
            if removal is not None:
                await removal.wait()
            if action.seen is None:
                mine = connection.first_statement(slot.fence.start) or mine
            async with self._store_room:
                try:
                    done = await self._state(slot, mine, action.seen)
                    if not done and action.seen is None and (floor := await self._router.floor(mine.user)) >= mine.gen:
                        # Another owner's fence, a younger one, gave the statements that were dropped their gens.
                        mine = connection.first_statement(floor + 1) or mine
                        done = await self._state(slot, mine, None)
                    if not done and connection.unsure:
                        await self._end_route(mine)  # what came first may be its own, under a fence of before
                except Fenced:
                    self.suspect(slot.number)
                except Unavailable as e:
                    self._log.debug("a commit is unknown", conn_id=mine.conn_id, error=str(e))
        metrics.LOGINS.labels({True: "done", False: "try_again", None: "unknown"}[done]).inc()
        if not self._knows(connection) or slot is None:
            return
        if done:
            self._log.info("committed", conn_id=mine.conn_id, user=mine.user, gen=mine.gen, guest=mine.guest)
        self.run(connection, connection.committed(done, slot.run))

    async def _state(self, slot: Slot, mine: Session, seen: Route | None) -> bool:
        """Writes a session and its route. False: another commit came first, or there is no room for one more device."""
        # The session first: a route never names a session that nobody could load.
        await self._put(slot, mine)
        most = self._shard.settings.max_devices_per_user
        route = await self._router.commit(mine.user, mine.device_id, seen, mine.conn_id, first_gen=mine.gen, most=most)
        return route is not None

    async def _put(self, slot: Slot, mine: Session) -> None:
        """Writes a session under the slot's fence, whichever that is when it arrives. Raises Fenced and Unavailable."""
        while True:
            fence = slot.fence
            try:
                await self._store.put(slot.number, fence, [mine])
                return
            except Fenced:
                if slot.renewal is not None:
                    await slot.renewal.wait()
                if slot.fence == fence:
                    raise

    async def _end_sessions(self) -> None:
        while True:
            await self._work["ends"].wait()
            self._work["ends"].clear()
            while self._ends:
                batch = [self._ends.popleft() for _ in range(min(ENDS_PER_ROUND, len(self._ends)))]
                if not await self._end_batch(batch):
                    await asyncio.sleep(RETRY_S)

    async def _end_batch(self, batch: list[tuple[Connection | None, do.End | do.Remove]]) -> bool:
        """Ends what it can; puts the rest back. False: the store is away."""
        by_slot: dict[int, list[tuple[Connection | None, do.End | do.Remove]]] = {}
        finished = asyncio.Event()
        for connection, action in batch:
            conn_id = action.session.conn_id
            known = self._shard.connections.get(conn_id)
            if connection is None and known is not None and known.session is not None:
                continue  # a removal that was overtaken: this connection committed again
            self._removing[conn_id] = finished  # from here on a commit of it waits
            by_slot.setdefault(slot_of(conn_id), []).append((connection, action))
        try:
            results = await asyncio.gather(*(self._end_slot(s, items) for s, items in by_slot.items()))
        finally:
            finished.set()
            for _, action in batch:
                self._removing.pop(action.session.conn_id, None)
        return all(results)

    async def _end_slot(self, number: int, items: list[tuple[Connection | None, do.End | do.Remove]]) -> bool:
        slot = self._shard.slots.get(number)
        if slot is None:
            return True  # lost: its new owner ends them
        conn_ids = [action.session.conn_id for _, action in items]
        async with self._store_room:
            try:
                for _, action in items:
                    if isinstance(action, do.End):
                        # The route first: after a crash between the two it names nothing that is not there.
                        await self._end_route(action.session)
                await self._store.remove(number, slot.fence, conn_ids)
            except Fenced:
                self.suspect(number)
                self._ends.extend(items)
                return False
            except Unavailable as e:
                self._log.debug("sessions could not be ended", error=str(e))
                self._ends.extend(items)
                return False
        for connection, action in items:
            metrics.ENDED.labels("ended" if connection is not None else "removed").inc()
            if connection is not None:
                self._log.info("session ended", conn_id=action.session.conn_id, user=action.session.user)
                self._shard.forget(connection)
        return True

    async def _end_route(self, ended: Session) -> None:
        """Ends the route that names a session, if one does. Raises Unavailable."""
        user, device_id = ended.user, ended.device_id
        if await self._router.end(user, device_id, Route(ended.conn_id, ended.gen)):
            return
        # An earlier commit of it, whose answer was lost, may have written another gen: nobody else would ever end that one,
        # and it would hold a device's place for good.
        route = await self._router.read(user, device_id)
        if route is not None and route.conn_id == ended.conn_id:
            await self._router.end(user, device_id, route)

    async def _restore(self, connection: Connection, action: do.RestoreRoute) -> None:
        mine = action.session
        slot = self._shard.slots.get(slot_of(mine.conn_id))
        if slot is None or not slot.loaded or not self._knows(connection) or connection.phase is not Phase.LIVE:
            return
        try:
            async with self._store_room:
                # What lost the route may have lost the session with it: whoever owns the slot next could not load it, and
                # the route would live for ever.
                await self._put(slot, mine)
                stands = await self._router.restore(
                    mine.user, mine.device_id, Route(mine.conn_id, mine.gen), action.seen
                )
                if not stands and action.seen is None and await self._router.floor(mine.user) >= mine.gen:
                    # It was ended from outside, and then the record was full: what ended it was dropped.
                    self._log.info("a session whose route was dropped ends", conn_id=mine.conn_id)
                    self.run(connection, connection.replaced(Code.SESSION_UNKNOWN))
                    return
        except Fenced:
            self.suspect(slot.number)
            return
        except Unavailable:
            return  # the next heartbeat finds it
        self._log.warning("a route was missing and was written again", conn_id=mine.conn_id, stands=stands)

    async def _tell_shard(self, owner: str, conn_id: int, by_conn_id: int, code: Code) -> None:
        try:
            await self._shards.replaced(owner, conn_id, by_conn_id, code)
        except Unavailable as e:
            self._log.debug("replaced could not be told", shard=owner, conn_id=conn_id, error=str(e))

    # ── questions to msg ─────────────────────────────────────────────────────────────────────────────────────

    async def _ask_sync(self, connection: Connection, ask: do.AskSync) -> None:
        shard = self._shard
        if retry_ms := shard.admission.read(shard.now_ms):
            connection.request_done()
            self._answer(connection, answers.synced_refusal(Code.BUSY, ask.ref, retry_ms))
            return
        user = connection.session.user if connection.session is not None else ""
        late = self._late(connection, SYNC, ask.ref)
        try:
            async with self._msg_room:
                frame = answers.synced(await self._msg.sync(user, ask.request))
        except Unavailable:
            frame = answers.synced_refusal(Code.UNAVAILABLE, ask.ref)
        finally:
            late.cancel()
            connection.request_done()
            shard.admission.reads.done(shard.now_ms)
        self._answer(connection, frame)

    async def _ask_pull(self, connection: Connection, ask: do.AskPull) -> None:
        shard = self._shard
        if retry_ms := shard.admission.read(shard.now_ms):
            connection.request_done()
            self._answer(connection, answers.pulled_refusal(Code.BUSY, ask.ref, ask.conversation, retry_ms))
            return
        user = connection.session.user if connection.session is not None else ""
        late = self._late(connection, PULL, ask.ref)
        try:
            async with self._msg_room:
                frame = answers.pulled(await self._msg.pull(user, ask.request))
        except Unavailable:
            frame = answers.pulled_refusal(Code.UNAVAILABLE, ask.ref, ask.conversation)
        finally:
            late.cancel()
            connection.request_done()
            shard.admission.reads.done(shard.now_ms)
        self._answer(connection, frame)

    def _late(self, connection: Connection, kind: Kind, ref: int) -> asyncio.TimerHandle:
        delay_s = self._pending_ticks * TICK_MS / 1000
        return asyncio.get_running_loop().call_later(delay_s, self._tell_pending, connection, kind, ref)

    def _tell_pending(self, connection: Connection, kind: Kind, ref: int) -> None:
        if self._knows(connection):
            self._downlink.send(connection.conn_id, answers.ack(kind, Code.PENDING, connection.conn_id, ref))

    def _answer(self, connection: Connection, frame: bytes) -> None:
        if self._knows(connection) and connection.phase is Phase.LIVE:
            self._downlink.send(connection.conn_id, frame)

    def _knows(self, connection: Connection) -> bool:
        return self._shard.connections.get(connection.conn_id) is connection


def _take(questions: dict[int, _Question], at_most: int) -> list[_Question]:
    """Takes the oldest ones out."""
    return [questions.pop(conn_id) for conn_id in list(islice(questions, at_most))]
