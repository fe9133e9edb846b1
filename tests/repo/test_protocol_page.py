"""docs/protocol.md says what the code says: types, fields, codes, limits, and a session in bytes."""

from __future__ import annotations

import json
import re

import pytest
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from plato.api import names
from plato.client.core import backoff, repeats, session
from plato.core import codes
from plato.core.codes import Code
from plato.core.conversations import dialogue_id, group_id
from plato.core.frames import DEFAULT_LIMIT_BYTES, pack
from plato.runtime.settings import Settings
from plato.topology.record import Gateway
from plato.wire.v1 import client_pb2 as pb
from plato.wire.v1 import content_pb2 as content
from plato_gateway import downlink
from plato_gateway.core import websocket
from plato_ipconfig import app as ipconfig

from tests.repo.tracked import text

PAGE = text("docs/protocol.md")
MESSAGES: dict[str, Descriptor] = {
    **pb.DESCRIPTOR.message_types_by_name,
    **content.DESCRIPTOR.message_types_by_name,
}
SCALARS = {
    FieldDescriptor.TYPE_UINT64: "uint64",
    FieldDescriptor.TYPE_UINT32: "uint32",
    FieldDescriptor.TYPE_STRING: "string",
    FieldDescriptor.TYPE_BYTES: "bytes",
    FieldDescriptor.TYPE_BOOL: "bool",
}
ACTS = {
    codes.Action.NONE: "none",
    codes.Action.RETRY: "retry",
    codes.Action.RECONNECT: "reconnect",
    codes.Action.LOGIN: "log in",
    codes.Action.STOP: "stop",
}


def section(head: str) -> str:
    """What stands below a heading, up to the next one of its level or above."""
    level = head.split(" ", 1)[0]
    match = re.search(rf"^{re.escape(head)}$(.*?)(?=^#{{1,{len(level)}}} |\Z)", PAGE, re.DOTALL | re.MULTILINE)
    assert match, f"{head} is missing"
    return match[1]


def tables(part: str) -> list[list[list[str]]]:
    """The tables of a part: rows of cells, without head and rule."""
    found = re.findall(r"(?:^\|.*\|\n)+", part, re.MULTILINE)
    return [[[c.strip() for c in row.strip("|").split("|")] for row in t.strip().split("\n")[2:]] for t in found]


def type_of(field: FieldDescriptor) -> str:
    if field.enum_type is not None:
        name = field.enum_type.name
    elif field.message_type is not None:
        name = field.message_type.name
    else:
        name = SCALARS[field.type]
    return f"repeated {name}" if field.is_repeated else name


def test_the_types() -> None:
    rows = tables(section("## 3. Frames"))[0]
    assert {int(row[0]): row[1] for row in rows} == {v: k for k, v in pb.CmdType.items()}
    for row in rows:
        if not row[3].startswith("kept"):
            assert row[3] in MESSAGES, row


@pytest.mark.parametrize("name", sorted(MESSAGES))
def test_the_fields(name: str) -> None:
    found = tables(section(f"### {name}"))
    said = [(row[0], int(row[1]), row[2]) for row in found[0]] if found else []
    assert said == [(f.name, f.number, type_of(f)) for f in MESSAGES[name].fields]


def test_no_message_is_made_up() -> None:
    heads = set(re.findall(r"^### (\w+)$", PAGE, re.MULTILINE))
    assert heads == set(MESSAGES)


def test_the_codes() -> None:
    ranges, listed = tables(section("## 4. Codes"))
    said = [(int(row[0]), row[1], row[2], row[3]) for row in listed]
    assert said == [(int(c), c.name, ACTS[c.action], codes.TEXT[c]) for c in Code]
    for row in ranges:
        low, high = (int(n) for n in row[0].split(" – "))
        act = re.findall(r"\*\*(.+?)\*\*", row[1])[0]
        assert {ACTS[codes.action(n)] for n in range(low, high + 1)} == {act}
    assert ACTS[codes.action(500)] == "stop"
    assert f"400 – {session.CONNECTION_STOP_MAX}" in section("## 4. Codes")


