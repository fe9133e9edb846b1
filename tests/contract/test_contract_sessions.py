"""SessionStore: fake and Valkey."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from plato.core.errors import Fenced
from plato.core.ids import make_id
from plato.ports import Fence, FenceView, Session

if TYPE_CHECKING:
    from tests.contract.conftest import Stores

NOW_MS = 1_800_000_000_000
SLOT = 17


def fence(epoch: int = 5, start: int = NOW_MS, token: str = "a1", owner: str = "plato-s0") -> Fence:
    return Fence(epoch, start, token, owner)


def session(n: int, slot: int = SLOT, **changes: object) -> Session:
    conn_id = make_id(NOW_MS + n, 3, slot)
    plain = Session(conn_id, f"user-{n}", (1 << 64) - 1 - n, bytes(range(n % 256)), n, guest=False)
    return replace(plain, **changes)  # type: ignore[arg-type]  # fields by name


async def own(stores: Stores, f: Fence, slot: int = SLOT) -> Fence:
    """Acquires against whatever stands now."""
    (view,) = await stores.sessions.look([slot])
    got = await stores.sessions.acquire({slot: f}, {slot: view.fence})
    return got[slot]


async def test_an_unknown_slot_has_no_fence(stores: Stores) -> None:
    assert await stores.sessions.look([3, 4]) == [FenceView(None, False, None)] * 2
    assert await stores.sessions.look([]) == []
    assert await stores.sessions.load(3) == []
    assert await stores.sessions.get(make_id(NOW_MS, 1, 3)) is None


async def test_acquire_sets_what_look_shows_in_order(stores: Stores) -> None:
    fences = {1: fence(), 1023: fence(epoch=6, owner="plato-s1", token="b2")}
    assert await stores.sessions.acquire(fences, {1: None, 1023: None}) == fences
    assert await stores.sessions.prove("plato-s1", "b2") is False
    views = await stores.sessions.look([1023, 2, 1, 1023])
    assert [v.fence for v in views] == [fences[1023], None, fences[1], fences[1023]]
    assert [v.proof for v in views] == [1, None, None, 1]


async def test_acquire_needs_what_was_seen(stores: Stores) -> None:
    first = await own(stores, fence())
    later = fence(epoch=6, token="b2", owner="plato-s1")
    for seen in (None, replace(first, token="zz"), replace(first, start=first.start - 1), replace(first, owner="x")):
        assert await stores.sessions.acquire({SLOT: later}, {SLOT: seen}) == {}
    assert (await stores.sessions.look([SLOT]))[0].fence == first
    assert await stores.sessions.acquire({SLOT: later}, {SLOT: first}) == {SLOT: replace(later, start=first.start + 1)}


async def test_acquire_of_a_missing_slot_that_was_seen_owned_loses(stores: Stores) -> None:
    first = await own(stores, fence())
    await stores.wipe()
    assert await stores.sessions.acquire({SLOT: fence(epoch=9)}, {SLOT: first}) == {}


async def test_acquire_refuses_an_older_epoch(stores: Stores) -> None:
    first = await own(stores, fence(epoch=7))
    assert await stores.sessions.acquire({SLOT: fence(epoch=6, start=NOW_MS + 99)}, {SLOT: first}) == {}
    same_epoch = fence(epoch=7, start=NOW_MS + 99, token="b2")
    assert await stores.sessions.acquire({SLOT: same_epoch}, {SLOT: first}) == {SLOT: same_epoch}


async def test_start_is_strictly_rising_whatever_the_clock_says(stores: Stores) -> None:
    starts = [(await own(stores, fence(start=at))).start for at in (NOW_MS, NOW_MS - 5_000, NOW_MS, NOW_MS + 7, 1)]
    assert starts == [NOW_MS, NOW_MS + 1, NOW_MS + 2, NOW_MS + 7, NOW_MS + 8]


async def test_of_racing_owners_one_acquires(stores: Stores) -> None:
    slots = range(20)
    contenders = [fence(token=f"t{i}", owner=f"plato-s{i}") for i in range(8)]
    seen: dict[int, Fence | None] = dict.fromkeys(slots)
    results = await asyncio.gather(
        *(stores.sessions.acquire(dict.fromkeys(slots, contender), seen) for contender in contenders)
    )
    won = [(slot, got) for result in results for slot, got in result.items()]
    assert sorted(slot for slot, _ in won) == list(slots)
    views = await stores.sessions.look(list(slots))
    assert {slot: view.fence for slot, view in zip(slots, views, strict=True)} == dict(won)


async def test_release_marks_only_our_own_and_acquire_clears_it(stores: Stores) -> None:
    mine = await own(stores, fence())
    await stores.sessions.release({SLOT: replace(mine, token="zz"), 99: mine})
    assert await stores.sessions.look([SLOT, 99]) == [FenceView(mine, False, None), FenceView(None, False, None)]
    await stores.sessions.release({SLOT: mine})
    assert (await stores.sessions.look([SLOT]))[0].released
    await own(stores, fence(token="b2"))
    assert not (await stores.sessions.look([SLOT]))[0].released


async def test_a_proof_rises_with_every_call_and_belongs_to_owner_and_token(stores: Stores) -> None:
    await own(stores, fence())
    assert await stores.sessions.prove("plato-s0", "another") is False
    assert (await stores.sessions.look([SLOT]))[0].proof is None
    assert await stores.sessions.prove("plato-s0", "a1") is False
    seen = []
    for _ in range(3):
        assert await stores.sessions.prove("plato-s0", "a1") is True
        seen.append((await stores.sessions.look([SLOT]))[0].proof or 0)
    assert seen[0] < seen[1] < seen[2]
    assert await stores.sessions.prove("plato-s1", "a1") is False
    assert (await stores.sessions.look([SLOT]))[0].proof == seen[2]


async def test_sessions_come_back_as_they_were_put(stores: Stores) -> None:
    mine = await own(stores, fence())
    put = [
        session(1),
        session(2, user="жук }{", secret=b"\x00\xff\r\n", platform="web", network="5g"),
        session(3, user="guest:1", guest=True, device_id=0),
    ]
    await stores.sessions.put(SLOT, mine, put)
    assert sorted(await stores.sessions.load(SLOT), key=lambda s: s.conn_id) == put
    assert [await stores.sessions.get(s.conn_id) for s in put] == put
    changed = replace(put[0], gen=99)
    await stores.sessions.put(SLOT, mine, [changed])
    assert await stores.sessions.get(changed.conn_id) == changed
    assert len(await stores.sessions.load(SLOT)) == 3


async def test_remove_deletes_and_absent_ones_do_no_harm(stores: Stores) -> None:
    mine = await own(stores, fence())
    put = [session(n) for n in range(5)]
    await stores.sessions.put(SLOT, mine, put)
    await stores.sessions.remove(SLOT, mine, [put[0].conn_id, put[3].conn_id, session(77).conn_id])
    await stores.sessions.remove(SLOT, mine, [put[0].conn_id])
    await stores.sessions.remove(SLOT, mine, [])
    assert {s.conn_id for s in await stores.sessions.load(SLOT)} == {put[1].conn_id, put[2].conn_id, put[4].conn_id}
    assert await stores.sessions.get(put[0].conn_id) is None


async def test_more_sessions_than_a_batch_holds(stores: Stores) -> None:
    mine = await own(stores, fence())
    put = [session(n) for n in range(1_111)]
    await stores.sessions.put(SLOT, mine, put)
    assert sorted(await stores.sessions.load(SLOT), key=lambda s: s.conn_id) == put
    await stores.sessions.remove(SLOT, mine, [s.conn_id for s in put[1:]])
    assert await stores.sessions.load(SLOT) == [put[0]]


async def test_slots_are_apart(stores: Stores) -> None:
    await own(stores, fence(), slot=1)
    await own(stores, fence(), slot=11)
    await stores.sessions.put(1, fence(), [session(1, slot=1)])
    await stores.sessions.put(11, fence(), [session(2, slot=11)])
    assert await stores.sessions.load(1) == [session(1, slot=1)]
    assert await stores.sessions.load(11) == [session(2, slot=11)]


@pytest.mark.parametrize(
    "foreign",
    [
        pytest.param({"epoch": 4, "start": NOW_MS + 9}, id="smaller-epoch"),
        pytest.param({"start": NOW_MS - 1}, id="smaller-start"),
        pytest.param({"token": "zz"}, id="equal-number-other-token"),
        pytest.param({"epoch": 6}, id="stored-is-smaller"),
        pytest.param({"start": NOW_MS + 1}, id="stored-start-is-smaller"),
    ],
)
async def test_r5_fences_refuse_older_owner(stores: Stores, foreign: dict[str, object]) -> None:
    mine = await own(stores, fence())
    await stores.sessions.put(SLOT, mine, [session(1)])
    other = replace(mine, **foreign)  # type: ignore[arg-type]  # fields by name
    for sessions in ([session(2)], []):
        with pytest.raises(Fenced):
            await stores.sessions.put(SLOT, other, sessions)
    for conn_ids in ([session(1).conn_id], []):
        with pytest.raises(Fenced):
            await stores.sessions.remove(SLOT, other, conn_ids)
    await stores.sessions.release({SLOT: other})
    assert await stores.sessions.load(SLOT) == [session(1)]
    assert await stores.sessions.look([SLOT]) == [FenceView(mine, False, None)]


async def test_r5_a_missing_fence_refuses_writes(stores: Stores) -> None:
    with pytest.raises(Fenced):
        await stores.sessions.put(SLOT, fence(), [session(1)])
    with pytest.raises(Fenced):
        await stores.sessions.remove(SLOT, fence(), [session(1).conn_id])
    assert await stores.sessions.load(SLOT) == []


async def test_r5_the_old_owner_writes_nothing_after_a_take_over(stores: Stores) -> None:
    old = await own(stores, fence())
    await stores.sessions.put(SLOT, old, [session(1)])
    new = await own(stores, fence(token="b2", owner="plato-s1"))
    with pytest.raises(Fenced):
        await stores.sessions.put(SLOT, old, [session(2)])
    with pytest.raises(Fenced):
        await stores.sessions.remove(SLOT, old, [session(1).conn_id])
    await stores.sessions.put(SLOT, new, [session(3)])
    assert sorted(s.gen for s in await stores.sessions.load(SLOT)) == [1, 3]


async def test_r5_a_wiped_store_shows_in_the_proof_and_refuses_until_acquired_again(stores: Stores) -> None:
    mine = await own(stores, fence())
    await stores.sessions.prove("plato-s0", "a1")
    assert await stores.sessions.prove("plato-s0", "a1") is True
    await stores.wipe()
    assert await stores.sessions.prove("plato-s0", "a1") is False
    with pytest.raises(Fenced):
        await stores.sessions.put(SLOT, mine, [session(1)])
    again = await own(stores, replace(mine, start=mine.start + 1))
    assert again == replace(mine, start=mine.start + 1)
    await stores.sessions.put(SLOT, again, [session(1)])
    assert await stores.sessions.load(SLOT) == [session(1)]
