"""The chat terminal's groups, commands, ticks and counts, on a platform in memory."""

from __future__ import annotations

import asyncio
import io
import sys
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from plato.cli.chat import peer_fault, run_chat
from plato.cli.chat_commands import Commands
from plato.cli.chat_plain import PlainChat, format_line
from plato.cli.chat_screen import ChatScreen, Draft
from plato.cli.transcript import conversation_words, in_order, line_of, operation_words, where_words
from plato.client import Attachment, Client, Conversation, Message, MsgType, Phase, Quote, Rich, Role
from plato.client.content import Operation
from plato.core.conversations import dialogue_id
from plato.fakes.platform import Platform
from plato.fakes.platform_server import PlatformServer
from plato.wire.v1 import client_pb2 as pb
from plato.wire.v1 import content_pb2
from textual.widgets import OptionList, Static

PAIR = dialogue_id("alice", "bob")
TOLD = pb.ACKMsg(heartbeat_ms=400, repeat_min_ms=80, repeat_max_ms=400, reconnect_delay_ms=20)


async def until(condition: Callable[[], object], what: str = "") -> None:
    deadline = time.monotonic() + 40
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(what)
        await asyncio.sleep(0.01)


def message(body: bytes, msg_type: int = 0, **more: Any) -> Message:
    return Message("c", 9, 8, 9, "alice", msg_type, body, bytes(16), 0, False, **more)


def operation(kind: MsgType, **fields: Any) -> Message:
    return message(content_pb2.Operation(**fields).SerializeToString(), kind)


def test_operations_are_told_in_words() -> None:
    for found, words in (
        (operation(MsgType.GROUP_CREATE, title="tea", users=["alice", "bob"]), "alice made the group 'tea' with bob"),
        (operation(MsgType.GROUP_ADD, users=["bob"]), "alice added bob"),
        (operation(MsgType.GROUP_ADD, users=[f"u{n}" for n in range(12)]),
         "alice added u0, u1, u2, u3, u4, u5, u6, u7, u8, u9 and 2 more"),
        (operation(MsgType.GROUP_REMOVE, users=["bob"], owner="carol"), "alice removed bob; carol leads the group now"),
        (operation(MsgType.GROUP_LEAVE, users=["alice"]), "alice left"),
        (operation(MsgType.GROUP_RENAME, title="x\x1b[2J"), "alice named the group 'x\ufffd[2J'"),
        (operation(MsgType.GROUP_ROLE, users=["bob"], role=int(Role.ADMINISTRATOR)), "alice made bob an administrator"),
        (operation(MsgType.RECALL, msg_id=3, seq=7), "alice recalled [7]"),
        (message(b"", 1_900), "alice changed something that this program is too old to show"),
        (message(b"", MsgType.EDIT, recalled=True), "alice edited a message that was recalled"),
    ):  # fmt: skip
        assert operation_words(found) == words
        assert line_of(found).event
        assert format_line(found).startswith(f"[9] {words}")
    edit = message(Operation(MsgType.EDIT, msg_id=3, body=b"new\nwords").encode(), MsgType.EDIT)
    assert format_line(edit) == "[9] alice edited a message: new\\nwords"


def test_messages_are_told_with_what_they_carry() -> None:
    reply = Quote(3, 2, "bob", "tea?")
    rich = Rich("yes", reply, (Attachment("a", "cat.png", "image/png", 2_500),))
    found = message(rich.encode(), MsgType.RICH)
    assert format_line(found, reply) == "[9] alice: (to [2] bob: tea?) yes [cat.png, 2 kB]"
    assert (line_of(found, reply).quote, line_of(found).text) == ("bob: tea?", "yes [cat.png, 2 kB]")
    assert line_of(found, replace(reply, text="")).quote == "bob: (recalled)"
    assert line_of(message(b"", recalled=True, changed_seq=10)).text == "(recalled)"
    assert line_of(message(b"new", changed_seq=10)).text == "new (edited)"


def test_conversations_stand_in_order() -> None:
    tea = Conversation("g:t", "", 9, 9, 0, "tea", 3, unread=2)
    some = [Conversation("d:b", "bob", 1, 1, 0), Conversation("d:c", "carol", 1, 1, 0, pinned_at_ms=5), tea]
    assert [conversation_words(c) for c in in_order(some)] == ["carol (pinned)", "tea (2 unread)", "bob"]


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


