"""The whole pod as it runs: parent, workers and link as processes, against a shard that echoes."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from array import array
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
import websockets
from plato.adapters.topology_file import write
from plato.core.frames import pack, split
from plato.fakes.alone import Alone
from plato.local.logs import reason
from plato.runtime.settings import Settings, dump
from plato.topology.record import Gateway, Shard, Topology, even_ranges
from plato.wire.v1 import canned, state_pb2, state_pb2_grpc
from plato_gateway import preflight
from plato_gateway.core import lanes
from plato_gateway.pod import Pod

DEADLINE_S = 50.0
WORKERS = 2


class Echo(Alone):
    """A shard that sends each payload back, as Push would go, with a suffix."""

    def __init__(self) -> None:
        self.until_ms = 0
        self.kinds: list[tuple[int, int]] = []
        """(kind, conn_id) of all but DATA."""

    async def Attach(self, requests: Any, context: Any) -> Any:
        batch_no = 0
        async for batch in requests:
            if not batch.batch_no:
                continue
            batch_no += 1
            payloads: list[bytes] = []
            rows: dict[int, list[tuple[int, int]]] = {}
            for e in batch.events:
                at = 0
                for kind, conn_id, n in zip(e.kinds, array("Q", e.conn_ids), array("I", e.lengths), strict=True):
                    data = e.data[at : at + n]
                    at += n
                    if kind != lanes.DATA:
                        self.kinds.append((kind, conn_id))
                        continue
                    for payload in split(data):
                        rows.setdefault(e.worker, []).append((conn_id, len(payloads)))
                        payloads.append(payload)
            out = state_pb2.StateBatch(batch_no=batch_no, taken=batch.batch_no, payload_data=b"".join(payloads))
            out.payload_lengths = array("I", map(len, payloads)).tobytes()
            for index, entries in rows.items():
                out.frames.add(
                    worker=index,
                    conn_ids=array("Q", [c for c, _ in entries]).tobytes(),
                    payload_index=array("I", [i for _, i in entries]).tobytes(),
                    suffix_lengths=bytes([1] * len(entries)),
                    suffix_data=b"+" * len(entries),
                    flags=bytes(len(entries)),
                )
            yield out

    async def Reserve(self, request: state_pb2.ReserveRequest, context: Any) -> state_pb2.ReserveReply:
        from_ms = max(self.until_ms, time.time_ns() // 1_000_000 if not self.until_ms else 0)
        self.until_ms = max(from_ms, time.time_ns() // 1_000_000 + request.ahead_ms)
        return state_pb2.ReserveReply(ok=True, from_ms=from_ms, until_ms=self.until_ms)


class RunningPod:
    """A pod, its shard, its settings file."""

    def __init__(self, settings: Settings, process: subprocess.Popen[bytes], shard: Echo) -> None:
        self.settings = settings
        self.process = process
        self.shard = shard

    @property
    def pids(self) -> dict[str, Any]:
        path = self.settings.gateway.run_dir / "pids.json"
        made: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {"pod": 0, "link": 0, "workers": []}
        return made

    @property
    def workers_met(self) -> int:
        """How many workers had a connection: worker k mints where slot % W == k."""
        return len({conn_id % 1024 % WORKERS for kind, conn_id in self.shard.kinds if kind == lanes.OPENED})

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """A connection that is let in, which the first seconds of a gateway may refuse."""
        end_s = time.monotonic() + DEADLINE_S
        while True:
            assert time.monotonic() < end_s, "nobody lets us in"
            try:
                reader, writer = await asyncio.open_connection("127.0.0.1", self.settings.gateway.tcp_port)
            except OSError:
                await asyncio.sleep(0.02)
                continue
            if await echo(reader, writer, b"hello") == b"hello+":
                return reader, writer
            writer.close()
            await asyncio.sleep(0.02)


async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, payload: bytes) -> bytes:
    """Sends a payload, again each second as clients do (R3), and gives its answer or a refusal; b"" at the stream's end.
    An answer to what was repeated earlier is passed over."""
    end_s = time.monotonic() + DEADLINE_S
    while time.monotonic() < end_s:
        try:
            writer.write(pack(payload))
            while True:
                async with asyncio.timeout(1):
                    header = await reader.readexactly(4)
                answer = await reader.readexactly(int.from_bytes(header, "big"))
                if answer == payload + b"+" or not answer.endswith(b"+"):
                    return answer
        except TimeoutError:
            continue
        except (asyncio.IncompleteReadError, ConnectionError):
            return b""
    raise AssertionError(f"no answer within {DEADLINE_S} s")


async def until(condition: Callable[[], bool], what: str) -> None:
    end_s = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < end_s, f"not within {DEADLINE_S} s: {what}"
        await asyncio.sleep(0.01)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(") ", 1)[1][0] != "Z"
    except FileNotFoundError:
        return False


@pytest.fixture
async def pod(make_settings: Callable[..., Settings], tmp_path: Path) -> AsyncIterator[RunningPod]:
    async with running(make_settings(workers=WORKERS), tmp_path) as found:
        yield found


@asynccontextmanager
async def running(settings: Settings, tmp_path: Path, *, others: int = 0) -> AsyncIterator[RunningPod]:
    """A pod and its shard. others: gateways that the record names besides."""
    shard = Echo()
    server = grpc.aio.server()
    state_pb2_grpc.add_StateServicer_to_server(shard, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    g = settings.gateway
    own = Gateway("uid-0", 3, WORKERS, ("s0",), "127.0.0.1", g.tcp_port, g.ws_port, f"127.0.0.1:{g.admin_port}")
    gateways = {f"edge-{n}": replace(own, uid=f"uid-{n}", worker_id=3 + n) for n in range(1 + others)}
    topology = Topology("c", 1, even_ranges(["s0"], 1), {"s0": Shard(f"127.0.0.1:{port}", "u")}, gateways)
    write(settings.topology.path, topology)
    file = tmp_path / "plato.yaml"
    file.write_text(dump(settings))
    process = await asyncio.to_thread(
        subprocess.Popen, [sys.executable, "-m", "plato_gateway", "--settings", str(file)]
    )
    try:
        yield RunningPod(settings, process, shard)
    finally:
        process.kill()
        process.wait()
        await server.stop(None)


async def test_a_killed_link_costs_its_clients_nothing_but_time(pod: RunningPod) -> None:
    clients = [await pod.connect() for _ in range(20)]
    for turn in range(3):
        link = pod.pids["link"]
        os.kill(link, signal.SIGKILL)
        answers = await asyncio.gather(*(echo(r, w, b"turn %d" % turn) for r, w in clients))
        assert answers == [b"turn %d+" % turn] * 20
        await until(lambda: pod.pids["link"] not in (0, link), "the next one is named")  # noqa: B023 -- it ends in here
    assert sum(kind == lanes.OPENED for kind, _ in pod.shard.kinds) == len(
        {c for k, c in pod.shard.kinds if k == lanes.OPENED}
    )
    for _, writer in clients:
        writer.close()


async def test_a_killed_worker_closes_its_sockets_and_is_replaced(pod: RunningPod) -> None:
    clients = [await pod.connect() for _ in range(20)]
    while pod.workers_met < WORKERS:  # at the start one of them may be alone for a while
        assert len(clients) < 500, "one worker gets every connection"
        clients.append(await pod.connect())
    victim = pod.pids["workers"][0]
    os.kill(victim, signal.SIGKILL)
    answers = await asyncio.gather(*(echo(r, w, b"after") for r, w in clients))
    assert set(answers) == {b"", b"after+"}, "one worker's clients are cut, the other's served"
    await until(lambda: pod.pids["workers"][0] not in (0, victim), "another took its place")
    again = [await pod.connect() for _ in range(20)]
    ids = [c for k, c in pod.shard.kinds if k == lanes.OPENED]
    assert len(ids) == len(set(ids)), "no conn_id was given twice"
    for _, writer in (*clients, *again):
        writer.close()


async def test_a_pods_list_of_processes_that_cannot_be_written_costs_no_socket(pod: RunningPod) -> None:
    reader, writer = await pod.connect()
    link, workers = pod.pids["link"], pod.pids["workers"]
    in_the_way = pod.settings.gateway.run_dir / "pids.json.new"
    in_the_way.mkdir()  # as bad as a full disk: the file cannot be written
    os.kill(link, signal.SIGKILL)
    assert await echo(reader, writer, b"after") == b"after+"
    assert pod.process.poll() is None
    in_the_way.rmdir()
    await until(lambda: pod.pids["link"] not in (0, link), "the list is written when it can be")
    assert pod.pids["workers"] == workers
    assert pod.pids["ended"] == {"link": -signal.SIGKILL}
    writer.close()


def test_a_child_that_cannot_start_ends_the_pod_however_slow_it_was_and_says_why(
    make_settings: Callable[..., Settings],
) -> None:
    """On a busy machine a start takes longer than SETTLED_S; the refused setting went round in circles there, untold."""
    settings = make_settings(workers=1)
    settings.gateway.run_dir.mkdir()
    said = settings.gateway.run_dir / "pids.json"
    own = Pod(settings, [])
    own._others = []
    own._bury_orphans = lambda: None  # type: ignore[method-assign]  # this process has children that are not the pod's
    (child,) = own._workers
    pipes: set[str] = set()

    def ends(code: int, words: str) -> int:
        """One child of it, which ran for a minute and ended so; what the pod makes of it."""
        child.command = [
            sys.executable,
            "-ISc",
            f"import os, sys; os.write(int(sys.argv[-1]), {words.encode()!r}); os._exit({code})",
        ]
        child.start_at_s = 0.0
        own._start_due()
        pipes.add(str(Path(f"/proc/self/fd/{child.words_fd}").readlink()))
        child.started_s -= 60
        assert child.process is not None
        os.waitid(os.P_PID, child.process.pid, os.WEXITED | os.WNOWAIT)
        return own._reap()

    assert ends(preflight.CANNOT_START, "tls.client_dir: no") == preflight.CANNOT_START
    assert ends(1, "OSError: what") == 0
    assert ends(preflight.CANNOT_START, "tls.client_dir: gone") == 0, "the others' sockets live"
    assert json.loads(said.read_text())["words"] == {"worker-0": "tls.client_dir: gone"}
    assert json.loads(said.read_text())["ended"] == {"worker-0": preflight.CANNOT_START}
    assert len(pipes) == 3
    assert pipes.isdisjoint(_open_files()), "both ends of each are closed"


def _open_files() -> set[str]:
    """What this process has open, by name; other tests' left-overs come and go with the garbage collector."""
    found = set()
    for fd in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            found.add(str(fd.readlink()))
    return found


