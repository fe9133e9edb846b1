"""When the members of a large conversation are told of new messages: once per window, however many came in it.

    note     a message is committed: its conversation is due at the end of a window, which it opens or joins
    take     what is due now: the conversation, its newest seq, and the time within which its members are to pull
    done     everybody was told: the next window may end

A window is `first_ms` × members / push_members; while messages go on it doubles from one to the next. The members pull
within the window, or longer: so that as many as were online last time pull no faster than PULLS_PER_S, and the next notice
waits for that. Always at most `most_ms`. So one message to a quiet group is told soon, and a stream costs the same however
fast it runs.

Memory: one entry per conversation that had a message within the last FORGET_MS.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, NamedTuple

PULLS_PER_S: Final = 500
"""Of one conversation's members together: a pull costs the whole path about as much as a message to one person does."""
FORGET_MS: Final = 60_000
_SWEEP_AT: Final = 256


class Notice(NamedTuple):
    """What is to be told."""

    conversation_id: str
    seq: int
    within_ms: int


@dataclass(slots=True)
class _Large:
    size: int
    seq: int = 0
    """Newest committed."""
    window_ms: int = 0
    within_ms: int = 0
    """What the next notice, or the last one, tells."""
    due_ms: int = -1
    """-1: nothing is to be told."""
    ended_ms: int = -1 << 60
    """When the last window ended."""
    online: int = 0
    telling: bool = False


class Windows:
    """The windows of one msg process."""

    def __init__(self, first_ms: int, most_ms: int, push_members: int) -> None:
        self._first_ms = first_ms
        self._most_ms = max(first_ms, most_ms)
        self._push_members = max(1, push_members)
        self._large: dict[str, _Large] = {}

    def note(self, conversation_id: str, seq: int, size: int, now_ms: int) -> None:
        """A message is committed."""
        large = self._large.get(conversation_id)
        if large is None:
            if len(self._large) % _SWEEP_AT == _SWEEP_AT - 1:
                self._sweep(now_ms)
            large = self._large[conversation_id] = _Large(size, online=size)  # all of them, until one notice knows
        large.seq = max(large.seq, seq)
        large.size = size
        if large.due_ms >= 0:
            return
        least_ms = min(self._most_ms, max(self._first_ms, self._first_ms * size // self._push_members))
        busy = now_ms - large.ended_ms <= large.within_ms
        large.window_ms = min(self._most_ms, max(least_ms, 2 * large.window_ms if busy else 0))
        large.due_ms = now_ms + least_ms
        if busy:
            large.due_ms = max(large.due_ms, large.ended_ms + max(large.window_ms, large.within_ms))
        pulling_ms = large.online * 1_000 // PULLS_PER_S
        large.within_ms = min(self._most_ms, max(large.window_ms, pulling_ms))

    def take(self, now_ms: int, limit: int) -> list[Notice]:
        """What is due, the longest first, at most `limit`; none of a conversation before `done` was said of its last one."""
        due = sorted(
            (large.due_ms, conversation_id)
            for conversation_id, large in self._large.items()
            if 0 <= large.due_ms <= now_ms and not large.telling
        )
        notices = []
        for _, conversation_id in due[:limit]:
            large = self._large[conversation_id]
            large.due_ms, large.ended_ms, large.telling = -1, now_ms, True
            notices.append(Notice(conversation_id, large.seq, large.within_ms))
        return notices

    def done(self, conversation_id: str, online: int) -> None:
        """The notice went out, to so many devices."""
        large = self._large[conversation_id]
        large.telling, large.online = False, online

    def next_ms(self) -> int | None:
        """When `take` has something to give next; None: not before a `note` or a `done`."""
        return min((x.due_ms for x in self._large.values() if x.due_ms >= 0 and not x.telling), default=None)

    def _sweep(self, now_ms: int) -> None:
        for conversation_id, large in list(self._large.items()):
            if large.due_ms < 0 and not large.telling and now_ms - large.ended_ms > FORGET_MS:
                del self._large[conversation_id]
