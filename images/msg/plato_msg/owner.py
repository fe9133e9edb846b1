"""Which partitions this process owns (R7), and the tick that takes and gives them.

    tick: our beat → who lives → who should own what → give what is another's, take what is ours → save the fanned_out marks

Time only begins an attempt; the epoch in the database decides. Memory: one Held per owned partition. Ordering: `turn` is
held by a batch transaction and by each change of `held`, so a partition is released after the running batch, never in it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Final

from plato.core.errors import Unavailable
from plato.ports import BusReader, TopologySource
from plato.runtime import logs

from plato_msg import metrics
from plato_msg.core.allocator import Allocator
from plato_msg.core.assignment import Liveness, assign
from plato_msg.core.progress import Progress, Ticket
from plato_msg.store_pg import Owner, PgMsgStore

TICK_S: Final = 0.5
SLOW_S: Final = 5.0
"""A tick that runs this long: the database hangs, and `not_serving` says so. It decides nothing else."""

RELEASE_TICKS: Final = 4
"""A partition that is to be given waits this long for its fan-out to settle; the successor repeats what did not."""


@dataclass(slots=True, eq=False)
class Held:
    """One owned partition. A new object after each take-over and reload: what hangs on an old one has no effect."""

    partition: int
    epoch: int
    position: int
    """Every record up to here has its outcome. Moved by the uplink, after the commit."""
    saved: int
    """fanned_out as stored."""
    progress: Progress = field(init=False)
    replayed: int = field(init=False)
    """Up to here the records in (fanned_out, position] went out again; new ones are taken when it reaches position."""
    leaving: int = 0
    """Ticks since it became another's; 0: it stays."""

    def __post_init__(self) -> None:
        self.progress = Progress(self.saved)
        self.replayed = self.saved

    @property
    def ready(self) -> bool:
        """New records may be taken."""
        return not self.leaving and self.replayed >= self.position

    def committed(self, position: int, fanned_out: int) -> Ticket:
        """A batch up to `position` was committed and took the mark along; returns its ticket for the fan-out."""
        self.position = self.replayed = position
        self.saved = max(self.saved, fanned_out)
        return self.progress.open(position)


