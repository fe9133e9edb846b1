"""One suite for the three allocators, on a real PostgreSQL and a real Valkey; and SeqCounters: fake and Valkey.

What a batch makes of an allocator's answer is R9's: max(allocated, last_seq + 1). The suite plays that batch.
"""

from __future__ import annotations

import asyncio
import random
import secrets
from collections.abc import AsyncIterator, Iterable, Mapping
from dataclasses import dataclass, field

import pytest
from plato.adapters.pg import Database
from plato.adapters.schema_pg import migrate
from plato.adapters.valkey import ValkeyStore
from plato.adapters.valkey.client import Client, command
from plato.core.errors import Unavailable
from plato.fakes.store import FakeSeqCounters, MemoryStore
from plato.ports import SeqCounters
from plato_msg import allocators
from plato_msg.core.allocator import JUMP, SEGMENT, Allocator
from plato_msg.core.batch import Conversation, Known
from plato_msg.store_pg import PgMsgStore

ALLOCATORS = ("single_writer", "redis", "segment")


@dataclass
class Rig:
    """Allocators of one name over one database and one store, and what their batches committed."""

    name: str
    ledger: PgMsgStore
    store: ValkeyStore
    admin: Client
    database: Database
    last: dict[str, int] = field(default_factory=dict)

    def process(self) -> Allocator:
        """The allocator of a msg process that begins."""
        return allocators.choose(self.name, self.ledger, self.store.counters)

    async def batch(self, allocator: Allocator, wanted: Mapping[str, int]) -> dict[str, list[int]]:
        """One batch that commits: the seqs that each conversation's messages got."""
        known = Known({}, {c: Conversation("open", last, {}) for c, last in self.last.items()})
        given: dict[str, list[int]] = {}
        for conversation, first in (await allocator.allocate(wanted, known)).items():
            first = max(first, self.last.get(conversation, 0) + 1)
            given[conversation] = list(range(first, first + wanted[conversation]))
            self.last[conversation] = given[conversation][-1]
        return given

    async def lose_reservations(self) -> None:
        """Every key of the store, and every row of the ledger."""
        await self.admin.run([command("FLUSHALL")])
        async with self.database.connection() as connection:
            await connection.execute("DELETE FROM im_seq_reserved")


@pytest.fixture(params=ALLOCATORS)
async def rig(request: pytest.FixtureRequest, databases: Database, valkey: ValkeyStore, admin: Client) -> Rig:
    return Rig(request.param, PgMsgStore(databases), valkey, admin, databases)


@pytest.fixture
async def databases(postgres_uri: str) -> AsyncIterator[Database]:
    schema = f"seqs_{secrets.token_hex(6)}"
    await migrate(postgres_uri, schema, 8)
    made = Database(postgres_uri, schema)
    yield made
    await made.close()


@pytest.fixture
async def valkey(valkey_url: str) -> AsyncIterator[ValkeyStore]:
    made = await ValkeyStore.connect(valkey_url, f"t{secrets.token_hex(4)}:")
    yield made
    await made.close()


@pytest.fixture
async def admin(valkey_url: str) -> AsyncIterator[Client]:
    made = Client(valkey_url)
    yield made
    await made.close()


async def test_a_new_conversation_begins_at_1_and_has_no_hole(rig: Rig) -> None:
    allocator = rig.process()
    given = [await rig.batch(allocator, {"a": 3, "b": 1}) for _ in range(4)]
    assert [seq for batch in given for seq in batch["a"]] == list(range(1, 13))
    assert [seq for batch in given for seq in batch["b"]] == [1, 2, 3, 4]


async def test_seqs_only_rise_whatever_is_lost_between(rig: Rig) -> None:
    """Restarts, forgotten memory, a wiped store, lost rows, batches that do not commit: never a number twice."""
    rng = random.Random(2)
    names = ["a", "b", "c"]
    allocator = rig.process()
    shown: dict[str, list[int]] = {c: [] for c in names}
    for _ in range(60):
        match rng.randrange(8):
            case 0:
                allocator = rig.process()
            case 1:
                allocator.forget()
            case 2:
                await rig.admin.run([command("FLUSHALL")])
            case 3:
                await rig.lose_reservations()
            case 4:  # numbers are taken, and the batch fails: memory is dropped
                known = Known({}, {c: Conversation("open", last, {}) for c, last in rig.last.items()})
                await allocator.allocate({"a": 5}, known)
                allocator.forget()
            case _:
                wanted = {c: rng.choice([1, 7, 400]) for c in rng.sample(names, 2)}
                for conversation, seqs in (await rig.batch(allocator, wanted)).items():
                    shown[conversation] += seqs
    for seqs in shown.values():
        assert seqs == sorted(set(seqs))
    assert all(shown.values())


