"""What a person at the terminal of `plato up` hears of deaths: one line each, and of one that keeps dying a line with a
count now and then.

    told(name, how, now) → the line to print, or None: it is counted into a later one

Memory: one entry per process name.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

WINDOW_S: Final = 60.0
LINES_PER_WINDOW: Final = 3
"""Of one process; what dies more often is in a loop, and its log says more than a fourth line."""


@dataclass(slots=True)
class _Told:
    since: float
    lines: int = 0
    silent: int = 0


class Deaths:
    """Decides which deaths are told."""

    def __init__(self) -> None:
        self._of: dict[str, _Told] = {}

    def told(self, name: str, how: str, now: float) -> str | None:
        """how: "signal 9", or its last words; now: seconds of any clock that does not go back."""
        entry = self._of.setdefault(name, _Told(now))
        silent = entry.silent
        if now - entry.since >= WINDOW_S:
            entry.since, entry.lines, entry.silent = now, 0, 0
        if entry.lines >= LINES_PER_WINDOW:
            entry.silent += 1
            return None
        entry.lines += 1
        entry.silent = 0
        why = f" ({how})" if how else ""
        before = f", after {silent} more that were not told" if silent else ""
        return f"{name} ended{why}{before}, started again"


def how(code: int) -> str:
    """An exit code in words; as subprocess counts them: -9 is signal 9."""
    return f"signal {-code}" if code < 0 else f"exit code {code}"
