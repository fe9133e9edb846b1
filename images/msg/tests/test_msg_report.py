"""The gate of a msg process: the record's uid and the store's reservation, and what /v1/report says of both."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest
from msg_harness import Cluster, Node, until, up
from msg_harness import cluster as made
from plato.core.ids import worker_id_of
from plato.fakes.store import FakeReservationStore
from plato.topology.record import Msg


@pytest.fixture
async def cluster(postgres_uri: str) -> AsyncIterator[Cluster]:
    async with made(postgres_uri) as c:
        yield c


def record(c: Cluster, node: Node, worker_id: int, uid: str = "") -> None:
    now = c.topology.current()
    msgs = {**now.msgs, node.name: Msg(uid or node.uid, worker_id, "")}
    c.topology.set(replace(now, epoch=now.epoch + 1, msgs=msgs))


async def test_a_process_that_serves_reports_its_lease(cluster: Cluster) -> None:
    node = await cluster.start()
    await until(lambda: not node.service.not_ready())
    said = node.service.report()
    assert (said["worker_id"], said["lease"]) == (101, True)
    assert said["epoch_seen"] == cluster.topology.current().epoch
    assert said["serving"]


async def test_without_its_uid_in_the_record_it_does_not_serve(cluster: Cluster) -> None:
    node = cluster.build()
    record(cluster, node, 7, uid="of the pod before")
    node.task = asyncio.create_task(node.service.run())
    cluster.nodes.append(node)
    await until(lambda: "does not name this process" in node.service.not_ready())
    await asyncio.sleep(0.1)  # and stays so
    assert "does not name this process" in node.service.not_ready()
    said = node.service.report()
    assert (said["worker_id"], said["lease"], said["serving"]) == (None, None, False)
    assert not cluster.memory.reservations


async def test_another_pods_reservation_keeps_it_out_until_the_record_gives_another_worker_id(cluster: Cluster) -> None:
    store = FakeReservationStore(cluster.memory)
    assert await store.reserve(7, "another pod", 1, 2**42, 60_000) is not None
    node = cluster.build()
    record(cluster, node, 7)
    node.task = asyncio.create_task(node.service.run())
    cluster.nodes.append(node)
    await until(lambda: node.service.report()["lease"] is False)
    assert "reservation" in node.service.not_ready()
    assert not node.partitions, "it owns nothing either"
    record(cluster, node, 8)
    await until(lambda: not node.service.not_ready())
    assert (node.service.report()["worker_id"], node.service.report()["lease"]) == (8, True)
    await cluster.send(up("alice", "bob", b"hello"))
    await until(cluster.settled)
    (row,) = await cluster.fetch("SELECT msg_id FROM im_message")
    assert worker_id_of(row) == 8


async def test_a_worker_id_that_changes_under_a_serving_process_is_followed(cluster: Cluster) -> None:
    node = await cluster.start()
    await until(lambda: not node.service.not_ready())
    await cluster.send(up("alice", "bob", b"one"))
    await until(cluster.settled)
    record(cluster, node, 300)
    await until(lambda: node.service.report()["worker_id"] == 300 and node.service.report()["lease"] is True)
    await cluster.send(up("alice", "bob", b"two", client_id=2))
    await until(cluster.settled)
    rows = await cluster.fetch("SELECT msg_id FROM im_message ORDER BY seq")
    assert [worker_id_of(row) for row in rows] == [101, 300]


async def test_a_process_whose_uid_leaves_the_record_gives_its_partitions_up(cluster: Cluster) -> None:
    node = await cluster.start()
    await until(lambda: bool(node.partitions))
    record(cluster, node, 9, uid="of the pod after")
    await until(lambda: not node.partitions)
    assert "does not name this process" in node.service.not_ready()
