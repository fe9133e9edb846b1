"""Which stamps a worker may use: parts of what this link reserved, never one twice for one worker index.

Workers of one pod share a worker_id and mint in different slots (slot % W), so one window serves them all at once. Two
processes at one index, one after the other, would mint in the same slots: the second gets only stamps that no
earlier one was granted. Another link starts at the end of all earlier reservations, so links need not agree.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class _Held:
    boot: int
    from_ms: int
    until_ms: int


class Grants:
    """What was reserved, and what each worker index holds of it. Times are Unix ms; windows are [from, until)."""

    def __init__(self) -> None:
        self._from_ms = 0  # the newest run of reservations without a gap
        self._until_ms = 0
        self._held: dict[int, _Held] = {}

    @property
    def until_ms(self) -> int:
        """The end of what is reserved; 0: nothing yet."""
        return self._until_ms

    def reserved(self, from_ms: int, until_ms: int) -> None:
        """Another window was reserved, after all earlier ones; it extends what every present worker holds."""
        if until_ms <= from_ms:
            return
        extends = from_ms == self._until_ms
        if not extends:
            self._from_ms = from_ms
        for held in self._held.values():
            if not extends or held.until_ms != self._until_ms:
                held.from_ms = from_ms
            held.until_ms = until_ms
        self._until_ms = until_ms

    def window(self, index: int, boot: int) -> tuple[int, int]:
        """(from, until) that process `boot` at `index` may use; empty (from = until) before the next reservation."""
        held = self._held.get(index)
        if held is None:
            held = self._held[index] = _Held(boot, self._from_ms, self._until_ms)
        elif held.boot != boot:
            # Everything up to until was granted to the process before.
            held = self._held[index] = _Held(boot, held.until_ms, held.until_ms)
        return held.from_ms, held.until_ms
