"""ipconfig over HTTP: who gets a list, what stands in it, and that it answers while everything else is away."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import aiohttp
import pytest
from plato.core.codes import Code
from plato.core.errors import Unavailable
from plato.fakes.tokens import FakeTokens
from plato.runtime.admin import HttpServer
from plato.topology.record import Gateway, Topology, even_ranges
from plato_ipconfig.app import IpList, internal, public
from plato_ipconfig.core.rank import Board, Load
from plato_ipconfig.source import LoadSource, parse
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


async def until(condition: Callable[[], Any], deadline_s: float, why: str) -> None:
    end = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < end, why
        await asyncio.sleep(0.02)


def gateway(i: int, admin: str = "127.0.0.1:1") -> Gateway:
    return Gateway(f"uid-{i}", i, 2, ("s0",), "127.0.0.1", 8900 + 10 * i, 8901 + 10 * i, admin, zone="here")


def topology(*gateways: Gateway) -> Topology:
    return Topology("c", 1, even_ranges(["s0"], 1), gateways={f"edge-{i}": g for i, g in enumerate(gateways)})


class Source:
    """A TopologySource whose record the test sets."""

    gone = False

    def __init__(self, record: Topology | None) -> None:
        self.record = record

    def current(self) -> Topology:
        if self.record is None:
            raise Unavailable("none yet")
        return self.record

    async def changed(self, after_epoch: int) -> Topology:
        raise NotImplementedError


class Service:
    """Both applications on real ports."""

    def __init__(self, record: Topology | None, *, guests: bool = False) -> None:
        self.source = Source(record)
        self.board = Board(3_000)
        self.tokens = FakeTokens()
        self.now = 0
        self.list = IpList(
            self.source, self.board, self.tokens, guests=guests, now_ms=lambda: self.now, chance=lambda: 0.0
        )
        self.public, self.internal = free_port(), free_port()

    async def get(
        self, path: str = "/ip/list", token: str | None = "fake:alice", *, inside: bool = False, **headers: str
    ) -> tuple[int, Any, Any]:
        if token is not None:
            headers["Authorization"] = f"Bearer {token}"
        url = f"http://127.0.0.1:{self.internal if inside else self.public}{path}"
        async with aiohttp.ClientSession() as session, session.get(url, headers=headers) as answer:
            body = await answer.read()
            return answer.status, json.loads(body) if body[:1] == b"{" else body, answer.headers


@asynccontextmanager
async def serving(record: Topology | None, *, guests: bool = False) -> AsyncIterator[Service]:
    service = Service(record, guests=guests)
    servers = [
        HttpServer(public(service.list, ()), "127.0.0.1", service.public),
        HttpServer(internal(service.list), "127.0.0.1", service.internal),
    ]
    for server in servers:
        await server.start()
    try:
        yield service
    finally:
        for server in servers:
            await server.stop()


async def test_lists_the_five_with_most_room_first() -> None:
    async with serving(topology(*(gateway(i) for i in range(7)))) as service:
        for i in range(7):
            service.board.observe(f"edge-{i}", Load(True, 0, 10 + i), 0)
        status, body, _ = await service.get()
    assert status == 200
    assert (body["message"], body["code"]) == ("ok", 0)
    assert [entry["name"] for entry in body["data"]] == ["edge-6", "edge-5", "edge-4", "edge-3", "edge-2"]
    assert body["data"][0] == {"name": "edge-6", "ip": "127.0.0.1", "port": 8960, "ws_port": 8961, "zone": "here"}


@pytest.mark.parametrize("state", ["draining", "leaving", "lost"])
async def test_who_does_not_serve_by_the_record_is_not_listed_though_it_has_room(state: str) -> None:
    async with serving(topology(gateway(0), replace(gateway(1), state=state))) as service:
        service.board.observe("edge-0", Load(True, 0, 1), 0)
        service.board.observe("edge-1", Load(True, 0, 90), 0)
        _, body, _ = await service.get()
        assert [entry["name"] for entry in body["data"]] == ["edge-0"]
        _, body, _ = await service.get("/explain", inside=True)
        assert [(g["name"], g["state"]) for g in body["gateways"]] == [("edge-0", "serving"), ("edge-1", state)]
        service.source.record = topology(replace(gateway(0), state=state), replace(gateway(1), state=state))
        status, body, headers = await service.get()
        assert (status, body["data"], headers["Retry-After"]) == (503, [], "1")


async def test_the_callers_zone_comes_first_among_equals() -> None:
    far, near, full = gateway(0), replace(gateway(1), zone="z"), replace(gateway(2), zone="z")
    async with serving(topology(far, near, full)) as service:
        service.board.observe("edge-0", Load(True, 0, 90), 0)
        service.board.observe("edge-1", Load(True, 0, 40), 0)
        service.board.observe("edge-2", Load(True, 50, 0), 0)

        async def order(path: str = "/ip/list", **headers: Any) -> list[str]:
            return [entry["name"] for entry in (await service.get(path, **headers))[1]["data"]]

        assert await order() == ["edge-0", "edge-1", "edge-2"]
        assert await order("/ip/list?zone=z") == ["edge-1", "edge-0", "edge-2"]
        assert await order(**{"Plato-Zone": "z"}) == ["edge-1", "edge-0", "edge-2"]
        assert await order("/ip/list?zone=nowhere") == ["edge-0", "edge-1", "edge-2"]


async def test_two_callers_in_one_second_are_sent_to_different_gateways() -> None:
    async with serving(topology(gateway(0), gateway(1))) as service:
        for i in range(2):
            service.board.observe(f"edge-{i}", Load(True, 0, 10), 0)
        first = [(await service.get())[1]["data"][0]["name"] for _ in range(2)]
    assert sorted(first) == ["edge-0", "edge-1"]


async def test_a_silent_gateway_goes_last_and_one_that_says_it_is_closing_behind_it() -> None:
    async with serving(topology(gateway(0), gateway(1), gateway(2))) as service:
        service.board.observe("edge-0", Load(True, 0, 50), 0)
        service.board.observe("edge-2", Load(False, 0, 90), 5_000)
        service.board.observe("edge-1", Load(True, 0, 1), 5_000)
        service.now = 5_000
        _, body, _ = await service.get()
    assert [entry["name"] for entry in body["data"]] == ["edge-1", "edge-0", "edge-2"]


async def test_known_gateways_are_listed_while_no_load_is_known() -> None:
    async with serving(topology(gateway(0), gateway(1))) as service:
        status, body, _ = await service.get()
    assert status == 200
    assert {entry["name"] for entry in body["data"]} == {"edge-0", "edge-1"}


async def test_nothing_to_list_is_said_with_a_code_that_asks_to_retry() -> None:
    async with serving(None) as service:
        status, body, headers = await service.get()
        ready, why, _ = await service.get("/readyz", inside=True)
        alive, _, _ = await service.get("/healthz", inside=True)
    assert (status, body["code"], headers["Retry-After"]) == (503, Code.UNAVAILABLE, "1")
    assert (ready, why["reason"], alive) == (503, "no topology was read yet", 200)


@pytest.mark.parametrize("code", [Code.TOKEN_EXPIRED, Code.TOKEN_NOT_YET_VALID, Code.TOKEN_INVALID])
@pytest.mark.parametrize("guests", [False, True])
async def test_a_refused_token_is_answered_with_its_code(code: Code, guests: bool) -> None:
    async with serving(topology(gateway(0)), guests=guests) as service:
        service.tokens.refuse("fake:alice", code)
        status, body, headers = await service.get()
    assert (status, body["code"], body["data"]) == (401, code, [])
    assert body["message"]
    assert headers["WWW-Authenticate"] == "Bearer"


async def test_callers_without_a_token_are_answered_only_while_guests_are_on() -> None:
    async with serving(topology(gateway(0))) as service:
        assert (await service.get(token=None))[0] == 401
        assert (await service.get(token=None, Authorization="Basic YTpi"))[0] == 401
        assert (await service.get(token=""))[0] == 401
    async with serving(topology(gateway(0)), guests=True) as service:
        assert (await service.get(token=None))[0] == 200
        assert (await service.get(token=None, Authorization="Basic YTpi"))[0] == 401


async def test_browsers_on_loopback_may_read_the_list_and_others_may_not() -> None:
    async with serving(topology(gateway(0))) as service:
        _, _, near = await service.get(Origin="http://localhost:3000")
        _, _, far = await service.get(Origin="https://evil.example")
    assert near["Access-Control-Allow-Origin"] == "http://localhost:3000"
    assert "Access-Control-Allow-Origin" not in far


async def test_explain_stands_on_the_internal_port_alone_and_metrics_count() -> None:
    async with serving(topology(gateway(0), gateway(1))) as service:
        service.board.observe("edge-1", Load(True, 3, 7), 0)
        service.now = 40
        assert (await service.get("/explain"))[0] == 404
        _, body, _ = await service.get("/explain", inside=True)
        await service.get()
        _, metrics, _ = await service.get("/metrics", inside=True)
    first, second = body["gateways"]
    assert (first["name"], first["group"], first["room"], first["sample_age_ms"]) == ("edge-1", "room", 7, 40)
    assert (second["name"], second["group"], second["sample_age_ms"]) == ("edge-0", "silent", None)
    assert b'plato_ipconfig_first_listed_total{gateway="edge-1"}' in metrics


# ── where the figures come from ──────────────────────────────────────────────────────────────────────────────


class FakeAdmin:
    """A gateway's admin port: /v1/load answers what the test says."""

    def __init__(self) -> None:
        self.port = free_port()
        self.answer: Any = {}
        self.status = 200
        self.asked = 0
        self._server = HttpServer(Starlette(routes=[Route("/v1/load", self._load)]), "127.0.0.1", self.port)

    async def _load(self, _: Request) -> Response:
        self.asked += 1
        return JSONResponse(self.answer, status_code=self.status)

    async def __aenter__(self) -> FakeAdmin:
        await self._server.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._server.stop()


