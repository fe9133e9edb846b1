"""A real worker process, real sockets, and a link that the test plays over the lane."""

from __future__ import annotations

import os
import random
import resource
import signal
import socket
import struct
import subprocess
import sys
import time
from array import array
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from plato.core.codes import Code
from plato.core.frames import FrameReader, pack, split
from plato.core.ids import slot_of, worker_id_of
from plato.runtime.settings import Settings, dump
from plato.wire.v1 import canned
from plato.wire.v1 import client_pb2 as wire_pb
from plato_gateway.core import lanes
from plato_gateway.core.drain import Mode
from plato_gateway.uplink import SHARE

DEADLINE_S = 30.0
CREDIT_BYTES = 4_194_304
WORKER_ID = 7
WS_KEY = b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n\r\n"
Event = tuple[int, int, bytes]


class FakeLink:
    """The link's end of one worker's lane. `events` holds (kind, conn_id, data) in order, `attaches` their numbers."""

    def __init__(self, run_dir: Path) -> None:
        run_dir.mkdir(parents=True, exist_ok=True)
        path = run_dir / "link.sock"
        path.unlink(missing_ok=True)
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen(4)
        self._listener.settimeout(DEADLINE_S)
        self._sock = socket.socket(socket.AF_UNIX)
        self._reader = lanes.LaneReader()
        self.events: list[Event] = []
        self.attaches: list[int] = []
        self.stats = lanes.Stats()
        self.hello: lanes.Hello

    def accept(self) -> lanes.Hello:
        """Waits for the worker."""
        self._sock.close()
        self._sock, _ = self._listener.accept()
        self._reader = lanes.LaneReader()
        self._got: list[lanes.Message] = []
        self.until(lambda: any(isinstance(m, lanes.Hello) for m in self._got))
        self.hello = next(m for m in self._got if isinstance(m, lanes.Hello))
        return self.hello

    def attach(
        self, *, table: bytes = bytes(1024), groups: tuple[int, ...] = (0,), credit_bytes: int = CREDIT_BYTES
    ) -> None:
        """Says what a link says first: slots, home slots with an hour of stamps, an announcement per group."""
        now_ms = time.time_ns() // 1_000_000
        self.send(lanes.pack_slots(table))
        self.send(lanes.pack_config(lanes.Config(WORKER_ID, tuple(range(1024)), now_ms, now_ms + 3_600_000)))
        for i, group in enumerate(groups):
            self.send(lanes.pack_announce(group, self.hello.attach + 1 + i, credit_bytes))
        self.until(lambda: sum(k == lanes.END for k, _, _ in self.events) >= len(groups))

    def send(self, message: bytes) -> None:
        self._sock.settimeout(DEADLINE_S)
        self._sock.sendall(message)

    def frames(self, entries: list[tuple[int, bytes, bytes, int]]) -> None:
        """Sends (conn_id, payload, suffix, flags) as one batch."""
        self.send(
            lanes.pack_frames(
                array("I", [len(e[1]) for e in entries]).tobytes(),
                b"".join(e[1] for e in entries),
                array("Q", [e[0] for e in entries]).tobytes(),
                array("I", range(len(entries))).tobytes(),
                bytes(len(e[2]) for e in entries),
                b"".join(e[2] for e in entries),
                bytes(e[3] for e in entries),
            )
        )

    def pump(self, timeout_s: float = 0.02) -> bool:
        """Takes what came within the time; False: nothing."""
        self._sock.settimeout(timeout_s)
        try:
            data = self._sock.recv(1 << 20)
        except (TimeoutError, BlockingIOError):
            return False
        assert data, "the worker closed the lane"
        for message in self._reader.feed(data):
            self._got.append(message)
            if isinstance(message, lanes.Stats):
                self.stats = message
            elif isinstance(message, lanes.Events):
                ids, lengths, at = array("Q", message.conn_ids), array("I", message.lengths), 0
                for kind, conn_id, n in zip(message.kinds, ids, lengths, strict=True):
                    self.events.append((kind, conn_id, message.data[at : at + n]))
                    self.attaches.append(message.attach)
                    at += n
                assert at == len(message.data)
        return True

    def until(self, condition: Callable[[], bool]) -> None:
        """Takes messages until the condition holds."""
        end_s = time.monotonic() + DEADLINE_S
        while not condition():
            assert time.monotonic() < end_s, f"not within {DEADLINE_S} s; last events {self.events[-5:]}"
            self.pump()

    def taken(self) -> None:
        """Waits until the worker took all that was said: it answers a question in its turn. Silence would not tell."""

        def answers() -> int:
            return sum(isinstance(m, lanes.Held) for m in self._got)

        before = answers()
        self.send(lanes.pack_drain(Mode.SERVE))
        self.until(lambda: answers() > before)

    def listen_for(self, seconds: float) -> None:
        """Takes messages for so long."""
        end_s = time.monotonic() + seconds
        while time.monotonic() < end_s:
            self.pump()

    def conn_id_of(self, sock: socket.socket) -> int:
        """Waits for, and gives, the conn_id that was opened for a client's socket."""
        host, port = sock.getsockname()[:2]
        end = f"{host}:{port}".encode()
        self.until(lambda: any(k == lanes.OPENED and d[1:] == end for k, _, d in self.events))
        return next(c for k, c, d in self.events if k == lanes.OPENED and d[1:] == end)

    def data_of(self, conn_id: int) -> list[bytes]:
        """The payloads that came from a connection, in order."""
        return [p for k, c, d in self.events if k == lanes.DATA and c == conn_id for p in split(d)]

    def closes_of(self, conn_id: int) -> list[int]:
        """The codes of its CLOSED events."""
        return [int.from_bytes(d, "big") for k, c, d in self.events if k == lanes.CLOSED and c == conn_id]

    def drop(self) -> None:
        """The link dies."""
        self._sock.close()
        self._listener.close()


