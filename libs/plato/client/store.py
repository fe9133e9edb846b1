"""The client's store: one SQLite file per device (WAL, synchronous=FULL), or ":memory:".

`apply` makes one `Writes` durable in one transaction; it blocks on the disk and runs on a thread, one call at a time.
Reads have a connection of their own, so they see committed rows only; they are short and run on the loop. A lock file
beside the store keeps a second process out. The file grows with the messages it holds; nothing else in it does.
"""

from __future__ import annotations

import fcntl
import os
import sqlite3
from pathlib import Path
from typing import Final

from plato.client.api import StoreError, StoreForeign, StoreInUse
from plato.client.core.heartbeat import read
from plato.client.core.model import Entry, Place, Row, Session, Snapshot, Writes

MEMORY: Final = ":memory:"
REFUSED_KEPT: Final = 1_000
_VERSION: Final = 1
_SCHEMA: Final = """
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
_ROW: Final = "conversation_id, seq, prev_seq, msg_id, from_user, msg_type, body, client_msg_id, server_at_ms"


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
                    f"INSERT INTO message ({_ROW}) VALUES (?,?,?,?,?,?,?,?,?) ON CONFLICT DO NOTHING",
                    [_values(row) for row in writes.rows],
                )
            if writes.places:
                many(
                    "INSERT INTO conversation VALUES (?,?,?,?,?) ON CONFLICT DO UPDATE SET peer=excluded.peer,"
                    " cursor=excluded.cursor, newest_seq=excluded.newest_seq, next_client_id=excluded.next_client_id",
                    [
                        (p.conversation_id, p.peer, p.cursor, p.newest_seq, p.next_client_id)
                        for p in writes.places.values()
                    ],
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
            for e, code in writes.refused:
                run(
                    "INSERT INTO refused (conversation_id, client_id, client_msg_id, msg_type, body, code)"
                    " VALUES (?,?,?,?,?,?)",
                    (e.conversation_id, e.client_id, e.client_msg_id, e.msg_type, e.body, code),
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

    def after(self, number: int, limit: int) -> list[tuple[int, Row]]:
        """The next messages behind a number, with theirs, in the order of arrival."""
        found = self._read().execute(
            f"SELECT number, {_ROW} FROM message WHERE number > ? ORDER BY number LIMIT ?", (number, limit)
        )
        return [(n, Row(*values)) for n, *values in found]

    def history(self, conversation_id: str, before: int | None, limit: int) -> list[Row]:
        """The newest `limit` messages with seq < before (None: of all), by rising seq."""
        found = (
            self._read()
            .execute(
                f"SELECT {_ROW} FROM message WHERE conversation_id = ? AND seq < ? ORDER BY seq DESC LIMIT ?",
                (conversation_id, (1 << 63) - 1 if before is None else before, limit),
            )
            .fetchall()
        )
        return [Row(*values) for values in reversed(found)]

    def own(self, conversation_id: str, user: str, client_msg_id: bytes) -> Row | None:
        """The stored message of this sender and key."""
        found = self._read().execute(
            f"SELECT {_ROW} FROM message WHERE client_msg_id = ? AND conversation_id = ? AND from_user = ?",
            (client_msg_id, conversation_id, user),
        )
        values = found.fetchone()
        return Row(*values) if values else None

    def refused(self, conversation_id: str) -> list[tuple[Entry, int]]:
        """The refused messages of a conversation with their codes, oldest first; the newest 1,000 of all are kept."""
        found = self._read().execute(
            "SELECT conversation_id, client_id, client_msg_id, '', msg_type, body, code FROM refused"
            " WHERE conversation_id = ? ORDER BY number",
            (conversation_id,),
        )
        return [(Entry(*values), code) for *values, code in found]

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
                f"BEGIN; {_SCHEMA} INSERT INTO meta VALUES ('device_id', '{device_id}');"
                f" PRAGMA user_version = {_VERSION}; COMMIT;"
            )
        # Not a version of its own: clients of before read and write a store that has it.
        self._writer.execute("CREATE INDEX IF NOT EXISTS message_key ON message (client_msg_id)")

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
            places=tuple(Place(*p) for p in run("SELECT * FROM conversation")),
            outbox=tuple(Entry(*e) for e in run("SELECT * FROM outbox ORDER BY conversation_id, client_id")),
            learnt=tuple(read(self._meta("learnt") or "")),
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


def _values(row: Row) -> tuple[str | int | bytes, ...]:
    return (
        row.conversation_id,
        row.seq,
        row.prev_seq,
        row.msg_id,
        row.from_user,
        row.msg_type,
        row.body,
        row.client_msg_id,
        row.server_at_ms,
    )
