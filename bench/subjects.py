"""Who is measured: C, a worker alone, a gateway, NATS, mosquitto. Each is started, and says its port and its processes.

C          c/server
worker     a real worker; c/link plays its link and sends every frame back
gateway    a real worker and a real link; bench/shard.py plays the shard and sends every frame back
NATS       nats-server; each connection subscribes to what it publishes
mosquitto  the same, with QoS 0
"""

from __future__ import annotations

import contextlib
import socket
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from plato.adapters.topology_file import write
from plato.runtime.settings import dump, load
from plato.topology.record import Gateway, Shard, SlotRange, Topology

from bench.processes import BenchError, Pids, line_of, running
from bench.programs import HERE, Programs

C, WORKER, GATEWAY, NATS, MOSQUITTO = "C", "worker", "gateway", "NATS", "mosquitto"
ALL = (C, WORKER, GATEWAY, NATS, MOSQUITTO)
SUFFIX_BYTES = 10
"""What a push carries behind its shared payload; the played links append it in a fan-out."""
ROOT = HERE.parent
_START_S = 20.0


@dataclass(frozen=True)
class Subject:
    """A running server."""

    name: str
    dialect: str
    port: int
    pids: Pids
    suffix_bytes: int = 0


@contextlib.contextmanager
def started(name: str, programs: Programs, folder: Path, **gateway: object) -> Iterator[Subject]:
    """Starts one; it ends with the block. gateway: settings of the section, for a worker or gateway."""
    folder = folder / name
    folder.mkdir()
    with contextlib.ExitStack() as stack:
        yield _STARTS[name](programs, folder, stack, gateway)


def free_ports(count: int) -> list[int]:
    """Ports that were free a moment ago."""
    held = [socket.socket() for _ in range(count)]
    try:
        for sock in held:
            sock.bind(("127.0.0.1", 0))
        return [int(sock.getsockname()[1]) for sock in held]
    finally:
        for sock in held:
            sock.close()


def await_port(port: int) -> None:
    """Waits until somebody listens. Raises BenchError."""
    end_s = time.monotonic() + _START_S
    while True:
        with socket.socket() as sock:
            if sock.connect_ex(("127.0.0.1", port)) == 0:
                return
        if time.monotonic() > end_s:
            raise BenchError(f"nobody listens at port {port} after {_START_S:.0f} s")
        time.sleep(0.02)


def await_echo(port: int) -> None:
    """Waits until a frame comes back: the worker is configured and its link attached. Raises BenchError."""
    end_s = time.monotonic() + _START_S
    frame = b"\0\0\0\x01E"
    while time.monotonic() < end_s:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=2) as sock:
            sock.sendall(frame)
            if sock.recv(64) == frame:  # else it is an ERROR frame: not yet
                return
        time.sleep(0.05)
    raise BenchError(f"no frame came back from port {port} within {_START_S:.0f} s")


Stack = contextlib.ExitStack
Settings = dict[str, object]


def _c(programs: Programs, folder: Path, stack: Stack, _: Settings) -> Subject:
    process = stack.enter_context(running([programs.c["server"]]))
    return Subject(C, "frames", int(line_of(process)), {"server": [process.pid]})


def _settings(folder: Path, given: Settings) -> tuple[Path, int]:
    tcp, ws, admin = free_ports(3)
    flags: dict[str, object] = {
        "process.name": "edge-0", "process.uid": "u", "topology.path": str(folder / "topology.json"), "log.level": "error",
        "gateway.tcp_port": tcp, "gateway.ws_port": ws, "gateway.admin_port": admin, "gateway.run_dir": str(folder),
        "gateway.poll_port": 0,
        "gateway.workers": 1, "gateway.login_timeout_ms": 600_000,
    }  # fmt: skip
    flags |= {key if "." in key else f"gateway.{key}": value for key, value in given.items()}
    path = folder / "plato.yaml"
    path.write_text(dump(load(None, flags=flags, environ={})))
    return path, tcp


def _role(settings: Path, role: str) -> list[str | Path]:
    return [sys.executable, "-m", "plato_gateway", "--settings", settings, "--role", role]


def _worker(programs: Programs, folder: Path, stack: Stack, given: Settings) -> Subject:
    settings, tcp = _settings(folder, given)
    stack.enter_context(running([programs.c["link"], folder]))
    worker = stack.enter_context(running(_role(settings, "worker")))
    if not given:
        await_port(tcp)
        await_echo(tcp)
    return Subject(WORKER, "frames", tcp, {"worker": [worker.pid]}, SUFFIX_BYTES)


def _gateway(programs: Programs, folder: Path, stack: Stack, given: Settings) -> Subject:
    settings, tcp = _settings(folder, given)
    shard = stack.enter_context(running([sys.executable, "-m", "bench.shard"], cwd=ROOT))
    addr = f"127.0.0.1:{line_of(shard)}"
    own = Gateway("u", 1, 1, ("s0",), "127.0.0.1", tcp, tcp + 1, "127.0.0.1:1")
    write(
        folder / "topology.json",
        Topology("bench", 1, (SlotRange(0, 1023, "s0", 1),), {"s0": Shard(addr, "u")}, {"edge-0": own}),
    )
    link = stack.enter_context(running(_role(settings, "link")))
    worker = stack.enter_context(running(_role(settings, "worker")))
    if "tls.client_dir" not in given:
        await_echo(tcp)
    else:
        await_port(tcp)
    return Subject(GATEWAY, "frames", tcp, {"worker": [worker.pid], "link": [link.pid]}, SUFFIX_BYTES)


def _nats(programs: Programs, folder: Path, stack: Stack, _: Settings) -> Subject:
    assert programs.nats is not None
    (port,) = free_ports(1)
    config = folder / "nats.conf"
    config.write_text(
        f'listen: "127.0.0.1:{port}"\nmax_connections: 20000\nping_interval: "10m"\nwrite_deadline: "30s"\n'
    )
    log = stack.enter_context((folder / "log").open("wb"))
    process = stack.enter_context(running([programs.nats.path, "-c", config], log, programs.nats.env))
    await_port(port)
    return Subject(NATS, "nats", port, {"server": [process.pid]})


def _mosquitto(programs: Programs, folder: Path, stack: Stack, _: Settings) -> Subject:
    assert programs.mosquitto is not None
    (port,) = free_ports(1)
    config = folder / "mosquitto.conf"
    config.write_text(
        f"listener {port} 127.0.0.1\nallow_anonymous true\npersistence false\nlog_type error\nset_tcp_nodelay true\n"
        "max_queued_messages 0\nsys_interval 0\nuser root\n"
    )
    log = stack.enter_context((folder / "log").open("wb"))
    process = stack.enter_context(running([programs.mosquitto.path, "-c", config], log, programs.mosquitto.env))
    await_port(port)
    return Subject(MOSQUITTO, "mqtt", port, {"server": [process.pid]})


_STARTS = {C: _c, WORKER: _worker, GATEWAY: _gateway, NATS: _nats, MOSQUITTO: _mosquitto}


def there(programs: Programs) -> list[str]:
    """Names of those that this machine can have."""
    return [
        n
        for n in ALL
        if not (n == NATS and programs.nats is None) and not (n == MOSQUITTO and programs.mosquitto is None)
    ]
