"""One thread through a msg process: records in, rows, receipts and pushes out."""

from __future__ import annotations

import asyncio

from msg_harness import cluster, until, up
from plato.core.codes import Code
from plato.core.conversations import dialogue_id


async def test_a_message_is_stored_receipted_and_pushed_to_every_device_of_both(postgres_uri: str) -> None:
    async with cluster(postgres_uri) as c:
        await c.start()
        sending, other = c.connect("alice", 1, "s0"), c.connect("alice", 2, "s1")
        bobs = [c.connect("bob", 1, "s0"), c.connect("bob", 2, "s1")]
        first, second = up("alice", "bob", b"one", client_id=7), up("alice", "", b"two", client_id=8)
        second.conversation_id = first.conversation_id
        await c.send(first, second)
        await until(c.settled)

        rows = await c.fetch(
            "SELECT msg_id, seq, prev_seq, body, client_msg_id, from_user FROM im_message ORDER BY seq"
        )
        assert [row[1:4] for row in rows] == [(1, 0, b"one"), (2, 1, b"two")]
        assert [row[4] for row in rows] == [first.client_msg_id, second.client_msg_id]
        assert await c.fetch("SELECT user_id, joined_seq FROM im_member ORDER BY user_id") == [("alice", 0), ("bob", 0)]
        assert await c.fetch("SELECT kind, last_seq FROM im_conversation") == [("dialogue", 2)]

        for conn_id in [other, *bobs]:
            assert not c.receipts(conn_id)
            got = [(p.MsgID, p.seq, p.prev_seq, p.Content, p.client_msg_id, p.from_user) for p in c.pushes(conn_id)]
            assert got == rows
        assert not c.pushes(sending)
        receipts = c.receipts(sending)
        assert [(r.code, r.client_id, r.msg_id, r.seq, r.prev_seq) for r in receipts] == [
            (Code.OK, 7, rows[0][0], 1, 0),
            (Code.OK, 8, rows[1][0], 2, 1),
        ]
        assert [r.trace_id for r in receipts] == [first.trace_id, second.trace_id]
        pushed = {id(p.frame): p.frame for conn_id in [other, *bobs] for p in c.shards.taken[conn_id]}
        assert len(set(pushed.values())) == 2, "one encoding per message"


async def test_a_note_to_oneself_reaches_the_other_devices(postgres_uri: str) -> None:
    async with cluster(postgres_uri) as c:
        await c.start()
        phone, desk = c.connect("alice", 1), c.connect("alice", 2)
        await c.send(up("alice", "alice", b"note"))
        await until(c.settled)
        assert [r.seq for r in c.receipts(phone)] == [1]
        assert [p.Content for p in c.pushes(desk)] == [b"note"]
        assert not c.pushes(phone)
        assert await c.fetch("SELECT conversation_id, user_id FROM im_member") == [
            (dialogue_id("alice", "alice"), "alice")
        ]


async def test_thousands_are_taken_in_order(postgres_uri: str) -> None:
    async with cluster(postgres_uri) as c:
        await c.start(batch_records=100)
        conn_id = c.connect("bob")
        senders = [f"user{i}" for i in range(20)]
        loop = asyncio.get_running_loop()
        sent = [up(s, "bob", b"%d" % i, client_id=i + 1) for i in range(100) for s in senders]
        begun = loop.time()
        for at in range(0, len(sent), 200):
            await c.send(*sent[at : at + 200])
        await until(c.settled)
        print(f"{len(sent) / (loop.time() - begun):.0f} messages/s")
        by_conversation: dict[str, list[bytes]] = {}
        for push in c.pushes(conn_id):
            by_conversation.setdefault(push.conversation_id, []).append(push.Content)
        assert len(by_conversation) == 20
        assert all(bodies == [b"%d" % i for i in range(100)] for bodies in by_conversation.values())
