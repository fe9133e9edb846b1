"""The bucket of a connection's frames, and runs cut into pieces."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from plato.core import frames
from plato.core.errors import PeerError
from plato_state.core.pace import (
    BURST_FRAMES,
    FRAMES_PER_TICK,
    LIMIT_FRAMES,
    PIECE_BYTES,
    PIECE_FRAMES,
    ROUND_TICKS,
    Paces,
    pieces,
)


def test_a_burst_is_served_and_what_exceeds_it_is_not() -> None:
    paces = Paces()
    assert paces.charge(1, BURST_FRAMES - 1, 0) == BURST_FRAMES - 1
    assert paces.charge(1, 10, 0) == 1, "the first ones are"
    assert paces.charge(1, 10, 0) == 0
    assert paces.charge(2, 10, 0) == 10, "another connection has a bucket of its own"
    assert not paces.floods(1, 0)


def test_the_bucket_drains_by_ticks_alone() -> None:
    paces = Paces()
    paces.charge(1, BURST_FRAMES, 0)
    assert paces.charge(1, 1_000, 1) == FRAMES_PER_TICK
    assert paces.charge(1, 1, 2) == 0, "frames that were dropped fill it too"


def test_who_sends_at_the_pace_is_served_for_ever() -> None:
    paces = Paces()
    for tick in range(4 * ROUND_TICKS):
        assert paces.charge(1, FRAMES_PER_TICK, tick) == FRAMES_PER_TICK
        assert not paces.floods(1, tick)


def test_who_sends_twice_as_fast_floods_after_seconds_and_drains_when_it_stops() -> None:
    paces = Paces()
    tick = 0
    while not paces.floods(1, tick):
        tick += 1
        paces.charge(1, 2 * FRAMES_PER_TICK, tick)
    assert 10_000 < tick * 25 < 15_000, "ms"
    paces.charge(1, 1_000_000, tick)
    assert paces.charge(1, 5, tick + ROUND_TICKS) == 5, "however much it was"


def test_only_connections_that_spoke_lately_are_remembered() -> None:
    paces = Paces()
    for tick in range(20 * ROUND_TICKS):
        paces.charge(tick, 1, tick)
    assert len(paces) <= 2 * ROUND_TICKS
    paces.charge(0, 1, 1_000 * ROUND_TICKS)
    assert len(paces) == 1


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 9_000), st.integers(0, 300)), max_size=60))
def test_the_two_rounds_are_one_bucket(said: list[tuple[int, int, int]]) -> None:
    paces, levels, seen = Paces(), dict.fromkeys(range(4), 0), dict.fromkeys(range(4), 0)
    now = 0
    for conn_id, n, wait in said:
        now += wait
        level = max(0, levels[conn_id] - (now - seen[conn_id]) * FRAMES_PER_TICK)
        assert paces.charge(conn_id, n, now) == min(n, max(0, BURST_FRAMES - level))
        levels[conn_id], seen[conn_id] = min(level + n, LIMIT_FRAMES), now
        assert paces.floods(conn_id, now) == (level + n >= LIMIT_FRAMES)


@given(st.lists(st.integers(1, 12_000), max_size=400))
def test_pieces_are_the_run_in_order_and_each_is_small(sizes: list[int]) -> None:
    payloads = [bytes([i % 256]) * n for i, n in enumerate(sizes)]
    run = b"".join(map(frames.pack, payloads))
    cut = [list(frames.split(piece)) for piece in pieces(run)]
    assert [p for piece in cut for p in piece] == payloads
    for piece in cut:
        assert 1 <= len(piece) <= PIECE_FRAMES
        assert len(piece) == 1 or sum(4 + len(p) for p in piece) <= PIECE_BYTES


@given(st.lists(st.binary(min_size=1, max_size=20), max_size=300), st.binary(max_size=12))
def test_what_is_broken_stays_in_the_last_piece(payloads: list[bytes], tail: bytes) -> None:
    run = b"".join(map(frames.pack, payloads)) + tail
    cut = list(pieces(run))
    assert b"".join(cut) == run
    for piece in cut[:-1]:
        assert frames.whole_bytes(piece, 1 << 32) == len(piece) or 0 in piece[:4]


def test_a_cut_run_is_found_out() -> None:
    (piece,) = pieces(frames.pack(b"whole") + b"\0\0")
    with pytest.raises(PeerError):
        list(frames.split(piece))
