"""Search in one's own conversations: words → the index → what the asker may read → where the words stand → a page.

    turn of the user ─▸ the conversations, the one with the newest message first, PART at a time
         ─▸ per part the places that the index finds, the newest first ─▸ merged: a part is opened when its newest is due
         ─▸ texts of the page ─▸ compared with the words once more

A part bounds what the index does: it works for each place that it finds through all the conversations that are asked for at
once. All of it, waiting for a turn and for a connection too, takes msg.search_ms at most. Past it the page ends early where
something was found; where parts were left out it says so; where nothing was found it is refused in words. Memory: PART_KEYS
places per part, and the texts of one page.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from plato.core.codes import Code
from plato.core.errors import PeerError
from plato.core.ids import MAX_ID

from plato_msg.core import words
from plato_msg.texts_pg import CONVERSATIONS_MAX, Found, PgTexts, Place, TooSlow
from plato_msg.turns import Turns

PART: Final = 64
"""Conversations that one look is for."""
PART_KEYS: Final = 200
TEXTS_SHARE: Final = 0.2
"""Of the time, kept for the texts of what was found."""
WORK_S: Final = 0.002
"""So long the loop is held at most, but for one text; then searches rest."""
PAGE_BYTES: Final = 512 << 10
"""Of the hits of one page; what passes it ends the page."""
AT_ONCE: Final = 1
IN_ALL: Final = 4
"""Searches of one user: under way, and with those that wait. There are more connections than AT_ONCE."""
RETRY_MS: Final = 1_000


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


class Page(NamedTuple):
    """Hits, the newest first. below: where the next page begins; 0: there is none. left_out: where not everything was
    searched, what was, in words."""

    hits: list[Hit]
    below: int
    left_out: str = ""


class Slow(PeerError):
    """Nothing was found within the time."""

    def __init__(self, within_ms: int) -> None:
        super().__init__(
            Code.BAD_RANGE,
            f"the search took longer than {within_ms} ms; name a conversation, a time, or rarer words",
        )


class Crowded(PeerError):
    """The time was over before it was this search's turn."""

    def __init__(self) -> None:
        super().__init__(Code.BUSY, "too many search at the moment; the same again later")


@dataclass(slots=True)
class _Part:
    """Some of the conversations. below: what the index has not been asked for yet lies below it."""

    query: str
    conversations: int
    below: int
    keys: deque[Place] = field(default_factory=deque)
    opened: bool = False
    ended: bool = False

    @property
    def top(self) -> int:
        """No place that it still holds is newer; 0: it holds none."""
        if self.keys:
            return self.keys[0].msg_id
        return 0 if self.ended else self.below


class Search:
    """Answers searches. Raises PeerError (Slow, Crowded, TooMany among them), and Unavailable."""

    def __init__(self, store: PgTexts, *, within_ms: int) -> None:
        self._store = store
        self._within_ms = within_ms
        self._turns = Turns(AT_ONCE, IN_ALL, RETRY_MS)
        self._turn = asyncio.Lock()
        self._worked_s = 0.0

    async def page(self, user: str, question: Question, before_id: int, limit: int) -> Page:
        """Hits below the msg_id."""
        wanted = words.terms(question.text)
        if not wanted:
            raise PeerError(Code.BAD_OPERATION, "name a word: letters or digits")
        deadline = asyncio.get_running_loop().time() + self._within_ms / 1_000
        async with AsyncExitStack() as stack:
            try:
                async with asyncio.timeout_at(deadline):
                    await stack.enter_async_context(self._turns.of(user))
            except TimeoutError:
                raise Crowded from None
            return await self._page(user, question, wanted, min(before_id, MAX_ID), limit, deadline)

    async def _page(
        self, user: str, question: Question, wanted: Sequence[words.Term], below: int, limit: int, deadline: float
    ) -> Page:
        look_until = deadline - TEXTS_SHARE * self._within_ms / 1_000
        try:
            mine = await self._store.conversations(user, question.conversation_id, look_until)
        except TooSlow as e:
            raise (Crowded() if e.waited else Slow(self._within_ms)) from e
        left_out = ""
        if len(mine) > CONVERSATIONS_MAX:
            mine, left_out = mine[:CONVERSATIONS_MAX], _only(CONVERSATIONS_MAX)
        parts = [
            _Part(words.tsquery(wanted, [place.conversation_id for place in some]), len(some), below)
            for some in (mine[at : at + PART] for at in range(0, len(mine), PART))
        ]
        for n, part in enumerate(parts):
            part.below = min(below, mine[n * PART].msg_id + 1)
        hits: list[Hit] = []
        size = 0
        slow: TooSlow | None = None
        while parts and slow is None:
            keys, slow = await self._next(user, question, parts, limit - len(hits), look_until)
            if slow is not None and not keys and not hits:
                # Nothing that is certain to be the newest. What is there is shown, and said to be a part.
                keys = sorted((key for part in parts for key in part.keys), key=lambda key: -key.msg_id)[:limit]
                if not keys:
                    raise (Crowded() if slow.waited else Slow(self._within_ms)) from slow
                left_out = _only(sum(part.conversations for part in parts if part.opened))
            try:
                rows = await self._store.texts(keys, deadline) if keys else []
            except TooSlow as e:
                if not hits:
                    raise Slow(self._within_ms) from e
                return Page(hits, below, left_out)
            for row in rows:
                below = min(below, row.msg_id)
                places = await self._places(row.said, wanted)
                if places:
                    hits.append(Hit(row, *words.snippet(row.said, places)))
                    size += len(row.body)
                over = asyncio.get_running_loop().time() > deadline
                if len(hits) == limit or size >= PAGE_BYTES or (hits and over):
                    return Page(hits, below, left_out)
            if keys:
                below = min(below, keys[-1].msg_id)  # those without a text were changed meanwhile
            if slow is None and not any(part.top for part in parts):
                return Page(hits, 0, left_out)
        if slow is not None and not hits:
            raise Slow(self._within_ms) from slow
        return Page(hits, below if slow is not None else 0, left_out)

    async def _next(
        self, user: str, question: Question, parts: Sequence[_Part], count: int, look_until: float
    ) -> tuple[list[Place], TooSlow | None]:
        """The next places of all parts, the newest first; and what ended it early."""
        keys: list[Place] = []
        while len(keys) < count:
            part = max(parts, key=lambda part: part.top)
            if not part.top:
                break
            if part.keys:
                keys.append(part.keys.popleft())
                continue
            try:
                found = await self._store.look(
                    user,
                    part.query,
                    before_id=part.below,
                    from_user=question.from_user,
                    after_ms=question.after_ms,
                    before_ms=question.before_ms,
                    limit=PART_KEYS,
                    until=look_until,
                )
            except TooSlow as e:
                return keys, e
            part.opened = True
            part.keys.extend(found)
            part.ended = len(found) < PART_KEYS
            part.below = found[-1].msg_id if found else 0
        return keys, None

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


def _only(conversations: int) -> str:
    return (
        f"only the {conversations} conversations with the newest messages were searched; name a conversation, or rarer"
        " words, to search the others"
    )
