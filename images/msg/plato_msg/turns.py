"""Turns of users: what one of them asks is done a few at a time, waits in a short line, and is refused past it.

    user ─▸ [line, at most in_all] ─▸ at_once of them under way ─▸ the connections that all users share

So whoever asks much waits behind himself: with fewer turns than there are connections, one is left for everybody else.
Memory: one entry per user with something under way.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from plato.core.codes import Code
from plato.core.errors import PeerError


class TooMany(PeerError):
    """One user asks too much at the same time. retry_ms: ask again after so long."""

    def __init__(self, in_all: int, retry_ms: int) -> None:
        self.words = f"you have {in_all} of these under way; wait for one of them"
        self.retry_ms = retry_ms
        super().__init__(Code.TOO_FAST, self.words)


@dataclass(slots=True)
class _Line:
    turn: asyncio.Semaphore
    count: int = 0


class Turns:
    """The turns of everybody, for one kind of work."""

    def __init__(self, at_once: int, in_all: int, retry_ms: int) -> None:
        """Of one user: at_once under way, and in_all with those that wait."""
        self._at_once = at_once
        self._in_all = in_all
        self._retry_ms = retry_ms
        self._lines: dict[str, _Line] = {}

    def __len__(self) -> int:
        """Users with something under way."""
        return len(self._lines)

    def under_way(self, user: str) -> int:
        """How much of this user's is under way or waits."""
        line = self._lines.get(user)
        return line.count if line is not None else 0

    @asynccontextmanager
    async def of(self, user: str) -> AsyncIterator[None]:
        """Waits for the user's turn, which lasts for the block. Raises TooMany at once."""
        line = self._lines.get(user)
        if line is None:
            line = self._lines[user] = _Line(asyncio.Semaphore(self._at_once))
        if line.count >= self._in_all:
            raise TooMany(self._in_all, self._retry_ms)
        line.count += 1
        try:
            async with line.turn:
                yield
        finally:
            line.count -= 1
            if not line.count:
                del self._lines[user]
