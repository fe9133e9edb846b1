"""What is refused before the bus: form and length of ids and bodies. What they say is for msg to judge (R9)."""

from __future__ import annotations

from uuid import UUID, uuid5

from plato.core.codes import Code
from plato.core.conversations import is_conversation_id, is_open_id, is_user_id
from plato.wire.v1.client_pb2 import LoginMsg, UPMsg

from plato_state.core.uplinks import MAX_CLIENT_ID

HEAD_ROOM_BYTES = 2_048
"""What a frame needs besides the body: body ≤ frame limit − 2 KB."""

_GUEST_NAMESPACE = UUID("9d1b9f0e-52a4-5c0b-8f5e-6c7f0e1f4a11")
CLIENT_MSG_ID_BYTES = 16
TRACE_ID_BYTES = 16
LABEL_BYTES = 64
"""Longest platform, network or version text that is kept; longer ones are cut."""


def max_body_bytes(max_frame_bytes: int) -> int:
    """The longest body of an UP, told at login."""
    return max_frame_bytes - HEAD_ROOM_BYTES


def refusal(up: UPMsg, body_limit_bytes: int, guest: bool) -> Code | None:
    """Why an UP is refused for good before the bus; None: its form is right. The body's bytes are nobody's business."""
    conversation = up.Head.SessionId
    if not is_conversation_id(conversation) or (guest and not is_open_id(conversation)):
        return Code.BAD_CONVERSATION
    client_id = up.Head.ClientID
    if client_id > MAX_CLIENT_ID or (client_id < 1 and not guest):
        return Code.BAD_CLIENT_ID
    if not guest and len(up.client_msg_id) != CLIENT_MSG_ID_BYTES:
        return Code.BAD_CLIENT_MSG_ID
    if up.to_user and not is_user_id(up.to_user):
        return Code.BAD_TO_USER
    if len(up.UPMsgBody) > body_limit_bytes:
        return Code.BODY_TOO_LARGE
    return None


def login_refusal(login: LoginMsg) -> Code | None:
    """Why a Login is refused by its form alone."""
    if not login.HasField("Head") or not login.Head.DeviceID:
        return Code.MALFORMED
    return None


def guest_message_id(conn_id: int, conversation: str, client_id: int) -> bytes:
    """The client_msg_id of a guest's UP, the same each time it is sent: UUIDv5 of (conn_id, conversation, ClientID)."""
    return uuid5(_GUEST_NAMESPACE, f"{conn_id}:{client_id}:{conversation}").bytes


def label(text: str) -> str:
    """A short text for the session's record, cut at LABEL_BYTES of UTF-8."""
    raw = text.encode("utf-8", "replace")
    return text if len(raw) <= LABEL_BYTES else raw[:LABEL_BYTES].decode("utf-8", "ignore")
