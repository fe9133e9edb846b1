"""Long polling at the gateway: what a session answers, and a real poller before a real worker whose link the test plays."""

from __future__ import annotations

import asyncio
import http.client
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
from array import array
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import trustme
from plato.core import longpoll
from plato.core.codes import Code
from plato.core.errors import PeerError
from plato.core.frames import pack, split
from plato.core.longpoll import Body, decode
from plato.runtime.client_tls import CERTIFICATE, KEY, NewestCertificate, load
from plato.runtime.settings import Settings, dump
from plato.wire.v1 import canned
from plato_gateway.core import lanes
from plato_gateway.core.longpoll import DOWN_BYTES, Session
from plato_gateway.longpoll_http import HttpServer, Request, Response

from tests.ports import free_port

DEADLINE_S = 20.0
LIMIT = 65_536


# ── the core ─────────────────────────────────────────────────────────────────────────────────────────────────────


def test_an_answer_that_was_lost_is_given_again_and_a_confirmed_one_is_not() -> None:
    session = Session(LIMIT, 0)
    session.came(pack(b"one") + pack(b"two"))
    for _ in range(2):
        poll = session.begin_poll()
        assert not session.waits(poll)
        assert session.answer(LIMIT, poll) == (1, pack(b"one") + pack(b"two"), False)
    session.hear(Body(received=1), 0)
    assert session.answer(LIMIT, session.begin_poll()) == (2, pack(b"two"), False)


def test_a_newer_poll_ends_the_older_which_brings_nothing() -> None:
    session = Session(LIMIT, 0)
    old = session.begin_poll()
    assert session.waits(old)
    new = session.begin_poll()
    assert not session.waits(old)
    assert session.waits(new)
    session.came(pack(b"x"))
    assert session.answer(LIMIT, old) == (1, b"", False)
    assert session.answer(LIMIT, new) == (1, pack(b"x"), False)


def test_the_end_is_said_with_the_last_frame_and_not_before() -> None:
    session = Session(LIMIT, 0)
    session.came(pack(b"one") + pack(b"two"))
    session.over = True
    assert session.answer(1, session.begin_poll()) == (1, pack(b"one"), False)
    session.hear(Body(received=1), 0)
    assert session.answer(1, session.begin_poll()) == (2, pack(b"two"), True)
    session.hear(Body(received=2), 0)
    assert session.answer(1, session.begin_poll()) == (3, b"", True)


def test_a_client_is_gone_when_no_request_waits_or_comes() -> None:
    session = Session(LIMIT, 0)
    session.begin_poll()
    assert not session.silent(10**9, 30_000)
    session.end_poll(100_000)
    assert not session.silent(129_999, 30_000)
    assert session.silent(130_000, 30_000)
    session.hear(Body(), 140_000)
    assert not session.silent(150_000, 30_000)


def test_a_slow_reader_fills_its_bound_and_no_more_is_read() -> None:
    session = Session(LIMIT, 0)
    while not session.full:
        session.came(pack(b"x" * 8_192))
    assert session._down.size_bytes < DOWN_BYTES + 16_384
    first, run, _ = session.answer(LIMIT, session.begin_poll())
    session.hear(Body(received=first + sum(1 for _ in split(run)) - 1), 0)
    assert not session.full


def test_a_frame_of_a_bad_size_ends_the_connection_with_its_code_and_a_false_number_is_refused() -> None:
    session = Session(LIMIT, 0)
    with pytest.raises(PeerError):
        session.hear(Body(received=1), 0)
    assert session.take(Body(first=1, run=pack(b"x" * (LIMIT + 1)))) == b""
    assert session.over
    assert session.answer(LIMIT, session.begin_poll()) == (1, pack(canned.ERRORS[Code.FRAME_SIZE]), True)


