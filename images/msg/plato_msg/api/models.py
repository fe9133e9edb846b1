"""What the answers of more than one router look like, for the OpenAPI document and for whoever reads it."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

Seq = Annotated[int, Field(ge=0, description="A place in a conversation; 1 is its first.")]
MsgId = Annotated[str, Field(pattern=r"^[0-9]{1,20}$", description="A msg_id: a number as text.")]
UserId = Annotated[str, Field(min_length=1, max_length=64, description="1 to 64 bytes of UTF-8.")]


class Answer(BaseModel):
    """An answer. Clients ignore fields that they do not know."""

    model_config = ConfigDict(populate_by_name=True, serialize_by_alias=True)


class Given(BaseModel):
    """A request's body: unknown fields are errors, so that a mistyped one is noticed."""

    model_config = ConfigDict(extra="forbid", populate_by_name=True)


class Reply(Answer):
    """What is answered: a copy, which does not follow edits."""

    msg_id: str
    seq: int
    from_user: str = Field(alias="from")
    text: str


class AttachmentOut(Answer):
    """A reference to an attachment."""

    attachment_id: str
    name: str
    media_type: str
    size_bytes: int
    width: int
    height: int
    thumbnail: bool


class MessageOut(Answer):
    """A message. type 0 is text, 1 rich text, 1000 to 1999 an operation; others have a body."""

    msg_id: str
    conversation_id: str
    seq: int
    prev_seq: int = Field(description="The seq of the message before it; seqs may leave gaps.")
    from_user: str = Field(alias="from")
    type: int
    server_at: int = Field(description="Unix ms.")
    client_msg_id: str = Field(description="A UUID, the sender's.")
    recalled: bool
    edited: bool
    text: str | None = None
    reply: Reply | None = None
    attachments: list[AttachmentOut] | None = None
    mentions: list[str] | None = None
    operation: dict[str, Any] | None = Field(None, description="kind, and what that kind has.")
    body: str | None = Field(None, description="base64, of types that Plato does not read.")


class Page(Answer):
    """Messages by rising seq, and what they cover: every message of [covered_from, covered_to] is among them."""

    conversation_id: str
    messages: list[MessageOut]
    covered_from: int
    covered_to: int
    newest_seq: int


RoleName = Literal["member", "administrator", "owner"]
