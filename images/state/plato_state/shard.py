"""The tables of one state shard: its slots, connections, gateway streams and timers. The parts around it share them.

    server ─▸ uplink ─▸ sessions ─▸ downlink ─▸ server        timers turn the wheels; ownership says which slots are ours
                 └─▸ bus ─▸ (acks) ─┘

Everything runs in one event loop, so tables change only between awaits. Memory: per connection one Connection and two
wheel entries at most; per stream what `downlink` bounds; per shard what `batcher` bounds.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable
from typing import Any, Final

from plato.core.ids import slot_of, worker_id_of
from plato.ports import Fence
from plato.runtime import logs
from plato.runtime.settings import StateSettings

from plato_state.core.admission import Admission
from plato_state.core.answers import Told
from plato_state.core.attaches import Attaches, bitmap_of_slots
from plato_state.core.batcher import Batcher
from plato_state.core.checks import max_body_bytes
from plato_state.core.pushes import first_run
from plato_state.core.session import Connection, Rules
from plato_state.core.table import Table
from plato_state.core.turns import Turns
from plato_state.core.uplinks import Ticket
from plato_state.core.wheel import Wheel, spread
from plato_state.stream import LinkStream

TICK_MS: Final = 25


def ticks(ms: int) -> int:
    """Milliseconds in ticks, rounded up, at least one."""
    return max(1, -(-ms // TICK_MS))


def pending_ticks(ms: int) -> int:
    """When PENDING is said, so that it leaves before `ms` passed even if a tick or two come late."""
    return max(1, ms * 9 // 10 // TICK_MS)


class Slot:
    """A slot that this shard acquired."""

    __slots__ = ("fence", "loaded", "number", "renewal", "since")

    def __init__(self, number: int, fence: Fence, since: int) -> None:
        self.number = number
        self.fence = fence
        self.loaded = False
        """True once every session of the store is in `connections`; only then it is served."""
        self.since = since
        """Tick of the acquisition."""
        self.renewal: asyncio.Event | None = None
        """While the fence is being replaced by a greater one of ours: set when that is over."""

    @property
    def run(self) -> int:
        """The first run of this acquisition."""
        return first_run(self.fence.start)


class Shard:
    """What the parts of one state process share."""

    def __init__(self, name: str, settings: StateSettings, guests: bool, max_frame_bytes: int) -> None:
        self.name = name
        self.settings = settings
        self.body_limit_bytes = max_body_bytes(max_frame_bytes)
        floor_ms, ceiling_ms = settings.heartbeat_bounds_ms
        self.rules = Rules(
            login_timeout_ms=settings.login_timeout_ms,
            heartbeat_ms=settings.heartbeat_ms,
            resume_window_ms=settings.resume_window_ms,
            max_uplinks=settings.max_uplinks_per_connection,
            guests=guests,
            told=Told(
                resume_window_ms=settings.resume_window_ms,
                reconnect_delay_ms=settings.reconnect_delay_ms,
                repeat_min_ms=settings.repeat_min_ms,
                repeat_max_ms=settings.repeat_max_ms,
                max_body_bytes=self.body_limit_bytes,
                heartbeat_floor_ms=floor_ms,
                heartbeat_ceiling_ms=ceiling_ms,
                connect_delay_ms=settings.connect_delay_ms,
                connect_timeout_ms=settings.connect_timeout_ms,
            ),
        )
        self.connections = Table()
        """Every connection of a loaded slot, and every session that waits for its client."""
        self.live = 0
        """How many of them are in use, as of the last second."""
        self.slots: dict[int, Slot] = {}
        """Acquired slots. Written by ownership and recovery."""
        self.assigned: dict[int, int] = {}
        """Slot → epoch, as the topology has it now; we hold most of these."""
        self.topology_epoch = 0
        self.links: dict[int, LinkStream] = {}
        """Gateway streams by the gateway's worker_id."""
        self.silent_since: dict[tuple[int, int], int] = {}
        """(worker_id, worker) → the tick at which its announcement lost its stream; 0, our start: never announced."""
        self.workers: dict[int, int] = {}
        """worker_id → how many workers its gateway had when its stream ended."""
        self.attaches = Attaches()
        self.batcher = Batcher(settings.bus_queue_bytes)
        self.admission = Admission(
            settings.connection_uplinks_per_s,
            settings.user_uplinks_per_s,
            settings.bus_calm_ms,
            settings.receipt_calm_ms,
        )
        self.life: Wheel[int] = Wheel()
        self.repeats: Wheel[int] = Wheel(1024)
        self.serving = False
        """True while streams and deliveries are answered: slots were loaded, and fences are proven (R5)."""
        self.dirty_done = 0
        """The greatest dirty count for which every session is in a new run."""
        self.turns = Turns(settings.logins_per_s)

    @property
    def now(self) -> int:
        """The current tick."""
        return self.life.now

    def stream_of(self, conn_id: int) -> LinkStream | None:
        """The gateway stream of a connection; None: it is down."""
        return self.links.get(worker_id_of(conn_id))

    def stream_down_ms(self, conn_id: int) -> int | None:
        """How long nobody could speak for this connection; None: its worker is attached and announced."""
        worker_id = worker_id_of(conn_id)
        link = self.links.get(worker_id)
        workers = link.workers if link is not None else self.workers.get(worker_id, 1)
        worker = slot_of(conn_id) % workers
        if link is not None and worker in link.announced:
            return None
        return (self.now - self.silent_since.get((worker_id, worker), 0)) * TICK_MS

    def detached(self, link: LinkStream) -> None:
        """A gateway's stream ended: nobody speaks for its connections until their workers announce them again."""
        if self.links.get(link.worker_id) is link:
            del self.links[link.worker_id]
        self.workers[link.worker_id] = link.workers
        for worker in link.announced:
            self.silent_since[link.worker_id, worker] = self.now
        link.announced.clear()
        self.attaches.detach(link.worker_id)

    def grace_ms(self, conn_id: int) -> int:
        """How long this slot's owner still ends no session: as long as others would wait before they took it (R5)."""
        slot = self.slots.get(slot_of(conn_id))
        if slot is None:
            return 0
        return max(0, self.settings.fence_stale_ms - (self.now - slot.since) * TICK_MS)

    def arm(self, conn_id: int, after_ms: int) -> None:
        """Sets a connection's life timer, a little later for some than for others."""
        after = ticks(after_ms)
        self.life.arm(conn_id, self.now + after + spread(conn_id, after >> 4))

    def heard(self, connection: Connection) -> None:
        """A live connection said something."""
        self.arm(connection.conn_id, connection.silence_ms)

    @property
    def now_ms(self) -> int:
        """The current tick in milliseconds."""
        return self.life.now * TICK_MS

    def drop(self, ticket: Ticket) -> None:
        """A queued uplink was dropped by its owner."""
        self.batcher.drop(ticket)
        self.admission.dropped()

    def turn_ms(self, connection: Connection) -> int:
        """How long a connection that wants to log in is to wait for its turn; 0: it is let in."""
        return self.turns.ask(connection.conn_id, self.now * TICK_MS)

    def forget(self, connection: Connection) -> None:
        """Takes a connection out of all tables."""
        conn_id = connection.conn_id
        if self.connections.get(conn_id) is connection:
            del self.connections[conn_id]
            self.life.cancel(conn_id)
            self.repeats.cancel(conn_id)
            self.turns.forget(conn_id)

    def lose(self, slots: Iterable[int]) -> None:
        """These slots are not ours any more: what is queued is dropped, and everything about them is forgotten."""
        lost = {s for s in slots if self.slots.pop(s, None) is not None}
        if not lost:
            return
        self.attaches.lost(lost)
        self.tell_links()
        for connection in self.connections.of_slots(lost):
            if connection.uplinks is not None:
                for ticket in connection.uplinks.abandon():
                    self.drop(ticket)
            self.forget(connection)

    def serves(self) -> bytes:
        """The slots that are loaded, as a bitmap."""
        return bitmap_of_slots(number for number, slot in self.slots.items() if slot.loaded)

    def tell_links(self) -> None:
        """Every gateway hears which slots are served now; in the order of this with the frames around it."""
        if self.links:
            slots = self.serves()
            for link in self.links.values():
                link.serves(self.topology_epoch, slots)

    def silence(self, why: str) -> None:
        """Answers nothing any more: closes every stream, until ownership says otherwise."""
        self.serving = False
        for link in list(self.links.values()):
            link.close(why)


class Background:
    """Tasks beside the main ones. What they raise unexpectedly is logged and counted by `on_error`; `stop` ends them."""

    def __init__(self, on_error: Callable[[], None]) -> None:
        self._tasks: set[asyncio.Task[None]] = set()
        self._on_error = on_error
        self._log = logs.get("background")

    def __len__(self) -> int:
        return len(self._tasks)

    def start(self, work: Coroutine[Any, Any, None]) -> None:
        """Runs `work` as a task of its own."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            self._on_error()
            self._log.error("a background task failed", exc_info=task.exception())

    async def stop(self) -> None:
        """Cancels what runs and waits for it."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
