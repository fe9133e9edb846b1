"""Fan-out to large groups: who is online is told that there is something, once per window, and pulls it.

    note → [window of the conversation: core/windows.py] → its members in pages, their routes in one pipeline per page
         → one frame for all → the shards' lanes, beside what they carry, merged with what is unsent (downlink.py)

Nothing of this stands in the pipeline's way: a batch that has a message of a large group is committed and its dialogues go
out at once; the group is gone through page by page afterwards, with as much time between pages as a page took. Members are
read after the commit, so they may be newer than the record: who left meanwhile is not told, and may not pull either.

A batch counts as fanned out (R7) when a notice of its seq, or of a newer one, was taken by each target shard, or that shard
is marked dirty. Memory: a page of members and routes per notice that is going out, NOTICES at a time; a job per batch that
waits, WAITING at most (past it, the fan-out waits).
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Final, Protocol

from plato.core.errors import Unavailable
from plato.core.ids import slot_of
from plato.ports import Payload, Route
from plato.runtime import logs
from plato.topology.record import Topology

from plato_msg import metrics
from plato_msg.core.fanout import notify_frame
from plato_msg.core.windows import Notice, Windows

PAGE: Final = 500
NOTICES: Final = 2
WAITING: Final = 1_000
_BACK_OFF_S: Final = 0.1

Targets = dict[tuple[str, int], int]
"""{(user, device_id): conn_id}."""


class MemberReader(Protocol):
    """Where members are read (plato_msg.store_pg.PgMsgStore)."""

    async def members(self, conversation_id: str, after: str, limit: int, below_seq: int) -> list[str]:
        """A page of them, by id. Raises Unavailable."""


class Job(Protocol):
    """What waits for its parts (plato_msg.downlink)."""

    def opened(self) -> None:
        """One more part."""

    def done(self) -> None:
        """One less."""


class Outlet(Protocol):
    """What the notices go out through (plato_msg.downlink)."""

    def topology_now(self) -> Topology:
        """The record that routes are judged by."""

    async def read_routes(self, names: list[str]) -> Mapping[str, Mapping[int, Route]]:
        """Of all of them; tries until it can."""

    def notify(self, shard: str, conversation_id: str, payload: Payload, targets: Targets, jobs: Sequence[Job]) -> None:
        """Puts a notice on a shard's lane; the jobs wait for it."""


class Notifier:
    """The notices of one msg process. `run` sends them."""

    def __init__(self, outlet: Outlet, members: MemberReader, windows: Windows) -> None:
        self._outlet = outlet
        self._members = members
        self._windows = windows
        self._jobs: dict[str, list[Job]] = {}
        self._waiting = 0
        self._going = 0
        self._noted = asyncio.Event()
        self._room = asyncio.Event()
        self._log = logs.get("notify")

    async def note(self, conversation_id: str, seq: int, size: int, job: Job) -> None:
        """A message of a large group is committed; `job` waits until its members are told."""
        while self._waiting >= WAITING:
            self._room.clear()
            await self._room.wait()
        job.opened()
        self._waiting += 1
        self._jobs.setdefault(conversation_id, []).append(job)
        self._windows.note(conversation_id, seq, size, self._now_ms())
        self._noted.set()

    async def run(self) -> None:
        """Runs until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            while True:
                self._noted.clear()
                for notice in self._windows.take(self._now_ms(), NOTICES - self._going):
                    self._going += 1
                    jobs = self._jobs.pop(notice.conversation_id)
                    tasks.create_task(self._send(notice, jobs), name="notice")
                due_ms = self._windows.next_ms() if self._going < NOTICES else None
                try:
                    async with asyncio.timeout(None if due_ms is None else (due_ms - self._now_ms()) / 1_000):
                        await self._noted.wait()
                except TimeoutError:
                    pass

    async def _send(self, notice: Notice, jobs: list[Job]) -> None:
        loop = asyncio.get_running_loop()
        payload = Payload(notify_frame(*notice), b"")
        after, online = "", 0
        while True:
            begun = loop.time()
            names = await self._page(notice, after)
            routes = await self._outlet.read_routes(names) if names else {}
            topology = self._outlet.topology_now()
            by_shard: dict[str, Targets] = {}
            for user, devices in routes.items():
                for device_id, route in devices.items():
                    if route.conn_id:
                        shard = topology.owner(slot_of(route.conn_id)).shard
                        by_shard.setdefault(shard, {})[user, device_id] = route.conn_id
            for shard, targets in by_shard.items():
                online += len(targets)
                self._outlet.notify(shard, notice.conversation_id, payload, targets, jobs)
            if len(names) < PAGE:
                break
            after = names[-1]
            await asyncio.sleep(loop.time() - begun)
        for job in jobs:
            job.done()
        metrics.NOTICES.inc()
        metrics.NOTICE_DEVICES.inc(online)
        metrics.NOTICE_BATCHES.inc(len(jobs))
        self._log.debug("notified", conversation_id=notice.conversation_id, seq=notice.seq, devices=online)
        self._windows.done(notice.conversation_id, online)
        self._waiting -= len(jobs)
        self._going -= 1
        self._room.set()
        self._noted.set()

    async def _page(self, notice: Notice, after: str) -> list[str]:
        while True:
            try:
                return await self._members.members(notice.conversation_id, after, PAGE, notice.seq)
            except Unavailable as e:
                self._log.warning("members cannot be read", reason=str(e))
                await asyncio.sleep(_BACK_OFF_S)

    @staticmethod
    def _now_ms() -> int:
        return int(asyncio.get_running_loop().time() * 1_000)