async def test_a_plain_chat_leads_a_group() -> None:
    async with (
        PlatformServer(Platform(told=TOLD)) as server,
        Client("alice", ":memory:", [server.address], user="alice") as alice,
        Client("bob", ":memory:", [server.address], user="bob") as bob,
    ):
        typed, out, err = Typed(), io.StringIO(), io.StringIO()
        chat = asyncio.create_task(PlainChat(alice, PAIR, "bob", out, err).run(typed.lines(), asyncio.Event()))
        typed.type("/new tea bob carol", "hello", "//help is no command", "/etc/passwd is none either")
        await until(lambda: "[4] alice: /etc/passwd is none either\n" in out.getvalue(), out.getvalue())
        assert out.getvalue().splitlines()[:3] == [
            "[1] alice made the group 'tea' with bob, carol",
            "[2] alice: hello",
            "[3] alice: /help is no command",
        ]
        group = next(c.conversation_id for c in alice.conversations() if c.title == "tea")
        await until(lambda: bob.message(group, 4))
        await (await bob.send("tea?", conversation_id=group)).settled()
        await until(lambda: "[5] bob: tea?\n" in out.getvalue())
        typed.type("/reply yes", "/edit #2 hello you", "/recall #3", "/rename milk", "/recall #77", "/role bob boss")
        await until(lambda: "[9] alice named the group 'milk'\n" in out.getvalue(), out.getvalue())
        assert out.getvalue().splitlines()[5:8] == [
            "[6] alice: (to [5] bob: tea?) yes",
            "[7] alice edited [2]: hello you",
            "[8] alice recalled [3]",
        ]
        await until(lambda: "/role: " in err.getvalue(), err.getvalue())
        assert "# /recall: there is no message #77 here\n" in err.getvalue()
        await until(lambda: server.platform.user("alice").of(group).read_seq == 5, "what was printed is read")
        typed.type(
            "/members", "/role bob administrator", "/remove carol", "/add dora", "/list", "/recall #5", "/open bob"
        )
        await until(lambda: "/open: no conversation is called 'bob'" in err.getvalue(), err.getvalue())
        await (await bob.send("psst", to="alice")).settled()
        await until(lambda: "# bob wrote to you: psst\n" in err.getvalue())
        await until(lambda: "alice recalled [5]" in out.getvalue(), out.getvalue())  # while its group is open
        typed.type("/open bob", "hi", None)
        assert await asyncio.wait_for(chat, 40) == 0, err.getvalue()
        assert out.getvalue().splitlines()[-2:] == ["[1] bob: psst", "[2] alice: hi"]
        assert "# alice (owner), bob, carol\n" in err.getvalue()
        assert "# milk\n" in err.getvalue()
        for words in (
            "alice made bob an administrator",
            "alice removed carol",
            "alice added dora",
            "alice recalled [5]",
        ):
            assert words in out.getvalue()


def content(app: ChatScreen, name: str) -> str:
    return str(app.query_one(name, Static).render())


async def test_the_screen_shows_who_reads_who_writes_and_what_became_of_messages() -> None:
    async with (
        PlatformServer(Platform(told=TOLD)) as server,
        Client("alice", ":memory:", [server.address], user="alice") as alice,
        Client("bob", ":memory:", [server.address], user="bob") as bob,
        Client("carol", ":memory:", [server.address], user="carol") as carol,
    ):
        first = await (await bob.send("tea?", to="alice")).settled()
        app = ChatScreen(alice, PAIR, "alice", "bob")
        async with app.run_test(size=(90, 24)) as pilot:

            async def enter(words: str) -> None:
                app.query_one(Draft).load_text(words)
                await pilot.press("enter")

            await until(lambda: "bob: tea?" in content(app, "#lines"))
            await until(lambda: (c := bob.conversation(PAIR)) and c.peer_read_seq == 1, "what is looked at is read")
            bob.typing(PAIR)
            await until(lambda: "bob writes …" in content(app, "#head"))
            await enter("yes")
            await until(lambda: "alice: yes  ✓✓" in content(app, "#lines"))
            bob.read(PAIR)
            await until(lambda: "alice: yes  ✓✓ read by bob" in content(app, "#lines"), content(app, "#lines"))
            await pilot.press("/")
            await until(lambda: "#1 bob: tea?" in content(app, "#lines"), "numbers while a command is typed")
            await enter("/reply milk")
            await until(lambda: "alice > bob: tea?" in content(app, "#lines"), content(app, "#lines"))
            await until(lambda: "#1" not in content(app, "#lines"))
            await (await bob.edit(first.msg_id, "coffee?")).settled()
            await until(lambda: "bob: coffee? (edited)" in content(app, "#lines"))
            await (await bob.recall(first.msg_id)).settled()
            await until(lambda: "bob: (recalled)" in content(app, "#lines"))
            await until(lambda: "alice > bob: (recalled)" in content(app, "#lines"), "what was quoted goes too")
            await enter("/recall #1")
            await until(lambda: "/recall: " in content(app, "#note"), "refused, in words")
            await enter("/quitt now")
            await until(lambda: "/quitt is no command and was not sent" in content(app, "#note"), content(app, "#note"))
            await until(lambda: app.query_one(Draft).text == "/quitt now", "it comes back, to be mended")
            ticket = await carol.create_group("tea", ["alice"])
            await (await carol.send("all here?", conversation_id=ticket.conversation_id)).settled()
            await until(lambda: "carol wrote in 'tea': all here?" in content(app, "#note"))
            await until(lambda: "1 unread elsewhere" in content(app, "#head"), content(app, "#head"))
            await pilot.press("ctrl+g")
            await until(lambda: len(app.screen_stack) == 2)
            await pilot.press("escape")
            await until(lambda: len(app.screen_stack) == 1)
            await pilot.press("ctrl+g")
            await until(lambda: len(app.screen_stack) == 2 and app.screen.query_one(OptionList).option_count == 2)
            await pilot.press("home", "enter")
            await until(lambda: "alice → tea (2)" in content(app, "#head"), content(app, "#head"))
            await until(lambda: "· carol made the group 'tea' with alice" in content(app, "#lines"))
            await until(lambda: "unread" not in content(app, "#head"))
            await enter("/rename milk")
            await until(lambda: "your role" in content(app, "#note"), content(app, "#note"))
            await enter("/leave")
            await until(lambda: "· alice left" in content(app, "#lines"))
            assert app.query_one(Draft).text == ""
            await pilot.press("ctrl+q")
        assert app.return_value == 0


