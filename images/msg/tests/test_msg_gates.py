"""What is refused though its conversation would take it: messages from who is not welcome, and attachments that are not the
sender's to show. And who may fetch an attachment after that."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any
from uuid import uuid4

import pytest
from msg_harness import PARTITIONS, Cluster, cluster, until, up
from plato.adapters.pg import Database
from plato.core.codes import Code
from plato.core.conversations import dialogue_id, partition_of
from plato.ports import BusRecord
from plato.wire.v1 import content_pb2 as content
from plato.wire.v1.bus_pb2 import GroupChange, Record
from plato_msg.attachments_pg import PgAttachments, Stored
from plato_msg.core.batch import decode
from plato_msg.friends_pg import PgFriends
from plato_msg.retention import Retention
from plato_msg.store_pg import Batch

G = "g:town"


@pytest.fixture
async def c(postgres_uri: str) -> AsyncIterator[Cluster]:
    async with cluster(postgres_uri) as made:
        yield made


@pytest.fixture
async def database(c: Cluster) -> AsyncIterator[Database]:
    made = Database(c.uri, c.schema)
    yield made
    await made.close()


async def outcome(c: Cluster, record: Record) -> tuple[int, int]:
    """Sends one record; its code and msg_id."""
    await c.send(record)
    rows: list[tuple[int, int]] = []

    async def settled() -> bool:
        rows[:] = await c.fetch(
            "SELECT code, coalesce(msg_id, 0) FROM im_outcome WHERE client_msg_id = $1", record.client_msg_id
        )
        return bool(rows)

    await until(settled)
    return rows[0]


def rich(sender: str, receiver: str, *named: str, conversation_id: str | None = None) -> Record:
    body = content.Rich(text="look", attachments=[content.Attachment(attachment_id=a) for a in named])
    return up(sender, receiver, body.SerializeToString(), conversation_id=conversation_id)


def operation(sender: str, conversation_id: str, kind: int, **fields: Any) -> Record:
    record = up(sender, "", content.Operation(**fields).SerializeToString(), conversation_id=conversation_id)
    record.msg_type = kind
    return record


async def upload(attachments: PgAttachments, owner: str) -> str:
    attachment_id = uuid4().hex[:22]
    await attachments.begin(Stored(attachment_id, owner, "cat.jpg", "image/jpeg", 3, b"x" * 32))
    await attachments.finish(attachment_id)
    return attachment_id


async def readers(attachments: PgAttachments, attachment_id: str, *users: str) -> list[str]:
    return [user for user in users if await attachments.find(attachment_id, user) is not None]


async def test_an_attachment_is_for_who_may_read_a_message_that_references_it(c: Cluster, database: Database) -> None:
    await c.start()
    attachments = PgAttachments(database)
    one = await upload(attachments, "ann")
    everybody = ("ann", "ben", "cid", "dan")
    assert await readers(attachments, one, *everybody) == ["ann"]
    assert await outcome(c, rich("cid", "dan", one)) == (Code.ATTACHMENT_UNKNOWN, 0), "another one's"
    assert await outcome(c, rich("cid", "dan", "none")) == (Code.ATTACHMENT_UNKNOWN, 0), "the same where there is none"
    assert await readers(attachments, one, *everybody) == ["ann"]
    assert (await outcome(c, rich("ann", "ben", one)))[0] == Code.OK
    assert await readers(attachments, one, *everybody) == ["ann", "ben"]
    assert (await outcome(c, rich("ben", "cid", one)))[0] == Code.OK, "who may read it may show it on"
    assert await readers(attachments, one, *everybody) == ["ann", "ben", "cid"]
    assert (await outcome(c, rich("ann", "ben", *[f"x{n}" for n in range(11)])))[0] == Code.BAD_OPERATION
    assert (await outcome(c, up("ann", "ben", b"\xff\xff")))[0] == Code.OK, "an application's own bytes name nothing"


async def test_an_id_that_no_database_holds_is_refused_as_any_unknown_one(c: Cluster) -> None:
    await c.start()
    code, _ = await outcome(c, rich("alice", "bob", "\x00"))
    assert code == Code.ATTACHMENT_UNKNOWN


async def test_members_fetch_within_their_range(c: Cluster, database: Database) -> None:
    await c.start()
    attachments = PgAttachments(database)
    first, second = await upload(attachments, "ann"), await upload(attachments, "ann")

    async def change(kind: GroupChange.Kind.ValueType, *users: str) -> None:
        order = GroupChange(kind=kind, users=users)
        record = Record(conversation_id=G, from_user="admin", client_msg_id=uuid4().bytes, group=order)
        assert (await outcome(c, record))[0] == Code.OK

    await change(GroupChange.CREATE, "ann", "ben")
    assert (await outcome(c, rich("ann", "", first, conversation_id=G)))[0] == Code.OK
    await change(GroupChange.ADD, "cid")
    await change(GroupChange.REMOVE, "ben")
    assert (await outcome(c, rich("ann", "", second, conversation_id=G)))[0] == Code.OK
    assert await readers(attachments, first, "ann", "ben", "cid", "eve") == ["ann", "ben"], "ben was there, cid was not"
    assert await readers(attachments, second, "ann", "ben", "cid", "eve") == ["ann", "cid"]


async def test_a_recall_and_an_edit_take_an_attachment_away(c: Cluster, database: Database) -> None:
    await c.start()
    attachments = PgAttachments(database)
    one, two = await upload(attachments, "ann"), await upload(attachments, "ann")
    conversation_id = dialogue_id("ann", "ben")
    _, msg_id = await outcome(c, rich("ann", "ben", one))
    body = content.Rich(attachments=[content.Attachment(attachment_id=two)]).SerializeToString()
    edit = operation("ann", conversation_id, content.EDIT, msg_id=msg_id, msg_type=content.RICH, body=body)
    assert (await outcome(c, edit))[0] == Code.OK
    assert await readers(attachments, one, "ann", "ben") == ["ann"]
    assert await readers(attachments, two, "ann", "ben") == ["ann", "ben"]
    theirs = await upload(attachments, "eve")
    body = content.Rich(attachments=[content.Attachment(attachment_id=theirs)]).SerializeToString()
    edit = operation("ann", conversation_id, content.EDIT, msg_id=msg_id, msg_type=content.RICH, body=body)
    assert (await outcome(c, edit))[0] == Code.ATTACHMENT_UNKNOWN
    assert (await outcome(c, operation("ann", conversation_id, content.RECALL, msg_id=msg_id)))[0] == Code.OK
    assert await readers(attachments, two, "ann", "ben") == ["ann"]
    assert set(await attachments.unused(-60.0, 10)) == {one, two, theirs}, "and what nobody uses is removed some day"


async def test_what_is_removed_cannot_be_referenced_and_what_is_referenced_is_not_removed(
    c: Cluster, database: Database
) -> None:
    await c.start()
    attachments = PgAttachments(database)
    used, unused = await upload(attachments, "ann"), await upload(attachments, "ann")
    assert await attachments.unused_bytes("ann") == 6
    assert (await outcome(c, rich("ann", "ben", used)))[0] == Code.OK
    assert await attachments.unused_bytes("ann") == 3
    assert await attachments.forget([used, unused], 3_600) == [], "not yet"
    assert await attachments.forget([used, unused], -60.0) == [unused]
    assert (await outcome(c, rich("ann", "ben", unused)))[0] == Code.ATTACHMENT_UNKNOWN
    await attachments.remove([unused])
    assert await readers(attachments, used, "ben") == ["ben"]


async def test_what_retention_removes_references_nothing_any_more(c: Cluster, database: Database) -> None:
    await c.start()
    attachments = PgAttachments(database)
    one, two = await upload(attachments, "ann"), await upload(attachments, "ann")
    for record in (rich("ann", "ben", one), rich("ann", "ben", two), rich("ann", "cid", two)):
        assert (await outcome(c, record))[0] == Code.OK
    await c.execute(
        "UPDATE im_message SET server_at = now() - interval '9 days' WHERE conversation_id ="
        f" '{dialogue_id('ann', 'ben')}'"
    )
    assert await Retention(database, lambda: range(PARTITIONS), PARTITIONS, 3).walk() == 2
    assert set(await attachments.unused(-60.0, 10)) == {one, two}
    assert await attachments.forget([one, two], -60.0) == [one]
    assert await attachments.unused(-60.0, 10) == [one], "the other one is used still"
    assert await readers(attachments, two, "ben", "cid") == ["cid"]


async def test_who_is_blocked_is_refused_from_the_first_message_on(c: Cluster, database: Database) -> None:
    await c.start()
    friends = PgFriends(database)
    await friends.act("block", "ann", "ben")
    assert await outcome(c, up("ben", "ann")) == (Code.NOT_WELCOME, 0)
    assert await c.fetch("SELECT * FROM im_conversation") == [], "it made no conversation"
    assert (await outcome(c, up("ann", "ben")))[0] == Code.OK
    assert (await outcome(c, up("ben", "ann")))[0] == Code.NOT_WELCOME, "also where he names nobody"
    assert (await outcome(c, up("ben", "", conversation_id=dialogue_id("ann", "ben"))))[0] == Code.NOT_WELCOME
    assert (await outcome(c, up("cid", "ann")))[0] == Code.OK, "the others are"
    server = up("ben", "ann")
    server.authority = True
    assert (await outcome(c, server))[0] == Code.OK, "what an application server says binds"
    await friends.act("unblock", "ann", "ben")
    _, msg_id = await outcome(c, up("ben", "ann"))
    await friends.act("block", "ann", "ben")
    conversation_id = dialogue_id("ann", "ben")
    edit = operation("ben", conversation_id, content.EDIT, msg_id=msg_id, body=b"!")
    assert (await outcome(c, edit))[0] == Code.NOT_WELCOME
    assert (await outcome(c, operation("ben", conversation_id, content.RECALL, msg_id=msg_id)))[0] == Code.OK


async def test_a_name_that_is_not_his_tells_nothing_about_a_third_one(c: Cluster, database: Database) -> None:
    await c.start()
    await PgFriends(database).act("block", "cid", "ann")
    assert (await outcome(c, up("ann", "ben")))[0] == Code.OK
    assert (await outcome(c, up("ann", "cid", conversation_id=dialogue_id("ann", "ben"))))[0] == Code.OK
    assert (await outcome(c, up("ann", "cid", conversation_id=dialogue_id("ann", "dan"))))[0] == Code.BAD_CONVERSATION


@pytest.mark.parametrize("default", [False, True])
async def test_only_friends_may_write_where_the_user_or_the_platform_says_so(
    c: Cluster, database: Database, default: bool
) -> None:
    friends = PgFriends(database)
    await friends.act("request", "ben", "ann")
    await friends.act("accept", "ann", "ben")
    await friends.act("request", "cid", "ann")
    await friends.set_friends_only("ann", None if default else True)
    uplinks = [
        decode(BusRecord(partition_of(r.conversation_id, PARTITIONS), n, r.SerializeToString()), PARTITIONS)
        for n, r in enumerate([up("ben", "ann"), up("cid", "ann"), up("ann", "ann")], 1)
    ]
    async with database.connection() as connection, connection.transaction():
        found = await Batch(connection).known(uplinks, friends_only=default)
    assert [found.gates.judge(u) for u in uplinks] == [Code.OK, Code.NOT_WELCOME, Code.OK]
    await friends.set_friends_only("ann", False)
    async with database.connection() as connection, connection.transaction():
        found = await Batch(connection).known(uplinks, friends_only=default)
    assert [found.gates.judge(u) for u in uplinks] == [Code.OK, Code.OK, Code.OK], "what the user says goes before"
