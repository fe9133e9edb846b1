"""Gateways that speak TLS: clients over TCP and WebSocket, a certificate that is replaced, peers that are plain."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import pytest
import trustme
from plato.client import Client
from plato.local.cluster import LocalCluster

from tests.faults.load import Person
from tests.faults.waiting import until

NAME = "chat.example"
pytestmark = pytest.mark.timeout(90)


def write(folder: Path, authority: trustme.CA) -> str:
    """Puts a new certificate where the gateways look; returns it as text."""
    made = authority.issue_cert(NAME)
    chain = b"".join(blob.bytes() for blob in made.cert_chain_pems)
    # The key first: a pair that does not fit is refused, and looked at again.
    (folder / "tls.key").write_bytes(made.private_key_pem.bytes())
    (folder / "tls.crt").write_bytes(chain)
    return chain.decode()


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, authority: trustme.CA) -> Path:
    made = tmp_path_factory.mktemp("certificates")
    write(made, authority)
    return made


@pytest.fixture(scope="module")
def secure(new_cluster: Callable[..., LocalCluster], folder: Path) -> LocalCluster:
    return new_cluster({"tls.client_dir": str(folder), "gateway.login_timeout_ms": 1_000})


def context(authority: trustme.CA) -> ssl.SSLContext:
    made = ssl.create_default_context()
    authority.configure_trust(made)
    return made


def port_of(cluster: LocalCluster) -> int:
    return int(cluster.gateways[0].rpartition(":")[2])


def shown_certificate(cluster: LocalCluster) -> str:
    """What the first gateway shows now."""
    return ssl.get_server_certificate(("127.0.0.1", port_of(cluster)))


async def test_people_talk_over_tls_by_tcp_and_websocket(
    secure: LocalCluster, authority: trustme.CA, tmp_path: Path
) -> None:
    people = []
    made: tuple[tuple[str, Literal["tcp", "ws"]], ...] = (("tls-tcp", "tcp"), ("tls-ws", "ws"))
    for user, transport in made:
        client = Client(
            secure.token(user),
            tmp_path / user,
            secure.gateway_addresses(transport),
            user=user,
            transport=transport,
            tls=context(authority),
            tls_name=NAME,
        )
        people.append(Person(user, tmp_path / user, transport, client))
    one, two = people
    bodies = [f"{n} " + "x" * (50_000 if n % 10 == 0 else n) for n in range(40)]
    async with one.client, two.client:
        for each in people:
            await each.watch()
        for body in bodies:
            await one.client.send(body, to="tls-ws")
            await two.client.send(body, to="tls-tcp")
        await until(lambda: all(len(p.shown) == 80 for p in people), 30.0)
        for each in people:
            await each.unwatch()
    for each in people:
        for author in ("tls-tcp", "tls-ws"):
            assert [row.body.decode() for row in each.shown if row.from_user == author] == bodies


async def test_a_gateway_with_another_name_is_not_trusted(
    secure: LocalCluster, authority: trustme.CA, tmp_path: Path
) -> None:
    loop = asyncio.get_running_loop()
    with pytest.raises(ssl.SSLCertVerificationError):
        await loop.create_connection(
            asyncio.Protocol, "127.0.0.1", port_of(secure), ssl=context(authority), server_hostname="other.example"
        )


async def test_a_plain_peer_and_a_silent_one_are_closed(secure: LocalCluster) -> None:
    for words in (b"\x00\x00\x00\x04\x08\x01\x12\x00", b""):
        reader, writer = await asyncio.open_connection("127.0.0.1", port_of(secure))
        writer.write(words)
        await asyncio.wait_for(_end(reader), 10)
        writer.close()


async def _end(reader: asyncio.StreamReader) -> None:
    try:
        while await reader.read(100):
            pass
    except ConnectionError:
        pass


async def test_a_new_certificate_is_shown_and_nobody_is_cut(
    secure: LocalCluster, authority: trustme.CA, folder: Path, tmp_path: Path
) -> None:
    client = Client(
        secure.token("tls-stays"), tmp_path / "stays", secure.gateway_addresses("tcp"), user="tls-stays",
        tls=context(authority), tls_name=NAME,
    )  # fmt: skip
    person = Person("tls-stays", tmp_path / "stays", "tcp", client)
    async with client:
        await person.watch()
        await until(lambda: person.onlines, 20.0)
        fresh = write(folder, authority).partition("-----END")[0]
        # Two workers share the port: each takes the new one within its second.
        await until(lambda: all(fresh in shown_certificate(secure) for _ in range(8)), 15.0)
        await client.send("still here", to="tls-stays")
        await until(lambda: person.shown, 10.0)
        assert len(person.onlines) == 1
        await person.unwatch()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # that it is old is the point
def test_tls_1_1_is_refused(secure: LocalCluster) -> None:
    old = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    old.check_hostname = False
    old.verify_mode = ssl.CERT_NONE
    old.set_ciphers("DEFAULT@SECLEVEL=0")
    old.maximum_version = ssl.TLSVersion.TLSv1_1
    old.minimum_version = ssl.TLSVersion.TLSv1_1
    with socket.create_connection(("127.0.0.1", port_of(secure))) as sock, pytest.raises(ssl.SSLError):
        old.wrap_socket(sock)
