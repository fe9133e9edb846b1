"""Words: what is found, in which scripts, and where it stands."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plato_msg.core import words


def found(text: str, query: str) -> list[str]:
    return [text[a:b] for a, b in words.places(text, words.terms(query))]


@pytest.mark.parametrize(
    ("text", "query", "parts"),
    [
        ("Hello, World!", "world", ["World"]),
        ("Hello, World!", "wor hel", ["Hel", "Wor"]),
        ("Hello, World!", "orld", []),
        ("Hello, World!", "w", []),
        ("plan w", "w", ["w"]),
        ("大家你好吗", "你好", ["你好"]),
        ("大家你好吗", "好", ["好"]),
        ("大家你好吗", "吗", ["吗"]),
        ("你的，好吗", "你好", []),
        ("好吗你好", "你好吗", []),
        ("明日は東京タワーへ", "東京タワー", ["東京タワー"]),
        ("오늘 날씨가 좋다", "날씨", ["날씨"]),
        ("ครับผม", "ผม", ["ผม"]),
        ("iPhone手机壳", "手机 iphone", ["iPhone手机"]),
        ("Ｆｕｌｌ width", "full", ["Ｆｕｌｌ"]),
        ("Über die Straße", "uber strasse", ["Über", "Straße"]),
        ("cafe\u0301 noir", "café", ["cafe"]),
        ("Ελλάδα Ёлка", "ελλαδα елка", ["Ελλάδα", "Ёлка"]),
        ("हिन्दी में", "हिन्दी", ["हिन्दी"]),
        ("a 'quoted' \\ word", "quoted", ["quoted"]),
        ("😀 smile", "smile", ["smile"]),
    ],
)
def test_what_is_found_and_where(text: str, query: str, parts: list[str]) -> None:
    assert found(text, query) == parts


@settings(max_examples=40)
@given(st.text(max_size=60), st.text(max_size=20))
def test_what_stands_somewhere_is_in_the_index(text: str, query: str) -> None:
    """The index finds at least what is found by looking: each part of the query is a lexeme of the text, or begins one."""
    wanted = words.terms(query)
    if not wanted or not words.places(text, wanted):
        return
    held = words.lexemes(text, "c")
    for term in wanted:
        pairs = [term.word[n : n + 2] for n in range(max(1, len(term.word) - 1))] if term.unspaced else [term.word]
        for part in pairs:
            assert any(lexeme.startswith(part) for lexeme in held)
    assert not any(" " in lexeme or not lexeme for lexeme in held)


@settings(max_examples=40)
@given(st.text(max_size=400), st.text(min_size=1, max_size=5))
def test_a_snippet_shows_the_first_place(text: str, query: str) -> None:
    found = words.places(text, words.terms(query)) if words.terms(query) else []
    part, inside = words.snippet(text, found)
    assert part in text
    assert len(part) <= words.SNIPPET
    if found:
        assert part[inside[0][0] : inside[0][1]] == text[found[0][0] : found[0][1]][: inside[0][1] - inside[0][0]]
        assert inside[0][1] > inside[0][0]


def test_a_query_names_its_conversations() -> None:
    query = words.tsquery(words.terms("it's 你好吗"), ["d:x", "g:y"])
    assert query == (
        f"'it':* & 's' & '你好' & '好吗' & ('{words.conversation('d:x')}' | '{words.conversation('g:y')}')"
    )
