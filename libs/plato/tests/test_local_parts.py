"""The parts of the embedded cluster one by one: ports, folder, topology, keepers, logs, control."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import errno
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from plato.local import control, keeper, logs, pods, probe, specs
from plato.local.child import Child
from plato.local.deaths import LINES_PER_WINDOW, WINDOW_S, Deaths, how
from plato.local.folder import DataFolder, LocalError
from plato.local.keeper import ServiceKeeper
from plato.local.ports import PortUse, blocked, check_free, free_offset, in_the_way, plan, release_offset, shard_name
from plato.local.registry import Registry, homes, parse_slots
from plato.local.servers import Server
from plato.runtime.settings import Settings, load
from plato.topology.record import Move, loads

from tests.ports import free_port


def settings(**flags: Any) -> Settings:
    return load(environ={}, flags={key.replace("__", "."): value for key, value in flags.items()})


async def until(condition: Callable[[], Any], deadline_s: float, why: str) -> None:
    end = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < end, why
        await asyncio.sleep(0.02)


# ── ports ────────────────────────────────────────────────────────────────────────────────────────────────────


def test_ports_are_those_of_the_table_and_the_second_instance_is_ten_higher() -> None:
    ports = {key: use.port for key, use in plan(settings()).items()}
    assert {ports["edge-0.tcp"], ports["edge-0.ws"], ports["edge-0.admin"]} == {8900, 8901, 8909}
    assert {ports["edge-1.tcp"], ports["edge-1.ws"], ports["edge-1.admin"]} == {8910, 8911, 8919}
    assert (ports["plato-s0.grpc"], ports["plato-s1.grpc"]) == (8902, 8912)
    assert (ports["plato-msg-0.http"], ports["plato-msg-1.http"]) == (8903, 8913)
    assert (ports["ipconfig"], ports["ipconfig.internal"]) == (8904, 8905)


@pytest.mark.parametrize("count", [1, 2, 5, 16])
def test_no_two_processes_want_one_port_whatever_their_number(count: int) -> None:
    uses = plan(settings(local__shards=count, local__gateways=count, local__msgs=count, local__port_offset=1_000))
    ports = [use.port for use in uses.values()]
    assert len(set(ports)) == len(ports)
    assert min(ports) >= 9_900


def test_a_port_in_use_is_named_with_its_setting_its_holder_and_the_way_out() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        told = blocked(PortUse("edge-0.tcp", "gateway.tcp_port", "127.0.0.1", port))
    assert f"port {port} (gateway.tcp_port, for edge-0.tcp) is in use by " in told
    assert f"(process {os.getpid()})" in told
    assert "local.port_offset" in told


@pytest.mark.parametrize(("offset", "advised"), [(0, 1_000), (1_000, 2_000), (7_345, 8_345)])
def test_who_moved_every_port_already_is_told_of_another_offset(offset: int, advised: int) -> None:
    use = plan(settings(local__port_offset=offset))["web"]
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        use = dataclasses.replace(use, port=taken.getsockname()[1])
        for told in (blocked(use), *in_the_way([use, dataclasses.replace(use, key="again")])):
            assert f"`plato up --port-offset {advised}`" in told


def test_a_shared_listener_counts_as_taken() -> None:
    with socket.socket() as taken:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(LocalError, match="is in use"):
            check_free([PortUse("edge-0.tcp", "gateway.tcp_port", "127.0.0.1", taken.getsockname()[1])])


def test_many_ports_of_one_holder_are_one_line() -> None:
    uses = []
    with contextlib.ExitStack() as taken:
        for n in range(6):
            sock = taken.enter_context(socket.socket())
            sock.bind(("127.0.0.1", 0))
            sock.listen()
            uses.append(PortUse(f"edge-{n}.tcp", "gateway.tcp_port", "127.0.0.1", sock.getsockname()[1]))
        (told,) = in_the_way(uses)
        assert "… (6 in all) are in use by " in told
        assert f"(process {os.getpid()}); stop that, or move every port with `plato up --port-offset 1000`" in told
        assert in_the_way(uses[:1]) == [blocked(uses[0])]
    assert in_the_way(uses) == []


def test_an_address_that_is_not_ours_is_named() -> None:
    told = blocked(PortUse("edge-0.tcp", "gateway.tcp_port", "203.0.113.9", 8900))
    assert told.startswith("gateway.tcp_port: cannot listen on 203.0.113.9:8900")
    assert os.strerror(errno.EADDRNOTAVAIL) in told


def test_a_free_offset_is_free() -> None:
    offset = free_offset(settings())
    check_free(plan(settings(local__port_offset=offset)).values())
    release_offset(offset)


def test_an_offset_is_told_once_until_it_is_released(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two clusters that begin at the same time, in one process or two: none listens yet."""
    lanes = iter([205, 205, 206])  # above those that are told: another run may hold any of them
    monkeypatch.setattr("random.randrange", lambda *_: next(lanes))
    assert free_offset(settings()) == 20_500
    other = "from plato.local import ports; print(ports._claim(20_500), ports._claim(20_600))"
    told = subprocess.run([sys.executable, "-c", other], capture_output=True, text=True, check=True).stdout
    assert told == "False True\n"
    assert free_offset(settings()) == 20_600, "it ended, and its claim with it"
    for offset in (20_500, 20_600):
        release_offset(offset)
    told = subprocess.run([sys.executable, "-c", other], capture_output=True, text=True, check=True).stdout
    assert told == "True True\n"


