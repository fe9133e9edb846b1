"""A worker's listening sockets, and who is let in.

Each worker has its own (SO_REUSEPORT), so the kernel spreads connections over workers. One round accepts at most ACCEPTS
per listener. A TCP connection is let in at once; a WebSocket one after its upgrade, which h11 reads. Being let in means
a conn_id, so without home slots or reserved stamps the answer is "closing", past max_connections it is "full": a frame
on TCP, 503 on WebSocket. Nobody hangs: the login time-out holds from accept on.

The third one is a Unix socket, for the process that does long polling (longpoll.py): one connection of its own for each
of its clients, which begins with the client's address and then speaks as TCP does.

Memory: an upgrade holds its h11 connection, at most UPGRADE_BYTES, no longer than the login time-out.
"""

from __future__ import annotations

import errno
import os
import socket
import struct
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

import h11
from plato.api.names import WS_PATH
from plato.core.codes import Code, text
from plato.core.ids import ConnIdMinter, OutOfReservation
from plato.runtime.client_tls import Certificates
from plato.wire.v1 import canned

from .core import lanes, websocket
from .core.addresses import key_of
from .downlink import Downlink
from .lane import address, poll_socket
from .preflight import StartError, port_error
from .sockets import FRESH, GREETING, LISTENER, PAUSED, READ_BYTES, SHAKING, TCP, UPGRADING, WS, Sockets
from .tls import Session
from .uplink import Uplink

ACCEPTS: Final = 64
BACKLOG: Final = 4_096
UPGRADE_BYTES: Final = 16_384
MAX_SHAKING: Final = 1_024
"""Handshakes under way in one worker; past it peers are closed at once, and try the next gateway."""
OVERLOADED_LAG_MS: Final = 1_000
"""Rounds that take this long on average: new connections are sent to the next gateway."""

_TCP, _WS, _POLL = ord("t"), ord("w"), ord("p")


