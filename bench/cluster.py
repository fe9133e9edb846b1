"""A whole embedded cluster under people: `plato up` on free ports, and c/people as its clients."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from plato.core.conversations import dialogue_id
from plato.local.cluster import ClusterEnded, LocalCluster
from plato.local.folder import LocalError
from plato.local.kafka import KafkaServer, new_id
from plato.local.servers import ServerError
from plato.runtime.settings import SettingsError

from bench.loading import Process
from bench.processes import BenchError, Pids, cpu_s, line_of, running, tell, tree_cpu_s
from bench.programs import Programs
from bench.subjects import free_ports
from tools.kafka_broker import jars as kafka_jars

SERVERS = ("postgres", "valkey", "kafka")
"""Kinds that serve by processes of their own, which come and go."""
_brokers: dict[LocalCluster, KafkaServer] = {}


@contextlib.contextmanager
def broker(folder: Path) -> Iterator[KafkaServer]:
    """One Kafka broker on free ports, as the tests start it: a single node, its log on this disk. Raises BenchError."""
    if why := kafka_jars.missing():
        raise BenchError(why)
    try:
        port, controller_port = free_ports(2)
        server = KafkaServer(folder, port, controller_port, kafka_jars.jars(), cluster_id=new_id())
        asyncio.run(server.start())
    except (kafka_jars.JarsError, ServerError) as e:
        raise BenchError(f"the Kafka broker cannot start: {e}") from e
    try:
        yield server
    finally:
        server.kill()
        asyncio.run(server.stop())


@contextlib.contextmanager
def cluster(folder: Path, settings: Mapping[str, Any]) -> Iterator[LocalCluster]:
    """A cluster that serves, with one process of each service unless settings say otherwise; with bus.type kafka a broker
    beside it. Raises BenchError."""
    with contextlib.ExitStack() as stack:
        kafka = stack.enter_context(broker(folder / "kafka")) if settings.get("bus.type") == "kafka" else None
        more = {"bus.servers": kafka.servers} if kafka else {}
        made = stack.enter_context(_cluster(folder, {**settings, **more}))
        if kafka:
            _brokers[made] = kafka
            stack.callback(_brokers.pop, made)
        yield made


@contextlib.contextmanager
def _cluster(folder: Path, settings: Mapping[str, Any]) -> Iterator[LocalCluster]:
    one = {"local.gateways": 1, "local.shards": 1, "local.msgs": 1, "gateway.workers": 1, "log.level": "warning"}
    try:
        made = LocalCluster.launch(folder / "data", {**one, **settings})
    except (LocalError, SettingsError) as e:
        raise BenchError(f"the cluster cannot start: {e}") from e
    try:
        made.wait_ready(120)
        yield made
    except (LocalError, ClusterEnded) as e:
        raise BenchError(f"the cluster does not serve: {e}") from e
    finally:
        made.down()


def parts(made: LocalCluster) -> dict[str, list[int]]:
    """Kind of process → pids."""
    found: dict[str, list[int]] = {}
    for entry in made.status()["processes"]:
        if entry["pid"] is not None:
            found.setdefault(str(entry["kind"]), []).append(int(entry["pid"]))
    if (kafka := _brokers.get(made)) is not None and kafka.pid is not None:
        found["kafka"] = [kafka.pid]
    return found


def spent_s(pids: Pids) -> dict[str, float]:
    """Per kind the CPU time so far, seconds. Raises BenchError when one of our processes ended."""
    try:
        return {
            kind: sum(tree_cpu_s(pid) if kind in SERVERS else cpu_s(pid) for pid in some) for kind, some in pids.items()
        }
    except FileNotFoundError as e:
        raise BenchError(f"a process of the cluster ended meanwhile ({e.filename})") from e


def descendants(pid: int) -> list[int]:
    """The process and everything below it."""
    found = [pid]
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in (task / "children").read_text().split():
            found += descendants(int(child))
    return found


@contextlib.contextmanager
def crowd(programs: Programs, made: LocalCluster, folder: Path, count: int, first: int = 0) -> Iterator[Process]:
    """c/people with that many users in pairs, all of whom came in through one gateway."""
    lines = []
    for i in range(first, first + count):
        user, peer = f"bench-{i}", f"bench-{i ^ 1}"
        lines.append(f"{made.token(user)} {peer} {dialogue_id(user, peer)}\n")
    path = folder / "people"
    path.write_text("".join(lines))
    ports = made.ports
    gateways = ",".join(
        str(port) for name, port in sorted(ports.items()) if name.startswith("edge-") and name.endswith(".tcp")
    )
    with running([programs.c["people"], gateways, str(ports["ipconfig"]), path]) as people:
        yield people


def order(people: Process, line: str, word: str) -> list[float]:
    """Tells the people to do something; the numbers of their answer."""
    tell(people, line)
    return answer(people, word)


def answer(people: Process, word: str) -> list[float]:
    """The numbers of their next line."""
    first, *rest = line_of(people).split()
    if first != word:
        raise BenchError(f"{word!r} was awaited, {first!r} came")
    return [float(number) for number in rest]
