"""ipconfig over HTTP: who gets a list, what stands in it, what an operator sees and sets, where the figures come from."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from ipconfig_harness import BERLIN, WORLD, Service, Source, gateway, mmdb, serving, topology
from plato.core.codes import Code
from plato.runtime.admin import HttpServer
from plato.topology.record import Topology
from plato_ipconfig.core.rank import Board, Load, Place
from plato_ipconfig.dispatch import Atlas
from plato_ipconfig.gauges import Gauges
from plato_ipconfig.source import LoadSource, parse
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from tests.ports import free_port

POLL_MS = 300
"""Also how long one answer may take, and the machine may be busy."""


async def until(condition: Callable[[], Any], why: str) -> None:
    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end, why
        await asyncio.sleep(0.02)


async def test_lists_the_five_with_most_room_first(tmp_path: Path) -> None:
    async with serving(topology(*(gateway(i) for i in range(7))), tmp_path) as service:
        for i in range(7):
            service.board.observe(f"edge-{i}", Load(True, 0, 10 + i), 0)
        status, body, _ = await service.get()
    assert status == 200
    assert (body["message"], body["code"]) == ("ok", 0)
    assert [entry["name"] for entry in body["data"]] == ["edge-6", "edge-5", "edge-4", "edge-3", "edge-2"]
    assert body["data"][0] == {"name": "edge-6", "ip": "127.0.0.1", "port": 8960, "ws_port": 8961, "zone": "here"}


@pytest.mark.parametrize("state", ["draining", "leaving", "lost"])
async def test_who_does_not_serve_by_the_record_is_not_listed_though_it_has_room(state: str, tmp_path: Path) -> None:
    async with serving(topology(gateway(0), replace(gateway(1), state=state)), tmp_path) as service:
        service.board.observe("edge-0", Load(True, 0, 1), 0)
        service.board.observe("edge-1", Load(True, 0, 90), 0)
        _, body, _ = await service.get()
        assert [entry["name"] for entry in body["data"]] == ["edge-0"]
        _, body, _ = await service.get("/explain", inside=True)
        assert [(g["name"], g["state"]) for g in body["gateways"]] == [("edge-0", "serving"), ("edge-1", state)]
        service.source.record = topology(replace(gateway(0), state=state), replace(gateway(1), state=state))
        status, body, headers = await service.get()
        assert (status, body["data"], headers["Retry-After"]) == (503, [], "1")


async def test_the_callers_zone_comes_first_until_another_has_three_times_as_much_left(tmp_path: Path) -> None:
    far, near, full = gateway(0), gateway(1, zone="z"), gateway(2, zone="z")
    async with serving(topology(far, near, full), tmp_path) as service:
        service.board.observe("edge-0", Load(True, 10, 90), 0)
        service.board.observe("edge-1", Load(True, 60, 40), 0)
        service.board.observe("edge-2", Load(True, 50, 0), 0)
        assert await service.order() == ["edge-0", "edge-1", "edge-2"]
        assert await service.order("/ip/list?zone=z") == ["edge-1", "edge-0", "edge-2"]
        assert await service.order(headers={"Plato-Zone": "z"}) == ["edge-1", "edge-0", "edge-2"]
        assert await service.order("/ip/list?zone=nowhere") == ["edge-0", "edge-1", "edge-2"]
        service.board.observe("edge-1", Load(True, 79, 21), 0, uid="restarted")
        assert await service.order("/ip/list?zone=z") == ["edge-0", "edge-1", "edge-2"]


async def test_the_callers_address_tells_by_the_map_where_a_gateway_is_near(tmp_path: Path) -> None:
    """By the gateway's own address, or by where its zone lies; a region makes its zones near each other."""
    (tmp_path / "world.mmdb").write_bytes(mmdb(WORLD))
    record = topology(
        gateway(0, zone="us-1", ip="203.0.113.5"),
        gateway(1, zone="eu-1", ip="10.0.0.1"),
        gateway(2, zone="eu-2", ip="10.0.0.2"),
        gateway(3, zone="au-1", ip="203.0.113.200"),
    )
    atlas = Atlas({"eu-1": "eu", "eu-2": "eu"}, {"eu-1": BERLIN})
    async with serving(record, tmp_path, trusted=("127.0.0.1",), atlas=atlas, geoip=tmp_path / "world.mmdb") as service:
        for i in range(4):
            service.board.observe(f"edge-{i}", Load(True, 0, 1_000), 0)
        frankfurt = await service.order(headers={"X-Forwarded-For": "198.51.100.7"})
        assert frankfurt == ["edge-1", "edge-2", "edge-0", "edge-3"]
        assert (await service.order(headers={"X-Forwarded-For": "2001:db8:1::7"}))[0] == "edge-0"
        shown = await service.explained("?address=198.51.100.7")
        assert [(name, g["km"]) for name, g in shown.items()] == [
            ("edge-1", pytest.approx(424, abs=10)),
            ("edge-2", 2_000),
            ("edge-0", pytest.approx(6_200, abs=60)),
            ("edge-3", pytest.approx(16_500, abs=200)),
        ]
        assert "423 km away" in shown["edge-1"]["why"]
        shown = await service.explained("?address=198.51.100.7&zone=eu-2")
        assert [(name, g["km"]) for name, g in shown.items()][:2] == [("edge-2", 0), ("edge-1", 100)]
        # Everybody falls silent: distance alone.
        service.now = 60_000
        assert (await service.order(headers={"X-Forwarded-For": "203.0.113.130"}))[0] == "edge-3"


