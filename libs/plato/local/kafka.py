"""Kafka as child processes: real KRaft brokers on loopback, one or a few, durable across kill -9. For tests, and to try.

The jars are no wheel: whoever starts a broker says where they lie (tools/kafka_broker gets them). Each broker is also its
cluster's controller. What a dead one left in its folder is what the next start goes on from.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import os
import shutil
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path

from plato.local.child import Child
from plato.local.servers import Server, ServerError

_JAVA_OPTIONS = (
    "-Xmx256m", "-Xms64m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-XX:-UsePerfData", "-Djava.awt.headless=true",
    "-Dorg.slf4j.simpleLogger.defaultLogLevel=warn", "-Dorg.slf4j.simpleLogger.showDateTime=true",
)  # fmt: skip


def java() -> str:
    """The Java that runs brokers: $JAVA_HOME's, else the one on the path; "" where there is none."""
    home = os.environ.get("JAVA_HOME")
    if home and Path(home, "bin", "java").exists():
        return str(Path(home, "bin", "java"))
    return shutil.which("java") or ""


def new_id() -> str:
    """A Kafka id: 16 random bytes, in URL-safe base64 without padding. One that begins with `-` would read as an option."""
    while True:
        text = base64.urlsafe_b64encode(uuid.uuid4().bytes).decode().rstrip("=")
        if not text.startswith("-"):
            return text


class KafkaServer(Server):
    """One broker in `folder`. voters: {node id: controller port} of all of its cluster; itself alone by default.

    listeners: more of them, {name: (port, port that clients are told)}, for a relay between. options: server properties.
    """

    name = "kafka"

    def __init__(
        self,
        folder: Path,
        port: int,
        controller_port: int,
        jars: Path,
        *,
        cluster_id: str,
        node_id: int = 1,
        voters: Mapping[int, int] | None = None,
        listeners: Mapping[str, tuple[int, int]] | None = None,
        log: Path | None = None,
        options: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(folder, port, log=log)
        self.jars = jars
        self.node_id = node_id
        self._cluster_id = cluster_id
        all_voters = dict(voters or {node_id: controller_port})
        several = len(all_voters) > 1
        replicas = str(min(3, len(all_voters)))
        every = {"PLAIN": (port, port), **(listeners or {})}
        self._properties = {
            "process.roles": "broker,controller",
            "node.id": str(node_id),
            "controller.quorum.voters": ",".join(f"{n}@127.0.0.1:{p}" for n, p in sorted(all_voters.items())),
            "controller.listener.names": "CONTROLLER",
            "inter.broker.listener.name": "PLAIN",
            "listeners": ",".join(
                [f"{n}://127.0.0.1:{p}" for n, (p, _) in every.items()] + [f"CONTROLLER://127.0.0.1:{controller_port}"]
            ),
            "advertised.listeners": ",".join(f"{n}://127.0.0.1:{p}" for n, (_, p) in every.items()),
            "listener.security.protocol.map": ",".join(f"{n}:PLAINTEXT" for n in [*every, "CONTROLLER"]),
            "log.dirs": str(self.folder / "data"),
            "auto.create.topics.enable": "false",
            "offsets.topic.replication.factor": replicas,
            "transaction.state.log.replication.factor": replicas,
            "transaction.state.log.min.isr": "2" if several else "1",
            "offsets.topic.num.partitions": "1",
            "transaction.state.log.num.partitions": "1",
            "group.initial.rebalance.delay.ms": "0",
            # A broker that comes back is let in when its last session is over.
            "broker.session.timeout.ms": "2000",
            "broker.heartbeat.interval.ms": "300",
            "num.network.threads": "2",
            "num.io.threads": "2",
            "num.recovery.threads.per.data.dir": "2",
            "log.cleaner.enable": "false",
            "controlled.shutdown.enable": str(several).lower(),
            **(options or {}),
        }

    @property
    def servers(self) -> str:
        """Its bootstrap address."""
        return f"127.0.0.1:{self.port}"

    async def spawn(self) -> Child:
        """See Server."""
        program = java()
        if not program:
            raise ServerError("there is no Java on this machine; install one (17 or later) or set JAVA_HOME")
        self.folder.mkdir(parents=True, exist_ok=True)
        data = self.folder / "data"
        if not (data / "meta.properties").exists():
            # What `StorageTool format` writes, without a Java start of its own.
            data.mkdir(exist_ok=True)
            (data / "meta.properties").write_text(
                f"version=1\ncluster.id={self._cluster_id}\nnode.id={self.node_id}\ndirectory.id={new_id()}\n"
            )
        properties = self.folder / "server.properties"
        properties.write_text("".join(f"{key}={value}\n" for key, value in self._properties.items()))
        argv = [program, *_JAVA_OPTIONS, "-cp", f"{self.jars}/*", "kafka.Kafka", str(properties)]
        self._child = Child(argv, log=self.log)
        return self._child

    async def answers(self) -> bool:
        """See Server."""
        from aiokafka.client import AIOKafkaClient  # here: the CLI's fast commands import this package too
        from aiokafka.errors import KafkaError

        try:
            _, writer = await asyncio.open_connection("127.0.0.1", self.port)
            writer.close()
        except OSError:
            return False
        client = AIOKafkaClient(bootstrap_servers=self.servers, request_timeout_ms=3_000)
        try:
            await client.bootstrap()
            return any(broker.nodeId == self.node_id for broker in client.cluster.brokers())
        except (KafkaError, OSError, TimeoutError):
            return False
        finally:
            with contextlib.suppress(KafkaError, OSError):
                await client.close()

    def reason(self) -> str:
        """See Server."""
        lines = (self._child.output() if self._child else "").strip().splitlines()
        return next((line for line in lines if "ERROR" in line or "Exception" in line), lines[-1] if lines else "")


def cluster(
    folder: Path, ports: Sequence[tuple[int, int]], jars: Path, options: Mapping[str, str] | None = None
) -> list[KafkaServer]:
    """Brokers 1, 2, … of one cluster, not started; ports: (clients', controllers') of each."""
    voters = {node: controller for node, (_, controller) in enumerate(ports, 1)}
    cluster_id = new_id()
    return [
        KafkaServer(
            folder / f"kafka-{node}",
            port,
            controller,
            jars,
            cluster_id=cluster_id,
            node_id=node,
            voters=voters,
            options=options,
        )
        for node, (port, controller) in enumerate(ports, 1)
    ]
