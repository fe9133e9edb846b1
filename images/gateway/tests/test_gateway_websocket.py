"""The WebSocket codec: messages of any cut and fragmentation become the same run; nothing escapes, whatever comes."""

from __future__ import annotations

import base64
import struct
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from plato.core.frames import pack
from plato_gateway.core import websocket
from plato_gateway.core.websocket import Inbound, Taken, close_frame, head, origin_allowed, upgrade

LIMIT = 200
BINARY, CONTINUATION, TEXT, CLOSE, PING, PONG = 2, 0, 1, 8, 9, 10


def frame(opcode: int, body: bytes, *, fin: bool = True, mask: bytes = b"\x11\x22\x33\x44", rsv: int = 0) -> bytes:
    """A client's frame, masked byte by byte."""
    first = (0x80 if fin else 0) | rsv << 4 | opcode
    n = len(body)
    length = bytes([0x80 | n]) if n < 126 else struct.pack(">BH", 0xFE, n) if n < 65536 else struct.pack(">BQ", 0xFF, n)
    return bytes([first]) + length + mask + bytes(b ^ mask[i % 4] for i, b in enumerate(body))


def feed(wire: bytes, step: int, limit: int = LIMIT) -> tuple[bytes, bytes, int | None]:
    """(run, answers, close) of a wire that comes in steps; after a close nothing more is fed, as the worker does."""
    inbound = Inbound(limit)
    run, answers = b"", b""
    for at in range(0, len(wire), step):
        taken = inbound.feed(wire[at : at + step])
        run += taken.run
        answers += taken.answers
        if taken.close is not None:
            return run, answers, taken.close
    return run, answers, None


MESSAGE = st.tuples(st.binary(min_size=1, max_size=LIMIT), st.integers(1, 4), st.booleans())


