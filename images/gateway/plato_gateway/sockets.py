"""A worker's sockets: bare file descriptors, what each is, and the bytes that wait for a full one.

Everything is indexed by fd, in lists that grow with the greatest fd; a connection that idles has no object of its own.
`fd_of` (conn_id → fd) alone says who a connection is: an fd is closed, and so may be reused, only at the end of a round.

Memory: per idle connection the list cells and one dict entry; per connection that does not read, at most
send_queue_bytes and one frame; a cut frame waits in `rest` or `inbound`, at most one frame and one read.
"""

from __future__ import annotations

import os
import select
import socket
from array import array
from collections import deque
from typing import Final

import h11

from .core.addresses import Addresses
from .core.websocket import Inbound
from .tls import Sealed, Session, TlsError

FREE: Final = 0
TCP: Final = 1
WS: Final = 2
UPGRADING: Final = 3
CLOSING: Final = 4
LISTENER: Final = 5
LANE: Final = 6
SHAKING: Final = 7
"""Its TLS handshake is not done."""
GREETING: Final = 8
"""Of the process that does long polling, which has not said yet for whom."""

FRESH: Final = 1
"""No whole frame came yet: the login time-out holds."""
PAUSED: Final = 2
"""Not read now: its group has no credit or no stream."""
WAITS: Final = 4
"""Bytes wait for the socket to take them."""

READ_BYTES: Final = 16_384
"""What one event reads at most."""
SEALED_CHUNKS: Final = 64
"""What TLS itself has to say to a peer that does not read (answers to its key updates): so many reads' worth."""

_TCP, _TLS = ord("t"), ord("s")

IN: Final = select.EPOLLIN
OUT: Final = select.EPOLLOUT


class Queue:
    """Bytes that a full socket did not take yet."""

    __slots__ = ("chunks", "head_is_cut", "size_bytes")

    def __init__(self) -> None:
        self.chunks: deque[bytes] = deque()
        self.size_bytes = 0
        self.head_is_cut = False
        """The first chunk is the rest of one whose beginning is on the wire: it must stay."""


