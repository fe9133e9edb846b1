"""(run, push_no) of one connection: what came, what may be acknowledged, when only a Sync can tell what was lost (R4).

push_no is consecutive within a run. A jump, or a greater run, means that frames may have been lost: a Sync is due, and
nothing from there on is acknowledged before that Sync and the pulls it asked for are stored. A frame whose content could
not be stored yet (its conversation has a gap) holds the acknowledgement below itself. Memory: one number per such
conversation.
"""

from __future__ import annotations

from enum import Enum
from typing import Final

_SYNC: Final = ""  # no conversation has an empty id


class Arrival(Enum):
    """What a numbered frame is."""

    NEXT = "next"
    REPEAT = "repeat"  # of this run and seen before: acknowledge again
    STALE = "stale"  # of a lower run: ignore
    JUMP = "jump"  # something was lost, or a new run began: Sync


class PushLine:
    """The numbers of one connection."""

    def __init__(self) -> None:
        self.run = 0
        self._seen = 0
        self._holds: dict[str, int] = {}  # conversation (or _SYNC) → first push_no that it keeps back
        self._told = (0, 0)
        self._tell_again = False

    def arrive(self, run: int, push_no: int) -> Arrival:
        """A numbered frame came; its content is handled by the caller, save for STALE."""
        if run < self.run:
            return Arrival.STALE
        if run > self.run:
            self._begin(run, push_no)
            return Arrival.JUMP
        if push_no <= self._seen:
            self._tell_again = True
            return Arrival.REPEAT
        jumped = push_no > self._seen + 1
        if jumped:
            self._hold(_SYNC, self._seen + 1)
        self._seen = push_no
        return Arrival.JUMP if jumped else Arrival.NEXT

    def hint(self, run: int, push_no: int) -> bool:
        """The server's newest numbers by another frame. True: something was lost, Sync."""
        if run < self.run or (run == self.run and push_no <= self._seen):
            return False
        if run > self.run:
            self._begin(run, push_no)
        else:
            self._hold(_SYNC, self._seen + 1)
            self._seen = push_no
        return True

    def adopt(self, run: int, push_no: int) -> None:
        """The numbers at the commit. The Sync that committed reads after them, so it covers whatever came before: no
        jump. What came numbered ahead of this answer keeps its hold until that Sync ends."""
        if run > self.run:
            self.run, self._seen = run, push_no
            self._holds.clear()
        elif run == self.run:
            self._seen = max(self._seen, push_no)

    def sync_due(self) -> None:
        """The newest frame asked for a Sync: it is acknowledged when that has ended."""
        self._hold(_SYNC, self._seen)

    def synced(self, behind: list[str]) -> None:
        """The Sync ended; `behind` are the conversations that it, or a push, left with a gap: they keep holding."""
        first = self._holds.pop(_SYNC, None)
        if first is not None:
            for conversation_id in behind:
                self._hold(conversation_id, first)

    def hold(self, conversation_id: str) -> None:
        """The newest frame's content waits for a pull of this conversation."""
        self._hold(conversation_id, self._seen)

    def release(self, conversation_id: str) -> None:
        """This conversation has no gap any more."""
        self._holds.pop(conversation_id, None)

    @property
    def stored(self) -> tuple[int, int]:
        """The newest (run, push_no) up to which everything is stored, or will be by the writes of this round."""
        return self.run, self._free()

    def acknowledgement(self) -> tuple[int, int] | None:
        """What to acknowledge now, if it is news or was asked for again."""
        newest = max(self.stored, self._told)
        if newest[1] == 0 or (newest == self._told and not self._tell_again):
            return None
        self._told, self._tell_again = newest, False
        return newest

    def _free(self) -> int:
        if not self._holds:
            return self._seen
        return min(self._seen, min(self._holds.values()) - 1)

    def _begin(self, run: int, push_no: int) -> None:
        """A greater run: its frames before this one may be lost; old holds now hold the new run from its start."""
        self.run, self._seen = run, push_no
        self._holds = dict.fromkeys(self._holds, 1)
        self._holds[_SYNC] = 1
        self._tell_again = False

    def _hold(self, key: str, push_no: int) -> None:
        push_no = max(1, push_no)
        self._holds[key] = min(push_no, self._holds.get(key, push_no))
