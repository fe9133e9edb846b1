"""The files of docs/embed.md, taken from the page and run: a program in Python and a page in a browser that talk."""

from __future__ import annotations

import asyncio
import contextlib
import re
import shutil
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import pytest
from plato.local.cluster import LocalCluster
from playwright.async_api import expect

from tests.faults.waiting import until
from tests.ports import free_port
from tests.product.api import person
from tests.product.browser import WAIT_MS, browsers, required

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "embed.md").read_text(encoding="utf-8")
pytestmark = pytest.mark.timeout(180)


@pytest.fixture(scope="module")
def town(new_cluster: Callable[..., LocalCluster]) -> Iterator[LocalCluster]:
    made = new_cluster({"gateway.workers": 1})
    yield made
    made.down()


def block(language: str, number: int = 0) -> str:
    """A file of the page."""
    found: list[str] = re.findall(rf"^```{language}\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
    return found[number]


@asynccontextmanager
async def running(folder: Path, *arguments: str) -> AsyncIterator[asyncio.subprocess.Process]:
    """One of the page's programs."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, *arguments, cwd=folder, stdout=asyncio.subprocess.PIPE
    )
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


async def listens(port: int) -> bool:
    with contextlib.suppress(OSError):
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.close()
        return True
    return False


async def line(process: asyncio.subprocess.Process) -> str:
    assert process.stdout is not None
    return (await asyncio.wait_for(process.stdout.readline(), 30)).decode().strip()


async def test_the_python_program_and_the_page_in_a_browser_talk(town: LocalCluster, tmp_path: Path) -> None:
    required()
    for name, text in {
        "hello.py": block("python"),
        "server.py": block("python", 1),
        "index.html": block("html"),
        "app.js": block("js"),
    }.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    shutil.copy(ROOT / "libs" / "plato" / "web" / "plato.js", tmp_path)
    older = await person(town, "bob").ok("POST", "/v1/messages", {"to": "alice", "text": "of yesterday"})
    port = free_port()
    command = [sys.executable, "-m", "plato.cli", "token", "--data-dir", str(town.data_dir)]
    async with (
        running(tmp_path, "server.py", str(port), "bob", "alice", town.ipconfig_url, *command),
        running(tmp_path, "hello.py", town.token("alice"), "bob", town.ipconfig_url) as hello,
        browsers() as browser,
    ):
        assert await line(hello) == f"sent, its place is {older['seq'] + 1}"
        page = await browser.new_page()
        kept = page.request
        await until(partial(listens, port), 30.0, "server.py does not listen")
        assert (await kept.get(f"http://127.0.0.1:{port}/app.js")).status == 200
        for other in ("/server.py", "/hello.db", "/", "/sub/../server.py"):
            answer = await kept.get(f"http://127.0.0.1:{port}{other}")
            assert (answer.status == 404) is (other != "/"), other
        faults: list[str] = []
        page.on("pageerror", lambda error: faults.append(str(error)))
        await page.goto(f"http://127.0.0.1:{port}/")
        await expect(page.get_by_text("alice: Hello from Python")).to_be_visible(timeout=WAIT_MS)
        await page.get_by_label("Message").fill("Hello from the browser")
        await page.get_by_label("Message").press("Enter")
        assert await line(hello) == "bob: Hello from the browser"
        await expect(page.get_by_text("bob: Hello from the browser", exact=True)).to_be_visible(timeout=WAIT_MS)
        await expect(page.get_by_text("online")).to_be_visible()
        assert faults == []