async def test_gateways_are_asked_each_round_whatever_one_of_them_does() -> None:
    async with FakeAdmin() as good, FakeAdmin() as bad:
        record = topology(
            gateway(0, f"127.0.0.1:{good.port}"), gateway(1, f"127.0.0.1:{bad.port}"), gateway(2, "127.0.0.1:1")
        )
        good.answer = {"name": "edge-0", "uid": "uid-0", "serving": True, "connections": 2, "connections_left": 8}
        bad.status = 500
        board = Board(3_000)
        source = LoadSource(Source(record), board, 50, lambda: 0)
        task = asyncio.create_task(source.run())
        await until(lambda: good.asked > 3 and bad.asked > 3, 10, "not asked again")
        assert board.place("edge-0", 0).room == 8
        assert board.place("edge-1", 0).age_ms is None
        bad.status, bad.answer = 200, {**good.answer, "name": "edge-1", "uid": "uid-1", "connections_left": 3}
        await until(lambda: board.place("edge-1", 0).room == 3, 10, "the second was not heard")
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task


async def test_no_topology_ends_no_round() -> None:
    empty = Source(None)
    board = Board(3_000)
    async with FakeAdmin() as admin:
        admin.answer = {"name": "edge-0", "uid": "uid-0", "serving": True, "connections": 0, "connections_left": 1}
        task = asyncio.create_task(LoadSource(empty, board, 50, lambda: 0).run())
        empty.record = topology(gateway(0, f"127.0.0.1:{admin.port}"))
        await until(lambda: board.place("edge-0", 0).room == 1, 10, "not asked once there was a topology")
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        b"{",
        b'"x"',
        b'{"name": "edge-0"}',
        b'{"name": "edge-0", "uid": "other", "serving": true, "connections": 1, "connections_left": 1}',
        b'{"name": "edge-0", "uid": "u", "serving": true, "connections": "many", "connections_left": 1}',
        b'{"name": "edge-0", "uid": "u", "serving": true, "connections": 1, "connections_left": null}',
        b"\xff\xfe",
    ],
)
def test_an_answer_that_is_none_is_refused(body: bytes) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 (each has its own words)
        parse(body, "edge-0", "u")
