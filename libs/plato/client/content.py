"""What bodies hold, as the application sees it: rich messages, and the operations that change a conversation. Pure.

The wire's form is libs/plato/wire/v1/content.proto. Reading never raises: a body that cannot be read is nobody's operation.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Final

from google.protobuf.message import DecodeError

from plato.core.visible import plain
from plato.wire.v1 import content_pb2 as pb

OPERATIONS: Final = range(1_000, 2_000)
"""msg_types of operations."""
QUOTE_CHARACTERS: Final = 256
ATTACHMENTS: Final = 10
USERS: Final = 500
"""Users in one operation."""
TITLE_BYTES: Final = 128


class MsgType(IntEnum):
    """msg_types that Plato's clients write and read; all others are the application's own."""

    TEXT = 0
    RICH = 1
    GROUP_CREATE = 1000
    GROUP_ADD = 1001
    GROUP_REMOVE = 1002
    GROUP_LEAVE = 1003
    GROUP_RENAME = 1004
    GROUP_ROLE = 1005
    RECALL = 1010
    EDIT = 1011


class Role(IntEnum):
    """What somebody is in a group."""

    MEMBER = 0
    ADMINISTRATOR = 1
    OWNER = 2


@dataclass(frozen=True, slots=True)
class Quote:
    """What a message answers: its name, and enough of it to be shown where it is not at hand (≤ 256 characters)."""

    msg_id: int
    seq: int
    from_user: str
    text: str


@dataclass(frozen=True, slots=True)
class Attachment:
    """A file that was uploaded over HTTP. width, height: of pictures, else 0. thumbnail: there is one."""

    attachment_id: str
    name: str = ""
    media_type: str = ""
    size_bytes: int = 0
    width: int = 0
    height: int = 0
    thumbnail: bool = False


@dataclass(frozen=True, slots=True)
class Rich:
    """A message that is more than text. mentions: user_ids."""

    text: str = ""
    reply: Quote | None = None
    attachments: tuple[Attachment, ...] = ()
    mentions: tuple[str, ...] = ()

    def encode(self) -> bytes:
        """The body of a message of MsgType.RICH. Raises ValueError."""
        if len(self.attachments) > ATTACHMENTS:
            raise ValueError(
                f"{len(self.attachments)} attachments: at most {ATTACHMENTS}; send them in several messages"
            )
        if self.reply is not None and len(self.reply.text) > QUOTE_CHARACTERS:
            raise ValueError(f"a quote of {len(self.reply.text)} characters: at most {QUOTE_CHARACTERS}")
        inner = pb.Rich(text=self.text, mentions=self.mentions)
        if self.reply is not None:
            q = self.reply
            inner.reply.CopyFrom(pb.Quote(msg_id=q.msg_id, seq=q.seq, from_user=q.from_user, text=q.text))
        for a in self.attachments:
            inner.attachments.add(
                attachment_id=a.attachment_id,
                name=plain(a.name),  # else the platform refuses it
                media_type=a.media_type,
                size_bytes=a.size_bytes,
                width=a.width,
                height=a.height,
                thumbnail=a.thumbnail,
            )
        return inner.SerializeToString()


@dataclass(frozen=True, slots=True)
class Operation:
    """A change of a conversation. seq, owner: set by the platform: the place of the message that is meant, and who leads
    the group now where its owner left."""

    kind: MsgType
    title: str = ""
    users: tuple[str, ...] = ()
    role: Role = Role.MEMBER
    msg_id: int = 0
    seq: int = 0
    msg_type: int = 0
    body: bytes = b""
    owner: str = ""

    def encode(self) -> bytes:
        """The body of a message of this kind. Raises ValueError."""
        return pb.Operation(
            title=self.title,
            users=self.users,
            role=pb.Role.ValueType(self.role),
            msg_id=self.msg_id,
            msg_type=self.msg_type,
            body=self.body,
        ).SerializeToString()


def is_operation(msg_type: int) -> bool:
    """Whether messages of this type change their conversation, also where this client does not know how."""
    return msg_type in OPERATIONS


def rich_of(msg_type: int, body: bytes) -> Rich | None:
    """What a message of MsgType.RICH holds; None: it is of another type, or cannot be read."""
    if msg_type != MsgType.RICH:
        return None
    try:
        found = pb.Rich.FromString(body)
    except DecodeError:
        return None
    quote = found.reply
    reply = Quote(quote.msg_id, quote.seq, quote.from_user, quote.text) if found.HasField("reply") else None
    attachments = tuple(
        Attachment(a.attachment_id, a.name, a.media_type, a.size_bytes, a.width, a.height, a.thumbnail)
        for a in found.attachments
    )
    return Rich(found.text, reply, attachments, tuple(found.mentions))


def operation_of(msg_type: int, body: bytes) -> Operation | None:
    """What a message of an operation's type asks for; None: it is none, cannot be read, or is of a newer platform."""
    if msg_type not in OPERATIONS:
        return None
    try:
        kind = MsgType(msg_type)
        found = pb.Operation.FromString(body)
        role = Role(found.role)
    except (DecodeError, ValueError):
        return None
    return Operation(
        kind,
        found.title,
        tuple(found.users),
        role,
        found.msg_id,
        found.seq,
        found.msg_type,
        found.body,
        found.owner,
    )


def text_of(msg_type: int, body: bytes) -> str:
    """What a message says, as text: of a rich one its text, of an operation nothing. What is no UTF-8 becomes U+FFFD."""
    if msg_type in OPERATIONS:
        return ""
    rich = rich_of(msg_type, body)
    return body.decode("utf-8", "replace") if rich is None else rich.text
