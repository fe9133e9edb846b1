"""One msg process, put together from its ports: hops 3 and 4, history, ownership, ids, housekeeping.

    start → its own record in the topology carries our uid → reservation → ownership, uplink, downlink → until cancelled

Everything runs in one loop; a part that ends ends the process. Memory: see uplink, downlink.
"""

from __future__ import annotations

import asyncio
import secrets
from dataclasses import dataclass, replace
from typing import Any, Final

from plato.core.errors import Unavailable
from plato.guards import Guard, GuardedConnections
from plato.ports import BusReader, ReservationStore, ShardClient, TopologySource
from plato.runtime import logs
from plato.runtime.process import forever
from plato.runtime.report import ranges

from plato_msg import metrics
from plato_msg.core.allocator import Allocator, SingleWriter
from plato_msg.core.policy import Rules
from plato_msg.core.windows import Windows
from plato_msg.downlink import Downlink, RouteReader
from plato_msg.feed import Feed
from plato_msg.friends import Friends
from plato_msg.friends_pg import PgFriends
from plato_msg.history import HOT_PULLS_PER_S, History
from plato_msg.hooks import BeforeHook
from plato_msg.ids import MsgIds
from plato_msg.owner import TICK_S, Ownership
from plato_msg.reads import Reads
from plato_msg.retention import Retention
from plato_msg.store_pg import PUSH_MEMBERS, Database, PgMsgStore
from plato_msg.texts import Texts
from plato_msg.texts_pg import PgTexts
from plato_msg.uplink import Uplinks
from plato_msg.userstate import UserStates

TRIM_PERIOD_S: Final = 60.0
GAUGES_S: Final = 1.0


@dataclass(frozen=True, slots=True)
class Options:
    """What a msg process is told. What has a name of the settings means the same."""

    name: str
    uid: str
    partitions: int
    rules: Rules
    batch_records: int = 500
    member_stale_ms: int = 3_000
    bus_retention_s: int = 86_400
    max_frame_bytes: int = 65_536
    hot_pulls_per_s: int = HOT_PULLS_PER_S
    read_calm_ms: int = 500
    push_members_max: int = PUSH_MEMBERS
    notify_window_ms: int = 10
    notify_window_max_ms: int = 5_000
    events_retention_s: float = 0.0
    """0: batches write no feed."""
    message_retention_days: int = 0
    tick_s: float = TICK_S


