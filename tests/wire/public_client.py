"""The public client's frames, encoded by protoc from its own bare field list (public_client.proto), and the frozen ones.

`python -m tests.wire.public_client` prints the vectors anew; they are written down once and never change.
"""

from __future__ import annotations

import json
import tempfile
from functools import cache
from pathlib import Path
from typing import Any, Final

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from grpc_tools import protoc

HERE: Final = Path(__file__).resolve().parent
DEVICE_ID: Final = 123
CONN_ID: Final = 0x0123_4567_89AB_CDEF
"""The conn_id of the frozen vectors that name one."""
SESSION: Final = "1001"
BODY: Final = b'{"text":"hello"}'

LOGIN, HEARTBEAT, RECONN, ACK, UP, PUSH = range(6)


@cache
def _messages() -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "set"
        code = protoc.main(["protoc", f"-I{HERE}", f"--descriptor_set_out={out}", str(HERE / "public_client.proto")])
        if code:
            raise RuntimeError(f"protoc ended with code {code}")
        found = descriptor_pb2.FileDescriptorSet.FromString(out.read_bytes())
    pool = descriptor_pool.DescriptorPool()
    pool.Add(found.file[0])
    return {
        m.name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"public_client.{m.name}"))
        for m in found.file[0].message_type
    }


def message(name: str, **fields: Any) -> Any:
    """A message of the public client's own proto."""
    return _messages()[name](**fields)


def read(name: str, data: bytes) -> Any:
    """Decodes as the public client does: what it does not know is skipped."""
    return _messages()[name].FromString(data)


def frame(kind: int, inner: Any) -> bytes:
    """A whole TCP frame."""
    payload: bytes = message("MsgCmd", Type=kind, Payload=inner.SerializeToString()).SerializeToString()
    return len(payload).to_bytes(4, "big") + payload


def login() -> bytes:
    """Login: a DeviceID and nothing else."""
    return frame(LOGIN, message("LoginMsg", Head=message("LoginMsgHead", DeviceID=DEVICE_ID)))


def heartbeat() -> bytes:
    """Heartbeat with an empty head."""
    return frame(HEARTBEAT, message("HeartbeatMsg", Head=message("HeartbeatMsgHead")))


def reconn(conn_id: int) -> bytes:
    """ReConn: the last conn_id and nothing else."""
    return frame(RECONN, message("ReConnMsg", Head=message("ReConnMsgHead", ConnID=conn_id)))


def up(client_id: int, conn_id: int, body: bytes = BODY, session: str = SESSION) -> bytes:
    """UP: the first client_id of a connection is 0."""
    head = message("UPMsgHead", ClientID=client_id, ConnID=conn_id, SessionId=session)
    return frame(UP, message("UPMsg", Head=head, UPMsgBody=body))


def push_ack(conn_id: int) -> bytes:
    """The ACK of a push: it names no message, and its type is UP."""
    return frame(ACK, message("ACKMsg", Type=UP, ConnID=conn_id))


def redirect() -> bytes:
    """What newer clients of a draining gateway are sent: a type and a payload that this field list does not know."""
    gateway = b"\x0a\x06edge-1\x12\x0b203.0.113.7\x18\xce\x45\x20\xcf\x45"
    inner = b"\x0a" + bytes([len(gateway)]) + gateway
    payload: bytes = b"\x08\x0d\x12" + bytes([len(inner)]) + inner
    return len(payload).to_bytes(4, "big") + payload


def vectors() -> dict[str, str]:
    """Name → hex, made anew."""
    return {
        "login": login().hex(),
        "heartbeat": heartbeat().hex(),
        "reconn": reconn(CONN_ID).hex(),
        "up_first": up(0, CONN_ID).hex(),
        "up_second": up(1, CONN_ID).hex(),
        "up_without_conn_id": up(0, 0).hex(),
        "push_ack": push_ack(CONN_ID).hex(),
        "push_ack_without_conn_id": push_ack(0).hex(),
        "redirect_to_be_ignored": redirect().hex(),
    }


def frozen() -> dict[str, bytes]:
    """Name → frame, as written down."""
    found: dict[str, str] = json.loads((HERE / "vectors.json").read_text(encoding="utf-8"))
    return {name: bytes.fromhex(text) for name, text in found.items()}


if __name__ == "__main__":
    print(json.dumps(vectors(), indent=1))