class Running:
    """A worker process with a fake link."""

    def __init__(self, settings: Settings, process: subprocess.Popen[bytes], link: FakeLink) -> None:
        self.settings = settings
        self.process = process
        self.link = link
        self.made: list[socket.socket] = []
        """Clients' sockets, closed with the test."""

    def connect(self, port: int | None = None) -> socket.socket:
        sock = socket.create_connection(("127.0.0.1", port or self.settings.gateway.tcp_port), DEADLINE_S)
        sock.settimeout(DEADLINE_S)
        self.made.append(sock)
        return sock

    def close_all(self) -> None:
        for sock in self.made:
            sock.close()

    @property
    def memory_bytes(self) -> int:
        fields = Path(f"/proc/{self.process.pid}/statm").read_text().split()
        return int(fields[1]) * resource.getpagesize()

    @property
    def fds(self) -> int:
        return sum(1 for _ in Path(f"/proc/{self.process.pid}/fd").iterdir())


Start = Callable[..., Running]


@pytest.fixture
def start(make_settings: Callable[..., Settings], tmp_path: Path) -> Iterator[Start]:
    """start(attach=True, **gateway settings) gives a Running; all end with the test."""
    with ExitStack() as stack:

        def begin(*, attach: bool = True, nofile: int = 0, **gateway: Any) -> Running:
            settings = make_settings(**gateway)
            link = FakeLink(settings.gateway.run_dir)
            file = tmp_path / "plato.yaml"
            file.write_text(dump(settings))
            command = [sys.executable, "-m", "plato_gateway", "--settings", str(file), "--role", "worker"]
            if nofile:
                command = ["bash", "-c", f'ulimit -n {nofile}; exec "$@"', "-", *command]
            process = subprocess.Popen(command)
            stack.callback(process.wait)
            stack.callback(process.kill)
            stack.callback(link.drop)
            link.accept()
            if attach:
                link.attach()
            running = Running(settings, process, link)
            stack.callback(running.close_all)
            return running

        yield begin


def read_frame(sock: socket.socket) -> bytes:
    """One frame's payload; b"" at the end of the stream."""
    header = read_exactly(sock, 4)
    return read_exactly(sock, int.from_bytes(header, "big")) if header else b""


def read_exactly(sock: socket.socket, n: int) -> bytes:
    got = b""
    while len(got) < n:
        piece = sock.recv(n - len(got))
        if not piece:
            assert not got, f"the stream ended within a frame: {got!r}"
            return b""
        got += piece
    return got


def fill(sock: socket.socket) -> bool:
    """Sends frames until the socket is full; True: it became so."""
    for _ in range(10_000):
        try:
            sock.send(pack(b"x" * 10_000))
        except BlockingIOError:
            return True
    return False


def wait_for(condition: Callable[[], bool], what: str) -> None:
    end_s = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < end_s, f"not within {DEADLINE_S} s: {what}"
        time.sleep(0.01)


# ── frames in ────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_frame_split_at_every_byte_arrives_the_same(start: Start) -> None:
    w = start()
    payload = b"abcdefgh"
    wire = pack(payload)
    sock = w.connect()
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    conn_id = w.link.conn_id_of(sock)
    for cut in range(1, len(wire)):
        sock.sendall(wire[:cut])
        w.link.until(lambda: not w.link.pump(0.003))  # a pause, so that the first part is read alone
        sock.sendall(wire[cut:])
        w.link.until(lambda cut=cut: len(w.link.data_of(conn_id)) == cut)  # type: ignore[misc]  # mypy infers no default
    for byte in wire * 3:
        sock.sendall(bytes([byte]))
    w.link.until(lambda: len(w.link.data_of(conn_id)) == len(wire) - 1 + 3)
    assert set(w.link.data_of(conn_id)) == {payload}


def test_ten_frames_in_one_packet_arrive_in_order_as_one_run(start: Start) -> None:
    w = start()
    sock = w.connect()
    conn_id = w.link.conn_id_of(sock)
    sent = [b"frame %d" % i for i in range(10)]
    sock.sendall(b"".join(map(pack, sent)))
    w.link.until(lambda: len(w.link.data_of(conn_id)) == 10)
    assert w.link.data_of(conn_id) == sent
    assert [k for k, c, _ in w.link.events if c == conn_id] == [lanes.OPENED, lanes.DATA]


