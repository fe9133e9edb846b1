"""Real PostgreSQL and Valkey through kill -9, leftovers, wrong passwords, taken ports, and users."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import asyncpg
import pytest
from plato.local.child import Identity, launch_command
from plato.local.servers import PostgresServer, Server, ServerError, ValkeyServer

from tests.ports import free_port

root_only = pytest.mark.skipif(os.geteuid() != 0, reason="only root changes its user id")


async def until(condition: Callable[[], Any], deadline_s: float, why: str) -> None:
    end = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < end, why
        await asyncio.sleep(0.02)


@contextlib.asynccontextmanager
async def started(server: Server) -> AsyncIterator[Server]:
    await server.start()
    try:
        yield server
    finally:
        await server.stop()


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A PostgreSQL folder that was made once and stopped: tests copy it, initdb is slow."""
    folder = tmp_path_factory.mktemp("made")
    server = PostgresServer(folder, free_port())

    async def make() -> None:
        async with started(server):
            connection = await asyncpg.connect(server.uri)
            await connection.execute("create table kept (n int)")
            await connection.close()

    asyncio.run(make())
    return folder


@pytest.fixture
def postgres(made: Path, tmp_path: Path) -> PostgresServer:
    shutil.copytree(made, tmp_path / "pg", dirs_exist_ok=True)
    return PostgresServer(tmp_path / "pg", free_port())


async def kept(server: PostgresServer) -> list[int]:
    connection = await asyncpg.connect(server.uri)
    rows = await connection.fetch("select n from kept order by n")
    await connection.close()
    return [row["n"] for row in rows]


async def put(server: PostgresServer, n: int) -> None:
    connection = await asyncpg.connect(server.uri)
    await connection.execute("insert into kept values ($1)", n)
    await connection.close()


async def test_postgres_keeps_every_commit_over_kill_9(postgres: PostgresServer) -> None:
    for n in range(3):
        await postgres.start()
        await put(postgres, n)
        assert postgres.child is not None
        postgres.kill()
        assert await postgres.child.wait() == -signal.SIGKILL
    async with started(postgres):
        assert await kept(postgres) == [0, 1, 2]


