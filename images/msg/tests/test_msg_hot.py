"""Hot conversations: many pulls become few questions, and none is answered with what was true before it came."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Collection

import pytest
from msg_harness import Cluster, cluster, until
from plato.adapters.pg import Database
from plato.core.codes import Code
from plato.core.errors import Unavailable
from plato.wire.v1 import client_pb2 as wire
from plato_msg import hot as hot_module
from plato_msg.history import History
from plato_msg.reads import FLOOR, Reads
from plato_msg.store_pg import Access, Message, PgMsgStore

C = "crowd"
MEMBERS = [f"m{i}" for i in range(40)]


class Counted(PgMsgStore):
    """A store that counts its questions, and may hold them after they were answered."""

    def __init__(self, database: Database) -> None:
        super().__init__(database)
        self.single = self.together = self.ranges = 0
        self.gate: asyncio.Event | None = None
        self.held = asyncio.Event()
        self.broken = False

    async def membership(self, user: str, conversation_id: str) -> Access | None:
        self.single += 1
        return await super().membership(user, conversation_id)

    async def memberships(self, conversation_id: str, users: Collection[str]) -> dict[str, Access]:
        self.together += 1
        answer = await super().memberships(conversation_id, users)
        if self.gate is not None:
            self.held.set()
            await self.gate.wait()
        if self.broken:
            raise Unavailable("broken")
        return answer

    async def messages(
        self, conversation_id: str, from_seq: int, to_seq: int, limit: int, limit_bytes: int, *, newest_first: bool
    ) -> list[Message]:
        self.ranges += 1
        return await super().messages(conversation_id, from_seq, to_seq, limit, limit_bytes, newest_first=newest_first)


class Crowd:
    """A conversation of many members, and the History that answers them."""

    def __init__(self, c: Cluster, hot_pulls_per_s: int = 1) -> None:
        self.c = c
        self.store = Counted(c._database)
        self.history = History(self.store, max_frame_bytes=65_536, hot_pulls_per_s=hot_pulls_per_s)
        self.last = 0

    async def begin(self) -> None:
        async with self.c._database.connection() as connection:
            await connection.execute("INSERT INTO im_conversation VALUES ($1, 'open', 0)", C)
            await connection.executemany(
                "INSERT INTO im_member VALUES ($1, $2, $3)", [(C, m, 0) for m in MEMBERS] + [(C, "late", 3)]
            )

    async def write(self, count: int = 1, hole: int = 0, body: bytes = b"x") -> None:
        """Commits messages."""
        async with self.c._database.connection() as connection, connection.transaction():
            for _ in range(count):
                seq, self.last = self.last + 1 + hole, self.last
                await connection.execute(
                    "INSERT INTO im_message VALUES ($1, $2, $3, $4, 'm0', 1, $5, $6, now())",
                    seq, C, seq, self.last, body, seq.to_bytes(16, "big"),
                )  # fmt: skip
                self.last = seq
            await connection.execute("UPDATE im_conversation SET last_seq = $1", self.last)

    async def pull(
        self, user: str = "m1", from_seq: int = 1, to_seq: int = 0, limit: int = 0, newest: bool = False
    ) -> wire.PulledMsg:
        request = wire.PullMsg(conversation_id=C, from_seq=from_seq, to_seq=to_seq, limit=limit, newest_first=newest)
        return await self.history.pull(user, request)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hot_module, "ROWS", 20)
    monkeypatch.setattr(hot_module, "ROW_BYTES_MAX", 20_000)


def seqs(answer: wire.PulledMsg) -> list[int]:
    return [row.seq for row in answer.rows]


async def test_a_crowd_s_pulls_become_few_questions(postgres_uri: str) -> None:
    async with cluster(postgres_uri) as c:
        crowd = Crowd(c)
        await crowd.begin()
        await crowd.write(10)
        answers = await asyncio.gather(*(crowd.pull(m, 6) for m in MEMBERS for _ in range(5)))
        assert all(seqs(a) == [6, 7, 8, 9, 10] and a.newest_seq == 10 for a in answers)
        assert crowd.store.single <= 1
        assert crowd.store.together <= 3
        assert crowd.store.ranges <= 4
        assert crowd.history.hot_conversations() == [C]


async def test_conversations_that_are_not_hot_are_read_as_ever(postgres_uri: str) -> None:
    async with cluster(postgres_uri) as c:
        crowd = Crowd(c, hot_pulls_per_s=1_000)
        await crowd.begin()
        await crowd.write(3)
        await asyncio.gather(*(crowd.pull(m) for m in MEMBERS))
        assert crowd.store.single == len(MEMBERS)
        assert crowd.store.together == 0


async def test_r2_a_pull_never_gets_the_answer_of_a_question_that_began_before_it(postgres_uri: str) -> None:
    async with cluster(postgres_uri) as c:
        crowd = Crowd(c)
        await crowd.begin()
        await crowd.write(1)
        assert seqs(await crowd.pull()) == [1]
        crowd.store.gate = asyncio.Event()
        early = asyncio.create_task(crowd.pull("m1"))
        await crowd.store.held.wait()  # the database has answered: 1
        await crowd.write(1)
        late = [asyncio.create_task(crowd.pull(m)) for m in MEMBERS]  # they know of the second message
        await until(lambda: crowd.history._hot._entries[C].next is not None)
        asked = crowd.store.together
        crowd.store.gate.set()
        assert seqs(await early) == [1], "true when it came"
        assert all(seqs(a) == [1, 2] for a in await asyncio.gather(*late))
        assert crowd.store.together == asked + 1, "and they are one question"


async def test_whoever_is_no_member_or_joined_late_sees_no_more_than_before(postgres_uri: str) -> None:
    async with cluster(postgres_uri) as c:
        crowd = Crowd(c)
        await crowd.begin()
        await crowd.write(6)
        await crowd.pull()
        member, late, stranger = await asyncio.gather(crowd.pull(), crowd.pull("late"), crowd.pull("stranger"))
        assert seqs(member) == [1, 2, 3, 4, 5, 6]
        assert seqs(late) == [4, 5, 6]
        assert (stranger.code, seqs(stranger), stranger.newest_seq) == (Code.NOT_A_MEMBER, [], 0)
        nowhere = wire.PullMsg(conversation_id="nowhere")
        assert {(await crowd.history.pull("m1", nowhere)).code for _ in range(3)} == {Code.NOT_A_MEMBER}


@pytest.mark.usefixtures("small")
async def test_any_pull_is_answered_as_without_memory(postgres_uri: str) -> None:
    """Random writes with holes and large rows, random ranges and directions, against a History that keeps nothing."""
    async with cluster(postgres_uri) as c:
        rng = random.Random(8)
        crowd, plain = Crowd(c), History(PgMsgStore(c._database), max_frame_bytes=65_536, hot_pulls_per_s=1 << 30)
        await crowd.begin()
        for _ in range(80):
            if rng.random() < 0.3:
                await crowd.write(rng.randint(1, 8), rng.choice([0, 0, 3]), bytes(rng.choice([1, 1, 4_000])))
            first = rng.randint(0, crowd.last + 2)
            request = wire.PullMsg(
                conversation_id=C,
                from_seq=first,
                to_seq=rng.choice([0, first + rng.randint(0, 30)]),
                limit=rng.choice([0, 1, 3, 500]),
                newest_first=rng.random() < 0.5,
            )
            user = rng.choice(["m1", "late", "stranger"])
            assert await crowd.history.pull(user, request) == await plain.pull(user, request)
        entry = crowd.history._hot._entries[C]
        assert len(entry.rows) <= 20
        assert crowd.store.ranges < 80, "some came from memory"


async def test_removed_rows_go_from_memory_too(postgres_uri: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async with cluster(postgres_uri) as c:
        crowd = Crowd(c)
        await crowd.begin()
        await crowd.write(3)
        await crowd.pull()
        assert seqs(await crowd.pull()) == [1, 2, 3]
        await c.execute("DELETE FROM im_message WHERE seq < 3")
        monkeypatch.setattr(hot_module, "STALE_S", 0.0)
        assert seqs(await crowd.pull()) == [3]


async def test_a_question_that_fails_fails_those_who_asked_and_no_others(postgres_uri: str) -> None:
    async with cluster(postgres_uri) as c:
        crowd = Crowd(c)
        await crowd.begin()
        await crowd.write(1)
        crowd.store.broken = True
        assert {type(e) for e in await asyncio.gather(*(crowd.pull(m) for m in MEMBERS), return_exceptions=True)} == {
            Unavailable
        }
        crowd.store.broken = False
        assert seqs(await crowd.pull()) == [1]


async def test_reads_that_take_too_long_refuse_new_ones_with_a_time(postgres_uri: str) -> None:
    async with cluster(postgres_uri) as c:
        now = [0.0]
        crowd = Crowd(c)
        await crowd.begin()
        await crowd.write(1)
        reads = Reads(crowd.history, calm_ms=500, clock=lambda: now[0])
        pull = wire.PullMsg(ref=4, conversation_id=C)
        assert seqs(await reads.pull("m1", pull)) == [1]
        crowd.store.gate = asyncio.Event()
        waiting = [asyncio.create_task(reads.pull(m, pull)) for m in MEMBERS[:FLOOR]]
        await crowd.store.held.wait()
        assert reads.limiter.in_flight == FLOOR
        now[0] = 0.6
        pulled = await reads.pull("m1", pull)
        synced = await reads.sync("m1", wire.SyncMsg(ref=5))
        assert (pulled.code, pulled.ref, pulled.conversation_id) == (Code.BUSY, 4, C)
        assert (synced.code, synced.ref) == (Code.BUSY, 5)
        assert 250 <= pulled.retry_ms < synced.retry_ms
        crowd.store.gate.set()
        assert all(seqs(a) == [1] for a in await asyncio.gather(*waiting))
        assert seqs(await reads.pull("m1", pull)) == [1]
        reads.measure()
