"""`python -m plato_state` on real servers: it starts, serves, releases, and says in one line what stops it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import sys
import urllib.error
import urllib.request
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import asyncpg
import grpc
import pytest
from plato.adapters import schema_pg, tokens, topology_file
from plato.adapters.owner import Owner
from plato.adapters.valkey import ValkeyStore
from plato.api.names import EXIT_NOT_ALONE
from plato.core import frames
from plato.core.codes import Code
from plato.topology.record import Shard, Topology, even_ranges
from plato.wire.v1 import client_pb2 as pb
from plato.wire.v1 import state_pb2, state_pb2_grpc
from redis import Redis
from state_harness import ALL_SLOTS, BEGIN, DATA, END, OPENED, Received, command, unpack, up

from tests.ports import free_port

PREFIX = "state-process:"


@dataclass
class Place:
    """Everything that a state process needs around it."""

    folder: Path
    environment: dict[str, str]
    port: int
    admin_port: int
    valkey_url: str
    epoch: int = 1
    processes: list[asyncio.subprocess.Process] = field(default_factory=list)

    def topology(self, uid: str) -> None:
        self.epoch += 1
        record = Topology("c", self.epoch, even_ranges(["s0"], 1), {"s0": Shard(f"127.0.0.1:{self.port}", uid)})
        topology_file.write(self.folder / "topology.json", record)

    async def run(self, uid: str, **more: str) -> asyncio.subprocess.Process:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "plato_state",
            env={**self.environment, "PLATO_PROCESS__UID": uid, **more},
            cwd=self.folder,
            stderr=asyncio.subprocess.PIPE,
        )
        self.processes.append(process)
        return process

    async def get(self, path: str) -> tuple[int, str]:
        def ask() -> tuple[int, str]:
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{self.admin_port}{path}", timeout=20) as reply:
                    return reply.status, reply.read().decode()
            except urllib.error.HTTPError as e:
                with e:
                    return e.code, e.read().decode()
            except OSError as e:
                return 0, str(e)

        return await asyncio.to_thread(ask)

    async def ready(self) -> None:
        deadline = asyncio.get_running_loop().time() + 30
        while (answer := await self.get("/readyz"))[0] != 200:
            assert asyncio.get_running_loop().time() < deadline, answer
            await asyncio.sleep(0.02)


@pytest.fixture
async def place(tmp_path: Path, postgres_uri: str, valkey_url: str) -> AsyncIterator[Place]:
    schema = "state_process"
    await schema_pg.migrate(postgres_uri, schema, 4)
    tokens.make_dev_key(tmp_path / "keys")
    port, admin_port = free_port(), free_port()
    environment = {
        **{k: v for k, v in os.environ.items() if not k.startswith("PLATO_")},
        "PLATO_PROCESS__NAME": "s0",
        "PLATO_TOPOLOGY__PATH": str(tmp_path / "topology.json"),
        "PLATO_AUTH__KEYS_DIR": str(tmp_path / "keys"),
        "PLATO_STATE__PORT": str(port),
        "PLATO_STATE__ADMIN_PORT": str(admin_port),
        "PLATO_DATABASE__URI": postgres_uri,
        "PLATO_DATABASE__SCHEMA_NAME": schema,
        "PLATO_BUS__PARTITIONS": "4",
        "PLATO_STORE__URL": valkey_url,
        "PLATO_STORE__KEY_PREFIX": PREFIX,
    }
    made = Place(tmp_path, environment, port, admin_port, valkey_url)
    made.topology("u1")
    yield made
    for process in made.processes:  # nothing is left, whatever the test came to
        if process.returncode is None:
            process.kill()
            await process.communicate()


async def end(process: asyncio.subprocess.Process, number: int = signal.SIGKILL) -> tuple[int, str]:
    """Ends a process; its exit code and what it said."""
    with contextlib.suppress(ProcessLookupError):
        process.send_signal(number)
    _, err = await asyncio.wait_for(process.communicate(), 30)
    return process.returncode or 0, err.decode()


async def talk(place: Place, conn_id: int, *payloads: bytes) -> list[Any]:
    """A link that opens one connection, sends frames one after another, and returns what came, one answer for each."""
    async with grpc.aio.insecure_channel(f"127.0.0.1:{place.port}") as channel:
        stub: Any = state_pb2_grpc.StateStub(channel)
        call = stub.Attach()
        await call.write(state_pb2.LinkBatch(hello=state_pb2.LinkHello(gateway="g", uid="u", worker_id=7, workers=1)))
        events = [(BEGIN, 0, ALL_SLOTS), (END, 0, b""), (OPENED, conn_id, b"t")]
        got: list[Any] = []
        for payload in payloads:
            events.append((DATA, conn_id, frames.pack(payload)))
            batch = state_pb2.LinkBatch()
            batch.events.add(
                worker=0,
                boot=1,
                attach=1,
                kinds=bytes(k for k, _, _ in events),
                conn_ids=b"".join(c.to_bytes(8, "little") for _, c, _ in events),
                lengths=b"".join(len(d).to_bytes(4, "little") for _, _, d in events),
                data=b"".join(d for _, _, d in events),
            )
            await call.write(batch)
            events = []
            wanted = len(got) + 1
            while len(got) < wanted:
                reply = await asyncio.wait_for(call.read(), 20)
                assert isinstance(reply, state_pb2.StateBatch), call
                acks = (Received(frame, closes) for _, frame, closes in unpack(reply))
                got += [r for r in acks if r.kind == pb.ACK and r.code != Code.PENDING]
                await call.write(state_pb2.LinkBatch(taken=reply.batch_no))
        call.cancel()
    return got


async def test_it_serves_over_real_servers_and_a_restart_finds_what_it_left(place: Place) -> None:
    token = tokens.issue(place.folder / "keys", "dev", "alice", "plato", "plato", 60)
    login = command(pb.LOGIN, pb.LoginMsg(Head=pb.LoginMsgHead(DeviceID=2**64 - 1), token=token))
    sync = command(pb.SYNC, pb.SyncMsg(ref=1))
    process = await place.run("u1")
    try:
        await place.ready()
        answers = await talk(place, 1 << 22 | 7 << 12 | 5, login, sync, up("c", 1), up("c", 2))
        assert [(a.message.Type, a.code) for a in answers] == [(pb.LOGIN, 0), (pb.SYNC, 0), (pb.UP, 0), (pb.UP, 0)]
        deadline = asyncio.get_running_loop().time() + 20
        while 'plato_state_slots{state="loaded"} 1024.0' not in (text := (await place.get("/metrics"))[1]):
            assert asyncio.get_running_loop().time() < deadline, text
            await asyncio.sleep(0.02)
        assert 'plato_state_uplinks_total{code="ok"} 2.0' in text
        assert "plato_state_bus_append_seconds_count" in text
    finally:
        code, said = await end(process)
    place.topology("u2")
    process = await place.run("u2")
    try:
        await place.ready()
        secret = answers[0].message.secret
        resume = pb.ReConnMsg(Head=pb.ReConnMsgHead(ConnID=answers[0].message.ConnID), secret=secret)
        again = await talk(place, 2 << 22 | 7 << 12 | 6, command(pb.RECONN, resume), sync, up("c", 3, acked=2))
        assert [(a.message.Type, a.code) for a in again] == [(pb.RECONN, 0), (pb.SYNC, 0), (pb.UP, 0)]
    finally:
        code, said = await end(process, signal.SIGTERM)
    assert code == 0, said
    for line in said.splitlines():
        assert json.loads(line)["level"] in ("info", "warning"), line
    store = await ValkeyStore.connect(place.valkey_url, PREFIX)
    assert all(view.released for view in await store.sessions.look(range(1024)))
    await store.close()


@pytest.mark.parametrize("which", ["STATE__PORT", "STATE__ADMIN_PORT"])
async def test_a_port_in_use_is_told_in_one_line(place: Place, which: str) -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = str(holder.getsockname()[1])
        process = await place.run("u1", **{f"PLATO_{which}": port})
        _, err = await asyncio.wait_for(process.communicate(), 30)
    lines = [line for line in err.decode().splitlines() if not line.startswith("{")]
    assert process.returncode not in (0, None)
    assert len(lines) == 1, err
    assert port in lines[0]
    assert which.lower().replace("__", ".") in lines[0]


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({"PLATO_PROCESS__NAME": ""}, "process.name"),
        ({"PLATO_BUS__PARTITIONS": "8"}, "partitions"),
        ({"PLATO_AUTH__KEYS_DIR": "/nowhere/keys"}, "auth.keys_dir"),
    ],
)
async def test_settings_that_cannot_work_are_told_in_one_line(
    place: Place, variables: dict[str, str], words: str
) -> None:
    process = await place.run("u1", **variables)
    _, err = await asyncio.wait_for(process.communicate(), 30)
    lines = [line for line in err.decode().splitlines() if not line.startswith("{")]
    assert process.returncode == 2
    assert len(lines) == 1, err
    assert words in lines[0]


@pytest.mark.parametrize("where", ["schema", "store"])
async def test_what_belongs_to_another_cluster_is_refused_before_anything_is_written(
    place: Place, postgres_uri: str, where: str
) -> None:
    """Somebody edits the Secret, and a pod restarts before any Job has looked. Its fences would be greater than theirs."""
    theirs, prefix = Owner("im/demo"), f"{PREFIX}{where}:"
    place.environment |= {"PLATO_DATABASE__SCHEMA_NAME": f"state_{where}", "PLATO_STORE__KEY_PREFIX": prefix}
    await schema_pg.migrate(postgres_uri, f"state_{where}", 4, theirs if where == "schema" else None)
    store, connection = await ValkeyStore.connect(place.valkey_url, prefix), await asyncpg.connect(postgres_uri)
    try:
        if where == "store":
            await store.claim(theirs)

        async def written() -> tuple[list[bytes], str]:
            with Redis.from_url(place.valkey_url) as held:
                keys = sorted(held.keys(f"{prefix}*"))
            return keys, str(await connection.fetch(f"SELECT * FROM state_{where}.meta ORDER BY key"))

        before = await written()
        process = await place.run("u1", PLATO_CLUSTER="shop/demo")
        _, err = await asyncio.wait_for(process.communicate(), 30)
        assert process.returncode == EXIT_NOT_ALONE, err
        last = err.decode().splitlines()[-1]
        assert last.startswith("plato-state: ")
        for words in (where, "belongs to PlatoCluster im/demo", "give shop/demo another", "correct the Secret"):
            assert words in last
        assert await written() == before
        if where == "store":  # its own mark there, and none in the database
            process = await place.run("u1", PLATO_CLUSTER="im/demo")
            await place.ready()
            await end(process)
    finally:
        await store.close()
        await connection.close()


async def test_it_waits_in_words_for_a_schema_that_is_migrated_beside_it(place: Place, postgres_uri: str) -> None:
    process = await place.run("u1", PLATO_DATABASE__SCHEMA_NAME="state_later")
    try:
        deadline = asyncio.get_running_loop().time() + 30
        while "plato db migrate" not in (answer := (await place.get("/readyz"))[1]):
            assert asyncio.get_running_loop().time() < deadline, answer
            await asyncio.sleep(0.02)
        assert (await place.get("/healthz"))[0] == 200
        await schema_pg.migrate(postgres_uri, "state_later", 4)
        await place.ready()
    finally:
        await end(process)


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({"PLATO_STORE__URL": "redis://127.0.0.1:1/0"}, "store"),
        ({"PLATO_DATABASE__URI": "postgresql://plato@127.0.0.1:1/plato"}, "database plato at 127.0.0.1:1"),
    ],
)
async def test_a_signal_ends_it_while_it_waits_for_what_is_away(
    place: Place, variables: dict[str, str], words: str
) -> None:
    process = await place.run("u1", **variables)
    deadline = asyncio.get_running_loop().time() + 30
    while words not in (answer := (await place.get("/readyz"))[1]):
        assert asyncio.get_running_loop().time() < deadline, answer
        await asyncio.sleep(0.02)
    code, said = await end(process, signal.SIGTERM)
    assert code == 0, said


async def test_a_stopped_process_that_wakes_serves_on(place: Place) -> None:
    """R10 for the whole process: SIGSTOP, SIGCONT, and it proves itself before anything is lost."""
    process = await place.run("u1")
    try:
        await place.ready()
        process.send_signal(signal.SIGSTOP)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(process.wait(), 4)
        process.send_signal(signal.SIGCONT)
        await place.ready()
        token = tokens.issue(place.folder / "keys", "dev", "alice", "plato", "plato", 60)
        login = command(pb.LOGIN, pb.LoginMsg(Head=pb.LoginMsgHead(DeviceID=1), token=token))
        (answer,) = await talk(place, 3 << 22 | 7 << 12 | 5, login)
        assert answer.code == 0
    finally:
        await end(process)
