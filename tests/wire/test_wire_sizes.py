"""Frames of ordinary use fit into one packet: below 1,400 bytes with their length, a heartbeat below 512.

Ordinary: a token with an RSA signature, an hour of absence with twenty conversations, messages of a few hundred characters.
Each frame is made by the code that makes it in use, with numbers as large as they get.
"""

from __future__ import annotations

import base64
import json

import pytest
from plato.client.core import wire
from plato.client.core.model import Entry
from plato.client.core.session import VERSION
from plato.core.codes import Code
from plato.core.conversations import dialogue_id
from plato.core.frames import pack
from plato.runtime.settings import Settings
from plato.topology.record import Gateway
from plato.wire.v1 import client_pb2 as pb
from plato_gateway.core import websocket
from plato_state.core import answers
from plato_state.shard import Shard

PACKET_BYTES, BEAT_BYTES = 1_400, 512
NUMBER = (1 << 63) - 1
TIME_MS = (1 << 32) - 1
WORDS = ("Whoever reads this on a train gets it in one packet. " * 16)[:800].encode()
CONVERSATIONS = sorted((dialogue_id("alice", f"user-{n}"), 1_000_000 + n) for n in range(20))


def token() -> str:
    """As long as one that RS256 signed: the claims that are required, a key id, 256 bytes of signature."""
    user = "4f6b2a70-6f0a-4c57-9d3e-1f1d3c1f6a55"
    claims = {
        "sub": user,
        "iss": "https://login.example.com",
        "aud": "plato",
        "exp": 1_800_000_000,
        "iat": 1_799_996_400,
    }
    parts = [json.dumps({"alg": "RS256", "typ": "JWT", "kid": "2026-11-key-1"}).encode(), json.dumps(claims).encode()]
    return ".".join(base64.urlsafe_b64encode(part).decode().rstrip("=") for part in (*parts, b"\xff" * 256))


def numbered(kind: pb.CmdType.ValueType, inner: bytes) -> bytes:
    return pb.MsgCmd(Type=kind, Payload=inner, run=NUMBER, push_no=NUMBER).SerializeToString()


def frames() -> dict[str, bytes]:
    settings = Settings()
    told = Shard("plato-s0", settings.state, guests=False, max_frame_bytes=settings.gateway.max_frame_bytes).rules.told
    conversation, key, user = CONVERSATIONS[0][0], b"\xff" * 16, "u" * 64
    push = pb.PushMsg(
        MsgID=NUMBER,
        Content=WORDS,
        conversation_id=conversation,
        seq=NUMBER,
        prev_seq=NUMBER - 1,
        from_user=user,
        msg_type=TIME_MS,
        client_msg_id=key,
        server_at_ms=NUMBER,
        trace_id=key,
    )
    receipt = pb.ReceiptMsg(
        conversation_id=conversation,
        client_msg_id=key,
        client_id=NUMBER,
        msg_id=NUMBER,
        seq=NUMBER,
        prev_seq=NUMBER - 1,
        server_at_ms=NUMBER,
        trace_id=key,
    )
    page = pb.SyncedMsg(ref=NUMBER, more=True, covered_id=conversation)
    for conversation_id, seq in CONVERSATIONS[:10]:
        page.items.add(conversation_id=conversation_id, newest_seq=seq, first_cursor=seq, peer="user-17")
    gateways = [
        (f"plato-edge-{n}", Gateway("uid", n, 2, (), "203.0.113.107", 8900, 8901, "x:1", zone="eu-central-1a"))
        for n in range(10)
    ]
    entry = Entry(conversation, NUMBER, key, user, TIME_MS, WORDS)
    return {
        "LOGIN": wire.login(NUMBER, token(), "python", "cellular", VERSION, TIME_MS),
        "RECONN": wire.reconn(NUMBER, b"s" * 16, "cellular", TIME_MS),
        "ACK of LOGIN": answers.login_ack(pb.LOGIN, NUMBER, user, b"s" * 16, TIME_MS, told),
        "ACK, come later": answers.login_later(pb.LOGIN, NUMBER, TIME_MS),
        "SYNC": wire.sync(NUMBER, "", "", CONVERSATIONS),
        "ACK of SYNC": answers.sync_ack(NUMBER, NUMBER, NUMBER, NUMBER),
        "SYNCED": answers.synced(page.SerializeToString()),
        "UP": wire.up(entry, NUMBER),
        "ACK of UP": answers.up_ack(Code.EXPECTED, NUMBER, conversation, NUMBER, key, NUMBER),
        "RECEIPT": numbered(pb.RECEIPT, receipt.SerializeToString()),
        "PUSH": numbered(pb.PUSH, push.SerializeToString()),
        "ACK of PUSH": wire.push_ack(NUMBER, NUMBER),
        "NOTIFY": numbered(pb.NOTIFY, b""),
        "REDIRECT": answers.redirect(gateways),
        "HEARTBEAT": wire.heartbeat(NUMBER, NUMBER, TIME_MS),
        "ACK of HEARTBEAT": answers.heartbeat_ack(NUMBER, TIME_MS, NUMBER, NUMBER),
    }


@pytest.mark.parametrize("name", list(frames()))
def test_a_frame_of_ordinary_use_fits_into_one_packet(name: str) -> None:
    frame = frames()[name]
    limit = BEAT_BYTES if "HEARTBEAT" in name else PACKET_BYTES
    on_websocket = len(websocket.head(len(frame))) + 4 + len(frame)  # 4: a client's mask
    assert max(len(pack(frame)), on_websocket) < limit, f"{name}: {len(frame)} bytes"


def test_the_frames_are_no_toys() -> None:
    """What is measured holds what it says: a body of 800 bytes, a token, twenty cursors."""
    sizes = {name: len(frame) for name, frame in frames().items()}
    assert sizes["PUSH"] > len(WORDS)
    assert sizes["LOGIN"] > 550
    assert sizes["SYNC"] > 20 * len(CONVERSATIONS[0][0])
