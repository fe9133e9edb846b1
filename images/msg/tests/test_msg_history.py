"""Sync and Pull against a real PostgreSQL: pages end, ranges say what they cover, and nobody sees what is not theirs."""

from __future__ import annotations

import random
from collections.abc import Iterable

import pytest
from msg_harness import Cluster, cluster, until, up
from plato.core.codes import Code
from plato.core.conversations import dialogue_id
from plato.wire.v1 import client_pb2 as wire
from plato_msg.history import MAX_CURSORS, History
from plato_msg.store_pg import PgMsgStore

ALICE_BOB = dialogue_id("alice", "bob")


async def fill(
    c: Cluster,
    conversation_id: str,
    seqs: Iterable[int],
    *,
    members: dict[str, int] | None = None,
    kind: str = "open",
    body: bytes = b"x",
    last_seq: int | None = None,
) -> None:
    """A conversation as if it had been written: rows at these seqs, members {user: joined_seq}."""
    seqs = list(seqs)
    async with c._database.connection() as connection:
        newest = max(seqs, default=0) if last_seq is None else last_seq
        await connection.execute("INSERT INTO im_conversation VALUES ($1, $2, $3)", conversation_id, kind, newest)
        for user, joined in (members or {"alice": 0}).items():
            await connection.execute("INSERT INTO im_member VALUES ($1, $2, $3)", conversation_id, user, joined)
        (first,) = await connection.fetchrow("SELECT coalesce(max(msg_id), 0) + 1 FROM im_message") or (1,)
        await connection.executemany(
            "INSERT INTO im_message VALUES ($1, $2, $3, $4, 'alice', 1, $5, $6, now())",
            [
                (first + i, conversation_id, seq, seqs[i - 1] if i else 0, body, (first + i).to_bytes(16, "big"))
                for i, seq in enumerate(seqs)
            ],
        )


def history(c: Cluster, max_frame_bytes: int = 65_536) -> History:
    return History(PgMsgStore(c._database), max_frame_bytes=max_frame_bytes)


def seqs_of(answer: wire.PulledMsg) -> list[int]:
    return [row.seq for row in answer.rows]


def covered(answer: wire.PulledMsg) -> tuple[int, int]:
    return (answer.covered_from, answer.covered_to)


async def pull(
    h: History,
    from_seq: int = 0,
    to_seq: int = 0,
    limit: int = 0,
    *,
    user: str = "alice",
    conversation_id: str = "room",
    newest_first: bool = False,
) -> wire.PulledMsg:
    return await h.pull(
        user,
        wire.PullMsg(
            ref=9,
            conversation_id=conversation_id,
            from_seq=from_seq,
            to_seq=to_seq,
            limit=limit,
            newest_first=newest_first,
        ),
    )


# ── Pull ─────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_m5_pages_of_24_above_a_cursor_of_10_leave_nothing_out(postgres_uri: str) -> None:
    async with cluster(postgres_uri) as c:
        await fill(c, "room", range(1, 51))
        h = history(c)
        first = await pull(h, 11, 0, 24)
        assert (first.ref, first.code, first.newest_seq) == (9, Code.OK, 50)
        assert (seqs_of(first), covered(first)) == (list(range(11, 35)), (11, 34))
        second = await pull(h, 35, 0, 24)
        assert (seqs_of(second), covered(second)) == (list(range(35, 51)), (35, 50))


async def test_rows_carry_everything_that_a_push_does(postgres_uri: str) -> None:
    async with cluster(postgres_uri) as c:
        await c.start()
        bob = c.connect("bob")
        message = up("alice", "bob", b"\x00body\xff")
        await c.send(message, up("bob", "alice", b"2"))
        await until(c.settled)
        answer = await pull(history(c), conversation_id=ALICE_BOB, user="bob")
        (row, _), (push,) = answer.rows, c.pushes(bob)
        push.ClearField("trace_id")  # it ends with the push
        assert row == push
        assert row.client_msg_id == message.client_msg_id
        assert abs(row.server_at_ms - push.server_at_ms) == 0


