"""TLS under the worker's sockets: whatever is cut, full or dropped, what arrives is what was sent, whole frames in order."""

from __future__ import annotations

import contextlib
import random
import socket
import ssl
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import pytest
import trustme
from plato.runtime.client_tls import CERTIFICATE, KEY, Certificates
from plato_gateway.sockets import TCP, WAITS, Sockets
from plato_gateway.tls import Sealed, Session, TlsError

NAME = "chat.example"


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


def write(folder: Path, authority: trustme.CA, name: str = NAME) -> Path:
    """A folder as a Secret of type kubernetes.io/tls is mounted."""
    folder.mkdir(exist_ok=True)
    made = authority.issue_cert(name)
    (folder / CERTIFICATE).write_bytes(b"".join(blob.bytes() for blob in made.cert_chain_pems))
    (folder / KEY).write_bytes(made.private_key_pem.bytes())
    authority.cert_pem.write_to_path(str(folder / "ca.crt"))
    return folder


class Peer:
    """A client's end: OpenSSL over memory, so that the test decides how many bytes move when."""

    def __init__(self, sock: socket.socket, authority: trustme.CA) -> None:
        context = ssl.create_default_context()
        authority.configure_trust(context)
        self.sock = sock
        self._in, self._out = ssl.MemoryBIO(), ssl.MemoryBIO()
        self.tls = context.wrap_bio(self._in, self._out, server_hostname=NAME)
        self.got = bytearray()
        self.ended = False

    def push(self) -> None:
        if self._out.pending:
            self.sock.sendall(self._out.read())

    def pull(self, size_bytes: int = 65_536) -> bool:
        """Takes at most so many bytes of the wire; False: there are none now."""
        try:
            data = self.sock.recv(size_bytes)
        except BlockingIOError:
            return False
        if data:
            self._in.write(data)
        else:
            self._in.write_eof()
            self.ended = True
        return bool(data)

    def read(self) -> None:
        try:
            while data := self.tls.read(65_536):
                self.got += data
            self.ended = True
        except ssl.SSLWantReadError:
            pass


@pytest.fixture
def pair(authority: trustme.CA, tmp_path: Path) -> Iterator[tuple[Sockets, int, Peer]]:
    """A worker's Sockets with one connection whose handshake is done, and its peer. The socket between them is small."""
    ours, theirs = socket.socketpair()
    for sock in (ours, theirs):
        sock.setblocking(False)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4_096)
    sockets, peer = Sockets(), Peer(theirs, authority)
    fd = ours.detach()
    sockets.add(fd, TCP)
    sockets.tls[fd] = Session(Certificates(write(tmp_path / "tls", authority)).context)
    done = False
    for _ in range(20):
        try:
            peer.tls.do_handshake()
        except ssl.SSLWantReadError:
            pass
        peer.push()
        done = bool(sockets.shake(fd)) or done
        peer.pull()
        if done:
            break
    assert done
    sockets.flush(fd)
    yield sockets, fd, peer
    if sockets.kind[fd]:
        sockets.end(fd)
    sockets.close_ended()
    theirs.close()
    sockets.epoll.close()


def test_what_a_full_socket_refuses_arrives_later_whole_and_in_order(pair: tuple[Sockets, int, Peer]) -> None:
    sockets, fd, peer = pair
    chance = random.Random(1)
    sent = bytearray()
    for _ in range(300):
        frame = chance.randbytes(chance.choice((1, 5, 100, 3_000, 40_000)))
        sent += frame
        assert sockets.send(fd, frame) >= 0
        if chance.random() < 0.5:
            peer.pull(chance.randrange(1, 9_000))
            peer.read()
        if chance.random() < 0.5:
            assert sockets.flush(fd) >= 0
    assert fd in sockets.queues  # else nothing was refused
    while sockets.flags[fd] & WAITS or peer.pull():
        assert sockets.flush(fd) >= 0
        peer.pull()
        peer.read()
    assert bytes(peer.got) == bytes(sent)
    assert fd not in sockets.queues


