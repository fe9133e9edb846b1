"""Links: one open connection to a gateway, over TCP or WebSocket. Frames in by a callback, frames out in batches.

A link neither decides nor remembers anything. It reads no further while it is paused; what it writes is bounded by the
outbox's window and the few requests that the machine has open.
"""

from __future__ import annotations

import asyncio
import ssl
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

import aiohttp

from plato.api.names import WS_PATH
from plato.core.errors import PeerError
from plato.core.frames import FrameReader, pack

READ_LIMIT_BYTES: Final = 1_048_576
"""The largest frame taken; a gateway may be set to send larger ones than the usual 65,536 bytes, up to this."""
_CLOSE_S: Final = 1.0

OnFrames = Callable[[list[bytes]], None]
OnClosed = Callable[[], None]


class Link(Protocol):
    """An open connection."""

    @property
    def way(self) -> str:
        """How it goes: "tcp", "ws" or "poll". Networks treat each in another way."""

    def send(self, payloads: Sequence[bytes]) -> None:
        """Sends frames, in order. After a close, nothing."""

    def close(self) -> None:
        """Closes without waiting; `on_closed` is not called for it."""

    def pause(self, paused: bool) -> None:
        """Reads no further, or again."""

    async def ended(self) -> None:
        """Waits, after the close, until everything of the link is released."""


@dataclass(frozen=True, slots=True)
class TlsOptions:
    """How to know a gateway: the certificates that are trusted, and the name that its own must hold.

    An empty name is the address's host, which seldom works with lists: they name gateways by IP address.
    """

    context: ssl.SSLContext
    name: str = ""


async def open_link(
    address: str, transport: str, on_frames: OnFrames, on_closed: OnClosed, tls: TlsOptions | None = None
) -> Link:
    """Opens "tcp://host:port", "ws://host:port/path" (or wss), or "host:port" by `transport`; all of them over TLS if given.
    Polls are longpoll.py's.

    on_frames gets whole payloads in order; on_closed comes once, when the other side or the network ended it.
    Raises OSError.
    """
    try:
        scheme, rest, host, port = parse(address, transport)
    except ValueError as e:  # of a list that ipconfig gave; the user's own were checked before
        raise OSError(str(e)) from e
    if scheme != "tcp":
        url = f"{'wss' if tls else scheme}://{rest}" if "/" in rest else f"{'wss' if tls else scheme}://{rest}{WS_PATH}"
        return await _open_ws(url, on_frames, on_closed, tls)
    loop = asyncio.get_running_loop()
    _, link = await loop.create_connection(
        lambda: TcpLink(on_frames, on_closed),
        host,
        port,
        ssl=tls.context if tls else None,
        server_hostname=(tls.name or host) if tls else None,
    )
    return link


def parse(address: str, transport: str) -> tuple[str, str, str, int]:
    """A gateway's address as (scheme, what follows it, host, port); http is long polling. Raises ValueError, in words."""
    scheme, _, rest = address.rpartition("://")
    scheme = scheme or ("http" if transport == "poll" else transport)
    if scheme not in ("tcp", "ws", "wss", "http", "https"):
        raise ValueError(
            f"gateway {address!r}: the address begins with tcp://, ws://, wss:// or http://, or is host:port"
        )
    place = rest if scheme == "tcp" else rest.partition("/")[0]
    host, _, port = place.rpartition(":")
    if not host.strip("[]") or not port.isdecimal() or not 0 < int(port) < 65_536:
        raise ValueError(f"gateway {address!r}: the address is host:port, such as 127.0.0.1:8900")
    return scheme, rest, host.strip("[]"), int(port)


