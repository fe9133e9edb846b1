"""Friends: what two are to each other under every act, in any order, at once, and over a block that nobody notices."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from uuid import uuid4

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plato.adapters.pg import Database
from plato.adapters.schema_pg import migrate
from plato.core.codes import Code
from plato.core.conversations import dialogue_id
from plato.core.errors import PeerError
from plato.wire.v1 import client_pb2 as wire
from plato_msg import gates_pg
from plato_msg.core import friendship
from plato_msg.core.friendship import ACTS, BLOCKED, COUNTERPART, FRIENDS, NONE, Act, Refused, Side
from plato_msg.friends import Friends
from plato_msg.friends_pg import Impossible, PgFriends
from plato_msg.userstate_pg import PgUserStates

STEP = st.tuples(st.sampled_from(ACTS), st.booleans())


@settings(max_examples=40)
@given(st.lists(STEP, max_size=12))
def test_a_relation_is_one_thing_told_from_two_sides(steps: Sequence[tuple[Act, bool]]) -> None:
    sides = [Side(), Side()]
    for act, second in steps:
        own, other = sides[second], sides[not second]
        judged = friendship.judge(act, own, other, "hi")
        if isinstance(judged, Refused):
            continue
        sides[second], sides[not second] = judged
        assert COUNTERPART[sides[0].relation] == sides[1].relation
        assert sides[not second].blocked == other.blocked, "nobody unblocks himself"
        assert friendship.judge(act, *judged, "hi") == judged, "done once"
        assert bool(sides[0].words) <= (sides[0].relation in (friendship.ASKED, friendship.WAITING))


@settings(max_examples=40)
@given(st.lists(STEP, max_size=10))
def test_who_is_blocked_sees_what_he_would_see_if_he_were_not(steps: Sequence[tuple[Act, bool]]) -> None:
    """The blocked side's acts and sights, with the block and without it."""
    blocked, free = [Side(), Side()], [Side(), Side()]
    blocked[0] = Side(blocked=True)
    for act, second in steps:
        if not second:
            continue  # who blocks looks away
        for sides in (blocked, free):
            judged = friendship.judge(act, sides[1], sides[0])
            if not isinstance(judged, Refused):
                sides[1], sides[0] = judged
        assert blocked[1].seen == free[1].seen
        assert blocked[0].seen == (BLOCKED, "")


class Told:
    """What devices were told."""

    def __init__(self) -> None:
        self.states: dict[str, list[tuple[int, int, str]]] = {}

    async def changed(self, told: Mapping[str, Sequence[wire.StateMsg]]) -> None:
        for user, states in told.items():
            for state in states:
                assert state.prev_version == state.version - 1
                (friend,) = state.friends
                self.states.setdefault(user, []).append((state.version, friend.status, friend.words))


@pytest.fixture
async def database(postgres_uri: str) -> AsyncIterator[Database]:
    schema = f"friends_{uuid4().hex[:12]}"
    await migrate(postgres_uri, schema, 4)
    made = Database(postgres_uri, schema, size=8)
    yield made
    await made.close()


async def test_a_request_is_told_to_both_and_taken(database: Database) -> None:
    told = Told()
    friends = Friends(PgFriends(database), told, friends_only=False)
    assert (await friends.act("request", "ann", "ben", "it is me")).status == friendship.ASKED
    assert (await friends.act("request", "ann", "ben", "again")).words == "it is me", "asked once"
    assert told.states == {"ann": [(1, 1, "it is me")], "ben": [(1, 2, "it is me")]}
    assert (await friends.act("accept", "ben", "ann")).status == FRIENDS
    assert told.states["ann"][1:] == [(2, 3, "")]
    assert told.states["ben"][1:] == [(2, 3, "")]
    with pytest.raises(Impossible):
        await friends.act("accept", "ann", "cid")
    assert [f.user for f in await friends.page("ann", FRIENDS, "", 10)] == ["ben"]
    assert (await friends.act("remove", "ann", "ben")).status == NONE
    assert await friends.page("ben", None, "", 10) == []
    for other in ("ann", "", "x\x01"):
        with pytest.raises(PeerError) as refused:
            await friends.act("request", "ann", other)
        assert refused.value.code == Code.BAD_TO_USER


async def test_a_device_that_was_away_gets_friends_by_its_version(database: Database) -> None:
    store, states = PgFriends(database), PgUserStates(database)
    for name in ("ben", "cid", "dan"):
        await store.act("request", name, "ann", name)
    await store.act("refuse", "ann", "cid")
    await store.act("block", "ann", "dan")

    async def since(version: int) -> tuple[int, dict[str, int]]:
        state = await states.since("ann", version, 500, 32_768, [store])
        return state.version, {f.user: f.status for f in state.friends}

    assert await since(0) == (5, {"ben": 2, "cid": 0, "dan": 4})
    assert await since(3) == (5, {"cid": 0, "dan": 4})
    assert await since(5) == (5, {})
    await store.act("remove", "dan", "ann")
    assert await since(5) == (5, {}), "who is blocked changes nothing that is seen"
    assert (await store.act("unblock", "ann", "dan"))["ann"].status == NONE
    assert await since(5) == (6, {"dan": 0})


