"""The platform in memory behind real sockets: TCP frames and WebSocket messages, for tests of clients.

Each port takes TCP or WebSocket; everything runs on the caller's loop. Memory: the platform's, and what sockets buffer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from types import TracebackType

from aiohttp import WSMsgType, web

from plato.api.names import WS_PATH
from plato.core.frames import FrameReader, pack
from plato.fakes.platform import Platform


class PlatformServer:
    """Use as `async with PlatformServer(platform) as server:`; several servers may share one platform, as gateways do."""

    def __init__(self, platform: Platform) -> None:
        self.platform = platform
        self.accepted = 0
        self.refusing = False
        """New connections are closed at once."""
        self.muted = False
        """Frames of clients are read and thrown away, and nothing is sent: a dead peer whose socket stands."""
        self.address = ""
        self.ws_address = ""
        self._peers: dict[int, asyncio.Transport | web.WebSocketResponse] = {}
        self._unsent: dict[int, asyncio.Queue[bytes | None]] = {}
        self._writers: set[asyncio.Task[None]] = set()
        self._siblings: list[PlatformServer] = []
        self._tcp: asyncio.Server
        self._runner: web.AppRunner

    async def __aenter__(self) -> PlatformServer:
        loop = asyncio.get_running_loop()
        self._tcp = await loop.create_server(lambda: _Peer(self), "127.0.0.1", 0)
        self.address = f"tcp://127.0.0.1:{self._tcp.sockets[0].getsockname()[1]}"
        application = web.Application()
        application.router.add_get(WS_PATH, self._websocket)
        self._runner = web.AppRunner(application, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self.ws_address = f"ws://127.0.0.1:{self._runner.addresses[0][1]}{WS_PATH}"
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._tcp.close()
        self.cut()
        for task in list(self._writers):
            task.cancel()
        await asyncio.gather(*self._writers, return_exceptions=True)
        await self._runner.cleanup()

    def beside(self, other: PlatformServer) -> None:
        """Makes two servers of one platform know each other, so that a frame leaves through its connection's own."""
        self._siblings.append(other)
        other._siblings.append(self)

    def cut(self, conn_ids: Iterable[int] | None = None) -> None:
        """Breaks connections (None: all), as a dying gateway does."""
        for conn_id in list(self._peers) if conn_ids is None else list(conn_ids):
            peer = self._peers.get(conn_id)
            if isinstance(peer, asyncio.Transport):
                peer.abort()
            elif peer is not None:
                self._unsent[conn_id].put_nowait(None)
            self._forget(conn_id)

    def flush(self) -> None:
        """Sends what the platform wants sent; to be called after anything was done to it by hand."""
        out, self.platform.out = self.platform.out, []
        for conn_id, payload in out:
            server = next((s for s in (self, *self._siblings) if conn_id in s._peers), None)
            if server is not None and not server.muted:
                server._send(conn_id, payload)

    def _send(self, conn_id: int, payload: bytes | None) -> None:
        peer = self._peers[conn_id]
        if not isinstance(peer, asyncio.Transport):
            self._unsent[conn_id].put_nowait(payload)
        elif payload is None:
            peer.close()
        else:
            peer.write(pack(payload))
        if payload is None:
            self._forget(conn_id)

    def _arrived(self, conn_id: int, payloads: Iterable[bytes]) -> None:
        if self.muted:
            return
        for payload in payloads:
            self.platform.frame(conn_id, payload)
        self.flush()

    def _forget(self, conn_id: int) -> None:
        self._peers.pop(conn_id, None)
        self.platform.close(conn_id)

    async def _websocket(self, request: web.Request) -> web.WebSocketResponse:
        socket = web.WebSocketResponse(compress=False)
        await socket.prepare(request)
        if self.refusing:
            await socket.close()
            return socket
        self.accepted += 1
        conn_id = self.platform.open()
        self._peers[conn_id] = socket
        unsent: asyncio.Queue[bytes | None] = asyncio.Queue()
        self._unsent[conn_id] = unsent

        async def write() -> None:
            while (payload := await unsent.get()) is not None:
                await socket.send_bytes(payload)
            await socket.close()

        writer = asyncio.create_task(write())
        self._writers.add(writer)
        writer.add_done_callback(self._writers.discard)
        try:
            async for message in socket:
                if message.type is WSMsgType.BINARY:
                    self._arrived(conn_id, [message.data])
        finally:
            writer.cancel()
            del self._unsent[conn_id]
            self._forget(conn_id)
        return socket


class _Peer(asyncio.Protocol):
    """One TCP connection."""

    def __init__(self, server: PlatformServer) -> None:
        self._server = server
        self._conn_id = 0
        self._frames = FrameReader()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """asyncio's call."""
        assert isinstance(transport, asyncio.Transport)
        if self._server.refusing:
            transport.abort()
            return
        self._server.accepted += 1
        self._conn_id = self._server.platform.open()
        self._server._peers[self._conn_id] = transport

    def data_received(self, data: bytes) -> None:
        """asyncio's call."""
        self._server._arrived(self._conn_id, self._frames.feed(data))

    def connection_lost(self, exc: Exception | None) -> None:
        """asyncio's call."""
        if self._conn_id:
            self._server._forget(self._conn_id)
