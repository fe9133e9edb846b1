"""PostgreSQL is killed by -9 under a working msg: it goes on through the same objects, and nothing is lost or doubled."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path

from msg_harness import PARTITIONS, cluster, until, up
from plato.core.errors import Unavailable
from plato.local.servers import PostgresServer
from plato.wire.v1.bus_pb2 import Record

from tests.ports import free_port


async def test_r9_msg_goes_on_after_postgres_was_killed_three_times(tmp_path: Path) -> None:
    server = PostgresServer(tmp_path / "pg", free_port())
    await server.start()
    try:
        async with cluster(server.uri) as c:
            bob = c.connect("bob")
            first, second = await c.start("msg-0"), await c.start("msg-1")
            await until(lambda: len(first.partitions) + len(second.partitions) == PARTITIONS)
            sent: list[Record] = []
            stop = asyncio.Event()

            async def send() -> None:
                number = 0
                while not stop.is_set():
                    number += 1
                    batch = [up(f"user{i}", "bob", b"%d" % number, client_id=number) for i in range(8)]
                    while True:  # as R8 says: the same again until known
                        with contextlib.suppress(Unavailable):
                            await c.send(*batch)
                            break
                        await asyncio.sleep(0.02)
                    sent.extend(batch)
                    await asyncio.sleep(0.002)

            sending = asyncio.create_task(send())
            for _ in range(3):
                seen = len(c.pushes(bob))
                await until(lambda seen=seen: len(c.pushes(bob)) > seen + 50)  # type: ignore[misc]  # a lambda's default
                server.kill()
                assert server.child is not None
                await server.child.wait()
                await server.start()
            seen = len(c.pushes(bob))
            await until(lambda: len(c.pushes(bob)) > seen)
            stop.set()
            await sending
            await until(c.settled)
            assert not first.task.done()
            assert not second.task.done()
            rows = await c.fetch("SELECT from_user, seq, prev_seq, body FROM im_message ORDER BY conversation_id, seq")
            assert len(rows) == len(sent)
            for i in range(8):
                mine = [row[1:] for row in rows if row[0] == f"user{i}"]
                assert mine == [(n + 1, n, b"%d" % (n + 1)) for n in range(len(sent) // 8)]
            shown = {(p.from_user, p.seq): p.MsgID for p in c.pushes(bob)}
            assert len(shown) == len(sent), "each was pushed"
            assert set(shown.values()) == set(await c.fetch("SELECT msg_id FROM im_message"))
    finally:
        await server.stop()