# ── the folder ───────────────────────────────────────────────────────────────────────────────────────────────


def test_a_folder_keeps_its_identity_and_shows_secrets_to_nobody(tmp_path: Path) -> None:
    folder = DataFolder(tmp_path / "data")
    uid = folder.prepare()
    assert folder.prepare() == uid
    for private in (folder.keys, folder.run, folder.logs):
        assert private.stat().st_mode & 0o077 == 0


def test_the_lock_holds_off_a_second_one_and_names_the_first(tmp_path: Path) -> None:
    folder = DataFolder(tmp_path)
    folder.prepare()
    assert folder.running() is None
    with folder.locked():
        assert folder.running() == os.getpid()
        with pytest.raises(LocalError, match=rf"already running in .* \(process {os.getpid()}\)"), folder.locked():
            pytest.fail("two hold the lock")
    assert folder.running() is None


def test_a_folder_that_we_make_may_be_passed_and_one_that_was_there_keeps_its_mode(tmp_path: Path) -> None:
    DataFolder(tmp_path / "a" / "new").prepare()
    assert (tmp_path / "a" / "new").stat().st_mode & 0o777 == 0o711
    empty = tmp_path / "empty"
    empty.mkdir()
    empty.chmod(0o755)
    (empty / "lost+found").mkdir()
    folder = DataFolder(empty)
    uid = folder.prepare()
    assert folder.prepare() == uid
    assert empty.stat().st_mode & 0o777 == 0o755
    assert all(p.stat().st_mode & 0o077 == 0 for p in empty.iterdir() if p.name != "lost+found"), (
        "what is ours is private"
    )


def test_a_folder_without_our_mark_is_left_alone(tmp_path: Path) -> None:
    for name in ("e", "a", "c", "b"):
        (tmp_path / name).touch()
    with pytest.raises(LocalError, match=r"is not empty and not Plato's: it holds a, b, c, … and no plato.json"):
        DataFolder(tmp_path).prepare()
    assert len(list(tmp_path.iterdir())) == 4


def test_a_status_that_nobody_writes_any_more_does_not_say_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = time.time()
    monkeypatch.setattr("plato.local.folder.time", SimpleNamespace(time=lambda: now_s))
    folder = DataFolder(tmp_path)
    folder.prepare()
    with folder.locked():
        for age_s, phase in ((1, "up"), (60, "silent for 60 s")):
            told = {"supervisor_pid": os.getpid(), "phase": "up", "at": now_s - age_s}
            folder.status.write_text(json.dumps(told))
            assert str((folder.read_status() or {})["phase"]).startswith(phase)


@pytest.mark.parametrize(
    ("info", "words"),
    [
        ('{"format": 2, "plato": "3.0", "cluster_uid": "x"}', r"made by Plato 3\.0 \(format 2\)"),
        ("{", "cannot be read"),
        ("[]", "cannot be read"),
        ('{"format": "x", "plato": "3.0", "cluster_uid": "x"}', "cannot be read"),
    ],
)
def test_data_that_are_not_of_this_version_are_refused(tmp_path: Path, info: str, words: str) -> None:
    (tmp_path / "plato.json").write_text(info)
    with pytest.raises(LocalError, match=words):
        DataFolder(tmp_path).prepare()