class Ownership:
    """The partitions of one msg process. `run` ticks for ever."""

    def __init__(
        self,
        store: PgMsgStore,
        topology: TopologySource,
        allocator: Allocator,
        name: str,
        uid: str,
        *,
        stale_ms: int,
        tick_s: float = TICK_S,
        bus: BusReader | None = None,
    ) -> None:
        """bus: asked how far its partitions are, and which are stopped, where the database does not know."""
        self._store = store
        self._topology = topology
        self._allocator = allocator
        self._name, self._uid = name, uid
        self._tick_s = tick_s
        self._bus = bus
        self._liveness = Liveness(max(2, round(stale_ms / 1000 / tick_s)))
        self.turn = asyncio.Lock()
        self.held: dict[int, Held] = {}
        self.doubtful = False
        """After an error whose effect is unknown: `reload` before anything else is taken."""
        self._member = False
        """Others may count us as one: we told our beat."""
        self._failed = ""
        self._begun_s: float | None = None
        """Loop time at which the running tick began; None: none runs."""
        self._log = logs.get("owner")

    async def run(self) -> None:
        """Ticks until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            self._begun_s = loop.time()
            try:
                await self.tick()
                self._failed = ""
            except Unavailable as e:
                self._failed = str(e)
                self._log.warning("tick failed", reason=str(e))
            self._begun_s = None
            await asyncio.sleep(self._tick_s)

    def not_serving(self) -> str:
        """Why the database takes no write of ours now; "" when the last tick, which writes our beat, went through."""
        if self._failed:
            return self._failed
        if self._begun_s is not None:
            waited_s = asyncio.get_running_loop().time() - self._begun_s
            if waited_s > SLOW_S:
                return f"the database does not answer a write since {waited_s:.0f} s"
        return ""

    @property
    def named(self) -> bool:
        """The topology's record of us carries our uid: we may serve."""
        try:
            record = self._topology.current().msgs.get(self._name)
        except Unavailable:
            return False
        return record is not None and record.uid == self._uid

    async def tick(self) -> None:
        """One round. Raises Unavailable; then the next one looks anew."""
        if not self.named:
            await self._give(list(self.held), at_once=True)
            return
        self._member = True
        beats = await self._store.beat(self._uid)
        owners, lag = await self._store.owners()
        # A partition that is stopped commits nothing, so no guard would tell that a newer epoch stands, somebody's order to
        # go on elsewhere among them (docs/kafka.md).
        if lost := [row.partition for row in owners if self._outlived(row)]:
            self.step_down(lost)
        named = {msg.uid for msg in self._topology.current().msgs.values()}
        live = self._liveness.observe(beats, named)
        live.add(self._uid)
        target = assign(live, [row.owner for row in owners])
        for partition, held in self.held.items():
            if target[partition] == self._uid:
                held.leaving = 0
        await self._give([p for p in self.held if target[p] != self._uid])
        await self._take(
            [
                row
                for row in owners
                if target[row.partition] == self._uid
                and row.partition not in self.held
                and (row.owner in ("", self._uid) or row.owner not in live)
            ]
        )
        await self._flush()
        if gone := self._liveness.gone(named):
            await self._store.forget_members(gone)
        metrics.PARTITIONS.set(len(self.held))
        for partition, held in self.held.items():
            newest = self._bus.newest(partition) if self._bus is not None else None
            behind = lag[partition] if newest is None else max(0, newest - held.position)
            metrics.LAG.labels(str(partition)).set(behind)
        if self._bus is not None:
            metrics.STOPPED.set(sum(partition in self.held for partition in self._bus.stopped))

    async def give_all(self) -> None:
        """Gives everything up at once, and is no member any more, so that nobody plans with us or waits for our silence. For
        the end of the process. Raises Unavailable."""
        await self._give(list(self.held), at_once=True)
        if self._member:
            await self._store.forget_members([self._uid])

    def doubt(self) -> None:
        """Memory may be wrong: drop it. Nothing is taken before `reload`."""
        self.doubtful = True
        self._allocator.forget()

    async def reload(self) -> None:
        """Reads again what is ours, after `doubt`. Raises Unavailable."""
        async with self.turn:
            rows = await self._store.load(self._uid, {p: held.epoch for p, held in self.held.items()})
            self._lose(set(self.held) - {row.partition for row in rows})
            for row in rows:
                self.held[row.partition] = _held(row)
            self.doubtful = False

    def step_down(self, partitions: Collection[int]) -> None:
        """Another owner, or another position, stands: these are lost; a later tick may take them anew."""
        self._lose(partitions)
        self._allocator.forget()

    def _lose(self, partitions: Collection[int]) -> None:
        for partition in partitions:
            if self.held.pop(partition, None) is not None:
                self._log.warning("stepped down", partition=partition)
                metrics.STEPPED_DOWN.inc()
                metrics.LAG.remove(str(partition))

    def _outlived(self, row: Owner) -> bool:
        held = self.held.get(row.partition)
        return held is not None and held.epoch != row.epoch

    async def _take(self, rows: list[Owner]) -> None:
        if not rows:
            return
        taken = await self._store.take(self._uid, {row.partition: row.epoch for row in rows})
        async with self.turn:
            for row in taken:
                self.held[row.partition] = _held(row)
            self._allocator.forget()
        metrics.TAKEOVERS.inc(len(taken))
        if taken:
            self._log.info("took partitions", partitions=[row.partition for row in taken])

    async def _give(self, partitions: Collection[int], *, at_once: bool = False) -> None:
        for partition in partitions:
            self.held[partition].leaving += 1
        leaving = [self.held[p] for p in partitions]
        going = [h for h in leaving if at_once or h.progress.settled or h.leaving > RELEASE_TICKS]
        if not going:
            return
        async with self.turn:
            going = [held for held in going if self.held.get(held.partition) is held]
            await self._store.save({h.partition: (h.epoch, h.progress.fanned_out) for h in going}, release=True)
            for held in going:
                del self.held[held.partition]
                metrics.LAG.remove(str(held.partition))
            self._allocator.forget()
        self._log.info("gave partitions", partitions=[held.partition for held in going])

    async def _flush(self) -> None:
        """Saves the marks that moved and that no batch has taken along."""
        moved = [held for held in self.held.values() if held.progress.fanned_out > held.saved]
        if not moved:
            return
        marks = {held.partition: (held.epoch, held.progress.fanned_out) for held in moved}
        await self._store.save(marks)
        for held in moved:
            held.saved = max(held.saved, marks[held.partition][1])


def _held(row: Owner) -> Held:
    return Held(row.partition, row.epoch, row.position, row.fanned_out)
