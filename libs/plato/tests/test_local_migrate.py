"""`plato db migrate`: how long it waits for a database, and how long one that answers may take, are two things."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest
from plato.adapters import schema_pg
from plato.core.errors import Unavailable
from plato.local import database
from plato.runtime.settings import Settings, load


@pytest.fixture
def settings() -> Settings:
    return load(environ={"PLATO_DATABASE__URI": "postgresql://u@127.0.0.1:1/d"})


@pytest.mark.parametrize("wait_s", [0, 15])
async def test_a_migration_that_has_found_its_database_is_not_cut_off_by_a_short_wait(
    settings: Settings, wait_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A large table takes minutes; a Job that gives up after each 15 s would never bring it to an end."""
    bounds: list[asyncio.Timeout] = []
    left_s: list[float] = []

    async def migrate(*_: object) -> int:
        left_s.append((bounds[0].when() or 0.0) - asyncio.get_running_loop().time())
        return 4

    def timeout(delay_s: float) -> asyncio.Timeout:
        bounds.append(asyncio.timeout(delay_s))
        return bounds[0]

    monkeypatch.setattr(schema_pg, "migrate", migrate)
    monkeypatch.setattr(database, "asyncio", SimpleNamespace(timeout=timeout, sleep=asyncio.sleep))
    assert await database.migrate_when_it_answers(settings, wait_s, print) == 4
    assert left_s[0] > database.RUN_S / 2


async def test_a_migration_that_hangs_ends_in_words(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    async def migrate(*_: object) -> int:
        return await asyncio.Event().wait()

    monkeypatch.setattr(schema_pg, "migrate", migrate)
    monkeypatch.setattr(database, "RUN_S", 0.05)
    with pytest.raises(Unavailable, match=r"did not end within 0\.05 s: the database is busy or hangs"):
        await database.migrate_when_it_answers(settings, 0, print)
