"""Foreign clients against a whole running platform: the public Plato client as a guest, and a WebSocket library's user."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest
import websockets
from plato.core.codes import Code
from plato.core.conversations import dialogue_id
from plato.core.frames import FrameReader, pack
from plato.local.cluster import LocalCluster
from plato.wire.v1 import client_pb2 as pb

from tests.wire import public_client as public

WAIT_S = 40.0
pytestmark = pytest.mark.timeout(90)


@pytest.fixture(scope="module")
def platform(new_cluster: Callable[..., LocalCluster]) -> Iterator[LocalCluster]:
    """A cluster that lets guests in."""
    found = new_cluster({"auth.guests": True})
    yield found
    found.down()


def test_the_vectors_are_what_protoc_makes_of_the_field_list() -> None:
    assert {name: data.hex() for name, data in public.frozen().items()} == public.vectors()


def test_our_own_stubs_read_the_vectors() -> None:
    """The numbers of types 0 to 5 and of their fields never change."""
    found = {name: pb.MsgCmd.FromString(data[4:]) for name, data in public.frozen().items()}
    assert found["login"].Type == pb.LOGIN
    assert pb.LoginMsg.FromString(found["login"].Payload).Head.DeviceID == 123
    assert found["heartbeat"].Type == pb.HEARTBEAT
    assert pb.HeartbeatMsg.FromString(found["heartbeat"].Payload).HasField("Head")
    assert pb.ReConnMsg.FromString(found["reconn"].Payload).Head.ConnID == public.CONN_ID
    up = pb.UPMsg.FromString(found["up_second"].Payload)
    assert (up.Head.ClientID, up.Head.ConnID, up.Head.SessionId, up.UPMsgBody) == (
        1,
        public.CONN_ID,
        public.SESSION,
        public.BODY,
    )
    ack = pb.ACKMsg.FromString(found["push_ack"].Payload)
    assert (ack.Type, ack.ConnID) == (pb.UP, public.CONN_ID)


def test_a_client_of_before_redirect_skips_it_and_ours_reads_it() -> None:
    data = public.frozen()["redirect_to_be_ignored"]
    assert public.read("MsgCmd", data[4:]).Type not in range(6), "no type that an older client acts on"
    cmd = pb.MsgCmd.FromString(data[4:])
    (gateway,) = pb.RedirectMsg.FromString(cmd.Payload).gateways
    assert (cmd.Type, gateway.name, gateway.ip) == (pb.REDIRECT, "edge-1", "203.0.113.7")
    assert (gateway.port, gateway.ws_port) == (8910, 8911)


class Guest:
    """A socket on which the public client's bytes are sent, and what comes is read as that client reads it."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self.writer = writer
        self._frames = FrameReader()
        self._unread: list[bytes] = []
        self._pushes: list[Any] = []  # that came while an answer was waited for
        self._pushed: set[int] = set()
        self.kinds: list[int] = []
        self.conn_id = 0

    def send(self, *frames: bytes) -> None:
        self.writer.write(b"".join(frames))

    async def receive(self) -> Any:
        """The next frame's body, an ACKMsg or a PushMsg. A push that is repeated, as its ACK took long, is passed over."""
        while True:
            async with asyncio.timeout(WAIT_S):
                while not self._unread:
                    data = await self._reader.read(65_536)
                    assert data, "the platform closed the connection"
                    self._unread += self._frames.feed(data)
            cmd = public.read("MsgCmd", self._unread.pop(0))
            self.kinds.append(cmd.Type)
            body = public.read({public.ACK: "ACKMsg", public.PUSH: "PushMsg"}[cmd.Type], cmd.Payload)
            if cmd.Type != public.PUSH or body.MsgID not in self._pushed:
                self._pushed |= {body.MsgID} if cmd.Type == public.PUSH else set()
                return body

    async def answer(self, kind: int, client_id: int = 0) -> Any:
        """The ACK of a frame. Pushes may come before it, also that of the same message: they wait for `push`."""
        while True:
            body = await self.receive()
            if self.kinds[-1] == public.PUSH:
                self._pushes.append(body)
            elif (body.Type, body.ClientID) == (kind, client_id) and body.Code != Code.PENDING:
                return body

    async def push(self) -> Any:
        """The next push; not acknowledged yet."""
        if self._pushes:
            return self._pushes.pop(0)
        while True:
            body = await self.receive()
            if self.kinds[-1] == public.PUSH:
                return body


