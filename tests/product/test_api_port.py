"""msg.api_port: people's routes are there and only there, with nothing beside them, by the certificate of tls.client_dir."""

from __future__ import annotations

import asyncio
import signal
import ssl
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
import trustme
from plato.local.cluster import LocalCluster

pytestmark = pytest.mark.timeout(180)
HOST = "127.0.0.1"
OPERATORS = ("/metrics", "/healthz", "/readyz", "/v1/report", "/admin/v1/groups?name=x", "/admin/v1/groups/members")


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


@pytest.fixture(scope="module")
def town(
    new_cluster: Callable[..., LocalCluster], authority: trustme.CA, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[LocalCluster]:
    folder: Path = tmp_path_factory.mktemp("tls")
    made = authority.issue_cert(HOST)
    (folder / "tls.key").write_bytes(made.private_key_pem.bytes())
    (folder / "tls.crt").write_bytes(b"".join(blob.bytes() for blob in made.cert_chain_pems))
    settings = {
        "gateway.workers": 1,
        "msg.api_port": 8933,
        "msg.api_body_ms": 1_000,
        "msg.api_settle_ms": 3_000,
        "tls.client_dir": str(folder),
    }
    cluster = new_cluster(settings)
    yield cluster
    cluster.down()


def people(town: LocalCluster, authority: trustme.CA, user: str = "") -> httpx.AsyncClient:
    trusted = ssl.create_default_context()
    authority.configure_trust(trusted)
    headers = {"Authorization": f"Bearer {town.token(user)}"} if user else {}
    return httpx.AsyncClient(base_url=town.api_url, verify=trusted, headers=headers, timeout=20)


def internal(town: LocalCluster, path: str, user: str = "") -> int:
    """Status of the internal port's answer."""
    headers = {"Authorization": f"Bearer {town.token(user)}"} if user else {}
    request = urllib.request.Request(f"http://{HOST}:{town.ports['plato-msg-0.http']}{path}", headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=20) as answer:
            status: int = answer.status
            return status
    except urllib.error.HTTPError as e:
        with e:
            return e.code


async def test_people_are_served_by_tls_and_operators_on_the_other_port(
    town: LocalCluster, authority: trustme.CA
) -> None:
    assert town.api_url == f"https://{HOST}:{town.ports['plato-msg-0.api']}"
    async with people(town, authority, "alice") as alice, people(town, authority, "bob") as bob:
        sent = await alice.post("/v1/messages", json={"to": "bob", "text": "hello"})
        assert sent.status_code in (201, 202)

        async def arrived() -> bool:
            found = (await bob.get("/v1/conversations")).json()["conversations"]
            return sent.json()["conversation_id"] in [c["conversation_id"] for c in found]

        async with asyncio.timeout(20):
            while not await arrived():  # noqa: ASYNC110 - asked over HTTP
                await asyncio.sleep(0.05)
        for path in OPERATORS:
            assert (await alice.get(path)).status_code == 404, path
        assert (await alice.get("/openapi.json")).status_code == 200
    async with people(town, authority) as nobody:
        assert (await nobody.get("/v1/conversations")).status_code == 401
    for path, status in (("/readyz", 200), ("/metrics", 200), ("/v1/report", 200)):
        assert await asyncio.to_thread(internal, town, path) == status
    for path in ("/v1/conversations", "/openapi.json"):
        assert await asyncio.to_thread(internal, town, path, "alice") == 404
    assert town.ask_msg("GET", "/readyz")["ready"] is True  # what `plato status` asks


async def test_a_body_that_does_not_come_ends_in_its_time(town: LocalCluster, authority: trustme.CA) -> None:
    trusted = ssl.create_default_context()
    authority.configure_trust(trusted)
    reader, writer = await asyncio.open_connection(HOST, town.ports["plato-msg-0.api"], ssl=trusted)
    head = f"POST /v1/messages HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {town.token('alice')}\r\n"
    writer.write(f'{head}Content-Type: application/json\r\nContent-Length: 100\r\n\r\n{{"to": '.encode())
    answer = await asyncio.wait_for(reader.read(), 20)
    assert answer.startswith(b"HTTP/1.1 408 ")
    writer.close()


async def test_requests_are_answered_on_while_a_process_settles(town: LocalCluster, authority: trustme.CA) -> None:
    """After SIGTERM, for msg.api_settle_ms: who comes is told to come by another connection for the next request."""
    async with people(town, authority, "alice") as alice:
        assert "connection" not in (await alice.get("/v1/conversations")).headers
        town.kill("plato-msg-0", signal.SIGTERM)
        async with asyncio.timeout(20):
            while (answer := await alice.get("/v1/conversations")).headers.get("connection") != "close":
                assert answer.status_code == 200
        assert answer.status_code == 200
    await asyncio.to_thread(town.wait_ready)
