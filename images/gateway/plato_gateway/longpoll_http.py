"""HTTP/1.1 for long polling: whole requests in, whole answers out, one at a time per socket. h11 reads and writes.

Nobody holds a socket for nothing: the first bytes come within `first_s`, a request is whole within REQUEST_S, the next one
begins within KEEP_S. A peer that goes away while its request is answered cancels the answer.

Memory: per socket one request of at most most_bytes and HEAD_BYTES, one answer, and EARLY_BYTES of what is sent too early.
What a peer does not read is not added to: its next request waits until the answer before is out.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Final

import h11

from .core.addresses import key_of

HEAD_BYTES: Final = 16_384
EARLY_BYTES: Final = 65_536
REQUEST_S: Final = 30.0
KEEP_S: Final = 60.0
BACKLOG: Final = 1_024


@dataclass(frozen=True, slots=True)
class Request:
    """A whole request. headers: by lower-case name; peer: host:port of the socket."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes
    peer: str


@dataclass(frozen=True, slots=True)
class Response:
    """A whole answer; length and caching are said for it."""

    status: int
    body: bytes = b""
    headers: tuple[tuple[str, str], ...] = ()
    close: bool = False
    """Close the socket after it."""


Handler = Callable[[Request], Awaitable[Response]]


class HttpServer:
    """Listens and answers by `handler`."""

    def __init__(
        self, handler: Handler, *, most_bytes: int, most_sockets: int, first_s: float, most_each: int = 0
    ) -> None:
        """most_each: sockets of one address; 0: no bound."""
        self.handler = handler
        self.most_bytes = most_bytes
        self.first_s = first_s
        self.sockets: set[HttpSocket] = set()
        self.refused = 0
        """Sockets closed at once, for there were too many."""
        self._most_sockets = most_sockets
        self._most_each = most_each
        self._each: dict[str, int] = {}
        self._server: asyncio.Server | None = None

    async def start(self, host: str, port: int, tls: ssl.SSLContext | None) -> None:
        """Raises OSError when the port cannot be opened."""
        loop = asyncio.get_running_loop()
        shake_s = self.first_s if tls is not None else None
        self._server = await loop.create_server(
            lambda: HttpSocket(self), host, port, ssl=tls, ssl_handshake_timeout=shake_s, backlog=BACKLOG
        )

    def admit(self, socket: HttpSocket, key: str) -> bool:
        """Whether there is room for one more, of this address."""
        count = self._each.get(key, 0) + 1
        if len(self.sockets) >= self._most_sockets or 0 < self._most_each < count:
            self.refused += 1
            return False
        self.sockets.add(socket)
        self._each[key] = count
        return True

    def gone(self, socket: HttpSocket, key: str) -> None:
        """A socket that was admitted, or one that was not, has ended."""
        if socket in self.sockets:
            self.sockets.discard(socket)
            self._each[key] -= 1
            if not self._each[key]:
                del self._each[key]

    async def stop(self, within_s: float) -> None:
        """Takes nobody in any more, lets what is being answered be answered, and closes all."""
        if self._server is not None:
            self._server.close()
        busy = [s.task for s in self.sockets if s.task is not None]
        if busy:
            await asyncio.wait(busy, timeout=within_s)
        for socket in list(self.sockets):
            socket.close()


