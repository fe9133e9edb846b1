"""A real link between workers that the test plays and state shards that the test serves over gRPC."""

from __future__ import annotations

import asyncio
import time
import urllib.error
import urllib.request
from array import array
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import grpc
import pytest
from plato.fakes.alone import Alone
from plato.fakes.topology import FakeTopology
from plato.runtime.settings import Settings
from plato.topology.record import Gateway, Shard, SlotRange, Topology, even_ranges, with_process
from plato.wire.v1 import state_pb2, state_pb2_grpc
from plato_gateway import stream
from plato_gateway.core import lanes
from plato_gateway.link import Link
from plato_gateway.load import Load

DEADLINE_S = 30.0


async def until(condition: Callable[[], bool], what: str = "") -> None:
    end_s = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < end_s, f"not within {DEADLINE_S} s: {what}"
        await asyncio.sleep(0.01)


class Reservations:
    """The store's reservations, shared by shards, as the port defines them."""

    def __init__(self) -> None:
        self.holder: tuple[str, int] = ("", 0)
        self.until_ms = 0
        self.given: list[tuple[int, int, int]] = []
        """(boot, from, until) in order."""

    def reserve(self, uid: str, boot: int, ahead_ms: int) -> tuple[int, int] | None:
        now_ms = time.time_ns() // 1_000_000
        if self.holder[0] not in ("", uid) and now_ms < self.until_ms:
            return None
        from_ms = self.until_ms if self.holder == (uid, boot) else max(self.until_ms, now_ms)
        self.until_ms = max(from_ms, now_ms + ahead_ms)
        self.holder = (uid, boot)
        self.given.append((boot, from_ms, self.until_ms))
        return from_ms, self.until_ms


class FakeShard(Alone):
    """A shard that keeps what it gets. `takes` off: it reads batches and never says taken."""

    def __init__(self, name: str, reservations: Reservations) -> None:
        self.name = name
        self.takes = True
        self.reserves = True
        self.answers = asyncio.Event()
        """Cleared: reservations wait."""
        self.answers.set()
        self.asked = 0
        self.hellos: list[state_pb2.LinkHello] = []
        self.batches: list[state_pb2.LinkBatch] = []
        self.events: list[state_pb2.WorkerEvents] = []
        self.link_took = 0
        self._reservations = reservations
        self._out: asyncio.Queue[state_pb2.StateBatch | None] = asyncio.Queue()
        self._server: grpc.aio.Server | None = None
        self.port = 0

    async def start(self) -> None:
        self._server = grpc.aio.server()
        state_pb2_grpc.add_StateServicer_to_server(self, self._server)
        self.port = self._server.add_insecure_port(f"127.0.0.1:{self.port}")
        await self._server.start()

    async def stop(self) -> None:
        if self._server is not None:
            await self._server.stop(None)
            self._server = None

    @property
    def record(self) -> Shard:
        return Shard(f"127.0.0.1:{self.port}", f"uid-{self.name}")

    def send(self, batch: state_pb2.StateBatch) -> None:
        self._out.put_nowait(batch)

    def serves(self, epoch: int, slots: Iterable[int]) -> None:
        self.send(state_pb2.StateBatch(serves_epoch=epoch, serves=lanes.slot_bits(slots)))

    def end_stream(self) -> None:
        self._out.put_nowait(None)

    def say_taken(self) -> None:
        self.send(state_pb2.StateBatch(taken=self.batches[-1].batch_no))

    async def Attach(self, requests: Any, context: Any) -> Any:
        async def read() -> None:
            async for batch in requests:
                if batch.HasField("hello"):
                    self.hellos.append(batch.hello)
                self.link_took = batch.taken or self.link_took
                if batch.batch_no:
                    self.batches.append(batch)
                    self.events += batch.events
                    if self.takes:
                        self.send(state_pb2.StateBatch(taken=batch.batch_no))

        reader = asyncio.create_task(read())
        try:
            while (batch := await self._out.get()) is not None:
                yield batch
        finally:
            reader.cancel()
            self._out = asyncio.Queue()  # what was not sent is not for the next stream

    async def Reserve(self, request: state_pb2.ReserveRequest, context: Any) -> state_pb2.ReserveReply:
        self.asked += 1
        await self.answers.wait()
        if not self.reserves:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "the store is away")
        window = self._reservations.reserve(request.uid, request.boot, request.ahead_ms)
        if window is None:
            return state_pb2.ReserveReply(ok=False, msg="held by another")
        return state_pb2.ReserveReply(ok=True, from_ms=window[0], until_ms=window[1])


