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
from dataclasses import replace
from datetime import date, datetime
from pathlib import Path
from typing import Any

import pytest
from plato.cli import app as cli
from plato.cli import chat_plain
from plato.cli.chat import run_chat
from plato.cli.chat_plain import PlainChat
from plato.cli.chat_screen import ChatScreen, Draft, Talk
from plato.cli.transcript import Line, Transcript, line_of, new_days, one_line, printable, state_words
from plato.client import Client, Delivery, Message, OutboxFull, Phase, Receipt, Sent, State
from plato.core.codes import Code
from plato.core.conversations import dialogue_id
from plato.fakes.platform import REFUSED_BODY, Platform
from plato.fakes.platform_server import PlatformServer
from plato.wire.v1 import client_pb2 as pb
from textual.events import Key, MouseScrollUp, Paste
from textual.widgets import Static

ALICE_BOB = dialogue_id("alice", "bob")
TOLD = pb.ACKMsg(heartbeat_ms=400, repeat_min_ms=80, repeat_max_ms=400, reconnect_delay_ms=20)


async def until(condition: Callable[[], object], what: str = "") -> None:
    deadline = time.monotonic() + 40
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
            await until(lambda: "# carol wrote to you: psst\n" in err.getvalue())
            typed.type(REFUSED_BODY.decode(), "x" * 70_000, "bye", None)
            assert await asyncio.wait_for(chat, 40) == 1, "two of them will never be sent"
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
        assert await asyncio.wait_for(chat, 40) == 1
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
                assert b"--device NAME" in err
            os.kill(second.pid, signal.SIGINT)
            assert await asyncio.to_thread(second.wait, 30) == 0
            assert second.stderr is not None
            assert b"Traceback" not in second.stderr.read()


async def test_a_chat_needs_one_peer() -> None:
    async def token() -> str:
        return "x"

    for plain in (True, False):
        for to, conversation, words in (
            (None, None, "either --to USER or"),
            ("bob", "room", "either --to USER or"),
            ("ü" * 33, None, "1 to 64 bytes"),
            ("b\x1bob", None, r"'b\\x1bob'"),
            ("", None, "1 to 64 bytes"),
            (None, "ü" * 33, "--conversation"),
            (None, "a\nb", "--conversation"),
        ):
            with pytest.raises(ValueError, match=words):
                await run_chat(
                    user="alice", to=to, conversation=conversation, token=token, store_path=Path("x"),
                    ipconfig_url=None, gateways=["x:1"], transport="tcp", plain=plain,
                )  # fmt: skip


