"""Home slots, groups and grants: who mints where, and that no stamp is granted to two processes of one index."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from plato.topology.record import Shard, Topology, even_ranges
from plato_gateway.core.grants import Grants
from plato_gateway.core.homes import Groups, home_slots, slot_table, slots_for_worker
from plato_gateway.core.lanes import NO_GROUP

TOPOLOGY = Topology("c", 1, even_ranges(["a", "b"], 1), {"a": Shard("a:1", "ua"), "b": Shard("b:1", "ub")})


def test_a_gateway_mints_at_its_live_homes_else_at_others() -> None:
    assert home_slots(TOPOLOGY, ("a",), ("a", "b")) == tuple(range(512))
    assert home_slots(TOPOLOGY, ("a",), ("b",)) == tuple(range(512, 1024))
    assert home_slots(TOPOLOGY, ("a", "b"), ("b",)) == tuple(range(512, 1024))
    assert home_slots(TOPOLOGY, ("a",), ()) == ()


@given(st.sampled_from([1, 2, 4, 8, 16]), st.sets(st.integers(0, 1023)))
def test_workers_share_the_home_slots_without_overlap(workers: int, slots: set[int]) -> None:
    parts = [slots_for_worker(sorted(slots), k, workers) for k in range(workers)]
    assert sorted(s for part in parts for s in part) == sorted(slots)
    assert all(s % workers == k for k, part in enumerate(parts) for s in part)


def test_groups_keep_their_numbers_and_the_table_names_them() -> None:
    groups = Groups()
    groups.keep(["a", "b"])
    b = groups.of["b"]
    groups.keep(["b", "c"])
    assert groups.of["b"] == b
    assert len(set(groups.of.values())) == 2
    table = slot_table(TOPOLOGY, groups.of)
    assert set(table[:512]) == {NO_GROUP}
    assert set(table[512:]) == {b}


STEP = st.one_of(
    st.tuples(st.just("reserve"), st.integers(0, 5_000), st.integers(0, 3_000)),
    st.tuples(st.just("look"), st.integers(0, 1), st.integers(1, 3)),
)


@given(st.lists(STEP, max_size=40))
def test_no_stamp_is_granted_to_two_processes_of_one_index(steps: list[tuple[str, int, int]]) -> None:
    grants = Grants()
    end_ms = 1_000
    reserved: list[tuple[int, int]] = []
    granted: dict[tuple[int, int], set[int]] = {}
    for what, a, b in steps:
        if what == "reserve":
            from_ms = end_ms + (a if a % 3 == 0 else 0)  # most follow without a gap
            end_ms = from_ms + b
            grants.reserved(from_ms, end_ms)
            reserved.append((from_ms, end_ms))
        else:
            from_ms, until_ms = grants.window(a, b)
            # Stamps in steps of 50 stand for all: windows begin and end anywhere, so look at each edge too.
            stamps = {*range(from_ms, until_ms, 50), from_ms, until_ms - 1} if until_ms > from_ms else set()
            for other, theirs in granted.items():
                if other[0] == a and other[1] != b:
                    assert not stamps & theirs
            granted.setdefault((a, b), set()).update(range(from_ms, until_ms))
            assert all(any(f <= s < u for f, u in reserved) for s in stamps)


def test_a_new_process_gets_only_what_is_reserved_after_it_came() -> None:
    grants = Grants()
    grants.reserved(100, 200)
    assert grants.window(0, 11) == (100, 200)
    assert grants.window(1, 12) == (100, 200)  # another index mints in other slots
    assert grants.window(0, 13) == (200, 200)
    grants.reserved(200, 300)
    assert grants.window(0, 13) == (200, 300)
    assert grants.window(1, 12) == (100, 300)
