"""Answers in a row for one connection travel as one run, and nothing changes its order, its place or its size."""

from __future__ import annotations

from collections import defaultdict

import pytest
from hypothesis import given
from hypothesis import strategies as st
from plato.core.frames import FrameReader
from plato.core.ids import EPOCH_MS, make_id
from plato.wire.v1 import state_pb2
from plato_state import stream
from plato_state.stream import RUN, SEND, SEND_AND_CLOSE, LinkStream
from state_harness import unpack

WORKERS = 2
CONNECTIONS = [make_id(EPOCH_MS + 1, 1, n) for n in range(4)]


def link(runs: bool = True) -> LinkStream:
    return LinkStream(state_pb2.LinkHello(gateway="g", worker_id=7, workers=WORKERS, runs=runs))


def sent(of: LinkStream) -> tuple[dict[int, list[tuple[bytes, bool]]], int]:
    """What each connection gets, in order, and how many entries that took."""
    got: dict[int, list[tuple[bytes, bool]]] = defaultdict(list)
    entries = 0
    while (batch := of.next_batch()) is not None:
        entries += sum(len(columns.flags) for columns in batch.frames)
        for conn_id, frame, closes in unpack(batch):
            got[conn_id].append((frame, closes))
        of.taken(batch.batch_no)
    return got, entries


FRAMES = st.binary(min_size=1, max_size=40)
STEPS = st.lists(
    st.tuples(st.sampled_from(CONNECTIONS), st.sampled_from(["answer", "answer", "close", "push", "notice"]), FRAMES),
    max_size=60,
)


@given(steps=STEPS, runs=st.booleans(), batch_bytes=st.sampled_from([60, 200, 100_000]))
def test_every_connection_gets_its_frames_in_order_with_runs_and_without(
    steps: list[tuple[int, str, bytes]], runs: bool, batch_bytes: int
) -> None:
    of, want = link(runs), defaultdict[int, list[tuple[bytes, bool]]](list)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stream, "BATCH_BYTES", batch_bytes)
        for n, (conn_id, kind, frame) in enumerate(steps):
            match kind:
                case "answer" | "close":
                    assert of.add(conn_id, frame, SEND if kind == "answer" else SEND_AND_CLOSE)
                    want[conn_id].append((frame, kind == "close"))
                case "push":
                    assert of.push(conn_id, frame, b"-s")
                    want[conn_id].append((frame + b"-s", False))
                case _:
                    assert of.push_notice(conn_id, f"c{n}", n, frame + b"%d" % n, b"-n")
                    want[conn_id].append((frame + b"%d" % n + b"-n", False))
        queued = of.queued_bytes
        assert queued >= sum(len(frame) for _, kind, frame in steps if kind in ("answer", "close"))
        got, _ = sent(of)
    assert got == want
    assert of.queued_bytes == 0


def test_answers_in_a_row_are_one_entry_and_only_for_who_takes_runs() -> None:
    a, b = CONNECTIONS[:2]
    for runs, entries in ((True, 3), (False, 18)):
        of = link(runs)
        for n in range(16):
            of.add(a, b"answer %d" % n)
        of.add(b, b"one")
        of.add(a, b"last")
        got, took = sent(of)
        assert [frame for frame, _ in got[a]] == [*(b"answer %d" % n for n in range(16)), b"last"]
        assert took == entries


def test_a_run_says_how_many_frames_it_has() -> None:
    of = link()
    for n in range(3):
        of.add(CONNECTIONS[0], b"%d" % n)
    batch = of.next_batch()
    assert batch is not None
    (columns,) = batch.frames
    assert (list(columns.flags), columns.suffix_data) == ([RUN], b"\3\0\0\0")
    assert list(FrameReader().feed(batch.payload_data)) == [b"0", b"1", b"2"]
