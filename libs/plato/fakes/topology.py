"""A TopologySource that a test sets by hand."""

from __future__ import annotations

import asyncio

from plato.core.errors import Unavailable
from plato.topology.record import Topology


class FakeTopology:
    """TopologySource in memory. Records older than the current one are ignored, as the real sources do."""

    def __init__(self, topology: Topology | None = None) -> None:
        self._topology = topology
        self.gone = False
        """See the port; set by the test."""
        self._waiting: list[asyncio.Future[None]] = []

    def set(self, topology: Topology) -> None:
        """Publishes a record; every waiter of `changed` looks at it."""
        if self._topology is not None and topology.epoch <= self._topology.epoch:
            return
        self._topology = topology
        waiting, self._waiting = self._waiting, []
        for future in waiting:
            if not future.done():
                future.set_result(None)

    def current(self) -> Topology:
        """See the port."""
        if self._topology is None:
            raise Unavailable("no topology was read yet")
        return self._topology

    async def changed(self, after_epoch: int) -> Topology:
        """See the port."""
        while self._topology is None or self._topology.epoch <= after_epoch:
            future = asyncio.get_running_loop().create_future()
            self._waiting.append(future)
            await future
        return self._topology