class FakeWorker:
    """A worker's end of the lane."""

    def __init__(self, index: int, boot: int, attach: int = 0) -> None:
        self.hello = lanes.Hello(index, boot, 4_000 + index, 0, attach)
        self.got: list[lanes.Message] = []
        self.reads = asyncio.Event()
        self.reads.set()
        self.ended = False

    async def connect(self, run_dir: Path) -> None:
        reader, self._writer = await asyncio.open_unix_connection(str(run_dir / "link.sock"))
        self._writer.write(lanes.pack_hello(self.hello))
        self._task = asyncio.create_task(self._read(reader))

    async def _read(self, reader: asyncio.StreamReader) -> None:
        parser = lanes.LaneReader()
        while data := await reader.read(65_536):
            self.got += parser.feed(data)
            await self.reads.wait()
        self.ended = True

    async def close(self) -> None:
        self._writer.close()
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    def send(self, message: bytes) -> None:
        self._writer.write(message)

    def all(self, kind: type[lanes.Message]) -> list[Any]:
        return [m for m in self.got if isinstance(m, kind)]

    @property
    def config(self) -> lanes.Config:
        configs = self.all(lanes.Config)
        return configs[-1] if configs else lanes.Config(0, (), 0, 0)

    def attach_of(self, group: int) -> int:
        """The newest attach number of a group; 0: suspended or never announced."""
        for m in reversed(self.got):
            if isinstance(m, lanes.Announce) and m.group == group:
                return m.attach
            if isinstance(m, lanes.Suspend) and m.group == group:
                return 0
        return 0

    @property
    def held(self) -> frozenset[int]:
        return frozenset(self.all(lanes.Hold)[-1].slots)

    def group_of_slot(self, slot: int) -> int:
        tables = self.all(lanes.Slots)
        return int(tables[-1].groups[slot]) if tables else lanes.NO_GROUP

    def event(self, slot: int, data: bytes, attach: int | None = None) -> None:
        group = self.group_of_slot(slot)
        self.send(
            lanes.pack_events(
                group,
                self.attach_of(group) if attach is None else attach,
                bytes([lanes.DATA]),
                array("Q", [(1 << 30) + slot]).tobytes(),
                array("I", [len(data)]).tobytes(),
                data,
            )
        )


class Cluster:
    """Shards, a topology that a test moves, and links on one run_dir."""

    def __init__(self, settings: Settings, shards: list[FakeShard], reservations: Reservations) -> None:
        self.settings = settings
        self.shards = shards
        self.reservations = reservations
        self.source = FakeTopology()
        self.run_dir = settings.gateway.run_dir
        self.epoch = 1

    def topology(self, homes: tuple[str, ...] = ("s0",), uid: str = "uid-0") -> Topology:
        gateway = Gateway(uid, 5, self.settings.gateway.workers, homes, "127.0.0.1", 1, 2, "127.0.0.1:3")
        names = [s.name for s in self.shards]
        return Topology(
            "c", self.epoch, even_ranges(names, 1), {s.name: s.record for s in self.shards}, {"edge-0": gateway}
        )

    def publish(self, topology: Topology | None = None, **how: Any) -> Topology:
        self.epoch += 1
        made = topology or self.topology(**how)
        made = with_process(made, self.epoch)
        self.source.set(made)
        return made

    @asynccontextmanager
    async def link(self) -> AsyncIterator[Link]:
        link = Link(self.settings, self.source)
        await link.start()
        task = asyncio.create_task(link.run())
        try:
            yield link
        finally:
            assert not task.done(), "the link ended by itself"
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await link.stop()


