"""All SQL of msg, in statements over arrays: none per message. What flows: one transaction per batch, of all its partitions.

    batch():  guard (R7: the owner's rows, where epoch and position are the expected ones) → known() → write() → commit
    around:   beats, owners, take-over and release; dirty shards; what replays and reads need

Lock order: rows of bus_owner by partition, then everything else of those partitions, which only their owner touches.
Memory: one batch.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Final, NamedTuple, Protocol, TypeAlias

import asyncpg
from plato.core.errors import Fenced
from plato.core.ids import MAX_ID

from plato_msg.core.batch import Conversation, Known, Outcome, Plan, Uplink
from plato_msg.core.policy import GROUP

Connection: TypeAlias = "asyncpg.Connection[asyncpg.Record]"


class Database(Protocol):
    """Where connections come from (plato.adapters.pg.Database)."""

    def connection(self) -> AbstractAsyncContextManager[Connection]:
        """A connection for the time of the block. Raises Unavailable, and Unstorable for SQLSTATE classes 22 and 23."""


class SteppedDown(Fenced):
    """These partitions have another owner or another position than the batch expected; nothing was written."""

    def __init__(self, partitions: Collection[int]) -> None:
        super().__init__(f"partitions {sorted(partitions)} are no longer owned as expected")
        self.partitions = frozenset(partitions)


class Owner(NamedTuple):
    """A row of bus_owner. owner: uid, "" when released."""

    partition: int
    owner: str
    epoch: int
    position: int
    fanned_out: int


class Guard(NamedTuple):
    """What a batch expects of one partition, and what it sets."""

    partition: int
    epoch: int
    position: int
    new_position: int
    fanned_out: int


class Poison(NamedTuple):
    """A record that no outcome can be kept for."""

    partition: int
    position: int
    reason: str
    value: bytes


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


ROW_BYTES: Final = 384
"""What a row's ids and numbers take in a frame at most, beside the body."""

_GUARD = """
WITH expected AS (
    SELECT * FROM unnest($1::integer[], $2::bigint[], $3::bigint[], $4::bigint[], $5::bigint[])
        AS e(partition, epoch, position, new_position, fanned_out)
), held AS MATERIALIZED (
    SELECT o.partition FROM bus_owner o JOIN expected e USING (partition)
    WHERE o.epoch = e.epoch AND o.position = e.position
    ORDER BY o.partition FOR UPDATE OF o
)
UPDATE bus_owner o SET position = e.new_position, fanned_out = greatest(o.fanned_out, e.fanned_out)
FROM expected e JOIN held USING (partition)
WHERE o.partition = e.partition
RETURNING o.partition
"""

_OUTCOMES = """
SELECT o.conversation_id, o.from_user, o.client_msg_id, o.code, coalesce(o.msg_id, 0), coalesce(o.seq, 0),
       coalesce(m.prev_seq, 0), coalesce((extract(epoch FROM m.server_at) * 1000)::bigint, 0)
FROM unnest($1::text[], $2::text[], $3::bytea[]) AS k(conversation_id, from_user, client_msg_id)
JOIN im_outcome o USING (conversation_id, from_user, client_msg_id)
LEFT JOIN im_message m ON m.conversation_id = o.conversation_id AND m.seq = o.seq
"""

# Of a group with more than $4 members only those that the batch names ($2, $3). Both conditions on c.members are of the
# outer row, so the branch that does not apply reads nothing.
_CONVERSATIONS = """
SELECT c.conversation_id, c.kind, c.last_seq, c.members, m.user_id, m.joined_seq
FROM im_conversation c LEFT JOIN LATERAL (
    SELECT w.user_id, w.joined_seq FROM im_member w
    WHERE c.members <= $4 AND w.conversation_id = c.conversation_id
    UNION ALL
    SELECT w.user_id, w.joined_seq FROM unnest($2::text[], $3::text[]) AS n(conversation_id, user_id)
        JOIN im_member w ON w.conversation_id = c.conversation_id AND w.user_id = n.user_id
    WHERE c.members > $4 AND n.conversation_id = c.conversation_id
) m ON true
WHERE c.conversation_id = ANY ($1::text[])
"""

PUSH_MEMBERS: Final = 500