class Sockets:
    """The tables, and the system calls on them."""

    def __init__(self) -> None:
        self.epoll = select.epoll()
        self.kind = bytearray()
        self.flags = bytearray()
        self.listener_letter = bytearray()
        """Per fd "t", "w" or "p", as OPENED names the listener."""
        self.conn: list[int] = []
        """Per fd its conn_id; 0: none (listener, upgrading, closing)."""
        self.serial = array("Q")
        """Per fd a number that changes with each accept, so that timers know whom they meant."""
        self.fd_of: dict[int, int] = {}
        self.rest: dict[int, bytearray] = {}
        """TCP: a cut frame."""
        self.inbound: dict[int, Inbound] = {}
        """WebSocket: a cut frame or message."""
        self.upgrades: dict[int, h11.Connection] = {}
        """WebSocket: a request that is not whole yet."""
        self.queues: dict[int, Queue] = {}
        self.tls: dict[int, Session] = {}
        self.polled: dict[int, bytes] = {}
        """By long polling: the client's address, as the process that does it said."""
        self.addresses: Addresses | None = None
        """Counts connections per address; None: nothing is bounded."""
        self.counted: dict[int, str] = {}
        """Per fd the address that it counts for."""
        self.again: list[tuple[int, int]] = []
        """(fd, serial) of TLS connections that may hold input which no event will tell of."""
        self.open = 0
        """Client sockets, those that upgrade or close included."""
        self.bytes_out = 0
        self._serials = 0
        self._ended: list[int] = []

    def add(self, fd: int, kind: int, letter: int = 0, flags: int = 0) -> None:
        """Takes a non-blocking fd of a client, a listener or the lane, and watches it."""
        if fd >= len(self.kind):
            more = fd + 64 - len(self.kind)
            self.kind += bytes(more)
            self.flags += bytes(more)
            self.listener_letter += bytes(more)
            self.conn += [0] * more
            self.serial.frombytes(bytes(more * self.serial.itemsize))
        self._serials += 1
        self.kind[fd] = kind
        self.flags[fd] = flags
        self.listener_letter[fd] = letter
        self.conn[fd] = 0
        self.serial[fd] = self._serials
        self.epoll.register(fd, IN)
        if kind not in (LISTENER, LANE):
            self.open += 1

    def name(self, fd: int, conn_id: int) -> None:
        """The fd is this connection from now on."""
        self.conn[fd] = conn_id
        self.fd_of[conn_id] = fd

    def unname(self, fd: int) -> int:
        """The fd is no connection any more; returns the conn_id that it was (0: none)."""
        conn_id = self.conn[fd]
        if conn_id:
            self.conn[fd] = 0
            self.fd_of.pop(conn_id, None)
        return conn_id

    def watch(self, fd: int) -> None:
        """Sets what epoll reports of an fd, from its flags."""
        flags = self.flags[fd]
        self.epoll.modify(fd, (0 if flags & PAUSED else IN) | (OUT if flags & WAITS else 0))

    def read(self, fd: int, size_bytes: int) -> bytes:
        """os.read, but of the plaintext where the connection speaks TLS (then maybe more than `size_bytes`); b"" at the end.

        Raises BlockingIOError: nothing whole is there yet; other OSErrors: it is broken.
        """
        tls = self.tls.get(fd)
        if tls is None:
            return os.read(fd, size_bytes)
        try:
            if data := tls.open():
                return data
            more = os.read(fd, READ_BYTES)
            if not more:
                return b""
            tls.feed(more)
            data = tls.open()
        except TlsError as e:
            self._write_sealed(fd, Sealed(e.last))
            return b""
        if not self._write_sealed(fd, tls.own()):
            raise ConnectionAbortedError  # it makes TLS talk, and does not read what it says
        if not data:
            raise BlockingIOError
        return data

    def shake(self, fd: int) -> bool | None:
        """Goes on with a TLS handshake: True when it is done, None when it failed."""
        tls = self.tls[fd]
        try:
            data = os.read(fd, READ_BYTES)
            if not data:
                return None
            tls.feed(data)
            done = tls.shake()
        except BlockingIOError:
            return False
        except TlsError as e:
            self._write_sealed(fd, Sealed(e.last))
            return None
        except OSError:
            return None
        self._write_sealed(fd, tls.own())
        return done

    def _write_sealed(self, fd: int, data: Sealed) -> bool:
        """Writes what TLS itself says, or puts it where it belongs: behind a cut chunk, before what is not sealed yet.
        False: too much of it waits."""
        if not data:
            return True
        n = 0
        queue = self.queues.get(fd)
        if queue is None:
            try:
                n = os.write(fd, data)
            except BlockingIOError:
                pass
            except OSError:
                return True  # the next read or write finds it broken
            self.bytes_out += n
            if n < len(data):
                self.wait(fd, Sealed(data[n:]), cut=True)
            return True
        at = sum(type(chunk) is Sealed for chunk in queue.chunks)  # sealed ones stand in front
        queue.chunks.insert(at, data)
        queue.size_bytes += len(data)
        return at < SEALED_CHUNKS

    def send(self, fd: int, data: bytes) -> int:
        """Writes now what the socket takes and queues the rest. Returns the bytes that wait, or -1: the socket is broken."""
        if fd in self.queues:
            return self.wait(fd, data)
        if fd in self.tls:
            try:
                data = self.tls[fd].seal(data)
            except TlsError:
                return -1
        try:
            n = os.write(fd, data)
        except BlockingIOError:
            n = 0
        except OSError:
            return -1
        self.bytes_out += n
        if n == len(data):
            return 0
        if type(data) is Sealed:
            return self.wait(fd, Sealed(data[n:]), cut=True)
        return self.wait(fd, data[n:], cut=n > 0)

    def wait(self, fd: int, data: bytes, *, cut: bool = False) -> int:
        """Queues bytes (cut: their frame's beginning is on the wire). Returns the bytes that wait."""
        queue = self.queues.get(fd)
        if queue is None:
            queue = self.queues[fd] = Queue()
            queue.head_is_cut = cut
            self.flags[fd] |= WAITS
            self.watch(fd)
        queue.chunks.append(data)
        queue.size_bytes += len(data)
        return queue.size_bytes

    def flush(self, fd: int) -> int:
        """Writes what waits. Returns the bytes that still wait, or -1: the socket is broken."""
        queue = self.queues.get(fd)
        if queue is None:
            return 0
        chunks = queue.chunks
        tls = self.tls.get(fd)
        while chunks:
            if tls is not None and type(chunks[0]) is not Sealed:
                try:
                    sealed = tls.seal(chunks[0])
                except TlsError:
                    return -1
                queue.size_bytes += len(sealed) - len(chunks[0])
                chunks[0] = sealed
                queue.head_is_cut = True
            # 64 chunks keep the call below IOV_MAX; one call takes what the socket's buffer has room for.
            part = [chunks[i] for i in range(1 if tls is not None else min(len(chunks), 64))]
            try:
                n = os.writev(fd, part)
            except BlockingIOError:
                return queue.size_bytes
            except OSError:
                return -1
            self.bytes_out += n
            queue.size_bytes -= n
            for chunk in part:
                if n < len(chunk):
                    break
                n -= len(chunk)
                chunks.popleft()
                queue.head_is_cut = False
            if n:
                chunks[0] = chunks[0][n:] if tls is None else Sealed(chunks[0][n:])
                queue.head_is_cut = True
        del self.queues[fd]
        self.flags[fd] &= ~WAITS
        self.watch(fd)
        return 0

    def drop_waiting(self, fd: int) -> None:
        """Forgets what waits, save the rest of a frame whose beginning is on the wire, and what is sealed."""
        queue = self.queues.get(fd)
        if queue is None:
            return
        cut = 1 if queue.head_is_cut else 0
        kept = [chunk for i, chunk in enumerate(queue.chunks) if i < cut or type(chunk) is Sealed]
        queue.chunks = deque(kept)
        queue.size_bytes = sum(map(len, kept))

    def end(self, fd: int) -> None:
        """Done with this fd: nothing is read or written any more; it closes at the end of the round."""
        if self.kind[fd] == FREE:
            return
        if self.kind[fd] not in (LISTENER, LANE):
            self.open -= 1
        self.unname(fd)
        self.kind[fd] = FREE
        self.flags[fd] = 0
        self.forget_input(fd)
        self.queues.pop(fd, None)
        self.tls.pop(fd, None)
        self.polled.pop(fd, None)
        if self.addresses is not None and (key := self.counted.pop(fd, None)) is not None:
            self.addresses.gone(key)
        self.epoll.unregister(fd)
        self._ended.append(fd)

    def forget_input(self, fd: int) -> None:
        """Drops what of its input is unfinished."""
        self.rest.pop(fd, None)
        self.inbound.pop(fd, None)
        self.upgrades.pop(fd, None)

    def close_ended(self) -> None:
        """Closes the fds that ended in this round. Before this none can be reused, so stale events meet no stranger."""
        for fd in self._ended:
            os.close(fd)
        self._ended.clear()

    def shutdown_writing(self, fd: int) -> None:
        """Half-closes, so that what was written arrives although the peer still sends."""
        if fd in self.tls:
            self._write_sealed(fd, self.tls[fd].bye())
            if fd in self.queues:
                return  # the flush of that little comes here again
        sock = _borrow(fd)
        try:
            sock.shutdown(socket.SHUT_WR)
        except OSError:
            pass  # the peer was faster
        finally:
            sock.detach()

    def peer(self, fd: int) -> bytes:
        """What OPENED and NAMED say of a connection: the listener's letter and the peer's host:port ("" if it is gone)."""
        if fd in self.polled:
            return b"%c%s" % (self._letter(fd), self.polled[fd])
        sock = _borrow(fd)
        try:
            host, port = sock.getpeername()[:2]
            return b"%c%s:%d" % (self._letter(fd), host.encode(), port)
        except OSError:
            return b"%c" % self._letter(fd)
        finally:
            sock.detach()

    def _letter(self, fd: int) -> int:
        """As OPENED names the listener: "s" is TCP with TLS."""
        letter = self.listener_letter[fd]
        return _TLS if letter == _TCP and fd in self.tls else letter


def _borrow(fd: int) -> socket.socket:
    """A socket object over an fd that stays ours: detach it. Family and type spare three system calls."""
    return socket.socket(socket.AF_INET, socket.SOCK_STREAM, 0, fileno=fd)
