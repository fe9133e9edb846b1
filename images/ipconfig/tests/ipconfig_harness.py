"""What the tests of ipconfig share: a service in this process, a record, a small map of the world written byte by byte."""

from __future__ import annotations

import json
import struct
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from ipaddress import IPv4Network, ip_network
from pathlib import Path
from typing import Any

import aiohttp
from plato.core.errors import Unavailable
from plato.fakes.tokens import FakeTokens
from plato.runtime.admin import HttpServer
from plato.topology.record import Gateway, Topology, even_ranges
from plato_ipconfig.app import IpList, internal, public
from plato_ipconfig.core.address import networks
from plato_ipconfig.core.limits import Buckets
from plato_ipconfig.core.rank import Board
from plato_ipconfig.dispatch import Atlas, Dispatch
from plato_ipconfig.door import Door
from plato_ipconfig.geo import Geo
from plato_ipconfig.rebalance import Rebalance
from plato_ipconfig.switch import Switch
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from tests.ports import free_port


def gateway(i: int, admin: str = "127.0.0.1:1", zone: str = "here", ip: str = "127.0.0.1") -> Gateway:
    return Gateway(f"uid-{i}", i, 2, ("s0",), ip, 8900 + 10 * i, 8901 + 10 * i, admin, zone=zone)


def topology(*gateways: Gateway, epoch: int = 1) -> Topology:
    return Topology("c", epoch, even_ranges(["s0"], 1), gateways={f"edge-{i}": g for i, g in enumerate(gateways)})


class Source:
    """A TopologySource whose record the test sets."""

    gone = False

    def __init__(self, record: Topology | None) -> None:
        self.record = record

    def current(self) -> Topology:
        if self.record is None:
            raise Unavailable("no record")
        return self.record

    async def changed(self, after_epoch: int) -> Topology:
        raise AssertionError("ipconfig reads what holds now, and waits for no change")


class Service:
    """Both applications on ports of their own, with a clock that the test moves."""

    def __init__(
        self,
        record: Topology | None,
        folder: Path,
        *,
        guests: bool = False,
        user: tuple[float, int] = (1_000.0, 1_000),
        address: tuple[float, int] = (1_000.0, 1_000),
        trusted: tuple[str, ...] = (),
        atlas: Atlas | None = None,
        geoip: Path | None = None,
    ) -> None:
        """user, address: (per second, burst)."""
        self.source = Source(record)
        self.board = Board(3_000)
        self.tokens = FakeTokens()
        self.now = 0
        self.unix_ms = 1_790_000_000_000
        self.let_in = True
        self.override_path = folder / "override.json"
        geo = Geo(geoip)
        geo.load()
        self.dispatch = Dispatch(
            self.source,
            self.board,
            geo,
            Switch(self.override_path, lambda: self.unix_ms),
            atlas or Atlas(),
            lambda: self.now,
            lambda: 0.0,
        )
        door = Door(
            self.tokens,
            Buckets(*user),
            Buckets(*address),
            networks(trusted),
            guests=guests,
            now_ms=lambda: self.now,
        )
        self.list = IpList(self.dispatch, door, lambda: self.unix_ms)
        self.public, self.internal = free_port(), free_port()
        self.session: aiohttp.ClientSession

    def guard(self, _: Request) -> Response | None:
        return None if self.let_in else JSONResponse({"error": "no"}, status_code=401)

    async def get(
        self,
        path: str = "/ip/list",
        token: str | None = "fake:alice",
        *,
        inside: bool = False,
        headers: Mapping[str, str] | None = None,
    ) -> tuple[int, Any, Any]:
        return await self.ask("GET", path, token, inside=inside, headers=headers)

    async def ask(
        self,
        method: str,
        path: str,
        token: str | None = None,
        *,
        inside: bool = True,
        headers: Mapping[str, str] | None = None,
        body: Any = None,
    ) -> tuple[int, Any, Any]:
        sent = dict(headers or {})
        if token is not None:
            sent["Authorization"] = f"Bearer {token}"
        url = f"http://127.0.0.1:{self.internal if inside else self.public}{path}"
        async with self.session.request(method, url, headers=sent, json=body) as answer:
            raw = await answer.read()
            return answer.status, json.loads(raw) if raw[:1] == b"{" else raw, answer.headers

    async def order(self, path: str = "/ip/list", headers: Mapping[str, str] | None = None) -> list[str]:
        return [entry["name"] for entry in (await self.get(path, headers=headers))[1]["data"]]

    async def explained(self, query: str = "") -> dict[str, dict[str, Any]]:
        """What /explain says, by gateway, in its order."""
        return {g["name"]: g for g in (await self.get(f"/explain{query}", inside=True))[1]["gateways"]}


