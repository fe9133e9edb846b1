"""R6's machine alone: which events count, and what an announcement means."""

from __future__ import annotations

from plato_state.core.attaches import Announced, Attach, Attaches, slots_of_bitmap


def loaded(slot: int) -> bool:
    return slot < 8


def attach(attaches: Attaches, boot: int, number: int, *, begins: bool = True) -> Attach:
    got = attaches.accept(7, 0, boot, number, begins)
    assert got is not None
    return got


def conn(slot: int, n: int = 0) -> int:
    return (n + 1) << 12 | slot


def test_events_of_an_older_attach_are_dropped() -> None:
    attaches = Attaches()
    attach(attaches, 1, 5)
    assert attaches.accept(7, 0, 1, 4, True) is None
    assert attaches.accept(7, 0, 1, 5, False) is not None
    assert attaches.accept(7, 0, 1, 6, False) is None, "a newer one begins with BEGIN"
    attach(attaches, 1, 6)
    assert attaches.accept(7, 0, 1, 5, True) is None


def test_another_boot_begins_anew_and_the_old_one_is_dropped() -> None:
    attaches = Attaches()
    attach(attaches, 1, 5)
    assert attaches.accept(7, 0, 2, 1, False) is None
    attach(attaches, 2, 1)
    assert attaches.accept(7, 0, 1, 5, False) is None


def test_workers_and_gateways_are_told_apart() -> None:
    attaches = Attaches()
    attach(attaches, 1, 5)
    assert attaches.accept(7, 1, 1, 4, True) is not None
    assert attaches.accept(8, 0, 1, 4, True) is not None


def test_without_its_stream_nobody_speaks_until_the_next_begin() -> None:
    attaches = Attaches()
    attach(attaches, 1, 5)
    attaches.detach(7)
    assert attaches.accept(7, 0, 1, 5, False) is None
    assert attaches.accept(7, 0, 1, 6, False) is None
    assert attaches.accept(7, 0, 1, 6, True) is not None


def test_end_says_what_lives_in_the_covered_slots() -> None:
    attaches = Attaches()
    a = attach(attaches, 1, 5)
    attaches.begin(a, frozenset({1, 2}))
    attaches.lives(a, conn(1), True)
    attaches.lives(a, conn(2), True)
    attaches.lives(a, conn(2, 1), True)
    attaches.closed(a, conn(2))
    attaches.lives(a, conn(3), True)
    said = attaches.end(a, loaded)
    assert said == Announced(7, 0, 1, frozenset({1, 2}), frozenset({conn(1), conn(2, 1)}))
    assert attaches.end(a, loaded) is None, "no BEGIN stands"


def test_what_lives_in_a_slot_that_still_loads_is_kept_for_then() -> None:
    attaches = Attaches()
    a = attach(attaches, 1, 5)
    attaches.begin(a, frozenset({1, 9, 10}))
    attaches.lives(a, conn(9), False)
    said = attaches.end(a, loaded)
    assert said is not None
    assert said.slots == {1}
    attaches.lives(a, conn(9, 1), False)
    attaches.lives(a, conn(9, 2), False)
    attaches.closed(a, conn(9, 2))
    assert attaches.loaded_slot(9) == [Announced(7, 0, 1, frozenset({9}), frozenset({conn(9), conn(9, 1)}))]
    assert attaches.loaded_slot(9) == []
    assert attaches.loaded_slot(10) == [Announced(7, 0, 1, frozenset({10}), frozenset())]


def test_an_announcement_of_moved_slots_leaves_the_others_as_they_were() -> None:
    attaches = Attaches()
    a = attach(attaches, 1, 5)
    attaches.begin(a, frozenset({9}))
    attaches.lives(a, conn(9), False)
    attaches.end(a, loaded)
    a = attach(attaches, 1, 6)
    attaches.begin(a, frozenset({10}))
    attaches.end(a, loaded)
    assert [s.named for s in attaches.loaded_slot(9)] == [frozenset({conn(9)})]


def test_a_lost_stream_takes_what_was_kept_with_it() -> None:
    attaches = Attaches()
    a = attach(attaches, 1, 5)
    attaches.begin(a, frozenset({9}))
    attaches.lives(a, conn(9), False)
    attaches.end(a, loaded)
    attaches.detach(7)
    assert attaches.loaded_slot(9) == []


def test_bitmaps() -> None:
    assert slots_of_bitmap(b"") == frozenset()
    assert slots_of_bitmap(b"\x05" + bytes(126) + b"\x80") == {0, 2, 1023}
    assert slots_of_bitmap(b"\xff" * 500) == set(range(1024))
