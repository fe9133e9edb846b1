"""One small HTTP GET on loopback, with a time-out: readiness of processes, without a client library."""

from __future__ import annotations

import asyncio
import contextlib
import json

_ANSWER_LIMIT_BYTES = 65_536


async def get(host: str, port: int, path: str, timeout_s: float = 2.0) -> tuple[int, bytes]:
    """(status, body) of an answer; (0, b"") when nobody answers in time."""
    writer: asyncio.StreamWriter | None = None
    try:
        async with asyncio.timeout(timeout_s):
            reader, writer = await asyncio.open_connection(host, port)
            writer.write(f"GET {path} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode())
            raw = await reader.read(_ANSWER_LIMIT_BYTES)
            while chunk := await reader.read(_ANSWER_LIMIT_BYTES):
                raw += chunk
    except (OSError, TimeoutError):
        return 0, b""
    finally:
        if writer is not None:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()
    head, _, body = raw.partition(b"\r\n\r\n")
    fields = head.split(b" ", 2)
    return (int(fields[1]), body) if len(fields) > 1 and fields[1].isdigit() else (0, b"")


async def not_ready(host: str, port: int) -> str:
    """Why the process behind this admin port does not serve; "" when it does."""
    return (await ask(host, port))[0]


async def ask(host: str, port: int) -> tuple[str, str]:
    """(why the process behind this admin port does not serve, why it does without the bus); "" for what is well."""
    status, body = await get(host, port, "/readyz")
    if status == 0:
        return "it does not answer", ""
    try:
        said = json.loads(body)
        reason, bus = str(said["reason"]), str(said.get("bus", ""))
    except (ValueError, KeyError, TypeError, AttributeError):
        reason, bus = "", ""
    return "" if status == 200 else reason or f"/readyz answers {status}", bus
