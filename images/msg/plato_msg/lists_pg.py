"""SQL of what is read of conversations as one user sees them: the list, unread counts, who has read. Always the primary.

A page of the list is one statement: the newest row of each of the user's conversations by an index, sorted by (pinned,
newest), cut at the page, and only of what is left the last message and the count. Counts look at COUNT_ROWS rows of a
conversation at most, and are at most COUNT_MAX, which means so many or more. Memory: one page.
"""

from __future__ import annotations

import base64
import struct
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

from plato.core.conversations import dialogue_id

from plato_msg.store_pg import Database

COUNT_MAX: Final = 1_000
COUNT_ROWS: Final = 2_000
BODY_BYTES: Final = 200
COUNTS: Final = 100
OPERATIONS: Final = 1_000
"""msg_types from here on are operations: never unread."""


class Last(NamedTuple):
    """The newest message that the user sees in a conversation."""

    msg_id: int
    seq: int
    from_user: str
    msg_type: int
    body: bytes
    """Its first BODY_BYTES; of UTF-8 maybe cut within a character."""
    recalled: bool
    server_at_ms: int


class Item(NamedTuple):
    """A conversation in a user's list."""

    conversation_id: str
    kind: str
    """'dialogue', 'group' or 'open'."""
    title: str
    """A group's; of one that the user left: as it was then."""
    peer: str
    """A dialogue's other user; with oneself: oneself."""
    members: int
    """A group's; 0 for who left."""
    last: Last | None
    newest_seq: int
    """Of who left: the seq of the leave."""
    unread: int
    read_seq: int
    peer_read_seq: int
    pinned_at_ms: int
    muted_until_ms: int
    left: bool


class Page(NamedTuple):
    """A page of the list. cursor: "" where nothing follows."""

    items: list[Item]
    cursor: str


# Everything that the user may read, with where reading begins (`floor`) and ends (`upto`).
_MINE: Final = """
    SELECT conversation_id, joined_seq, NULL::bigint AS left_seq, '' AS then FROM im_member WHERE user_id = $1 {one}
    UNION ALL
    SELECT conversation_id, joined_seq, left_seq, title FROM im_former_member WHERE user_id = $1 {one}
"""

# The user's own row. OFFSET 0, here and below: a look-up by the whole key for each row, though a planner without statistics
# takes a user's rows for few and would go through all of them each time.
_OWN: Final = (
    """SELECT * FROM im_user_state o WHERE o.user_id = $1 AND o.conversation_id = m.conversation_id OFFSET 0"""
)

_LIST: Final = """
WITH mine AS (SELECT v.conversation_id, v.kind, v.members, m.left_seq,
        CASE WHEN m.left_seq IS NULL THEN v.title ELSE m.then END AS title,
        least(v.last_seq, m.left_seq) AS upto, greatest(m.joined_seq, s.cleared_seq) AS floor, s.cleared_seq,
        coalesce(s.read_seq, 0) AS read_seq, coalesce(s.peer_read_seq, 0) AS peer_read_seq,
        coalesce((extract(epoch FROM s.pinned_at) * 1000000)::bigint, 0) AS pinned,
        coalesce((extract(epoch FROM s.muted_until) * 1000)::bigint, 0) AS muted
    FROM ({mine}) m JOIN im_conversation v USING (conversation_id)
    LEFT JOIN LATERAL ({state}) s ON true
), page AS (
    SELECT mine.*, coalesce(n.msg_id, 0) AS newest FROM mine LEFT JOIN LATERAL (
        SELECT msg_id FROM im_message r
        WHERE r.conversation_id = mine.conversation_id AND r.seq > mine.floor AND r.seq <= mine.upto
        ORDER BY r.seq DESC LIMIT 1) n ON true
    WHERE {where}
    ORDER BY pinned DESC, newest DESC, mine.conversation_id DESC LIMIT $2
)
SELECT page.conversation_id, kind, title,
    CASE WHEN kind <> 'dialogue' THEN '' ELSE coalesce((SELECT p.user_id FROM im_member p
        WHERE p.conversation_id = page.conversation_id AND p.user_id <> $1 LIMIT 1), $1) END,
    CASE WHEN left_seq IS NULL THEN members ELSE 0 END, upto, u.unread, read_seq, peer_read_seq, pinned, muted,
    left_seq IS NOT NULL, newest, l.msg_id, l.seq, l.from_user, l.msg_type, substring(l.body FROM 1 FOR {body}), l.recalled,
    (extract(epoch FROM l.server_at) * 1000)::bigint
FROM page
LEFT JOIN LATERAL (
    SELECT * FROM im_message r WHERE r.conversation_id = page.conversation_id AND r.seq > page.floor AND r.seq <= page.upto
        AND NOT EXISTS (SELECT 1 FROM im_hidden h
            WHERE h.user_id = $1 AND h.conversation_id = r.conversation_id AND h.seq = r.seq OFFSET 0)
    ORDER BY r.seq DESC LIMIT 1) l ON true
CROSS JOIN LATERAL (SELECT count(*) AS unread FROM ({unread}) c) u
ORDER BY pinned DESC, newest DESC, page.conversation_id DESC
"""

