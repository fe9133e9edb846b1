"""The store of blobs: a folder, and a store that speaks S3. Whole or not at all, ranges, and words when it is away."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from plato.adapters.blobs import FolderBlobs, blob_store
from plato.adapters.blobs_s3 import S3Blobs
from plato.core import sigv4
from plato.core.errors import Unavailable
from plato.ports import BlobStore
from plato.runtime.settings import AttachmentSettings, SettingsError

from tests.ports import free_ports
from tools.s3_server.server import S3Server

REQUIRED = "PLATO_S3_REQUIRED"
"""Set by `make test-product`: else the server is not started, since it and its environment take their time."""


@pytest.fixture(scope="module")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    if not os.environ.get(REQUIRED):
        pytest.skip("`make test-product` runs it on a store that speaks S3")
    server = S3Server(free_ports(1)[0], tmp_path_factory.mktemp("s3") / "log")
    server.start()
    yield server
    server.kill()


@pytest.fixture(params=["folder", "s3"])
def kind(request: pytest.FixtureRequest) -> S3Server | None:
    found: S3Server | None = request.getfixturevalue("s3") if request.param == "s3" else None
    return found


@pytest.fixture
async def blobs(kind: S3Server | None, tmp_path: Path) -> AsyncIterator[BlobStore]:
    secret = tmp_path / "secret"
    if kind is not None:
        secret.write_text(kind.secret_key + "\n", encoding="utf-8")
        settings = AttachmentSettings(s3_url=kind.url, s3_access_key=kind.access_key, s3_secret_key_file=secret)
    else:
        settings = AttachmentSettings(folder=tmp_path / "blobs")
    made = blob_store(settings)
    assert made is not None
    yield made
    await made.close()


def source(folder: Path, content: bytes) -> Path:
    path = folder / "source"
    path.write_bytes(content)
    return path


async def read(blobs: BlobStore, key: str, first: int, last: int) -> bytes:
    return b"".join([chunk async for chunk in blobs.read(key, first, last)])


async def test_a_blob_is_read_as_it_was_put(blobs: BlobStore, tmp_path: Path) -> None:
    content = os.urandom(700_001)
    await blobs.put("AbC-_9.thumbnail", source(tmp_path, content))
    await blobs.put("AbC-_9.thumbnail", source(tmp_path, content))
    size = len(content)
    for first, last in ((0, size - 1), (0, 0), (1, 299_999), (size - 3, size - 1), (5, 4)):
        assert await read(blobs, "AbC-_9.thumbnail", first, last) == content[first : last + 1]
    await blobs.delete("AbC-_9.thumbnail")
    await blobs.delete("AbC-_9.thumbnail")
    with pytest.raises(Unavailable):
        await read(blobs, "AbC-_9.thumbnail", 0, 1)


async def test_an_empty_file_and_many_at_once(blobs: BlobStore, tmp_path: Path) -> None:
    path = source(tmp_path, b"x" * 5_000)
    await asyncio.gather(*(blobs.put(f"many{n}", path) for n in range(20)))
    assert all([await read(blobs, f"many{n}", 0, 4_999) == b"x" * 5_000 for n in range(20)])
    await blobs.put("none", source(tmp_path, b""))
    assert await read(blobs, "none", 0, -1) == b""


async def test_a_blob_that_is_shorter_than_its_row_says_is_a_failure(blobs: BlobStore, tmp_path: Path) -> None:
    await blobs.put("short", source(tmp_path, b"12345"))
    with pytest.raises(Unavailable):
        await read(blobs, "short", 0, 9)


async def test_a_folder_shows_no_half_blob(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blobs = FolderBlobs(tmp_path / "blobs")

    def full(fd: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(Unavailable, match="No space left"):
        await blobs.put("half", source(tmp_path, b"x" * 1_000))
    assert [path for path in (tmp_path / "blobs").rglob("*") if path.is_file()] == []


async def test_a_store_that_is_away_or_refuses_is_unavailable_in_words(tmp_path: Path) -> None:
    (port,) = free_ports(1)
    blobs = S3Blobs(f"http://127.0.0.1:{port}/files", sigv4.Keys("a", "b", "us-east-1"))
    with pytest.raises(Unavailable, match="does not answer"):
        await read(blobs, "key", 0, 1)
    with pytest.raises(Unavailable, match="does not answer"):
        await blobs.delete("key")
    await blobs.close()


async def test_a_wrong_secret_is_refused_by_the_store(s3: S3Server, tmp_path: Path) -> None:
    blobs = S3Blobs(s3.url, sigv4.Keys(s3.access_key, "wrong", "us-east-1"))
    with pytest.raises(Unavailable, match="answered 403"):
        await read(blobs, "key", 0, 1)
    await blobs.close()


def test_settings_that_do_not_fit_say_so(tmp_path: Path) -> None:
    assert blob_store(AttachmentSettings()) is None
    with pytest.raises(ValueError, match="s3_access_key"):
        AttachmentSettings(s3_url="http://s3/b")
    with pytest.raises(ValueError, match="leave one"):
        AttachmentSettings(s3_url="http://s3/b", s3_access_key="a", s3_secret_key_file=tmp_path, folder=tmp_path)
    named = AttachmentSettings(s3_url="http://s3/b", s3_access_key="a", s3_secret_key_file=tmp_path / "none")
    with pytest.raises(SettingsError, match="s3_secret_key_file"):
        blob_store(named)
