"""The client's store: one SQLite file per device (WAL, synchronous=FULL), or ":memory:".

`apply` makes one `Writes` durable in one transaction; it blocks on the disk and runs on a thread, one call at a time.
Reads have a connection of their own, so they see committed rows only; they are short and run on the loop. A lock file
beside the store keeps a second process out. The file grows with the messages it holds; nothing else in it does.
"""

from __future__ import annotations

import fcntl
import os
import sqlite3
from collections.abc import Sequence
from operator import attrgetter
from pathlib import Path
from typing import Any, Final

from plato.client.api import Friend, FriendStatus, StoreError, StoreForeign, StoreInUse
from plato.client.content import OPERATIONS, Role
from plato.client.core import groups
from plato.client.core.heartbeat import read
from plato.client.core.inbox import Thread
from plato.client.core.model import Entry, Membership, Place, Revision, Row, Session, Shared, Snapshot, Writes

MEMORY: Final = ":memory:"
REFUSED_KEPT: Final = 1_000
_VERSION: Final = 2
_SCHEMA_1: Final = """
CREATE TABLE meta (name TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE conversation (
    conversation_id TEXT PRIMARY KEY, peer TEXT NOT NULL, cursor INTEGER NOT NULL, newest_seq INTEGER NOT NULL,
    next_client_id INTEGER NOT NULL
) WITHOUT ROWID;
-- number: the order in which this device came to know them; within a conversation that is seq's order.
CREATE TABLE message (
    number INTEGER PRIMARY KEY, conversation_id TEXT NOT NULL, seq INTEGER NOT NULL, prev_seq INTEGER NOT NULL,
    msg_id INTEGER NOT NULL, from_user TEXT NOT NULL, msg_type INTEGER NOT NULL, body BLOB NOT NULL,
    client_msg_id BLOB NOT NULL, server_at_ms INTEGER NOT NULL, UNIQUE (conversation_id, seq)
);
CREATE TABLE outbox (
    conversation_id TEXT NOT NULL, client_id INTEGER NOT NULL, client_msg_id BLOB NOT NULL UNIQUE, to_user TEXT NOT NULL,
    msg_type INTEGER NOT NULL, body BLOB NOT NULL, PRIMARY KEY (conversation_id, client_id)
);
CREATE TABLE refused (
    number INTEGER PRIMARY KEY, conversation_id TEXT NOT NULL, client_id INTEGER NOT NULL, client_msg_id BLOB NOT NULL,
    msg_type INTEGER NOT NULL, body BLOB NOT NULL, code INTEGER NOT NULL
);
"""
# Operations: what they change, and what this user's devices share.
_SCHEMA_2: Final = """
ALTER TABLE message ADD COLUMN changed_seq INTEGER NOT NULL DEFAULT 0;
ALTER TABLE message ADD COLUMN recalled INTEGER NOT NULL DEFAULT 0;
CREATE INDEX message_id ON message (msg_id);
ALTER TABLE conversation ADD COLUMN title TEXT NOT NULL DEFAULT '';
ALTER TABLE conversation ADD COLUMN members INTEGER NOT NULL DEFAULT 0;
ALTER TABLE conversation ADD COLUMN has_left INTEGER NOT NULL DEFAULT 0;
ALTER TABLE conversation ADD COLUMN group_seq INTEGER NOT NULL DEFAULT 0;
-- seq: of an EDIT, by the message that it means: where that is recalled, what it said goes too.
CREATE TABLE edit (
    conversation_id TEXT NOT NULL, msg_id INTEGER NOT NULL, seq INTEGER NOT NULL,
    PRIMARY KEY (conversation_id, msg_id, seq)
) WITHOUT ROWID;
-- role NULL: no member any more. seq: of the operation that made it so, the greatest one holds.
CREATE TABLE member (
    conversation_id TEXT NOT NULL, user TEXT NOT NULL, seq INTEGER NOT NULL, role INTEGER,
    PRIMARY KEY (conversation_id, user)
) WITHOUT ROWID;
CREATE TABLE shared (
    conversation_id TEXT PRIMARY KEY, read_seq INTEGER NOT NULL, wanted_seq INTEGER NOT NULL,
    pinned_at_ms INTEGER NOT NULL, muted_until_ms INTEGER NOT NULL, peer_read_seq INTEGER NOT NULL,
    cleared_seq INTEGER NOT NULL
) WITHOUT ROWID;
CREATE TABLE hidden (
    conversation_id TEXT NOT NULL, seq INTEGER NOT NULL, PRIMARY KEY (conversation_id, seq)
) WITHOUT ROWID;
CREATE TABLE friend (user TEXT PRIMARY KEY, status INTEGER NOT NULL, words TEXT NOT NULL) WITHOUT ROWID;
"""
_ROW: Final = (
    "conversation_id, seq, prev_seq, msg_id, from_user, msg_type, body, client_msg_id, server_at_ms, changed_seq,"
    " recalled"
)
_PLACE: Final = "conversation_id, peer, cursor, newest_seq, next_client_id, title, members, has_left, group_seq"
_ROW_VALUES: Final = attrgetter(*Row.__slots__)
_PLACE_VALUES: Final = attrgetter(*Place.__slots__)
_SHARED_VALUES: Final = attrgetter(*Shared.__slots__)
_MEMBER_VALUES: Final = attrgetter(*Membership.__slots__)
_REVISE: Final = (
    "UPDATE message SET msg_type = ifnull(?, msg_type), body = ?, recalled = ?, changed_seq = ?"
    " WHERE msg_id = ? AND conversation_id = ? AND changed_seq < ?"
)
# Who is in already keeps the role, where somebody adds them.
_MEMBER: Final = (
    "INSERT INTO member VALUES (?1,?2,?3,?4) ON CONFLICT DO UPDATE SET seq = ?3,"
    " role = CASE WHEN ?5 THEN ifnull(role, ?4) ELSE ?4 END WHERE seq <= ?3"
)
_HIDDEN: Final = """EXISTS (SELECT 1 FROM hidden h WHERE h.conversation_id = message.conversation_id AND h.seq = message.seq)
 OR seq <= ifnull((SELECT cleared_seq FROM shared s WHERE s.conversation_id = message.conversation_id), 0)"""