async def test_a_new_certificate_is_shown_to_whoever_comes_next(tmp_path: Path) -> None:
    """Also to who names no server, and while the port stays open."""
    authority = trustme.CA()
    client = ssl.create_default_context()
    authority.configure_trust(client)

    def renew(name: str) -> None:
        made = authority.issue_cert(name)
        (tmp_path / CERTIFICATE).write_bytes(b"".join(blob.bytes() for blob in made.cert_chain_pems))
        (tmp_path / KEY).write_bytes(made.private_key_pem.bytes())

    async def answer(_: Request) -> Response:
        return Response(200)

    renew("old.example")
    certificates = NewestCertificate(load(tmp_path))
    server = HttpServer(answer, most_bytes=1, most_sockets=9, first_s=5.0)
    await server.start("127.0.0.1", 0, certificates.serve())
    assert server._server is not None
    port = server._server.sockets[0].getsockname()[1]

    async def shown(name: str | None) -> str:
        client.check_hostname = name is not None
        reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=client, server_hostname=name or "")
        found = writer.get_extra_info("peercert")["subjectAltName"][0][1]
        writer.close()
        await reader.read()
        await writer.wait_closed()
        return str(found)

    try:
        assert await shown("old.example") == "old.example"
        renew("new.example")
        assert certificates.look() == "a new certificate is used"
        assert await shown("new.example") == await shown(None) == "new.example"
        (tmp_path / KEY).write_bytes(b"no key")
        assert "new certificate" not in certificates.look() != ""
        assert await shown("new.example") == "new.example"
    finally:
        await server.stop(1.0)


# ── real processes ───────────────────────────────────────────────────────────────────────────────────────────────


class Lane:
    """The link's end of the worker's lane: answers each frame by itself, and by "CLOSE" with a close after it."""

    def __init__(self, run_dir: Path) -> None:
        run_dir.mkdir(parents=True, exist_ok=True)
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(run_dir / "link.sock"))
        self._listener.listen(4)
        self._listener.settimeout(DEADLINE_S)
        self.events: list[tuple[int, int, bytes]] = []
        self.echo = True

    def start(self) -> None:
        """Waits for the worker and lets it take connections in."""
        self.sock, _ = self._listener.accept()
        now_ms = time.time_ns() // 1_000_000
        self.send(lanes.pack_slots(bytes(1024)))
        self.send(lanes.pack_config(lanes.Config(7, tuple(range(1024)), now_ms, now_ms + 3_600_000)))
        self.send(lanes.pack_announce(0, 1, 4_194_304))
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def send(self, message: bytes) -> None:
        self.sock.sendall(message)

    def frame(self, conn_id: int, payloads: list[bytes], flags: int = 0) -> None:
        """Frames for one connection; flags: of each."""
        lengths = array("I", map(len, payloads)).tobytes()
        n = len(payloads)
        ids, index = array("Q", [conn_id] * n).tobytes(), array("I", range(n)).tobytes()
        self.send(lanes.pack_frames(lengths, b"".join(payloads), ids, index, bytes(n), b"", bytes([flags] * n)))

    def _run(self) -> None:
        reader = lanes.LaneReader()
        while data := self.sock.recv(262_144):
            for message in reader.feed(data):
                if isinstance(message, lanes.Events):
                    self._events(message)

    def _events(self, events: lanes.Events) -> None:
        at = 0
        ids, lengths = array("Q", events.conn_ids), array("I", events.lengths)
        for kind, conn_id, n in zip(events.kinds, ids, lengths, strict=True):
            data = events.data[at : at + n]
            at += n
            self.events.append((kind, conn_id, data))
            if kind == lanes.DATA and self.echo:
                self.frame(conn_id, list(split(data)))

    def close(self) -> None:
        """Ends it."""
        self._listener.close()
        with suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)
        self.thread.join(DEADLINE_S)
        self.sock.close()

    def until(self, kind: int) -> tuple[int, bytes]:
        """Waits for the first event of a kind."""
        end_s = time.monotonic() + DEADLINE_S
        while time.monotonic() < end_s:
            for k, conn_id, data in list(self.events):
                if k == kind:
                    return conn_id, data
            time.sleep(0.01)
        raise AssertionError(f"no event {kind}: {self.events}")