def test_data_without_their_identity_are_not_taken_for_new(tmp_path: Path) -> None:
    folder = DataFolder(tmp_path)
    folder.prepare()
    (folder.postgres / "data").mkdir()
    folder.info.unlink()
    with pytest.raises(LocalError, match="restore it"):
        folder.prepare()


def test_sockets_have_a_short_path_however_deep_the_folder_lies(tmp_path: Path) -> None:
    assert DataFolder(Path("/var/lib/plato")).sockets == Path("/var/lib/plato/run")
    deep = DataFolder(tmp_path / ("x" * 60) / ("y" * 60))
    deep.prepare()
    try:
        assert deep.sockets != deep.run
        assert len(os.fsencode(deep.sockets / "edge-15" / "link.sock")) < 107
        assert deep.sockets.stat().st_mode & 0o077 == 0
    finally:
        deep.sockets.rmdir()


def test_a_status_of_a_dead_supervisor_is_no_status(tmp_path: Path) -> None:
    folder = DataFolder(tmp_path)
    folder.prepare()
    folder.status.write_text(json.dumps({"supervisor_pid": os.getpid()}))
    assert folder.read_status() is None
    with folder.locked():
        assert folder.read_status() == {"supervisor_pid": os.getpid()}
        folder.status.write_text(json.dumps({"supervisor_pid": 1}))
        assert folder.read_status() is None


# ── the topology ─────────────────────────────────────────────────────────────────────────────────────────────


def registry(path: Path, **flags: Any) -> Registry:
    chosen = settings(**flags)
    return Registry(path / "topology.json", "cluster", chosen, plan(chosen))


def test_each_start_has_a_new_uid_that_is_on_disk_before_it(tmp_path: Path) -> None:
    own = registry(tmp_path)
    first = own.renew(["plato-s0", "plato-s1", "edge-0", "edge-1", "plato-msg-0", "plato-msg-1", "plato-ipconfig-0"])
    assert len(set(first.values())) == 7
    record = loads((tmp_path / "topology.json").read_text())
    assert {n: s.uid for n, s in record.shards.items()} == {n: first[n] for n in ("plato-s0", "plato-s1")}
    assert [(g.worker_id, g.tcp, g.admin) for g in record.gateways.values()] == [
        (0, 8900, "127.0.0.1:8909"),
        (1, 8910, "127.0.0.1:8919"),
    ]
    assert [(m.worker_id, m.addr) for m in record.msgs.values()] == [(600, "127.0.0.1:8907"), (601, "127.0.0.1:8917")]
    second = own.renew(["plato-s1"])
    after = loads((tmp_path / "topology.json").read_text())
    assert after.shards["plato-s1"].uid == second["plato-s1"] != first["plato-s1"]
    assert after.shards["plato-s0"].uid == first["plato-s0"]
    assert after.epoch > record.epoch
    assert after.slots == record.slots


def test_slots_keep_their_epoch_over_a_restart_and_are_assigned_anew_for_other_shards(tmp_path: Path) -> None:
    first = registry(tmp_path)
    first.renew(["plato-s0", "plato-s1"])
    again = registry(tmp_path)
    assert again.topology.slots == first.topology.slots
    assert again.topology.epoch > first.topology.epoch
    again.renew(["plato-s0"])
    three = registry(tmp_path, local__shards=3)
    assert {r.shard for r in three.topology.slots} == {"plato-s0", "plato-s1", "plato-s2"}
    assert all(r.epoch == three.topology.epoch > again.topology.epoch for r in three.topology.slots)


