"""The feed: every message and operation of the cluster, for application servers that keep a cursor.

    a batch's transaction ─▸ im_feed (partition, position), with the messages themselves
    read   rows behind the cursor, per partition by position ─▸ merged ─▸ the messages as they are now ─▸ the next cursor
    wait   one task looks at the partitions' positions while somebody waits, and wakes who waits for one that moved; who
           waits at the same cursor reads together
    trim   each owner removes what is older than its retention, and leaves a floor

Only a partition's owner writes its rows, in the transaction that moves its position, so whoever reads on from a position
misses nothing and gets nothing twice; a conversation lies in one partition, so its messages come in order. A cursor below a
floor is refused: it would miss what was removed. Memory: one page per reader; the pages are bound by count and bytes.
"""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

from plato.core.conversations import partition_of
from plato.core.errors import Unavailable

from plato_msg.core import cursors
from plato_msg.store_reads import Database, Message

LOOK_S: Final = 0.1
PAGE_BYTES: Final = 4 << 20
SCAN: Final = 5_000
"""Rows of a partition that one read looks at for a single conversation."""
WAITERS: Final = 500
TRIM_ROWS: Final = 1_000

_KEYS: Final = """
SELECT f.partition, f.position, f.msg_id, f.conversation_id, f.seq
FROM unnest($1::integer[], $2::bigint[]) AS c(partition, position) CROSS JOIN LATERAL (
    SELECT * FROM im_feed r WHERE r.partition = c.partition AND r.position > c.position ORDER BY r.position LIMIT $3
) f ORDER BY f.partition, f.position
"""
_BOUNDS: Final = (
    "SELECT o.partition, o.position, coalesce(f.position, 0) FROM bus_owner o"
    " LEFT JOIN im_feed_floor f USING (partition) ORDER BY o.partition"
)
_MESSAGES: Final = """
SELECT n, conversation_id, msg_id, seq, prev_seq, from_user, msg_type, body, client_msg_id, at, changed_seq, recalled FROM (
    SELECT k.n, m.*, (extract(epoch FROM m.server_at) * 1000)::bigint AS at,
        sum(octet_length(m.body)) OVER (ORDER BY k.n) - octet_length(m.body) AS begins
    FROM unnest($1::text[], $2::bigint[]) WITH ORDINALITY AS k(conversation_id, seq, n)
    JOIN im_message m ON m.conversation_id = k.conversation_id AND m.seq = k.seq
) sized WHERE begins < $3 ORDER BY n
"""
_TRIM: Final = """
WITH upto AS (
    SELECT position FROM im_feed WHERE partition = $1 ORDER BY position OFFSET $3 LIMIT 1
), gone AS (
    DELETE FROM im_feed f USING upto WHERE f.partition = $1 AND f.position <= upto.position
        AND (SELECT at FROM im_feed WHERE partition = $1 AND position = upto.position) < now() - make_interval(secs => $2)
    RETURNING f.position
)
INSERT INTO im_feed_floor (partition, position) SELECT $1, max(position) FROM gone HAVING count(*) > 0
ON CONFLICT (partition) DO UPDATE SET position = greatest(im_feed_floor.position, EXCLUDED.position)
"""


class Event(NamedTuple):
    """A message of the feed, as it is now."""

    partition: int
    position: int
    conversation_id: str
    message: Message


class Gone(Exception):
    """What comes after this cursor was removed."""


class Foreign(Exception):
    """This is no cursor of this cluster's."""


class Busy(Exception):
    """Too many wait here."""


class Key(NamedTuple):
    """A row of im_feed."""

    partition: int
    position: int
    msg_id: int
    conversation_id: str
    seq: int


