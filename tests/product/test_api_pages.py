"""The pages about the HTTP API, bots, hooks and moderation, done as they say, on a real cluster."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from plato.core.codes import Code
from plato.core.conversations import dialogue_id
from plato.local.cluster import LocalCluster

from tests.faults.waiting import until, until_sync
from tests.ports import free_port
from tests.product import pages
from tests.product.api import person, quoted

ROOT = Path(__file__).resolve().parents[2]
WORD = "spam"
pytestmark = pytest.mark.timeout(180)


@pytest.fixture(scope="module")
def hook_port() -> int:
    return free_port()


@pytest.fixture(scope="module")
def secret(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Made as docs/hooks.md says."""
    folder = tmp_path_factory.mktemp("hook")
    (make,) = re.findall(r"^(head -c 32 .*)$", (ROOT / "docs" / "hooks.md").read_text(encoding="utf-8"), re.MULTILINE)
    subprocess.run(["bash", "-c", make], cwd=folder, check=True)
    return folder / "hook.secret"


@pytest.fixture(scope="module")
def town(new_cluster: Callable[..., LocalCluster], hook_port: int, secret: Path) -> Iterator[LocalCluster]:
    base = f"http://127.0.0.1:{hook_port}"
    made = new_cluster(
        {
            "gateway.workers": 1,
            "msg.events": "true",
            "msg.hook_url": f"{base}/before",
            "msg.after_url": f"{base}/after",
            "msg.push_url": f"{base}/push",
            "msg.hook_secret_file": secret,
        }
    )
    yield made
    made.down()


@contextmanager
def running(output: Path, *arguments: str, **environment: str) -> Iterator[subprocess.Popen[bytes]]:
    """A program of examples/bot, with nothing of Plato's to import."""
    with output.open("wb") as out:
        process = subprocess.Popen(
            [sys.executable, "-I", *arguments], stdout=out, stderr=out, env={**os.environ, **environment}, cwd=ROOT
        )
        try:
            yield process
        finally:
            process.kill()
            process.wait()


@pytest.mark.parametrize("page", ["http-api.md", "moderation.md"])
def test_every_command_of_the_page_works(town: LocalCluster, page: str) -> None:
    assert (ROOT / "docs" / page).read_text(encoding="utf-8").count("curl") > 3
    for _ in range(2):  # a reader may try it again
        assert "REFUSED" not in pages.run(town, page)


def test_the_page_about_overload_shows_it(town: LocalCluster) -> None:
    said = pages.run(town, "overload.md")
    counted = {int(code): int(count) for count, code in re.findall(r"^ *(\d+) (200|429)$", said, re.MULTILINE)}
    assert sum(counted.values()) == 400
    assert counted[200] > 0
    assert counted[429] > 0, "on a fast machine for the rate, on a slow one for the reads under way"
    assert said.count('{"devices":[]}') == 2


async def test_the_bot_answers_once_though_it_dies(town: LocalCluster, tmp_path: Path) -> None:
    tail = uuid.uuid4().hex[:8]
    alice, bob, helper = f"alice-{tail}", f"bob-{tail}", f"helper-{tail}"
    a = person(town, alice)
    program = str(ROOT / "examples" / "bot" / "bot.py")
    arguments = (program, helper, "--api", town.api_url, "--place", str(tmp_path / "place"))
    environment = {"TOKEN": town.token("bots", scope="server")}

    async def answers(conversation_id: str) -> list[str]:
        page = await a.ok("GET", f"/v1/conversations/{quoted(conversation_id)}/messages?limit=500")
        return [m["text"] for m in page["messages"] if m["from"] == helper]

    group = (await a.ok("POST", "/v1/groups", {"title": "Tea", "members": [helper, bob]}))["conversation_id"]
    dialogue = dialogue_id(alice, helper)
    with running(tmp_path / "1", *arguments, **environment):
        await until(lambda: b"answers" in (tmp_path / "1").read_bytes(), 20)
        await until(lambda: (tmp_path / "place").exists() or waking(a, helper), 30)
        await a.ok("POST", "/v1/messages", {"to": helper, "text": "hello"})
        await a.ok("POST", "/v1/messages", {"to": bob, "text": "between us"})
        await a.ok("POST", "/v1/messages", {"conversation_id": group, "text": "not for you"})
        await a.ok("POST", "/v1/messages", {"conversation_id": group, "rich": {"text": "you?", "mentions": [helper]}})
        await until(lambda: answers(group), 30)
    await a.ok("POST", "/v1/messages", {"to": helper, "text": "are you there?"})
    with running(tmp_path / "2", *arguments, **environment):

        async def answered() -> bool:
            return "You said: are you there?" in await answers(dialogue)

        await until(answered, 30)
    said = [text for text in await answers(dialogue) if "wake" not in text]
    assert said == ["You said: hello", "You said: are you there?"]
    assert await answers(group) == ["You said: you?"]


async def waking(a: object, helper: str) -> bool:
    """Writes to the bot until it has its place: it begins with what comes after it began."""
    from tests.product.api import Api

    assert isinstance(a, Api)
    await a.ok("POST", "/v1/messages", {"to": helper, "text": "wake"})
    await asyncio.sleep(0)
    return False


async def test_the_receiver_refuses_and_is_told(
    town: LocalCluster, hook_port: int, secret: Path, tmp_path: Path
) -> None:
    tail = uuid.uuid4().hex[:8]
    alice, bob = f"alice-{tail}", f"bob-{tail}"
    a, out = person(town, alice), tmp_path / "out"
    program = str(ROOT / "examples" / "bot" / "hook.py")
    with running(out, program, "--port", str(hook_port), "--refuse", WORD, SECRET_FILE=str(secret)):
        await asyncio.to_thread(until_sync, lambda: b"receives" in out.read_bytes(), 20)

        async def refused() -> bool:  # after failures the hook is asked only now and then
            answer = await a.ask("POST", "/v1/messages", {"to": bob, "text": f"buy {WORD}"})
            return answer.status == 403 and answer.body["code"] == Code.REFUSED_BY_HOOK

        await until(refused, 60)
        await a.ok("POST", "/v1/messages", {"to": bob, "text": "all is well"})
        await until(lambda: f"{alice}: all is well" in out.read_text(encoding="utf-8"), 60)
        await until(lambda: f"to {bob} " in out.read_text(encoding="utf-8"), 60)
