"""R9 and R2 on a real PostgreSQL: every record ends in one outcome, whatever it is and whatever fails meanwhile."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Mapping, Sequence
from uuid import uuid4

import pytest
from msg_harness import PARTITIONS, Cluster, cluster, until, up
from plato.adapters.pg import Connection, Database
from plato.core.codes import Code
from plato.core.conversations import dialogue_id, partition_of
from plato.core.errors import Unavailable
from plato_msg import metrics
from plato_msg.core.batch import Known

ALICE_BOB = dialogue_id("alice", "bob")
PARTITION = partition_of(ALICE_BOB, PARTITIONS)
NEVER_S = 3_600.0


async def bodies(c: Cluster) -> list[tuple[int, int, bytes]]:
    return await c.fetch("SELECT seq, prev_seq, body FROM im_message ORDER BY conversation_id, seq")


async def ready(c: Cluster) -> None:
    await until(lambda: sum(len(n.partitions) for n in c.nodes) == PARTITIONS)


# ── duplicates ───────────────────────────────────────────────────────────────────────────────────────────────


async def test_m19_the_same_uplink_again_gives_one_row_one_push_and_the_first_receipt_again(postgres_uri: str) -> None:
    async with cluster(postgres_uri) as c:
        await c.start()
        alice, bob = c.connect("alice"), c.connect("bob")
        message, after = up("alice", "bob", b"once"), up("alice", "bob", b"after", client_id=2)
        await c.send(message)
        await until(c.settled)
        await c.send(after)
        await until(c.settled)
        await c.send(message)
        await until(c.settled)
        assert await bodies(c) == [(1, 0, b"once"), (2, 1, b"after")]
        assert [p.seq for p in c.pushes(bob)] == [1, 2]
        first, _, again = c.receipts(alice)
        assert (first.code, again.code) == (Code.OK, Code.DUPLICATE)
        assert (again.msg_id, again.seq, again.prev_seq, again.server_at_ms, again.client_msg_id, again.client_id) == (
            first.msg_id,
            1,
            0,
            first.server_at_ms,
            message.client_msg_id,
            1,
        )


async def test_r9_duplicates_within_a_batch_are_found_before_numbers_are_given(postgres_uri: str) -> None:
    async with cluster(postgres_uri) as c:
        alice, bob = c.connect("alice"), c.connect("bob")
        refused_batches = metrics.BATCHES.labels("Unstorable")._value.get()
        one, two = up("alice", "bob", b"1"), up("alice", "bob", b"2", client_id=2)
        await c.send(one, two, one, two, one, up("alice", "bob", b"3", client_id=3))
        await c.start()
        await until(c.settled)
        assert await bodies(c) == [(1, 0, b"1"), (2, 1, b"2"), (3, 2, b"3")]
        assert [p.seq for p in c.pushes(bob)] == [1, 2, 3]
        assert [(r.code, r.seq) for r in c.receipts(alice)] == [(0, 1), (0, 2), (1, 1), (1, 2), (1, 1), (0, 3)]
        assert metrics.BATCHES.labels("Unstorable")._value.get() == refused_batches, "the unique keys were not needed"


async def test_r9_the_same_client_msg_id_of_another_sender_is_another_message(postgres_uri: str) -> None:
    async with cluster(postgres_uri) as c:
        await c.start()
        key = uuid4().bytes
        await c.send(up("alice", "bob", b"a", client_msg_id=key), up("bob", "alice", b"b", client_msg_id=key))
        await until(c.settled)
        assert await bodies(c) == [(1, 0, b"a"), (2, 1, b"b")]


# ── refusals ─────────────────────────────────────────────────────────────────────────────────────────────────


async def test_r9_a_refusal_is_stored_takes_no_seq_and_is_repeated(postgres_uri: str) -> None:
    async with cluster(postgres_uri) as c:
        await c.start()
        alice, carol, bob = c.connect("alice"), c.connect("carol"), c.connect("bob")
        wrong = up("carol", "bob", b"no", conversation_id=ALICE_BOB)
        await c.send(up("alice", "bob", b"1"), wrong, up("alice", "bob", b"2", client_id=2), wrong)
        await until(c.settled)
        assert await bodies(c) == [(1, 0, b"1"), (2, 1, b"2")]
        refused = await c.fetch("SELECT code, msg_id, seq, client_msg_id FROM im_outcome WHERE from_user = 'carol'")
        assert refused == [(Code.BAD_CONVERSATION, None, None, wrong.client_msg_id)]
        receipts = c.receipts(carol)
        assert [(r.code, r.msg_id, r.seq, r.client_id) for r in receipts] == [(Code.BAD_CONVERSATION, 0, 0, 1)] * 2
        assert not c.pushes(carol)
        assert len(c.pushes(bob)) == 2
        # Carol's outcome stands even where she would be let in now.
        await c.execute(f"INSERT INTO im_member VALUES ('{ALICE_BOB}', 'carol', 2)")
        await c.send(wrong)
        await until(lambda: len(c.receipts(carol)) == 3)
        assert c.receipts(carol)[2].code == Code.BAD_CONVERSATION
        assert len(c.receipts(alice)) == 2


async def test_open_conversations_are_joined_by_the_first_up_while_guests_are_on(postgres_uri: str) -> None:
    async with cluster(postgres_uri) as c:
        await c.start(guests=True)
        alice, guest = c.connect("alice"), c.connect("guest:7", 123)
        await c.send(up("alice", "", b"1", conversation_id="42"))
        await until(c.settled)
        await c.send(up("guest:7", "", b"2", conversation_id="42", device_id=123, guest=True))
        await until(c.settled)
        await c.send(up("alice", "", b"3", conversation_id="42", client_id=2))
        await until(c.settled)
        assert [(p.Content, p.SessionID) for p in c.pushes(guest)] == [(b"2", 42), (b"3", 42)], (
            "its own Push, no Receipt"
        )
        assert not c.receipts(guest)
        assert [p.Content for p in c.pushes(alice)] == [b"2"]
        members = await c.fetch("SELECT user_id, joined_seq FROM im_member WHERE conversation_id = '42' ORDER BY 1")
        assert members == [("alice", 0), ("guest:7", 1)]


async def test_a_guests_repetition_is_answered_by_its_push_and_its_shard_hears_of_a_refusal(postgres_uri: str) -> None:
    async with cluster(postgres_uri) as c:
        await c.start(guests=True)
        alice, guest = c.connect("alice"), c.connect("guest:7", 123)
        message = up("guest:7", "", b"x", conversation_id="lobby", device_id=123, guest=True)
        await c.send(up("alice", "", b"1", conversation_id="lobby"))
        await until(c.settled)
        await c.send(message, up("guest:7", "", b"y", conversation_id="g:x", device_id=123, guest=True))
        await until(c.settled)
        await c.send(message)
        await until(c.settled)
        await until(lambda: len(c.frames(guest)) == 3)
        first, again = c.pushes(guest)
        assert (first.MsgID, first.Content) == (again.MsgID, again.Content)
        assert [r.code for r in c.receipts(guest)] == [Code.NOT_A_MEMBER], (
            "its shard keeps it, no guest knows a receipt"
        )
        assert [p.Content for p in c.pushes(alice)] == [b"x"]
        assert await c.fetch("SELECT code FROM im_outcome WHERE conversation_id = 'g:x'") == [Code.NOT_A_MEMBER]


async def test_guests_off_nobody_joins_an_open_conversation(postgres_uri: str) -> None:
    async with cluster(postgres_uri) as c:
        await c.start()
        alice = c.connect("alice")
        await c.send(up("alice", "", conversation_id="lobby"))
        await until(c.settled)
        assert [r.code for r in c.receipts(alice)] == [Code.NOT_A_MEMBER]
        assert await bodies(c) == []


# ── the record's own fault ───────────────────────────────────────────────────────────────────────────────────


async def test_r9_an_undecodable_record_is_kept_by_its_place_and_the_partition_moves_on(postgres_uri: str) -> None:
    async with cluster(postgres_uri) as c:
        before = metrics.POISON._value.get()
        alice = c.connect("alice")
        foreign = next(i for i in map(str, range(99)) if partition_of(i, PARTITIONS) != PARTITION)
        bad = [b"\xff\xff", b"", up("alice", "bob", conversation_id=foreign).SerializeToString()]
        good = [up("alice", "bob", b"%d" % i, client_id=i + 1) for i in range(4)]
        values = [good[0].SerializeToString()]
        for value, record in zip(bad, good[1:], strict=True):
            values += [value, record.SerializeToString()]
        await c.append(PARTITION, *values)
        await c.start()
        await until(c.settled)
        assert [row[2] for row in await bodies(c)] == [b"0", b"1", b"2", b"3"]
        assert [r.seq for r in c.receipts(alice)] == [1, 2, 3, 4]
        kept = await c.fetch("SELECT partition, position, value, reason <> '' FROM bus_poison ORDER BY position")
        assert kept == [(PARTITION, 2 * (i + 1), value, True) for i, value in enumerate(bad)]
        assert metrics.POISON._value.get() == before + 3


@pytest.mark.parametrize(
    "fault",
    [
        "ALTER TABLE im_message ADD CONSTRAINT no CHECK (body <> 'poison')",  # 23514
        "CREATE FUNCTION no() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN IF NEW.body = 'poison' THEN"
        " RAISE EXCEPTION 'no' USING ERRCODE = '22P02'; END IF; RETURN NEW; END $$;"
        "CREATE TRIGGER no BEFORE INSERT ON im_message FOR EACH ROW EXECUTE FUNCTION no()",
    ],
    ids=["class 23", "class 22"],
)
async def test_r9_a_record_that_the_database_refuses_stands_alone_and_the_rest_moves_on(
    postgres_uri: str, fault: str
) -> None:
    async with cluster(postgres_uri) as c:
        await c.execute(fault)
        alice, bob = c.connect("alice"), c.connect("bob")
        poison = up("alice", "bob", b"poison", client_id=3)
        sent = [up("alice", "bob", b"%d" % i, client_id=i + 1) for i in range(9)]
        others = [up("carol", f"user{i}", b"other") for i in range(20)]  # in every partition
        await c.send(*sent[:2], poison, *others, *sent[3:], poison)
        await c.start()
        await until(c.settled)
        kept = await c.fetch("SELECT seq, body FROM im_message WHERE from_user = 'alice' ORDER BY seq")
        assert kept == [(n + 1, s.body) for n, s in enumerate([*sent[:2], *sent[3:]])], "no hole, in order"
        assert len(await c.fetch("SELECT 1 FROM im_message WHERE body = 'other'")) == 20
        refused = await c.fetch("SELECT code, client_msg_id FROM im_outcome WHERE code <> 0")
        assert refused == [(Code.NOT_STORABLE, poison.client_msg_id)]
        assert [r.code for r in c.receipts(alice)] == [0, 0, Code.NOT_STORABLE, *[0] * 6, Code.NOT_STORABLE]
        assert len(c.pushes(bob)) == 8
        assert await c.fetch("SELECT count(*) FROM bus_poison") == [0]


async def test_r9_a_record_without_a_storable_outcome_is_kept_by_its_place(postgres_uri: str) -> None:
    async with cluster(postgres_uri) as c:
        await c.execute("ALTER TABLE im_outcome ADD CONSTRAINT no CHECK (from_user <> 'mallory')")
        await c.send(up("alice", "bob", b"1"), up("mallory", "alice"), up("alice", "bob", b"2", client_id=2))
        await c.start()
        await until(c.settled)
        assert [row[2] for row in await bodies(c)] == [b"1", b"2"]
        assert len(await c.fetch("SELECT 1 FROM bus_poison WHERE reason LIKE '%23514%'")) == 1


# ── everything else is retried ───────────────────────────────────────────────────────────────────────────────

TROUBLE = """
CREATE TABLE trouble (left_over integer); INSERT INTO trouble VALUES (1);
CREATE FUNCTION no() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
    IF (SELECT left_over FROM trouble) > 0 THEN RAISE EXCEPTION 'no' USING ERRCODE = '%s'; END IF; RETURN NEW; END $$;