class Feed:
    """Reads the feed. Every method raises Unavailable."""

    def __init__(self, database: Database, partitions: int, *, page_bytes: int = PAGE_BYTES) -> None:
        self._database = database
        self._partitions = partitions
        self._page_bytes = page_bytes
        self._waiting = 0
        self._seen: list[int] = []
        self._together: dict[tuple[str, str, int], asyncio.Task[tuple[list[Event], str]]] = {}
        """Reads that are under way and begun after the newest wake, of those who waited for it."""
        self._moved = asyncio.Event()
        self._closed = False

    # ── for callers with a cursor ────────────────────────────────────────────────────────────────────────────

    async def now(self) -> str:
        """The cursor behind everything that is there."""
        return cursors.encode([position for position, _ in await self._bounds()])

    async def read(self, cursor: str, conversation_id: str, limit: int) -> tuple[list[Event], str]:
        """What comes after the cursor ("": after the oldest that is kept), and the next cursor. conversation_id: only of
        this one. Raises Foreign and Gone too."""
        after = cursors.decode(cursor, self._partitions) if cursor else [floor for _, floor in await self._bounds()]
        if after is None:
            raise Foreign
        only = partition_of(conversation_id, self._partitions) if conversation_id else None
        while True:
            if only is None:
                looked = keys = merged(await self.keys(dict(enumerate(after)), limit), limit)
            else:
                looked = await self.keys({only: after[only]}, SCAN)
                keys = [key for key in looked if key.conversation_id == conversation_id][:limit]
            events, done = await self.messages(keys)
            await self._check(after)
            for key in done:
                after[key.partition] = key.position
            if only is not None and looked and len(done) == len(keys) < limit:
                after[only] = looked[-1].position  # none of its messages is left among what was looked at
            if events or only is None or len(looked) < SCAN:
                return events, cursors.encode(after)

    async def wait(self, cursor: str, conversation_id: str, limit: int, wait_s: float) -> tuple[list[Event], str]:
        """`read`; where there is nothing yet, what comes within `wait_s`. Raises Busy too."""
        deadline = asyncio.get_running_loop().time() + wait_s
        woken = False
        while True:
            moved = self._moved
            events: list[Event] = []
            if not woken:
                events, cursor = await self.read(cursor, conversation_id, limit)
            elif self._beyond(cursor, conversation_id):
                events, cursor = await self._read_together(cursor, conversation_id, limit)
            woken = True
            left_s = deadline - asyncio.get_running_loop().time()
            if events or left_s <= 0 or self._closed:
                return events, cursor
            if self._waiting >= WAITERS:
                raise Busy
            self._waiting += 1
            try:
                async with asyncio.timeout(left_s):
                    await moved.wait()
            except TimeoutError:
                pass
            finally:
                self._waiting -= 1

    async def run(self) -> None:
        """Wakes who waits; until cancelled."""
        seen: list[int] = []
        while True:
            await asyncio.sleep(LOOK_S)
            if not self._waiting:
                continue
            try:
                now = [position for position, _ in await self._bounds()]
            except Unavailable:
                now = []  # who waits reads, and is told
            if now != seen:
                seen = self._seen = now
                self._wake()

    def close(self) -> None:
        """Nobody waits any more."""
        self._closed = True
        self._wake()

    # ── for hooks and owners ─────────────────────────────────────────────────────────────────────────────────

    async def keys(self, after: Mapping[int, int], limit: int) -> list[Key]:
        """Rows behind {partition: position}, at most `limit` of each partition; by partition and position."""
        async with self._database.connection() as connection:
            rows = await connection.fetch(_KEYS, list(after.keys()), list(after.values()), limit)
        return [Key(*row) for row in rows]

    async def messages(self, keys: Sequence[Key]) -> tuple[list[Event], list[Key]]:
        """The messages of these rows, as many as fit into a page, and the rows that are dealt with by that."""
        if not keys:
            return [], []
        async with self._database.connection() as connection:
            rows = await connection.fetch(
                _MESSAGES, [key.conversation_id for key in keys], [key.seq for key in keys], self._page_bytes
            )
        events = []
        for n, conversation_id, *message in rows:
            key = keys[n - 1]
            events.append(Event(key.partition, key.position, conversation_id, Message(*message)))
        # Of a row without a message (its retention is over) there is nothing to tell. The first one always fits.
        return events, list(keys[: rows[-1][0]] if rows else keys)

    async def look_up(self, places: Sequence[tuple[str, int]]) -> list[Event]:
        """The messages at these places (conversation_id, seq), in order; those that are gone are left out."""
        found: list[Event] = []
        keys = [Key(0, 0, 0, *place) for place in places]
        while keys:
            events, done = await self.messages(keys)
            found += events
            keys = keys[len(done) :]
        return found

    async def trim(self, partition: int, older_than_s: float) -> None:
        """Removes what is older, some rows at a time."""
        async with self._database.connection() as connection:
            while await connection.execute(_TRIM, partition, older_than_s, TRIM_ROWS - 1) != "INSERT 0 0":
                pass

    async def _bounds(self) -> list[tuple[int, int]]:
        """(newest position, floor) by partition."""
        async with self._database.connection() as connection:
            return [(row[1], row[2]) for row in await connection.fetch(_BOUNDS)]

    async def _check(self, after: Sequence[int]) -> None:
        """Called after what lies behind `after` was read: what was removed before that left its floor."""
        for position, (newest, floor) in zip(after, await self._bounds(), strict=True):
            if position > newest:
                raise Foreign
            if position < floor:
                raise Gone

    def _beyond(self, cursor: str, conversation_id: str) -> bool:
        """Whether a partition moved that this cursor waits for; True where that is not known."""
        after = cursors.decode(cursor, self._partitions)
        if after is None or len(self._seen) != len(after):
            return True
        only = partition_of(conversation_id, self._partitions) if conversation_id else None
        return any(
            now > at for n, (now, at) in enumerate(zip(self._seen, after, strict=True)) if only is None or n == only
        )

    async def _read_together(self, cursor: str, conversation_id: str, limit: int) -> tuple[list[Event], str]:
        """`read`, once for all who were woken at this cursor. Only for who was woken: what begins now began after that."""
        key = cursor, conversation_id, limit
        read = self._together.get(key)
        if read is None:
            read = self._together[key] = asyncio.create_task(self.read(*key), name="feed read")
            read.add_done_callback(lambda done: self._ended(key, done))
        return await asyncio.shield(read)  # another one may wait for it

    def _ended(self, key: tuple[str, str, int], read: asyncio.Task[tuple[list[Event], str]]) -> None:
        if self._together.get(key) is read:
            del self._together[key]
        if not read.cancelled():
            read.exception()  # known, also where whoever waited for it went away

    def _wake(self) -> None:
        self._together = {}
        moved, self._moved = self._moved, asyncio.Event()
        moved.set()


def merged(keys: Sequence[Key], limit: int) -> list[Key]:
    """The oldest rows of all partitions, each partition's by position."""
    by_partition: dict[int, list[Key]] = {}
    for key in keys:
        by_partition.setdefault(key.partition, []).append(key)
    return [key for key, _ in zip(heapq.merge(*by_partition.values(), key=_age), range(limit), strict=False)]


def _age(key: Key) -> int:
    return key.msg_id