@asynccontextmanager
async def guest(address: str) -> AsyncIterator[Guest]:
    host, port = address.split("//")[-1].rsplit(":", 1)
    found = Guest(*await asyncio.open_connection(host, int(port)))
    try:
        yield found
    finally:
        found.writer.transport.abort()


async def test_the_public_client_logs_in_beats_sends_and_is_pushed_to(platform: LocalCluster) -> None:
    vectors = public.frozen()
    one, two = platform.gateway_addresses("tcp")
    async with guest(one) as alice, guest(two) as bob:
        for person in (alice, bob):
            person.send(vectors["login"])
            welcome = await person.answer(public.LOGIN)
            assert welcome.Code == 0, welcome
            person.conn_id = welcome.ConnID
            assert person.conn_id
        assert alice.conn_id != bob.conn_id
        alice.send(vectors["heartbeat"])
        assert (await alice.answer(public.HEARTBEAT)).Code == 0
        # The first message joins the open conversation; the sender gets the push too, as this client expects.
        alice.send(public.up(0, alice.conn_id))
        first = await alice.answer(public.UP, 0)
        assert (first.Code, first.ConnID) == (0, alice.conn_id)
        own = await alice.push()
        assert (own.Content, own.SessionID) == (public.BODY, 1001)
        assert own.MsgID
        alice.send(public.push_ack(alice.conn_id))
        # The frozen bytes, which name no connection.
        bob.send(vectors["up_without_conn_id"])
        assert (await bob.answer(public.UP, 0)).Code == 0
        theirs = await bob.push()
        assert theirs.Content == public.BODY
        bob.send(vectors["push_ack_without_conn_id"])
        got = await alice.push()
        assert (got.MsgID, got.Content, got.SessionID) == (theirs.MsgID, public.BODY, 1001)
        assert got.MsgID > own.MsgID
        alice.send(public.push_ack(alice.conn_id))
        # Many in one packet, in order, one push at a time.
        alice.send(*(public.up(n, alice.conn_id, f"{n}".encode()) for n in range(1, 9)))
        bodies: list[bytes] = []
        while len(bodies) < 8:
            bodies.append((await bob.push()).Content)
            bob.send(public.push_ack(bob.conn_id))
        assert bodies == [f"{n}".encode() for n in range(1, 9)]
    assert set(alice.kinds + bob.kinds) <= {public.ACK, public.PUSH}, "a guest is sent nothing that it does not know"


async def test_the_public_client_survives_its_reconn(platform: LocalCluster) -> None:
    one, two = platform.gateway_addresses("tcp")
    async with guest(two) as other:
        other.send(public.login())
        other.conn_id = (await other.answer(public.LOGIN)).ConnID
        other.send(public.up(0, other.conn_id, b"here", "2002"))
        await other.answer(public.UP, 0)
        async with guest(one) as before:
            before.send(public.frozen()["login"])
            before.conn_id = (await before.answer(public.LOGIN)).ConnID
            before.send(public.up(0, before.conn_id, b"joined", "2002"))
            assert (await before.answer(public.UP, 0)).Code == 0
        async with guest(two) as again:
            again.send(public.reconn(before.conn_id))
            welcome = await again.answer(public.RECONN)
            assert welcome.Code == 0, welcome
            again.conn_id = welcome.ConnID
            assert again.conn_id not in (0, before.conn_id)
            again.send(public.frozen()["heartbeat"])
            assert (await again.answer(public.HEARTBEAT)).Code == 0
            again.send(public.up(0, again.conn_id, b"back", "2002"))  # it counts from 0 again
            assert (await again.answer(public.UP, 0)).Code == 0
            seen = []
            while b"back" not in seen:
                seen.append((await other.push()).Content)
                other.send(public.push_ack(other.conn_id))
            other.send(public.up(1, other.conn_id, b"welcome back", "2002"))
            while (await again.push()).Content != b"welcome back":
                again.send(public.push_ack(again.conn_id))


