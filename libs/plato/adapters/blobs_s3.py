"""Blobs in a store that speaks S3: PUT, GET with a range, DELETE, signed by plato.core.sigv4 and sent by aiohttp.

An SDK for three requests would be a third of the image: boto3 and botocore bring 25 MB of descriptions of other services.
What cannot be reached, and what answers 5xx, is asked again for RETRY_S; then Unavailable. A PUT that is repeated writes the
same bytes under the same key, and the store shows an object only when it is whole.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from collections.abc import AsyncIterator, Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

import aiohttp

from plato.core import sigv4
from plato.core.errors import Unavailable
from plato.runtime.secret_file import SecretFile
from plato.runtime.settings import AttachmentSettings, SettingsError

CHUNK_BYTES: Final = 256 << 10
RETRY_S: Final = (0.1, 0.3, 1.0, 2.0)
_TIMEOUT: Final = aiohttp.ClientTimeout(total=None, sock_connect=3.0, sock_read=20.0)


class S3Blobs:
    """BlobStore in one bucket. Of one loop; opens its connections when it is first asked."""

    def __init__(self, url: str, keys: sigv4.Keys | Callable[[], sigv4.Keys]) -> None:
        """url: of the bucket, https://store.example/bucket or https://bucket.store.example, a prefix may follow. keys: or
        what gives those of the moment."""
        self._url = url.rstrip("/")
        self._keys = keys if callable(keys) else lambda: keys
        self._session: aiohttp.ClientSession | None = None

    @classmethod
    def of(cls, settings: AttachmentSettings) -> S3Blobs:
        """As the settings say; keys in files are read again when those change. Raises SettingsError for one that cannot be
        read."""
        assert settings.s3_secret_key_file is not None, "the settings were checked"
        secret = _key("s3_secret_key_file", settings.s3_secret_key_file)
        access: Callable[[], bytes] = settings.s3_access_key.encode
        if settings.s3_access_key_file is not None:
            access = _key("s3_access_key_file", settings.s3_access_key_file)
        return cls(settings.s3_url, lambda: sigv4.Keys(access().decode(), secret().decode(), settings.s3_region))

    async def put(self, key: str, source: Path) -> None:
        """See the port."""
        size, digest = await asyncio.to_thread(_measure, source)
        for wait_s in (*RETRY_S, None):
            try:
                with source.open("rb") as body:  # aiohttp reads it off the loop, and closes it
                    async with self._ask(
                        "PUT", key, digest, {"content-length": str(size)}, body if size else b""
                    ) as answer:
                        await self._expect(answer, key, 200)
                return
            except Unavailable:
                if wait_s is None:
                    raise
                await asyncio.sleep(wait_s)

    async def read(self, key: str, first: int, last: int) -> AsyncIterator[bytes]:
        """See the port."""
        if last < first:
            return
        sent = 0
        async with self._ask("GET", key, sigv4.NOTHING, {"range": f"bytes={first}-{last}"}) as answer:
            await self._expect(answer, key, 200, 206)
            if answer.status == 200 and first:
                raise Unavailable("the store of attachments knows no ranges")
            with _translated():
                async for chunk in answer.content.iter_chunked(CHUNK_BYTES):
                    part = chunk[: last - first + 1 - sent]
                    sent += len(part)
                    if part:
                        yield part
        if sent != last - first + 1:
            raise Unavailable(f"the blob {key} is shorter than it was")

    async def delete(self, key: str) -> None:
        """See the port."""
        async with self._ask("DELETE", key, sigv4.NOTHING) as answer:
            await self._expect(answer, key, 200, 204, 404)

    async def close(self) -> None:
        """See the port."""
        if self._session is not None:
            await self._session.close()
            self._session = None

    @contextlib.asynccontextmanager
    async def _ask(
        self, method: str, key: str, digest: str, headers: dict[str, str] | None = None, body: object = None
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        if self._session is None:
            self._session = aiohttp.ClientSession(timeout=_TIMEOUT, auto_decompress=False)
        url = f"{self._url}/{sigv4.path_of(key)}"
        at = datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ")
        signed = sigv4.signed(self._keys(), method, url, digest, at, headers)
        with _translated():
            answer = await self._session.request(
                method, url, headers=signed, data=body, skip_auto_headers=["Content-Type"]
            )
        try:
            yield answer
        finally:
            answer.release()

    @staticmethod
    async def _expect(answer: aiohttp.ClientResponse, key: str, *statuses: int) -> None:
        if answer.status in statuses:
            return
        with _translated():
            said = (await answer.content.read(1_024)).decode("utf-8", "replace")
        raise Unavailable(f"the store of attachments answered {answer.status} for {key}: {' '.join(said.split())}")


def _measure(source: Path) -> tuple[int, str]:
    """Size, and SHA-256 in hex."""
    with source.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        return file.tell(), digest


@contextlib.contextmanager
def _translated() -> Iterator[None]:
    try:
        yield
    except (aiohttp.ClientError, OSError) as e:  # OSError: TimeoutError too
        raise Unavailable(f"the store of attachments does not answer: {e!r}") from e


def _key(setting: str, path: Path) -> SecretFile:
    """Raises SettingsError."""
    try:
        return SecretFile(path, lambda found: "" if found.isascii() and found else "is empty, or no ASCII")
    except (OSError, ValueError) as e:
        raise SettingsError(
            f"attachments.{setting}: {path} cannot be read: {e}; it holds a key of attachments.s3_url"
        ) from e