@asynccontextmanager
async def serving(record: Topology | None, folder: Path, **kinds: Any) -> AsyncIterator[Service]:
    service = Service(record, folder, **kinds)
    servers = [
        HttpServer(public(service.list, ()), "127.0.0.1", service.public, proxies=False),
        HttpServer(
            internal(service.list, service.guard, Rebalance(service.dispatch, None, None).route),
            "127.0.0.1",
            service.internal,
        ),
    ]
    for server in servers:
        await server.start()
    try:
        async with aiohttp.ClientSession() as service.session:
            yield service
    finally:
        for server in servers:
            await server.stop()


# ── a MaxMind database ───────────────────────────────────────────────────────────────────────────────────────


def _control(kind: int, size: int) -> bytes:
    assert size < 285
    first, more = (size, b"") if size < 29 else (29, bytes([size - 29]))
    return (bytes([kind << 5 | first]) if kind < 8 else bytes([first, kind - 7])) + more


def _packed(value: Any) -> bytes:
    """A value in the database's own encoding, without pointers."""
    if isinstance(value, str):
        raw = value.encode()
        return _control(2, len(raw)) + raw
    if isinstance(value, float):
        return _control(3, 8) + struct.pack(">d", value)
    if isinstance(value, int):
        raw = value.to_bytes((value.bit_length() + 7) // 8, "big")
        return _control(9 if len(raw) > 4 else 6, len(raw)) + raw
    if isinstance(value, list):
        return _control(11, len(value)) + b"".join(map(_packed, value))
    return _control(7, len(value)) + b"".join(_packed(k) + _packed(v) for k, v in value.items())


def mmdb(records: Mapping[str, Any]) -> bytes:
    """A database that gives `records`: {network: value}; networks do not overlap. IPv4 lies in ::/96, as usual."""
    data = b""
    offsets: dict[str, int] = {}
    tree: list[list[int | str | None]] = [[None, None]]
    for text, value in records.items():
        net = ip_network(text)
        offsets[text] = len(data)
        data += _packed(value)
        v4 = isinstance(net, IPv4Network)
        bits, length = int(net.network_address), net.prefixlen + (96 if v4 else 0)
        at = 0
        for depth in range(length):
            bit = bits >> (127 - depth) & 1
            if depth == length - 1:
                tree[at][bit] = text
            elif isinstance(below := tree[at][bit], int):
                at = below
            else:
                tree.append([None, None])
                tree[at][bit] = at = len(tree) - 1

    def record(entry: int | str | None) -> bytes:
        number = len(tree) if entry is None else entry if isinstance(entry, int) else len(tree) + 16 + offsets[entry]
        return number.to_bytes(3, "big")

    facts = {
        "node_count": len(tree),
        "record_size": 24,
        "ip_version": 6,
        "database_type": "Test-City",
        "languages": ["en"],
        "binary_format_major_version": 2,
        "binary_format_minor_version": 0,
        "build_epoch": 1_790_000_000,
        "description": {"en": "written by a test"},
    }
    nodes = b"".join(record(left) + record(right) for left, right in tree)
    return nodes + bytes(16) + data + b"\xab\xcd\xefMaxMind.com" + _packed(facts)


def city(latitude: float, longitude: float) -> dict[str, Any]:
    return {"location": {"latitude": latitude, "longitude": longitude, "accuracy_radius": 10}}


FRANKFURT, BERLIN, NEW_YORK, SYDNEY = (50.11, 8.68), (52.52, 13.40), (40.71, -74.01), (-33.87, 151.21)
WORLD = {
    "198.51.100.0/25": city(*FRANKFURT),
    "198.51.100.128/25": city(*BERLIN),
    "203.0.113.0/25": city(*NEW_YORK),
    "203.0.113.128/25": city(*SYDNEY),
    "2001:db8:1::/48": city(*NEW_YORK),
    "192.0.2.0/25": {"country": {"iso_code": "DE"}},
}
