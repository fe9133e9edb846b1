"""The real process: a list is answered without one connection being made, and goes on being answered when everything that
ipconfig reads is gone; a start with nobody there goes by what lies on disk.

Connections are counted by strace, and by an audit hook inside of the interpreter, for machines that have no strace.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import yaml
from ipconfig_harness import WORLD, gateway, mmdb, topology
from plato.adapters import tokens
from plato.runtime.admin import HttpServer
from plato.topology.record import dumps
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from tests.ports import free_port

# Writes a line per connect of this process, then is plato_ipconfig.
AUDITED = (
    "import os, runpy, sys\n"
    "out = os.open(sys.argv.pop(1), os.O_WRONLY | os.O_CREAT | os.O_APPEND)\n"
    "def hook(event, arguments):\n"
    "    if event in ('socket.connect', 'socket.sendto', 'socket.getaddrinfo'):\n"
    "        os.write(out, f'{event} {arguments[1:]}\\n'.encode())\n"
    "sys.addaudithook(hook)\n"
    "runpy.run_module('plato_ipconfig', run_name='__main__', alter_sys=True)\n"
)


class Ground:
    """What an ipconfig stands on: keys, a record, a map, and one gateway that tells its load."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.keys = folder / "keys"
        tokens.make_dev_key(self.keys)
        self.record = folder / "topology.json"
        self.map = folder / "world.mmdb"
        self.map.write_bytes(mmdb(WORLD))
        self.port, self.internal, self.admin = free_port(), free_port(), free_port()
        self.asked = 0
        near, far = (gateway(0, f"127.0.0.1:{self.admin}", ip="198.51.100.9"), gateway(1, ip="203.0.113.9"))
        self.record.write_text(dumps(topology(near, far)), encoding="utf-8")
        self.token = tokens.issue(self.keys, tokens.DEV_KID, "alice", "plato", "plato", 3_600)

    def settings(self) -> Path:
        path = self.folder / "plato.yaml"
        own = {
            "port": self.port,
            "internal_port": self.internal,
            "poll_ms": 600_000,  # one round, and none while a test counts
            "silent_ms": 600_000,
            "geoip_path": str(self.map),
            "override_path": str(self.folder / "override.json"),
            "trusted_proxies": ["127.0.0.1"],
            "user_burst": 10_000,
        }
        sections = {"ipconfig": own, "auth": {"keys_dir": str(self.keys)}, "topology": {"path": str(self.record)}}
        path.write_text(yaml.safe_dump(sections), encoding="utf-8")
        return path

    @asynccontextmanager
    async def gateway(self) -> AsyncIterator[None]:
        """The load figures of edge-0."""

        async def load(_: Request) -> Response:
            self.asked += 1
            said: dict[str, Any] = {"name": "edge-0", "uid": "uid-0", "serving": True, "connections": 1}
            return JSONResponse({**said, "connections_left": 9_999})

        server = HttpServer(Starlette(routes=[Route("/v1/load", load)]), "127.0.0.1", self.admin)
        await server.start()
        try:
            yield
        finally:
            await server.stop()

    @asynccontextmanager
    async def process(self, before: list[str]) -> AsyncIterator[None]:
        """python -m plato_ipconfig; `before`: how it is called. Ends when both ports answer; killed at the end."""
        env = {key: value for key, value in os.environ.items() if not key.startswith("PLATO_")}
        log = self.folder / "log"
        with log.open("ab") as out:
            process = subprocess.Popen(  # noqa: ASYNC220  # it returns at once
                [*before, "--settings", str(self.settings())],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                env=env,
                cwd=self.folder,
                start_new_session=True,
            )
        try:
            end = time.monotonic() + 60
            while (await self.answers())[0] != 200:
                assert process.poll() is None, log.read_text()
                assert time.monotonic() < end, log.read_text()
                await asyncio.sleep(0.05)
            yield
        finally:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait(30)

    async def answers(self, times: int = 1, address: str = "198.51.100.7") -> tuple[int, list[str]]:
        """(worst status, names in the last answer) of so many requests, each on a connection of its own."""
        headers = {"Authorization": f"Bearer {self.token}", "X-Forwarded-For": address}
        worst, names = 0, []
        async with aiohttp.ClientSession(headers=headers, connector=aiohttp.TCPConnector(force_close=True)) as session:
            for _ in range(times):
                try:
                    async with session.get(f"http://127.0.0.1:{self.port}/ip/list") as answer:
                        worst, names = max(worst, answer.status), [g["name"] for g in (await answer.json())["data"]]
                except OSError:
                    return 0, []
        return worst, names


