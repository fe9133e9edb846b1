"""The index of texts: the owner of a partition reads what was committed there, behind the commits, and writes its words.

    committed(plan) ─▸ conversations that have something new ─▸ rows above their marks ─▸ words ─▸ im_text and the marks
    partitions taken ─▸ all conversations, a page at a time: those of ours that lie behind their mark

Nothing waits for it: it has connections of its own, locks rows of its own tables only, and rests longer than it worked. What
a process that died had in memory is found again by whoever takes its partitions, since the marks say how far the index is.
Memory: the rows of a turn; WAITING ids, past which the next walk over all conversations finds the rest.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter as Counts
from collections.abc import Callable, Collection
from typing import Final

from google.protobuf.message import DecodeError
from plato.core.conversations import partition_of
from plato.core.errors import Unavailable
from plato.runtime import logs
from plato.wire.v1 import content_pb2 as content
from prometheus_client import Counter, Gauge

from plato_msg.core import words
from plato_msg.core.batch import Plan
from plato_msg.texts_pg import PgTexts, Text, Unread

WAITING: Final = 100_000
CONVERSATIONS: Final = 50
"""Of one turn."""
ROWS: Final = 20
"""Of one conversation in one turn."""
RESTS: Final = 3
"""A rest is so many times as long as the turn before it."""
WALK_PAGE: Final = 2_000
LOOK_S: Final = 1.0
BACK_OFF_S: Final = 2.0
_indexed = Counter("plato_msg_texts_indexed_total", "Messages whose words were put into the index.")
_behind = Gauge("plato_msg_texts_waiting", "Conversations of which something is not in the index yet.")


class Texts:
    """Keeps the index of the partitions that this process owns. `run` works until cancelled."""

    def __init__(self, store: PgTexts, held: Callable[[], Collection[int]], partitions: int) -> None:
        """held: the partitions that are ours now."""
        self._store = store
        self._held = held
        self._partitions = partitions
        self._waiting: dict[str, None] = {}
        self._work = asyncio.Event()
        self._walked: frozenset[int] = frozenset()
        """Partitions whose conversations are gone through, since they are ours."""
        self._walk_from: str | None = None
        """The walk has come so far; None: none is on its way."""
        self._log = logs.get("texts")

    def committed(self, plan: Plan) -> None:
        """A batch was committed."""
        if plan.conversations:
            if len(self._waiting) < WAITING:
                self._waiting.update(dict.fromkeys(plan.conversations))
            else:
                self._walked = frozenset()
            self._work.set()

    async def run(self) -> None:
        """Works until cancelled."""
        while True:
            begun = time.monotonic()
            try:
                busy = await self.step()
            except Unavailable as e:
                self._log.warning("the index of texts waits", reason=str(e))
                busy = False
                await asyncio.sleep(BACK_OFF_S)
            _behind.set(len(self._waiting))
            if busy:
                await asyncio.sleep(RESTS * (time.monotonic() - begun))
                continue
            self._work.clear()
            if not self._waiting:
                try:
                    async with asyncio.timeout(LOOK_S):
                        await self._work.wait()
                except TimeoutError:
                    pass

    async def step(self) -> bool:
        """One turn; False: there was nothing to do. Raises Unavailable; what was not done waits."""
        held = frozenset(self._held())
        if held - self._walked:
            self._walk_from = ""
        self._walked = held
        if self._walk_from is not None and len(self._waiting) < CONVERSATIONS:
            found, after = await self._store.behind(self._walk_from, WALK_PAGE)
            self._walk_from = after or None
            self._waiting.update(dict.fromkeys(found))
        turn = list(self._waiting)[:CONVERSATIONS]
        for conversation_id in turn:  # before it is read: what is committed from now on waits again
            del self._waiting[conversation_id]
        ours = [c for c in turn if partition_of(c, self._partitions) in held]
        if ours:
            try:
                unread = await self._store.after(ours, ROWS)
                await self._index(unread)
            except BaseException:
                self._waiting.update(dict.fromkeys(ours))
                raise
            counts = Counts(row.conversation_id for row in unread)
            # There is more; the others go first.
            self._waiting.update((c, None) for c, count in counts.items() if count == ROWS)
        return bool(turn) or self._walk_from is not None

    async def _index(self, unread: list[Unread]) -> None:
        if not unread:
            return
        marks = {row.conversation_id: row.seq for row in unread}
        rows = {(row.conversation_id, row.seq): row for row in unread}
        changed = {
            (row.conversation_id, seq): None for row in unread for seq in [changes(row)] if seq and seq < row.seq
        }
        for row in await self._store.rows([place for place in changed if place not in rows]) if changed else ():
            rows[row.conversation_id, row.seq] = row
        texts = []
        for row in rows.values():
            texts.append(text_of(row))
            await asyncio.sleep(0)  # a long text takes milliseconds: messages go between
        await self._store.write(texts, marks)
        _indexed.inc(sum(bool(text.said) for text in texts))


def said(msg_type: int, body: bytes) -> str:
    """What a body says in words; "" for what is an application's own."""
    try:
        if msg_type == content.TEXT:
            return body.decode().replace("\x00", "")
        if msg_type == content.RICH:
            rich = content.Rich.FromString(body)
            return "\n".join(filter(None, [rich.text, *(a.name for a in rich.attachments)])).replace("\x00", "")
    except (DecodeError, UnicodeDecodeError):
        pass
    return ""


def changes(row: Unread) -> int:
    """The seq of the message that an operation changed; 0: it is none."""
    if row.msg_type not in (content.RECALL, content.EDIT):
        return 0
    try:
        return content.Operation.FromString(row.body).seq
    except DecodeError:
        return 0


def text_of(row: Unread) -> Text:
    """A message as the index has it."""
    text = "" if row.recalled else said(row.msg_type, row.body)
    found = " ".join(words.lexemes(text, row.conversation_id)) if text else ""
    return Text(row.conversation_id, row.seq, row.msg_id, row.changed_seq, text, found)
