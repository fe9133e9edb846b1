"""What may stand in a name that people read: titles, names of files, user_ids. What shows nothing, and what turns
the direction of text, makes two names look alike, or one look like another kind of file; it is taken away, or refused.

    never         controls, marks and overrides of direction, zero-width spaces, fillers, tags by themselves
    only where    joiners within words of scripts that join, or between emoji; variation selectors behind what they vary;
    they work     tags behind a black flag; blanks of Braille behind a pattern

The tables are those of clients/web/src/core/visible.ts; tests of both read libs/plato/tests/visible.json. Ranges of code
points, not categories: those depend on the version of Unicode that each side was built with.
"""

from __future__ import annotations

import re
from typing import Final, TypeAlias

Ranges: TypeAlias = tuple[tuple[int, int], ...]

NEVER: Final[Ranges] = (
    (0x00, 0x1F),
    (0x7F, 0x9F),
    (0xAD, 0xAD),  # soft hyphen
    (0x34F, 0x34F),  # grapheme joiner
    (0x61C, 0x61C),  # Arabic letter mark
    (0x115F, 0x1160),  # Hangul fillers
    (0x17B4, 0x17B5),
    (0x200B, 0x200B),  # zero-width space
    (0x200E, 0x200F),  # marks of direction
    (0x2028, 0x202E),  # separators; embeddings, overrides
    (0x2060, 0x206F),  # word joiner, isolates, deprecated ones
    (0x3164, 0x3164),
    (0xFEFF, 0xFEFF),
    (0xFFA0, 0xFFA0),
    (0xFFF0, 0xFFFC),
    (0x1BCA0, 0x1BCA3),
    (0x1D159, 0x1D159),
    (0x1D173, 0x1D17A),
    (0xE0000, 0xE001F),
    (0xE0080, 0xE00FF),
    (0xE01F0, 0xE0FFF),
)
JOINING: Final[Ranges] = (
    (0x600, 0x8FF),  # Arabic, Syriac, N'Ko and their like
    (0x900, 0xDFF),  # India and Sri Lanka
    (0xF00, 0x109F),  # Tibetan, Burmese
    (0x1700, 0x18AF),  # Philippines, Khmer, Mongolian
    (0x1900, 0x1CFF),
    (0xA800, 0xABFF),
    (0x10A00, 0x11FFF),
    (0x1E900, 0x1E95F),  # Adlam
)
VIRAMAS: Final[Ranges] = tuple(
    (code, code)
    for code in (
        *(0x94D, 0x9CD, 0xA4D, 0xACD, 0xB4D, 0xBCD, 0xC4D, 0xCCD, 0xD4D, 0xDCA),
        *(0xF84, 0x1039, 0x103A, 0x1714, 0x1734, 0x17D2, 0x1A60, 0x1B44, 0x1BAA),
    )
)
"""Behind them a joiner works at the end of a word too."""
EMOJI: Final[Ranges] = ((0x2190, 0x2BFF), (0xFE0F, 0xFE0F), (0x1F000, 0x1FAFF), (0xE007F, 0xE007F))
VARIED: Final[Ranges] = (
    (0x23, 0x23),
    (0x2A, 0x2A),
    (0x30, 0x39),
    (0xA9, 0xA9),
    (0xAE, 0xAE),
    (0x1000, 0x109F),
    (0x203C, 0x3299),
    (0x3400, 0x9FFF),
    (0xA840, 0xA877),
    (0xF900, 0xFAFF),
    (0xFF00, 0xFFEF),
    (0x1F000, 0x1FAFF),
    (0x20000, 0x3FFFF),
)
"""What variation selectors stand behind."""
HAN: Final[Ranges] = ((0x3400, 0x9FFF), (0xF900, 0xFAFF), (0x20000, 0x3FFFF))
MONGOLIAN: Final[Ranges] = ((0x1800, 0x180A), (0x1810, 0x18AF))
BEHIND: Final[tuple[tuple[Ranges, Ranges], ...]] = (
    (((0xFE00, 0xFE0F),), VARIED),
    (((0xE0100, 0xE01EF),), HAN),
    (((0x180B, 0x180F),), MONGOLIAN),
    (((0xE0020, 0xE007F),), ((0x1F3F4, 0x1F3F4), (0xE0020, 0xE007E))),
    (((0x2800, 0x2800),), ((0x2801, 0x28FF),)),
)
"""(characters, what they must stand behind)."""
NON_JOINER: Final = 0x200C
JOINER: Final = 0x200D


def _class(*tables: Ranges) -> str:
    return "[" + "".join(f"{chr(first)}-{chr(last)}" for table in tables for first, last in table) + "]"


_SUSPECT: Final = re.compile(_class(NEVER, ((NON_JOINER, JOINER),), *(characters for characters, _ in BEHIND))).search


def plain(text: str) -> str:
    """The text without what shows nothing, or turns the rest."""
    if _SUSPECT(text) is None:
        return text
    kept: list[int] = []
    codes = [code for code in map(ord, text) if not _in(code, NEVER)]
    for place, code in enumerate(codes):
        before = kept[-1] if kept else 0
        if code in (NON_JOINER, JOINER):
            if not _joins(code, before, codes[place + 1] if place + 1 < len(codes) else 0):
                continue
        elif any(_in(code, characters) and not _in(before, behind) for characters, behind in BEHIND):
            continue
        kept.append(code)
    return "".join(map(chr, kept))


def is_plain(text: str) -> bool:
    """Whether nothing of it would be taken away."""
    return plain(text) == text


def _joins(code: int, before: int, after: int) -> bool:
    if _in(before, VIRAMAS):
        return True
    if any(_in(after, characters) for characters, _ in BEHIND):
        return False  # it does not stand behind what it must
    if _in(before, JOINING):
        return _in(after, JOINING)
    return code == JOINER and _in(before, EMOJI) and _in(after, EMOJI)


def _in(code: int, table: Ranges) -> bool:
    return any(first <= code <= last for first, last in table)