class TcpLink(asyncio.Protocol):
    """Frames with a 4-byte length over TCP. asyncio sets TCP_NODELAY itself."""

    way = "tcp"

    def __init__(self, on_frames: OnFrames, on_closed: OnClosed) -> None:
        self._on_frames = on_frames
        self._on_closed = on_closed
        self._reader = FrameReader(READ_LIMIT_BYTES)
        self._transport: asyncio.Transport | None = None
        self._ours = False  # we closed it

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """asyncio's call."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        """asyncio's call."""
        if self._ours:
            return
        try:
            payloads = self._reader.feed(data)
        except PeerError:
            assert self._transport is not None
            self._transport.abort()  # ends in connection_lost
            return
        if payloads:
            self._on_frames(payloads)

    def connection_lost(self, exc: Exception | None) -> None:
        """asyncio's call."""
        if not self._ours:
            self._ours = True
            self._on_closed()

    def send(self, payloads: Sequence[bytes]) -> None:
        """See Link."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(b"".join(map(pack, payloads)))

    def close(self) -> None:
        """See Link."""
        self._ours = True
        if self._transport is not None:
            self._transport.abort()

    def pause(self, paused: bool) -> None:
        """See Link."""
        if self._transport is None or self._transport.is_closing():
            return
        if paused:
            self._transport.pause_reading()
        else:
            self._transport.resume_reading()

    async def ended(self) -> None:
        """See Link."""
        await asyncio.sleep(0)  # the transport closes its socket in the loop's next turn


async def _open_ws(url: str, on_frames: OnFrames, on_closed: OnClosed, tls: TlsOptions | None) -> Link:
    session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None, sock_connect=10))
    try:
        socket = await session.ws_connect(
            url,
            max_msg_size=READ_LIMIT_BYTES,
            compress=0,
            autoping=True,
            ssl=tls.context if tls else True,
            server_hostname=(tls.name or None) if tls else None,
        )
    except BaseException as e:
        await session.close()
        if isinstance(e, aiohttp.ClientError | ValueError):
            raise OSError(f"{url}: {e}") from e
        raise
    return WsLink(session, socket, on_frames, on_closed)


class WsLink:
    """One binary message per frame over WebSocket: a task that reads and one that writes."""

    way = "ws"

    def __init__(
        self,
        session: aiohttp.ClientSession,
        socket: aiohttp.ClientWebSocketResponse,
        on_frames: OnFrames,
        on_closed: OnClosed,
    ) -> None:
        self._session = session
        self._socket = socket
        self._on_frames = on_frames
        self._on_closed = on_closed
        self._unsent: deque[bytes] = deque()
        self._wake = asyncio.Event()
        self._reading = asyncio.Event()
        self._reading.set()
        self._ours = False
        self._tasks = [asyncio.create_task(self._read()), asyncio.create_task(self._write())]
        self._ending: asyncio.Task[None] | None = None

    def send(self, payloads: Sequence[bytes]) -> None:
        """See Link."""
        if not self._ours:
            self._unsent.extend(payloads)
            self._wake.set()

    def close(self) -> None:
        """See Link."""
        self._ours = True
        self._end()

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

    async def _read(self) -> None:
        try:
            while True:
                await self._reading.wait()
                message = await self._socket.receive()
                if message.type is not aiohttp.WSMsgType.BINARY:
                    break  # a close, an error, or a text that no gateway sends
                if not self._ours:
                    self._on_frames([message.data])
        finally:
            self._gone()

    async def _write(self) -> None:
        try:
            while True:
                await self._wake.wait()
                self._wake.clear()
                while self._unsent:
                    await self._socket.send_bytes(self._unsent.popleft())
        except (OSError, aiohttp.ClientError, RuntimeError):
            self._gone()

    def _gone(self) -> None:
        if not self._ours:
            self._ours = True
            self._end()
            self._on_closed()

    def _end(self) -> None:
        if self._ending is None:
            self._ending = asyncio.get_running_loop().create_task(self._release())

    async def _release(self) -> None:
        """Says goodbye, briefly; a peer that does not answer is not waited for."""
        try:
            async with asyncio.timeout(_CLOSE_S):
                await self._socket.close()
        except (TimeoutError, OSError, aiohttp.ClientError, RuntimeError):
            pass
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._session.close()