def test_a_move_is_one_write_that_stands_over_restarts(tmp_path: Path) -> None:
    first = registry(tmp_path)
    first.renew(["plato-s0", "plato-s1"])
    before = first.topology
    assert first.move(parse_slots("0-3,9"), "plato-s1") == [0, 1, 2, 3, 9]
    record = loads((tmp_path / "topology.json").read_text())
    assert record.epoch > before.epoch
    assert {s for s, e in record.slots_of("plato-s1").items() if e == record.epoch} == {0, 1, 2, 3, 9}
    assert record.move == Move(record.epoch, ((0, 3), (9, 9)), "plato-s0", "plato-s1", record.epoch)
    assert first.move(parse_slots("0-3"), "plato-s1") == []
    first.move(range(1024), "plato-s1")
    again = registry(tmp_path)
    assert again.topology.slots == first.topology.slots  # though one shard has none now
    for slots, shard in (("0", "plato-s7"), ("", "plato-s0"), ("5-x", "plato-s0"), ("1020-1024", "plato-s0")):
        with pytest.raises(LocalError):
            first.move(parse_slots(slots), shard)


def test_epochs_rise_though_the_clock_goes_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = registry(tmp_path)
    first.renew(["plato-s0"])
    monkeypatch.setattr(time, "time", lambda: 1_000_000.0)
    again = registry(tmp_path)
    assert again.topology.epoch == first.topology.epoch + 1
    again.renew(["plato-s0"])
    assert again.topology.epoch == first.topology.epoch + 2


@pytest.mark.parametrize(("text", "words"), [("{", "cannot be read"), (None, "another cluster's")])
def test_a_record_that_is_not_ours_is_refused(tmp_path: Path, text: str | None, words: str) -> None:
    own = registry(tmp_path)
    own.renew(["plato-s0"])
    if text is not None:
        (tmp_path / "topology.json").write_text(text)
    with pytest.raises(LocalError, match=words):
        Registry(tmp_path / "topology.json", "other", settings(), plan(settings()))


@given(st.integers(1, 16), st.integers(1, 16))
def test_every_shard_is_somebodys_home_and_no_gateway_is_without(gateways: int, shards: int) -> None:
    all_homes = [homes(g, gateways, shards) for g in range(gateways)]
    assert {name for own in all_homes for name in own} == {shard_name(s) for s in range(shards)}
    assert all(all_homes)
    sizes = [len(own) for own in all_homes]
    assert max(sizes) - min(sizes) <= 1


# ── settings of a process ────────────────────────────────────────────────────────────────────────────────────


def test_each_process_gets_the_users_settings_with_its_own_ports(tmp_path: Path) -> None:
    folder = DataFolder(tmp_path)
    folder.prepare()
    chosen = settings(state__heartbeat_ms=777, local__port_offset=100)
    base = specs.effective(chosen, folder, "postgresql://x", "redis://y")
    found = {spec.name: spec for spec in specs.write_all(base, folder, plan(chosen))}
    assert set(found) == {
        "plato-ipconfig-0", "edge-0", "edge-1", "plato-s0", "plato-s1", "plato-msg-0", "plato-msg-1"
    }  # fmt: skip
    read = {name: load(folder.run / f"{name}.yaml", environ={}) for name in found}
    assert all(own.state.heartbeat_ms == 777 and own.database.uri == "postgresql://x" for own in read.values())
    assert all(own.topology.path == folder.topology and own.auth.keys_dir == folder.keys for own in read.values())
    assert read["edge-1"].gateway.tcp_port == 9_010
    assert read["edge-1"].gateway.run_dir != read["edge-0"].gateway.run_dir
    assert read["plato-s1"].state.port == 9_012
    assert read["plato-msg-1"].msg.grpc_port == 9_017
    assert all((folder.run / f"{name}.yaml").stat().st_mode & 0o077 == 0 for name in found), "they hold passwords"


def test_what_a_user_sets_in_vain_is_named() -> None:
    assert specs.overruled(settings()) == []
    chosen = settings(database__uri="postgresql://x", store__url="redis://y", auth__keys_dir="k", gateway__workers=1)
    assert specs.overruled(chosen) == ["auth.keys_dir", "database.uri", "store.url"]


def test_no_variable_of_the_user_reaches_a_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PLATO_STATE__PORT", "1")
    monkeypatch.setenv("PLATO_PROCESS__UID", "old")
    spec = specs.Spec("plato-s0", "state", ("x",), tmp_path / "log", PortUse("a", "b", "c", 1))
    env = spec.environment("new")
    assert {key: value for key, value in env.items() if key.startswith("PLATO_")} == {
        "PLATO_PROCESS__NAME": "plato-s0",
        "PLATO_PROCESS__UID": "new",
    }


