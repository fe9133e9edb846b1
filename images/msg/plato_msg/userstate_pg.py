"""SQL of what a user's devices share. A transaction of changes, in this order:

    access()   which conversations their users may read, and what stands; what would change nothing is left out
    raise      the versions of everybody whose state changes, in one statement in the order of user_ids: it locks the rows,
               so transactions cannot deadlock, and the order of a user's versions is that of commits
    write()    the rows, each with its version

A version holds at most ENTRIES entries, and fits into half a frame, so that an answer can always end between two versions: a
user with more of them in one transaction gets several versions. Memory: what the caller hands in.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, Protocol

from plato.wire.v1 import client_pb2 as wire

from plato_msg.store_pg import Connection, Database

ENTRIES: Final = 100
ENTRY_BYTES: Final = 128
"""What an entry takes in a frame at most: an id of 64 bytes, five numbers, tags."""
AUTHOR_ROWS: Final = 100
"""How far back authors are looked for in what was newly read."""
AUTHORS: Final = 20

Key = tuple[str, str]
"""(user, conversation_id)."""


class Access(NamedTuple):
    """What a user may read of a conversation, and what stands."""

    kind: str
    joined_seq: int
    last_seq: int
    """Of who left: the seq of the leave."""
    peer: str
    """A dialogue's other user; "" elsewhere, and in a dialogue with oneself."""
    read_seq: int
    peer_read_seq: int
    """As the user's own row has it: how far the peer has read."""
    pinned: bool
    muted_until_ms: int
    cleared_seq: int
    left: bool
    version: int
    """Of the user's row for it; 0: there is none."""


@dataclass(slots=True)
class Change:
    """What is to be written of one user and conversation. None: as it is. Positions only rise."""

    read_seq: int = 0
    peer_read_seq: int = 0
    cleared_seq: int = 0
    pinned: bool | None = None
    muted_until_ms: int | None = None
    hidden: set[int] = field(default_factory=set)


class Read(NamedTuple):
    """A position that rose, from `old` to `new`."""

    user: str
    conversation_id: str
    old: int
    new: int


class Entry(NamedTuple):
    """One change with its version, as it is told."""

    version: int
    entry: wire.ConversationState | wire.HiddenMessage | wire.FriendState


class Source(Protocol):
    """Something else that a user's devices share, and another module keeps."""

    async def since(self, connection: Connection, user: str, version: int, limit: int) -> Sequence[Entry]:
        """The entries with a greater version, by version, at most `limit`."""


_ACCESS: Final = """
SELECT k.u, k.c, v.kind, m.joined_seq, least(v.last_seq, m.left_seq),
       CASE WHEN v.kind <> 'dialogue' THEN '' ELSE coalesce((SELECT p.user_id FROM im_member p
         WHERE p.conversation_id = k.c AND p.user_id <> k.u LIMIT 1), '') END,
       coalesce(s.read_seq, 0), coalesce(s.peer_read_seq, 0), s.pinned_at IS NOT NULL,
       coalesce((extract(epoch FROM s.muted_until) * 1000)::bigint, 0), coalesce(s.cleared_seq, 0), m.left_seq IS NOT NULL,
       coalesce(s.version, 0)
FROM unnest($1::text[], $2::text[]) AS k(u, c)
JOIN im_conversation v ON v.conversation_id = k.c
CROSS JOIN LATERAL (
    SELECT joined_seq, NULL::bigint AS left_seq FROM im_member WHERE conversation_id = k.c AND user_id = k.u
    UNION ALL
    SELECT joined_seq, left_seq FROM im_former_member WHERE conversation_id = k.c AND user_id = k.u
    ORDER BY left_seq DESC LIMIT 1  -- NULL, who is a member, comes first
) m
LEFT JOIN im_user_state s ON s.user_id = k.u AND s.conversation_id = k.c
"""

_RAISE: Final = """
INSERT INTO im_user (user_id, version) SELECT u, n FROM unnest($1::text[], $2::bigint[]) AS r(u, n) ORDER BY u COLLATE "C"
ON CONFLICT (user_id) DO UPDATE SET version = im_user.version + EXCLUDED.version
RETURNING user_id, version
"""