def test_frames_of_many_connections_keep_their_order_under_load(start: Start) -> None:
    w = start()
    chance = random.Random(7)
    sent: dict[int, list[bytes]] = {}
    with ExitStack() as stack:
        socks = [stack.enter_context(w.connect()) for _ in range(20)]
        ids = [w.link.conn_id_of(s) for s in socks]
        streams = []
        for i, conn_id in enumerate(ids):
            sent[conn_id] = [b"%d/%d/" % (i, n) + b"x" * chance.randrange(0, 3_000) for n in range(60)]
            streams.append(b"".join(map(pack, sent[conn_id])))
        at = [0] * len(socks)
        while any(at[i] < len(streams[i]) for i in range(len(socks))):
            i = chance.randrange(len(socks))
            step = chance.choice((1, 7, 500, 5_000, 20_000))
            socks[i].sendall(streams[i][at[i] : at[i] + step])
            at[i] += step
            w.link.pump(0.0001)
        w.link.until(lambda: all(len(w.link.data_of(c)) == 60 for c in ids))
    assert {c: w.link.data_of(c) for c in ids} == sent


def test_the_largest_frame_passes_and_one_byte_more_is_refused(start: Start) -> None:
    w = start(max_frame_bytes=4_096)
    sock = w.connect()
    conn_id = w.link.conn_id_of(sock)
    sock.sendall(pack(b"x" * 4_096))
    w.link.until(lambda: w.link.data_of(conn_id) == [b"x" * 4_096])
    sock.sendall(pack(b"x" * 4_097))
    assert read_frame(sock) == canned.FRAME_SIZE
    assert read_frame(sock) == b""
    w.link.until(lambda: w.link.closes_of(conn_id) == [Code.FRAME_SIZE])


def test_bad_lengths_harm_only_their_sender(start: Start) -> None:
    w = start()
    before = w.memory_bytes
    with ExitStack() as stack:
        good = stack.enter_context(w.connect())
        good_id = w.link.conn_id_of(good)
        bad = [stack.enter_context(w.connect()) for _ in range(100)]
        for i, sock in enumerate(bad):
            sock.sendall(b"\0\0\0\0" if i % 2 else b"\x7f\xff\xff\xff\x01")
        for sock in bad:
            assert read_frame(sock) == canned.FRAME_SIZE
            assert read_frame(sock) == b""
        good.sendall(pack(b"still here"))
        w.link.until(lambda: w.link.data_of(good_id) == [b"still here"])
        w.link.until(lambda: w.link.stats.bad_frames == 100)
    assert w.memory_bytes - before < 10 * 1024 * 1024


def test_ids_are_minted_in_home_slots_with_the_given_worker_id(start: Start) -> None:
    w = start()
    now_ms = time.time_ns() // 1_000_000
    w.link.send(lanes.pack_config(lanes.Config(WORKER_ID, (4, 900), now_ms, now_ms + 3_600_000)))
    with ExitStack() as stack:
        socks = [stack.enter_context(w.connect()) for _ in range(40)]
        ids = [w.link.conn_id_of(s) for s in socks]
    assert len(set(ids)) == 40
    assert {slot_of(i) for i in ids} == {4, 900}
    assert {worker_id_of(i) for i in ids} == {WORKER_ID}


# ── frames out, closes ───────────────────────────────────────────────────────────────────────────────────────


def test_frames_are_sent_with_their_suffix_and_only_to_who_is_here(start: Start) -> None:
    w = start()
    with w.connect() as a, w.connect() as b:
        a_id, b_id = w.link.conn_id_of(a), w.link.conn_id_of(b)
        w.link.frames(
            [
                (a_id, b"one", b"", 0),
                (b_id, b"two", b"-s", 0),
                (12345, b"nobody", b"xyz", 0),
                (a_id, b"three", b"-t", 0),
            ]
        )
        assert read_frame(a) == b"one"
        assert read_frame(a) == b"three-t"
        assert read_frame(b) == b"two-s"
    w.link.until(lambda: w.link.stats.frames_unknown == 1 and w.link.stats.frames_out == 3)


def test_a_run_is_its_frames_whatever_stands_beside_it_on_tcp_and_websocket(start: Start) -> None:
    w = start()
    runs = [(b"one", b"two"), (b"x" * 70_000, b"z", b"y" * 130)]
    with w.connect() as tcp, w.connect(w.settings.gateway.ws_port) as ws:
        ws.sendall(UPGRADE % b"")
        ids = [w.link.conn_id_of(tcp), w.link.conn_id_of(ws)]
        assert _until(ws, b"\r\n\r\n").startswith(b"HTTP/1.1 101 ")
        out = 0
        for run in runs:
            data, count = b"".join(map(pack, run)), len(run).to_bytes(4, "little")
            w.link.frames([(i, data, count, lanes.RUN) for i in (*ids, 12345)])  # no connection twice
            three = ((b"before", b"-", 0), (data, count, lanes.RUN), (b"behind", b"", 0))
            w.link.frames([(i, *entry) for i in ids for entry in three])
            out += 2 * (2 * len(run) + 2)
            want = [*run, b"before-", *run, b"behind"]
            assert [read_frame(tcp) for _ in want] == want
            assert [_message(ws) for _ in want] == want
        w.link.until(lambda: w.link.stats.frames_out == out and w.link.stats.frames_unknown == len(runs))


def test_a_run_for_who_does_not_read_waits_and_comes_whole(start: Start) -> None:
    w = start(send_queue_bytes=8 * 1024 * 1024)
    with w.connect() as sock:
        conn_id = w.link.conn_id_of(sock)
        frames = [b"%d" % n + b"x" * 60_000 for n in range(64)]
        for at in range(0, 64, 8):
            w.link.frames([(conn_id, b"".join(map(pack, frames[at : at + 8])), b"\x08\0\0\0", lanes.RUN)])
        w.link.frames([(conn_id, b"bye", b"", lanes.CLOSE_AFTER)])
        got = []
        while frame := read_frame(sock):
            got.append(frame)
        assert got == [*frames, b"bye"]


