"""The SQL of msg's pipeline, in statements over arrays: none per message. What flows: one transaction per batch, of all its
partitions. Reads: store_reads.py.

    batch():  guard (R7: the owner's rows, where epoch and position are the expected ones) → known() → write() → commit
    around:   beats, owners, take-over and release; dirty shards; what replays need

Lock order: rows of bus_owner by partition, then everything else of those partitions, which only their owner touches.
Memory: one batch.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Final, NamedTuple

from plato.core.errors import Fenced
from plato.wire.v1 import content_pb2 as content

from plato_msg import gates_pg
from plato_msg.core import gates, references
from plato_msg.core.batch import Conversation, Key, Known, Outcome, Plan, Row, Uplink
from plato_msg.core.operations import Target, is_operation
from plato_msg.core.policy import GROUP
from plato_msg.store_reads import OUTCOMES, PgReads, columns
from plato_msg.store_reads import ROW_BYTES as ROW_BYTES
from plato_msg.store_reads import Access as Access
from plato_msg.store_reads import Connection as Connection
from plato_msg.store_reads import Database as Database
from plato_msg.store_reads import Message as Message


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


_MAY_NEED_AN_OWNER: Final = (content.GROUP_REMOVE, content.GROUP_LEAVE, content.GROUP_ROLE)
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

# Of a group with more than $4 members only those that the batch names ($2, $3). Both conditions on c.members are of the
# outer row, so the branch that does not apply reads nothing.
_CONVERSATIONS = """
SELECT c.conversation_id, c.kind, c.last_seq, c.members, c.title, m.user_id, m.joined_seq, m.role, {choosy}
FROM im_conversation c LEFT JOIN LATERAL (
    SELECT w.user_id, w.joined_seq, w.role FROM im_member w
    WHERE c.members <= $4 AND w.conversation_id = c.conversation_id
    UNION ALL
    SELECT w.user_id, w.joined_seq, w.role FROM unnest($2::text[], $3::text[]) AS n(conversation_id, user_id)
        JOIN im_member w ON w.conversation_id = c.conversation_id AND w.user_id = n.user_id
    WHERE c.members > $4 AND n.conversation_id = c.conversation_id
) m ON true
WHERE c.conversation_id = ANY ($1::text[])
"""

_PLAIN = _CONVERSATIONS.format(choosy="false")
_WITH_DIALOGUES = _CONVERSATIONS.format(choosy=gates_pg.CHOOSY) + gates_pg.GUARDED

# Who could become the owner of large groups, one page of each: the leaders, and the $2[i] + 1 senior members.
_SENIORS = """
SELECT n.conversation_id, s.user_id, s.joined_seq, s.role
FROM unnest($1::text[], $2::integer[]) AS n(conversation_id, named), LATERAL (
    (SELECT user_id, joined_seq, role FROM im_member w WHERE w.conversation_id = n.conversation_id AND w.role > 0)
    UNION ALL
    (SELECT user_id, joined_seq, role FROM im_member w WHERE w.conversation_id = n.conversation_id AND w.role = 0
        ORDER BY joined_seq, user_id LIMIT n.named + 1)
) s
"""

_TARGETS = """
SELECT msg_id, conversation_id, seq, from_user, msg_type, (extract(epoch FROM server_at) * 1000)::bigint, recalled
FROM im_message WHERE msg_id = ANY ($1::bigint[])
"""

_ROWS = """
SELECT m.conversation_id, m.from_user, m.client_msg_id, m.msg_type, m.body, m.changed_seq, m.recalled
FROM unnest($1::text[], $2::text[], $3::bytea[]) AS k(conversation_id, from_user, client_msg_id)
JOIN im_message m USING (conversation_id, from_user, client_msg_id)
"""

PUSH_MEMBERS: Final = 500


class Batch:
    """The open transaction of one batch; its guard has passed."""

    def __init__(self, connection: Connection, push_members: int = PUSH_MEMBERS, *, feed: bool = False) -> None:
        self._connection = connection
        self._push_members = push_members
        self._feed = feed

    async def known(self, uplinks: Sequence[Uplink], *, friends_only: bool = False) -> Known:
        """What the database holds on these records' keys and conversations. friends_only: of users who did not choose."""
        known = await _known(self._connection, uplinks, self._push_members, friends_only)
        if invitations := gates.invitations(uplinks):
            known.gates.uninvited = await gates_pg.uninvited(self._connection, invitations, friends_only)
        if named := gates.named(uplinks):
            known.gates.readable = await gates_pg.readable(self._connection, named)
        return known

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
        if plan.titles:
            await execute(
                "UPDATE im_conversation c SET title = t.title FROM unnest($1::text[], $2::text[]) AS t(id, title)"
                " WHERE c.conversation_id = t.id",
                list(plan.titles.keys()),
                list(plan.titles.values()),
            )
        if plan.leaves:
            await execute(
                "DELETE FROM im_member m USING unnest($1::text[], $2::text[]) AS l(c, u)"
                " WHERE m.conversation_id = l.c AND m.user_id = l.u",
                *columns(plan.leaves, 2),
            )
        if plan.joins:
            await execute(
                "INSERT INTO im_member (conversation_id, user_id, joined_seq, role)"
                " SELECT * FROM unnest($1::text[], $2::text[], $3::bigint[], $4::smallint[])",
                *columns(plan.joins, 4),
            )
            if plan.groups:
                await execute(
                    "DELETE FROM im_former_member f USING unnest($1::text[], $2::text[]) AS j(c, u)"
                    " WHERE f.conversation_id = j.c AND f.user_id = j.u",
                    *columns((join[:2] for join in plan.joins), 2),
                )
        if plan.former:
            await execute(
                "INSERT INTO im_former_member (conversation_id, user_id, joined_seq, left_seq, title)"
                " SELECT * FROM unnest($1::text[], $2::text[], $3::bigint[], $4::bigint[], $5::text[])"
                " ON CONFLICT (conversation_id, user_id) DO UPDATE"
                " SET joined_seq = EXCLUDED.joined_seq, left_seq = EXCLUDED.left_seq, title = EXCLUDED.title",
                *columns(plan.former, 5),
            )
        if plan.roles:
            await execute(
                "UPDATE im_member m SET role = r.role"
                " FROM unnest($1::text[], $2::text[], $3::smallint[]) AS r(c, u, role)"
                " WHERE m.conversation_id = r.c AND m.user_id = r.u",
                *columns(plan.roles, 3),
            )
        if plan.outcomes:
            await execute(
                "INSERT INTO im_outcome (conversation_id, from_user, client_msg_id, code, msg_id, seq, words)"
                " SELECT c, u, i, code, nullif(msg_id, 0), nullif(seq, 0), nullif(words, '') FROM unnest("
                "$1::text[], $2::text[], $3::bytea[], $4::integer[], $5::bigint[], $6::bigint[], $7::text[])"
                " AS o(c, u, i, code, msg_id, seq, words)",
                *columns(
                    (
                        (*d.uplink.key, d.outcome.code, d.outcome.msg_id, d.outcome.seq, d.outcome.words)
                        for d in plan.outcomes
                    ),
                    7,
                ),
            )
        if plan.messages:
            await execute(
                "INSERT INTO im_message (msg_id, conversation_id, seq, prev_seq, from_user, msg_type, body, client_msg_id,"
                " server_at) SELECT msg_id, c, seq, prev_seq, u, msg_type, body, i, to_timestamp(at / 1000.0) FROM unnest("
                "$1::bigint[], $2::text[], $3::bigint[], $4::bigint[], $5::text[], $6::bigint[], $7::bytea[], $8::bytea[],"
                " $9::bigint[]) AS m(msg_id, c, seq, prev_seq, u, msg_type, body, i, at)",
                *columns(
                    (
                        (
                            d.outcome.msg_id,
                            d.uplink.conversation_id,
                            d.outcome.seq,
                            d.outcome.prev_seq,
                            d.uplink.from_user,
                            d.msg_type,
                            d.body,
                            d.uplink.client_msg_id,
                            d.outcome.server_at_ms,
                        )
                        for d in plan.messages
                    ),
                    9,
                ),
            )
        if plan.edits:
            await self._edit(plan)
        if uses := references.uses(plan):
            await gates_pg.settle(self._connection, uses)
        if self._feed and plan.messages:
            await execute(
                "INSERT INTO im_feed (partition, position, msg_id, conversation_id, seq)"
                " SELECT * FROM unnest($1::integer[], $2::bigint[], $3::bigint[], $4::text[], $5::bigint[])",
                *columns(
                    (
                        (
                            d.uplink.partition,
                            d.uplink.position,
                            d.outcome.msg_id,
                            d.uplink.conversation_id,
                            d.outcome.seq,
                        )
                        for d in plan.messages
                    ),
                    5,
                ),
            )
        if poison:
            await execute(
                "INSERT INTO bus_poison (partition, position, reason, value)"
                " SELECT * FROM unnest($1::integer[], $2::bigint[], $3::text[], $4::bytea[])"
                " ON CONFLICT DO NOTHING",
                *columns(poison, 4),
            )

    async def _edit(self, plan: Plan) -> None:
        """Older messages become what they were made; of a recalled one nothing stays, in its EDITs neither."""
        execute = self._connection.execute
        await execute(
            "UPDATE im_message m"
            " SET msg_type = e.msg_type, body = e.body, changed_seq = e.changed_seq, recalled = e.recalled"
            " FROM unnest($1::bigint[], $2::bigint[], $3::bytea[], $4::bigint[], $5::boolean[])"
            " AS e(msg_id, msg_type, body, changed_seq, recalled) WHERE m.msg_id = e.msg_id",
            *columns(((e.msg_id, *e.row) for e in plan.edits.values()), 5),
        )
        if plan.edited:
            await execute(
                "INSERT INTO im_edit (conversation_id, of_seq, seq)"
                " SELECT * FROM unnest($1::text[], $2::bigint[], $3::bigint[])",
                *columns(plan.edited, 3),
            )
        recalls = [(e.conversation_id, e.seq, e.row.changed_seq) for e in plan.edits.values() if e.row.recalled]
        if recalls:
            await execute(
                "UPDATE im_message m SET body = '', recalled = true, changed_seq = r.at"
                " FROM unnest($1::text[], $2::bigint[], $3::bigint[]) AS r(c, of_seq, at)"
                " JOIN im_edit e ON e.conversation_id = r.c AND e.of_seq = r.of_seq"
                " WHERE m.conversation_id = e.conversation_id AND m.seq = e.seq",
                *columns(recalls, 3),
            )
        await execute(
            "UPDATE im_conversation c SET changed_seq = n.seq FROM unnest($1::text[], $2::bigint[]) AS n(id, seq)"
            " WHERE c.conversation_id = n.id",
            list(plan.changed.keys()),
            list(plan.changed.values()),
        )