def test_the_timers_and_limits() -> None:
    settings = Settings().state
    said = {row[0]: row[1] for row in tables(section("## 7. Timers"))[0]}
    names_told = ("heartbeat_ms", "resume_window_ms", "reconnect_delay_ms", "repeat_min_ms", "repeat_max_ms")
    for name in (*names_told, "connect_delay_ms", "connect_timeout_ms"):
        assert int(said[name].replace(",", "")) == getattr(settings, name) == getattr(repeats.Timing(), name), name
    bounds = repeats.Timing().heartbeat_floor_ms, repeats.Timing().heartbeat_ceiling_ms
    page = [int(said[f"heartbeat_{name}_ms"].replace(",", "")) for name in ("floor", "ceiling")]
    assert tuple(page) == bounds == settings.heartbeat_bounds_ms
    assert int(said["max_body_bytes"].replace(",", "")) == Settings().gateway.max_frame_bytes - 2_048
    assert int(said["login time-out"].replace(",", "")) == settings.login_timeout_ms
    assert int(said['"retry" codes']) == repeats.LATER_MIN_MS
    assert int(said["failed attempts"]) == backoff.BACKOFF_MIN_MS
    limits = {row[0]: row[1] for row in tables(section("## 9. Limits"))[0]}
    assert limits["frame"].startswith(f"1 to {DEFAULT_LIMIT_BYTES:,} bytes")
    assert int(limits["UP unanswered per connection"]) == settings.max_uplinks_per_connection
    assert Settings().gateway.send_queue_bytes == 1 << 20
    assert f"port {names.GATEWAY_TCP_PORT}" in PAGE
    assert f"port {names.GATEWAY_WS_PORT}, path `{names.WS_PATH}`" in PAGE
    assert f"(port {names.IPCONFIG_PORT})" in PAGE
    assert f"`{dialogue_id('alice', 'bob')}`" in PAGE
    assert f"`{group_id('alice', bytes(16))}`" in PAGE


def test_the_operations() -> None:
    said = {int(row[0]): row[1] for row in tables(section("## 12. Bodies and operations"))[0]}
    assert said == {number: name for name, number in content.MsgType.items() if number >= 1_000}
    settings = Settings().msg
    assert f"`msg.recall_limit_s` ({settings.recall_limit_s:,})" in PAGE
    assert f"`msg.edit_limit_s` ({settings.edit_limit_s:,})" in PAGE


def test_the_statuses_of_a_websocket() -> None:
    refused, closed = tables(section("### WebSocket: refusals and closes"))
    said = {int(status) for row in refused for status in row[0].split(", ")}
    key = (b"sec-websocket-key", b"AAAAAAAAAAAAAAAAAAAAAA==")
    asks = [(b"connection", b"upgrade"), (b"upgrade", b"websocket"), (b"sec-websocket-version", b"13")]
    judged = [
        websocket.upgrade(b"GET", b"/other", [*asks, key], names.WS_PATH, ()),
        websocket.upgrade(b"POST", b"/ws", [*asks, key], names.WS_PATH, ()),
        websocket.upgrade(b"GET", b"/ws", [key], names.WS_PATH, ()),
        websocket.upgrade(b"GET", b"/ws", asks, names.WS_PATH, ()),
        websocket.upgrade(b"GET", b"/ws", [*asks, key, (b"origin", b"https://a.example")], names.WS_PATH, ()),
    ]
    assert [answer.status for answer in judged] == [404, 405, 426, 400, 403]
    assert said == {answer.status for answer in judged} | {503, 408, 429, 431}, "the last four: tests of the gateway"
    numbers = {row[0]: row[1] for row in closed}
    own = [websocket.NORMAL, websocket.GOING_AWAY, websocket.PROTOCOL_ERROR, websocket.UNSUPPORTED, websocket.TOO_BIG]
    assert list(numbers) == [*map(str, own), f"{websocket.APPLICATION} + code"]
    for code, status in downlink._WS_STATUS.items():
        assert code.name in numbers[str(status)]
    for name, status in re.findall(r"(\d{4}) ([A-Z_]+)", numbers["4000 + code"]):
        assert int(name) == websocket.APPLICATION + Code[status]


def test_the_list_of_gateways() -> None:
    part = section("### Finding a gateway")
    block = re.search(r"```json\n(.*?)\n```", part, re.DOTALL)
    assert block
    (entry,) = json.loads(block[1])["data"]
    assert entry == ipconfig._entry("edge-0", Gateway("uid", 0, 2, (), "203.0.113.7", 8900, 8901, "x:1"))
    statuses = {row[0]: row[1] for row in tables(part)[0]}
    assert set(statuses) == {"401", "429", "503"}
    assert statuses["429"] == str(int(Code.BUSY))
    assert statuses["503"] == str(int(Code.UNAVAILABLE))
    tokens = (Code.TOKEN_EXPIRED, Code.TOKEN_NOT_YET_VALID, Code.TOKEN_INVALID)
    assert statuses["401"] == ", ".join(str(int(c)) for c in tokens)