@pytest.mark.parametrize("newest_first", [False, True])
async def test_a_pull_over_any_range_ends_and_covers_it_even_with_holes(postgres_uri: str, newest_first: bool) -> None:
    chance = random.Random(newest_first)
    async with cluster(postgres_uri) as c:
        seqs = sorted(chance.sample(range(3, 400), 120))
        await fill(c, "room", seqs, last_seq=405)
        h = history(c)
        for _ in range(25):
            low, high = sorted((chance.randrange(0, 420), chance.randrange(1, 420)))
            limit = chance.randrange(1, 40)
            wanted = [s for s in seqs if low <= s <= high]
            got: list[int] = []
            begin, end, pulls = max(low, 1), min(high, 405), 0
            while begin <= end:
                answer = await pull(h, begin, end, limit, newest_first=newest_first)
                pulls += 1
                a, b = covered(answer)
                assert seqs_of(answer) == sorted(seqs_of(answer))
                assert len(answer.rows) <= limit
                assert seqs_of(answer) == [s for s in seqs if a <= s <= b], "every row of what it covers, and no other"
                got += seqs_of(answer)
                if newest_first:
                    assert b == end
                    end = a - 1
                else:
                    assert a == begin
                    begin = b + 1
            assert sorted(got) == wanted
            assert pulls <= len(wanted) // limit + 1, "a hole costs no pull"


async def test_what_is_not_there_yet_is_not_covered(postgres_uri: str) -> None:
    async with cluster(postgres_uri) as c:
        await fill(c, "room", range(1, 11))
        h = history(c)
        answer = await pull(h, 5, 100)
        assert (seqs_of(answer), covered(answer), answer.newest_seq) == ([5, 6, 7, 8, 9, 10], (5, 10), 10)
        beyond = await pull(h, 11, 100)
        assert (seqs_of(beyond), covered(beyond), beyond.newest_seq) == ([], (11, 10), 10)
        assert (await pull(h, (1 << 64) - 1, (1 << 64) - 1)).code == Code.OK


async def test_a_member_sees_nothing_from_before_the_join_and_the_range_is_covered(postgres_uri: str) -> None:
    async with cluster(postgres_uri) as c:
        await fill(c, "room", range(1, 11), members={"alice": 0, "bob": 6})
        answer = await pull(history(c), user="bob")
        assert (seqs_of(answer), covered(answer)) == ([7, 8, 9, 10], (1, 10))
        early = await pull(history(c), 1, 5, user="bob")
        assert (seqs_of(early), covered(early)) == ([], (1, 5))


async def test_newest_first_gives_the_newest_page_by_rising_seq(postgres_uri: str) -> None:
    async with cluster(postgres_uri) as c:
        await fill(c, "room", range(1, 31))
        answer = await pull(history(c), limit=10, newest_first=True)
        assert (seqs_of(answer), covered(answer)) == (list(range(21, 31)), (21, 30))


async def test_a_removed_range_is_answered_as_covered(postgres_uri: str) -> None:
    async with cluster(postgres_uri) as c:
        await fill(c, "room", range(50, 61))
        answer = await pull(history(c), 1, 49)
        assert (seqs_of(answer), covered(answer)) == ([], (1, 49))


@pytest.mark.parametrize("body_bytes", [100, 7_000, 63_488])
async def test_an_answer_fits_into_a_frame_and_the_pulls_still_end(postgres_uri: str, body_bytes: int) -> None:
    async with cluster(postgres_uri) as c:
        await fill(c, "room", range(1, 21), body=b"b" * body_bytes)
        h = history(c)
        for newest_first in (False, True):
            got: list[int] = []
            begin, end = 1, 20
            while begin <= end:
                answer = await pull(h, begin, end, 500, newest_first=newest_first)
                cmd = wire.MsgCmd(Type=wire.PULLED, Payload=answer.SerializeToString())
                assert cmd.ByteSize() <= 65_536
                assert answer.rows
                got += seqs_of(answer)
                begin, end = (begin, answer.covered_from - 1) if newest_first else (answer.covered_to + 1, end)
            assert sorted(got) == list(range(1, 21))


