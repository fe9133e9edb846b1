"""A client of a few bytes: says exactly what a test wants to say, in whatever order, and nothing by itself.

For peers that the real client never would be (mute, slow, broken, thousands). One TCP connection, no timer, no memory but
what was read and not yet asked for.
"""

from __future__ import annotations

import asyncio
import secrets
import uuid
from collections import deque
from types import TracebackType
from typing import Any, Final, TypeVar

from google.protobuf.message import Message as Proto
from plato.core.codes import Code
from plato.core.frames import FrameReader, pack
from plato.wire.v1 import client_pb2 as wire

WAIT_S: Final = 20.0
_Body = TypeVar("_Body", bound=Proto)


def frame(cmd_type: wire.CmdType.ValueType, body: Proto) -> bytes:
    """A whole TCP frame."""
    return pack(wire.MsgCmd(Type=cmd_type, Payload=body.SerializeToString()).SerializeToString())


class Raw:
    """Use as `async with await Raw.open(host, port) as raw:`."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer
        self.device_id = secrets.randbits(62) + 1
        self.conn_id = 0
        self.secret = b""
        self._frames = FrameReader(1 << 24)
        self._unread: deque[wire.MsgCmd] = deque()

    @classmethod
    async def open(cls, host: str, port: int) -> Raw:
        """Connects. Raises OSError."""
        return cls(*await asyncio.open_connection(host, port))

    async def __aenter__(self) -> Raw:
        return self

    async def __aexit__(
        self, _: type[BaseException] | None, __: BaseException | None, ___: TracebackType | None
    ) -> None:
        self.writer.transport.abort()

    async def write(self, data: bytes) -> None:
        """Sends bytes as they are."""
        self.writer.write(data)
        await self.writer.drain()

    async def send(self, cmd_type: wire.CmdType.ValueType, body: Proto) -> None:
        """Sends one frame."""
        await self.write(frame(cmd_type, body))

    def post(self, cmd_type: wire.CmdType.ValueType, body: Proto) -> None:
        """Sends one frame without waiting."""
        self.writer.write(frame(cmd_type, body))

    async def receive(self, wait_s: float = WAIT_S) -> wire.MsgCmd | None:
        """The next frame; None at the end of the connection. Raises TimeoutError."""
        async with asyncio.timeout(wait_s):
            while not self._unread:
                try:
                    data = await self.reader.read(65_536)
                except ConnectionError:
                    return None
                if not data:
                    return None
                self._unread += map(wire.MsgCmd.FromString, self._frames.feed(data))
        return self._unread.popleft()

    async def until(
        self, cmd_type: wire.CmdType.ValueType, kind: type[_Body], wait_s: float = WAIT_S, **fields: Any
    ) -> _Body:
        """The next frame of that type whose body has these fields; others are skipped. Raises EOFError at the end."""
        why = ""
        async with asyncio.timeout(wait_s):
            while True:
                cmd = await self.receive(wait_s)
                if cmd is None:
                    raise EOFError(f"closed before {wire.CmdType.Name(cmd_type)} came{why}")
                if cmd.Type == wire.ERROR:
                    why = f": code {wire.ErrorMsg.FromString(cmd.Payload).code}"
                if cmd.Type == cmd_type:
                    body = kind.FromString(cmd.Payload)
                    if all(getattr(body, name) == value for name, value in fields.items()):
                        return body

    async def final(self, answered: wire.CmdType.ValueType, wait_s: float = WAIT_S, **fields: Any) -> wire.ACKMsg:
        """The ACK of a frame of that type that is not "pending": a platform that is busy says so first."""
        async with asyncio.timeout(wait_s):
            while True:
                ack = await self.until(wire.ACK, wire.ACKMsg, wait_s, Type=answered, **fields)
                if ack.Code != Code.PENDING:
                    return ack

    async def ended(self, wait_s: float = WAIT_S) -> list[wire.MsgCmd]:
        """Waits for the end of the connection; returns the frames that came before it. Raises TimeoutError."""
        seen = []
        async with asyncio.timeout(wait_s):
            while (cmd := await self.receive(wait_s)) is not None:
                seen.append(cmd)
        return seen

    async def login(self, token: str, device_id: int | None = None) -> wire.ACKMsg:
        """Login; keeps conn_id and secret. Commits nothing."""
        self.device_id = device_id or self.device_id
        head = wire.LoginMsgHead(DeviceID=self.device_id)
        await self.send(wire.LOGIN, wire.LoginMsg(Head=head, token=token, platform="test"))
        ack = await self.final(wire.LOGIN)
        self.conn_id, self.secret = ack.ConnID, ack.secret
        return ack

    async def reconn(self, conn_id: int, secret: bytes) -> wire.ACKMsg:
        """ReConn into a session; keeps the new conn_id."""
        await self.send(wire.RECONN, wire.ReConnMsg(Head=wire.ReConnMsgHead(ConnID=conn_id), secret=secret))
        ack = await self.final(wire.RECONN)
        self.conn_id, self.secret = ack.ConnID, secret
        return ack

    async def sync(self, ref: int = 1) -> tuple[wire.ACKMsg, wire.SyncedMsg]:
        """Sync without cursors; returns the commit's answer and the first page."""
        await self.send(wire.SYNC, wire.SyncMsg(ref=ref))
        ack = await self.final(wire.SYNC, ref=ref)
        return ack, await self.until(wire.SYNCED, wire.SyncedMsg, ref=ref)

    async def enter(self, token: str, device_id: int | None = None) -> wire.ACKMsg:
        """Login and the committing Sync; returns the commit's answer. Raises AssertionError when either is refused."""
        ack = await self.login(token, device_id)
        assert ack.Code == 0, ack
        committed, _ = await self.sync()
        assert committed.Code == 0, committed
        return committed

    async def heartbeat(self) -> wire.ACKMsg:
        """One heartbeat and its answer."""
        await self.send(wire.HEARTBEAT, wire.HeartbeatMsg(Head=wire.HeartbeatMsgHead()))
        return await self.until(wire.ACK, wire.ACKMsg, Type=wire.HEARTBEAT)

    async def up(
        self,
        conversation_id: str,
        client_id: int,
        body: bytes,
        *,
        to_user: str = "",
        key: bytes | None = None,
        acked: int = 0,
        conn_id: int = 0,
    ) -> bytes:
        """Sends one UP; returns its client_msg_id. Does not wait."""
        key = key or uuid.uuid4().bytes
        head = wire.UPMsgHead(ClientID=client_id, SessionId=conversation_id, ConnID=conn_id)
        up = wire.UPMsg(Head=head, UPMsgBody=body, client_msg_id=key, to_user=to_user, acked=acked)
        await self.send(wire.UP, up)
        return key

    async def accepted(self, client_id: int, wait_s: float = WAIT_S) -> wire.ACKMsg:
        """The answer to an UP that is not "pending"."""
        return await self.final(wire.UP, wait_s, ClientID=client_id)

    async def logout(self) -> None:
        """Ends the session; waits for the close."""
        await self.send(wire.LOGOUT, wire.LogoutMsg())
        await self.ended()
