"""The schema of the database: made once, whoever comes first; and what a process says about one that does not fit."""

from __future__ import annotations

import asyncio
from uuid import uuid4

import asyncpg
import pytest
from plato.adapters import schema_pg
from plato.core.errors import Unavailable
from plato.runtime.settings import SettingsError


def new_schema() -> str:
    return f"schema_{uuid4().hex[:12]}"


async def test_migrating_twice_and_at_the_same_time_makes_it_once(postgres_uri: str) -> None:
    schema = new_schema()
    versions = await asyncio.gather(*(schema_pg.migrate(postgres_uri, schema, 16) for _ in range(4)))
    assert set(versions) == {schema_pg.code_version()}
    assert await schema_pg.migrate(postgres_uri, schema, 16) == schema_pg.code_version()
    assert await schema_pg.check(postgres_uri, schema, 16) == schema_pg.code_version()


async def test_ids_sort_by_their_bytes(postgres_uri: str) -> None:
    schema = new_schema()
    await schema_pg.migrate(postgres_uri, schema, 1)
    names = ["a", "B", "é", "z", "Z", "d:x", "_", "漢", "😀", "ﬀ"]
    connection = await asyncpg.connect(postgres_uri, server_settings={"search_path": schema})
    try:
        await connection.execute(
            "INSERT INTO im_conversation (conversation_id, kind) SELECT unnest($1::text[]), 'open'", names
        )
        rows = await connection.fetch("SELECT conversation_id FROM im_conversation ORDER BY conversation_id")
        columns = await connection.fetch(
            "SELECT table_name, column_name, collation_name FROM information_schema.columns WHERE table_schema = $1"
            " AND column_name IN ('conversation_id', 'user_id', 'from_user')",
            schema,
        )
    finally:
        await connection.close()
    assert [r[0] for r in rows] == sorted(names, key=str.encode)
    assert len(columns) >= 15
    assert {c["collation_name"] for c in columns} == {"C"}


async def test_a_database_without_the_schema_says_what_to_run(postgres_uri: str) -> None:
    with pytest.raises(schema_pg.NotMigrated, match="plato db migrate"):
        await schema_pg.check(postgres_uri, new_schema(), 16)
    assert issubclass(schema_pg.NotMigrated, Unavailable)  # callers wait: the migration runs beside them


def as_one_older(monkeypatch: pytest.MonkeyPatch) -> int:
    """Makes this program the one before it; returns its version."""
    files = schema_pg.migrations()
    older = {number: text for number, text in files.items() if number < len(files)}
    monkeypatch.setattr(schema_pg, "migrations", lambda: older)
    return len(older)