async def test_two_callers_in_one_second_are_sent_to_different_gateways(tmp_path: Path) -> None:
    async with serving(topology(gateway(0), gateway(1)), tmp_path) as service:
        for i in range(2):
            service.board.observe(f"edge-{i}", Load(True, 0, 10), 0)
        first = [(await service.get())[1]["data"][0]["name"] for _ in range(2)]
    assert sorted(first) == ["edge-0", "edge-1"]


async def test_a_silent_gateway_is_dropped_within_seconds_and_one_that_says_it_is_closing_goes_last(
    tmp_path: Path,
) -> None:
    async with serving(topology(gateway(0), gateway(1), gateway(2)), tmp_path) as service:
        service.board.observe("edge-0", Load(True, 0, 50), 0)
        service.board.observe("edge-1", Load(True, 0, 1), 0)
        service.board.observe("edge-2", Load(True, 0, 90), 0)
        assert await service.order() == ["edge-2", "edge-0", "edge-1"]
        service.now = 3_001
        service.board.observe("edge-2", Load(False, 0, 90), 3_001)
        service.board.observe("edge-1", Load(True, 0, 1), 3_001)
        assert await service.order() == ["edge-1", "edge-2"]
        assert (await service.explained())["edge-0"]["why"].startswith("not heard for 3.0 s")
        service.board.observe("edge-1", Load(True, 1, 0), 3_001)
        assert await service.order() == ["edge-0", "edge-1", "edge-2"], "nobody else has room: it is tried after all"


async def test_known_gateways_are_listed_while_no_load_is_known(tmp_path: Path) -> None:
    async with serving(topology(gateway(0), gateway(1)), tmp_path) as service:
        status, body, _ = await service.get()
    assert status == 200
    assert {entry["name"] for entry in body["data"]} == {"edge-0", "edge-1"}


async def test_nothing_to_list_is_said_with_a_code_that_asks_to_retry(tmp_path: Path) -> None:
    async with serving(None, tmp_path) as service:
        status, body, headers = await service.get()
        ready, why, _ = await service.get("/readyz", inside=True)
        alive, _, _ = await service.get("/healthz", inside=True)
    assert (status, body["code"], headers["Retry-After"]) == (503, Code.UNAVAILABLE, "1")
    assert (ready, why["reason"], alive) == (503, "no topology was read yet", 200)