# ── keepers ──────────────────────────────────────────────────────────────────────────────────────────────────


class Kept:
    """A keeper of a small program, and what it said."""

    def __init__(self, folder: Path, code: str) -> None:
        self.said: list[str] = []
        self.marker = folder / "starts"
        program = f"open({str(self.marker)!r}, 'a').write('x')\n{code}"
        self.admin = PortUse("plato-s0.admin", "state.admin_port", "127.0.0.1", free_port())
        spec = specs.Spec("plato-s0", "state", (sys.executable, "-c", program), folder / "log", self.admin)
        self.died: list[tuple[str, str]] = []
        self.keeper = ServiceKeeper(
            spec, registry(folder), self.said.append, lambda: None, lambda name, how: self.died.append((name, how))
        )

    @property
    def starts(self) -> int:
        return self.marker.stat().st_size if self.marker.exists() else 0


@contextlib.asynccontextmanager
async def keeping(folder: Path, code: str) -> AsyncIterator[Kept]:
    kept = Kept(folder, code)
    kept.keeper.begin()
    try:
        yield kept
    finally:
        await kept.keeper.end(5)
    assert kept.keeper.pid is None


SLEEP = "import time\ntime.sleep(600)"


async def test_one_that_keeps_dying_is_slowed_down_and_its_last_words_are_told(tmp_path: Path) -> None:
    code = "import sys\nsys.exit('state: database.uri: refused; correct it')"
    async with keeping(tmp_path, code) as kept:
        await until(lambda: kept.said, 20, "nothing was told")
        assert kept.said[0] == "plato-s0 ended 3 times before it served: database.uri: refused; correct it"
        assert kept.starts >= 3
        began, before = time.monotonic(), kept.starts
        await until(lambda: kept.starts >= before + 2, 20, "it was given up")
        assert time.monotonic() - began > 0.3, "no back-off"
        assert (
            kept.keeper.why.startswith("it ended: database.uri: refused")
            or kept.keeper.why == "it is starting"
            or (kept.keeper.why == "it does not answer")
        )


async def test_one_that_is_killed_comes_back_at_once_with_a_new_uid(tmp_path: Path) -> None:
    async with keeping(tmp_path, SLEEP) as kept:
        await until(lambda: kept.starts == 1 and kept.keeper.pid is not None, 20, "not started")
        pid = kept.keeper.pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        await until(lambda: kept.starts == 2 and kept.keeper.pid not in (None, pid), 20, "not started again")
        assert kept.keeper.restarts == 1
        assert not kept.said
        assert kept.died == [("plato-s0", "signal 9")]


async def test_one_that_was_stopped_stays_stopped_though_it_will_not_hear(tmp_path: Path) -> None:
    async with keeping(tmp_path, SLEEP) as kept:
        await until(lambda: kept.starts == 1 and kept.keeper.pid is not None, 20, "not started")
        kept.keeper.pause()
        await until(lambda: kept.keeper.pid is None, 20, "it runs on")
        assert (kept.keeper.restarts, kept.keeper.wanted) == (0, False)
        kept.keeper.begin()
        await until(lambda: kept.starts == 2, 20, "not started again")


async def test_ready_follows_the_process(tmp_path: Path) -> None:
    code = (
        "import http.server, json, os, sys\n"
        "class H(http.server.BaseHTTPRequestHandler):\n"
        "    def do_GET(self):\n"
        "        body = json.dumps({'ready': False, 'reason': 'slots are loading'}).encode()\n"
        "        ready = os.path.exists(sys.argv[1])\n"
        "        self.send_response(200 if ready else 503)\n"
        "        self.send_header('Content-Length', str(len(body)))\n"
        "        self.end_headers()\n"
        "        self.wfile.write(body)\n"
        "http.server.HTTPServer(('127.0.0.1', int(sys.argv[2])), H).serve_forever()\n"
    )
    kept = Kept(tmp_path, code)
    spec = kept.keeper.spec
    argv = (*spec.argv, str(tmp_path / "go"), str(kept.admin.port))
    kept.keeper.spec = specs.Spec(spec.name, spec.kind, argv, spec.log, spec.admin)
    kept.keeper.begin()
    try:
        await until(lambda: kept.keeper.why == "slots are loading", 20, kept.keeper.why)
        assert not kept.keeper.ready
        (tmp_path / "go").touch()
        await until(lambda: kept.keeper.ready, 20, kept.keeper.why)
        assert kept.keeper.why == ""
        assert kept.keeper.pid is not None
        os.kill(kept.keeper.pid, signal.SIGKILL)
        (tmp_path / "go").unlink()
        await until(lambda: not kept.keeper.ready, 20, "a dead one passes for ready")
    finally:
        await kept.keeper.end(5)


