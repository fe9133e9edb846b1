"""A live run from its beginning to its judgement: the platform comes up, people talk, steps are done, the report is held."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

from e2e.frame import evidence
from e2e.frame.kube import Kube
from e2e.frame.platform import Platform
from e2e.live.balancer import Balancer
from e2e.live.driver import LiveLoad
from e2e.live.report import Report
from e2e.live.steps import Stage
from e2e.testbed.layout import Layout

IN_TIME: Final = 0.99
RATE_PER_S: Final = 50.0
CLIENTS: Final = 300


def run(platform: Platform, testbed: Layout | None, steps: Sequence[Callable[[Stage], None]], **plan: Any) -> Report:
    """Does the steps while everybody talks; the report is returned and kept as evidence. Raises what a step raises.

    plan: other values of the load's Plan than CLIENTS and RATE_PER_S.
    """
    folder = Path(tempfile.mkdtemp(prefix="plato-live-", dir=_memory()))
    port = int(platform.ipconfig_url("").rpartition(":")[2])
    hosts = node_addresses(platform.kube)
    try:
        with Balancer([(host, port) for host in hosts]) as balancer:
            url = f"http://127.0.0.1:{balancer.port}"
            load = LiveLoad(platform.plan(folder, url, **{"users": CLIENTS, "rate_per_s": RATE_PER_S, **plan}))
            try:
                load.start()
                stage = Stage(platform, load, testbed)
                failed: BaseException | None = None
                try:
                    for step in steps:
                        step(stage)
                except AssertionError as e:  # the report explains more than the step alone
                    failed = e
                report = load.stop(platform.rows)
            finally:
                load.kill()
        _keep(report, folder)
        if failed is not None:
            raise failed
        return report
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def judge(report: Report) -> None:
    """The promises: nothing lost, doubled or out of order; in time; no reconnect that nobody announced."""
    assert report.findings == (), [str(f) for f in report.findings[:20]]
    assert report.unsettled == 0
    assert report.offline == ()
    assert report.unannounced == (), [str(c) for c in report.unannounced[:20]]
    assert report.in_time >= IN_TIME
    assert len(report.gateways) >= 2
    assert report.per_s >= 0.9 * report.wanted_per_s


def node_addresses(kube: Kube) -> list[str]:
    """Addresses of the nodes at which NodePorts answer."""
    return [
        address["address"]
        for node in kube.items("Node")
        for address in node["status"]["addresses"]
        if address["type"] == "InternalIP"
    ]


def _keep(report: Report, folder: Path) -> None:
    """Prints the report, and keeps it with what is needed to look into it."""
    print(report, flush=True)
    kept = evidence.folder_of("live")
    (kept / "report.txt").write_text(f"{report}\n")
    lines = [str(f) for f in report.findings] + [str(c) for c in report.unannounced]
    (kept / "findings.txt").write_text("\n".join(lines) + "\n")
    for file in [*folder.glob("history-*.jsonl"), *folder.glob("worker-*.log")]:
        shutil.copy(file, kept / file.name)


def _memory() -> str | None:
    """300 stores that are made durable all the time belong into memory: the disk is the database's."""
    memory = Path("/dev/shm")
    return str(memory) if memory.is_dir() else None
