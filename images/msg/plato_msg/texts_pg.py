"""SQL of the index of texts: what is not read yet, what it says, and looking for it.

    behind   conversations whose newest message lies above their mark, a page of all conversations at a time
    after    rows above the marks, and the rows that operations among them changed
    write    rows of im_text, and the marks, in one transaction
    look     the index, then for each row whether its reader may read it, as things stand now
    texts    what stands at the places that are shown

What was read before a change and written after it says so by its changed_seq: it replaces nothing newer, and is not found.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Final, NamedTuple

import asyncpg
from plato.core.errors import PlatoError, Unavailable
from plato.core.ids import MAX_ID

from plato_msg.store_reads import Connection, Database, columns

CONVERSATIONS_MAX: Final = 5_000
"""Conversations of one search, those with the newest messages."""
LEAST_MS: Final = 20
"""What is not begun with less time than this."""

# Where a user's conversations are: the newest text that he may read of each. $4: seq of no message.
_CONVERSATIONS: Final = """
SELECT mine.conversation_id, n.seq, n.msg_id FROM (
    SELECT conversation_id, joined_seq, $4::bigint AS upto FROM im_member
    WHERE user_id = $1 AND ($2 = '' OR conversation_id = $2)
    UNION ALL
    SELECT conversation_id, joined_seq, left_seq FROM im_former_member
    WHERE user_id = $1 AND ($2 = '' OR conversation_id = $2)
) mine CROSS JOIN LATERAL (
    SELECT r.seq, r.msg_id FROM im_text r
    WHERE r.conversation_id = mine.conversation_id AND r.seq > mine.joined_seq AND r.seq <= mine.upto
    ORDER BY r.seq DESC LIMIT 1
) n ORDER BY n.msg_id DESC LIMIT $3
"""

# Sorted before it is joined, so that messages are looked up until the page is full, and not for all that the index finds.
_LOOK: Final = """
SELECT t.conversation_id, t.seq, t.msg_id FROM (
    SELECT conversation_id, seq, msg_id, changed_seq FROM im_text
    WHERE words @@ $2::tsquery AND msg_id < $3 ORDER BY msg_id DESC OFFSET 0
) t JOIN im_message m ON m.msg_id = t.msg_id AND NOT m.recalled AND m.changed_seq = t.changed_seq
WHERE ($4 = '' OR m.from_user = $4)
AND ($5 = 0 OR m.server_at > to_timestamp($5 / 1000.0)) AND ($6 = 0 OR m.server_at < to_timestamp($6 / 1000.0))
AND (
    EXISTS (SELECT FROM im_member w
            WHERE w.conversation_id = t.conversation_id AND w.user_id = $1 AND w.joined_seq < t.seq)
    OR EXISTS (SELECT FROM im_former_member w WHERE w.conversation_id = t.conversation_id AND w.user_id = $1
               AND w.joined_seq < t.seq AND t.seq <= w.left_seq)
)
AND NOT EXISTS (SELECT FROM im_user_state s
                WHERE s.user_id = $1 AND s.conversation_id = t.conversation_id AND s.cleared_seq >= t.seq)
AND NOT EXISTS (SELECT FROM im_hidden h
                WHERE h.user_id = $1 AND h.conversation_id = t.conversation_id AND h.seq = t.seq)
ORDER BY t.msg_id DESC LIMIT $7
"""

_TEXTS: Final = """
SELECT t.conversation_id, t.said, m.msg_id, m.seq, m.prev_seq, m.from_user, m.msg_type, m.body, m.client_msg_id,
       (extract(epoch FROM m.server_at) * 1000)::bigint, m.changed_seq
