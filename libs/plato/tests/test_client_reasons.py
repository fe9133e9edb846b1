"""A client that is kept offline says why: in its state, in the log, and to whoever waits for its name."""

from __future__ import annotations

import asyncio
import logging

import pytest
from aiohttp import web
from plato.client import Client, Phase, Refused, State
from plato.core.codes import Code
from plato.fakes.platform import Platform
from plato.fakes.platform_server import PlatformServer


async def offline(client: Client) -> State:
    """The first state that waits and says why."""
    async with asyncio.timeout(15):
        async for state in client.states():
            if state.phase is Phase.OFFLINE and state.reason:
                return state
    raise AssertionError(client.state)


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.name == "plato.client" and r.levelno == logging.WARNING]


async def test_a_refused_token_is_told_in_the_state_and_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    async with (
        PlatformServer(Platform(verify=lambda _: Code.TOKEN_EXPIRED)) as server,
        Client("bad", ":memory:", [server.address], user="alice") as alice,
    ):
        state = await offline(alice)
        assert state.code == Code.TOKEN_EXPIRED
        assert "token" in str(state)
        rounds = 0
        async with asyncio.timeout(15):
            async for later in alice.states():
                rounds += later.phase is Phase.OFFLINE
                if rounds == 3:
                    break
    assert len(warnings(caplog)) == 1, warnings(caplog)
    assert "token" in warnings(caplog)[0]


async def test_who_is_not_known_and_refused_cannot_send_and_is_told() -> None:
    async with (
        PlatformServer(Platform(verify=lambda _: Code.TOKEN_INVALID)) as server,
        Client(lambda: "bad", ":memory:", [server.address]) as unknown,
    ):
        with pytest.raises(Refused, match="user=") as told:
            await asyncio.wait_for(unknown.send("x", to="bob"), 15)
        assert told.value.code == Code.TOKEN_INVALID


async def test_an_ipconfig_that_does_not_answer_is_named(caplog: pytest.LogCaptureFixture) -> None:
    url = "http://127.0.0.1:9"
    async with Client("alice", ":memory:", ipconfig_url=url, user="alice") as alice:
        state = await offline(alice)
        assert state.code is None
        assert url in state.reason
    assert len(warnings(caplog)) == 1
    assert url in warnings(caplog)[0]


async def test_a_token_that_ipconfig_refuses_is_told() -> None:
    async def refuse(request: web.Request) -> web.Response:
        return web.json_response({"message": "token", "code": 305, "data": []}, status=401)

    app = web.Application()
    app.router.add_get("/ip/list", refuse)
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        async with Client("bad", ":memory:", ipconfig_url=url) as alice:
            with pytest.raises(Refused, match="token"):
                await asyncio.wait_for(alice.send("x", to="bob"), 15)
            state = await offline(alice)
            assert state.code == Code.TOKEN_INVALID
            assert url in state.reason
    finally:
        await runner.cleanup()


async def test_a_provider_that_fails_is_named() -> None:
    def fail() -> str:
        raise OSError("the vault is shut")

    async with PlatformServer(Platform()) as server, Client(fail, ":memory:", [server.address], user="alice") as alice:
        assert "the vault is shut" in (await offline(alice)).reason
