"""`python -m plato_ipconfig`: wires the topology, the keys and the board, and serves two ports."""

from __future__ import annotations

import plato.runtime.early  # isort: skip  # noqa: F401  # first, and for what its import does

import asyncio
import sys
import time

from plato.adapters.tokens import JwtVerifier
from plato.adapters.topology import topology_source
from plato.runtime import tls
from plato.runtime.admin import HttpServer
from plato.runtime.process import StartError, forever, run, until_stopped
from plato.runtime.settings import Settings

from plato_ipconfig.app import IpList, internal, public
from plato_ipconfig.core.rank import Board
from plato_ipconfig.source import LoadSource


def now_ms() -> int:
    """Milliseconds of a clock that never goes back."""
    return time.monotonic_ns() // 1_000_000


async def main(settings: Settings) -> int:
    """Serves until it is stopped. Returns the exit code."""
    own = settings.ipconfig
    topology = topology_source(settings.topology)
    tokens = JwtVerifier(settings.auth.keys_dir, settings.auth.issuer, settings.auth.audience)
    board = Board(own.silent_ms)
    ip_list = IpList(topology, board, tokens, guests=settings.auth.guests, now_ms=now_ms)
    own_tls = tls.internal(settings.tls.internal_dir)
    shown = own_tls.serve() if own_tls is not None else None
    servers: list[HttpServer] = []
    try:
        for key, application, host, port, context in (
            ("ipconfig.internal_port", internal(ip_list), own.internal_host, own.internal_port, shown),
            ("ipconfig.port", public(ip_list, settings.gateway.ws_origins), own.host, own.port, None),
        ):
            server = HttpServer(application, host, port, context)
            try:
                await server.start()
            except OSError as e:
                raise StartError(f"{key}: cannot listen on {host}:{port}: {e.strerror}; set another one") from e
            servers.append(server)
        source = LoadSource(topology, board, own.poll_ms, now_ms, own_tls)
        parts = {"topology": topology.run(), "source": source.run()}
        return await until_stopped(
            [asyncio.create_task(forever(name, part), name=name) for name, part in parts.items()]
        )
    finally:
        for server in servers:
            await server.stop()


if __name__ == "__main__":
    sys.exit(run("plato-ipconfig", main))
