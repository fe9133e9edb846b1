"""SQL of what refuses an uplink (plato_msg.core.gates), within the transaction of a batch; none where no record needs it.

    CHOOSY, GUARDED   joined to the look-up of conversations: a probe per sender, two per dialogue unless nobody is choosy
    unwelcome         what follows of them; asks for friends where a recipient is choosy
    uninvited         who cannot be brought into a group by whom
    readable          which attachments may be referenced by whom; holds them, so that none is removed before the commit
    settle            the uses of the messages that the batch writes or changes

Lock order: attachments by id, twice: readable takes key shares, which only a removal waits for; settle takes the rows.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Final

from plato_msg.store_reads import Connection, columns

# Of a dialogue's member: takes messages of friends only. $7: msg.friends_only. What hangs on no row is asked once.
CHOOSY: Final = """
c.kind = 'dialogue' AND ($7::boolean OR (SELECT EXISTS (SELECT FROM im_user WHERE friends_only)))
AND CASE WHEN $7 THEN coalesce((SELECT i.friends_only FROM im_user i WHERE i.user_id = m.user_id), true)
    ELSE EXISTS (SELECT FROM im_user i WHERE i.user_id = m.user_id AND i.friends_only) END
"""

# Rows without a kind. Of a sender ($5) and who blocks him; of a user whom a dialogue's first message names ($6), if choosy.
GUARDED: Final = """
UNION ALL
SELECT f.other_id, '', 0, 0, '', f.user_id, 0, 0::smallint, false
FROM im_friend f WHERE f.blocked AND f.other_id = ANY ($5::text[]) AND (
    f.user_id = ANY ($6::text[])
    OR EXISTS (SELECT FROM im_member w WHERE w.user_id = f.user_id AND w.conversation_id = ANY ($1::text[]))
)
UNION ALL
SELECT '', '', 0, 0, '', n, 0, 0::smallint, true FROM unnest($6::text[]) n
WHERE CASE WHEN $7 THEN coalesce((SELECT i.friends_only FROM im_user i WHERE i.user_id = n), true)
    ELSE EXISTS (SELECT FROM im_user i WHERE i.user_id = n AND i.friends_only) END
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


def guarded(dialogues: Collection[tuple[str, str, str]]) -> tuple[list[str], list[str]]:
    """$5 and $6 of GUARDED."""
    return list({sender for _, sender, _ in dialogues}), list({named for _, _, named in dialogues if named})


async def unwelcome(
    connection: Connection,
    dialogues: Collection[tuple[str, str, str]],
    members: Mapping[str, Collection[str]],
    blocks: Collection[tuple[str, str]],
    choosy: Collection[str],
) -> set[tuple[str, str]]:
    """(conversation_id, sender) of the dialogues whose other user takes nothing of the sender.

    members: {conversation_id: users} as stored; blocks: {(user, who is blocked by him)}; choosy: who takes messages of
    friends only.
    """
    found: set[tuple[str, str]] = set()
    asked: dict[tuple[str, str], tuple[str, str]] = {}
    for conversation_id, sender, named in dialogues:
        for user in {*members.get(conversation_id, ()), *([named] if named else ())} - {sender}:
            if (user, sender) in blocks:
                found.add((conversation_id, sender))
            elif user in choosy:
                asked[user, sender] = conversation_id, sender
    if asked:
        rows = await connection.fetch(
            "SELECT f.user_id, f.other_id FROM unnest($1::text[], $2::text[]) AS k(u, o)"
            " JOIN im_friend f ON f.user_id = k.u AND f.other_id = k.o WHERE f.relation = 3",
            *columns(asked, 2),
        )
        for row in rows:
            del asked[row[0], row[1]]
    return found | set(asked.values())


async def uninvited(
    connection: Connection, invitations: Collection[tuple[str, str]], friends_only: bool
) -> set[tuple[str, str]]:
    """Those (user, who brings him into a group) among them where the user takes nothing of that one: he blocks him, or takes
    messages of friends only, and they are none. friends_only: of users who did not choose."""
    rows = await connection.fetch(
        "SELECT k.u, k.s FROM unnest($1::text[], $2::text[]) AS k(u, s)"
        " LEFT JOIN LATERAL (SELECT f.blocked, f.relation FROM im_friend f"
        "   WHERE f.user_id = k.u AND f.other_id = k.s OFFSET 0) f ON true"
        " WHERE f.blocked OR (f.relation IS DISTINCT FROM 3"
        "   AND coalesce((SELECT i.friends_only FROM im_user i WHERE i.user_id = k.u), $3))",
        *columns(invitations, 2),
        friends_only,
    )
    return {(row[0], row[1]) for row in rows}


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
