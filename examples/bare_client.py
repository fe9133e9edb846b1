"""The smallest client that docs/protocol.md allows: a socket, protobuf, no memory. It logs in, says one thing, and shows
what comes until it has its receipt.

    .venv/bin/python examples/bare_client.py alice bob "$(.venv/bin/plato token alice)" "hello"

A real client keeps an outbox and cursors (sections 5 and 6 of that page); this one shows the frames.
"""

from __future__ import annotations

import argparse
import secrets
import socket
import uuid
from typing import Any

from google.protobuf.message import Message
from plato.core.conversations import dialogue_id
from plato.wire.v1 import client_pb2 as pb


class Wire:
    """Frames over one TCP connection."""

    def __init__(self, host: str, port: int) -> None:
        self._socket = socket.create_connection((host, port), timeout=10)

    def send(self, kind: pb.CmdType.ValueType, body: Message) -> None:
        """One frame: 4 bytes of length, then MsgCmd."""
        payload = pb.MsgCmd(Type=kind, Payload=body.SerializeToString()).SerializeToString()
        self._socket.sendall(len(payload).to_bytes(4, "big") + payload)

    def receive(self) -> pb.MsgCmd:
        """The next frame. Raises ConnectionError at the end."""
        return pb.MsgCmd.FromString(self._exactly(int.from_bytes(self._exactly(4), "big")))

    def ack(self, kind: pb.CmdType.ValueType) -> Any:
        """The ACK of a frame of ours that is not "pending"; everything else on the way is skipped."""
        while True:
            cmd = self.receive()
            if cmd.Type == pb.ACK:
                ack = pb.ACKMsg.FromString(cmd.Payload)
                if ack.Type == kind and ack.Code != 2:
                    return ack

    def close(self) -> None:
        """Closes the socket; the session waits for a ReConn that this client will not send."""
        self._socket.close()

    def _exactly(self, count: int) -> bytes:
        data = b""
        while len(data) < count:
            more = self._socket.recv(count - len(data))
            if not more:
                raise ConnectionError("the platform closed the connection")
            data += more
        return data


def main() -> None:
    """Login, Sync, UP; then pushes and the receipt."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("user")
    parser.add_argument("to")
    parser.add_argument("token")
    parser.add_argument("words")
    parser.add_argument("--gateway", default="127.0.0.1:8900")
    asked = parser.parse_args()
    host, port = asked.gateway.rsplit(":", 1)
    wire = Wire(host, int(port))
    wire.send(pb.LOGIN, pb.LoginMsg(Head=pb.LoginMsgHead(DeviceID=secrets.randbits(63) + 1), token=asked.token))
    welcome = wire.ack(pb.LOGIN)
    if welcome.Code:
        raise SystemExit(f"refused: {welcome.Msg}")
    wire.send(pb.SYNC, pb.SyncMsg(ref=1))
    committed = wire.ack(pb.SYNC)
    print(f"{welcome.user_id} is connection {committed.ConnID}")
    key = uuid.uuid4().bytes
    head = pb.UPMsgHead(ClientID=1, SessionId=dialogue_id(asked.user, asked.to))
    wire.send(pb.UP, pb.UPMsg(Head=head, UPMsgBody=asked.words.encode(), client_msg_id=key, to_user=asked.to))
    while True:
        cmd = wire.receive()
        if cmd.run:
            wire.send(pb.ACK, pb.ACKMsg(Type=pb.PUSH, run=cmd.run, push_no=cmd.push_no))
        if cmd.Type == pb.PUSH:
            push = pb.PushMsg.FromString(cmd.Payload)
            print(f"[{push.seq}] {push.from_user}: {push.Content.decode('utf-8', 'replace')}")
        elif cmd.Type == pb.RECEIPT:
            receipt = pb.ReceiptMsg.FromString(cmd.Payload)
            if receipt.client_msg_id == key:
                print(
                    f"[{receipt.seq}] has msg_id {receipt.msg_id}" if receipt.code < 100 else f"refused: {receipt.msg}"
                )
                break
    wire.send(pb.LOGOUT, pb.LogoutMsg())
    while wire.receive().Type != pb.KICK:  # LOGGED_OUT; the close follows
        pass
    wire.close()


if __name__ == "__main__":
    try:
        main()
    except OSError as e:  # nobody listens there, or the connection ended
        raise SystemExit(f"{e}; is Plato up?") from None