FROM unnest($1::text[], $2::bigint[]) AS k(c, s) JOIN im_text t ON t.conversation_id = k.c AND t.seq = k.s
JOIN im_message m ON m.msg_id = t.msg_id AND NOT m.recalled AND m.changed_seq = t.changed_seq
ORDER BY m.msg_id DESC
"""


class Place(NamedTuple):
    """A message that can be found."""

    conversation_id: str
    seq: int
    msg_id: int


class Unread(NamedTuple):
    """A message that is not in the index as it is now."""

    conversation_id: str
    seq: int
    msg_id: int
    msg_type: int
    body: bytes
    changed_seq: int
    recalled: bool


class Text(NamedTuple):
    """A row of im_text. said "": nothing can be found of it. lexemes: with spaces between."""

    conversation_id: str
    seq: int
    msg_id: int
    changed_seq: int
    said: str
    lexemes: str


class Found(NamedTuple):
    """A message that the index found, as it is now."""

    conversation_id: str
    said: str
    msg_id: int
    seq: int
    prev_seq: int
    from_user: str
    msg_type: int
    body: bytes
    client_msg_id: bytes
    server_at_ms: int
    changed_seq: int


class TooSlow(PlatoError):
    """The search was stopped after its time. waited: no connection came free within it."""

    def __init__(self, *, waited: bool = False) -> None:
        super().__init__()
        self.waited = waited


class PgTexts:
    """The index. Every method raises Unavailable."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def behind(self, after: str, limit: int) -> tuple[list[str], str]:
        """Of the `limit` conversations with ids greater than `after` those that hold something unread, and the last id that
        was looked at; "": there are no more."""
        async with self._database.connection() as connection:
            rows = await connection.fetch(
                "SELECT c.conversation_id, c.last_seq > coalesce(t.seq, 0) FROM ("
                "   SELECT conversation_id, last_seq FROM im_conversation WHERE conversation_id > $1"
                "   ORDER BY conversation_id LIMIT $2) c LEFT JOIN im_text_mark t USING (conversation_id)"
                " ORDER BY c.conversation_id",
                after,
                limit,
            )
        return [row[0] for row in rows if row[1]], rows[-1][0] if len(rows) == limit else ""

    async def after(self, conversations: Collection[str], limit: int) -> list[Unread]:
        """Per conversation at most `limit` messages above its mark, by seq."""
        async with self._database.connection() as connection:
            rows = await connection.fetch(
                "SELECT m.conversation_id, m.seq, m.msg_id, m.msg_type, m.body, m.changed_seq, m.recalled"
                " FROM unnest($1::text[]) AS k(c) LEFT JOIN im_text_mark t ON t.conversation_id = k.c"
                " CROSS JOIN LATERAL (SELECT * FROM im_message r WHERE r.conversation_id = k.c"
                "   AND r.seq > coalesce(t.seq, 0) ORDER BY r.seq LIMIT $2) m ORDER BY 1, 2",
                list(conversations),
                limit,
            )
        return [Unread(*row) for row in rows]

    async def rows(self, places: Collection[tuple[str, int]]) -> list[Unread]:
        """The messages at (conversation_id, seq)."""
        async with self._database.connection() as connection:
            rows = await connection.fetch(
                "SELECT m.conversation_id, m.seq, m.msg_id, m.msg_type, m.body, m.changed_seq, m.recalled"
                " FROM unnest($1::text[], $2::bigint[]) AS k(c, s)"
                " JOIN im_message m ON m.conversation_id = k.c AND m.seq = k.s",
                *columns(places, 2),
            )
        return [Unread(*row) for row in rows]

    async def write(self, texts: Sequence[Text], marks: Mapping[str, int]) -> None:
        """Puts texts in, each (conversation_id, seq) once, takes those that say nothing out, and moves the marks."""
        async with self._database.connection() as connection, connection.transaction():
            await connection.execute(
                "INSERT INTO im_text AS held (conversation_id, seq, msg_id, changed_seq, said, words)"
                " SELECT c, s, m, k, said, array_to_tsvector(string_to_array(l, ' ')) FROM unnest("
                "$1::text[], $2::bigint[], $3::bigint[], $4::bigint[], $5::text[], $6::text[]) AS t(c, s, m, k, said, l)"
                ' ORDER BY c COLLATE "C", s ON CONFLICT (conversation_id, seq) DO UPDATE'
                " SET changed_seq = EXCLUDED.changed_seq, said = EXCLUDED.said, words = EXCLUDED.words"
                " WHERE held.changed_seq <= EXCLUDED.changed_seq",
                *columns((t for t in texts if t.said), 6),
            )
            silent = [(t.conversation_id, t.seq) for t in texts if not t.said and t.changed_seq]
            if silent:
                await connection.execute(
                    "DELETE FROM im_text t USING unnest($1::text[], $2::bigint[]) AS k(c, s)"
                    " WHERE t.conversation_id = k.c AND t.seq = k.s",
                    *columns(silent, 2),
                )
            await connection.execute(
                "INSERT INTO im_text_mark AS held (conversation_id, seq)"
                ' SELECT * FROM unnest($1::text[], $2::bigint[]) AS t(c, s) ORDER BY c COLLATE "C"'
                " ON CONFLICT (conversation_id) DO UPDATE SET seq = greatest(held.seq, EXCLUDED.seq)",
                list(marks.keys()),
                list(marks.values()),
            )

    # ── searching: each ends by a moment of the loop's clock, and raises TooSlow too ─────────────────────────

    async def conversations(self, user: str, conversation_id: str, until: float) -> list[Place]:
        """What a user may search: of everything, or of one conversation, those that he is or was in, each with the newest
        text that he may read; the newest first, one more than CONVERSATIONS_MAX at most."""
        async with self._within(until) as connection:
            rows = await connection.fetch(_CONVERSATIONS, user, conversation_id, CONVERSATIONS_MAX + 1, MAX_ID)
        return [Place(*row) for row in rows]

    async def look(
        self,
        user: str,
        query: str,
        *,
        before_id: int = MAX_ID,
        from_user: str = "",
        after_ms: int = 0,
        before_ms: int = 0,
        limit: int,
        until: float,
    ) -> list[Place]:
        """Messages that the user may read and whose words fit, the newest first, below the msg_id."""
        async with self._within(until) as connection:
            rows = await connection.fetch(_LOOK, user, query, before_id, from_user, after_ms, before_ms, limit)
        return [Place(*row) for row in rows]

    async def texts(self, places: Collection[Place], until: float) -> list[Found]:
        """What stands at places that `look` found, the newest first; without those that were changed meanwhile."""
        async with self._within(until) as connection:
            rows = await connection.fetch(_TEXTS, *columns((place[:2] for place in places), 2))
        return [Found(*row) for row in rows]

    @asynccontextmanager
    async def _within(self, until: float) -> AsyncIterator[Connection]:
        """A connection whose statements end by then."""
        clock = asyncio.get_running_loop().time
        if until - clock() < LEAST_MS / 1_000:
            raise TooSlow
        async with AsyncExitStack() as stack:
            try:
                async with asyncio.timeout_at(until):
                    connection = await stack.enter_async_context(self._stopping())
            except TimeoutError:
                raise TooSlow(waited=True) from None
            left_ms = max(1, int((until - clock()) * 1_000))
            await connection.execute(f"SET LOCAL statement_timeout = {left_ms}")
            yield connection

    @asynccontextmanager
    async def _stopping(self) -> AsyncIterator[Connection]:
        """A transaction that reads; a statement of it that took too long raises TooSlow."""
        try:
            async with self._database.connection() as connection, connection.transaction(readonly=True):
                yield connection
        except Unavailable as e:
            if isinstance(e.__cause__, asyncpg.QueryCanceledError):
                raise TooSlow from e
            raise
