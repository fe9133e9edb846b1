"""The client's edge on real sockets and real SQLite files, against the platform in memory."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import sqlite3
import threading
import time
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Literal

import pytest
from aiohttp import web
from plato.client import (
    Client,
    Delivery,
    Message,
    OutboxFull,
    Phase,
    Refused,
    Stopped,
    StoreError,
    StoreForeign,
    StoreInUse,
)
from plato.client import client as client_module
from plato.client import writer as writer_module
from plato.client.access import subject
from plato.client.core import outbox as outbox_module
from plato.client.discovery import addresses
from plato.client.links import TcpLink
from plato.client.store import Store
from plato.core.codes import Code
from plato.core.conversations import dialogue_id
from plato.core.frames import pack
from plato.fakes.platform import REFUSED_BODY, Platform
from plato.fakes.platform_server import PlatformServer
from plato.wire.v1 import client_pb2 as pb

Transport = Literal["tcp", "ws"]
TOLD = pb.ACKMsg(
    heartbeat_ms=400,
    repeat_min_ms=80,
    repeat_max_ms=400,
    reconnect_delay_ms=40,
    resume_window_ms=10_000,
    max_body_bytes=61_440,
)
WAIT_S = 40.0
ALICE_BOB = dialogue_id("alice", "bob")


async def until(condition: Callable[[], object], what: str = "") -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(what or "the condition never came true")
        await asyncio.sleep(0.005)


async def online(*clients: Client) -> None:
    await until(lambda: all(c.state.phase is Phase.ONLINE for c in clients), "not online")


@asynccontextmanager
async def gateways(count: int = 1, **platform: Any) -> AsyncIterator[list[PlatformServer]]:
    shared = Platform(told=TOLD, **platform)
    servers = [PlatformServer(shared) for _ in range(count)]
    for n, server in enumerate(servers):
        for other in servers[:n]:
            server.beside(other)
    for server in servers:
        await server.__aenter__()
    try:
        yield servers
    finally:
        for server in servers:
            await server.__aexit__(None, None, None)


def client(
    user: str, store: Path | str, servers: Sequence[PlatformServer], transport: Transport = "tcp", **more: Any
) -> Client:
    where = [s.ws_address if transport == "ws" else s.address for s in servers]
    return Client(user, store, where, user=user, transport=transport, **more)


class Reader:
    """An application that notes what it is shown."""

    def __init__(self, who: Client) -> None:
        self.shown: list[Message] = []
        self.ended: BaseException | None = None
        self.task = asyncio.create_task(self._read(who))

    async def _read(self, who: Client) -> None:
        try:
            async for message in who.messages():
                self.shown.append(message)
        except Stopped as e:
            self.ended = e

    @property
    def texts(self) -> list[str]:
        return [m.text for m in self.shown]

    async def has(self, *texts: str) -> None:
        await until(lambda: len(self.shown) >= len(texts), f"{self.texts} instead of {texts}")
        assert self.texts == list(texts)

    async def stop(self) -> None:
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)


@pytest.mark.parametrize("transport", ["tcp", "ws"])
async def test_two_people_talk(tmp_path: Path, transport: Transport) -> None:
    async with gateways() as servers:
        async with (
            client("alice", tmp_path / "a.db", servers, transport) as alice,
            client("bob", tmp_path / "b.db", servers, transport) as bob,
        ):
            reads = Reader(alice), Reader(bob)
            first = await alice.send("hello", to="bob")
            await first.accepted()
            receipt = await first.settled()
            assert (receipt.seq, receipt.conversation_id, receipt.client_msg_id) == (1, ALICE_BOB, first.client_msg_id)
            await (await bob.send(b"\x00\xff hi", conversation_id=ALICE_BOB, msg_type=7)).settled()
            for reader in reads:
                await until(lambda: len(reader.shown) == 2)  # noqa: B023 -- it ends before the loop goes on
                assert [(m.body, m.from_user, m.seq, m.msg_type) for m in reader.shown] == [
                    (b"hello", "alice", 1, 0),
                    (b"\x00\xff hi", "bob", 2, 7),
                ]
                assert {m.delivery for m in reader.shown} == {Delivery.STORED}
            assert [m.mine for m in reads[0].shown] == [True, False]
            assert [m.seq for m in await bob.history(ALICE_BOB)] == [1, 2]
            assert [m.seq for m in await bob.history(ALICE_BOB, before=2)] == [1]
            assert [(c.peer, c.cursor, c.newest_seq, c.unsettled) for c in bob.conversations()] == [("alice", 2, 2, 0)]
            for reader in reads:
                await reader.stop()
        assert bob.state.phase is Phase.STOPPED


async def test_what_is_sent_offline_goes_out_later(tmp_path: Path) -> None:
    async with gateways() as servers:
        servers[0].refusing = True
        async with client("alice", tmp_path / "a.db", servers) as alice:
            tickets = [await alice.send(f"{n}", to="bob") for n in range(40)]
            assert [m.delivery for m in alice.unsettled(ALICE_BOB)] == [Delivery.QUEUED] * 40
            assert [t.client_id for t in tickets] == list(range(1, 41))
            assert alice.state.phase is not Phase.ONLINE
            servers[0].refusing = False
            for ticket in tickets:
                await asyncio.wait_for(ticket.settled(), WAIT_S)
            assert [m.text for m in await alice.history(ALICE_BOB)] == [f"{n}" for n in range(40)]
            assert alice.unsettled(ALICE_BOB) == []


async def test_a_crash_keeps_the_outbox_and_its_numbers(tmp_path: Path) -> None:
    """A process that dies leaves what `send` returned for; the next one sends it under the same numbers."""
    nowhere = ["tcp://127.0.0.1:1"]
    keys = []
    async with Client("alice", tmp_path / "a.db", nowhere, user="alice") as alice:
        for n in range(3):
            keys.append((await alice.send(f"{n}", to="bob")).client_msg_id)
    async with gateways() as servers, client("alice", tmp_path / "a.db", servers) as alice:
        late = await alice.send("3", to="bob")
        assert late.client_id == 4
        await late.settled()
        rows = servers[0].platform.conversations[ALICE_BOB].rows
        assert [r.client_msg_id for r in rows] == [*keys, late.client_msg_id]


async def test_what_was_taken_is_not_shown_again(tmp_path: Path) -> None:
    async with gateways() as servers, client("alice", tmp_path / "a.db", servers) as alice:
        async with client("bob", tmp_path / "b.db", servers) as bob:
            for n in range(5):
                await alice.send(f"{n}", to="bob")
            taken = []
            async for message in bob.messages():
                taken.append(message.text)
                if len(taken) == 3:
                    break
        async with client("bob", tmp_path / "b.db", servers) as bob:
            reader = Reader(bob)
            await reader.has("3", "4")
            await (await alice.send("5", to="bob")).settled()
            await reader.has("3", "4", "5")
            await reader.stop()
        assert taken == ["0", "1", "2"]


async def test_what_was_taken_is_remembered_while_the_client_runs(tmp_path: Path) -> None:
    """A crash shows again at most what was taken in the last moment, and what is in the application's hands."""

    def delivered() -> list[tuple[str]]:
        with contextlib.closing(sqlite3.connect(f"file:{tmp_path / 'b.db'}?mode=ro", uri=True)) as file:
            return file.execute("SELECT value FROM meta WHERE name = 'delivered'").fetchall()

    async with (
        gateways() as servers,
        client("alice", ":memory:", servers) as alice,
        client("bob", tmp_path / "b.db", servers) as bob,
    ):
        for n in range(4):
            await alice.send(f"{n}", to="bob")
        shown = bob.messages()
        assert [(await anext(shown)).text for _ in range(4)] == ["0", "1", "2", "3"]
        await until(lambda: delivered() == [("3",)], "the fourth is still in hand")


