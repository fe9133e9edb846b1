"""A link by long polling: short HTTP requests instead of a socket that stays (docs/protocol.md, "Long polling").

    send ─▸ Outgoing ─POST, one at a time→ gateway        gateway ─answer of a POST that waits→ Incoming ─▸ on_frames

A request that fails is made again: numbers see to it that nothing is lost or doubled. It asks for less then, waits for less,
and gets a socket of its own each time, since a network that kills sockets may count their bytes or seconds. The link is
gone when the gateway says so, when nobody listens there, or when every request of PATIENCE_S failed.

Memory: what is not confirmed, which the outbox's window bounds; one answer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Final

import aiohttp

from plato.client.links import READ_LIMIT_BYTES, OnClosed, OnFrames, TlsOptions
from plato.core import longpoll
from plato.core.errors import PeerError
from plato.core.frames import pack
from plato.core.longpoll import PAGE_BYTES, Body, Incoming, Outgoing

ANSWER_S: Final = 8.0
"""An answer comes within so long, beside the time that its request asked the gateway to wait."""
WAIT_MIN_MS: Final = 2_000
PAGE_MIN_BYTES: Final = 1_024
BACKOFF_MIN_S: Final = 0.05
BACKOFF_MAX_S: Final = 2.0
PATIENCE_S: Final = 12.0
REFUSED_MAX: Final = 4
CLOSE_S: Final = 1.0


class _Failed(Exception):
    """A request came to nothing; the next one may not. refused: nobody listens."""

    def __init__(self, why: str, refused: bool = False) -> None:
        super().__init__(why)
        self.refused = refused


class _Gone(Exception):
    """The gateway knows no such connection."""


async def open_poll(url: str, on_frames: OnFrames, on_closed: OnClosed, tls: TlsOptions | None) -> PollLink:
    """Begins a connection at "http://host:port/poll" (or https). Raises OSError."""
    http = _Http(url, tls)
    try:
        opened = await http.post(Body(longpoll.OPEN), ANSWER_S)
    except (_Failed, _Gone) as e:
        await http.close()
        raise OSError(f"{url}: {e}") from e
    except BaseException:
        await http.close()
        raise
    return PollLink(http, opened, on_frames, on_closed)


class _Http:
    """POSTs to one URL."""

    def __init__(self, url: str, tls: TlsOptions | None) -> None:
        self._url = url
        self._session = aiohttp.ClientSession()
        self._ssl = tls.context if tls else True
        self._name = (tls.name or None) if tls else None
        self.single = False
        """Each request gets a socket of its own."""

    async def post(self, body: Body, within_s: float) -> Body:
        """The answer. Raises _Failed, _Gone."""
        headers = {"Content-Type": "application/octet-stream", **({"Connection": "close"} if self.single else {})}
        try:
            async with self._session.post(
                self._url,
                data=body.encode(),
                headers=headers,
                timeout=aiohttp.ClientTimeout(total=within_s),
                allow_redirects=False,
                ssl=self._ssl,
                server_hostname=self._name,
            ) as answer:
                if answer.status == 410:
                    raise _Gone("the connection is over")
                if answer.status != 200:
                    raise _Failed(f"status {answer.status}")
                return longpoll.decode(await answer.read())
        except PeerError as e:  # a portal's page, most likely
            raise _Failed(str(e)) from e
        except aiohttp.ClientConnectorError as e:
            raise _Failed(str(e), isinstance(e.os_error, ConnectionRefusedError)) from e
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as e:
            raise _Failed(repr(e)) from e

    async def close(self) -> None:
        """Releases the sockets."""
        await self._session.close()


class PollLink:
    """An open connection; see Link."""

    way = "poll"

    def __init__(self, http: _Http, opened: Body, on_frames: OnFrames, on_closed: OnClosed) -> None:
        self._http = http
        self._session = opened.session
        self._longest_ms = self._wait_ms = opened.a
        self._on_frames = on_frames
        self._on_closed = on_closed
        self._outgoing = Outgoing()
        self._incoming = Incoming(READ_LIMIT_BYTES)
        self._up_bytes = self._down_bytes = PAGE_BYTES
        self._wake = asyncio.Event()
        self._reading = asyncio.Event()
        self._reading.set()
        self._over = False
        self._loop = asyncio.get_running_loop()
        self._failing_since_s: float | None = None
        self._refused = 0
        self._tasks = [asyncio.create_task(self._run(self._write)), asyncio.create_task(self._run(self._poll))]
        self._ending: asyncio.Task[None] | None = None

    def send(self, payloads: Sequence[bytes]) -> None:
        """See Link."""
        if not self._over:
            for payload in payloads:
                self._outgoing.put(pack(payload))
            self._wake.set()

    def close(self) -> None:
        """See Link."""
        self._over = True
        self._end(tell=True)

    def pause(self, paused: bool) -> None:
        """See Link."""
        if paused:
            self._reading.clear()
        else:
            self._reading.set()

    async def ended(self) -> None:
        """See Link."""
        if self._ending is not None:
            await asyncio.shield(self._ending)

    # ── requests ─────────────────────────────────────────────────────────────────────────────────────────────

    async def _run(self, part: Callable[[], Awaitable[None]]) -> None:
        try:
            await part()
        except (_Gone, PeerError):
            pass
        finally:
            if not self._over:
                self._over = True
                self._end(tell=False)
                self._on_closed()

    async def _write(self) -> None:
        tries = 0
        while True:
            await self._wake.wait()
            self._wake.clear()
            while len(self._outgoing):
                first, run = self._outgoing.page(self._up_bytes)
                before = len(self._outgoing)
                try:
                    await self._exchange(Body(0, self._session, 0, 0, self._incoming.received, first, run), 0)
                    self._up_bytes = min(PAGE_BYTES, 2 * self._up_bytes)
                except _Failed:
                    self._up_bytes = max(PAGE_MIN_BYTES, self._up_bytes // 2)
                if len(self._outgoing) < before:
                    tries = 0
                else:  # it failed, or the gateway has no room now
                    tries += 1
                    await asyncio.sleep(min(BACKOFF_MAX_S, BACKOFF_MIN_S * 2 ** min(tries, 10)))

    async def _poll(self) -> None:
        tries = 0
        while True:
            await self._reading.wait()
            asked_s = self._loop.time()
            ask = Body(0, self._session, self._wait_ms, self._down_bytes, self._incoming.received)
            try:
                answer = await self._exchange(ask, self._wait_ms)
            except _Failed:
                self._down_bytes = max(PAGE_MIN_BYTES, self._down_bytes // 2)
                if self._loop.time() - asked_s > WAIT_MIN_MS / 1000:  # killed as it waited
                    self._wait_ms = max(WAIT_MIN_MS, self._wait_ms // 2)
                tries += 1
                await asyncio.sleep(min(BACKOFF_MAX_S, BACKOFF_MIN_S * 2 ** min(tries, 10)))
                continue
            tries = 0
            self._down_bytes = min(PAGE_BYTES, 2 * self._down_bytes)
            payloads = self._incoming.take(answer.first, answer.run)
            if payloads and not self._over:
                self._on_frames(payloads)
            if answer.flags & longpoll.END:
                raise _Gone("the gateway closed it")

    async def _exchange(self, body: Body, wait_ms: int) -> Body:
        """One request. Raises _Failed; _Gone when that was the last of too many."""
        try:
            answer = await self._http.post(body, wait_ms / 1000 + ANSWER_S)
        except _Failed as e:
            self._http.single = True
            now_s = self._loop.time()
            self._failing_since_s = self._failing_since_s or now_s
            self._refused = self._refused + 1 if e.refused else 0
            if self._refused >= REFUSED_MAX or now_s - self._failing_since_s > PATIENCE_S:
                raise _Gone("no request gets through") from e
            raise
        self._failing_since_s = None
        self._refused = 0
        self._outgoing.confirmed(answer.received)
        return answer

    def _end(self, tell: bool) -> None:
        if self._ending is None:
            self._ending = self._loop.create_task(self._release(tell))

    async def _release(self, tell: bool) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if tell:
            try:
                await self._http.post(Body(longpoll.CLOSE, self._session, received=self._incoming.received), CLOSE_S)
            except (_Failed, _Gone):
                pass  # it will find out by our silence
        await self._http.close()
