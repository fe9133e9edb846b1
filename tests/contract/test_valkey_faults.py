"""The Valkey adapter when its server misbehaves (M26), and what it leaves in the server."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path

import pytest
from plato.adapters.valkey import ValkeyStore, sessions
from plato.adapters.valkey.client import Client, Script, command, evaluate
from plato.core.errors import Unavailable
from plato.core.ids import make_id
from plato.local.servers import ValkeyServer
from plato.ports import Fence, Route, Session, Window
from plato.runtime.settings import SettingsError

from tests.ports import free_port

NOW_MS = 1_800_000_000_000
SLOT = 17
FENCE = Fence(5, NOW_MS, "a1", "plato-s0")


def session(n: int) -> Session:
    return Session(make_id(NOW_MS + n, 3, SLOT), "alice", n, b"secret", n, guest=False)


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[ValkeyServer]:
    """A Valkey of the test's own, to be killed."""
    own = ValkeyServer(tmp_path / "valkey", free_port())
    await own.start()
    yield own
    with suppress(ProcessLookupError):
        if own.pid is not None:
            os.kill(own.pid, signal.SIGCONT)
    await own.stop()


@pytest.fixture
async def store(server: ValkeyServer) -> AsyncIterator[ValkeyStore]:
    made = await ValkeyStore.connect(server.url, "p:")
    yield made
    await made.close()


@pytest.fixture
async def admin(server: ValkeyServer) -> AsyncIterator[Client]:
    client = Client(server.url)
    yield client
    await client.close()


async def everything(store: ValkeyStore, n: int) -> None:
    """Every call of the three ports, each with the outcome it must have."""
    (view,) = await store.sessions.look([SLOT])
    held = (await store.sessions.acquire({SLOT: FENCE}, {SLOT: view.fence}))[SLOT]
    await store.sessions.prove("plato-s0", "a1")
    assert await store.sessions.prove("plato-s0", "a1") is True
    await store.sessions.put(SLOT, held, [session(n), session(n + 1)])
    assert await store.sessions.get(session(n).conn_id) == session(n)
    await store.sessions.remove(SLOT, held, [session(n + 1).conn_id])
    assert session(n) in await store.sessions.load(SLOT)
    await store.sessions.release({SLOT: held})
    assert await store.routes.compare_and_set("alice", n, None, Route(1, 1)) is True
    assert (await store.routes.read_many(["alice"]))[0][n] == Route(1, 1)
    window = await store.reservations.reserve(3, "u", n, NOW_MS, 1_000)
    assert window is not None
    assert window.until_ms > window.from_ms


async def test_m26_a_flushed_script_cache_fails_no_call(store: ValkeyStore, admin: Client) -> None:
    for n in range(0, 20, 2):
        await admin.run([command("SCRIPT", "FLUSH")])
        await everything(store, n)


async def test_m26_a_script_flush_inside_a_pipeline(store: ValkeyStore, admin: Client) -> None:
    await everything(store, 0)
    await admin.run([command("SCRIPT", "FLUSH")])
    sets = [store.routes.compare_and_set(f"user-{n}", 1, None, Route(n, 1)) for n in range(300)]
    assert all(await asyncio.gather(*sets))
    found = await store.routes.read_many([f"user-{n}" for n in range(300)])
    assert found == [{1: Route(n, 1)} for n in range(300)]


