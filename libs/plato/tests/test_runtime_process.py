"""How a service starts, says what is wrong, logs, and ends."""

from __future__ import annotations

import asyncio
import json
import os
import resource
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from plato.api.names import EXIT_NOT_ALONE
from plato.runtime import admin
from plato.runtime.process import CANNOT_START, PartEnded, forever
from plato.runtime.settings import SettingsError, load
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from tests.ports import free_port

_SERVICE = """
import asyncio, sys
from plato.runtime import logs
from plato.runtime.settings import NotAlone, SettingsError
from plato.runtime.process import StartError, run, until_stopped

async def main(settings):
    log = logs.get("part")
    async def work():
        await asyncio.sleep(0)  # until_stopped's own task comes next: it takes the signals
        await asyncio.sleep(0)
        print("up", flush=True)
        await asyncio.Event().wait()
    async def fail():
        raise ValueError("a fault")
    what = settings.process.name
    if what == "port":
        raise StartError("state.port: cannot listen on 127.0.0.1:1; set another one")
    if what == "astray":
        raise NotAlone("it belongs to PlatoCluster im/demo")
    log.info("serving", conn_id=2**60, msg_id=7, trace_id=b"\\x01\\xff", user="ü")
    log.debug("not shown")
    if what == "late":
        async def refuse():
            await asyncio.sleep(0.01)
            raise SettingsError("database.uri: refuses us; correct it")
        return await until_stopped([asyncio.create_task(work()), asyncio.create_task(refuse())])
    if what == "settle":
        async def every():
            await asyncio.sleep(0)  # as above
            await asyncio.sleep(0)
            while True:
                print("up", flush=True)
                turns.append(1)
                await asyncio.sleep(0.01)
        turns = []
        async def last():
            log.info("settles")
            before = len(turns)
            while len(turns) < before + 3:  # for ever, if the parts had ended
                await asyncio.sleep(0.01)
        code = await until_stopped([asyncio.create_task(every())], last)
        log.info("ends")
        return code
    if what == "limit":
        import resource
        print(*resource.getrlimit(resource.RLIMIT_NOFILE), flush=True)
        return 0
    return await until_stopped([asyncio.create_task(fail() if what == "fail" else work(), name="work")])

sys.exit(run("service", main))
"""


def start(name: str, *arguments: str, **variables: str) -> subprocess.Popen[str]:
    env = {key: value for key, value in os.environ.items() if not key.startswith("PLATO_")}
    return subprocess.Popen(
        [sys.executable, "-c", _SERVICE, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**env, "PLATO_PROCESS__NAME": name, **variables},
        cwd="/",
    )


def end(service: subprocess.Popen[str], number: int | None = None) -> tuple[int, list[str]]:
    """Waits until it is up if it should be signalled; returns its exit code and the lines of its log."""
    if number is not None:
        assert service.stdout is not None
        assert service.stdout.readline() == "up\n"
        service.send_signal(number)
    _, err = service.communicate(timeout=30)
    return service.returncode, (err or "").splitlines()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_a_service_in_order(number: int) -> None:
    code, log = end(start("plato-s0"), number)
    assert code == 0
    assert len(log) == 1


def test_what_is_to_be_done_last_is_done_while_all_parts_work() -> None:
    service = start("settle")
    assert service.stdout is not None
    assert service.stdout.readline() == "up\n"
    service.send_signal(signal.SIGTERM)
    out, log = service.communicate(timeout=30)
    assert service.returncode == 0
    assert [json.loads(line)["event"] for line in log.splitlines()][1:] == ["settles", "ends"]
    assert out.count("up") > 2


def test_logs_are_json_with_ids_as_text_and_traces_as_hex() -> None:
    _, (line,) = end(start("plato-s0"), signal.SIGTERM)
    entry: dict[str, Any] = json.loads(line)
    assert entry.pop("ts").endswith("Z")
    assert entry == {
        "event": "serving",
        "level": "info",
        "process": "plato-s0",
        "part": "part",
        "conn_id": str(2**60),
        "msg_id": "7",
        "trace_id": "01ff",
        "user": "ü",
    }


def test_what_a_part_finds_wrong_after_waiting_is_one_line_too() -> None:
    code, log = end(start("late"))
    assert code == 2
    assert log[-1] == "service: database.uri: refuses us; correct it"
    assert len(log) == 2


def test_a_service_may_open_as_many_files_as_its_machine_lets_it() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(512, hard), hard))
    try:
        service = start("limit")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    out, _ = service.communicate(timeout=30)
    assert out.split() == [str(hard), str(hard)]


def test_logs_that_cannot_be_written_end_nothing() -> None:
    with Path("/dev/full").open("w") as full:
        service = subprocess.Popen(
            [sys.executable, "-c", _SERVICE],
            stdout=subprocess.PIPE,
            stderr=full,
            text=True,
            env={**os.environ, "PLATO_PROCESS__NAME": "x"},
            cwd="/",
        )
        assert end(service, signal.SIGTERM)[0] == 0


def test_the_level_is_a_setting() -> None:
    assert len(end(start("plato-s0", PLATO_LOG__LEVEL="debug"), signal.SIGTERM)[1]) == 2
    assert end(start("plato-s0", PLATO_LOG__LEVEL="error"), signal.SIGTERM)[1] == []


def test_a_service_does_not_run_on_with_a_part_of_it_dead() -> None:
    code, log = end(start("fail"))
    assert code == 1
    entry = json.loads(log[-1])
    assert (entry["event"], entry["task"]) == ("a task ended", "work")
    assert "ValueError: a fault" in entry["exception"]