class Store:
    """One open store. Raises StoreError in its constructor, sqlite3.Error from `apply` (repeat it: nothing was written)."""

    def __init__(self, path: Path | str, new_device_id: int, device_id: int | None = None) -> None:
        """new_device_id: for a store that has none yet. device_id: the one it must have, if given."""
        self.in_memory = str(path) == MEMORY
        self._lock: int | None = None
        if not self.in_memory:
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            self._lock = _lock(Path(f"{path}.lock"))
        try:
            self._path = str(path)
            self._writer = _connect(self._path)
            self._reader: sqlite3.Connection | None = None
            try:
                self._prepare(path, new_device_id if device_id is None else device_id)
                self._snapshot = self._load()
                self._delivered = int(self._meta("delivered") or 0)
                if device_id is not None and device_id != self._snapshot.device_id:
                    raise StoreForeign(
                        f"the store {path} belongs to device {self._snapshot.device_id}; name another file"
                    )
            except BaseException:
                self._writer.close()
                raise
        except sqlite3.Error as e:
            self._unlock()
            raise StoreError(f"the store {path} cannot be used: {e}; name another file or repair this one") from e
        except BaseException:
            self._unlock()
            raise

    def load(self) -> Snapshot:
        """What the store held when it was opened."""
        return self._snapshot

    def apply(self, writes: Writes) -> None:
        """Makes `writes` durable, whole or not at all. Blocks. Raises sqlite3.Error."""
        run = self._writer.execute
        many = self._writer.executemany
        run("BEGIN IMMEDIATE")
        try:
            if writes.rows:
                many(
                    f"INSERT INTO message ({_ROW}) VALUES (?,?,?,?,?,?,?,?,?,?,?) ON CONFLICT DO UPDATE SET"
                    " msg_type=excluded.msg_type, body=excluded.body, changed_seq=excluded.changed_seq,"
                    " recalled=excluded.recalled WHERE excluded.changed_seq > changed_seq",
                    [_ROW_VALUES(row) for row in writes.rows],
                )
            for revision in writes.revisions:
                self._revise(revision)
            for membership in writes.memberships:
                self._join(membership)
            if writes.places:
                many(
                    f"INSERT INTO conversation ({_PLACE}) VALUES (?,?,?,?,?,?,?,?,?) ON CONFLICT DO UPDATE SET"
                    " peer=excluded.peer, cursor=excluded.cursor, newest_seq=excluded.newest_seq,"
                    " next_client_id=excluded.next_client_id, title=excluded.title, members=excluded.members,"
                    " has_left=excluded.has_left, group_seq=excluded.group_seq",
                    [_PLACE_VALUES(p) for p in writes.places.values()],
                )
            if writes.forgotten:
                run("DELETE FROM hidden")
                run("DELETE FROM friend")
            if writes.shared:
                many(
                    "INSERT OR REPLACE INTO shared VALUES (?,?,?,?,?,?,?)",
                    [_SHARED_VALUES(s) for s in writes.shared.values()],
                )
            if writes.hidden:
                many("INSERT OR IGNORE INTO hidden VALUES (?,?)", list(writes.hidden))
            if writes.friends:
                many(
                    "INSERT OR REPLACE INTO friend VALUES (?,?,?)",
                    [(f.user, f.status.value, f.words) for f in writes.friends.values()],
                )
            if writes.queued:
                many(
                    "INSERT INTO outbox VALUES (?,?,?,?,?,?)",
                    [
                        (e.conversation_id, e.client_id, e.client_msg_id, e.to_user, e.msg_type, e.body)
                        for e in writes.queued.values()
                    ],
                )
            if writes.unqueued:
                many(
                    "DELETE FROM outbox WHERE conversation_id = ? AND client_id = ?",
                    [(e.conversation_id, e.client_id) for e in writes.unqueued],
                )
            for e, code, detail in writes.refused:
                run(
                    "INSERT INTO refused (conversation_id, client_id, client_msg_id, msg_type, body, code, detail)"
                    " VALUES (?,?,?,?,?,?,?)",
                    (e.conversation_id, e.client_id, e.client_msg_id, e.msg_type, e.body, code, detail),
                )
                run("DELETE FROM refused WHERE number <= (SELECT max(number) FROM refused) - ?", (REFUSED_KEPT,))
            meta = dict(writes.meta)
            if writes.delivered:
                meta["delivered"] = str(writes.delivered)
            if meta:
                many("INSERT INTO meta VALUES (?,?) ON CONFLICT DO UPDATE SET value=excluded.value", list(meta.items()))
            run("COMMIT")
        except BaseException:
            if self._writer.in_transaction:
                run("ROLLBACK")
            raise

    def delivered(self) -> int:
        """The number of the last message that the application had taken when the store was opened."""
        return self._delivered

    def after(self, number: int, limit: int) -> list[tuple[int, Row, bool]]:
        """The next messages behind a number, with theirs and whether they are hidden, in the order of arrival."""
        found = self._read().execute(
            f"SELECT number, {_HIDDEN}, {_ROW} FROM message WHERE number > ? ORDER BY number LIMIT ?", (number, limit)
        )
        return [(n, _row(values), bool(hidden)) for n, hidden, *values in found]

    def history(self, conversation_id: str, before: int | None, limit: int) -> list[Row]:
        """The newest `limit` messages with seq < before (None: of all) that are not hidden, by rising seq."""
        found = (
            self._read()
            .execute(
                f"SELECT {_ROW} FROM message WHERE conversation_id = ? AND seq < ? AND NOT ({_HIDDEN})"
                " ORDER BY seq DESC LIMIT ?",
                (conversation_id, (1 << 63) - 1 if before is None else before, limit),
            )
            .fetchall()
        )
        return [_row(values) for values in reversed(found)]

    def shown(self, rows: Sequence[Row]) -> list[Row]:
        """What is to be shown of a page that came from the platform: without what is hidden, and each row as of the newest
        operation that either side knows."""
        found = []
        for row in rows:
            here = self._read().execute(
                f"SELECT ({_HIDDEN}), {_ROW} FROM message WHERE conversation_id = ? AND seq = ?",
                (row.conversation_id, row.seq),
            )
            values = here.fetchone()
            if values is None:
                hidden = self._read().execute(
                    f"SELECT {_HIDDEN} FROM (SELECT ? AS conversation_id, ? AS seq) AS message",
                    (row.conversation_id, row.seq),
                )
                if not hidden.fetchone()[0]:
                    found.append(row)
            elif not values[0]:
                mine = _row(values[1:])
                found.append(mine if mine.changed_seq > row.changed_seq else row)
        return found

    def message(self, msg_id: int) -> tuple[Row, bool] | None:
        """The stored message of this id, and whether it is hidden."""
        found = self._read().execute(f"SELECT ({_HIDDEN}), {_ROW} FROM message WHERE msg_id = ?", (msg_id,))
        values = found.fetchone()
        return (_row(values[1:]), bool(values[0])) if values else None

    def at(self, conversation_id: str, seq: int) -> tuple[Row, bool] | None:
        """The stored message of this place, and whether it is hidden."""
        found = self._read().execute(
            f"SELECT ({_HIDDEN}), {_ROW} FROM message WHERE conversation_id = ? AND seq = ?", (conversation_id, seq)
        )
        values = found.fetchone()
        return (_row(values[1:]), bool(values[0])) if values else None

    def unread(self, conversation_id: str, user: str, read_seq: int) -> int:
        """How many messages above a position count as unread: of others, no operations, not recalled, not hidden."""
        found = self._read().execute(
            "SELECT count(*) FROM message WHERE conversation_id = ? AND seq > ? AND from_user <> ? AND msg_type < ?"
            f" AND NOT recalled AND NOT ({_HIDDEN})",
            (conversation_id, read_seq, user, OPERATIONS.start),
        )
        return int(found.fetchone()[0])

    def members(self, conversation_id: str) -> dict[str, int]:
        """{user: role} of a group, as far as operations told it."""
        found = self._read().execute(
            "SELECT user, role FROM member WHERE conversation_id = ? AND role IS NOT NULL ORDER BY user",
            (conversation_id,),
        )
        return dict(found.fetchall())

    def friends(self) -> list[Friend]:
        """Every user with whom something is, or was."""
        found = self._read().execute("SELECT user, status, words FROM friend ORDER BY user")
        return [Friend(user, FriendStatus(status), words) for user, status, words in found]

    def own(self, conversation_id: str, user: str, client_msg_id: bytes) -> Row | None:
        """The stored message of this sender and key."""
        found = self._read().execute(
            f"SELECT {_ROW} FROM message WHERE client_msg_id = ? AND conversation_id = ? AND from_user = ?",
            (client_msg_id, conversation_id, user),
        )
        values = found.fetchone()
        return _row(values) if values else None

    def refused(self, conversation_id: str) -> list[tuple[Entry, int, str]]:
        """The refused messages of a conversation with codes and words, oldest first; the newest 1,000 of all are kept."""
        found = self._read().execute(
            "SELECT conversation_id, client_id, client_msg_id, '', msg_type, body, code, detail FROM refused"
            " WHERE conversation_id = ? ORDER BY number",
            (conversation_id,),
        )
        return [(Entry(*values), code, detail) for *values, code, detail in found]

    def close(self) -> None:
        """Closes the file and lets others open it."""
        self._writer.close()
        if self._reader is not None:
            self._reader.close()
        self._unlock()

    def _read(self) -> sqlite3.Connection:
        """The connection for reads, opened by the first one: a client that reads nothing has one connection less."""
        if self.in_memory:
            return self._writer
        if self._reader is None:
            self._reader = _connect(self._path)
        return self._reader

    def _prepare(self, path: Path | str, device_id: int) -> None:
        version = self._writer.execute("PRAGMA user_version").fetchone()[0]
        if version > _VERSION:
            raise StoreForeign(f"the store {path} has format {version}, newer than this client's {_VERSION}; update it")
        if version == 0:
            self._writer.executescript(
                f"BEGIN; {_SCHEMA_1} {_SCHEMA_2} INSERT INTO meta VALUES ('device_id', '{device_id}');"
                f" PRAGMA user_version = {_VERSION}; COMMIT;"
            )
        elif version == 1:
            self._from_1()
        # Not versions of their own: clients of before read and write a store that has them.
        if "detail" not in [column[1] for column in self._writer.execute("PRAGMA table_info(refused)")]:
            self._writer.execute("ALTER TABLE refused ADD COLUMN detail TEXT NOT NULL DEFAULT ''")
        self._writer.execute("CREATE INDEX IF NOT EXISTS message_key ON message (client_msg_id)")

    def _from_1(self) -> None:
        """A store of a client that knew no operations: those it received as messages are done now."""
        run = self._writer.execute
        # executescript would commit before it begins; this is one transaction.
        run("BEGIN IMMEDIATE")
        try:
            for statement in _SCHEMA_2.split(";"):
                run(statement)
            user = self._meta("user")
            threads: dict[str, Thread] = {}
            received = (OPERATIONS.start, OPERATIONS.stop)
            for values in run(
                f"SELECT {_ROW} FROM message WHERE msg_type >= ? AND msg_type < ? ORDER BY number", received
            ).fetchall():
                row = _row(values)
                if (revision := groups.revision_of(row)) is not None:
                    self._revise(revision)
                for membership in groups.memberships_of(row):
                    self._join(membership)
                groups.operate(threads.setdefault(row.conversation_id, Thread(row.conversation_id)), row, user)
            for t in threads.values():
                run(
                    "UPDATE conversation SET title = ?, members = ?, has_left = ?, group_seq = ? WHERE conversation_id = ?",
                    (t.title, t.members, t.left, t.group_seq, t.conversation_id),
                )
            run(f"PRAGMA user_version = {_VERSION}")
            run("COMMIT")
        except BaseException:
            run("ROLLBACK")
            raise

    def _revise(self, r: Revision) -> None:
        run = self._writer.execute
        run(_REVISE, (r.msg_type, r.body, r.recalled, r.changed_seq, r.msg_id, r.conversation_id, r.changed_seq))
        if r.recalled:
            run(
                "UPDATE message SET body = x'', recalled = 1, changed_seq = ?1 WHERE conversation_id = ?2 AND seq IN"
                " (SELECT seq FROM edit WHERE conversation_id = ?2 AND msg_id = ?3) AND changed_seq < ?1",
                (r.changed_seq, r.conversation_id, r.msg_id),
            )
        else:
            run("INSERT OR IGNORE INTO edit VALUES (?,?,?)", (r.conversation_id, r.msg_id, r.changed_seq))

    def _join(self, m: Membership) -> None:
        if m.role == Role.OWNER:
            self._writer.execute(
                "UPDATE member SET role = ?, seq = ? WHERE conversation_id = ? AND role = ? AND user <> ? AND seq < ?",
                (Role.ADMINISTRATOR, m.seq, m.conversation_id, Role.OWNER, m.user, m.seq),
            )
        self._writer.execute(_MEMBER, _MEMBER_VALUES(m))

    def _load(self) -> Snapshot:
        run = self._writer.execute
        session = None
        if text := self._meta("session"):
            conn_id, secret = text.split(" ")
            session = Session(int(conn_id), bytes.fromhex(secret))
        return Snapshot(
            device_id=int(self._meta("device_id") or 0),
            user=self._meta("user"),
            session=session,
            gateways=tuple((self._meta("gateways") or "").split()),
            last_gateway=self._meta("last_gateway"),
            places=tuple(
                Place(*(*values[:7], bool(values[7]), values[8]))
                for values in run(f"SELECT {_PLACE} FROM conversation")
            ),
            outbox=tuple(Entry(*e) for e in run("SELECT * FROM outbox ORDER BY conversation_id, client_id")),
            learnt=tuple(read(self._meta("learnt") or "")),
            state_version=int(self._meta("state_version") or 0),
            shared=tuple(Shared(*values) for values in run("SELECT * FROM shared")),
        )

    def _meta(self, name: str) -> str | None:
        found = self._writer.execute("SELECT value FROM meta WHERE name = ?", (name,)).fetchone()
        return (found[0] or None) if found else None

    def _unlock(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def _connect(path: str) -> sqlite3.Connection:
    # Calls come from a pool's threads, but never two at a time on one connection.
    connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False, timeout=10, cached_statements=16)
    try:
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = FULL")
        connection.execute("PRAGMA cache_size = -64")  # KiB; thousands of clients may live in one process
    except BaseException:
        connection.close()
        raise
    return connection


def _lock(path: Path) -> int:
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as e:
        raise StoreError(f"the store's lock {path} cannot be opened: {e.strerror}; name a writable place") from e
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as e:
        os.close(descriptor)
        raise StoreInUse(
            f"another process has this store open ({path} is locked); close it or name another store"
        ) from e
    return descriptor


def _row(values: Sequence[Any]) -> Row:
    return Row(*(*values[:-1], bool(values[-1])))