async def test_more_than_a_segment_at_once(rig: Rig) -> None:
    allocator = rig.process()
    for _ in range(3):
        given = await rig.batch(allocator, {"a": 2 * SEGMENT + 1, "b": 1})
        assert len(given["a"]) == 2 * SEGMENT + 1
    assert rig.last == {"a": 3 * (2 * SEGMENT + 1), "b": 3}


async def test_many_conversations_in_one_batch(rig: Rig) -> None:
    allocator = rig.process()
    names = [f"c{i}" for i in range(700)]
    for seq in (1, 2):
        assert await rig.batch(allocator, dict.fromkeys(names, 1)) == {c: [seq] for c in names}


async def test_two_processes_after_each_other_never_share_a_number(rig: Rig) -> None:
    old, new = rig.process(), rig.process()
    given = [await rig.batch(p, {"a": 2}) for p in (old, new, old, new, old)]
    seqs = [seq for batch in given for seq in batch["a"]]
    assert seqs == sorted(set(seqs))


async def test_no_key_has_a_ttl(rig: Rig) -> None:
    await rig.batch(rig.process(), {f"c{i}": 1 for i in range(20)})
    for key in await keys(rig.admin):
        (ttl,) = await rig.admin.run([command("PTTL", key)])
        assert ttl == -1


async def test_what_a_lagging_database_lost_is_not_given_again(rig: Rig) -> None:
    """The database fails over and has lost its newest messages, which clients have seen. Counters and reservations that
    outlived them keep their numbers apart; the single writer cannot know."""
    await rig.batch(rig.process(), {"a": 30})
    rig.last["a"] = 20
    (first, *_) = (await rig.batch(rig.process(), {"a": 1}))["a"]
    assert first == 21 if rig.name == "single_writer" else first > 30


async def keys(admin: Client) -> list[bytes]:
    (found,) = await admin.run([command("KEYS", "*")])
    return list(found)


# ── redis ────────────────────────────────────────────────────────────────────────────────────────────────────


class Counters:
    """Counters that a test takes away."""

    def __init__(self, counters: SeqCounters) -> None:
        self._counters = counters
        self.away = False
        self.hang = False
        self.asked = 0

    async def _check(self) -> None:
        self.asked += 1
        if self.hang:
            await asyncio.Event().wait()
        if self.away:
            raise Unavailable("away")

    async def take(self, wanted: Mapping[str, tuple[int, int]]) -> dict[str, int]:
        await self._check()
        return await self._counters.take(wanted)

    async def begin(self, wanted: Mapping[str, tuple[int, int]]) -> dict[str, int]:
        await self._check()
        return await self._counters.begin(wanted)


@pytest.mark.parametrize("how", ["away", "hang"])
async def test_segments_take_over_while_the_store_is_away(databases: Database, how: str) -> None:
    now = [0.0]
    counters = Counters(FakeSeqCounters(MemoryStore()))
    allocator = allocators.RedisAllocator(counters, PgMsgStore(databases), lambda: now[0])
    rig = Rig("redis", PgMsgStore(databases), None, None, databases)  # type: ignore[arg-type]  # neither is reached
    shown = (await rig.batch(allocator, {"a": 3}))["a"]
    setattr(counters, how, True)
    shown += (await rig.batch(allocator, {"a": 3}))["a"]
    asked = counters.asked
    shown += (await rig.batch(allocator, {"a": 3}))["a"]
    assert counters.asked == asked, "a store that was away is not asked for each batch"
    setattr(counters, how, False)
    shown += (await rig.batch(allocator, {"a": 3}))["a"]
    assert counters.asked == asked
    now[0] += allocators.AWAY_S
    shown += (await rig.batch(allocator, {"a": 3}))["a"]
    assert counters.asked > asked
    assert shown == sorted(set(shown))
    assert len(shown) == 15