async def test_who_is_no_member_learns_nothing(postgres_uri: str) -> None:
    async with cluster(postgres_uri) as c:
        await fill(c, "room", range(1, 5), members={"alice": 0})
        h = history(c)
        there, nowhere = await pull(h, user="mallory"), await pull(h, user="mallory", conversation_id="no such room")
        assert there.code == Code.NOT_A_MEMBER
        there.conversation_id = nowhere.conversation_id
        assert there == nowhere


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"conversation_id": "room", "limit": 501}, Code.BAD_RANGE),
        ({"conversation_id": "room", "from_seq": 5, "to_seq": 4}, Code.BAD_RANGE),
        ({"conversation_id": ""}, Code.BAD_CONVERSATION),
        ({"conversation_id": "a\x00b"}, Code.BAD_CONVERSATION),
        ({"conversation_id": "x" * 65}, Code.BAD_CONVERSATION),
    ],
)
async def test_a_bad_pull_is_refused_with_its_code(postgres_uri: str, fields: dict[str, int], code: Code) -> None:
    async with cluster(postgres_uri) as c:
        answer = await history(c).pull("alice", wire.PullMsg(ref=3, **fields))  # type: ignore[arg-type]  # mixed fields
        assert (answer.ref, answer.code, len(answer.rows)) == (3, code, 0)


# ── Sync ─────────────────────────────────────────────────────────────────────────────────────────────────────


def cursors(pairs: dict[str, int]) -> list[wire.Cursor]:
    return [wire.Cursor(conversation_id=c, seq=s) for c, s in sorted(pairs.items(), key=lambda p: p[0].encode())]


async def test_sync_lists_what_is_newer_than_its_cursor_or_unlisted(postgres_uri: str) -> None:
    async with cluster(postgres_uri) as c:
        await fill(c, "behind", range(1, 6))
        await fill(c, "current", range(1, 6))
        await fill(c, "ahead", range(1, 6))
        await fill(c, "unlisted", range(1, 6))
        await fill(c, "joined late", range(1, 6), members={"bob": 0, "alice": 3})
        await fill(c, "joined, nothing since", range(1, 6), members={"bob": 0, "alice": 5})
        await fill(c, "of others", range(1, 6), members={"bob": 0})
        sync = wire.SyncMsg(ref=4, cursors=cursors({"behind": 4, "current": 5, "ahead": 9, "of others": 0, "none": 1}))
        answer = await history(c).sync("alice", sync)
        assert (answer.ref, answer.code, answer.more, answer.covered_id) == (4, Code.OK, False, "")
        assert [(i.conversation_id, i.newest_seq, i.first_cursor, i.peer) for i in answer.items] == [
            ("behind", 5, 0, ""),
            ("joined late", 5, 3, ""),
            ("unlisted", 5, 0, ""),
        ]


async def test_sync_names_the_peer_of_a_dialogue(postgres_uri: str) -> None:
    async with cluster(postgres_uri) as c:
        await c.start()
        await c.send(up("alice", "bob"), up("alice", "alice"))
        await until(c.settled)
        answer = await history(c).sync("alice", wire.SyncMsg())
        assert {(i.conversation_id, i.peer) for i in answer.items} == {
            (ALICE_BOB, "bob"),
            (dialogue_id("alice", "alice"), "alice"),
        }
        (item,) = (await history(c).sync("bob", wire.SyncMsg())).items
        assert item.peer == "alice"


