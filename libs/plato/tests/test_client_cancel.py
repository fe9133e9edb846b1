"""A cancellation that comes in the very moment in which what is waited for is done is a cancellation all the same: whoever
cancels a client's task is sure that it ends, on Python 3.11 too."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from plato.client.access import _ask
from plato.client.client import Client
from plato.client.links import WsLink
from plato.client.writer import Writer


async def test_while_a_token_is_asked_for() -> None:
    given: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    await _cancelled_when(_ask(lambda: given), lambda: given.set_result("token"))


async def test_while_the_disk_is_waited_for() -> None:
    writer: Any = object.__new__(Writer)
    writer._idle = asyncio.Event()
    await _cancelled_when(Writer.drain(writer, 60), writer._idle.set)


async def test_while_a_page_of_history_is_waited_for() -> None:
    class Machine:
        def forget_history(self, ref: int) -> None:
            pass

    client: Any = object.__new__(Client)
    client._loop, client._pages, client._machine = asyncio.get_running_loop(), {}, Machine()
    client._poke = lambda: None
    await _cancelled_when(Client._page(client, 1), lambda: client._pages[1].set_result(()))


async def test_while_a_socket_is_closed() -> None:
    closed = asyncio.Event()

    class Socket:
        async def close(self) -> None:
            await closed.wait()

    link: Any = object.__new__(WsLink)
    link._socket, link._tasks = Socket(), []
    await _cancelled_when(WsLink._release(link), closed.set)


async def _cancelled_when(waiting: Any, done: Any) -> None:
    task = asyncio.ensure_future(waiting)
    for _ in range(5):  # it waits
        await asyncio.sleep(0)
    assert not task.done()
    done()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        async with asyncio.timeout(10):
            await task