async def test_a_second_reader_goes_on_where_the_first_stood(tmp_path: Path) -> None:
    async with gateways() as servers, client("alice", ":memory:", servers) as alice:
        first = Reader(alice)
        await alice.send("1", to="bob")
        await first.has("1")
        second = Reader(alice)
        await alice.send("2", to="bob")
        await second.has("2")
        await asyncio.wait_for(first.task, WAIT_S)
        await first.has("1")
        await second.stop()


@pytest.mark.parametrize("transport", ["tcp", "ws"])
async def test_a_dead_gateway_is_left_and_the_session_resumed(tmp_path: Path, transport: Transport) -> None:
    async with gateways(2) as (one, two):
        platform = one.platform
        async with (
            client("alice", tmp_path / "a.db", [one, two], transport) as alice,
            client("bob", tmp_path / "b.db", [two]) as bob,
        ):
            reader = Reader(alice)
            await online(alice, bob)
            if alice.state.gateway not in (one.address, one.ws_address):
                one.refusing, two.refusing = False, True
                two.cut(platform.live("alice"))
                await until(lambda: alice.state.gateway in (one.address, one.ws_address))
                await online(alice)
                two.refusing = False
            logins = platform.logins
            states = []

            async def watch() -> None:
                async for state in alice.states():
                    states.append(state)

            watcher = asyncio.create_task(watch())
            one.refusing = True
            one.cut()
            await bob.send("in the gap", to="alice")
            await reader.has("in the gap")
            await online(alice)
            assert alice.state.gateway in (two.address, two.ws_address)
            assert platform.logins == logins, "a resume needs no login"
            assert Phase.OFFLINE in [s.phase for s in states]
            watcher.cancel()
            await reader.stop()