class MsgService:
    """A msg process without its sockets: `run` works until cancelled, `reads` answers Sync and Pull, `not_ready` says why
    not."""

    def __init__(
        self,
        options: Options,
        topology: TopologySource,
        bus: BusReader,
        database: Database,
        reads: Database,
        routes: RouteReader,
        shards: ShardClient,
        reservations: ReservationStore,
        allocator: Allocator | None = None,
        hook: BeforeHook | None = None,
        texts: Database | None = None,
        asked: Database | None = None,
    ) -> None:
        """database: for the pipeline; reads: for what clients' frames ask, so that a flood of reads does not slow the
        pipeline. hook: is asked about messages before they are stored. texts: for the index of texts; None: none is kept.
        asked: for what is read by HTTP, so that it does not slow the clients; None: as reads."""
        self._options = options
        self._topology = topology
        self._bus = bus
        self._reservations = reservations
        self._hook = hook
        keeps_events = options.events_retention_s > 0
        self.store = PgMsgStore(database, options.push_members_max, feed=keeps_events)
        self.guard = Guard("the database", metrics.BREAKER_REFUSED.inc)
        self.history = History(
            PgMsgStore(GuardedConnections(reads, self.guard)),
            max_frame_bytes=options.max_frame_bytes,
            hot_pulls_per_s=options.hot_pulls_per_s,
        )
        # A guard of its own: a list that takes too long must not have the clients' Syncs refused.
        by_http = GuardedConnections(asked or reads, Guard("the database", metrics.BREAKER_REFUSED.inc))
        self.feed = Feed(by_http, options.partitions) if keeps_events else None
        self.reads = Reads(self.history, options.read_calm_ms)
        self.http_reads = Reads(
            History(
                PgMsgStore(by_http), max_frame_bytes=options.max_frame_bytes, hot_pulls_per_s=options.hot_pulls_per_s
            ),
            options.read_calm_ms,
        )
        self._allocator = allocator or SingleWriter()
        self.owners = Ownership(
            self.store,
            topology,
            self._allocator,
            options.name,
            options.uid,
            stale_ms=options.member_stale_ms,
            tick_s=options.tick_s,
            bus=bus,
        )
        self.downlink = Downlink(
            topology,
            routes,
            shards,
            self.store,
            members=self.store,
            windows=Windows(options.notify_window_ms, options.notify_window_max_ms, options.push_members_max),
        )
        friends = PgFriends(by_http)  # a Sync brings a connection of its own
        self.states = UserStates(
            GuardedConnections(reads, self.guard),
            self.downlink,
            routes,
            push_members_max=options.push_members_max,
            max_frame_bytes=options.max_frame_bytes,
            sources=[friends],
            lists=by_http,
        )
        self.history.states = self.states
        self.friends = Friends(friends, self.states, friends_only=options.rules.friends_only)
        self.retention = Retention(
            database, lambda: self.owners.held, options.partitions, options.message_retention_days
        )
        self.texts = Texts(PgTexts(texts), lambda: self.owners.held, options.partitions) if texts else None
        self.ids: MsgIds | None = None
        """None before the topology named us."""
        self._reserved = False
        """A reservation of ours stood once; reads go on without one."""
        self._log = logs.get("msg")

    def not_ready(self) -> str:
        """Why this process does not serve; "" when it does."""
        if not self.owners.named:
            return "the topology does not name this process"
        if not self._reserved:
            return "no reservation of msg_ids yet"
        if self.ids is not None and self.ids.lease is False:
            return f"another process has the reservation of worker_id {self.ids.worker_id}"
        return ""

    def stopped(self) -> str:
        """Which partitions of ours the bus cannot give us, and why (R11); "" when it is none."""
        return "; ".join(why for partition, why in self._bus.stopped.items() if partition in self.owners.held)

    def report(self) -> dict[str, Any]:
        """What /v1/report says."""
        try:
            epoch = self._topology.current().epoch
        except Unavailable:
            epoch = 0
        said: dict[str, Any] = {
            "epoch_seen": epoch,
            "worker_id": self.ids.worker_id if self.ids is not None else None,
            "lease": self.ids.lease if self.ids is not None else None,
            "partitions": ranges(self.owners.held),
            "serving": not self.not_ready(),
        }
        return said

    def uplinks(self, ids: MsgIds) -> Uplinks:
        """The pipeline, which mints from `ids`."""
        return Uplinks(
            self._bus,
            self.store,
            self.owners,
            self._allocator,
            ids,
            self.downlink,
            replace(self._options.rules, push_members=self._options.push_members_max),
            partitions=self._options.partitions,
            batch_records=self._options.batch_records,
            hook=self._hook,
            committed=self.texts.committed if self.texts is not None else None,
        )

    async def run(self) -> None:
        """Works until cancelled, or raises what a part of it raised."""
        epoch, worker_id = await self._own_worker_id(-1)
        ids = self.ids = MsgIds(self._reservations, worker_id, self._options.uid, secrets.randbits(63))
        uplinks = self.uplinks(ids)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(forever("worker_id", self._follow_worker_id(ids, epoch)), name="worker_id")
            tasks.create_task(forever("ids", ids.run()), name="ids")
            await ids.granted()
            self._reserved = True
            self._log.info("serves", worker_id=ids.worker_id)
            tasks.create_task(forever("downlink", self.downlink.run()), name="downlink")
            if self.feed is not None:
                tasks.create_task(forever("feed", self.feed.run()), name="feed")
            tasks.create_task(forever("states", self.states.run()), name="states")
            tasks.create_task(forever("owner", self.owners.run()), name="owner")
            tasks.create_task(forever("uplink", uplinks.run()), name="uplink")
            tasks.create_task(forever("trim", self._trim()), name="trim")
            if self._options.message_retention_days:
                tasks.create_task(forever("retention", self.retention.run()), name="retention")
            if self.texts is not None:
                tasks.create_task(forever("texts", self.texts.run()), name="texts")
            tasks.create_task(forever("gauges", self._measure()), name="gauges")

    async def leave(self) -> None:
        """Gives every partition up, so that the others need not wait for our silence. A hint: after `run` was cancelled."""
        try:
            async with asyncio.timeout(2.0):
                await self.owners.give_all()
        except (Unavailable, TimeoutError):
            pass

    async def _own_worker_id(self, epoch: int) -> tuple[int, int]:
        """The epoch and the worker_id of the first record after `epoch` that names this process."""
        while True:
            topology = await self._topology.changed(epoch)
            epoch = topology.epoch
            record = topology.msgs.get(self._options.name)
            if record is not None and record.uid == self._options.uid:
                return epoch, record.worker_id

    async def _follow_worker_id(self, ids: MsgIds, epoch: int) -> None:
        """A record that was rebuilt may give us another one, if ours is reserved by somebody else."""
        while True:
            epoch, worker_id = await self._own_worker_id(epoch)
            ids.rename(worker_id)

    async def _measure(self) -> None:
        """Sets the gauges of the reads."""
        while True:
            self.reads.measure()
            metrics.BREAKER.set(self.guard.refusal_ratio)
            await asyncio.sleep(GAUGES_S)

    async def _trim(self) -> None:
        """Deletes bus records that are long fanned out, and rows of the feed that are old."""
        while True:
            await asyncio.sleep(TRIM_PERIOD_S)
            for held in list(self.owners.held.values()):
                try:
                    await self._bus.trim(held.partition, held.saved, self._options.bus_retention_s)
                    if self.feed is not None:
                        await self.feed.trim(held.partition, self._options.events_retention_s)
                except Unavailable:
                    break
