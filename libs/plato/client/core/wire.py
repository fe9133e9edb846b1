"""Builds the frames that a client sends and reads those it gets. Payloads only: a link adds the length on TCP."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from google.protobuf.message import DecodeError

from plato.client.core.model import Entry, Row
from plato.core.codes import Code
from plato.core.errors import PeerError
from plato.wire.v1 import client_pb2 as pb

MAX_SEQ: Final = (1 << 63) - 1
"""Greater numbers fit no store; a peer that sends one is broken."""


def _cmd(kind: pb.CmdType.ValueType, inner: bytes) -> bytes:
    return pb.MsgCmd(Type=kind, Payload=inner).SerializeToString()


def login(device_id: int, token: str, platform: str, network: str, version: str, heartbeat_ms: int = 0) -> bytes:
    """Login of a device. heartbeat_ms: the interval learnt for this network; 0: none."""
    inner = pb.LoginMsg(
        Head=pb.LoginMsgHead(DeviceID=device_id),
        token=token,
        platform=platform,
        network=network,
        version=version,
        heartbeat_ms=heartbeat_ms,
    )
    return _cmd(pb.LOGIN, inner.SerializeToString())


def reconn(conn_id: int, secret: bytes, network: str = "", heartbeat_ms: int = 0) -> bytes:
    """ReConn into the session that `conn_id` last committed. network, heartbeat_ms: as in `login`."""
    head = pb.ReConnMsgHead(ConnID=conn_id)
    inner = pb.ReConnMsg(Head=head, secret=secret, network=network, heartbeat_ms=heartbeat_ms)
    return _cmd(pb.RECONN, inner.SerializeToString())


def heartbeat(run: int, push_no: int, heartbeat_ms: int = 0) -> bytes:
    """Heartbeat with the newest (run, push_no) whose content is stored, and the interval that is wished for (0: none)."""
    inner = pb.HeartbeatMsg(Head=pb.HeartbeatMsgHead(), run=run, push_no=push_no, heartbeat_ms=heartbeat_ms)
    return _cmd(pb.HEARTBEAT, inner.SerializeToString())


def push_ack(run: int, push_no: int) -> bytes:
    """Everything of `run` up to `push_no` is stored."""
    return _cmd(pb.ACK, pb.ACKMsg(Type=pb.PUSH, run=run, push_no=push_no).SerializeToString())


def up(entry: Entry, acked: int) -> bytes:
    """One uplink. Its client_msg_id is its trace id too: repeated sends are one trace."""
    inner = pb.UPMsg(
        Head=pb.UPMsgHead(ClientID=entry.client_id, SessionId=entry.conversation_id),
        UPMsgBody=entry.body,
        acked=acked,
        client_msg_id=entry.client_msg_id,
        to_user=entry.to_user,
        msg_type=entry.msg_type,
        trace_id=entry.client_msg_id,
    )
    return _cmd(pb.UP, inner.SerializeToString())


def sync(
    ref: int, after_id: str, upto_id: str, cursors: Iterable[tuple[str, int]], state_version: int | None = None
) -> bytes:
    """One page of Sync; cursors are (conversation_id, cursor), sorted by the ids' UTF-8 bytes. state_version: what the
    user's devices share is wanted, as far as it is newer than that."""
    inner = pb.SyncMsg(ref=ref, after_id=after_id, upto_id=upto_id)
    if state_version is not None:
        inner.want_state, inner.state_version = True, state_version
    for conversation_id, seq in cursors:
        inner.cursors.add(conversation_id=conversation_id, seq=seq)
    return _cmd(pb.SYNC, inner.SerializeToString())


def pull(ref: int, conversation_id: str, from_seq: int, to_seq: int, limit: int, newest_first: bool = False) -> bytes:
    """Rows from_seq..to_seq (0: to the newest), the oldest `limit` of them, or the newest."""
    inner = pb.PullMsg(
        ref=ref,
        conversation_id=conversation_id,
        from_seq=from_seq,
        to_seq=to_seq,
        limit=limit,
        newest_first=newest_first,
    )
    return _cmd(pb.PULL, inner.SerializeToString())


def read(ref: int, conversation_id: str, seq: int) -> bytes:
    """The user has read up to here."""
    return _cmd(pb.READ, pb.ReadMsg(ref=ref, conversation_id=conversation_id, seq=seq).SerializeToString())


def typing(conversation_id: str, stopped: bool) -> bytes:
    """The user writes, or stopped to."""
    return _cmd(pb.TYPING, pb.TypingMsg(conversation_id=conversation_id, stopped=stopped).SerializeToString())


def logout() -> bytes:
    """End the session now."""
    return _cmd(pb.LOGOUT, pb.LogoutMsg().SerializeToString())


def open_cmd(payload: bytes) -> pb.MsgCmd:
    """The outer frame. Raises PeerError(MALFORMED)."""
    try:
        return pb.MsgCmd.FromString(payload)
    except DecodeError as e:
        raise PeerError(Code.MALFORMED, "a frame of the server") from e


def row_of(push: pb.PushMsg) -> Row:
    """A Push or a pulled row. Raises PeerError(MALFORMED) for numbers that no store can keep."""
    if not 0 <= push.prev_seq < push.seq <= MAX_SEQ or push.MsgID > MAX_SEQ or push.server_at_ms > MAX_SEQ:
        raise PeerError(Code.MALFORMED, f"seq {push.seq} after {push.prev_seq}, msg_id {push.MsgID}")
    return Row(
        push.conversation_id,
        push.seq,
        push.prev_seq,
        push.MsgID,
        push.from_user,
        push.msg_type,
        push.Content,
        push.client_msg_id,
        push.server_at_ms,
        min(push.changed_seq, MAX_SEQ),
        push.recalled,
    )


def rows_of(pulled: pb.PulledMsg) -> Sequence[Row]:
    """The rows of a page, by rising seq; rows without a conversation_id take the page's. Raises PeerError(MALFORMED)."""
    rows = []
    for push in pulled.rows:
        if not push.conversation_id:
            push.conversation_id = pulled.conversation_id
        rows.append(row_of(push))
    rows.sort(key=lambda row: row.seq)
    return rows
