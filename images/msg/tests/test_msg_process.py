"""`python -m plato_msg` as a process: what it says when it cannot start, and that it serves on real servers when it can."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any
from uuid import uuid4

import asyncpg
import grpc
import pytest
import yaml
from msg_harness import until, up
from plato.adapters import topology_file
from plato.adapters.bus_pg import PgBusProducer
from plato.adapters.owner import Owner
from plato.adapters.pg import Database
from plato.adapters.schema_pg import migrate
from plato.adapters.valkey import ValkeyStore
from plato.api.names import EXIT_NOT_ALONE
from plato.core.codes import Code
from plato.core.conversations import partition_of
from plato.topology.record import Msg, Topology, even_ranges
from plato.wire.v1 import client_pb2 as wire
from plato.wire.v1 import msg_pb2, msg_pb2_grpc
from redis import Redis

from tests.ports import free_port

PARTITIONS = 8
UID = "uid-1"


class Setup:
    """Settings of one msg process on the session's servers, in a schema and under a key prefix of its own."""

    def __init__(self, folder: Path, postgres_uri: str, valkey_url: str) -> None:
        self.folder = folder
        self.uri = postgres_uri
        self.blockers: list[asyncio.Server] = []
        self.processes: list[asyncio.subprocess.Process] = []
        self.schema = f"process_{uuid4().hex[:10]}"
        self.grpc_port, self.http_port = free_port(), free_port()
        self.settings: dict[str, dict[str, Any]] = {
            "process": {"name": "msg-0", "uid": UID},
            "topology": {"path": str(folder / "topology.json")},
            "msg": {"grpc_port": self.grpc_port, "http_port": self.http_port},
            "database": {"uri": postgres_uri, "schema_name": self.schema},
            "store": {"url": valkey_url, "key_prefix": f"{self.schema}:"},
            "bus": {"partitions": PARTITIONS},
        }

    def name_it(self, uid: str = UID, epoch: int = 1) -> None:
        """Writes a topology that names the process."""
        topology = Topology(
            "test", epoch, even_ranges(["s0"], 1), msgs={"msg-0": Msg(uid, 7, f"127.0.0.1:{self.grpc_port}")}
        )
        topology_file.write(self.folder / "topology.json", topology)

    async def start(self, **more: str) -> asyncio.subprocess.Process:
        path = self.folder / "plato.yaml"
        path.write_text(yaml.safe_dump(self.settings), encoding="utf-8")
        environment = {k: v for k, v in os.environ.items() if not k.startswith("PLATO_")}
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "plato_msg",
            "--settings",
            str(path),
            stderr=asyncio.subprocess.PIPE,
            env={**environment, **more},
        )
        self.processes.append(process)
        return process

    async def block(self) -> int:
        """A port that somebody else listens on."""
        self.blockers.append(await asyncio.start_server(lambda r, w: None, "127.0.0.1", 0))
        port: int = self.blockers[-1].sockets[0].getsockname()[1]
        return port

    async def end(self) -> None:
        """Leaves nothing, whatever the test came to."""
        for process in self.processes:
            if process.returncode is None:
                process.kill()
                await process.communicate()

    async def get(self, path: str, port: int = 0) -> tuple[int, str]:
        """Status and body of the admin port, or of another one; (0, "") while it does not listen."""
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", port or self.http_port)
        except OSError:
            return 0, ""
        writer.write(f"GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode())
        answer = (await reader.read()).decode()
        writer.close()
        head, _, body = answer.partition("\r\n\r\n")
        return int(head.split()[1]), body

    async def ready(self) -> bool:
        return (await self.get("/readyz"))[0] == 200


@pytest.fixture
async def setup(tmp_path: Path, postgres_uri: str, valkey_url: str) -> AsyncIterator[Setup]:
    made = Setup(tmp_path, postgres_uri, valkey_url)
    yield made
    await made.end()


Break = Callable[[Setup], Coroutine[Any, Any, Any]]


async def newer_schema(s: Setup) -> None:
    await asyncpg_execute(s, f"UPDATE {s.schema}.meta SET value = '99' WHERE key IN ('schema_version', 'readable_by')")


async def other_partitions(s: Setup) -> None:
    s.settings["bus"]["partitions"] = 16


async def wrong_password(s: Setup) -> None:
    head, _, tail = s.uri.rpartition("@")
    s.settings["database"]["uri"] = head.rpartition(":")[0] + ":wrong@" + tail


async def wrong_store_password(s: Setup) -> None:
    s.settings["store"]["url"] = "redis://:wrong@" + s.settings["store"]["url"].rpartition("@")[2]


async def grpc_port_in_use(s: Setup) -> None:
    s.settings["msg"]["grpc_port"] = await s.block()


async def http_port_in_use(s: Setup) -> None:
    s.settings["msg"]["http_port"] = await s.block()


async def nameless(s: Setup) -> None:
    s.settings["process"] = {}


async def unknown_key(s: Setup) -> None:
    s.settings["msg"]["prot"] = 1


async def asyncpg_execute(s: Setup, sql: str) -> None:
    connection = await asyncpg.connect(s.uri)
    await connection.execute(sql)
    await connection.close()


@pytest.mark.parametrize(
    ("broken", "words"),
    [
        (newer_schema, "newer version of Plato"),
        (other_partitions, "bus.partitions: 16 cannot be used"),
        (wrong_password, "database.uri"),
        (wrong_store_password, "store"),
        (grpc_port_in_use, "msg.grpc_port"),
        (http_port_in_use, "msg.http_port"),
        (nameless, "process.name"),
        (unknown_key, "msg.prot"),
    ],
    ids=lambda p: getattr(p, "__name__", ""),
)
async def test_what_cannot_start_says_so_in_one_line(setup: Setup, broken: Break, words: str) -> None:
    await migrate(setup.uri, setup.schema, PARTITIONS)
    setup.name_it()
    await broken(setup)
    process = await setup.start()
    async with asyncio.timeout(30):
        _, stderr = await process.communicate()
    for blocker in setup.blockers:
        blocker.close()
    assert process.returncode not in (0, None)
    lines = stderr.decode().splitlines()
    assert len(lines) == 1, lines
    assert lines[0].startswith("plato-msg: ")
    assert words in lines[0]
    assert "wrong@" not in lines[0]
    assert ":wrong" not in lines[0]


@pytest.mark.parametrize("where", ["schema", "store"])
async def test_what_belongs_to_another_cluster_is_refused_before_anything_is_written(setup: Setup, where: str) -> None:
    """Somebody edits the Secret, and a pod restarts before any Job has looked: it would write messages among theirs."""
    theirs, prefix = Owner("im/demo"), setup.settings["store"]["key_prefix"]
    await migrate(setup.uri, setup.schema, PARTITIONS, theirs if where == "schema" else None)
    store = await ValkeyStore.connect(setup.settings["store"]["url"], prefix)
    if where == "store":
        await store.claim(theirs)
    await store.close()

    async def written() -> tuple[list[bytes], str]:
        with Redis.from_url(setup.settings["store"]["url"]) as held:
            keys = sorted(held.keys(f"{prefix}*"))
        connection = await asyncpg.connect(setup.uri)
        # The bus is noted by whoever checks a schema first; with a store that is another's, the schema is still its own.
        of_theirs = f"SELECT * FROM {setup.schema}.meta WHERE key <> 'bus' OR $1 ORDER BY key"
        rows = str(await connection.fetch(of_theirs, where == "schema"))
        await connection.close()
        return keys, rows

    before = await written()
    setup.name_it()
    process = await setup.start(PLATO_CLUSTER="shop/demo")
    async with asyncio.timeout(30):
        _, stderr = await process.communicate()
    assert process.returncode == EXIT_NOT_ALONE, stderr
    last = stderr.decode().splitlines()[-1]
    assert last.startswith("plato-msg: ")
    for words in (where, "belongs to PlatoCluster im/demo", "give shop/demo another", "correct the Secret"):
        assert words in last
    assert await written() == before
    if where == "schema":  # its own mark there, and none in the store
        await setup.start(PLATO_CLUSTER="im/demo")
        await until(setup.ready)


async def test_it_waits_in_words_for_a_schema_that_is_migrated_beside_it(setup: Setup) -> None:
    setup.name_it()
    process = await setup.start()
    try:

        async def says_so() -> bool:
            return "plato db migrate" in (await setup.get("/readyz"))[1]

        await until(says_so)
        status, body = await setup.get("/admin/v1/groups?name=x")  # a door of its own, which writes
        assert status == 503
        assert "plato db migrate" in body
        assert (await setup.get("/healthz"))[0] == 200
        await migrate(setup.uri, setup.schema, PARTITIONS)
        await until(setup.ready)
    finally:
        process.terminate()
        async with asyncio.timeout(30):
            _, stderr = await process.communicate()
    assert process.returncode == 0, stderr.decode()


async def test_a_signal_ends_it_while_it_waits(setup: Setup) -> None:
    setup.settings["store"]["url"] = "redis://127.0.0.1:1/0"
    await migrate(setup.uri, setup.schema, PARTITIONS)
    process = await setup.start()

    async def says_so() -> bool:
        return "store" in (await setup.get("/readyz"))[1]

    await until(says_so)
    process.terminate()
    async with asyncio.timeout(30):
        _, stderr = await process.communicate()
    assert process.returncode == 0, stderr.decode()


@pytest.fixture
async def running(setup: Setup) -> tuple[Setup, asyncio.subprocess.Process]:
    await migrate(setup.uri, setup.schema, PARTITIONS)
    return setup, await setup.start()


async def test_a_process_serves_once_it_is_named_and_stops_in_order(
    running: tuple[Setup, asyncio.subprocess.Process],
) -> None:
    setup, process = running
    await until(lambda: answers(setup, 503))
    assert (await setup.get("/healthz"))[0] == 200
    setup.name_it("another uid")
    channel = grpc.aio.insecure_channel(f"127.0.0.1:{setup.grpc_port}")
    stub: msg_pb2_grpc.MsgAsyncStub = msg_pb2_grpc.MsgStub(channel)
    try:
        await until(lambda: not_named(setup))
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await stub.Sync(msg_pb2.SyncRequest(user_id="bob"))
        assert refused.value.code() == grpc.StatusCode.UNAVAILABLE
        setup.name_it(epoch=2)
        await until(setup.ready)
        message = up("alice", "bob", b"hello")
        database = Database(setup.uri, setup.schema)
        producer = PgBusProducer(database, PARTITIONS)
        partition = partition_of(message.conversation_id, PARTITIONS)
        await producer.append({partition: [message.SerializeToString()]})

        async def synced() -> bool:
            return bool((await stub.Sync(msg_pb2.SyncRequest(user_id="bob"))).items)

        await until(synced)
        pulled = await stub.Pull(
            msg_pb2.PullRequest(user_id="bob", pull=wire.PullMsg(conversation_id=message.conversation_id))
        )
        assert [row.Content for row in pulled.rows] == [b"hello"]
        refusal = await stub.Pull(msg_pb2.PullRequest(user_id="bob", pull=wire.PullMsg(conversation_id="x")))
        assert refusal.code == Code.NOT_A_MEMBER
        process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(30):
            _, stderr = await process.communicate()
        assert process.returncode == 0, stderr.decode()
        async with database.connection() as connection:
            assert await connection.fetchval("SELECT count(*) FROM bus_owner WHERE owner <> ''") == 0, "it gave all up"
        await database.close()
        events = [json.loads(line) for line in stderr.decode().splitlines()]
        assert all(e["process"] == "msg-0" for e in events)
    finally:
        await channel.close(None)


async def answers(setup: Setup, status: int) -> bool:
    return (await setup.get("/readyz"))[0] == status


async def not_named(setup: Setup) -> bool:
    return "does not name" in (await setup.get("/readyz"))[1]


async def test_r11_what_the_database_promises_is_shown(running: tuple[Setup, asyncio.subprocess.Process]) -> None:
    setup, process = running
    setup.name_it()
    await until(setup.ready)
    _, body = await setup.get("/readyz")
    assert json.loads(body) == {
        "ready": True,
        "reason": "",
        "durability": "single node: promises process crashes only",
    }
    _, metrics = await setup.get("/metrics")
    assert 'plato_msg_durability{level="process"} 1.0' in metrics
    assert 'plato_msg_durability{level="node"} 0.0' in metrics
    for name in ("records_total", "batch_seconds", "lag_records", "fanout_entries", "dirty_shards", "partitions_owned"):
        assert f"plato_msg_{name}" in metrics
    process.send_signal(signal.SIGTERM)
    async with asyncio.timeout(30):
        _, stderr = await process.communicate()
    shown = [e for e in map(json.loads, stderr.decode().splitlines()) if "promises process crashes only" in e["event"]]
    assert [(e["level"], e["durability"]) for e in shown] == [("warning", "process")]


async def test_people_have_a_port_of_their_own_with_nothing_else_on_it_and_the_other_has_nothing_for_them(
    tmp_path: Path,
) -> None:
    """It listens while the database and the store are away, and says so to people."""
    nobody, api_port = free_port(), free_port()
    made = Setup(tmp_path, f"postgresql://x@127.0.0.1:{nobody}/x", f"redis://127.0.0.1:{nobody}/0")
    made.settings["msg"]["api_port"] = api_port
    process = await made.start()
    try:
        async with asyncio.timeout(30):
            while (await made.get("/openapi.json", api_port))[0] != 200:  # noqa: ASYNC110 - of another process
                await asyncio.sleep(0.05)
        internal = {path: (await made.get(path))[0] for path in ("/healthz", "/metrics", "/v1/report")}
        assert internal == {"/healthz": 200, "/metrics": 200, "/v1/report": 200}
        assert (await made.get("/readyz"))[0] == 503
        for path in ("/healthz", "/metrics", "/readyz", "/admin/v1/groups?name=x"):
            assert (await made.get(path, api_port))[0] == 404, path
        assert (await made.get("/v1/conversations", api_port))[0] == 503
        for path in ("/v1/conversations", "/openapi.json"):
            assert (await made.get(path))[0] == 404, path
        process.send_signal(signal.SIGTERM)
        await process.communicate()
        assert process.returncode == 0
    finally:
        await made.end()
