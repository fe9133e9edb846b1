"""Which attachments a message references: by its own body, or by the one that an EDIT gives to an older message."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

from google.protobuf.message import DecodeError
from plato.core.visible import is_plain
from plato.wire.v1 import content_pb2 as content

if TYPE_CHECKING:
    from plato_msg.core.batch import Plan, Uplink

MOST: Final = 10
"""Attachments of one message."""
NAME_CHARACTERS: Final = 256
"""Of one's name."""


def attachments(msg_type: int, body: bytes) -> tuple[str, ...]:
    """The attachment_ids that a body names, each once. A body that cannot be read is the application's own, and names
    none."""
    if msg_type != content.RICH:
        return ()
    try:
        rich = content.Rich.FromString(body)
    except DecodeError:
        return ()
    return tuple(dict.fromkeys(a.attachment_id for a in rich.attachments)) if rich.attachments else ()


def misleads(uplink: Uplink) -> bool:
    """Whether an attachment that it names has a name that is not plain (plato.core.visible)."""
    edit = uplink.operation if uplink.msg_type == content.EDIT else None
    body = uplink.body if edit is None else edit.body
    return any(len(a.name) > NAME_CHARACTERS or not is_plain(a.name) for a in content.Rich.FromString(body).attachments)


def of(uplink: Uplink) -> tuple[str, ...]:
    """What an uplink wants to reference."""
    if uplink.msg_type == content.RICH:
        return attachments(uplink.msg_type, uplink.body)
    if uplink.msg_type == content.EDIT and uplink.operation is not None:
        return attachments(uplink.operation.msg_type, uplink.operation.body)
    return ()


def uses(plan: Plan) -> Mapping[tuple[str, int], tuple[str, ...]]:
    """{(conversation_id, seq): attachment_ids} of what a batch writes: new messages that reference some, and each message
    that it changes, with what this one references then."""
    found: dict[tuple[str, int], tuple[str, ...]] = {}
    for d in plan.messages:
        if d.msg_type == content.RICH:
            named = attachments(d.msg_type, d.body)
            if named:
                found[d.uplink.conversation_id, d.outcome.seq] = named
    for edit in plan.edits.values():
        named = () if edit.row.recalled else attachments(edit.row.msg_type, edit.row.body)
        found[edit.conversation_id, edit.seq] = named
    return found
