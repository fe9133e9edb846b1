"""What of conversations and messages is read, in one statement each: for Sync and Pull, for the HTTP API, for notices. All
from the primary. Memory: one page.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Final, NamedTuple, Protocol, TypeAlias

import asyncpg
from plato.core.ids import MAX_ID
from plato.wire.v1 import content_pb2 as content

from plato_msg.core.batch import Key, Outcome
from plato_msg.core.policy import GROUP

Connection: TypeAlias = "asyncpg.Connection[asyncpg.Record]"


class Database(Protocol):
    """Where connections come from (plato.adapters.pg.Database)."""

    def connection(self) -> AbstractAsyncContextManager[Connection]:
        """A connection for the time of the block. Raises Unavailable, and Unstorable for SQLSTATE classes 22 and 23."""


class Message(NamedTuple):
    """A row of im_message, without its conversation_id."""

    msg_id: int
    seq: int
    prev_seq: int
    from_user: str
    msg_type: int
    body: bytes
    client_msg_id: bytes
    server_at_ms: int
    changed_seq: int = 0
    recalled: bool = False


class Access(NamedTuple):
    """What a user may read of a conversation: (joined_seq, newest_seq]. newest_seq: of who left, the seq of the leave."""

    newest_seq: int
    joined_seq: int
    changed_seq: int
    """Of the newest operation that changed an older row."""
    left: bool = False


class Listed(NamedTuple):
    """A conversation as Sync tells of it."""

    conversation_id: str
    newest_seq: int
    joined_seq: int
    peer: str
    title: str
    members: int
    left: bool


ROW_BYTES: Final = 384
"""What a row's ids and numbers take in a frame at most, beside the body."""

# prev_seq of a message that retention removed: its true one is gone, and a client that has a gap below it must see one.
OUTCOMES = """
SELECT o.conversation_id, o.from_user, o.client_msg_id, o.code, coalesce(o.msg_id, 0), coalesce(o.seq, 0),
       coalesce(m.prev_seq, o.seq - 1, 0), coalesce((extract(epoch FROM m.server_at) * 1000)::bigint, 0),
       coalesce(o.words, '')
FROM unnest($1::text[], $2::text[], $3::bytea[]) AS k(conversation_id, from_user, client_msg_id)
JOIN im_outcome o USING (conversation_id, from_user, client_msg_id)
LEFT JOIN im_message m ON m.conversation_id = o.conversation_id AND m.seq = o.seq
"""

# The access of $1 to $2; of NULL: the application's.
_ACCESS = """
SELECT role, joined_seq, NULL::bigint AS left_seq, '' AS title, false AS gone FROM im_member
WHERE conversation_id = $2 AND user_id = $1
UNION ALL
SELECT 0, joined_seq, left_seq, title, true FROM im_former_member WHERE conversation_id = $2 AND user_id = $1
UNION ALL
SELECT 0, 0, NULL, '', false WHERE $1::text IS NULL
"""


