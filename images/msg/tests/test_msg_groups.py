"""Groups: made and changed by records, written to by members only, pushed to while small, notified while large."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from uuid import uuid4

import pytest
from msg_harness import SHARDS, Cluster, cluster, until, up
from plato.core.codes import Code
from plato.core.conversations import partition_of
from plato.wire.v1 import client_pb2 as wire
from plato.wire.v1.bus_pb2 import GroupChange, Record
from plato_msg import downlink
from plato_msg.downlink import NOTICE_ENTRIES
from plato_msg.groups import Groups
from plato_msg.notify import PAGE

G = "g:town"


@pytest.fixture
async def c(postgres_uri: str) -> AsyncIterator[Cluster]:
    async with cluster(postgres_uri) as made:
        yield made


def change(kind: GroupChange.Kind.ValueType, *users: str, group: str = G) -> Record:
    order = GroupChange(kind=kind, users=users)
    return Record(conversation_id=group, from_user="admin", client_msg_id=uuid4().bytes, group=order)


def say(user: str, body: bytes = b"hi", group: str = G) -> Record:
    return up(user, "", body, conversation_id=group)


async def members(c: Cluster) -> dict[str, int]:
    return dict(await c.fetch("SELECT user_id, joined_seq FROM im_member WHERE conversation_id = $1", G))


async def test_r9_membership_is_as_of_the_record(c: Cluster) -> None:
    conns = {user: c.connect(user) for user in ("ann", "ben", "cid", "eve")}
    await c.start()
    await c.send(
        say("ann"),  # no group yet
        change(GroupChange.CREATE, "ann", "ben"),
        say("ann"),  # 2
        change(GroupChange.ADD, "cid", "ben"),  # 3
        say("cid"),  # 4
        change(GroupChange.REMOVE, "ben", "nobody"),  # 5
        say("ben"),
        say("ann"),  # 6
        change(GroupChange.ADD, "ben"),  # 7
        say("eve"),
    )
    await until(c.settled)
    assert await members(c) == {"ann": 0, "cid": 2, "ben": 6}
    assert await c.fetch("SELECT kind, last_seq, members FROM im_conversation") == [("group", 7, 3)]
    assert await c.fetch("SELECT * FROM im_former_member") == [], "who came back is a member"
    codes = [(r.code, r.seq) for user in ("ann", "cid", "ben", "eve") for r in c.receipts(conns[user])]
    refused = (Code.NOT_A_MEMBER, 0)
    assert codes == [refused, (0, 2), (0, 6), (0, 4), refused, refused]
    got = {user: [push.seq for push in c.pushes(conn)] for user, conn in conns.items()}
    assert got == {"ann": [1, 3, 4, 5, 7], "ben": [1, 2, 3, 4, 5, 7], "cid": [3, 5, 6, 7], "eve": []}
    history = c.nodes[0].service.history
    pull = wire.PullMsg(conversation_id=G, from_seq=1)
    assert [row.seq for row in (await history.pull("cid", pull)).rows] == [3, 4, 5, 6, 7]
    assert [row.seq for row in (await history.pull("ben", pull)).rows] == [7]
    assert (await history.pull("eve", pull)).code == Code.NOT_A_MEMBER
    synced = await history.sync("cid", wire.SyncMsg())
    (item,) = synced.items
    assert (item.conversation_id, item.newest_seq, item.first_cursor, item.peer, item.members) == (G, 7, 2, "", 3)


async def test_refused_changes_change_nothing(c: Cluster) -> None:
    await c.start()
    groups = Groups(c._producer, c.nodes[0].service.store, wait_s=60.0)
    assert (await groups.order(G, "add", ["ann"], "1")).codes == {Code.GROUP_UNKNOWN: 1}
    assert (await groups.order(G, "create", ["ann"], "2")).codes == {Code.OK: 1}
    assert (await groups.order(G, "create", ["ann"], "2")).codes == {Code.OK: 1}, "the same order is done once"
    assert (await groups.order(G, "create", ["bob"], "3")).codes == {Code.GROUP_EXISTS: 1}
    assert (await groups.order(G, "remove", ["bob"], "4")).codes == {Code.OK: 1}
    many = await groups.order(G, "add", [f"u{n:05}" for n in range(10_000)], "5")
    assert many.codes == {Code.OK: 19, Code.GROUP_FULL: 1}
    assert await groups.show(G, "u09498", 5) == (9_501, 21, ["u09499"])
    assert len(await members(c)) == 9_501


@pytest.mark.parametrize("why", ["another kind of conversation", "an unknown kind"])
async def test_what_is_no_change_of_a_group_is_skipped(c: Cluster, why: str) -> None:
    await c.start()
    record = change(GroupChange.CREATE, "ann")
    if why == "another kind of conversation":
        record.conversation_id = "lobby"
    else:
        record.ClearField("group")
        # A kind that a later version knows.
        record = Record.FromString(record.SerializeToString() + b"\x62\x02\x08\x09")
    await c.send(record)
    await until(c.settled)
    assert len(await c.fetch("SELECT reason FROM bus_poison")) == 1
    assert await c.fetch("SELECT * FROM im_conversation") == []


async def large(c: Cluster, count: int, online: int, *, push_members: int = 3) -> list[int]:
    """A group of `count` members, the first `online` of them connected on both shards by turns."""
    await c.start(push_members=push_members)
    groups = Groups(c._producer, c.nodes[0].service.store, wait_s=60.0)
    names = [f"u{n:05}" for n in range(count)]
    assert (await groups.order(G, "create", names, "made")).codes.keys() == {Code.OK}
    return [c.connect(name, shard=SHARDS[n % 2]) for n, name in enumerate(names[:online])]


async def test_a_large_group_is_notified_once_per_window_and_pulls(c: Cluster) -> None:
    conns = await large(c, PAGE + 100, PAGE + 50)
    await until(c.settled)
    c.shards.calls.clear()
    await c.send(*[say("u00000") for _ in range(40)])
    await until(c.settled)
    assert [r.seq for r in c.receipts(conns[0])] == list(range(3, 43)), "the sender has receipts, one for each"
    for conn in conns[1:]:
        seqs = c.notices(conn, G)
        assert seqs[-1] == 42
        assert len(seqs) <= 5, "one batch, some windows at most"
        assert c.pushes(conn) == []
    assert max(count for _, count in c.shards.calls) <= NOTICE_ENTRIES + 40
    pulled = await c.nodes[0].service.history.pull("u00003", wire.PullMsg(conversation_id=G, from_seq=1))
    assert [row.seq for row in pulled.rows] == list(range(1, 43))


async def test_large_and_small_is_decided_by_the_count_at_the_record(c: Cluster) -> None:
    conns = await large(c, 4, 4)
    await c.send(say("u00001"))
    await until(lambda: c.notices(conns[0], G)[-1:] == [2])
    await c.send(change(GroupChange.REMOVE, "u00003"))
    await c.send(say("u00001"))
    await until(lambda: [push.seq for push in c.pushes(conns[0])][-1:] == [4] or c.notices(conns[0], G)[-1:] == [4])
    await until(c.settled)
    await c.send(say("u00001"))
    await until(lambda: [push.seq for push in c.pushes(conns[0])][-1:] == [5])
    assert 4 not in c.notices(conns[3], G), "who is no member any more is not told"
    assert [push.seq for push in c.pushes(conns[3])] == [3], "but of the leave"


async def test_r7_a_slow_shard_holds_neither_the_others_of_a_large_group_nor_dialogues(
    c: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    conns = await large(c, 2 * NOTICE_ENTRIES + 20, 2 * NOTICE_ENTRIES + 20)
    await until(c.settled)
    ann, ben = c.connect("ann", shard="s0"), c.connect("ben", shard="s0")
    given_up = asyncio.Event()
    reach = c.shards._reach

    async def hangs(shard: str) -> None:
        if shard == "s1":
            await given_up.wait()
        await reach(shard)

    monkeypatch.setattr(downlink, "DELIVER_TIMEOUT_S", 60.0)  # how long this takes, the machine says
    monkeypatch.setattr(c.shards, "_reach", hangs)
    # A dialogue of the group's own partition.
    other = next(n for n in range(1_000) if partition_of(up("ann", f"x{n}").conversation_id, 8) == partition_of(G, 8))
    peer = c.connect(f"x{other}", shard="s0")
    for seq in range(1, 6):
        await c.send(say("u00000"), up("ann", "ben"), up("ann", f"x{other}"))
        await until(lambda seq=seq: len(c.pushes(peer)) == len(c.pushes(ben)) == seq)  # type: ignore[misc]  # mypy: a default
    await until(lambda: all(c.notices(conn, G)[-1:] == [8] for conn in conns[::2]))
    assert len(c.receipts(ann)) == 10
    partition = partition_of(G, 8)
    held = c.nodes[0].service.owners.held[partition]
    assert held.progress.fanned_out < held.position, "s1 is neither told nor marked"
    assert not await c.fetch("SELECT shard FROM bus_dirty")
    c.shards.away.add("s1")
    given_up.set()
    await until(lambda: held.progress.fanned_out == held.position)
    assert await c.fetch("SELECT shard FROM bus_dirty") == ["s1"], "marked before the mark passed"
    c.shards.away.clear()
    await c.send(say("u00000"))
    await until(lambda: all(c.notices(conn, G)[-1:] == [9] for conn in conns[1::2]))
    assert max(map(len, (c.notices(conn, G) for conn in conns[1::2]))) < 9, "unsent notices were merged"


async def test_r7_a_notice_that_was_cut_off_is_told_by_the_next_owner(c: Cluster) -> None:
    conns = await large(c, 8, 8)
    await until(c.settled)
    reads: list[int] = []

    async def die(users: object) -> None:
        if isinstance(users, list) and len(users) > 1:  # the group's page
            reads.append(len(users))
            await asyncio.Event().wait()

    c.routes.on_read = die
    await c.send(say("u00001"))
    await until(lambda: reads == [8])
    assert await c.fetch("SELECT count(*) FROM im_message WHERE msg_type = 1") == [1]
    await c.nodes[0].kill()
    c.routes.on_read = lambda users: None
    await c.start("msg-1", push_members=3, stale_ms=400)
    await until(lambda: all(c.notices(conn, G)[-1:] == [2] for conn in conns))
    await until(c.settled)
