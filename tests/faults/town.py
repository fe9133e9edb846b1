"""Members of a large group: raw connections that do what docs/protocol.md asks of a client that is notified, and note what
came. For tests and the bench; thousands fit into one process.
"""

from __future__ import annotations

import asyncio
import random
import time

from plato.wire.v1 import client_pb2 as wire

from tests.faults.raw import Raw


class Member:
    """One connection. `run` reads until it is cancelled or closed."""

    def __init__(self, raw: Raw, conversation_id: str, seed: int, after: int = 0) -> None:
        """after: the seq behind which it reads: that of the operations that made the group."""
        self.raw = raw
        self._after = after
        self._conversation_id = conversation_id
        self._chance = random.Random(seed)
        self.rows: list[wire.PushMsg] = []
        self.pulled_at: list[float] = []
        """Of each row: time.monotonic() when it was here."""
        self.notices: list[wire.NotifyMsg] = []
        self.pushes = 0
        """Frames of the group that were pushed."""
        self.refused = 0
        """Pulls that were answered "later"."""
        self._asked = False
        self._ref = 1
        self._counted: set[tuple[int, int]] = set()  # (run, push_no): what is not acknowledged in time is repeated

    async def run(self) -> None:
        """Notified: pull within the time, from the last row on; pulled: on, until there is no more."""
        newest, numbers = 0, (0, 0)
        while (cmd := await self.raw.receive(3_600)) is not None:
            fresh = (cmd.run, cmd.push_no) not in self._counted
            if cmd.Type in (wire.NOTIFY, wire.PUSH) and cmd.push_no:
                self._counted.add((cmd.run, cmd.push_no))
            if cmd.Type == wire.NOTIFY:
                notify = wire.NotifyMsg.FromString(cmd.Payload)
                numbers = max(numbers, (cmd.run, cmd.push_no))
                for cursor in notify.newest:
                    if cursor.conversation_id == self._conversation_id:
                        self.notices += [notify] * fresh
                        newest = max(newest, cursor.seq)
                if not notify.newest and not self._asked:
                    self._later(0)  # something may have been lost
                elif newest > self.seq and not self._asked:
                    self._later(self._chance.random() * notify.within_ms)
            elif cmd.Type == wire.PUSH:
                pushed = wire.PushMsg.FromString(cmd.Payload)
                self.pushes += fresh and pushed.conversation_id == self._conversation_id
                numbers = max(numbers, (cmd.run, cmd.push_no))
            elif cmd.Type == wire.PULLED:
                page = wire.PulledMsg.FromString(cmd.Payload)
                if page.code:
                    self.refused += 1
                    self._later(page.retry_ms or 250)
                    continue
                rows = [row for row in page.rows if row.seq > self.seq]
                self.rows += rows
                self.pulled_at += [time.monotonic()] * len(rows)
                self._asked = False
                if self.seq < max(newest, page.newest_seq):
                    self._later(0)
            if numbers[1] and not self._asked:
                ack = wire.ACKMsg(Type=wire.PUSH, run=numbers[0], push_no=numbers[1])
                await self.raw.send(wire.ACK, ack)
                numbers = (numbers[0], 0)

    @property
    def seq(self) -> int:
        """The newest row that is here."""
        return self.rows[-1].seq if self.rows else self._after

    def _later(self, wait_ms: float) -> None:
        self._asked = True
        asyncio.get_running_loop().call_later(wait_ms / 1_000, self._pull)

    def _pull(self) -> None:
        self._ref += 1
        asked = wire.PullMsg(ref=self._ref, conversation_id=self._conversation_id, from_seq=self.seq + 1, limit=500)
        if not self.raw.writer.is_closing():
            self.raw.post(wire.PULL, asked)