class Listeners:
    """Accepts, upgrades, names and times out the connections of one worker."""

    def __init__(
        self,
        sockets: Sockets,
        uplink: Uplink,
        downlink: Downlink,
        stats: lanes.Stats,
        *,
        max_connections: int,
        login_timeout_ms: int,
        ws_origins: Sequence[str],
        certificates: Certificates | None = None,
        now_ms: Callable[[], int] = lambda: time.time_ns() // 1_000_000,
    ) -> None:
        self.minter = ConnIdMinter()
        self.age_ms = 0
        """The worker's ticks, which it sets each round."""
        self.closing = False
        """The worker ends: nobody is let in."""
        self.lag_ms = 0.0
        """How long rounds take on average."""
        self._sockets = sockets
        self._uplink = uplink
        self._downlink = downlink
        self._stats = stats
        self._max_connections = max_connections
        self._login_timeout_ms = login_timeout_ms
        self._origins = ws_origins
        self._certificates = certificates
        self._shaking = 0
        self._now_ms = now_ms
        self._listening: dict[int, socket.socket] = {}
        self._spare_fd = os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC)
        self._silent: deque[tuple[int, int, int]] = deque()
        """(deadline in ticks, fd, serial) of sockets from which no frame came when they were accepted; by deadline."""

    def listen(self, host: str, tcp_port: int, ws_port: int) -> None:
        """Opens both listeners. Raises StartError."""
        for key, port, letter in (("tcp_port", tcp_port, _TCP), ("ws_port", ws_port, _WS)):
            sock = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            try:
                sock.bind((host, port))
                sock.listen(BACKLOG)
            except OSError as e:
                sock.close()
                raise StartError(port_error(key, host, port, e)) from e
            sock.setblocking(False)
            self._listening[sock.fileno()] = sock
            self._sockets.add(sock.fileno(), LISTENER, letter)

    def listen_polls(self, run_dir: Path, index: int) -> None:
        """Opens the socket for long polling, in place of one that a dead worker left. Raises StartError."""
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        folder = -1
        try:
            run_dir.mkdir(parents=True, exist_ok=True)
            where, folder = address(run_dir, poll_socket(index))
            Path(where).unlink(missing_ok=True)
            sock.bind(where)
            Path(where).chmod(0o600)
            sock.listen(BACKLOG)
        except OSError as e:
            sock.close()
            raise StartError(f"gateway.run_dir: {run_dir} takes no socket ({e.strerror}); name another folder") from e
        finally:
            if folder >= 0:
                os.close(folder)
        sock.setblocking(False)
        self._listening[sock.fileno()] = sock
        self._sockets.add(sock.fileno(), LISTENER, _POLL)

    def stop(self) -> None:
        """Stops listening; the kernel's backlog goes to the pod's other workers or is reset."""
        self.closing = True
        for fd, sock in self._listening.items():
            self._sockets.end(fd)
            sock.detach()
        self._listening.clear()

    def accept(self, listener_fd: int) -> None:
        """Accepts what waits, at most ACCEPTS."""
        listener = self._listening[listener_fd]
        letter = self._sockets.listener_letter[listener_fd]
        for _ in range(ACCEPTS):
            try:
                # Not accept(): a socket object costs as much as the call, and only its number is kept.
                fd, where = listener._accept()  # type: ignore[attr-defined]  # typeshed lacks it
            except BlockingIOError:
                return
            except OSError as e:
                if e.errno in (errno.EMFILE, errno.ENFILE):
                    self._shed(listener)
                    return
                continue  # the peer gave up before it was accepted
            os.set_blocking(fd, False)
            # TCP_NODELAY comes from the listener: Linux hands a listener's options on to what it accepts.
            # The poller's socket has no address: it says whose connection it is (read_greeting).
            self._accepted(fd, letter, b"%c%s:%d" % (letter, where[0].encode(), where[1]) if where else b"")

    def _shed(self, listener: socket.socket) -> None:
        """Out of file descriptors: gives the spare one up to accept and close one peer, else the listener stays readable
        for ever and its peers hang."""
        self._stats.refused += 1
        if self._spare_fd >= 0:
            os.close(self._spare_fd)
            self._spare_fd = -1
        with suppress(OSError):
            listener.accept()[0].close()
        with suppress(OSError):
            self._spare_fd = os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC)

    def _accepted(self, fd: int, letter: int, peer: bytes) -> None:
        sockets = self._sockets
        if self._certificates is not None and letter != _POLL and self._shaking >= MAX_SHAKING:
            self._stats.refused += 1
            os.close(fd)  # words would cost the handshake that there is no room for; nor does it count for its address
            return
        if sockets.addresses is not None and letter != _POLL and (retry_ms := self._crowded(fd, peer[1:])):
            if self._certificates is not None:
                os.close(fd)  # words would cost a handshake
                return
            sockets.add(fd, TCP if letter == _TCP else UPGRADING, letter)
            self._refuse_address(fd, retry_ms)
            return
        if letter == _POLL:
            sockets.add(fd, GREETING, letter, FRESH)  # what is encrypted of it is so outside of this pod's sockets
        elif self._certificates is None:
            sockets.add(fd, TCP if letter == _TCP else UPGRADING, letter, FRESH)
            if not self._admit(fd, peer):
                return
        else:
            # Whether there is room is asked after the handshake: without it a peer understands no answer.
            sockets.add(fd, SHAKING, letter, FRESH)
            sockets.tls[fd] = Session(self._certificates.context)
            self._shaking += 1
        if sockets.flags[fd] & FRESH:
            self._silent.append((self.age_ms + self._login_timeout_ms, fd, sockets.serial[fd]))

    def _admit(self, fd: int, peer: bytes = b"") -> bool:
        """Lets a connection in, or its upgrade begin; False: it was refused for want of stamps. peer: as OPENED names it,
        if that is known."""
        sockets = self._sockets
        if len(sockets.fd_of) + len(sockets.upgrades) >= self._max_connections or self.lag_ms > OVERLOADED_LAG_MS:
            self._refuse(fd, Code.GATEWAY_FULL)
        elif sockets.kind[fd] == UPGRADING:
            sockets.upgrades[fd] = h11.Connection(h11.SERVER, max_incomplete_event_size=UPGRADE_BYTES)
        else:
            return self._let_in(fd, peer)
        return True

    def read_greeting(self, fd: int) -> None:
        """Takes the first bytes of a connection by long polling: a length and its client's address."""
        sockets = self._sockets
        try:
            size = os.read(fd, 1)
            said = os.read(fd, size[0]) if size and size[0] else b""
        except OSError:
            size, said = b"", b""
        if not size or len(said) != size[0]:  # it is gone: what it says first, it writes in one call
            sockets.end(fd)
            return
        sockets.polled[fd] = said
        sockets.kind[fd] = TCP
        if sockets.addresses is not None and (retry_ms := self._crowded(fd, said)):
            self._refuse_address(fd, retry_ms)
        elif self._admit(fd):
            self._stats.polled += 1

    def read_handshake(self, fd: int) -> None:
        """Takes bytes of a TLS handshake that is not done yet."""
        sockets = self._sockets
        done = sockets.shake(fd)
        if done is False:
            return
        self._shaking -= 1
        if done is None:
            self._stats.refused += 1
            sockets.end(fd)
            return
        sockets.kind[fd] = TCP if sockets.listener_letter[fd] == _TCP else UPGRADING
        self._admit(fd)
        sockets.again.append((fd, sockets.serial[fd]))  # its first frame may have come with the handshake's last

    def hung_up(self, fd: int) -> None:
        """The peer gave up in its handshake."""
        self._shaking -= 1
        self._sockets.end(fd)

    def renew(self) -> str:
        """Looks for a new certificate; returns what there is to say about it, "" for nothing."""
        if self._certificates is None:
            return ""
        before = self._certificates.failure
        if self._certificates.renew():
            return "a new certificate is used"
        return self._certificates.failure if self._certificates.failure != before else ""

    def _let_in(self, fd: int, peer: bytes = b"") -> bool:
        """Gives the socket its conn_id; False: it was refused."""
        try:
            if self.closing:
                raise OutOfReservation
            conn_id = self.minter.mint(self._now_ms())
        except OutOfReservation:
            self._refuse(fd, Code.GATEWAY_CLOSING)
            return False
        self._sockets.name(fd, conn_id)
        self._stats.accepted += 1
        self._uplink.opened(fd, conn_id, peer)
        return True

    def _crowded(self, fd: int, peer: bytes) -> int:
        """Counts a connection for its address, peer being host:port; above 0: there are too many, it may come again in so
        many ms."""
        addresses = self._sockets.addresses
        assert addresses is not None
        key = key_of(peer.rpartition(b":")[0].decode(errors="replace"))
        retry_ms = addresses.came(key, self.age_ms)
        if retry_ms:
            self._stats.refused += 1
        else:
            self._sockets.counted[fd] = key
        return retry_ms

    def _refuse_address(self, fd: int, retry_ms: int) -> None:
        if self._sockets.kind[fd] == TCP:
            payload = canned.address_busy(retry_ms)
            self._downlink.refuse(fd, struct.pack(">I", len(payload)) + payload)
            return
        code = Code.ADDRESS_BUSY
        headers = [(b"x-plato-code", b"%d" % code), (b"retry-after", b"%d" % -(-retry_ms // 1_000))]
        self._downlink.refuse(fd, _http(429, headers, text(code).encode() + b"\n"))

    def _refuse(self, fd: int, code: Code) -> None:
        self._stats.refused += 1
        payload = canned.ERRORS[code]
        if self._sockets.kind[fd] == TCP:
            self._downlink.refuse(fd, struct.pack(">I", len(payload)) + payload)
        else:
            self._downlink.refuse(fd, _http(503, [(b"x-plato-code", b"%d" % code)], text(code).encode() + b"\n"))

    # ── WebSocket upgrades ───────────────────────────────────────────────────────────────────────────────────

    def read_upgrade(self, fd: int) -> None:
        """Takes bytes of a request that is not whole yet."""
        sockets = self._sockets
        try:
            data = sockets.read(fd, READ_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            sockets.end(fd)
            return
        self._stats.bytes_in += len(data)
        connection = sockets.upgrades[fd]
        try:
            connection.receive_data(data)
            event = connection.next_event()
        except h11.RemoteProtocolError as e:
            self._answer(fd, websocket.Upgrade(e.error_status_hint, [], b"this is no HTTP/1.1 request\n"))
            return
        if event is h11.NEED_DATA:
            return
        if not isinstance(event, h11.Request):
            sockets.end(fd)
            return
        answer = websocket.upgrade(event.method, event.target, list(event.headers), WS_PATH, self._origins)
        if answer.status != 101:
            self._answer(fd, answer)
            return
        rest = connection.trailing_data[0]
        # The request has no body, so h11 holds nothing else; what follows it is WebSocket already.
        if not self._let_in(fd):
            return
        del sockets.upgrades[fd]
        sockets.kind[fd] = WS
        self._downlink.send(fd, _http(101, answer.headers, b""))
        if rest and sockets.kind[fd] == WS:
            self._uplink.take_ws(fd, rest)

    def _answer(self, fd: int, answer: websocket.Upgrade) -> None:
        self._stats.refused += 1
        self._downlink.close_raw(fd, _http(answer.status, answer.headers, answer.text))

    # ── time-outs ────────────────────────────────────────────────────────────────────────────────────────────

    def expire(self) -> None:
        """Closes whoever was let in long ago and sent no whole frame. Those that are not read now get another term."""
        sockets, silent = self._sockets, self._silent
        while silent and silent[0][0] <= self.age_ms:
            _, fd, serial = silent.popleft()
            if sockets.serial[fd] != serial or not sockets.flags[fd] & FRESH:
                continue
            if sockets.flags[fd] & PAUSED:
                silent.append((self.age_ms + self._login_timeout_ms, fd, serial))
                continue
            self._stats.login_timeouts += 1
            if sockets.kind[fd] == SHAKING:
                self.hung_up(fd)
            elif sockets.kind[fd] == GREETING:
                sockets.end(fd)
            elif sockets.kind[fd] == UPGRADING:
                self._downlink.close_raw(fd, _http(408, [], text(Code.LOGIN_TIMEOUT).encode() + b"\n"))
            else:
                self._downlink.close(fd, Code.LOGIN_TIMEOUT)


def _http(status: int, headers: Sequence[tuple[bytes, bytes]], body: bytes) -> bytes:
    """An HTTP/1.1 response, encoded by h11."""
    connection = h11.Connection(h11.SERVER)
    if status == 101:
        # h11 wants to have seen the request before it lets a server switch protocols.
        connection.receive_data(b"GET / HTTP/1.1\r\nhost: x\r\nconnection: upgrade\r\nupgrade: websocket\r\n\r\n")
        connection.next_event()
        return connection.send(h11.InformationalResponse(status_code=101, headers=list(headers))) or b""
    names = {name for name, _ in headers}
    usual = [(b"content-length", b"%d" % len(body)), (b"connection", b"close"), (b"content-type", b"text/plain")]
    response = h11.Response(status_code=status, headers=[*(h for h in usual if h[0] not in names), *headers])
    sent = connection.send(response) or b""
    return sent + (connection.send(h11.Data(data=body)) or b"") + (connection.send(h11.EndOfMessage()) or b"")
