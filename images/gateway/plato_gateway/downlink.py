"""Hop 6 in a worker: frames from the link to sockets, and every close.

A batch's frames are gathered per connection and written in one call; what a full socket refuses is queued, up to
send_queue_bytes, past which the connection is closed as slow. A close puts its last frame on the wire, half-closes, and
reads on (throwing away) until the peer has closed too, or LINGER_MS of ticks: otherwise unread bytes would turn
the close into a reset that overtakes the last frame (R3).

Memory: `lingering` holds one tuple per closing socket; of refused ones, which cost the peer nothing, at most
MAX_REFUSED_LINGERING.
"""

from __future__ import annotations

import os
import struct
from collections import deque
from typing import Final, Protocol

from plato.core.codes import Code, text
from plato.wire.v1 import canned

from .core import lanes, websocket
from .sockets import CLOSING, PAUSED, TCP, WAITS, WS, Sockets

LINGER_MS: Final = 2_000
MAX_REFUSED_LINGERING: Final = 1_024

_pack_length = struct.Struct(">I").pack
_WS_STATUS = {Code.GATEWAY_CLOSING: websocket.GOING_AWAY, Code.FRAME_SIZE: websocket.TOO_BIG}


class ClosedSink(Protocol):
    """Where a close is told (hop 1: it travels in order with the data)."""

    def closed(self, conn_id: int, code: int) -> None:
        """The connection ended, with this code (0: by the peer or by state's order)."""