async def test_an_unknown_session_is_told_so(platform: LocalCluster) -> None:
    async with guest(platform.gateway_addresses("tcp")[0]) as stranger:
        stranger.send(public.frozen()["reconn"])
        refusal = await stranger.answer(public.RECONN)
        assert refusal.Code == Code.SESSION_UNKNOWN
        stranger.send(public.frozen()["login"])  # and may log in on the same socket
        assert (await stranger.answer(public.LOGIN)).Code == 0


async def test_m27_frames_in_any_pieces(platform: LocalCluster) -> None:
    """One frame byte by byte; ten frames in one packet."""
    async with guest(platform.gateway_addresses("tcp")[1]) as person:
        for byte in public.login():
            person.send(bytes([byte]))
            await person.writer.drain()
        person.conn_id = (await person.answer(public.LOGIN)).ConnID
        person.send(*(public.up(n, person.conn_id, f"{n}".encode(), "3003") for n in range(10)))
        answered: list[int] = []
        pushed: list[bytes] = []
        while len(answered) < 10 or len(pushed) < 10:
            body = await person.receive()
            if person.kinds[-1] == public.PUSH:
                pushed.append(body.Content)
                person.send(public.push_ack(person.conn_id))
            elif body.Code != Code.PENDING:
                answered.append(body.ClientID)
        assert answered == list(range(10))
        assert pushed == [f"{n}".encode() for n in range(10)]


# ── a WebSocket client of another library ────────────────────────────────────────────────────────────────────


class WebUser:
    """Plato's own wire over the `websockets` library: one binary message is one payload."""

    def __init__(self, socket: websockets.ClientConnection) -> None:
        self.socket = socket
        self._unread: list[pb.MsgCmd] = []

    async def send(self, kind: pb.CmdType.ValueType, body: Any) -> None:
        await self.socket.send(pb.MsgCmd(Type=kind, Payload=body.SerializeToString()).SerializeToString())

    async def receive(self, kind: pb.CmdType.ValueType, into: Any, **fields: Any) -> tuple[pb.MsgCmd, Any]:
        """The first frame of that type with these fields, and not "pending". Others stay for later: an ACK and a RECEIPT
        have no order, and what is not acknowledged in time comes again."""
        at = 0
        async with asyncio.timeout(WAIT_S):
            while True:
                if at == len(self._unread):
                    data = await self.socket.recv()
                    assert isinstance(data, bytes)
                    self._unread.append(pb.MsgCmd.FromString(data))
                cmd = self._unread[at]
                body = into.FromString(cmd.Payload) if cmd.Type == kind else None
                if (
                    body is not None
                    and getattr(body, "Code", 0) != Code.PENDING
                    and all(getattr(body, name) == value for name, value in fields.items())
                ):
                    del self._unread[at]
                    return cmd, body
                at += 1

    async def enter(self, token: str) -> None:
        head = pb.LoginMsgHead(DeviceID=uuid.uuid4().int >> 65)
        await self.send(pb.LOGIN, pb.LoginMsg(Head=head, token=token, platform="web"))
        _, welcome = await self.receive(pb.ACK, pb.ACKMsg)
        assert (welcome.Type, welcome.Code) == (pb.LOGIN, 0), welcome
        await self.send(pb.SYNC, pb.SyncMsg(ref=7))
        _, committed = await self.receive(pb.ACK, pb.ACKMsg)
        assert (committed.Type, committed.Code, committed.ref) == (pb.SYNC, 0, 7), committed
        _, page = await self.receive(pb.SYNCED, pb.SyncedMsg)
        assert (page.ref, page.code) == (7, 0)


