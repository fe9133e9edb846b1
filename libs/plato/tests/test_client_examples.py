"""The examples, run as their reader would run them, on a platform in memory."""

from __future__ import annotations

import asyncio
import re
import signal
import sqlite3
import subprocess
import sys
import textwrap
from asyncio.subprocess import PIPE
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import plato.client
from plato.client import Client, MsgType
from plato.fakes.platform import Platform
from plato.fakes.platform_server import PlatformServer

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"
WAIT_S = 30


@contextmanager
def running(name: str, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    child = subprocess.Popen(
        [sys.executable, "-u", str(EXAMPLES / name), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        yield child
    finally:
        child.kill()
        child.communicate()


async def test_the_echo_bot_answers_once_also_after_a_restart(tmp_path: Path) -> None:
    async with PlatformServer(Platform()) as server:
        gateway = server.address.removeprefix("tcp://")
        arguments = ("echo", "echo", "--gateway", gateway, "--store", str(tmp_path / "bot.db"))
        async with Client("alice", ":memory:", [gateway], user="alice") as alice:
            shown = alice.messages()
            for words in ("one", "two"):
                await alice.send(words, to="echo")  # for the second time while nobody is there
                with running("echo_bot.py", *arguments) as bot:
                    said = []
                    async with asyncio.timeout(WAIT_S):
                        for _ in range(2):
                            message = await anext(shown)
                            said.append((message.from_user, message.text))
                    assert said == [("alice", words), ("echo", words)]
                    bot.send_signal(signal.SIGINT)
                    out, _ = await asyncio.to_thread(bot.communicate, timeout=WAIT_S)
                    assert "Traceback" not in out
                    assert f"alice: {words}" in out
        rows = next(iter(server.platform.conversations.values())).rows
        assert [r.Content for r in rows] == [b"one", b"one", b"two", b"two"]


async def test_the_echo_bot_answers_once_after_a_crash(tmp_path: Path) -> None:
    """What it took is shown again, as after a crash: the answers of before are found by their keys."""
    store = tmp_path / "bot.db"
    async with PlatformServer(Platform()) as server:
        gateway = server.address.removeprefix("tcp://")
        arguments = ("echo", "echo", "--gateway", gateway, "--store", str(store))
        async with Client("alice", ":memory:", [gateway], user="alice") as alice:
            shown = alice.messages()
            for words in ("one", "two"):
                await alice.send(words, to="echo")
                with running("echo_bot.py", *arguments) as bot:
                    async with asyncio.timeout(WAIT_S):
                        said = [(await anext(shown)).text for _ in range(2)]
                    assert said == [words, words]
                    bot.send_signal(signal.SIGINT)
                    out, _ = await asyncio.to_thread(bot.communicate, timeout=WAIT_S)
                    assert "alice: one" in out, "the first one is shown each time"
                with sqlite3.connect(store) as db:
                    db.execute("DELETE FROM meta WHERE name = 'delivered'")
                db.close()
        rows = next(iter(server.platform.conversations.values())).rows
        assert [r.Content for r in rows] == [b"one", b"one", b"two", b"two"]


async def test_the_client_s_own_example_runs(tmp_path: Path) -> None:
    assert plato.client.__doc__
    example = "\n".join(line for line in plato.client.__doc__.splitlines()[1:] if not line or line.startswith("    "))
    async with PlatformServer(Platform()) as server:
        assert example.count("127.0.0.1:8900") == 1
        source = textwrap.dedent(example).replace("127.0.0.1:8900", server.address)
        run = [sys.executable, "-c", source, "alice"]
        child = await asyncio.to_thread(
            subprocess.run, run, cwd=tmp_path, capture_output=True, text=True, timeout=WAIT_S, check=False
        )
        assert (child.returncode, child.stdout) == (0, "its place is 1\nalice: hello\n"), child.stderr
        assert (tmp_path / "alice.db").exists()


async def test_the_page_s_group_runs(tmp_path: Path) -> None:
    page = (EXAMPLES.parent / "docs" / "client.md").read_text(encoding="utf-8")
    program = re.findall(r"```python\n(.*?)```", page, re.DOTALL)[-1]
    async with PlatformServer(Platform()) as server, Client("bob", ":memory:", [server.address], user="bob") as bob:
        await (await bob.send("of yesterday", to="alice")).settled()
        run = [sys.executable, "-c", program, "alice", server.address]
        child = await asyncio.create_subprocess_exec(*run, cwd=tmp_path, stdout=PIPE, stderr=PIPE)
        try:
            async with asyncio.timeout(WAIT_S):
                async for message in bob.messages():
                    if message.operation is not None and message.operation.kind is MsgType.EDIT:
                        await bob.send("yes", conversation_id=message.conversation_id)
                    if message.rich is not None:
                        assert (message.text, message.rich.reply and message.rich.reply.text) == ("see you", "yes")
                        break
                out, err = await child.communicate()
        finally:
            if child.returncode is None:
                child.kill()
        assert (child.returncode, err) == (0, b"")
        assert out == b"alice GROUP_CREATE\nalice EDIT\nbob: yes\nthe question is now: tea at six?\n"


async def test_the_bare_client_says_one_thing() -> None:
    async with PlatformServer(Platform()) as server:
        gateway = server.address.removeprefix("tcp://")
        for n in (1, 2):
            with running("bare_client.py", "alice", "bob", "alice", "hello", "--gateway", gateway) as bare:
                out, _ = await asyncio.to_thread(bare.communicate, timeout=WAIT_S)
                assert bare.returncode == 0, out
                assert f"[{n}] has msg_id {n}" in out