@pytest.mark.parametrize("code", [Code.TOKEN_EXPIRED, Code.TOKEN_NOT_YET_VALID, Code.TOKEN_INVALID])
@pytest.mark.parametrize("guests", [False, True])
async def test_a_refused_token_is_answered_with_its_code(code: Code, guests: bool, tmp_path: Path) -> None:
    async with serving(topology(gateway(0)), tmp_path, guests=guests) as service:
        service.tokens.refuse("fake:alice", code)
        status, body, headers = await service.get()
    assert (status, body["code"], body["data"]) == (401, code, [])
    assert body["message"]
    assert headers["WWW-Authenticate"] == "Bearer"


async def test_callers_without_a_token_are_answered_only_while_guests_are_on(tmp_path: Path) -> None:
    async with serving(topology(gateway(0)), tmp_path) as service:
        assert (await service.get(token=None))[0] == 401
        assert (await service.get(token=None, headers={"Authorization": "Basic YTpi"}))[0] == 401
        assert (await service.get(token=""))[0] == 401
    async with serving(topology(gateway(0)), tmp_path, guests=True) as service:
        assert (await service.get(token=None))[0] == 200
        assert (await service.get(token=None, headers={"Authorization": "Basic YTpi"}))[0] == 401


async def test_browsers_on_loopback_may_read_the_list_and_others_may_not(tmp_path: Path) -> None:
    async with serving(topology(gateway(0)), tmp_path) as service:
        _, _, near = await service.get(headers={"Origin": "http://localhost:3000"})
        _, _, far = await service.get(headers={"Origin": "https://evil.example"})
    assert near["Access-Control-Allow-Origin"] == "http://localhost:3000"
    assert "Access-Control-Allow-Origin" not in far


async def test_explain_stands_on_the_internal_port_alone_and_metrics_count(tmp_path: Path) -> None:
    async with serving(topology(gateway(0), gateway(1)), tmp_path) as service:
        service.board.observe("edge-1", Load(True, 3, 7), 0)
        service.now = 40
        assert (await service.get("/explain"))[0] == 404
        _, body, _ = await service.get("/explain", inside=True)
        await service.get()
        _, metrics, _ = await service.get("/metrics", inside=True)
    first, second = body["gateways"]
    assert (first["name"], first["group"], first["room"], first["sample_age_ms"]) == ("edge-1", "room", 7, 40)
    assert (first["place"], first["why"]) == (1, "no limit of bandwidth, 7 connections left")
    assert (second["name"], second["group"], second["sample_age_ms"]) == ("edge-0", "silent", None)
    assert (second["place"], second["why"]) == (None, "was never heard")
    assert body["map"] == {"loaded": False, "trouble": "ipconfig.geoip_path is not set"}
    assert b'plato_ipconfig_first_listed_total{gateway="edge-1"}' in metrics


async def test_explain_names_each_score_and_refuses_what_is_no_address(tmp_path: Path) -> None:
    async with serving(topology(gateway(0), gateway(1), gateway(2)), tmp_path) as service:
        service.board.observe("edge-0", Load(True, 100, 900, 500_000_000, 1_000_000_000), 0)
        service.board.observe("edge-1", Load(True, 950, 50, 800_000_000, 1_000_000_000), 0)
        service.board.observe("edge-2", Load(True, 1_000, 0), 0)
        shown = await service.explained("?zone=here")
        assert (await service.get("/explain?address=moon", inside=True))[0] == 400
    first, second, third = shown.values()
    assert (first["active"], first["static"], first["gb_per_s_left"], first["km"]) == (0.5, 900, 0.5, 0)
    assert first["why"] == "0.50 GB/s left, 900 connections left, 0 km away (× 1.00)"
    assert (second["group"], second["blend"]) == ("low", pytest.approx(2 * 0.05 * 0.8 / 0.85, abs=1e-4))
    assert third["group"] == "full"


# ── limits ───────────────────────────────────────────────────────────────────────────────────────────────────