class Poller:
    """A client that says one request at a time."""

    def __init__(self, port: int) -> None:
        self.http = http.client.HTTPConnection("127.0.0.1", port, timeout=DEADLINE_S)
        self.session = longpoll.NO_SESSION
        self.received = 0

    def post(self, body: Body | bytes, **headers: str) -> tuple[int, Body | None, dict[str, str]]:
        self.http.request("POST", "/poll", body if isinstance(body, bytes) else body.encode(), headers)
        return self.answer()

    def answer(self) -> tuple[int, Body | None, dict[str, str]]:
        with self.http.getresponse() as answer:
            data = answer.read()
            said = {k.lower(): v for k, v in answer.getheaders()}
            return answer.status, decode(data) if answer.status == 200 else None, said

    def open(self) -> None:
        status, body, _ = self.post(Body(longpoll.OPEN))
        assert status == 200
        assert body is not None
        self.session = body.session

    def ask(self, wait_ms: int = 0, first: int = 1, payloads: tuple[bytes, ...] = (), **more: Any) -> Body:
        run = b"".join(map(pack, payloads))
        given = {"a": wait_ms, "b": LIMIT, "received": self.received, "first": first, "run": run, **more}
        status, body, _ = self.post(Body(session=self.session, **given))
        assert (status, body is not None) == (200, True)
        assert body is not None
        return body

    def say(self, wait_ms: int) -> None:
        """Sends a poll, and does not wait for its answer: `hears` does."""
        self.http.request(
            "POST", "/poll", Body(session=self.session, a=wait_ms, b=LIMIT, received=self.received).encode()
        )

    def hears(self) -> Body:
        status, body, _ = self.answer()
        assert (status, body is not None) == (200, True)
        assert body is not None
        return body

    def hear(self, count: int) -> list[bytes]:
        """Polls until so many frames came."""
        got: list[bytes] = []
        while len(got) < count:
            body = self.ask(5_000)
            got += split(body.run)
            self.received += sum(1 for _ in split(body.run))
        return got

    def last_words(self) -> bytes:
        """Polls, and confirms nothing more, until the end is said; returns the frames that it came with."""
        while not (body := self.ask(5_000)).flags & longpoll.END:
            pass
        return body.run


Parts = dict[str, subprocess.Popen[bytes]]


@contextmanager
def gateway(settings: Settings, folder: Path) -> Iterator[tuple[Lane, Parts, Callable[[], Poller]]]:
    """A worker and a poller as processes; the link is the test's."""
    file = folder / "settings.yaml"
    file.write_text(dump(settings))
    base = [sys.executable, "-m", "plato_gateway", "--settings", str(file), "--role"]
    lane = Lane(settings.gateway.run_dir)
    with ExitStack() as stack:
        parts = {}
        for role in ("worker", "poller"):
            parts[role] = stack.enter_context(subprocess.Popen([*base, role]))
            stack.callback(parts[role].kill)
        lane.start()
        stack.callback(lane.close)
        end_s = time.monotonic() + DEADLINE_S
        while True:
            with closing(socket.socket()) as probe:
                if not probe.connect_ex(("127.0.0.1", settings.gateway.poll_port)):
                    break
            assert time.monotonic() < end_s, "the poller does not listen"
            time.sleep(0.02)

        def poller() -> Poller:
            made = Poller(settings.gateway.poll_port)
            stack.callback(made.http.close)
            return made

        yield lane, parts, poller


