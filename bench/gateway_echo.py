"""How much of a plain C epoll echo server one gateway worker holds, per core (design §14: ≥ 0.7).

`python bench/gateway_echo.py` builds gateway_echo.c, puts the same load on the C server and on a real worker whose
link is played by another process that sends every frame back, and compares frames per second of the server's own CPU
time: on a machine that other work shares, wall time says little.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import socket
import subprocess
import sys
import tempfile
import time
from array import array
from pathlib import Path

from plato.runtime.settings import dump, load
from plato_gateway.core import lanes

HERE = Path(__file__).parent
TICK_S = 1 / os.sysconf("SC_CLK_TCK")


def cpu_s(pid: int) -> float:
    """User and system time of a process, seconds."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(") ", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) * TICK_S


def echo_link(run_dir: Path) -> None:
    """A link that says hello and sends every frame back, until the worker ends."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(run_dir / "link.sock"))
    listener.listen()
    sock, _ = listener.accept()
    reader = lanes.LaneReader()
    sock.sendall(lanes.pack_slots(bytes(1024)))
    now_ms = time.time_ns() // 1_000_000
    sock.sendall(lanes.pack_config(lanes.Config(1, tuple(range(1024)), now_ms, now_ms + 3_600_000)))
    sock.sendall(lanes.pack_announce(0, 1, 1 << 40))
    with contextlib.suppress(ConnectionError):
        while data := sock.recv(1 << 20):
            for message in reader.feed(data):
                if isinstance(message, lanes.Events):
                    sock.sendall(_back(message))


def _back(events: lanes.Events) -> bytes:
    lengths, payloads, ids = array("I"), [], array("Q")
    at = 0
    for kind, conn_id, n in zip(events.kinds, array("Q", events.conn_ids), array("I", events.lengths), strict=True):
        end = at + n
        if kind == lanes.DATA:
            while at < end:
                size = int.from_bytes(events.data[at : at + 4], "big")
                payloads.append(events.data[at + 4 : at + 4 + size])
                lengths.append(size)
                ids.append(conn_id)
                at += 4 + size
        at = end
    count = len(ids)
    index = array("I", range(count)).tobytes()
    return lanes.pack_frames(
        lengths.tobytes(), b"".join(payloads), ids.tobytes(), index, bytes(count), b"", bytes(count)
    )


def measure(binary: Path, port: int, pid: int, options: argparse.Namespace, burst: int) -> float:
    """Frames per second of the server's CPU time."""
    arguments = [str(port), str(options.connections), str(options.seconds), str(options.bytes), str(burst)]
    before_s = cpu_s(pid)
    loaded = subprocess.run([str(binary), "load", *arguments], capture_output=True, text=True, check=True)
    return int(loaded.stdout) / (cpu_s(pid) - before_s)


def main() -> int:
    """Prints frames per CPU second of both, and the ratio. Exit code 1 if it is below --floor at one frame per packet."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--connections", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--bytes", type=int, default=100)
    parser.add_argument("--floor", type=float, default=0.0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        where = Path(folder)
        binary = where / "gateway_echo"
        subprocess.run(["cc", "-O2", "-o", str(binary), str(HERE / "gateway_echo.c")], check=True)
        with socket.socket() as a, socket.socket() as b:
            a.bind(("127.0.0.1", 0))
            b.bind(("127.0.0.1", 0))
            tcp, ws = a.getsockname()[1], b.getsockname()[1]
        flags = {"gateway.tcp_port": tcp, "gateway.ws_port": ws, "gateway.run_dir": str(where), "gateway.workers": 1}
        (where / "plato.yaml").write_text(dump(load(None, flags=flags, environ={})))
        server = subprocess.Popen([str(binary), "serve"], stdout=subprocess.PIPE, text=True)
        link = subprocess.Popen([sys.executable, __file__, "--link", folder])
        command = [sys.executable, "-m", "plato_gateway", "--settings", str(where / "plato.yaml"), "--role", "worker"]
        worker = subprocess.Popen(command)
        try:
            assert server.stdout is not None
            c_port = int(server.stdout.readline())
            time.sleep(2)  # the worker starts, is configured, is idle
            ratios = []
            for burst in (1, 16):
                plain = measure(binary, c_port, server.pid, options, burst)
                ours = measure(binary, tcp, worker.pid, options, burst)
                ratios.append(ours / plain)
                print(f"{burst:3} frames a packet: C {plain:9,.0f}/s  worker {ours:9,.0f}/s  ratio {ours / plain:.2f}")
            return int(ratios[0] < options.floor)
        finally:
            for process in (link, worker, server):
                process.kill()
                process.wait()


if __name__ == "__main__":
    if sys.argv[1:2] == ["--link"]:
        echo_link(Path(sys.argv[2]))
    else:
        sys.exit(main())
