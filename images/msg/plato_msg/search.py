"""Search in one's own conversations: words → the index → what the asker may read → where the words stand → a page.

The index finds candidates; what is shown was compared with the words once more, so a page may take several looks. All of
them together take msg.search_ms at most; past it the page ends early where something was found, and is refused in words
where nothing was. Memory: one look.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Final, NamedTuple

from plato.core.codes import Code
from plato.core.errors import PeerError
from plato.core.ids import MAX_ID

from plato_msg.core import words
from plato_msg.texts_pg import Found, PgTexts, TooSlow

LOOK_ROWS: Final = 200
LEAST_MS: Final = 50
WORK_S: Final = 0.002
"""So long the loop is held at most, but for one text; then searches rest."""
PAGE_BYTES: Final = 512 << 10
"""Of the hits of one page; what passes it ends the page."""


class Question(NamedTuple):
    """What is looked for. conversation_id, from_user "": anywhere, by anybody; times in Unix ms, 0: any."""

    text: str
    conversation_id: str = ""
    from_user: str = ""
    after_ms: int = 0
    before_ms: int = 0


class Hit(NamedTuple):
    """A message, a part of what it says, and where in that part the words stand: (from, to) in characters."""

    message: Found
    snippet: str
    matches: Sequence[tuple[int, int]]


class Slow(PeerError):
    """Nothing was found within the time."""

    def __init__(self, within_ms: int) -> None:
        super().__init__(
            Code.BAD_RANGE,
            f"the search took longer than {within_ms} ms; name a conversation, a time, or rarer words",
        )


class Search:
    """Answers searches. Raises PeerError, Slow among them, and Unavailable."""

    def __init__(self, store: PgTexts, *, within_ms: int) -> None:
        self._store = store
        self._within_ms = within_ms
        self._turn = asyncio.Lock()
        self._worked_s = 0.0

    async def page(self, user: str, question: Question, before_id: int, limit: int) -> tuple[list[Hit], int]:
        """Hits below the msg_id, the newest first, and where the next page begins; 0: there is none."""
        wanted = words.terms(question.text)
        if not wanted:
            raise PeerError(Code.BAD_OPERATION, "name a word: letters or digits")
        conversations = await self._store.conversations(user, question.conversation_id)
        if not conversations:
            return [], 0  # also for who is no member, and where there is none
        query = words.tsquery(wanted, conversations)
        deadline = time.monotonic() + self._within_ms / 1_000
        hits: list[Hit] = []
        size = 0
        below = min(before_id, MAX_ID)
        while True:
            left_ms = int((deadline - time.monotonic()) * 1_000)
            try:
                if left_ms < LEAST_MS:
                    raise TooSlow
                rows = await self._store.look(
                    user,
                    query,
                    before_id=below,
                    from_user=question.from_user,
                    after_ms=question.after_ms,
                    before_ms=question.before_ms,
                    limit=LOOK_ROWS,
                    within_ms=left_ms,
                )
            except TooSlow as e:
                if not hits:
                    raise Slow(self._within_ms) from e
                return hits, below
            for row in rows:
                below = row.msg_id
                places = await self._places(row.said, wanted)
                if places:
                    hits.append(Hit(row, *words.snippet(row.said, places)))
                    size += len(row.body)
                if len(hits) == limit or size >= PAGE_BYTES or (hits and time.monotonic() > deadline):
                    return hits, below
            if len(rows) < LOOK_ROWS:
                return hits, 0

    async def _places(self, said: str, wanted: Sequence[words.Term]) -> list[tuple[int, int]]:
        """Where the words stand. A long text takes milliseconds of the loop that messages go through: all searches together
        rest as long as they worked."""
        async with self._turn:
            begun = time.monotonic()
            found = words.places(said, wanted)
            self._worked_s += time.monotonic() - begun
            if self._worked_s >= WORK_S:
                rest_s, self._worked_s = self._worked_s, 0.0
                await asyncio.sleep(rest_s)
        return found