CREATE TRIGGER no BEFORE INSERT ON im_message FOR EACH ROW EXECUTE FUNCTION no()
"""


class Counting:
    """An allocator that counts in memory, as one with reserved segments does."""

    def __init__(self) -> None:
        self.next: dict[str, int] = {}
        self.calls = 0

    async def allocate(self, wanted: Mapping[str, int], known: Known) -> dict[str, int]:
        self.calls += 1
        first = {}
        for conversation, count in wanted.items():
            held = known.conversations.get(conversation)
            first[conversation] = self.next.get(conversation, held.last_seq + 1 if held else 1)
            self.next[conversation] = first[conversation] + count
        return first

    def forget(self) -> None:
        self.next.clear()


@pytest.mark.parametrize("state", ["53100", "40P01", "57014", "XX000", "42P01"])
async def test_r9_any_other_error_is_retried_with_memory_dropped_and_nothing_is_refused(
    postgres_uri: str, state: str
) -> None:
    async with cluster(postgres_uri) as c:
        await c.execute(TROUBLE.replace("%s", state))
        allocator = Counting()
        node = await c.start(allocator=allocator, tick_s=NEVER_S)
        await ready(c)
        alice = c.connect("alice")
        await c.send(*(up("alice", "bob", b"%d" % i, client_id=i + 1) for i in range(3)))
        await until(lambda: allocator.calls >= 3)
        assert await c.fetch("SELECT count(*) FROM im_outcome") == [0]
        assert not c.frames(alice)
        await c.execute("UPDATE trouble SET left_over = 0")
        await until(lambda: len(c.receipts(alice)) == 3)
        # Numbers that the failed batches took in memory are forgotten: no hole.
        assert await bodies(c) == [(1, 0, b"0"), (2, 1, b"1"), (3, 2, b"2")]
        assert {r.code for r in c.receipts(alice)} == {Code.OK}
        assert set(await c.fetch("SELECT epoch FROM bus_owner")) == {1}, "it never stepped down"
        assert len(node.partitions) == PARTITIONS


class LosesAnswers(Database):
    """A database whose commits happen and whose answers are lost, `count` times."""

    def __init__(self, uri: str, schema: str) -> None:
        super().__init__(uri, schema)
        self.count = 0

    @contextlib.asynccontextmanager
    async def connection(self) -> AsyncIterator[Connection]:
        async with super().connection() as connection:
            yield connection
        if self.count:
            self.count -= 1
            raise Unavailable("the answer was lost")


async def test_r9_a_commit_whose_answer_was_lost_is_found_by_the_reload(postgres_uri: str) -> None:
    async with cluster(postgres_uri) as c:
        database = LosesAnswers(c.uri, c.schema)
        await c.start(database=lambda _: database, tick_s=NEVER_S)
        await ready(c)
        alice, bob = c.connect("alice"), c.connect("bob")
        database.count = 1
        await c.send(up("alice", "bob", b"1"))
        await until(lambda: len(c.receipts(alice)) == 1)
        assert database.count == 0
        await c.send(up("alice", "bob", b"2", client_id=2))
        await until(lambda: len(c.receipts(alice)) == 2)
        assert await bodies(c) == [(1, 0, b"1"), (2, 1, b"2")]
        assert [(r.code, r.seq) for r in c.receipts(alice)] == [(0, 1), (0, 2)]
        assert [p.seq for p in c.pushes(bob)] == [1, 2]
        assert await c.fetch("SELECT epoch, position FROM bus_owner WHERE partition = $1", PARTITION) == [(1, 2)]
        await database.close()


class TooLow:
    """An allocator that lost its counts."""

    async def allocate(self, wanted: Mapping[str, int], known: Known) -> dict[str, int]:
        return dict.fromkeys(wanted, 1)

    def forget(self) -> None:
        pass


async def test_r9_an_allocator_that_lost_its_counts_changes_nothing(postgres_uri: str) -> None:
    async with cluster(postgres_uri) as c:
        await c.start(allocator=TooLow())
        for i in range(3):
            await c.send(up("alice", "bob", b"a%d" % i, client_id=2 * i + 1), up("bob", "alice", b"b%d" % i))
            await until(c.settled)
        assert [row[0] for row in await bodies(c)] == [1, 2, 3, 4, 5, 6]


async def test_r9_deleted_messages_do_not_bring_their_numbers_back(postgres_uri: str) -> None:
    async with cluster(postgres_uri) as c:
        await c.start()
        for i in range(3):
            await c.send(up("alice", "bob", client_id=i + 1))
            await until(c.settled)
        await c.execute("DELETE FROM im_message")  # as retention does
        await c.send(up("alice", "bob", b"next", client_id=4))
        await until(c.settled)
        assert await bodies(c) == [(4, 3, b"next")]


# ── R2 ───────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_r2_msg_stores_before_it_reads_routes(postgres_uri: str) -> None:
    """A device that commits and then reads finds the message in its page, or in its route: there is no moment between."""
    async with cluster(postgres_uri) as c:
        seen: list[tuple[bool, set[str]]] = []

        async def at_read(users: Sequence[str]) -> None:
            seen.append((bool(await c.fetch("SELECT 1 FROM im_message")), set(users)))

        c.routes.on_read = at_read
        await c.start()
        await c.send(up("alice", "bob"))
        await until(c.settled)
        assert seen == [(True, {"alice", "bob"})], "one pipeline, after the commit"
        await c.send(up("alice", "bob", client_id=2), up("bob", "alice"))
        await until(c.settled)
        assert len(seen) >= 2, "no route is cached"


async def test_the_trace_id_of_the_uplink_goes_with_receipt_and_push(postgres_uri: str) -> None:
    async with cluster(postgres_uri) as c:
        await c.start()
        alice, bob = c.connect("alice"), c.connect("bob", shard="s1")
        message = up("alice", "bob")
        await c.send(message)
        await until(c.settled)
        for conn_id in (alice, bob):
            (payload,) = c.shards.taken[conn_id]
            assert payload.trace_id == message.trace_id
        assert c.receipts(alice)[0].trace_id == c.pushes(bob)[0].trace_id == message.trace_id
