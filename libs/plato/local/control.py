"""The supervisor's control socket: one JSON object in, one out, per connection, on a Unix socket that only we can open.

{"command": "stop" | "start", "target": NAME or KIND}   → {"names": [...]}
{"command": "move", "target": "FIRST-LAST,… SHARD"}      → {"names": [slots that went there]}
{"command": "drain", "target": "NAME PACE SETTLE_S DEADLINE_S"}, {"command": "undrain", "target": NAME} → {"names": [NAME]}
{"command": "down"}                                      → {"names": []}; the supervisor then stops everything
errors                                                   → {"error": "one line"}
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

from plato.local.folder import LocalError

Handler = Callable[[str, str], list[str]]
"""(command, target) → names it is about. Raises LocalError."""

_LINE_LIMIT_BYTES = 4_096


class ControlServer:
    """Answers commands while the supervisor runs."""

    def __init__(self, path: Path, handler: Handler) -> None:
        self._path = path
        self._handler = handler
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        """Listens. A socket that a killed supervisor left is replaced: the folder's lock is ours."""
        self._path.unlink(missing_ok=True)
        before = os.umask(0o177)
        try:
            self._server = await asyncio.start_unix_server(self._answer, self._path, limit=_LINE_LIMIT_BYTES)
        finally:
            os.umask(before)

    async def stop(self) -> None:
        """Stops listening and removes the socket."""
        if self._server is not None:
            self._server.close()
        self._path.unlink(missing_ok=True)

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        answer: dict[str, Any]
        with contextlib.suppress(OSError, TimeoutError, ValueError):
            async with asyncio.timeout(5):
                line = await reader.readline()
            try:
                request = json.loads(line)
                answer = {"names": self._handler(str(request["command"]), str(request.get("target", "")))}
            except LocalError as e:
                answer = {"error": str(e)}
            except (ValueError, KeyError, TypeError, RecursionError):
                answer = {"error": "this is no command"}
            writer.write(json.dumps(answer).encode() + b"\n")
            await writer.drain()
        writer.close()


def send(path: Path, command: str, target: str = "") -> list[str]:
    """Sends one command to a running supervisor; returns the names it is about. Raises LocalError."""
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(10)
            connection.connect(str(path))
            connection.sendall(json.dumps({"command": command, "target": target}).encode() + b"\n")
            with connection.makefile("rb") as answers:
                answer = json.loads(answers.readline(_LINE_LIMIT_BYTES * 4) or b"{}")
    except (OSError, ValueError) as e:
        raise LocalError(f"the supervisor does not answer on {path} ({e}); see `plato status`") from e
    if "error" in answer:
        raise LocalError(str(answer["error"]))
    return [str(name) for name in answer.get("names", [])]
