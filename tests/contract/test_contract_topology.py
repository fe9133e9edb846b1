"""TopologySource: fake, file, and a ConfigMap behind an API server of our own."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from plato.adapters.topology_file import LOOK_S, FileTopology, write
from plato.adapters.topology_kube import Access, KubeTopology
from plato.core.errors import Unavailable
from plato.fakes.kube_api import FakeKubeApi
from plato.fakes.topology import FakeTopology
from plato.ports import TopologySource
from plato.topology.record import Shard, Topology, dumps, even_ranges


def record(epoch: int, addr: str = "127.0.0.1:1") -> Topology:
    return Topology("cluster", epoch, even_ranges(["plato-s0"], 1), shards={"plato-s0": Shard(addr, f"uid-{epoch}")})


@dataclass
class Published:
    source: TopologySource
    publish: Callable[[Topology], None]


@pytest.fixture(params=["fake", "file", "kube"])
async def published(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Published]:
    if request.param == "fake":
        fake = FakeTopology()
        yield Published(fake, fake.set)
        return
    path = tmp_path / "topology.json"
    if request.param == "file":
        yield Published(FileTopology(path), lambda topology: write(path, topology))
        return
    (tmp_path / "token").write_text("token-1")
    async with FakeKubeApi() as api:
        source = KubeTopology("t", Access(api.base, api.namespace, tmp_path / "token", None), path)
        following = asyncio.create_task(source.run())
        yield Published(source, lambda topology: api.publish("t", topology))
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)


async def shows(source: TopologySource, epoch: int) -> Topology:
    """Waits for `epoch` in current(), 5 s at most."""
    async with asyncio.timeout(20):
        while True:
            try:
                if (topology := source.current()).epoch == epoch:
                    return topology
            except Unavailable:
                pass
            await asyncio.sleep(0.01)


async def test_nothing_is_there_before_the_first_record(published: Published) -> None:
    with pytest.raises(Unavailable):
        published.source.current()
    waiting = asyncio.create_task(published.source.changed(0))
    await asyncio.sleep(0)
    published.publish(record(4))
    async with asyncio.timeout(20):
        assert await waiting == record(4)
    assert published.source.current() == record(4)


async def test_current_follows_what_is_published(published: Published) -> None:
    for epoch in (1, 2, 7):
        published.publish(record(epoch))
        assert await shows(published.source, epoch) == record(epoch)


async def test_changed_returns_at_once_when_it_knows_a_newer_one(published: Published) -> None:
    published.publish(record(3))
    async with asyncio.timeout(20):
        assert await published.source.changed(2) == record(3)
        assert await published.source.changed(0) == record(3)


async def test_every_waiter_is_told(published: Published) -> None:
    published.publish(record(3))
    waiting = [asyncio.create_task(published.source.changed(after)) for after in (3, 3, 4)]
    await asyncio.sleep(0)
    published.publish(record(4))
    async with asyncio.timeout(20):
        assert [await waiting[0], await waiting[1]] == [record(4), record(4)]
    assert not waiting[2].done()
    published.publish(record(5))
    async with asyncio.timeout(20):
        assert await waiting[2] == record(5)


async def test_epochs_never_go_back(published: Published) -> None:
    published.publish(record(5))
    await shows(published.source, 5)
    published.publish(record(4))
    published.publish(record(5, addr="another"))
    waiting = asyncio.create_task(published.source.changed(5))
    done, _ = await asyncio.wait([waiting], timeout=3 * LOOK_S)
    assert not done
    assert published.source.current() == record(5)
    published.publish(record(6))
    async with asyncio.timeout(20):
        assert await waiting == record(6)


async def test_a_cancelled_waiter_disturbs_nobody(published: Published) -> None:
    given_up = asyncio.create_task(published.source.changed(0))
    kept = asyncio.create_task(published.source.changed(0))
    await asyncio.sleep(0)
    given_up.cancel()
    published.publish(record(1))
    async with asyncio.timeout(20):
        assert await kept == record(1)


# ── the file alone ───────────────────────────────────────────────────────────────────────────────────────────


async def test_every_half_of_a_written_file_is_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "topology.json"
    whole = dumps(record(2)).encode()
    for cut in range(0, len(whole), 7):
        path.write_bytes(whole[:cut])
        with pytest.raises(Unavailable, match=r"topology file .*topology\.json"):
            FileTopology(path).current()
    write(path, record(1))
    source = FileTopology(path)
    assert source.current() == record(1)
    path.write_bytes(whole[:50])
    waiting = asyncio.create_task(source.changed(1))
    await asyncio.sleep(0)
    assert source.current() == record(1)
    path.write_bytes(whole)
    async with asyncio.timeout(20):
        assert await waiting == record(2)


async def test_a_file_that_goes_away_and_comes_back(tmp_path: Path) -> None:
    path = tmp_path / "topology.json"
    write(path, record(1))
    source = FileTopology(path)
    await shows(source, 1)
    path.unlink()
    waiting = asyncio.create_task(source.changed(1))
    done, _ = await asyncio.wait([waiting], timeout=2 * LOOK_S)
    assert not done
    assert source.current() == record(1)
    write(path, record(2))
    async with asyncio.timeout(20):
        assert await waiting == record(2)


async def test_a_replaced_file_of_the_same_size_and_time_is_seen(tmp_path: Path) -> None:
    path = tmp_path / "topology.json"
    write(path, record(1))
    facts = path.stat()
    source = FileTopology(path)
    await shows(source, 1)
    other = tmp_path / "other"
    other.write_text(dumps(record(2)))
    os.utime(other, ns=(facts.st_atime_ns, facts.st_mtime_ns))
    assert other.stat().st_size == facts.st_size
    other.replace(path)
    await shows(source, 2)


async def test_an_unchanged_file_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "topology.json"
    write(path, record(1))
    source = FileTopology(path)
    first = source.current()
    monkeypatch.setattr("plato.adapters.topology_file.loads", lambda _: pytest.fail("read again"))
    async with asyncio.timeout(20):
        begun = time.monotonic()
        while time.monotonic() - begun < 2 * LOOK_S:
            assert source.current() is first
            await asyncio.sleep(0.02)


def test_another_format_and_bad_utf8_are_told_in_words(tmp_path: Path) -> None:
    path = tmp_path / "topology.json"
    path.write_text(dumps(record(1)).replace('"format": 1', '"format": 2'))
    with pytest.raises(Unavailable, match="format 2 is not 1"):
        FileTopology(path).current()
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(Unavailable, match="topology file"):
        FileTopology(path).current()


def test_write_leaves_nothing_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "topology.json"
    (tmp_path / "topology.json.new").write_text("left by a crash")
    write(path, record(1))
    write(path, record(2))
    assert [p.name for p in tmp_path.iterdir()] == ["topology.json"]
    assert FileTopology(path).current() == record(2)
