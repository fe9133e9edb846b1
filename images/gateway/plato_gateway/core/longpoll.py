"""A connection by long polling, at the gateway: what a request may bring and what its answer holds.

    request ─▸ hear ─▸ run, for the worker          the worker's frames ─▸ came ─▸ answer, of a request that waits

To the worker it is a connection as any other. One request waits at a time: a newer one ends the older, which is answered
with nothing. Frames stay here until a request says that they were received, so an answer that is lost is given again.

Memory: up nothing; down DOWN_BYTES and one read, past which the worker's socket is not read; its own queue is bounded.
"""

from __future__ import annotations

from typing import Final

from plato.core.codes import Code
from plato.core.errors import PeerError
from plato.core.frames import FrameReader, pack
from plato.core.longpoll import Body, Incoming, Outgoing
from plato.wire.v1 import canned

DOWN_BYTES: Final = 65_536
"""What waits for the client is read from the worker up to so much; the rest counts as the worker's queue."""
FRAME_LIMIT_BYTES: Final = 1_048_576
"""Of what the platform sends; the largest that a client takes."""


class Session:
    """One connection. Times are the process's ticks, ms."""

    def __init__(self, limit_bytes: int, now_ms: int) -> None:
        """limit_bytes: of one payload of the client."""
        self.over = False
        """The worker ended it: what `answer` gives is the last."""
        self._up = Incoming(limit_bytes)
        self._down = Outgoing()
        self._reader = FrameReader(FRAME_LIMIT_BYTES)
        self._heard_ms = now_ms
        self._newest_poll = 0
        self._waiting = 0

    # ── the client's side ────────────────────────────────────────────────────────────────────────────────────

    def hear(self, body: Body, now_ms: int) -> None:
        """A request came: it confirms what was received. Raises PeerError(MALFORMED)."""
        self._heard_ms = now_ms
        if not self._down.confirmed(body.received):
            raise PeerError(Code.MALFORMED, f"{body.received} frames were received, {self._down.last} were sent")

    def take(self, body: Body) -> bytes:
        """The frames of a request that are new, joined, to be written to the worker. Raises PeerError(MALFORMED).

        A payload of a bad size ends the connection, as on the other listeners: `over` says so.
        """
        try:
            return b"".join(map(pack, self._up.take(body.first, body.run)))
        except PeerError as e:
            if e.code is not Code.FRAME_SIZE:
                raise
            self._down.put(pack(canned.ERRORS[Code.FRAME_SIZE]))
            self.over = True
            return b""

    def begin_poll(self) -> int:
        """A request begins to wait; returns its number. It ends the one that waited."""
        self._newest_poll += 1
        self._waiting += 1
        return self._newest_poll

    def end_poll(self, now_ms: int) -> None:
        """A request waits no more: it is answered, or its asker is gone."""
        self._waiting -= 1
        self._heard_ms = now_ms

    def waits(self, poll: int) -> bool:
        """Whether this request has nothing to be answered with yet."""
        return poll == self._newest_poll and not self.over and not len(self._down)

    def answer(self, most_bytes: int, poll: int | None) -> tuple[int, bytes, bool]:
        """(number of the first frame, frames, whether the connection is over with them). poll: of a request that waited;
        one that did not wait, or was ended by a newer one, brings no frames."""
        if poll != self._newest_poll:
            return 1, b"", False
        first, run = self._down.page(most_bytes)
        return first, run, self.over and len(run) == self._down.size_bytes

    @property
    def received(self) -> int:
        """The number up to which the client's frames were taken."""
        return self._up.received

    def silent(self, now_ms: int, most_ms: int) -> bool:
        """Whether no request waits, and none came for so long: the client is gone."""
        return self._waiting == 0 and now_ms - self._heard_ms >= most_ms

    # ── the worker's side ────────────────────────────────────────────────────────────────────────────────────

    def came(self, data: bytes) -> None:
        """Bytes of the worker. Raises PeerError: they are no frames."""
        for payload in self._reader.feed(data):
            self._down.put(pack(payload))

    @property
    def full(self) -> bool:
        """So much waits for the client that the worker is not read."""
        return self._down.size_bytes >= DOWN_BYTES
