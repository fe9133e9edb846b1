"""Workers, links and pollers: children of a gateway, named by the gateway itself in <run_dir>/pids.json."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from plato.local.deaths import how

STEADY_S: Final = 5.0
TELL_AFTER: Final = 3
"""As for a gateway itself (keeper.py): after so many ends at its start it is told less often, with how many there were."""
START_CODES: Final = (2, 3)
"""Exit codes of a process that could not start, however long that took it."""


@dataclass(slots=True)
class PodProcess:
    """One child of a gateway, as last seen."""

    name: str
    kind: str
    pid: int
    since: float
    restarts: int = 0
    early: int = 0
    """Ends in a row that came at its start."""
    end: str = ""
    """How the last one ended, and why if it said so."""
    doubtful_s: float = 0.0
    """How long the running one must have run to count as serving: the ones before it ended at their start."""


class PodWatch:
    """Reads one gateway's pids.json and counts restarts by the change of pids."""

    def __init__(
        self,
        name: str,
        path: Path,
        ended: Callable[[str, str], None] = lambda _name, _how: None,
        say: Callable[[str], None] = lambda _line: None,
    ) -> None:
        """ended: called with a child's name and how it ended, once it was started again by a gateway that lives. say: one
        line to the terminal, of one that ends again and again at its start."""
        self.name = name
        self._ended = ended
        self._say = say
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
            words = {str(name): str(said) for name, said in raw.get("words", {}).items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return  # not written yet; the gateway replaces it whole
        self._stamp = stamp
        now = time.time()
        for child, known in self._known.items():
            if pod == self._pod and child in ends:
                known.end = f"{how(ends[child])}: {words[child]}" if words.get(child) else how(ends[child])
        for child, (kind, pid) in found.items():
            before = self._known.get(child)
            if before is None:
                self._known[child] = PodProcess(f"{self.name}/{child}", kind, pid, now)
            elif before.pid != pid and pod != self._pod:  # they ended with their gateway, of which is told by itself
                before.pid, before.since, before.early, before.end, before.doubtful_s = pid, now, 0, "", 0.0
            elif before.pid != pid:
                self._again(before, pid, ends.get(child, 0), now)
        self._pod = pod

    def _again(self, process: PodProcess, pid: int, code: int, now: float) -> None:
        """It was started again after an end with that code."""
        ran_s = now - process.since
        process.pid, process.since, process.restarts = pid, now, process.restarts + 1
        process.early = process.early + 1 if code in START_CODES or ran_s < STEADY_S else 0
        # A start that fails may be slow, too: the next one is believed when it outlasted that.
        failing = process.early and (code > 0 or process.early >= TELL_AFTER)
        process.doubtful_s = max(STEADY_S, 2 * ran_s) if failing else 0.0
        if process.early < TELL_AFTER:
            self._ended(process.name, process.end)
        elif process.early == TELL_AFTER or process.early & (process.early - 1) == 0:
            self._say(f"{process.name} ended {process.early} times before it served: {process.end}")

    def processes(self, gateway_ready: bool, why: str, stopped: bool = False) -> list[dict[str, Any]]:
        """Entries for status.json. A link is ready when its gateway is (else: `why` not); others when they run, after ends
        at their start when they run for a while. stopped: the gateway was, on order."""
        entries = []
        for process in self._known.values():
            alive = _alive(process.pid)
            doubtful = alive and time.time() - process.since < process.doubtful_s
            ready = alive and not doubtful and (process.kind != "link" or gateway_ready)
            if doubtful:
                reason = f"it ended {process.early} × at its start: {process.end}"
            elif alive:
                reason = "" if ready else why
            elif stopped:
                reason = "it ended with its gateway, which was stopped with `plato stop`"
            else:
                reason = f"it ended{f' ({process.end})' if process.end else ''}; its gateway starts it again"
            entries.append(
                {
                    "name": process.name,
                    "kind": process.kind,
                    "pid": process.pid if alive else None,
                    "ready": ready,
                    "restarts": process.restarts,
                    "since": round(process.since, 3),
                    "reason": reason,
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