async def test_m26_reset_connections_fail_no_call(store: ValkeyStore, admin: Client) -> None:
    await everything(store, 0)
    for n in range(2, 40, 2):
        await admin.run([command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")])
        await everything(store, n)


async def test_m26_connections_reset_under_way_fail_no_call(store: ValkeyStore, admin: Client) -> None:
    killing, done = True, 0

    async def kill() -> int:
        kills = 0
        while killing:
            (killed,) = await admin.run([command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")])
            kills += killed
            await asyncio.sleep(0.01)  # the pace of the fault, not a wait for anything
            before = done
            # A machine that is busy does its round first: else there is nothing but resets.
            while killing and done == before:  # noqa: ASYNC110 - of another task
                await asyncio.sleep(0.001)
        return kills

    killer = asyncio.create_task(kill())
    try:
        for n in range(150):
            calls = [store.routes.compare_and_set(f"u{i}", n, None, Route(n + 1, 1)) for i in range(20)]
            for result in await asyncio.gather(*calls, return_exceptions=True):
                # Two resets in a row are an outage; what is told then is Unavailable, and nothing wrong.
                assert result is True or isinstance(result, Unavailable), result
                done += result is True
    finally:
        killing = False
    assert await killer > 5
    assert done > 2_500
    for routes in await store.routes.read_many([f"u{i}" for i in range(20)]):
        assert all(route == Route(device + 1, 1) for device, route in routes.items())


class Relay:
    """Between the adapter and the server: loses replies on demand, as a connection does that breaks under way."""

    def __init__(self, port: int) -> None:
        self._target = port
        self._links: set[asyncio.StreamWriter] = set()
        self._server: asyncio.Server | None = None
        self.lose_after: int | None = None
        """None: relays. n: passes n more bytes of replies, then breaks the connection, once."""

    async def start(self) -> int:
        """Listens; returns the port."""
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        port: int = self._server.sockets[0].getsockname()[1]
        return port

    async def stop(self) -> None:
        """Ends everything."""
        assert self._server is not None
        self._server.close()
        self.break_links()
        await self._server.wait_closed()

    def break_links(self) -> None:
        """Closes every connection of now."""
        for writer in self._links:
            writer.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        up_reader, up_writer = await asyncio.open_connection("127.0.0.1", self._target)
        self._links |= {writer, up_writer}
        await asyncio.gather(self._copy(reader, up_writer, replies=False), self._copy(up_reader, writer, replies=True))
        for end in (writer, up_writer):
            end.close()
            with suppress(OSError):
                await end.wait_closed()
        self._links -= {writer, up_writer}

    async def _copy(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, replies: bool) -> None:
        with suppress(OSError):
            while data := await reader.read(65_536):
                if replies and self.lose_after is not None:
                    data = data[: self.lose_after]
                    self.lose_after -= len(data)
                    writer.write(data)
                    if self.lose_after == 0:
                        self.lose_after = None
                        break
                    continue
                writer.write(data)
        writer.close()


@pytest.fixture
async def relay(server: ValkeyServer) -> AsyncIterator[Relay]:
    made = Relay(server.port)
    yield made
    await made.stop()


@pytest.fixture
async def relayed(server: ValkeyServer, relay: Relay) -> AsyncIterator[ValkeyStore]:
    port = await relay.start()
    made = await ValkeyStore.connect(server.url.replace(f":{server.port}/", f":{port}/"), "p:")
    await made.ping()
    yield made
    await made.close()


async def test_m26_a_call_whose_answer_is_lost_is_told_its_first_outcome(relayed: ValkeyStore, relay: Relay) -> None:
    store = relayed
    relay.lose_after = 0
    held = await store.sessions.acquire({SLOT: FENCE, 18: FENCE}, {SLOT: None, 18: None})
    assert held == {SLOT: FENCE, 18: FENCE}
    relay.lose_after = 5  # the first answer passes, and a part of the second
    again = await store.sessions.acquire({SLOT: FENCE, 18: FENCE}, dict(held))
    assert [f.start for f in again.values()] == [NOW_MS + 1, NOW_MS + 1]
    mine = again[SLOT]
    relay.lose_after = 0
    await store.sessions.put(SLOT, mine, [session(1), session(2)])
    relay.lose_after = 0
    await store.sessions.remove(SLOT, mine, [session(2).conn_id])
    relay.lose_after = 1
    assert await store.sessions.load(SLOT) == [session(1)]
    relay.lose_after = 0
    assert await store.routes.compare_and_set("alice", 1, None, Route(9, 1)) is True
    first = await store.reservations.reserve(3, "u", 1, NOW_MS, 1_000)
    relay.lose_after = 0
    second = await store.reservations.reserve(3, "u", 1, NOW_MS + 500, 1_000)
    assert first == Window(NOW_MS, NOW_MS + 1_000)
    assert second == Window(NOW_MS + 1_000, NOW_MS + 1_500)
    assert relay.lose_after is None


async def test_m26_a_connection_that_broke_in_its_rest_costs_no_retry(relayed: ValkeyStore, relay: Relay) -> None:
    await everything(relayed, 0)
    relay.break_links()
    async with asyncio.timeout(20):
        # Until the loop has seen the end of it, of which redis-py tells by no event.
        while not await relayed._client._connection.can_read():  # noqa: ASYNC110
            await asyncio.sleep(0.001)
    handshake = len(b"+OK\r\n")
    relay.lose_after = handshake  # the new connection's own call is lost too: that is what the retry is for
    assert await relayed.routes.compare_and_set("bob", 1, None, Route(9, 1)) is True
    assert relay.lose_after is None


async def written(server: ValkeyServer, admin: Client, n: int) -> None:
    """Waits until the server's file has all that it answered: it holds that back, for two seconds at most, while an fsync is
    under way. What is lost so is written again by its owners (R5), of whom there are none here."""
    await admin.run([command("SET", "mark", f"written-{n}")])
    async with asyncio.timeout(30):
        while not any(  # noqa: ASYNC110 - of a file
            f"written-{n}".encode() in file.read_bytes() for file in (server.folder / "appendonlydir").glob("*.aof")
        ):
            await asyncio.sleep(0.02)


async def test_m26_a_restarted_store_is_usable_at_once(store: ValkeyStore, server: ValkeyServer, admin: Client) -> None:
    await everything(store, 0)
    for n in (2, 4):
        await written(server, admin, n)
        server.kill()
        assert server.child is not None
        await server.child.wait()
        begun = time.monotonic()
        for _ in range(3):
            with pytest.raises(Unavailable, match=r"store redis://127\.0\.0\.1:\d+/0: "):
                await store.ping()
        assert time.monotonic() - begun < 5, "refused is known at once; it waits for nothing"
        await server.start()
        await everything(store, n)
    assert {s.device_id for s in await store.sessions.load(SLOT)} == {0, 2, 4}


def counted_connects(store: ValkeyStore, monkeypatch: pytest.MonkeyPatch) -> list[None]:
    """One item for each connection that the store begins from now on."""
    connects: list[None] = []
    connect = store._client._connection.connect

    async def counted() -> None:
        connects.append(None)
        await connect()

    monkeypatch.setattr(store._client._connection, "connect", counted)
    return connects


async def test_a_store_that_hangs_fails_everyone_in_time(
    store: ValkeyStore, server: ValkeyServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    await everything(store, 0)
    assert server.pid is not None
    connects = counted_connects(store, monkeypatch)
    os.kill(server.pid, signal.SIGSTOP)
    calls = [store.sessions.prove("plato-s0", "a1") for _ in range(3_000)]
    async with asyncio.timeout(20):  # 2 s and what 3,000 failures cost; one time-out after the other would be 12 s
        results = await asyncio.gather(*calls, return_exceptions=True)
    assert all(isinstance(r, Unavailable) and "no answer in time" in str(r) for r in results)
    assert not connects, "a time-out is final: nobody waits for a second one"
    async with asyncio.timeout(20):
        with pytest.raises(Unavailable, match="no answer in time"):  # the handshake hangs as well
            await store.ping()
    assert 1 <= len(connects) <= 2
    os.kill(server.pid, signal.SIGCONT)
    await everything(store, 2)


async def test_a_caller_that_gives_up_disturbs_nobody(store: ValkeyStore) -> None:
    for n in range(50):
        given_up = asyncio.create_task(store.routes.read_many(["alice"]))
        kept = asyncio.create_task(store.routes.compare_and_set("bob", n, None, Route(n, 1)))
        await asyncio.sleep(0)
        if n % 2:
            await asyncio.sleep(0)
        given_up.cancel()
        assert await kept
    assert len((await store.routes.read_many(["bob"]))[0]) == 50


async def test_what_cannot_be_packed_fails_its_own_caller_only(store: ValkeyStore) -> None:
    good = asyncio.create_task(store.routes.read_many(["alice"]))
    with pytest.raises(UnicodeEncodeError):
        await store.routes.read_many(["\ud800"])
    assert await good == [{}]


async def test_an_error_that_the_store_answers_is_unavailable(admin: Client) -> None:
    broken = Script("return redis.call('NOSUCH')")
    good = asyncio.create_task(admin.run([command("PING")]))
    with pytest.raises(Unavailable, match=r"(?i)unknown .*command") as caught:
        await admin.run([evaluate(broken, ["k"])])
    assert caught.value.__cause__ is not None
    assert await good == [b"PONG"]


async def test_close_fails_what_is_on_its_way(server: ValkeyServer) -> None:
    store = await ValkeyStore.connect(server.url)
    assert server.pid is not None
    await store.ping()
    os.kill(server.pid, signal.SIGSTOP)
    waiting = asyncio.create_task(store.ping())
    await asyncio.sleep(0)
    await store.close()
    await store.close()
    with pytest.raises(Unavailable, match="closed"):
        await waiting
    with pytest.raises(Unavailable, match="closed"):
        await store.ping()


async def test_live_sets_never_pass_their_limit(
    store: ValkeyStore, admin: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert sessions.MAX_SET_MEMBERS == 5_000
    monkeypatch.setattr(sessions, "MAX_SET_MEMBERS", 50)
    await store.sessions.acquire({SLOT: FENCE}, {SLOT: None})
    put = [session(n) for n in range(1_000)]
    for begin in range(0, 1_000, 125):
        await store.sessions.put(SLOT, FENCE, put[begin : begin + 125])
        await store.sessions.remove(SLOT, FENCE, [s.conn_id for s in put[begin : begin + 125 : 3]])
        await store.sessions.put(SLOT, FENCE, put[begin + 1 : begin + 125 : 3])  # again: they stay where they are
    kept = [s for n, s in enumerate(put) if (n % 125) % 3]
    assert sorted(await store.sessions.load(SLOT), key=lambda s: s.conn_id) == kept
    (keys,) = await admin.run([command("KEYS", f"p:{{s{SLOT}}}:live:*")])
    sizes = await admin.run([command("SCARD", key) for key in keys])
    assert max(sizes) <= 50
    assert sum(sizes) == len(kept)
    assert len(sizes) <= len(kept) // 50 + 2  # freed places are used again


async def test_keys_carry_their_tag_and_no_time_to_live(store: ValkeyStore, admin: Client) -> None:
    await everything(store, 0)
    (keys,) = await admin.run([command("KEYS", "*")])
    names = sorted(key.decode() for key in keys)
    kinds = [name.split("}")[0][:4] for name in names]
    assert kinds == ["p:{o", *["p:{s"] * 4, "p:{u", "p:{w"]
    assert {name.split("}")[0] for name in names if name.startswith("p:{s")} == {"p:{s17"}
    assert set(await admin.run([command("TTL", key) for key in keys])) == {-1}


async def test_proofs_of_former_processes_are_bounded(store: ValkeyStore, admin: Client) -> None:
    await store.sessions.prove("plato-s0", "long-lived")
    for n in range(60):
        await store.sessions.prove("plato-s0", f"t{n}")
        assert await store.sessions.prove("plato-s0", "long-lived") is True
    assert await admin.run([command("HLEN", "p:{oplato-s0}")]) == [17]
    assert await store.sessions.prove("plato-s0", "t59") is True
    assert await store.sessions.prove("plato-s0", "t0") is False


async def test_512_slots_are_looked_at_and_acquired_fast(store: ValkeyStore) -> None:
    begun = time.monotonic()
    views = await store.sessions.look(range(512))
    seen = {slot: view.fence for slot, view in enumerate(views)}
    assert len(await store.sessions.acquire(dict.fromkeys(range(512), FENCE), seen)) == 512
    assert all(not loaded for loaded in await asyncio.gather(*(store.sessions.load(slot) for slot in range(512))))
    assert time.monotonic() - begun < 5  # 0.05 s on a quiet machine


# ── what is told at the start ────────────────────────────────────────────────────────────────────────────────


async def test_check_passes_on_a_good_store(store: ValkeyStore) -> None:
    await store.check()


async def test_check_names_a_wrong_password(server: ValkeyServer) -> None:
    for password in (":wrong@", ""):
        store = await ValkeyStore.connect(server.url.replace(f":{server.password}@", password))
        with pytest.raises(SettingsError, match=r"store\.url: .* password") as caught:
            await store.check()
        assert "\n" not in str(caught.value)
        assert "wrong@" not in str(caught.value)
        with pytest.raises(Unavailable):
            await store.ping()
        await store.close()


async def test_check_names_an_unreachable_store() -> None:
    port = free_port()
    store = await ValkeyStore.connect(f"redis://:secret@127.0.0.1:{port}/0")
    with pytest.raises(Unavailable, match=f"store redis://127.0.0.1:{port}/0") as caught:
        await store.check()
    assert "secret" not in str(caught.value)
    await store.close()


async def test_check_refuses_a_store_that_evicts(store: ValkeyStore, admin: Client) -> None:
    await admin.run([command("CONFIG", "SET", "maxmemory", "100mb", "maxmemory-policy", "allkeys-lru")])
    with pytest.raises(SettingsError, match="set maxmemory-policy noeviction"):
        await store.check()


@pytest.mark.parametrize("url", ["", "http://x", "redis://h:port/0", "redis://h:1/0?nonsense=1", "redis://[::1/0"])
async def test_a_bad_url_is_a_settings_error(url: str) -> None:
    with pytest.raises(SettingsError, match=r"store\.url"):
        await ValkeyStore.connect(url)