async def test_a_child_that_ignores_the_order_to_end_is_killed(tmp_path: Path) -> None:
    code = "import signal, time\nsignal.signal(15, signal.SIG_IGN)\nprint('deaf', flush=True)\ntime.sleep(600)"
    child = Child([sys.executable, "-c", code], log=tmp_path / "log")
    await until(lambda: "deaf" in child.output(), 20, "not started")
    assert await child.stop(timeout_s=0.1) == -signal.SIGKILL


async def test_a_program_that_is_not_there_says_so(tmp_path: Path) -> None:
    child = Child(["/nowhere/postgres"], log=tmp_path / "log")
    assert await child.wait() == 126
    assert child.output().strip() == "cannot start /nowhere/postgres: No such file or directory"


def test_a_loop_of_deaths_is_told_a_few_times_and_then_counted() -> None:
    deaths = Deaths()
    lines = [deaths.told("edge-0/worker-1", how(-9), 0.1 * n) for n in range(10)]
    assert lines[0] == "edge-0/worker-1 ended (signal 9), started again"
    assert lines[LINES_PER_WINDOW:] == [None] * (10 - LINES_PER_WINDOW)
    assert deaths.told("plato-s0", how(1), 1.0) == "plato-s0 ended (exit code 1), started again", "each by itself"
    told = deaths.told("edge-0/worker-1", "", WINDOW_S + 1)
    assert told == "edge-0/worker-1 ended, after 7 more that were not told, started again"
    assert deaths.told("edge-0/worker-1", "", WINDOW_S + 2) == "edge-0/worker-1 ended, started again"


class OneServer(Server):
    """A server that is a sleeping program, and answers or not as the test says."""

    name = "postgres"
    reply = True

    async def spawn(self) -> Child:
        self._child = Child([sys.executable, "-c", SLEEP], log=self.log)
        return self._child

    async def answers(self) -> bool:
        return self.reply

    def reason(self) -> str:
        return ""


async def test_a_server_that_hangs_or_has_no_room_does_not_count_as_serving(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = OneServer(tmp_path, 1)
    kept = keeper.ServerKeeper(server, lambda _: None, lambda: None, look_every_s=0.02)
    kept.begin()
    try:
        await until(lambda: kept.ready, 20, "it does not serve")
        server.reply = False
        await until(lambda: not kept.ready, 20, "a hanging server counts as serving")
        assert kept.why == "it does not answer"
        server.reply = True
        await until(lambda: kept.ready, 20, "it does not serve again")
        monkeypatch.setattr(keeper, "FULL_DISK_BYTES", 1 << 62)
        await until(lambda: not kept.ready, 20, "a full disk counts as serving")
        assert kept.why.startswith("its disk is full: ")
        assert kept.restarts == 0
    finally:
        await kept.end(5)


# ── logs, pods, control, probe ───────────────────────────────────────────────────────────────────────────────


def line(**fields: str) -> str:
    return json.dumps(fields) + "\n"


@pytest.mark.parametrize(
    ("output", "reason"),
    [
        ("", "it wrote nothing"),
        ("state: gateway.x: unknown key\n", "gateway.x: unknown key"),
        ("Traceback (most recent call last):\n  File\nOSError: [Errno 28] full\n", "OSError: [Errno 28] full"),
        (
            line(level="error", event="a task ended", exception="Traceback\nValueError: bad"),
            "a task ended: ValueError: bad",
        ),
        (line(level="error", event="stop", reason="fenced") + line(level="info", event="x"), "stop: fenced"),
    ],
)
def test_the_reason_is_the_line_that_tells_most(output: str, reason: str) -> None:
    assert logs.reason(output) == reason


def test_a_large_log_is_set_aside_at_a_start_and_cut_while_it_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logs, "KEEP_BYTES", 10)
    monkeypatch.setattr(logs, "CUT_BYTES", 10)
    log = tmp_path / "x.log"
    for n in range(5):
        log.write_text(f"{n}" * 20)
        logs.rotate(log)
        assert not log.exists()
    assert [(tmp_path / f"x.log.{i}").read_text()[0] for i in (1, 2, 3)] == ["4", "3", "2"]
    assert len(list(tmp_path.iterdir())) == 3
    with log.open("a") as file:
        file.write("a" * 20)
        file.flush()
        logs.cut(log)
        assert log.stat().st_size == 0
        file.write("b")
        file.flush()
    assert log.read_text() == "b"
    logs.rotate(log)
    assert log.exists(), "a small log stays"