async def test_a_user_who_asks_too_often_is_told_when_and_nobody_else_behind_the_address_is_refused(
    tmp_path: Path,
) -> None:
    async with serving(topology(gateway(0)), tmp_path, user=(1, 3), address=(1, 1)) as service:
        assert [(await service.get())[0] for _ in range(3)] == [200] * 3
        status, body, headers = await service.get()
        assert (status, body["code"], body["data"], headers["Retry-After"]) == (429, Code.BUSY, [], "1")
        for i in range(40):  # one address, whose own bucket holds a single request
            assert (await service.get(token=f"fake:user-{i}"))[0] == 200
        service.now = 1_000
        assert (await service.get())[0] == 200


async def test_strangers_share_their_addresss_limit_and_take_nothing_from_who_shows_a_token(tmp_path: Path) -> None:
    kinds: dict[str, Any] = {"guests": True, "address": (1, 4), "trusted": ("127.0.0.0/8",)}
    async with serving(topology(gateway(0)), tmp_path, **kinds) as service:
        service.tokens.refuse("fake:stolen", Code.TOKEN_EXPIRED)
        here = {"X-Forwarded-For": "6.6.6.6, 203.0.113.1"}
        assert [(await service.get(token=None, headers=here))[0] for _ in range(2)] == [200] * 2
        assert [(await service.get(token="fake:stolen", headers=here))[0] for _ in range(3)] == [401, 401, 429]
        assert (await service.get(token=None, headers=here))[0] == 429
        assert (await service.get(headers=here))[0] == 200, "a valid token does not touch the address's limit"
        assert (await service.get(token=None, headers={"X-Forwarded-For": "6.6.6.6, 203.0.113.2"}))[0] == 200


async def test_without_trusted_proxies_nobody_speaks_for_another_address(tmp_path: Path) -> None:
    async with serving(topology(gateway(0)), tmp_path, guests=True, address=(1, 2)) as service:
        found = [(await service.get(token=None, headers={"X-Forwarded-For": f"203.0.113.{i}"}))[0] for i in range(3)]
    assert found == [200, 200, 429]


# ── the switch ───────────────────────────────────────────────────────────────────────────────────────────────


async def test_an_override_counts_at_once_outlives_a_restart_and_is_taken_back(tmp_path: Path) -> None:
    record = topology(gateway(0), gateway(1), gateway(2))
    async with serving(record, tmp_path) as service:
        for i in range(3):
            service.board.observe(f"edge-{i}", Load(True, 0, 100 - i), 0)
        assert (await service.get())[1]["data"][0]["name"] == "edge-0"
        asked = {"first": ["edge-2"], "never": ["edge-0"], "reason": "its disk"}
        status, body, _ = await service.ask("PUT", "/override", body=asked)
        assert (status, body["note"]) == (200, "")
        assert await service.order() == ["edge-2", "edge-1"]
        shown = await service.explained()
        assert shown["edge-2"]["why"] == "the override puts it first"
        assert shown["edge-0"]["why"] == "not listed: the override says never"
        assert _gauge(service, "plato_ipconfig_override") == {(): 1.0}
    async with serving(record, tmp_path) as service:
        assert await service.order() == ["edge-2", "edge-1"]
        assert (await service.ask("GET", "/override"))[1]["override"]["reason"] == "its disk"
        assert (await service.ask("DELETE", "/override"))[0] == 200
        assert set(await service.order()) == {"edge-0", "edge-1", "edge-2"}
    async with serving(record, tmp_path) as service:
        assert (await service.ask("GET", "/override"))[1]["override"] is None


async def test_an_override_ends_by_itself(tmp_path: Path) -> None:
    async with serving(topology(gateway(0), gateway(1)), tmp_path) as service:
        await service.ask("PUT", "/override", body={"never": ["edge-0"], "for_s": 60})
        assert await service.order() == ["edge-1"]
        service.unix_ms += 60_000
        assert set(await service.order()) == {"edge-0", "edge-1"}


