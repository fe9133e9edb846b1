"""How fast one connection is served: a leaky bucket of frames, and runs cut into pieces of bounded work.

Every frame that comes fills the bucket, served or not; a tick lets FRAMES_PER_TICK out. Above BURST_FRAMES nothing more is
served, above LIMIT_FRAMES the sender is no client of ours and its socket is closed. An honest client has at most some
dozens of frames under way and waits longer when it is told BUSY, so it drains; a flooder does not.

Memory: two dict entries per connection that spoke within the last two rounds of ROUND_TICKS. Buckets that are not there
have drained.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Final

FRAMES_PER_TICK: Final = 25
"""1,000 frames a second, at 25 ms a tick."""
BURST_FRAMES: Final = 4_000
LIMIT_FRAMES: Final = 12_000
"""Twice the served pace reaches it after 12 s, a hundred times that within a moment."""
VERIFY_FRAMES: Final = 15
"""What a token's signature check costs besides: it takes as long as so many frames."""
ROUND_TICKS: Final = LIMIT_FRAMES // FRAMES_PER_TICK + 1
"""The fullest bucket is empty after it."""

PIECE_FRAMES: Final = 128
PIECE_BYTES: Final = 8_192
"""A piece costs at most some 3 ms: 128 frames of 25 µs, or fewer that are larger."""

_length = struct.Struct(">I").unpack_from


class Paces:
    """The buckets, by conn_id. `now`: the shard's tick, never less than before."""

    def __init__(self) -> None:
        # conn_id → the frame count at which its bucket is empty, counted by a clock of FRAMES_PER_TICK per tick
        self._young: dict[int, int] = {}
        self._old: dict[int, int] = {}
        self._round_ends = ROUND_TICKS

    def __len__(self) -> int:
        return len(self._young) + len(self._old)

    def charge(self, conn_id: int, frames: int, now: int) -> int:
        """So many frames came; returns how many of them, the first ones, are served."""
        if now >= self._round_ends:
            self._old = self._young if now < self._round_ends + ROUND_TICKS else {}
            self._young = {}
            self._round_ends = now + ROUND_TICKS
        clock = now * FRAMES_PER_TICK
        empty_at = self._young.get(conn_id)
        if empty_at is None:
            empty_at = self._old.get(conn_id, 0)
        level = empty_at - clock if empty_at > clock else 0
        self._young[conn_id] = clock + min(level + frames, LIMIT_FRAMES)
        return frames if level + frames <= BURST_FRAMES else max(0, BURST_FRAMES - level)

    def floods(self, conn_id: int, now: int) -> bool:
        """Whether its bucket has reached the limit."""
        return self._young.get(conn_id, 0) - now * FRAMES_PER_TICK >= LIMIT_FRAMES


def pieces(run: bytes) -> Iterator[bytes]:
    """A run of whole frames in parts of at most PIECE_FRAMES frames and PIECE_BYTES, or one frame. What is broken in it
    stays in the last part."""
    start = at = count = 0
    end = len(run)
    while end - at >= 4:
        behind = at + 4 + _length(run, at)[0]
        if count and (count == PIECE_FRAMES or behind - start > PIECE_BYTES):
            yield run[start:at]
            start, count = at, 0
        if behind > end:
            break
        at = behind
        count += 1
    if start < end:
        yield run[start:]