def alive(pid: int) -> bool:
    """Whether it runs. A zombie has ended, and waits for the machine's first process to take note."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    return False


def fact(pid: int | None, name: str) -> str:
    """/proc/PID/NAME."""
    return Path(f"/proc/{pid}/{name}").read_text()


async def test_postgres_starts_past_a_backend_that_outlived_it(postgres: PostgresServer) -> None:
    await postgres.start()
    connection = await asyncpg.connect(postgres.uri)
    backend = await connection.fetchval("select pg_backend_pid()")
    os.kill(backend, signal.SIGSTOP)  # does not see its postmaster die, and holds the shared memory
    postgres.kill()
    assert postgres.child is not None
    await postgres.child.wait()
    assert alive(backend)
    async with started(postgres):
        assert await kept(postgres) == []
        assert not alive(backend)
    connection.terminate()


async def test_postgres_starts_past_a_pid_file_whose_pid_is_somebody_else(postgres: PostgresServer) -> None:
    other = await asyncio.create_subprocess_exec("sleep", "60")
    try:
        (postgres.data / "postmaster.pid").write_text(f"{other.pid}\n{postgres.data}\n0\n5432\n\n127.0.0.1\n\nready\n")
        async with started(postgres):
            assert await kept(postgres) == []
        assert other.returncode is None, "the other process was harmed"
    finally:
        other.kill()
        await other.wait()


async def test_postgres_makes_its_folder_again_after_a_cut_in_the_middle(tmp_path: Path) -> None:
    half = tmp_path / "data.new"
    half.mkdir()
    (half / "PG_VERSION").write_text("18\n")
    async with started(PostgresServer(tmp_path, free_port())) as server:
        assert server.pid is not None
    assert not half.exists()


async def test_postgres_asks_for_the_password_and_listens_on_loopback_only(postgres: PostgresServer) -> None:
    async with started(postgres):
        with pytest.raises(asyncpg.InvalidPasswordError):
            await asyncpg.connect(postgres.uri.replace(postgres.password, "wrong"))
        connection = await asyncpg.connect(postgres.uri)
        shown = {
            name: await connection.fetchval(f"show {name}")
            for name in (
                "listen_addresses",
                "fsync",
                "synchronous_commit",
                "unix_socket_directories",
                "server_encoding",
            )
        }
        await connection.close()
    assert shown == {
        "listen_addresses": "127.0.0.1",
        "fsync": "on",
        "synchronous_commit": "on",
        "unix_socket_directories": "",
        "server_encoding": "UTF8",
    }


async def test_postgres_tells_a_lost_password_in_words(postgres: PostgresServer) -> None:
    (postgres.folder / "password").write_text("another\n")
    with pytest.raises(ServerError, match=r"refuses the password in .*password.*restore that file"):
        await postgres.start()
    await postgres.stop()


async def test_a_disk_without_room_for_the_data_folder_is_told_with_the_way_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    initdb = tmp_path / "initdb"
    initdb.write_text("#!/bin/sh\necho 'FATAL:  could not write: No space left on device' >&2\nexit 1\n")
    initdb.chmod(0o755)
    monkeypatch.setattr("plato.local.servers.postgres_binary", lambda _: initdb)
    with pytest.raises(ServerError, match="No space left on device; make room, or name another folder"):
        await PostgresServer(tmp_path / "pg", free_port()).start()


@pytest.mark.parametrize("kind", ["postgres", "valkey"])
async def test_a_taken_port_is_told_in_words(kind: str, postgres: PostgresServer, tmp_path: Path) -> None:
    server = postgres if kind == "postgres" else ValkeyServer(tmp_path / "valkey", free_port())
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        other: Server
        port = taken.getsockname()[1]
        other = PostgresServer(server.folder, port) if kind == "postgres" else ValkeyServer(server.folder, port)
        with pytest.raises(ServerError) as told:
            async with asyncio.timeout(20):
                await other.start()
    assert "\n" not in str(told.value)
    assert f"{kind} ended at its start" in str(told.value)
    assert "Traceback" not in str(told.value)


async def command(server: ValkeyServer, *lines: str) -> list[bytes]:
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write("".join(f"{line}\r\n" for line in (f"AUTH {server.password}", *lines)).encode())
    answers = []
    for _ in range(len(lines) + 1):
        line = await reader.readline()
        if line.startswith(b"$") and line != b"$-1\r\n":
            line = await reader.readline()
        answers.append(line.strip())
    writer.close()
    await writer.wait_closed()
    return answers[1:]


async def test_valkey_keeps_what_its_file_has_over_kill_9(tmp_path: Path) -> None:
    """What it answered is in its file at once, or within two seconds while an fsync is under way; the rest its owners write
    again (R5)."""
    server = ValkeyServer(tmp_path, free_port())

    def has(value: bytes) -> bool:
        return any(value in file.read_bytes() for file in (tmp_path / "appendonlydir").glob("*.aof"))

    for n in range(3):
        await server.start()
        assert await command(server, f"SET k{n} v{n}") == [b"+OK"]
        await until(partial(has, f"v{n}".encode()), 30, "it is never written")
        server.kill()
        assert server.child is not None
        await server.child.wait()
    async with started(server):
        assert await command(server, "GET k0", "GET k1", "GET k2") == [b"v0", b"v1", b"v2"]


async def test_valkey_starts_past_a_torn_end_of_its_file(tmp_path: Path) -> None:
    server = ValkeyServer(tmp_path, free_port())
    async with started(server):
        await command(server, "SET kept 1", "SET torn 2")
    (tail,) = (tmp_path / "appendonlydir").glob("*.incr.aof")
    with tail.open("r+b") as file:
        file.truncate(tail.stat().st_size - 3)
    async with started(server):
        assert await command(server, "GET kept", "GET torn") == [b"1", b"$-1"]


async def test_valkey_asks_for_the_password_and_never_evicts(tmp_path: Path) -> None:
    server = ValkeyServer(tmp_path, free_port())
    async with started(server):
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(b"PING\r\n")
        assert (await reader.readline()).startswith(b"-NOAUTH")
        writer.close()
        await writer.wait_closed()
        assert b"noeviction" in (tmp_path / "valkey.conf").read_bytes()
    for secret in ("password", "valkey.conf"):
        assert (tmp_path / secret).stat().st_mode & 0o077 == 0


_BOTH = """
import asyncio, sys, time
from functools import partial
from pathlib import Path
from plato.local.servers import PostgresServer, ValkeyServer
async def main():
    postgres, valkey = PostgresServer(Path(sys.argv[1]), int(sys.argv[2])), ValkeyServer(Path(sys.argv[3]), int(sys.argv[4]))
    await asyncio.gather(postgres.start(), valkey.start())
    print(postgres.pid, valkey.pid, flush=True)
    await asyncio.Event().wait()
asyncio.run(main())
"""


@contextlib.contextmanager
def owner(wrapped: Callable[[list[str]], list[str]], pg: Path, valkey: Path) -> Iterator[tuple[Any, list[int]]]:
    argv = [sys.executable, "-c", _BOTH, str(pg), str(free_port()), str(valkey), str(free_port())]
    with subprocess.Popen(wrapped(argv), stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        pids = [int(pid) for pid in process.stdout.readline().split()]
        try:
            yield process, pids
        finally:
            process.kill()


def as_ourselves(argv: list[str]) -> list[str]:
    return argv


def as_a_normal_user(argv: list[str]) -> list[str]:
    """In a user namespace of its own, where we are `nobody`: a process without any right over another user's files."""
    return launch_command(argv, Identity(map_uid=65534))


@pytest.mark.parametrize(
    "wrapped", [pytest.param(as_ourselves, id="ourselves"), pytest.param(as_a_normal_user, id="normal user")]
)
async def test_nothing_outlives_a_killed_owner(
    wrapped: Callable[[list[str]], list[str]], postgres: PostgresServer, tmp_path: Path
) -> None:
    with owner(wrapped, postgres.folder, tmp_path / "valkey") as (process, pids):
        assert len(pids) == 2
        assert [fact(pid, "comm")[:6] for pid in pids] == ["postgr", "valkey"]
        process.kill()
        process.wait()
        await until(lambda: not any(alive(pid) for pid in pids), 20, f"{pids} outlived their owner")
    async with started(postgres):
        assert await kept(postgres) == []


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that other users may pass through; pytest's own let nobody in."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o711)
        yield Path(folder)


@root_only
async def test_postgres_runs_as_another_user_where_user_namespaces_are_refused(open_folder: Path) -> None:
    server = PostgresServer(open_folder / "pg", free_port(), identity=Identity(become=(65534, 65534)))
    async with started(server):
        assert "Uid:\t65534\t65534" in fact(server.pid, "status")
        await server.stop()
        await server.start()