Make = Callable[..., Any]


@pytest.fixture
async def cluster(make_settings: Callable[..., Settings]) -> AsyncIterator[Make]:
    """await cluster(shards=2, workers=2, **gateway settings) gives a Cluster with running shards."""
    async with AsyncExitStack() as stack:

        async def make(shards: int = 2, workers: int = 2, **gateway: Any) -> Cluster:
            reservations = Reservations()
            made = [FakeShard(f"s{i}", reservations) for i in range(shards)]
            for shard in made:
                await shard.start()
                stack.push_async_callback(shard.stop)
            return Cluster(make_settings(workers=workers, **gateway), made, reservations)

        yield make


@asynccontextmanager
async def worker(cluster: Cluster, index: int, boot: int, attach: int = 0) -> AsyncIterator[FakeWorker]:
    made = FakeWorker(index, boot, attach)
    await made.connect(cluster.run_dir)
    try:
        yield made
    finally:
        await made.close()


async def attached(w: FakeWorker, slots: tuple[int, ...] = (0, 1023)) -> None:
    await until(lambda: all(w.attach_of(w.group_of_slot(s)) for s in slots), "the shards are announced")


async def get(port: int, path: str) -> tuple[int, str]:
    def ask() -> tuple[int, str]:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=5) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as e:
            with e:
                return e.code, e.read().decode()

    return await asyncio.to_thread(ask)


# ── up ───────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_a_worker_learns_slots_then_attaches_and_its_columns_pass_unopened(cluster: Make) -> None:
    c = await cluster()
    c.publish()
    async with c.link(), worker(c, 1, boot=77, attach=40) as w:
        await attached(w)
        kinds = [type(m) for m in w.got]
        assert kinds.index(lanes.Slots) < kinds.index(lanes.Announce)
        assert sorted(a.attach for a in w.all(lanes.Announce)) == [41, 42]
        assert {a.credit_bytes for a in w.all(lanes.Announce)} == {c.settings.gateway.credit_bytes}
        await until(lambda: bool(c.shards[0].hellos))
        hello = c.shards[0].hellos[0]
        assert (hello.gateway, hello.uid, hello.worker_id, hello.workers) == ("edge-0", "uid-0", 5, 2)
        # Columns of nonsense: the link must not look inside.
        w.send(
            lanes.pack_events(
                w.group_of_slot(0), w.attach_of(w.group_of_slot(0)), b"\xee", b"ididid!!", b"\xff" * 4, b"d"
            )
        )
        await until(lambda: bool(c.shards[0].events))
        (e,) = c.shards[0].events
        assert (e.worker, e.boot, e.attach) == (1, 77, w.attach_of(w.group_of_slot(0)))
        assert (e.kinds, e.conn_ids, e.lengths, e.data) == (b"\xee", b"ididid!!", b"\xff" * 4, b"d")
        assert not c.shards[1].events


async def test_a_worker_that_was_there_before_the_shards_is_announced_when_they_come(cluster: Make) -> None:
    c = await cluster(shards=1)
    await c.shards[0].stop()
    c.publish()
    async with c.link() as link, worker(c, 0, boot=1) as w:
        await until(lambda: w.group_of_slot(0) != lanes.NO_GROUP)
        assert w.attach_of(0) == 0
        assert "no state shard" in link.not_ready()
        await c.shards[0].start()
        await attached(w)
        await until(lambda: link.not_ready() == "")