def test_a_frame_for_a_closed_connection_never_reaches_the_next_one_at_its_fd(start: Start) -> None:
    w = start()
    old = w.connect()
    old_id = w.link.conn_id_of(old)
    old.close()
    w.link.until(lambda: w.link.closes_of(old_id) == [0])
    with w.connect() as new:
        new_id = w.link.conn_id_of(new)
        w.link.frames([(old_id, b"for the old one", b"", 0), (new_id, b"for the new one", b"", 0)])
        assert read_frame(new) == b"for the new one"


def test_r3_close_carries_its_last_frame(start: Start) -> None:
    """The last frame arrives although megabytes wait before it and the peer keeps sending."""
    w = start(send_queue_bytes=8 * 1024 * 1024)
    sock = w.connect()
    conn_id = w.link.conn_id_of(sock)
    bulk = [b"%d" % i + b"x" * 60_000 for i in range(64)]
    w.link.frames([(conn_id, p, b"", 0) for p in bulk])
    sock.sendall(pack(b"unread") * 1_000)  # bytes that nobody reads would turn a plain close into a reset
    w.link.frames([(conn_id, b"goodbye", b"!", lanes.CLOSE_AFTER), (conn_id, b"too late", b"", 0)])
    got = []
    while frame := read_frame(sock):
        got.append(frame)
    assert got == [*bulk, b"goodbye!"]
    w.link.until(lambda: w.link.closes_of(conn_id) == [0])
    sock.close()
    free = w.fds
    with w.connect() as other:
        w.link.conn_id_of(other)
    wait_for(lambda: w.fds <= free, "the closed socket's descriptor is free")


def test_a_peer_that_ignores_the_close_is_cut_in_time(start: Start) -> None:
    w = start()
    idle_fds = w.fds
    sock = w.connect()
    conn_id = w.link.conn_id_of(sock)
    w.link.frames([(conn_id, b"bye", b"", lanes.CLOSE_AFTER)])
    assert read_frame(sock) == b"bye"
    began_s = time.monotonic()
    wait_for(lambda: w.fds <= idle_fds, "the worker gave the socket up")
    assert time.monotonic() - began_s < 12
    sock.close()


def test_a_slow_reader_is_closed_with_slow_reader_and_others_are_served(start: Start) -> None:
    w = start(send_queue_bytes=131_072)
    before = w.memory_bytes
    slow, other = w.connect(), w.connect()
    slow_id, other_id = w.link.conn_id_of(slow), w.link.conn_id_of(other)
    sent = 0
    while not w.link.closes_of(slow_id):
        assert sent < 100_000, "it was never found slow"
        w.link.frames([(slow_id, b"%d/" % (sent + i) + b"x" * 1_000, b"", 0) for i in range(200)])
        sent += 200
        w.link.frames([(other_id, b"tick", b"", 0)])
        assert read_frame(other) == b"tick"
        w.link.pump(0.001)
    assert w.link.closes_of(slow_id) == [Code.SLOW_READER]
    frames = []
    while frame := read_frame(slow):
        frames.append(frame)
    assert frames[-1] == canned.SLOW_READER
    assert [int(f.split(b"/")[0]) for f in frames[:-1]] == list(range(len(frames) - 1)), "whole frames, in order"
    assert w.memory_bytes - before < 20 * 1024 * 1024
    other.sendall(pack(b"fine"))
    w.link.until(lambda: w.link.data_of(other_id) == [b"fine"])


# ── login time-out, limits ───────────────────────────────────────────────────────────────────────────────────


def test_silent_sockets_and_dribblers_are_closed_in_time_and_the_rest_is_served(start: Start) -> None:
    w = start(login_timeout_ms=1_000)
    with ExitStack() as stack:

        def said(words: bytes, port: int | None = None) -> socket.socket:
            """A client that speaks as soon as it is there: its time-out runs, however long we are kept from going on."""
            sock = stack.enter_context(w.connect(port))
            sock.sendall(words)
            return sock

        good = said(pack(b"first"))
        good_id = w.link.conn_id_of(good)
        silent = [stack.enter_context(w.connect()) for _ in range(200)]
        dribbling = [said(b"\0\0") for _ in range(200)]
        half_open = [said(b"GET /ws HTTP/1.1\r\nHost: x\r\n", w.settings.gateway.ws_port) for _ in range(50)]
        good.sendall(pack(b"meanwhile"))
        w.link.until(lambda: w.link.data_of(good_id) == [b"first", b"meanwhile"])
        for sock in (*silent, *dribbling):
            assert read_frame(sock) == canned.LOGIN_TIMEOUT
            assert read_frame(sock) == b""
        for sock in half_open:
            assert sock.recv(4096).startswith(b"HTTP/1.1 408 ")
        w.link.until(lambda: w.link.stats.login_timeouts == 450)
        w.link.until(lambda: sum(k == lanes.CLOSED for k, _, _ in w.link.events) >= 400)
        codes = [int.from_bytes(d, "big") for k, _, d in w.link.events if k == lanes.CLOSED]
        assert codes == [Code.LOGIN_TIMEOUT] * 400
        good.sendall(pack(b"still here"))
        w.link.until(lambda: w.link.data_of(good_id)[-1] == b"still here")


