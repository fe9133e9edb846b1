"""The HTTP API's own port: what a stranger holds of it ends by a bound, and whoever keeps to them is served."""

from __future__ import annotations

import asyncio
import gc
import inspect
import socket
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import trustme
from plato.core.codes import Code
from plato.fakes.tokens import FakeTokens
from plato.runtime.client_tls import CERTIFICATE, KEY, newest
from plato_msg.api import app, port
from plato_msg.api.auth import Door
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.types import ASGIApp, Receive, Scope, Send

DEADLINE_S = 20.0
LONG_S = 300.0
"""A bound that does not count here."""


@pytest.fixture(autouse=True)
def looks_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that bounds may be short here."""
    monkeypatch.setattr(port, "TICK_S", 0.02)
    monkeypatch.setattr(port, "LOOK_S", 0.05)


async def answers(scope: Scope, receive: Receive, send: Send) -> None:
    """Says how long the body was; /big: more than any buffer holds; /early: answers without reading."""
    request = Request(scope, receive)
    made: Response
    if request.url.path == "/big":

        async def big() -> AsyncIterator[bytes]:
            for _ in range(1_000):
                yield bytes(65_536)

        made = StreamingResponse(big())
    elif request.url.path == "/early":
        made = PlainTextResponse("no")
    else:
        size = 0
        async for chunk in request.stream():
            size += len(chunk)
        made = PlainTextResponse(str(size))
    await made(scope, receive, send)


@asynccontextmanager
async def serving(
    application: ASGIApp = answers, *, connections: int = 50, head_s: float = LONG_S, body_s: float = LONG_S,
    folder: Path | None = None,
) -> AsyncIterator[tuple[port.ApiPort, int]]:  # fmt: skip
    with socket.create_server(("127.0.0.1", 0)) as probe:
        number: int = probe.getsockname()[1]
    made = port.ApiPort(application, "127.0.0.1", number, port.Bounds(connections, head_s, body_s), newest(folder))
    await made.start()
    try:
        yield made, number
    finally:
        await made.stop()


class Peer:
    """A client that sends what it likes."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    @classmethod
    async def to(cls, number: int, **more: Any) -> Peer:
        return cls(*await asyncio.open_connection("127.0.0.1", number, **more))

    async def say(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def all(self) -> bytes:
        """What comes until the other side ends."""
        try:
            return await asyncio.wait_for(self.reader.read(-1), DEADLINE_S)
        except ConnectionError:
            return b""
        finally:
            self.writer.close()


def put(folder: Path, authority: trustme.CA) -> bytes:
    made = authority.issue_cert("chat.example")
    (folder / KEY).write_bytes(made.private_key_pem.bytes())
    chain = made.cert_chain_pems[0].bytes()
    (folder / CERTIFICATE).write_bytes(chain)
    return chain


async def until(holds: Callable[[], Any]) -> None:
    """holds: an answer, or what gives one."""
    async with asyncio.timeout(DEADLINE_S):
        while True:
            found = holds()
            if await found if inspect.isawaitable(found) else found:
                return
            await asyncio.sleep(0.01)


# ── who keeps to the bounds ──────────────────────────────────────────────────────────────────────────────────


async def test_requests_are_answered_one_after_another_on_one_connection() -> None:
    async with serving(head_s=5, body_s=5) as (_, number), httpx.AsyncClient() as client:
        for size in (0, 10, 300_000):
            answer = await client.post(f"http://127.0.0.1:{number}/", content=bytes(size))
            assert (answer.status_code, answer.text) == (200, str(size))
            assert "server" not in answer.headers  # no stranger needs to know
            assert answer.headers["date"]


async def test_a_body_may_take_its_time_as_long_as_it_comes() -> None:
    """4 KiB a second and more are never too slow, however short the wait that a body may cost by itself."""
    async with serving(body_s=0.15) as (_, number):
        peer = await Peer.to(number)
        await peer.say(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 20480\r\nConnection: close\r\n\r\n")
        for _ in range(5):
            await peer.say(bytes(4_096))
            await asyncio.sleep(0.1)
        assert (await peer.all()).endswith(b"\r\n\r\n20480")


async def test_an_application_that_is_slow_is_not_the_clients_fault() -> None:
    go_on = asyncio.Event()

    async def slow(scope: Scope, receive: Receive, send: Send) -> None:
        await go_on.wait()
        await answers(scope, receive, send)

    async with serving(slow, head_s=0.1, body_s=0.1) as (_, number):
        peer = await Peer.to(number)
        await peer.say(
            b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 200000\r\nConnection: close\r\n\r\n" + bytes(90_000)
        )
        await asyncio.sleep(0.4)  # more than any bound
        go_on.set()
        await peer.say(bytes(110_000))
        assert (await peer.all()).endswith(b"\r\n\r\n200000")


# ── who does not ─────────────────────────────────────────────────────────────────────────────────────────────


async def test_a_connection_too_many_is_closed_at_once_and_room_is_made_by_who_leaves() -> None:
    async with serving(connections=2) as (_, number):
        first, second = await Peer.to(number), await Peer.to(number)
        for peer in (first, second):  # both are in, not in the backlog
            await peer.say(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
            assert await asyncio.wait_for(peer.reader.readuntil(b"\r\n\r\n0"), DEADLINE_S)
        assert await (await Peer.to(number)).all() == b""
        first.writer.close()

        async def served() -> bool:
            peer = await Peer.to(number)
            await peer.say(b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
            return b"200 OK" in await peer.all()

        await until(served)
        second.writer.close()


@pytest.mark.parametrize(
    ("sent", "answer"),
    [(b"", b""), (b"GET / HTTP/1.1\r\nHost: x\r\n", b"408"), (b"GET / HTTP/1.1\r\nHost: x\r\n\r\nGET / HT", b"408")],
)
async def test_a_head_that_does_not_come_ends_the_connection(sent: bytes, answer: bytes) -> None:
    async with serving(head_s=0.15) as (_, number):
        peer = await Peer.to(number)
        await peer.say(sent)
        said = await peer.all()
        assert said.split(b"HTTP/1.1 ")[-1][:3] == answer


async def test_who_asks_nothing_more_goes_and_sooner_when_places_are_few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(port, "CROWDED_KEEP_S", 0.15)
    async with serving(connections=4) as (made, number):

        async def asked() -> Peer:
            peer = await Peer.to(number)
            await peer.say(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
            await asyncio.wait_for(peer.reader.readuntil(b"\r\n\r\n0"), DEADLINE_S)
            return peer

        stays = [await asked() for _ in range(3)]
        await asyncio.sleep(0.4)
        assert made.connections == 3
        stays.append(await asked())
        await until(lambda: made.connections < 4)
        monkeypatch.setattr(port, "KEEP_S", 0.15)
        for peer in stays:
            assert await peer.all() == b""


async def test_a_head_that_trickles_is_no_faster() -> None:
    async with serving(head_s=0.15) as (_, number):
        peer = await Peer.to(number)

        async def trickle() -> None:
            try:
                for byte in b"GET / HTTP/1.1\r\nX: " + b"x" * 4_000:
                    await peer.say(bytes([byte]))
                    await asyncio.sleep(0.02)
            except ConnectionError:
                pass

        sends = asyncio.create_task(trickle())
        await peer.all()  # 408, or the reset that takes it away; it comes to an end
        sends.cancel()


@pytest.mark.parametrize(
    "sent",
    [
        b"nonsense\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: x\r\nContent-Length: x\r\n\r\n",
        b"GET /%ff%00 HTTP/1.1\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nxyz\r\n",
        b"POST /early HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n|xyz\r\n",
        b"GET /big HTTP/1.1\r\nHost: x\r\n\r\n|nonsense\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\nExpect: 100-continue\r\n\r\n|1|GET",
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\nnonsense\r\n\r\n",
    ],
)
async def test_whatever_a_stranger_sends_ends_and_leaves_no_trace_in_the_log(
    sent: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    """A line for each would let strangers fill the disk. What stands behind | is sent when the first of an answer came."""
    gc.collect()  # what other tests left behind speaks up now
    caplog.clear()
    async with serving(head_s=0.5, body_s=0.5) as (made, number):
        peer = await Peer.to(number)
        first, *more = sent.split(b"|")
        await peer.say(first)
        for part in more:
            assert await asyncio.wait_for(peer.reader.read(10), DEADLINE_S)
            await peer.say(part)
        await peer.all()
        await until(lambda: made.connections == 0)
    gc.collect()
    assert [r for r in caplog.records if r.levelname in ("WARNING", "ERROR", "CRITICAL")] == []


async def test_a_head_too_large_is_refused() -> None:
    async with serving() as (_, number):
        peer = await Peer.to(number)
        await peer.say(b"GET / HTTP/1.1\r\nX: " + b"x" * (port.HEAD_BYTES + 4_096))
        assert b" 400 " in await peer.all()


async def test_a_body_that_trickles_is_ended_and_its_request_too() -> None:
    """The application hears that its client is gone: nothing waits on."""
    ended = asyncio.Event()

    async def reads(scope: Scope, receive: Receive, send: Send) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        ended.set()

    async with serving(reads, body_s=0.15) as (_, number):
        peer = await Peer.to(number)
        await peer.say(b"POST / HTTP/1.1\r\nHost: x\r\nOrigin: http://localhost:1\r\nContent-Length: 1000\r\n\r\nx")
        answer = await peer.all()
        assert b"408" in answer
        assert b"\r\nAccess-Control-Allow-Origin: http://localhost:1\r\n" in answer  # the page that asked may read it
        assert answer.endswith(b"\r\n\r\n")
        await asyncio.wait_for(ended.wait(), DEADLINE_S)


async def test_the_rest_of_a_body_that_nobody_reads_holds_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(port, "LINGER_S", 0.15)
    async with serving() as (_, number):
        peer = await Peer.to(number)
        await peer.say(b"POST /early HTTP/1.1\r\nHost: x\r\nContent-Length: 100000000\r\n\r\n")
        said = await peer.all()
        assert said.startswith(b"HTTP/1.1 200")
        assert said.endswith(b"no")


async def test_whoever_does_not_take_an_answer_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(port, "TAKE_S", 0.15)
    async with serving() as (made, number):
        peer = await Peer.to(number, limit=1_024)
        await peer.say(b"GET /big HTTP/1.1\r\nHost: x\r\n\r\n")
        await until(lambda: made.connections == 1)
        await until(lambda: made.connections == 0)
        peer.writer.close()


async def test_an_upgrade_stays_within_the_bounds() -> None:
    async with serving(head_s=0.15) as (_, number):
        peer = await Peer.to(number)
        await peer.say(
            b"GET / HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"
            b"Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\nGET"
        )
        said = await peer.all()
        assert said.startswith(b"HTTP/1.1 200")
        assert b" 408 " in said


# ── TLS ──────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_tls_shows_the_newest_certificate_and_plain_text_gets_nothing(tmp_path: Path) -> None:
    authority = trustme.CA()
    trusted = ssl.create_default_context()
    authority.configure_trust(trusted)
    put(tmp_path, authority)

    async def shown(number: int) -> bytes:
        peer = await Peer.to(number, ssl=trusted, server_hostname="chat.example")
        found: bytes = peer.writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
        await peer.say(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\nConnection: close\r\n\r\nabc")
        assert (await peer.all()).endswith(b"\r\n\r\n3")
        return found

    async with serving(folder=tmp_path) as (_, number):
        before = await shown(number)
        plain = await Peer.to(number)
        await plain.say(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        assert b"HTTP" not in await plain.all()
        fresh = ssl.PEM_cert_to_DER_cert(put(tmp_path, authority).decode())
        assert fresh != before

        async def renewed() -> bool:
            return await shown(number) == fresh

        await until(renewed)
        (tmp_path / KEY).write_text("no key")  # and a pair that does not fit is passed over
        assert await shown(number) == fresh


async def test_a_handshake_that_does_not_end_counts_as_a_connection(tmp_path: Path) -> None:
    """Else strangers would use up the descriptors of the process with those."""
    put(tmp_path, trustme.CA())
    async with serving(connections=1, folder=tmp_path) as (made, number):
        silent = await Peer.to(number)
        await until(lambda: made.connections == 1)
        assert await (await Peer.to(number)).all() == b""  # at once: no bound in time counts here
        assert made.connections == 1
        silent.writer.close()
        await until(lambda: made.connections == 0)


async def test_a_handshake_that_does_not_end_is_ended(tmp_path: Path) -> None:
    put(tmp_path, trustme.CA())
    async with serving(head_s=0.15, folder=tmp_path) as (made, number):
        assert await (await Peer.to(number)).all() == b""
        await until(lambda: made.connections == 0)


# ── the end ──────────────────────────────────────────────────────────────────────────────────────────────────


async def test_who_asks_while_it_settles_is_answered_and_told_to_come_anew() -> None:
    async with serving() as (made, number), httpx.AsyncClient() as client:
        before = await client.get(f"http://127.0.0.1:{number}/")
        assert "connection" not in before.headers
        settles = asyncio.create_task(made.settle(0.2))
        await asyncio.sleep(0)
        during = await client.get(f"http://127.0.0.1:{number}/")
        assert (during.status_code, during.headers["connection"]) == (200, "close")
        await settles


async def test_a_stop_lets_what_is_under_way_be_answered() -> None:
    async with serving() as (made, number):
        peer, idle = await Peer.to(number), await Peer.to(number)
        await peer.say(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\n\r\n12")
        await until(lambda: made.connections == 2)
        stops = asyncio.create_task(made.stop())
        assert await idle.all() == b""
        await peer.say(b"345")
        assert (await peer.all()).endswith(b"\r\n\r\n5")
        await asyncio.wait_for(stops, DEADLINE_S)
        with pytest.raises(ConnectionError):
            await Peer.to(number)


async def test_a_port_that_is_taken_is_an_error_at_once() -> None:
    async with serving() as (_, number):
        again = port.ApiPort(answers, "127.0.0.1", number, port.Bounds(1, 1, 1))
        with pytest.raises(OSError, match="in use"):
            await again.start()


# ── with the API behind it ───────────────────────────────────────────────────────────────────────────────────


async def test_a_body_too_large_is_refused_in_words_and_strangers_reach_no_other_route() -> None:
    api = app.application(Door(FakeTokens(), 50, 50, lambda: 0.0), [])
    async with serving(api) as (_, number), httpx.AsyncClient(base_url=f"http://127.0.0.1:{number}") as client:
        for path in ("/metrics", "/healthz", "/readyz", "/v1/report", "/admin/v1/groups", "/docs", "/"):
            answer = await client.get(path, headers={"Authorization": "Bearer fake:alice"})
            assert (answer.status_code, answer.headers["content-type"]) == (404, "application/problem+json"), path
        assert (await client.get("/openapi.json")).status_code == 200
        refused = await client.post("/v1/nothing", content=b"{}")
        assert (refused.status_code, refused.json()["code"]) == (401, Code.TOKEN_INVALID)