def _traced(counts: Path) -> list[str]:
    strace = shutil.which("strace")
    if strace is None or subprocess.run([strace, "-o", "/dev/null", "true"], capture_output=True).returncode:
        pytest.skip("strace is not here, or may trace nothing: the audit hook of the other run is the proof")
    calls = "trace=connect,sendto,sendmsg,sendmmsg"
    return [strace, "-f", "-q", "-e", calls, "-o", str(counts), sys.executable, "-P", "-m", "plato_ipconfig"]


def _audited(counts: Path) -> list[str]:
    return [sys.executable, "-P", "-c", AUDITED, str(counts)]


def _connects(counts: Path) -> list[str]:
    """Connections made, and datagrams sent to an address; what is sent on an accepted connection is no such."""
    return [
        line
        for line in counts.read_text(encoding="utf-8", errors="replace").splitlines()
        if ("connect" in line or "getaddrinfo" in line or "sa_family" in line or "socket.sendto" in line)
        and "resumed" not in line  # strace's second line for one call
    ]


def _reached(counts: Path, port: int) -> bool:
    """Whether a connection to this port of ours was begun, in the words of either."""
    return any(f"htons({port})" in line or f"', {port})" in line for line in _connects(counts))


@pytest.mark.parametrize("way", [_traced, _audited])
async def test_an_answer_makes_no_connection_and_needs_nothing_that_is_elsewhere(tmp_path: Path, way: Any) -> None:
    ground, counts = Ground(tmp_path), tmp_path / "counts"
    async with ground.gateway(), ground.process(way(counts)):
        end = time.monotonic() + 30
        while not ground.asked or (await ground.answers())[1] != ["edge-0"]:  # edge-1 was never heard
            assert time.monotonic() < end, "the gateway was not asked for its load"
            await asyncio.sleep(0.05)
        while not (_reached(counts, ground.admin) and _reached(counts, 1)):  # nobody is there, and the round asks all
            assert time.monotonic() < end, "the round of load figures connected, and that was not seen"
            await asyncio.sleep(0.05)
        before = _connects(counts)
        assert await ground.answers(100) == (200, ["edge-0"])
        assert await ground.answers(1, "203.0.113.5") == (200, ["edge-0"])
        assert _connects(counts) == before
        # All that it reads goes away.
        ground.record.unlink()
        ground.map.unlink()
        shutil.rmtree(ground.keys)
        end = time.monotonic() + 1.5  # longer than a look at the keys waits
        while time.monotonic() < end:
            assert await ground.answers(5) == (200, ["edge-0"])
        assert _connects(counts) == before


async def test_a_start_while_nobody_is_there_answers_by_distance_from_what_lies_on_disk(tmp_path: Path) -> None:
    """No gateway answers: the record tells who there is, the map who is near. The override of before stands too."""
    ground = Ground(tmp_path)
    async with ground.process([sys.executable, "-P", "-m", "plato_ipconfig"]):
        assert await ground.answers(1, "198.51.100.7") == (200, ["edge-0", "edge-1"])
        assert await ground.answers(1, "203.0.113.5") == (200, ["edge-1", "edge-0"])
        ask = [sys.executable, "-P", "-m", "plato_ipconfig.ask"]
        env = {**os.environ, "PLATO_SETTINGS": str(tmp_path / "plato.yaml")}
        order = '{"never": ["edge-0"]}'
        done = await asyncio.to_thread(
            subprocess.run, [*ask, "PUT", "/override", order], env=env, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        assert await ground.answers(1, "198.51.100.7") == (200, ["edge-1"])
    async with ground.process([sys.executable, "-P", "-m", "plato_ipconfig"]):
        assert await ground.answers(1, "198.51.100.7") == (200, ["edge-1"])
