"""What /healthz and /readyz say: ill is what only a restart can help against, not ready is everything else that keeps us
from working.

Each cluster and the round over all of them leave a life-sign when they have seen everything they look at, or have told a
person why they could not. Without one for SILENT_S the process is ill: it looks healthy to nobody while it does nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

SILENT_S: Final = 120.0


class Health:
    """Life-signs by name, and troubles in words by name."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._signs: dict[str, float] = {}
        self._troubles: dict[str, str] = {"start": "starting"}

    def expect(self, name: str) -> None:
        """From now on this part must give signs."""
        self._signs.setdefault(name, self._clock())

    def sign(self, name: str) -> None:
        """This part lives."""
        self._signs[name] = self._clock()

    def drop(self, name: str) -> None:
        """This part has ended as it should."""
        self._signs.pop(name, None)
        self._troubles.pop(name, None)

    def trouble(self, name: str, words: str) -> None:
        """Why this part does not work; empty: it does."""
        if words:
            self._troubles[name] = words
        else:
            self._troubles.pop(name, None)

    def ill(self) -> str:
        """For /healthz."""
        now = self._clock()
        found = []
        for name, at in self._signs.items():
            if now - at > SILENT_S:
                why = f" ({self._troubles[name]})" if name in self._troubles else ""
                found.append(f"{name}: no sign of life for {now - at:.0f} s{why}")
        return "; ".join(found)

    def not_ready(self) -> str:
        """For /readyz. Troubles of single clusters are told by their conditions; the operator serves the others."""
        return next((words for name, words in self._troubles.items() if not name.startswith("cluster ")), "")
