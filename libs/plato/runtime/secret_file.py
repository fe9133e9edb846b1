"""A secret in a file, read again when the file changes: Kubernetes brings a changed Secret into pods that run."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from plato.runtime import logs

LOOK_S: Final = 1.0
"""How often the file is looked at, at most."""


class SecretFile:
    """The newest usable contents of a file, without white space around them, by a call."""

    def __init__(
        self, path: Path, wrong: Callable[[bytes], str] = lambda _: "", clock: Callable[[], float] = time.monotonic
    ) -> None:
        """wrong: why contents cannot be used, "" for those that can; such are passed over later on. Raises OSError, and
        ValueError with its words."""
        self._path = path
        self._wrong = wrong
        self._clock = clock
        self._looked_s = clock()
        self._stamp = self._now()
        self._value = self._read()

    def __call__(self) -> bytes:
        """The secret."""
        if self._clock() - self._looked_s >= LOOK_S:
            self._looked_s = self._clock()
            self._look()
        return self._value

    def _look(self) -> None:
        log = logs.get("secret")
        try:
            stamp = self._now()
            if stamp == self._stamp:
                return
            self._stamp = stamp
            self._value = self._read()
        except (OSError, ValueError) as e:
            log.warning("a new secret cannot be used, the old one is", path=str(self._path), reason=str(e))
        else:
            log.info("a new secret is used", path=str(self._path))

    def _now(self) -> tuple[int, int, int]:
        found = self._path.stat()
        return found.st_mtime_ns, found.st_ino, found.st_size

    def _read(self) -> bytes:
        found = self._path.read_bytes().strip()
        if why := self._wrong(found):
            raise ValueError(why)
        return found
