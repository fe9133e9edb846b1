"""What the commands say: errors are one line that names the fault and the way out, and an exit code other than 0."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

import asyncpg
import jwt
import pytest
from plato import __version__
from plato.cli import app, dispatch, show
from plato.local import tokens
from plato.local.child import Identity, launch_command
from plato.local.folder import DataFolder
from plato.runtime.settings import AuthSettings

from tests.ports import free_port

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Run:
    """run("status", …) → (exit code, stdout, stderr), in an empty folder and without PLATO_ variables."""
    monkeypatch.chdir(tmp_path)
    for name in [n for n in os.environ if n.startswith("PLATO_")]:
        monkeypatch.delenv(name)

    def call(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["plato", *arguments])
        code = app.main()
        out = capsys.readouterr()
        return code, out.out, out.err

    return call


def one_line(result: tuple[int, str, str], code: int, *words: str) -> None:
    found, _, err = result
    assert found == code, err
    assert err.startswith("plato: ")
    assert err.count("\n") == 1, err
    for word in words:
        assert word in err


def test_unknown_setting_is_named_with_the_known_ones(run: Run, tmp_path: Path) -> None:
    (tmp_path / "plato.yaml").write_text("gateway:\n  tcp_prot: 9000\n")
    one_line(run("settings"), 2, "gateway.tcp_prot: unknown key in plato.yaml; known here:", "tcp_port")
    one_line(run("up"), 2, "gateway.tcp_prot")


def test_unknown_section_is_named(run: Run, tmp_path: Path) -> None:
    (tmp_path / "plato.yaml").write_text("gatevay:\n  tcp_port: 9000\n")
    one_line(run("up"), 2, "gatevay: unknown section in plato.yaml", "gateway")


def test_wrong_type_names_the_key_the_value_and_the_variable(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PLATO_GATEWAY__TCP_PORT", "many")
    one_line(run("up"), 2, "gateway.tcp_port: 'many' cannot be used", "correct it in PLATO_GATEWAY__TCP_PORT\n")
    monkeypatch.delenv("PLATO_GATEWAY__TCP_PORT")
    one_line(run("up", "--port-offset", "-1"), 2, "-1 cannot be used", "correct it in --port-offset\n")


def test_a_file_that_is_no_yaml_is_named(run: Run, tmp_path: Path) -> None:
    (tmp_path / "plato.yaml").write_text("gateway: [\n")
    one_line(run("status"), 2, "plato.yaml is no YAML")


def test_a_scope_that_is_none_and_members_that_are_none_are_named(run: Run) -> None:
    one_line(run("token", "bob", "--scope", "sever"), 2, "--scope 'sever'", "server")
    one_line(run("group", "create", "bad name!"), 1, "nobody is named", "--member USER")
    one_line(run("group", "add", "town", "--member", "admin"), 1, "member 'admin'", "administrators")


def test_the_override_and_who_is_not_counted_are_shown() -> None:
    found = {
        "gateways": {"edge-0": {"zone": "", "connections": 3, "most": 9}},
        "imbalance": 1.0,
        "shifts": [],
        "refused": {},
    }
    said = dispatch.rebalanced(found, True, ["edge-0", "edge-1"])
    assert any(line.startswith("not counted: edge-1;") for line in said)
    assert not any("not counted" in line for line in dispatch.rebalanced(found, True, ["edge-0"]))
    head = dict.fromkeys(("version", "phase", "supervisor_pid", "data_dir", "durability"), "")
    status: dict[str, Any] = {**head, "processes": [], "ports": {}}
    assert any("never edge-1" in line for line in show.status_lines(status, "never edge-1"))
    assert not any("override" in line for line in show.status_lines(status))


def test_a_missing_settings_file_is_named(run: Run) -> None:
    one_line(run("status", "--settings", "nowhere.yaml"), 2, "nowhere.yaml", "No such file")


def test_without_a_command_the_help_is_printed_as_it_is(run: Run) -> None:
    for arguments, command in (([], "status"), (["db"], "migrate")):
        code, _, err = run(*arguments)
        assert code == 2
        assert err.startswith(f"Usage: {' '.join(['plato', *arguments])} [OPTIONS] COMMAND")
        assert any(line.split()[:1] == [command] for line in err.splitlines()), "one line per command"


def test_the_version_is_asked_in_two_ways(run: Run) -> None:
    assert run("--version") == run("version") == (0, f"plato {__version__}\n", "")


def test_a_folder_with_other_things_in_it_is_refused_and_left_as_it_was(run: Run, tmp_path: Path) -> None:
    theirs = tmp_path / "projects"
    theirs.mkdir()
    theirs.chmod(0o775)
    (theirs / "thesis.txt").write_text("mine")
    one_line(
        run("up", "-d", str(theirs)), 1, f"{theirs} is not empty and not Plato's: it holds thesis.txt", "--data-dir"
    )
    assert [p.name for p in theirs.iterdir()] == ["thesis.txt"]
    assert theirs.stat().st_mode & 0o777 == 0o775
    code, out, _ = run("doctor", "-d", str(theirs))
    assert code == 1
    assert f"BAD   the data folder {theirs} is not empty and not Plato's" in out


def test_an_empty_variable_for_the_folder_is_no_folder(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PLATO_LOCAL__DATA_DIR", "")
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    one_line(run("status"), 1, f"not running in {Path.cwd() / '.plato'}")


def test_a_folder_that_cannot_be_looked_at_is_told(tmp_path: Path) -> None:
    """As a user without rights of root, who meets another's private folder."""
    data = tmp_path / "data"
    data.mkdir()
    (data / "lock").touch()
    data.chmod(0)
    env = {key: value for key, value in os.environ.items() if not key.startswith("PLATO_")}
    for command in ("down", "status", "settings"):
        argv = [sys.executable, "-m", "plato.cli", command, "--data-dir", str(data)]
        if os.geteuid() == 0:
            argv = launch_command(argv, Identity(map_uid=65534))
        done = subprocess.run(argv, capture_output=True, text=True, timeout=30, check=False, env=env)
        one_line(
            (done.returncode, "", done.stderr), 1, f"whether Plato runs in {data} cannot be seen (Permission denied"
        )
    data.chmod(0o700)


