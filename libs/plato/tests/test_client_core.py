"""The client's rules one by one: numbers, outbox, inbox, Sync, gateways, repeats, the store."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from plato.client import OutboxFull
from plato.client.core import inbox as inbox_module
from plato.client.core import outbox as outbox_module
from plato.client.core.gateways import Gateways
from plato.client.core.inbox import Inbox, Thread
from plato.client.core.model import UNPLACED, Entry, Place, Row, Session, Snapshot, Writes
from plato.client.core.numbers import Arrival, PushLine
from plato.client.core.outbox import Outbox, Verdict
from plato.client.core.repeats import Requests, Timing
from plato.client.core.syncwalk import SyncWalk
from plato.client.store import Store
from plato.core.codes import Code
from plato.wire.v1 import client_pb2 as pb

C = "d:conversation"


def never() -> float:
    """Chance that takes nothing off."""
    return 0.0


def row(seq: int, prev_seq: int | None = None, body: bytes = b"", conversation_id: str = C) -> Row:
    prev = seq - 1 if prev_seq is None else prev_seq
    return Row(conversation_id, seq, prev, 1000 + seq, "bob", 0, body, seq.to_bytes(16, "big"), 0)


# ── R4: run and push_no ──────────────────────────────────────────────────────────────────────────────────────


def test_r4_pushes_are_acknowledged_cumulatively_once() -> None:
    line = PushLine()
    line.adopt(5, 0)
    assert [line.arrive(5, n) for n in (1, 2, 3)] == [Arrival.NEXT] * 3
    assert line.acknowledgement() == (5, 3)
    assert line.acknowledgement() is None
    assert line.arrive(5, 2) is Arrival.REPEAT
    assert line.acknowledgement() == (5, 3), "a repeat is acknowledged again"


def test_r4_a_jump_holds_the_acknowledgement_until_the_sync_is_stored() -> None:
    line = PushLine()
    line.adopt(5, 0)
    line.arrive(5, 1)
    assert line.arrive(5, 3) is Arrival.JUMP
    assert line.arrive(5, 4) is Arrival.NEXT
    assert line.acknowledgement() == (5, 1)
    line.synced([])
    assert line.acknowledgement() == (5, 4)


def test_r4_a_gap_found_by_the_sync_goes_on_holding() -> None:
    line = PushLine()
    line.adopt(5, 0)
    line.arrive(5, 2)
    line.synced([C])
    line.arrive(5, 3)
    assert line.acknowledgement() is None
    line.release(C)
    assert line.acknowledgement() == (5, 3)


def test_r4_a_greater_run_is_taken_over_and_a_lower_one_ignored() -> None:
    line = PushLine()
    line.adopt(5, 7)
    line.arrive(5, 8)
    line.hold(C)
    assert line.arrive(6, 1) is Arrival.JUMP
    assert line.arrive(5, 9) is Arrival.STALE
    assert line.acknowledgement() is None
    line.synced([])
    assert line.acknowledgement() is None, "the old gap holds in the new run as well"
    line.release(C)
    assert line.acknowledgement() == (6, 1)


def test_r4_a_heartbeat_tells_of_lost_pushes() -> None:
    line = PushLine()
    line.adopt(5, 2)
    assert not line.hint(5, 2)
    assert not line.hint(4, 9)
    assert line.hint(5, 3)
    assert line.stored == (5, 2)
    assert line.hint(6, 0)
    assert line.stored == (6, 0)


@given(st.lists(st.tuples(st.integers(1, 3), st.integers(1, 12), st.sampled_from(["", C, "other"]), st.booleans())))
def test_r4_nothing_is_acknowledged_over_a_gap_or_a_loss(frames: list[tuple[int, int, str, bool]]) -> None:
    """Whatever comes: what is acknowledged was seen, and lies below every gap that is open."""
    line = PushLine()
    seen: set[tuple[int, int]] = set()
    open_gaps: dict[str, tuple[int, int]] = {}
    lost: tuple[int, int] | None = None
    last = (0, 0)
    for run, push_no, gap, sync in frames:
        before = line.run
        arrival = line.arrive(run, push_no)
        if arrival is Arrival.STALE:
            assert run < before
            continue
        if run > before:
            seen, open_gaps, lost = set(), dict.fromkeys(open_gaps, (run, 1)), (run, 1)
        elif arrival is Arrival.JUMP and lost is None:
            lost = (run, max((n for _, n in seen), default=0) + 1)
        seen |= {(run, n) for n in range(1, push_no + 1)}
        if gap:
            open_gaps.setdefault(gap, (run, max(n for _, n in seen)))
            line.hold(gap)
        if sync and lost is not None:
            line.synced([])
            lost = None
        told = line.acknowledgement()
        if told is not None:
            assert told >= last
            assert told in seen
            if told > last:
                assert all(told < at for at in open_gaps.values())
                assert lost is None or told < lost
            last = told


# ── R3: the outbox ───────────────────────────────────────────────────────────────────────────────────────────


def outbox(count: int = 0) -> Outbox:
    made = Outbox([], {}, Timing(), never)
    for n in range(1, count + 1):
        made.add(C, key(n), "bob", 0, b"%d" % n)
    return made


def key(n: int) -> bytes:
    return n.to_bytes(16, "big")


def ready(made: Outbox, now_ms: int = 0) -> list[int]:
    return [entry.client_id for entry, _ in made.take_ready(now_ms)]


def test_r3_an_ack_stops_the_timer_and_only_an_outcome_empties_the_outbox() -> None:
    made = outbox(2)
    assert ready(made) == [1, 2]
    assert made.deadline_ms() == 2_000
    for n in (1, 2):
        assert made.answer(C, n, Code.OK, 0, 10) is Verdict.ACCEPTED
    assert made.deadline_ms() is None
    assert [e.accepted for e in made.entries(C)] == [True, True]
    assert made.expire(10**9)
    made.rewind_all()
    assert ready(made) == [1, 2], "unreceipted is sent again after a commit, in order"
    settled = made.settle(key(1))
    assert settled is not None
    assert settled.client_id == 1
    assert made.settle(key(1)) is None
    assert [e.client_id for e in made.entries(C)] == [2]


def test_r3_acked_names_settled_ones_only() -> None:
    made = outbox(3)
    assert [acked for _, acked in made.take_ready(0)] == [0, 0, 0]
    for n in (1, 2, 3):
        made.answer(C, n, Code.OK, 0, 0)
    made.settle(key(2))
    made.rewind_all()
    assert [(e.client_id, acked) for e, acked in made.take_ready(0)] == [(1, 0), (3, 0)]
    made.settle(key(1))
    made.rewind_all()
    assert [(e.client_id, acked) for e, acked in made.take_ready(0)] == [(3, 2)]
    made.settle(key(3))
    assert made.add(C, key(4), "bob", 0, b"").client_id == 4
    assert [(e.client_id, acked) for e, acked in made.take_ready(0)] == [(4, 3)]


def test_r3_many_expected_answers_cause_one_repeat() -> None:
    made = outbox(5)
    assert ready(made) == [1, 2, 3, 4, 5]
    for n in (2, 3, 4, 5):  # the first one was lost
        assert made.answer(C, n, Code.EXPECTED, 1, 0) is Verdict.NOTHING
        assert ready(made) == ([1] if n == 2 else [])
    assert made.answer(C, 1, Code.OK, 0, 0) is Verdict.ACCEPTED
    assert ready(made) == [2, 3, 4, 5]


def test_r3_expected_of_a_settled_one_waits_for_acked() -> None:
    """2 was refused while 1 was on its way: the server comes to expect 2, which is gone; `acked` tells it, in time."""
    made = outbox(3)
    ready(made)
    made.answer(C, 1, Code.OK, 0, 0)
    made.settle(key(2))
    made.answer(C, 3, Code.EXPECTED, 2, 0)
    assert ready(made, 0) == []
    made.settle(key(1))
    assert [(e.client_id, acked) for e, acked in made.take_ready(0)] == [(3, 2)]


def test_r3_busy_goes_back_and_waits_longer_each_time() -> None:
    made = outbox(3)
    ready(made)
    waits = []
    now_ms = 0
    for _ in range(9):
        for n in (1, 2, 3):
            made.answer(C, n, Code.BUSY, 0, now_ms)
        assert ready(made, now_ms) == []
        due_ms = made.deadline_ms()
        assert due_ms is not None
        waits.append(due_ms - now_ms)
        now_ms = due_ms
        assert ready(made, now_ms) == [1], "one alone, until it is accepted"
    assert waits == [250, 500, 1_000, 2_000, 4_000, 8_000, 16_000, 30_000, 30_000]
    made.answer(C, 1, Code.OK, 0, now_ms)
    assert ready(made, now_ms) == [2, 3]


def test_a_time_that_is_told_holds_every_conversation_back() -> None:
    made = outbox(3)
    made.add("other", key(9), "", 1, b"")
    assert len(made.take_ready(0)) == 4
    made.answer(C, 2, Code.TOO_FAST, 0, 100, 5_000)
    made.answer(C, 3, Code.EXPECTED, 2, 100)
    made.answer(C, 1, Code.OK, 0, 100)
    made.settle(key(9))
    made.add("other", key(10), "", 1, b"")
    assert made.deadline_ms() == 5_100
    assert made.take_ready(5_099) == []
    made.answer(C, 2, Code.BUSY, 0, 5_099, 10_000_000)
    assert {(e.conversation_id, e.client_id) for e, _ in made.take_ready(5_100)} == {(C, 2), (C, 3), ("other", 2)}
    made.answer(C, 2, Code.BUSY, 0, 5_200, 10_000_000)
    made.settle(key(10))
    assert made.deadline_ms() == 65_200, "no longer than a minute, whatever is told"


def test_r3_pending_resets_the_count_and_three_unanswered_are_dead() -> None:
    made = outbox(1)
    ready(made)
    now_ms = 0
    for _ in range(8):
        due_ms = made.deadline_ms()
        assert due_ms is not None
        now_ms = due_ms
        assert made.expire(now_ms)
        assert ready(made, now_ms) == [1]
        assert made.answer(C, 1, Code.PENDING, 0, now_ms) is Verdict.NOTHING
    for _ in range(2):
        due_ms = made.deadline_ms()
        assert due_ms is not None
        now_ms = due_ms
        assert made.expire(now_ms)
        assert ready(made, now_ms) == [1]
    assert made.expire(made.deadline_ms() or 0) is False
    assert len(made) == 1


def test_the_window_is_shared_and_lanes_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outbox_module, "WINDOW", 4)
    made = Outbox([], {}, Timing(), never)
    for n in range(6):
        for name in ("a", "b"):
            made.add(name, key(n * 2 + (name == "b")), "", 0, b"")
    first = [(e.conversation_id, e.client_id) for e, _ in made.take_ready(0)]
    assert first == [("a", 1), ("a", 2), ("a", 3), ("a", 4)]
    assert made.take_ready(0) == []
    assert made.deadline_ms() == 2_000, "nothing to do before an answer"
    made.answer("a", 1, Code.OK, 0, 0)
    assert [(e.conversation_id, e.client_id) for e, _ in made.take_ready(0)] == [("b", 1)]


def test_the_outbox_is_bounded_in_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outbox_module, "MAX_BYTES", 10)
    made = outbox()
    made.add(C, key(1), "", 0, b"x" * 8)
    with pytest.raises(OutboxFull):
        made.add(C, key(2), "", 0, b"x" * 3)
    made.settle(key(1))
    assert made.add(C, key(2), "", 0, b"x" * 10).client_id == 2


# ── the cursor, the reorder buffer ───────────────────────────────────────────────────────────────────────────


def inbox(cursor: int = 0) -> tuple[Inbox, Thread]:
    thread = Thread(C, cursor=cursor)
    return Inbox([thread]), thread


def seqs(rows: Sequence[Row]) -> list[int]:
    return [r.seq for r in rows]


def test_m5_the_gap_is_pulled_from_the_cursor_up() -> None:
    """1 to 10 held, 40 newer, page size 24: 11–34, then 35–50; a push of 50 waits meanwhile."""
    made, thread = inbox(10)
    assert made.offer(thread, row(50)) == []
    assert thread.behind
    page = [row(n) for n in range(11, 35)]
    readable, moved = made.page(thread, page, 11, 34, 50)
    assert (seqs(readable), moved, thread.behind) == (list(range(11, 35)), True, True)
    readable, moved = made.page(thread, [row(n) for n in range(35, 50)], 35, 49, 50)
    assert (seqs(readable), moved, thread.behind) == (list(range(35, 51)), True, False)


def test_m5_the_newest_page_first_shows_nothing() -> None:
    made, thread = inbox(10)
    made.hint(thread, 50)
    assert made.page(thread, [row(n) for n in range(27, 51)], 27, 50, 50) == ([], False)
    assert thread.cursor == 10


def test_a_push_moves_the_cursor_only_if_nothing_lies_between() -> None:
    made, thread = inbox(10)
    assert made.offer(thread, row(13)) == []
    assert made.offer(thread, row(12)) == []
    assert seqs(made.offer(thread, row(11))) == [11, 12, 13]
    assert made.offer(thread, row(12)) == [], "seen"
    assert seqs(made.offer(thread, row(1_014, 13))) == [1_014], "a hole that prev_seq jumps"
    assert thread.cursor == 1_014


def test_a_covered_range_without_rows_moves_the_cursor() -> None:
    """Rows were removed, or numbers left out: the range says that nothing else is there."""
    made, thread = inbox(10)
    made.hint(thread, 40)
    assert made.page(thread, [], 11, 30, 40) == ([], True)
    assert thread.cursor == 30
    assert seqs(made.offer(thread, row(40, 9))) == [40]


def test_what_does_not_exist_yet_is_not_covered() -> None:
    made, thread = inbox(10)
    made.hint(thread, 12)
    made.page(thread, [row(11), row(12)], 11, 10**9, 12)
    assert thread.cursor == 12
    assert seqs(made.offer(thread, row(13))) == [13]


def test_a_new_conversation_waits_for_its_first_cursor() -> None:
    made = Inbox([])
    thread = made.get(C)
    thread.peer = "bob"
    assert made.offer(thread, row(31)) == []
    assert thread.behind
    assert made.cursors() == []
    assert seqs(made.place(thread, 30)) == [31]
    assert made.cursors() == [(C, 31)]
    first = made.get("other")
    assert seqs(made.offer(first, row(1, conversation_id="other"))) == [1]


def test_the_reorder_buffer_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inbox_module, "BUFFER_ROWS", 3)
    monkeypatch.setattr(inbox_module, "BUFFER_BYTES", 100)
    made, thread = inbox(0)
    for n in range(2, 10):
        assert made.offer(thread, row(n, body=b"x" * 40)) == []
    assert sorted(thread.early) == [1, 2]
    assert thread.newest_seq == 9, "what did not fit is pulled"
    assert seqs(made.offer(thread, row(1))) == [1, 2, 3]
    assert made.offer(thread, row(6)) == []
    made.give_up(thread)
    assert not thread.behind
    assert not thread.early


@given(st.permutations(range(1, 12)), st.sets(st.integers(1, 11)))
def test_any_order_is_read_in_order(order: list[int], doubled: set[int]) -> None:
    made, thread = inbox(0)
    read: list[int] = []
    for n in [*order, *doubled]:
        read += seqs(made.offer(thread, row(n)))
    assert read == list(range(1, 12))


# ── Sync ─────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_sync_walks_in_chunks_of_five_hundred() -> None:
    cursors = [(f"{n:05}", n) for n in range(1_200)]
    walk = SyncWalk()
    asked = []
    way: bool | None = True
    while way:
        after, upto, chunk = walk.ask(cursors)
        asked.append((after, upto, len(chunk)))
        way = walk.answered(False, upto)
    assert way is False
    assert asked == [("", "00499", 500), ("00499", "00999", 500), ("00999", "", 200)]


def test_a_sync_asks_on_from_what_is_covered_and_never_in_circles() -> None:
    walk = SyncWalk()
    assert walk.ask([("a", 1), ("é", 2), ("z", 3)]) == ("", "", [("a", 1), ("é", 2), ("z", 3)])
    assert walk.answered(True, "m") is True
    assert walk.ask([("a", 1), ("z", 3), ("é", 2)]) == ("m", "", [("z", 3), ("é", 2)])
    assert walk.answered(True, "m") is None
    assert walk.answered(True, "") is None
    assert walk.answered(False, "") is False


# ── gateways, requests ───────────────────────────────────────────────────────────────────────────────────────


def order(book: Gateways) -> list[str]:
    found = []
    while (address := book.take()) is not None:
        found.append(address)
    return found


def test_the_last_gateway_comes_first_if_it_is_still_listed() -> None:
    book = Gateways(["x", "y"], ["a", "b"], "b")
    book.begin_round(["a", "b", "c"], never)
    assert order(book) == ["b", "a", "c"]
    book.begin_round(["a", "c"], never)
    assert order(book) == ["a", "c"]
    book.begin_round(None, never)
    assert order(book) == ["a", "c", "x", "y"]
    book.begin_round([], lambda: 0.9)
    assert order(book) == ["a", "c", "y", "x"]


def test_a_closing_gateway_comes_last_once() -> None:
    book = Gateways([], ["a", "b", "c"], "a")
    book.avoid("a")
    book.begin_round(["a", "b", "c"], never)
    assert order(book) == ["b", "c", "a"]
    book.begin_round(["a", "b", "c"], never)
    assert order(book) == ["a", "b", "c"]


def test_requests_are_repeated_with_back_off_and_then_dead() -> None:
    made = Requests(Timing(), never)
    made.ask(pb.PULL, 1, b"one", 0)
    at = []
    while (due_ms := made.deadline_ms()) is not None:
        again = made.expire(due_ms)
        if again is None:
            break
        assert again == [b"one"]
        at.append(due_ms)
    assert at == [2_000, 6_000]
    assert due_ms == 14_000
    request = made.find(pb.PULL, 1)
    assert request is not None
    made.pending(request, 20_000)
    assert made.expire(22_000) == [b"one"]
    made.later(request, 23_000)
    assert made.deadline_ms() == 23_250


# ── the store ────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_store_gives_back_what_was_written(tmp_path: Path) -> None:
    entries = [Entry(C, n, key(n), "bob", n, b"\x00\xff%d" % n) for n in (1, 2, 3)]
    store = Store(tmp_path / "s.db", new_device_id=2**64 - 1)
    first = Writes(
        rows=[row(1), row(2, body=b"\x00")],
        places={C: Place(C, "bob", 2, 9, 4)},
        queued={e.client_msg_id: e for e in entries},
        meta={"user": "alice", "session": "77 0aff", "gateways": "a\nb", "last_gateway": "b"},
    )
    store.apply(first)
    store.apply(Writes(unqueued=[entries[0], entries[1]], refused=[(entries[1], 426, "too long")], delivered=1))
    store.apply(Writes(rows=[row(2), row(3)], places={"x": Place("x", "", UNPLACED, 0, 1)}))
    store.close()
    store = Store(tmp_path / "s.db", new_device_id=1)
    assert store.load() == Snapshot(
        device_id=2**64 - 1,
        user="alice",
        session=Session(77, b"\x0a\xff"),
        gateways=("a", "b"),
        last_gateway="b",
        places=(Place(C, "bob", 2, 9, 4), Place("x", "", UNPLACED, 0, 1)),
        outbox=(entries[2],),
    )
    assert store.delivered() == 1
    assert [(n, r.seq) for n, r, _ in store.after(0, 10)] == [(1, 1), (2, 2), (3, 3)]
    assert store.history(C, None, 2) == [row(2, body=b"\x00"), row(3)]
    assert store.history(C, 2, 5) == [row(1)]
    assert store.refused(C) == [(dataclasses.replace(entries[1], to_user=""), 426, "too long")]
    assert store.refused("x") == []
    store.apply(Writes(meta={"session": ""}))
    store.close()
    store = Store(tmp_path / "s.db", new_device_id=1)
    assert store.load().session is None
    store.close()


def test_a_transaction_is_whole_or_nothing(tmp_path: Path) -> None:
    store = Store(tmp_path / "s.db", 1)
    entry = Entry(C, 1, key(1), "", 0, b"")
    store.apply(Writes(queued={key(1): entry}))
    with pytest.raises(Exception, match="UNIQUE"):
        store.apply(Writes(rows=[row(1)], queued={key(1): entry}))
    assert store.history(C, None, 10) == []
    store.apply(Writes(rows=[row(1)]))
    assert len(store.history(C, None, 10)) == 1
    store.close()
