"""The data folder of an embedded cluster: what lies where, who may use it, and how an outsider finds a running one.

plato.json        our mark: format of the folder, cluster_uid; a folder that holds other things and no mark is left alone
lock              held (flock) by the supervisor as long as it lives
topology.json     the topology record; the supervisor is its only writer
keys/             the generated development key
postgres/ valkey/ the servers' folders, each with its password
run/              effective settings per process, status.json, sockets (or in a short folder below /tmp)
logs/             one file per process
attachments/      files that people sent
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import pwd
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from plato import __version__
from plato.local.servers import write_private
from plato.runtime.settings import Settings

FORMAT: Final = 1
"""Layout of the folder. Another number in plato.json: another version's data."""

STATUS_SILENT_S: Final = 15.0
"""A status older than this says nothing about now."""

_NOT_CONTENT: Final = frozenset({"lost+found", "plato.json.new"})
"""A folder with these alone counts as empty: a mounted disk's own, and our mark when it was cut short."""

_SOCKET_PATH_BYTES: Final = 107  # sun_path without its closing zero
_LONGEST_SOCKET_NAME: Final = 48


class LocalError(Exception):
    """The embedded cluster cannot do this: one line that names the reason and the way out."""


def data_dir(settings: Settings) -> Path:
    """Where the embedded cluster of these settings keeps its data."""
    if settings.local.data_dir is not None:
        return settings.local.data_dir.expanduser().absolute()
    return Path("/var/lib/plato") if os.geteuid() == 0 else Path.cwd() / ".plato"


