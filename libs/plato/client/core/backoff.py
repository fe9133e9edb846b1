"""How long to stay away: after a round in which no gateway served us, and after a connection that was lost.

Nobody told a code: nothing listens, or what does is mute, and who is back is to be found soon. A code sent us away, or
connections do not stay: who answers is to be spared. A crowd that lost its gateway comes back spread over the delay that
the server told; past that it is the server that gives each its turn.
"""

from __future__ import annotations

from typing import Final

from plato.client.core.repeats import RETRY_MAX_MS, Chance, jittered_ms

BACKOFF_MIN_MS: Final = 250
BACKOFF_MAX_MS: Final = 5_000
"""Between rounds in which nobody told a code."""
TOLD_BACKOFF_MAX_MS: Final = 30_000
"""Between rounds in which a code sent us away, and between connections that do not stay."""
STAYED_MS: Final = 2_000
"""A connection that stayed this long counts as a success."""
BRIEF_FREE: Final = 4
"""So many in a row may not stay before the next one is put off: gateways that die one after another are no fault of the
one that is tried next, but who lets us in and throws us out again and again is to be spared."""


class Backoff:
    """What went wrong so far."""

    def __init__(self, chance: Chance) -> None:
        self._chance = chance
        self._failed = 0  # rounds in a row
        self._brief = 0  # connections in a row that did not stay
        self._told_ms = 0
        self.told = False
        """A code came in this round."""

    @property
    def clean(self) -> bool:
        """No round failed since the last connection was lost."""
        return self._failed == 0

    def begin_round(self) -> None:
        """Nothing came yet."""
        self.told, self._told_ms = False, 0

    def stay_away(self, retry_ms: int) -> None:
        """A gateway said for how long; the one that is free first decides."""
        self._told_ms = min(retry_ms, self._told_ms or retry_ms, RETRY_MAX_MS)

    def failed_ms(self) -> int:
        """A round failed: the wait before the next one."""
        most_ms = TOLD_BACKOFF_MAX_MS if self.told else BACKOFF_MAX_MS
        delay_ms = jittered_ms(BACKOFF_MIN_MS, most_ms, self._failed, self._chance)
        self._failed += 1
        return max(delay_ms, self._told_ms)

    def lost_ms(self, stood_ms: int, most_ms: int) -> int:
        """A connection was lost that stood so long: the wait before it is resumed, a random part of what the server told."""
        delay_ms = int(self._chance() * most_ms)
        self._failed = 0
        self._brief = 0 if stood_ms >= STAYED_MS else self._brief + 1
        if self._brief > BRIEF_FREE:
            more = self._brief - BRIEF_FREE - 1
            delay_ms += jittered_ms(BACKOFF_MIN_MS, TOLD_BACKOFF_MAX_MS, more, self._chance)
        return delay_ms