async def test_who_may_not_sets_nothing_and_a_wrong_order_is_refused_in_words(tmp_path: Path) -> None:
    async with serving(topology(gateway(0), gateway(1)), tmp_path) as service:
        status, body, _ = await service.ask("PUT", "/override", body={"never": ["edge-9"]})
        assert (status, body["error"]) == (400, "edge-9 is no gateway of this cluster")
        assert (await service.ask("PUT", "/override", body=[]))[0] == 400
        origin = {"Origin": "https://evil.example"}
        assert (await service.ask("PUT", "/override", body={"never": ["edge-0"]}, headers=origin))[0] == 403
        service.let_in = False
        assert (await service.ask("PUT", "/override", body={"never": ["edge-0"]}))[0] == 401
        assert (await service.ask("DELETE", "/override"))[0] == 401
        assert (await service.ask("GET", "/override"))[1] == {"override": None}
        assert (await service.ask("PUT", "/override", inside=False, body={"never": ["edge-0"]}))[0] == 404


async def test_a_file_that_cannot_be_written_or_read_stops_no_override_and_no_start(tmp_path: Path) -> None:
    (tmp_path / "override.json").mkdir()
    async with serving(topology(gateway(0), gateway(1)), tmp_path) as service:
        status, body, _ = await service.ask("PUT", "/override", body={"never": ["edge-0"]})
        assert (status, body["note"].startswith("it ends with this process")) == (200, True)
        assert await service.order() == ["edge-1"]
    (tmp_path / "override.json").rmdir()
    for damage in ("", "{", "[]", '{"by": "moon", "until_ms": 0}', '{"never": ["a"]}'):
        (tmp_path / "override.json").write_text(damage)
        async with serving(topology(gateway(0), gateway(1)), tmp_path) as service:
            assert len(await service.order()) == 2


# ── figures ──────────────────────────────────────────────────────────────────────────────────────────────────


def _gauge(service: Service, name: str) -> dict[tuple[str, ...], float]:
    (family,) = [m for m in Gauges(service.dispatch).collect() if m.name == name]
    return {tuple(s.labels.values()): s.value for s in family.samples}


async def test_imbalance_and_how_gateways_are_seen_are_metrics(tmp_path: Path) -> None:
    record = topology(gateway(0), gateway(1), replace(gateway(2), state="draining"), gateway(3))
    async with serving(record, tmp_path) as service:
        assert _gauge(service, "plato_ipconfig_imbalance_ratio") == {(): 1.0}
        service.board.observe("edge-0", Load(True, 300, 700), 0)
        service.board.observe("edge-1", Load(True, 100, 900), 0)
        service.board.observe("edge-2", Load(False, 900, 0), 0)
        assert _gauge(service, "plato_ipconfig_imbalance_ratio") == {(): 1.5}, "who drains does not count"
        assert _gauge(service, "plato_ipconfig_connections") == {(): 400.0}
        seen = _gauge(service, "plato_ipconfig_gateways")
        assert seen == {("room",): 2.0, ("low",): 0.0, ("silent",): 1.0, ("full",): 0.0, ("closing",): 1.0}
        assert _gauge(service, "plato_ipconfig_override") == {(): 0.0}
        assert _gauge(service, "plato_ipconfig_map_loaded") == {(): 0.0}


# ── rebalance ────────────────────────────────────────────────────────────────────────────────────────────────


async def test_a_rebalance_tells_each_gateway_that_has_too_many_its_part_and_names_who_refuses(tmp_path: Path) -> None:
    async with FakeAdmin() as ready, FakeAdmin() as busy:
        busy.status, busy.answer = 409, {"error": "draining"}
        record = topology(
            gateway(0, f"127.0.0.1:{ready.port}"), gateway(1, f"127.0.0.1:{busy.port}"), gateway(2), gateway(3)
        )
        async with serving(record, tmp_path) as service:
            for i, connections in enumerate([400, 300, 200, 100]):
                service.board.observe(f"edge-{i}", Load(True, connections, 1_000 - connections), 0)
            status, body, _ = await service.ask("POST", "/rebalance", body={"dry_run": True})
            assert (status, ready.shed, busy.shed) == (200, [], [])
            assert body["shifts"] == [
                {"from": "edge-0", "to": "edge-3", "clients": 150},
                {"from": "edge-1", "to": "edge-2", "clients": 50},
            ]
            status, body, _ = await service.ask("POST", "/rebalance", body={"pace_per_s": 7})
            assert ready.shed == [{"shifts": [{"to": "edge-3", "clients": 150}], "pace_per_s": 7}]
            assert list(body["refused"]) == ["edge-1"]
            assert "draining" in body["refused"]["edge-1"]
            assert (await service.ask("POST", "/rebalance", body={"least": 0}))[0] == 400
            assert (await service.ask("POST", "/rebalance", body=[]))[0] == 400
            service.let_in = False
            assert (await service.ask("POST", "/rebalance"))[0] == 401


