"""R4's machine alone: numbers, the newest frame, three repeats, runs; and a guest's one push at a time."""

from __future__ import annotations

from plato_state.core import pushes
from plato_state.core.pushes import GuestPushes, Pushes, first_run, gap_ms


def test_numbers_are_consecutive_and_only_the_newest_frame_is_kept() -> None:
    p = Pushes(7)
    p.push(b"a")
    p.push(b"b")
    assert (p.run, p.push_no, p.frame) == (7, 2, b"b")


def test_an_acknowledgement_is_cumulative_and_of_this_run() -> None:
    p = Pushes(7)
    for frame in (b"a", b"b", b"c"):
        p.push(frame)
    assert not p.acknowledged(6, 3), "a lower run"
    assert not p.acknowledged(8, 3), "a run that was never sent"
    assert not p.acknowledged(7, 4), "a number that was never sent"
    assert not p.acknowledged(7, 2)
    assert p.frame == b"c"
    assert p.acknowledged(7, 3)
    assert not p.frame
    assert p.acknowledged(7, 1), "an old one changes nothing"
    assert p.settled_no == 3


def test_the_newest_is_repeated_three_times_then_left_to_the_heartbeats() -> None:
    p = Pushes(7)
    p.push(b"a")
    assert [p.repeat() for _ in range(5)] == [b"a", b"a", b"a", b"", b""]
    assert p.push_no == 1
    p.push(b"b")
    assert p.repeat() == b"b"


def test_a_new_push_is_repeated_three_times_of_its_own() -> None:
    p = Pushes(7)
    p.push(b"a")
    p.repeat()
    p.repeat()
    p.push(b"b")
    assert [p.repeat() for _ in range(4)] == [b"b", b"b", b"b", b""]


def test_a_doubt_begins_a_greater_run_with_nothing_in_it() -> None:
    p = Pushes(7)
    p.push(b"a")
    p.doubt()
    assert (p.run, p.push_no, p.frame) == (8, 0, b"")
    assert p.repeat() == b""


def test_what_a_later_page_covers_is_counted_and_not_repeated() -> None:
    p = Pushes(0)
    p.skip()
    p.skip()
    p.begin(9)
    assert (p.run, p.push_no, p.frame) == (9, 2, b"")
    p.push(b"c")
    assert p.push_no == 3
    assert p.acknowledged(9, 3)


def test_the_next_acquisition_has_a_greater_run_than_any_doubt_of_this_one() -> None:
    p = Pushes(first_run(1_800_000_000_000))
    for _ in range(1_000):
        p.doubt()
    assert first_run(1_800_000_000_001) > p.run
    assert first_run(1_900_000_000_000) < 1 << 63


def test_gaps_double_up_to_the_longest() -> None:
    assert [gap_ms(n, 2_000, 30_000) for n in range(6)] == [2_000, 4_000, 8_000, 16_000, 30_000, 30_000]


def test_a_guest_has_one_unacknowledged_push_at_a_time() -> None:
    guest = GuestPushes()
    assert guest.push(b"a") == (b"a", True)
    assert guest.push(b"b") == (b"", True)
    assert guest.push(b"c") == (b"", True)
    assert guest.acknowledged() == b"b"
    assert guest.acknowledged() == b"c"
    assert guest.acknowledged() == b""
    assert guest.push(b"d") == (b"d", True)


def test_a_guest_that_does_not_acknowledge_gets_three_repeats_then_the_next() -> None:
    guest = GuestPushes()
    guest.push(b"a")
    guest.push(b"b")
    assert [guest.repeat() for _ in range(8)] == [b"a"] * 3 + [b"b"] + [b"b"] * 3 + [b""]


def test_a_guests_queue_is_bounded_in_frames_and_bytes() -> None:
    guest = GuestPushes()
    assert [guest.push(b"x")[1] for _ in range(pushes.GUEST_FRAMES + 2)].count(False) == 1
    guest = GuestPushes()
    size = pushes.GUEST_BYTES // 2
    assert [guest.push(bytes(size))[1] for _ in range(4)] == [True, True, True, False]
