"""Attachments: uploads to the store of blobs, their rows, who may fetch them, and the removal of what nobody uses.

    upload   owner's room → bytes to a file of ours, counted and hashed → what they are → row (hidden) → blobs → row (shown)
    fetch    row, if the reader may → bytes of the blob, a range of them
    sweep    unused for keep_unused_s → hidden for good → blobs → row

The name and the media type are the sender's words: a picture is what its first bytes say, and everything else is handed out
as a file to be saved. What is answered to somebody who may not read an attachment is what is answered where there is none.
Memory: a chunk per upload and per fetch; disk: UPLOADS times bytes_max.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
import secrets
import tempfile
from collections import Counter as CountOf
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from plato.core.codes import Code
from plato.core.errors import PeerError, Unavailable
from plato.core.visible import plain
from plato.ports import BlobStore
from plato.runtime import logs
from plato.runtime.settings import AttachmentSettings
from prometheus_client import Counter

from plato_msg import pictures
from plato_msg.attachments_pg import PgAttachments, Stored

UPLOADS: Final = 8
"""At once, per process."""
UPLOADS_OF_ONE: Final = 3
"""Of one user at once, per process: so that slow ones keep nobody out."""
RECEIVE_S: Final = 300.0
NAME_BYTES: Final = 200
WRITE_BYTES: Final = 256 << 10
SWEEP_S: Final = 300.0
SWEEP_PAGE: Final = 100
SWEEP_PAUSE_S: Final = 1.0
_uploaded = Counter("plato_msg_uploaded_bytes_total", "Bytes of attachments that were stored.")
_TYPE: Final = re.compile(r"[a-z0-9][a-z0-9!#$&^_.+-]{0,63}/[a-z0-9][a-z0-9!#$&^_.+-]{0,63}")
_ID: Final = re.compile(r"[A-Za-z0-9_-]{22}")
_UNSAFE: Final = re.compile(r'[\x00-\x1f\x7f-\x9f/\\:*?"<>|\u200e\u200f\u202a-\u202e\u2066-\u2069]')
"""Of a file's name: what other systems read as a path, and what turns the direction of text, so that "gpj.exe" is shown as
"exe.jpg". What shows nothing is taken away after that (plato.core.visible)."""


class Refused(PeerError):
    """An upload that is refused. status: of HTTP."""

    def __init__(self, code: Code, detail: str, status: int) -> None:
        super().__init__(code, detail)
        self.detail = detail
        self.status = status


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of uploads. types: "audio/*" stands for every subtype."""

    bytes_max: int
    types: tuple[str, ...]
    unused_bytes_max: int
    keep_unused_s: float

    @classmethod
    def of(cls, settings: AttachmentSettings) -> Limits:
        """As the settings say."""
        return cls(settings.bytes_max, settings.types, settings.unused_bytes_max, settings.keep_unused_s)


