"""The chat terminal. Skeleton: the signature that `plato chat` calls, filled in by the next commits."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Literal


async def run_chat(
    *,
    user: str,
    to: str | None,
    conversation: str | None,
    token: Callable[[], Awaitable[str]],
    store_path: Path,
    ipconfig_url: str | None,
    gateways: list[str],
    transport: Literal["tcp", "ws"],
    plain: bool,
) -> int:
    """Runs one chat until its user leaves; returns the exit code."""
    raise NotImplementedError
