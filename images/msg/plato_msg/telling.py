"""Frames for everything that a user has connected, beside the fan-out of messages.

    tell  numbered: through the downlink's lanes, so what a shard does not take is looked for again, or the shard is marked
          dirty (R4, R7); `done` is called when that is so for each of them. In the order of the calls, per shard
    hint  not numbered (READ, TYPING): handed to its shard once, lost where that fails

Memory: HINTS hints per shard; past it they are dropped. What is told waits in the lanes, whose bytes are bounded.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final

from plato.core.errors import Unavailable
from plato.core.ids import slot_of
from plato.ports import Delivery, Payload, Route

from plato_msg import metrics
from plato_msg.core.fanout import Part
from plato_msg.downlink import Downlink

HINTS: Final = 10_000
HINTS_PER_CALL: Final = 1_000
HINT_S: Final = 1.0


class _Told:
    """Settled when each part of it was taken, or its shard is dirty (plato_msg.notify.Job)."""

    def __init__(self, done: Callable[[], None]) -> None:
        self._done = done
        self._open = 1

    def opened(self) -> None:
        self._open += 1

    def done(self) -> None:
        self._open -= 1
        if not self._open:
            self._done()


class Teller:
    """Sends to users' devices by their routes, which the caller reads after its commit."""

    def __init__(self, downlink: Downlink) -> None:
        self._downlink = downlink
        self._hints: dict[str, list[tuple[Payload, int]]] = {}
        self._sending: set[asyncio.Task[None]] = set()

    def tell(
        self,
        frames: Mapping[str, Sequence[bytes]],
        routes: Mapping[str, Mapping[int, Route]],
        done: Callable[[], None],
    ) -> None:
        """{user: frames, in order} to every device that has a connection."""
        topology = self._downlink.topology_now()
        parts: dict[str, Part] = {}
        for user, theirs in frames.items():
            for frame in theirs:
                payload = Payload(frame, b"")
                for device_id, route in routes.get(user, {}).items():
                    if route.conn_id:
                        shard = topology.owner(slot_of(route.conn_id)).shard
                        parts.setdefault(shard, Part()).add(payload, route.conn_id, (user, device_id))
        job = _Told(done)
        for shard, part in parts.items():
            metrics.STATES.inc(len(part.entries))
            self._downlink.hand_over(shard, part, [job], look=1)
        job.done()

    def hint(self, frames: Iterable[tuple[bytes, str]], routes: Mapping[str, Mapping[int, Route]]) -> None:
        """(frame, user) to every device that has a connection, once."""
        topology = self._downlink.topology_now()
        payload = Payload(b"", b"")
        for frame, user in frames:
            if frame is not payload.frame:
                payload = Payload(frame, b"")
            for route in routes.get(user, {}).values():
                if route.conn_id:
                    self._add_hint(topology.owner(slot_of(route.conn_id)).shard, payload, route.conn_id)

    async def stop(self) -> None:
        """Drops the hints that are on their way."""
        for task in self._sending:
            task.cancel()
        await asyncio.gather(*self._sending, return_exceptions=True)

    def _add_hint(self, shard: str, payload: Payload, conn_id: int) -> None:
        waiting = self._hints.get(shard)
        if waiting is None:
            waiting = self._hints[shard] = []
            task = asyncio.get_running_loop().create_task(self._send_hints(shard, waiting), name=f"hints {shard}")
            self._sending.add(task)
            task.add_done_callback(self._sending.discard)
        if len(waiting) < HINTS:
            waiting.append((payload, conn_id))
        else:
            metrics.HINTS.labels("dropped").inc()

    async def _send_hints(self, shard: str, waiting: list[tuple[Payload, int]]) -> None:
        try:
            while waiting:
                turn, waiting[:HINTS_PER_CALL] = waiting[:HINTS_PER_CALL], []
                payloads: list[Payload] = []
                entries: list[Delivery] = []
                for payload, conn_id in turn:
                    if not payloads or payloads[-1] is not payload:
                        payloads.append(payload)
                    entries.append(Delivery(conn_id, len(payloads) - 1))
                try:
                    async with asyncio.timeout(HINT_S):
                        await self._downlink.shards.deliver(shard, payloads, entries)
                    metrics.HINTS.labels("sent").inc(len(turn))
                except (Unavailable, TimeoutError):
                    metrics.HINTS.labels("dropped").inc(len(turn) + len(waiting))
                    waiting.clear()
        finally:
            del self._hints[shard]
