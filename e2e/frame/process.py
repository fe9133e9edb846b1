"""A process of the operator on this machine, against a real API server: what tests start, stop, look into and kill."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from tests.ports import free_port


class Operator:
    """One process, with its own port and log, for one namespace, where its Lease lies too. Those with the same `pod` are
    one container's successive starts: the next one takes the Lease at once."""

    def __init__(self, folder: Path, kubeconfig: Path, namespace: str, pod: str = "") -> None:
        self.port = free_port()
        self.log = folder / f"operator-{self.port}.log"
        said = {
            "KUBECONFIG": str(kubeconfig), "PLATO_OPERATOR__NAMESPACES": namespace,
            "PLATO_OPERATOR__LEASE_NAMESPACE": namespace, "PLATO_OPERATOR__ADMIN_HOST": "127.0.0.1",
            "PLATO_OPERATOR__PORT": str(self.port), "PLATO_OPERATOR__NODES": "false",
            **({"PLATO_PROCESS__NAME": pod, "PLATO_PROCESS__UID": f"{pod}-uid"} if pod else {}),
        }  # fmt: skip
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "plato_operator"], env={**os.environ, **said}, cwd=folder, stderr=log
            )

    def get(self, path: str) -> tuple[int, str]:
        """An answer of the admin port; (0, "") while nobody listens."""
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=5) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as e:
            return e.code, e.read().decode()
        except OSError:
            return 0, ""

    def ready(self) -> bool:
        """Whether it holds the Lease and works."""
        return self.get("/readyz")[0] == 200

    def metric(self, name: str) -> float:
        """Sum of a metric over its labels."""
        lines = self.get("/metrics")[1].splitlines()
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.partition("{")[0].partition(" ")[0] == name)

    def lines(self, event: str) -> list[dict[str, Any]]:
        """Log lines of an event."""
        found = [json.loads(line) for line in self.log.read_text().splitlines() if line.startswith("{")]
        return [line for line in found if line.get("event") == event]

    def kill(self) -> None:
        """SIGKILL."""
        self.process.kill()
        self.process.wait(10)

    def end(self) -> int:
        """SIGTERM, and SIGKILL if that does not help; the exit code."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
            self.process.terminate()
            try:
                self.process.wait(20)
            except subprocess.TimeoutExpired:
                self.process.kill()
        return self.process.wait(5)