# ── where the figures come from ──────────────────────────────────────────────────────────────────────────────


def seen(board: Board, name: str) -> Place:
    return board.ranked({name: False}, 0, lambda: 0.0)[0]


class FakeAdmin:
    """A gateway's admin port: /v1/load answers what the test says."""

    def __init__(self) -> None:
        self.port = free_port()
        self.answer: Any = {}
        self.status = 200
        self.asked = 0
        self.shed: list[Any] = []
        routes = [Route("/v1/load", self._load), Route("/v1/shed", self._shed, methods=["POST"])]
        self._server = HttpServer(Starlette(routes=routes), "127.0.0.1", self.port)

    async def _load(self, _: Request) -> Response:
        self.asked += 1
        return JSONResponse(self.answer, status_code=self.status)

    async def _shed(self, request: Request) -> Response:
        self.shed.append(await request.json())
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
        source = LoadSource(Source(record), board, POLL_MS, lambda: 0)
        task = asyncio.create_task(source.run())
        await until(lambda: good.asked > 2 and bad.asked > 2, "not asked again")
        await until(lambda: seen(board, "edge-0").room == 8, "the first was not heard")
        assert seen(board, "edge-1").age_ms is None
        bad.status, bad.answer = 200, {**good.answer, "name": "edge-1", "uid": "uid-1", "connections_left": 3}
        await until(lambda: seen(board, "edge-1").room == 3, "the second was not heard")
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task


async def test_no_topology_ends_no_round() -> None:
    class Empty(Source):
        asked = 0

        def current(self) -> Topology:
            self.asked += 1
            return super().current()

    empty = Empty(None)
    board = Board(3_000)
    async with FakeAdmin() as admin:
        admin.answer = {"name": "edge-0", "uid": "uid-0", "serving": True, "connections": 0, "connections_left": 1}
        task = asyncio.create_task(LoadSource(empty, board, POLL_MS, lambda: 0).run())
        await until(lambda: empty.asked, "no round was begun")
        empty.record = topology(gateway(0, f"127.0.0.1:{admin.port}"))
        await until(lambda: seen(board, "edge-0").room == 1, "not asked once there was a topology")
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
        b"[" * 100_000,
        b'{"name": "edge-0", "uid": "u", "serving": true, "connections": 1, "connections_left": 1, "max_bytes_per_s": 9}',
        b'{"name": "edge-0", "uid": "u", "serving": true, "connections": 1, "connections_left": 1, "max_bytes_per_s": []}',
        b'{"name": "edge-0", "uid": "u", "serving": true, "connections": 1e999, "connections_left": 1}',
    ],
)
def test_an_answer_that_is_none_is_refused(body: bytes) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 (each has its own words)
        parse(body, "edge-0", "u")


def test_bandwidth_counts_only_where_a_limit_is_told() -> None:
    said = {"name": "a", "uid": "u", "serving": True, "connections": 3, "connections_left": 7}
    assert parse(json.dumps(said).encode(), "a", "u") == Load(True, 3, 7)
    more = {**said, "max_bytes_per_s": 100, "bytes_per_s_left": 40}
    assert parse(json.dumps(more).encode(), "a", "u") == Load(True, 3, 7, 40, 100)
    assert parse(json.dumps({**said, "max_bytes_per_s": 0, "bytes_per_s_left": None}).encode(), "a", "u").bytes_max == 0