def test_what_is_dropped_of_a_slow_reader_costs_no_sealed_byte(pair: tuple[Sockets, int, Peer]) -> None:
    sockets, fd, peer = pair
    frames = [bytes([i]) * 5_000 for i in range(50)]
    for frame in frames:
        sockets.send(fd, frame)
    assert sockets.queues[fd].size_bytes > 100_000
    sockets.drop_waiting(fd)
    sockets.send(fd, b"last words")
    while sockets.flags[fd] & WAITS or peer.pull():
        assert sockets.flush(fd) >= 0
        peer.pull()
        peer.read()  # a dropped record would raise here: bad record mac
    got = bytes(peer.got)
    assert got.endswith(b"last words")
    body = got.removesuffix(b"last words")
    assert len(body) % 5_000 == 0
    assert body == b"".join(frames)[: len(body)]


def test_input_is_read_whole_however_it_is_cut(pair: tuple[Sockets, int, Peer]) -> None:
    sockets, fd, peer = pair
    sent, got = bytearray(), bytearray()
    wire = bytearray()
    chance = random.Random(2)
    for _ in range(100):
        piece = chance.randbytes(chance.choice((1, 7, 2_000, 20_000)))
        sent += piece
        peer.tls.write(piece)
        wire += peer._out.read()
    while wire or len(got) < len(sent):
        try:
            n = peer.sock.send(wire[: chance.randrange(1, 3_000)])
            del wire[:n]
        except BlockingIOError:
            pass
        try:
            got += sockets.read(fd, 16_384)
        except BlockingIOError:
            pass
    assert got == sent


def test_the_peers_end_is_an_end(pair: tuple[Sockets, int, Peer]) -> None:
    sockets, fd, peer = pair
    peer.tls.write(b"before the end")
    with pytest.raises(ssl.SSLWantReadError):
        peer.tls.unwrap()
    peer.push()
    assert sockets.read(fd, 100) == b"before the end"
    assert sockets.read(fd, 100) == b""


def test_garbage_ends_the_connection_and_no_other(pair: tuple[Sockets, int, Peer]) -> None:
    sockets, fd, peer = pair
    peer.sock.sendall(b"GET / HTTP/1.1\r\n\r\n" * 10)
    assert sockets.read(fd, 100) == b""
    assert sockets.send(fd, b"x") in (-1, 0)


def test_our_end_is_told(pair: tuple[Sockets, int, Peer]) -> None:
    sockets, fd, peer = pair
    sockets.send(fd, b"bye")
    sockets.shutdown_writing(fd)
    while peer.pull():
        peer.read()
    peer.read()
    assert peer.got == b"bye"
    assert peer.ended


def test_a_plain_peer_fails_its_handshake(authority: trustme.CA, tmp_path: Path) -> None:
    session = Session(Certificates(write(tmp_path / "tls", authority)).context)
    session.feed(b"\x00\x00\x00\x05hello")
    with pytest.raises(TlsError):
        session.shake()


def test_a_new_certificate_is_used_and_a_bad_one_is_not(authority: trustme.CA, tmp_path: Path) -> None:
    folder = write(tmp_path / "tls", authority)
    certificates = Certificates(folder)
    first = certificates.context
    assert not certificates.renew()
    write(folder, authority)
    assert certificates.renew()
    second = certificates.context
    assert second is not first
    (folder / KEY).write_text("no key")
    assert not certificates.renew()
    assert certificates.context is second
    assert str(folder) in certificates.failure
    write(folder, authority)
    assert certificates.renew()
    assert not certificates.failure


def test_a_folder_without_a_pair_is_said_at_once(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        Certificates(tmp_path)


def test_a_peer_that_makes_tls_talk_and_does_not_read_it_is_dropped_before_it_fills_memory() -> None:
    """Key updates: each one that it sends is answered by OpenSSL itself, outside of what is bounded for frames."""

    class Updates:
        """A session whose peer sends nothing else."""

        def feed(self, data: bytes) -> None:
            pass

        def open(self) -> bytes:
            return b""

        def own(self) -> Sealed:
            return Sealed(bytes(16_384))

    sockets = Sockets()
    ours, theirs = socket.socketpair()
    with theirs:
        ours.setblocking(False)
        fd = ours.detach()
        sockets.add(fd, TCP)
        sockets.tls[fd] = cast(Session, Updates())

        def say() -> None:
            for _ in range(2_000):
                theirs.sendall(b"x")
                with contextlib.suppress(BlockingIOError):
                    sockets.read(fd, 4_096)

        with pytest.raises(ConnectionAbortedError):
            say()
        assert sockets.queues[fd].size_bytes < 2 << 20
        sockets.end(fd)
        sockets.close_ended()
