"""The client of examples/go-client in a process of its own: what it says as events, what it keeps as the checker's rows.

build()   one binary, outside the checkout
GoClient  stdin: a line is a message ─▸ process ─▸ stdout: a line of JSON is an event
Lists     stands in for ipconfig: the real list, with a relay's address in place of each gateway's
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import os
import shutil
import signal
import subprocess
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from plato.local.cluster import LocalCluster

from tests.faults.checker import Row, Sent
from tests.faults.relay import Relay
from tests.faults.waiting import until

SOURCE = Path(__file__).resolve().parents[2] / "examples" / "go-client"


def go(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs go in the client's folder. Never downloads: the client has no dependency, and this toolchain has to do."""
    environment = {**os.environ, "GOPROXY": "off", "GOTOOLCHAIN": "local", "GOFLAGS": "-buildvcs=false"}
    return subprocess.run(
        ["go", *arguments], cwd=SOURCE, env=environment, capture_output=True, text=True, check=False, timeout=300
    )


def missing() -> str:
    """Why the client cannot be built here; "" where it can."""
    return "" if shutil.which("go") else "the Go toolchain (go on PATH, 1.22 or later) is missing: no Go client here"


def build(folder: Path) -> Path:
    """Builds it; returns the binary."""
    binary = folder / "plato-go-client"
    run = go("build", "-o", str(binary), ".")
    assert run.returncode == 0, run.stderr
    return binary


class GoClient:
    """One run of the binary. A second one with the same store is the same installation."""

    def __init__(self, binary: Path, list_url: str, user: str, store: Path, token: str) -> None:
        self.user, self.store = user, store
        self.events: list[dict[str, Any]] = []
        self._command = [str(binary), "-ip", list_url, "-token", token, "-state", str(store), "-json", "-v"]
        self._process: asyncio.subprocess.Process | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self.log: list[str] = []

    async def start(self, *arguments: str) -> GoClient:
        """Runs it with these further arguments."""
        self._process = await asyncio.create_subprocess_exec(
            *self._command,
            *arguments,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        self._tasks = [asyncio.create_task(self._read()), asyncio.create_task(self._read_log())]
        return self

    async def __aenter__(self) -> GoClient:
        return self

    async def __aexit__(
        self, _: type[BaseException] | None, error: BaseException | None, ___: TracebackType | None
    ) -> None:
        if self.process.returncode is None:
            self.kill()
        await self.wait()
        if error is not None:
            print(f"--- {self.user}, the Go client:", *self.log[-60:], sep="\n")

    @property
    def process(self) -> asyncio.subprocess.Process:
        """The process."""
        assert self._process is not None
        return self._process

    async def _read(self) -> None:
        assert self.process.stdout is not None
        async for line in self.process.stdout:
            self.events.append(json.loads(line))

    async def _read_log(self) -> None:
        assert self.process.stderr is not None
        async for line in self.process.stderr:
            self.log.append(line.decode().rstrip())

    async def say(self, body: str) -> None:
        """Sends a message to the user of `-to`."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{body}\n".encode())
        await self.process.stdin.drain()

    def kill(self) -> None:
        """SIGKILL."""
        self.process.kill()

    def freeze(self) -> None:
        """SIGSTOP."""
        self.process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """SIGCONT."""
        self.process.send_signal(signal.SIGCONT)

    async def wait(self, within_s: float = 20.0) -> int:
        """Waits for its end; returns the exit code."""
        code = await asyncio.wait_for(self.process.wait(), within_s)
        await asyncio.gather(*self._tasks)
        return code

    def told(self, kind: str) -> list[dict[str, Any]]:
        """Its events of a kind: message, settled, live, lost."""
        return [e for e in self.events if e["kind"] == kind]

    async def online(self, times: int = 1) -> None:
        """Waits until it committed so many connections."""
        await until(lambda: len(self.told("live")) >= times, 20.0, f"{self.user}: not online, {self.log[-5:]}")

    def shown(self) -> list[Row]:
        """What its user was shown, in order."""
        return [
            Row(
                e["conversation"], e["seq"], e.get("prev_seq", 0), int(e["msg_id"]), e["from"],
                bytes.fromhex(e["client_msg_id"]), e.get("body", "").encode(),
            )
            for e in self.told("message")
        ]  # fmt: skip

    def _journal(self, field: str) -> list[dict[str, Any]]:
        # It may be writing: what stands behind the last line end is no line yet.
        lines = (self.store / "journal").read_text(encoding="utf-8").rpartition("\n")[0].splitlines()
        return [entry for line in lines for entry in json.loads(line).get(field, [])]

    def stored(self) -> list[Row]:
        """The rows in its journal."""
        return [
            Row(
                r["Conversation"], r["Seq"], r["PrevSeq"], r["MsgID"], r["From"],
                base64.b64decode(r["ClientMsgID"]), base64.b64decode(r["Body"]),
            )
            for r in self._journal("Rows")
        ]  # fmt: skip

    def sent(self) -> list[Sent]:
        """What it took to send, ever."""
        refused = {(s["Conversation"], s["ClientID"]) for s in self._journal("Settled") if s["Code"] >= 400}
        return [
            Sent(
                self.user, 0, o["Conversation"], base64.b64decode(o["ClientMsgID"]), base64.b64decode(o["Body"]),
                o["ClientID"], refused=(o["Conversation"], o["ClientID"]) in refused,
            )
            for o in self._journal("Out")
        ]  # fmt: skip

    def settled(self) -> int:
        """How many of those have their outcome."""
        return len(self._journal("Settled"))


class Lists:
    """Answers GET /ip/list with the real ipconfig's answer, its gateways replaced by relays, in order."""

    def __init__(self, cluster: LocalCluster, relays: Sequence[Relay]) -> None:
        self._real = f"{cluster.ipconfig_url}/ip/list"
        self._relays = relays
        self._server: asyncio.Server | None = None
        self.url = ""

    async def __aenter__(self) -> Lists:
        self._server = await asyncio.start_server(self._answer, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(
        self, _: type[BaseException] | None, __: BaseException | None, ___: TracebackType | None
    ) -> None:
        assert self._server is not None
        self._server.close()
        await self._server.wait_closed()

    def _ask(self, authorization: str) -> tuple[int, bytes]:
        request = urllib.request.Request(self._real, headers={"Authorization": authorization})
        try:
            with urllib.request.urlopen(request, timeout=5) as answer:
                found = json.loads(answer.read())
        except urllib.error.HTTPError as refusal:
            with refusal:
                return refusal.code, refusal.read()
        found["data"] = [{**found["data"][0], "ip": r.host, "port": r.port} for r in self._relays]
        return 200, json.dumps(found).encode()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
            lines = dict(line.split(": ", 1) for line in head.split("\r\n")[1:] if line)
            status, body = await asyncio.to_thread(self._ask, lines["Authorization"])
            writer.write(
                f"HTTP/1.1 {status} -\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n".encode() + body
            )
            await writer.drain()
        writer.close()
