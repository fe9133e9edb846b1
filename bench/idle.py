"""idle: memory of a connection that says nothing: anonymous pages per connection, by the slope from one crowd to twice it.

A first crowd connects, says one frame each and is silent; memory is read; the second one does the same. The slope leaves out
what the processes hold anyway. Columns: worker and link alone; the same with TLS; whole sessions, with state and its store.
"""

from __future__ import annotations

import contextlib
import datetime
import ipaddress
import socket
import ssl
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from bench import subjects
from bench.cluster import cluster, crowd, order, parts
from bench.loading import Options, expect, folder
from bench.processes import BenchError, Pids, anonymous_bytes, running
from bench.programs import Programs
from bench.report import Figure, Result
from bench.subjects import Subject

TARGET_BYTES = 512


def measure(programs: Programs, options: Options) -> Result:
    """Runs it. Three rounds: what a process holds does not depend on what else the machine does."""
    each = options.storm_connections // 2
    result = Result("idle", f"idle connection, slope from {each:,} to {2 * each:,}: bytes of user space per connection")
    slopes: dict[str, list[float]] = {}
    for _ in range(min(3, options.rounds)):
        for name, found in (("plain", _plain(programs, each)), ("C", _c(programs, each))):
            for part, slope in found.items():
                slopes.setdefault(f"{name}: {part}", []).append(slope)
    for part, slope in _tls(programs, each).items():
        slopes[f"TLS: {part}"] = [slope]
    for part, slope in _sessions(programs, options, each).items():
        slopes[f"sessions: {part}"] = [slope]
    for name, values in slopes.items():
        aim = ("<=", float(TARGET_BYTES)) if name == "plain: worker + link" else None
        result.figures.append(Figure(name, "bytes", tuple(values), aim))
    result.notes.append("anonymous pages, in steps of 4 KiB; kernel memory of the sockets is not counted")
    result.notes.append("C says what a bare epoll server takes; TLS and sessions are measured once")
    return result


def _read(pids: Pids) -> dict[str, int]:
    return {part: sum(map(anonymous_bytes, some)) for part, some in pids.items()}


def _settled(pids: Pids) -> dict[str, int]:
    """Memory when it stands still for half a second (2 s at most): what was just freed or fetched has its place."""
    before = _read(pids)
    for _ in range(4):
        time.sleep(0.5)
        after = _read(pids)
        if after == before:
            break
        before = after
    return before


def _slopes(read: list[dict[str, int]], each: int) -> dict[str, float]:
    before, after = read
    found = {part: (after[part] - before[part]) / each for part in before}
    if "link" in found:
        found["worker + link"] = found["worker"] + found["link"]
        if "state" in found:
            found["worker + link + state"] = found["worker + link"] + found["state"]
    return found


def _held(programs: Programs, subject: Subject, each: int) -> dict[str, float]:
    with contextlib.ExitStack() as stack:
        read = []
        for _ in range(2):
            command: list[str | Path] = [
                programs.c["load"],
                subject.dialect,
                str(subject.port),
                "hold",
                str(each),
                "100",
            ]
            expect(stack.enter_context(running(command)), "ready")
            read.append(_settled(subject.pids))
    return _slopes(read, each)


def _plain(programs: Programs, each: int) -> dict[str, float]:
    with folder() as where, subjects.started(subjects.GATEWAY, programs, where) as subject:
        return _held(programs, subject, each)


def _c(programs: Programs, each: int) -> dict[str, float]:
    with folder() as where, subjects.started(subjects.C, programs, where) as subject:
        return _held(programs, subject, each)


def _tls(programs: Programs, each: int) -> dict[str, float]:
    with folder() as where, contextlib.ExitStack() as stack:
        _certificate(where)
        given: dict[str, object] = {"tls.client_dir": str(where)}
        subject = stack.enter_context(subjects.started(subjects.GATEWAY, programs, where, **given))
        _await_tls(subject.port)
        read = []
        for _ in range(2):
            stack.enter_context(_tls_crowd(subject.port, each))
            read.append(_settled(subject.pids))
        return _slopes(read, each)


def _sessions(programs: Programs, options: Options, each: int) -> dict[str, float]:
    read = []
    wanted = ("worker", "link", "state", "valkey")
    with folder() as where, cluster(where, {"bus.type": options.bus}) as made, contextlib.ExitStack() as stack:
        for number in range(2):
            few = where / str(number)
            few.mkdir()
            people = stack.enter_context(crowd(programs, made, few, each, first=number * each))
            order(people, "enter", "ready")
            pids = {name: some for name, some in parts(made).items() if name in wanted}
            read.append(_settled(pids))
    return _slopes(read, each)


def _await_tls(port: int) -> None:
    """Waits until a frame comes back: before the link is attached the answer is "closing". Raises BenchError."""
    end_s = time.monotonic() + 20
    while True:
        try:
            with _tls_crowd(port, 1):
                return
        except (BenchError, OSError):
            if time.monotonic() > end_s:
                raise
            time.sleep(0.05)


@contextlib.contextmanager
def _tls_crowd(port: int, count: int) -> Iterator[None]:
    """Connections whose handshake and first frame are done; the client's half of TLS is thrown away, the sockets stay."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    frame = b"\0\0\0\x64" + b"E" * 100
    with contextlib.ExitStack() as stack:
        for _ in range(count):
            sock = stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=20))
            into, out = ssl.MemoryBIO(), ssl.MemoryBIO()
            tls = context.wrap_bio(into, out)
            _pumped(sock, into, out, tls.do_handshake)
            tls.write(frame)
            if _pumped(sock, into, out, partial(tls.read, 200)) != frame:
                raise BenchError("the frame did not come back over TLS")
        yield


def _pumped(sock: socket.socket, into: ssl.MemoryBIO, out: ssl.MemoryBIO, act: Callable[[], object]) -> object:
    """Moves bytes between the socket and TLS until `act` is done; its result."""
    while True:
        try:
            done = act()
        except ssl.SSLWantReadError:
            if out.pending:
                sock.sendall(out.read())
            into.write(sock.recv(65_536))
            continue
        if out.pending:
            sock.sendall(out.read())
        return done


def _certificate(where: Path) -> None:
    """A certificate for 127.0.0.1 that is valid for a day."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "bench")])
    now = datetime.datetime.now(datetime.UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(name).issuer_name(name).public_key(key.public_key()).serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1)).not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), critical=False)
        .sign(key, hashes.SHA256())
    )  # fmt: skip
    (where / "tls.crt").write_bytes(made.public_bytes(serialization.Encoding.PEM))
    encoding = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    (where / "tls.key").write_bytes(key.private_bytes(*encoding))