# Rows that are unread of `page`, at most COUNT_MAX.
_UNREAD: Final = f"""
    SELECT 1 FROM (
        SELECT r.seq, r.from_user, r.msg_type, r.recalled FROM im_message r
        WHERE r.conversation_id = page.conversation_id AND r.seq > greatest(page.read_seq, page.floor) AND r.seq <= page.upto
        ORDER BY r.seq DESC LIMIT {COUNT_ROWS}) r
    WHERE r.from_user <> $1 AND r.msg_type < {OPERATIONS} AND NOT r.recalled
        AND NOT EXISTS (SELECT 1 FROM im_hidden h
            WHERE h.user_id = $1 AND h.conversation_id = page.conversation_id AND h.seq = r.seq OFFSET 0)
    LIMIT {COUNT_MAX}
"""

_PAGE: Final = _LIST.format(
    mine=_MINE.format(one=""),
    state=_OWN,
    # Cleared and silent since: not in the list.
    where="(n.msg_id IS NOT NULL OR mine.cleared_seq IS NULL OR mine.cleared_seq = 0)"
    " AND ($3::bigint IS NULL OR (pinned, coalesce(n.msg_id, 0), mine.conversation_id) < ($3, $4, $5))",
    body=BODY_BYTES,
    unread=_UNREAD,
)
_ONE: Final = _LIST.format(
    mine=_MINE.format(one="AND conversation_id = $3"), state=_OWN, where="true", body=BODY_BYTES, unread=_UNREAD
)

_TOTAL: Final = f"""
SELECT count(*) FROM (
    SELECT 1 FROM (
        SELECT v.conversation_id, coalesce(s.read_seq, 0) AS read_seq, greatest(m.joined_seq, s.cleared_seq) AS floor,
            least(v.last_seq, m.left_seq) AS upto
        FROM ({_MINE.format(one="")}) m JOIN im_conversation v USING (conversation_id)
        LEFT JOIN LATERAL ({_OWN}) s ON true
        WHERE least(v.last_seq, m.left_seq) > greatest(s.read_seq, m.joined_seq, s.cleared_seq)
            AND (s.muted_until IS NULL OR s.muted_until <= now())
    ) page CROSS JOIN LATERAL ({_UNREAD}) u LIMIT {COUNT_MAX}
) c
"""

# Of members alone: who left reads messages up to the leave, but what members do since then he is not told.
_JOINED: Final = "SELECT joined_seq FROM im_member WHERE conversation_id = $2 AND user_id = $1"

_READERS: Final = """
SELECT m.user_id FROM im_message a JOIN im_member m ON m.conversation_id = a.conversation_id
JOIN im_user_state s ON s.user_id = m.user_id AND s.conversation_id = m.conversation_id
WHERE a.conversation_id = $1 AND a.seq = $2 AND m.user_id > $3 AND m.user_id <> a.from_user
    AND m.joined_seq < a.seq AND s.read_seq >= a.seq
ORDER BY m.user_id LIMIT $4
"""

# One pass over the members, whatever is asked: how many joined below the i-th seq and have read up to the j-th. Authors, who
# are not readers of their own, come beside.
_COUNTS: Final = """
SELECT width_bucket(m.joined_seq, $2::bigint[]), width_bucket(s.read_seq, $2::bigint[]), count(*), NULL::bigint
FROM im_member m JOIN im_user_state s ON s.user_id = m.user_id AND s.conversation_id = m.conversation_id
WHERE m.conversation_id = $1 AND s.read_seq >= ($2::bigint[])[1] GROUP BY 1, 2
UNION ALL
SELECT 0, 0, (m.joined_seq < a.seq AND s.read_seq >= a.seq)::int, a.seq
FROM im_message a LEFT JOIN im_member m ON m.conversation_id = a.conversation_id AND m.user_id = a.from_user
LEFT JOIN im_user_state s ON s.user_id = a.from_user AND s.conversation_id = a.conversation_id
WHERE a.conversation_id = $1 AND a.seq = ANY ($2::bigint[])
"""

