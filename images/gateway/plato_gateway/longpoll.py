"""The third listener: long polling, for networks that kill sockets. A process of its own beside the workers.

    client ─POST /poll→ this process ─Unix socket, TCP's frames→ a worker ─▸ as any other connection

Each connection has a socket to one of the pod's workers, which names it, bounds it, times its login out, drains it and
closes it as it does with those of its own; so nothing of that is here, and a worker knows no HTTP. What is here is the
client's end of that socket, reached by requests that may be lost or doubled (plato.core.longpoll, core/longpoll.py).

A connection is named by sixteen random bytes, which only its client learns; its conn_id opens nothing. It ends when the
worker ends it, when the client says so, or when no request came for poll_silent_ms of ticks (R10).

Memory: per connection see core/longpoll.py, and one request that waits for room toward the worker. Connections that are
over take no place: as many as may be open are kept for their last answer, the newest ones.
"""

from __future__ import annotations

import asyncio
import os
import random
import resource
import secrets
import signal
import time
from collections.abc import Callable
from functools import partial
from typing import Final

from plato.api.names import POLL_PATH
from plato.core import longpoll
from plato.core.codes import Code, text
from plato.core.errors import PeerError
from plato.core.longpoll import Body
from plato.runtime import client_tls, logs
from plato.runtime.settings import Settings

from .core.longpoll import Session
from .core.websocket import origin_allowed
from .lane import address, poll_socket
from .longpoll_http import HttpServer, Request, Response
from .preflight import StartError, port_error

TICK_S: Final = 0.5
READ_BYTES: Final = 16_384
WRITE_HIGH_BYTES: Final = 65_536
ROOM_S: Final = 10.0
"""How long a request waits for its worker to take what came before it; then its frames are left to the next one."""
STOP_S: Final = 1.0
OVERLOADED_LAG_S: Final = 1.0
SPARE_SOCKETS: Final = 256
SOCKETS_EACH: Final = 3
"""Of one connection: one to poll, one to send, one that is just closed. Where connections of an address are bounded."""
PREFLIGHT_S: Final = 7_200

_BYTES = ("content-type", "application/octet-stream")
_WORDS = ("content-type", "text/plain; charset=utf-8")


class Upstream(asyncio.BufferedProtocol):
    """A connection's socket to its worker."""

    _buffer = memoryview(bytearray(READ_BYTES))
    """Shared: what is read is copied out before anything else is read."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.changed = asyncio.Event()
        """Something came, or this socket or an older poll ended."""
        self.writable = asyncio.Event()
        self.writable.set()
        self.on_end: Callable[[], None] | None = None
        """Is told when the worker ended it."""
        self._transport: asyncio.Transport | None = None
        self._reading = True

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See asyncio."""
        assert isinstance(transport, asyncio.Transport)
        transport.set_write_buffer_limits(high=WRITE_HIGH_BYTES)
        self._transport = transport

    def get_buffer(self, sizehint: int) -> memoryview:
        """See asyncio."""
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        """See asyncio."""
        if self.session.over:
            return
        try:
            self.session.came(bytes(self._buffer[:nbytes]))
        except PeerError:
            self.close()
        self.look()

    def connection_lost(self, exc: Exception | None) -> None:
        """See asyncio."""
        self._transport = None
        self.session.over = True
        self.writable.set()
        self.look()
        if self.on_end is not None:
            self.on_end()

    def pause_writing(self) -> None:
        """See asyncio."""
        self.writable.clear()

    def resume_writing(self) -> None:
        """See asyncio."""
        self.writable.set()

    def look(self) -> None:
        """Wakes who waits, and reads on or not, as the session has room."""
        self.changed.set()
        if self._transport is None or self._transport.is_closing():
            return
        if self._reading == self.session.full:
            self._reading = not self._reading
            if self._reading:
                self._transport.resume_reading()
            else:
                self._transport.pause_reading()

    def write(self, data: bytes) -> None:
        """Frames for the worker."""
        if self._transport is not None and data:
            self._transport.write(data)

    def close(self) -> None:
        """Ends it when what was written is out."""
        if self._transport is not None:
            self._transport.close()


