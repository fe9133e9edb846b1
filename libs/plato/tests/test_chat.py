"""The chat terminal on a platform in memory: in lines, as scripts use it, and on its full screen."""

from __future__ import annotations

import asyncio
import contextlib
import io
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest
from plato.cli import chat_plain
from plato.cli.chat import run_chat
from plato.cli.chat_plain import PlainChat
from plato.cli.chat_screen import ChatScreen
from plato.cli.transcript import Transcript, line_of, one_line, printable
from plato.client import Client, Delivery, Message, Phase
from plato.core.codes import Code
from plato.core.conversations import dialogue_id
from plato.fakes.platform import REFUSED_BODY, Platform
from plato.fakes.platform_server import PlatformServer
from plato.wire.v1 import client_pb2 as pb
from textual.containers import VerticalScroll
from textual.widgets import Input, Static

ALICE_BOB = dialogue_id("alice", "bob")
TOLD = pb.ACKMsg(heartbeat_ms=400, repeat_min_ms=80, repeat_max_ms=400, reconnect_delay_ms=20)


async def until(condition: Callable[[], object], what: str = "") -> None:
    deadline = time.monotonic() + 15
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(what)
        await asyncio.sleep(0.01)


def message(seq: int, text: str, delivery: Delivery = Delivery.STORED, mine: bool = True, code: int = 0) -> Message:
    key = seq.to_bytes(16, "big")
    return Message("c", seq, seq - 1, seq, "alice", 0, text.encode(), key, 0, mine, delivery, code)


def test_nothing_that_a_message_holds_can_drive_the_terminal() -> None:
    evil = "a\x1b[2Jb\x07c\x9bd\re\nf\tg"
    assert printable(evil) == "a�[2Jb�c�d�e\nf\tg"
    assert one_line(evil + "\\") == "a�[2Jb�c�d\\re\\nf\\tg\\\\"
    assert "\n" not in one_line(evil)


def test_a_transcript_keeps_order_and_shows_each_message_once() -> None:
    shown = Transcript()
    assert shown.add([message(2, "two"), message(1, "one", mine=False)])
    assert not shown.add([message(2, "two")])
    assert shown.waiting([message(2, "two", Delivery.ACCEPTED), message(3, "three", Delivery.QUEUED)], [])
    refused = message(9, "bad", Delivery.REFUSED, code=Code.NOT_STORABLE)
    assert shown.waiting([message(3, "three", Delivery.ACCEPTED)], [refused])
    assert not shown.waiting([message(3, "three", Delivery.ACCEPTED)], [refused])
    assert [(line.text, line.tick) for line in shown.lines()] == [
        ("one", ""),
        ("two", "✓✓"),
        ("bad", "✗ the message could not be stored as it is"),
        ("three", "✓"),
    ]
    assert shown.first_seq == 1
    assert line_of(message(1, "x")).who == "alice"


class Typed:
    """Standard input that a test types on."""

    def __init__(self) -> None:
        self._lines: asyncio.Queue[str | None] = asyncio.Queue()

    def type(self, *lines: str | None) -> None:
        for line in lines:
            self._lines.put_nowait(line)

    async def lines(self) -> AsyncIterator[str]:
        while (line := await self._lines.get()) is not None:
            yield line


async def test_a_plain_chat_prints_and_sends_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    async with PlatformServer(Platform(told=TOLD)) as server:
        here = [server.address]
        async with (
            Client("alice", ":memory:", here, user="alice") as alice,
            Client("bob", ":memory:", here, user="bob") as bob,
            Client("carol", ":memory:", here, user="carol") as carol,
        ):
            typed, out, err = Typed(), io.StringIO(), io.StringIO()
            chat = asyncio.create_task(PlainChat(alice, ALICE_BOB, "bob", out, err).run(typed.lines(), asyncio.Event()))
            typed.type("hello")
            await until(lambda: out.getvalue() == "[1] alice: hello\n", out.getvalue())
            await (await bob.send("two\nlines \x1b[31m", to="alice")).settled()
            await until(lambda: "[2] bob: two\\nlines �[31m\n" in out.getvalue())
            await (await carol.send("psst", to="alice")).settled()
            await until(lambda: "carol wrote in " in err.getvalue())
            typed.type(REFUSED_BODY.decode(), "x" * 70_000, "bye", None)
            assert await asyncio.wait_for(chat, 15) == 0
            assert out.getvalue().endswith("[3] alice: bye\n")
            assert "psst" not in out.getvalue()
            assert "refused: the message could not be stored" in err.getvalue()
            assert "not sent: the body is larger" in err.getvalue()
            assert f"# online via {server.address}\n" in err.getvalue()
            server.refusing = True
            server.cut()
            monkeypatch.setattr(chat_plain, "LINGER_S", 0.05)
            typed.type("left", None)
            assert await PlainChat(alice, ALICE_BOB, "bob", out, err).run(typed.lines(), asyncio.Event()) == 1
            assert "1 messages are not settled yet" in err.getvalue()


