"""The application's message stream: pages of stored rows, handed out one by one, in the order of arrival."""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable
from typing import Final

from plato.client.api import Message


class MessageStream:
    """An async iterator over what is stored behind a number.

    A message counts as taken when the application asks for the next one, or when the client is closed in good order; so a
    crash in between shows it again rather than never. `handed` is the number of the last one handed out.
    Memory: one page.
    """

    PAGE: Final = 100

    def __init__(
        self,
        after: int,
        next_page: Callable[[int], list[tuple[int, Message]]],
        more: Callable[[], Awaitable[None]],
        took: Callable[[int], None],
    ) -> None:
        """next_page(number): the messages behind it; raises StopAsyncIteration at the end. more: waits for new ones."""
        self.handed = after
        self.ended = False
        self._next_page = next_page
        self._more = more
        self._took = took
        self._taken = after
        self._page: deque[tuple[int, Message]] = deque()

    def __aiter__(self) -> MessageStream:
        return self

    async def __anext__(self) -> Message:
        """The next message; waits for it."""
        self._take()
        while not self._page:
            if self.ended:
                raise StopAsyncIteration
            try:
                self._page.extend(self._next_page(self.handed))
            except StopAsyncIteration:
                self.ended = True
                raise
            if not self._page:
                await self._more()
        self.handed, message = self._page.popleft()
        return message

    def end(self) -> None:
        """Ends this reader; what was handed out counts as taken, the rest goes to the next one."""
        self._take()
        self.ended = True
        self._page.clear()

    def _take(self) -> None:
        if self.handed > self._taken:
            self._taken = self.handed
            self._took(self.handed)
