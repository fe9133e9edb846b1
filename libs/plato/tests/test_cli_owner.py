"""`plato db migrate --cluster`: a schema and a store belong to one PlatoCluster, and another one is told whose they are."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable, Iterator
from urllib.parse import urlsplit

import asyncpg
import pytest
from plato.adapters import schema_pg
from plato.adapters.owner import of_environment
from plato.adapters.valkey import ValkeyStore
from plato.api.names import EXIT_NOT_ALONE
from plato.cli import app
from plato.runtime.settings import NotAlone
from redis import Redis

Migrate = Callable[..., tuple[int, str]]
SCHEMAS = ("own_a", "own_b")
REMEDIES = ("database.schema", "store.keyPrefix")


@pytest.fixture
def migrate(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], postgres_uri: str, valkey_url: str
) -> Iterator[Migrate]:
    """migrate(cluster, schema=…, prefix=…, adopt=…) as the Job does it, by environment: (exit code, stderr)."""
    for name in [n for n in os.environ if n.startswith("PLATO_")]:
        monkeypatch.delenv(name)
    monkeypatch.chdir("/")

    def call(
        cluster: str, schema: str = "own_a", prefix: str = "own-a:", adopt: str = "", store: str = valkey_url
    ) -> tuple[int, str]:
        for name, value in {
            "DATABASE__URI": postgres_uri, "DATABASE__SCHEMA_NAME": schema, "STORE__URL": store,
            "STORE__KEY_PREFIX": prefix, "CLUSTER": cluster, "ADOPT": adopt,
        }.items():  # fmt: skip
            monkeypatch.setenv(f"PLATO_{name}", value)
        monkeypatch.setattr(sys, "argv", ["plato", "db", "migrate", "--wait-s", "0"])
        code = app.main()
        return code, capsys.readouterr().err

    yield call
    with Redis.from_url(valkey_url) as held:
        held.delete("own-a:{cluster}", "own-b:{cluster}")
    asyncio.run(_run(postgres_uri, *(f"drop schema if exists {schema} cascade" for schema in SCHEMAS)))


async def _run(uri: str, *statements: str) -> list[str | None]:
    connection = await asyncpg.connect(uri)
    try:
        return [await connection.fetchval(statement) for statement in statements]
    finally:
        await connection.close()


def marks(uri: str, url: str, schema: str = "own_a", prefix: str = "own-a:") -> tuple[str | None, str | None]:
    """(of the schema, of the store)."""
    there = f"select to_regclass('{schema}.meta')::text"
    mark = None
    if asyncio.run(_run(uri, there))[0] is not None:
        (mark,) = asyncio.run(_run(uri, f"select value from {schema}.meta where key = 'cluster'"))
    with Redis.from_url(url, decode_responses=True) as held:
        return mark, held.get(f"{prefix}{{cluster}}")


def test_another_clusters_schema_and_store_are_refused_in_words(
    migrate: Migrate, postgres_uri: str, valkey_url: str
) -> None:
    """Its shards would have greater fences and take every slot. What it named besides is left as it was."""
    assert migrate("im/demo")[0] == 0
    assert migrate("im/demo")[0] == 0  # deleted and created again, or a newer version
    where, kept = urlsplit(postgres_uri), urlsplit(valkey_url)
    for given, named, remedy in (
        ({"prefix": "own-b:"}, f"at {where.hostname}:{where.port}, schema 'own_a'", "database.schema"),
        ({"schema": "own_b"}, f"store redis://{kept.hostname}:{kept.port}/0, key prefix 'own-a:'", "store.keyPrefix"),
    ):
        code, said = migrate("shop/demo", **given)
        assert code == EXIT_NOT_ALONE
        assert said.startswith("plato: ")
        assert said.count("\n") == 1
        for words in (named, "PlatoCluster im/demo", f"give shop/demo another {remedy}", "plato.im/adopt=im/demo"):
            assert words in said, said
        assert all(secret is None or secret not in said for secret in (where.password, kept.password))
    assert marks(postgres_uri, valkey_url, "own_b", "own-b:") == (None, None)
    assert marks(postgres_uri, valkey_url) == ("im/demo", "im/demo")
    assert migrate("shop/demo", schema="own_b", prefix="own-b:")[0] == 0
    assert marks(postgres_uri, valkey_url, "own_b", "own-b:") == ("shop/demo", "shop/demo")


def test_a_mark_is_taken_over_by_who_names_its_owner(migrate: Migrate, postgres_uri: str, valkey_url: str) -> None:
    """A backup that is restored in another namespace. The one before is out from then on."""
    assert migrate("im/demo")[0] == 0
    assert migrate("new/demo", adopt="im/other")[0] == EXIT_NOT_ALONE
    assert migrate("new/demo", adopt="im/demo")[0] == 0
    assert marks(postgres_uri, valkey_url) == ("new/demo", "new/demo")
    assert migrate("new/demo", adopt="im/demo")[0] == 0
    assert migrate("new/demo")[0] == 0
    assert migrate("im/demo")[0] == EXIT_NOT_ALONE


def test_a_schema_of_one_and_a_store_of_another_are_taken_over_together(
    migrate: Migrate, postgres_uri: str, valkey_url: str
) -> None:
    """Each refusal tells the whole value that helps, those named before included."""
    assert migrate("im/demo", prefix="own-b:")[0] == 0
    assert migrate("shop/demo", schema="own_b")[0] == 0
    adopt = ""
    for named in ("im/demo", "im/demo,shop/demo"):
        code, said = migrate("new/demo", adopt=adopt)
        assert code == EXIT_NOT_ALONE
        adopt = said.strip().rpartition("plato.im/adopt=")[2]
        assert adopt == named
    assert migrate("new/demo", adopt=" im/demo, shop/demo ")[0] == 0
    assert marks(postgres_uri, valkey_url) == ("new/demo", "new/demo")
    assert migrate("shop/demo", schema="own_b")[0] == EXIT_NOT_ALONE


def test_without_a_cluster_nothing_is_marked_or_asked(migrate: Migrate, postgres_uri: str, valkey_url: str) -> None:
    assert migrate("", store="redis://127.0.0.1:1/0")[0] == 0
    assert marks(postgres_uri, valkey_url) == (None, None)
    assert migrate("im/demo")[0] == 0  # one that ran before there were marks
    assert marks(postgres_uri, valkey_url) == ("im/demo", "im/demo")
    assert migrate("")[0] == 0


def test_who_starts_reads_the_marks_and_goes_on_where_they_are_its_own_or_none(
    migrate: Migrate, postgres_uri: str, valkey_url: str
) -> None:
    """None: not migrated yet, which the check of the schema tells, or older than marks. Another's counts before all else: an
    older schema of theirs is not waited for."""

    async def look(cluster: str, schema: str, prefix: str) -> list[str]:
        """What the database and the store say; "" for consent."""
        store, said = await ValkeyStore.connect(valkey_url, prefix), []
        own = of_environment({"PLATO_CLUSTER": cluster})
        for asked in (schema_pg.check(postgres_uri, schema, 64, owner=own), store.check(own)):
            try:
                await asked
                said.append("")
            except (NotAlone, schema_pg.NotMigrated) as e:
                said.append(f"{type(e).__name__}: {e}")
        await store.close()
        return said

    assert migrate("im/demo")[0] == migrate("", schema="own_b")[0] == 0
    for free in (("im/demo", "own_a", "own-a:"), ("shop/demo", "own_b", "own-b:"), ("", "own_a", "own-a:")):
        assert asyncio.run(look(*free)) == ["", ""]
    asyncio.run(_run(postgres_uri, "update own_a.meta set value = '1' where key = 'schema_version'"))
    for said, remedy in zip(asyncio.run(look("shop/demo", "own_a", "own-a:")), REMEDIES, strict=True):
        assert said.startswith("NotAlone: ")
        assert f"give shop/demo another {remedy}, or correct the Secret that leads there" in said
    assert asyncio.run(look("shop/demo", "own_none", "own-b:"))[0].startswith("NotMigrated: ")
    assert marks(postgres_uri, valkey_url, "own_b", "own-b:") == (None, None)
    assert of_environment({"PLATO_CLUSTER": ""}) is None


def test_nothing_is_marked_while_the_store_is_away(migrate: Migrate, postgres_uri: str, valkey_url: str) -> None:
    code, said = migrate("im/demo", store="redis://127.0.0.1:1/0")
    assert code == 1
    assert "store redis://127.0.0.1:1/0" in said
    assert marks(postgres_uri, valkey_url) == (None, None)
