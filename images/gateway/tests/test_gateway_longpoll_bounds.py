"""Long polling under whoever means harm: nobody keeps a socket by dribbling, nobody has memory filled by not reading."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable

import pytest
from plato.api.names import POLL_PATH
from plato.core import longpoll
from plato.core.longpoll import Body
from plato.runtime.settings import Settings
from plato_gateway.lane import address, poll_socket
from plato_gateway.longpoll import Polls
from plato_gateway.longpoll_http import HttpServer, HttpSocket, Request, Response

ASK = b"POST /poll HTTP/1.1\r\nhost: x\r\ncontent-length: 0\r\n\r\n"


class Transport(asyncio.Transport):
    """A client's socket, as asyncio's: what the client does not read waits, and the protocol is told."""

    def __init__(self, protocol: HttpSocket, host: str = "192.0.2.1") -> None:
        super().__init__({"peername": (host, 1)})
        self.protocol = protocol
        self.unread = 0
        self.ended = False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """See asyncio."""
        self.unread += len(data)
        if self.unread > 65_536:
            self.protocol.pause_writing()

    def read(self) -> None:
        """The client reads all of it."""
        self.unread = 0
        self.protocol.resume_writing()

    def abort(self) -> None:
        """See asyncio."""
        self.ended = True
        self.protocol.connection_lost(None)

    def close(self) -> None:
        """See asyncio."""
        self.ended = True

    def is_closing(self) -> bool:
        """See asyncio."""
        return self.ended


def connected(answer: Response) -> Transport:
    async def handler(_: Request) -> Response:
        return answer

    protocol = HttpSocket(HttpServer(handler, most_bytes=100, most_sockets=9, first_s=5.0))
    transport = Transport(protocol)
    protocol.connection_made(transport)
    return transport


async def test_a_request_that_comes_byte_by_byte_gets_no_more_time_with_each() -> None:
    protocol = connected(Response(200)).protocol
    protocol.data_received(ASK[:1])
    assert protocol._timer is not None
    ends_s = protocol._timer.when()
    await asyncio.sleep(0.01)
    protocol.data_received(ASK[1:2])
    assert protocol._timer.when() == ends_s
    protocol.data_received(ASK[2:])
    while protocol.task is not None:  # noqa: ASYNC110 - it ends within this loop
        await asyncio.sleep(0)
    ends_s = protocol._timer.when()
    protocol.data_received(ASK[:1])
    assert protocol._timer.when() < ends_s, "the next request has its own time"
    protocol.connection_lost(None)


@pytest.mark.parametrize("times", [3, 400])
async def test_answers_that_are_not_read_hold_up_the_next_request(times: int) -> None:
    transport = connected(Response(200, bytes(60_000)))
    protocol = transport.protocol
    for _ in range(times):
        protocol.data_received(ASK)
        for _ in range(4):
            await asyncio.sleep(0)
    assert transport.unread < 3 * 65_536, "whatever it asks, no more is put before it"
    if times < 10:
        seen = 0
        while transport.unread:
            seen += transport.unread
            transport.read()
            for _ in range(4):
                await asyncio.sleep(0)
        assert seen > times * 60_000, "once it reads, all of it is answered"
    else:
        for _ in range(2_000):
            protocol.data_received(ASK)
        assert transport.ended, "and what it sends meanwhile is bounded"
    protocol.connection_lost(None)


async def test_connections_that_the_worker_refused_take_nobodys_place(make_settings: Callable[..., Settings]) -> None:
    """One address that is refused over and over, by its bound, must not fill the gateway for all others."""
    settings = make_settings(poll_max_connections=2)
    polls = Polls(settings)

    def refuse(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.close()

    where, folder = address(settings.gateway.run_dir, poll_socket(0))
    settings.gateway.run_dir.mkdir()
    worker = await asyncio.start_unix_server(refuse, where)
    if folder >= 0:
        os.close(folder)
    request = Request("POST", POLL_PATH, {}, Body(longpoll.OPEN).encode(), "192.0.2.1:1")
    try:
        names = []
        for _ in range(9):
            response = await polls.answer(request)
            assert response.status == 200
            names.append(longpoll.decode(response.body).session)
            async with asyncio.timeout(10):
                while not polls._open[names[-1]].session.over:  # noqa: ASYNC110 - the socket's end comes by itself
                    await asyncio.sleep(0)
        assert list(polls._open) == names[-2:], "what is over is kept for its last answer, bounded"
    finally:
        worker.close()


async def test_sockets_of_one_address_are_bounded_where_its_connections_are() -> None:
    """Else whoever opens them and says nothing takes the room of all others, bound or not."""

    async def handler(_: Request) -> Response:
        return Response(200)

    server = HttpServer(handler, most_bytes=100, most_sockets=9, first_s=5.0, most_each=2)

    def come(host: str) -> Transport:
        protocol = HttpSocket(server)
        transport = Transport(protocol, host)
        protocol.connection_made(transport)
        return transport

    here = [come("192.0.2.1") for _ in range(4)]
    assert [one.ended for one in here] == [False, False, True, True]
    house = [come(f"2001:db8:1:2::{n}") for n in range(3)]
    assert [one.ended for one in house] == [False, False, True], "an IPv6 house is one address"
    here[0].abort()
    assert not come("192.0.2.1").ended
    for one in list(server.sockets):
        one.connection_lost(None)
    assert server._each == {}