async def test_a_restarted_process_resumes_without_a_token(tmp_path: Path) -> None:
    async def never() -> str:
        raise AssertionError("the token is not needed")

    async with gateways() as servers:
        async with client("alice", tmp_path / "a.db", servers) as alice:
            await online(alice)
        where = [servers[0].address]
        async with Client(never, tmp_path / "a.db", where) as alice:
            await online(alice)
            assert alice.user == "alice"
            assert servers[0].platform.logins == 1
            # The session is gone on the platform: a new login, with a token, on the same socket.
            servers[0].platform.end_sessions()
        async with client("alice", tmp_path / "a.db", servers) as alice:
            await online(alice)
            assert servers[0].platform.logins == 2


async def test_a_mute_gateway_is_dead_after_three_unanswered(tmp_path: Path) -> None:
    async with gateways(2) as (one, two), client("alice", tmp_path / "a.db", [one, two]) as alice:
        await online(alice)
        here, there = (one, two) if alice.state.gateway == one.address else (two, one)
        here.muted = True
        sent = await alice.send("through the other", to="bob")
        await asyncio.wait_for(sent.settled(), WAIT_S)
        assert alice.state.gateway == there.address


async def test_one_device_twice_ends_with_one(tmp_path: Path) -> None:
    async with gateways() as servers, client("alice", tmp_path / "1.db", servers, device_id=5) as one:
        reader = Reader(one)
        await online(one)
        async with client("alice", tmp_path / "2.db", servers, device_id=5) as two:
            await online(two)
            await until(lambda: one.state.phase is Phase.STOPPED)
            assert one.state.code == Code.REPLACED
            await asyncio.wait_for(reader.task, WAIT_S)
            assert isinstance(reader.ended, Stopped)
            assert reader.ended.code == Code.REPLACED
            with pytest.raises(Stopped, match="logged in elsewhere"):
                await one.send("too late", to="bob")
            assert (await (await two.send("mine", to="bob")).settled()).seq == 1
        assert servers[0].platform.logins == 2


async def test_logout_ends_the_session(tmp_path: Path) -> None:
    async with gateways() as servers:
        async with client("alice", tmp_path / "a.db", servers) as alice:
            reader = Reader(alice)
            await online(alice)
            await alice.logout()
            assert alice.state.code == Code.LOGGED_OUT
            await asyncio.wait_for(reader.task, WAIT_S)
            assert reader.ended is None
        assert servers[0].platform.live("alice") == []
        async with client("alice", tmp_path / "a.db", servers) as alice:
            await online(alice)
            assert servers[0].platform.logins == 2


