"""Plans of who owns what, and who counts as alive."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from plato_msg.core.assignment import Liveness, assign
from plato_msg.core.progress import Progress

uids = st.sampled_from(list("abcdef"))


@given(st.sets(uids, min_size=1), st.lists(uids | st.just(""), min_size=1, max_size=64))
def test_r7_shares_are_even_and_nothing_moves_without_need(live: set[str], owners: list[str]) -> None:
    target = assign(live, owners)
    counts = {uid: target.count(uid) for uid in live}
    assert len(target) == len(owners) == sum(counts.values())
    assert max(counts.values()) - min(counts.values()) <= 1
    assert assign(live, target) == target, "a plan that is carried out stays"
    assert assign(sorted(live, reverse=True), owners) == target, "the order of names does not matter"
    # As few moves as even shares allow: everybody keeps min(what it has, its share).
    kept = sum(a == b for a, b in zip(owners, target, strict=True))
    share, more = divmod(len(owners), len(live))
    held = sorted((owners.count(uid) for uid in live), reverse=True)
    assert kept == sum(min(n, share + (i < more)) for i, n in enumerate(held))


def test_nobody_lives_nobody_owns() -> None:
    assert assign([], ["a", "b"]) == ["", ""]


def test_r7_who_does_not_beat_is_dead_after_so_many_looks_and_not_before() -> None:
    liveness = Liveness(3)
    named = {"a", "b"}
    assert liveness.observe({"a": 1, "b": 7}, named) == {"a", "b"}
    assert liveness.observe({"a": 2, "b": 7}, named) == {"a", "b"}
    assert liveness.observe({"a": 3, "b": 7}, named) == {"a", "b"}
    assert liveness.observe({"a": 4, "b": 7}, named) == {"a"}
    assert liveness.observe({"a": 5, "b": 8}, named) == {"a", "b"}, "it came back"


def test_r7_who_the_topology_no_longer_names_is_dead_at_once() -> None:
    liveness = Liveness(3)
    assert liveness.observe({"a": 1, "b": 1}, {"a", "b"}) == {"a", "b"}
    assert liveness.observe({"a": 2, "b": 2}, {"a"}) == {"a"}
    assert liveness.gone({"a"}) == []
    for beat in range(3, 7):
        liveness.observe({"a": beat, "b": 2}, {"a"})
    assert liveness.gone({"a"}) == ["b"]


@given(st.permutations(range(8)))
def test_r7_the_mark_passes_batches_in_order_only(order: list[int]) -> None:
    progress = Progress(10)
    tickets = [progress.open(20 + 10 * i) for i in range(8)]
    done: set[int] = set()
    for i in order:
        tickets[i].settle()
        done.add(i)
        front = next((k for k in range(8) if k not in done), 8)
        assert progress.fanned_out == 10 + 10 * front
        assert progress.settled == (len(done) == 8)
