"""The admin port of a process: /healthz (the loop turns), /readyz (it serves; else 503 and why), /metrics (Prometheus)."""

from __future__ import annotations

import asyncio
import re
import ssl
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import uvicorn
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

HEAD_S: Final = 10.0
"""A request's head is whole within so long: from the open socket, or from the answer before."""

_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")
NotReady = Callable[[], str]
"""Says why this process does not serve now; "" when it does."""


def app(
    not_ready: NotReady,
    routes: Sequence[BaseRoute] = (),
    info: Callable[[], Mapping[str, str]] = dict,
    ill: Callable[[], str] = str,
) -> Starlette:
    """An application with the three standard routes and the caller's. info: more to say in /readyz, by name. ill: why only
    a restart helps, for /healthz (503); "" while all is well."""

    async def healthz(_: Request) -> Response:
        why = ill()
        return PlainTextResponse(f"{why or 'ok'}\n", status_code=503 if why else 200)

    async def readyz(_: Request) -> Response:
        why = not_ready()
        return JSONResponse({"ready": not why, "reason": why, **info()}, status_code=503 if why else 200)

    async def metrics(_: Request) -> Response:
        return Response(generate_latest(), media_type=CONTENT_TYPE_LATEST)

    standard = [Route("/healthz", healthz), Route("/readyz", readyz), Route("/metrics", metrics)]
    return Starlette(routes=[*standard, *routes])


class _Http(H11Protocol):
    """uvicorn's, which waits for ever for a head: idle and dribbling sockets would use up the process's descriptors."""

    _late: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn's
        super().connection_made(transport)
        self._look()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._look()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._look()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._late is not None:
            self._late.cancel()
        super().connection_lost(exc)

    def _look(self) -> None:
        cycle: Any = self.cycle
        if cycle is None or cycle.response_complete:
            if self._late is None:  # once: each byte must not give it more time
                self._late = self.loop.call_later(HEAD_S, self._too_late)
        elif self._late is not None:
            self._late.cancel()
            self._late = None

    def _too_late(self) -> None:
        if self.transport.get_protocol() is self:
            self.transport.close()


class PlainPaths:
    """Has no path with a control character in it, escaped or not, be taken for one without: a router's pattern ends before a
    line end, and what a proxy keeps from strangers by its path would be reached with one behind it."""

    def __init__(self, application: ASGIApp) -> None:
        self._application = application

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""
        if scope["type"] == "http" and _CONTROL.search(scope["path"]):
            scope = {**scope, "path": _CONTROL.sub("\x00", scope["path"])}
        await self._application(scope, receive, send)


class HttpServer:
    """Serves an ASGI application inside this loop. `start` raises OSError (port in use) at once; `stop` ends it."""

    def __init__(
        self,
        application: Starlette,
        host: str,
        port: int,
        tls: ssl.SSLContext | None = None,
        *,
        proxies: bool = True,
    ) -> None:
        """proxies: whether a proxy on loopback may say whose request it brings; off where the application decides that."""
        config = uvicorn.Config(
            PlainPaths(application),
            host=host,
            port=port,
            log_config=None,
            access_log=False,
            lifespan="off",
            http=_Http,
            proxy_headers=proxies,
        )
        config.load()
        config.ssl = tls
        self._server = uvicorn.Server(config)
        self._server.lifespan = config.lifespan_class(config)
        self._host, self._port = host, port
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Binds and begins to serve."""
        import socket

        sock = socket.socket(socket.AF_INET6 if ":" in self._host else socket.AF_INET)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind((self._host, self._port))
        except OSError:
            sock.close()
            raise
        # uvicorn's serve() would take over the process's signals; startup and main_loop do not.
        await self._server.startup(sockets=[sock])
        self._task = asyncio.create_task(self._server.main_loop())

    async def stop(self) -> None:
        """Stops accepting and ends open requests."""
        if self._task is not None:
            self._server.should_exit = True
            await self._task
            await self._server.shutdown()
            self._task = None
