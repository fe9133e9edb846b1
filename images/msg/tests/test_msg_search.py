"""Search: what is committed is found soon, as it is now, by who may read it, and by nobody else. On real PostgreSQL."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any
from uuid import uuid4

import pytest
from msg_harness import PARTITIONS, Cluster, cluster, until, up
from plato.adapters.pg import Database
from plato.core.conversations import dialogue_id, partition_of
from plato.core.errors import PeerError
from plato.core.ids import MAX_ID
from plato.wire.v1 import content_pb2 as content
from plato.wire.v1.bus_pb2 import GroupChange, Record
from plato_msg import search as searching
from plato_msg import texts as indexing
from plato_msg.core.batch import Plan
from plato_msg.search import Question, Search, Slow
from plato_msg.texts import Texts
from plato_msg.texts_pg import Found, PgTexts

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


def say(user: str, other: str, text: str, conversation_id: str | None = None) -> Record:
    record = up(user, other, text.encode(), conversation_id=conversation_id)
    record.msg_type = content.TEXT
    return record


def operation(user: str, conversation_id: str, kind: int, **fields: Any) -> Record:
    record = up(user, "", content.Operation(**fields).SerializeToString(), conversation_id=conversation_id)
    record.msg_type = kind
    return record


async def index(database: Database, partitions: range = range(PARTITIONS)) -> None:
    """A process that begins, and works until there is nothing to do."""
    texts = Texts(PgTexts(database), lambda: partitions, PARTITIONS)
    while await texts.step():
        pass


async def find(database: Database, user: str, text: str, **more: Any) -> list[str]:
    search = Search(PgTexts(database), within_ms=5_000)
    hits, _ = await search.page(user, Question(text, **more), MAX_ID, 100)
    return [hit.message.said for hit in hits]


async def test_words_are_found_by_both_sides_the_newest_first_and_by_no_stranger(
    c: Cluster, database: Database
) -> None:
    await c.start()
    await c.send(say("ann", "ben", "Good morning"), say("ben", "ann", "good night"))
    await until(c.settled)
    await c.send(say("ann", "cid", "goodbye 你好吗"))  # of another partition, perhaps: later, to be the newest
    await until(c.settled)
    await index(database)
    assert await find(database, "ann", "good") == ["goodbye 你好吗", "good night", "Good morning"]
    assert await find(database, "ben", "GOOD") == ["good night", "Good morning"]
    assert await find(database, "cid", "你好") == ["goodbye 你好吗"]
    assert await find(database, "cid", "好") == ["goodbye 你好吗"]
    assert await find(database, "ben", "你好") == []
    assert await find(database, "eve", "good") == []
    assert await find(database, "eve", "good", conversation_id=dialogue_id("ann", "ben")) == []
    assert await find(database, "ann", "good", conversation_id=dialogue_id("ann", "ben"), from_user="ben") == [
        "good night"
    ]
    with pytest.raises(PeerError):
        await find(database, "ann", "?!")


async def test_members_find_within_their_range_and_not_what_they_deleted(c: Cluster, database: Database) -> None:
    await c.start()

    def change(kind: GroupChange.Kind.ValueType, *users: str) -> Record:
        order = GroupChange(kind=kind, users=users)
        return Record(conversation_id=G, from_user="admin", client_msg_id=uuid4().bytes, group=order)

    await c.send(
        change(GroupChange.CREATE, "ann", "ben"),
        say("ann", "", "word one", G),
        change(GroupChange.ADD, "cid"),
        change(GroupChange.REMOVE, "ben"),
        say("ann", "", "word two", G),
        say("ann", "", "word three", G),
    )
    await until(c.settled)
    await index(database)
    assert await find(database, "ann", "word") == ["word three", "word two", "word one"]
    assert await find(database, "ben", "word") == ["word one"]
    assert await find(database, "cid", "word") == ["word three", "word two"]
    ((seq,),) = [await c.fetch("SELECT seq FROM im_message WHERE body = 'word two'")]
    await c.execute(f"INSERT INTO im_hidden (user_id, conversation_id, seq, version) VALUES ('ann', '{G}', {seq}, 1)")
    assert await find(database, "ann", "word") == ["word three", "word one"]
    await c.execute(
        f"INSERT INTO im_user_state (user_id, conversation_id, version, cleared_seq) VALUES ('cid', '{G}', 1, {seq})"
    )
    assert await find(database, "cid", "word") == ["word three"]


async def test_an_edit_and_a_recall_are_found_as_they_are_now(c: Cluster, database: Database) -> None:
    await c.start()
    conversation_id = dialogue_id("ann", "ben")
    await c.send(say("ann", "ben", "alpha"), say("ann", "ben", "beta"))
    await until(c.settled)
    await index(database)
    alpha, beta = await c.fetch("SELECT msg_id FROM im_message ORDER BY seq")
    await c.send(
        operation("ann", conversation_id, content.EDIT, msg_id=alpha, body=b"gamma"),
        operation("ann", conversation_id, content.RECALL, msg_id=beta),
    )
    await until(c.settled)
    assert await find(database, "ben", "alpha") == [], "what was is not found, though the index lags"
    assert await find(database, "ben", "beta") == []
    await index(database)
    assert await find(database, "ben", "gamma") == ["gamma"]
    assert await c.fetch("SELECT said FROM im_text") == ["gamma"], "and nothing stays of what was recalled"


async def test_the_index_goes_on_where_a_process_died_and_leaves_others_partitions_alone(
    c: Cluster, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(indexing, "ROWS", 3)
    monkeypatch.setattr(indexing, "WALK_PAGE", 2)
    await c.start()
    names = [f"u{n}" for n in range(12)]
    await c.send(*(say("ann", name, f"note {n}") for name in names for n in range(5)))
    await until(c.settled)
    half = range(PARTITIONS // 2)
    await index(database, half)
    theirs = {name for name in names if partition_of(dialogue_id("ann", name), PARTITIONS) in half}
    assert 0 < len(theirs) < len(names)
    assert len(await find(database, "ann", "note")) == 5 * len(theirs)
    dying = Texts(PgTexts(database), lambda: range(PARTITIONS), PARTITIONS)
    await dying.step()  # and no further
    await index(database)
    assert len(await find(database, "ann", "note")) == 60
    assert await c.fetch("SELECT count(*) FROM im_text") == [60]


async def test_what_is_committed_while_the_index_is_written_is_not_missed(c: Cluster, database: Database) -> None:
    await c.start()
    texts = Texts(PgTexts(database), lambda: range(PARTITIONS), PARTITIONS)
    plan = Plan(conversations={dialogue_id("ann", "ben"): ("dialogue", 1)})
    written = PgTexts.write
    later: list[Record] = [say("ann", "ben", "second")]

    async def slow(self: PgTexts, *args: Any) -> None:
        if later:
            await c.send(later.pop())
            await until(c.settled)
            texts.committed(plan)
        await written(self, *args)

    await c.send(say("ann", "ben", "first"))
    await until(c.settled)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PgTexts, "write", slow)
        while await texts.step():
            pass
    assert await find(database, "ben", "second") == ["second"]


async def test_pages_follow_each_other_without_a_gap(c: Cluster, database: Database) -> None:
    await c.start()
    await c.send(*(say("ann", "ben", f"page {n}") for n in range(25)))
    await until(c.settled)
    await index(database)
    search = Search(PgTexts(database), within_ms=5_000)
    below, said = MAX_ID, []
    while below:
        hits, below = await search.page("ben", Question("page"), below, 10)
        said += [hit.message.said for hit in hits]
    assert said == [f"page {n}" for n in reversed(range(25))]


async def test_a_search_that_takes_too_long_says_so(c: Cluster, database: Database) -> None:
    await c.start()
    await c.send(say("ann", "ben", "slow"))
    await until(c.settled)
    await index(database)
    lock = await c.connection()
    try:
        async with lock.transaction():
            await lock.execute("LOCK TABLE im_text")
            with pytest.raises(Slow, match="name a conversation"):
                await Search(PgTexts(database), within_ms=300).page("ann", Question("slow"), MAX_ID, 10)
    finally:
        await lock.close()
    assert await find(database, "ann", "slow") == ["slow"]


async def test_a_search_of_long_texts_lets_messages_go_between_and_its_page_is_bound(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Store:
        async def conversations(self, user: str, conversation_id: str) -> list[str]:
            return ["d:x"]

        async def look(self, user: str, query: str, *, before_id: int, limit: int, **_: Any) -> list[Found]:
            ids = range(min(before_id, 100) - 1, 0, -1)
            return [Found("d:x", "a word", n, n, n - 1, "ann", 0, b"a word", b"", 0, 0) for n in ids][:limit]

    turns = 0

    async def messages() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    store: Any = Store()
    search = Search(store, within_ms=5_000)
    monkeypatch.setattr(searching, "WORK_S", 0)  # every text is a long one
    others = asyncio.create_task(messages())
    hits, _ = await search.page("ann", Question("word"), MAX_ID, 100)
    assert turns >= len(hits) - 1 == 98

    monkeypatch.setattr(searching, "PAGE_BYTES", 30)
    found, below = [], MAX_ID
    while below:
        hits, below = await search.page("ann", Question("word"), below, 100)
        assert len(hits) <= 5
        found += [hit.message.msg_id for hit in hits]
    assert found == list(range(99, 0, -1))
    others.cancel()
