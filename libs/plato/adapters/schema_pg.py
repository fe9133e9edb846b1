"""The schema of Plato's database: numbered SQL files beside this module, run in order, each once, under an advisory lock.

    migrate   plato db migrate, and the local supervisor: makes the schema or brings it up to this program's version
    check     every process that uses the database: refuses to start on a database that it does not fit

The number of partitions is stored when the schema is made and never changes: a conversation's order hangs on it.

While a cluster is upgraded, and after it is rolled back, programs run on a schema that is newer than theirs. Each file says
in a line `-- readable by: K` which is the oldest version whose program reads and writes the database after it; its own
predecessor at least. The newest file's K is stored as `readable_by`: older programs than that are refused.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from importlib import resources
from typing import Final
from urllib.parse import urlsplit

import asyncpg

from plato.adapters.owner import Owner
from plato.adapters.pg import COMMAND_TIMEOUT_S, Connection, connect, translated
from plato.core.errors import Unavailable
from plato.runtime.settings import SettingsError

_FOLDER: Final = "sql"
_READABLE_BY: Final = re.compile(r"^-- readable by: (\d+)$", re.MULTILINE)
POSTGRES_BUS: Final = "postgres"
"""The bus of a database that is its own."""


class NotMigrated(Unavailable):
    """The database holds no schema yet, or an older one: whoever started us runs `plato db migrate`, beside us or later."""


def migrations() -> dict[int, str]:
    """{number: SQL text} of every file NNNN_name.sql, from 1 without a gap."""
    files = {
        int(f.name.split("_")[0]): f.read_text(encoding="utf-8")
        for f in (resources.files("plato.adapters") / _FOLDER).iterdir()
        if f.name.endswith(".sql")
    }
    if sorted(files) != list(range(1, len(files) + 1)):
        raise RuntimeError(f"the numbers of the SQL files have a gap: {sorted(files)}")
    return files


def code_version() -> int:
    """The schema version that this program is made for."""
    return len(migrations())


def readable_by(number: int, text: str) -> int:
    """The oldest schema version whose programs work with the database after migration `number`. Raises RuntimeError for one
    that would stop the version before it: that takes two migrations, with a release between them."""
    said = _READABLE_BY.search(text)
    oldest = int(said[1]) if said is not None else number
    if number > 1 and not 1 <= oldest < number:
        raise RuntimeError(f"migration {number} must say `-- readable by: K` with K from 1 to {number - 1}")
    return oldest


async def migrate(
    uri: str,
    schema: str,
    partitions: int = 64,
    owner: Owner | None = None,
    claim_more: Callable[[], Awaitable[None]] | None = None,
) -> int:
    """Brings the schema up to this program's version, makes it if it is missing; returns the version.

    partitions: stored when the schema is made. All in one transaction: a failure leaves the old version.
    owner: marked as the one that the schema belongs to. claim_more: marks what else belongs to it; called when the schema is
    known to be free or its own and before anything is changed, so that a refusal of either leaves both as they were.
    A newer schema that this program reads stays as it is. Raises SettingsError (newer schema that it does not read, other
    number of partitions, refused; NotAlone: another one's) and Unavailable.
    """
    files = migrations()
    newest = len(files)
    connection = await _open(uri, command_timeout_s=None)
    try:
        with translated():
            async with connection.transaction():
                # DDL may wait long for a busy cluster's locks, and for another migration; the caller bounds the whole.
                await connection.execute("SET LOCAL statement_timeout = 0")
                await connection.execute("SELECT pg_advisory_xact_lock(hashtextextended($1, 0))", f"plato:{schema}")
                await connection.execute(f'CREATE SCHEMA IF NOT EXISTS "{schema}"')
                await connection.execute(f'SET LOCAL search_path TO "{schema}"')
                version = await _version(connection, schema)
                await _refuse_newer(connection, version, uri)
                if version:
                    await _refuse_another(connection, owner, uri, schema)
                if claim_more is not None:
                    await claim_more()
                for number in sorted(files):
                    if number > version:
                        await connection.execute(files[number])
                if version == 0:
                    await _first(connection, partitions)
                if version <= newest:
                    await _store(connection, "schema_version", str(newest))
                    await _store(connection, "readable_by", str(readable_by(newest, files[newest])))
                if owner is not None:
                    await _store(connection, "cluster", owner.cluster)
                await _check_partitions(connection, partitions)
    except Unavailable as e:
        if isinstance(e.__cause__, asyncpg.InsufficientPrivilegeError):
            raise SettingsError(f"{_where(uri)}: {e.__cause__}; grant CREATE on the database to this user") from e
        raise
    finally:
        connection.terminate()
    return max(version, newest)


async def check(uri: str, schema: str, partitions: int, bus: str = POSTGRES_BUS, owner: Owner | None = None) -> int:
    """The database's schema version, if this program fits it.

    A newer one fits if its migration says so. bus: whose positions the database keeps (POSTGRES_BUS, or a topic's identity);
    the first one that is asked about stays. owner: for whom this program runs; in another one's schema nothing is written.
    Raises SettingsError in words: newer schema, other number of partitions, another bus, refused password, unknown database;
    NotAlone: another one's.
    Raises Unavailable while the server is away; NotMigrated, which is one, while the schema is missing or older.
    """
    connection = await _open(uri, schema)
    try:
        with translated():
            version = await _version(connection, schema)
            if version == 0:
                raise NotMigrated(f"{_where(uri)} holds no schema {schema!r} yet; run `plato db migrate` first")
            await _refuse_another(connection, owner, uri, schema)
            await _refuse_newer(connection, version, uri)
            if version < code_version():
                raise NotMigrated(
                    f"{_where(uri)} has schema version {version}, this program needs {code_version()};"
                    " run `plato db migrate`"
                )
            await _check_partitions(connection, partitions)
            await _check_bus(connection, bus)
            return version
    finally:
        connection.terminate()


@dataclass(frozen=True, slots=True)
class Durability:
    """What the database promises about a commit (R11)."""

    level: str
    """"none" (a crash of the machine or server may lose commits), "process" (single node) or "node" (a standby has it)."""
    promise: str
    """The same in words, for people."""


async def durability(uri: str) -> Durability:
    """Reads the server's settings. Raises SettingsError and Unavailable as check does."""
    connection = await _open(uri)
    try:
        with translated():
            row = await connection.fetchrow(
                "SELECT current_setting('fsync') AS fsync, current_setting('full_page_writes') AS pages,"
                " current_setting('synchronous_commit') AS sync, current_setting('synchronous_standby_names') AS standbys"
            )
    finally:
        connection.terminate()
    assert row is not None
    return judge_durability(row["fsync"], row["pages"], row["sync"], row["standbys"])


def judge_durability(fsync: str, full_page_writes: str, synchronous_commit: str, standbys: str) -> Durability:
    """What these settings of PostgreSQL promise. synchronous_commit is that of our own sessions."""
    if fsync != "on" or full_page_writes != "on":
        return Durability("none", "fsync or full_page_writes is off: a crash of the machine may lose everything")
    if synchronous_commit not in ("on", "remote_apply"):
        return Durability("none", f"synchronous_commit is {synchronous_commit}: a crash may lose acknowledged messages")
    if standbys.strip():
        return Durability("node", f"synchronous standby ({standbys.strip()}): survives the loss of one node")
    return Durability("process", "single node: promises process crashes only")


async def _open(uri: str, schema: str | None = None, command_timeout_s: float | None = COMMAND_TIMEOUT_S) -> Connection:
    try:
        return await connect(uri, schema, timeout_s=5.0, command_timeout_s=command_timeout_s)
    except (asyncpg.InvalidPasswordError, asyncpg.InvalidAuthorizationSpecificationError) as e:
        raise SettingsError(f"{_where(uri)} refuses us: {e}; correct user and password in database.uri") from e
    except asyncpg.InvalidCatalogNameError as e:
        raise SettingsError(f"{_where(uri)}: {e}; create it or correct database.uri") from e
    except (asyncpg.ClientConfigurationError, ValueError) as e:
        raise SettingsError(f"database.uri cannot be used: {e}; write postgresql://user:password@host:port/name") from e
    except (asyncpg.PostgresError, asyncpg.InterfaceError, OSError, TimeoutError) as e:
        raise Unavailable(f"{_where(uri)} does not answer: {e!r}") from e


async def _version(connection: Connection, schema: str) -> int:
    if await connection.fetchval("SELECT to_regclass($1)", f'"{schema}".meta') is None:
        return 0
    value = await connection.fetchval("SELECT value FROM meta WHERE key = 'schema_version'")
    return int(value or 0)


async def _first(connection: Connection, partitions: int) -> None:
    await connection.execute(
        "INSERT INTO meta (key, value) VALUES ('schema_version', '0'), ('partitions', $1)", str(partitions)
    )
    for table in ("bus_head", "bus_owner"):
        await connection.execute(f"INSERT INTO {table} (partition) SELECT generate_series(0, $1 - 1)", partitions)


async def _check_partitions(connection: Connection, partitions: int) -> None:
    stored = int(await connection.fetchval("SELECT value FROM meta WHERE key = 'partitions'"))
    if stored != partitions:
        raise SettingsError(
            f"bus.partitions: {partitions} cannot be used: the database was made with {stored}, and a conversation's order"
            f" hangs on it; set bus.partitions to {stored} in plato.yaml or PLATO_BUS__PARTITIONS"
        )


async def _check_bus(connection: Connection, bus: str) -> None:
    """Positions in the database are one bus's own: on another they would skip records, or wait for some that never come."""
    stored = await connection.fetchval("SELECT value FROM meta WHERE key = 'bus'")
    if stored is None:
        # Made before this was kept: then it was PostgreSQL's, if any record was ever appended.
        if bus != POSTGRES_BUS and await connection.fetchval("SELECT max(next_position) > 1 FROM bus_head"):
            stored = POSTGRES_BUS
        else:
            await connection.execute("INSERT INTO meta (key, value) VALUES ('bus', $1) ON CONFLICT DO NOTHING", bus)
            stored = await connection.fetchval("SELECT value FROM meta WHERE key = 'bus'")
    if stored != bus:
        raise SettingsError(
            f"bus.type: this database belongs to the bus [{stored}], and the settings name [{bus}]; its positions mean"
            " nothing there. Name that bus again, or another database or schema (docs/kafka.md says how to change)"
        )


async def _store(connection: Connection, key: str, value: str) -> None:
    await connection.execute(
        "INSERT INTO meta (key, value) VALUES ($1, $2) ON CONFLICT (key) DO UPDATE SET value = excluded.value",
        key,
        value,
    )


async def _refuse_another(connection: Connection, owner: Owner | None, uri: str, schema: str) -> None:
    """Raises NotAlone for a schema with another one's mark."""
    if owner is not None:
        held = await connection.fetchval("SELECT value FROM meta WHERE key = 'cluster'")
        owner.check(held, f"{_where(uri)}, schema {schema!r},", "database.schema")


async def _refuse_newer(connection: Connection, version: int, uri: str) -> None:
    """Raises SettingsError for a newer schema, unless the migration that made it says that this program reads it."""
    if version <= code_version():
        return
    oldest = await connection.fetchval("SELECT value FROM meta WHERE key = 'readable_by'")
    if oldest is None or int(oldest) > code_version():
        raise SettingsError(
            f"{_where(uri)} has schema version {version}, newer than this program's {code_version()}"
            f" and readable from {oldest or version} on; start a newer version of Plato"
        )


def _where(uri: str) -> str:
    """The database in words, without its password."""
    try:
        parts = urlsplit(uri)
        return f"database {parts.path.lstrip('/') or '?'} at {parts.hostname}:{parts.port or 5432}"
    except ValueError:
        return "database"
