"""Names of users and conversations."""

from __future__ import annotations

import base64
import hashlib
from zlib import crc32

import pytest
from hypothesis import given
from hypothesis import strategies as st
from plato.core.conversations import (
    dialogue_id,
    group_id,
    is_conversation_id,
    is_open_id,
    is_user_id,
    partition_of,
    why_unreachable,
)

# Cs: lone surrogates; Cc: control characters.
users = st.text(st.characters(exclude_categories=["Cs", "Cc"]), min_size=1, max_size=16)


@given(a=users, b=users, key=st.binary(min_size=16, max_size=16))
def test_a_group_of_one_is_no_group_of_another(a: str, b: str, key: bytes) -> None:
    made = group_id(a, key)
    assert (made == group_id(b, key)) == (a == b)
    assert made.startswith("g:")
    assert len(made.encode()) == 45
    name = a.encode()
    digest = hashlib.sha256(len(name).to_bytes(2, "big") + name + key).digest()
    assert base64.urlsafe_b64decode(made[2:] + "=") == digest


@given(a=users, b=users)
def test_both_sides_compute_the_same_dialogue(a: str, b: str) -> None:
    made = dialogue_id(a, b)
    assert made == dialogue_id(b, a)
    assert made.startswith("d:")
    assert len(made.encode()) == 45
    assert is_conversation_id(made)
    assert not is_open_id(made)


@given(pair=st.tuples(users, users), other=st.tuples(users, users))
def test_different_pairs_have_different_dialogues(pair: tuple[str, str], other: tuple[str, str]) -> None:
    assert (dialogue_id(*pair) == dialogue_id(*other)) == (sorted(pair) == sorted(other))


def test_lengths_keep_joined_names_apart() -> None:
    assert dialogue_id("ab", "c") != dialogue_id("a", "bc")


def test_a_dialogue_id_as_specified() -> None:
    digest = hashlib.sha256(b"\x00\x05alice" + b"\x00\x03bob").digest()
    assert dialogue_id("bob", "alice") == "d:" + base64.urlsafe_b64encode(digest).decode().rstrip("=")


@pytest.mark.parametrize("name", ["a", "x" * 64, "é" * 32, "жук", "a b", "guest:1", "d:x", "😀" * 16, "\u00a0"])
def test_good_names(name: str) -> None:
    assert is_user_id(name)
    assert is_conversation_id(name)


@pytest.mark.parametrize(
    "name", ["", "x" * 65, "é" * 33, "a\x00", "\n", "a\x1f", "\x7f", "\x80", "a\x9fb", "\ud800", "a\udfff"]
)
def test_bad_names(name: str) -> None:
    assert not is_user_id(name)
    assert not is_conversation_id(name)


def test_to_whom_nobody_can_write() -> None:
    assert why_unreachable("bob") == why_unreachable("guest:1") == ""
    assert "kept for what administrators do" in why_unreachable("admin")
    assert "1 to 64 bytes" in why_unreachable("guest:\n")


@given(name=st.text())
def test_any_text_is_good_or_bad(name: str) -> None:
    if is_user_id(name):
        assert 1 <= len(name.encode()) <= 64


@pytest.mark.parametrize(
    ("name", "is_open"), [("room", True), ("7", True), ("d:x", False), ("g:x", False), ("dx", True)]
)
def test_open_conversations_have_no_prefix(name: str, is_open: bool) -> None:
    assert is_open_id(name) is is_open


@given(name=users, partitions=st.integers(1, 1024))
def test_a_partition_is_explicit_and_in_range(name: str, partitions: int) -> None:
    assert partition_of(name, partitions) == crc32(name.encode("utf-8")) % partitions
    assert 0 <= partition_of(name, partitions) < partitions


def test_partitions_stay_where_they_are() -> None:
    """Stored data depends on them."""
    assert [partition_of(name, 64) for name in ("room", "жук", dialogue_id("alice", "bob"))] == [
        crc32(b"room") % 64,
        crc32("жук".encode()) % 64,
        crc32(b"d:" + dialogue_id("alice", "bob")[2:].encode()) % 64,
    ]