class PgMsgStore(PgReads):
    """Partitions' owners, outcomes and messages. Every method raises Unavailable; batch also Unstorable and SteppedDown."""

    def __init__(self, database: Database, push_members: int = PUSH_MEMBERS, *, feed: bool = False) -> None:
        """push_members: of groups that have more, batches read no list of members; see plato_msg.notify. feed: batches write
        the rows of plato_msg.feed."""
        super().__init__(database)
        self._feed = feed
        self._push_members = push_members

    @asynccontextmanager
    async def batch(self, guards: Sequence[Guard]) -> AsyncIterator[Batch]:
        """One transaction that begins by moving the owners' positions, and commits at the end of the block.

        Raises SteppedDown, Unstorable, or Unavailable: then the commit may have happened, so memory is to be reloaded.
        """
        async with self._database.connection() as connection, connection.transaction():
            rows = await connection.fetch(_GUARD, *columns(guards, 5))
            if len(rows) != len(guards):
                raise SteppedDown({g.partition for g in guards} - {row["partition"] for row in rows})
            yield Batch(connection, self._push_members, feed=self._feed)

    async def known(self, uplinks: Sequence[Uplink]) -> Known:
        """As Batch.known, outside of a batch: for what is fanned out again, with all rows as they are now."""
        async with self._database.connection() as connection:
            known = await _known(connection, uplinks, self._push_members)
            known.rows = await _rows(connection, known.outcomes)
            return known

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
                *columns(((p, epoch, mark) for p, (epoch, mark) in fanned_out.items()), 3),
                release,
            )

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


