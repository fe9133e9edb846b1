"""R7 on a real PostgreSQL: two owners at one time, take-over, hand-over, fanned_out, dirty shards."""

from __future__ import annotations

import asyncio

import pytest
from msg_harness import PARTITIONS, Cluster, Node, cluster, until, up
from plato.core.conversations import dialogue_id, partition_of
from plato.core.errors import Unavailable
from plato.fakes.store import FakeReservationStore
from plato.ports import Route
from plato_msg import owner
from plato_msg.core.batch import Known, Plan, judge, number
from plato_msg.core.batch import Uplink as Decoded
from plato_msg.core.policy import Rules
from plato_msg.ids import MsgIds
from plato_msg.store_pg import Guard, Owner, PgMsgStore, SteppedDown

ALICE_BOB = dialogue_id("alice", "bob")
PARTITION = partition_of(ALICE_BOB, PARTITIONS)
NEVER_S = 3_600.0
"""As tick: the first one comes at once, no other does."""


def plan_of(body: bytes) -> Plan:
    u = Decoded(PARTITION, 1, ALICE_BOB, "alice", 1, 1, body.ljust(16), "bob", 1, body, b"", False)
    return number(judge([u], Known({}, {}), Rules(False)), Known({}, {}), {ALICE_BOB: 1}, [len(body) + 1], 1_000)


async def write(store: PgMsgStore, guard: Guard, body: bytes) -> None:
    async with store.batch([guard]) as batch:
        await batch.write(plan_of(body))


async def test_r7_a_batch_of_an_older_epoch_has_no_effect(postgres_uri: str) -> None:
    async with cluster(postgres_uri) as c:
        store = c.build().service.store
        (old,) = await store.take("old", {PARTITION: 0})
        (new,) = await store.take("new", {PARTITION: old.epoch})
        assert (old.epoch, new.epoch, new.position) == (1, 2, 0)
        with pytest.raises(SteppedDown) as caught:
            await write(store, Guard(PARTITION, old.epoch, 0, 1, 0), b"old")
        assert caught.value.partitions == {PARTITION}
        assert await c.fetch("SELECT * FROM im_message") == []
        await write(store, Guard(PARTITION, new.epoch, 0, 1, 0), b"new")
        assert await c.fetch("SELECT body FROM im_message") == [b"new"]


async def test_r7_a_batch_at_another_position_has_no_effect(postgres_uri: str) -> None:
    async with cluster(postgres_uri) as c:
        store = c.build().service.store
        (mine,) = await store.take("me", {PARTITION: 0})
        await write(store, Guard(PARTITION, mine.epoch, 0, 5, 0), b"one")
        for position in (0, 4, 6):
            with pytest.raises(SteppedDown):
                await write(store, Guard(PARTITION, mine.epoch, position, 9, 0), b"two")
        assert await c.fetch("SELECT body FROM im_message") == [b"one"]
        assert await c.fetch("SELECT position FROM bus_owner WHERE partition = $1", PARTITION) == [5]


async def test_r7_one_lost_partition_stops_the_whole_batch_and_is_named(postgres_uri: str) -> None:
    async with cluster(postgres_uri) as c:
        store = c.build().service.store
        rows = await store.take("me", {0: 0, 1: 0, 2: 0})
        await store.take("other", {1: 1})
        with pytest.raises(SteppedDown) as caught:
            async with store.batch([Guard(r.partition, r.epoch, 0, 3, 0) for r in rows]):
                raise AssertionError("the guard let it through")
        assert caught.value.partitions == {1}
        assert set(await c.fetch("SELECT position FROM bus_owner")) == {0}


async def test_r7_a_take_over_waits_for_the_running_batch_and_reads_after_it(postgres_uri: str) -> None:
    async with cluster(postgres_uri) as c:
        old, new = c.build(), c.build()
        (mine,) = await old.service.store.take("old", {PARTITION: 0})
        async with old.service.store.batch([Guard(PARTITION, mine.epoch, 0, 7, 0)]) as batch:
            taking = asyncio.create_task(new.service.store.take("new", {PARTITION: mine.epoch}))

            async def blocked() -> bool:
                return bool(await c.fetch("SELECT 1 FROM pg_stat_activity WHERE wait_event_type = 'Lock'"))

            await until(blocked)
            await batch.write(plan_of(b"in time"))
            assert not taking.done()
        (row,) = await taking
        assert (row.epoch, row.position) == (2, 7), "it read the position of the batch that it waited for"