async def test_a_refused_token_is_renewed_and_a_bad_provider_asked_again(tmp_path: Path) -> None:
    asked: list[str] = []

    async def provider() -> str:
        asked.append("")
        if len(asked) == 1:
            raise OSError("no network yet")
        return "old" if len(asked) == 2 else "alice"

    def verify(token: str) -> str | Code:
        return Code.TOKEN_EXPIRED if token == "old" else token

    async with gateways(verify=verify) as servers, Client(provider, tmp_path / "a.db", [servers[0].address]) as alice:
        await online(alice)
        assert len(asked) == 3
        assert alice.user == "alice"
        assert (await (await alice.send("x", to="bob")).settled()).conversation_id == ALICE_BOB


async def test_a_plain_function_may_give_the_token(tmp_path: Path) -> None:
    given: list[object] = [None, "alice"]

    def provider() -> str:
        return given.pop(0)  # type: ignore[return-value] # the first one is an application's mistake

    async with gateways() as servers, Client(provider, tmp_path / "a.db", [servers[0].address]) as alice:
        await online(alice)
        assert alice.user == "alice"
        assert not given


async def test_somebody_elses_token_is_named(tmp_path: Path) -> None:
    async with (
        gateways() as servers,
        Client("gina", tmp_path / "o.db", [servers[0].address], user="other") as other,
    ):
        await until(lambda: other.state.phase is Phase.STOPPED)
        assert other.state.reason == "the token belongs to 'gina', not to 'other'"
        assert "gina" in str(other.state)
        with pytest.raises(Stopped, match="the token belongs to 'gina'"):
            await other.send("x", to="bob")
        with pytest.raises(Stopped, match="the token belongs to 'gina'"):
            await anext(other.messages())