async def _known(
    connection: Connection, uplinks: Sequence[Uplink], push_members: int, friends_only: bool = False
) -> Known:
    found = await connection.fetch(OUTCOMES, *columns((u.key for u in uplinks), 3))
    outcomes = {(c, u, bytes(i)): Outcome(*rest) for c, u, i, *rest in found}
    named = {(u.conversation_id, user): None for u in uplinks for user in u.named}
    conversation_ids = list({u.conversation_id for u in uplinks})
    looked_up: tuple[object, ...] = (conversation_ids, *columns(named, 2), push_members)
    if dialogues := gates.dialogues(uplinks):
        rows = await connection.fetch(_WITH_DIALOGUES, *looked_up, *gates_pg.guarded(dialogues), friends_only)
    else:
        rows = await connection.fetch(_PLAIN, *looked_up)
    blocks: set[tuple[str, str]] = set()
    choosy: set[str] = set()
    members: dict[str, dict[str, int]] = {}
    roles: dict[str, dict[str, int]] = {}
    conversations: dict[str, Conversation] = {}
    for conversation_id, kind, last_seq, size, title, user_id, joined_seq, role, is_choosy in rows:
        if is_choosy:
            choosy.add(user_id)
        if not kind:
            if conversation_id:
                blocks.add((user_id, conversation_id))
            continue
        conversation = conversations.get(conversation_id)
        if conversation is None:
            members[conversation_id], roles[conversation_id] = {}, {}
            conversations[conversation_id] = Conversation(
                kind, last_seq, members[conversation_id], size, roles[conversation_id], title
            )
        if user_id is not None:
            members[conversation_id][user_id] = joined_seq
            if role:
                roles[conversation_id][user_id] = role
    known = Known(outcomes, conversations)
    if blocks or choosy:
        known.gates.unwelcome = await gates_pg.unwelcome(connection, dialogues, members, blocks, choosy)
    operations = [u for u in uplinks if is_operation(u.msg_type)]
    if not operations:
        return known
    known.rows = await _rows(connection, {u.key: None for u in operations if u.key in outcomes})
    msg_ids = {u.operation.msg_id for u in operations if u.operation is not None and u.operation.msg_id}
    if msg_ids:
        known.targets = {row[0]: Target(*row) for row in await connection.fetch(_TARGETS, list(msg_ids))}
    large = {
        u.conversation_id: None
        for u in operations
        if u.msg_type in _MAY_NEED_AN_OWNER
        and (held := conversations.get(u.conversation_id)) is not None
        and not held.whole
    }
    if large:
        counts = [sum(conversation_id == named_in for named_in, _ in named) for conversation_id in large]
        for conversation_id, user_id, joined_seq, role in await connection.fetch(_SENIORS, list(large), counts):
            members[conversation_id][user_id] = joined_seq
            if role:
                roles[conversation_id][user_id] = role
    return known


async def _rows(connection: Connection, keys: Collection[Key]) -> dict[Key, Row]:
    """How the messages of these keys are stored."""
    if not keys:
        return {}
    return {(c, u, bytes(i)): Row(*rest) for c, u, i, *rest in await connection.fetch(_ROWS, *columns(keys, 3))}
