"""Log files of child processes: kept small, and read for the one line that says why a process ended."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
from pathlib import Path
from typing import Final

KEEP_BYTES: Final = 10_485_760
"""A log larger than this at a start of its process is set aside as NAME.log.1 (up to .3)."""

CUT_BYTES: Final = 67_108_864
"""A log that grew past this while its process runs is copied to NAME.log.1 and emptied; children append, so they go on."""

_OLD = 3
_SPEAKER = re.compile(r"^(\S*python\S*|plato[\w.-]*|gateway|state|msg|ipconfig): ")


def rotate(log: Path) -> None:
    """At a start: sets a large log aside."""
    with contextlib.suppress(OSError):
        if log.stat().st_size > KEEP_BYTES:
            _shift(log)
            log.rename(log.with_name(log.name + ".1"))


def cut(log: Path) -> None:
    """While the process runs: empties a log that grew too large."""
    with contextlib.suppress(OSError):
        if log.stat().st_size > CUT_BYTES:
            _shift(log)
            shutil.copyfile(log, log.with_name(log.name + ".1"))
            with log.open("r+b") as file:
                file.truncate(0)


def _shift(log: Path) -> None:
    for i in range(_OLD - 1, 0, -1):
        old = log.with_name(f"{log.name}.{i}")
        if old.exists():
            old.replace(log.with_name(f"{log.name}.{i + 1}"))


def reason(output: str) -> str:
    """The line of a service's output that says best why it ended: the last error, without its JSON around it."""
    lines = [line for line in output.splitlines() if line.strip()]
    for line in reversed(lines):
        try:
            entry = json.loads(line)
        except ValueError:
            continue
        if isinstance(entry, dict) and entry.get("level") in ("error", "critical"):
            exception = str(entry.get("exception") or "").strip()
            last = exception.splitlines()[-1] if exception else ""
            more = last or str(entry.get("error") or entry.get("reason") or "")
            return f"{entry.get('event')}: {more}" if more else str(entry.get("event"))
    # A traceback ends with the exception; a settings error is one line after the program's name.
    plain = [line.strip() for line in lines if not line.startswith("{")]
    return _SPEAKER.sub("", plain[-1]) if plain else "it wrote nothing"
