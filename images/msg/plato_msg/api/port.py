"""The HTTP API's own port, for the world: what a stranger can hold of it is bounded, in number and in time.

    socket ─▸ one of `connections`, else closed at once
           ─▸ TLS handshake       whole within head_s
           ─▸ head of a request   whole within head_s, HEAD_BYTES
           ─▸ its body            makes us wait for body_s, and a second more per RATE_BYTES_PER_S that it brought
           ─▸ the answer          whoever takes nothing of it for TAKE_S is cut off
           ─▸ the next request    begins within KEEP_S, or CROWDED_KEEP_S while three quarters of all places are taken

uvicorn reads and writes; this file decides who may stay. All connections are looked at every TICK_S, so nothing is armed per
request. Time in which we do not read, because the application is behind, is nobody's fault. How large a body may be is the
application's to say. Memory: per connection a head, and 64 KiB of a body each way.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import ssl
import time
from collections.abc import Sequence
from dataclasses import dataclass
from email.utils import formatdate
from typing import Any, Final

import h11
import uvicorn
from plato.runtime import logs
from plato.runtime.admin import PlainPaths
from plato.runtime.client_tls import NewestCertificate
from prometheus_client import Counter, Gauge
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from plato_msg.api.origins import told

HEAD_BYTES: Final = 32_768
"""The longest cursor of /v1/events is half of it."""
RATE_BYTES_PER_S: Final = 4_096
TAKE_S: Final = 60.0
KEEP_S: Final = 60.0
CROWDED_KEEP_S: Final = 1.0
LINGER_S: Final = 5.0
"""For the rest of a body that nobody reads, and for the peer's end of a connection that we closed."""
STOP_S: Final = 10.0
TICK_S: Final = 0.25
LOOK_S: Final = 1.0
"""How often the certificate is looked at, and the date written."""
BACKLOG: Final = 1_024
_TOO_SLOW: Final = b"HTTP/1.1 408 Request Timeout\r\nContent-Length: 0\r\nConnection: close\r\n"
_CLOSE: Final = (b"connection", b"close")
_quiet: Final = logging.getLogger("uvicorn.api")
_quiet.setLevel(logging.ERROR)  # a line per bad request would let strangers fill the log

_open = Gauge("plato_msg_api_connections", "Connections to msg.api_port.")
_ended = Counter("plato_msg_api_ended_total", "Connections to msg.api_port that a bound of it ended.", ["bound"])
_FULL, _HANDSHAKE, _HEAD, _BODY, _ANSWER = "connections", "handshake", "head", "body", "answer"
_REST, _IDLE = "rest", "idle"
for _bound in (_FULL, _HANDSHAKE, _HEAD, _BODY, _ANSWER, _REST, _IDLE):
    _ended.labels(_bound)


@dataclass(frozen=True, slots=True)
class Bounds:
    """connections: at once. head_s: for a handshake, and for a head. body_s: that a body may make us wait, beside what its
    bytes take."""

    connections: int
    head_s: float
    body_s: float


