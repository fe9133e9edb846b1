"""Fields that several routes take: ids in paths, keys of writes, bodies of messages.

An id in a path may hold "/", written %2F: `keep_slashes` has it survive the router as a control character, which no id has.
"""

from __future__ import annotations

import base64
import binascii
import re
import uuid
from typing import Annotated, Final, NamedTuple, Self
from urllib.parse import quote, unquote, unquote_to_bytes

from fastapi import Depends, Header, Path
from plato.core.codes import Code
from plato.core.conversations import is_user_id
from plato.core.ids import MAX_ID
from plato.core.visible import plain
from plato.wire.v1 import content_pb2 as content
from pydantic import AfterValidator, BeforeValidator, Field, model_validator
from starlette.types import ASGIApp, Receive, Scope, Send

from plato_msg.api import problems
from plato_msg.api.auth import AnyCaller
from plato_msg.api.models import Given, MsgId, UserId
from plato_msg.api.problems import Problem
from plato_msg.operations import client_msg_id_of

_SLASH: Final = "\x01"
_CONTROL: Final = re.compile(r"[\x00-\x1f\x7f-\x9f]")
_ESCAPED: Final = re.compile(rb"%2[fF]")
MAX_MENTIONS: Final = 100
MAX_ATTACHMENTS: Final = 10
QUOTED_CHARACTERS: Final = 256
FIRST_OPERATION: Final = 1_000
LAST_OPERATION: Final = 1_999


class KeepSlashes:
    """Has an escaped slash of a path stay part of its segment. Refuses paths with what no id can hold: a control character
    would be taken for such a slash, and bytes that are no UTF-8 for each other."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""
        if scope["type"] == "http":
            raw = (scope.get("raw_path") or quote(scope["path"]).encode()).split(b"?")[0]
            try:
                odd = _CONTROL.search(unquote_to_bytes(raw).decode()) is not None
            except UnicodeDecodeError:
                odd = True
            if odd:
                why = "the path holds a control character, or bytes that are no UTF-8; escape the UTF-8 of an id with %"
                await problems.answer(Problem(Code.MALFORMED, why))(scope, receive, send)
                return
            if _ESCAPED.search(raw):
                scope = {**scope, "path": unquote(_ESCAPED.sub(b"%01", raw).decode("ascii", "replace"))}
        await self._app(scope, receive, send)


def _slashes(given: object) -> object:
    return given.replace(_SLASH, "/") if isinstance(given, str) else given


def user_id(given: str) -> str:
    """Itself, or ValueError."""
    if not is_user_id(given):
        raise ValueError("must be 1 to 64 bytes of UTF-8 without control or invisible characters")
    return given


ConversationId = Annotated[
    str, Path(description="A conversation_id; a slash in it is %2F.", examples=["g:town"]), BeforeValidator(_slashes)
]
UserIdPath = Annotated[
    str, Path(description="A user_id; a slash in it is %2F."), BeforeValidator(_slashes), AfterValidator(user_id)
]


def _msg_id(given: object) -> int:
    number = int(given) if isinstance(given, str) and given.isascii() and given.isdecimal() and len(given) <= 20 else 0
    # What cannot be one names no message: no other answer than for one that is not there.
    return number if number <= MAX_ID else 0


MsgIdPath = Annotated[
    int, Path(description="A msg_id.", json_schema_extra={"type": "string"}), BeforeValidator(_msg_id)
]


def _number(given: object) -> int:
    if not (
        isinstance(given, str) and given.isascii() and given.isdecimal() and len(given) <= 20 and int(given) < 2**64
    ):
        raise ValueError("must be a number of 64 bits")
    return int(given)


NumberPath = Annotated[
    int, Path(description="A number as text.", json_schema_extra={"type": "string"}), BeforeValidator(_number)
]


async def _key(
    who: AnyCaller,
    idempotency_key: Annotated[
        str, Header(max_length=200, description="Names this request: sent again with the same one, it is done once.")
    ] = "",
) -> bytes:
    return client_msg_id_of(who.user, idempotency_key) if idempotency_key else uuid.uuid4().bytes


Key = Annotated[bytes, Depends(_key)]
"""16 bytes: the client_msg_id of what the request writes."""


# ── bodies ───────────────────────────────────────────────────────────────────────────────────────────────────


class AttachmentIn(Given):
    """A reference, as the upload answered it."""

    attachment_id: str = Field(max_length=64)
    name: Annotated[str, AfterValidator(plain)] = Field("", max_length=256)
    media_type: str = Field("", max_length=128)
    size_bytes: int = Field(0, ge=0, le=MAX_ID)
    width: int = Field(0, ge=0, le=2**32 - 1)
    height: int = Field(0, ge=0, le=2**32 - 1)
    thumbnail: bool = False


class RichIn(Given):
    """Text with more: what it answers, attachments, who is mentioned."""

    text: str = ""
    reply_to: MsgId | None = Field(None, description="msg_id of a message of the same conversation.")
    attachments: list[AttachmentIn] = Field([], max_length=MAX_ATTACHMENTS)
    mentions: list[UserId] = Field([], max_length=MAX_MENTIONS)

    def content(self, reply: content.Quote | None) -> content.Rich:
        """As it goes over the wire."""
        return content.Rich(
            text=self.text,
            reply=reply,
            attachments=[content.Attachment(**one.model_dump()) for one in self.attachments],
            mentions=self.mentions,
        )


class Body(NamedTuple):
    """A message's type and bytes. reply_to: to be looked up and quoted; 0: it answers nothing."""

    msg_type: int
    raw: bytes
    rich: RichIn | None = None
    reply_to: int = 0


class BodyIn(Given):
    """Exactly one of text, rich, and type with body."""

    text: str | None = None
    rich: RichIn | None = None
    type: int | None = Field(None, ge=0, le=2**32 - 1, description="The application's own, with body.")
    body: str | None = Field(None, description="base64.")

    @model_validator(mode="after")
    def _one(self) -> Self:
        if (self.text is not None) + (self.rich is not None) + (self.body is not None) != 1:
            raise ValueError("give exactly one of text, rich, and type with body")
        if (self.type is None) != (self.body is None):
            raise ValueError("type and body come together")
        return self

    def read(self, limit_bytes: int) -> Body:
        """The body. Raises Problem."""
        if self.text is not None:
            found = Body(content.TEXT, _utf8(self.text))
        elif self.rich is not None:
            reply_to = _msg_id(self.rich.reply_to or "")
            if self.rich.reply_to and not reply_to:
                raise Problem(Code.MESSAGE_UNKNOWN)
            _utf8(self.rich.model_dump_json())
            found = Body(content.RICH, self.rich.content(None).SerializeToString(), self.rich, reply_to)
        else:
            assert self.type is not None  # _one saw to it
            assert self.body is not None
            if FIRST_OPERATION <= self.type <= LAST_OPERATION:
                raise Problem(Code.BAD_OPERATION, "operations have paths of their own")
            try:
                found = Body(self.type, base64.b64decode(self.body, validate=True))
            except (binascii.Error, ValueError) as e:
                raise Problem(Code.MALFORMED, "body must be base64") from e
        if len(found.raw) > limit_bytes:
            raise Problem(Code.BODY_TOO_LARGE, f"the body has {len(found.raw)} bytes, {limit_bytes} are the most")
        return found


def _utf8(text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError as e:
        raise Problem(Code.MALFORMED, "the text holds half of a surrogate pair") from e
