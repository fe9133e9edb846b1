"""Which port every process of the embedded cluster listens on, and who is in the way.

port = its setting + local.port_offset + 10 × the instance's number.
"""

from __future__ import annotations

import contextlib
import errno
import os
import random
import shlex
import socket
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from plato.api import names
from plato.local.folder import LocalError
from plato.runtime.settings import Settings


@dataclass(frozen=True, slots=True)
class PortUse:
    """One listening port: its key in status.json, the setting it comes from, its address; offset: how much of the port is
    local.port_offset."""

    key: str
    setting: str
    host: str
    port: int
    offset: int = 0


_OFFSET_STEP: Final = 1_000
_MOST_PORT: Final = 65_535
_LANE: Final = 100
"""Ports between two offsets that `free_offset` tells."""
_claims: dict[int, int] = {}
"""{offset: the descriptor that holds it}."""

WEB_HOSTS: Final = ("127.0.0.1", "localhost")
"""Names of the chat page's host."""


def web_origins(settings: Settings) -> tuple[str, ...]:
    """The origins of the chat page, the address to be told first; () where there is none."""
    port = settings.local.web_port
    return tuple(f"http://{host}:{port + settings.local.port_offset}" for host in WEB_HOSTS) if port else ()


def plan(settings: Settings) -> dict[str, PortUse]:
    """{key: use} of every port, e.g. "edge-1.tcp". Raises LocalError when two want one port, or one is no port."""
    local = settings.local
    uses = [
        PortUse("postgres", "local.postgres_port", "127.0.0.1", local.postgres_port),
        PortUse("valkey", "local.valkey_port", "127.0.0.1", local.valkey_port),
        PortUse("ipconfig", "ipconfig.port", settings.ipconfig.host, settings.ipconfig.port),
        PortUse(
            "ipconfig.internal",
            "ipconfig.internal_port",
            settings.ipconfig.internal_host,
            settings.ipconfig.internal_port,
        ),
    ]
    if local.web_port:
        uses.append(PortUse("web", "local.web_port", "127.0.0.1", local.web_port))
    for i in range(local.gateways):
        name, gateway, step = gateway_name(i), settings.gateway, names.LOCAL_PORT_STEP * i
        uses += [
            PortUse(f"{name}.tcp", "gateway.tcp_port", gateway.host, gateway.tcp_port + step),
            PortUse(f"{name}.ws", "gateway.ws_port", gateway.host, gateway.ws_port + step),
            PortUse(f"{name}.admin", "gateway.admin_port", gateway.admin_host, gateway.admin_port + step),
        ]
        if gateway.poll_port:
            uses.append(PortUse(f"{name}.poll", "gateway.poll_port", gateway.host, gateway.poll_port + step))
    for i in range(local.shards):
        name, state, step = shard_name(i), settings.state, names.LOCAL_PORT_STEP * i
        uses += [
            PortUse(f"{name}.grpc", "state.port", state.host, state.port + step),
            PortUse(f"{name}.admin", "state.admin_port", state.admin_host, state.admin_port + step),
        ]
    for i in range(local.msgs):
        name, msg, step = msg_name(i), settings.msg, names.LOCAL_PORT_STEP * i
        uses += [
            PortUse(f"{name}.grpc", "msg.grpc_port", msg.host, msg.grpc_port + step),
            PortUse(f"{name}.http", "msg.http_port", msg.http_host, msg.http_port + step),
        ]
        if msg.api_port:
            uses.append(PortUse(f"{name}.api", "msg.api_port", msg.api_host, msg.api_port + step))
    moved = [PortUse(u.key, u.setting, u.host, u.port + local.port_offset, local.port_offset) for u in uses]
    taken: dict[int, PortUse] = {}
    for use in moved:
        if use.port > 65535:
            raise LocalError(f"{use.setting}: port {use.port} for {use.key} is above 65535; lower local.port_offset")
        if use.port in taken:
            raise LocalError(
                f"port {use.port} is wanted by both {taken[use.port].key} ({taken[use.port].setting}) and {use.key} "
                f"({use.setting}); set one of the two to another port"
            )
        taken[use.port] = use
    return {use.key: use for use in moved}


def shard_name(i: int) -> str:
    """Name of the i-th state shard."""
    return f"plato-s{i}"


def gateway_name(i: int) -> str:
    """Name of the i-th gateway."""
    return f"edge-{i}"


def msg_name(i: int) -> str:
    """Name of the i-th msg process."""
    return f"plato-msg-{i}"


def api_door(settings: Settings, name: str) -> tuple[str, str]:
    """(scheme, key of its port) of the HTTP API at the msg process `name`."""
    if not settings.msg.api_port:
        return "http", f"{name}.http"
    return "https" if settings.tls.client_dir is not None else "http", f"{name}.api"


def check_free(uses: Iterable[PortUse]) -> None:
    """Raises LocalError, in words, when one of the ports cannot be listened on now."""
    for use in uses:
        if why := blocked(use):
            raise LocalError(why)