def test_a_bad_peer_is_one_line(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for arguments in (["--to", "ü" * 33], ["--to", "a\x07b"], ["--to", ""], ["-c", "ü" * 33], ["-c", "x", "--plain"]):
        monkeypatch.setattr(sys, "argv", ["plato", "chat", "alice", *arguments, *(["--to", "b"] * ("x" in arguments))])
        assert cli.main() == 2
        out, err = capsys.readouterr()
        assert not out
        assert err.startswith("plato: ")
        assert err.count("\n") == 1
        assert "\x07" not in err


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
                await until(lambda: "online" in content(app, "#head"))
                talk = app.query_one(Talk)
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
                assert app.query_one(Draft).text == ""
                await until(lambda: talk.scroll_y == talk.max_scroll_y)
                server.refusing = True
                server.cut()
                await pilot.press(*"later", "enter")
                await until(lambda: "alice: later  …\n" in content(app, "#lines"))
                await until(lambda: "offline, next try in 1 s" in content(app, "#head"))
                server.refusing = False
                await until(lambda: "alice: later  ✓✓\n" in content(app, "#lines"))
                server.platform.kick("alice", Code.REPLACED)
                server.flush()
                await until(lambda: "logged in elsewhere" in content(app, "#head"))
                assert "--device NAME" in content(app, "#head")
                assert app.query_one(Draft).disabled
                await pilot.press("ctrl+q")
            assert app.return_value == 1


@contextlib.asynccontextmanager
async def talking(
    size: tuple[int, int], lines: int = 0
) -> AsyncIterator[tuple[PlatformServer, Client, ChatScreen, Any]]:
    """Alice at her screen, bob somewhere else; `lines` were said before."""
    async with PlatformServer(Platform(told=TOLD)) as server:
        here = [server.address]
        async with (
            Client("alice", ":memory:", here, user="alice") as alice,
            Client("bob", ":memory:", here, user="bob") as bob,
        ):
            for n in range(lines):
                await (await bob.send(f"before {n}", to="alice")).settled()
            app = ChatScreen(alice, ALICE_BOB, "alice", "bob")
            async with app.run_test(size=size) as pilot:
                await until(lambda: f"before {lines - 1}\n" in content(app, "#lines") if lines else True)
                await until(lambda: "online" in content(app, "#head"))
                yield server, bob, app, pilot


def said(server: PlatformServer) -> list[str]:
    found = server.platform.conversations.get(ALICE_BOB)
    return [row.Content.decode() for row in found.rows] if found else []


def at_end(app: ChatScreen) -> bool:
    talk = app.query_one(Talk)
    return talk.max_scroll_y > 0 and round(talk.scroll_y) == talk.max_scroll_y


async def test_the_screen_follows_while_both_write_until_its_user_scrolls_up() -> None:
    async with talking((80, 20)) as (server, bob, app, pilot):
        for n in range(25):
            await bob.send(f"from bob {n}", to="alice")
            await pilot.press("x", "enter")
            if n > 8 and n % 5 == 4:
                await until(lambda: at_end(app), f"after {n}")
        await until(lambda: len(said(server)) == 50 and content(app, "#lines").count("✓✓") == 25)
        await until(lambda: at_end(app))
        await pilot.press("pageup")
        place = app.query_one(Talk).scroll_y
        await (await bob.send("unseen", to="alice")).settled()
        await until(lambda: "unseen" in content(app, "#lines"))
        await until(lambda: "↓ new messages" in content(app, "#note"))
        await pilot.pause()
        assert app.query_one(Talk).scroll_y == place
        await pilot.press("pagedown", "pagedown")
        await until(lambda: at_end(app) and "↓" not in content(app, "#note"))
        await pilot._post_mouse_events([MouseScrollUp], Talk, offset=(3, 3))
        await until(lambda: not at_end(app))
        await (await bob.send("unseen, too", to="alice")).settled()
        await until(lambda: "↓ new messages" in content(app, "#note"))
        await pilot.press(*"mine", "enter")
        await until(lambda: at_end(app) and "↓" not in content(app, "#note"), "one's own message is looked at")


async def test_the_screen_follows_through_resizes() -> None:
    async with talking((100, 50), lines=60) as (_, bob, app, pilot):
        await until(lambda: at_end(app))
        for size in ((60, 15), (100, 50), (30, 12), (60, 15)):
            await pilot.resize_terminal(*size)
            await until(lambda: at_end(app), str(size))
            await (await bob.send(f"at {size}, and a long line that is wrapped " * 3, to="alice")).settled()
            await until(lambda: f"at {size}" in content(app, "#lines"))  # noqa: B023 -- it ends before the loop goes on
            await until(lambda: at_end(app), f"{size}, one more")
        await pilot.press("pageup")
        assert not at_end(app)
        await pilot.resize_terminal(60, 18)
        await pilot.pause()
        assert not at_end(app)
        assert not app.query_one(Talk).following


async def test_enter_takes_the_draft_away_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also while the disk is slow: two Enters are one message, three lines are three."""
    slow = asyncio.Event()
    send = Client.send

    async def slowly(self: Client, body: bytes | str, **more: Any) -> Sent:
        await slow.wait()
        return await send(self, body, **more)

    monkeypatch.setattr(Client, "send", slowly)
    async with talking((80, 24)) as (server, _, app, pilot):
        await pilot.press("enter", "space", "enter", *"one", "enter", "enter", *"two", "ctrl+j", *"three", "enter", "f")
        assert app.query_one(Draft).text == "f"
        slow.set()
        await until(lambda: content(app, "#lines").count("✓✓") == 3)
        assert said(server) == ["one", "two", "three"]
        slow.clear()
        await pilot.press(*"our")
        app.query_one(Draft).post_message(Key("enter", None))
        leaving = asyncio.create_task(pilot.press("ctrl+c"))  # it returns when that was done
        await until(lambda: app.query_one(Draft).text == "")
        slow.set()
        await leaving
        await until(lambda: app.return_value == 0)
        kept = [m.text for m in app._client.unsettled(ALICE_BOB)]
        assert (said(server)[3:] or kept) == ["four"], "leaving waits until it is in the outbox"


async def test_a_paste_of_many_lines_is_one_message() -> None:
    async with talking((80, 24)) as (server, _, app, pilot):
        app.query_one(Draft).post_message(Paste("one\rtwo\r\n\nfour"))
        await until(lambda: app.query_one(Draft).text == "one\ntwo\n\nfour")
        await pilot.press("!", "enter")
        await until(lambda: "✓✓" in content(app, "#lines"))
        assert said(server) == ["one\ntwo\n\nfour!"]
        indent = "\n         │ "
        assert f"alice: one{indent}two{indent}{indent}four!  ✓✓\n" in content(app, "#lines")


async def test_what_was_not_sent_comes_back_and_its_note_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    full = True
    asked = asyncio.Event()
    send = Client.send

    async def maybe(self: Client, body: bytes | str, **more: Any) -> Sent:
        await asked.wait()
        if full:
            raise OutboxFull("too many messages wait")
        return await send(self, body, **more)

    monkeypatch.setattr(Client, "send", maybe)
    async with talking((80, 24)) as (server, _, app, pilot):
        await pilot.press(*"one", "enter", *"two", "enter", *"three")
        asked.set()
        await until(lambda: "not sent: too many messages wait" in content(app, "#note"))
        assert app.query_one(Draft).text == "one\ntwo\nthree"
        full = False
        await pilot.press("!", "enter")
        await until(lambda: said(server) == ["one\ntwo\nthree!"])
        await until(lambda: "not sent" not in content(app, "#note"))


async def test_a_key_ends_the_wait_for_the_next_attempt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("plato.client.core.backoff.BACKOFF_MAX_MS", 60_000)
    async with talking((80, 24)) as (server, _, app, pilot):
        server.refusing = True
        server.cut(server.platform.live("alice"))
        await until(lambda: "offline, next try in " in content(app, "#head"))
        app._client._machine._backoff._failed = 10
        await until(lambda: (app._client.next_try_s or 0) > 15)
        first = content(app, "#head")
        await until(lambda: content(app, "#head") != first and "next try in" in content(app, "#head"), "it counts")
        server.refusing = False
        begun = time.monotonic()
        await pilot.press("enter")
        await until(lambda: "online" in content(app, "#head"))
        assert time.monotonic() - begun < 10


async def test_an_unexpected_error_is_no_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(*_: object) -> list[object]:
        raise KeyError("nobody expected this")

    async def token() -> str:
        return "alice"

    monkeypatch.setattr(Transcript, "lines", broken)
    monkeypatch.setattr(ChatScreen, "is_headless", True)
    async with PlatformServer(Platform(told=TOLD)) as server:
        with pytest.raises(KeyError, match="nobody expected"):
            await run_chat(
                user="alice", to="bob", conversation=None, token=token, store_path=Path(":memory:"), ipconfig_url=None,
                gateways=[server.address], transport="tcp", plain=False,
            )  # fmt: skip
    out, err = capsys.readouterr()
    assert "Traceback" not in out + err


def test_days_are_announced_when_they_change() -> None:
    def at(when: datetime) -> Line:
        return line_of(replace(message(1, "x"), server_at_ms=int(when.timestamp() * 1000)))

    monday, tuesday = datetime(2026, 3, 2, 23, 59), datetime(2026, 3, 3, 0, 1)
    lines = [at(monday), at(monday), at(tuesday), line_of(message(2, "queued", Delivery.QUEUED)), at(tuesday)]
    assert new_days(lines, date(2026, 3, 3)) == [monday.date(), None, tuesday.date(), None, None]
    assert new_days(lines, date(2026, 3, 2)) == [None, None, tuesday.date(), None, None]
    assert new_days([at(tuesday)], date(2026, 3, 3)) == [None]
    assert new_days([at(tuesday)], date(2027, 3, 3)) == [tuesday.date()]


async def test_the_screen_says_of_which_day_history_is() -> None:
    async with talking((80, 24)) as (server, bob, app, _):
        server.platform.msg_away = True
        await bob.send("old", to="alice")
        await until(lambda: server.platform.bus)
        server.platform.run_msg()
        server.platform.out = [
            (conn_id, payload and aged(payload, int(datetime(2026, 3, 2, 12, 0).timestamp() * 1000)))
            for conn_id, payload in server.platform.out
        ]
        server.flush()
        await until(lambda: "── Monday, 02 March 2026 ──\n12:00:00 bob: old\n" in content(app, "#lines"))


def aged(payload: bytes, server_at_ms: int) -> bytes:
    cmd = pb.MsgCmd.FromString(payload)
    if cmd.Type == pb.PUSH:
        push = pb.PushMsg.FromString(cmd.Payload)
        push.server_at_ms = server_at_ms
        cmd.Payload = push.SerializeToString()
    return cmd.SerializeToString()


def test_the_connection_is_told_in_words_for_people() -> None:
    assert state_words(State(Phase.OFFLINE, Code.HEARTBEAT_TIMEOUT), 2.1) == "offline, next try in 3 s"
    assert state_words(State(Phase.OFFLINE, Code.GATEWAY_CLOSING), None) == "offline, trying again"
    assert state_words(State(Phase.OFFLINE, Code.GATEWAY_FULL), 0.1) == "offline, next try in 1 s: the platform is full"
    assert "the token is expired" in state_words(State(Phase.OFFLINE, Code.TOKEN_EXPIRED), 1)
    assert state_words(State(Phase.LOGGING_IN, Code.GATEWAY_CLOSING), None) == "logging in"
    assert state_words(State(Phase.STOPPED), None) == "stopped"
    assert "an administrator" in state_words(State(Phase.STOPPED, Code.KICKED), None)
    assert "--device NAME" in state_words(State(Phase.STOPPED, Code.REPLACED), None)
    assert state_words(State(Phase.STOPPED, Code.TOKEN_INVALID, detail="whose?"), None) == "stopped: whose?"


async def test_a_plain_chat_ends_when_its_last_line_is_printed() -> None:
    """The outcome of the last message is told a moment after the outbox is empty; that moment is made longer here."""
    async with (
        PlatformServer(Platform(told=TOLD)) as server,
        Client("alice", ":memory:", [server.address], user="alice") as alice,
    ):
        settled = Sent.settled
        late = asyncio.Event()

        async def slowly(self: Sent) -> Receipt:
            receipt = await settled(self)
            await late.wait()
            return receipt

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Sent, "settled", slowly)
            typed, out = Typed(), io.StringIO()
            chat = asyncio.create_task(
                PlainChat(alice, ALICE_BOB, "bob", out, io.StringIO()).run(typed.lines(), asyncio.Event())
            )
            typed.type("hello", None)
            await until(lambda: said(server) == ["hello"] and not alice.unsettled(ALICE_BOB))
            done, _ = await asyncio.wait([chat], timeout=0.2)
            assert not done
            late.set()
            assert await asyncio.wait_for(chat, 40) == 0
        assert out.getvalue() == "[1] alice: hello\n"


async def test_a_plain_chat_tells_an_outage_once_and_what_nobody_expected() -> None:
    async with (
        PlatformServer(Platform(told=TOLD)) as server,
        Client("alice", ":memory:", [server.address], user="alice") as alice,
    ):
        err = io.StringIO()

        async def broken() -> AsyncIterator[str]:
            await until(lambda: "# online" in err.getvalue())
            server.refusing = True
            server.cut()
            await until(lambda: alice._machine._backoff._failed >= 4)
            server.refusing = False
            await until(lambda: err.getvalue().count("# online") == 2)
            raise KeyError("nobody expected this")
            yield ""

        with pytest.raises(KeyError):
            await PlainChat(alice, ALICE_BOB, "bob", io.StringIO(), err).run(broken(), asyncio.Event())
        words = err.getvalue().splitlines()
        assert words[-3:] == [
            f"# online via {server.address}",
            "# offline, trying again",
            f"# online via {server.address}",
        ]