def test_r10_a_stopped_worker_does_not_time_out_who_waited_meanwhile(start: Start) -> None:
    w = start(login_timeout_ms=3_000)
    sock = w.connect()
    conn_id = w.link.conn_id_of(sock)
    w.process.send_signal(signal.SIGSTOP)
    sock.sendall(pack(b"hello"))
    stopped = w.connect()  # the kernel accepts it while the worker sleeps
    time.sleep(3.5)  # longer than the time-out, by the clock: this is what the test is about
    w.process.send_signal(signal.SIGCONT)
    w.link.until(lambda: w.link.data_of(conn_id) == [b"hello"])
    stopped_id = w.link.conn_id_of(stopped)
    stopped.sendall(pack(b"me too"))
    w.link.until(lambda: w.link.data_of(stopped_id) == [b"me too"])
    assert w.link.stats.login_timeouts == 0


def test_past_max_connections_the_next_gateway_is_named_on_both_listeners(start: Start) -> None:
    w = start(max_connections=2)
    with w.connect() as a, w.connect() as b:
        a_id, b_id = w.link.conn_id_of(a), w.link.conn_id_of(b)
        with w.connect() as refused:
            assert read_frame(refused) == canned.GATEWAY_FULL
            assert read_frame(refused) == b""
        with w.connect(w.settings.gateway.ws_port) as refused:
            assert refused.recv(4096).startswith(b"HTTP/1.1 503 ")
        a.close()
        w.link.until(lambda: w.link.closes_of(a_id) == [0])
        with w.connect() as c:
            assert w.link.conn_id_of(c) not in (a_id, b_id)


def test_an_address_past_its_connections_is_told_when_on_both_listeners_and_others_come_in(start: Start) -> None:
    w = start(connections_per_address=2)
    with w.connect() as a, w.connect(w.settings.gateway.ws_port):
        a_id = w.link.conn_id_of(a)
        with w.connect() as refused:
            assert read_frame(refused) == canned.address_busy(30_000)
            assert read_frame(refused) == b""
        with w.connect(w.settings.gateway.ws_port) as refused:
            answer = refused.recv(4096)
            assert answer.startswith(b"HTTP/1.1 429 ")
            assert b"retry-after: 30" in answer.lower()
        where = "127.0.0.1", w.settings.gateway.tcp_port
        with socket.create_connection(where, DEADLINE_S, source_address=("127.0.0.2", 0)) as other:
            w.link.conn_id_of(other)
        a.close()
        w.link.until(lambda: w.link.closes_of(a_id) == [0])
        with w.connect() as c:
            w.link.conn_id_of(c)
        w.link.until(lambda: w.link.stats.refused == 2)


def test_an_address_that_connects_too_fast_waits_and_keeps_what_it_has(start: Start) -> None:
    w = start(connects_per_s_per_address=1)
    let_in = [w.connect() for _ in range(10)]
    first_id = w.link.conn_id_of(let_in[0])
    refused = [w.connect() for _ in range(5)][-1]  # a second that passed on the way here lets one more in
    frame = wire_pb.MsgCmd.FromString(read_frame(refused))
    error = wire_pb.ErrorMsg.FromString(frame.Payload)
    assert error.code == Code.ADDRESS_BUSY
    assert 0 < error.retry_ms <= 1_001
    let_in[0].sendall(pack(b"still here"))
    w.link.until(lambda: w.link.data_of(first_id) == [b"still here"])


def test_without_a_window_or_home_slots_new_ones_are_refused_and_old_ones_kept(start: Start) -> None:
    w = start(attach=False)
    with w.connect() as early:
        assert read_frame(early) == canned.GATEWAY_CLOSING
    w.link.attach()
    with w.connect() as kept:
        kept_id = w.link.conn_id_of(kept)
        w.link.send(lanes.pack_config(lanes.Config(WORKER_ID, (), 0, 0)))
        w.link.taken()
        with w.connect() as refused:
            assert read_frame(refused) == canned.GATEWAY_CLOSING
        kept.sendall(pack(b"kept"))
        w.link.until(lambda: w.link.data_of(kept_id) == [b"kept"])


def test_running_out_of_descriptors_refuses_and_recovers(start: Start) -> None:
    w = start(nofile=60)
    with ExitStack() as stack:
        socks = [stack.enter_context(w.connect()) for _ in range(90)]
        w.link.until(lambda: w.link.stats.refused >= 1)
        first_id = w.link.conn_id_of(socks[0])
        socks[0].sendall(pack(b"alive"))
        w.link.until(lambda: w.link.data_of(first_id) == [b"alive"])
    w.link.until(lambda: w.link.stats.connections == 0)
    with w.connect() as again:
        w.link.conn_id_of(again)


def test_sigterm_tells_everybody_that_the_gateway_closes(start: Start) -> None:
    w = start()
    with w.connect() as sock:
        conn_id = w.link.conn_id_of(sock)
        w.process.send_signal(signal.SIGTERM)
        assert read_frame(sock) == canned.GATEWAY_CLOSING
        assert read_frame(sock) == b""
        w.link.until(lambda: w.link.closes_of(conn_id) == [Code.GATEWAY_CLOSING])
    assert w.process.wait(DEADLINE_S) == 0


