"""M12: msg dies at every step between a record's arrival and its fan-out; the next one ends it, once, in order."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable, Collection
from typing import Any

import pytest
from msg_harness import PARTITIONS, Cluster, Crash, Node, cluster, until, up
from plato.core.conversations import dialogue_id
from plato_msg.store_pg import Batch, Guard

MESSAGES = 12


def crash(*_: Any, **__: Any) -> Any:
    raise Crash


async def crash_async(*_: Any, **__: Any) -> Any:
    raise Crash


def at_guard(c: Cluster, node: Node) -> None:
    """Before the transaction began."""
    node.service.store.batch = crash  # type: ignore[method-assign]  # the injection


def in_the_transaction(c: Cluster, node: Node) -> None:
    """Everything is written, nothing committed."""
    whole = node.service.store.batch

    @contextlib.asynccontextmanager
    async def batch(guards: Collection[Guard]) -> AsyncIterator[Batch]:
        async with whole(list(guards)) as opened:
            yield opened
            raise Crash

    node.service.store.batch = batch  # type: ignore[method-assign]  # the injection


def after_the_commit(c: Cluster, node: Node) -> None:
    """Committed, not handed to the downlink."""
    node.service.downlink.submit = crash_async  # type: ignore[method-assign]  # the injection


def at_the_routes(c: Cluster, node: Node) -> None:
    """Handed over, routes not read."""
    c.routes.on_read = crash


def before_a_delivery(c: Cluster, node: Node) -> None:
    """Routes read, nothing delivered by s1."""
    c.shards.on_deliver = lambda shard: crash() if shard == "s1" else None


def after_a_delivery(c: Cluster, node: Node) -> None:
    """One shard took it, its answer is lost."""
    c.shards.on_delivered = lambda shard: crash() if shard == "s1" else None


def at_the_mark(c: Cluster, node: Node) -> None:
    """Everything delivered, fanned_out not saved."""
    node.service.store.save = crash_async  # type: ignore[method-assign]  # the injection


def at_the_dirty_mark(c: Cluster, node: Node) -> None:
    """A shard is away, its mark is not written."""
    c.shards.away.add("s1")
    node.service.store.mark_dirty = crash_async  # type: ignore[method-assign]  # the injection


STEPS: list[Callable[[Cluster, Node], None]] = [
    at_guard,
    in_the_transaction,
    after_the_commit,
    at_the_routes,
    before_a_delivery,
    after_a_delivery,
    at_the_mark,
    at_the_dirty_mark,
]


@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.__name__)
async def test_m12_msg_dies_at_a_step_and_the_next_one_ends_it(
    postgres_uri: str, step: Callable[[Cluster, Node], None]
) -> None:
    async with cluster(postgres_uri) as c:
        alice, bob = c.connect("alice", shard="s0"), c.connect("bob", shard="s1")
        first = await c.start()
        await until(lambda: len(first.partitions) == PARTITIONS)
        await c.send(up("alice", "bob", b"0"))
        await until(c.settled)
        step(c, first)
        sent = [up("alice", "bob", b"%d" % i, client_id=i + 1) for i in range(1, MESSAGES)]
        await c.send(*sent)
        died = await first.ended()
        assert died is not None
        c.routes.on_read = lambda users: None
        c.shards.on_deliver = c.shards.on_delivered = lambda shard: None
        c.shards.away.clear()

        await c.start()
        await until(c.settled)
        rows = await c.fetch("SELECT msg_id, seq, prev_seq, body FROM im_message ORDER BY seq")
        assert [row[1:] for row in rows] == [(i + 1, i, b"%d" % i) for i in range(MESSAGES)]
        assert await c.fetch("SELECT last_seq FROM im_conversation") == [MESSAGES]
        for got in (
            [(p.MsgID, p.seq) for p in c.pushes(bob)],
            [(r.msg_id, r.seq) for r in c.receipts(alice)],
        ):
            shown = list(dict.fromkeys(got))  # a client shows a seq once
            assert shown == [row[:2] for row in rows]
            again = [seq for _, seq in got[len(shown) :]]
            assert again == sorted(again), "a repetition keeps the order too"
        assert {r.code for r in c.receipts(alice)} == {0}


async def test_m12_killed_again_and_again_in_the_middle_of_a_thousand(postgres_uri: str) -> None:
    async with cluster(postgres_uri) as c:
        bob = c.connect("bob")
        senders = [f"user{i}" for i in range(10)]
        for s in senders:
            c.connect(s, shard="s1")
        node = await c.start(batch_records=7)
        total = 100
        for i in range(total):
            done = len(c.pushes(bob))  # before: all of it may be pushed by the time that this knows it sent
            await c.send(*(up(s, "bob", b"%d" % i, client_id=i + 1) for s in senders))
            if i % 20 == 10:
                await until(lambda done=done: len(c.pushes(bob)) > done)  # type: ignore[misc]  # mypy: a lambda's default
                await node.kill()
                node = await c.start(batch_records=7)
        await until(c.settled)
        rows = await c.fetch(
            "SELECT conversation_id, seq, prev_seq, body FROM im_message ORDER BY conversation_id, seq"
        )
        assert len(rows) == total * len(senders)
        expected = [(i + 1, i, b"%d" % i) for i in range(total)]
        pushes = c.pushes(bob)
        for s in senders:
            conversation = dialogue_id(s, "bob")
            assert [row[1:] for row in rows if row[0] == conversation] == expected
            shown = dict.fromkeys(p.seq for p in pushes if p.conversation_id == conversation)
            assert list(shown) == [seq for seq, _, _ in expected], "each is shown once, in order"