def test_a_folder_that_cannot_be_written_is_named_with_the_way_out(run: Run, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    one_line(run("up", "--data-dir", str(tmp_path / "file" / "below")), 1, str(tmp_path / "file"), "--data-dir")
    one_line(run("up", "--data-dir", "/proc/plato"), 1, "/proc/plato", "cannot be written")


@pytest.mark.skipif(os.geteuid() != 0, reason="needs a folder of another user")
def test_a_folder_of_another_user_is_named(run: Run, tmp_path: Path) -> None:
    (tmp_path / "theirs").mkdir()
    os.chown(tmp_path / "theirs", 1, 1)
    one_line(run("up", "--data-dir", str(tmp_path / "theirs")), 1, "belongs to user daemon, not to root")


def test_ports_above_the_last_one_are_told(run: Run, tmp_path: Path) -> None:
    (tmp_path / "plato.yaml").write_text("gateway:\n  tcp_port: 60000\n")
    told = run("up", "-d", str(tmp_path / "d"), "--port-offset", "10000")
    one_line(told, 1, "gateway.tcp_port: port 70000 for edge-0.tcp is above 65535; lower local.port_offset")


def test_two_settings_on_one_port_are_told(run: Run, tmp_path: Path) -> None:
    (tmp_path / "plato.yaml").write_text("state:\n  port: 8903\n")
    one_line(run("up", "-d", str(tmp_path / "d")), 1, "port 8903 is wanted by both", "state.port", "msg.http_port")


def test_not_running_is_told_by_every_command_that_needs_it(run: Run, tmp_path: Path) -> None:
    for arguments in (["status"], ["chat", "alice", "--to", "bob"], ["stop", "msg"], ["start", "msg"]):
        result = run(*arguments, "-d", str(tmp_path / "d"))
        assert result[0] == 1
        assert "`plato up`" in result[2] or "does not answer" in result[2], result[2]
        assert result[2].count("\n") == 1
    assert run("down", "-d", str(tmp_path / "d"))[0] == 0


def test_a_wrong_option_is_one_line(run: Run) -> None:
    one_line(run("up", "--prot"), 2, "plato: No such option: --prot; see `plato up --help`\n")
    one_line(run("db", "x"), 2, "plato: No such command 'x'; see `plato db --help`\n")
    one_line(run("upp"), 2, "Did you mean 'up'? See `plato --help`\n")
    one_line(run("chat", "alice"), 2, "--to USER or --group NAME or --conversation ID")
    one_line(run("chat", "alice", "--to", "bob", "--transport", "quic"), 2, "tcp or ws")


def test_settings_prints_what_load_reads_back_and_no_password(run: Run, tmp_path: Path) -> None:
    (tmp_path / "plato.yaml").write_text("database:\n  uri: postgresql://me:letmein@db:5432/x\nlocal:\n  shards: 3\n")
    code, out, _ = run("settings", "--port-offset", "7")
    assert code == 0
    assert "letmein" not in out
    assert "postgresql://me:***@db:5432/x" in out
    assert "shards: 3" in out
    assert "port_offset: 7" in out


def test_settings_schema_describes_every_key(run: Run) -> None:
    code, out, _ = run("settings", "--schema")
    schema = json.loads(out)
    assert code == 0
    assert set(schema["properties"]) >= {"gateway", "state", "msg", "ipconfig", "database", "store", "bus", "local"}


@pytest.mark.parametrize("user", ["", "x" * 65, "guest:1", "admin", "a\x00b"])
def test_token_of_an_impossible_user_is_refused_in_words(run: Run, tmp_path: Path, user: str) -> None:
    _was_up(tmp_path / "d")
    one_line(run("token", user, "-d", str(tmp_path / "d")), 1, "cannot have a token")


def test_token_speaks_for_its_user_until_its_end(run: Run, tmp_path: Path) -> None:
    folder = _was_up(tmp_path / "d")
    code, out, _ = run("token", "alice", "--ttl", "60", "-d", str(tmp_path / "d"))
    secret = (folder.keys / "dev.key").read_text().strip()
    claims = jwt.decode(out.strip(), secret, algorithms=["HS256"], audience="plato", issuer="plato")
    assert code == 0
    assert claims["sub"] == "alice"
    assert 50 < claims["exp"] - time.time() <= 61


def _was_up(path: Path) -> DataFolder:
    """A folder as a stopped cluster leaves it, as far as tokens go."""
    folder = DataFolder(path)
    folder.prepare()
    tokens.ensure_key(folder)
    (folder.run / "plato-ipconfig-0.yaml").write_text("")
    return folder


# ── the database ─────────────────────────────────────────────────────────────────────────────────────────────


def _settings_for(tmp_path: Path, uri: str) -> str:
    path = tmp_path / "db.yaml"
    path.write_text(f"database:\n  uri: {uri}\n  schema_name: cli_messages\n")
    return str(path)


def test_migrate_makes_the_schema_and_says_its_version(run: Run, tmp_path: Path, postgres_uri: str) -> None:
    code, out, err = run("db", "migrate", "-s", _settings_for(tmp_path, postgres_uri))
    assert (code, err) == (0, "")
    assert out.startswith("the schema cli_messages is at version ")


def test_migrate_tells_a_wrong_password_and_prints_none(run: Run, tmp_path: Path, postgres_uri: str) -> None:
    head, tail = postgres_uri.split("@")
    wrong = f"{head.rsplit(':', 1)[0]}:wrongsecret@{tail}"
    result = run("db", "migrate", "-s", _settings_for(tmp_path, wrong))
    one_line(result, 2, "password authentication failed", "database.uri")
    assert "wrongsecret" not in result[2]


def test_migrate_of_a_folder_where_nothing_runs_touches_no_other_database(run: Run, tmp_path: Path) -> None:
    named = _settings_for(tmp_path, "postgresql://p@127.0.0.1:1/x")
    one_line(run("db", "migrate", "-s", named, "-d", str(tmp_path / "d")), 1, f"not running in {tmp_path / 'd'}")
    one_line(run("db", "migrate"), 1, "Plato is not running in", "database.uri")


def test_migrate_tells_a_database_that_is_away(run: Run, tmp_path: Path) -> None:
    named = _settings_for(tmp_path, "postgresql://p@127.0.0.1:1/x")
    one_line(run("db", "migrate", "-s", named, "--wait-s", "0"), 1, "127.0.0.1:1")


async def test_migrate_waits_for_a_database_that_starts_beside_it(postgres_uri: str) -> None:
    """As the Job does: settings by environment, a folder that nobody may write to, no home."""
    where = urlsplit(postgres_uri)
    port = free_port()
    environment = {
        "PATH": "/usr/bin:/bin",
        "PLATO_DATABASE__URI": postgres_uri.replace(f":{where.port}/", f":{port}/"),
        "PLATO_DATABASE__SCHEMA_NAME": "cli_waits",
        "PLATO_BUS__PARTITIONS": "8",
    }
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "plato.cli",
        "db",
        "migrate",
        cwd="/proc",
        env=environment,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    assert process.stderr is not None
    async with asyncio.timeout(30):
        line = (await process.stderr.readline()).decode()
    assert line.startswith("plato: database")
    assert line.endswith("; trying again\n")

    async def join(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection(where.hostname, where.port)

        async def carry(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
            with contextlib.suppress(OSError):
                while data := await source.read(65_536):
                    sink.write(data)
            sink.close()

        await asyncio.gather(carry(reader, back), carry(there, writer))

    relay = await asyncio.start_server(join, "127.0.0.1", port)
    try:
        async with asyncio.timeout(30):
            out, err = await process.communicate()
    finally:
        relay.close()
    assert process.returncode == 0, err.decode()
    assert out.decode().startswith("the schema cli_waits is at version ")
    assert where.password is None or where.password not in line + out.decode()


async def test_migrate_refuses_a_newer_schema(tmp_path: Path, postgres_uri: str) -> None:
    env = {key: value for key, value in os.environ.items() if not key.startswith("PLATO_")}
    argv = [sys.executable, "-m", "plato.cli", "db", "migrate", "-s", _settings_for(tmp_path, postgres_uri)]
    assert (await _output(argv, env))[0] == 0
    connection = await asyncpg.connect(postgres_uri)
    try:
        await connection.execute(
            "update cli_messages.meta set value = '999' where key in ('schema_version', 'readable_by')"
        )
        code, err = await _output(argv, env)
    finally:
        await connection.execute("drop schema cli_messages cascade")
        await connection.close()
    one_line((code, "", err), 2, "999")


async def _output(argv: list[str], env: dict[str, str]) -> tuple[int, str]:
    import asyncio

    process = await asyncio.create_subprocess_exec(*argv, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    _, err = await process.communicate()
    assert process.returncode is not None
    return process.returncode, err.decode()


# ── the rest ─────────────────────────────────────────────────────────────────────────────────────────────────


def test_doctor_names_what_is_wrong_and_counts_it(run: Run, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    code, out, _ = run("doctor", "--data-dir", str(tmp_path / "file" / "below"), "--port-offset", "0")
    assert code == 1
    assert "BAD   the data folder" in out
    assert "ok    Python" in out
    assert "ok    postgres (PostgreSQL)" in out
    assert "ok    Valkey server" in out


def test_an_unexpected_error_is_one_line_too(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("a fault\nof ours")

    monkeypatch.setattr(app, "_settings", broken)
    one_line(run("status"), 1, "RuntimeError: a fault of ours; PLATO_DEBUG=1 shows where")


def test_a_full_disk_is_told_as_one(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", "/data/run/edge-0.yaml.new")

    monkeypatch.setattr(app, "_settings", full)
    line = "the disk is full: there is no room to hold /data/run/edge-0.yaml.new; make room and try again"
    one_line(run("status"), 1, line)


def test_the_commands_start_fast() -> None:
    """No command line waits for gRPC, the database's or the terminal's library before it is read."""
    slow = ("grpc", "asyncpg", "textual", "aiohttp", "redis", "starlette", "uvicorn", "google.protobuf")
    code = f"import sys, plato.cli.app; print([m for m in {slow!r} if m in sys.modules])"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=True)
    assert found.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0 s"), (59, "59 s"), (60, "1 min"), (3_599, "59 min"), (7_200, "2 h"), (200_000, "2 d")]
)
def test_ago_uses_the_largest_unit(seconds: int, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = time.time()
    monkeypatch.setattr(show, "time", SimpleNamespace(time=lambda: now_s))
    assert show.ago(now_s - seconds - 0.5) == text


def test_auth_settings_are_those_of_the_token(tmp_path: Path) -> None:
    folder = _was_up(tmp_path)
    token = tokens.make_token(folder, AuthSettings(issuer="me", audience="them"), "bob", 10)
    claims = jwt.decode(token, options={"verify_signature": False})
    assert (claims["iss"], claims["aud"]) == ("me", "them")