class ApiPort:
    """Serves an ASGI application. `start` raises OSError (port in use) at once; `run` ends only if a part of it broke."""

    def __init__(
        self,
        application: ASGIApp,
        host: str,
        port: int,
        bounds: Bounds,
        certificates: NewestCertificate | None = None,
        origins: Sequence[str] = (),
    ) -> None:
        """certificates None: plain text. origins: as of the application."""
        self._host, self._port = host, port
        self._bounds = bounds
        self._certificates = certificates
        self._origins = origins

        plain = PlainPaths(application)

        async def unless_gone(scope: Scope, receive: Receive, send: Send) -> None:
            with contextlib.suppress(ClientDisconnect):  # else a stranger's every hang-up is a trace in the log
                await plain(scope, receive, send)

        self._config = uvicorn.Config(
            unless_gone,
            interface="asgi3",
            http=_Socket,
            ws="none",  # an upgrade would leave our bounds
            lifespan="off",
            log_config=None,
            access_log=False,
            proxy_headers=False,
            server_header=False,
            timeout_keep_alive=int(2 * KEEP_S),  # ours comes first
            h11_max_incomplete_event_size=HEAD_BYTES,
        )
        self._config.load()
        self._state = ServerState()
        self._listening: socket.socket | None = None
        self._serving: set[asyncio.Task[None]] = set()
        """One per connection, from the first moment on, the handshake included."""
        self._parts: list[asyncio.Task[None]] = []
        self._settling = False
        self._log = logs.get("api")

    @property
    def connections(self) -> int:
        """How many there are, those in a handshake included."""
        return len(self._serving)

    async def start(self) -> None:
        """Binds and begins to serve."""
        listening = socket.socket(socket.AF_INET6 if ":" in self._host else socket.AF_INET)
        try:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listening.bind((self._host, self._port))
            listening.listen(BACKLOG)
            listening.setblocking(False)
        except OSError:
            listening.close()
            raise
        self._listening = listening
        self._date()
        tls = self._certificates.serve() if self._certificates is not None else None
        self._parts = [asyncio.create_task(self._accept(listening, tls)), asyncio.create_task(self._tick())]

    async def run(self) -> None:
        """Waits, and raises what broke. Its cancellation ends nothing: `stop` does."""
        done, _ = await asyncio.wait(self._parts, return_when=asyncio.FIRST_COMPLETED)
        for part in done:
            part.result()

    async def settle(self, seconds: float) -> None:
        """Goes on answering for so long, and asks each client to come by another connection for its next request: balancers
        send requests here for a while after they were told not to."""
        self._settling = True
        self._date()
        await asyncio.sleep(seconds)

    async def stop(self) -> None:
        """Takes nobody in any more, lets what is being answered be answered within STOP_S, and closes all."""
        if self._listening is None or not self._parts:
            return
        accept, *others = self._parts
        await _cancelled(accept)
        self._listening.close()
        for connection in list(self._state.connections):
            connection.shutdown()
        if self._serving:
            await asyncio.wait(self._serving, timeout=STOP_S)
        for task in self._state.tasks | self._serving:
            task.cancel()
        if left := self._state.tasks | self._serving:
            await asyncio.wait(left, timeout=STOP_S)
        for part in others:
            await _cancelled(part)
        self._parts = []

    async def _accept(self, listening: socket.socket, tls: ssl.SSLContext | None) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                sock, _ = await loop.sock_accept(listening)
            except OSError as e:  # no descriptors are left, or who came is gone again
                self._log.warning("cannot accept", reason=e.strerror)
                await asyncio.sleep(TICK_S)
                continue
            if len(self._serving) >= self._bounds.connections:
                sock.close()
                _ended.labels(_FULL).inc()
                continue
            task = loop.create_task(self._serve(sock, tls))
            self._serving.add(task)
            task.add_done_callback(self._served)

    def _served(self, task: asyncio.Task[None]) -> None:
        self._serving.discard(task)
        _open.set(len(self._serving))
        if not task.cancelled() and (error := task.exception()) is not None:
            self._log.error("a connection broke", exc_info=error)

    async def _serve(self, sock: socket.socket, tls: ssl.SSLContext | None) -> None:
        _open.set(len(self._serving))
        protocol = _Socket(self._config, self._state, {}, bounds=self._bounds, origins=self._origins)
        more: dict[str, Any] = {}
        if tls is not None:
            more = {"ssl": tls, "ssl_handshake_timeout": self._bounds.head_s, "ssl_shutdown_timeout": LINGER_S}
        try:
            await asyncio.get_running_loop().connect_accepted_socket(lambda: protocol, sock, **more)
        except OSError as e:  # ssl.SSLError, TimeoutError and a reset are such
            if isinstance(e, ConnectionAbortedError):  # what asyncio raises when a handshake does not end
                _ended.labels(_HANDSHAKE).inc()
            return
        try:
            await protocol.lost.wait()
        finally:
            if not protocol.lost.is_set():
                protocol.transport.abort()

    async def _tick(self) -> None:
        last_s, dated_s = time.monotonic(), 0.0
        while True:
            await asyncio.sleep(TICK_S)
            now_s = time.monotonic()
            # Where our own loop was late, nobody else was: what they sent may not have been read yet.
            past_s, last_s = min(now_s - last_s, 2 * TICK_S), now_s
            crowded = 4 * len(self._serving) > 3 * self._bounds.connections
            keep_s = CROWDED_KEEP_S if crowded else KEEP_S
            for connection in list(self._state.connections):
                if isinstance(connection, _Socket) and (bound := connection.look(past_s, keep_s)):
                    _ended.labels(bound).inc()
            if now_s - dated_s >= LOOK_S:
                dated_s = now_s
                self._date()
                if self._certificates is not None and (said := self._certificates.look()):
                    self._log.warning(said)

    def _date(self) -> None:
        """What each answer begins with."""
        made = [(b"date", formatdate(usegmt=True).encode()), *self._config.encoded_headers]
        self._state.default_headers = [*made, _CLOSE] if self._settling else made


