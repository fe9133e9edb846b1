"""WebSocket (RFC 6455) as the gateway speaks it: server side, no extension, binary messages only.

In: masked frames. `Inbound.feed` turns bytes into a run of length-prefixed payloads (the same that a TCP listener
forwards), the control frames to answer with, and the reason to close, if any. Out: `head` is what stands before an
unmasked payload. Fragments are joined up to the frame limit. An Inbound exists only while a frame or message is unfinished.

Memory: at most one frame (limit + 14 bytes), one message under way (limit) and one read.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import ipaddress
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final
from urllib.parse import urlsplit

BINARY_HEAD: Final = 0x82
NORMAL: Final = 1000
GOING_AWAY: Final = 1001
PROTOCOL_ERROR: Final = 1002
UNSUPPORTED: Final = 1003
TOO_BIG: Final = 1009
APPLICATION: Final = 4000
"""A close that the gateway itself decides is APPLICATION + its wire code, where RFC 6455 has no better number."""

_GUID = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
_CONTINUATION, _TEXT, _BINARY, _CLOSE, _PING, _PONG = 0x0, 0x1, 0x2, 0x8, 0x9, 0xA
_LENGTH = struct.Struct(">I")
_HEAD16 = struct.Struct(">BBH")
_HEAD64 = struct.Struct(">BBQ")
_VALID_CLOSE = frozenset((*range(1000, 1004), *range(1007, 1015), *range(3000, 5000)))


@dataclass(frozen=True, slots=True)
class Taken:
    """What some bytes amounted to.

    run: length-prefixed payloads, whole messages; answers: frames to send back; close: None, or the status of the close
    that is to be sent (or was answered, then `answers` holds it already and `answered` is true).
    """

    run: bytes = b""
    answers: bytes = b""
    close: int | None = None
    answered: bool = False


def head(length: int) -> bytes:
    """The header of an unmasked binary message of `length` bytes."""
    if length < 126:
        return bytes((BINARY_HEAD, length))
    if length < 65_536:
        return _HEAD16.pack(BINARY_HEAD, 126, length)
    return _HEAD64.pack(BINARY_HEAD, 127, length)


def messages(run: bytes) -> bytes:
    """Frames that stand in a row, each with its 4-byte big-endian length, as unmasked binary messages."""
    parts: list[bytes] = []
    at, end = 0, len(run)
    while at < end:
        start = at + 4
        at = start + int.from_bytes(run[start - 4 : start], "big")
        parts += (head(at - start), run[start:at])
    return b"".join(parts)


def close_frame(status: int, reason: str = "") -> bytes:
    """An unmasked close frame; the reason is cut to fit."""
    body = struct.pack(">H", status) + reason.encode()[:123].decode(errors="ignore").encode()
    return bytes((0x80 | _CLOSE, len(body))) + body


def unmask(data: bytes, mask: bytes) -> bytes:
    """`data` XOR the repeated 4-byte mask, in C: by one big integer."""
    n = len(data)
    repeated = (mask * (n // 4 + 1))[:n]
    return (int.from_bytes(data, "little") ^ int.from_bytes(repeated, "little")).to_bytes(n, "little")


class Inbound:
    """One connection's unfinished bytes: a cut frame, a message under way."""

    __slots__ = ("_buffer", "_limit_bytes", "_message", "_need_bytes")

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._buffer = bytearray()
        self._need_bytes = 2
        self._message: bytearray | None = None
        """The fragments of a message so far; None: no message is under way."""

    @property
    def idle(self) -> bool:
        """True when nothing is unfinished, so that the object can go."""
        return not self._buffer and self._message is None

    def feed(self, data: bytes) -> Taken:
        """Takes bytes as they come. Raises nothing: whatever the peer sent, the answer is in Taken."""
        buffer = self._buffer
        buffer += data
        if len(buffer) < self._need_bytes:
            return Taken()
        run: list[bytes] = []
        answers: list[bytes] = []
        close: int | None = None
        answered = False
        at, end = 0, len(buffer)
        self._need_bytes = 2
        while end - at >= 2:
            first, second = buffer[at], buffer[at + 1]
            opcode, length = first & 0x0F, second & 0x7F
            header = 6
            if length == 126:
                header = 8
                if end - at >= 4:
                    length = int.from_bytes(buffer[at + 2 : at + 4], "big")
            elif length == 127:
                header = 14
                if end - at >= 10:
                    length = int.from_bytes(buffer[at + 2 : at + 10], "big")
            close = self._refusal(first, second)
            if close is not None:
                break
            if end - at < header:
                self._need_bytes = header
                break
            if opcode < 8 and length + len(self._message or b"") > self._limit_bytes:
                close = TOO_BIG
                break
            if end - at < header + length:
                self._need_bytes = header + length
                break
            body = unmask(
                bytes(buffer[at + header : at + header + length]), bytes(buffer[at + header - 4 : at + header])
            )
            at += header + length
            if opcode < 8:
                if not first & 0x80:
                    if self._message is None:
                        self._message = bytearray()
                    self._message += body  # joined at the end: a copy per fragment would be a peer's to multiply
                    continue
                message = body if self._message is None else bytes(self._message + body)
                self._message = None
                if not message:
                    close = TOO_BIG
                    break
                run += (_LENGTH.pack(len(message)), message)
            elif opcode == _PING:
                answers += (bytes((0x80 | _PONG, len(body))), body)
            elif opcode == _CLOSE:
                close, answered = _close_status(body)
                if answered:
                    answers.append(close_frame(close))
                break
        del buffer[:at]
        return Taken(b"".join(run), b"".join(answers), close, answered)

    def _refusal(self, first: int, second: int) -> int | None:
        """The close status that a frame's first two bytes deserve; None: fine."""
        opcode = first & 0x0F
        if first & 0x70 or not second & 0x80:
            return PROTOCOL_ERROR  # a reserved bit (no extension was agreed), or not masked
        if opcode >= 8:
            if opcode > _PONG or not first & 0x80 or second & 0x7F > 125:
                return PROTOCOL_ERROR  # unknown, fragmented or long control frame
            return None
        if opcode == _TEXT:
            return UNSUPPORTED
        if opcode == _BINARY:
            return None if self._message is None else PROTOCOL_ERROR
        if opcode == _CONTINUATION:
            return PROTOCOL_ERROR if self._message is None else None
        return PROTOCOL_ERROR