async def test_r7_an_owner_that_froze_within_a_batch_does_not_hold_its_partition_for_ever(postgres_uri: str) -> None:
    async with cluster(postgres_uri) as c:
        old, new = c.build().service.store, c.build().service.store
        (mine,) = await old.take("old", {PARTITION: 0})
        taken: list[Owner] = []

        async def freeze() -> None:
            async with old.batch([Guard(PARTITION, mine.epoch, 0, 7, 0)]) as batch:
                await batch.write(plan_of(b"frozen"))
                taken.extend(await new.take("new", {PARTITION: mine.epoch}))  # the server ends what is idle for 5 s

        with pytest.raises(Unavailable):
            await freeze()
        (row,) = taken
        assert (row.epoch, row.position) == (2, 0)
        assert await c.fetch("SELECT * FROM im_message") == []


async def test_r7_only_one_of_two_take_overs_wins(postgres_uri: str) -> None:
    async with cluster(postgres_uri) as c:
        store = c.build().service.store
        both = await asyncio.gather(*(store.take(uid, dict.fromkeys(range(PARTITIONS), 0)) for uid in ("a", "b")))
        won = {row.partition for row in both[0]}, {row.partition for row in both[1]}
        assert won[0] | won[1] == set(range(PARTITIONS))
        assert not won[0] & won[1]
        stored = {(o, e, p) for o, e, p in await c.fetch("SELECT owner, epoch, partition FROM bus_owner")}
        assert stored == {(row.owner, row.epoch, row.partition) for rows in both for row in rows}, "who won, stands"
        assert {epoch for _, epoch, _ in stored} == {1}


async def test_r7_an_owner_that_lost_its_partition_steps_down(postgres_uri: str) -> None:
    async with cluster(postgres_uri) as c:
        node = await c.start(tick_s=NEVER_S)
        await until(lambda: len(node.partitions) == PARTITIONS)
        await node.service.store.take("other", {PARTITION: 1})
        sending = c.connect("alice")
        await c.send(up("alice", "bob"))
        await until(lambda: PARTITION not in node.partitions)
        assert await c.fetch("SELECT * FROM im_message") == []
        assert not c.frames(sending)
        assert len(node.partitions) == PARTITIONS - 1, "the others go on"
        elsewhere = next(
            u for u in map(str, range(99)) if partition_of(dialogue_id("alice", u), PARTITIONS) != PARTITION
        )
        await c.send(up("alice", elsewhere))
        await until(lambda: len(c.receipts(sending)) == 1)


async def test_r7_records_read_under_an_older_ownership_are_dropped(postgres_uri: str) -> None:
    """The partition was lost and came again, further on: what was read before must not move it back."""
    async with cluster(postgres_uri) as c:
        node = c.build(tick_s=NEVER_S)
        c.name(node)
        owners = node.service.owners
        await owners.tick()
        await c.send(*(up("alice", "bob", b"%d" % i, client_id=i + 1) for i in range(4)))
        uplinks = node.service.uplinks(await ids_of(c))
        under = dict(owners.held)
        records = await node.bus.read(PARTITION, 0, 2)
        await node.service.store.take("other", {PARTITION: under[PARTITION].epoch})
        await c.execute(f"UPDATE bus_owner SET position = 4 WHERE partition = {PARTITION}")
        owners.step_down([PARTITION])
        await owners.tick()
        assert owners.held[PARTITION].position == 4
        await uplinks.take(records, under)
        assert owners.held[PARTITION].position == 4, "the newer ownership stays"
        assert await c.fetch("SELECT position FROM bus_owner WHERE partition = $1", PARTITION) == [4]
        assert await c.fetch("SELECT * FROM im_message") == []


async def ids_of(c: Cluster) -> MsgIds:
    ids = MsgIds(FakeReservationStore(c.memory), 9, "uid", 1)
    assert await ids.raise_once()
    return ids


async def keep_sending(c: Cluster, stop: asyncio.Event, sent: list[str]) -> None:
    """One message after the other in many dialogues with bob."""
    number = 0
    while not stop.is_set():
        number += 1
        users = [f"user{i}" for i in range(12)]
        await c.send(*(up(u, "bob", b"%d" % number, client_id=number) for u in users))
        sent.extend(users)
        await asyncio.sleep(0.005)


