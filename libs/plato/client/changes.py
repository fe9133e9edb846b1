"""The application's stream of changes: what happened to what it has been shown already.

Of two changes of one thing only the later one waits. Nothing here is durable: after a start the application looks at
everything anyway. Memory: `MOST` changes per reader; a reader that is slower than that is told so, by `Overflowed`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from plato.client.api import Change, ClientError, FriendChanged, Overflowed, ReadBy, Typing

MOST: Final = 10_000


class ChangeStream:
    """An async iterator over changes from its making on."""

    def __init__(self, left: Callable[[ChangeStream], None]) -> None:
        """left: called when the reader ended this stream."""
        self._waiting: dict[object, Change] = {}
        self._came = asyncio.Event()
        self._ended = False
        self._error: ClientError | None = None
        self._left = left

    def __aiter__(self) -> ChangeStream:
        return self

    async def __anext__(self) -> Change:
        """The next change; waits for it."""
        while not self._waiting:
            if self._ended:
                if self._error is not None:
                    raise self._error
                raise StopAsyncIteration
            self._came.clear()
            await self._came.wait()
        return self._waiting.pop(next(iter(self._waiting)))

    async def aclose(self) -> None:
        """The reader looks no more."""
        self.end(None)
        self._waiting.clear()
        self._left(self)

    def put(self, change: Change) -> None:
        """The client's call."""
        if self._ended:
            return
        if len(self._waiting) >= MOST:
            self._waiting.clear()
            change = Overflowed()
        key = _key(change)
        self._waiting.pop(key, None)
        self._waiting[key] = change
        self._came.set()

    def end(self, error: ClientError | None) -> None:
        """The client stopped; what waits is still handed out. error: raised behind it."""
        if not self._ended:
            self._ended, self._error = True, error
            self._came.set()


def _key(change: Change) -> object:
    match change:
        case ReadBy() | Typing():
            return type(change), change.conversation_id, change.user
        case FriendChanged():
            return FriendChanged, change.friend.user
        case _:
            return change
