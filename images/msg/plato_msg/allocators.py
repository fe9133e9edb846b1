"""The allocators that reserve: seqs from segments in the database, or from counters in the store.

    segment   a range of 1,000 is reserved by one committed statement and used up in memory; the next is fetched ahead
    redis     a counter per conversation in the store; the database is told before a number passes what it was told last.
              A counter that is missing or of another run of the server begins again JUMP above everything known. While the
              store is away: segment

Neither decides alone: R9's max(allocated, last_seq + 1) is taken by the batch, whose guard refuses an older owner (R7).
Memory: Segments' bound, and MARKS marks of the ledger. Everything is called under the owner's turn, one batch at a time.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Final

from plato.core.errors import Unavailable
from plato.ports import SeqCounters
from plato.runtime import logs

from plato_msg import metrics
from plato_msg.core.allocator import JUMP, SEGMENT, Allocator, SeqLedger, SingleWriter, last_seq
from plato_msg.core.batch import Known
from plato_msg.core.segments import Segments

MARKS: Final = 10_000
ANSWER_S: Final = 0.25
"""The batch's transaction is open meanwhile; a store that takes longer counts as away."""
AWAY_S: Final = 1.0
"""A store that was away is asked again after so long."""


class SegmentAllocator:
    """Numbers of segments of the database."""

    def __init__(self, ledger: SeqLedger) -> None:
        self._ledger = ledger
        self._segments = Segments()
        self._ahead: asyncio.Task[None] | None = None

    async def allocate(self, wanted: Mapping[str, int], known: Known) -> dict[str, int]:
        """See the port."""
        firsts: dict[str, int] = {}
        missing: dict[str, int] = {}
        for conversation, count in wanted.items():
            above = last_seq(known, conversation)
            first = self._segments.take(conversation, count, above)
            if first is None:
                missing[conversation] = above
            else:
                firsts[conversation] = first
        if missing:
            size = max(SEGMENT, *(wanted[conversation] for conversation in missing))
            for conversation, upto in (await self._ledger.reserve(missing, size)).items():
                first = firsts[conversation] = upto - size + 1
                self._segments.add(conversation, first + wanted[conversation], upto)
        low = [c for c in wanted if c not in missing and self._segments.running_low(c)]
        if low and self._ahead is None:
            self._ahead = asyncio.create_task(self._fetch(low), name="seqs ahead")
        return firsts

    def forget(self) -> None:
        """See the port."""
        self._segments.clear()
        if self._ahead is not None:
            self._ahead.cancel()
            self._ahead = None

    async def _fetch(self, conversations: Iterable[str]) -> None:
        # Away: the next batch that finds them low tries again, the one that finds them empty waits.
        try:
            with contextlib.suppress(Unavailable):
                fetched = await self._ledger.reserve(dict.fromkeys(conversations, 0), SEGMENT)
                for conversation, upto in fetched.items():
                    self._segments.add(conversation, upto - SEGMENT + 1, upto)
                    metrics.SEQS_AHEAD.inc()
        finally:
            if self._ahead is asyncio.current_task():
                self._ahead = None


class RedisAllocator:
    """Numbers of counters in the store, its last word kept in the database each thousand."""

    def __init__(self, counters: SeqCounters, ledger: SeqLedger, now: Callable[[], float] | None = None) -> None:
        """now: seconds of a clock that does not step; the loop's."""
        self._counters = counters
        self._ledger = ledger
        self._segment = SegmentAllocator(ledger)
        self._marks: OrderedDict[str, int] = OrderedDict()
        """{conversation: a number that the ledger holds, or a smaller one}."""
        self._now = now
        self._ask_at_s = 0.0
        self._log = logs.get("allocator")

    async def allocate(self, wanted: Mapping[str, int], known: Known) -> dict[str, int]:
        """See the port."""
        now = self._now() if self._now is not None else asyncio.get_running_loop().time()
        if now >= self._ask_at_s:
            try:
                firsts = await self._from_counters({c: (n, last_seq(known, c)) for c, n in wanted.items()})
            except _Away as e:
                self._log.warning("the store is away: segments of the database give the seqs", reason=str(e))
                self._ask_at_s = now + AWAY_S
            else:
                metrics.SEQS_FALLEN_BACK.set(0)
                await self._keep({c: first + wanted[c] - 1 for c, first in firsts.items()})
                return firsts
        metrics.SEQS_FALLEN_BACK.set(1)
        return await self._segment.allocate(wanted, known)

    def forget(self) -> None:
        """See the port."""
        self._marks.clear()
        self._segment.forget()

    async def _from_counters(self, wanted: Mapping[str, tuple[int, int]]) -> dict[str, int]:
        """Raises _Away for the store, and Unavailable for the database."""
        firsts = await self._ask(self._counters.take(wanted))
        lost = [c for c in wanted if c not in firsts]
        if lost:
            reserved = await self._ledger.reserved(lost)
            begun: dict[str, tuple[int, int]] = {}
            for conversation in lost:
                count, above = wanted[conversation]
                if above or conversation in reserved:  # else it is new, and has no counter yet
                    above = max(above + JUMP, reserved.get(conversation, 0))
                    metrics.SEQ_JUMPS.inc()
                begun[conversation] = (count, above)
            firsts |= await self._ask(self._counters.begin(begun))
        return firsts

    async def _ask(self, answer: Awaitable[dict[str, int]]) -> dict[str, int]:
        try:
            async with asyncio.timeout(ANSWER_S):
                return await answer
        except Unavailable as e:
            raise _Away(str(e)) from e
        except TimeoutError as e:
            raise _Away(f"no answer within {ANSWER_S} s") from e

    async def _keep(self, lasts: Mapping[str, int]) -> None:
        """Has the ledger hold every number before it is used."""
        beyond = {c: last for c, last in lasts.items() if last > self._marks.get(c, 0)}
        if beyond:
            self._marks |= await self._ledger.reserve(beyond, SEGMENT)
        for conversation in lasts:
            self._marks.move_to_end(conversation)
        while len(self._marks) > MARKS:
            self._marks.popitem(last=False)


class _Away(Exception):
    """The store did not answer; the database may."""


def choose(name: str, ledger: SeqLedger, counters: SeqCounters) -> Allocator:
    """The allocator of the setting msg.allocator."""
    if name == "redis":
        return RedisAllocator(counters, ledger)
    return SegmentAllocator(ledger) if name == "segment" else SingleWriter()
