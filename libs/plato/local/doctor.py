"""What `plato doctor` looks at: the machine, the folder, the ports, and the running cluster. Each finding is one line."""

from __future__ import annotations

import os
import platform
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Final

from plato.local.bus_watch import words
from plato.local.child import OURSELVES
from plato.local.folder import DataFolder, LocalError, data_dir, user_name
from plato.local.ports import in_the_way, plan
from plato.local.servers import ServerError, postgres_binary, postgres_identity, valkey_binary
from plato.runtime.settings import Settings

_LEAST_FILES: Final = 1_024
_LEAST_DISK_BYTES: Final = 1_073_741_824
_SPARE_FILES: Final = 200
"""Descriptors of a gateway worker besides its connections."""


class Level(Enum):
    """How bad a finding is."""

    OK = "ok"
    NOTE = "note"
    BAD = "bad"


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report."""

    level: Level
    text: str


def _ok(text: str) -> Finding:
    return Finding(Level.OK, text)


def _note(text: str) -> Finding:
    return Finding(Level.NOTE, text)


def _bad(text: str) -> Finding:
    return Finding(Level.BAD, text)


def examine(settings: Settings) -> Iterator[Finding]:
    """Everything, in the order in which it matters. Changes nothing on the machine."""
    yield _python()
    yield from _binaries()
    yield _user()
    folder = DataFolder(data_dir(settings))
    yield from _folder(folder)
    yield _files(settings)
    try:
        running = folder.running()
    except LocalError as e:
        yield _bad(str(e))
        return
    if running is None:
        yield from _ports(settings)
        yield _note("the cluster is not running; `plato up` starts it")
    else:
        yield from _cluster(folder)


def _python() -> Finding:
    version = platform.python_version()
    machine = f"{platform.system()} {platform.machine()}"
    if not (3, 11) <= sys.version_info[:2] <= (3, 14):
        return _bad(f"Python {version}: 3.11 to 3.14 are supported; make the environment anew with one of them")
    if platform.system() != "Linux":
        return _bad(f"{machine}: the embedded servers run on Linux only")
    return _ok(f"Python {version} on {machine}")


def _binaries() -> Iterator[Finding]:
    finders: tuple[Callable[[], Path], ...] = (lambda: postgres_binary("postgres"), valkey_binary)
    for find in finders:
        try:
            path = find()
            done = subprocess.run([str(path), "--version"], capture_output=True, text=True, timeout=20, check=False)
        except (ServerError, OSError, subprocess.TimeoutExpired) as e:
            yield _bad(f"a server's binary cannot be run: {e}")
            continue
        if done.returncode != 0:
            yield _bad(f"{path} cannot be run: {(done.stderr or done.stdout).strip().splitlines()[-1:]}")
        else:
            yield _ok(done.stdout.strip().split(" sha=")[0])


def _user() -> Finding:
    me = user_name(os.geteuid())
    try:
        identity = postgres_identity()
    except ServerError as e:
        return _bad(str(e))
    if identity == OURSELVES:
        return _ok(f"user {me}: PostgreSQL runs as you")
    if identity.map_uid is not None:
        return _ok(f"user {me}: PostgreSQL runs in a user namespace, where you are {user_name(identity.map_uid)}")
    assert identity.become is not None
    return _note(
        f"user {me}: user namespaces are refused here, so PostgreSQL runs as {user_name(identity.become[0])}; "
        "that user must be able to reach the data folder and the installed packages"
    )


def _folder(folder: DataFolder) -> Iterator[Finding]:
    existing = folder.root
    while not existing.exists() and existing != existing.parent:
        existing = existing.parent
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        yield _bad(f"the data folder {folder.root} cannot be written; choose another one with --data-dir")
        return
    if folder.root.exists() and folder.root.stat().st_uid != os.geteuid():
        owner = user_name(folder.root.stat().st_uid)
        yield _bad(
            f"the data folder {folder.root} belongs to {owner}; run as {owner} or choose another with --data-dir"
        )
        return
    others = [] if folder.info.exists() or not folder.root.exists() else sorted(folder.root.iterdir())
    if others:
        yield _bad(
            f"the data folder {folder.root} is not empty and not Plato's; name a new or an empty one with --data-dir"
        )
        return
    free = shutil.disk_usage(existing).free
    text = f"data folder {folder.root}, {free / 2**30:.1f} GiB free"
    if free < _LEAST_DISK_BYTES:
        yield _bad(f"{text}: below 1 GiB; make room, or PostgreSQL stops when it is full")
    else:
        yield _ok(text)
    kind = _file_system(existing)
    if kind in ("tmpfs", "ramfs"):
        yield _note(f"the data folder is on {kind}: nothing in it survives a restart of the machine")
    elif kind in ("nfs", "nfs4", "cifs", "9p", "fuse.sshfs"):
        yield _note(f"the data folder is on {kind}: PostgreSQL wants a local disk for its promises")


def _file_system(path: Path) -> str:
    best, kind = "", ""
    try:
        for line in Path("/proc/mounts").read_text(encoding="utf-8").splitlines():
            _, mount, found, *_ = line.split(" ")
            if path.is_relative_to(mount) and len(mount) >= len(best):
                best, kind = mount, found
    except (OSError, ValueError):
        return ""
    return kind


def _files(settings: Settings) -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    reach = (hard - _SPARE_FILES) * settings.gateway.workers if hard != resource.RLIM_INFINITY else 1 << 40
    if hard != resource.RLIM_INFINITY and hard < _LEAST_FILES:
        return _bad(f"open files are limited to {hard}; raise the limit (ulimit -n {_LEAST_FILES} or more)")
    if reach < settings.gateway.max_connections:
        return _note(
            f"open files are limited to {hard} per process: a gateway holds about {reach} connections, "
            f"gateway.max_connections says {settings.gateway.max_connections}; raise ulimit -n for more"
        )
    return _ok(f"open files: {soft} (may be raised to {'any' if hard == resource.RLIM_INFINITY else hard})")


def _ports(settings: Settings) -> Iterator[Finding]:
    try:
        uses = plan(settings)
    except LocalError as e:
        yield _bad(str(e))
        return
    faults = in_the_way(uses.values())
    yield from (_bad(why) for why in faults)
    if not faults:
        ports = sorted(use.port for use in uses.values())
        yield _ok(f"all {len(ports)} ports are free ({ports[0]} to {ports[-1]})")


def _cluster(folder: DataFolder) -> Iterator[Finding]:
    status = folder.read_status()
    if status is None:
        yield _note("the cluster is starting or stopping")
        return
    if status["phase"] != "up":
        yield _bad(f"the cluster is {status['phase']}")
    missing = [entry for entry in status["processes"] if not entry["ready"]]
    yield from (_bad(f"{entry['name']} does not serve: {entry['reason']}") for entry in missing)
    bus = words({entry["name"]: entry.get("bus", "") for entry in status["processes"]})
    if bus:
        yield _bad(bus)
    if not missing:
        yield _ok(f"the cluster runs: {len(status['processes'])} processes, all serve")
    restarts = {entry["name"]: entry["restarts"] for entry in status["processes"] if entry["restarts"]}
    if restarts:
        yield _note("started again after an end: " + ", ".join(f"{name} {n} ×" for name, n in restarts.items()))
    yield _note(f"durability: {status['durability']}")
