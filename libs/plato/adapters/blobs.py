"""Where the bytes of attachments lie: a folder, or a store that speaks S3. A blob is written whole or not at
all, and never changed.

FolderBlobs   <folder>/<first two characters of the key>/<key>, written beside it, synced and renamed
S3Blobs       plato.adapters.blobs_s3
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import tempfile
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, BinaryIO, Final, TypeVar

from plato.adapters.blobs_s3 import S3Blobs
from plato.core.errors import Unavailable
from plato.ports import BlobStore
from plato.runtime.settings import AttachmentSettings

CHUNK_BYTES: Final = 256 << 10
T = TypeVar("T")


class FolderBlobs:
    """BlobStore in a folder, which several processes of one machine, or a volume that they share, may have in common."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    async def put(self, key: str, source: Path) -> None:
        """See the port."""
        await _off_loop(self._put, key, source)

    async def read(self, key: str, first: int, last: int) -> AsyncIterator[bytes]:
        """See the port."""
        file = await _off_loop(self._open, key, first)
        try:
            left = last - first + 1
            while left > 0:
                chunk = await _off_loop(file.read, min(left, CHUNK_BYTES))
                if not chunk:
                    raise Unavailable(f"the blob {key} is shorter than it was")
                left -= len(chunk)
                yield chunk
        finally:
            file.close()

    async def delete(self, key: str) -> None:
        """See the port."""
        await _off_loop(self._delete, key)

    async def close(self) -> None:
        """See the port."""

    def _path(self, key: str) -> Path:
        return self._folder / key[:2] / key

    def _put(self, key: str, source: Path) -> None:
        path = self._path(key)
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        made, name = tempfile.mkstemp(prefix=".part-", dir=path.parent)
        try:
            with os.fdopen(made, "wb") as target, source.open("rb") as given:
                shutil.copyfileobj(given, target, CHUNK_BYTES)
                target.flush()
                os.fsync(target.fileno())
            Path(name).replace(path)
        except BaseException:
            with contextlib.suppress(OSError):
                Path(name).unlink()
            raise
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

    def _open(self, key: str, first: int) -> BinaryIO:
        file = self._path(key).open("rb")
        file.seek(first)
        return file

    def _delete(self, key: str) -> None:
        self._path(key).unlink(missing_ok=True)


def blob_store(settings: AttachmentSettings) -> BlobStore | None:
    """The store that the settings name; None: none, attachments are off. Raises SettingsError."""
    if settings.s3_url:
        return S3Blobs.of(settings)
    return FolderBlobs(settings.folder) if settings.folder is not None else None


async def _off_loop(call: Callable[..., T], *args: Any) -> T:
    """Runs what waits for a disk in a thread; what the file system raises becomes Unavailable."""
    try:
        return await asyncio.to_thread(call, *args)
    except OSError as e:
        raise Unavailable(f"the folder of attachments: {e.strerror or e}") from e
