"""Segments of reserved seqs in memory, per conversation: at most two ranges, the one in use and the one fetched ahead.

    take → numbers, or None: reserve and `add`           running_low → fetch the next one ahead

Bounded by MAX_CONVERSATIONS, the least recently used one goes first; what is dropped is a hole, which prev_seq jumps.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

MAX_CONVERSATIONS: Final = 10_000
LOW: Final = 500
"""Below so many numbers left the next segment is fetched ahead."""


class Segments:
    """Ranges [next, last] of every conversation that lately got a number."""

    def __init__(self, max_conversations: int = MAX_CONVERSATIONS) -> None:
        self._max = max_conversations
        self._ranges: OrderedDict[str, list[tuple[int, int]]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._ranges)

    def take(self, conversation: str, count: int, above: int) -> int | None:
        """The first of `count` consecutive numbers greater than `above`; None: no range holds them. Ranges that are too
        short, or passed by `above`, are dropped."""
        ranges = self._ranges.get(conversation, [])
        while ranges:
            begin, last = ranges[0]
            first = max(begin, above + 1)
            if first + count - 1 <= last:
                ranges[0] = (first + count, last)
                self._ranges.move_to_end(conversation)
                return first
            del ranges[0]
        self._ranges.pop(conversation, None)
        return None

    def running_low(self, conversation: str) -> bool:
        """Whether it is time to fetch its next segment."""
        ranges = self._ranges.get(conversation, [])
        return sum(last - begin + 1 for begin, last in ranges) < LOW

    def add(self, conversation: str, first: int, last: int) -> None:
        """A newly reserved range; an empty one is none. One that follows the range in use lengthens it, so that a run may
        cross the border."""
        if first > last:
            return
        ranges = self._ranges.setdefault(conversation, [])
        if ranges and ranges[-1][1] + 1 == first:
            ranges[-1] = (ranges[-1][0], last)
        else:
            ranges.append((first, last))
        self._ranges.move_to_end(conversation)
        while len(self._ranges) > self._max:
            self._ranges.popitem(last=False)

    def clear(self) -> None:
        """Drops everything."""
        self._ranges.clear()
