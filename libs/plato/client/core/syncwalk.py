"""One Sync: pages keyed by conversation_id. The ids we know are cut into chunks of at most 500 cursors, each asked as the
range (after_id, upto_id]; the last chunk is open-ended, so that unknown conversations show too. A page says up to which id
it covers; the walk asks on from there.

Bounded by one page at a time; the cursors are read anew for each request, so pushes between pages count.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

MAX_CURSORS: Final = 500

Cursors = Sequence[tuple[str, int]]
"""(conversation_id, cursor) pairs, sorted by the ids' UTF-8 bytes."""


class SyncWalk:
    """Where a Sync stands: everything up to `after_id` is covered."""

    def __init__(self) -> None:
        self.after_id = ""
        self._upto_id = ""

    def ask(self, cursors: Cursors) -> tuple[str, str, Cursors]:
        """The next page: (after_id, upto_id, its cursors)."""
        after = self.after_id.encode()
        rest = [pair for pair in cursors if pair[0].encode() > after] if after else cursors
        chunk = rest[:MAX_CURSORS]
        self._upto_id = chunk[-1][0] if len(rest) > MAX_CURSORS else ""
        return self.after_id, self._upto_id, chunk

    def answered(self, more: bool, covered_id: str) -> bool | None:
        """A page came. True: ask on. False: all is covered. None: the page made no way, ask the same later."""
        if more:
            if covered_id.encode() <= self.after_id.encode():
                return None
            self.after_id = covered_id
            return True
        if self._upto_id:
            self.after_id = self._upto_id
            return True
        return False
