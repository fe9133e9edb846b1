"""Peers that send mutated frames: a gateway worker's halves and a shard read them, and a good peer notices nothing.

Each frame begins as a true one (every type, as a client sends it), then bits flip, bytes go missing or come twice, inner and
outer lengths lie, two frames are spliced. Only documented answers may come back; state's own error counter must not move.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import AsyncIterator

import pytest
from plato.core.codes import Code
from plato.core.conversations import dialogue_id
from plato.core.frames import pack
from plato.wire.v1 import client_pb2 as wire
from prometheus_client import REGISTRY

from tests.datapath.road import Peer, Road, open_road

FRAMES = 1_500
SEED = 1


@pytest.fixture
async def road() -> AsyncIterator[Road]:
    async with open_road() as opened:
        yield opened


def true_frames(token: str) -> list[bytes]:
    """One payload of each kind that a client sends."""
    conversation = dialogue_id("mallory", "alice")
    bodies = [
        (wire.LOGIN, wire.LoginMsg(Head=wire.LoginMsgHead(DeviceID=5), token=token, platform="x" * 40)),
        (wire.HEARTBEAT, wire.HeartbeatMsg(Head=wire.HeartbeatMsgHead(), run=1, push_no=2)),
        (wire.RECONN, wire.ReConnMsg(Head=wire.ReConnMsgHead(ConnID=1 << 40), secret=b"s" * 16)),
        (wire.ACK, wire.ACKMsg(Type=wire.PUSH, run=1 << 40, push_no=7, ConnID=9)),
        (
            wire.UP,
            wire.UPMsg(
                Head=wire.UPMsgHead(ClientID=1, SessionId=conversation),
                UPMsgBody=b"body",
                client_msg_id=b"k" * 16,
                to_user="alice",
            ),
        ),
        (wire.SYNC, wire.SyncMsg(ref=1, cursors=[wire.Cursor(conversation_id=conversation, seq=3)])),
        (wire.PULL, wire.PullMsg(ref=2, conversation_id=conversation, from_seq=1, limit=10)),
        (wire.READ, wire.ACKMsg()),
        (wire.LOGOUT, wire.LogoutMsg()),
        (wire.KICK, wire.KickMsg(code=403)),
        (wire.SYNCED, wire.SyncedMsg(ref=1)),
    ]
    return [wire.MsgCmd(Type=kind, Payload=body.SerializeToString()).SerializeToString() for kind, body in bodies]


def mutated(chance: random.Random, frames: list[bytes]) -> bytes:
    """A payload that is wrong in one to four ways, or not at all."""
    made = bytearray(chance.choice(frames))
    for _ in range(chance.randrange(5)):
        at = chance.randrange(len(made) + 1)
        match chance.randrange(6):
            case 0 if made:
                made[at % len(made)] ^= 1 << chance.randrange(8)
            case 1:
                del made[at : at + chance.randrange(1, 9)]
            case 2:
                made[at:at] = chance.randbytes(chance.randrange(1, 9))
            case 3:
                made[at:at] = made[: chance.randrange(len(made) + 1)]
            case 4:
                made[at:] = chance.choice(frames)
            case _ if made:
                made[at % len(made)] = chance.choice((0, 1, 0x7F, 0x80, 0xFF))
    return bytes(made)


def errors() -> float:
    return REGISTRY.get_sample_value("plato_state_errors_total") or 0.0


async def beats(road: Road, peer: Peer) -> None:
    """The peer's heartbeat is answered, so everything before it was handled."""
    before = len(peer.find(wire.ACK, wire.ACKMsg, Type=wire.HEARTBEAT))
    peer.send(wire.HEARTBEAT, wire.HeartbeatMsg(Head=wire.HeartbeatMsgHead()))
    await road.until(lambda: len(peer.find(wire.ACK, wire.ACKMsg, Type=wire.HEARTBEAT, Code=Code.OK)) > before)


@pytest.mark.parametrize("logged_in", [False, True])
async def test_mutated_frames_harm_their_sender_only(road: Road, logged_in: bool) -> None:
    chance = random.Random(SEED + logged_in)
    good = await road.enter("alice", 1)
    frames = true_frames(road.tokens.issue("mallory"))
    before = errors()
    bad: Peer | None = None
    closed = 0
    for n in range(FRAMES):
        if bad is None:
            bad = await road.enter("mallory", 5) if logged_in else road.gateway.connect()
            if bad not in road.peers:
                road.peers.append(bad)
        with contextlib.suppress(OSError):  # it may be closed already
            bad.sock.sendall(pack(mutated(chance, frames) or b"\0"))
        if n % 10 == 9:
            await beats(road, good)
            if bad.conn_id not in road.gateway.sockets.fd_of:
                closed += 1
                bad.sock.close()
                road.peers.remove(bad)
                bad = None
    assert errors() == before, "something escaped that no answer is documented for"
    for peer in road.peers:
        for cmd in peer.got:
            assert cmd.Type in wire.CmdType.values()
            if cmd.Type == wire.ERROR:
                assert wire.ErrorMsg.FromString(cmd.Payload).code in set(Code)
    assert closed or not logged_in, "a logout or two must be among them, or the frames never arrived"