class Polls:
    """The connections of one gateway by long polling. `answer` handles a request."""

    def __init__(self, settings: Settings) -> None:
        gateway = settings.gateway
        self._gateway = gateway
        self._open: dict[bytes, Upstream] = {}
        self._over: dict[bytes, None] = {}
        """Of those the ones that are over and wait for a request that hears it, the oldest first."""
        self._opening = 0
        self._age_ms = 0
        self._lag_s = 0.0
        self._stopping = False
        self._log = logs.get("longpoll")
        self._certificates = client_tls.newest(settings.tls.client_dir)
        self._http = HttpServer(
            self.answer,
            most_bytes=longpoll.HEAD_BYTES + longpoll.PAGE_BYTES + gateway.max_frame_bytes + 4,
            most_sockets=2 * gateway.poll_max_connections + SPARE_SOCKETS,
            first_s=gateway.login_timeout_ms / 1000,
            most_each=SOCKETS_EACH * gateway.connections_per_address,
        )

    async def start(self) -> None:
        """Opens the port. Raises StartError."""
        host, port = self._gateway.host, self._gateway.poll_port
        tls = self._certificates.serve() if self._certificates is not None else None
        try:
            await self._http.start(host, port, tls)
        except OSError as e:
            raise StartError(port_error("poll_port", host, port, e)) from e

    async def run(self) -> None:
        """Ticks until cancelled: who fell silent is closed, new certificates are taken."""
        last_s = time.monotonic()
        while True:
            await asyncio.sleep(TICK_S)
            now_s = time.monotonic()
            took_s, last_s = now_s - last_s, now_s
            self._lag_s += (min(took_s - TICK_S, 5.0) - self._lag_s) / 4
            self._age_ms += int(1000 * min(took_s, 2 * TICK_S))
            for name, upstream in list(self._open.items()):
                if upstream.session.silent(self._age_ms, self._gateway.poll_silent_ms):
                    self._drop(name, upstream)
            if self._certificates is not None and (said := self._certificates.look()):
                self._log.warning(said)

    async def stop(self) -> None:
        """The workers ended: says so to everybody who asks within STOP_S."""
        self._stopping = True
        for upstream in self._open.values():
            upstream.session.over = True
            upstream.look()
        await self._http.stop(STOP_S)

    # ── HTTP ─────────────────────────────────────────────────────────────────────────────────────────────────

    async def answer(self, request: Request) -> Response:
        """Answers a request of any kind."""
        origin = request.headers.get("origin")
        if request.path != POLL_PATH:
            return _words(404, f"long polling is at {POLL_PATH}")
        if origin is not None and not origin_allowed(origin, self._gateway.ws_origins):
            return _words(403, "this origin is not allowed; the setting is gateway.ws_origins")
        if request.method == "OPTIONS":
            response = Response(204, b"", _preflight())
        elif request.method == "POST":
            response = await self._post(request)
        else:
            response = _words(405, "POST only", ("allow", "POST, OPTIONS"))
        if origin is None:
            return response
        cors = (
            ("access-control-allow-origin", origin),
            ("access-control-expose-headers", "x-plato-code"),
            ("vary", "origin"),
        )
        return Response(response.status, response.body, (*response.headers, *cors), response.close)

    async def _post(self, request: Request) -> Response:
        try:
            body = longpoll.decode(request.body)
            if body.flags & longpoll.OPEN:
                if body.run:
                    raise PeerError(Code.MALFORMED, "a request that opens brings no frames")
                return await self._begin(request.peer)
            upstream = self._open.get(body.session)
            if upstream is None:
                return _words(410, "no such connection: it ended, or this gateway started again")
            return await self._exchange(upstream, body)
        except PeerError as e:
            return _words(400, str(e))

    async def _begin(self, peer: str) -> Response:
        """A new connection: a socket to a worker, and a name."""
        here = len(self._open) - len(self._over) + self._opening
        full = here >= self._gateway.poll_max_connections or self._lag_s > OVERLOADED_LAG_S
        if full or self._stopping:
            return _refused(Code.GATEWAY_FULL if full else Code.GATEWAY_CLOSING)
        session = Session(self._gateway.max_frame_bytes, self._age_ms)
        self._opening += 1
        try:
            upstream = await self._connect(session, peer)
        finally:
            self._opening -= 1
        if upstream is None:
            return _refused(Code.GATEWAY_CLOSING)
        name = secrets.token_bytes(longpoll.SESSION_BYTES)
        self._open[name] = upstream
        upstream.on_end = partial(self._ended, name)
        return self._said(name, session, 1, b"", 0)

    async def _connect(self, session: Session, peer: str) -> Upstream | None:
        """A socket to one of the workers, which are tried from any one on; None: none takes it."""
        loop, workers = asyncio.get_running_loop(), self._gateway.workers
        begin = random.randrange(workers)
        for index in (*range(begin, workers), *range(begin)):
            where, folder = address(self._gateway.run_dir, poll_socket(index))
            upstream = Upstream(session)
            try:
                await loop.create_unix_connection(partial(_itself, upstream), where)
            except OSError:
                continue  # the pod starts it again
            finally:
                if folder >= 0:
                    os.close(folder)
            said = peer.encode()[:255]
            upstream.write(bytes([len(said)]) + said)
            return upstream
        return None

    async def _exchange(self, upstream: Upstream, body: Body) -> Response:
        session = upstream.session
        session.hear(body, self._age_ms)
        upstream.look()
        if body.run:
            await self._bring(upstream, body)
        if body.flags & longpoll.CLOSE:
            self._drop(body.session, upstream)
            return self._said(body.session, session, 1, b"", longpoll.END)
        poll: int | None = None
        if body.a:
            poll = session.begin_poll()
            upstream.changed.set()  # an older one is answered now
            try:
                await self._wait(upstream, poll, min(body.a, self._gateway.poll_wait_ms) / 1000)
            finally:
                session.end_poll(self._age_ms)
        first, run, end = session.answer(min(body.b, longpoll.PAGE_BYTES), poll)
        return self._said(body.session, session, first, run, longpoll.END if end else 0)

    async def _bring(self, upstream: Upstream, body: Body) -> None:
        """Hands the new frames of a request to the worker, when it has room. What does not get in is not taken."""
        if not upstream.writable.is_set():
            try:
                async with asyncio.timeout(ROOM_S):
                    await upstream.writable.wait()
            except TimeoutError:
                return
        session = upstream.session
        if session.over:
            return
        upstream.write(session.take(body))
        if session.over:  # a frame of a bad size: the worker sees a close, the client the reason
            upstream.close()
            upstream.look()

    async def _wait(self, upstream: Upstream, poll: int, wait_s: float) -> None:
        try:
            async with asyncio.timeout(wait_s):
                while upstream.session.waits(poll):
                    upstream.changed.clear()
                    await upstream.changed.wait()
        except TimeoutError:
            pass

    def _said(self, name: bytes, session: Session, first: int, run: bytes, flags: int) -> Response:
        gateway = self._gateway
        answer = Body(flags, name, gateway.poll_wait_ms, gateway.poll_silent_ms, session.received, first, run)
        return Response(200, answer.encode(), (_BYTES,), close=self._stopping)

    def _ended(self, name: bytes) -> None:
        if name in self._open:
            self._over[name] = None
            if len(self._over) > self._gateway.poll_max_connections:
                oldest = next(iter(self._over))
                self._drop(oldest, self._open[oldest])

    def _drop(self, name: bytes, upstream: Upstream) -> None:
        self._open.pop(name, None)
        self._over.pop(name, None)
        upstream.close()
        upstream.session.over = True
        upstream.changed.set()


def _itself(upstream: Upstream) -> Upstream:
    return upstream


def _words(status: int, words: str, *headers: tuple[str, str]) -> Response:
    return Response(status, words.encode() + b"\n", (_WORDS, *headers))


def _refused(code: Code) -> Response:
    return _words(503, text(code), ("x-plato-code", str(int(code))))


def _preflight() -> tuple[tuple[str, str], ...]:
    return (
        ("access-control-allow-methods", "POST"),
        ("access-control-allow-headers", "content-type"),
        ("access-control-max-age", str(PREFLIGHT_S)),
    )


async def run(settings: Settings) -> int:
    """The process's main. Returns the exit code; raises StartError when the port cannot be opened."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    asked = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, asked.set)
    polls = Polls(settings)
    await polls.start()
    ticks, end = asyncio.ensure_future(polls.run()), asyncio.ensure_future(asked.wait())
    await asyncio.wait((ticks, end), return_when=asyncio.FIRST_COMPLETED)
    if ticks.done():
        end.cancel()
        ticks.result()
    ticks.cancel()
    await polls.stop()
    return 0
