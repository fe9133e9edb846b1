"""Long polling: a connection made of short HTTP requests. Its bodies, and what keeps frames in order and single.

    sender   Outgoing: number 1, 2, 3 … ─▸ page of what is not confirmed ─▸ a body
    receiver Incoming: what was had before is passed over, what jumps ahead is not taken ─▸ the number up to which it has all

Both sides have one of each. A body that is lost, doubled or late changes nothing: what is not confirmed is said again, and
what was taken is known by its number. A request and an answer have the same form:

    version u8 · flags u8 · session 16 bytes · a u32 · b u32 · received u64 · first u64 · frames, each u32 length and payload

all big-endian; a, b: in a request how long to wait (ms) and how many bytes of frames to answer with, in an answer the
longest wait that is kept and how long a session may be silent (ms). received: the sender of the body has every frame up to
this number. first: the number of the body's first frame.

Memory: an Outgoing holds what is not confirmed; `size_bytes` says how much, its owner bounds it.
"""

from __future__ import annotations

import struct
from collections import deque
from dataclasses import dataclass
from typing import Final

from plato.core.codes import Code
from plato.core.errors import PeerError
from plato.core.frames import split, whole_bytes

VERSION: Final = 1
OPEN: Final = 1
"""In a request: begin a connection; session is sixteen zeros."""
CLOSE: Final = 2
"""In a request: end the connection when these frames are taken."""
END: Final = 1
"""In an answer: the connection is over; the frames here, if any, are its last."""
SESSION_BYTES: Final = 16
NO_SESSION: Final = bytes(SESSION_BYTES)
PAGE_BYTES: Final = 65_536
"""A body carries at most so many bytes of frames, or a single frame."""

_HEAD: Final = struct.Struct(">BB16sIIQQ")
HEAD_BYTES: Final = _HEAD.size


@dataclass(frozen=True, slots=True)
class Body:
    """A request or an answer; a and b as above. run: whole frames, joined."""

    flags: int = 0
    session: bytes = NO_SESSION
    a: int = 0
    b: int = 0
    received: int = 0
    first: int = 1
    run: bytes = b""

    def encode(self) -> bytes:
        """The bytes of the body."""
        head = _HEAD.pack(VERSION, self.flags, self.session, self.a, self.b, self.received, self.first)
        return head + self.run


def decode(data: bytes) -> Body:
    """Reads a body. Raises PeerError(MALFORMED); the frames are not looked at yet."""
    if len(data) < HEAD_BYTES:
        raise PeerError(Code.MALFORMED, f"a body of {len(data)} bytes has no head")
    version, flags, session, a, b, received, first = _HEAD.unpack_from(data)
    if version != VERSION:
        raise PeerError(Code.MALFORMED, f"version {version} of long polling, here {VERSION}")
    return Body(flags, session, a, b, received, first, data[HEAD_BYTES:])


class Outgoing:
    """Frames that the other side has not confirmed, each with its length in front, by number."""

    def __init__(self) -> None:
        self.last = 0
        """Number of the newest frame."""
        self.size_bytes = 0
        self._frames: deque[bytes] = deque()

    def __len__(self) -> int:
        return len(self._frames)

    def put(self, frame: bytes) -> None:
        """Takes the next frame, with its length in front."""
        self.last += 1
        self._frames.append(frame)
        self.size_bytes += len(frame)

    def confirmed(self, received: int) -> bool:
        """The other side has everything up to this number. False: it never was that much."""
        if received > self.last:
            return False
        for _ in range(received - (self.last - len(self._frames))):
            self.size_bytes -= len(self._frames.popleft())
        return True

    def page(self, most_bytes: int = PAGE_BYTES) -> tuple[int, bytes]:
        """(number of the first frame, frames): what is not confirmed, from the oldest on, at least one if there is any."""
        first = self.last - len(self._frames) + 1
        parts: list[bytes] = []
        size = 0
        for frame in self._frames:
            size += len(frame)
            if parts and size > most_bytes:
                break
            parts.append(frame)
        return first, b"".join(parts)


class Incoming:
    """What came from the other side: `received` is the number up to which everything is here."""

    def __init__(self, limit_bytes: int) -> None:
        """limit_bytes: of one payload."""
        self.received = 0
        self._limit_bytes = limit_bytes

    def take(self, first: int, run: bytes) -> list[bytes]:
        """The payloads of `run` that were not here yet, in order; none if it begins beyond the next number.

        Raises PeerError: FRAME_SIZE, or MALFORMED for a cut frame or a number 0; nothing of the run is taken then.
        """
        if not run:
            return []
        if whole_bytes(run, self._limit_bytes) != len(run) or first < 1:
            raise PeerError(Code.MALFORMED, "a frame was cut" if first else "frames count from 1")
        if first > self.received + 1:
            return []
        new = list(split(run))[self.received + 1 - first :]
        self.received += len(new)
        return new