class _Socket(H11Protocol):
    """One connection."""

    def __init__(self, *given: Any, bounds: Bounds, origins: Sequence[str], **named: Any) -> None:
        super().__init__(*given, **named)
        self.logger = _quiet
        self.access_log = False
        self.lost = asyncio.Event()
        self._bounds = bounds
        self._origins = origins
        self._at: tuple[str, object] = ("", None)
        """What we wait for, and within which request."""
        self._waited_s = 0.0
        self._brought = 0
        """Bytes, since then."""

    def data_received(self, data: bytes) -> None:
        """See asyncio."""
        self._brought += len(data)
        super().data_received(data)

    def connection_lost(self, exc: Exception | None) -> None:
        """See asyncio."""
        super().connection_lost(exc)
        self._unset_keepalive_if_required()
        self.lost.set()

    def send_400_response(self, msg: str) -> None:
        """Ends a connection that broke the protocol: with an answer where there is none yet, uvicorn's own would raise
        where there is."""
        self._gone()
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            super().send_400_response(msg)
        else:
            self.transport.abort()

    def look(self, past_s: float, keep_s: float) -> str:
        """Ends this connection if it is too slow, and returns by which bound. past_s: since the last look. keep_s: how
        long one may stay that asks nothing."""
        waits_for, most_s = self._waits_for(keep_s)
        at = (waits_for, self.cycle)
        if at[0] != self._at[0] or at[1] is not self._at[1]:
            self._at, self._waited_s, self._brought = at, 0.0, 0
            return ""
        if not most_s:
            self._waited_s = 0.0
            return ""
        if waits_for == _BODY and self.flow.read_paused:
            return ""
        self._waited_s += past_s
        if self._waited_s <= most_s:
            return ""
        self._end(waits_for)
        return waits_for

    def _waits_for(self, keep_s: float) -> tuple[str, float]:
        """What the peer owes us, and how long it may take; 0.0: nothing."""
        theirs = self.conn.their_state
        if self.transport.is_closing():
            return _REST, LINGER_S
        if theirs is h11.IDLE:
            begun = self.cycle is None or bool(self.conn.trailing_data[0])
            return (_HEAD, self._bounds.head_s) if begun else (_IDLE, keep_s)
        if theirs is h11.SEND_BODY and (self.cycle is None or self.cycle.response_complete):
            return _REST, LINGER_S
        if theirs is h11.SEND_BODY and not self.cycle.waiting_for_100_continue:
            return _BODY, self._bounds.body_s + self._brought / RATE_BYTES_PER_S
        return _ANSWER, TAKE_S if self.flow.write_paused else 0.0

    def _end(self, waits_for: str) -> None:
        cycle, transport = self.cycle, self.transport
        if transport.is_closing() or waits_for == _ANSWER:
            transport.abort()
            return
        # Not to who said nothing: a balancer would take it for the answer to its next request.
        answered = bool(self.conn.trailing_data[0]) if waits_for == _HEAD else waits_for == _BODY
        if answered and (cycle is None or cycle.response_complete or not cycle.response_started):
            # Of a head that is not whole nobody knows from which page it comes.
            readable = told(cycle.scope["headers"], self._origins) if waits_for == _BODY and cycle is not None else b""
            transport.write(_TOO_SLOW + readable + b"\r\n")
        self._gone()
        transport.close()

    def _gone(self) -> None:
        """Whatever the application still says goes nowhere."""
        cycle = self.cycle
        if cycle is not None and not cycle.response_complete:
            cycle.disconnected = True
            cycle.message_event.set()


async def _cancelled(task: asyncio.Task[None]) -> None:
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