async def test_a_chat_opens_with_a_group_by_its_title(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async with (
        PlatformServer(Platform(told=TOLD)) as server,
        Client("bob", ":memory:", [server.address], user="bob") as bob,
    ):
        await (await bob.create_group("tea", ["alice"])).settled()
        monkeypatch.setattr("plato.cli.chat.GROUP_S", 0.3)
        monkeypatch.setattr("plato.cli.chat.stdin_lines", lambda: Typed().lines())

        async def token() -> str:
            return "alice"

        def chat(name: str) -> asyncio.Task[int]:
            return asyncio.create_task(
                run_chat(
                    user="alice", to=None, conversation=None, group=name, token=token, store_path=tmp_path / "a.db",
                    ipconfig_url=None, gateways=[server.address], transport="tcp", plain=True,
                )
            )  # fmt: skip

        assert await chat("milk") == 2
        assert "alice is in no group 'milk'" in capsys.readouterr().err
        monkeypatch.setattr("plato.cli.chat.GROUP_S", 40)
        shown = io.StringIO()
        monkeypatch.setattr(sys, "stdout", shown)
        running = chat("tea")
        await until(lambda: "[1] bob made the group 'tea' with alice\n" in shown.getvalue(), shown.getvalue())
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


async def test_only_known_words_are_commands() -> None:
    async with Client("alice", ":memory:", ["x:1"], user="alice") as alice:
        commands = Commands(alice, "alice")
        assert commands.split("/help") == ("help", "")
        assert commands.split("/new tea bob") == ("new", "tea bob")
        for line in ("/usr/bin", "// no", "/", "help", " /help"):
            assert commands.split(line) == ("", line)
        assert commands.split("//help me") == ("", "/help me")
        assert commands.split("//quitt") == ("", "/quitt")
        assert commands.split("/quitt") == ("quitt", "")
        assert "//quitt says it as text" in commands.unknown("quitt")
        assert not commands.unknown("help")
        assert alice.state.phase is not Phase.STOPPED


async def test_a_mistyped_command_is_not_sent() -> None:
    async def lines() -> AsyncIterator[str]:
        for line in ("/opn bob", "//opn is text", "/etc/hosts too"):
            yield line

    async with (
        PlatformServer(Platform(told=TOLD)) as server,
        Client("alice", ":memory:", [server.address], user="alice") as alice,
    ):
        out, err = io.StringIO(), io.StringIO()
        code = await asyncio.wait_for(PlainChat(alice, PAIR, "bob", out, err).run(lines(), asyncio.Event()), 40)
        assert code == 1, "not all that was typed was sent"
        assert out.getvalue() == "[1] alice: /opn is text\n[2] alice: /etc/hosts too\n"
        assert "# /opn is no command and was not sent; /help lists them, //opn says it as text\n" in err.getvalue()


async def test_help_is_whole_on_a_screen_of_80_columns() -> None:
    async with (
        PlatformServer(Platform(told=TOLD)) as server,
        Client("alice", ":memory:", [server.address], user="alice") as alice,
    ):
        app = ChatScreen(alice, PAIR, "alice", "bob")
        async with app.run_test(size=(80, 24)) as pilot:
            await pilot.press(*"/help", "enter")
            note = app.query_one("#note", Static)
            await until(lambda: "/unmute" in str(note.content))
            width = note.content_size.width
            await until(lambda: note.content_size.height * width > len(str(note.content)), "cut off")
            assert width < 80


def test_where_somebody_wrote_is_told_by_name() -> None:
    group = Conversation("g:abc", "", 1, 1, 0, title="tea", members=3)
    assert where_words("g:abc", group) == "in 'tea'"
    assert where_words("d:f_LZ", None) == "to you"
    assert where_words("g:abc", None) == "in a group without a title"
    assert where_words("room", None) == "in room"


def test_nobody_chats_with_a_name_that_is_no_person() -> None:
    assert "kept for what administrators do" in peer_fault("admin", None)
    assert peer_fault("guest:1", None) == ""