class Batch:
    """The open transaction of one batch; its guard has passed."""

    def __init__(self, connection: Connection, push_members: int = PUSH_MEMBERS) -> None:
        self._connection = connection
        self._push_members = push_members

    async def known(self, uplinks: Sequence[Uplink]) -> Known:
        """What the database holds on these records' keys and conversations."""
        return await _known(self._connection, uplinks, self._push_members)

    async def write(self, plan: Plan, poison: Sequence[Poison] = ()) -> None:
        """Writes the plan's rows, and the poisoned records."""
        execute = self._connection.execute
        if plan.conversations:
            await execute(
                "INSERT INTO im_conversation (conversation_id, kind, last_seq)"
                " SELECT * FROM unnest($1::text[], $2::text[], $3::bigint[])"
                " ON CONFLICT (conversation_id) DO UPDATE SET last_seq = EXCLUDED.last_seq",
                list(plan.conversations),
                [kind for kind, _ in plan.conversations.values()],
                [last_seq for _, last_seq in plan.conversations.values()],
            )
        if plan.groups:
            await execute(
                "INSERT INTO im_conversation (conversation_id, kind, members) SELECT c, $3, n"
                " FROM unnest($1::text[], $2::integer[]) AS g(c, n)"
                " ON CONFLICT (conversation_id) DO UPDATE SET members = EXCLUDED.members",
                list(plan.groups.keys()),
                list(plan.groups.values()),
                GROUP,
            )
        if plan.leaves:
            await execute(
                "DELETE FROM im_member m USING unnest($1::text[], $2::text[]) AS l(c, u)"
                " WHERE m.conversation_id = l.c AND m.user_id = l.u",
                *_columns(plan.leaves, 2),
            )
        if plan.joins:
            await execute(
                "INSERT INTO im_member (conversation_id, user_id, joined_seq)"
                " SELECT * FROM unnest($1::text[], $2::text[], $3::bigint[])",
                *_columns(plan.joins, 3),
            )
        if plan.outcomes:
            await execute(
                "INSERT INTO im_outcome (conversation_id, from_user, client_msg_id, code, msg_id, seq)"
                " SELECT c, u, i, code, nullif(msg_id, 0), nullif(seq, 0) FROM unnest("
                "$1::text[], $2::text[], $3::bytea[], $4::integer[], $5::bigint[], $6::bigint[])"
                " AS o(c, u, i, code, msg_id, seq)",
                *_columns(((*d.uplink.key, d.outcome.code, d.outcome.msg_id, d.outcome.seq) for d in plan.outcomes), 6),
            )
        if plan.messages:
            await execute(
                "INSERT INTO im_message (msg_id, conversation_id, seq, prev_seq, from_user, msg_type, body, client_msg_id,"
                " server_at) SELECT msg_id, c, seq, prev_seq, u, msg_type, body, i, to_timestamp(at / 1000.0) FROM unnest("
                "$1::bigint[], $2::text[], $3::bigint[], $4::bigint[], $5::text[], $6::bigint[], $7::bytea[], $8::bytea[],"
                " $9::bigint[]) AS m(msg_id, c, seq, prev_seq, u, msg_type, body, i, at)",
                *_columns(
                    (
                        (
                            d.outcome.msg_id,
                            d.uplink.conversation_id,
                            d.outcome.seq,
                            d.outcome.prev_seq,
                            d.uplink.from_user,
                            d.uplink.msg_type,
                            d.uplink.body,
                            d.uplink.client_msg_id,
                            d.outcome.server_at_ms,
                        )
                        for d in plan.messages
                    ),
                    9,
                ),
            )
        if poison:
            await execute(
                "INSERT INTO bus_poison (partition, position, reason, value)"
                " SELECT * FROM unnest($1::integer[], $2::bigint[], $3::text[], $4::bytea[])"
                " ON CONFLICT DO NOTHING",
                *_columns(poison, 4),
            )