async def test_a_websocket_library_logs_in_sends_and_receives(platform: LocalCluster) -> None:
    urls: Sequence[str] = platform.gateway_addresses("ws")
    urls = [u if u.startswith("ws://") else f"ws://{u}/ws" for u in urls]
    async with websockets.connect(urls[0]) as first, websockets.connect(urls[1]) as second:
        wendy, xaver = WebUser(first), WebUser(second)
        await wendy.enter(platform.token("wendy"))
        await xaver.enter(platform.token("xaver"))
        conversation_id = dialogue_id("wendy", "xaver")
        keys = [uuid.uuid4().bytes for _ in range(3)]
        for n, key in enumerate(keys, 1):
            head = pb.UPMsgHead(ClientID=n, SessionId=conversation_id)
            up = pb.UPMsg(Head=head, UPMsgBody=b"\x00\xff%d" % n, client_msg_id=key, to_user="xaver", acked=n - 1)
            await wendy.send(pb.UP, up)
            _, ack = await wendy.receive(pb.ACK, pb.ACKMsg)
            assert (ack.Type, ack.Code, ack.ClientID, ack.client_msg_id) == (pb.UP, 0, n, key)
            _, receipt = await wendy.receive(pb.RECEIPT, pb.ReceiptMsg, client_id=n)
            assert (receipt.seq, receipt.prev_seq, receipt.client_msg_id) == (n, n - 1, key)
            cmd, push = await xaver.receive(pb.PUSH, pb.PushMsg, seq=n)
            assert (push.Content, push.seq, push.MsgID) == (b"\x00\xff%d" % n, n, receipt.msg_id)
            assert (push.from_user, push.conversation_id) == ("wendy", conversation_id)
            await xaver.send(pb.ACK, pb.ACKMsg(Type=pb.PUSH, run=cmd.run, push_no=cmd.push_no))
        await xaver.send(pb.PULL, pb.PullMsg(ref=9, conversation_id=conversation_id, limit=2, newest_first=True))
        _, pulled = await xaver.receive(pb.PULLED, pb.PulledMsg)
        assert ([r.seq for r in pulled.rows], pulled.covered_from, pulled.covered_to) == ([2, 3], 2, 3)
        await xaver.send(pb.HEARTBEAT, pb.HeartbeatMsg())
        _, beat = await xaver.receive(pb.ACK, pb.ACKMsg)
        assert (beat.Type, beat.Code) == (pb.HEARTBEAT, 0)
        assert beat.push_no >= 3
        await wendy.send(pb.LOGOUT, pb.LogoutMsg())
        await asyncio.wait_for(wendy.socket.wait_closed(), WAIT_S)


async def test_a_message_in_fragments_is_one_frame(platform: LocalCluster) -> None:
    url = platform.gateway_addresses("ws")[0]
    async with websockets.connect(url if url.startswith("ws://") else f"ws://{url}/ws") as socket:
        user = WebUser(socket)
        login = pb.LoginMsg(Head=pb.LoginMsgHead(DeviceID=1), token=platform.token("yve"))
        whole = pb.MsgCmd(Type=pb.LOGIN, Payload=login.SerializeToString()).SerializeToString()
        await socket.send([whole[:1], whole[1:40], whole[40:]])
        _, welcome = await user.receive(pb.ACK, pb.ACKMsg)
        assert (welcome.Code, welcome.user_id) == (0, "yve")


def test_frozen_frames_carry_their_length() -> None:
    for name, data in public.frozen().items():
        assert FrameReader().feed(data) == [data[4:]], name
        assert pack(data[4:]) == data