def test_a_drain_refuses_newcomers_in_words_names_who_is_here_and_cuts_when_told(start: Start) -> None:
    def held(mode: Mode) -> lanes.Held:
        w.link.send(lanes.pack_drain(mode))
        w.link.until(lambda: any(isinstance(m, lanes.Held) and m.mode == mode for m in w.link._got))
        found = [m for m in w.link._got if isinstance(m, lanes.Held) and m.mode == mode]
        w.link._got.clear()
        return found[-1]

    def closed(conn_id: int) -> None:
        w.link.until(lambda: w.link.closes_of(conn_id) == [Code.GATEWAY_CLOSING])

    w = start()
    with w.connect() as here:
        conn_id = w.link.conn_id_of(here)
        assert list(held(Mode.REFUSE).conn_ids) == [conn_id]
        with w.connect() as refused:
            assert read_frame(refused) == canned.GATEWAY_CLOSING
        with w.connect(w.settings.gateway.ws_port) as refused:
            refused.sendall(b"GET /ws HTTP/1.1\r\nHost: x\r\nConnection: upgrade\r\nUpgrade: websocket\r\n" + WS_KEY)
            assert refused.recv(4096).startswith(b"HTTP/1.1 503 ")
        here.sendall(pack(b"still here"))
        w.link.until(lambda: w.link.data_of(conn_id) == [b"still here"])
        held(Mode.SERVE)
        with w.connect() as late:
            late_id = w.link.conn_id_of(late)
            cut = held(Mode.CUT)
            assert (cut.cut, list(cut.conn_ids)) == (2, [])
            for sock, number in ((here, conn_id), (late, late_id)):
                assert read_frame(sock) == canned.GATEWAY_CLOSING
                assert read_frame(sock) == b""
                closed(number)
        assert held(Mode.CUT).cut == 2
        held(Mode.SERVE)
        assert held(Mode.REFUSE).cut == 0, "of another drain"


# ── the lane ─────────────────────────────────────────────────────────────────────────────────────────────────


def test_r6_attach_names_live_connections(start: Start) -> None:
    w = start()
    link = w.link
    with w.connect() as a, w.connect() as b, w.connect() as gone:
        ids = {link.conn_id_of(s) for s in (a, b)}
        gone_id = link.conn_id_of(gone)
        gone.close()
        link.until(lambda: link.closes_of(gone_id) == [0])
        at = len(link.events)
        a_id = link.conn_id_of(a)
        a.sendall(pack(b"before"))
        link.until(lambda: link.data_of(a_id) == [b"before"])
        link.send(lanes.pack_announce(0, link.hello.attach + 2, CREDIT_BYTES))
        link.until(lambda: any(k == lanes.END for k, _, _ in link.events[at:]))
        a.sendall(pack(b"after"))
        link.until(lambda: link.data_of(a_id) == [b"before", b"after"])
    said = list(zip(link.events, link.attaches, strict=True))[at:]
    kinds = [e[0] for e, _ in said if e[0] != lanes.CLOSED]
    assert kinds == [lanes.DATA, lanes.BEGIN, lanes.NAMED, lanes.NAMED, lanes.END, lanes.DATA]
    assert {e[1] for e, _ in said if e[0] == lanes.NAMED} == ids
    assert {e[2][:2] for e, _ in said if e[0] == lanes.NAMED} == {b"t1"}
    assert next(e[2] for e, _ in said if e[0] == lanes.BEGIN) == b"\xff" * 128
    # What was said before the announcement bears the older number, what comes after the newer.
    numbers = [n for (k, _, _), n in said if k != lanes.CLOSED]
    assert numbers == [link.hello.attach + 1] + [link.hello.attach + 2] * 5


def test_r6_a_held_slot_is_read_only_after_its_connections_were_named(start: Start) -> None:
    w = start(attach=False)
    link = w.link
    link.attach(groups=(0, 1), table=bytes(1023) + b"\1")  # nearly all slots are group 0's
    with w.connect() as moves, w.connect() as stays, w.connect() as ends:
        moving, staying, ending = (link.conn_id_of(s) for s in (moves, stays, ends))
        slots = {moving & 0x3FF, ending & 0x3FF} - {staying & 0x3FF}
        link.send(lanes.pack_hold(slots))
        link.send(lanes.pack_slots(bytes(int(s in slots) for s in range(1024))))
        link.taken()
        moves.sendall(pack(b"first"))
        stays.sendall(pack(b"not held"))
        link.until(lambda: link.data_of(staying) == [b"not held"])
        moves.sendall(pack(b"second"))
        link.frames([(moving, b"from the old shard", b"", 0), (ending, b"bye", b"", lanes.CLOSE_AFTER)])
        assert read_frame(moves) == b"from the old shard"  # what comes down is not held
        assert read_frame(ends) == b"bye"
        assert link.data_of(moving) == []
        at = len(link.events)
        link.send(lanes.pack_hold(()))
        link.until(lambda: link.data_of(moving) == [b"first", b"second"])
        said = [(k, c) for k, c, _ in link.events[at:] if c != staying]
        begin = next(d for k, _, d in link.events[at:] if k == lanes.BEGIN)
        assert set(lanes.slots_of_bits(begin)) == slots
        assert said[0] == (lanes.BEGIN, 0)
        assert (lanes.NAMED, moving) in said
        end, data = said.index((lanes.END, 0)), said.index((lanes.DATA, moving))
        assert said.index((lanes.NAMED, moving)) < end < data
        assert (lanes.NAMED, ending) not in said
        assert said.index((lanes.CLOSED, ending)) > end  # the new shard hears what the old one could not
        assert set(link.attaches[at:]) == {link.hello.attach + 2}  # no new attach: nothing in flight was lost


