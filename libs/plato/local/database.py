"""The embedded cluster's database (role, database, schema), and a bus that lies elsewhere. Errors are one line."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Final

from plato.core.errors import PlatoError, Unavailable
from plato.local.folder import DataFolder, LocalError
from plato.local.servers import PostgresServer, new_password, write_private
from plato.runtime.settings import Settings, SettingsError

NAME = "plato"
"""Name of the role and of the database."""
_AGAIN_S: Final = 0.5
RUN_S: Final = 600.0
"""How long a migration that has found its database may take, however short the wait for that: it may have a large table to
change, or to wait for the locks of a busy cluster."""


async def prepare(server: PostgresServer, folder: DataFolder) -> str:
    """Makes the role and the database where they are missing. Returns the role's URI.

    The role's password is set again at each start, so that its file is the only place that must be right.
    """
    import asyncpg

    path = folder.database_password
    if not path.exists():
        write_private(path, new_password() + "\n")
    password = path.read_text(encoding="utf-8").strip()
    connection = await asyncpg.connect(server.uri, timeout=10)
    try:
        quoted = "'" + password.replace("'", "''") + "'"
        known = await connection.fetchval("select 1 from pg_roles where rolname = $1", NAME)
        await connection.execute(f"{'alter' if known else 'create'} role {NAME} login password {quoted}")
        if not await connection.fetchval("select 1 from pg_database where datname = $1", NAME):
            await connection.execute(f"create database {NAME} owner {NAME}")
    finally:
        await connection.close()
    return f"postgresql://{NAME}:{password}@127.0.0.1:{server.port}/{NAME}"


async def migrate(uri: str, schema: str, partitions: int) -> int:
    """Brings the schema up to this program's version; returns the version. Raises LocalError in one line."""
    from plato.adapters import schema_pg

    try:
        return await schema_pg.migrate(uri, schema, partitions)
    except (SettingsError, PlatoError) as e:
        raise LocalError(str(e)) from e


async def migrate_when_it_answers(
    settings: Settings, wait_s: float, say: Callable[[str], None], cluster: str = "", adopts: str = ""
) -> int:
    """As `migrate`, for a database that may be starting beside us: tried again for wait_s; `say` is told each new reason.
    One that answers is given RUN_S.

    cluster: "<namespace>/<name>" of the PlatoCluster that the schema and the store are marked with, as its own; empty: no
    mark is set or asked for. adopts: whose marks it may replace, with commas between.
    Raises SettingsError for what waiting does not mend (NotAlone: schema or store are another cluster's), and Unavailable.
    """
    from plato.adapters import schema_pg
    from plato.adapters.owner import Owner
    from plato.adapters.valkey import ValkeyStore

    database, store = settings.database, settings.store
    owner = Owner(cluster, adopts) if cluster else None

    async def claim_store() -> None:
        assert owner is not None
        there = await ValkeyStore.connect(store.url, store.key_prefix)
        try:
            await there.claim(owner)
        finally:
            await there.close()

    end_s = time.monotonic() + wait_s
    told = ""
    while True:
        try:
            async with asyncio.timeout(max(RUN_S, wait_s)):
                return await schema_pg.migrate(
                    database.uri,
                    database.schema_name,
                    settings.bus.partitions,
                    owner,
                    claim_store if owner is not None else None,
                )
        except TimeoutError as e:
            raise Unavailable(
                f"the migration did not end within {max(RUN_S, wait_s):g} s: the database is busy or hangs"
            ) from e
        except Unavailable as e:
            if time.monotonic() + _AGAIN_S >= end_s:
                raise
            if str(e) != told:
                told = str(e)
                say(f"{told}; trying again")
        await asyncio.sleep(_AGAIN_S)


async def prepare_bus(settings: Settings, wait_s: float, say: Callable[[str], None]) -> str:
    """Makes Kafka's topic where it is missing, trying again for wait_s; what stands, in words; "" for a bus in the database.

    Raises SettingsError for what waiting does not mend, and Unavailable.
    """
    from plato.adapters import bus

    end_s = time.monotonic() + wait_s
    told = ""
    while True:
        try:
            return await bus.prepare(settings)
        except Unavailable as e:
            if time.monotonic() + _AGAIN_S >= end_s:
                raise
            if str(e) != told:
                told = str(e)
                say(f"{told}; trying again")
        await asyncio.sleep(_AGAIN_S)


async def durability(settings: Settings) -> str:
    """What bus and database promise about an acknowledged message, in words (R11). Raises LocalError."""
    from plato.adapters import bus

    try:
        return (await bus.durability(settings)).promise
    except (SettingsError, PlatoError) as e:
        raise LocalError(str(e)) from e