async def test_a_shard_that_takes_nothing_stops_no_other(cluster: Make) -> None:
    c = await cluster(credit_bytes=100_000)
    stuck, fine = c.shards
    stuck.takes = False
    c.publish()
    async with c.link() as link, worker(c, 0, boot=1) as w:
        await attached(w)
        for _ in range(5):
            w.event(0, b"x" * 1_000)
            w.event(1023, b"y" * 1_000)
            await until(lambda: bool(stuck.batches))
        await until(lambda: sum(len(e.data) for e in fine.events) == 5_000)
        cost = 1_000 + lanes.EVENT_COST_BYTES
        group = w.group_of_slot(1023)
        await until(lambda: sum(m.credit_bytes for m in w.all(lanes.Credit) if m.group == group) == 5 * cost)
        for _ in range(20):
            w.event(0, b"x" * 1_000)
            w.event(1023, b"y" * 1_000)
            await asyncio.sleep(0)
        await until(lambda: sum(len(e.data) for e in fine.events) == 25_000)
        await until(lambda: len(stuck.batches) >= 2, "the second batch, by another stream")
        assert len(stuck.batches) == 2, "two untaken batches at most"
        assert not [m for m in w.all(lanes.Credit) if m.group == w.group_of_slot(0)]
        # Taken at last: what waited follows, joined into one batch, and the credit comes back, all of it, once.
        stuck.takes = True
        stuck.say_taken()
        await until(lambda: sum(len(e.data) for e in stuck.events) == 25_000)
        assert len(stuck.batches) <= 4
        stuck_group = w.group_of_slot(0)
        await until(lambda: sum(m.credit_bytes for m in w.all(lanes.Credit) if m.group == stuck_group) == 25 * cost)
        assert [e.data[:1] for e in stuck.events] == [b"x"] * len(stuck.events)
        assert sum(len(e.kinds) for e in stuck.events) == 25
        assert link.streams["s0"].counts.events_dropped == 0


async def test_events_stay_in_order_and_workers_apart_in_joined_batches(cluster: Make) -> None:
    c = await cluster(shards=1)
    shard = c.shards[0]
    shard.takes = False
    c.publish()
    async with c.link(), worker(c, 0, boot=1) as a, worker(c, 1, boot=2) as b:
        await attached(a)
        await attached(b)
        for n in range(100):
            a.event(0, b"a%03d" % n)
            b.event(1, b"b%03d" % n)
            if n < 2:
                await until(lambda n=n: len(shard.batches) > n)  # type: ignore[misc]  # mypy infers no default
        shard.takes = True
        shard.say_taken()
        await until(lambda: sum(len(e.kinds) for e in shard.events) == 200)
    for index, letter in ((0, b"a"), (1, b"b")):
        joined = b"".join(e.data for e in shard.events if e.worker == index)
        assert joined == b"".join(letter + b"%03d" % n for n in range(100))


async def test_r6_events_of_an_older_attach_are_dropped(cluster: Make) -> None:
    c = await cluster(shards=1)
    shard = c.shards[0]
    c.publish()
    async with c.link(), worker(c, 0, boot=1) as w:
        await attached(w)
        first = w.attach_of(0)
        await shard.stop()
        await until(lambda: w.attach_of(0) == 0, "suspended")
        w.event(0, b"while it was away", attach=first)
        await shard.start()
        await until(lambda: w.attach_of(0) > first, "announced anew")
        w.event(0, b"late, of the older attach", attach=first)
        w.event(0, b"fine")
        await until(lambda: bool(shard.events))
        assert [e.data for e in shard.events] == [b"fine"]
        assert len(shard.hellos) == 2


async def test_a_stream_comes_back_within_a_second_of_its_shard(cluster: Make) -> None:
    c = await cluster(shards=1)
    c.publish()
    async with c.link(), worker(c, 0, boot=1) as w:
        await attached(w)
        await c.shards[0].stop()
        await until(lambda: w.attach_of(0) == 0)
        await asyncio.sleep(1.5)  # the back-off has reached its longest
        await c.shards[0].start()
        began_s = time.monotonic()
        await attached(w)
        assert time.monotonic() - began_s < 4  # a second and room; nobody's own back-off grew beyond a second


