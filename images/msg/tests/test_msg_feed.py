"""The feed on a real PostgreSQL: what a cursor leads to, what is removed, and that nothing is served with a gap."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from msg_harness import Cluster, cluster, until
from plato.core.conversations import partition_of
from plato_msg import feed as feeds
from plato_msg.core import cursors
from plato_msg.feed import Feed, Foreign, Gone, Key, merged
from test_msg_history import fill


async def write(c: Cluster, conversation_id: str, seqs: range, *, position: int = 1, age_s: int = 0) -> int:
    """Rows of the feed for messages that are there, from this position on; returns the partition."""
    partitions = len(await c.fetch("SELECT 1 FROM bus_owner"))
    partition = partition_of(conversation_id, partitions)
    for n, seq in enumerate(seqs):
        await c.execute(
            "INSERT INTO im_feed SELECT"
            f" {partition}, {position + n}, msg_id, conversation_id, seq, now() - interval '{age_s} s'"
            f" FROM im_message WHERE conversation_id = '{conversation_id}' AND seq = {seq}"
        )
    await c.execute(f"UPDATE bus_owner SET position = {position + len(seqs)} WHERE partition = {partition}")
    return partition


async def partitions(c: Cluster) -> int:
    return len(await c.fetch("SELECT 1 FROM bus_owner"))


async def test_the_feed_is_read_by_its_cursor_and_what_was_removed_is_told(
    postgres_uri: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with cluster(postgres_uri) as c:
        count = await partitions(c)
        feed = Feed(c._database, count, page_bytes=1_000)
        await fill(c, "room", range(1, 11), body=b"x" * 300)
        await fill(c, "hall", range(1, 4))
        await write(
            c, "hall", range(1, 4), position=100 if partition_of("hall", count) == partition_of("room", count) else 1
        )
        room = await write(c, "room", range(1, 11), position=1)
        await c.execute("UPDATE bus_owner SET position = 200")

        # Pages are cut by bytes, and go on where they were cut.
        got: list[tuple[str, int]] = []
        cursor = ""
        while len(got) < 13:
            events, cursor = await feed.read(cursor, "", 500)
            assert 0 < len(events) <= 13
            got += [(e.conversation_id, e.message.seq) for e in events]
        assert [seq for conversation, seq in got if conversation == "room"] == list(range(1, 11))
        assert [seq for conversation, seq in got if conversation == "hall"] == [1, 2, 3]
        assert await feed.read(cursor, "", 500) == ([], cursor)

        # One conversation, though others fill what is looked at.
        monkeypatch.setattr(feeds, "SCAN", 2)
        events, after = await feed.read("", "room", 4)
        assert [e.message.seq for e in events] == [1, 2]
        assert (await feed.read(after, "hall", 4))[0] or partition_of("hall", count) != room
        assert (await feed.read(await feed.now(), "room", 4))[0] == []

        # What is old goes, some rows at a time, and leaves a floor.
        monkeypatch.setattr(feeds, "TRIM_ROWS", 3)
        await feed.trim(room, 60)
        assert len((await feed.read("", "room", 500))[0]) > 0, "nothing is old yet"
        await c.execute(f"UPDATE im_feed SET at = now() - interval '1 h' WHERE partition = {room} AND position <= 7")
        middle = cursors.encode([6 if partition == room else 0 for partition in range(count)])
        await feed.trim(room, 60)
        rows = await c.fetch(
            f"SELECT position FROM im_feed WHERE partition = {room} AND position < 100 ORDER BY position"
        )
        assert rows == [7, 8, 9, 10], "whole steps of TRIM_ROWS alone"
        assert [e.message.seq for e in (await feed.read(middle, "room", 500))[0]][:1] == [7], "none of its rows is gone"
        with pytest.raises(Gone):
            await feed.read(cursors.encode([5 if p == room else 0 for p in range(count)]), "", 500)
        assert [e.message.seq for e in (await feed.read("", "room", 500))[0]][:1] == [7], "from the oldest that is kept"

        for foreign in (cursors.encode([1] * (count + 1)), cursors.encode([10**9] * count), "nonsense"):
            with pytest.raises(Foreign):
                await feed.read(foreign, "", 500)

        # A row whose message is gone is passed.
        await c.execute("DELETE FROM im_message WHERE conversation_id = 'room'")
        events, passed = await feed.read(middle, "", 500)
        assert {e.conversation_id for e in events} <= {"hall"}
        assert (await feed.read(passed, "room", 500))[0] == []


def test_pages_of_several_partitions_keep_the_order_of_each() -> None:
    keys = [Key(0, 1, 50, "a", 1), Key(0, 2, 10, "a", 2), Key(1, 1, 20, "b", 1), Key(1, 2, 60, "b", 2)]
    assert [(key.partition, key.position) for key in merged(keys, 3)] == [(1, 1), (0, 1), (0, 2)]
    assert merged([], 3) == []


class Counted(Feed):
    """A feed of two partitions without a database: `bounds` is where they are, `reads` what was read."""

    def __init__(self) -> None:
        nothing: Any = None
        super().__init__(nothing, 2)
        self.bounds = [5, 5]
        self.reads: list[tuple[str, str]] = []

    async def read(self, cursor: str, conversation_id: str, limit: int) -> tuple[list[Any], str]:
        self.reads.append((cursor, conversation_id))
        await asyncio.sleep(0)
        after = cursors.decode(cursor, 2)
        assert after is not None
        only = partition_of(conversation_id, 2) if conversation_id else None
        moved = [n for n in range(2) if self.bounds[n] > after[n] and only in (None, n)]
        return [(n, self.bounds[n]) for n in moved], cursors.encode(self.bounds)

    async def _bounds(self) -> list[tuple[int, int]]:
        return [(position, 0) for position in self.bounds]


async def test_those_who_wait_at_one_cursor_read_once_together_and_only_if_their_partition_moved(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(feeds, "LOOK_S", 0.01)
    feed: Any = Counted()
    looking = asyncio.create_task(feed.run())
    here = cursors.encode(feed.bounds)
    room = next(name for name in map(str, range(99)) if partition_of(name, 2) == 0)
    hall = next(name for name in map(str, range(99)) if partition_of(name, 2) == 1)
    everybody = [asyncio.create_task(feed.wait(here, "", 100, 60)) for _ in range(400)]
    rooms = [asyncio.create_task(feed.wait(here, room, 100, 60)) for _ in range(5)]
    halls = [asyncio.create_task(feed.wait(here, hall, 100, 60)) for _ in range(5)]
    await until(lambda: feed._waiting == 410)
    await until(lambda: feed._seen == [5, 5])
    await until(lambda: feed._waiting == 410)
    feed.reads.clear()
    feed.bounds = [6, 5]
    assert [(await one)[0] for one in [*everybody, *rooms]] == [[(0, 6)]] * 405
    assert sorted(feed.reads) == sorted([(here, ""), (here, room)])
    feed.reads.clear()
    feed.bounds = [6, 7]
    assert [(await one)[0] for one in halls] == [[(1, 7)]] * 5
    assert feed.reads == [(here, hall)]
    assert not feed._together
    looking.cancel()
    feed.close()


async def test_who_comes_while_others_read_reads_what_is_there_by_then(monkeypatch: pytest.MonkeyPatch) -> None:
    feed: Any = Counted()
    here = cursors.encode(feed.bounds)
    gate = asyncio.Event()
    read = Counted.read

    async def slow(self: Counted, cursor: str, conversation_id: str, limit: int) -> tuple[list[Any], str]:
        found = await read(self, cursor, conversation_id, limit)
        await gate.wait()
        return found

    monkeypatch.setattr(Counted, "read", slow)
    first = asyncio.create_task(feed._read_together(here, "", 100))
    await until(lambda: bool(feed.reads))
    feed.bounds = [6, 5]
    second = asyncio.create_task(feed.wait(here, "", 100, 0))
    await until(lambda: len(feed.reads) == 2)
    gate.set()
    assert (await second)[0] == [(0, 6)]
    assert (await first)[0] == []
