"""POST /v1/shed: asks some clients of this gateway to go to others that have more left, each through its shard.

    {"shifts": [{"to": "edge-3", "clients": 250}], "pace_per_s": 200}
        ─▸ workers: who is here ─▸ core/shed ─▸ a few each STEP_S ─▸ each one's shard ─▸ REDIRECT

ipconfig sends it (`plato rebalance`): it knows how full the others are. Nothing of it outlives this process; what is lost,
the next look of ipconfig orders again. Bounds: see core/shed.py; a body of at most MOST_BYTES.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Mapping
from typing import Any, Final, Protocol

from plato.core.ids import slot_of
from plato.runtime import logs
from plato.runtime.settings import Settings
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from .core import lanes
from .core.shed import Part, Shed

PATH: Final = "/v1/shed"
STEP_S: Final = 0.05
ANSWER_S: Final = 2.0
"""Workers that have not said who is here by then have their clients left alone."""
LATE_S: Final = 30.0
"""An order ends so long after its pace would have: the shards of the rest are away."""
MOST_BYTES: Final = 65_536
MOST_PACE_PER_S: Final = 10_000
_log = logs.get("shed")


class Lane(Protocol):
    """A worker's lane, as this needs it."""

    index: int
    boot: int


class Stream(Protocol):
    """A shard's stream, as this needs it."""

    group: int

    def shed(self, conn_ids: list[int], to: tuple[str, ...]) -> bool:
        """Names connections to the shard. False: not now."""


class GatewayShed:
    """Lives in the link. `run` until cancelled."""

    def __init__(
        self,
        settings: Settings,
        lanes_by_index: Mapping[int, Lane],
        streams: Mapping[str, Stream],
        group_of_slot: Callable[[int], int],
        ask_who_is_here: Callable[[], None],
        not_ready: Callable[[], str],
    ) -> None:
        """group_of_slot: the link's number for the shard of a slot. ask_who_is_here: has each worker say it to `held`."""
        self._name = settings.process.name
        self._pace_per_s = settings.gateway.drain_pace_per_s
        self._lanes = lanes_by_index
        self._streams = streams
        self._group_of_slot = group_of_slot
        self._ask_who_is_here = ask_who_is_here
        self._not_ready = not_ready
        self._core = Shed()
        self._here: dict[int, list[int]] = {}
        """Worker index → its connections, of those that answered."""
        self._give_up_s = self._end_s = 0.0
        self._ordered = asyncio.Event()

    def held(self, lane: Lane, held: lanes.Held) -> None:
        """A worker says who is here."""
        if self._core.waits:
            self._here[lane.index] = held.conn_ids.tolist()

    def route(self, guard: Callable[[Request], Response | None]) -> Route:
        """The route of the admin port. guard: answers whom it does not let in."""

        async def shed(request: Request) -> Response:
            refusal = guard(request)
            if refusal is not None:
                return refusal
            if "origin" in request.headers:  # a page in somebody's browser
                return JSONResponse({"error": "not from a browser"}, status_code=403)
            if why := self._not_ready():
                return JSONResponse({"error": f"{self._name}: {why}"}, status_code=409)
            try:
                parts, pace_per_s = parse(await _body(request), self._pace_per_s)
            except ValueError as e:
                return JSONResponse({"error": str(e)}, status_code=400)
            self.order(parts, pace_per_s)
            return JSONResponse({"clients": self._core.left, "pace_per_s": pace_per_s})

        return Route(PATH, shed, methods=["POST"])

    def order(self, parts: list[Part], pace_per_s: int) -> None:
        """A new order; it takes the place of one that runs."""
        self._core.order([part for part in parts if part.target != self._name], pace_per_s, _now_ms())
        self._here.clear()
        self._give_up_s = time.monotonic() + ANSWER_S
        self._end_s = time.monotonic() + self._core.left / pace_per_s + LATE_S
        self._ask_who_is_here()
        self._ordered.set()
        _log.info("clients are asked to go to others", clients=self._core.left, pace_per_s=pace_per_s)

    async def run(self) -> None:
        """Names clients while an order runs."""
        while True:
            await self._ordered.wait()
            while self._core.left:
                self.step()
                await asyncio.sleep(STEP_S)
            self._ordered.clear()

    def step(self) -> None:
        """Whatever is due now."""
        why = self._not_ready() or ("it takes too long" if time.monotonic() > self._end_s else "")
        if why:
            _log.info("clients are asked no more", reason=why, left=self._core.left)
            self._core.order((), 1, _now_ms())
            return
        if self._core.waits:
            if self._here.keys() < self._lanes.keys() and time.monotonic() < self._give_up_s:
                return
            self._core.here(conn_id for conn_ids in self._here.values() for conn_id in conn_ids)
            self._here.clear()
        by_stream: dict[tuple[int, str], list[int]] = {}
        for conn_id, target in self._core.step(_now_ms()):
            by_stream.setdefault((self._group_of_slot(slot_of(conn_id)), target), []).append(conn_id)
        streams = {stream.group: stream for stream in self._streams.values()}
        for (group, target), conn_ids in by_stream.items():
            stream = streams.get(group)
            if stream is None or not stream.shed(conn_ids, (target,)):
                self._core.unsent([(conn_id, target) for conn_id in conn_ids])


def parse(raw: bytes, pace_per_s: int) -> tuple[list[Part], int]:
    """The parts and the pace of a body; pace_per_s: where it says none. Raises ValueError in words."""
    try:
        body: Any = json.loads(raw)
        shifts, pace = body["shifts"], body.get("pace_per_s") or pace_per_s
        parts = [Part(shift["to"], shift["clients"]) for shift in shifts]
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as e:
        raise ValueError(f'the body must be as {{"shifts": [{{"to": "edge-3", "clients": 250}}]}}: {e!r}') from e
    if not all(isinstance(p.target, str) and type(p.clients) is int and p.clients >= 0 for p in parts):
        raise ValueError("a shift is a gateway's name and a whole number of clients")
    if type(pace) is not int or not 1 <= pace <= MOST_PACE_PER_S:
        raise ValueError(f"pace_per_s must be 1 to {MOST_PACE_PER_S}")
    return parts, pace


async def _body(request: Request) -> bytes:
    raw = b""
    async for part in request.stream():
        raw += part
        if len(raw) > MOST_BYTES:
            raise ValueError(f"the body has more than {MOST_BYTES} bytes")
    return raw


def _now_ms() -> int:
    return time.monotonic_ns() // 1_000_000
