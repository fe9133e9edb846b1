"""Frames that state itself writes: answers, refusals, the reason of a close, the empty hint. All are MsgCmd encodings."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeAlias

from plato.core.codes import Code, text
from plato.topology.record import Gateway
from plato.wire.v1.client_pb2 import (
    ACK,
    ERROR,
    HEARTBEAT,
    KICK,
    NOTIFY,
    PULLED,
    READ,
    REDIRECT,
    SYNC,
    SYNCED,
    TYPING,
    UP,
    ACKMsg,
    CmdType,
    ErrorMsg,
    KickMsg,
    MsgCmd,
    NotifyMsg,
    PulledMsg,
    RedirectGateway,
    RedirectMsg,
    SyncedMsg,
)

Kind: TypeAlias = "CmdType.ValueType"
"""A frame's type."""

LAST_PUBLIC_TYPE = 5
"""Types above are Plato's own and never go to a guest."""
UNNUMBERED = frozenset((READ, TYPING))
"""Frames of msg that carry no (run, push_no): sent once to who is live, never kept, never repeated."""


@dataclass(frozen=True, slots=True)
class Told:
    """What every Login or ReConn answer tells the client; ms and bytes. 0: not told, the client has its default."""

    resume_window_ms: int
    reconnect_delay_ms: int
    repeat_min_ms: int
    repeat_max_ms: int
    max_body_bytes: int
    heartbeat_floor_ms: int = 0
    heartbeat_ceiling_ms: int = 0
    """0: every client keeps the usual interval."""
    connect_delay_ms: int = 0
    connect_timeout_ms: int = 0


def frame(kind: Kind, payload: bytes) -> bytes:
    """A MsgCmd without run and push_no."""
    return MsgCmd(Type=kind, Payload=payload).SerializeToString()


def type_of(encoded: bytes) -> int:
    """The CmdType of a MsgCmd that one of our own parts encoded: field 1 stands first, or is absent (0)."""
    return encoded[1] if len(encoded) > 1 and encoded[0] == 0x08 else 0


def notice_of(encoded: bytes) -> tuple[str, int] | None:
    """(conversation_id, seq) of a Notify that one of our own parts encoded about one conversation; None of other frames."""
    if type_of(encoded) != NOTIFY:
        return None
    newest = NotifyMsg.FromString(MsgCmd.FromString(encoded).Payload).newest
    return (newest[0].conversation_id, newest[0].seq) if len(newest) == 1 else None


def ack(kind: Kind, code: Code, conn_id: int, ref: int = 0) -> bytes:
    """The ACK of a Login, ReConn, Heartbeat, Sync or Pull that says no more than its code."""
    message = ACKMsg(Code=code, Type=kind, ConnID=conn_id, ref=ref)
    if code:
        message.Msg = text(code)
    return frame(ACK, message.SerializeToString())


def login_ack(kind: Kind, conn_id: int, user: str, secret: bytes, heartbeat_ms: int, told: Told) -> bytes:
    """Login or ReConn is answered; nothing else happened yet. heartbeat_ms: the interval that this client keeps."""
    message = ACKMsg(
        Type=kind,
        ConnID=conn_id,
        secret=secret,
        heartbeat_ms=heartbeat_ms,
        resume_window_ms=told.resume_window_ms,
        reconnect_delay_ms=told.reconnect_delay_ms,
        repeat_min_ms=told.repeat_min_ms,
        repeat_max_ms=told.repeat_max_ms,
        max_body_bytes=told.max_body_bytes,
        user_id=user,
        heartbeat_floor_ms=told.heartbeat_floor_ms,
        heartbeat_ceiling_ms=told.heartbeat_ceiling_ms,
        connect_delay_ms=told.connect_delay_ms,
        connect_timeout_ms=told.connect_timeout_ms,
    )
    return frame(ACK, message.SerializeToString())