def test_a_link_that_restarts_finds_every_socket_again_and_loses_nothing_sent_meanwhile(start: Start) -> None:
    w = start()
    with ExitStack() as stack:
        socks = [stack.enter_context(w.connect()) for _ in range(30)]
        ids = [w.link.conn_id_of(s) for s in socks]
        boot, attach = w.link.hello.boot, w.link.attaches[-1]
        w.link.drop()
        for i, sock in enumerate(socks):
            sock.sendall(pack(b"sent into the gap %d" % i))
        link = FakeLink(w.settings.gateway.run_dir)
        stack.callback(link.drop)
        hello = link.accept()
        assert (hello.boot, hello.attach, hello.connections) == (boot, attach, 30)
        link.attach()
        assert sorted(c for k, c, _ in link.events if k == lanes.NAMED) == sorted(ids)
        link.until(lambda: all(len(link.data_of(c)) == 1 for c in ids))
        for i, conn_id in enumerate(ids):
            assert link.data_of(conn_id) == [b"sent into the gap %d" % i]
        link.frames([(c, b"welcome", b"", 0) for c in ids])
        assert [read_frame(s) for s in socks] == [b"welcome"] * 30


def test_a_group_without_credit_stops_its_connections_and_no_others(start: Start) -> None:
    w = start(attach=False)
    link = w.link
    # Even slots belong to group 0, odd ones to group 1.
    link.attach(table=bytes(s % 2 for s in range(1024)), groups=(0, 1), credit_bytes=100_000)
    with ExitStack() as stack:
        socks = {link.conn_id_of(s): s for s in (stack.enter_context(w.connect()) for _ in range(8))}
        starved = [c for c in socks if slot_of(c) % 2 == 0]
        fine = [c for c in socks if slot_of(c) % 2 == 1]
        assert starved
        assert fine
        for c in starved:
            socks[c].setblocking(False)
            assert fill(socks[c])

        def taken(group: list[int]) -> int:
            return sum(len(p) for c in group for p in link.data_of(c))

        for c in fine:
            for n in range(20):
                socks[c].sendall(pack(b"%d" % n))
        link.until(lambda: all(len(link.data_of(c)) == 20 for c in fine))
        use_up(link, lambda: taken(starved) > 80_000)
        assert taken(starved) < 200_000
        before = taken(starved)
        link.send(lanes.pack_credit(0, 300_000))
        use_up(link, lambda: taken(starved) > before + 150_000)
        assert taken(starved) < before + 600_000


def use_up(link: FakeLink, enough: Callable[[], bool]) -> None:
    """Returns of nothing, each of which gives every connection its share anew, until no credit is left. enough: was taken
    by then; a worker that is kept waiting for its core is silent, too."""
    end_s, silent = time.monotonic() + DEADLINE_S, 0
    while silent < 5 or not enough():
        assert time.monotonic() < end_s, "credit was left over"
        link.send(lanes.pack_credit(0, 0))
        silent = 0 if link.pump(0.1) else silent + 1


@pytest.mark.parametrize("ws", [False, True])
def test_one_connection_gets_its_share_of_a_groups_credit_and_the_others_are_served(start: Start, ws: bool) -> None:
    w = start(attach=False)
    link = w.link
    link.attach(credit_bytes=CREDIT_BYTES)
    share_bytes = CREDIT_BYTES // SHARE
    with ExitStack() as stack:
        quiet = stack.enter_context(w.connect())
        quiet_id = link.conn_id_of(quiet)
        greedy = stack.enter_context(w.connect(w.settings.gateway.ws_port if ws else None))
        flood, said = pack(b"x" * 1_000), b"x" * 1_000
        if ws:
            greedy.sendall(b"GET /ws HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n" + WS_KEY)
            assert greedy.recv(4_096).startswith(b"HTTP/1.1 101")
            flood = b"\x82\xfe" + (1_000).to_bytes(2, "big") + bytes(4) + said
        greedy_id = link.conn_id_of(greedy)
        greedy.setblocking(False)

        def taken() -> int:
            return sum(len(d) for k, c, d in link.events if k == lanes.DATA and c == greedy_id)

        for turn in range(1, 4):
            # No credit comes back; it says as much as anybody takes.
            end_s, silent = time.monotonic() + DEADLINE_S, 0
            while silent < 5:
                assert time.monotonic() < end_s
                with suppress(BlockingIOError):
                    while True:
                        greedy.send(flood * 64)
                silent = 0 if link.pump(0.02) else silent + 1
            assert taken() < turn * (share_bytes + 40_000), "a share, and what one read brings beyond it"
            quiet.sendall(pack(b"%d" % turn))
            link.until(lambda turn=turn: len(link.data_of(quiet_id)) == turn)  # type: ignore[misc]  # a default binds it
            link.send(lanes.pack_credit(0, 0))
            link.until(lambda turn=turn: taken() > turn * share_bytes)  # type: ignore[misc]  # a default binds it