async def test_a_gateway_without_its_certificate_ends_with_the_reason_as_its_last_error(
    make_settings: Callable[..., Settings], tmp_path: Path
) -> None:
    settings = make_settings(workers=WORKERS)
    settings = settings.model_copy(update={"tls": settings.tls.model_copy(update={"client_dir": tmp_path / "missing"})})
    file = tmp_path / "plato.yaml"
    file.write_text(dump(settings))
    own = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "plato_gateway", "--settings", str(file), stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    try:
        async with asyncio.timeout(60):
            output, _ = await own.communicate()
    finally:
        if own.returncode is None:
            own.kill()
            await own.wait()
    assert own.returncode == preflight.CANNOT_START
    assert reason(output.decode()).startswith(
        f"cannot start: tls.client_dir: {tmp_path / 'missing'} has no usable tls.crt"
    )


async def test_a_killed_pod_leaves_no_process(pod: RunningPod) -> None:
    _, writer = await pod.connect()
    pids = pod.pids
    everyone = [pids["link"], *pids["workers"]]
    assert pids["pod"] == pod.process.pid
    assert all(alive(p) for p in everyone)
    pod.process.kill()
    await until(lambda: not any(alive(p) for p in everyone), "its children ended")
    writer.close()


async def test_sigterm_says_goodbye_and_ends_with_code_0(pod: RunningPod) -> None:
    reader, writer = await pod.connect()
    everyone = [pod.pids["link"], *pod.pids["workers"]]
    pod.process.send_signal(signal.SIGTERM)
    said = await reader.read()
    while said.startswith(pack(b"hello+")):  # answers to what `connect` repeated
        said = said.removeprefix(pack(b"hello+"))
    assert said == pack(canned.GATEWAY_CLOSING)
    writer.close()
    assert await asyncio.to_thread(pod.process.wait, DEADLINE_S) == 0
    assert not any(alive(p) for p in everyone)
    # The link has ended; what it told last may still be on its way here.
    await until(lambda: any(k == lanes.CLOSED for k, _ in pod.shard.kinds), "the shard was told before the link ended")
    assert not (pod.settings.gateway.run_dir / "pids.json").exists()


