"""Frames: however the bytes are cut, the payloads are the same; only PeerError escapes."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from plato.core.codes import Code
from plato.core.errors import PeerError
from plato.core.frames import DEFAULT_LIMIT_BYTES, FrameReader, pack, split, whole_bytes
from plato.wire.v1 import client_pb2
from plato.wire.v1.suffix import push_suffix, varint

payloads = st.lists(st.binary(min_size=1, max_size=300), max_size=10)


def test_a_frame_is_its_big_endian_length_and_the_payload() -> None:
    assert pack(b"abc") == b"\x00\x00\x00\x03abc"


@given(sent=payloads, cuts=st.lists(st.integers(0, 3_100), max_size=20))
def test_cuts_change_nothing(sent: list[bytes], cuts: list[int]) -> None:
    stream = b"".join(map(pack, sent))
    reader = FrameReader()
    got: list[bytes] = []
    edges = [0, *sorted(min(cut, len(stream)) for cut in cuts), len(stream)]
    for begin, end in pairwise(edges):
        got += reader.feed(stream[begin:end])
    assert got == sent


def test_m27_one_frame_split_at_every_byte_and_ten_frames_in_one_packet() -> None:
    frame = pack(bytes(range(200)))
    for cut in range(len(frame) + 1):
        reader = FrameReader()
        assert reader.feed(frame[:cut]) + reader.feed(frame[cut:]) == [frame[4:]]
    assert FrameReader().feed(frame * 10) == [frame[4:]] * 10
    reader = FrameReader()
    assert [p for byte in frame * 3 for p in reader.feed(bytes([byte]))] == [frame[4:]] * 3


@given(sent=payloads, tail=st.binary(max_size=3))
def test_whole_bytes_stops_before_what_is_not_whole(sent: list[bytes], tail: bytes) -> None:
    stream = b"".join(map(pack, sent))
    for data in (stream + tail, bytearray(stream + tail), memoryview(stream + tail)):
        assert whole_bytes(data) == len(stream)
    assert whole_bytes(stream + pack(b"12345")[:-1]) == len(stream)
    assert list(split(stream)) == sent


@pytest.mark.parametrize("length", [0, DEFAULT_LIMIT_BYTES + 1, 0x7FFFFFFF, 0xFFFFFFFF])
def test_a_bad_length_is_refused_as_soon_as_it_is_there(length: int) -> None:
    header = length.to_bytes(4, "big")
    assert whole_bytes(header[:3]) == 0
    for data in (header, pack(b"good") + header):
        with pytest.raises(PeerError) as caught:
            whole_bytes(data)
        assert caught.value.code == Code.FRAME_SIZE
        with pytest.raises(PeerError):
            FrameReader().feed(data)


def test_the_limit_itself_passes() -> None:
    assert FrameReader(16).feed(pack(b"x" * 16)) == [b"x" * 16]
    with pytest.raises(PeerError):
        FrameReader(16).feed(pack(b"x" * 17))
    assert len(FrameReader().feed(pack(bytes(DEFAULT_LIMIT_BYTES)))[0]) == DEFAULT_LIMIT_BYTES


def refusal(parse: Callable[[bytes], object], data: bytes) -> Code:
    try:
        parse(data)
    except PeerError as e:
        return e.code
    return Code.OK


@given(data=st.binary(max_size=400))
def test_any_bytes_raise_nothing_but_peer_error(data: bytes) -> None:
    assert refusal(FrameReader(64).feed, data) in (Code.OK, Code.FRAME_SIZE)
    assert refusal(whole_bytes, data) in (Code.OK, Code.FRAME_SIZE)
    assert refusal(lambda run: list(split(run)), data) in (Code.OK, Code.MALFORMED)


@pytest.mark.parametrize("run", [b"\x00", b"\x00\x00\x00\x05abcd", b"\x00\x00\x00\x00", pack(b"ok") + b"\x00\x00"])
def test_a_cut_run_is_malformed(run: bytes) -> None:
    with pytest.raises(PeerError) as caught:
        list(split(run))
    assert caught.value.code == Code.MALFORMED


# ── the suffix that a worker appends ─────────────────────────────────────────────────────────────────────────

u64 = st.integers(0, (1 << 64) - 1)


@given(run=u64, push_no=u64, payload=st.binary(max_size=50))
def test_a_suffix_sets_run_and_push_no(run: int, push_no: int, payload: bytes) -> None:
    shared = client_pb2.MsgCmd(Type=client_pb2.PUSH, Payload=payload).SerializeToString()
    suffix = push_suffix(run, push_no)
    assert len(suffix) <= 22
    read = client_pb2.MsgCmd.FromString(shared + suffix)
    assert (read.Type, read.Payload, read.run, read.push_no) == (client_pb2.PUSH, payload, run, push_no)


@pytest.mark.parametrize(("value", "encoded"), [(0, b"\x00"), (127, b"\x7f"), (128, b"\x80\x01"), (300, b"\xac\x02")])
def test_varints(value: int, encoded: bytes) -> None:
    assert varint(value) == encoded
