"""SQL of what refuses an uplink (plato_msg.core.gates), within the transaction of a batch; none where no record needs it.

    UNWELCOME   joined to the look-up of conversations: three probes per dialogue, and none while nobody blocks or is choosy
    readable    which attachments may be referenced by whom; holds them, so that none is removed before the commit
    settle      the uses of the messages that the batch writes or changes

Lock order: attachments by id, twice: readable takes key shares, which only a removal waits for; settle takes the rows.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Final

from plato_msg.store_reads import Connection, columns

# $5 to $7: (conversation_id, sender, the other user where the first message names him); $8: msg.friends_only.
# The first condition is asked once per statement: it hangs on no row.
UNWELCOME: Final = """
UNION ALL
SELECT d.conversation_id, '', 0, 0, '', d.sender, 0, 0::smallint
FROM unnest($5::text[], $6::text[], $7::text[]) AS d(conversation_id, sender, named)
CROSS JOIN LATERAL (
    SELECT w.user_id FROM im_member w WHERE w.conversation_id = d.conversation_id AND w.user_id <> d.sender
    UNION ALL SELECT d.named WHERE d.named <> '' AND d.named <> d.sender
) r
WHERE ($8::boolean OR (SELECT EXISTS (SELECT FROM im_friend WHERE blocked))
    OR (SELECT EXISTS (SELECT FROM im_user WHERE friends_only)))
AND (
    EXISTS (SELECT FROM im_friend f WHERE f.user_id = r.user_id AND f.other_id = d.sender AND f.blocked)
    OR (
        coalesce((SELECT i.friends_only FROM im_user i WHERE i.user_id = r.user_id), $8)
        AND NOT EXISTS (
            SELECT FROM im_friend f WHERE f.user_id = r.user_id AND f.other_id = d.sender AND f.relation = 3
        )
    )
)
"""

READABLE: Final = """
(a.owner = {reader} OR EXISTS (
    SELECT FROM im_attachment_use u
    JOIN im_message m ON m.conversation_id = u.conversation_id AND m.seq = u.seq AND NOT m.recalled
    WHERE u.attachment_id = a.attachment_id AND (
        EXISTS (SELECT FROM im_member w
                WHERE w.conversation_id = u.conversation_id AND w.user_id = {reader} AND w.joined_seq < u.seq)
        OR EXISTS (SELECT FROM im_former_member w
                WHERE w.conversation_id = u.conversation_id AND w.user_id = {reader}
                AND w.joined_seq < u.seq AND u.seq <= w.left_seq))))
"""
"""Whether {reader} may read attachment a: the owner; a member, of what came after the join; a former one, up to the leave. A
message that was recalled references nothing."""


async def readable(connection: Connection, wanted: Collection[tuple[str, str]]) -> set[tuple[str, str]]:
    """Those (user, attachment_id) among them that the user may read."""
    rows = await connection.fetch(
        "SELECT k.u, a.attachment_id FROM unnest($1::text[], $2::text[]) AS k(u, a)"
        " JOIN im_attachment a ON a.attachment_id = k.a AND a.stored"
        f" WHERE {READABLE.format(reader='k.u')} ORDER BY a.attachment_id FOR KEY SHARE OF a",
        *columns(wanted, 2),
    )
    return {(row[0], row[1]) for row in rows}


async def settle(connection: Connection, uses: Mapping[tuple[str, int], Collection[str]]) -> None:
    """Makes these the uses of their messages."""
    messages = columns(uses, 2)
    rows = [(attachment_id, *message) for message, named in uses.items() for attachment_id in named]
    touched = await connection.fetch(
        "SELECT attachment_id FROM im_attachment WHERE attachment_id = ANY ($1::text[]) OR attachment_id IN ("
        " SELECT u.attachment_id FROM unnest($2::text[], $3::bigint[]) AS m(c, s)"
        "  JOIN im_attachment_use u ON u.conversation_id = m.c AND u.seq = m.s)"
        " ORDER BY attachment_id FOR NO KEY UPDATE",
        [row[0] for row in rows],
        *messages,
    )
    if not touched:
        return
    await connection.execute(
        "DELETE FROM im_attachment_use u USING unnest($1::text[], $2::bigint[]) AS m(c, s)"
        " WHERE u.conversation_id = m.c AND u.seq = m.s",
        *messages,
    )
    await connection.execute(
        "INSERT INTO im_attachment_use (attachment_id, conversation_id, seq)"
        " SELECT * FROM unnest($1::text[], $2::text[], $3::bigint[])",
        *columns(rows, 3),
    )
    await connection.execute(
        "UPDATE im_attachment a SET unused_since = CASE"
        " WHEN EXISTS (SELECT FROM im_attachment_use u WHERE u.attachment_id = a.attachment_id) THEN NULL"
        " ELSE coalesce(a.unused_since, now()) END WHERE a.attachment_id = ANY ($1)",
        [row[0] for row in touched],
    )
