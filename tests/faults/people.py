"""Small makers for the fault tests: one client at one address, and a client in a process of its own."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Literal

from plato.client import Client
from plato.local.cluster import LocalCluster

from tests.faults.load import Person
from tests.faults.waiting import until

ROOT = Path(__file__).resolve().parents[2]


@asynccontextmanager
async def person(
    cluster: LocalCluster,
    user: str,
    store: Path,
    gateways: list[str] | None = None,
    *,
    device_id: int | None = None,
    transport: Literal["tcp", "ws"] = "tcp",
    online: bool = True,
) -> AsyncIterator[Person]:
    """A watched client; `gateways`: where it may connect (None: every gateway of the cluster)."""
    addresses = cluster.gateway_addresses(transport) if gateways is None else gateways

    async def token() -> str:
        return cluster.token(user)

    client = Client(token, store, addresses, user=user, device_id=device_id, transport=transport)
    made = Person(user, store, transport, client)
    async with client:
        await made.watch()
        try:
            if online:
                await until(lambda: made.onlines, 20.0, f"{user} did not come online")
            yield made
        finally:
            await made.unwatch()


class Listener:
    """A client in a process of its own, so that the process can be stopped: prints each message as a JSON line."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self.bodies: list[str] = []
        self.ready = asyncio.Event()
        self._reader = asyncio.create_task(self._read())

    @classmethod
    async def start(cls, cluster: LocalCluster, user: str, store: Path) -> Listener:
        """Starts it and waits until it is online."""
        arguments = json.dumps({"token": cluster.token(user), "store": str(store), "gateways": cluster.gateways})
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            str(Path(__file__).with_name("listener.py")),
            arguments,
            stdout=asyncio.subprocess.PIPE,
            cwd=ROOT,
        )
        made = cls(process)
        await asyncio.wait_for(made.ready.wait(), 30)
        return made

    async def _read(self) -> None:
        assert self._process.stdout is not None
        async for line in self._process.stdout:
            said = json.loads(line)
            if "body" in said:
                self.bodies.append(said["body"])
            else:
                self.ready.set()

    def freeze(self) -> None:
        """SIGSTOP."""
        os.kill(self._process.pid, signal.SIGSTOP)

    def thaw(self) -> None:
        """SIGCONT."""
        os.kill(self._process.pid, signal.SIGCONT)

    async def stop(self) -> None:
        """Ends it."""
        self._process.kill()
        await self._process.wait()
        await self._reader
