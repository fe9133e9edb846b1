"""TLS inside and outside, with real pods: certificates come as Secrets of type kubernetes.io/tls, every hop uses them.

A gateway that drains proves most of it: the operator must hear it by HTTPS, ipconfig must see its load by HTTPS, the
shards must redirect its clients over mutual gRPC, and the client moves from one TLS socket to another.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from pathlib import Path

import pytest
import trustme
from plato.adapters.tokens import DEV_KID, issue
from plato.client import Client

from e2e.frame.certificates import put
from e2e.frame.dependencies import Dependencies
from e2e.frame.kube import Kube, wait_for
from e2e.frame.platform import Images, Platform
from e2e.live import scene

NAMESPACE = "e2e-tls"
NAME = "chat.example"
INTERNAL = "plato-internal"
PORTS = {"tcp": 9700, "ws": 9701, "admin": 9709}
SPEC = {
    "state": {"shards": 1},
    "msg": {"replicas": 1},
    "ipconfig": {"replicas": 1},
    "tls": {"client": {"name": "outside"}, "internal": {"name": "inside"}},
    "gateways": {
        "initialReplicas": 2,
        "template": {
            "workers": 1,
            "ports": PORTS,
            "drain": {"pacePerSecond": 100, "deadlineSeconds": 60, "settleSeconds": 1},
        },
    },
}


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    """One for inside and outside."""
    return trustme.CA()


@pytest.fixture(scope="module")
def platform(
    kube: Kube,
    images: Images,
    dependencies: Dependencies,
    authority: trustme.CA,
    tmp_path_factory: pytest.TempPathFactory,
) -> Platform:
    """A small platform that speaks nothing but TLS."""
    made = Platform(kube, "tls", images, dependencies, tmp_path_factory.mktemp("tls"))
    made.install_operator()
    put(kube, "inside", authority, INTERNAL)
    put(kube, "outside", authority, NAME)
    made.create(SPEC)
    made.wait_gateways(2, 120)  # Ready does not wait for one that is just starting, and it is to have people
    return made


def client(platform: Platform, authority: trustme.CA, user: str, store: Path) -> Client:
    """A client that asks ipconfig and trusts our authority."""
    trusted = ssl.create_default_context()
    authority.configure_trust(trusted)
    host = scene.node_addresses(platform.kube)[0]
    return Client(
        issue(platform.keys_dir, DEV_KID, user, "plato", "plato", 3_600),
        store,
        ipconfig_url=platform.ipconfig_url(host),
        user=user,
        tls=trusted,
        tls_name=NAME,
    )


def addresses(platform: Platform) -> list[str]:
    """Where gateways are reached."""
    return [str(pod["status"]["hostIP"]) for pod in platform.serving()]


@pytest.mark.timeout(400)
def test_people_talk_while_a_gateway_drains_and_every_hop_is_tls(
    platform: Platform, authority: trustme.CA, tmp_path: Path
) -> None:
    """Also the operator's reports: without them the drain would end by force, at its deadline."""

    async def talk() -> None:
        async with (
            client(platform, authority, "ann", tmp_path / "ann") as ann,
            client(platform, authority, "bob", tmp_path / "bob") as bob,
        ):
            for n in range(3):
                await (await ann.send(f"{n}", to="bob")).settled()
            await asyncio.to_thread(platform.scale, 1)
            await asyncio.to_thread(platform.wait_gateways, 1, 120)
            for n in range(3, 6):
                await (await ann.send(f"{n}", to="bob")).settled()
            got = []
            async for message in bob.messages():
                got.append(message.text)
                if len(got) == 6:
                    break
            assert got == [f"{n}" for n in range(6)]

    asyncio.run(asyncio.wait_for(talk(), 200))
    forced = [e for e in platform.kube.items("Event") if e.get("reason") in ("DrainForced", "DrainBlocked")]
    assert forced == []
    platform.wait_ready(60)


def test_nothing_answers_in_plain_text(platform: Platform) -> None:
    """Client ports and the admin port."""
    host = addresses(platform)[0]
    for port in PORTS.values():
        with socket.create_connection((host, port), 5) as sock:
            sock.settimeout(10)
            sock.sendall(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n")
            try:
                answer = sock.recv(100)
            except ConnectionError:
                answer = b""
            assert not answer.startswith(b"HTTP/1.1 200"), port


@pytest.mark.timeout(300)
def test_a_new_certificate_is_shown_without_a_restart(platform: Platform, authority: trustme.CA) -> None:
    """Kubelet brings a changed Secret into the pod within its sync period, a minute or so."""
    before = {pod["metadata"]["uid"] for pod in platform.pods("gateway")}
    fresh = {port: put(platform.kube, name, authority, host) for name, host, port in (
        ("outside", NAME, PORTS["tcp"]), ("inside", INTERNAL, PORTS["admin"]),
    )}  # fmt: skip
    host = addresses(platform)[0]
    for port, chain in fresh.items():
        wait_for(
            f"port {port} shows the new certificate",
            lambda port=port, chain=chain: (  # type: ignore[misc]  # bound now
                ssl.get_server_certificate((host, port)).partition("-----END")[0] in chain
            ),
            200,
        )
    platform.wait_ready(60)
    assert {pod["metadata"]["uid"] for pod in platform.pods("gateway")} == before