def test_a_connection_by_polls_is_one_as_any_other(make_settings: Callable[..., Settings], tmp_path: Path) -> None:
    settings = make_settings(poll_port=free_port(), poll_wait_ms=5_000, poll_silent_ms=4_000, login_timeout_ms=5_000)
    with gateway(settings, tmp_path) as (lane, parts, poller):
        one = poller()
        one.open()
        conn_id, peer = lane.until(lanes.OPENED)
        assert peer.startswith(b"p127.0.0.1:")
        assert one.session != conn_id.to_bytes(16, "big") != longpoll.NO_SESSION

        # Requests that are doubled, late or ahead: each frame reaches the worker once, in order.
        assert one.ask(first=1, payloads=(b"a", b"b")).received == 2
        assert one.ask(first=1, payloads=(b"a", b"b")).received == 2
        assert one.ask(first=5, payloads=(b"e",)).received == 2
        assert one.ask(first=2, payloads=(b"b", b"c")).received == 3
        # An answer that was lost comes again; what was confirmed does not.
        whole = b"".join(map(pack, (b"a", b"b", b"c")))
        while one.ask(5_000).run != whole:
            pass
        assert one.hear(3) == [b"a", b"b", b"c"]
        one.ask()
        assert b"".join(d for k, _, d in lane.events if k == lanes.DATA) == b"".join(map(pack, (b"a", b"b", b"c")))

        # A newer poll ends the older one, which waited on another socket.
        older = poller()
        older.session, older.received = one.session, 3
        older.ask()  # its socket is known: what is said there and then on the other is read in this order
        bodies: list[Body] = []
        older.say(5_000)
        thread = threading.Thread(target=lambda: bodies.append(older.hears()))
        thread.start()
        newer = threading.Thread(target=lambda: bodies.append(one.ask(5_000)))
        newer.start()
        thread.join(DEADLINE_S)
        assert [b.run for b in bodies] == [b""]
        lane.frame(conn_id, [b"late"])
        newer.join(DEADLINE_S)
        assert [b.run for b in bodies] == [b"", pack(b"late")]

        # The shard closes it: the last frame and the end come together, again if the answer was lost, then it is gone.
        lane.frame(conn_id, [b"bye"], lanes.CLOSE_AFTER)
        one.received = 4
        for _ in range(2):
            assert one.last_words() == pack(b"bye")
        one.ask(flags=longpoll.CLOSE)
        assert one.post(Body(session=one.session))[0] == 410

        # A client that asks no more is closed, and its shard hears of it.
        assert lane.until(lanes.CLOSED)[0] == conn_id  # the one before: it must not be taken for the next one's
        lane.events.clear()
        silent = poller()
        silent.open()
        silent.ask(payloads=(b"x",))
        conn_id, _ = lane.until(lanes.OPENED)
        assert lane.until(lanes.CLOSED)[0] == conn_id
        assert silent.post(Body(session=silent.session))[0] == 410

        # The worker ends: who polls hears why, then the poller ends too.
        last_one = poller()
        last_one.open()
        last_one.ask(payloads=(b"y",))
        assert last_one.hear(1) == [b"y"]
        parts["worker"].send_signal(signal.SIGTERM)
        assert last_one.last_words() == pack(canned.ERRORS[Code.GATEWAY_CLOSING])
        refused = poller()
        parts["worker"].wait(DEADLINE_S)
        status, _, headers = refused.post(Body(longpoll.OPEN))
        assert (status, headers["x-plato-code"]) == (503, str(int(Code.GATEWAY_CLOSING)))
        parts["poller"].send_signal(signal.SIGTERM)
        assert parts["poller"].wait(DEADLINE_S) == 0


def test_http_is_bounded_and_says_what_is_wrong(make_settings: Callable[..., Settings], tmp_path: Path) -> None:
    settings = make_settings(
        poll_port=free_port(), poll_max_connections=1, max_connections=1, login_timeout_ms=3_000, max_frame_bytes=4_096
    )
    port = settings.gateway.poll_port
    with gateway(settings, tmp_path) as (_, _, poller):
        # Nobody keeps a socket without a request, and a connection without a frame is no login.
        with closing(socket.create_connection(("127.0.0.1", port), DEADLINE_S)) as idle:
            one = poller()
            one.open()
            assert one.last_words() == pack(canned.ERRORS[Code.LOGIN_TIMEOUT])
            assert idle.recv(1) == b""
        one.open()  # what is over takes no place
        one.ask(payloads=(b"x",))
        other = poller()
        status, _, headers = other.post(Body(longpoll.OPEN))
        assert (status, headers["x-plato-code"]) == (503, str(int(Code.GATEWAY_FULL)))
        one.ask(flags=longpoll.CLOSE)

        assert other.post(b"no body")[0] == 400
        assert other.post(Body(session=b"?" * 16))[0] == 410
        assert other.post(b"\0" * 200_000)[0] == 413
        other.http.close()
        other.http.request("GET", "/poll")
        assert other.http.getresponse().status == 405
        other.http.close()
        other.http.request("POST", "/elsewhere", b"")
        assert other.http.getresponse().status == 404
        other.http.close()
        with closing(socket.create_connection(("127.0.0.1", port), DEADLINE_S)) as odd:
            odd.sendall(b"no HTTP at all\r\n\r\n")
            assert odd.recv(100).startswith(b"HTTP/1.1 400 ")

        # Browsers: the preflight and the answer name the origin; a foreign one is refused.
        status, _, headers = other.post(Body(longpoll.OPEN), Origin="http://localhost:3000")
        assert (status, headers["access-control-allow-origin"]) == (200, "http://localhost:3000")
        assert headers["cache-control"] == "no-store"
        other.http.request("OPTIONS", "/poll", headers={"Origin": "http://localhost:3000"})
        with other.http.getresponse() as preflight:
            assert (preflight.status, preflight.getheader("access-control-allow-methods")) == (204, "POST")
        assert other.post(Body(longpoll.OPEN), Origin="https://evil.example")[0] == 403
