"""Messages that are older than `msg.message_retention_days` are removed: by each process those of its partitions.

    a walk: conversations by id, PAGE at a time → of each the oldest BATCH rows, those that are too old go → again, while
    there are more → the next page; after the last one a pause of WALK_S

Between two statements it rests for RESTS times as long as the one before took, so it never takes more than a fraction of the
database. What stays: the conversation and its last_seq, so a pull over what was removed is answered as covered; outcomes, so
what is sent again is a duplicate still. Memory: one page of ids.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Sequence
from typing import Final

from plato.core.conversations import partition_of
from plato.core.errors import Unavailable
from plato.runtime import logs

from plato_msg import metrics
from plato_msg.store_reads import Database

PAGE: Final = 500
BATCH: Final = 100
RESTS: Final = 9
WALK_S: Final = 600.0
_BACK_OFF_S: Final = 5.0

_PAGE = "SELECT conversation_id FROM im_conversation WHERE conversation_id > $1 ORDER BY conversation_id LIMIT $2"
_REMOVE = """
WITH old AS MATERIALIZED (
    SELECT o.conversation_id, o.seq FROM unnest($1::text[]) AS c(id), LATERAL (
        SELECT m.conversation_id, m.seq, m.server_at FROM im_message m
        WHERE m.conversation_id = c.id ORDER BY m.seq LIMIT $3
    ) o WHERE o.server_at < now() - make_interval(days => $2)
), edits AS (
    DELETE FROM im_edit e USING old WHERE e.conversation_id = old.conversation_id AND e.of_seq = old.seq
), texts AS (
    DELETE FROM im_text t USING old WHERE t.conversation_id = old.conversation_id AND t.seq = old.seq
), uses AS (
    DELETE FROM im_attachment_use u USING old WHERE u.conversation_id = old.conversation_id AND u.seq = old.seq
    RETURNING u.attachment_id
), unused AS (  -- or perhaps not: whoever removes what is unused looks whether it still is used
    UPDATE im_attachment a SET unused_since = now() FROM uses WHERE a.attachment_id = uses.attachment_id
)
DELETE FROM im_message m USING old WHERE m.conversation_id = old.conversation_id AND m.seq = old.seq
RETURNING m.conversation_id
"""


class Retention:
    """The walks of one process. `run` does everything."""

    def __init__(
        self,
        database: Database,
        owned: Callable[[], Collection[int]],
        partitions: int,
        days: int,
        walk_s: float = WALK_S,
    ) -> None:
        """owned: the partitions that are ours now."""
        self._database = database
        self._owned = owned
        self._partitions = partitions
        self._days = days
        self._walk_s = walk_s
        self._log = logs.get("retention")

    async def run(self) -> None:
        """Runs until cancelled."""
        while True:
            try:
                removed = await self.walk()
            except Unavailable as e:
                self._log.warning("will be tried again", reason=str(e))
                await asyncio.sleep(_BACK_OFF_S)
                continue
            if removed:
                self._log.info("removed old messages", messages=removed)
            await asyncio.sleep(self._walk_s)

    async def walk(self) -> int:
        """All conversations once; how many rows went. Raises Unavailable."""
        loop = asyncio.get_running_loop()
        after, removed = "", 0
        while True:
            begun = loop.time()
            async with self._database.connection() as connection:
                page = [row[0] for row in await connection.fetch(_PAGE, after, PAGE)]
            owned = set(self._owned())
            rest = [c for c in page if partition_of(c, self._partitions) in owned]
            while rest:
                rest, count = await self._remove(rest)
                removed += count
                await asyncio.sleep(RESTS * (loop.time() - begun))
                begun = loop.time()
            if len(page) < PAGE:
                return removed
            after = page[-1]

    async def _remove(self, conversations: Sequence[str]) -> tuple[list[str], int]:
        """One batch of each: those that may have more, and how many rows went."""
        async with self._database.connection() as connection:
            rows = await connection.fetch(_REMOVE, list(conversations), self._days, BATCH)
        counts: dict[str, int] = {}
        for row in rows:
            counts[row[0]] = counts.get(row[0], 0) + 1
        metrics.REMOVED.inc(len(rows))
        return [c for c, count in counts.items() if count == BATCH], len(rows)