async def test_news_of_a_shard_end_the_wait_for_it(cluster: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "BACKOFF_MIN_S", 60.0)
    monkeypatch.setattr(stream, "BACKOFF_MAX_S", 60.0)
    c = await cluster(shards=1)
    published = c.publish()
    async with c.link(), worker(c, 0, boot=1) as w:
        await attached(w)
        await c.shards[0].stop()
        await until(lambda: w.attach_of(0) == 0)
        await c.shards[0].start()
        name, shard = next(iter(published.shards.items()))
        c.publish(replace(published, shards={name: replace(shard, uid="the next process", ip="127.0.0.1")}))
        await attached(w)


async def test_an_address_that_is_old_is_passed_over_for_the_name(cluster: Make) -> None:
    c = await cluster(shards=1)
    record = c.topology()
    shards = {name: replace(shard, ip="127.0.0.2") for name, shard in record.shards.items()}
    c.publish(replace(record, shards=shards))
    async with c.link(), worker(c, 0, boot=1) as w:
        await attached(w)


# ── down ─────────────────────────────────────────────────────────────────────────────────────────────────────


def frames_for(columns: dict[int, list[int]], batch_no: int, payload: bytes = b"hello") -> state_pb2.StateBatch:
    """One payload for connections per worker index."""
    batch = state_pb2.StateBatch(
        batch_no=batch_no, payload_lengths=array("I", [len(payload)]).tobytes(), payload_data=payload
    )
    for index, conn_ids in columns.items():
        batch.frames.add(
            worker=index,
            conn_ids=array("Q", conn_ids).tobytes(),
            payload_index=array("I", [0] * len(conn_ids)).tobytes(),
            suffix_lengths=bytes([1] * len(conn_ids)),
            suffix_data=b"s" * len(conn_ids),
            flags=bytes(len(conn_ids)),
        )
    return batch


async def test_frames_reach_their_worker_and_count_as_taken(cluster: Make) -> None:
    c = await cluster(shards=1)
    c.publish()
    async with c.link(), worker(c, 0, boot=1) as a, worker(c, 1, boot=2) as b:
        await attached(a)
        await attached(b)
        c.shards[0].send(frames_for({0: [10], 1: [11, 13]}, 1))
        c.shards[0].send(frames_for({1: [15]}, 2))
        await until(lambda: c.shards[0].link_took == 2)
        await until(lambda: len(b.all(lanes.Frames)) == 2 and bool(a.all(lanes.Frames)))
        (only,) = a.all(lanes.Frames)
        assert (list(only.conn_ids), only.payloads, only.suffix_data) == ([10], [b"hello"], b"s")
        assert [list(f.conn_ids) for f in b.all(lanes.Frames)] == [[11, 13], [15]]


async def test_a_worker_that_takes_nothing_stops_no_other(cluster: Make) -> None:
    c = await cluster(shards=1)
    c.publish()
    async with c.link() as link, worker(c, 0, boot=1) as stuck, worker(c, 1, boot=2) as fine:
        await attached(stuck)
        await attached(fine)
        stuck.reads.clear()
        for n in range(1, 41):
            c.shards[0].send(frames_for({0: [10], 1: [11]}, n, b"x" * 400_000))
        await until(lambda: len(fine.all(lanes.Frames)) == 40)
        await until(lambda: c.shards[0].link_took == 40)
        assert 0 < link.streams["s0"].counts.frames_dropped < 40
        stuck.reads.set()
        await until(lambda: len(stuck.all(lanes.Frames)) == 40 - link.streams["s0"].counts.frames_dropped)


# ── minting ──────────────────────────────────────────────────────────────────────────────────────────────────


