"""What a failed test leaves behind: resources, pods, events, logs, the topology, and the last writes to the API server."""

from __future__ import annotations

import contextlib
import os
import subprocess
import tempfile
from pathlib import Path
from typing import Final

from e2e.frame.kube import Kube

AUDIT_LINES: Final = 2_000


def folder_of(name: str) -> Path:
    """Where evidence goes: PLATO_E2E_ARTIFACTS, else a folder among the machine's temporary files."""
    chosen = os.environ.get("PLATO_E2E_ARTIFACTS")
    folder = Path(chosen) if chosen else Path(tempfile.gettempdir()) / "plato-e2e-artifacts"
    folder = folder / name
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def collect(kube: Kube, folder: Path, audit_log: Path | None = None) -> None:
    """Writes all of it into `folder`; what cannot be had is left out."""
    _write(kube, folder / "resources.yaml", "get", "platoclusters,gatewaypools,stateshards", "-o", "yaml")
    _write(kube, folder / "objects.txt", "get", "all,configmaps,poddisruptionbudgets,leases", "-o", "wide")
    _write(kube, folder / "pods.yaml", "get", "pods", "-o", "yaml")
    _write(kube, folder / "topology.yaml", "get", "configmaps", "-o", "yaml")
    _write(kube, folder / "events.txt", "get", "events", "--sort-by=.lastTimestamp")
    _write(kube, folder / "nodes.txt", "get", "nodes", "-o", "wide")
    for pod in kube.run("get", "pods", "-o", "name").stdout.split():
        name = pod.rpartition("/")[2]
        _write(kube, folder / f"{name}.log", "logs", name, "--all-containers", "--tail=5000")
        _write(kube, folder / f"{name}.previous.log", "logs", name, "--all-containers", "--previous", "--tail=2000")
    if audit_log is not None and audit_log.exists():
        found = subprocess.run(
            ["grep", "-F", kube.namespace, str(audit_log)], capture_output=True, text=True, check=False
        )
        (folder / "audit.jsonl").write_text("\n".join(found.stdout.splitlines()[-AUDIT_LINES:]))


def _write(kube: Kube, file: Path, *words: str) -> None:
    with contextlib.suppress(subprocess.TimeoutExpired):
        found = kube.run(*words, timeout_s=30)
        if found.stdout:
            file.write_text(found.stdout)