_WRITE: Final = """
INSERT INTO im_user_state AS s
    (user_id, conversation_id, version, read_seq, peer_read_seq, cleared_seq)
SELECT * FROM unnest($1::text[], $2::text[], $3::bigint[], $4::bigint[], $5::bigint[], $6::bigint[])
ON CONFLICT (user_id, conversation_id) DO UPDATE SET
    version = EXCLUDED.version,
    read_seq = greatest(s.read_seq, EXCLUDED.read_seq),
    peer_read_seq = greatest(s.peer_read_seq, EXCLUDED.peer_read_seq),
    cleared_seq = greatest(s.cleared_seq, EXCLUDED.cleared_seq)
"""

# Apart, since pins and mutes are rare.
_MARK: Final = """
UPDATE im_user_state s SET
    pinned_at = CASE WHEN w.pin IS NULL THEN s.pinned_at WHEN w.pin THEN coalesce(s.pinned_at, now()) END,
    muted_until = CASE WHEN w.mute IS NULL THEN s.muted_until WHEN w.mute > 0 THEN to_timestamp(w.mute / 1000.0) END
FROM unnest($1::text[], $2::text[], $3::boolean[], $4::bigint[]) AS w(u, c, pin, mute)
WHERE s.user_id = w.u AND s.conversation_id = w.c
"""

_STATE: Final = """conversation_id, version, read_seq, peer_read_seq, cleared_seq,
    coalesce((extract(epoch FROM pinned_at) * 1000)::bigint, 0),
    coalesce((extract(epoch FROM muted_until) * 1000)::bigint, 0)
"""

_AUTHORS: Final = f"""
SELECT k.n, a.from_user FROM unnest($1::text[], $2::text[], $3::bigint[], $4::bigint[])
    WITH ORDINALITY AS k(u, c, after, upto, n)
CROSS JOIN LATERAL (
    SELECT from_user, max(seq) AS seq FROM (
        SELECT from_user, seq FROM im_message WHERE conversation_id = k.c AND seq > k.after AND seq <= k.upto
        ORDER BY seq DESC LIMIT {AUTHOR_ROWS}
    ) page WHERE from_user <> k.u GROUP BY from_user ORDER BY 2 DESC LIMIT {AUTHORS}
) a
JOIN im_member m ON m.conversation_id = k.c AND m.user_id = a.from_user
"""


# In a dialogue who blocks the other one hears nothing of him.
_AUDIENCES: Final = """
SELECT k.u, k.c, o.user_id FROM unnest($1::text[], $2::text[]) AS k(u, c)
JOIN im_member m ON m.conversation_id = k.c AND m.user_id = k.u
CROSS JOIN LATERAL (
    SELECT w.user_id FROM im_member w WHERE w.conversation_id = k.c AND NOT (left(k.c, 2) = 'd:' AND EXISTS (
        SELECT FROM im_friend f WHERE f.user_id = w.user_id AND f.other_id = k.u AND f.blocked)) LIMIT $3
) o
"""


async def raise_versions(connection: Connection, counts: Mapping[str, int]) -> dict[str, int]:
    """Raises the versions of these users by so many; {user: the newest one}. Locks their rows to the end of the transaction,
    which takes them with this one statement only."""
    if not counts:
        return {}
    rows = await connection.fetch(_RAISE, list(counts.keys()), list(counts.values()))
    return {row[0]: row[1] for row in rows}


