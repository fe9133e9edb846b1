"""`python -m plato_ipconfig`: wires the topology, the keys and the board, and serves two ports."""

from __future__ import annotations

import plato.runtime.early  # isort: skip  # noqa: F401  # first, and for what its import does

import asyncio
import sys
import time

from plato.adapters.tokens import JwtVerifier
from plato.adapters.topology import topology_source
from plato.runtime import report, tls
from plato.runtime.admin import HttpServer
from plato.runtime.process import StartError, forever, run, until_stopped
from plato.runtime.settings import Settings
from prometheus_client import REGISTRY

from plato_ipconfig.app import IpList, internal, public
from plato_ipconfig.core.address import networks
from plato_ipconfig.core.limits import Buckets
from plato_ipconfig.core.rank import Board
from plato_ipconfig.dispatch import Atlas, Dispatch
from plato_ipconfig.door import Door
from plato_ipconfig.gauges import Gauges
from plato_ipconfig.geo import Geo
from plato_ipconfig.rebalance import Rebalance
from plato_ipconfig.source import LoadSource
from plato_ipconfig.switch import Switch


def now_ms() -> int:
    """Milliseconds of a clock that never goes back."""
    return time.monotonic_ns() // 1_000_000


def unix_ms() -> int:
    """Unix time, for what people wrote down with it."""
    return time.time_ns() // 1_000_000


async def main(settings: Settings) -> int:
    """Serves until it is stopped. Returns the exit code."""
    own = settings.ipconfig
    topology = topology_source(settings.topology)
    tokens = JwtVerifier(settings.auth.keys_dir, settings.auth.issuer, settings.auth.audience)
    board = Board(own.silent_ms)
    geo = Geo(own.geoip_path)
    geo.load()
    dispatch = Dispatch(
        topology, board, geo, Switch(own.override_path, unix_ms), Atlas(own.regions, own.places), now_ms
    )
    door = Door(
        tokens,
        Buckets(own.user_per_min / 60, own.user_burst),
        Buckets(own.address_per_s, own.address_burst),
        networks(own.trusted_proxies),
        guests=settings.auth.guests,
        now_ms=now_ms,
    )
    ip_list = IpList(dispatch, door, unix_ms)
    REGISTRY.register(Gauges(dispatch))
    own_tls = tls.internal(settings.tls.internal_dir)
    shown = own_tls.serve() if own_tls is not None else None
    rebalance = Rebalance(dispatch, settings.process.admin_tokens_dir, own_tls)
    operators = internal(ip_list, report.guard(settings), rebalance.route)
    servers: list[HttpServer] = []
    try:
        for key, application, host, port, context in (
            ("ipconfig.internal_port", operators, own.internal_host, own.internal_port, shown),
            ("ipconfig.port", public(ip_list, settings.gateway.ws_origins), own.host, own.port, None),
        ):
            server = HttpServer(application, host, port, context, proxies=key == "ipconfig.internal_port")
            try:
                await server.start()
            except OSError as e:
                raise StartError(f"{key}: cannot listen on {host}:{port}: {e.strerror}; set another one") from e
            servers.append(server)
        source = LoadSource(topology, board, own.poll_ms, now_ms, own_tls)
        parts = {"topology": topology.run(), "source": source.run(), "geo": geo.run()}
        return await until_stopped(
            [asyncio.create_task(forever(name, part), name=name) for name, part in parts.items()]
        )
    finally:
        for server in servers:
            await server.stop()


if __name__ == "__main__":
    sys.exit(run("plato-ipconfig", main))