async def check(c: Cluster, sent: list[str], bob: int) -> None:
    """Every message is stored once, in order, without a hole, and pushed in order (again after a change of owner)."""
    await until(c.settled)
    rows = await c.fetch("SELECT from_user, seq, prev_seq, body FROM im_message ORDER BY conversation_id, seq")
    assert len(rows) == len(sent)
    by_user: dict[str, list[tuple[int, int, bytes]]] = {}
    for user, seq, prev_seq, body in rows:
        by_user.setdefault(user, []).append((seq, prev_seq, body))
    for got in by_user.values():
        assert got == [(i + 1, i, b"%d" % (i + 1)) for i in range(len(got))]
    pushed: dict[str, dict[int, int]] = {}
    for push in c.pushes(bob):
        assert pushed.setdefault(push.from_user, {}).setdefault(push.seq, push.MsgID) == push.MsgID
    ids = dict(await c.fetch("SELECT msg_id, seq FROM im_message"))
    assert {i: s for user in pushed.values() for s, i in user.items()} == ids


async def balanced(c: Cluster, nodes: list[Node]) -> bool:
    counts = [len(n.partitions) for n in nodes]
    return sum(counts) == PARTITIONS and max(counts) - min(counts) <= 1 and await c.owners() == {n.uid for n in nodes}


async def test_r7_partitions_are_handed_over_when_a_process_comes_or_goes(postgres_uri: str) -> None:
    async with cluster(postgres_uri) as c:
        bob, sent, stop = c.connect("bob"), list[str](), asyncio.Event()
        first = await c.start("msg-0", stale_ms=300_000)
        await until(lambda: len(first.partitions) == PARTITIONS)
        sending = asyncio.create_task(keep_sending(c, stop, sent))
        second = await c.start("msg-1", stale_ms=300_000)
        await until(lambda: balanced(c, [first, second]))
        third = await c.start("msg-2", stale_ms=300_000)
        await until(lambda: balanced(c, [first, second, third]))
        await second.stop()  # gives its partitions up: nobody waits for its silence
        await until(lambda: balanced(c, [first, third]))
        stop.set()
        await sending
        await check(c, sent, bob)


async def test_r7_a_killed_process_is_followed_once_it_was_silent(postgres_uri: str) -> None:
    async with cluster(postgres_uri) as c:
        bob, sent, stop = c.connect("bob"), list[str](), asyncio.Event()
        first, second = await c.start("msg-0", stale_ms=400), await c.start("msg-1", stale_ms=400)
        await until(lambda: balanced(c, [first, second]))
        sending = asyncio.create_task(keep_sending(c, stop, sent))
        await first.kill()
        await until(lambda: len(second.partitions) == PARTITIONS)
        stop.set()
        await sending
        await check(c, sent, bob)


async def test_r7_a_restarted_process_need_not_wait_for_its_own_silence(postgres_uri: str) -> None:
    async with cluster(postgres_uri) as c:
        first = await c.start()
        await until(lambda: len(first.partitions) == PARTITIONS)
        await first.kill()
        # Ticks so long that by silence alone it would take many of them.
        second = await c.start(tick_s=NEVER_S)
        await until(lambda: len(second.partitions) == PARTITIONS)


async def test_r7_a_live_owner_is_not_robbed(postgres_uri: str) -> None:
    async with cluster(postgres_uri) as c:
        first, second = await c.start("msg-0"), await c.start("msg-1")
        await until(lambda: balanced(c, [first, second]))
        epochs = await c.fetch("SELECT epoch FROM bus_owner ORDER BY partition")
        beats = sum(await c.fetch("SELECT beat FROM bus_member"))

        async def long_after() -> bool:
            return bool(sum(await c.fetch("SELECT beat FROM bus_member")) > beats + 80)

        await until(long_after)
        assert await c.fetch("SELECT epoch FROM bus_owner ORDER BY partition") == epochs


