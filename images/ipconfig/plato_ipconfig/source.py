"""Load figures: each gateway of the topology is asked each `poll_ms`, all at once, and what it says goes to the board.

A gateway that does not answer within one round is left alone until the next; the board calls it silent by and by. Memory:
one request per gateway at a time, an answer of at most 16 KiB.
"""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Any, Final

import aiohttp
from plato.core.errors import Unavailable
from plato.ports import TopologySource
from plato.runtime import logs
from plato.runtime.tls import INTERNAL_NAME, InternalTls
from plato.topology.record import Gateway

from plato_ipconfig.core.rank import Board, Load

_ANSWER_LIMIT_BYTES: Final = 16_384
_log = logs.get("source")


class LoadSource:
    """Feeds a board until it is cancelled."""

    def __init__(
        self,
        topology: TopologySource,
        board: Board,
        poll_ms: int,
        now_ms: Callable[[], int],
        tls: InternalTls | None = None,
    ) -> None:
        self._topology = topology
        self._board = board
        self._poll_s = poll_ms / 1000
        self._now_ms = now_ms
        self._tls = tls
        self._context: ssl.SSLContext | None = None
        self._version = 0

    async def run(self) -> None:
        """Asks in rounds. A gateway's fault ends no round; no fault ends this task."""
        loop = asyncio.get_running_loop()
        timeout = aiohttp.ClientTimeout(total=self._poll_s)
        async with aiohttp.ClientSession(timeout=timeout, auto_decompress=False) as session:
            while True:
                begun = loop.time()
                try:
                    gateways = dict(self._topology.current().gateways)
                except Unavailable:
                    gateways = {}
                self._board.keep(gateways)
                await asyncio.gather(*(self._ask(session, name, gateway) for name, gateway in gateways.items()))
                await asyncio.sleep(max(0.0, begun + self._poll_s - loop.time()))

    async def _ask(self, session: aiohttp.ClientSession, name: str, gateway: Gateway) -> None:
        try:
            async with self._get(session, gateway.admin) as answer:
                if answer.status != 200:
                    raise ValueError(f"status {answer.status}")
                load = parse(await answer.content.read(_ANSWER_LIMIT_BYTES), name, gateway.uid)
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError) as e:
            _log.debug("no load figures", gateway=name, error=repr(e))
            return
        self._board.observe(name, load, self._now_ms(), gateway.uid)

    def _get(self, session: aiohttp.ClientSession, admin: str) -> AbstractAsyncContextManager[aiohttp.ClientResponse]:
        if self._tls is None:
            return session.get(f"http://{admin}/v1/load", allow_redirects=False)
        if self._context is None or self._version != self._tls.version:
            self._context, self._version = self._tls.ask(), self._tls.version
        return session.get(
            f"https://{admin}/v1/load", allow_redirects=False, ssl=self._context, server_hostname=INTERNAL_NAME
        )


def parse(body: bytes, name: str, uid: str) -> Load:
    """A gateway's answer. Raises ValueError when it cannot be read, or comes from another process than the topology's."""
    try:
        raw: Any = json.loads(body)
        if (raw["name"], raw["uid"]) != (name, uid):
            raise ValueError(f"another process answers: {raw['name']} {raw['uid']}")
        bytes_max = max(0, int(raw["max_bytes_per_s"])) if raw.get("max_bytes_per_s") is not None else 0
        return Load(
            bool(raw["serving"]),
            max(0, int(raw["connections"])),
            max(0, int(raw["connections_left"])),
            max(0, int(raw["bytes_per_s_left"])) if bytes_max else None,
            bytes_max,
        )
    except (KeyError, TypeError, AttributeError, OverflowError, RecursionError) as e:
        raise ValueError(f"no load figures: {e!r}") from e