async def test_a_counter_of_another_run_begins_again_a_thousand_higher(databases: Database) -> None:
    memory = MemoryStore()
    allocator = allocators.RedisAllocator(FakeSeqCounters(memory), PgMsgStore(databases))
    rig = Rig("redis", PgMsgStore(databases), None, None, databases)  # type: ignore[arg-type]  # neither is reached
    await rig.batch(allocator, {"a": 40})
    memory.counters["a"] = (30, memory.run)  # the replica lags by ten
    memory.run += 1
    given = await rig.batch(allocator, {"a": 1, "new": 1})
    assert given["a"][0] > 40 + JUMP
    assert given["new"] == [1]
    assert (await rig.batch(allocator, {"a": 1}))["a"] == [given["a"][0] + 1], "once begun, it counts on"


async def test_the_database_is_told_each_thousand_and_not_each_number(databases: Database) -> None:
    class Counted(PgMsgStore):
        times = 0

        async def reserve(self, above: Mapping[str, int], count: int) -> dict[str, int]:
            Counted.times += 1
            return await super().reserve(above, count)

    ledger = Counted(databases)
    allocator = allocators.RedisAllocator(FakeSeqCounters(MemoryStore()), ledger)
    rig = Rig("redis", ledger, None, None, databases)  # type: ignore[arg-type]  # neither is reached
    for _ in range(50):
        (last, *_) = (await rig.batch(allocator, {"a": 100}))["a"][::-1]
        assert last <= (await ledger.reserved(["a"]))["a"]
    assert 5 <= Counted.times <= 6


# ── segment ──────────────────────────────────────────────────────────────────────────────────────────────────


async def test_the_next_segment_is_fetched_before_its_need(databases: Database) -> None:
    class Watched(PgMsgStore):
        waited = 0
        """Reservations that a batch waited for."""
        fetched: asyncio.Event

        async def reserve(self, above: Mapping[str, int], count: int) -> dict[str, int]:
            if not any(task.get_name() == "seqs ahead" for task in [asyncio.current_task()] if task):
                Watched.waited += 1
                return await super().reserve(above, count)
            found = await super().reserve(above, count)
            self.fetched.set()
            return found

    ledger = Watched(databases)
    ledger.fetched = asyncio.Event()
    allocator = allocators.SegmentAllocator(ledger)
    rig = Rig("segment", ledger, None, None, databases)  # type: ignore[arg-type]  # neither is reached
    shown: list[int] = []
    for _ in range(40):
        shown += (await rig.batch(allocator, {"a": 100}))["a"]
        if len(shown) % SEGMENT == SEGMENT * 6 // 10:
            await asyncio.wait_for(ledger.fetched.wait(), 10)
            ledger.fetched.clear()
    assert shown == list(range(1, 4_001))
    assert Watched.waited == 1


# ── SeqCounters ──────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture(params=["fake", "valkey"])
async def counters(request: pytest.FixtureRequest, valkey: ValkeyStore) -> SeqCounters:
    return FakeSeqCounters(MemoryStore()) if request.param == "fake" else valkey.counters


async def test_counters_count_above_what_they_are_told(counters: SeqCounters) -> None:
    assert await counters.take({"a": (3, 0), "b{}:": (1, 0)}) == {}
    assert await counters.begin({"a": (3, 0), "b{}:": (1, 7)}) == {"a": 1, "b{}:": 8}
    assert await counters.take({"a": (2, 0), "b{}:": (5, 0), "c": (1, 0)}) == {"a": 4, "b{}:": 9}
    assert await counters.take({"a": (1, 40)}) == {"a": 41}
    assert await counters.begin({"a": (1, 10)}) == {"a": 42}, "what stands is never lowered"


async def test_counters_of_another_run_of_the_server_are_absent(valkey: ValkeyStore, admin: Client) -> None:
    await valkey.counters.begin({"a": (3, 0)})
    for key in await keys(admin):
        if key.endswith(b":a"):
            await admin.run([command("HSET", key, "run", "0" * 40)])  # as a replica holds it, or an append-only file
    assert await valkey.counters.take({"a": (1, 0)}) == {}
    assert await valkey.counters.begin({"a": (1, 0)}) == {"a": 4}


async def test_more_counters_than_a_call_carries(counters: SeqCounters) -> None:
    names: Iterable[str] = [f"c{i}" for i in range(9_000)]
    wanted = dict.fromkeys(names, (1, 5))
    assert await counters.begin(wanted) == dict.fromkeys(names, 6)
    assert await counters.take(wanted) == dict.fromkeys(names, 7)
