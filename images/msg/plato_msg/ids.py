"""msg_ids for one process: a minter below its reservation, which a loop raises each second.

Out of reservation → `take` waits; nothing is minted without one. Memory: the numbers of one batch.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from typing import Final

from plato.core.errors import Unavailable
from plato.core.ids import MsgIdMinter, OutOfReservation
from plato.ports import ReservationStore
from plato.runtime import logs

from plato_msg import metrics

AHEAD_MS: Final = 3_000
RAISE_S: Final = 1.0
_RETRY_S: Final = 0.2


def unix_ms() -> int:
    """The clock's reading; a minter bears any step of it."""
    return time.time_ns() // 1_000_000


class MsgIds:
    """Gives msg_ids of one worker_id to one boot of a process."""

    def __init__(
        self,
        reservations: ReservationStore,
        worker_id: int,
        uid: str,
        boot: int,
        now_ms: Callable[[], int] = unix_ms,
    ) -> None:
        self._reservations = reservations
        self._worker_id, self._uid, self._boot = worker_id, uid, boot
        self._now_ms = now_ms
        self._minter = MsgIdMinter(worker_id)
        self._until_ms = 0
        self._latest_ms = 0  # the clock's greatest reading
        self._granted = asyncio.Event()
        self._refused = False
        """The last answer of the store: another process has our worker_id."""
        self._log = logs.get("ids")

    @property
    def worker_id(self) -> int:
        """The one that ids carry now."""
        return self._worker_id

    @property
    def lease(self) -> bool | None:
        """Whether the store's reservation names this process; None: its last word is too old."""
        if self._refused:
            return False
        return True if self._until_ms > self._now_ms() else None

    async def granted(self) -> None:
        """Waits for a reservation."""
        await self._granted.wait()

    def rename(self, worker_id: int) -> None:
        """From now on ids carry another worker_id; nothing is minted before that one is reserved."""
        if worker_id == self._worker_id:
            return
        self._log.warning("our worker_id is another one now", before=self._worker_id, now=worker_id)
        self._worker_id, self._minter = worker_id, MsgIdMinter(worker_id)
        self._until_ms, self._refused = 0, False
        self._granted.clear()

    async def run(self) -> None:
        """Raises the reservation for ever."""
        while True:
            granted = False
            with contextlib.suppress(Unavailable):
                granted = await self.raise_once()
            await asyncio.sleep(RAISE_S if granted else _RETRY_S)

    async def raise_once(self) -> bool:
        """One step. False: another process holds the worker_id. Raises Unavailable."""
        worker_id = self._worker_id
        window = await self._reservations.reserve(worker_id, self._uid, self._boot, self._now_ms(), AHEAD_MS)
        if worker_id != self._worker_id:
            return False  # we were renamed meanwhile: this window is of the id before
        if window is None:
            if not self._refused:
                self._log.warning("another process still holds our worker_id", worker_id=worker_id)
            self._refused = True
            return False
        self._refused = False
        # A window that goes on where ours ends only moves the end: stamps stay near the clock.
        self._minter.grant(window.from_ms if window.from_ms > self._until_ms else 0, window.until_ms)
        self._until_ms = max(self._until_ms, window.until_ms)
        self._granted.set()
        return True

    async def take(self, count: int) -> list[int]:
        """`count` new ids; waits while out of reservation."""
        taken: list[int] = []
        while True:
            now_ms = self._now_ms()
            try:
                while len(taken) < count:
                    taken.append(self._minter.mint(now_ms))
            except OutOfReservation:
                self._granted.clear()
                await self._granted.wait()
                continue
            self._latest_ms = max(self._latest_ms, now_ms)
            metrics.ID_LAG_MS.set(self._latest_ms - now_ms)
            return taken