async def test_a_process_that_the_topology_does_not_name_takes_nothing_and_gives_what_it_has(postgres_uri: str) -> None:
    async with cluster(postgres_uri) as c:
        node = await c.start()
        await until(lambda: len(node.partitions) == PARTITIONS)
        assert node.service.not_ready() == ""
        c.unname("msg-0")
        await until(lambda: not node.partitions)
        assert await c.owners() == {""}
        assert "topology" in node.service.not_ready()


async def test_a_database_that_takes_no_write_is_said_and_over_when_it_takes_one(
    postgres_uri: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with cluster(postgres_uri) as c:
        node = await c.start()
        await until(lambda: len(node.partitions) == PARTITIONS)
        assert node.service.owners.not_serving() == ""
        beat, gate = node.service.store.beat, asyncio.Event()

        async def full(uid: str) -> dict[str, int]:
            raise Unavailable("PostgreSQL: No space left on device (SQLSTATE 53100)")

        async def hangs(uid: str) -> dict[str, int]:
            await gate.wait()
            return await beat(uid)

        monkeypatch.setattr(node.service.store, "beat", full)
        await until(lambda: "53100" in node.service.owners.not_serving())
        assert node.service.not_ready() == "", "reads go on"
        monkeypatch.setattr(node.service.store, "beat", beat)
        await until(lambda: node.service.owners.not_serving() == "")
        monkeypatch.setattr(node.service.store, "beat", hangs)
        monkeypatch.setattr(owner, "SLOW_S", 0.05)
        await until(lambda: "does not answer a write" in node.service.owners.not_serving())
        gate.set()
        monkeypatch.setattr(owner, "SLOW_S", 5.0)
        await until(lambda: node.service.owners.not_serving() == "")


# ── fanned_out and dirty shards ──────────────────────────────────────────────────────────────────────────────


async def fanned_out(c: Cluster) -> int:
    (mark,) = await c.fetch("SELECT fanned_out FROM bus_owner WHERE partition = $1", PARTITION)
    return int(mark)


async def stored(c: Cluster, count: int) -> bool:
    return len(await c.fetch("SELECT 1 FROM im_message")) == count


async def test_r7_fanned_out_passes_only_when_each_shard_took_it_or_is_marked_dirty(postgres_uri: str) -> None:
    async with cluster(postgres_uri) as c:
        node = await c.start()
        alice, bob = c.connect("alice", shard="s0"), c.connect("bob", shard="s1")
        c.shards.away.add("s1")
        connection = await c.connection()
        try:
            async with connection.transaction():
                await connection.execute("LOCK TABLE bus_dirty IN SHARE MODE")  # marks must wait
                await c.send(up("alice", "bob"))
                await until(lambda: bool(c.receipts(alice)))

                async def marking() -> bool:
                    return bool(
                        await c.fetch(
                            "SELECT 1 FROM pg_stat_activity WHERE query LIKE '%bus_mark_dirty%'"
                            " AND wait_event_type = 'Lock'"
                        )
                    )

                await until(marking)
                beats = await c.fetch("SELECT beat FROM bus_member")

                async def ticked() -> bool:
                    return bool((await c.fetch("SELECT beat FROM bus_member"))[0] > beats[0] + 3)

                await until(ticked)
                assert await fanned_out(c) == 0, "s1 neither took it nor is it marked"
        finally:
            await connection.close()
        await until(c.settled)
        assert await fanned_out(c) == 1
        assert await c.fetch("SELECT shard FROM bus_dirty") == ["s1"]
        assert not c.frames(bob)
        c.shards.away.clear()
        await until(lambda: bool(c.shards.dirty_counts["s1"]))
        await until(lambda: no_dirty(c))
        assert node.partitions


async def no_dirty(c: Cluster) -> bool:
    return not await c.fetch("SELECT 1 FROM bus_dirty")


async def test_r7_a_dirty_count_is_sent_until_done_and_deleted_only_where_it_is_unchanged(postgres_uri: str) -> None:
    async with cluster(postgres_uri) as c:
        node = await c.start()
        store = node.service.store
        c.shards.done["s1"] = 0
        await store.mark_dirty(["s1"])
        first = (await store.dirty())["s1"]
        await until(lambda: c.shards.dirty_counts["s1"].count(first) >= 2)
        await store.mark_dirty(["s1"])
        second = (await store.dirty())["s1"]
        assert second > first
        c.shards.done["s1"] = first  # done with the first only
        await until(lambda: c.shards.dirty_counts["s1"].count(second) >= 2)
        assert await store.dirty() == {"s1": second}
        await store.clear_dirty("s1", first)  # an answer that was late
        assert await store.dirty() == {"s1": second}
        c.shards.done["s1"] = second
        await until(lambda: no_dirty(c))
        await store.mark_dirty(["s1"])
        assert (await store.dirty())["s1"] > second, "a count is never used again: the shard would call it done"


async def test_r7_what_no_shard_took_after_three_looks_marks_the_owner_dirty(postgres_uri: str) -> None:
    async with cluster(postgres_uri) as c:
        await c.start()
        bob = c.connect("bob", shard="s1")
        c.shards.untaken.add(bob)
        c.shards.done["s1"] = 0
        await c.send(up("alice", "bob"))
        await until(c.settled)
        assert c.shards.calls == [("s1", 1)] * 3
        assert await c.fetch("SELECT shard FROM bus_dirty") == ["s1"]
        assert [read for read in c.routes.reads if "bob" in read] == [["alice", "bob"], ["bob"], ["bob"]]


async def test_r7_a_device_that_moved_is_found_by_the_next_look(postgres_uri: str) -> None:
    async with cluster(postgres_uri) as c:
        await c.start()
        old = c.connect("bob", shard="s1")
        moved: list[int] = []
        c.shards.untaken.add(old)

        def move(shard: str) -> None:
            if not moved:
                moved.append(c.connect("bob", shard="s0"))

        c.shards.on_deliver = move
        await c.send(up("alice", "bob", b"x"))
        await until(c.settled)
        assert [p.Content for p in c.pushes(moved[0])] == [b"x"]
        assert await no_dirty(c)


async def test_r7_a_device_that_left_is_done_with(postgres_uri: str) -> None:
    async with cluster(postgres_uri) as c:
        await c.start()
        old = c.connect("bob", shard="s1")
        c.shards.untaken.add(old)

        def leave(shard: str) -> None:
            c.memory.routes["bob", 1] = Route(0, 9)

        c.shards.on_deliver = leave
        await c.send(up("alice", "bob"))
        await until(c.settled)
        assert len(c.shards.calls) == 1
        assert await no_dirty(c)


async def test_r7_a_slow_shard_stops_no_other_and_keeps_its_order(postgres_uri: str) -> None:
    async with cluster(postgres_uri) as c:
        await c.start()
        alice, bob = c.connect("alice", shard="s0"), c.connect("bob", shard="s1")
        c.shards.hanging.add("s1")
        loop = asyncio.get_running_loop()
        begun = loop.time()
        for i in range(20):
            await c.send(up("alice", "bob", b"%d" % i, client_id=i + 1))
            await until(lambda i=i: len(c.receipts(alice)) == i + 1)  # type: ignore[misc]  # mypy: default of a lambda
        assert loop.time() - begun < 35, "they waited for the slow one: 2 s each"
        assert not c.frames(bob)
        assert [r.seq for r in c.receipts(alice)] == list(range(1, 21))
        await until(c.settled)
        assert await c.fetch("SELECT shard FROM bus_dirty") == ["s1"]


async def test_r7_what_was_not_fanned_out_goes_out_again_with_the_same_numbers(postgres_uri: str) -> None:
    async with cluster(postgres_uri) as c:
        alice, bob = c.connect("alice"), c.connect("bob")
        first = await c.start()
        gate = asyncio.Event()
        c.routes.on_read = lambda users: wait_for(gate)
        await c.send(*(up("alice", "bob", b"%d" % i, client_id=i + 1) for i in range(5)))
        await until(lambda: stored(c, 5))
        await first.kill()  # committed, nothing fanned out
        gate.set()
        assert not c.frames(alice)
        assert await fanned_out(c) == 0
        await c.start()
        await until(c.settled)
        rows = await c.fetch("SELECT msg_id, seq, prev_seq FROM im_message ORDER BY seq")
        assert [(p.MsgID, p.seq, p.prev_seq) for p in c.pushes(bob)] == rows
        assert [(r.msg_id, r.seq, r.prev_seq) for r in c.receipts(alice)] == rows
        assert {r.code for r in c.receipts(alice)} == {0}


async def wait_for(event: asyncio.Event) -> None:
    await event.wait()