class PgUserStates:
    """Rows of what users' devices share. Every method raises Unavailable."""

    def __init__(self, database: Database, entries: int = ENTRIES) -> None:
        """entries: at most so many in a version; one more where it deletes messages."""
        self._database = database
        self._entries = entries

    async def access(self, keys: Collection[Key]) -> dict[Key, Access]:
        """What is readable, by (user, conversation_id); strangers to a conversation are absent."""
        async with self._database.connection() as connection:
            return await access(connection, keys)

    async def write(self, changes: Mapping[Key, Change]) -> tuple[dict[str, list[wire.StateMsg]], list[Read]]:
        """Writes changes that were judged by what `access` said; one transaction. {user: STATEs, in order}, and which own
        read positions rose, as told by rows that are locked."""
        plan = _versions(changes, self._entries)
        if not plan:
            return {}, []
        async with self._database.connection() as connection, connection.transaction():
            newest = await raise_versions(connection, {user: len(chunks) for user, chunks in plan.items()})
            versions = {
                key: newest[user] - len(chunks) + n
                for user, chunks in plan.items()
                for n, chunk in enumerate(chunks, 1)
                for key in chunk
            }
            return await _write(connection, changes, versions, newest)

    async def since(
        self, user: str, version: int, limit: int, limit_bytes: int, sources: Sequence[Source] = ()
    ) -> wire.StateMsg:
        """The changes after `version`, whole versions only, of at most `limit` entries and `limit_bytes`, but the first
        version whatever it takes. prev_version is 0.

        The version is read before the entries: what is newer than it may be among them, and comes once more.
        """
        async with self._database.connection() as connection:
            newest = await connection.fetchval("SELECT version FROM im_user WHERE user_id = $1", user) or 0
            if version > newest:
                version = 0  # of another database, or of what it held before: all of it
            answer = wire.StateMsg(version=newest)
            if version == newest:
                return answer
            rows = await connection.fetch(
                f"SELECT {_STATE} FROM im_user_state WHERE user_id = $1 AND version > $2 ORDER BY version LIMIT $3",
                user,
                version,
                limit + 1,
            )
            entries = [Entry(row[1], _conversation_state(tuple(row))) for row in rows]
            rows = await connection.fetch(
                "SELECT conversation_id, seq, version FROM im_hidden WHERE user_id = $1 AND version > $2"
                " ORDER BY version LIMIT $3",
                user,
                version,
                limit + 1,
            )
            entries += [Entry(row[2], wire.HiddenMessage(conversation_id=row[0], seq=row[1])) for row in rows]
            for source in sources:
                entries += await source.since(connection, user, version, limit + 1)
        entries.sort(key=lambda e: e.version)
        page, size = 0, 0
        while page < len(entries):
            upto = page
            while upto < len(entries) and entries[upto].version == entries[page].version:
                size += entries[upto].entry.ByteSize() + 4
                upto += 1
            # Each of the lists may have been cut at limit + 1, so what lies behind that is not complete.
            if page and (upto > limit or size > limit_bytes):
                answer.more = True
                answer.version = entries[page - 1].version
                break
            page = upto
        fill(answer, (e.entry for e in entries[:page]))
        return answer

    async def authors(self, reads: Sequence[Read]) -> list[list[str]]:
        """Per read: who wrote what was newly read and is a member still, the latest first, at most AUTHORS."""
        found: list[list[str]] = [[] for _ in reads]
        if reads:
            async with self._database.connection() as connection:
                columns = [list(column) for column in zip(*reads, strict=True)]
                for n, author in await connection.fetch(_AUTHORS, *columns):
                    found[n - 1].append(author)
        return found

    async def versions(self, users: Collection[str]) -> dict[str, int]:
        """The newest version of each user that has one."""
        if not users:
            return {}
        async with self._database.connection() as connection:
            rows = await connection.fetch("SELECT user_id, version FROM im_user WHERE user_id = ANY ($1)", list(users))
        return {row[0]: row[1] for row in rows}

    async def state_of(self, keys: Collection[Key]) -> dict[Key, tuple[int, wire.ConversationState]]:
        """The rows that stand, with their versions."""
        if not keys:
            return {}
        async with self._database.connection() as connection:
            rows = await connection.fetch(
                f"SELECT s.user_id, {_STATE} FROM unnest($1::text[], $2::text[]) AS k(u, c)"
                " JOIN im_user_state s ON s.user_id = k.u AND s.conversation_id = k.c",
                *_columns(keys, 2),
            )
        return {(row[0], row[1]): (row[2], _conversation_state(tuple(row)[1:])) for row in rows}

    async def audiences(self, keys: Collection[Key], most: int) -> dict[Key, list[str]]:
        """Per (user, conversation_id) the other members, where the user is one and they are at most `most`."""
        found: dict[Key, list[str]] = {}
        async with self._database.connection() as connection:
            rows = await connection.fetch(_AUDIENCES, *_columns(keys, 2), most + 1)
        for user, conversation_id, other in rows:
            found.setdefault((user, conversation_id), []).append(other)
        return {(u, c): [o for o in others if o != u] for (u, c), others in found.items() if len(others) <= most}


async def access(connection: Connection, keys: Collection[Key]) -> dict[Key, Access]:
    """See PgUserStates."""
    rows = await connection.fetch(_ACCESS, *_columns(keys, 2)) if keys else []
    return {(row[0], row[1]): Access(*tuple(row)[2:]) for row in rows}


def fill(
    state: wire.StateMsg, entries: Iterable[wire.ConversationState | wire.HiddenMessage | wire.FriendState]
) -> None:
    """Puts entries where they belong."""
    for entry in entries:
        if isinstance(entry, wire.ConversationState):
            state.conversations.append(entry)
        elif isinstance(entry, wire.HiddenMessage):
            state.hidden.append(entry)
        else:
            state.friends.append(entry)