async def test_windows_of_two_processes_of_one_index_never_overlap_over_worker_and_link_restarts(cluster: Make) -> None:
    c = await cluster(shards=2)
    c.publish()
    windows: dict[int, list[tuple[int, int]]] = {}

    async def held(w: FakeWorker) -> None:
        await until(lambda: w.config.until_ms > w.config.from_ms, "a window")
        windows.setdefault(w.hello.boot, []).extend(
            (m.from_ms, m.until_ms) for m in w.all(lanes.Config) if m.until_ms > m.from_ms
        )

    for life in range(2):
        async with c.link():
            for turn in range(3):
                async with worker(c, 0, boot=100 * life + turn + 1) as w:
                    await held(w)
    async with c.link(), worker(c, 0, boot=1_000) as w:
        await held(w)
        first = w.config.until_ms
        await until(lambda: w.config.until_ms > first, "raised each second")
        await held(w)
        assert w.config.until_ms - time.time() * 1000 < 3_500
    assert len(windows) == 7
    spans = sorted((min(f for f, _ in ws), max(u for _, u in ws)) for ws in windows.values())
    assert all(a[1] <= b[0] for a, b in pairwise(spans)), spans
    boots = [b for b, _, _ in c.reservations.given]
    assert len(set(boots)) == 3, "one boot per link"


async def test_two_workers_mint_in_their_own_slots_of_the_home(cluster: Make) -> None:
    c = await cluster()
    c.publish(homes=("s1",))
    async with c.link(), worker(c, 0, boot=1) as a, worker(c, 1, boot=2) as b:
        # While the home is not attached yet, the other shard's slots serve.
        await until(lambda: a.config.slots == tuple(range(512, 1024, 2)), "of its home")
        await until(lambda: b.config.slots == tuple(range(513, 1024, 2)), "of its home")
        await until(lambda: bool(a.config.until_ms and b.config.until_ms))
        assert a.config.worker_id == b.config.worker_id == 5


async def test_a_home_that_is_silent_for_two_seconds_is_replaced_by_a_live_shard_until_it_is_back(
    cluster: Make,
) -> None:
    c = await cluster(workers=1)
    c.publish(homes=("s0",))
    async with c.link(), worker(c, 0, boot=1) as w:
        await attached(w)
        await until(lambda: w.config.slots == tuple(range(512)))
        gone_s = time.monotonic()
        await c.shards[0].stop()
        await until(lambda: w.config.slots == tuple(range(512, 1024)))
        assert 1.5 < time.monotonic() - gone_s < 15
        await c.shards[0].start()
        await until(lambda: w.config.slots == tuple(range(512)))
        before_ms = w.config.until_ms
        await until(lambda: w.config.until_ms > before_ms, "the reservation goes on")


async def test_a_home_that_takes_nothing_for_two_seconds_is_no_place_for_new_connections(cluster: Make) -> None:
    c = await cluster(workers=1)
    c.publish(homes=("s0",))
    async with c.link(), worker(c, 0, boot=1) as w:
        await attached(w)
        await until(lambda: w.config.slots == tuple(range(512)))
        c.shards[0].takes = False
        w.event(0, b"x")
        await until(lambda: w.config.slots == tuple(range(512, 1024)))
        c.shards[0].say_taken()
        await until(lambda: w.config.slots == tuple(range(512)))


async def test_a_shard_that_cannot_reserve_is_passed_over(cluster: Make) -> None:
    c = await cluster()
    c.shards[0].reserves = False
    c.publish()
    async with c.link() as link, worker(c, 0, boot=1) as w:
        await until(lambda: w.config.until_ms > 0)
        await attached(w)
        await until(lambda: link.not_ready() == "")


def asked_more(shard: FakeShard, asked: int) -> bool:
    return shard.asked > asked


def reserved_more(w: FakeWorker, before_ms: int) -> bool:
    return w.config.until_ms > before_ms


async def test_a_stream_that_ends_under_a_reservation_costs_that_one_only(cluster: Make) -> None:
    c = await cluster(shards=1)
    (shard,) = c.shards
    c.publish()
    async with c.link() as link, worker(c, 0, boot=1) as w:
        await attached(w)
        await until(lambda: link.not_ready() == "")
        for _ in range(3):  # a store that hangs: the shard does not answer, then ends its streams
            shard.answers.clear()
            asked = shard.asked
            await until(partial(asked_more, shard, asked), "a reservation is under way")
            shard.end_stream()
            await until(lambda: not link.streams["s0"].attached, "the stream is down")
            shard.answers.set()
            before_ms = w.config.until_ms
            await until(partial(reserved_more, w, before_ms), "stamps are reserved again")
        await until(lambda: link.not_ready() == "")


