"""Codes: one number, one meaning, one act; and the errors that carry them."""

from __future__ import annotations

import pytest
from plato.core.codes import TEXT, Action, Code, action, text
from plato.core.errors import DependencyError, Fenced, PeerError, PlatoError, Unavailable


def test_every_code_has_words_in_one_line() -> None:
    assert set(TEXT) == set(Code)
    assert all(words and "\n" not in words for words in TEXT.values())
    assert len(set(TEXT.values())) == len(Code)


@pytest.mark.parametrize(
    ("code", "act"),
    [
        (Code.OK, Action.NONE),
        (Code.PENDING, Action.NONE),
        (Code.BUSY, Action.RETRY),
        (Code.NOT_READY, Action.RETRY),
        (Code.GATEWAY_FULL, Action.RECONNECT),
        (Code.SLOT_LOST, Action.RECONNECT),
        (Code.LOGIN_FIRST, Action.LOGIN),
        (Code.TOKEN_EXPIRED, Action.LOGIN),
        (Code.MALFORMED, Action.STOP),
        (Code.TOO_MANY_CURSORS, Action.STOP),
    ],
)
def test_the_range_says_what_the_client_does(code: Code, act: Action) -> None:
    assert code.action == action(int(code)) == act


@pytest.mark.parametrize(
    ("number", "act"),
    [(99, Action.NONE), (100, Action.RETRY), (199, Action.RETRY), (200, Action.RECONNECT), (299, Action.RECONNECT),
     (300, Action.LOGIN), (399, Action.LOGIN), (400, Action.STOP), (499, Action.STOP), (500, Action.STOP),
     (4_294_967_295, Action.STOP)],
)  # fmt: skip
def test_unknown_codes_are_acted_on_by_their_range(number: int, act: Action) -> None:
    assert action(number) == act


def test_an_unknown_code_is_told_by_its_number() -> None:
    assert text(199) == "code 199"
    assert text(Code.BUSY) == text(100) == TEXT[Code.BUSY]


def test_our_fault_and_the_peers_are_different_branches() -> None:
    refused = PeerError(Code.MALFORMED, "a frame was cut")
    assert refused.code == Code.MALFORMED
    assert str(refused) == f"{TEXT[Code.MALFORMED]}: a frame was cut"
    assert str(PeerError(Code.BUSY)) == TEXT[Code.BUSY]
    assert issubclass(Unavailable, DependencyError)
    assert issubclass(Fenced, DependencyError)
    assert issubclass(DependencyError, PlatoError)
    assert not issubclass(DependencyError, PeerError)
    assert not issubclass(Fenced, Unavailable)