async def test_another_librarys_websocket_client_sends_and_receives(pod: RunningPod) -> None:
    _, writer = await pod.connect()
    uri = f"ws://127.0.0.1:{pod.settings.gateway.ws_port}/ws"
    async with websockets.connect(uri, compression="deflate", origin=websockets.Origin("http://localhost:9")) as client:
        assert client.response is not None
        assert "Sec-WebSocket-Extensions" not in client.response.headers
        for payload in (b"a", b"b" * 125, b"c" * 126, b"d" * 65_000):
            await client.send(payload)
            assert await client.recv() == payload + b"+"
        await client.send([b"in ", b"three ", b"parts"])
        assert await client.recv() == b"in three parts+"
        await (await client.ping())
    assert client.close_code == 1000
    opened = len([k for k, _ in pod.shard.kinds if k == lanes.OPENED])
    await until(lambda: any(k == lanes.CLOSED for k, _ in pod.shard.kinds), "the shard hears of its end")
    async with websockets.connect(uri) as client:
        await client.send("text")
        with pytest.raises(websockets.ConnectionClosedError) as refused:
            await client.recv()
        assert refused.value.rcvd is not None
        assert refused.value.rcvd.code == 1003
    async with websockets.connect(uri) as client:
        await client.send(b"x" * (pod.settings.gateway.max_frame_bytes + 1))
        assert await client.recv() == canned.FRAME_SIZE
        with pytest.raises(websockets.ConnectionClosedError) as refused:
            await client.recv()
        assert refused.value.rcvd is not None
        assert refused.value.rcvd.code == 1009
    with pytest.raises(websockets.InvalidStatus) as turned_away:
        await websockets.connect(uri, origin=websockets.Origin("https://evil.example"))
    assert turned_away.value.response.status_code == 403
    # The worker closes by itself, so what it tells the shard may come after what it told the peer.
    await until(
        lambda: len([k for k, _ in pod.shard.kinds if k == lanes.OPENED]) >= opened + 2, "the shard hears of both"
    )
    assert len([k for k, _ in pod.shard.kinds if k == lanes.OPENED]) == opened + 2
    writer.close()


