"""Attachments over HTTP. Uploads come as the request's body or as the first file of a form; downloads know ranges.

    POST /v1/attachments?name=cat.jpg          the bytes, Content-Type: image/jpeg; or multipart/form-data
    GET  /v1/attachments/{attachment_id}       the bytes; Range, If-None-Match, If-Range
    GET  /v1/attachments/{attachment_id}/thumbnail

What may not be read is answered as what is not there. Only pictures, by their bytes, may be shown in place; everything else
is to be saved, and no browser is to guess a type or run a script. Memory: a chunk per request.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import AsyncIterator
from typing import Annotated, Any, Final, NoReturn
from urllib.parse import quote

from fastapi import APIRouter, Path, Query
from plato.core.codes import Code
from pydantic import BaseModel
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse

from plato_msg import pictures
from plato_msg.api.auth import AnyCaller, Caller, Person
from plato_msg.api.problems import Problem
from plato_msg.attachments import Attachments, Refused, thumbnail_key
from plato_msg.attachments_pg import Stored

FORM_ROOM_BYTES: Final = 16 << 10
"""What a form may add to the file."""
_RANGE: Final = re.compile(r"bytes=(\d{0,19})-(\d{0,19})")
_PLAIN: Final = re.compile(r"[^A-Za-z0-9 ._()+-]")
_HEADERS: Final = {
    "Accept-Ranges": "bytes",
    "Cache-Control": "private, no-cache",  # asked again each time: a recall takes it away
    "Content-Security-Policy": "default-src 'none'; sandbox",
    "X-Content-Type-Options": "nosniff",
}
Id = Annotated[str, Path(max_length=64, description="As the upload was answered.")]


class Uploaded(BaseModel):
    """What a message's attachment says of it. width, height: of pictures, as they are shown; else 0."""

    attachment_id: str
    name: str
    media_type: str
    size_bytes: int
    width: int
    height: int
    thumbnail: bool


def router(attachments: Attachments) -> APIRouter:
    """The routes."""
    routes = APIRouter(tags=["attachments"])

    @routes.post(
        "/v1/attachments",
        status_code=201,
        response_model=Uploaded,
        summary="Upload a file",
        description="The body is the file, with its Content-Type; or a multipart/form-data, whose first file is taken. A"
        " message of type 1 then names attachment_id. What no message references within a day is removed.",
        max_body_size=attachments.limits.bytes_max + FORM_ROOM_BYTES,
        openapi_extra={
            "requestBody": {
                "required": True,
                "content": {
                    "application/octet-stream": {"schema": {"type": "string", "format": "binary"}},
                    "multipart/form-data": {
                        "schema": {"type": "object", "properties": {"file": {"type": "string", "format": "binary"}}}
                    },
                },
            }
        },
    )
    async def upload(
        request: Request,
        user: Person,
        name: Annotated[str, Query(max_length=1_024, description="The file's name; of a form: the file's own.")] = "",
    ) -> Uploaded:
        media_type = request.headers.get("Content-Type", "")
        given: AsyncIterator[bytes] = request.stream()
        try:
            if media_type.lower().startswith("multipart/form-data"):
                form = Form(media_type, given)
                await form.begin()
                name, media_type, given = name or form.name, form.media_type, form.chunks()
            row = await attachments.upload(user, name, media_type, given)
        except Refused as e:
            raise Problem(e.code, e.detail, status=e.status) from e
        except ClientDisconnect:
            raise Problem(Code.MALFORMED, "the request ended within the file") from None
        return uploaded(row)

    async def fetch(request: Request, who: Caller, attachment_id: str, *, thumbnail: bool) -> Response:
        row = await attachments.find(attachment_id, None if who.authority else who.user)
        if row is None or (thumbnail and not row.thumbnail_type):
            unknown()
        if thumbnail:
            key, size, media_type = thumbnail_key(row.attachment_id), row.thumbnail_size, row.thumbnail_type
            etag = f'"{row.sha256.hex()[:32]}-t"'
        else:
            key, size, media_type = row.attachment_id, row.size_bytes, row.media_type
            etag = f'"{row.sha256.hex()[:32]}"'
        headers = {**_HEADERS, "ETag": etag, "Content-Disposition": disposition(row.name, media_type, thumbnail)}
        if etag in [part.strip().removeprefix("W/") for part in request.headers.get("If-None-Match", "").split(",")]:
            return Response(status_code=304, headers=headers)
        first, last, status = 0, size - 1, 200
        wanted = request.headers.get("Range", "")
        if wanted and request.headers.get("If-Range", etag) == etag:
            part = cut(wanted, size)
            if part is not None:
                if part[0] > part[1]:
                    raise Problem(Code.BAD_RANGE, "the range lies beyond the file's end", status=416)
                (first, last), status = part, 206
                headers["Content-Range"] = f"bytes {first}-{last}/{size}"
        headers["Content-Length"] = str(last - first + 1)
        headers["Content-Type"] = media_type
        if request.method == "HEAD":
            return Response(status_code=status, headers=headers)
        chunks = attachments.read(key, first, last)
        return StreamingResponse(await begun(chunks), status_code=status, headers=headers)

    binary: dict[int | str, dict[str, Any]] = {
        200: {"content": {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}},
        206: {"description": "The range that was asked for."},
        304: {"description": "What If-None-Match names is what there is."},
    }

    @routes.api_route(
        "/v1/attachments/{attachment_id}",
        methods=["GET", "HEAD"],
        response_class=Response,
        responses=binary,
        summary="Fetch a file",
        description="For its owner, and for who may read a message that references it; for everybody else there is none.",
    )
    async def get(request: Request, who: AnyCaller, attachment_id: Id) -> Response:
        return await fetch(request, who, attachment_id, thumbnail=False)

    @routes.api_route(
        "/v1/attachments/{attachment_id}/thumbnail",
        methods=["GET", "HEAD"],
        response_class=Response,
        responses=binary,
        summary="Fetch a picture's thumbnail",
        description="At most 320 pixels wide and high, JPEG or WebP, upright, without metadata.",
    )
    async def get_thumbnail(request: Request, who: AnyCaller, attachment_id: Id) -> Response:
        return await fetch(request, who, attachment_id, thumbnail=True)

    return routes


