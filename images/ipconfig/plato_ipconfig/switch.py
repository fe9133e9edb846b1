"""The override of this process, and the file that keeps it over a restart.

What is set counts at once and is then written; where the file cannot be written it counts all the same, until the process
ends, and whoever set it is told. Memory: one override.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

from plato.runtime import logs

from plato_ipconfig.core.override import Override, kept

_log = logs.get("override")


class Switch:
    """Times are Unix ms."""

    def __init__(self, path: Path, unix_ms: Callable[[], int]) -> None:
        self._path = path
        self._unix_ms = unix_ms
        self._override = self._read()
        if self.override is not None:
            _log.warning("an override of before stands", **self._override.shown() if self._override else {})

    @property
    def override(self) -> Override | None:
        """The one that counts now, or None."""
        found = self._override
        return found if found is not None and found.stands(self._unix_ms()) else None

    def set(self, override: Override | None) -> str:
        """Puts it in place, or takes it back. Returns why it will not outlive this process; "" when it will."""
        self._override = override
        _log.warning(
            "an override is set" if override is not None else "the override is taken back",
            **override.shown() if override is not None else {},
        )
        try:
            if override is None:
                self._path.unlink(missing_ok=True)
                return ""
            new = self._path.with_name(self._path.name + ".new")
            with new.open("w", encoding="utf-8") as file:
                json.dump(override.shown(), file)
                file.flush()
                os.fsync(file.fileno())
            new.replace(self._path)
        except OSError as e:
            return (
                f"it ends with this process: {self._path} cannot be written: {e.strerror}; set ipconfig.override_path"
            )
        return ""

    def _read(self) -> Override | None:
        try:
            return kept(json.loads(self._path.read_text(encoding="utf-8")))
        except FileNotFoundError:
            return None
        except (OSError, ValueError, RecursionError) as e:
            _log.warning("the kept override cannot be read; none counts", path=str(self._path), reason=str(e))
            return None