def cmd(kind: pb.CmdType.ValueType, inner: object, run: int = 0, push_no: int = 0) -> bytes:
    payload: bytes = inner.SerializeToString()  # type: ignore[attr-defined]  # any message of the table
    return pb.MsgCmd(Type=kind, Payload=payload, run=run, push_no=push_no).SerializeToString()


def example() -> str:
    """A session of alice: she logs in, syncs, says hi to bob, hears from him."""
    conn_id, run = 402_573_470_999_089_152, 7
    secret, key, his = bytes(range(16)), bytes(range(16, 32)), bytes(range(32, 48))
    dialogue = dialogue_id("alice", "bob")
    head = pb.UPMsgHead(ClientID=1, SessionId=dialogue)
    told = Settings().state
    steps = [
        (">", "LOGIN", cmd(pb.LOGIN, pb.LoginMsg(Head=pb.LoginMsgHead(DeviceID=123), token="eyJ…"))),
        (
            "<",
            "ACK of the LOGIN: conn_id, secret, timers, user_id",
            cmd(
                pb.ACK,
                pb.ACKMsg(
                    Type=pb.LOGIN,
                    ConnID=conn_id,
                    secret=secret,
                    heartbeat_ms=told.heartbeat_ms,
                    resume_window_ms=told.resume_window_ms,
                    reconnect_delay_ms=told.reconnect_delay_ms,
                    repeat_min_ms=told.repeat_min_ms,
                    repeat_max_ms=told.repeat_max_ms,
                    max_body_bytes=63_488,
                    user_id="alice",
                    heartbeat_floor_ms=told.heartbeat_bounds_ms[0],
                    heartbeat_ceiling_ms=told.heartbeat_bounds_ms[1],
                    connect_delay_ms=told.connect_delay_ms,
                    connect_timeout_ms=told.connect_timeout_ms,
                ),
            ),
        ),
        (">", "SYNC, ref 1, no conversation known", cmd(pb.SYNC, pb.SyncMsg(ref=1))),
        (
            "<",
            "ACK of the SYNC: committed, run 7",
            cmd(pb.ACK, pb.ACKMsg(Type=pb.SYNC, ConnID=conn_id, ref=1, run=run)),
        ),
        ("<", "SYNCED, ref 1: nothing new, all covered", cmd(pb.SYNCED, pb.SyncedMsg(ref=1))),
        (
            ">",
            'UP, client_id 1, "hi", to bob',
            cmd(pb.UP, pb.UPMsg(Head=head, UPMsgBody=b"hi", client_msg_id=key, to_user="bob")),
        ),
        (
            "<",
            "ACK of the UP: accepted",
            cmd(
                pb.ACK,
                pb.ACKMsg(Type=pb.UP, ConnID=conn_id, ClientID=1, conversation_id=dialogue, client_msg_id=key),
            ),
        ),
        (
            "<",
            "RECEIPT, run 7, push_no 1: msg_id 42, seq 1",
            cmd(
                pb.RECEIPT,
                pb.ReceiptMsg(conversation_id=dialogue, client_msg_id=key, client_id=1, msg_id=42, seq=1),
                run,
                1,
            ),
        ),
        (
            "<",
            'PUSH, run 7, push_no 2: "yo" of bob, msg_id 43, seq 2, prev_seq 1',
            cmd(
                pb.PUSH,
                pb.PushMsg(
                    MsgID=43,
                    Content=b"yo",
                    conversation_id=dialogue,
                    seq=2,
                    prev_seq=1,
                    from_user="bob",
                    client_msg_id=his,
                ),
                run,
                2,
            ),
        ),
        (">", "ACK: both stored", cmd(pb.ACK, pb.ACKMsg(Type=pb.PUSH, run=run, push_no=2))),
        (
            ">",
            "HEARTBEAT: stored up to (7, 2)",
            cmd(pb.HEARTBEAT, pb.HeartbeatMsg(Head=pb.HeartbeatMsgHead(), run=run, push_no=2)),
        ),
    ]
    lines = []
    for way, words, payload in steps:
        frame = pack(payload).hex()
        lines.append(f"{way} {words}")
        lines += [f"    {frame[at : at + 96]}" for at in range(0, len(frame), 96)]
    return "\n".join(lines)


def test_the_session_in_bytes() -> None:
    block = re.search(r"```\n(.*?)\n```", section("## 11. A session in bytes"), re.DOTALL)
    assert block
    assert block[1] == example()
