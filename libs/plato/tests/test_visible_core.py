"""What may stand in names that people read: the cases that the browser's code answers too, and that one pass settles it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from plato.client.content import Attachment, Rich
from plato.client.operations import _title
from plato.core.conversations import is_title, is_user_id, why_no_person
from plato.core.visible import BEHIND, NEVER, is_plain, plain
from plato.wire.v1 import content_pb2 as content

CASES = json.loads(Path(__file__).with_name("visible.json").read_text(encoding="utf-8"))
ODD = [chr(code) for table in (NEVER, *(c for c, _ in BEHIND)) for pair in table for code in pair]
SEEN = [
    "a",
    "7",
    " ",
    "ا",
    "क",
    "\u094d",
    "北",
    "\u2764",
    "\U0001f469",
    "\U0001f3f4",
    "\u2801",
    "\u1820",
    "\u200c",
    "\u200d",
]


@pytest.mark.parametrize("case", CASES, ids=[ascii(case["given"]) for case in CASES])
def test_what_shows_nothing_or_turns_the_text_goes_and_what_scripts_and_emoji_need_stays(case: dict[str, str]) -> None:
    assert plain(case["given"]) == case["plain"]
    assert is_plain(case["plain"])
    assert is_title(case["given"]) is (case["given"] == case["plain"])


@given(st.lists(st.sampled_from([*ODD, *SEEN]) | st.characters(exclude_categories=["Cs"]), max_size=12).map("".join))
def test_what_is_left_is_plain(text: str) -> None:
    assert plain(plain(text)) == plain(text)


def test_a_title_that_looks_empty_is_none_and_an_empty_one_is() -> None:
    assert is_title("")
    assert not is_title("\u3000 ")
    with pytest.raises(ValueError, match="white space"):
        _title("\u200b \u200b")


def test_nobody_speaks_under_a_name_that_looks_like_anothers() -> None:
    for name in ("ali\u200bce", "ali\u200dce", "\u202eecila", "alice\ufe0f", "\u3164"):
        assert "not seen" in why_no_person(name)
        assert not is_user_id(name), "nor is it brought into a group"
    assert why_no_person("می\u200cخواهم") == ""


def test_the_client_sends_plain_titles_and_names() -> None:
    assert _title("gpj.\u202eexe") == "gpj.exe"
    body = Rich(attachments=(Attachment("x", "gpj.\u202eexe"),)).encode()
    assert content.Rich.FromString(body).attachments[0].name == "gpj.exe"
