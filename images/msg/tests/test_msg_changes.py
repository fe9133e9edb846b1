"""Operations in the database: what is written, what is read of it afterwards, from memory too, and what a replay pushes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from uuid import uuid4

import pytest
from msg_harness import Cluster, cluster, until, up
from plato.core.codes import Code
from plato.core.conversations import dialogue_id, group_id
from plato.wire.v1 import client_pb2 as wire
from plato.wire.v1 import content_pb2 as T
from plato.wire.v1.bus_pb2 import Record
from plato_msg.conversations import Conversations
from plato_msg.history import History
from plato_msg.operations import ADMIN, Operations, client_msg_id_of

PAIR = dialogue_id("ann", "ben")


@pytest.fixture
async def c(postgres_uri: str) -> AsyncIterator[Cluster]:
    async with cluster(postgres_uri) as made:
        yield made


def op(user: str, kind: int, conversation_id: str, key: bytes | None = None, **fields: object) -> Record:
    return Record(
        conversation_id=conversation_id,
        from_user=user,
        device_id=1,
        client_id=1,
        client_msg_id=key or uuid4().bytes,
        msg_type=kind,
        body=T.Operation(**fields).SerializeToString(),  # type: ignore[arg-type]  # the caller's fields
    )


async def msg_id(c: Cluster, conversation_id: str, seq: int) -> int:
    (found,) = await c.fetch(
        "SELECT msg_id FROM im_message WHERE conversation_id = $1 AND seq = $2", conversation_id, seq
    )
    assert isinstance(found, int)
    return found


async def reaches(c: Cluster, seq: int) -> bool:
    return await c.fetch("SELECT last_seq FROM im_conversation") == [seq]


async def pulled(history: History, user: str, conversation_id: str) -> list[tuple[int, bytes, int, bool]]:
    answer = await history.pull(user, wire.PullMsg(conversation_id=conversation_id, from_seq=1))
    assert answer.code == Code.OK
    assert (answer.covered_from, answer.covered_to) == (1, answer.newest_seq)
    return [(row.seq, row.Content, row.changed_seq, row.recalled) for row in answer.rows]


async def test_edit_and_recall_change_the_older_row_and_leave_nothing_behind(c: Cluster) -> None:
    ann, ben = c.connect("ann"), c.connect("ben")
    phone = c.connect("ann", device_id=2)
    await c.start()
    history = c.nodes[0].service.history
    await c.send(up("ann", "ben", b"one"), up("ann", "ben", b"other"))
    await until(c.settled)
    first = await msg_id(c, PAIR, 1)
    await c.send(op("ann", T.EDIT, PAIR, msg_id=first, body=b"secret"))
    await until(c.settled)
    assert (await pulled(history, "ben", PAIR))[0] == (1, b"secret", 3, False)
    for conn in (ann, phone, ben):
        (push,) = [p for p in c.pushes(conn) if p.msg_type == T.EDIT]
        assert T.Operation.FromString(push.Content) == T.Operation(msg_id=first, seq=1, body=b"secret")
    order = [type(f).__name__ for f in c.frames(ann) if f.seq == 3]
    assert order == ["PushMsg", "ReceiptMsg"], "the sending device is told what is stored"

    edit_again, recall = (
        op("ann", T.EDIT, PAIR, msg_id=first, body=b"secret 2"),
        op("ann", T.RECALL, PAIR, msg_id=first),
    )
    await c.send(edit_again, recall, op("ben", T.RECALL, PAIR, msg_id=await msg_id(c, PAIR, 2)))
    await until(c.settled)
    body = T.Operation(msg_id=first, seq=1).SerializeToString()
    assert await pulled(history, "ben", PAIR) == [
        (1, b"", 5, True),
        (2, b"other", 0, False),
        (3, b"", 5, True),
        (4, b"", 5, True),
        (5, body, 0, False),
    ]
    assert await c.fetch("SELECT count(*) FROM im_message WHERE position('secret'::bytea IN body) > 0") == [0]
    assert [r.code for r in c.receipts(ben)] == [Code.NOT_ALLOWED]
    assert await c.fetch("SELECT last_seq, changed_seq FROM im_conversation") == [(5, 5)]

    # Sent again it is a duplicate, and nobody but the sender hears of it, as it is stored now.
    before = len(c.pushes(ben))
    await c.send(edit_again)
    await until(c.settled)
    again = c.frames(ann)[-2:]
    assert [(f.seq, f.msg_id if isinstance(f, wire.ReceiptMsg) else f.MsgID) for f in again] == [
        (4, await msg_id(c, PAIR, 4))
    ] * 2
    assert isinstance(again[0], wire.PushMsg)
    assert (again[0].Content, again[0].recalled) == (b"", True)
    assert len(c.pushes(ben)) == before


async def test_who_left_reads_up_to_the_leave_and_hears_of_it(c: Cluster) -> None:
    key = uuid4().bytes
    group = group_id("ann", key)
    conns = {user: c.connect(user) for user in ("ann", "ben", "cid", "eve")}
    await c.start()
    history, reads = c.nodes[0].service.history, Conversations(c.nodes[0].service.store)
    await c.send(
        op("ann", T.GROUP_CREATE, group, key, title="old", users=["ben", "cid"]),
        up("ann", "", b"two", conversation_id=group),
        op("ann", T.GROUP_REMOVE, group, users=["ben"]),
        op("ann", T.GROUP_RENAME, group, title="new"),
        op("ann", T.GROUP_LEAVE, group),
    )
    await until(c.settled)
    assert [p.seq for p in c.pushes(conns["ben"])] == [1, 2, 3]
    assert [p.seq for p in c.pushes(conns["cid"])] == [1, 2, 3, 4, 5]
    assert [p.seq for p in c.pushes(conns["ann"])] == [1, 3, 4, 5], "its own operations, not its own messages"
    assert [row[0] for row in await pulled(history, "ben", group)] == [1, 2, 3]
    listed = {}
    for user in ("ann", "ben", "cid", "eve"):
        items = (await history.sync(user, wire.SyncMsg())).items
        listed[user] = [(i.newest_seq, i.title, i.members, i.left) for i in items]
    assert listed == {
        "ann": [(5, "new", 0, True)],
        "ben": [(3, "old", 0, True)],
        "cid": [(5, "new", 1, False)],
        "eve": [],
    }
    cursor = [wire.Cursor(conversation_id=group, seq=3)]
    assert list((await history.sync("ben", wire.SyncMsg(cursors=cursor))).items) == [], "nothing comes after it"

    info = await reads.info("cid", group)
    assert info is not None
    assert (info.kind, info.title, info.owner, info.members, info.role, info.left) == (
        "group",
        "new",
        "cid",
        1,
        2,
        False,
    )
    left = await reads.info("ben", group)
    assert left is not None
    assert (left.title, left.owner, left.members, left.newest_seq, left.left) == ("old", "", 0, 3, True)
    assert [m.user for m in await reads.members("cid", group, "", 10) or []] == ["cid"]
    for stranger, where in (("eve", group), ("cid", "g:none")):
        assert await reads.info(stranger, where) is None
        assert await reads.members(stranger, where, "", 10) is None
    assert await reads.members("ben", group, "", 10) is None, "who left sees no members"
    assert await reads.members(None, group, "", 10) is not None
    second, fourth = await msg_id(c, group, 2), await msg_id(c, group, 4)
    for user, of, there in (
        ("cid", fourth, True),
        ("ben", second, True),
        ("ben", fourth, False),
        ("eve", second, False),
    ):
        assert (await reads.message(user, of) is not None) == there, (user, of)

    await c.send(op("cid", T.GROUP_ADD, group, users=["ben"]))
    await until(c.settled)
    assert [row[0] for row in await pulled(history, "ben", group)] == [6], "from the return on"
    assert await reads.message("ben", second) is None


async def test_r2_what_is_held_in_memory_is_never_older_than_an_edit(c: Cluster) -> None:
    await c.start()
    history = History(c.nodes[0].service.store, max_frame_bytes=65_536, hot_pulls_per_s=1)
    await c.send(up("ann", "ben", b"0"), up("ann", "ben", b"x"))
    await until(c.settled)
    first, done = await msg_id(c, PAIR, 1), 0

    async def reader(user: str) -> int:
        looks = 0
        while done < 6:
            least = done
            rows = await pulled(history, user, PAIR)
            assert int(rows[0][1]) >= least, "what was done before the pull is shown"
            looks += 1
        return looks

    async def writer() -> None:
        nonlocal done
        for n in range(1, 7):
            await c.send(op("ann", T.EDIT, PAIR, msg_id=first, body=b"%d" % n))
            await until(c.settled)
            done = n

    *looks, _ = await asyncio.gather(reader("ann"), reader("ben"), reader("ben"), writer())
    assert history.hot_conversations() == [PAIR]
    assert all(count > 6 for count in looks if count is not None)
    await c.send(op("ann", T.RECALL, PAIR, msg_id=first))
    await until(c.settled)
    assert (await pulled(history, "ben", PAIR))[0] == (1, b"", 9, True)


async def test_r7_a_replay_pushes_what_was_stored_not_what_was_sent(c: Cluster) -> None:
    key = uuid4().bytes
    group = group_id("ann", key)
    ben, cid = c.connect("ben"), c.connect("cid")
    await c.start()
    await c.send(
        op("ann", T.GROUP_CREATE, group, key, users=["ben", "cid"]), up("ann", "", b"x", conversation_id=group)
    )
    await until(c.settled)
    second = await msg_id(c, group, 2)
    stuck = asyncio.Event()

    async def hang(users: object) -> None:
        stuck.set()
        await asyncio.Event().wait()

    c.routes.on_read = hang
    await c.send(
        op("ann", T.GROUP_REMOVE, group, users=["cid", "nobody"]),
        up("ben", "", b"later recalled", conversation_id=group),
        op("ann", T.EDIT, group, msg_id=second, body=b"y"),
    )
    await asyncio.wait_for(stuck.wait(), 30)
    await until(lambda: reaches(c, 5))
    await c.send(op("ann", T.RECALL, group, msg_id=await msg_id(c, group, 4)))
    await until(lambda: reaches(c, 6))
    await c.nodes[0].kill()
    c.routes.on_read = lambda users: None
    await c.start("msg-1", stale_ms=400)
    await until(c.settled)
    pushes = {p.seq: p for p in c.pushes(ben)}
    assert set(pushes) == {1, 2, 3, 5, 6}
    assert T.Operation.FromString(pushes[3].Content) == T.Operation(users=["cid"]), "only who really left"
    assert T.Operation.FromString(pushes[5].Content) == T.Operation(msg_id=second, seq=2, body=b"y")
    assert [p.seq for p in c.pushes(cid)] == [1, 2, 3], "who left by it is told by the successor too"


async def test_a_large_group_s_owner_leaves_and_the_senior_one_follows(c: Cluster) -> None:
    node = await c.start(push_members=2)
    operations = Operations(c._producer, node.service.store, wait_s=60.0)
    names = [f"u{n}" for n in range(9)]

    async def do(user: str, kind: T.MsgType.ValueType, authority: bool = False, **fields: object) -> int:
        asked = T.Operation(**fields)  # type: ignore[arg-type]  # the caller's fields
        return (await operations.operate(user, "g:big", kind, asked, uuid4().bytes, authority=authority)).code

    assert await do(ADMIN, T.GROUP_CREATE, True, users=names[::-1], owner="u8") == Code.OK
    assert await do("u8", T.GROUP_LEAVE) == Code.OK
    assert await c.fetch("SELECT user_id FROM im_member WHERE role = 2") == ["u0"], (
        "of those as senior, the first by id"
    )
    assert await do("u0", T.GROUP_ROLE, users=["u5", "u3"], role=T.ADMINISTRATOR) == Code.OK
    assert await do(ADMIN, T.GROUP_REMOVE, True, users=["u0", "u1"]) == Code.OK
    assert await c.fetch("SELECT user_id FROM im_member WHERE role = 2") == ["u3"], "the senior administrator"
    assert await do(ADMIN, T.GROUP_ROLE, True, users=["u7"], role=T.OWNER) == Code.OK
    assert await c.fetch("SELECT user_id, role FROM im_member WHERE role > 0 ORDER BY 1") == [
        ("u3", 1), ("u5", 1), ("u7", 2),
    ]  # fmt: skip
    assert await do("u3", T.GROUP_RENAME, title="x") == Code.OK
    assert await do("u2", T.GROUP_RENAME, title="y") == Code.NOT_ALLOWED
    (last,) = await c.fetch("SELECT body FROM im_message WHERE seq = 5")
    assert T.Operation.FromString(last).owner == "u7"


async def test_the_same_key_is_one_message_and_the_first_outcome(c: Cluster) -> None:
    phone = c.connect("ann", device_id=7)
    node = await c.start()
    operations = Operations(c._producer, node.service.store, wait_s=60.0)
    key = client_msg_id_of("ann", "order 1")
    sent = await asyncio.gather(
        *(operations.send("ann", PAIR, 0, b"hello", key, to_user="ben") for _ in range(5)),
        operations.send("ann", PAIR, 0, b"second", client_msg_id_of("ann", "order 2"), to_user="ben"),
    )
    assert [s.code for s in sent] == [Code.OK] * 6
    assert len({s[:3] for s in sent[:5]}) == 1
    assert sorted({s.seq for s in sent}) == [1, 2]
    assert await c.fetch("SELECT body FROM im_message ORDER BY seq") in ([b"hello", b"second"], [b"second", b"hello"])
    await until(c.settled)
    assert len(c.pushes(phone)) == 2
    assert c.receipts(phone) == [], "no device sent it"
    refused = await operations.send("eve", PAIR, 0, b"hi", uuid4().bytes)
    assert (refused.code, refused.msg_id, refused.seq) == (Code.NOT_A_MEMBER, 0, 0)
    await node.kill()
    quick = Operations(c._producer, (await c.start()).service.store, wait_s=0.0)
    pending = await quick.send("ann", PAIR, 0, b"third", uuid4().bytes)
    assert pending.code == Code.PENDING
