"""The Python client's polling link against the gateway's end of it, over an HTTP that loses requests and answers."""

from __future__ import annotations

import asyncio
import random
import secrets
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest
from plato.client import longpoll as client
from plato.core import longpoll
from plato.core.frames import split
from plato.core.longpoll import Body, decode
from plato_gateway.core.longpoll import Session
from plato_gateway.longpoll_http import HttpServer, Request, Response

LIMIT = 65_536
FRAMES = 200


class Gateway:
    """One session, whose worker the test plays; `fate` says what becomes of each request."""

    def __init__(self) -> None:
        self.session = Session(LIMIT, 0)
        self.name = secrets.token_bytes(longpoll.SESSION_BYTES)
        self.up: list[bytes] = []
        self.changed = asyncio.Event()
        self.fate: Callable[[], str] = lambda: "well"
        self.known = True
        self.closed = False
        self.requests = 0

    async def answer(self, request: Request) -> Response:
        self.requests += 1
        fate = self.fate()
        if fate == "lost":  # the request never came
            return Response(502, close=True)
        body = decode(request.body)
        if body.flags & longpoll.OPEN:
            return self.said(1, b"", 0)
        if not self.known or body.session != self.name:
            return Response(410)
        self.session.hear(body, 0)
        self.up += split(self.session.take(body))
        self.closed |= bool(body.flags & longpoll.CLOSE)
        poll = None
        if body.a:
            poll = self.session.begin_poll()
            self.changed.set()
            try:
                async with asyncio.timeout(body.a / 1000):
                    while self.session.waits(poll):
                        self.changed.clear()
                        await self.changed.wait()
            except TimeoutError:
                pass
            finally:
                self.session.end_poll(0)
        first, run, end = self.session.answer(body.b, poll)
        if fate == "mute":  # its answer is lost
            return Response(504, close=True)
        return self.said(first, run, longpoll.END if end else 0)

    def said(self, first: int, run: bytes, flags: int) -> Response:
        return Response(200, Body(flags, self.name, 1_000, 30_000, self.session.received, first, run).encode())

    def down(self, payload: bytes) -> None:
        self.session.came(len(payload).to_bytes(4, "big") + payload)
        self.changed.set()


@asynccontextmanager
async def linked() -> AsyncIterator[tuple[Gateway, client.PollLink, list[bytes], asyncio.Event]]:
    """A gateway, a link to it, what came on the link, and whether it is gone."""
    gateway, came, gone = Gateway(), [], asyncio.Event()  # type: tuple[Gateway, list[bytes], asyncio.Event]
    server = HttpServer(gateway.answer, most_bytes=2 * LIMIT, most_sockets=100, first_s=5.0)
    await server.start("127.0.0.1", 0, None)
    assert server._server is not None
    url = f"http://127.0.0.1:{server._server.sockets[0].getsockname()[1]}/poll"
    try:
        link = await client.open_poll(url, came.extend, gone.set, None)
        yield gateway, link, came, gone
        link.close()
        await link.ended()
    finally:
        await server.stop(1.0)
        await asyncio.sleep(0)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while True:
            if condition():
                return
            await asyncio.sleep(0.005)


async def test_nothing_is_lost_or_doubled_over_an_http_that_loses_a_third(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "BACKOFF_MIN_S", 0.001)
    monkeypatch.setattr(client, "BACKOFF_MAX_S", 0.01)
    chance = random.Random(7)
    async with linked() as (gateway, link, came, gone):
        gateway.fate = lambda: chance.choice(("well", "well", "well", "well", "lost", "mute"))
        said = [b"%d" % n + b"." * chance.randrange(600) for n in range(FRAMES)]
        for at in range(0, FRAMES, 5):
            link.send(said[at : at + 5])
            for payload in said[at : at + 5]:
                gateway.down(payload)
            await asyncio.sleep(0.001)
        await until(lambda: len(gateway.up) >= FRAMES and len(came) >= FRAMES)
        assert gateway.up == said
        assert came == said
        assert not gone.is_set()
        gateway.fate = lambda: "well"
    assert gateway.closed


async def test_it_is_gone_with_its_last_frame_when_the_gateway_says_so_and_at_once_when_it_is_not_known() -> None:
    async with linked() as (gateway, _, came, gone):
        gateway.down(b"bye")
        gateway.session.over = True
        gateway.changed.set()
        await until(gone.is_set)
        assert came == [b"bye"]
    async with linked() as (gateway, link, came, gone):
        gateway.known = False
        link.send([b"x"])
        await until(gone.is_set)
        assert came == []


async def test_a_paused_link_asks_for_nothing_more() -> None:
    async with linked() as (gateway, link, came, _):
        await until(lambda: gateway.session._waiting == 1)
        link.pause(True)
        gateway.down(b"one")  # a poll waited already
        await until(lambda: came == [b"one"])
        asked = gateway.requests
        gateway.down(b"two")
        link.send([b"x"])
        await until(lambda: gateway.up == [b"x"])
        assert (came, gateway.requests) == ([b"one"], asked + 1)
        link.pause(False)
        await until(lambda: came == [b"one", b"two"])


async def test_a_server_that_speaks_no_long_polling_cannot_be_opened() -> None:
    async def portal(_: Request) -> Response:
        return Response(200, b"<html>please log in</html>")

    server = HttpServer(portal, most_bytes=LIMIT, most_sockets=10, first_s=5.0)
    await server.start("127.0.0.1", 0, None)
    assert server._server is not None
    port = server._server.sockets[0].getsockname()[1]
    try:
        with pytest.raises(OSError, match="no head"):
            await client.open_poll(f"http://127.0.0.1:{port}/poll", lambda _: None, lambda: None, None)
    finally:
        await server.stop(1.0)
    with pytest.raises(OSError, match=str(port)):
        await client.open_poll(f"http://127.0.0.1:{port}/poll", lambda _: None, lambda: None, None)
