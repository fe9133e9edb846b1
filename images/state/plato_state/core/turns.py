"""Turns at login: a shard lets so many Logins and ReConns in a second; whoever comes when there is no room is told when.

    asks ─▸ room now ─▸ in
         └▸ none ─▸ a turn of its own, PER_S of them a second ─▸ told how long ─▸ asks again then ─▸ in

A crowd (a gateway died) so comes back at the pace at which it can be served, each client asking twice, instead of in waves
of repeats that nobody answers. Turns are handed out TURNS_AHEAD_MS ahead; whoever is beyond is told to ask again when the
last one is over, a little later for some than for others. A turn that is not taken within KEPT_MS is forgotten.

Memory: one entry per turn that is handed out, PER_S × (TURNS_AHEAD_MS + KEPT_MS) at most.
"""

from __future__ import annotations

from typing import Final

from plato_state.core.wheel import spread

TURNS_AHEAD_MS: Final = 20_000
KEPT_MS: Final = 10_000
"""How long a turn waits for its client: an answer may get lost, and is repeated."""
BURST_MS: Final = 500
"""Room that nobody used is kept so long: half a second's worth may come in at once."""
_US: Final = 1_000


class Turns:
    """The turns of one shard. `now_ms` never goes back."""

    def __init__(self, per_s: int) -> None:
        self._step_us = 1_000_000 // per_s
        self._kept_us = max(0, BURST_MS * _US - self._step_us)
        self._free_us = -self._kept_us  # when the next turn is that nobody has
        self._turns: dict[int, int] = {}  # conn_id → its turn, µs; in rising order

    def __len__(self) -> int:
        return len(self._turns)

    def ask(self, conn_id: int, now_ms: int) -> int:
        """A connection wants to log in. 0: it may, now; else in how many ms it is to ask again."""
        now_us = now_ms * _US
        self._forget(now_us)
        turn_us = self._turns.get(conn_id)
        if turn_us is not None:
            if turn_us > now_us:
                return -(-(turn_us - now_us) // _US)
            del self._turns[conn_id]
            return 0
        self._free_us = max(self._free_us, now_us - self._kept_us)
        if self._free_us <= now_us:
            self._free_us += self._step_us
            return 0
        wait_ms = -(-(self._free_us - now_us) // _US)
        if wait_ms > TURNS_AHEAD_MS:
            return wait_ms + spread(conn_id, TURNS_AHEAD_MS // 2)
        self._turns[conn_id] = self._free_us
        self._free_us += self._step_us
        return wait_ms

    def forget(self, conn_id: int) -> None:
        """The connection is gone; its turn lapses."""
        self._turns.pop(conn_id, None)

    def _forget(self, now_us: int) -> None:
        while self._turns:
            conn_id, turn_us = next(iter(self._turns.items()))
            if turn_us + KEPT_MS * _US >= now_us:
                return
            del self._turns[conn_id]