def _close_status(body: bytes) -> tuple[int, bool]:
    """The status to close with after the peer's close frame, and whether it is the peer's own, echoed."""
    if not body:
        return NORMAL, True
    if len(body) == 1:
        return PROTOCOL_ERROR, False
    status = int.from_bytes(body[:2], "big")
    try:
        body[2:].decode()
    except UnicodeDecodeError:
        return PROTOCOL_ERROR, False
    if status not in _VALID_CLOSE:
        return PROTOCOL_ERROR, False
    return status, True


@dataclass(frozen=True, slots=True)
class Upgrade:
    """The answer to an upgrade request: status 101 and its headers, or a refusal with a line of text."""

    status: int
    headers: list[tuple[bytes, bytes]]
    text: bytes = b""


def upgrade(
    method: bytes, target: bytes, headers: Iterable[tuple[bytes, bytes]], path: str, origins: Sequence[str]
) -> Upgrade:
    """Judges an upgrade request. `headers` have lower-case names, as h11 gives them; `path` is where WebSocket is served;
    `origins` are allowed ones (empty: any loopback). Requests without Origin come from no browser and are let in."""
    fields: dict[bytes, bytes] = {}
    for name, value in headers:
        fields[name] = fields[name] + b", " + value if name in fields else value
    if target.split(b"?", 1)[0] != path.encode():
        return _refused(404, f"WebSocket is served at {path}")
    if method != b"GET":
        return _refused(405, "WebSocket begins with GET", (b"allow", b"GET"))
    tokens = [t.strip().lower() for t in fields.get(b"connection", b"").split(b",")]
    if fields.get(b"upgrade", b"").strip().lower() != b"websocket" or b"upgrade" not in tokens:
        return _refused(426, "this port speaks WebSocket only", (b"upgrade", b"websocket"), (b"connection", b"upgrade"))
    if fields.get(b"sec-websocket-version", b"").strip() != b"13":
        return _refused(426, "version 13 of WebSocket is spoken here", (b"sec-websocket-version", b"13"))
    key = fields.get(b"sec-websocket-key", b"").strip()
    try:
        if len(base64.b64decode(key, validate=True)) != 16:
            return _refused(400, "Sec-WebSocket-Key must be 16 bytes in base64")
    except (binascii.Error, ValueError):
        return _refused(400, "Sec-WebSocket-Key must be 16 bytes in base64")
    origin = fields.get(b"origin")
    if origin is not None and not origin_allowed(origin.decode("latin-1"), origins):
        return _refused(403, "this origin is not allowed; the setting is gateway.ws_origins")
    accept = base64.b64encode(hashlib.sha1(key + _GUID).digest())
    return Upgrade(101, [(b"upgrade", b"websocket"), (b"connection", b"Upgrade"), (b"sec-websocket-accept", accept)])


def origin_allowed(origin: str, allowed: Sequence[str]) -> bool:
    """Whether a browser's Origin may come in; with nothing allowed by name, any loopback host may."""
    if allowed:
        return origin.rstrip("/").lower() in {o.rstrip("/").lower() for o in allowed}
    try:
        host = urlsplit(origin).hostname or ""
    except ValueError:
        return False
    if host == "localhost" or host.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _refused(status: int, text: str, *headers: tuple[bytes, bytes]) -> Upgrade:
    body = text.encode() + b"\n"
    usual = [
        (b"content-type", b"text/plain; charset=utf-8"),
        (b"content-length", str(len(body)).encode()),
        (b"connection", b"close"),
    ]
    return Upgrade(status, [*usual, *(h for h in headers if h[0] != b"connection")], body)
