"""The part of an API server that pods use, behind a real socket: one namespace's ConfigMaps, listed and watched.

Faults are switched on by attributes. Versions are a counter; a watch from before `oldest` is answered 410 as an event,
as the real one does. Memory: every event since the start.
"""

from __future__ import annotations

import asyncio
import json
from types import TracebackType
from typing import Any

from aiohttp import web

from plato.topology.record import Topology
from plato.topology.stored import pack


class FakeKubeApi:
    """Use as `async with FakeKubeApi() as api:`; `api.base` is its address, `api.token` what it lets in."""

    def __init__(self, namespace: str = "im") -> None:
        self.namespace = namespace
        self.base = ""
        self.token = "token-1"
        self.refuse = 0
        """Status that every request is answered with; 0: none."""
        self.garbage: bytes | None = None
        """Every answer's body instead of what it should be."""
        self.mute = False
        """Requests are read and never answered; open watches say nothing more."""
        self.end_watches_at_once = False
        self.oldest = 0
        """Watches from an older version are answered 410."""
        self.requests: list[dict[str, str]] = []
        """Query of each request that was let in, in order."""
        self._objects: dict[str, dict[str, Any]] = {}
        self._events: list[tuple[int, str, Any]] = []
        self._version = 100
        self._more = asyncio.Event()
        self._open: set[web.StreamResponse] = set()
        self._runner: web.AppRunner
        self._port = 0

    async def __aenter__(self) -> FakeKubeApi:
        await self.up()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.down()

    async def up(self) -> None:
        """Listens: where it did before, if it did."""
        app = web.Application()
        app.router.add_get(f"/api/v1/namespaces/{self.namespace}/configmaps", self._answer)
        self._runner = web.AppRunner(app, shutdown_timeout=0.01, handler_cancellation=True)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self._port, reuse_address=True)
        await site.start()
        assert self._runner.addresses
        self._port = self._runner.addresses[0][1]
        self.base = f"http://127.0.0.1:{self._port}"

    async def down(self) -> None:
        """Goes away; open watches are cut."""
        self.cut()
        await self._runner.cleanup()

    def cut(self) -> None:
        """Breaks every open watch off."""
        for response in list(self._open):
            if response._payload_writer is not None and response._req is not None and response._req.transport:
                response._req.transport.abort()

    def put(self, name: str, content: dict[str, Any]) -> None:
        """Creates or replaces an object with this data or binaryData."""
        kind = "MODIFIED" if name in self._objects else "ADDED"
        self._version += 1
        metadata = {"name": name, "namespace": self.namespace, "resourceVersion": str(self._version)}
        self._objects[name] = {"kind": "ConfigMap", "apiVersion": "v1", "metadata": metadata, **content}
        self._say(kind, self._objects[name])

    def publish(self, name: str, topology: Topology) -> None:
        """Puts a record as the operator does."""
        self.put(name, pack(topology))

    def delete(self, name: str) -> None:
        """Removes an object."""
        self._version += 1
        found = self._objects.pop(name)
        found = {**found, "metadata": {**found["metadata"], "resourceVersion": str(self._version)}}
        self._say("DELETED", found)

    def bookmark(self, name: str = "") -> None:
        """Tells watches the present version."""
        self._version += 1
        self._say("BOOKMARK", {"kind": "ConfigMap", "metadata": {"name": name, "resourceVersion": str(self._version)}})

    def say(self, line: dict[str, Any]) -> None:
        """Any event, good or bad, to every open watch."""
        self._say(str(line["type"]), line["object"])

    @property
    def watches(self) -> int:
        """Watches that are open now."""
        return len(self._open)

    @property
    def version(self) -> int:
        """The present version."""
        return self._version

    def _say(self, kind: str, found: Any) -> None:
        self._events.append((self._version, kind, found))
        self._more.set()
        self._more = asyncio.Event()

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        if self.mute:
            await asyncio.Event().wait()
        if request.headers.get("Authorization") != f"Bearer {self.token}":
            return web.json_response({"kind": "Status", "message": "Unauthorized", "code": 401}, status=401)
        self.requests.append(dict(request.query))
        if self.refuse:
            words = {"kind": "Status", "message": f"refused by the test: {self.refuse}", "code": self.refuse}
            return web.json_response(words, status=self.refuse)
        if self.garbage is not None:
            return web.Response(body=self.garbage)
        name = request.query["fieldSelector"].removeprefix("metadata.name=")
        if request.query.get("watch") == "1":
            return await self._watch(request, name)
        items = [self._objects[name]] if name in self._objects else []
        return web.json_response({"metadata": {"resourceVersion": str(self._version)}, "items": items})

    async def _watch(self, request: web.Request, name: str) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        after = int(request.query["resourceVersion"])
        if after < self.oldest:
            expired = {"kind": "Status", "message": "too old resource version", "code": 410}
            await response.write(json.dumps({"type": "ERROR", "object": expired}).encode() + b"\n")
            return response
        if self.end_watches_at_once:
            return response
        at = next((i for i, (version, _, _) in enumerate(self._events) if version > after), len(self._events))
        self._open.add(response)
        try:
            async with asyncio.timeout(float(request.query["timeoutSeconds"])):
                while True:
                    more = self._more
                    for _, kind, found in self._events[at:]:
                        shown = found.get("metadata", {}).get("name", name) if isinstance(found, dict) else name
                        if not self.mute and shown in (name, ""):
                            await response.write(json.dumps({"type": kind, "object": found}).encode() + b"\n")
                    at = len(self._events)
                    await more.wait()
        except TimeoutError:
            return response
        finally:
            self._open.discard(response)
