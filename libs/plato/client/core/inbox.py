"""The inbox: per conversation the cursor, the reorder buffer and the gap that a pull must fill.

A row moves the cursor only if nothing lies between: prev_seq ≤ cursor < seq (prev_seq is the seq of the row before it,
so a hole in the numbers is passed only by a row, or by a page, that says so). What comes too early waits in the reorder
buffer while pulls fetch the gap in pages from the cursor up; a page moves the cursor to the end of the range it covers.
A row is handed out once, in order, in the call that moves the cursor over it.

Memory: a few words per conversation; the reorder buffer is bounded over all conversations, and what does not fit is pulled.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

from plato.client.core.model import UNPLACED, Row
from plato.core.conversations import DIALOGUE_PREFIX, GROUP_PREFIX

BUFFER_ROWS: Final = 1_000
BUFFER_BYTES: Final = 4 * 1024 * 1024


@dataclass(slots=True)
class Thread:
    """One conversation's reading side. newest_seq: the greatest seq heard of, so newest_seq > cursor means a gap."""

    conversation_id: str
    peer: str = ""
    cursor: int = UNPLACED
    newest_seq: int = 0
    early: dict[int, Row] = field(default_factory=dict)  # by prev_seq
    title: str = ""  # these four: of a group, as of group_seq
    members: int = 0  # 0: not told yet
    left: bool = False
    group_seq: int = 0

    @property
    def placed(self) -> bool:
        """Whether the first cursor is known."""
        return self.cursor != UNPLACED

    @property
    def untold(self) -> bool:
        """Whether a Sync has still to tell a group's title and members, or whom a dialogue is with: this user's own rows,
        written on another device, do not."""
        if self.cursor <= 0:
            return False
        if self.conversation_id.startswith(GROUP_PREFIX):
            return self.members == 0 and not self.left
        return not self.peer and self.conversation_id.startswith(DIALOGUE_PREFIX)

    @property
    def behind(self) -> bool:
        """Whether rows are known of that are not stored."""
        return self.newest_seq > max(self.cursor, 0)


class Inbox:
    """All conversations of one device."""

    def __init__(self, threads: Iterable[Thread]) -> None:
        self._threads = {t.conversation_id: t for t in threads}
        self._early_rows = 0
        self._early_bytes = 0

    def threads(self) -> list[Thread]:
        """Every conversation."""
        return list(self._threads.values())

    def find(self, conversation_id: str) -> Thread | None:
        """The conversation, if it is known."""
        return self._threads.get(conversation_id)

    def get(self, conversation_id: str) -> Thread:
        """The conversation, known from now on."""
        thread = self._threads.get(conversation_id)
        if thread is None:
            thread = self._threads[conversation_id] = Thread(conversation_id)
        return thread

    def cursors(self) -> list[tuple[str, int]]:
        """(conversation_id, cursor) of every placed conversation, sorted by the ids' UTF-8 bytes, for Sync, which lists
        those that are newer; so of who is to be told anyway, the cursor is one too low."""
        pairs = [(t.conversation_id, t.cursor - t.untold) for t in self._threads.values() if t.placed]
        pairs.sort(key=lambda pair: pair[0].encode())
        return pairs

    def behind(self) -> list[str]:
        """The conversations with a gap."""
        return [t.conversation_id for t in self._threads.values() if t.behind]

    def place(self, thread: Thread, first_cursor: int) -> list[Row]:
        """A Sync told where a reader of this conversation starts; early rows may fit now."""
        if not thread.placed:
            thread.cursor = first_cursor
        return self._drain(thread)

    def offer(self, thread: Thread, row: Row) -> list[Row]:
        """A pushed row, or an own one by its receipt. Returns what became readable, in order."""
        if row.seq <= thread.cursor:
            return []
        thread.newest_seq = max(thread.newest_seq, row.seq)
        if not thread.placed and row.prev_seq == 0:
            thread.cursor = 0
        if thread.placed and row.prev_seq <= thread.cursor:
            thread.cursor = row.seq
            return [row, *self._drain(thread)]
        if (
            row.prev_seq not in thread.early
            and self._early_rows < BUFFER_ROWS
            and self._early_bytes + len(row.body) <= BUFFER_BYTES
        ):
            thread.early[row.prev_seq] = row
            self._early_rows += 1
            self._early_bytes += len(row.body)
        return []

    def page(
        self, thread: Thread, rows: Sequence[Row], covered_from: int, covered_to: int, newest_seq: int
    ) -> tuple[list[Row], bool]:
        """A pulled page, rows by rising seq. Returns what became readable, and whether the cursor moved or the gap closed.

        A page that begins beyond the cursor is of no use here and changes nothing.
        """
        if not thread.placed or covered_from > thread.cursor + 1:
            return [], False
        before = thread.cursor
        newest_seq = max(newest_seq, rows[-1].seq if rows else 0)
        upto = min(covered_to, newest_seq)  # what does not exist yet is not covered, whatever a page says
        readable = [row for row in rows if before < row.seq <= upto]
        thread.cursor = max(before, upto)
        thread.newest_seq = max(thread.newest_seq, newest_seq)
        readable += self._drain(thread)
        return readable, thread.cursor > before or not thread.behind

    def hint(self, thread: Thread, newest_seq: int) -> None:
        """The conversation is known to reach up to newest_seq."""
        thread.newest_seq = max(thread.newest_seq, newest_seq)

    def give_up(self, thread: Thread) -> None:
        """Its rows may not be read any more: no gap, nothing early."""
        for row in thread.early.values():
            self._forget(row)
        thread.early.clear()
        thread.newest_seq = max(thread.cursor, 0)

    def _drain(self, thread: Thread) -> list[Row]:
        """Moves early rows over the cursor as long as one fits; drops those that it has passed."""
        readable: list[Row] = []
        if not thread.early or not thread.placed:
            return readable
        for prev_seq in sorted(thread.early):
            if prev_seq > thread.cursor:
                break
            row = thread.early.pop(prev_seq)
            self._forget(row)
            if row.seq > thread.cursor:
                thread.cursor = row.seq
                readable.append(row)
        return readable

    def _forget(self, row: Row) -> None:
        self._early_rows -= 1
        self._early_bytes -= len(row.body)
