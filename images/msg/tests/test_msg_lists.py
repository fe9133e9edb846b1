"""A user's list of conversations, what is unread of it, and who has read, against a real PostgreSQL and beside a model that
counts one by one."""

from __future__ import annotations

import json
import random
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

from msg_harness import Cluster, cluster, written
from plato.core.conversations import dialogue_id
from plato_msg import lists_pg
from plato_msg.lists_pg import PgLists
from plato_msg.userstate import UserStates


@asynccontextmanager
async def lists(postgres_uri: str) -> AsyncIterator[tuple[Cluster, UserStates]]:
    """A cluster whose process only reads."""
    async with cluster(postgres_uri) as c:
        yield c, c.build().service.states


async def mark(c: Cluster, user: str, conversation_id: str, **columns: object) -> None:
    """A row of the user's state."""
    names = ", ".join(columns)
    values = ", ".join(f"${n}" for n in range(3, 3 + len(columns)))
    async with c._database.connection() as connection:
        await connection.execute(
            f"INSERT INTO im_user_state (user_id, conversation_id, version, {names}) VALUES ($1, $2, 1, {values})",
            user,
            conversation_id,
            *columns.values(),
        )


async def walk(states: UserStates, user: str, limit: int) -> list[str]:
    """The whole list, page by page."""
    found: list[str] = []
    cursor = ""
    while True:
        page = await states.conversations(user, cursor, limit)
        assert page is not None
        found += [item.conversation_id for item in page.items]
        cursor = page.cursor
        if not cursor:
            return found
        assert len(page.items) == limit


async def test_pinned_ones_come_first_then_the_newest_and_no_page_repeats_or_skips(postgres_uri: str) -> None:
    async with lists(postgres_uri) as (c, states):
        for n in range(9):
            await written(c, f"g:{n}", ["bob"] * 2, {"alice": 0, "bob": 0})
        await written(c, "g:others", ["bob"], {"bob": 0})
        async with c._database.connection() as connection:
            for n, pinned in ((2, "2026-01-01"), (5, "2026-01-02")):
                await connection.execute(
                    "INSERT INTO im_user_state (user_id, conversation_id, version, pinned_at)"
                    f" VALUES ('alice', 'g:{n}', 1, '{pinned}')"
                )
            # What has no message yet that its reader may see stands last.
            await connection.execute("INSERT INTO im_conversation (conversation_id, kind) VALUES ('g:new', 'group')")
            await connection.execute("INSERT INTO im_member (conversation_id, user_id) VALUES ('g:new', 'alice')")
        expected = ["g:5", "g:2", *(f"g:{n}" for n in (8, 7, 6, 4, 3, 1, 0)), "g:new"]
        for limit in (1, 3, 4, 100):
            assert await walk(states, "alice", limit) == expected
        for nonsense in ("x", "AAAA", "é", "/" * 40):
            assert await states.conversations("alice", nonsense) is None
        assert await walk(states, "nobody", 10) == []


async def test_an_item_says_what_its_user_sees(postgres_uri: str) -> None:
    async with lists(postgres_uri) as (c, states):
        dialogue = dialogue_id("alice", "bob")
        await written(c, dialogue, ["alice", "bob", "bob"], {"alice": 0, "bob": 0}, kind="dialogue")
        await mark(c, "alice", dialogue, read_seq=1, peer_read_seq=3)
        await written(c, "g:x", ["bob"] * 5, {"carol": 0}, left={"alice": 3})
        await c.execute("UPDATE im_former_member SET title = 'then'")
        await written(c, "g:cleared", ["bob"] * 3, {"alice": 0, "bob": 0})
        await mark(c, "alice", "g:cleared", cleared_seq=3)
        await written(c, "g:back", ["bob"] * 4, {"alice": 0, "bob": 0})
        await mark(c, "alice", "g:back", cleared_seq=3)
        await c.execute(
            "UPDATE im_message SET body = convert_to(repeat('x', 500), 'UTF8') WHERE conversation_id = 'g:back'"
        )
        await c.execute("INSERT INTO im_hidden VALUES ('alice', 'g:x', 3, 1)")
        page = await states.conversations("alice")
        assert page is not None
        back, left, talk = page.items
        assert (talk.kind, talk.peer, talk.unread, talk.read_seq, talk.peer_read_seq) == ("dialogue", "bob", 2, 1, 3)
        assert talk.last is not None
        assert (talk.last.seq, talk.last.from_user, talk.last.body, talk.newest_seq) == (3, "bob", b"m3", 3)
        assert (left.left, left.title, left.members, left.newest_seq, left.unread) == (True, "then", 0, 3, 2)
        assert left.last is not None
        assert left.last.seq == 2, "the newest one that is not deleted for its user"
        assert back.last is not None
        assert (back.conversation_id, back.title, back.members, back.unread) == ("g:back", "T", 2, 1)
        assert back.last.body == b"x" * 200
        one = await states.conversation("alice", "g:cleared")
        assert one is not None
        assert (one.last, one.unread) == (None, 0)
        assert await states.conversation("alice", dialogue) == talk