@pytest.mark.parametrize(
    ("address", "words"),
    [("foo", "host:port"), ("tcp://foo", "host:port"), ("foo:70000", "host:port"), (":8900", "host:port"),
     ("ws://foo/ws", "host:port"), ("udp://foo:80", "begins with")],
)  # fmt: skip
def test_an_impossible_gateway_is_told_at_once(address: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Client("alice", ":memory:", ["127.0.0.1:8900", "ws://[::1]:8901/ws", address])
    with pytest.raises(ValueError, match="a list"):
        Client("alice", ":memory:", "127.0.0.1:8900")


async def test_a_key_sends_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Queued, in flight, settled, refused, before a restart and after it: one message, one outcome."""
    key, other, bad = (uuid.UUID(int=n) for n in (1, 2, 3))
    async with Client("alice", tmp_path / "a.db", ["tcp://127.0.0.1:1"], user="alice") as alice:
        commit = threading.Event()
        apply = Store.apply

        def slowly(self: Store, writes: Any) -> None:
            assert commit.wait(WAIT_S)
            apply(self, writes)

        monkeypatch.setattr(Store, "apply", slowly)
        calls = [asyncio.create_task(alice.send(f"{n}", to="bob", client_msg_id=key)) for n in range(3)]
        await asyncio.wait(calls, timeout=0.05)
        assert not any(c.done() for c in calls), "not durable yet"
        calls[0].cancel()
        await asyncio.wait(calls[:1])
        commit.set()
        first = await calls[1]
        assert await calls[2] is first
        assert first.client_msg_id == key.bytes
        assert len(alice.unsettled(ALICE_BOB)) == 1
        with pytest.raises(ValueError, match="used in conversation"):
            await alice.send("x", conversation_id="room", client_msg_id=key)
    async with gateways() as servers:
        async with client("alice", tmp_path / "a.db", servers) as alice:
            again = await alice.send("again", to="bob", client_msg_id=key)
            assert again.client_id == 1
            receipt = await again.settled()
            await (await alice.send("more", to="bob", client_msg_id=other)).settled()
            with pytest.raises(Refused):
                await (await alice.send(REFUSED_BODY, to="bob", client_msg_id=bad)).settled()
            assert await (await alice.send("again", to="bob", client_msg_id=key)).settled() == receipt
        async with client("alice", tmp_path / "a.db", servers) as alice:
            assert (await (await alice.send("more", to="bob", client_msg_id=other)).settled()).seq == 2
            with pytest.raises(Refused):
                await (await alice.send("good", to="bob", client_msg_id=bad)).settled()
            assert alice.unsettled(ALICE_BOB) == []
        assert [r.Content for r in servers[0].platform.conversations[ALICE_BOB].rows] == [b"0", b"more"]


async def test_a_hurried_client_tries_at_once() -> None:
    async with gateways() as servers:
        await servers[0].__aexit__(None, None, None)
        async with client("alice", ":memory:", servers) as alice:
            alice._machine._backoff._failed = 20
            await until(lambda: (alice.next_try_s or 0) > 2)
            failed = alice._machine._backoff._failed
            alice.hurry()
            assert (alice.next_try_s or 0) < 1.01
            await until(lambda: alice._machine._backoff._failed > failed, "a new attempt was made")
            assert alice.state.code is None
        with pytest.raises(Stopped):
            alice.hurry()


async def test_a_token_that_stays_refused_makes_no_storm(tmp_path: Path) -> None:
    refuse = gateways(verify=lambda _: Code.TOKEN_INVALID)
    async with refuse as servers, client("alice", tmp_path / "a.db", servers) as alice:
        await until(lambda: servers[0].platform.logins >= 4)
        assert alice.state.code == Code.TOKEN_INVALID
        begun = time.monotonic()
        logins = servers[0].platform.logins
        await until(lambda: servers[0].platform.logins >= logins + 2)
        assert time.monotonic() - begun > 0.3


async def test_the_platform_says_who_we_are(tmp_path: Path) -> None:
    """An opaque token: `send(to=…)` waits for the first login."""
    async with gateways() as servers, Client("alice", tmp_path / "a.db", [servers[0].address]) as alice:
        assert (await alice.send("x", to="bob")).conversation_id == ALICE_BOB


async def test_a_gap_is_pulled_and_nothing_early_is_shown(tmp_path: Path) -> None:
    async with gateways(page_rows=7) as servers:
        platform, server = servers[0].platform, servers[0]
        async with client("alice", ":memory:", servers) as alice, client("bob", tmp_path / "b.db", servers) as bob:
            reader = Reader(bob)
            await online(alice, bob)
            await (await alice.send("0", to="bob")).settled()
            await reader.has("0")
            (conn_id,) = platform.live("bob")
            for n in range(1, 30):
                await (await alice.send(f"{n}", to="bob")).settled()
                if n == 1:
                    conn = platform._conns[conn_id]
                    conn.push_no += 1  # one frame is lost from here on, and with it a number
            await reader.has(*(f"{n}" for n in range(30)))
            server.cut([conn_id])
            for n in range(30, 60):
                await (await alice.send(f"{n}", to="bob")).settled()
            await reader.has(*(f"{n}" for n in range(60)))
            await reader.stop()


async def test_refusals_are_told_and_kept(tmp_path: Path) -> None:
    async with gateways() as servers, client("alice", tmp_path / "a.db", servers) as alice:
        bad = await alice.send(REFUSED_BODY, to="bob")
        good = await alice.send("fine", to="bob")
        with pytest.raises(Refused, match="could not be stored") as refusal:
            await bad.settled()
        assert refusal.value.code == Code.NOT_STORABLE
        assert (await good.settled()).seq == 1
        assert [(m.body, m.delivery, m.code) for m in alice.refused(ALICE_BOB)] == [
            (REFUSED_BODY, Delivery.REFUSED, Code.NOT_STORABLE)
        ]
        assert alice.unsettled(ALICE_BOB) == []


async def test_bad_calls_are_refused_at_once(tmp_path: Path) -> None:
    async with gateways() as servers, client("alice", tmp_path / "a.db", servers) as alice:
        with pytest.raises(ValueError, match="either"):
            await alice.send("x")
        with pytest.raises(ValueError, match="either"):
            await alice.send("x", to="bob", conversation_id="d:1")
        with pytest.raises(ValueError, match="to "):
            await alice.send("x", to="b" * 65)
        with pytest.raises(ValueError, match="kept for what administrators do"):
            await alice.send("x", to="admin")
        with pytest.raises(ValueError, match="conversation_id"):
            await alice.send("x", conversation_id="new\nline")
        with pytest.raises(ValueError, match="msg_type"):
            await alice.send("x", to="bob", msg_type=-1)
        with pytest.raises(ValueError, match="limit"):
            await alice.history(ALICE_BOB, limit=501)
        with pytest.raises(Refused, match="limit 61440"):
            await alice.send(b"x" * 61_441, to="bob")
        assert alice.conversations() == []
    with pytest.raises(ValueError, match="gateways"):
        Client("alice", ":memory:")
    with pytest.raises(Stopped):
        await alice.send("x", to="bob")


async def test_the_outbox_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outbox_module, "MAX_ENTRIES", 3)
    async with Client("alice", ":memory:", ["tcp://127.0.0.1:1"], user="alice") as alice:
        for n in range(3):
            await alice.send(f"{n}", to="bob")
        with pytest.raises(OutboxFull):
            await alice.send("3", to="bob")
        assert len(alice.unsettled(ALICE_BOB)) == 3


async def test_stores_are_guarded(tmp_path: Path) -> None:
    where = ["tcp://127.0.0.1:1"]
    async with Client("x", tmp_path / "a.db", where, user="alice", device_id=7) as alice:
        assert alice.device_id == 7
        with pytest.raises(StoreInUse, match="another process"):
            await Client("x", tmp_path / "a.db", where, user="alice").__aenter__()
    with pytest.raises(StoreForeign, match="'alice', not to 'bob'"):
        await Client("x", tmp_path / "a.db", where, user="bob").__aenter__()
    with pytest.raises(StoreForeign, match="device 7"):
        await Client("x", tmp_path / "a.db", where, user="alice", device_id=8).__aenter__()
    (tmp_path / "b.db").write_bytes(b"this is no database" * 100)
    with pytest.raises(StoreError, match="cannot be used"):
        await Client("x", tmp_path / "b.db", where).__aenter__()
    newer = sqlite3.connect(tmp_path / "c.db")
    newer.execute("PRAGMA user_version = 99")
    newer.close()
    with pytest.raises(StoreForeign, match="newer"):
        await Client("x", tmp_path / "c.db", where).__aenter__()
    async with Client("x", tmp_path / "a.db", where, user="alice") as alice:
        assert alice.device_id == 7


async def test_nothing_is_acknowledged_before_it_is_durable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk stands still: no UP leaves, no push is acknowledged, nothing is shown; then all of it."""
    gate = threading.Event()
    gate.set()
    apply = Store.apply

    def slow(self: Store, writes: Any) -> None:
        assert self.in_memory or gate.wait(WAIT_S)
        apply(self, writes)

    async with gateways() as servers:
        platform = servers[0].platform
        seen: list[pb.MsgCmd] = []
        frame = platform.frame

        def spy(conn_id: int, payload: bytes) -> None:
            if conn_id in platform.live("bob"):
                seen.append(pb.MsgCmd.FromString(payload))
            frame(conn_id, payload)

        monkeypatch.setattr(platform, "frame", spy)
        async with client("alice", ":memory:", servers) as alice, client("bob", tmp_path / "b.db", servers) as bob:
            reader = Reader(bob)
            await online(alice, bob)
            await (await alice.send("before", to="bob")).settled()
            await reader.has("before")
            await until(lambda: acks(seen) == [1])
            monkeypatch.setattr(Store, "apply", slow)
            gate.clear()
            await (await alice.send("held", to="bob")).settled()
            sending = asyncio.create_task(bob.send("mine", to="alice"))
            await (await alice.send("held too", to="bob")).settled()
            assert not sending.done()
            assert reader.texts == ["before"]
            assert acks(seen) == [1]
            assert pb.UP not in [cmd.Type for cmd in seen]
            known = bob.conversations()[0].conversation_id
            paging = asyncio.create_task(bob.history(known))
            await asyncio.sleep(0.05)  # it would have read the store by now
            assert not paging.done(), "history leaves out what is known and on its way to the disk"
            gate.set()
            assert [m.text for m in await paging] == ["before", "held", "held too"]
            await (await sending).settled()
            await reader.has("before", "held", "held too", "mine")
            await until(lambda: acks(seen)[-1] >= 4)
            await reader.stop()


def acks(seen: Sequence[pb.MsgCmd]) -> list[int]:
    found = [pb.ACKMsg.FromString(cmd.Payload) for cmd in seen if cmd.Type == pb.ACK]
    return [ack.push_no for ack in found if ack.Type == pb.PUSH]


async def test_history_does_not_wait_for_ever_for_a_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "HISTORY_S", 0.05)
    gate = threading.Event()
    apply = Store.apply

    def stuck(self: Store, writes: Any) -> None:
        assert self.in_memory or gate.wait(WAIT_S)
        apply(self, writes)

    async with (
        gateways() as servers,
        client("alice", ":memory:", servers) as alice,
        client("bob", tmp_path / "b.db", servers) as bob,
    ):
        reader = Reader(bob)
        await online(alice, bob)
        await (await alice.send("stored", to="bob")).settled()
        await reader.has("stored")
        monkeypatch.setattr(Store, "apply", stuck)
        await (await alice.send("held", to="bob")).settled()
        known = bob.conversations()[0].conversation_id
        await until(lambda: bob.conversations()[0].newest_seq == 2)
        assert [m.text for m in await bob.history(known)] == ["stored"]
        gate.set()
        await reader.has("stored", "held")
        assert [m.text for m in await bob.history(known)] == ["stored", "held"]
        await reader.stop()


