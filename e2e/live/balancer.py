"""What a cloud's load balancer is to a NodePort: one address that leads to whichever node answers.

A user outside of the cluster knows one URL of ipconfig; nodes come and go behind it. A thread of its own, so that the suite
may block; one pass of bytes per connection, nothing is kept.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Sequence
from types import TracebackType
from typing import Final

CONNECT_S: Final = 0.5


class Balancer:
    """Use as `with Balancer([(host, port), …]) as balancer:`; clients connect to 127.0.0.1:`balancer.port`."""

    def __init__(self, targets: Sequence[tuple[str, int]]) -> None:
        self._targets = list(targets)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="balancer", daemon=True)
        self._ready = threading.Event()
        self._stop = asyncio.Event()
        self.port = 0

    def __enter__(self) -> Balancer:
        self._thread.start()
        self._ready.wait(10)
        return self

    def __exit__(self, _: type[BaseException] | None, __: BaseException | None, ___: TracebackType | None) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(10)

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._serve())

    async def _serve(self) -> None:
        server = await asyncio.start_server(self._pass, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        self._ready.set()
        await self._stop.wait()
        server.close()

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for target in list(self._targets):
            try:
                ahead, behind = await asyncio.wait_for(asyncio.open_connection(*target), CONNECT_S)
            except (OSError, TimeoutError):
                # Whoever does not answer is asked last from now on.
                if target in self._targets:
                    self._targets.remove(target)
                    self._targets.append(target)
                continue
            await asyncio.gather(_pump(reader, behind), _pump(ahead, writer))
            return
        writer.close()


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await reader.read(65_536):
            writer.write(data)
            await writer.drain()
    writer.close()
    with contextlib.suppress(OSError):
        await writer.wait_closed()
