"""The switch: what a person decides over the figures' heads.

{"by": "load" | "distance" | "chance",     what orders the list; load is the ordinary way
 "first": ["edge-3"],                      these stand first, in this order, whatever their figures say
 "never": ["edge-1"],                      these are not listed
 "for_s": 3600,                            it ends by itself; 0 or left out: it stands until it is taken back
 "reason": "…"}                            for whoever finds it
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

MOST_NAMES: Final = 500
MOST_REASON: Final = 500
MOST_S: Final = 30 * 86_400


class By(StrEnum):
    """What orders the list."""

    LOAD = "load"
    DISTANCE = "distance"
    CHANCE = "chance"


@dataclass(frozen=True, slots=True)
class Override:
    """See the module. until_ms: Unix ms; 0: no end."""

    by: By = By.LOAD
    first: tuple[str, ...] = ()
    never: tuple[str, ...] = ()
    reason: str = ""
    until_ms: int = 0

    def stands(self, unix_ms: int) -> bool:
        """Whether it still counts."""
        return not self.until_ms or unix_ms < self.until_ms

    def shown(self) -> dict[str, Any]:
        """As JSON, for people and for the file."""
        return {
            "by": str(self.by),
            "first": list(self.first),
            "never": list(self.never),
            "reason": self.reason,
            "until_ms": self.until_ms,
        }


def ordered(raw: Any, unix_ms: int) -> Override:
    """An order of a person, as in the module. Raises ValueError in words."""
    if not isinstance(raw, Mapping):
        raise ValueError('an override is a JSON object, as {"never": ["edge-1"]}')
    if strange := sorted(set(map(str, raw)) - {"by", "first", "never", "for_s", "reason"}):
        raise ValueError(f"{strange[0]} is no part of an override; known: by, first, never, for_s, reason")
    for_s = raw.get("for_s", 0)
    if isinstance(for_s, bool) or not isinstance(for_s, int) or not 0 <= for_s <= MOST_S:
        raise ValueError(f"for_s: {for_s!r} must be whole seconds, 0 to {MOST_S}")
    made = _made(raw, unix_ms + 1000 * for_s if for_s else 0)
    if made.by is By.LOAD and not made.first and not made.never:
        raise ValueError("this would change nothing; give by, first or never")
    return made


def kept(raw: Any) -> Override:
    """One that was written as `shown`. Raises ValueError."""
    if not isinstance(raw, Mapping) or not isinstance(until_ms := raw.get("until_ms"), int):
        raise ValueError("no override is kept here")
    return _made(raw, until_ms)


def _made(raw: Mapping[Any, Any], until_ms: int) -> Override:
    try:
        by = By(raw.get("by", "load"))
    except ValueError:
        raise ValueError(f"by: {raw['by']!r} must be one of {', '.join(By)}") from None
    reason = raw.get("reason", "")
    if not isinstance(reason, str) or len(reason) > MOST_REASON:
        raise ValueError(f"reason: must be text of at most {MOST_REASON} characters")
    return Override(by, _names(raw, "first"), _names(raw, "never"), reason, until_ms)


def _names(raw: Mapping[Any, Any], key: str) -> tuple[str, ...]:
    found = raw.get(key, ())
    if not isinstance(found, list | tuple) or len(found) > MOST_NAMES or not all(isinstance(n, str) for n in found):
        raise ValueError(f"{key}: must be a list of gateways' names")
    return tuple(dict.fromkeys(found))