_SHARE: Final = """
SELECT o.u, NOT EXISTS (SELECT 1 FROM im_friend b WHERE b.user_id = o.u AND b.other_id = $1 AND b.blocked)
FROM unnest($2::text[], $3::text[]) AS o(u, dialogue) WHERE
    EXISTS (SELECT 1 FROM im_friend f WHERE f.user_id = $1 AND f.other_id = o.u AND f.relation = 3)
    OR EXISTS (SELECT 1 FROM im_member m WHERE m.conversation_id = o.dialogue AND m.user_id = $1)
    OR EXISTS (SELECT 1 FROM im_member m JOIN im_member w ON w.conversation_id = m.conversation_id AND w.user_id = $1
        WHERE m.user_id = o.u)
"""


class PgLists:
    """Reads of what a user sees. Every method raises Unavailable."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def page(self, user: str, cursor: str, limit: int) -> Page | None:
        """A page of the list; None: the cursor is not one of ours."""
        after: tuple[int | None, int, str] | None = (None, 0, "") if not cursor else _opened(cursor)
        if after is None:
            return None
        async with self._database.connection() as connection:
            rows = [tuple(row) for row in await connection.fetch(_PAGE, user, limit + 1, *after)]
        more = len(rows) > limit
        last = rows[limit - 1] if more else None
        return Page(
            [_item(row) for row in rows[:limit]], _sealed(last[9], last[12], last[0]) if last is not None else ""
        )

    async def one(self, user: str, conversation_id: str) -> Item | None:
        """One conversation as the list shows it; None for a stranger."""
        async with self._database.connection() as connection:
            row = await connection.fetchrow(_ONE, user, 1, conversation_id)
        return _item(tuple(row)) if row is not None else None

    async def unread(self, user: str) -> int:
        """Of all conversations that are not muted, COUNT_MAX at most."""
        async with self._database.connection() as connection:
            count: int = await connection.fetchval(_TOTAL, user)
        return count

    async def readers(self, user: str, conversation_id: str, seq: int, after: str, limit: int) -> list[str] | None:
        """By id; None for a stranger, and for who left; [] where the user may not read that row."""
        async with self._database.connection() as connection:
            joined_seq = await connection.fetchval(_JOINED, user, conversation_id)
            if joined_seq is None:
                return None
            if seq <= joined_seq:
                return []
            return [row[0] for row in await connection.fetch(_READERS, conversation_id, seq, after, limit)]

    async def read_counts(self, user: str, conversation_id: str, seqs: Sequence[int]) -> dict[int, int] | None:
        """{seq: how many}; seqs: sorted, each once. None for a stranger, and for who left."""
        async with self._database.connection() as connection:
            joined_seq = await connection.fetchval(_JOINED, user, conversation_id)
            if joined_seq is None:
                return None
            wanted = [seq for seq in seqs if seq > joined_seq]
            rows = await connection.fetch(_COUNTS, conversation_id, wanted) if wanted else []
        counts = [0] * (len(wanted) + 1)
        authors: dict[int, int] = {}
        for joined, read, count, seq in rows:
            if seq is not None:
                authors[seq] = count or 0
            else:  # wanted[joined:read] are behind the join and within the position
                for i in range(joined, read):
                    counts[i] += count
        return {seq: counts[i] - authors[seq] for i, seq in enumerate(wanted) if seq in authors}

    async def acquainted(self, user: str, others: Sequence[str]) -> dict[str, bool]:
        """Those who are in a conversation with the user now, or friends; False: has blocked the user."""
        async with self._database.connection() as connection:
            rows = await connection.fetch(_SHARE, user, list(others), [dialogue_id(user, other) for other in others])
        return {row[0]: row[1] for row in rows}


def _item(row: tuple[Any, ...]) -> Item:
    (
        (conversation_id, kind, title, peer, members, upto, unread, read_seq, peer_read_seq, pinned, muted, left, _),
        last,
    ) = (
        row[:13],
        row[13:],
    )
    return Item(
        conversation_id,
        kind,
        title,
        peer,
        members,
        Last(*last) if last[0] is not None else None,
        upto,
        unread,
        read_seq,
        peer_read_seq,
        pinned // 1_000,
        muted,
        left,
    )


def _sealed(pinned: int, newest: int, conversation_id: str) -> str:
    raw = struct.pack(">QQ", pinned, newest) + conversation_id.encode()
    return base64.urlsafe_b64encode(raw).rstrip(b"=").decode()


def _opened(cursor: str) -> tuple[int, int, str] | None:
    try:
        raw = base64.urlsafe_b64decode(cursor + "=" * (-len(cursor) % 4))
        pinned, newest = struct.unpack_from(">QQ", raw)
        conversation_id = raw[16:].decode()
    except (ValueError, struct.error):
        return None
    if max(pinned, newest) >= 1 << 63 or "\0" in conversation_id:
        return None
    return pinned, newest, conversation_id
