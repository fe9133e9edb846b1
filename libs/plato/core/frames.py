"""Frames of the TCP wire: 4-byte big-endian length, then the payload; 1 ≤ length ≤ limit."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Final

from plato.core.codes import Code
from plato.core.errors import PeerError

DEFAULT_LIMIT_BYTES: Final = 65_536
_LENGTH = struct.Struct(">I")


def pack(payload: bytes) -> bytes:
    """One frame: the length and the payload."""
    return _LENGTH.pack(len(payload)) + payload


def whole_bytes(data: bytes | bytearray | memoryview, limit_bytes: int = DEFAULT_LIMIT_BYTES) -> int:
    """How many leading bytes of `data` are whole frames. Raises PeerError(FRAME_SIZE) at a bad length."""
    at, end = 0, len(data)
    unpack = _LENGTH.unpack_from
    while end - at >= 4:
        (length,) = unpack(data, at)
        if not 1 <= length <= limit_bytes:
            raise PeerError(Code.FRAME_SIZE, f"length {length}, limit {limit_bytes}")
        if end - at - 4 < length:
            break
        at += 4 + length
    return at


def split(run: bytes) -> Iterator[bytes]:
    """The payloads of a run of whole frames. A broken run (never from our own gateway) raises PeerError(MALFORMED)."""
    at, end = 0, len(run)
    while at < end:
        if end - at < 4:
            raise PeerError(Code.MALFORMED, "a frame was cut")
        (length,) = _LENGTH.unpack_from(run, at)
        at += 4
        if length < 1 or end - at < length:
            raise PeerError(Code.MALFORMED, "a frame was cut")
        yield run[at : at + length]
        at += length


class FrameReader:
    """Joins bytes as they come into frames; for clients and tests. Memory: at most one frame and one read."""

    def __init__(self, limit_bytes: int = DEFAULT_LIMIT_BYTES) -> None:
        self._limit_bytes = limit_bytes
        self._rest = b""

    def feed(self, data: bytes) -> list[bytes]:
        """The payloads that `data` completed, in order. Raises PeerError(FRAME_SIZE)."""
        joined = self._rest + data
        whole = whole_bytes(joined, self._limit_bytes)
        self._rest = joined[whole:]
        return list(split(joined[:whole]))
