"""Words of texts and of queries: what is put into the index, what is looked for, and where it stands.

    text   → folded characters → runs: a word of letters and digits, or a run of a script that writes no spaces
    lexemes of a word: itself. Of a run: each pair of neighbours, and its last character
    query  a word is found where one begins with it; a run is found by its pairs, a single character by what begins with it

So 你好 is found in 大家你好吗, which trigrams could not do: a Chinese word has two characters. Pairs alone would
find 你好 and 好吗 apart, so what the index finds is compared once more (`places`). Folding takes case, width and the marks
of European letters away.
"""

from __future__ import annotations

import functools
import hashlib
import unicodedata
from collections.abc import Sequence
from typing import Final, NamedTuple

LONGEST: Final = 64
"""Characters of a word; what is longer is cut."""
MOST_LEXEMES: Final = 2_000
"""Of one text."""
MOST_TERMS: Final = 8
"""Of one query; the rest is left out."""
SNIPPET: Final = 160
"""Characters."""
_MARKS_END: Final = 0x0530
_MARKS_BEGIN: Final = chr(_MARKS_END)
"""Before it: scripts whose marks are taken away (Latin, Greek, Cyrillic)."""
_UNSPACED: Final = (
    (0x0E00, 0x0EFF),  # Thai, Lao
    (0x1000, 0x109F),  # Burmese
    (0x1100, 0x11FF),  # Hangul Jamo
    (0x1780, 0x17FF),  # Khmer
    (0x3005, 0x3007),
    (0x3040, 0x30FF),  # kana
    (0x31F0, 0x31FF),
    (0x3400, 0x4DBF),  # Han
    (0x4E00, 0x9FFF),
    (0xAC00, 0xD7AF),  # Hangul: its words carry endings
    (0xF900, 0xFAFF),
    (0x20000, 0x3FFFF),
)


_OTHER, _MARK, _LETTER, _LETTER_UNSPACED = range(4)
"""Kinds of folded characters."""


class Run(NamedTuple):
    """A word, or a run of a script without spaces, folded. at: per folded character its place in the text."""

    word: str
    unspaced: bool
    at: Sequence[int]


class Term(NamedTuple):
    """What a query looks for."""

    word: str
    unspaced: bool


def runs(text: str) -> list[Run]:
    """The words and runs of a text, in its order."""
    found: list[Run] = []
    word: list[str] = []
    at: list[int] = []
    unspaced = False

    def end() -> None:
        if word:
            found.append(Run("".join(word), unspaced, tuple(at)))
            word.clear()
            at.clear()

    for place, character in enumerate(text):
        for folded, kind in _looked_up(character):
            if kind == _OTHER:
                end()
                continue
            mark = kind == _MARK
            if mark and (not word or word[-1] < _MARKS_BEGIN):
                continue
            other = unspaced if mark else kind == _LETTER_UNSPACED
            if word and other != unspaced:
                end()
            unspaced = other
            word.append(folded)
            at.append(place)
    end()
    return found


def lexemes(text: str, conversation_id: str) -> list[str]:
    """What the index holds of a text: without spaces, each once."""
    found: dict[str, None] = {conversation(conversation_id): None}
    for run in runs(text):
        if run.unspaced:
            found.update(dict.fromkeys(map("".join, zip(run.word, run.word[1:], strict=False))))
            found[run.word[-1]] = None
        else:
            found[run.word[:LONGEST]] = None
        if len(found) >= MOST_LEXEMES:
            break
    return list(found)[:MOST_LEXEMES]


def conversation(conversation_id: str) -> str:
    """The lexeme of everything that is said in a conversation. No word begins with "="; two conversations may share one."""
    return "=" + hashlib.sha256(conversation_id.encode()).hexdigest()[:12]


def terms(query: str) -> list[Term]:
    """What a query looks for; all of it must be there."""
    found = dict.fromkeys(
        Term(run.word if run.unspaced else run.word[:LONGEST], run.unspaced) for run in runs(query[: 16 * LONGEST])
    )
    return list(found)[:MOST_TERMS]


def tsquery(wanted: Sequence[Term], conversations: Sequence[str]) -> str:
    """The query of PostgreSQL: every term, in one of these conversations."""
    parts: list[str] = []
    for term in wanted:
        if term.unspaced and len(term.word) > 1:
            parts += [_quoted(a + b) for a, b in zip(term.word, term.word[1:], strict=False)]
        else:
            # One letter begins too many words.
            parts.append(_quoted(term.word) + (":*" if term.unspaced or len(term.word) > 1 else ""))
    places = " | ".join(_quoted(conversation(c)) for c in conversations)
    return " & ".join([*dict.fromkeys(parts), f"({places})"])


def places(text: str, wanted: Sequence[Term]) -> list[tuple[int, int]]:
    """Where the terms stand in a text, as (from, to) in characters, without overlaps; [] unless each of them does."""
    found: list[tuple[int, int]] = []
    said = runs(text)
    for term in wanted:
        here = [span for run in said if run.unspaced == term.unspaced for span in _in(run, term)]
        if not here:
            return []
        found += here
    joined: list[tuple[int, int]] = []
    for begin, end in sorted(found):
        if joined and begin <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(end, joined[-1][1])
        else:
            joined.append((begin, end))
    return joined


def snippet(text: str, found: Sequence[tuple[int, int]]) -> tuple[str, list[tuple[int, int]]]:
    """A part of the text with the first place in it, and the places that lie in that part."""
    first = found[0][0] if found else 0
    begin = 0 if len(text) <= SNIPPET else max(0, min(first - SNIPPET // 4, len(text) - SNIPPET))
    part = text[begin : begin + SNIPPET]
    inside = [
        (max(a, begin) - begin, min(b, begin + SNIPPET) - begin) for a, b in found if begin <= a < begin + SNIPPET
    ]
    return part, inside


def _in(run: Run, term: Term) -> list[tuple[int, int]]:
    size = len(term.word)
    if not term.unspaced:
        whole = size == 1
        fits = run.word == term.word if whole else run.word[:LONGEST].startswith(term.word)
        return [(run.at[0], run.at[size - 1] + 1)] if fits else []
    found = []
    begin = run.word.find(term.word)
    while begin >= 0:
        found.append((run.at[begin], run.at[begin + size - 1] + 1))
        begin = run.word.find(term.word, begin + size)
    return found


@functools.lru_cache(4_096)
def _looked_up(character: str) -> tuple[tuple[str, int], ...]:
    """A character folded: each that it becomes, and its kind. Remembered: a message has some ten thousand, of few kinds."""
    found = []
    for folded in _fold(character):
        if unicodedata.category(folded)[0] == "M":
            kind = _MARK
        elif folded.isalnum():
            kind = _LETTER_UNSPACED if _is_unspaced(folded) else _LETTER
        else:
            kind = _OTHER
        found.append((folded, kind))
    return tuple(found)


def _fold(character: str) -> str:
    if character.isascii():
        return character.lower()
    folded = unicodedata.normalize("NFKC", character).casefold()
    bare = unicodedata.normalize("NFD", folded)
    if len(bare) > 1 and ord(bare[0]) < _MARKS_END:
        return "".join(c for c in bare if unicodedata.category(c) != "Mn")
    return folded


def _is_unspaced(character: str) -> bool:
    code = ord(character)
    return code >= _UNSPACED[0][0] and any(first <= code <= last for first, last in _UNSPACED)


def _quoted(lexeme: str) -> str:
    return "'" + lexeme.replace("\\", "\\\\").replace("'", "''") + "'"
