"""R4: the newest push of one connection, until it is acknowledged. What was lost becomes a hint to Sync.

Each frame that goes down is numbered (run, push_no): push_no rises by one within a run, run rises at each start, slot
acquisition or doubt. The client acknowledges cumulatively, after it has stored; at a jump or a greater run it syncs.

    push           number it, keep it as the newest (the one before is forgotten), send it
    repeat timer   not acknowledged: send the newest again, 3 times with growing gaps; then only heartbeat answers
                   carry the newest numbers
    acknowledged   (run, n) with n = the newest: nothing is kept; a lower run or number changes nothing
    doubt          run + 1, push_no 0, nothing kept; an empty Notify of the new run follows, paced by the caller

A guest's ACK names no number, so guests get one push at a time, and the next one after its ACK (or after the repeats).

Memory per connection: one frame (shared with others' in a fan-out); a guest's queue is capped in frames and bytes.
"""

from __future__ import annotations

from collections import deque

RUN_SHIFT = 16
"""run = fence start << 16 | doubts: the next acquisition's run is greater, however many doubts there were and whatever
the clocks did, since starts rise by one at least and 65,536 doubts need more than an hour at their pace."""

REPEATS = 3
GUEST_FRAMES = 64
GUEST_BYTES = 262_144


def first_run(start: int) -> int:
    """The run of every session of a slot that was acquired with this fence start (Unix ms, rising)."""
    return start << RUN_SHIFT


class Pushes:
    """A user's numbered pushes."""

    __slots__ = ("frame", "push_no", "repeats", "run", "settled_no")

    def __init__(self, run: int) -> None:
        self.run = run
        self.push_no = 0
        """Number of the newest frame of this run; 0: none yet."""
        self.settled_no = 0
        """Greatest number of this run that needs no repeat: acknowledged, or covered by a page that is read later."""
        self.frame = b""
        """The newest frame, without its suffix; b"" when nothing is to be repeated."""
        self.repeats = 0
        """How often the newest frame was repeated."""

    def begin(self, run: int) -> None:
        """The session is committed or was loaded: its run is known. What was counted before stays counted."""
        self.run = run

    def push(self, frame: bytes) -> None:
        """Numbers a frame and keeps it; the caller sends it and arms the repeat timer anew."""
        self.push_no += 1
        self.frame = frame
        self.repeats = 0

    def skip(self) -> None:
        """Numbers a frame that is not sent, since the page that is read after the commit covers it."""
        self.push_no += 1
        self.settled_no = self.push_no

    def acknowledged(self, run: int, push_no: int) -> bool:
        """A cumulative acknowledgement. True: nothing is left to be repeated. Other runs and old numbers: no effect."""
        if run == self.run and self.settled_no < push_no <= self.push_no:
            self.settled_no = push_no
        if self.settled_no == self.push_no:
            self.frame = b""
        return not self.frame

    def repeat(self) -> bytes:
        """The repeat timer fired: the frame to send again under its number; b"": stop, heartbeats carry it from now."""
        if not self.frame or self.repeats >= REPEATS:
            self.frame = b""
            return b""
        self.repeats += 1
        return self.frame

    def doubt(self) -> None:
        """Frames may have been lost unnoticed: a new run begins. The caller sends an empty Notify when its pace allows."""
        self.run += 1
        self.push_no = self.settled_no = 0
        self.frame = b""


class GuestPushes:
    """A guest's pushes: one unacknowledged at a time, the rest queued in order."""

    __slots__ = ("_bytes", "_queue", "frame", "repeats")

    def __init__(self) -> None:
        self.frame = b""
        """The push that waits for its ACK; b"": none."""
        self.repeats = 0
        self._queue: deque[bytes] = deque()
        self._bytes = 0

    def push(self, frame: bytes) -> tuple[bytes, bool]:
        """(frame to send now or b"", False if it was dropped because the queue is full)."""
        if not self.frame:
            self.frame, self.repeats = frame, 0
            return frame, True
        if len(self._queue) >= GUEST_FRAMES or self._bytes + len(frame) > GUEST_BYTES:
            return b"", False
        self._queue.append(frame)
        self._bytes += len(frame)
        return b"", True

    def acknowledged(self) -> bytes:
        """The push was acknowledged: the next one to send, or b""."""
        self.repeats = 0
        if not self._queue:
            self.frame = b""
            return b""
        self.frame = self._queue.popleft()
        self._bytes -= len(self.frame)
        return self.frame

    def repeat(self) -> bytes:
        """The repeat timer fired: the same again, after three times the next one; b"": nothing waits."""
        if self.frame and self.repeats < REPEATS:
            self.repeats += 1
            return self.frame
        return self.acknowledged()


def gap_ms(repeats: int, min_ms: int, max_ms: int) -> int:
    """How long to wait before the next repeat: min, doubled each time, ≤ max."""
    return min(min_ms << repeats, max_ms)
