"""What a gateway's /v1/report says: its worker_id and whose the reservation is, never more than is known."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import grpc
from plato.fakes.alone import Alone
from plato.fakes.topology import FakeTopology
from plato.runtime.settings import Settings
from plato.topology.record import Gateway, Shard, Topology, even_ranges
from plato.wire.v1 import state_pb2, state_pb2_grpc
from plato_gateway.core import lanes
from plato_gateway.link import Link

Make = Callable[..., Settings]


class FakeShard(Alone):
    """Holds streams open, and answers reservations as told."""

    def __init__(self) -> None:
        self.holder: dict[int, str] = {}
        """worker_id → the uid that has it; others are refused."""
        self.away = False
        self.asked: list[int] = []

    async def Attach(self, request_iterator: Any, context: Any) -> Any:
        await asyncio.Event().wait()
        yield state_pb2.StateBatch()

    async def Reserve(self, request: state_pb2.ReserveRequest, context: Any) -> state_pb2.ReserveReply:
        self.asked.append(request.worker_id)
        if self.away:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "the store is away")
        if self.holder.get(request.worker_id, request.uid) != request.uid:
            return state_pb2.ReserveReply(ok=False, msg="held by another")
        now_ms = time.time_ns() // 1_000_000
        return state_pb2.ReserveReply(ok=True, from_ms=now_ms, until_ms=now_ms + request.ahead_ms)


class Place:
    """A link, its shard, and its report over HTTP."""

    def __init__(self, settings: Settings, port: int, session: aiohttp.ClientSession) -> None:
        self.settings, self.port, self.session = settings, port, session
        self.shard = FakeShard()
        self.source = FakeTopology()
        self.epoch = 0
        self.link: Link

    def publish(self, worker_id: int = 5, uid: str = "uid-0") -> None:
        self.epoch += 1
        gateway = Gateway(uid, worker_id, 2, ("s0",), "127.0.0.1", 1, 2, "127.0.0.1:3")
        shards = {"s0": Shard(f"127.0.0.1:{self.port}", "uid-s0")}
        self.source.set(Topology("c", self.epoch, even_ranges(["s0"], 1), shards, {"edge-0": gateway}))

    async def report(self) -> dict[str, Any]:
        url = f"http://127.0.0.1:{self.settings.gateway.admin_port}/v1/report"
        async with self.session.get(url, headers={"Authorization": "Bearer t"}) as answer:
            assert answer.status == 200
            said: dict[str, Any] = await answer.json()
            return said

    async def says(self, **wanted: Any) -> dict[str, Any]:
        async with asyncio.timeout(10):
            while wanted.items() - (said := await self.report()).items():  # noqa: ASYNC110 - asked over HTTP
                await asyncio.sleep(0.02)
        return said


@asynccontextmanager
async def place(make_settings: Make, tmp_path: Path) -> AsyncIterator[Place]:
    tokens = tmp_path / "admin"
    tokens.mkdir()
    (tokens / "t").write_text("t")
    settings = make_settings(workers=2)
    process = settings.process.model_copy(update={"admin_tokens_dir": tokens})
    settings = settings.model_copy(update={"process": process})
    server = grpc.aio.server()
    async with aiohttp.ClientSession() as session:
        made = Place(settings, server.add_insecure_port("127.0.0.1:0"), session)
        state_pb2_grpc.add_StateServicer_to_server(made.shard, server)
        await server.start()
        link = made.link = Link(settings, made.source)
        await link.start()
        task = asyncio.create_task(link.run())
        try:
            yield made
            assert not task.done()
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await link.stop()
            await server.stop(None)


async def test_lease_is_known_only_from_an_answer_of_the_store(make_settings: Make, tmp_path: Path) -> None:
    async with place(make_settings, tmp_path) as p:
        said = await p.report()
        assert (said["uid"], said["worker_id"], said["lease"], said["epoch_seen"]) == ("uid-0", None, None, 0)
        assert (said["connections"], said["drain"], said["serving"]) == (0, None, False)
        p.shard.away = True
        p.publish()
        await p.says(worker_id=5, epoch_seen=1, lease=None)
        p.shard.away = False
        await p.says(lease=True)
        p.shard.away = True
        await p.says(lease=None)  # what was reserved has passed
        p.shard.away = False
        p.shard.holder[5] = "another"
        await p.says(lease=False)


async def test_without_a_token_nothing_is_told(make_settings: Make, tmp_path: Path) -> None:
    async with place(make_settings, tmp_path) as p:
        url = f"http://127.0.0.1:{p.settings.gateway.admin_port}/v1/report"
        async with p.session.get(url) as answer:
            assert answer.status == 401


async def test_the_gate_opens_for_the_uid_of_the_record_only(make_settings: Make, tmp_path: Path) -> None:
    async with place(make_settings, tmp_path) as p:
        p.publish(uid="of the pod before")
        said = await p.says(epoch_seen=1)
        assert (said["worker_id"], said["lease"]) == (None, None)
        assert not p.shard.asked
        assert "with uid 'uid-0'" in p.link.not_ready()
        p.publish()
        await p.says(worker_id=5, lease=True)
        p.publish(uid="of the pod after")
        await p.says(worker_id=None, lease=None, epoch_seen=3)
        assert "with uid 'uid-0'" in p.link.not_ready()


async def test_a_contested_worker_id_that_the_record_replaces_mints_only_under_the_new_reservation(
    make_settings: Make, tmp_path: Path
) -> None:
    async with place(make_settings, tmp_path) as p:
        reader, writer = await asyncio.open_unix_connection(str(p.settings.gateway.run_dir / "link.sock"))
        writer.write(lanes.pack_hello(lanes.Hello(0, 77, 4_000, 0, 0)))
        p.publish()
        await p.says(lease=True)
        p.shard.holder[5] = "another"
        await p.says(lease=False)
        p.shard.away = True
        asked = len(p.shard.asked)
        p.publish(worker_id=6)
        await p.says(worker_id=6, lease=None)
        async with asyncio.timeout(20):
            while 6 not in p.shard.asked[asked:]:  # noqa: ASYNC110 - of another task
                await asyncio.sleep(0.01)
        p.shard.away = False
        await p.says(worker_id=6, lease=True)
        parser, configs = lanes.LaneReader(), list[lanes.Config]()
        async with asyncio.timeout(20):
            while not any(c.worker_id == 6 and c.until_ms > c.from_ms for c in configs):
                configs += [m for m in parser.feed(await reader.read(65_536)) if isinstance(m, lanes.Config)]
        firsts = [c for c in configs if c.worker_id == 6]
        assert firsts[0].from_ms == firsts[0].until_ms, "stamps of the worker_id before are not used for this one"
        writer.close()
