"""The lane's messages: what is packed comes back, however it was cut; of garbage only LaneError escapes."""

from __future__ import annotations

from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st
from plato_gateway.core import lanes

U64 = st.integers(0, 2**64 - 1)
U32 = st.integers(0, 2**32 - 1)
GROUP = st.integers(0, 254)

ENTRIES = st.lists(st.tuples(st.integers(1, 6), U64, st.binary(max_size=40)), max_size=8)


@st.composite
def packed(draw: st.DrawFn) -> tuple[lanes.Message, bytes]:
    """A message and its encoding."""
    which = draw(st.integers(0, 10))
    if which == 0:
        hello = lanes.Hello(draw(st.integers(0, 15)), draw(U64), draw(U32), draw(U32), draw(U64))
        return hello, lanes.pack_hello(hello)
    if which == 1:
        entries = draw(ENTRIES)
        group, attach = draw(GROUP), draw(U64)
        columns = (
            bytes(k for k, _, _ in entries),
            array("Q", [c for _, c, _ in entries]).tobytes(),
            array("I", [len(d) for _, _, d in entries]).tobytes(),
            b"".join(d for _, _, d in entries),
        )
        return lanes.Events(group, attach, *columns), lanes.pack_events(group, attach, *columns)
    if which == 2:
        stats = lanes.Stats(*draw(st.lists(U64, min_size=len(lanes.STATS_FIELDS), max_size=len(lanes.STATS_FIELDS))))
        return stats, lanes.pack_stats(stats)
    if which == 3:
        slots = tuple(sorted(draw(st.sets(st.integers(0, 1023), max_size=30))))
        config = lanes.Config(draw(st.integers(0, 1023)), slots, draw(U64), draw(U64))
        return config, lanes.pack_config(config)
    if which == 4:
        table = draw(st.binary(min_size=1024, max_size=1024))
        return lanes.Slots(table), lanes.pack_slots(table)
    if which == 5:
        announce = lanes.Announce(draw(GROUP), draw(U64), draw(U64))
        return announce, lanes.pack_announce(announce.group, announce.attach, announce.credit_bytes)
    if which == 6:
        group = draw(GROUP)
        return lanes.Suspend(group), lanes.pack_suspend(group)
    if which == 7:
        credit = lanes.Credit(draw(GROUP), draw(U64))
        return credit, lanes.pack_credit(credit.group, credit.credit_bytes)
    if which == 8:
        drain = lanes.Drain(draw(st.integers(0, 2)))
        return drain, lanes.pack_drain(drain.mode)
    if which == 9:
        held = lanes.Held(draw(st.integers(0, 2)), draw(U32), array("Q", draw(st.lists(U64, max_size=9))))
        return held, lanes.pack_held(held.mode, held.cut, held.conn_ids)
    payloads = draw(st.lists(st.binary(max_size=30), min_size=1, max_size=5))
    rows = draw(
        st.lists(
            st.tuples(U64, st.integers(0, len(payloads) - 1), st.binary(max_size=22), st.integers(0, 1)), max_size=8
        )
    )
    conn_ids = array("Q", [r[0] for r in rows])
    index = array("I", [r[1] for r in rows])
    suffix_lengths, suffix_data = bytes(len(r[2]) for r in rows), b"".join(r[2] for r in rows)
    flags = bytes(r[3] for r in rows)
    return lanes.Frames(payloads, conn_ids, index, suffix_lengths, suffix_data, flags), lanes.pack_frames(
        array("I", map(len, payloads)).tobytes(),
        b"".join(payloads),
        conn_ids.tobytes(),
        index.tobytes(),
        suffix_lengths,
        suffix_data,
        flags,
    )


@given(st.lists(packed(), max_size=6), st.integers(1, 50))
def test_messages_come_back_however_they_are_cut(messages: list[tuple[lanes.Message, bytes]], step: int) -> None:
    wire = b"".join(encoded for _, encoded in messages)
    expected = [message for message, _ in messages]
    assert lanes.LaneReader().feed(wire) == expected
    reader = lanes.LaneReader()
    got: list[lanes.Message] = []
    for at in range(0, len(wire), step):
        got += reader.feed(wire[at : at + step])
    assert got == expected


def _feed(data: bytes, step: int) -> str:
    reader = lanes.LaneReader()
    try:
        for at in range(0, len(data), step):
            reader.feed(data[at : at + step])
    except lanes.LaneError:
        return "LaneError"
    return "fine"


@given(st.binary(max_size=200))
def test_garbage_raises_nothing_but_lane_error(data: bytes) -> None:
    assert _feed(data, max(1, len(data))) == _feed(data, 1)


@given(packed(), st.data())
def test_a_damaged_message_raises_nothing_but_lane_error(
    made: tuple[lanes.Message, bytes], data: st.DataObject
) -> None:
    wire = bytearray(made[1])
    for _ in range(data.draw(st.integers(1, 4))):
        # The length stays: a longer one only waits for more.
        wire[data.draw(st.integers(4, len(wire) - 1))] = data.draw(st.integers(0, 255))
    _feed(bytes(wire), len(wire))


def test_columns_that_do_not_fit_each_other_are_refused() -> None:
    ids, index = array("Q", [1]).tobytes(), array("I", [1]).tobytes()
    for lengths, payload, suffix_lengths, suffix, what in (
        ([3], b"abc", b"\0", b"", "index"),
        ([3, 4], b"abc", b"\0", b"", "payload lengths"),
        ([3, 1], b"abcd", b"\2", b"x", "suffix"),
    ):
        wire = lanes.pack_frames(array("I", lengths).tobytes(), payload, ids, index, suffix_lengths, suffix, b"\0")
        with pytest.raises(lanes.LaneError, match=what):
            lanes.LaneReader().feed(wire)


def test_another_version_of_the_lane_is_refused() -> None:
    wire = bytearray(lanes.pack_hello(lanes.Hello(0, 1, 2, 3, 4)))
    wire[5] = lanes.VERSION + 1
    with pytest.raises(lanes.LaneError, match="version"):
        lanes.LaneReader().feed(bytes(wire))


@given(st.sets(st.integers(0, 1023)))
def test_slot_bits_name_the_same_slots(slots: set[int]) -> None:
    bits = lanes.slot_bits(slots)
    assert len(bits) == 128
    assert set(lanes.slots_of_bits(bits)) == slots
    assert all(bool(bits[s // 8] >> (s % 8) & 1) == (s in slots) for s in range(1024))