class Attachments:
    """The attachments of one msg process. `run` removes what is unused."""

    def __init__(self, store: PgAttachments, blobs: BlobStore | None, limits: Limits) -> None:
        """blobs None: attachments are off, in words."""
        self._store = store
        self._blobs = blobs
        self.limits = limits
        self._pictures = pictures.Pictures()
        self._turns = asyncio.Semaphore(UPLOADS)
        self._under_way: CountOf[str] = CountOf()
        self._log = logs.get("attachments")

    async def upload(self, owner: str, name: str, media_type: str, chunks: AsyncIterator[bytes]) -> Stored:
        """Takes an upload. Raises Refused, and Unavailable: repeat, nothing is left of it that anybody finds."""
        if self._blobs is None:
            raise Refused(
                Code.UNAVAILABLE, "attachments are off here: set attachments.folder or attachments.s3_url", 501
            )
        claimed = media_type.partition(";")[0].strip().lower() or "application/octet-stream"
        if await self._store.unused_bytes(owner) >= self.limits.unused_bytes_max:
            raise Refused(
                Code.TOO_FAST, "you have uploaded much that no message references yet; send it, or wait a day", 429
            )
        if self._under_way[owner] >= UPLOADS_OF_ONE:
            raise Refused(Code.TOO_FAST, f"you have {UPLOADS_OF_ONE} uploads under way; wait for one of them", 429)
        self._under_way[owner] += 1
        try:
            return await self._take(owner, name, claimed, chunks)
        finally:
            self._under_way[owner] -= 1
            if not self._under_way[owner]:
                del self._under_way[owner]

    async def _take(self, owner: str, name: str, claimed: str, chunks: AsyncIterator[bytes]) -> Stored:
        assert self._blobs is not None, "upload looked"
        async with self._turns:
            with tempfile.TemporaryDirectory(prefix="plato-upload-") as folder:
                source, thumbnail = Path(folder) / "blob", Path(folder) / "thumbnail"
                try:
                    async with asyncio.timeout(RECEIVE_S):
                        first, size, digest = await self._receive(source, chunks)
                except TimeoutError:
                    raise Refused(Code.MALFORMED, f"the file did not come within {RECEIVE_S:.0f} s", 408) from None
                except OSError as e:
                    raise Unavailable(f"no room for an upload: {e}") from e
                row = await self._look(source, thumbnail, first, claimed)
                row = row._replace(
                    attachment_id=secrets.token_urlsafe(16),
                    owner=owner,
                    name=safe_name(name),
                    size_bytes=size,
                    sha256=digest,
                )
                await self._store.begin(row)
                await self._blobs.put(row.attachment_id, source)
                if row.thumbnail_type:
                    await self._blobs.put(thumbnail_key(row.attachment_id), thumbnail)
                await self._store.finish(row.attachment_id)
        _uploaded.inc(size)
        self._log.debug("uploaded", attachment_id=row.attachment_id, media_type=row.media_type, size_bytes=size)
        return row

    async def find(self, attachment_id: str, reader: str | None) -> Stored | None:
        """The attachment, if that user may read it; reader None: with authority. None: there is none for him."""
        if self._blobs is None or not _ID.fullmatch(attachment_id):
            return None
        return await self._store.find(attachment_id, reader)

    def read(self, key: str, first: int, last: int) -> AsyncIterator[bytes]:
        """The bytes from `first` to `last` of a blob: an attachment_id, or a thumbnail_key of one."""
        assert self._blobs is not None, "find found it"
        return self._blobs.read(key, first, last)

    async def run(self) -> None:
        """Removes what is unused until cancelled; each process does, and they take what they find."""
        while True:
            await asyncio.sleep(SWEEP_S)
            try:
                while await self.sweep():  # noqa: ASYNC110  # a pace, not a wait
                    await asyncio.sleep(SWEEP_PAUSE_S)
            except Unavailable as e:
                self._log.warning("unused attachments stay for now", reason=str(e))

    async def sweep(self) -> int:
        """Removes one page of what is unused; how many."""
        if self._blobs is None:
            return 0
        keep_s = self.limits.keep_unused_s
        found = await self._store.unused(keep_s, SWEEP_PAGE)
        gone = await self._store.forget(found, keep_s) if found else []
        for attachment_id in gone:
            await self._blobs.delete(attachment_id)
            await self._blobs.delete(thumbnail_key(attachment_id))
        if gone:
            await self._store.remove(gone)
            self._log.info("removed unused attachments", count=len(gone))
        return len(gone)

    async def _receive(self, source: Path, chunks: AsyncIterator[bytes]) -> tuple[bytes, int, bytes]:
        """The first bytes, the size and the SHA-256 of what came, which stands in `source`."""
        digest, size, first = hashlib.sha256(), 0, b""
        waiting = bytearray()
        file = await asyncio.to_thread(source.open, "wb")
        try:
            async for chunk in chunks:
                size += len(chunk)
                if size > self.limits.bytes_max:
                    raise Refused(
                        Code.BODY_TOO_LARGE, f"an attachment may have {self.limits.bytes_max} bytes at most", 413
                    )
                if len(first) < pictures.SNIFFED_BYTES:
                    first += bytes(chunk[: pictures.SNIFFED_BYTES])
                digest.update(chunk)
                waiting += chunk
                if len(waiting) >= WRITE_BYTES:
                    await asyncio.to_thread(file.write, bytes(waiting))
                    waiting.clear()
            await asyncio.to_thread(file.write, bytes(waiting))
        finally:
            await asyncio.to_thread(file.close)
        if not size:
            raise Refused(Code.MALFORMED, "the attachment has no bytes", 400)
        return first[: pictures.SNIFFED_BYTES], size, digest.digest()

    async def _look(self, source: Path, thumbnail: Path, first: bytes, claimed: str) -> Stored:
        """What it is, by its bytes where they say so. Raises Refused."""
        sniffed = pictures.media_type(first)
        media_type = sniffed or claimed
        if not _TYPE.fullmatch(media_type) or not allowed(media_type, self.limits.types):
            raise Refused(Code.MALFORMED, f"attachments of this media type are not taken; {self._types()} are", 415)
        if not sniffed and claimed in pictures.TYPES:
            raise Refused(Code.MALFORMED, "the bytes are no picture of the media type that was named", 415)
        if not sniffed:
            return Stored("", "", "", media_type, 0, b"")
        try:
            picture = await self._pictures.look(source, thumbnail)
        except pictures.NoPicture:
            raise Refused(Code.MALFORMED, "the bytes begin as a picture does, and cannot be read as one", 415) from None
        size = (await asyncio.to_thread(thumbnail.stat)).st_size if picture.thumbnail else 0
        return Stored("", "", "", media_type, 0, b"", picture.width, picture.height, picture.thumbnail, size)

    def _types(self) -> str:
        return ", ".join(self.limits.types)


def thumbnail_key(attachment_id: str) -> str:
    """The key of the blob that is an attachment's thumbnail."""
    return f"{attachment_id}.thumbnail"


def allowed(media_type: str, types: tuple[str, ...]) -> bool:
    """Whether the list has this media type, or all of its kind ("image/*")."""
    return media_type in types or f"{media_type.partition('/')[0]}/*" in types


def safe_name(name: str) -> str:
    """A file's name without a path and without what misleads, at most NAME_BYTES of UTF-8; "file" where nothing is left."""
    bare = _UNSAFE.sub("_", name.replace("\\", "/").rpartition("/")[2]).strip(" .")
    bare = plain(bare).strip(" .")
    cut = bare.encode("utf-8", "replace")[:NAME_BYTES].decode("utf-8", "ignore")
    return cut.strip() or "file"
