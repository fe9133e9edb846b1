"""Hot conversations: pulls of one that many members ask for at once are answered by few questions to the database.

    found    a top-k sketch counts pulls; `pulls_per_s` of one conversation make it hot for this second and the next
    merged   what was asked while a question runs waits for the next one, which asks for all of it together
    kept     the newest rows stay in memory, (low, high] without a gap; the question says up to where they may be shown

Nothing old is shown: a question that an answer comes from always began after the answer's pull had come (one that runs
already may have read before a commit that the pull must see, R2), it reads last_seq and the membership from the primary,
and changed_seq: rows up to last_seq change by operations only, and each raises it. Rows that were loaded under another
changed_seq are dropped. Rows that were removed go within STALE_S. What is not in memory is read as ever.

Memory: CONVERSATIONS entries of at most ROWS rows and ROW_BYTES_MAX bytes.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Final

from plato.core.topk import Hot

from plato_msg import metrics
from plato_msg.store_pg import ROW_BYTES, Access, Message, PgMsgStore

CONVERSATIONS: Final = 32
ROWS: Final = 500
ROW_BYTES_MAX: Final = 1 << 20
STALE_S: Final = 5.0
SKETCH: Final = 128


class _Flight:
    """One question on its way or waiting: for whom, and its answer ({user: Access} of those among them who may read)."""

    def __init__(self) -> None:
        self.users: set[str] = set()
        self.answer: asyncio.Future[dict[str, Access]] = asyncio.get_running_loop().create_future()


class _Entry:
    """A hot conversation."""

    def __init__(self) -> None:
        self.next: _Flight | None = None
        """Waits for the running question; the only one that may be joined."""
        self.task: asyncio.Task[None] | None = None
        self.rows: list[Message] = []
        """By rising seq: every row with low < seq ≤ high."""
        self.low = 0
        self.high = 0
        self.changed_seq = 0
        """The conversation's, before the rows were loaded."""
        self.loaded_s = 0.0


class HotConversations:
    """Over the reads of one msg process."""

    def __init__(self, store: PgMsgStore, pulls_per_s: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._store = store
        self._clock = clock
        self._hot: Hot[str] = Hot(pulls_per_s, size=SKETCH)
        self._entries: OrderedDict[str, _Entry] = OrderedDict()

    def seen(self, conversation_id: str) -> bool:
        """Counts one pull; whether its conversation is hot."""
        return self._hot.seen(conversation_id, int(self._clock() * 1_000))

    def hot(self) -> list[str]:
        """The conversations that are hot now; forgets what it holds of others."""
        hot = self._hot.hot(int(self._clock() * 1_000))
        for conversation_id in set(self._entries) - set(hot):
            if self._entries[conversation_id].task is None:
                del self._entries[conversation_id]
        return hot

    async def membership(self, user: str, conversation_id: str) -> Access | None:
        """As PgMsgStore.membership, asked together with what others ask. Raises Unavailable."""
        entry = self._entries.get(conversation_id)
        if entry is None:
            entry = self._entries[conversation_id] = _Entry()
            self._evict()
        else:
            self._entries.move_to_end(conversation_id)
        flight = entry.next
        if flight is None:
            flight = entry.next = _Flight()
            if entry.task is None:
                entry.task = asyncio.create_task(self._ask(conversation_id, entry), name="hot conversation")
        else:
            metrics.HOT_READS.labels("merged").inc()
        flight.users.add(user)
        # Shielded: one that gives up must not take the answer from the others.
        return (await asyncio.shield(flight.answer)).get(user)

    def rows(
        self, conversation_id: str, first: int, last: int, limit: int, changed_seq: int, *, newest_first: bool
    ) -> list[Message] | None:
        """The rows of [first, last] from the old or the new end, in that direction, at most `limit`; last: at most the
        newest_seq that `membership` gave, with this changed_seq. None: not all of them are here, or they may be old."""
        entry = self._entries.get(conversation_id)
        if entry is None or not entry.low < first or last > entry.high or entry.changed_seq != changed_seq:
            return None
        metrics.HOT_READS.labels("cached").inc()
        found = [row for row in entry.rows if first <= row.seq <= last]
        return found[::-1][:limit] if newest_first else found[:limit]

    async def _ask(self, conversation_id: str, entry: _Entry) -> None:
        """Question after question, as long as somebody waits."""
        try:
            while (flight := entry.next) is not None:
                entry.next = None
                try:
                    metrics.HOT_READS.labels("asked").inc()
                    answer = await self._store.memberships(conversation_id, flight.users)
                    now = next((access for access in answer.values() if not access.left), None)
                    if now is not None:
                        await self._load(conversation_id, entry, now.newest_seq, now.changed_seq)
                except Exception as e:
                    flight.answer.set_exception(e)
                    flight.answer.exception()  # whoever waited may have given up: then nobody looks at it
                else:
                    flight.answer.set_result(answer)
        finally:
            entry.task = None
            if entry.next is not None:  # cancelled: the process ends
                entry.next.answer.cancel()

    async def _load(self, conversation_id: str, entry: _Entry, last_seq: int, changed_seq: int) -> None:
        """Rows up to last_seq, which are committed, and not older than changed_seq says."""
        now_s = self._clock()
        if entry.changed_seq != changed_seq:
            entry.rows, entry.low, entry.high, entry.changed_seq = [], 0, 0, changed_seq
        if entry.rows and entry.high < last_seq and now_s - entry.loaded_s < STALE_S:
            more = await self._store.messages(
                conversation_id, entry.high + 1, last_seq, ROWS, ROW_BYTES_MAX, newest_first=False
            )
            if more and more[-1].seq == last_seq:
                entry.rows += more
                entry.high = last_seq
                self._trim(entry)
                return
        elif entry.high >= last_seq and now_s - entry.loaded_s < STALE_S:
            return
        rows = await self._store.messages(conversation_id, 1, last_seq, ROWS, ROW_BYTES_MAX, newest_first=True)
        entry.rows = rows[::-1]
        # Below the oldest row that came there may be others.
        entry.low = entry.rows[0].seq - 1 if entry.rows else last_seq
        entry.high = last_seq
        entry.loaded_s = now_s

    def _trim(self, entry: _Entry) -> None:
        size = sum(len(row.body) + ROW_BYTES for row in entry.rows)
        drop = max(0, len(entry.rows) - ROWS)
        size -= sum(len(row.body) + ROW_BYTES for row in entry.rows[:drop])
        while size > ROW_BYTES_MAX and drop < len(entry.rows) - 1:
            size -= len(entry.rows[drop].body) + ROW_BYTES
            drop += 1
        if drop:
            entry.low = entry.rows[drop - 1].seq
            del entry.rows[:drop]

    def _evict(self) -> None:
        for conversation_id in list(self._entries):
            if len(self._entries) <= CONVERSATIONS:
                break
            if self._entries[conversation_id].task is None:
                del self._entries[conversation_id]