async def test_sync_pages_by_id_bytes_and_end(postgres_uri: str) -> None:
    chance = random.Random(7)
    names = ["a", "B", "é", "zz", "Z", "_", "漢", "😀", "ﬀ", "d:1", "0", "~"] + [f"room {i}" for i in range(40)]
    async with cluster(postgres_uri) as c:
        newest = {}
        for name in names:
            newest[name] = chance.randrange(1, 5)
            await fill(c, name, range(1, newest[name] + 1))
        h = history(c)
        known = {n: chance.randrange(0, 5) for n in names if chance.random() < 0.7}
        wanted = sorted((n for n in names if newest[n] > known.get(n, 0)), key=str.encode)
        # As a client: its cursors in runs of ten, each Sync over one run's range, pages of three.
        ordered = sorted(known, key=str.encode)
        runs = [ordered[i : i + 10] for i in range(0, len(ordered), 10)]
        got: list[str] = []
        after = ""
        for number, run in enumerate(runs):
            upto = run[-1] if number < len(runs) - 1 else ""
            while True:
                listed = cursors({n: known[n] for n in run if n.encode() > after.encode()})
                answer = await h.sync("alice", wire.SyncMsg(after_id=after, upto_id=upto, cursors=listed, limit=3))
                assert len(answer.items) <= 3
                got += [i.conversation_id for i in answer.items]
                after = answer.covered_id
                if not answer.more:
                    assert answer.covered_id == upto
                    break
        assert got == wanted


async def test_sync_pages_are_keyed_by_id_not_by_newness(postgres_uri: str) -> None:
    async with cluster(postgres_uri) as c:
        for name in ("a", "b", "c", "d"):
            await fill(c, name, [1])
        h = history(c)
        first = await h.sync("alice", wire.SyncMsg(limit=2))
        assert ([i.conversation_id for i in first.items], first.more, first.covered_id) == (["a", "b"], True, "b")
        # What changes meanwhile neither hides nor repeats anything of the next page.
        await c.execute("UPDATE im_conversation SET last_seq = 9 WHERE conversation_id IN ('a', 'd')")
        second = await h.sync("alice", wire.SyncMsg(limit=2, after_id=first.covered_id))
        assert [(i.conversation_id, i.newest_seq) for i in second.items] == [("c", 1), ("d", 9)]
        assert not second.more


async def test_a_synced_page_fits_into_a_frame(postgres_uri: str) -> None:
    async with cluster(postgres_uri) as c:
        async with c._database.connection() as connection:
            await connection.execute(
                "INSERT INTO im_conversation SELECT lpad(i::text, 64, 'x'), 'dialogue', 9e15 FROM generate_series(1, 600) i"
            )
            await connection.execute(
                "INSERT INTO im_member SELECT lpad(i::text, 64, 'x'), u, 8e15 FROM generate_series(1, 600) i,"
                " unnest(ARRAY['alice', repeat('p', 64)]) u"
            )
        h = history(c)
        seen, after, more = 0, "", True
        while more:
            answer = await h.sync("alice", wire.SyncMsg(after_id=after, limit=500))
            assert wire.MsgCmd(Type=wire.SYNCED, Payload=answer.SerializeToString()).ByteSize() <= 65_536
            seen, after, more = seen + len(answer.items), answer.covered_id, answer.more
        assert seen == 600


@pytest.mark.parametrize(
    ("sync", "code"),
    [
        (wire.SyncMsg(cursors=cursors({f"c{i}": 1 for i in range(MAX_CURSORS + 1)})), Code.TOO_MANY_CURSORS),
        (
            wire.SyncMsg(cursors=[wire.Cursor(conversation_id="b"), wire.Cursor(conversation_id="a")]),
            Code.TOO_MANY_CURSORS,
        ),
        (
            wire.SyncMsg(cursors=[wire.Cursor(conversation_id="a"), wire.Cursor(conversation_id="a")]),
            Code.TOO_MANY_CURSORS,
        ),
        (wire.SyncMsg(cursors=[wire.Cursor(conversation_id="a\x00")]), Code.BAD_CONVERSATION),
        (wire.SyncMsg(after_id="x\x00"), Code.BAD_CONVERSATION),
        (wire.SyncMsg(upto_id="x" * 65), Code.BAD_CONVERSATION),
        (wire.SyncMsg(limit=501), Code.BAD_RANGE),
        (wire.SyncMsg(cursors=cursors({f"c{i}": (1 << 64) - 1 for i in range(MAX_CURSORS)})), Code.OK),
    ],
)
async def test_a_sync_is_checked(postgres_uri: str, sync: wire.SyncMsg, code: Code) -> None:
    async with cluster(postgres_uri) as c:
        answer = await history(c).sync("alice", sync)
        assert (answer.code, len(answer.items)) == (code, 0)
