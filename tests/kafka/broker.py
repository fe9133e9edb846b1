"""A Kafka broker for tests: started once per session, with a second listener that clients reach through a relay.

`required` decides where there is no Java or no Maven: a test says so and is skipped, or fails under `make test-kafka`.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import trustme
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, load_pem_private_key
from plato.adapters.bus_kafka_config import KafkaConfig
from plato.local.kafka import KafkaServer, cluster, new_id
from plato.runtime.settings import BusSettings

from tests.ports import free_ports
from tools.kafka_broker import jars

REQUIRED = "PLATO_KAFKA_REQUIRED"
"""Set: a machine that cannot run a broker fails the test instead of skipping it."""
RELAYED = "RELAYED"
SECURE = "SECURE"
PASSWORD = 'kafka\'s "own"'


def required() -> Path:
    """The folder of the jars. Skips the test, in words, where this machine cannot run a broker."""
    if why := jars.missing():
        if os.environ.get(REQUIRED):
            pytest.fail(why)
        pytest.skip(f"{why}; `make test-kafka` needs it")
    return jars.jars()


@dataclass(frozen=True, slots=True)
class Broker:
    """A running broker, and the port where a relay to `relayed_port` is to listen. At secure_port it speaks SASL_SSL, with a
    certificate that `ca` signed, to user plato with PASSWORD."""

    server: KafkaServer
    relay_port: int
    relayed_port: int
    secure_port: int
    ca: trustme.CA

    def config(self, topic: str, *, relayed: bool = False, partitions: int = 8) -> KafkaConfig:
        """How an adapter reaches a topic here, straight or through the relay."""
        port = self.relay_port if relayed else self.server.port
        return KafkaConfig(BusSettings(type="kafka", servers=f"127.0.0.1:{port}", topic=topic, partitions=partitions))


def running(folder: Path) -> Iterator[Broker]:
    """A fresh broker until the generator is closed. For session fixtures."""
    place = required()
    port, controller, relayed, relay, secure = free_ports(5)
    ca = trustme.CA()
    server = KafkaServer(
        folder,
        port,
        controller,
        place,
        cluster_id=new_id(),
        listeners={RELAYED: (relayed, relay), SECURE: (secure, secure)},
        options=_secured(folder, ca),
    )
    asyncio.run(server.start())
    try:
        yield Broker(server, relay, relayed, secure, ca)
    finally:
        server.kill()
        asyncio.run(server.stop())


def _secured(folder: Path, ca: trustme.CA) -> dict[str, str]:
    """Server properties of the listener SECURE."""
    own = ca.issue_cert("127.0.0.1")
    key = load_pem_private_key(own.private_key_pem.bytes(), None)
    store = folder / "broker.pem"
    pkcs8 = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    store.write_bytes(pkcs8 + b"".join(cert.bytes() for cert in own.cert_chain_pems))
    said = PASSWORD.replace('"', '\\\\"')  # once for the properties file, once for the text within it
    prefix = f"listener.name.{SECURE.lower()}"
    return {
        "listener.security.protocol.map": f"PLAIN:PLAINTEXT,CONTROLLER:PLAINTEXT,{RELAYED}:PLAINTEXT,{SECURE}:SASL_SSL",
        f"{prefix}.ssl.keystore.type": "PEM",
        f"{prefix}.ssl.keystore.location": str(store),
        f"{prefix}.sasl.enabled.mechanisms": "PLAIN",
        f"{prefix}.plain.sasl.jaas.config": "org.apache.kafka.common.security.plain.PlainLoginModule required"
        f' user_plato="{said}";',
    }


def freeze(server: KafkaServer) -> None:
    """SIGSTOP; returns when none of its threads runs any more."""
    assert server.child is not None
    server.child.send_signal(signal.SIGSTOP)
    tasks = Path(f"/proc/{server.child.pid}/task")
    deadline = time.monotonic() + 10
    while any(stat.read_text().rsplit(")", 1)[1].split()[0] != "T" for stat in tasks.glob("*/stat")):
        assert time.monotonic() < deadline
        time.sleep(0.001)


def thaw(server: KafkaServer) -> None:
    """SIGCONT, if it runs."""
    if server.child is not None:
        server.child.send_signal(signal.SIGCONT)


def brokers(folder: Path, count: int) -> list[KafkaServer]:
    """Brokers of one cluster, not started."""
    ports = free_ports(2 * count)
    return cluster(folder, list(zip(ports[::2], ports[1::2], strict=True)), required())