class PgReads:
    """Reads over one source of connections. Every method raises Unavailable."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def conversations(
        self, user: str, after_id: str, upto_id: str, cursors: Mapping[str, int], limit: int
    ) -> list[Listed]:
        """The user's conversations in (after_id, upto_id], also those that were left, that are newer than their cursor or,
        unlisted, than their join; by id, at most `limit`. upto_id "": to the end."""
        async with self._database.connection() as connection:
            rows = await connection.fetch(
                "(SELECT m.conversation_id, c.last_seq, m.joined_seq,"
                " CASE WHEN c.kind <> 'dialogue' THEN '' ELSE coalesce((SELECT p.user_id FROM im_member p"
                "   WHERE p.conversation_id = m.conversation_id AND p.user_id <> m.user_id LIMIT 1), m.user_id) END,"
                " c.title, c.members, false"
                " FROM im_member m JOIN im_conversation c USING (conversation_id)"
                " LEFT JOIN unnest($4::text[], $5::bigint[]) AS k(conversation_id, seq) USING (conversation_id)"
                " WHERE m.user_id = $1 AND m.conversation_id > $2 AND ($3 = '' OR m.conversation_id <= $3)"
                "   AND c.last_seq > greatest(k.seq, m.joined_seq)"  # greatest() skips the NULL of what is unlisted
                " ORDER BY m.conversation_id LIMIT $6)"
                " UNION ALL"
                " (SELECT f.conversation_id, f.left_seq, f.joined_seq, '', f.title, 0, true FROM im_former_member f"
                " LEFT JOIN unnest($4::text[], $5::bigint[]) AS k(conversation_id, seq) USING (conversation_id)"
                " WHERE f.user_id = $1 AND f.conversation_id > $2 AND ($3 = '' OR f.conversation_id <= $3)"
                "   AND f.left_seq > greatest(k.seq, f.joined_seq)"
                " ORDER BY f.conversation_id LIMIT $6)"
                " ORDER BY 1 LIMIT $6",
                user,
                after_id,
                upto_id,
                list(cursors.keys()),
                list(cursors.values()),
                limit,
            )
        return [Listed(*row) for row in rows]

    async def membership(self, user: str, conversation_id: str) -> Access | None:
        """What a member, or who was one, may read; None for everybody else."""
        return (await self._access(conversation_id, [user])).get(user)

    async def memberships(self, conversation_id: str, users: Collection[str]) -> dict[str, Access]:
        """`membership` for several users at once: {user: Access} of those among them who may read. One snapshot."""
        return await self._access(conversation_id, users)

    async def _access(self, conversation_id: str, users: Collection[str]) -> dict[str, Access]:
        async with self._database.connection() as connection:
            rows = await connection.fetch(
                "SELECT m.user_id, c.last_seq, m.joined_seq, c.changed_seq, false FROM im_member m"
                " JOIN im_conversation c USING (conversation_id) WHERE m.conversation_id = $1 AND m.user_id = ANY ($2)"
                " UNION ALL SELECT f.user_id, f.left_seq, f.joined_seq, c.changed_seq, true FROM im_former_member f"
                " JOIN im_conversation c USING (conversation_id) WHERE f.conversation_id = $1 AND f.user_id = ANY ($2)",
                conversation_id,
                list(users),
            )
        return {row[0]: Access(*row[1:]) for row in map(tuple, rows)}

    async def members(self, conversation_id: str, after: str, limit: int, below_seq: int = MAX_ID) -> list[str]:
        """The members that come after `after` and joined before the message `below_seq`, by id, at most `limit`."""
        async with self._database.connection() as connection:
            rows = await connection.fetch(
                "SELECT user_id FROM im_member WHERE conversation_id = $1 AND user_id > $2 AND joined_seq < $3"
                " ORDER BY user_id LIMIT $4",
                conversation_id,
                after,
                below_seq,
                limit,
            )
        return [row[0] for row in rows]

    async def group(self, conversation_id: str) -> tuple[int, int] | None:
        """(members, last_seq) of a group; None: there is none of that id."""
        async with self._database.connection() as connection:
            row = await connection.fetchrow(
                "SELECT members, last_seq FROM im_conversation WHERE conversation_id = $1 AND kind = $2",
                conversation_id,
                GROUP,
            )
        return (row[0], row[1]) if row is not None else None

    async def info(
        self, user: str | None, conversation_id: str
    ) -> tuple[str, str, str, int, int, int, int, bool, str] | None:
        """See plato_msg.conversations.Info, without its id. user None: whoever asks sees everything."""
        async with self._database.connection() as connection:
            row = await connection.fetchrow(
                "SELECT c.kind, CASE WHEN a.gone THEN a.title ELSE c.title END,"
                " CASE WHEN a.gone THEN '' ELSE coalesce((SELECT o.user_id FROM im_member o"
                "   WHERE o.conversation_id = c.conversation_id AND o.role = $3 AND o.role > 0 LIMIT 1), '') END,"
                " CASE WHEN a.gone THEN 0 WHEN c.kind = $4 THEN c.members"
                "   ELSE (SELECT count(*)::integer FROM im_member n WHERE n.conversation_id = c.conversation_id) END,"
                " a.role, a.joined_seq, coalesce(a.left_seq, c.last_seq), a.gone,"
                " CASE WHEN c.kind <> 'dialogue' OR $1::text IS NULL THEN '' ELSE coalesce((SELECT p.user_id"
                "   FROM im_member p WHERE p.conversation_id = c.conversation_id AND p.user_id <> $1 LIMIT 1), $1) END"
                f" FROM im_conversation c JOIN ({_ACCESS}) a ON true WHERE c.conversation_id = $2",
                user,
                conversation_id,
                content.OWNER,
                GROUP,
            )
        return tuple(row) if row is not None else None

    async def roll(
        self, user: str | None, conversation_id: str, after: str, limit: int
    ) -> list[tuple[str, int, int]] | None:
        """(user, role, joined_seq) of the members that come after `after`, by id, at most `limit`; None: the asker is no
        member. user None: whoever asks sees everything."""
        async with self._database.connection() as connection:
            rows = await connection.fetch(
                "SELECT m.user_id, m.role, m.joined_seq FROM im_conversation c LEFT JOIN LATERAL ("
                "   SELECT * FROM im_member w WHERE w.conversation_id = $2 AND w.user_id > $3 ORDER BY w.user_id LIMIT $4"
                " ) m ON true WHERE c.conversation_id = $2 AND ($1::text IS NULL OR EXISTS ("
                "   SELECT FROM im_member a WHERE a.conversation_id = $2 AND a.user_id = $1)) ORDER BY m.user_id",
                user,
                conversation_id,
                after,
                limit,
            )
        return [(row[0], row[1], row[2]) for row in rows if row[0] is not None] if rows else None

    async def message(self, user: str | None, msg_id: int) -> tuple[str, Message] | None:
        """(conversation_id, row) of a message that the user may read; user None: of any."""
        async with self._database.connection() as connection:
            row = await connection.fetchrow(
                "SELECT r.conversation_id, r.msg_id, r.seq, r.prev_seq, r.from_user, r.msg_type, r.body, r.client_msg_id,"
                " (extract(epoch FROM r.server_at) * 1000)::bigint, r.changed_seq, r.recalled FROM im_message r"
                " WHERE r.msg_id = $2 AND ($1::text IS NULL OR EXISTS (SELECT FROM im_member m"
                "   WHERE m.conversation_id = r.conversation_id AND m.user_id = $1 AND m.joined_seq < r.seq)"
                " OR EXISTS (SELECT FROM im_former_member f WHERE f.conversation_id = r.conversation_id AND f.user_id = $1"
                "   AND f.joined_seq < r.seq AND r.seq <= f.left_seq))",
                user,
                msg_id,
            )
        return (row[0], Message(*tuple(row)[1:])) if row is not None else None

    async def outcomes(self, keys: Collection[Key]) -> dict[Key, Outcome]:
        """Of those that have one."""
        async with self._database.connection() as connection:
            rows = await connection.fetch(OUTCOMES, *columns(keys, 3))
        return {(c, u, bytes(i)): Outcome(*rest) for c, u, i, *rest in rows}

    async def messages(
        self, conversation_id: str, from_seq: int, to_seq: int, limit: int, limit_bytes: int, *, newest_first: bool
    ) -> list[Message]:
        """The rows with from_seq ≤ seq ≤ to_seq from the old or the new end, in that direction: at most `limit`, and only
        those that begin within `limit_bytes`, each counted as its body and ROW_BYTES."""
        order = "DESC" if newest_first else "ASC"
        async with self._database.connection() as connection:
            rows = await connection.fetch(
                "SELECT msg_id, seq, prev_seq, from_user, msg_type, body, client_msg_id, at, changed_seq, recalled FROM ("
                " SELECT msg_id, seq, prev_seq, from_user, msg_type, body, client_msg_id, changed_seq, recalled,"
                "   (extract(epoch FROM server_at) * 1000)::bigint AS at,"
                f"   sum(octet_length(body) + {ROW_BYTES}) OVER (ORDER BY seq {order})"
                f"     - octet_length(body) - {ROW_BYTES} AS begins"
                "  FROM (SELECT * FROM im_message WHERE conversation_id = $1 AND seq BETWEEN $2 AND $3"
                f"       ORDER BY seq {order} LIMIT $4) page) sized"
                f" WHERE begins < $5 ORDER BY seq {order}",
                conversation_id,
                from_seq,
                to_seq,
                limit,
                limit_bytes,
            )
        return [Message(*row) for row in rows]


def columns(rows: Iterable[Sequence[object]], width: int) -> list[list[object]]:
    """Rows → columns; of no rows, `width` empty columns."""
    turned = [list(column) for column in zip(*rows, strict=True)]
    return turned or [[] for _ in range(width)]
