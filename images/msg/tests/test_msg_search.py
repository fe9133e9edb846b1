"""Search: what is committed is found soon, as it is now, by who may read it, and by nobody else. On real PostgreSQL."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
from collections.abc import AsyncIterator, Iterator
from typing import Any
from uuid import uuid4

import pytest
from msg_harness import PARTITIONS, Cluster, cluster, until, up
from plato.adapters.pg import Database
from plato.core.codes import Code
from plato.core.conversations import dialogue_id, partition_of
from plato.core.errors import PeerError
from plato.core.ids import MAX_ID
from plato.wire.v1 import content_pb2 as content
from plato.wire.v1.bus_pb2 import GroupChange, Record
from plato_msg import search as searching
from plato_msg import texts as indexing
from plato_msg import texts_pg
from plato_msg.core import words
from plato_msg.core.batch import Plan
from plato_msg.search import Crowded, Question, Search, Slow
from plato_msg.texts import Texts
from plato_msg.texts_pg import Found, PgTexts, Place, TooSlow
from plato_msg.turns import TooMany

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
    search = Search(PgTexts(database), within_ms=60_000)
    page = await search.page(user, Question(text, **more), MAX_ID, 100)
    return [hit.message.said for hit in page.hits]


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
    search = Search(PgTexts(database), within_ms=60_000)
    below, said = MAX_ID, []
    while below:
        hits, below, _ = await search.page("ben", Question("page"), below, 10)
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
                await Search(PgTexts(database), within_ms=1_000).page("ann", Question("slow"), MAX_ID, 10)
    finally:
        await lock.close()
    assert await find(database, "ann", "slow") == ["slow"]


async def test_a_page_of_many_conversations_is_the_newest_of_all_of_them(
    c: Cluster, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(searching, "PART", 2)
    monkeypatch.setattr(searching, "PART_KEYS", 3)
    await c.start()
    names = [f"u{n}" for n in range(9)]
    for turn in range(4):
        for name in names if turn % 2 else reversed(names):
            await c.send(say("ann", name, f"note {turn} {name}"))
        await until(c.settled)
    await index(database)
    newest = await c.fetch("SELECT convert_from(body, 'UTF8') FROM im_message ORDER BY msg_id DESC")
    search = Search(PgTexts(database), within_ms=60_000)
    below, said = MAX_ID, []
    while below:
        hits, below, left_out = await search.page("ann", Question("note"), below, 5)
        assert not left_out
        said += [hit.message.said for hit in hits]
    assert said == newest


async def test_who_is_in_thousands_of_groups_finds_a_common_word_in_time_on_every_page(
    c: Cluster, database: Database
) -> None:
    groups, each = 2_000, 4
    await c.execute(
        f"""
        INSERT INTO im_member (conversation_id, user_id) SELECT 'g:' || n, 'ann' FROM generate_series(1, {groups}) n;
        INSERT INTO im_message (msg_id, conversation_id, seq, prev_seq, from_user, msg_type, body, client_msg_id, server_at)
            SELECT s * {groups} + n, 'g:' || n, s, s - 1, 'ben', 0, 'hello', int8send(s * {groups} + n), now()
            FROM generate_series(1, {groups}) n, generate_series(1, {each}) s;
        INSERT INTO im_text SELECT conversation_id, seq, msg_id, 0, 'hello', array_to_tsvector(
            ARRAY['hello', '=' || left(encode(sha256(convert_to(conversation_id, 'UTF8')), 'hex'), 12)]) FROM im_message
        """
    )
    lexemes = await c.fetch("SELECT DISTINCT (tsvector_to_array(words))[1] FROM im_text WHERE conversation_id = 'g:1'")
    assert lexemes == [words.conversation("g:1")], "as the index writes them"
    search = Search(PgTexts(database), within_ms=40_000)
    newest = groups * (each + 1)
    for below in (MAX_ID, newest - 500, newest // 2):
        page = await search.page("ann", Question("hello"), below, 30)
        first = min(newest, below - 1)
        assert [hit.message.msg_id for hit in page.hits] == list(range(first, first - 30, -1))
        assert (page.below, page.left_out) == (first - 29, "")
    assert await c.fetch("SELECT gin_clean_pending_list('im_text_words')") == [0], "no list that each look would read"
    part = [f"g:{n}" for n in range(1, searching.PART + 1)]
    async with database.connection() as connection:
        said = await connection.fetchval(
            f"EXPLAIN (ANALYZE, FORMAT JSON) {texts_pg._LOOK}",
            "ann",
            words.tsquery(words.terms("hello"), part),
            MAX_ID,
            "",
            0,
            0,
            searching.PART_KEYS,
        )
    looked_up = [loops for table, loops in scans(json.loads(said)[0]["Plan"]) if table == "im_message"]
    assert sum(looked_up) <= searching.PART_KEYS + 1 < searching.PART * each, "until the page is full, and no further"


def scans(plan: dict[str, Any]) -> Iterator[tuple[str, int]]:
    """(table, how often) of each scan of a plan."""
    if "Relation Name" in plan:
        yield plan["Relation Name"], plan["Actual Loops"]
    for below in plan.get("Plans", ()):
        yield from scans(below)


class Messages:
    """A store with a message per id, in memory. On `look` the first `slow` parts are answered, then nothing is any more."""

    def __init__(self, of: dict[str, list[int]], *, said: str = "a word", slow: int = 1_000) -> None:
        self.of = of
        self.said = said
        self.slow = slow
        self.looked: list[str] = []
        self.gate: asyncio.Event | None = None

    async def conversations(self, user: str, conversation_id: str, until: float) -> list[Place]:
        if self.gate is not None:
            await self.gate.wait()
        mine = [Place(c, max(ids), max(ids)) for c, ids in self.of.items() if conversation_id in ("", c)]
        return sorted(mine, key=lambda place: -place.msg_id)

    async def look(self, user: str, query: str, *, before_id: int, limit: int, **_: Any) -> list[Place]:
        if len(self.looked) >= self.slow:
            raise TooSlow
        self.looked.append(query)
        found = [Place(c, n, n) for c, ids in self.of.items() if words.conversation(c) in query for n in ids]
        return sorted((p for p in found if p.msg_id < before_id), key=lambda place: -place.msg_id)[:limit]

    async def texts(self, places: list[Place], until: float) -> list[Found]:
        return [Found(p.conversation_id, self.said, p.msg_id, 1, 0, "ann", 0, b"a word", b"", 0, 0) for p in places]


def spread(draw: random.Random, conversations: int, messages: int) -> dict[str, list[int]]:
    of: dict[str, list[int]] = {}
    for n in range(1, messages + 1):
        of.setdefault(f"g:{draw.randrange(conversations)}", []).append(n)
    return of


@pytest.mark.parametrize("seed", range(5))
async def test_however_messages_lie_in_conversations_pages_are_the_newest_first_and_whole(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    draw = random.Random(seed)
    monkeypatch.setattr(searching, "PART", draw.randint(1, 9))
    monkeypatch.setattr(searching, "PART_KEYS", draw.randint(1, 9))
    store: Any = Messages(spread(draw, 40, 300))
    search = Search(store, within_ms=60_000)
    below, found = MAX_ID, []
    while below:
        page = await search.page("ann", Question("word"), below, draw.randint(1, 40))
        below = page.below
        found += [hit.message.msg_id for hit in page.hits]
    assert found == list(range(300, 0, -1))


async def test_who_is_in_thousands_of_groups_searches_those_with_the_newest_messages() -> None:
    store: Any = Messages({f"g:{n}": [n + 1, 10_000 + n] for n in range(3_000)})
    page = await Search(store, within_ms=60_000).page("ann", Question("word"), MAX_ID, 30)
    assert [hit.message.msg_id for hit in page.hits] == list(range(12_999, 12_969, -1))
    assert len(store.looked) == 1, "nothing newer can be in any other part"
    assert store.looked[0].count("=") == searching.PART, "one look is for so many conversations"


async def test_a_search_that_looked_at_a_part_only_says_so() -> None:
    store: Any = Messages({f"g:{n}": [n + 1, 10_000 + n] for n in range(3_000)}, slow=2)
    page = await Search(store, within_ms=60_000).page("ann", Question("word"), 10_000, 30)
    assert [hit.message.msg_id for hit in page.hits] == list(range(3_000, 2_970, -1))
    assert f"only the {2 * searching.PART} conversations with the newest messages" in page.left_out
    store = Messages({f"g:{n}": [n + 1] for n in range(3_000)}, slow=0)
    with pytest.raises(Slow, match="name a conversation"):
        await Search(store, within_ms=60_000).page("ann", Question("word"), MAX_ID, 30)


async def test_of_one_user_a_search_waits_for_the_one_before_and_too_many_are_refused_and_others_go_on() -> None:
    slow: Any = Messages({"g:1": [1]})
    slow.gate = asyncio.Event()
    search = Search(slow, within_ms=60_000)
    asked = [asyncio.create_task(search.page("ann", Question("word"), MAX_ID, 1)) for _ in range(searching.IN_ALL)]
    await until(lambda: search._turns.under_way("ann") == searching.IN_ALL)
    with pytest.raises(TooMany) as refused:
        await search.page("ann", Question("word"), MAX_ID, 1)
    assert refused.value.code == Code.TOO_FAST
    assert refused.value.retry_ms > 0
    others = asyncio.create_task(search.page("ben", Question("word"), MAX_ID, 1))
    await until(lambda: search._turns.under_way("ben") == 1)
    slow.gate.set()
    assert [len((await one).hits) for one in [*asked, others]] == [1] * (searching.IN_ALL + 1)
    assert len(search._turns) == 0


async def test_waiting_counts_as_searching() -> None:
    stuck: Any = Messages({"g:1": [1]})
    stuck.gate = asyncio.Event()
    search = Search(stuck, within_ms=100)
    first = asyncio.create_task(search.page("ann", Question("word"), MAX_ID, 1))
    await until(lambda: search._turns.under_way("ann") == 1)
    with pytest.raises(Crowded) as busy:
        await search.page("ann", Question("word"), MAX_ID, 1)
    assert busy.value.code == Code.BUSY
    stuck.gate.set()
    await first


async def test_waiting_for_a_connection_counts_too() -> None:
    class Taken:
        @contextlib.asynccontextmanager
        async def connection(self) -> AsyncIterator[Any]:
            await asyncio.Event().wait()
            yield

    taken: Any = Taken()
    with pytest.raises(Crowded):
        await Search(PgTexts(taken), within_ms=100).page("ann", Question("word"), MAX_ID, 1)


async def test_a_search_of_long_texts_lets_messages_go_between_and_its_page_is_bound(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    turns = 0

    async def messages() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    store: Any = Messages({"d:x": list(range(1, 100))})
    search = Search(store, within_ms=60_000)
    monkeypatch.setattr(searching, "WORK_S", 0)  # every text is a long one
    others = asyncio.create_task(messages())
    page = await search.page("ann", Question("word"), MAX_ID, 100)
    assert turns >= len(page.hits) - 1 == 98

    monkeypatch.setattr(searching, "PAGE_BYTES", 30)
    found, below = [], MAX_ID
    while below:
        hits, below, _ = await search.page("ann", Question("word"), below, 100)
        assert len(hits) <= 5
        found += [hit.message.msg_id for hit in hits]
    assert found == list(range(99, 0, -1))
    others.cancel()