async def test_another_holder_of_the_worker_id_keeps_this_one_from_serving(cluster: Make) -> None:
    c = await cluster()
    c.reservations.reserve("another-uid", 9, 600_000)
    c.publish()
    async with c.link() as link, worker(c, 0, boot=1) as w:
        await until(lambda: link.not_ready() == "held by another")
        assert w.config.until_ms == 0
        ends_ms = c.reservations.until_ms = time.time_ns() // 1_000_000 + 500
        await until(lambda: w.config.until_ms > 0, "the other's reservation passed")
        assert c.reservations.given[1][1] >= ends_ms


# ── topology ─────────────────────────────────────────────────────────────────────────────────────────────────


async def test_it_serves_only_when_its_own_record_carries_its_uid(cluster: Make) -> None:
    c = await cluster()
    async with c.link() as link, worker(c, 0, boot=1) as w:
        assert "no topology" in link.not_ready()
        c.publish(uid="of the process before")
        await until(lambda: "names no gateway" in link.not_ready())
        assert not link.streams
        assert w.config.slots == ()
        c.publish()
        await attached(w)
        await until(lambda: bool(w.config.slots) and link.not_ready() == "")
        c.publish(uid="of the process after")
        await until(lambda: not link.streams and w.config.slots == ())


async def test_r6_a_slot_that_moves_is_held_until_its_new_shard_serves_it(cluster: Make) -> None:
    c = await cluster()
    made = c.publish()
    async with c.link() as link, worker(c, 0, boot=1) as w:
        await attached(w)
        s1 = w.group_of_slot(1023)
        before = w.attach_of(s1)
        untouched = w.attach_of(w.group_of_slot(0))
        c.publish(
            Topology(
                "c",
                c.epoch,
                (SlotRange(0, 510, "s0", 1), SlotRange(511, 1023, "s1", 2)),
                made.shards,
                made.gateways,
            )
        )
        await until(lambda: w.group_of_slot(511) == s1)
        at = [i for i, m in enumerate(w.got) if isinstance(m, lanes.Slots)][-1]
        # Before its group was another one:
        assert any(isinstance(m, lanes.Hold) and m.slots == {511} for m in w.got[:at])
        assert w.held == {511}
        c.shards[1].serves(1, range(511, 1024))  # it does not know of the order yet
        c.shards[0].serves(2, range(511))
        await until(lambda: link.streams["s0"].serves is not None and link.streams["s1"].serves is not None)
        assert w.held == {511}
        c.shards[1].serves(2, range(511, 1024))
        await until(lambda: not w.held)
        assert (w.attach_of(w.group_of_slot(0)), w.attach_of(s1)) == (untouched, before)  # nothing in flight was lost
        w.event(511, b"moved")
        await until(lambda: any(e.data == b"moved" for e in c.shards[1].events))


async def test_a_shard_at_a_new_address_is_attached_there(cluster: Make) -> None:
    c = await cluster(shards=1)
    c.publish()
    async with c.link(), worker(c, 0, boot=1) as w:
        await attached(w)
        first = w.attach_of(0)
        again = FakeShard("s0", c.reservations)
        await again.start()
        c.shards = [again]
        c.publish()
        await until(lambda: w.attach_of(w.group_of_slot(0)) > first)
        w.event(0, b"there")
        await until(lambda: [e.data for e in again.events] == [b"there"])
        await again.stop()


# ── lane and admin port ──────────────────────────────────────────────────────────────────────────────────────


async def test_garbage_on_a_lane_ends_that_lane_only(cluster: Make) -> None:
    c = await cluster()
    c.publish()
    async with c.link() as link, worker(c, 0, boot=1) as bad, worker(c, 1, boot=2) as good:
        await attached(good)
        bad.send(b"\xff" * 32)
        await until(lambda: bad.ended and list(link.lanes) == [1])
        good.event(0, b"fine")
        await until(lambda: [e.data for e in c.shards[0].events] == [b"fine"])


