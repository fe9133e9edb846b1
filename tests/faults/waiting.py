"""Waiting without sleeping blindly: a condition, a deadline, and words for when it did not come."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Awaitable, Callable
from typing import Any

POLL_S = 0.02


async def until(condition: Callable[[], Any | Awaitable[Any]], deadline_s: float = 20.0, why: str = "") -> Any:
    """Returns the condition's first true value, asked every 20 ms. Raises TimeoutError with `why` after `deadline_s`."""
    loop = asyncio.get_running_loop()
    end = loop.time() + deadline_s
    while True:
        value = condition()
        if inspect.isawaitable(value):
            value = await value
        if value:
            return value
        if loop.time() >= end:
            raise TimeoutError(why or f"not within {deadline_s} s: {inspect.getsource(condition).strip()}")
        await asyncio.sleep(POLL_S)


def until_sync(condition: Callable[[], Any], deadline_s: float = 20.0, why: str = "") -> Any:
    """The same outside of a loop."""
    end = time.monotonic() + deadline_s
    while True:
        value = condition()
        if value:
            return value
        if time.monotonic() >= end:
            raise TimeoutError(why or f"not within {deadline_s} s: {inspect.getsource(condition).strip()}")
        time.sleep(POLL_S)