def test_a_suspended_group_keeps_its_sockets_and_goes_on_when_announced(start: Start) -> None:
    w = start(login_timeout_ms=2_500)
    link = w.link
    with w.connect() as sock:
        conn_id = link.conn_id_of(sock)
        link.send(lanes.pack_suspend(0))
        link.taken()
        sock.sendall(pack(b"held"))
        link.listen_for(3.0)  # longer than the login time-out: who is not read is not blamed
        assert link.data_of(conn_id) == []
        link.send(lanes.pack_announce(0, 9, CREDIT_BYTES))
        link.until(lambda: link.data_of(conn_id) == [b"held"])
        assert link.closes_of(conn_id) == []


def test_a_broken_lane_message_costs_the_lane_and_no_socket(start: Start) -> None:
    w = start()
    with w.connect() as sock:
        conn_id = w.link.conn_id_of(sock)
        w.link.send(struct.pack("<IB", 3, 99) + b"??")
        hello = w.link.accept()
        assert hello.connections == 1
        w.link.attach()
        sock.sendall(pack(b"fine"))
        w.link.until(lambda: w.link.data_of(conn_id) == [b"fine"])
        w.link.until(lambda: w.link.stats.lane_errors == 1)


def test_a_cut_frame_survives_the_links_restart(start: Start) -> None:
    w = start()
    with w.connect() as sock, _second_link(w) as restart:
        conn_id = w.link.conn_id_of(sock)
        wire = pack(b"whole")
        sock.sendall(wire[:6])
        w.link.until(lambda: not w.link.pump(0.05))
        link = restart()
        sock.sendall(wire[6:])
        link.until(lambda: link.data_of(conn_id) == [b"whole"])


@contextmanager
def _second_link(w: Running) -> Iterator[Callable[[], FakeLink]]:
    made: list[FakeLink] = []

    def restart() -> FakeLink:
        w.link.drop()
        link = FakeLink(w.settings.gateway.run_dir)
        made.append(link)
        link.accept()
        link.attach()
        return link

    yield restart
    for link in made:
        link.drop()


# ── WebSocket, by bytes ──────────────────────────────────────────────────────────────────────────────────────

UPGRADE = (
    b"GET /ws HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n%b\r\n"
)


def _masked(opcode: int, body: bytes, *, fin: bool = True) -> bytes:
    assert len(body) < 126
    return bytes([(0x80 if fin else 0) | opcode, 0x80 | len(body)]) + b"\0\0\0\0" + body


def _until(sock: socket.socket, end: bytes) -> bytes:
    got = b""
    while not got.endswith(end):
        got += sock.recv(1)
    return got


def _message(sock: socket.socket) -> bytes:
    """The next binary message that came."""
    kind, length = sock.recv(2, socket.MSG_WAITALL)
    assert kind == 0x82
    if more := {126: 2, 127: 8}.get(length, 0):
        length = int.from_bytes(sock.recv(more, socket.MSG_WAITALL), "big")
    return sock.recv(length, socket.MSG_WAITALL)


def test_websocket_bytes_right_behind_the_upgrade_are_taken(start: Start) -> None:
    w = start()
    with w.connect(w.settings.gateway.ws_port) as sock:
        sock.sendall(UPGRADE % b"" + _masked(2, b"early") + _masked(2, b"fra", fin=False))
        conn_id = w.link.conn_id_of(sock)
        w.link.until(lambda: w.link.data_of(conn_id) == [b"early"])
        sock.sendall(_masked(9, b"ping") + _masked(0, b"gment"))
        w.link.until(lambda: w.link.data_of(conn_id) == [b"early", b"fragment"])
        got = sock.recv(4096)
        while b"ping" not in got:
            got += sock.recv(4096)
        assert got.startswith(b"HTTP/1.1 101 ")
        assert got.endswith(b"\x8a\x04ping")
        w.link.frames([(conn_id, b"down", b"+1", lanes.CLOSE_AFTER)])
        rest = b""
        while piece := sock.recv(4096):
            rest += piece
        assert rest == b"\x82\x06down+1" + b"\x88\x02\x03\xe8"


def test_websocket_refusals_name_what_is_wrong(start: Start) -> None:
    w = start()
    for request, status in (
        (UPGRADE % b"Origin: https://evil.example\r\n", b"403"),
        (b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", b"404"),
        (b"\x16\x03\x01 this is TLS\r\n\r\n", b"400"),
        (b"GET /ws HTTP/1.1\r\nHost: x\r\nCookie: " + b"c" * 20_000, b"431"),
    ):
        with w.connect(w.settings.gateway.ws_port) as sock:
            sock.sendall(request)
            assert sock.recv(4096).startswith(b"HTTP/1.1 " + status)
    assert not [e for e in w.link.events if e[0] == lanes.OPENED]


def test_frame_reader_reads_what_the_worker_sends(start: Start) -> None:
    w = start()
    with w.connect() as sock:
        conn_id = w.link.conn_id_of(sock)
        payloads = [os.urandom(n) for n in (1, 125, 1_400, 65_536)]
        w.link.frames([(conn_id, p, b"", 0) for p in payloads])
        reader, got = FrameReader(), list[bytes]()
        while len(got) < len(payloads):
            got += reader.feed(sock.recv(65_536))
        assert got == payloads
