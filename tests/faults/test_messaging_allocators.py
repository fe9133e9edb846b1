"""Rows M1, M2 and M3 of the faults list, for each allocator of seqs: msg with a real PostgreSQL and real Valkeys."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from msg_harness import PARTITIONS, Cluster, Node, cluster, until, up
from plato.adapters.pg import Database
from plato.adapters.valkey import ValkeyStore
from plato.adapters.valkey.client import Client, command
from plato.core.conversations import dialogue_id
from plato.local.servers import ValkeyServer
from plato.wire.v1 import client_pb2 as wire
from plato_msg import allocators
from plato_msg.core.allocator import JUMP, SEGMENT, Allocator
from plato_msg.store_pg import PgMsgStore

from tests.ports import free_port

AB = dialogue_id("a", "b")
NEVER_S = 3_600.0
each_allocator = pytest.mark.parametrize("name", ["single_writer", "redis", "segment"])


@asynccontextmanager
async def allocator(c: Cluster, name: str, store_url: str) -> AsyncIterator[Allocator]:
    """An allocator of its own, as a msg process makes it."""
    store = await ValkeyStore.connect(store_url, f"{c.schema}:")
    database = Database(c.uri, c.schema)
    made = allocators.choose(name, PgMsgStore(database), store.counters)
    yield made
    made.forget()
    await store.close()
    await database.close()


async def say(c: Cluster, first: int, count: int) -> None:
    """Messages `first` … in the dialogue of a and b, five to a batch, and waits until they are stored."""
    for at in range(first, first + count, 5):
        numbers = range(at, min(at + 5, first + count))
        await c.send(*(up("a", "b", b"%d" % n, client_id=n) for n in numbers))
        await until(lambda stored=numbers[-1]: stored_up_to(c, stored))  # type: ignore[misc]  # bound now


async def stored_up_to(c: Cluster, number: int) -> bool:
    return bool(await c.fetch("SELECT 1 FROM im_message WHERE body = $1", b"%d" % number))


async def seqs(c: Cluster) -> list[int]:
    """By seq, after checking that the bodies rise with them and that prev_seq chains the rows."""
    rows = await c.fetch("SELECT seq, prev_seq, body FROM im_message ORDER BY seq")
    assert [int(body) for _, _, body in rows] == list(range(1, len(rows) + 1)), "lost, doubled or out of order"
    assert [prev for _, prev, _ in rows] == [0, *(seq for seq, _, _ in rows)][:-1]
    return [seq for seq, _, _ in rows]


async def pulled(node: Node, cursor: int) -> tuple[list[int], int]:
    """What a reader behind `cursor` gets until it knows that nothing is left, and in how many pulls."""
    found: list[int] = []
    for pulls in range(1, 100):
        answer = await node.service.history.pull("b", wire.PullMsg(conversation_id=AB, from_seq=cursor + 1))
        assert answer.code == 0
        for row in answer.rows:
            assert row.prev_seq <= cursor, "a hole that prev_seq does not jump"
            cursor = row.seq
            found.append(row.seq)
        cursor = answer.covered_to
        if cursor >= answer.newest_seq:
            return found, pulls
    raise AssertionError("pulling does not end")


@each_allocator
async def test_m01_a_wiped_store_gives_no_seq_again(postgres_uri: str, valkey_url: str, name: str) -> None:
    async with cluster(postgres_uri) as c, allocator(c, name, valkey_url) as a:
        node = await c.start(allocator=a)
        await say(c, 1, 40)
        assert await seqs(c) == list(range(1, 41))
        admin = Client(valkey_url)
        await admin.run([command("FLUSHALL")])
        await admin.close()
        await say(c, 41, 5)
        later = (await seqs(c))[40:]
        assert len(later) == 5
        assert later[0] == (41 if name != "redis" else 40 + JUMP + 1)
        assert await c.fetch("SELECT count(*) FROM im_outcome WHERE code <> 0") == [0]
        got, pulls = await pulled(node, 40)
        assert got == later
        assert pulls <= 2


@each_allocator
async def test_m02_a_lost_reservation_counts_nothing_and_no_key_expires(
    postgres_uri: str, valkey_url: str, name: str
) -> None:
    async with cluster(postgres_uri) as c, allocator(c, name, valkey_url) as a:
        node = await c.start(allocator=a)
        await say(c, 1, 4)
        admin = Client(valkey_url)
        (keys,) = await admin.run([command("KEYS", f"{c.schema}:*")])
        reserved = await c.fetch("SELECT upto FROM im_seq_reserved")
        assert (bool(keys), bool(reserved)) == {
            "single_writer": (False, False), "redis": (True, True), "segment": (False, True)
        }[name]  # fmt: skip
        for key in keys:
            assert await admin.run([command("PTTL", key)]) == [-1]
            await admin.run([command("DEL", key)])
        await admin.close()
        await c.execute("DELETE FROM im_seq_reserved")
        (item,) = (await node.service.history.sync("b", wire.SyncMsg())).items
        assert item.newest_seq == 4
        assert item.newest_seq - item.first_cursor <= 4, "unread"
        await say(c, 5, 1)
        await node.kill()
        async with allocator(c, name, valkey_url) as fresh:
            await c.start(allocator=fresh)
            await say(c, 6, 1)
        assert (await seqs(c))[:4] == [1, 2, 3, 4]


@each_allocator
async def test_m03_a_replica_that_lags_overwrites_nothing(
    postgres_uri: str, valkey_url: str, name: str, tmp_path: Path
) -> None:
    """The replica of the store becomes the primary and lacks the last ten allocations; msg goes on with it in another
    process, while the old one still speaks to the old primary."""
    server = ValkeyServer(tmp_path, free_port())
    await server.start()
    old_primary, replica = Client(valkey_url), Client(server.url)
    try:
        password = valkey_url.rpartition("@")[0].rpartition(":")[2]
        await old_primary.run([command("CONFIG", "SET", "repl-diskless-sync-delay", "0")])
        await replica.run([command("CONFIG", "SET", "masterauth", password)])
        await replica.run([command("REPLICAOF", "127.0.0.1", valkey_url.rpartition(":")[2].partition("/")[0])])
        async with cluster(postgres_uri) as c, allocator(c, name, valkey_url) as before, allocator(
            c, name, server.url
        ) as after:  # fmt: skip
            # It ticks no more once it owns everything: it neither gives its partitions nor beats.
            old = await c.start("msg-0", allocator=before, tick_s=NEVER_S)
            await until(lambda: len(old.partitions) == PARTITIONS)
            await say(c, 1, 20)
            await until(lambda: caught_up(old_primary, replica))
            await replica.run([command("REPLICAOF", "NO", "ONE")])
            await say(c, 21, 10)
            new = await c.start("msg-1", allocator=after)
            await until(lambda: len(new.partitions) == PARTITIONS)
            assert len(old.partitions) == PARTITIONS, "it does not know yet"
            await say(c, 31, 10)  # both read them; one may write
            found = await seqs(c)
            assert found[:30] == list(range(1, 31)), "nothing is overwritten"
            assert found[30] == {"single_writer": 31, "redis": 30 + JUMP + 1, "segment": SEGMENT + 1}[name]
            await until(lambda: len(old.partitions) < PARTITIONS)
            assert await c.fetch("SELECT count(*) FROM im_outcome") == [40]
    finally:
        await replica.close()
        await old_primary.close()
        await server.stop()


async def caught_up(primary: Client, replica: Client) -> bool:
    """The replica has everything that the primary wrote."""
    (info,) = await primary.run([command("INFO", "replication")])
    written = dict(line.split(":", 1) for line in info.decode().splitlines() if ":" in line)["master_repl_offset"]
    (info,) = await replica.run([command("INFO", "replication")])
    facts = dict(line.split(":", 1) for line in info.decode().splitlines() if ":" in line)
    return facts.get("master_link_status") == "up" and int(facts["slave_repl_offset"]) >= int(written)