def unknown() -> NoReturn:
    """There is no such attachment, or none for this caller."""
    raise Problem(Code.ATTACHMENT_UNKNOWN)


def uploaded(row: Stored) -> Uploaded:
    """A row, as the uploader is told."""
    return Uploaded(
        attachment_id=row.attachment_id,
        name=row.name,
        media_type=row.media_type,
        size_bytes=row.size_bytes,
        width=row.width,
        height=row.height,
        thumbnail=bool(row.thumbnail_type),
    )


def disposition(name: str, media_type: str, thumbnail: bool) -> str:
    """Content-Disposition: shown in place for pictures, saved for everything else."""
    way = "inline" if thumbnail or media_type in pictures.TYPES else "attachment"
    if thumbnail:
        return way
    return f"{way}; filename=\"{_PLAIN.sub('_', name)}\"; filename*=UTF-8''{quote(name, safe='')}"


def cut(wanted: str, size: int) -> tuple[int, int] | None:
    """The first and the last byte of a Range header; first > last: none of them is there; None: no range that we know, so
    the whole is sent."""
    found = _RANGE.fullmatch(wanted.strip())
    if found is None or found[0] == "bytes=-":
        return None
    if not found[1]:
        count = int(found[2])
        return (max(0, size - count), size - 1) if count else (1, 0)
    first, last = int(found[1]), int(found[2] or size - 1)
    if found[2] and last < first:
        return None
    return (first, min(last, size - 1)) if first < size else (1, 0)


async def begun(chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """The same chunks, of which the first is there: what fails at once is answered as a failure, not as a broken file."""
    first = await anext(chunks, b"")

    async def all_of_them() -> AsyncIterator[bytes]:
        yield first
        async for chunk in chunks:
            yield chunk

    return all_of_them()


class Form:
    """The first file of a multipart/form-data, while it comes. `begin` reads up to its bytes, `chunks` gives them."""

    def __init__(self, content_type: str, given: AsyncIterator[bytes]) -> None:
        _, options = parse_options_header(content_type)
        self._given = given
        self.name = ""
        self.media_type = ""
        self._field = self._value = b""
        self._headers: dict[bytes, bytes] = {}
        self._head_bytes = 0
        self._in_file = self._done = False
        self._ready: deque[bytes] = deque()
        try:
            self._parser = MultipartParser(
                options[b"boundary"],
                {
                    "on_part_begin": self._headers.clear,
                    "on_header_field": self._on_field,
                    "on_header_value": self._on_value,
                    "on_header_end": self._on_header,
                    "on_headers_finished": self._on_headers,
                    "on_part_data": self._on_data,
                    "on_part_end": self._on_end,
                },
            )
        except (KeyError, FormParserError):
            raise Problem(Code.MALFORMED, "the form names no boundary that can be used") from None

    async def begin(self) -> None:
        """Reads up to the file's first bytes. Raises Problem where there is no file."""
        while not self._in_file and not self._done and await self._more():
            pass
        if not (self._in_file or self._done):
            raise Problem(Code.MALFORMED, "the form holds no file: one part must have a filename")

    async def chunks(self) -> AsyncIterator[bytes]:
        """The file's bytes. Raises Problem where the form ends within them."""
        while True:
            while self._ready:
                yield self._ready.popleft()
            if self._done:
                return
            if not await self._more():
                raise Problem(Code.MALFORMED, "the form ends within the file")

    async def _more(self) -> bool:
        """Reads on; False: there is no more."""
        chunk = await anext(self._given, None)
        if chunk is None:
            return False
        try:
            self._parser.write(chunk)
        except FormParserError as e:
            raise Problem(Code.MALFORMED, f"the form cannot be read: {e}") from None
        return True

    def _on_field(self, data: bytes, start: int, end: int) -> None:
        self._field += data[start:end]
        self._bounded(end - start)

    def _on_value(self, data: bytes, start: int, end: int) -> None:
        self._value += data[start:end]
        self._bounded(end - start)

    def _bounded(self, count: int) -> None:
        self._head_bytes += count
        if self._head_bytes > FORM_ROOM_BYTES:
            raise Problem(Code.MALFORMED, "the form's headers are too long")

    def _on_header(self) -> None:
        self._headers[self._field.lower()] = self._value
        self._field = self._value = b""

    def _on_headers(self) -> None:
        _, options = parse_options_header(self._headers.get(b"content-disposition", b""))
        if self._done or self._in_file or b"filename" not in options:
            return
        self._in_file = True
        self.name = options[b"filename"].decode("utf-8", "replace")
        self.media_type = self._headers.get(b"content-type", b"").decode("latin-1")

    def _on_data(self, data: bytes, start: int, end: int) -> None:
        if self._in_file:
            self._ready.append(data[start:end])

    def _on_end(self) -> None:
        if self._in_file:
            self._in_file, self._done = False, True