async def test_who_is_blocked_is_answered_and_told_as_before(database: Database) -> None:
    told = Told()
    friends = Friends(PgFriends(database), told, friends_only=False)
    await friends.act("block", "ann", "ben")
    assert "ben" not in told.states
    assert await friends.friend("ben", "ann") is None
    assert (await friends.act("request", "ben", "ann", "please")).status == friendship.ASKED
    assert told.states["ann"] == [(1, BLOCKED, "")], "and who blocks is not bothered"
    assert [f.status for f in await friends.page("ann", None, "", 10)] == [BLOCKED]
    with pytest.raises(Impossible):
        await friends.act("request", "ann", "ben")
    assert (await friends.act("unblock", "ann", "ben")).words == "please", "unblocking shows who waits"


async def test_acts_of_both_at_once_keep_one_relation_and_never_deadlock(database: Database) -> None:
    store = PgFriends(database)
    names = [f"u{n}" for n in range(5)]
    pairs = [(a, b) for a in names for b in names if a != b]

    async def go(turn: int, user: str, other: str) -> None:
        act: Act = ACTS[(turn + len(user + other) + names.index(user)) % 4]
        try:
            await store.act(act, user, other)
        except Impossible:
            pass

    await asyncio.gather(*(go(turn, *pair) for turn in range(6) for pair in pairs))
    async with database.connection() as connection:
        rows = await connection.fetch("SELECT user_id, other_id, relation FROM im_friend")
    relations = {(row[0], row[1]): row[2] for row in rows}
    for (user, other), relation in relations.items():
        assert relations[other, user] == COUNTERPART[relation]


async def test_requests_that_cross_make_friends(database: Database) -> None:
    store = PgFriends(database)
    for n in range(10):
        await asyncio.gather(store.act("request", f"a{n}", f"b{n}"), store.act("request", f"b{n}", f"a{n}"))
        seen = [await store.friend(f"a{n}", f"b{n}"), await store.friend(f"b{n}", f"a{n}")]
        assert [f.status for f in seen if f is not None] == [FRIENDS, FRIENDS]


async def test_the_platform_says_who_may_write_until_the_user_does(database: Database) -> None:
    for default in (False, True):
        friends = Friends(PgFriends(database), Told(), friends_only=default)
        await friends.choose("ann", None)
        assert await friends.settings("ann") == (default, None)
        assert await friends.choose("ann", not default) == (not default, not default)
        assert await friends.settings("ann") == (not default, not default)


async def test_who_blocks_or_takes_friends_only_is_not_brought_into_groups(database: Database) -> None:
    store = PgFriends(database)
    await store.act("block", "ann", "ben")
    await store.act("request", "ben", "dan")
    await store.act("accept", "dan", "ben")
    await store.act("block", "ben", "eve")
    await store.set_friends_only("dan", True)
    await store.set_friends_only("cid", True)
    await store.set_friends_only("eve", False)
    pairs = [
        ("ann", "ben"),
        ("cid", "ben"),
        ("dan", "ben"),
        ("eve", "ben"),
        ("fay", "ben"),
        ("ann", "cid"),
        ("dan", "cid"),
    ]
    async with database.connection() as connection:
        assert await gates_pg.uninvited(connection, pairs, False) == {("ann", "ben"), ("cid", "ben"), ("dan", "cid")}
        assert await gates_pg.uninvited(connection, pairs, True) == {
            *(("ann", "ben"), ("cid", "ben"), ("dan", "cid")),
            *(("fay", "ben"), ("ann", "cid")),
        }
    await store.act("request", "ben", "ann")
    await store.act("unblock", "ann", "ben")
    await store.act("accept", "ann", "ben")
    await store.act("block", "ann", "ben")
    async with database.connection() as connection:
        assert await gates_pg.uninvited(connection, pairs[:1], False) == {("ann", "ben")}, "a friend, too"


async def test_who_blocks_does_not_hear_that_the_other_one_writes(database: Database) -> None:
    store, states = PgFriends(database), PgUserStates(database)
    dialogue = dialogue_id("ann", "ben")
    async with database.connection() as connection:
        await connection.executemany(
            "INSERT INTO im_member (conversation_id, user_id) VALUES ($1, $2)",
            [(conversation_id, user) for conversation_id in (dialogue, "g:town") for user in ("ann", "ben")],
        )
    keys = [(user, conversation_id) for conversation_id in (dialogue, "g:town") for user in ("ann", "ben")]
    everything = {(user, c): ["ben" if user == "ann" else "ann"] for user, c in keys}
    assert await states.audiences(keys, 500) == everything
    await store.act("block", "ann", "ben")
    assert await states.audiences(keys, 500) == {**everything, ("ben", dialogue): []}
