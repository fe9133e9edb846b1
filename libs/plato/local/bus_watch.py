"""What a person hears of a bus that does not answer: one line when that begins, one when it ends, whoever saw it first.

look({process: why the bus does not answer it}, now) → the line to print, or None
"""

from __future__ import annotations

from collections.abc import Mapping

WHAT_WAITS = "what is sent waits for it; what was stored can be read"


def words(away: Mapping[str, str]) -> str:
    """away: {process: why, "" where it answers}; "" if it answers all of them."""
    who = [name for name, why in away.items() if why]
    if not who:
        return ""
    return f"the bus does not answer {', '.join(who)}: {away[who[0]]}; {WHAT_WAITS}"


class BusWatch:
    """Decides what is told. Between the two lines processes may come to see it and cease to."""

    def __init__(self) -> None:
        self._since_s: float | None = None

    def look(self, away: Mapping[str, str], now_s: float) -> str | None:
        """now_s: of any clock that does not go back."""
        said = words(away)
        if said and self._since_s is None:
            self._since_s = now_s
            return said
        if not said and self._since_s is not None:
            took_s, self._since_s = now_s - self._since_s, None
            return f"the bus answers again, after {took_s:.0f} s"
        return None
