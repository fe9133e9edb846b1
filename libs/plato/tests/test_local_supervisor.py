"""The supervisor on real processes: restarts, stop and start, one per folder, kill -9 without orphans, data that stay."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import asyncpg
import pytest
import yaml
from plato.local.child import Identity, launch_command
from plato.local.cluster import ClusterEnded, LocalCluster
from plato.local.folder import LocalError
from plato.local.ports import free_offset
from plato.runtime.settings import PREFIX, load
from plato.topology.record import Topology, loads

KINDS = ("postgres", "valkey", "state", "gateway", "worker", "link", "poller", "msg", "ipconfig")


def until(condition: Callable[[], Any], deadline_s: float, why: str) -> Any:
    end = time.monotonic() + deadline_s
    while not (value := condition()):
        assert time.monotonic() < end, why
        time.sleep(0.02)
    return value


def alive(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    return False


def family(pid: int) -> set[int]:
    """Every descendant of a process."""
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            text = stat.read_text()
            children.setdefault(int(text.rsplit(")", 1)[1].split()[1]), []).append(int(text.split(" ", 1)[0]))
    found: set[int] = set()
    ahead = [pid]
    while ahead:
        for child in children.get(ahead.pop(), []):
            found.add(child)
            ahead.append(child)
    return found


def record(cluster: LocalCluster) -> Topology:
    return loads(cluster.folder.topology.read_text(encoding="utf-8"))


def uids(topology: Topology) -> dict[str, str]:
    found = {name: shard.uid for name, shard in topology.shards.items()}
    found |= {name: gateway.uid for name, gateway in topology.gateways.items()}
    return found | {name: msg.uid for name, msg in topology.msgs.items()}


def entry(cluster: LocalCluster, name: str) -> dict[str, Any]:
    return next(e for e in cluster.status()["processes"] if e["name"] == name)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    made = LocalCluster.launch(tmp_path_factory.mktemp("plato") / "data")
    try:
        made.wait_ready()
        yield made
    finally:
        made.down()


def plato(
    *arguments: str, cluster: LocalCluster | None = None, cwd: Path | None = None
) -> subprocess.CompletedProcess[str]:
    env = {key: value for key, value in os.environ.items() if not key.startswith(PREFIX)}
    where = ["--data-dir", str(cluster.data_dir)] if cluster is not None else []
    return subprocess.run(
        [sys.executable, "-m", "plato.cli", *arguments, *where],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env=env,
        cwd=cwd,
    )


def test_everything_of_the_design_runs_and_says_how_to_chat(cluster: LocalCluster) -> None:
    counts = {kind: len(cluster.pids(kind)) for kind in KINDS}
    assert counts == {
        "postgres": 1,
        "valkey": 1,
        "state": 2,
        "gateway": 2,
        "worker": 4,
        "link": 2,
        "poller": 2,
        "msg": 2,
        "ipconfig": 1,
    }
    assert all(e["restarts"] == 0 for e in cluster.status()["processes"])
    until(lambda: all(e["ready"] for e in cluster.status()["processes"]), 30, "not all of it serves")
    assert "process crashes only" in cluster.status()["durability"]
    printed = until(lambda: "chat bob --to alice" in cluster.output.read_text(), 20, "it does not say how to chat")
    assert printed
    commands = [line.strip() for line in cluster.output.read_text().splitlines() if " chat " in line and "--to" in line]
    assert len(commands) == 2
    assert all(command.endswith(f"--data-dir {cluster.data_dir}") for command in commands)


def test_status_shows_every_process_and_what_is_promised(cluster: LocalCluster) -> None:
    until(cluster.ready, 30, "it was not whole before")
    shown = plato("status", cluster=cluster)
    assert shown.returncode == 0, shown.stdout + shown.stderr
    for e in cluster.status()["processes"]:
        assert f"{e['name']} " in shown.stdout
    assert "process crashes only" in shown.stdout
    as_json = json.loads(plato("status", "--json", cluster=cluster).stdout)
    assert {e["name"] for e in as_json["processes"]} == {e["name"] for e in cluster.status()["processes"]}


def test_a_second_up_in_the_same_folder_is_refused_in_words(cluster: LocalCluster) -> None:
    second = plato("up", "--port-offset", "30000", cluster=cluster)
    assert second.returncode == 1
    assert second.stderr.count("\n") == 1
    assert f"already running in {cluster.data_dir} (process {cluster.status()['supervisor_pid']})" in second.stderr
    until(cluster.ready, 30, "it did harm")


def test_a_taken_port_is_told_before_anything_starts(cluster: LocalCluster, tmp_path: Path) -> None:
    offset = cluster.settings.local.port_offset
    second = plato("up", "--port-offset", str(offset), "--data-dir", str(tmp_path / "other"))
    assert second.returncode == 1
    assert second.stderr.count("\n") == 1
    port = cluster.ports["postgres"]
    assert f"port {port} (local.postgres_port, for postgres) is in use by postgres (process " in second.stderr
    assert "--port-offset" in second.stderr
    assert not (tmp_path / "other" / "postgres" / "data").exists()


def test_token_and_list_of_gateways_fit_together(cluster: LocalCluster) -> None:
    import urllib.request

    token = plato("token", "alice", cluster=cluster).stdout.strip()
    request = urllib.request.Request(f"{cluster.ipconfig_url}/ip/list", headers={"Authorization": f"Bearer {token}"})

    def listed() -> list[str]:
        with urllib.request.urlopen(request, timeout=20) as answer:
            return sorted(f"{e['ip']}:{e['port']}" for e in json.loads(answer.read())["data"])

    until(lambda: listed() == sorted(cluster.gateways), 30, "the list is another one")  # without who is silent for 3 s


def test_the_second_program_of_the_clients_page_runs(cluster: LocalCluster, tmp_path: Path) -> None:
    page = Path(__file__).resolve().parents[3] / "docs" / "client.md"
    program = re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)[1]
    argv = [sys.executable, "-c", program, cluster.ipconfig_url, str(cluster.folder.keys / "dev.key")]
    for place in (1, 2):
        done = subprocess.run(argv, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
        assert done.stdout == f"its place is {place}\n", done.stderr


@pytest.mark.parametrize("kind", KINDS)
def test_what_dies_is_started_again(cluster: LocalCluster, kind: str) -> None:
    until(cluster.ready, 30, "it was not whole before")
    victim = next(e for e in cluster.status()["processes"] if e["kind"] == kind)
    before = record(cluster)
    os.kill(victim["pid"], signal.SIGKILL)

    def again() -> bool:
        now = entry(cluster, victim["name"])
        return now["restarts"] == victim["restarts"] + 1 and now["pid"] not in (None, victim["pid"]) and now["ready"]

    until(again, 30, f"{victim['name']} was not started again")
    until(cluster.ready, 30, "the cluster is not whole again")
    told = f"{victim['name']} ended (signal 9), started again"
    until(lambda: told in cluster.output.read_text(), 20, cluster.output.read_text())
    after = record(cluster)
    assert after.slots == before.slots, "a restart must not assign slots anew"
    renewed = {name for name, uid in uids(after).items() if uid != uids(before)[name]}
    assert renewed == ({victim["name"]} if kind in ("state", "gateway", "msg") else set())
    assert after.epoch > before.epoch if renewed else after.epoch == before.epoch


def test_stopped_processes_stay_stopped_until_they_are_started(cluster: LocalCluster) -> None:
    until(cluster.ready, 30, "it was not whole before")
    stopped = plato("stop", "msg", cluster=cluster)
    assert stopped.stdout == "stopped: plato-msg-0, plato-msg-1\n", stopped.stderr
    assert cluster.pids("msg") == []
    assert not cluster.ready()
    shown = plato("status", cluster=cluster)
    assert shown.returncode == 1
    assert "it was stopped with `plato stop`" in shown.stdout
    started = plato("start", "plato-msg-1", cluster=cluster)
    assert started.stdout == "serving: plato-msg-1\n", started.stderr
    assert len(cluster.pids("msg")) == 1
    assert cluster.start_processes("msg") == ["plato-msg-0", "plato-msg-1"]
    until(cluster.ready, 30, "not whole again")


@pytest.mark.parametrize(
    ("target", "words"),
    [
        ("worker", "belongs to a gateway"),
        ("edge-0/link", "belongs to a gateway"),
        (
            "edg",
            "edg is not known here; known: gateway, ipconfig, msg, postgres, state, valkey, plato-ipconfig-0, edge-0,",
        ),
    ],
)
def test_stop_of_what_cannot_be_stopped_says_why(cluster: LocalCluster, target: str, words: str) -> None:
    told = plato("stop", target, cluster=cluster)
    assert told.returncode == 1
    assert words in told.stderr
    assert told.stderr.count("\n") == 1


def test_settings_and_migrate_of_a_running_cluster_are_its_own(cluster: LocalCluster) -> None:
    shown = plato("settings", cluster=cluster)
    assert shown.stdout.startswith(f"# in force in {cluster.data_dir}"), shown.stderr
    read = yaml.safe_load(shown.stdout)
    assert read["gateway"]["tcp_port"] == cluster.ports["edge-0.tcp"]
    assert read["state"]["port"] == cluster.ports["plato-s0.grpc"]
    assert read["msg"]["http_port"] == cluster.ports["plato-msg-0.http"]
    assert read["ipconfig"]["port"] == cluster.ports["ipconfig"]
    assert read["database"]["uri"].endswith(f":***@127.0.0.1:{cluster.ports['postgres']}/plato")
    assert cluster.database_uri.split(":")[2].split("@")[0] not in shown.stdout
    migrated = plato("db", "migrate", cluster=cluster)
    assert f"127.0.0.1:{cluster.ports['postgres']}/plato" in migrated.stdout, migrated.stderr


def test_doctor_in_a_second_folder_finds_one_cause(cluster: LocalCluster, tmp_path: Path) -> None:
    until(cluster.ready, 30, "it was not whole before")
    offset = str(cluster.settings.local.port_offset)
    report = plato("doctor", "--port-offset", offset, "--data-dir", str(tmp_path / "other"))
    bad = [line for line in report.stdout.splitlines() if line.startswith("BAD")]
    assert len(bad) == 1, report.stdout
    assert f"are in use by another Plato, in {cluster.data_dir}; stop it with" in bad[0]


def test_a_server_of_ones_own_is_said_to_be_unused(tmp_path: Path) -> None:
    other = LocalCluster.launch(tmp_path / "data", {"database.uri": "postgresql://x@h/y", "local.shards": 1})
    try:
        until(lambda: "not used here: database.uri; the embedded" in other.output.read_text(), 20, "nothing is said")
    finally:
        until(lambda: other.running or other._launched.poll() is not None, 20, "it does not start")  # type: ignore[union-attr]  # launched above
        other.down()


def test_doctor_finds_a_running_cluster_well(cluster: LocalCluster) -> None:
    until(cluster.ready, 30, "it was not whole before")
    report = plato("doctor", cluster=cluster)
    assert report.returncode == 0, report.stdout
    assert "processes, all serve" in report.stdout


def test_kill_9_of_the_supervisor_leaves_no_orphan_and_the_next_start_goes_on(tmp_path: Path) -> None:
    data = tmp_path / "data"
    first = LocalCluster.launch(data)
    first.wait_ready()
    offset = first.settings.local.port_offset
    everyone = family(int(first.status()["supervisor_pid"]))
    assert {e["pid"] for e in first.status()["processes"]} <= everyone
    before = record(first)
    _query(first, "create table plato.mine (n int)", "insert into plato.mine values (7)")
    first.kill_supervisor()
    until(lambda: not any(alive(pid) for pid in everyone), 20, "orphans were left")

    second = LocalCluster.launch(data, port_offset=offset)
    second.wait_ready()
    assert _query(second, "select n from plato.mine") == [(7,)]
    after = record(second)
    assert (after.cluster_uid, after.slots) == (before.cluster_uid, before.slots)
    assert after.epoch > before.epoch

    everyone = family(int(second.status()["supervisor_pid"]))
    os.kill(int(second.status()["supervisor_pid"]), signal.SIGINT)  # Ctrl-C
    assert second.reap(60) == 0
    until(lambda: not any(alive(pid) for pid in everyone), 20, "orphans were left")
    assert not second.folder.status.exists()
    told = plato("status", cluster=second)
    assert told.returncode == 1
    assert "is not running" in told.stderr
    assert plato("down", cluster=second).returncode == 0


def _query(cluster: LocalCluster, *statements: str) -> list[tuple[Any, ...]]:
    import asyncio

    async def ask() -> list[tuple[Any, ...]]:
        connection = await asyncpg.connect(cluster.database_uri)
        try:
            for statement in statements[:-1]:
                await connection.execute(statement)
            return [tuple(row) for row in await connection.fetch(statements[-1])]
        finally:
            await connection.close()

    return asyncio.run(ask())


def test_a_normal_user_runs_it_in_the_folder_beside_the_project(tmp_path: Path) -> None:
    """In a user namespace where we are `nobody`: no right of root, and the default folder of a normal user."""
    argv = [sys.executable, "-m", "plato.cli", "up", "--port-offset", str(free_offset(load(environ={})))]
    env = {key: value for key, value in os.environ.items() if not key.startswith(PREFIX)}
    with (tmp_path / "out").open("w") as out:
        up = subprocess.Popen(
            launch_command(argv, Identity(map_uid=65534)), cwd=tmp_path, env=env, stdout=out, stderr=out
        )
    try:
        cluster = LocalCluster(tmp_path / ".plato")
        until(lambda: up.poll() is None and _quietly_ready(cluster), 60, (tmp_path / "out").read_text())
        # It is said after everything serves.
        said = "chat alice --to bob\n"
        until(lambda: said in (tmp_path / "out").read_text(), 20, "the default folder needs no flag")
        up.send_signal(signal.SIGTERM)
        assert up.wait(60) == 0
    finally:
        up.kill()
        up.wait()


def _quietly_ready(cluster: LocalCluster) -> bool:
    with contextlib.suppress(LocalError):
        return cluster.ready()
    return False


def test_a_cluster_that_cannot_start_says_why_and_ends(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "plato.json").write_text('{"format": 99, "plato": "9.9.0", "cluster_uid": "x"}')
    cluster = LocalCluster.launch(tmp_path / "data")
    with pytest.raises(ClusterEnded, match=r"made by Plato 9\.9\.0 \(format 99\)"):
        cluster.wait_ready()