@given(st.lists(MESSAGE, max_size=5), st.binary(min_size=4, max_size=4), st.integers(1, 300))
def test_messages_become_one_run_however_they_are_cut(
    messages: list[tuple[bytes, int, bool]], mask: bytes, step: int
) -> None:
    wire, run, pongs = b"", b"", b""
    for body, parts, ping in messages:
        size = max(1, -(-len(body) // parts))
        pieces = [body[i : i + size] for i in range(0, len(body), size)]
        for i, piece in enumerate(pieces):
            wire += frame(BINARY if i == 0 else CONTINUATION, piece, fin=i == len(pieces) - 1, mask=mask)
            if ping:  # a control frame may stand between fragments
                wire += frame(PING, b"p" * i, mask=mask)
                pongs += bytes([0x8A, i]) + b"p" * i
        run += pack(body)
    assert feed(wire, step) == (run, pongs, None)
    assert feed(wire, max(1, len(wire))) == (run, pongs, None)


@given(st.binary(max_size=400), st.integers(1, 20))
def test_garbage_is_answered_and_nothing_escapes(data: bytes, step: int) -> None:
    whole, bytewise = feed(data, max(1, len(data))), feed(data, step)
    assert whole[2] == bytewise[2]
    assert whole[0] == bytewise[0]


@given(st.lists(st.sampled_from([0x00, 0x80, 0x01, 0x02, 0x82, 0x88, 0x89, 0x8A, 0xFF, 0xFE, 0x7F, 0x7E]), max_size=60))
def test_frames_of_odd_heads_are_answered_and_nothing_escapes(data: list[int]) -> None:
    wire = bytes(data)
    assert feed(wire, max(1, len(wire)))[2] == feed(wire, 1)[2]


@pytest.mark.parametrize(
    ("wire", "status"),
    [
        (frame(TEXT, b"hello"), websocket.UNSUPPORTED),
        (frame(BINARY, b"x", rsv=4), websocket.PROTOCOL_ERROR),
        (b"\x82\x01x", websocket.PROTOCOL_ERROR),  # not masked
        (frame(CONTINUATION, b"x"), websocket.PROTOCOL_ERROR),
        (frame(BINARY, b"a", fin=False) + frame(BINARY, b"b"), websocket.PROTOCOL_ERROR),
        (frame(3, b""), websocket.PROTOCOL_ERROR),
        (frame(11, b""), websocket.PROTOCOL_ERROR),
        (frame(PING, b"", fin=False), websocket.PROTOCOL_ERROR),
        (frame(PING, b"x" * 126), websocket.PROTOCOL_ERROR),
        (frame(BINARY, b""), websocket.TOO_BIG),
        (frame(BINARY, b"x" * (LIMIT + 1)), websocket.TOO_BIG),
        (frame(BINARY, b"x" * LIMIT, fin=False) + frame(CONTINUATION, b"y"), websocket.TOO_BIG),
        (frame(BINARY, b"x")[:1] + b"\xff" + b"\x7f" + b"\xff" * 7, websocket.TOO_BIG),
        (frame(CLOSE, b"\x03"), websocket.PROTOCOL_ERROR),
        (frame(CLOSE, struct.pack(">H", 1005)), websocket.PROTOCOL_ERROR),
        (frame(CLOSE, struct.pack(">H", 1000) + b"\xff"), websocket.PROTOCOL_ERROR),
    ],
)
def test_what_breaks_the_rules_is_closed_with_its_status(wire: bytes, status: int) -> None:
    for step in (1, len(wire)):
        # Masks that need not come: the verdict may fall on the head alone, or when the mask is there.
        assert feed(wire + b"\0" * 4, step)[2] == status


def test_a_frame_of_the_limit_passes_and_holds_nothing_after_it() -> None:
    inbound = Inbound(LIMIT)
    taken = inbound.feed(frame(BINARY, b"x" * LIMIT))
    assert taken == Taken(run=pack(b"x" * LIMIT))
    assert inbound.idle


def test_the_peers_close_is_echoed() -> None:
    taken = Inbound(LIMIT).feed(frame(BINARY, b"last") + frame(CLOSE, struct.pack(">H", 3001) + b"bye"))
    assert taken == Taken(pack(b"last"), close_frame(3001), 3001, answered=True)
    assert Inbound(LIMIT).feed(frame(CLOSE, b"")) == Taken(b"", close_frame(1000), 1000, answered=True)


@pytest.mark.parametrize("length", [1, 125, 126, 65_535, 65_536, 200_000])
def test_the_head_of_each_size(length: int) -> None:
    made = head(length)
    n, at = made[1], 2
    if n == 126:
        (n,), at = struct.unpack(">H", made[2:]), 4
    elif n == 127:
        (n,), at = struct.unpack(">Q", made[2:]), 10
    assert (made[0], n, len(made)) == (0x82, length, at)


# ── upgrade ──────────────────────────────────────────────────────────────────────────────────────────────────

KEY = b"dGhlIHNhbXBsZSBub25jZQ=="
GOOD = {
    b"host": b"x",
    b"upgrade": b"WebSocket",
    b"connection": b"keep-alive, Upgrade",
    b"sec-websocket-version": b"13",
    b"sec-websocket-key": KEY,
}


def ask(changes: dict[bytes, bytes] | None = None, method: bytes = b"GET", target: bytes = b"/ws") -> websocket.Upgrade:
    return upgrade(method, target, list({**GOOD, **(changes or {})}.items()), "/ws", ())


def test_an_upgrade_is_accepted_with_the_rfcs_own_example() -> None:
    answer = ask(target=b"/ws?a=b")
    assert answer.status == 101
    assert dict(answer.headers)[b"sec-websocket-accept"] == b"s3pPLMBiTxaQ9kYGzzhZRbK+xOo="
    assert b"sec-websocket-extensions" not in dict(answer.headers)


@pytest.mark.parametrize(
    ("changes", "method", "target", "status"),
    [
        ({}, b"POST", b"/ws", 405),
        ({}, b"GET", b"/", 404),
        ({b"upgrade": b"h2c"}, b"GET", b"/ws", 426),
        ({b"connection": b"close"}, b"GET", b"/ws", 426),
        ({b"sec-websocket-version": b"8"}, b"GET", b"/ws", 426),
        ({b"sec-websocket-key": b"short"}, b"GET", b"/ws", 400),
        ({b"sec-websocket-key": base64.b64encode(b"x" * 15)}, b"GET", b"/ws", 400),
        ({b"sec-websocket-key": b"\xff\xfe"}, b"GET", b"/ws", 400),
        ({b"origin": b"https://evil.example"}, b"GET", b"/ws", 403),
    ],
)
def test_a_bad_upgrade_is_refused_with_its_status(
    changes: dict[bytes, bytes], method: bytes, target: bytes, status: int
) -> None:
    assert ask(changes, method, target).status == status


@pytest.mark.parametrize(
    ("origin", "allowed", "fine"),
    [
        ("http://localhost:3000", (), True),
        ("http://127.0.0.1", (), True),
        ("http://[::1]:8080", (), True),
        ("https://app.localhost", (), True),
        ("https://example.org", (), False),
        ("http://localhost.example.org", (), False),
        ("null", (), False),
        ("http://[bad", (), False),
        ("https://example.org", ("https://example.org",), True),
        ("https://EXAMPLE.org", ("https://example.org/",), True),
        ("http://example.org", ("https://example.org",), False),
        ("http://localhost", ("https://example.org",), False),
    ],
)
def test_origins(origin: str, allowed: tuple[str, ...], fine: bool) -> None:
    assert origin_allowed(origin, allowed) is fine


def test_fragments_cost_what_they_bring_not_what_came_before_them() -> None:
    """Else a peer has the worker copy a whole message for each few bytes that it sends, and all others wait."""
    inbound = Inbound(1_048_576)
    inbound.feed(frame(BINARY, bytes(1_000_000), fin=False))
    begun_s = time.process_time()
    empty = frame(CONTINUATION, b"", fin=False) * 1_000
    for _ in range(200):
        assert inbound.feed(empty) == Taken()
    assert time.process_time() - begun_s < 5
    assert inbound.feed(frame(CONTINUATION, b"x")).run == pack(bytes(1_000_000) + b"x")
