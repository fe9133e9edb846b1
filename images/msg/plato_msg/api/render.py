"""Messages as JSON. Numbers that name something are text (a browser's numbers end at 2^53); those that count are numbers.

    {"msg_id": "7012…", "conversation_id": "d:…", "seq": 3, "prev_seq": 2, "from": "alice", "type": 1, "server_at": 1790…,
     "client_msg_id": "<UUID>", "text": "hi", "reply": {…}?, "attachments": […]?, "mentions": […]?, "operation": {…}?,
     "body": "<base64>"?, "recalled": false, "edited": false}

type 0 and 1 have a text; 1000 to 1999 an operation; every other one has its body as base64, as does one that cannot be read.
"""

from __future__ import annotations

import base64
import uuid
from typing import Any, Final

from google.protobuf.message import DecodeError
from plato.wire.v1 import client_pb2 as wire
from plato.wire.v1 import content_pb2 as content

from plato_msg.lists_pg import Last
from plato_msg.store_pg import Message

FIRST_OPERATION: Final = 1_000
LAST_OPERATION: Final = 1_999


def message(row: wire.PushMsg) -> dict[str, Any]:
    """A row as pulled or pushed."""
    said: dict[str, Any] = {
        "msg_id": str(row.MsgID),
        "conversation_id": row.conversation_id,
        "seq": row.seq,
        "prev_seq": row.prev_seq,
        "from": row.from_user,
        "type": row.msg_type,
        "server_at": row.server_at_ms,
        "client_msg_id": str(uuid.UUID(bytes=row.client_msg_id)) if len(row.client_msg_id) == 16 else "",
        "recalled": row.recalled,
        "edited": bool(row.changed_seq) and not row.recalled,
    }
    if not row.recalled:
        said |= body(row.msg_type, row.Content)
    return said


def stored(conversation_id: str, row: Message) -> dict[str, Any]:
    """A row of the store."""
    return message(
        wire.PushMsg(
            MsgID=row.msg_id,
            conversation_id=conversation_id,
            seq=row.seq,
            prev_seq=row.prev_seq,
            from_user=row.from_user,
            msg_type=row.msg_type,
            Content=row.body,
            client_msg_id=row.client_msg_id,
            server_at_ms=row.server_at_ms,
            changed_seq=row.changed_seq,
            recalled=row.recalled,
        )
    )


def beginning(last: Last) -> dict[str, Any]:
    """The newest message as a list shows it: of a body that was cut, what can be read of it."""
    said: dict[str, Any] = {
        "msg_id": str(last.msg_id),
        "seq": last.seq,
        "from": last.from_user,
        "type": last.msg_type,
        "server_at": last.server_at_ms,
        "recalled": last.recalled,
    }
    if last.recalled:
        return said
    shown = {"text": _cut(last.body)} if last.msg_type == content.TEXT else body(last.msg_type, last.body)
    if "body" not in shown:
        return said | {key: shown[key] for key in ("text", "attachments", "operation") if key in shown}
    if last.msg_type == content.RICH:
        return said | {"text": _cut(_first_text(last.body))}
    if FIRST_OPERATION <= last.msg_type <= LAST_OPERATION:
        return said | {"operation": operation(last.msg_type, content.Operation())}
    return said


def _cut(raw: bytes) -> str:
    return raw.decode(errors="ignore")


def _first_text(raw: bytes) -> bytes:
    """The first field of a Rich that was cut, if that is its text (tag 10, a length of at most two bytes)."""
    if raw[:1] != b"\x0a" or len(raw) < 3:
        return b""
    return raw[2 if raw[1] < 0x80 else 3 :]


def body(msg_type: int, raw: bytes) -> dict[str, Any]:
    """A body's fields."""
    try:
        if msg_type == content.TEXT:
            return {"text": raw.decode()}
        if msg_type == content.RICH:
            return rich(content.Rich.FromString(raw))
        if FIRST_OPERATION <= msg_type <= LAST_OPERATION:
            return {"operation": operation(msg_type, content.Operation.FromString(raw))}
    except (DecodeError, UnicodeDecodeError):
        pass  # an application's own bytes under one of our types: shown as they are
    return {"body": base64.b64encode(raw).decode()}


def rich(said: content.Rich) -> dict[str, Any]:
    """A Rich; what it has not is not there."""
    found: dict[str, Any] = {"text": said.text}
    if said.HasField("reply"):
        reply = said.reply
        found["reply"] = {"msg_id": str(reply.msg_id), "seq": reply.seq, "from": reply.from_user, "text": reply.text}
    if said.attachments:
        found["attachments"] = [attachment(one) for one in said.attachments]
    if said.mentions:
        found["mentions"] = list(said.mentions)
    return found


def attachment(said: content.Attachment) -> dict[str, Any]:
    """A reference to an attachment."""
    return {
        "attachment_id": said.attachment_id,
        "name": said.name,
        "media_type": said.media_type,
        "size_bytes": said.size_bytes,
        "width": said.width,
        "height": said.height,
        "thumbnail": said.thumbnail,
    }


def operation(msg_type: int, said: content.Operation) -> dict[str, Any]:
    """An operation: its kind, and the fields that this kind has."""
    kind = str(msg_type)
    if msg_type in content.MsgType.values():
        kind = content.MsgType.Name(msg_type).lower()  # type: ignore[arg-type]  # the line above says that it is one
    found: dict[str, Any] = {"kind": kind}
    if msg_type in (content.GROUP_CREATE, content.GROUP_RENAME):
        found["title"] = said.title
    if said.users:
        found["users"] = list(said.users)
    if msg_type == content.GROUP_ROLE:
        found["role"] = content.Role.Name(said.role).lower()
    if said.owner:
        found["owner"] = said.owner
    if msg_type in (content.RECALL, content.EDIT):
        found |= {"msg_id": str(said.msg_id), "seq": said.seq}
    if msg_type == content.EDIT:
        found["type"] = said.msg_type
        # An edit edits no operation, and one within another has no end: the before-hook shows what nobody judged yet.
        if not FIRST_OPERATION <= said.msg_type <= LAST_OPERATION:
            found |= body(said.msg_type, said.body)
    return found