async def test_a_full_disk_is_waited_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer_module, "REPEAT_S", 0.02)
    apply, failures = Store.apply, [3]

    def full(self: Store, writes: Any) -> None:
        if not self.in_memory and failures[0]:
            failures[0] -= 1
            raise sqlite3.OperationalError("database or disk is full")
        apply(self, writes)

    async with (
        gateways() as servers,
        client("alice", ":memory:", servers) as alice,
        client("bob", tmp_path / "b.db", servers) as bob,
    ):
        reader = Reader(bob)
        await online(alice, bob)
        monkeypatch.setattr(Store, "apply", full)
        await (await bob.send("kept", to="alice")).settled()
        await reader.has("kept")
        assert failures == [0]
        await reader.stop()


async def test_fifty_clients_share_a_few_threads(tmp_path: Path) -> None:
    async with gateways() as servers:
        people = [client(f"u{n}", tmp_path / f"{n}.db", servers, "ws" if n % 2 else "tcp") for n in range(50)]
        for person in people:
            await person.__aenter__()
        try:
            await online(*people)
            readers = [Reader(person) for person in people]
            for _ in range(4):
                tickets = [await p.send("x", to=f"u{n ^ 1}") for n, p in enumerate(people)]
                for ticket in tickets:
                    await asyncio.wait_for(ticket.settled(), WAIT_S)
            await until(lambda: all(len(r.shown) == 8 for r in readers))
            names = [t.name for t in threading.enumerate() if t.name.startswith("plato-store")]
            assert len(names) <= writer_module.THREADS
            for reader in readers:
                await reader.stop()
        finally:
            for person in people:
                await person.__aexit__(None, None, None)


