"""Workers, links and pollers: children of a gateway, named by the gateway itself in <run_dir>/pids.json."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from plato.local.deaths import how


@dataclass(slots=True)
class PodProcess:
    """One child of a gateway, as last seen."""

    name: str
    kind: str
    pid: int
    since: float
    restarts: int = 0


class PodWatch:
    """Reads one gateway's pids.json and counts restarts by the change of pids."""

    def __init__(self, name: str, path: Path, ended: Callable[[str, str], None] = lambda _name, _how: None) -> None:
        """ended: called with a child's name and how it ended, once it was started again by a gateway that lives."""
        self.name = name
        self._ended = ended
        self._pod = 0
        self._path = path
        self._stamp = 0
        self._known: dict[str, PodProcess] = {}

    def look(self) -> None:
        """Reads the file again, if it changed."""
        try:
            stamp = self._path.stat().st_mtime_ns
            if stamp == self._stamp:
                return
            raw = json.loads(self._path.read_text(encoding="utf-8"))
            found = _children(raw)
            pod = int(raw["pod"])
            ends = {str(name): int(code) for name, code in raw.get("ended", {}).items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return  # not written yet; the gateway replaces it whole
        self._stamp = stamp
        for child, (kind, pid) in found.items():
            before = self._known.get(child)
            if before is None:
                self._known[child] = PodProcess(f"{self.name}/{child}", kind, pid, time.time())
            elif before.pid != pid:
                before.pid, before.since, before.restarts = pid, time.time(), before.restarts + 1
                if pod == self._pod:  # else they died with their gateway, which is told by itself
                    self._ended(before.name, how(ends[child]) if child in ends else "")
        self._pod = pod

    def processes(self, gateway_ready: bool, why: str) -> list[dict[str, Any]]:
        """Entries for status.json. A link is ready when its gateway is (else: `why` not); others when they run."""
        entries = []
        for process in self._known.values():
            alive = _alive(process.pid)
            ready = alive and (process.kind != "link" or gateway_ready)
            entries.append(
                {
                    "name": process.name,
                    "kind": process.kind,
                    "pid": process.pid if alive else None,
                    "ready": ready,
                    "restarts": process.restarts,
                    "since": round(process.since, 3),
                    "reason": "" if ready else why if alive else "it ended; its gateway starts it again",
                }
            )
        return entries


def _children(raw: Any) -> dict[str, tuple[str, int]]:
    """{name: (kind, pid)} of {"link": pid, "poller": pid, "workers": [pid, …]}."""
    found = {f"worker-{i}": ("worker", int(pid)) for i, pid in enumerate(raw["workers"]) if pid}
    for kind in ("link", "poller"):
        if raw.get(kind):
            found[kind] = (kind, int(raw[kind]))
    return found


def _alive(pid: int) -> bool:
    """Whether it runs. A dead gateway's children may stay zombies where the machine's first process reaps nobody."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rsplit(")", 1)[1].split()[0] != "Z"
    except (OSError, IndexError):
        return False
