"""A proxy before the API server that answers watches badly: plain HTTP in front, the kubeconfig's credentials behind."""

from __future__ import annotations

import asyncio
import json
import ssl
import threading
from pathlib import Path
from typing import Any

import aiohttp
import yaml
from aiohttp import web
from kubernetes.aio import config
from kubernetes.aio.client.configuration import Configuration
from yarl import URL

GOOD, HANG, GARBAGE = "good", "hang", "garbage"


class BadApi:
    """Runs in a thread. `watches` says how watches are answered from now on: good, hang, garbage or an HTTP status; open
    ones are cut when it changes, but those of `hang` just fall silent. watched counts the watches that were asked for."""

    def __init__(self, kubeconfig: Path, folder: Path) -> None:
        self.watches: str = GOOD
        self.watched = 0
        self.kubeconfig = folder / "bad-api.kubeconfig"
        self._real = kubeconfig
        self._port = 0
        self._loop = asyncio.new_event_loop()
        self._up, self._stop = threading.Event(), asyncio.Event()
        self._changed: set[asyncio.Event] = set()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> BadApi:
        self._thread.start()
        assert self._up.wait(20), "the proxy does not start"
        cluster = {"name": "c", "cluster": {"server": f"http://127.0.0.1:{self._port}"}}
        context = {"name": "x", "context": {"cluster": "c", "user": "u"}}
        self.kubeconfig.write_text(
            yaml.safe_dump({
                "apiVersion": "v1", "kind": "Config", "clusters": [cluster], "contexts": [context],
                "users": [{"name": "u", "user": {}}], "current-context": "x",
            })
        )  # fmt: skip
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(20)

    def answer(self, how: str) -> None:
        """Changes how watches are answered; open ones notice."""
        self.watches = how
        for event in list(self._changed):
            self._loop.call_soon_threadsafe(event.set)

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._serve())

    async def _serve(self) -> None:
        found = Configuration()
        await config.load_kube_config(str(self._real), client_configuration=found)  # type: ignore[no-untyped-call]  # the library has no types
        context = ssl.create_default_context(cafile=found.ssl_ca_cert)
        if found.cert_file:
            context.load_cert_chain(found.cert_file, found.key_file)
        token = await found.get_api_key_with_prefix("BearerToken")
        headers = {"Authorization": token} if token else {}
        connector = aiohttp.TCPConnector(ssl=context, limit=0)
        timeout = aiohttp.ClientTimeout(total=None)
        async with aiohttp.ClientSession(connector=connector, headers=headers, timeout=timeout) as session:

            async def forward(request: web.Request) -> web.StreamResponse:
                return await self._forward(session, found.host, request)

            application = web.Application(client_max_size=1 << 24)
            application.router.add_route("*", "/{path:.*}", forward)
            runner = web.AppRunner(application, shutdown_timeout=0.5)
            await runner.setup()
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            self._port = runner.addresses[0][1]
            self._up.set()
            await self._stop.wait()
            await runner.cleanup()

    async def _forward(self, session: aiohttp.ClientSession, host: str, request: web.Request) -> web.StreamResponse:
        watch = request.query.get("watch") == "true"
        if watch:
            self.watched += 1
        if watch and self.watches.isdecimal():
            return _status(int(self.watches))
        kept = {k: v for k, v in request.headers.items() if k in ("Content-Type", "Accept", "User-Agent")}
        url = f"{host}{request.raw_path}"
        body = await request.read()
        async with session.request(request.method, URL(url, encoded=True), data=body or None, headers=kept) as answer:
            if not watch:
                content = await answer.read()
                return web.Response(status=answer.status, body=content, content_type="application/json")
            out = web.StreamResponse(status=answer.status, headers={"Content-Type": "application/json"})
            await out.prepare(request)
            await self._stream(answer, out)
            return out

    async def _stream(self, answer: aiohttp.ClientResponse, out: web.StreamResponse) -> None:
        changed = asyncio.Event()
        self._changed.add(changed)
        try:
            while True:
                if self.watches == HANG:
                    changed.clear()
                    await changed.wait()  # says nothing more, and does not close
                    continue
                if self.watches == GARBAGE:
                    await out.write(b"\x00<html>not a watch event\n")
                    return
                if self.watches != GOOD:
                    return
                line = asyncio.ensure_future(answer.content.readline())
                waiter = asyncio.ensure_future(changed.wait())
                await asyncio.wait([line, waiter], return_when=asyncio.FIRST_COMPLETED)
                waiter.cancel()
                changed.clear()
                if not line.done():
                    line.cancel()
                    continue
                if not line.result():
                    return
                await out.write(line.result())
        except (ConnectionError, aiohttp.ClientError):
            return
        finally:
            self._changed.discard(changed)


def _status(code: int) -> web.Response:
    reason = {410: "Expired", 403: "Forbidden", 404: "NotFound"}.get(code, "")
    body: dict[str, Any] = {
        "kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure", "reason": reason, "code": code,
        "message": f"watches are answered {code} in this test",
    }  # fmt: skip
    return web.Response(status=code, text=json.dumps(body), content_type="application/json")