def test_m27_frames_in_any_pieces_are_the_same() -> None:
    """One frame split at every byte; ten frames in one packet; in order."""
    payloads = [bytes([n]) * (n + 1) for n in range(10)]
    run = b"".join(map(pack, payloads))
    pieces = [[run], [run[n : n + 1] for n in range(len(run))]]
    pieces += [[run[:at], run[at:]] for at in range(len(run))]
    for parts in pieces:
        got: list[bytes] = []
        link = TcpLink(got.extend, lambda: None)
        for part in parts:
            link.data_received(part)
        assert got == payloads


async def test_a_frame_that_cannot_be_read_ends_the_link_only(tmp_path: Path) -> None:
    async with gateways() as servers, client("alice", tmp_path / "a.db", servers) as alice:
        await online(alice)
        (conn_id,) = servers[0].platform.live("alice")
        servers[0].platform.out.append((conn_id, b"\xff\xff\xff"))
        servers[0].flush()
        await until(lambda: servers[0].platform.live("alice") not in ([], [conn_id]))
        await online(alice)
        assert servers[0].platform.logins == 1


# ── the list of gateways ─────────────────────────────────────────────────────────────────────────────────────


@asynccontextmanager
async def ipconfig(answer: Callable[[web.Request], web.Response]) -> AsyncIterator[str]:
    async def handle(request: web.Request) -> web.Response:
        return answer(request)

    application = web.Application()
    application.router.add_get("/ip/list", handle)
    runner = web.AppRunner(application, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


def listing(*servers: PlatformServer) -> web.Response:
    data = []
    for server in servers:
        tcp, ws = (int(a.split(":")[2].split("/")[0]) for a in (server.address, server.ws_address))
        data.append({"ip": "127.0.0.1", "port": tcp, "ws_port": ws, "name": "edge"})
    return web.json_response({"message": "ok", "code": 0, "data": data})


@pytest.mark.parametrize("transport", ["tcp", "ws"])
async def test_gateways_come_from_ipconfig(tmp_path: Path, transport: Transport) -> None:
    tokens: list[str] = []

    async def provider() -> str:
        return "alice" if tokens else "stale"

    async with gateways(2) as (one, two):

        def answer(request: web.Request) -> web.Response:
            tokens.append(request.headers["Authorization"])
            if tokens[-1] == "Bearer stale":
                return web.json_response({"message": "token", "code": 305, "data": []}, status=401)
            return listing(one)

        def alice(url: str) -> Client:
            given = [two.address]
            return Client(provider, tmp_path / "a.db", given, ipconfig_url=url, transport=transport, user="alice")

        listed = one.ws_address if transport == "ws" else one.address
        async with ipconfig(answer) as url, alice(url) as first:
            await online(first)
            assert first.state.gateway == listed
            assert tokens == ["Bearer stale", "Bearer alice"]
        async with alice(url) as again:  # ipconfig is gone: the last known list serves, before the given one
            await online(again)
            assert again.state.gateway == listed
        one.refusing = True  # and if that one is gone too, the given ones do
        async with alice(url) as last:
            await online(last)
            assert last.state.gateway == two.address


@pytest.mark.parametrize(
    "answer",
    [
        lambda _: web.Response(status=500),
        lambda _: web.Response(text="no json"),
        lambda _: web.json_response([1]),
        lambda _: web.json_response({"data": [1, {"ip": 5}, {"ip": "127.0.0.1", "port": "x"}]}),
        lambda _: web.Response(text="[" * 100_000),
    ],
)
async def test_a_broken_list_is_no_obstacle(answer: Callable[[web.Request], web.Response]) -> None:
    async with (
        gateways() as servers,
        ipconfig(answer) as url,
        Client("alice", ":memory:", [servers[0].address], ipconfig_url=url, user="alice") as alice,
    ):
        await online(alice)


def test_addresses_of_a_list() -> None:
    data = [{"ip": "10.0.0.1", "port": 8900, "ws_port": 8901}, {"ip": "::1", "port": 1, "ws_port": 2}, {"ip": "x"}]
    assert addresses({"data": data}, "tcp") == ["tcp://10.0.0.1:8900", "tcp://[::1]:1"]
    assert addresses({"data": data}, "ws") == ["ws://10.0.0.1:8901/ws", "ws://[::1]:2/ws"]


def test_the_subject_of_a_token() -> None:
    def token(claims: object) -> str:
        return "h." + base64.urlsafe_b64encode(json.dumps(claims).encode()).decode().rstrip("=") + ".s"

    assert subject(token({"sub": "ålice"})) == "ålice"
    for bad in (
        "opaque",
        "a.b",
        "a.!!!.c",
        "a.YQ.c",
        token([1]),
        token({}),
        token({"sub": 1}),
        token({"sub": "x" * 65}),
    ):
        assert subject(bad) is None