def user_name(uid: int) -> str:
    """A user's name, or its number where it has none."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


@dataclass(frozen=True, slots=True)
class DataFolder:
    """Paths below one data folder. Only `prepare` and `locked` touch the disk."""

    root: Path

    @property
    def info(self) -> Path:
        """plato.json."""
        return self.root / "plato.json"

    @property
    def topology(self) -> Path:
        """The topology record."""
        return self.root / "topology.json"

    @property
    def keys(self) -> Path:
        """Folder of the keys that sign tokens."""
        return self.root / "keys"

    @property
    def postgres(self) -> Path:
        """PostgreSQL's folder."""
        return self.root / "postgres"

    @property
    def valkey(self) -> Path:
        """Valkey's folder."""
        return self.root / "valkey"

    @property
    def run(self) -> Path:
        """Effective settings and the status of the running cluster."""
        return self.root / "run"

    @property
    def status(self) -> Path:
        """status.json, written by the supervisor."""
        return self.run / "status.json"

    @property
    def logs(self) -> Path:
        """One log file per process."""
        return self.root / "logs"

    @property
    def attachments(self) -> Path:
        """The files that people sent, unless the settings name another place; made with the first of them."""
        return self.root / "attachments"

    @property
    def database_password(self) -> Path:
        """The password of the database role `plato`."""
        return self.postgres / "plato.password"

    @property
    def sockets(self) -> Path:
        """Folder of Unix sockets. Below /tmp where the data folder's own path is too long for a socket's address."""
        if len(os.fsencode(self.run)) + 1 + _LONGEST_SOCKET_NAME <= _SOCKET_PATH_BYTES:
            return self.run
        digest = hashlib.sha256(os.fsencode(self.root)).hexdigest()[:12]
        return Path("/tmp") / f"plato-{os.geteuid()}-{digest}"

    @property
    def control(self) -> Path:
        """The supervisor's control socket."""
        return self.sockets / "control.sock"

    def prepare(self) -> str:
        """Makes the folders and checks that they are ours and of this version. Returns the cluster's uid.

        Raises LocalError.
        """
        try:
            self._make_root()
            owner = self.root.stat().st_uid
            if owner != os.geteuid():
                raise LocalError(
                    f"the data folder {self.root} belongs to user {user_name(owner)}, not to {user_name(os.geteuid())}; "
                    "run as that user or choose another folder with --data-dir"
                )
            uid = self._identity()
            for folder in (self.keys, self.run, self.logs, self.postgres, self.valkey):
                folder.mkdir(mode=0o700, exist_ok=True)
            for folder in (self.keys, self.run, self.logs):
                folder.chmod(0o700)
            self._prepare_sockets()
            return uid
        except OSError as e:
            raise LocalError(
                f"the data folder {self.root} cannot be written ({e.strerror}: {e.filename}); "
                "choose another one with --data-dir or PLATO_LOCAL__DATA_DIR"
            ) from e

    def _make_root(self) -> None:
        """Makes the folder; one that was there before keeps its mode, whoever put it there."""
        try:
            self.root.mkdir(parents=True)
        except FileExistsError:
            return
        # Others may pass (PostgreSQL may run as another user), but not look in.
        self.root.chmod(0o711)

    def _prepare_sockets(self) -> None:
        folder = self.sockets
        if folder == self.run:
            return
        folder.mkdir(mode=0o700, exist_ok=True)
        found = folder.lstat()
        if folder.is_symlink() or found.st_uid != os.geteuid() or found.st_mode & 0o077:
            raise LocalError(f"{folder} is not ours alone; remove it, or choose a data folder with a shorter path")

    def _identity(self) -> str:
        if not self.info.exists():
            if (self.postgres / "data").exists():
                raise LocalError(
                    f"{self.info} is missing beside data; restore it, or move {self.root} away to begin anew"
                )
            others = sorted(path.name for path in self.root.iterdir() if path.name not in _NOT_CONTENT)
            if others:
                raise LocalError(
                    f"{self.root} is not empty and not Plato's: it holds {', '.join(others[:3])}"
                    f"{', …' if others[3:] else ''} and no plato.json; name a new or an empty folder with --data-dir"
                )
            info = {"format": FORMAT, "plato": __version__, "cluster_uid": str(uuid.uuid4())}
            write_private(self.info, json.dumps(info) + "\n")
        try:
            info = json.loads(self.info.read_text(encoding="utf-8"))
            made_by, format_, uid = str(info["plato"]), int(info["format"]), str(info["cluster_uid"])
        except (ValueError, KeyError, TypeError) as e:
            raise LocalError(f"{self.info} cannot be read; restore it, or move {self.root} away to begin anew") from e
        if format_ != FORMAT:
            raise LocalError(
                f"the data in {self.root} were made by Plato {made_by} (format {format_}); this is {__version__} "
                f"(format {FORMAT}): use that version, or another folder with --data-dir"
            )
        return uid

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Holds the folder's lock. The kernel drops it when the holder dies, however it dies.

        Raises LocalError when a supervisor runs here already.
        """
        path = self.root / "lock"
        fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            for attempt in range(10):
                try:
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if attempt == 9:  # somebody who only looks holds it for microseconds
                        pid = os.pread(fd, 32, 0).decode("ascii", "replace").strip()
                        raise LocalError(
                            f"Plato is already running in {self.root} (process {pid}); "
                            "see `plato status`, stop it with `plato down`"
                        ) from None
                    time.sleep(0.02)
            os.ftruncate(fd, 0)
            os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
            yield
        finally:
            os.close(fd)

    def running(self) -> int | None:
        """The pid of the supervisor that holds the lock, or None. Raises LocalError where that cannot be looked up."""
        try:
            fd = os.open(self.root / "lock", os.O_RDONLY)
        except FileNotFoundError:
            return None
        except OSError as e:
            raise LocalError(
                f"whether Plato runs in {self.root} cannot be seen ({e.strerror}: {e.filename}); "
                "run as the user who started it, or name its folder with --data-dir"
            ) from e
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return int(os.pread(fd, 32, 0) or b"0")
        finally:
            os.close(fd)
        return None

    def read_status(self) -> dict[str, Any] | None:
        """status.json of a running supervisor; None where none runs or it has not written one yet.

        A supervisor writes it each second; of one that is silent the phase says so instead of "up".
        """
        pid = self.running()
        if pid is None:
            return None
        try:
            status: dict[str, Any] = json.loads(self.status.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None
        if status.get("supervisor_pid") != pid:
            return None
        silent_s = time.time() - float(status.get("at", time.time()))
        if silent_s > STATUS_SILENT_S:
            status["phase"] = (
                f"silent for {silent_s:.0f} s (its disk is full, or its supervisor is stopped or overloaded)"
            )
        return status