def test_pids_of_a_gateway_are_followed_and_restarts_counted(tmp_path: Path) -> None:
    path = tmp_path / "pids.json"
    died: list[tuple[str, str]] = []
    watch = pods.PodWatch("edge-0", path, lambda name, how: died.append((name, how)))
    watch.look()
    assert watch.processes(True, "") == []
    me = os.getpid()
    path.write_text(json.dumps({"pod": 1, "link": me, "workers": [me, 0]}))
    watch.look()
    by_name = {e["name"]: e for e in watch.processes(False, "no shard")}
    assert set(by_name) == {"edge-0/link", "edge-0/worker-0"}
    assert (by_name["edge-0/worker-0"]["ready"], by_name["edge-0/link"]["ready"]) == (True, False)
    assert by_name["edge-0/link"]["reason"] == "no shard"
    path.write_text(json.dumps({"pod": 1, "link": os.getppid(), "workers": [me, me], "ended": {"link": -9}}))
    os.utime(path, ns=(1, 1))
    watch.look()
    by_name = {e["name"]: e for e in watch.processes(True, "")}
    assert (by_name["edge-0/link"]["restarts"], by_name["edge-0/worker-0"]["restarts"]) == (1, 0)
    assert died == [("edge-0/link", "signal 9")]
    path.write_text(json.dumps({"pod": 2, "link": me, "workers": [me, me]}))
    os.utime(path, ns=(3, 3))
    watch.look()
    assert died == [("edge-0/link", "signal 9")], "children of a dead gateway are told with it"
    by_name = {e["name"]: e for e in watch.processes(True, "")}
    path.write_text("{")
    os.utime(path, ns=(2, 2))
    watch.look()
    assert {e["name"]: e for e in watch.processes(True, "")} == by_name


async def test_control_answers_commands_and_refusals(tmp_path: Path) -> None:
    def handler(command: str, target: str) -> list[str]:
        if command != "stop":
            raise LocalError(f"{command} is no command")
        return [target, "x"]

    server = control.ControlServer(tmp_path / "c.sock", handler)
    (tmp_path / "c.sock").touch()  # as a killed supervisor leaves one
    await server.start()
    try:
        assert (tmp_path / "c.sock").stat().st_mode & 0o077 == 0
        assert await asyncio.to_thread(control.send, tmp_path / "c.sock", "stop", "msg") == ["msg", "x"]
        with pytest.raises(LocalError, match="jump is no command"):
            await asyncio.to_thread(control.send, tmp_path / "c.sock", "jump", "")
        reader, writer = await asyncio.open_unix_connection(tmp_path / "c.sock")
        writer.write(b"nonsense\n")
        assert json.loads(await reader.readline()) == {"error": "this is no command"}
        writer.close()
        await writer.wait_closed()
    finally:
        await server.stop()
    with pytest.raises(LocalError, match="does not answer"):
        control.send(tmp_path / "c.sock", "stop", "msg")


async def test_a_probe_of_nobody_or_of_nonsense_is_no_answer() -> None:
    assert await probe.get("127.0.0.1", free_port(), "/readyz") == (0, b"")

    async def nonsense(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"SSH-2.0-x\r\n")
        writer.close()

    server = await asyncio.start_server(nonsense, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    assert await probe.not_ready("127.0.0.1", port) == "it does not answer"
    server.close()
    await server.wait_closed()
