"""Hop 3: bus records → outcomes and messages in the database, in the order of their partition (R7, R9).

    wait for a hint → read the ready partitions together → one transaction: guard, what is known, decisions, rows → commit
    → positions in memory → Downlink.submit

After a take-over or a reload a partition first sends out again what lies in (fanned_out, position], from stored outcomes.
The data's own fault (SQLSTATE 22, 23): the batch is split until the record stands alone, gets NOT_STORABLE and the partition
moves on. Any other error: memory is dropped and reloaded, the same is tried again.
Memory: one read of at most READ_BYTES, and what Downlink's queue holds.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import Callable
from typing import Final

from plato.core.codes import Code
from plato.core.errors import OutOfRange, Unavailable, Unstorable
from plato.ports import BusReader, BusRecord
from plato.runtime import logs

from plato_msg import hooks, metrics
from plato_msg.core.allocator import Allocator
from plato_msg.core.batch import Decision, Plan, Undecodable, Uplink, again, decode, judge, number, wanted
from plato_msg.core.policy import Rules
from plato_msg.core.progress import Ticket
from plato_msg.downlink import Downlink
from plato_msg.hooks import NOTHING, BeforeHook, Judgement
from plato_msg.ids import MsgIds, unix_ms
from plato_msg.owner import Held, Ownership
from plato_msg.store_pg import Guard, PgMsgStore, Poison, SteppedDown

READ_BYTES: Final = 8 << 20
RECORD_BYTES: Final = 2 << 20
"""More than the largest frame that settings allow."""
BATCHES_PER_READ: Final = 4
WAIT_S: Final = 0.1
POLL_S: Final = 1.0
BACK_OFF_S: Final = (0.05, 0.1, 0.2, 0.5, 1.0)


class Uplinks:
    """The pipeline of one msg process. `run` does everything."""

    def __init__(
        self,
        bus: BusReader,
        store: PgMsgStore,
        owners: Ownership,
        allocator: Allocator,
        ids: MsgIds,
        downlink: Downlink,
        rules: Rules,
        *,
        partitions: int,
        batch_records: int,
        hook: BeforeHook | None = None,
        committed: Callable[[Plan], None] | None = None,
    ) -> None:
        """hook: is asked about messages before they are stored. committed: is told of each batch."""
        self._bus = bus
        self._store = store
        self._owners = owners
        self._allocator = allocator
        self._ids = ids
        self._downlink = downlink
        self._rules = rules
        self._partitions = partitions
        self._batch_records = batch_records
        self._hook = hook
        self._committed = committed
        self._waiting: set[int] = set()  # partitions that may hold records
        self._seen: set[Held] = set()  # owned at the last step: others are looked at without a hint
        self._polled_at = 0.0
        self._log = logs.get("uplink")

    async def run(self) -> None:
        """Runs until cancelled."""
        failures = 0
        while True:
            try:
                if not await self.step():
                    self._waiting |= await self._bus.wait(list(self._owners.held), WAIT_S)
                failures = 0
            except Unavailable as e:
                self._owners.doubt()
                self._log.warning("will be tried again", reason=str(e))
                await asyncio.sleep(BACK_OFF_S[min(failures, len(BACK_OFF_S) - 1)])
                failures += 1

    async def step(self) -> bool:
        """Takes what is ready; False: there was nothing. Raises Unavailable."""
        if self._owners.doubtful:
            await self._owners.reload()
        held = list(self._owners.held.values())
        for partition in held:
            if not partition.leaving and partition.replayed < partition.position:
                with contextlib.suppress(OutOfRange):  # the bus told it; the other partitions go on
                    await self._replay(partition)
        now = time.monotonic()
        if now - self._polled_at >= POLL_S:
            self._polled_at = now
            self._waiting |= {h.partition for h in held}
        self._waiting |= {h.partition for h in set(held) - self._seen}
        self._seen = set(held)
        self._waiting &= {h.partition for h in held}
        under = {h.partition: h for h in held if h.partition in self._waiting and h.ready}
        ready = {partition: h.position for partition, h in under.items()}
        if not ready:
            return False
        limit = max(1, min(self._batch_records, BATCHES_PER_READ * self._batch_records // len(ready)))
        limit_bytes = READ_BYTES // len(ready)
        records = await self._bus.read_many(ready, limit, limit_bytes)
        self._drained(ready, records, limit, limit_bytes)
        if records:
            await self.take(records, under)
        return bool(records)

    def _drained(self, ready: dict[int, int], records: list[BusRecord], limit: int, limit_bytes: int) -> None:
        """Partitions that gave all they had wait for a hint again."""
        counts = dict.fromkeys(ready, 0)
        sizes = dict.fromkeys(ready, 0)
        for record in records:
            counts[record.partition] += 1
            sizes[record.partition] += len(record.value)
        # A read that was cut by bytes left room for less than one record.
        self._waiting -= {
            p for p in ready if not counts[p] or (counts[p] < limit and limit_bytes - sizes[p] > RECORD_BYTES)
        }

    async def take(self, records: list[BusRecord], under: dict[int, Held]) -> None:
        """Records, sorted by partition and position, to their outcomes; `under`: the ownerships that they were read under.
        Raises Unavailable; what was committed before stays, and is on its way."""
        parts = [records]
        faulty: dict[tuple[int, int], str] = {}  # stood alone and was refused; not "": its outcome too
        said = await self._asked(records) if self._hook is not None else NOTHING
        while parts:
            part = parts.pop()
            try:
                decisions, tickets = await self._commit(part, under, faulty, said)
            except Unstorable as e:
                if len(part) > 1:
                    parts += [part[len(part) // 2 :], part[: len(part) // 2]]
                    continue
                place = (part[0].partition, part[0].position)
                faulty[place] = str(e) if place in faulty else ""
                self._log.error("record refused by the database", partition=place[0], position=place[1], reason=str(e))
                parts.append(part)
            except SteppedDown as e:
                self._owners.step_down(e.partitions)
                parts.append(part)
            else:
                await self._downlink.submit(decisions, tickets)

    async def _asked(self, records: list[BusRecord]) -> Judgement:
        """What the before-hook says of new records. Of all of them: what the rest of policy will say may still change until
        the batch, and nothing may pass unasked. Raises Unavailable: of the database alone."""
        assert self._hook is not None
        uplinks, _ = self._decode(records, {})
        known = await self._store.outcomes([u.key for u in uplinks])
        new = {u.key: u for u in reversed(uplinks) if u.key not in known}  # of copies, the first one
        return await self._hook.ask(list(reversed(new.values())))

    async def _commit(
        self, part: list[BusRecord], under: dict[int, Held], faulty: dict[tuple[int, int], str], said: Judgement
    ) -> tuple[list[Decision], list[Ticket]]:
        """One transaction, of those records whose ownership still is the one that they were read under. Raises Unstorable,
        SteppedDown (then nothing was written) and Unavailable."""
        ids = await self._ids.take(len(part))
        plan = Plan()
        async with self._owners.turn:
            # A partition that was lost and came again begins where its new row says, not here.
            part = [r for r in part if self._owners.held.get(r.partition) is under[r.partition]]
            uplinks, poison = self._decode(part, faulty)
            if said.bodies:
                uplinks = [hooks.replaced(u, said) for u in uplinks]
            last = {record.partition: record.position for record in part}
            guards = [
                Guard(p, under[p].epoch, under[p].position, position, under[p].progress.fanned_out)
                for p, position in last.items()
            ]
            if not guards:
                return [], []
            begun = time.perf_counter()
            try:
                async with self._store.batch(guards) as batch:
                    if uplinks:
                        known = await batch.known(uplinks, friends_only=self._rules.friends_only)
                        now_ms = unix_ms()
                        judged = judge(uplinks, known, self._rules, faulty, ids, now_ms, said.refused)
                        allocated = await self._allocator.allocate(wanted(judged), known)
                        plan = number(judged, known, allocated, ids, now_ms, self._rules.push_members)
                        if said.refused:
                            plan = hooks.worded(plan, said)
                    await batch.write(plan, poison)
            except Exception as e:
                metrics.BATCHES.labels(type(e).__name__).inc()
                raise
            metrics.BATCHES.labels("committed").inc()
            metrics.BATCH_SECONDS.observe(time.perf_counter() - begun)
            tickets = [under[guard.partition].committed(guard.new_position, guard.fanned_out) for guard in guards]
        self._count(plan, poison)
        if self._committed is not None:
            self._committed(plan)
        return plan.decisions, tickets

    def _decode(self, part: list[BusRecord], faulty: dict[tuple[int, int], str]) -> tuple[list[Uplink], list[Poison]]:
        uplinks: list[Uplink] = []
        poison: list[Poison] = []
        for record in part:
            reason = faulty.get((record.partition, record.position), "")
            if not reason:
                try:
                    uplinks.append(decode(record, self._partitions))
                    continue
                except Undecodable as e:
                    reason = str(e)
            poison.append(Poison(record.partition, record.position, reason.replace("\x00", "\\0"), record.value))
        return uplinks, poison

    def _count(self, plan: Plan, poison: list[Poison]) -> None:
        ends = Counter("duplicate" if d.repeated else Code(d.outcome.code).name.lower() for d in plan.decisions)
        for end, count in ends.items():
            metrics.RECORDS.labels(end).inc(count)
        for d in plan.decisions:
            self._log.debug(
                "decided",
                conversation_id=d.uplink.conversation_id,
                msg_id=d.outcome.msg_id,
                seq=d.outcome.seq,
                code=d.outcome.code,
                trace_id=d.uplink.trace_id,
            )
        for p in poison:
            metrics.POISON.inc()
            self._log.error("record skipped", partition=p.partition, position=p.position, reason=p.reason)

    async def _replay(self, held: Held) -> None:
        """One chunk of (replayed, position] goes out again, with the outcomes that are stored."""
        records = await self._bus.read(held.partition, held.replayed, self._batch_records)
        records = [r for r in records if r.position <= held.position]
        uplinks, _ = self._decode(records, {})
        decisions = again(uplinks, await self._store.known(uplinks), self._rules.push_members) if uplinks else []
        held.replayed = records[-1].position if records else held.position
        ticket = held.progress.open(held.replayed)
        await self._downlink.submit(decisions, [ticket])