async def test_a_program_works_on_the_schema_of_the_version_after_it(
    postgres_uri: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An upgrade migrates first and rolls afterwards, and a rollback runs the older migration again: neither may end a pod
    of the version before, nor set the schema back."""
    schema, newest = new_schema(), schema_pg.code_version()
    await schema_pg.migrate(postgres_uri, schema, 16)
    assert as_one_older(monkeypatch) == newest - 1
    assert await schema_pg.check(postgres_uri, schema, 16) == newest
    assert await schema_pg.migrate(postgres_uri, schema, 16) == newest
    assert await schema_pg.check(postgres_uri, schema, 16) == newest
    with pytest.raises(SettingsError, match="partitions"):
        await schema_pg.check(postgres_uri, schema, 32)


async def test_an_older_schema_is_brought_up_and_says_who_reads_it(
    postgres_uri: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also one that was made before `readable_by` was stored."""
    schema, newest = new_schema(), schema_pg.code_version()
    with monkeypatch.context() as earlier:
        as_one_older(earlier)
        await schema_pg.migrate(postgres_uri, schema, 16)
    connection = await asyncpg.connect(postgres_uri)
    try:
        await connection.execute(f"DELETE FROM {schema}.meta WHERE key = 'readable_by'")
        assert await schema_pg.migrate(postgres_uri, schema, 16) == newest
        stored = await connection.fetchval(f"SELECT value FROM {schema}.meta WHERE key = 'readable_by'")
    finally:
        await connection.close()
    assert int(stored) == schema_pg.readable_by(newest, schema_pg.migrations()[newest])


def test_each_migration_leaves_the_version_before_it_working() -> None:
    """What an old program cannot read is taken away by a later release's migration, when nothing old runs any more."""
    for number, text in schema_pg.migrations().items():
        assert number == 1 or schema_pg.readable_by(number, text) < number
    for bad in ("CREATE TABLE x ();", "-- readable by: 3", "-- readable by: 0"):
        with pytest.raises(RuntimeError, match="migration 3 must say"):
            schema_pg.readable_by(3, bad)


@pytest.mark.parametrize("readable", [None, 998])
async def test_a_newer_schema_is_refused_in_words(postgres_uri: str, readable: int | None) -> None:
    schema = new_schema()
    await schema_pg.migrate(postgres_uri, schema, 16)
    connection = await asyncpg.connect(postgres_uri)
    await connection.execute(f"UPDATE {schema}.meta SET value = '999' WHERE key = 'schema_version'")
    await connection.execute(f"DELETE FROM {schema}.meta WHERE key = 'readable_by'")
    if readable:
        await connection.execute(f"INSERT INTO {schema}.meta VALUES ('readable_by', '{readable}')")
    await connection.close()
    for refused in (schema_pg.check(postgres_uri, schema, 16), schema_pg.migrate(postgres_uri, schema, 16)):
        with pytest.raises(SettingsError, match=r"version 999, newer than .* start a newer version of Plato"):
            await refused


async def test_another_number_of_partitions_is_refused_in_words(postgres_uri: str) -> None:
    schema = new_schema()
    await schema_pg.migrate(postgres_uri, schema, 16)
    for refused in (schema_pg.check(postgres_uri, schema, 32), schema_pg.migrate(postgres_uri, schema, 32)):
        with pytest.raises(SettingsError, match=r"bus.partitions: 32 cannot be used: .* 16"):
            await refused


async def test_a_wrong_password_is_told_without_printing_it(postgres_uri: str) -> None:
    head, _, tail = postgres_uri.rpartition("@")
    wrong = head.rpartition(":")[0] + ":secret@" + tail
    with pytest.raises(SettingsError, match=r"database\.uri") as caught:
        await schema_pg.check(wrong, "plato", 16)
    assert "secret" not in str(caught.value)


async def test_a_missing_database_is_told(postgres_uri: str) -> None:
    missing = postgres_uri.rpartition("/")[0] + "/no_such_database"
    with pytest.raises(SettingsError, match="no_such_database"):
        await schema_pg.check(missing, "plato", 16)


async def test_a_server_that_is_away_is_unavailable() -> None:
    with pytest.raises(Unavailable):
        await schema_pg.check("postgresql://x:y@127.0.0.1:1/plato", "plato", 16)


@pytest.mark.parametrize(
    ("settings", "level"),
    [
        (("on", "on", "on", ""), "process"),
        (("on", "on", "on", "FIRST 1 (a)"), "node"),
        (("on", "on", "remote_apply", "a"), "node"),
        (("off", "on", "on", "a"), "none"),
        (("on", "off", "on", ""), "none"),
        (("on", "on", "off", "a"), "none"),
        (("on", "on", "local", "a"), "none"),
    ],
)
def test_r11_durable_is_what_the_settings_promise(settings: tuple[str, str, str, str], level: str) -> None:
    assert schema_pg.judge_durability(*settings).level == level


async def test_r11_a_single_node_promises_process_crashes_only(postgres_uri: str) -> None:
    found = await schema_pg.durability(postgres_uri)
    assert found.level == "process"
    assert found.promise == "single node: promises process crashes only"
