"""The two HTTP applications: the clients' GET /ip/list, and the internal port with /explain beside health and metrics.

A request touches memory only: the topology that was read, the board that is fed beside it, the keys that are loaded. So it
is answered while everything else is down.
"""

from __future__ import annotations

import random
from collections.abc import Callable

from plato.core.codes import Code, text
from plato.core.errors import PeerError, Unavailable
from plato.ports import TokenVerifier, TopologySource
from plato.runtime import admin
from plato.topology.record import SERVING, Gateway
from prometheus_client import Counter
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from plato_ipconfig.core.rank import LISTED, Board, Place

_requests = Counter("plato_ipconfig_requests_total", "Answers to GET /ip/list, by wire code.", ["code"])
_first = Counter("plato_ipconfig_first_listed_total", "How often a gateway stood first in an answer.", ["gateway"])

_LOOPBACK = r"https?://(localhost|127\.0\.0\.1|\[::1\])(:\d+)?"


class IpList:
    """Answers from memory which gateways to try."""

    def __init__(
        self,
        topology: TopologySource,
        board: Board,
        tokens: TokenVerifier,
        *,
        guests: bool,
        now_ms: Callable[[], int],
        chance: Callable[[], float] = random.random,
    ) -> None:
        """guests: callers without a token are answered too. now_ms: a clock that never goes back."""
        self._topology = topology
        self._board = board
        self._tokens = tokens
        self._guests = guests
        self._now_ms = now_ms
        self._chance = chance

    def not_ready(self) -> str:
        """Why nothing can be listed; "" when something can."""
        try:
            known = self._topology.current().gateways
        except Unavailable:
            return "no topology was read yet"
        return "" if known else "the topology names no gateway"

    def ranked(self, zone: str = "") -> tuple[list[Place], dict[str, Gateway]]:
        """Every gateway of the topology, best first for a caller in `zone` (empty: anywhere), and their records. ([], {})
        before the first topology."""
        try:
            gateways = dict(self._topology.current().gateways)
        except Unavailable:
            return [], {}
        draining = {name: gateway.state != SERVING for name, gateway in gateways.items()}
        near = {name for name, gateway in gateways.items() if zone and gateway.zone == zone}
        return self._board.ranked(draining, self._now_ms(), self._chance, near), gateways

    async def ip_list(self, request: Request) -> Response:
        """GET /ip/list. The caller's zone: ?zone=, or the header Plato-Zone of a proxy that knows it."""
        try:
            self._authenticate(request)
        except PeerError as e:
            _requests.labels(int(e.code)).inc()
            refusal = {"message": text(e.code), "code": int(e.code), "data": []}
            return JSONResponse(refusal, status_code=401, headers={"WWW-Authenticate": "Bearer"})
        ranked, gateways = self.ranked(request.query_params.get("zone") or request.headers.get("plato-zone", ""))
        # Who drains, leaves or is lost would only send a client on, or keep it waiting.
        places = [place for place in ranked if gateways[place.name].state == SERVING]
        if not places:
            _requests.labels(int(Code.UNAVAILABLE)).inc()
            away = {"message": text(Code.UNAVAILABLE), "code": int(Code.UNAVAILABLE), "data": []}
            return JSONResponse(away, status_code=503, headers={"Retry-After": "1"})
        listed = places[:LISTED]
        self._board.sent_to(listed[0].name)
        _first.labels(listed[0].name).inc()
        _requests.labels(int(Code.OK)).inc()
        data = [_entry(place.name, gateways[place.name]) for place in listed]
        return JSONResponse({"message": "ok", "code": 0, "data": data}, headers={"Cache-Control": "no-store"})

    async def explain(self, request: Request) -> Response:
        """GET /explain on the internal port: the whole ranking and what it rests on."""
        places, gateways = self.ranked(request.query_params.get("zone", ""))
        return JSONResponse(
            {
                "order": "room: most first; full; silent: by chance; closing (not listed where the topology says so); "
                "each: the zone of ?zone= first",
                "listed": LISTED,
                "gateways": [
                    {
                        **_entry(place.name, gateways[place.name]),
                        "state": gateways[place.name].state,
                        "group": place.group.name.lower(),
                        "room": place.room,
                        "sample_age_ms": place.age_ms,
                    }
                    for place in places
                ],
            }
        )

    def _authenticate(self, request: Request) -> None:
        kind, _, token = request.headers.get("authorization", "").partition(" ")
        if not kind and self._guests:
            return
        if kind.lower() != "bearer" or not token.strip():
            raise PeerError(Code.TOKEN_INVALID)
        self._tokens.verify(token.strip())


def _entry(name: str, gateway: Gateway) -> dict[str, str | int]:
    return {"name": name, "ip": gateway.ip, "port": gateway.tcp, "ws_port": gateway.ws, "zone": gateway.zone}


def public(ip_list: IpList, origins: tuple[str, ...]) -> Starlette:
    """The clients' application. origins: of browsers that may read the answer; empty: any on loopback."""
    cors = Middleware(
        CORSMiddleware,
        allow_origins=list(origins),
        allow_origin_regex=None if origins else _LOOPBACK,
        allow_methods=["GET"],
        allow_headers=["Authorization"],
    )
    return Starlette(routes=[Route("/ip/list", ip_list.ip_list)], middleware=[cors])


def internal(ip_list: IpList) -> Starlette:
    """The operators' application."""
    return admin.app(ip_list.not_ready, [Route("/explain", ip_list.explain)])