async def test_unread_is_what_others_said_since_and_is_still_there(postgres_uri: str) -> None:
    async with lists(postgres_uri) as (c, states):
        authors = ["bob", "alice", "bob", "bob", "alice", "bob", "bob", "bob"]
        await written(c, "g:x", authors, {"alice": 1, "bob": 0})
        await c.execute("UPDATE im_message SET recalled = true WHERE seq = 4")
        await c.execute("UPDATE im_message SET msg_type = 1001 WHERE seq = 6")
        await c.execute("INSERT INTO im_hidden VALUES ('alice', 'g:x', 7, 1), ('bob', 'g:x', 8, 1)")
        await written(c, "g:muted", ["bob"] * 3, {"alice": 0})
        await c.execute(
            "INSERT INTO im_user_state (user_id, conversation_id, version, muted_until)"
            " VALUES ('alice', 'g:muted', 1, now() + interval '1 hour')"
        )
        page = await states.conversations("alice")
        assert page is not None
        assert {item.conversation_id: item.unread for item in page.items} == {"g:x": 2, "g:muted": 3}, "seqs 3 and 8"
        assert await states.unread("alice") == 2
        await c.execute("UPDATE im_user_state SET muted_until = now() - interval '1 second'")
        assert await states.unread("alice") == 5
        await mark(c, "alice", "g:x", read_seq=3)
        assert await states.unread("alice") == 4


async def test_who_has_read_as_counted_one_by_one(postgres_uri: str) -> None:
    chance = random.Random(3)
    async with lists(postgres_uri) as (c, states):
        for group in range(4):
            conversation_id = f"g:{group}"
            users = [f"u{n:02}" for n in range(chance.randint(2, 40))]
            authors = [chance.choice([*users, "gone"]) for _ in range(20)]
            joined = {user: chance.choice([0, 0, chance.randint(0, 19)]) for user in users}
            await written(c, conversation_id, authors, joined, left={"gone": 12})
            read = {user: chance.randint(0, 20) for user in [*users[1:], "gone"]}
            for user, seq in read.items():
                await mark(c, user, conversation_id, read_seq=seq)
            expected = {
                seq: [u for u in users if u != author and joined[u] < seq <= read.get(u, 0)]
                for seq, author in enumerate(authors, 1)
            }
            asker = users[0]
            mine = {seq: who for seq, who in expected.items() if seq > joined[asker]}
            counts = await states.read_counts(asker, conversation_id, [0, *range(1, 30)])
            assert counts == {seq: len(who) for seq, who in mine.items()}
            for seq in chance.sample(range(1, 21), 5):
                assert await states.readers(asker, conversation_id, seq) == mine.get(seq, [])
                found: list[str] = []
                while page := await states.readers(asker, conversation_id, seq, found[-1] if found else "", 3):
                    found += page
                assert found == mine.get(seq, [])
            assert await states.read_counts("gone", conversation_id, [1, 12]) is None, "who left is told no more"
            assert await states.readers("gone", conversation_id, 1) is None
        assert await states.read_counts("eve", "g:0", [1]) is None
        assert await states.readers("eve", "g:0", 1) is None


def scans(plan: dict[str, Any]) -> Iterator[tuple[str, str, float]]:
    """(kind, table, rows in all loops) of each scan of a plan."""
    if "Relation Name" in plan:
        rows = (plan["Actual Rows"] + plan.get("Rows Removed by Filter", 0)) * plan["Actual Loops"]
        yield plan["Node Type"], plan["Relation Name"], rows
    for below in plan.get("Plans", ()):
        yield from scans(below)


async def test_a_list_reads_its_users_rows_and_no_others(postgres_uri: str) -> None:
    """300 conversations of one user among 900: index scans only, rows in proportion to the user's own."""
    async with cluster(postgres_uri) as c:
        await c.execute(
            "INSERT INTO im_conversation (conversation_id, kind, last_seq)"
            " SELECT 'g:' || n, 'group', 30 FROM generate_series(1, 900) n;"
            "INSERT INTO im_member (conversation_id, user_id)"
            " SELECT 'g:' || n, u FROM generate_series(1, 900) n, unnest(ARRAY['alice', 'bob']) u"
            "   WHERE u = 'bob' OR n <= 300;"
            "INSERT INTO im_message (msg_id, conversation_id, seq, prev_seq, from_user, msg_type, body, client_msg_id,"
            " server_at) SELECT n * 30 + s, 'g:' || n, s, s - 1, 'bob', 0, 'x', int8send(n * 30 + s), now()"
            " FROM generate_series(1, 900) n, generate_series(1, 30) s; ANALYZE;"
            # Behind the planner's back: it takes these tables for empty.
            "INSERT INTO im_user_state (user_id, conversation_id, version, read_seq)"
            " SELECT 'alice', 'g:' || n, 1, 0 FROM generate_series(1, 300) n;"
            "INSERT INTO im_hidden SELECT 'alice', 'g:' || n, 100 + s, 1"
            " FROM generate_series(1, 300) n, generate_series(1, 30) s"
        )
        page = await PgLists(c._database).page("alice", "", 20)
        assert page is not None
        assert [(i.conversation_id, i.unread) for i in page.items] == [(f"g:{n}", 30) for n in range(300, 280, -1)]
        for statement, arguments, most in (
            (lists_pg._PAGE, ("alice", 21, None, 0, ""), 4 * 300 + 21 * 2 * 32),
            (lists_pg._TOTAL, ("alice",), 3 * 300 + 1_050),
        ):
            async with c._database.connection() as connection:
                said = await connection.fetchval(f"EXPLAIN (ANALYZE, FORMAT JSON) {statement}", *arguments)
            found = list(scans(json.loads(said)[0]["Plan"]))
            assert {kind for kind, _, _ in found} <= {"Index Scan", "Index Only Scan", "Bitmap Heap Scan"}, found
            assert sum(rows for _, _, rows in found) <= most, found