def login_later(kind: Kind, conn_id: int, retry_ms: int) -> bytes:
    """Too many log in now: the same again on this connection, not before `retry_ms`."""
    code = Code.LOGIN_LATER
    message = ACKMsg(Code=code, Msg=text(code), Type=kind, ConnID=conn_id, retry_ms=retry_ms)
    return frame(ACK, message.SerializeToString())


def sync_ack(conn_id: int, ref: int, run: int, push_no: int) -> bytes:
    """The session is committed; live pushes go on from (run, push_no)."""
    message = ACKMsg(Type=SYNC, ConnID=conn_id, ref=ref, run=run, push_no=push_no)
    return frame(ACK, message.SerializeToString())


def heartbeat_ack(conn_id: int, heartbeat_ms: int, run: int, push_no: int) -> bytes:
    """Alive; carries the newest (run, push_no), so that a lost push is noticed."""
    message = ACKMsg(Type=HEARTBEAT, ConnID=conn_id, heartbeat_ms=heartbeat_ms, run=run, push_no=push_no)
    return frame(ACK, message.SerializeToString())


def up_ack(
    code: Code,
    conn_id: int,
    conversation: str,
    client_id: int,
    client_msg_id: bytes,
    expected: int = 0,
    retry_ms: int = 0,
) -> bytes:
    """The answer to an UP. retry_ms: not the same again before so long; 0: not told."""
    message = ACKMsg(
        Code=code,
        Type=UP,
        ConnID=conn_id,
        ClientID=client_id,
        conversation_id=conversation,
        client_msg_id=client_msg_id,
        expected=expected,
        retry_ms=retry_ms,
    )
    if code:
        message.Msg = text(code)
    return frame(ACK, message.SerializeToString())


def read_ack(code: int, conn_id: int, ref: int, conversation: str, seq: int, retry_ms: int = 0) -> bytes:
    """The answer to a READ. seq: the position that stands."""
    message = ACKMsg(
        Code=code, Type=READ, ConnID=conn_id, ref=ref, conversation_id=conversation, expected=seq, retry_ms=retry_ms
    )
    if code:
        message.Msg = text(code)
    return frame(ACK, message.SerializeToString())


def error(code: Code, kind: Kind, ref: int = 0) -> bytes:
    """A refusal that belongs to no other frame, or the reason of a close."""
    return frame(ERROR, ErrorMsg(code=code, msg=text(code), type=kind, ref=ref).SerializeToString())


def kick(code: Code) -> bytes:
    """The session ended for good."""
    return frame(KICK, KickMsg(code=code, msg=text(code)).SerializeToString())


def redirect(gateways: Iterable[tuple[str, Gateway]]) -> bytes:
    """Go on through one of these gateways, (name, record), the best first."""
    message = RedirectMsg(
        gateways=[
            RedirectGateway(name=n, ip=g.ip, port=g.tcp, ws_port=g.ws, zone=g.zone, poll_port=g.poll)
            for n, g in gateways
        ]
    )
    return frame(REDIRECT, message.SerializeToString())


def synced(encoded: bytes) -> bytes:
    """A page that msg wrote (SyncedMsg)."""
    return frame(SYNCED, encoded)


def synced_refusal(code: Code, ref: int, retry_ms: int = 0) -> bytes:
    """No page now."""
    return frame(SYNCED, SyncedMsg(ref=ref, code=code, msg=text(code), retry_ms=retry_ms).SerializeToString())


def pulled(encoded: bytes) -> bytes:
    """Rows that msg wrote (PulledMsg)."""
    return frame(PULLED, encoded)


def pulled_refusal(code: Code, ref: int, conversation: str, retry_ms: int = 0) -> bytes:
    """No rows now."""
    message = PulledMsg(ref=ref, code=code, msg=text(code), conversation_id=conversation, retry_ms=retry_ms)
    return frame(PULLED, message.SerializeToString())


EMPTY_NOTIFY = frame(NOTIFY, b"")
"""A hint to Sync: numbered in a new run, it says nothing else."""
