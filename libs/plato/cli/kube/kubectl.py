"""Kubernetes as the user's own kubectl sees it: same context, same credentials, same rights.

Each call is one kubectl process; nothing is kept between calls. Secrets are never asked for.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from dataclasses import dataclass
from typing import Any, Final

from plato.api import names

CLUSTERS: Final = f"platoclusters.{names.GROUP}"
POOLS: Final = f"gatewaypools.{names.GROUP}"
SHARDS: Final = f"stateshards.{names.GROUP}"
TIMEOUT_S: Final = 60


class KubeError(Exception):
    """kubectl refused or is not there: one line that says what to do."""


@dataclass(frozen=True, slots=True)
class Kubectl:
    """kubectl with the flags that choose a cluster and a namespace; an empty namespace is the context's own."""

    namespace: str = ""
    context: str = ""
    kubeconfig: str = ""

    def _command(self, words: tuple[str, ...]) -> list[str]:
        program = shutil.which(os.environ.get("PLATO_KUBECTL") or "kubectl")
        if program is None:
            raise KubeError("kubectl is not on PATH; install it, or name it in PLATO_KUBECTL")
        flags = [f"--kubeconfig={self.kubeconfig}"] if self.kubeconfig else []
        flags += [f"--context={self.context}"] if self.context else []
        flags += [f"--namespace={self.namespace}"] if self.namespace else []
        return [program, *flags, *words]

    def run(self, *words: str, stdin: str | None = None, timeout_s: float = TIMEOUT_S) -> str:
        """Standard output of one call. Raises KubeError with kubectl's own words."""
        command = self._command(words)
        try:
            done = subprocess.run(
                command, input=stdin, capture_output=True, encoding="utf-8", errors="replace", timeout=timeout_s, check=False
            )  # fmt: skip  # logs hold whatever bytes a process wrote
        except subprocess.TimeoutExpired as e:
            raise KubeError(f"kubectl {words[0]} did not answer within {timeout_s:.0f} s") from e
        if done.returncode:
            said = " ".join(done.stderr.split()) or f"exit code {done.returncode}"
            if "doesn't have a resource type" in said:
                said += "; install Plato's CRDs first (charts/plato)"
            raise KubeError(f"kubectl {words[0]}: {said}")
        return done.stdout

    def get(self, kind: str, name: str) -> dict[str, Any]:
        """One object. Raises KubeError if it is not there."""
        found: dict[str, Any] = json.loads(self.run("get", kind, name, "-o", "json"))
        return found

    def list(self, kind: str, selector: str = "", *, everywhere: bool = False) -> list[dict[str, Any]]:
        """The objects of a kind, by name."""
        words = ["get", kind, "-o", "json"]
        words += ["-l", selector] if selector else []
        words += ["--all-namespaces"] if everywhere else []
        items: list[dict[str, Any]] = json.loads(self.run(*words))["items"]
        return sorted(items, key=lambda o: (o["metadata"].get("namespace", ""), o["metadata"]["name"]))

    def merge(self, kind: str, name: str, patch: dict[str, Any]) -> None:
        """A merge patch."""
        self.run("patch", kind, name, "--type=merge", "-p", json.dumps(patch))