class Downlink:
    """Writes and closes the connections of one worker."""

    def __init__(self, sockets: Sockets, stats: lanes.Stats, send_queue_bytes: int) -> None:
        self._sockets = sockets
        self._stats = stats
        self._send_queue_bytes = send_queue_bytes
        self.sink: ClosedSink
        self.age_ms = 0
        """The worker's ticks, which it sets each round."""
        self._lingering: deque[tuple[int, int, int]] = deque()

    def deliver(self, frames: lanes.Frames) -> None:
        """Sends a batch. Frames for connections that are not here are counted and dropped: R6 tells state of them."""
        if len(set(frames.conn_ids)) == len(frames.conn_ids):
            self._deliver_singly(frames)
            return
        sockets, payloads, suffix_data = self._sockets, frames.payloads, frames.suffix_data
        find, kind = sockets.fd_of.get, sockets.kind
        gathered: dict[int, list[bytes]] = {}
        at = unknown = more = last_id = 0
        fd: int | None = None
        tcp = False
        pieces: list[bytes] = []
        for conn_id, i, n, flags in zip(
            frames.conn_ids, frames.index, frames.suffix_lengths, frames.flags, strict=True
        ):
            if conn_id != last_id:  # a connection's frames often stand in a row
                last_id = conn_id
                fd = find(conn_id)
                if fd is not None:
                    tcp = kind[fd] == TCP
                    known = gathered.get(fd)
                    if known is None:
                        gathered[fd] = pieces = []
                    else:
                        pieces = known
            if fd is None:
                at += n
                unknown += 1
                continue
            payload = payloads[i]
            if flags & lanes.RUN:
                pieces.append(payload if tcp else websocket.messages(payload))
                more += int.from_bytes(suffix_data[at : at + n], "little") - 1
                at += n
                continue
            head = _pack_length(len(payload) + n) if tcp else websocket.head(len(payload) + n)
            if n:
                pieces += (head, payload, suffix_data[at : at + n])
                at += n
            else:
                pieces += (head, payload)
            if flags & lanes.CLOSE_AFTER:
                del gathered[fd]
                self._close(fd, 0, b"".join(pieces), websocket.NORMAL)
                fd = None
        self._stats.frames_unknown += unknown
        self._stats.frames_out += len(frames.conn_ids) - unknown + more
        for to, parts in gathered.items():
            self.send(to, b"".join(parts))

    def _deliver_singly(self, frames: lanes.Frames) -> None:
        """A batch in which no connection gets two frames, the usual one: nothing to gather, no calls per frame."""
        sockets, payloads, suffix_data = self._sockets, frames.payloads, frames.suffix_data
        find, kind, queues, tls, write = sockets.fd_of.get, sockets.kind, sockets.queues, sockets.tls, os.write
        at = unknown = more = bytes_out = 0
        for conn_id, i, n, flags in zip(
            frames.conn_ids, frames.index, frames.suffix_lengths, frames.flags, strict=True
        ):
            fd = find(conn_id)
            data = payloads[i]
            if flags & lanes.RUN:
                if fd is not None:
                    more += int.from_bytes(suffix_data[at : at + n], "little") - 1
                    if kind[fd] != TCP:
                        data = websocket.messages(data)
                at += n
            elif n:
                data += suffix_data[at : at + n]
                at += n
            if fd is None:
                unknown += 1
                continue
            if not flags & lanes.RUN:
                size = len(data)
                data = (_pack_length(size) if kind[fd] == TCP else websocket.head(size)) + data
            if flags & lanes.CLOSE_AFTER:
                self._close(fd, 0, data, websocket.NORMAL)
                continue
            if fd in queues or fd in tls:
                self.send(fd, data)
                continue
            try:
                wrote = write(fd, data)
            except OSError:
                self.send(fd, data)
                continue
            bytes_out += wrote
            if wrote != len(data):
                self._sent(fd, sockets.wait(fd, data[wrote:], cut=True))
        sockets.bytes_out += bytes_out
        self._stats.frames_unknown += unknown
        self._stats.frames_out += len(frames.conn_ids) - unknown + more

    def send(self, fd: int, data: bytes) -> None:
        """Sends framed bytes to a connection; closes it if it is broken or past its bound."""
        self._sent(fd, self._sockets.send(fd, data))

    def _sent(self, fd: int, waiting: int) -> None:
        if waiting > self._send_queue_bytes:
            self._stats.slow_closed += 1
            self.close(fd, Code.SLOW_READER)
        elif waiting < 0:
            self.drop(fd)

    def flush(self, fd: int) -> None:
        """The socket takes bytes again."""
        waiting = self._sockets.flush(fd)
        if waiting < 0:
            self.drop(fd)
        elif waiting == 0 and self._sockets.kind[fd] == CLOSING:
            self._sockets.shutdown_writing(fd)

    def close(self, fd: int, code: Code) -> None:
        """Closes a connection for the worker's own reason, which is its last frame."""
        payload = canned.ERRORS[code]
        if self._sockets.kind[fd] == TCP:
            last = _pack_length(len(payload)) + payload
        else:
            last = websocket.head(len(payload)) + payload
        if code == Code.SLOW_READER:
            self._sockets.drop_waiting(fd)
        self._close(fd, code, last, _WS_STATUS.get(code, websocket.APPLICATION + code), text(code))

    def close_ws(self, fd: int, code: int, status: int, *, answered: bool, last: bytes = b"") -> None:
        """Closes a WebSocket connection with a status; answered: `last` holds the close frame already."""
        self._close(fd, code, last, None if answered else status)

    def close_raw(self, fd: int, last: bytes) -> None:
        """Closes a socket that is no connection (refused, or its upgrade was), after these bytes."""
        self._close(fd, 0, last, None)

    def drop(self, fd: int, code: int = 0) -> None:
        """The peer closed, or the socket broke: nothing more can be said to it."""
        conn_id = self._sockets.unname(fd)
        if conn_id:
            self.sink.closed(conn_id, code)
        self._sockets.end(fd)

    def refuse(self, fd: int, last: bytes) -> None:
        """Closes a socket that was never let in; when too many linger, without waiting for the peer."""
        if len(self._lingering) < MAX_REFUSED_LINGERING:
            self.close_raw(fd, last)
        else:
            self._sockets.send(fd, last)
            self._sockets.end(fd)

    def _close(self, fd: int, code: int, last: bytes, ws_status: int | None, reason: str = "") -> None:
        sockets = self._sockets
        conn_id = sockets.unname(fd)
        if conn_id:
            self.sink.closed(conn_id, code)
        if sockets.kind[fd] == WS and ws_status is not None:
            last += websocket.close_frame(ws_status, reason)
        sockets.kind[fd] = CLOSING
        sockets.forget_input(fd)
        waiting = sockets.send(fd, last) if last else sockets.flush(fd)
        if waiting < 0:
            sockets.end(fd)
            return
        sockets.flags[fd] &= WAITS  # whoever was paused is read again, to see its end
        sockets.watch(fd)
        if waiting == 0:
            sockets.shutdown_writing(fd)
        self._lingering.append((self.age_ms + LINGER_MS, fd, sockets.serial[fd]))

    def expire(self) -> None:
        """Ends the closing sockets whose peer did not close in time."""
        sockets, lingering = self._sockets, self._lingering
        while lingering and lingering[0][0] <= self.age_ms:
            _, fd, serial = lingering.popleft()
            if sockets.serial[fd] == serial and sockets.kind[fd] == CLOSING:
                sockets.end(fd)

    def is_paused(self, fd: int) -> bool:
        """Whether the socket is not read now."""
        return bool(self._sockets.flags[fd] & PAUSED)