def test_settings_that_cannot_work_are_one_line_and_code_2(tmp_path: Path) -> None:
    code, log = end(start("x", PLATO_STATE__PORTT="1"))
    assert code == 2
    assert len(log) == 1
    assert log[0].startswith("service: state.portt: unknown key in PLATO_STATE__PORTT; known here: ")
    code, log = end(start("x", "--settings", str(tmp_path / "nowhere")))
    assert code == 2
    assert len(log) == 1


def test_a_machine_that_cannot_serve_is_one_line_and_a_code_of_its_own() -> None:
    code, log = end(start("port"))
    assert code == CANNOT_START
    assert log == ["service: state.port: cannot listen on 127.0.0.1:1; set another one"]


def test_another_clusters_place_has_the_migrations_code_and_nothing_else_has_it() -> None:
    """The operator reads by it why a pod ended."""
    assert end(start("astray")) == (EXIT_NOT_ALONE, ["service: it belongs to PlatoCluster im/demo"])
    assert len({EXIT_NOT_ALONE, CANNOT_START, 0, 1, 2}) == 5


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"state.fence_stop_ms": 10_000}, "state: fence_stop_ms (10000) must be below fence_stale_ms (10000)"),
        ({"state.repeat_max_ms": 60, "state.repeat_min_ms": 61}, "state: repeat_max_ms (60) must not be below"),
        ({"ipconfig.poll_ms": 3_001}, "ipconfig: silent_ms (3000) must not be below poll_ms (3001)"),
    ],
)
def test_times_that_cannot_go_together_are_refused_in_one_line(flags: dict[str, int], words: str) -> None:
    with pytest.raises(SettingsError) as told:
        load(environ={}, flags=flags)
    assert str(told.value).startswith(words)
    assert "\n" not in str(told.value)
    assert str(told.value).endswith(f"correct it in {next(iter(flags))}")


# ── the admin port ───────────────────────────────────────────────────────────────────────────────────────────


async def _get(port: int, path: str) -> tuple[int, str]:
    async with aiohttp.ClientSession() as session, session.get(f"http://127.0.0.1:{port}{path}") as answer:
        return answer.status, await answer.text()


async def test_admin_tells_health_readiness_with_its_reason_and_metrics() -> None:
    why = ["slots are loading"]

    async def more(_: Request) -> Response:
        return PlainTextResponse("more")

    port = free_port()
    server = admin.HttpServer(admin.app(lambda: why[0], [Route("/more", more)]), "127.0.0.1", port)
    await server.start()
    try:
        assert await _get(port, "/healthz") == (200, "ok\n")
        status, body = await _get(port, "/readyz")
        assert (status, json.loads(body)) == (503, {"ready": False, "reason": "slots are loading"})
        why[0] = ""
        status, body = await _get(port, "/readyz")
        assert (status, json.loads(body)) == (200, {"ready": True, "reason": ""})
        assert "# TYPE python_info gauge" in (await _get(port, "/metrics"))[1]
        assert await _get(port, "/more") == (200, "more")
        for odd in ("%0A", "%0D%0A", "%01", "%E2%80%A8", "%00"):
            assert (await _get(port, f"/more{odd}"))[0] == 404, (
                "it is another path, for who keeps paths from strangers too"
            )
    finally:
        await server.stop()
    with pytest.raises(aiohttp.ClientError):
        await _get(port, "/healthz")


async def test_admin_says_at_once_that_its_port_is_taken() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        server = admin.HttpServer(admin.app(lambda: ""), "127.0.0.1", taken.getsockname()[1])
        with pytest.raises(OSError, match="in use"):
            await server.start()


async def test_admin_leaves_the_signals_of_the_process_alone() -> None:
    before = signal.getsignal(signal.SIGTERM)
    server = admin.HttpServer(admin.app(lambda: ""), "127.0.0.1", free_port())
    await server.start()
    assert signal.getsignal(signal.SIGTERM) is before
    await asyncio.wait_for(server.stop(), 10)


async def test_a_part_that_ends_by_itself_is_an_error_however_it_ends() -> None:
    async def returns() -> None:
        return None

    async def is_cancelled_from_within() -> None:
        future = asyncio.get_running_loop().create_future()
        future.cancel()
        await future

    for part in (returns, is_cancelled_from_within):

        async def process(part: Callable[[], Coroutine[None, None, None]] = part) -> None:
            async with asyncio.TaskGroup() as group:
                group.create_task(forever("part", part()))
                group.create_task(asyncio.Event().wait())

        with pytest.raises(ExceptionGroup) as raised:
            await process()
        assert isinstance(raised.value.exceptions[0], PartEnded)


async def test_a_part_that_is_cancelled_by_its_owner_just_ends() -> None:
    task = asyncio.create_task(forever("part", asyncio.Event().wait()))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


@pytest.mark.parametrize("sent", [b"", b"GET /healthz HTTP/1.1\r\nhost: x\r\n\r\n"])
async def test_a_socket_that_brings_no_whole_head_is_closed_however_often_it_says_a_byte(
    sent: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else one peer takes all descriptors, and who asks for the list of gateways finds the door shut."""

    def hasty() -> str:
        monkeypatch.setattr(admin, "HEAD_S", 0.2)
        return ""

    if sent:  # the first head may take its time, on a busy machine; the one after its answer is short of it
        monkeypatch.setattr(admin, "HEAD_S", 20.0)
    else:
        hasty()
    port = free_port()
    server = admin.HttpServer(admin.app(lambda: "", ill=hasty), "127.0.0.1", port)
    await server.start()
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(sent)
        if sent:
            assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200")
            await reader.readexactly(3)
        end = asyncio.create_task(reader.read())
        async with asyncio.timeout(20):
            while not end.done():
                writer.write(b"G")
                await asyncio.sleep(0.02)
        assert end.exception() is not None or end.result() == b""
        writer.close()
    finally:
        await server.stop()