def free_offset(settings: Settings) -> int:
    """A local.port_offset whose ports are all free now, below the range that outgoing connections draw from. Nobody else who
    asks here is told the same, or one that overlaps it with up to six instances of a kind, until `release_offset` or the end
    of this process: a cluster listens only seconds after it was begun.

    Raises LocalError.
    """
    for _ in range(200):
        offset = _LANE * random.randrange(1_000 // _LANE, 20_000 // _LANE)
        if not _claim(offset):
            continue
        moved = settings.model_copy(update={"local": settings.local.model_copy(update={"port_offset": offset})})
        try:
            check_free(plan(moved).values())
            return offset
        except LocalError:
            release_offset(offset)
    raise LocalError("no range of free ports was found; name one with local.port_offset")


def release_offset(offset: int) -> None:
    """Others may be told this one again. Nothing to do if `free_offset` did not tell it here."""
    fd = _claims.pop(offset, None)
    if fd is not None:
        os.close(fd)


def _claim(offset: int) -> bool:
    """By a name that no file holds: of this network, as its ports are, and gone with the process."""
    sock = socket.socket(socket.AF_UNIX)
    try:
        sock.bind(f"\0plato-ports-{offset}")
    except OSError:
        sock.close()
        return False
    _claims[offset] = sock.detach()
    return True


def blocked(use: PortUse) -> str:
    """Why `use` cannot be listened on: one line with the way out; "" if it can."""
    family = socket.AF_INET6 if ":" in use.host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        # Without SO_REUSEPORT, so that a gateway's shared listener counts; with REUSEADDR, so that closing ones do not.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((use.host, use.port))
            probe.listen(1)
        except OSError as e:
            if e.errno == errno.EADDRINUSE:
                return (
                    f"port {use.port} ({use.setting}, for {use.key}) is in use{_by_whom(use.port)}; stop that, or move "
                    f"every port with `plato up --port-offset {_other_offset(use)}` (local.port_offset)"
                )
            return f"{use.setting}: cannot listen on {use.host}:{use.port} for {use.key}: {e.strerror}; set another one"
    return ""


def _other_offset(use: PortUse) -> int:
    """A local.port_offset that is not the one in use."""
    further = use.offset + _OFFSET_STEP
    return further if use.port + 2 * _OFFSET_STEP < _MOST_PORT else use.offset // 2 or further


def in_the_way(uses: Iterable[PortUse]) -> list[str]:
    """Everything that keeps these ports from being listened on, one line per cause; [] if nothing does."""
    faults = {use: why for use in uses if (why := blocked(use))}
    if len(faults) < 2:
        return list(faults.values())
    lines = []
    held: dict[str, list[int]] = {}
    for use, holder in _holders(faults).items():
        folder = None if holder is None else _data_folder(holder)
        if holder is None:
            lines.append(faults[use])
        elif folder is not None:
            stop = f"`plato down --data-dir {shlex.quote(str(folder))}`"
            held.setdefault(f"by another Plato, in {folder}; stop it with {stop}", []).append(use.port)
        else:
            held.setdefault(f"by {_comm(holder)} (process {holder}); stop that", []).append(use.port)
    for holder_and_way_out, ports in held.items():
        shown = ", ".join(map(str, sorted(ports)[:4])) + (f", … ({len(ports)} in all)" if ports[4:] else "")
        lines.append(
            f"{'ports' if ports[1:] else 'port'} {shown} {'are' if ports[1:] else 'is'} in use {holder_and_way_out}, "
            f"or move every port with `plato up --port-offset {_other_offset(next(iter(faults)))}` (local.port_offset)"
        )
    return lines


def _by_whom(port: int) -> str:
    """ " by NAME (process PID)" where /proc tells; else ""."""
    use = PortUse("", "", "", port)
    holder = _holders([use])[use]
    return "" if holder is None else f" by {_comm(holder)} (process {holder})"


def _holders(uses: Iterable[PortUse]) -> dict[PortUse, int | None]:
    """The process that listens on each port, where /proc tells."""
    found: dict[PortUse, int | None] = dict.fromkeys(uses)
    by_port = {use.port: use for use in found}
    inodes: dict[str, PortUse] = {}
    for table in ("tcp", "tcp6"):
        with contextlib.suppress(OSError):
            for line in Path("/proc/net", table).read_text(encoding="ascii").splitlines()[1:]:
                fields = line.split()
                use = by_port.get(int(fields[1].rsplit(":", 1)[1], 16))
                if fields[3] == "0A" and use is not None:
                    inodes[f"socket:[{fields[9]}]"] = use
    for process in Path("/proc").glob("[0-9]*") if inodes else ():
        with contextlib.suppress(OSError):
            for fd in (process / "fd").iterdir():
                with contextlib.suppress(OSError):
                    use = inodes.get(str(fd.readlink()))
                    if use is not None and found[use] is None:
                        found[use] = int(process.name)
    return found


def _comm(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text(encoding="utf-8").strip()
    except OSError:
        return "a process"


def _data_folder(pid: int) -> Path | None:
    """The data folder of the embedded cluster that a process belongs to; None: it belongs to none that we can see.

    Services are told by the settings file that they were given, the servers by the folder that they work in, the supervisor,
    which serves the chat page, by the lock that it holds there.
    """
    with contextlib.suppress(OSError):
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        cwd = Path(f"/proc/{pid}/cwd").readlink()
        near = [Path(os.fsdecode(word)).parent.parent for word in words if word.endswith(b".yaml")]
        for folder in [*near, cwd.parent, cwd.parent.parent, *_open_in(pid)]:
            if (folder / "plato.json").exists():
                return folder
    return None


def _open_in(pid: int) -> Iterator[Path]:
    """The folders of the files that a process has open."""
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            target = fd.readlink()
            if target.is_absolute():
                yield target.parent