class HttpSocket(asyncio.Protocol):
    """One socket of a client."""

    def __init__(self, server: HttpServer) -> None:
        self.task: asyncio.Task[None] | None = None
        """Answers the request at hand."""
        self._server = server
        self._http = h11.Connection(h11.SERVER, max_incomplete_event_size=HEAD_BYTES)
        self._transport: asyncio.Transport | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._request: h11.Request | None = None
        self._body = bytearray()
        self._begun = False
        """Something of a request came: its time runs."""
        self._full = False
        """The answer before is not out yet."""
        self._early_bytes = 0
        self._peer = self._key = ""

    # ── asyncio's calls ──────────────────────────────────────────────────────────────────────────────────────

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See asyncio."""
        assert isinstance(transport, asyncio.Transport)
        peer = transport.get_extra_info("peername")
        self._peer, self._key = (f"{peer[0]}:{peer[1]}", key_of(peer[0])) if peer else ("", "")
        if not self._server.admit(self, self._key):
            transport.abort()
            return
        self._transport = transport
        self._within(self._server.first_s)

    def data_received(self, data: bytes) -> None:
        """See asyncio."""
        if self._transport is None:
            return
        if self.task is not None or self._full:
            self._early_bytes += len(data)
            if self._early_bytes > EARLY_BYTES:
                self._transport.abort()
                return
        elif not self._begun:  # once: whoever sends byte after byte gets no time for each
            self._begun = True
            self._within(REQUEST_S)
        try:
            self._http.receive_data(data)
        except h11.RemoteProtocolError:  # after its end was said; nothing of it counts
            self._transport.abort()
            return
        self._go_on()

    def pause_writing(self) -> None:
        """See asyncio."""
        self._full = True

    def resume_writing(self) -> None:
        """See asyncio."""
        self._full = False
        self._go_on()

    def connection_lost(self, exc: Exception | None) -> None:
        """See asyncio."""
        self._transport = None
        self._server.gone(self, self._key)
        self._within(None)
        if self.task is not None:
            self.task.cancel()

    # ── requests ─────────────────────────────────────────────────────────────────────────────────────────────

    def _go_on(self) -> None:
        while not self._full and self.task is None and self._transport is not None and not self._transport.is_closing():
            try:
                event = self._http.next_event()
            except h11.RemoteProtocolError as e:
                self._refuse(e.error_status_hint)
                return
            if event is h11.NEED_DATA or event is h11.PAUSED:
                if self._http.they_are_waiting_for_100_continue:
                    self._write(self._http.send(h11.InformationalResponse(status_code=100, headers=[])))
                return
            if isinstance(event, h11.Request):
                self._request = event
                self._body.clear()
            elif isinstance(event, h11.Data):
                self._body += event.data
                if len(self._body) > self._server.most_bytes:
                    self._refuse(413)
                    return
            elif isinstance(event, h11.EndOfMessage):
                self._within(None)
                self._early_bytes = 0
                self.task = asyncio.get_running_loop().create_task(self._answer())
            else:  # ConnectionClosed
                self.close()

    async def _answer(self) -> None:
        assert self._request is not None
        found = self._request
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in found.headers}
        path = found.target.decode("latin-1").partition("?")[0]
        request = Request(found.method.decode("latin-1"), path, headers, bytes(self._body), self._peer)
        try:
            response = await self._server.handler(request)
        except asyncio.CancelledError:
            if self._transport is None:
                return  # the peer is gone
            raise
        finally:
            self.task = None
        self._request = None
        self._body.clear()
        self._send(response)
        if self._transport is None:
            return
        if self._http.our_state is h11.DONE and self._http.their_state is h11.DONE and not response.close:
            self._http.start_next_cycle()
            self._begun = False
            self._within(KEEP_S)
            self._go_on()
        else:
            self._transport.close()

    def _refuse(self, status: int) -> None:
        """The request cannot be read on: says so, if that is possible still, and closes."""
        if self._http.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            with contextlib.suppress(h11.LocalProtocolError):
                self._send(Response(status, close=True))
        self.close()

    def _send(self, response: Response) -> None:
        usual = [("content-length", str(len(response.body))), ("cache-control", "no-store")]
        if response.status == 204:
            del usual[0]  # a 204 has no length
        if response.close:
            usual.append(("connection", "close"))
        head = h11.Response(status_code=response.status, headers=[*usual, *response.headers])
        parts = [
            self._http.send(head),
            self._http.send(h11.Data(data=response.body)),
            self._http.send(h11.EndOfMessage()),
        ]
        self._write(b"".join(part or b"" for part in parts))

    def _write(self, data: bytes | None) -> None:
        if data and self._transport is not None:
            self._transport.write(data)

    def close(self) -> None:
        """Ends the socket when what was written is out."""
        if self._transport is not None:
            self._transport.close()
            self._within(self._server.first_s)

    def _within(self, seconds: float | None) -> None:
        """Something is to happen within so long, or the socket ends; None: no longer."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if seconds is not None:
            self._timer = asyncio.get_running_loop().call_later(seconds, self._late)

    def _late(self) -> None:
        if self._transport is not None:
            self._transport.abort()
