"""State shards in memory, as msg sees them: FakeShards takes frames for connections, or does not, as the test says.

Memory: every frame that was taken.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Sequence

from plato.core.errors import Unavailable
from plato.ports import Delivery, Payload


class FakeShards:
    """ShardClient in memory, all shards in one. Reachable and willing unless told otherwise."""

    def __init__(self) -> None:
        self.taken: dict[int, list[Payload]] = defaultdict(list)
        """{conn_id: payloads in the order in which they were taken}."""
        self.calls: list[tuple[str, int]] = []
        """(shard, entries) of each call of deliver that came through."""
        self.away: set[str] = set()
        """Shards that raise Unavailable."""
        self.hanging: set[str] = set()
        """Shards that never answer."""
        self.untaken: set[int] = set()
        """Connections that no shard takes frames for."""
        self.holders: dict[int, str] = {}
        """Only this shard takes frames for the connection; absent: whichever is asked."""
        self.dirty_counts: dict[str, list[int]] = defaultdict(list)
        """Every count that a shard was told, in order."""
        self.done: dict[str, int] = {}
        """What a shard answers to `dirty`; absent: what it was told (it is done at once)."""
        self.told_replaced: list[tuple[str, int, int, int]] = []
        """(shard, conn_id, by_conn_id, code)."""
        self.on_deliver: Callable[[str], None] = lambda shard: None
        """Called before a delivery takes effect; may raise."""
        self.on_delivered: Callable[[str], None] = lambda shard: None
        """Called after it took effect, before the answer; may raise."""

    async def deliver(self, shard: str, payloads: Sequence[Payload], entries: Sequence[Delivery]) -> list[int]:
        """See the port."""
        await self._reach(shard)
        self.on_deliver(shard)
        untaken = []
        for i, entry in enumerate(entries):
            if entry.conn_id in self.untaken or self.holders.get(entry.conn_id, shard) != shard:
                untaken.append(i)
            else:
                self.taken[entry.conn_id].append(payloads[entry.payload])
        self.calls.append((shard, len(entries)))
        self.on_delivered(shard)
        return untaken

    async def dirty(self, shard: str, count: int) -> int:
        """See the port."""
        await self._reach(shard)
        self.dirty_counts[shard].append(count)
        return self.done.get(shard, count)

    async def replaced(self, shard: str, conn_id: int, by_conn_id: int, code: int) -> None:
        """See the port."""
        await self._reach(shard)
        self.told_replaced.append((shard, conn_id, by_conn_id, code))

    async def _reach(self, shard: str) -> None:
        if shard in self.away:
            raise Unavailable(f"shard {shard} is away")
        if shard in self.hanging:
            await asyncio.Event().wait()