class PgMsgStore:
    """Partitions' owners, outcomes and messages. Every method raises Unavailable; batch also Unstorable and SteppedDown."""

    def __init__(self, database: Database, push_members: int = PUSH_MEMBERS) -> None:
        """push_members: of groups that have more, batches read no list of members; see plato_msg.notify."""
        self._database = database
        self._push_members = push_members

    @asynccontextmanager
    async def batch(self, guards: Sequence[Guard]) -> AsyncIterator[Batch]:
        """One transaction that begins by moving the owners' positions, and commits at the end of the block.

        Raises SteppedDown, Unstorable, or Unavailable: then the commit may have happened, so memory is to be reloaded.
        """
        async with self._database.connection() as connection, connection.transaction():
            rows = await connection.fetch(_GUARD, *_columns(guards, 5))
            if len(rows) != len(guards):
                raise SteppedDown({g.partition for g in guards} - {row["partition"] for row in rows})
            yield Batch(connection, self._push_members)

    async def known(self, uplinks: Sequence[Uplink]) -> Known:
        """As Batch.known, outside of a batch: for what is fanned out again."""
        async with self._database.connection() as connection:
            return await _known(connection, uplinks, self._push_members)

    # ── owners and members ───────────────────────────────────────────────────────────────────────────────────

    async def beat(self, uid: str) -> dict[str, int]:
        """Moves our beat counter; returns everybody's {uid: beat}."""
        async with self._database.connection() as connection:
            await connection.execute(
                "INSERT INTO bus_member (uid, beat) VALUES ($1, 1)"
                " ON CONFLICT (uid) DO UPDATE SET beat = bus_member.beat + 1",
                uid,
            )
            rows = await connection.fetch("SELECT uid, beat FROM bus_member")
        return {row["uid"]: row["beat"] for row in rows}

    async def forget_members(self, uids: Collection[str]) -> None:
        """Deletes the rows of members that are gone."""
        async with self._database.connection() as connection:
            await connection.execute("DELETE FROM bus_member WHERE uid = ANY ($1)", list(uids))

    async def owners(self) -> tuple[list[Owner], dict[int, int]]:
        """Every partition's row, by partition, and {partition: records not taken yet}."""
        async with self._database.connection() as connection:
            rows = await connection.fetch(
                "SELECT o.partition, o.owner, o.epoch, o.position, o.fanned_out, h.next_position - 1 - o.position"
                " FROM bus_owner o JOIN bus_head h USING (partition) ORDER BY o.partition"
            )
        return [Owner(*row[:5]) for row in map(tuple, rows)], {row[0]: max(0, row[5]) for row in map(tuple, rows)}

    async def take(self, uid: str, seen_epochs: Mapping[int, int]) -> list[Owner]:
        """Takes partitions over where the epoch still is the seen one: commits epoch + 1; what it returns was read after no
        older owner could write any more. Partitions that somebody else took first are absent."""
        async with self._database.connection() as connection:
            await connection.execute(
                "WITH wanted AS (SELECT * FROM unnest($2::integer[], $3::bigint[]) AS w(partition, epoch)),"
                " held AS MATERIALIZED (SELECT o.partition FROM bus_owner o JOIN wanted w USING (partition)"
                "   WHERE o.epoch = w.epoch ORDER BY o.partition FOR UPDATE OF o)"
                " UPDATE bus_owner o SET owner = $1, epoch = o.epoch + 1"
                " FROM held WHERE o.partition = held.partition",
                uid,
                list(seen_epochs.keys()),
                list(seen_epochs.values()),
            )
        return await self.load(uid, {partition: epoch + 1 for partition, epoch in seen_epochs.items()})

    async def load(self, uid: str, epochs: Mapping[int, int]) -> list[Owner]:
        """The rows of those partitions that are ours under these epochs."""
        async with self._database.connection() as connection:
            rows = await connection.fetch(
                "SELECT o.partition, o.owner, o.epoch, o.position, o.fanned_out"
                " FROM bus_owner o JOIN unnest($2::integer[], $3::bigint[]) AS e(partition, epoch) USING (partition, epoch)"
                " WHERE o.owner = $1 ORDER BY o.partition",
                uid,
                list(epochs.keys()),
                list(epochs.values()),
            )
        return [Owner(*row) for row in rows]

    async def save(self, fanned_out: Mapping[int, tuple[int, int]], *, release: bool = False) -> None:
        """Saves {partition: (epoch, fanned_out)} where the epoch still is ours; `release` gives the partitions up too."""
        async with self._database.connection() as connection:
            await connection.execute(
                "WITH saved AS (SELECT * FROM unnest($1::integer[], $2::bigint[], $3::bigint[])"
                "   AS s(partition, epoch, fanned_out)),"
                " held AS MATERIALIZED (SELECT o.partition FROM bus_owner o JOIN saved s USING (partition)"
                "   WHERE o.epoch = s.epoch ORDER BY o.partition FOR UPDATE OF o)"
                " UPDATE bus_owner o SET fanned_out = greatest(o.fanned_out, s.fanned_out),"
                "   owner = CASE WHEN $4 THEN '' ELSE o.owner END"
                " FROM saved s JOIN held USING (partition) WHERE o.partition = s.partition",
                *_columns(((p, epoch, mark) for p, (epoch, mark) in fanned_out.items()), 3),
                release,
            )

    # ── reads ────────────────────────────────────────────────────────────────────────────────────────────────

    async def conversations(
        self, user: str, after_id: str, upto_id: str, cursors: Mapping[str, int], limit: int
    ) -> list[tuple[str, int, int, str]]:
        """(conversation_id, newest_seq, joined_seq, peer) of the user's conversations in (after_id, upto_id] that are newer
        than their cursor or, unlisted, than their join; by id, at most `limit`. upto_id "": to the end."""
        async with self._database.connection() as connection:
            rows = await connection.fetch(
                "SELECT m.conversation_id, c.last_seq, m.joined_seq,"
                " CASE WHEN c.kind <> 'dialogue' THEN '' ELSE coalesce((SELECT p.user_id FROM im_member p"
                "   WHERE p.conversation_id = m.conversation_id AND p.user_id <> m.user_id LIMIT 1), m.user_id) END"
                " FROM im_member m JOIN im_conversation c USING (conversation_id)"
                " LEFT JOIN unnest($4::text[], $5::bigint[]) AS k(conversation_id, seq) USING (conversation_id)"
                " WHERE m.user_id = $1 AND m.conversation_id > $2 AND ($3 = '' OR m.conversation_id <= $3)"
                "   AND c.last_seq > greatest(k.seq, m.joined_seq)"  # greatest() skips the NULL of what is unlisted
                " ORDER BY m.conversation_id LIMIT $6",
                user,
                after_id,
                upto_id,
                list(cursors.keys()),
                list(cursors.values()),
                limit,
            )
        return [(row[0], row[1], row[2], row[3]) for row in rows]

    async def membership(self, user: str, conversation_id: str) -> tuple[int, int] | None:
        """(last_seq, joined_seq) of a member's conversation; None for everybody else."""
        async with self._database.connection() as connection:
            row = await connection.fetchrow(
                "SELECT c.last_seq, m.joined_seq FROM im_member m JOIN im_conversation c USING (conversation_id)"
                " WHERE m.user_id = $1 AND m.conversation_id = $2",
                user,
                conversation_id,
            )
        return (row[0], row[1]) if row is not None else None

    async def memberships(self, conversation_id: str, users: Collection[str]) -> tuple[int, dict[str, int]] | None:
        """`membership` for several users at once: last_seq and {user: joined_seq} of the members among them; None: there is
        no such conversation."""
        async with self._database.connection() as connection:
            rows = await connection.fetch(
                "SELECT c.last_seq, m.user_id, m.joined_seq FROM im_conversation c LEFT JOIN im_member m"
                " ON m.conversation_id = c.conversation_id AND m.user_id = ANY ($2) WHERE c.conversation_id = $1",
                conversation_id,
                list(users),
            )
        return (rows[0][0], {row[1]: row[2] for row in rows if row[1] is not None}) if rows else None

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

    async def outcomes(
        self, conversation_id: str, from_user: str, client_msg_ids: Collection[bytes]
    ) -> dict[bytes, int]:
        """{client_msg_id: code} of those that have their outcome."""
        async with self._database.connection() as connection:
            rows = await connection.fetch(
                "SELECT client_msg_id, code FROM im_outcome"
                " WHERE conversation_id = $1 AND from_user = $2 AND client_msg_id = ANY ($3)",
                conversation_id,
                from_user,
                list(client_msg_ids),
            )
        return {bytes(row[0]): row[1] for row in rows}

    async def messages(
        self, conversation_id: str, from_seq: int, to_seq: int, limit: int, limit_bytes: int, *, newest_first: bool
    ) -> list[Message]:
        """The rows with from_seq ≤ seq ≤ to_seq from the old or the new end, in that direction: at most `limit`, and only
        those that begin within `limit_bytes`, each counted as its body and ROW_BYTES."""
        order = "DESC" if newest_first else "ASC"
        async with self._database.connection() as connection:
            rows = await connection.fetch(
                "SELECT msg_id, seq, prev_seq, from_user, msg_type, body, client_msg_id, at FROM ("
                " SELECT msg_id, seq, prev_seq, from_user, msg_type, body, client_msg_id,"
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

    # ── seqs that are reserved (plato_msg.core.allocator.SeqLedger) ─────────────────────────────────────────

    async def reserved(self, conversations: Iterable[str]) -> dict[str, int]:
        """See SeqLedger."""
        async with self._database.connection() as connection:
            rows = await connection.fetch(
                "SELECT conversation_id, upto FROM im_seq_reserved WHERE conversation_id = ANY ($1)",
                list(conversations),
            )
        return {row[0]: row[1] for row in rows}

    async def reserve(self, above: Mapping[str, int], count: int) -> dict[str, int]:
        """See SeqLedger. Rows are locked in the order of their ids, so that two owners cannot deadlock."""
        async with self._database.connection() as connection:
            rows = await connection.fetch(
                "INSERT INTO im_seq_reserved AS held (conversation_id, upto)"
                " SELECT c, above + $3 FROM unnest($1::text[], $2::bigint[]) AS w(c, above) ORDER BY c"
                " ON CONFLICT (conversation_id) DO UPDATE SET upto = greatest(held.upto, EXCLUDED.upto - $3) + $3"
                " RETURNING conversation_id, upto",
                list(above.keys()),
                list(above.values()),
                count,
            )
        return {row[0]: row[1] for row in rows}

    # ── dirty shards ─────────────────────────────────────────────────────────────────────────────────────────

    async def mark_dirty(self, shards: Collection[str]) -> None:
        """Raises the shards' counters."""
        async with self._database.connection() as connection:
            await connection.execute("SELECT bus_mark_dirty($1)", sorted(shards))

    async def dirty(self) -> dict[str, int]:
        """{shard: count} of all that are dirty."""
        async with self._database.connection() as connection:
            return {row["shard"]: row["count"] for row in await connection.fetch("SELECT shard, count FROM bus_dirty")}

    async def clear_dirty(self, shard: str, count: int) -> None:
        """Deletes the counter where it is unchanged."""
        async with self._database.connection() as connection:
            await connection.execute("DELETE FROM bus_dirty WHERE shard = $1 AND count = $2", shard, count)


async def _known(connection: Connection, uplinks: Sequence[Uplink], push_members: int) -> Known:
    outcomes = await connection.fetch(_OUTCOMES, *_columns((u.key for u in uplinks), 3))
    named = {
        (u.conversation_id, user): None for u in uplinks for user in (u.change.users if u.change else [u.from_user])
    }
    conversation_ids = list({u.conversation_id for u in uplinks})
    rows = await connection.fetch(_CONVERSATIONS, conversation_ids, *_columns(named, 2), push_members)
    members: dict[str, dict[str, int]] = {}
    conversations: dict[str, Conversation] = {}
    for conversation_id, kind, last_seq, size, user_id, joined_seq in rows:
        conversation = conversations.get(conversation_id)
        if conversation is None:
            held = members[conversation_id] = {}
            conversations[conversation_id] = Conversation(kind, last_seq, held, size)
        if user_id is not None:
            members[conversation_id][user_id] = joined_seq
    return Known({(c, u, bytes(i)): Outcome(*rest) for c, u, i, *rest in outcomes}, conversations)


def _columns(rows: Iterable[Sequence[object]], width: int) -> list[list[object]]:
    """Rows → columns; of no rows, `width` empty columns."""
    turned = [list(column) for column in zip(*rows, strict=True)]
    return turned or [[] for _ in range(width)]