def _versions(changes: Mapping[Key, Change], entries: int) -> dict[str, list[list[Key]]]:
    """Per user: the conversations that change, as one list per version."""
    plan: dict[str, list[list[Key]]] = {}
    room: dict[str, int] = defaultdict(int)
    for key, change in changes.items():
        size = 1 + len(change.hidden)
        chunks = plan.setdefault(key[0], [])
        if not chunks or size > room[key[0]]:
            chunks.append([])
            room[key[0]] = entries + 1
        chunks[-1].append(key)
        room[key[0]] -= size
    return plan


async def _write(
    connection: Connection, changes: Mapping[Key, Change], versions: Mapping[Key, int], newest: Mapping[str, int]
) -> tuple[dict[str, list[wire.StateMsg]], list[Read]]:
    keys = list(changes)
    # Everybody's row is locked by now, so this is what stands until the commit.
    before = await connection.fetch(
        "SELECT s.user_id, s.conversation_id, s.read_seq FROM unnest($1::text[], $2::text[]) AS k(u, c)"
        " JOIN im_user_state s ON s.user_id = k.u AND s.conversation_id = k.c",
        *_columns(keys, 2),
    )
    old = {(row[0], row[1]): row[2] for row in before}
    await connection.execute(
        _WRITE,
        *_columns(
            (
                (
                    *key,
                    versions[key],
                    changes[key].read_seq,
                    changes[key].peer_read_seq,
                    changes[key].cleared_seq,
                )
                for key in keys
            ),
            6,
        ),
    )
    marks = [
        (*k, c.pinned, c.muted_until_ms) for k, c in changes.items() if (c.pinned, c.muted_until_ms) != (None, None)
    ]
    if marks:
        await connection.execute(_MARK, *_columns(marks, 4))
    hidden = [(*key, seq, versions[key]) for key, change in changes.items() for seq in sorted(change.hidden)]
    if hidden:
        await connection.execute(
            "INSERT INTO im_hidden (user_id, conversation_id, seq, version)"
            " SELECT * FROM unnest($1::text[], $2::text[], $3::bigint[], $4::bigint[])"
            " ON CONFLICT (user_id, conversation_id, seq) DO UPDATE SET version = EXCLUDED.version",
            *_columns(hidden, 4),
        )
    rows = await connection.fetch(
        f"SELECT s.user_id, {_STATE} FROM unnest($1::text[], $2::text[]) AS k(u, c)"
        " JOIN im_user_state s ON s.user_id = k.u AND s.conversation_id = k.c",
        *_columns(keys, 2),
    )
    states: dict[tuple[str, int], wire.StateMsg] = {}
    for row in sorted(map(tuple, rows), key=lambda row: row[2]):
        user, version = row[0], row[2]
        state = states.get((user, version))
        if state is None:
            state = states[user, version] = wire.StateMsg(version=version, prev_version=version - 1)
        entry = _conversation_state(row[1:])
        state.conversations.append(entry)
        for seq in sorted(changes[user, entry.conversation_id].hidden):
            state.hidden.add(conversation_id=entry.conversation_id, seq=seq)
    told: dict[str, list[wire.StateMsg]] = {user: [] for user in newest}
    for (user, _), state in states.items():
        told[user].append(state)
    rose = [
        Read(*key, old.get(key, 0), change.read_seq)
        for key, change in changes.items()
        if change.read_seq > old.get(key, 0)
    ]
    return told, rose


def _conversation_state(row: Sequence[Any]) -> wire.ConversationState:
    """Of a row of _STATE."""
    conversation_id, _, read_seq, peer_read_seq, cleared_seq, pinned_at_ms, muted_until_ms = row
    return wire.ConversationState(
        conversation_id=conversation_id,
        read_seq=read_seq,
        peer_read_seq=peer_read_seq,
        cleared_seq=cleared_seq,
        pinned_at_ms=pinned_at_ms,
        muted_until_ms=muted_until_ms,
    )


def _columns(rows: Iterable[Sequence[object]], width: int) -> list[list[object]]:
    """Rows → columns; of no rows, `width` empty columns."""
    turned = [list(column) for column in zip(*rows, strict=True)]
    return turned or [[] for _ in range(width)]