async def test_a_run_dir_with_a_path_too_long_for_a_socket_works(cluster: Make, tmp_path: Path) -> None:
    c = await cluster(run_dir=str(tmp_path / ("long" * 30)))
    assert len(str(c.run_dir / "link.sock")) > 108
    c.publish()
    async with c.link():
        from plato_gateway.lane import Lane

        lane = Lane(c.run_dir)
        assert await asyncio.to_thread(lane.connect)
        lane.send(lanes.pack_hello(lanes.Hello(0, 5, 1, 0, 0)))
        assert lane.flush()
        got: list[lanes.Message] = []

        def reads() -> bool:
            got.extend(lane.read() or [])
            return any(isinstance(m, lanes.Announce) for m in got)

        await until(reads)
        lane.close()


def test_what_is_left_of_a_networks_capacity_is_told_with_it() -> None:
    load = Load(100, max_bytes_per_s=1_000_000)
    load.hello(lanes.Hello(index=0, boot=1, pid=5, connections=0, attach=0))
    load.stats(0, lanes.Stats(), 1.0)
    assert load.report("a", "u", True)["bytes_per_s_left"] == 1_000_000
    load.stats(0, lanes.Stats(bytes_in=300_000, bytes_out=100_000), 2.0)
    report = load.report("a", "u", True)
    assert (report["bytes_per_s"], report["bytes_per_s_left"], report["max_bytes_per_s"]) == (
        400_000,
        600_000,
        1_000_000,
    )
    load.stats(0, lanes.Stats(bytes_in=5_000_000, bytes_out=100_000), 3.0)
    assert load.report("a", "u", True)["bytes_per_s_left"] == 0
    assert load.report("a", "u", False)["bytes_per_s_left"] == 0


async def test_load_readiness_and_metrics_are_told_on_the_admin_port(cluster: Make) -> None:
    c = await cluster(max_connections=100)
    port = c.settings.gateway.admin_port
    async with c.link() as link, worker(c, 0, boot=1) as w:
        status, body = await get(port, "/readyz")
        assert status == 503
        assert "no topology" in body
        c.publish()
        await attached(w)
        await until(lambda: link.not_ready() == "")
        w.send(lanes.pack_stats(lanes.Stats(connections=30, accepted=40, bytes_in=1_000, loop_lag_ms=7)))
        await until(lambda: link.load.connections == 30)
        w.send(lanes.pack_stats(lanes.Stats(connections=31, accepted=41, bytes_in=500_000, loop_lag_ms=7)))
        await until(lambda: link.load.connections == 31)
        report = link.load.report("edge-0", "uid-0", True)
        status, body = await get(port, "/v1/load")
        assert status == 200
        assert report["bytes_per_s"] > 0
        for part in ('"name":"edge-0"', '"uid":"uid-0"', '"serving":true', '"connections":31', '"connections_left":69'):
            assert part in body
        assert '"max_connections":100' in body
        assert (report["bytes_per_s_left"], report["max_bytes_per_s"]) == (None, 0)
        assert (await get(port, "/readyz"))[0] == 200
        assert (await get(port, "/healthz"))[0] == 200
        _, metrics = await get(port, "/metrics")
        assert 'plato_gateway_connections{worker="0"} 31.0' in metrics
        assert 'plato_gateway_accepted_total{worker="0"} 41.0' in metrics
        assert 'plato_gateway_stream_attached{shard="s1"} 1.0' in metrics
        # A process that takes its place counts on from there.
        async with worker(c, 0, boot=2) as second:
            await attached(second)
            second.send(lanes.pack_stats(lanes.Stats(connections=1, accepted=2)))
            await until(lambda: link.load.connections == 1)
            _, metrics = await get(port, "/metrics")
            assert 'plato_gateway_accepted_total{worker="0"} 43.0' in metrics
