"""The two HTTP applications: the clients' GET /ip/list, and the internal port with explain, the switch and rebalance beside
health and metrics.

A request for the list touches memory only: the topology that was read, the board that is fed beside it, the map, the keys
and the limits. So it is answered while everything else is down.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from plato.core.codes import Code, text
from plato.runtime import admin
from plato.topology.record import Gateway
from prometheus_client import Counter
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from plato_ipconfig.core import address, distance, override
from plato_ipconfig.core.distance import nearness
from plato_ipconfig.core.rank import LISTED, LOW, Group, Place
from plato_ipconfig.dispatch import Dispatch, Ranking
from plato_ipconfig.door import Door, Refused

_requests = Counter("plato_ipconfig_requests_total", "Answers to GET /ip/list, by wire code.", ["code"])
_first = Counter("plato_ipconfig_first_listed_total", "How often a gateway stood first in an answer.", ["gateway"])

_LOOPBACK = r"https?://(localhost|127\.0\.0\.1|\[::1\])(:\d+)?"
_BODY_LIMIT_BYTES = 65_536

Guard = Callable[[Request], Response | None]
"""The answer to whom the internal port does not let do this; None: go on."""


class IpList:
    """Answers from memory which gateways to try."""

    def __init__(self, dispatch: Dispatch, door: Door, unix_ms: Callable[[], int]) -> None:
        self.dispatch = dispatch
        self._door = door
        self._unix_ms = unix_ms

    # ── clients ──────────────────────────────────────────────────────────────────────────────────────────────

    async def ip_list(self, request: Request) -> Response:
        """GET /ip/list. The caller's zone and region: ?zone= and ?region=, or the headers Plato-Zone and Plato-Region of a
        proxy that knows them; where neither is given, its address tells by the map."""
        try:
            caller = self._door.admit(request)
        except Refused as e:
            return _refusal(e)
        query, headers = request.query_params, request.headers
        found = self.dispatch.ranking(
            caller.address,
            query.get("zone") or headers.get("plato-zone", ""),
            query.get("region") or headers.get("plato-region", ""),
        )
        if not found.listed:
            return _answer(Code.UNAVAILABLE, 503, {"Retry-After": "1"})
        first = found.listed[0].name
        self.dispatch.sent_to(first)
        _first.labels(first).inc()
        _requests.labels(int(Code.OK)).inc()
        data = [_entry(place.name, found.gateways[place.name]) for place in found.listed]
        return JSONResponse({"message": "ok", "code": 0, "data": data}, headers={"Cache-Control": "no-store"})

    # ── operators ────────────────────────────────────────────────────────────────────────────────────────────

    async def explain(self, request: Request) -> Response:
        """GET /explain?address=&zone=&region=: the whole ranking for a caller there, and what it rests on."""
        query = request.query_params
        given = query.get("address", "")
        where = address.parsed(given) if given else None
        if given and where is None:
            return JSONResponse({"error": f"address: {given!r} is no IP address"}, status_code=400)
        found = self.dispatch.ranking(where, query.get("zone", ""), query.get("region", ""))
        return JSONResponse(self._explained(found, given))

    def _explained(self, found: Ranking, given: str) -> dict[str, Any]:
        geo = self.dispatch.geo
        listed = {place.name: i for i, place in enumerate(found.listed, 1)}
        return {
            "caller": {"address": given, **_spot(found.spot), "known": found.spot.known},
            "map": {"loaded": geo.loaded, "trouble": geo.trouble},
            "override": found.override.shown() if found.override is not None else None,
            "order": "room: most active score, then most static score; low (less than "
            f"{LOW:.0%} left of either): most blended score; silent: nearest; full: nearest; closing. "
            "Ties by chance. Silent ones are left out while room or low has somebody.",
            "listed": LISTED,
            "gateways": [
                {
                    **_entry(place.name, found.gateways[place.name]),
                    "place": listed.get(place.name),
                    "state": found.gateways[place.name].state,
                    "group": place.group.name.lower(),
                    "room": place.room,
                    "gb_per_s_left": None if place.gb_left is None else round(place.gb_left, 4),
                    "active": place.active,
                    "static": round(place.static, 1),
                    "blend": round(place.blend, 4),
                    "km": None if place.km is None else round(place.km),
                    "nearness": round(nearness(place.km), 3),
                    "sample_age_ms": place.age_ms,
                    "why": _why(place, found),
                }
                for place in found.places
            ],
        }

    async def show_override(self, _: Request) -> Response:
        """GET /override."""
        found = self.dispatch.switch.override
        return JSONResponse({"override": found.shown() if found is not None else None})

    async def set_override(self, request: Request) -> Response:
        """PUT /override: see core/override.py."""
        try:
            order = override.ordered(await _body(request), self._unix_ms())
        except ValueError as e:
            return JSONResponse({"error": str(e)}, status_code=400)
        unknown = [n for n in (*order.first, *order.never) if n not in self.dispatch.ranking(None).gateways]
        if unknown:
            return JSONResponse({"error": f"{unknown[0]} is no gateway of this cluster"}, status_code=400)
        return JSONResponse({"override": order.shown(), "note": self.dispatch.switch.set(order)})

    async def clear_override(self, _: Request) -> Response:
        """DELETE /override."""
        return JSONResponse({"override": None, "note": self.dispatch.switch.set(None)})


def _spot(spot: distance.Spot) -> dict[str, Any]:
    return {"zone": spot.zone, "region": spot.region, "map": list(spot.map) if spot.map is not None else None}


def _why(place: Place, found: Ranking) -> str:
    """One sentence for a person."""
    if found.gateways[place.name].state != "serving":
        return f"not listed: the topology says {found.gateways[place.name].state}"
    order = found.override
    if order is not None and place.name in order.never:
        return "not listed: the override says never" if place not in found.listed else "nobody else is left"
    if order is not None and place.name in order.first:
        return "the override puts it first"
    if order is not None and order.by is not override.By.LOAD and place.group is not Group.CLOSING:
        return f"the override orders by {order.by}"
    far = "" if place.km is None else f", {place.km:,.0f} km away (× {nearness(place.km):.2f})"
    match place.group:
        case Group.ROOM:
            gb = "no limit of bandwidth" if place.gb_left is None else f"{place.gb_left:.2f} GB/s left"
            return f"{gb}, {place.room} connections left{far}"
        case Group.LOW:
            return f"less than {LOW:.0%} of its connections or bandwidth is left{far}"
        case Group.FULL:
            return f"nothing is left of its connections or bandwidth{far}"
        case Group.SILENT:
            age = "was never heard" if place.age_ms is None else f"not heard for {place.age_ms / 1000:.1f} s"
            return f"{age}{far}"
    return "it says that it takes nobody in"


async def _body(request: Request) -> Any:
    """The JSON of a request. Raises ValueError."""
    import json

    raw = b""
    async for part in request.stream():
        raw += part
        if len(raw) > _BODY_LIMIT_BYTES:
            raise ValueError(f"the body has more than {_BODY_LIMIT_BYTES} bytes")
    try:
        return json.loads(raw)
    except (ValueError, RecursionError) as e:
        raise ValueError(f"the body is no JSON: {e}") from e


def _refusal(refused: Refused) -> Response:
    if refused.wait_ms:
        wait_s = -(-refused.wait_ms // 1000)
        return _answer(refused.code, 429, {"Retry-After": str(wait_s)})
    return _answer(refused.code, 401, {"WWW-Authenticate": "Bearer"})


def _answer(code: Code, status: int, headers: dict[str, str]) -> Response:
    _requests.labels(int(code)).inc()
    return JSONResponse({"message": text(code), "code": int(code), "data": []}, status_code=status, headers=headers)


def _entry(name: str, gateway: Gateway) -> dict[str, str | int]:
    polls = {"poll_port": gateway.poll} if gateway.poll else {}
    return {"name": name, "ip": gateway.ip, "port": gateway.tcp, "ws_port": gateway.ws, **polls, "zone": gateway.zone}


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


def internal(ip_list: IpList, guard: Guard, rebalance: Callable[[Request], Any] | None = None) -> Starlette:
    """The operators' application. guard: who may change something."""

    def guarded(act: Callable[[Request], Any]) -> Callable[[Request], Any]:
        async def route(request: Request) -> Response:
            refusal = guard(request)
            if refusal is not None:
                return refusal
            if "origin" in request.headers:  # a page in somebody's browser, on the operator's own machine
                return JSONResponse({"error": "not from a browser"}, status_code=403)
            answer: Response = await act(request)
            return answer

        return route

    routes = [
        Route("/explain", ip_list.explain),
        Route("/override", ip_list.show_override, methods=["GET"]),
        Route("/override", guarded(ip_list.set_override), methods=["PUT"]),
        Route("/override", guarded(ip_list.clear_override), methods=["DELETE"]),
    ]
    if rebalance is not None:
        routes.append(Route("/rebalance", guarded(rebalance), methods=["POST"]))
    return admin.app(ip_list.dispatch.not_ready, routes)