# ── what must be right before it starts ──────────────────────────────────────────────────────────────────────


def start_and_fail(settings: Settings, tmp_path: Path) -> tuple[int, str]:
    file = tmp_path / "plato.yaml"
    file.write_text(dump(settings))
    ended = subprocess.run(
        [sys.executable, "-m", "plato_gateway", "--settings", str(file)], capture_output=True, timeout=30, check=False
    )
    return ended.returncode, ended.stderr.decode()


@pytest.mark.parametrize("key", ["tcp_port", "ws_port", "admin_port"])
def test_a_port_in_use_is_told_in_one_line(key: str, make_settings: Callable[..., Settings], tmp_path: Path) -> None:
    settings = make_settings()
    port = getattr(settings.gateway, key)
    with socket.socket() as taken:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        taken.bind(("127.0.0.1", port))
        taken.listen()
        code, said = start_and_fail(settings, tmp_path)
    assert code == 3
    assert said == (
        f"plato-gateway: gateway.{key}: port {port} on 127.0.0.1 is in use; "
        f"stop what listens there or set gateway.{key} to a free port\n"
    )


def test_a_run_dir_that_cannot_be_made_is_told_in_one_line(
    make_settings: Callable[..., Settings], tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    code, said = start_and_fail(make_settings(run_dir=str(tmp_path / "file" / "run")), tmp_path)
    assert code == 3
    assert said.startswith("plato-gateway: gateway.run_dir: ")
    assert said.count("\n") == 1


def test_bad_settings_are_told_in_one_line(make_settings: Callable[..., Settings], tmp_path: Path) -> None:
    file = tmp_path / "plato.yaml"
    file.write_text("gateway:\n  workers: 3\n")
    ended = subprocess.run(
        [sys.executable, "-m", "plato_gateway", "--settings", str(file)], capture_output=True, timeout=30, check=False
    )
    assert ended.returncode == 2
    assert ended.stderr.decode().startswith("plato-gateway: gateway.workers: 3 cannot be used")


def test_free_ports_and_a_writable_folder_pass(make_settings: Callable[..., Settings]) -> None:
    settings = make_settings()
    preflight.check(settings.gateway)
    assert list(settings.gateway.run_dir.iterdir()) == []


async def refused(pod: RunningPod) -> bool:
    """Whether a newcomer is told that this gateway closes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", pod.settings.gateway.tcp_port)
    try:
        return await echo(reader, writer, b"new") == canned.GATEWAY_CLOSING
    finally:
        writer.close()


async def test_a_sigterm_that_drains_keeps_who_is_here_and_a_second_one_ends_at_once(
    make_settings: Callable[..., Settings], tmp_path: Path
) -> None:
    settings = make_settings(workers=WORKERS, drain_on_term=True, drain_settle_s=0)
    async with running(settings, tmp_path, others=1) as pod:
        reader, writer = await pod.connect()
        pod.process.send_signal(signal.SIGTERM)
        end_s = time.monotonic() + DEADLINE_S
        while not await refused(pod):
            assert time.monotonic() < end_s, "newcomers are let in"
        os.kill(pod.pids["link"], signal.SIGKILL)  # the next one knows, too
        assert await echo(reader, writer, b"still here") == b"still here+"
        assert await refused(pod)
        assert pod.process.poll() is None
        pod.process.send_signal(signal.SIGTERM)
        assert await asyncio.to_thread(pod.process.wait, DEADLINE_S) == 0
        assert (await reader.read()).endswith(pack(canned.GATEWAY_CLOSING))  # after answers to what was repeated
        writer.close()


async def test_a_sigterm_that_drains_ends_by_itself_when_nobody_is_left(
    make_settings: Callable[..., Settings], tmp_path: Path
) -> None:
    settings = make_settings(workers=WORKERS, drain_on_term=True)
    async with running(settings, tmp_path, others=1) as pod:
        _, writer = await pod.connect()
        pod.process.send_signal(signal.SIGTERM)
        end_s = time.monotonic() + DEADLINE_S
        while not await refused(pod):
            assert time.monotonic() < end_s, "newcomers are let in"
        assert pod.process.poll() is None
        writer.close()
        assert await asyncio.to_thread(pod.process.wait, DEADLINE_S) == 0


async def test_a_sigterm_with_nowhere_to_go_ends_at_once(
    make_settings: Callable[..., Settings], tmp_path: Path
) -> None:
    settings = make_settings(workers=WORKERS, drain_on_term=True)
    async with running(settings, tmp_path) as pod:
        reader, writer = await pod.connect()
        pod.process.send_signal(signal.SIGTERM)
        assert await asyncio.to_thread(pod.process.wait, DEADLINE_S) == 0
        assert (await reader.read()).endswith(pack(canned.GATEWAY_CLOSING))  # after answers to what was repeated
        writer.close()