async def test_a_plain_chat_ends_with_a_final_code() -> None:
    async with (
        PlatformServer(Platform(told=TOLD)) as server,
        Client("alice", ":memory:", [server.address], user="alice") as alice,
    ):
        out, err = io.StringIO(), io.StringIO()
        chat = asyncio.create_task(PlainChat(alice, "room", None, out, err).run(Typed().lines(), asyncio.Event()))
        await until(lambda: alice.state.phase is Phase.ONLINE)
        server.platform.kick("alice")
        server.flush()
        assert await asyncio.wait_for(chat, 15) == 1
        assert "stopped: the session was ended by an administrator" in err.getvalue()


CHAT = """
import asyncio, sys
from pathlib import Path
from plato.cli.chat import run_chat
async def token(): return {user!r}
sys.exit(asyncio.run(run_chat(user={user!r}, to={to!r}, conversation=None, token=token, store_path=Path({store!r}),
    ipconfig_url=None, gateways=[{gateway!r}], transport="tcp", plain=True)))
"""


@contextlib.contextmanager
def process(user: str, to: str, store: Path, gateway: str) -> Iterator[subprocess.Popen[bytes]]:
    code = CHAT.format(user=user, to=to, store=str(store), gateway=gateway)
    child = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    try:
        yield child
    finally:
        child.kill()
        child.communicate()


async def test_plain_chats_in_processes_of_their_own(tmp_path: Path) -> None:
    async with (
        PlatformServer(Platform(told=TOLD)) as server,
        Client("bob", ":memory:", [server.address], user="bob") as bob,
    ):
        with process("alice", "bob", tmp_path / "a.db", server.address) as first:
            out, err = await asyncio.to_thread(first.communicate, b"one\ntwo without an end", 30)
            assert (first.returncode, out) == (0, b"[1] alice: one\n[2] alice: two without an end\n"), err
        with process("alice", "bob", tmp_path / "a.db", server.address) as second:
            await until(lambda: server.platform.live("alice"))
            await (await bob.send("hi", to="alice")).settled()
            assert second.stdout is not None
            assert await asyncio.to_thread(second.stdout.readline) == b"[3] bob: hi\n"
            with process("alice", "bob", tmp_path / "a.db", server.address) as third:
                _, err = await asyncio.to_thread(third.communicate, b"", 30)
                assert third.returncode == 2
                assert b"another process has this store open" in err
            os.kill(second.pid, signal.SIGINT)
            assert await asyncio.to_thread(second.wait, 30) == 0
            assert second.stderr is not None
            assert b"Traceback" not in second.stderr.read()


async def test_a_chat_needs_one_peer() -> None:
    async def token() -> str:
        return "x"

    with pytest.raises(ValueError, match="either"):
        await run_chat(
            user="alice", to=None, conversation=None, token=token, store_path=Path("x"), ipconfig_url=None,
            gateways=["x"], transport="tcp", plain=True,
        )  # fmt: skip


def content(app: ChatScreen, name: str) -> str:
    return str(app.query_one(name, Static).render())


async def test_the_screen_shows_history_ticks_and_the_connection() -> None:
    async with PlatformServer(Platform(told=TOLD)) as server:
        here = [server.address]
        async with (
            Client("alice", ":memory:", here, user="alice") as alice,
            Client("bob", ":memory:", here, user="bob") as bob,
        ):
            for n in range(120):
                sent = await bob.send(f"line {n}", to="alice")
            await sent.settled()
            await until(lambda: any(c.cursor == 120 for c in alice.conversations()))
            app = ChatScreen(alice, ALICE_BOB, "alice", "bob")
            async with app.run_test(size=(80, 24)) as pilot:
                await until(lambda: "line 119" in content(app, "#lines"))
                assert "alice → bob" in content(app, "#head")
                assert "online" in content(app, "#head")
                talk = app.query_one("#talk", VerticalScroll)
                await until(lambda: talk.max_scroll_y > 0 and talk.scroll_y == talk.max_scroll_y)
                for _ in range(12):
                    await pilot.press("pageup")
                await until(lambda: "line 0\n" in content(app, "#lines"))
                for _ in range(20):
                    await pilot.press("pagedown")
                server.platform.msg_away = True
                await pilot.press(*"hello", "enter")
                await until(lambda: "alice: hello  ✓\n" in content(app, "#lines"), content(app, "#lines")[-99:])
                server.platform.run_msg()
                server.platform.msg_away = False
                server.flush()
                await until(lambda: "alice: hello  ✓✓\n" in content(app, "#lines"))
                assert app.query_one(Input).value == ""
                await until(lambda: talk.scroll_y == talk.max_scroll_y)
                server.refusing = True
                server.cut()
                await pilot.press(*"later", "enter")
                await until(lambda: "alice: later  …\n" in content(app, "#lines"))
                await until(lambda: "online" not in content(app, "#head"))
                server.refusing = False
                await until(lambda: "alice: later  ✓✓\n" in content(app, "#lines"))
                server.platform.kick("alice", Code.REPLACED)
                server.flush()
                await until(lambda: "logged in elsewhere" in content(app, "#head"))
                assert app.query_one(Input).disabled
                await pilot.press("ctrl+q")
            assert app.return_value == 1
