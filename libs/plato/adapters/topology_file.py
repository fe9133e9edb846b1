"""The topology in a file: the local supervisor writes it, every process reads it.

Nothing runs in the background: `current()` looks at the file if its last look is 100 ms old, and who waits in
`changed()` looks each 100 ms. A writer renames a whole file into place. A reader keeps the last good record: what is
missing, half-written, of another format or of an older epoch is passed over, and tried again at the next look.
Memory: one record.
"""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path
from typing import Final

from plato.core.errors import Unavailable
from plato.runtime import logs
from plato.topology.record import Topology, TopologyError, dumps, loads

LOOK_S: Final = 0.1


def write(path: Path, topology: Topology) -> None:
    """Puts the record in place, durably, whole or not at all. Raises OSError."""
    temporary = path.with_name(path.name + ".new")
    with temporary.open("w", encoding="utf-8") as file:
        file.write(dumps(topology))
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


class FileTopology:
    """TopologySource on a file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._topology: Topology | None = None
        self._stamp: tuple[int, int, int] | None = (
            None  # inode, mtime, size of what was read last and needs no new look
        )
        self._looked_at = float("-inf")
        self._trouble = f"topology file {path} was not read yet"

    def current(self) -> Topology:
        """See the port."""
        if time.monotonic() - self._looked_at >= LOOK_S:
            self._look()
        if self._topology is None:
            raise Unavailable(self._trouble)
        return self._topology

    async def changed(self, after_epoch: int) -> Topology:
        """See the port."""
        while True:
            self._look()
            if self._topology is not None and self._topology.epoch > after_epoch:
                return self._topology
            await asyncio.sleep(LOOK_S)

    @property
    def gone(self) -> bool:
        """See the port. Never: a file that is missing is written again."""
        return False

    async def run(self) -> None:
        """Nothing: readers look themselves. So that every source is run the same way."""
        await asyncio.Event().wait()

    def _look(self) -> None:
        """Reads the file if it is another one than before."""
        self._looked_at = time.monotonic()
        try:
            with self._path.open("rb") as file:
                facts = os.fstat(file.fileno())
                stamp = (facts.st_ino, facts.st_mtime_ns, facts.st_size)
                if stamp == self._stamp:
                    return
                read = loads(file.read().decode())
        except OSError as e:
            self._complain(f"topology file {self._path}: {e.strerror}")
            return
        except (TopologyError, UnicodeDecodeError) as e:
            self._complain(f"topology file {self._path}: {e}")
            return
        self._stamp = stamp
        self._trouble = ""
        if self._topology is None or read.epoch > self._topology.epoch:
            self._topology = read

    def _complain(self, trouble: str) -> None:
        """Once per kind of trouble: a half-written file is whole at the next look."""
        if trouble != self._trouble and self._topology is not None:
            logs.get("topology").warning("the last good record stands", reason=trouble, epoch=self._topology.epoch)
        self._trouble = trouble
