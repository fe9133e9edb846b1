"""POST /rebalance: moves the surplus of the fuller gateways of each zone to the emptier ones (`plato rebalance`).

    figures of the last seconds ─▸ core/balance.plan ─▸ POST /v1/shed at each gateway that has too many

Each gateway asks its clients at its own pace; nobody loses a connection, and whoever cannot go stays. ipconfig keeps nothing
of it: asked again, it looks again.
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import aiohttp
from plato.runtime import logs
from plato.runtime.tls import INTERNAL_NAME, InternalTls
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from plato_ipconfig.core.balance import LEAST, Shift, imbalance, plan
from plato_ipconfig.dispatch import Dispatch

TIMEOUT_S = 5.0
MOST_BYTES = 4_096
_log = logs.get("rebalance")


class Rebalance:
    """The route's work."""

    def __init__(self, dispatch: Dispatch, tokens_dir: Path | None, tls: InternalTls | None) -> None:
        """tokens_dir: process.admin_tokens_dir, whose tokens the gateways know too."""
        self._dispatch = dispatch
        self._tokens_dir = tokens_dir
        self._tls = tls

    async def route(self, request: Request) -> Response:
        """{"dry_run": false, "pace_per_s": 200, "least": 10}, each may be left out."""
        try:
            dry_run, pace_per_s, least = _asked(await request.body())
        except ValueError as e:
            return JSONResponse({"error": str(e)}, status_code=400)
        filled = self._dispatch.filled()
        shifts = plan(filled, least)
        answer = {
            "imbalance": round(imbalance(filled), 3),
            "gateways": {
                name: {"connections": g.connections, "most": g.most, "zone": g.zone} for name, g in filled.items()
            },
            "shifts": [{"from": s.source, "to": s.target, "clients": s.clients} for s in shifts],
            "refused": {} if dry_run else await self._order(shifts, pace_per_s),
        }
        return JSONResponse(answer)

    async def _order(self, shifts: list[Shift], pace_per_s: int | None) -> dict[str, str]:
        """Tells each source its part. {gateway: why not}."""
        admins = {name: g.admin for name, g in self._dispatch.gateways().items()}
        sources = sorted({shift.source for shift in shifts})
        timeout = aiohttp.ClientTimeout(total=TIMEOUT_S)
        async with aiohttp.ClientSession(timeout=timeout, headers=self._headers()) as session:
            whys = await asyncio.gather(
                *(
                    self._tell(session, admins[source], [s for s in shifts if s.source == source], pace_per_s)
                    for source in sources
                )
            )
        refused = {source: why for source, why in zip(sources, whys, strict=True) if why}
        _log.info("rebalance", shifts=[(s.source, s.target, s.clients) for s in shifts], refused=refused)
        return refused

    async def _tell(
        self, session: aiohttp.ClientSession, admin: str, shifts: list[Shift], pace_per_s: int | None
    ) -> str:
        body: dict[str, Any] = {"shifts": [{"to": s.target, "clients": s.clients} for s in shifts]}
        if pace_per_s is not None:
            body["pace_per_s"] = pace_per_s
        secure: dict[str, Any] = {} if self._tls is None else {"ssl": self._tls.ask(), "server_hostname": INTERNAL_NAME}
        try:
            url = f"{'http' if self._tls is None else 'https'}://{admin}/v1/shed"
            async with session.post(url, json=body, allow_redirects=False, **secure) as answer:
                if answer.status == 200:
                    return ""
                words = (await answer.content.read(MOST_BYTES)).decode(errors="replace")
                return f"status {answer.status}: {words}"
        except (aiohttp.ClientError, OSError, TimeoutError) as e:
            return str(e) or type(e).__name__

    def _headers(self) -> dict[str, str]:
        if self._tokens_dir is None:
            return {}
        for path in sorted(p for p in self._tokens_dir.iterdir() if not p.name.startswith(".")):
            return {"Authorization": f"Bearer {path.read_text(encoding='utf-8').strip()}"}
        return {}


def _asked(raw: bytes) -> tuple[bool, int | None, int]:
    """(dry_run, pace_per_s, least). Raises ValueError in words."""
    try:
        body = json.loads(raw) if raw.strip() else {}
        dry_run, pace, least = body.get("dry_run", False), body.get("pace_per_s"), body.get("least", LEAST)
    except (ValueError, AttributeError, RecursionError) as e:
        raise ValueError(f"the body is no JSON object: {e}") from e
    if type(dry_run) is not bool:
        raise ValueError("dry_run must be true or false")
    if pace is not None and (type(pace) is not int or not 1 <= pace <= 10_000):
        raise ValueError("pace_per_s must be 1 to 10000")
    if type(least) is not int or not 1 <= least <= 1_000_000:
        raise ValueError("least must be 1 to 1000000")
    return dry_run, pace, least
