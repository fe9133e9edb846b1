"""Uploads: what fails leaves nothing, slow ones keep nobody out, and what nobody uses goes with its bytes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from uuid import uuid4

import pytest
from plato.adapters.blobs import FolderBlobs
from plato.adapters.pg import Database
from plato.adapters.schema_pg import migrate
from plato.core.codes import Code
from plato.core.errors import Unavailable
from plato_msg.attachments import UPLOADS_OF_ONE, Attachments, Limits, Refused, safe_name
from plato_msg.attachments_pg import PgAttachments


@pytest.fixture
async def database(postgres_uri: str) -> AsyncIterator[Database]:
    schema = f"files_{uuid4().hex[:12]}"
    await migrate(postgres_uri, schema, 4)
    made = Database(postgres_uri, schema)
    yield made
    await made.close()


async def bytes_of(*parts: bytes) -> AsyncIterator[bytes]:
    for part in parts:
        yield part


def stored(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


async def test_what_nobody_uses_is_removed_with_its_bytes(database: Database, tmp_path: Path) -> None:
    store = PgAttachments(database)
    attachments = Attachments(store, FolderBlobs(tmp_path), Limits(100, ("text/plain",), 100, -60.0))
    row = await attachments.upload("ann", "a.txt", "text/plain; charset=utf-8", bytes_of(b"some ", b"words"))
    read = [chunk async for chunk in attachments.read(row.attachment_id, 0, row.size_bytes - 1)]
    assert b"".join(read) == b"some words"
    assert await attachments.find(row.attachment_id, "ann") == row
    assert len(stored(tmp_path)) == 1
    assert await attachments.sweep() == 1
    assert stored(tmp_path) == []
    assert await attachments.find(row.attachment_id, "ann") is None
    assert await attachments.sweep() == 0


async def test_an_upload_that_fails_leaves_nothing_that_is_found(database: Database, tmp_path: Path) -> None:
    class Away(FolderBlobs):
        async def put(self, key: str, source: Path) -> None:
            raise Unavailable("away")

    attachments = Attachments(PgAttachments(database), Away(tmp_path), Limits(100, ("text/plain",), 1_000, 3_600))
    with pytest.raises(Unavailable):
        await attachments.upload("ann", "a", "text/plain", bytes_of(b"x"))
    async with database.connection() as connection:
        (row,) = await connection.fetch("SELECT attachment_id, stored FROM im_attachment")
    assert not row[1]
    assert await attachments.find(row[0], "ann") is None
    for content, code in ((b"x" * 101, Code.BODY_TOO_LARGE), (b"", Code.MALFORMED)):
        with pytest.raises(Refused) as refused:
            await attachments.upload("ann", "a", "text/plain", bytes_of(content))
        assert refused.value.code == code


async def test_slow_uploads_of_one_user_keep_nobody_else_out(database: Database, tmp_path: Path) -> None:
    attachments = Attachments(PgAttachments(database), FolderBlobs(tmp_path), Limits(100, ("text/plain",), 100, 60))
    begun = asyncio.Semaphore(0)
    go = asyncio.Event()

    async def slow() -> AsyncIterator[bytes]:
        begun.release()
        await go.wait()
        yield b"x"

    under_way = [
        asyncio.create_task(attachments.upload("ann", "a", "text/plain", slow())) for _ in range(UPLOADS_OF_ONE)
    ]
    for _ in under_way:
        await begun.acquire()
    with pytest.raises(Refused) as refused:
        await attachments.upload("ann", "a", "text/plain", bytes_of(b"x"))
    assert (refused.value.code, refused.value.status) == (Code.TOO_FAST, 429)
    await attachments.upload("ben", "a", "text/plain", bytes_of(b"x" * 99))
    await attachments.upload("ben", "a", "text/plain", bytes_of(b"x"))
    with pytest.raises(Refused, match="uploaded much"):
        await attachments.upload("ben", "a", "text/plain", bytes_of(b"x"))
    go.set()
    await asyncio.gather(*under_way)


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ("cat.jpg", "cat.jpg"),
        ("C:\\tmp\\cat.jpg", "cat.jpg"),
        ("../../etc/passwd", "passwd"),
        ("", "file"),
        ("...", "file"),
        ("a\u202egpj.exe", "a_gpj.exe"),
        ("a\u200bb\u200d.jpg", "ab.jpg"),
        ("\u3164", "file"),
        ('a"b\r\n', "a_b__"),
        ("猫" * 100, "猫" * 66),
    ],
)
def test_a_name_is_a_name_and_no_path(given: str, name: str) -> None:
    assert safe_name(given) == name
