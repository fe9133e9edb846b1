"""READ and TYPING on their way to msg.

    READ    position ─▸ merged by (user, conversation) ─▸ one request of many, FLIGHTS at most on their way, the next fills
            ─▸ ACK with the position that stands, to each that asked; PENDING where it takes long (R3)
    TYPING  one per TYPING_MS of a connection and conversation ─▸ merged as well, one request on its way; never answered,
            never repeated, lost where msg does not take it

A READ is not kept: what msg does not answer is answered UNAVAILABLE, and the client repeats it. Memory: WAITING positions
and WAITING signals; past it a READ is answered BUSY and a signal is lost. A connection holds TYPED conversations.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Final

from plato.core.codes import Code
from plato.core.conversations import is_conversation_id
from plato.core.errors import Unavailable
from plato.core.ids import MAX_ID
from plato.ports import MsgClient, Position, Reading, Typing
from plato.runtime import logs
from plato.runtime.process import forever
from plato.wire.v1.client_pb2 import READ, TYPING, ReadMsg, TypingMsg

from plato_state import metrics
from plato_state.core import answers
from plato_state.core.session import Connection, Phase
from plato_state.downlink import Downlink
from plato_state.sessions import Sessions
from plato_state.shard import TICK_MS, Shard, pending_ticks

BATCH: Final = 500
FLIGHTS: Final = 2
"""One msg process that hangs must not hold up what another one would answer."""
WAITING: Final = 10_000
BUSY_RETRY_MS: Final = 500
TYPING_MS: Final = 2_000
TYPED: Final = 8
TYPING_BATCH: Final = 200

Key = tuple[str, str]
"""(user, conversation_id)."""


class _Asked:
    """A READ that waits for its answer."""

    __slots__ = ("answered", "connection", "conversation", "ref")

    def __init__(self, connection: Connection, conversation: str, ref: int) -> None:
        self.connection = connection
        self.conversation = conversation
        self.ref = ref
        self.answered = False


class Signals:
    """What clients have read and who types. `main()` asks msg."""

    def __init__(self, shard: Shard, downlink: Downlink, sessions: Sessions, msg: MsgClient) -> None:
        self._shard = shard
        self._downlink = downlink
        self._sessions = sessions
        self._msg = msg
        self._log = logs.get("signals")
        self._reads: dict[Key, tuple[int, list[_Asked]]] = {}
        self._waiting = 0
        self._typing: dict[Key, bool] = {}
        self._work = {name: asyncio.Event() for name in ("reads", "typing")}
        self._pending: deque[tuple[int, _Asked]] = deque()
        self._pending_ticks = pending_ticks(shard.settings.pending_ms)

    def read(self, connection: Connection, payload: bytes) -> None:
        """A READ. Raises DecodeError."""
        message = ReadMsg.FromString(payload)
        session = connection.session
        if connection.phase is not Phase.LIVE or session is None:
            self._sessions.run(connection, connection.out_of_place(READ, message.ref))
        elif session.guest:
            return  # its answer would be of no use to a guest, who has no other device
        elif not is_conversation_id(message.conversation_id):
            self._answer(connection, message.conversation_id, message.ref, Code.BAD_CONVERSATION)
        elif message.seq < 1:
            self._answer(connection, message.conversation_id, message.ref, Code.BAD_RANGE)
        else:
            self._read(connection, session.user, message.conversation_id, min(message.seq, MAX_ID), message.ref)

    def type(self, connection: Connection, payload: bytes) -> None:
        """A TYPING: it has no answer, so what is wrong with it is not told. Raises DecodeError."""
        message = TypingMsg.FromString(payload)
        session = connection.session
        if connection.phase is not Phase.LIVE or session is None:
            self._sessions.run(connection, connection.out_of_place(TYPING))
        elif not session.guest and is_conversation_id(message.conversation_id):
            self._type(connection, session.user, message.conversation_id, stopped=message.stopped)

    def _read(self, connection: Connection, user: str, conversation: str, seq: int, ref: int) -> None:
        shard = self._shard
        wait_ms = shard.admission.signal(connection.conn_id, shard.now_ms)
        if wait_ms:
            self._answer(connection, conversation, ref, Code.TOO_FAST, retry_ms=wait_ms)
            return
        if self._waiting >= WAITING:
            self._answer(connection, conversation, ref, Code.BUSY, retry_ms=BUSY_RETRY_MS)
            return
        asked = _Asked(connection, conversation, ref)
        upto, askers = self._reads.get((user, conversation), (0, []))
        self._reads[user, conversation] = max(upto, seq), [*askers, asked]
        self._waiting += 1
        self._pending.append((shard.now + self._pending_ticks, asked))
        self._work["reads"].set()

    def _type(self, connection: Connection, user: str, conversation: str, *, stopped: bool) -> None:
        now = self._shard.now
        if connection.typed is None:
            connection.typed = {}
        typed = connection.typed
        last = typed.get(conversation)
        # The end of a word that was told may follow at once; without it, nothing was to be ended.
        if stopped:
            if last is None or last[1]:
                return
        elif last is not None and (now - last[0]) * TICK_MS < TYPING_MS:
            return
        if last is None and len(typed) >= TYPED:
            oldest = min(typed, key=lambda c: typed[c][0])
            if (now - typed[oldest][0]) * TICK_MS < TYPING_MS:
                return
            del typed[oldest]
        typed[conversation] = (last[0] if stopped and last is not None else now), stopped
        if len(self._typing) >= WAITING:
            metrics.DROPPED.labels("typing").inc()
            return
        self._typing[user, conversation] = stopped
        self._work["typing"].set()

    def pend(self) -> None:
        """One tick: READs that are not answered in time are told so."""
        now = self._shard.now
        while self._pending and self._pending[0][0] <= now:
            asked = self._pending.popleft()[1]
            if not asked.answered:
                self._answer(asked.connection, asked.conversation, asked.ref, Code.PENDING)

    async def main(self) -> None:
        """Asks msg, until cancelled."""
        async with asyncio.TaskGroup() as group:
            for n in range(FLIGHTS):
                group.create_task(forever(f"reads {n}", self._ask_reads()), name=f"reads {n}")
            group.create_task(forever("typing", self._tell_typing()), name="typing")

    async def _ask_reads(self) -> None:
        while True:
            await self._work["reads"].wait()
            self._work["reads"].clear()
            while self._reads:
                batch = {key: self._reads.pop(key) for key in list(self._reads)[:BATCH]}
                readings = [Reading(*key, seq) for key, (seq, _) in batch.items()]
                try:
                    positions = await self._msg.read(readings)
                except Unavailable as e:
                    self._log.debug("read positions could not be told", error=str(e))
                    positions = [Position(Code.UNAVAILABLE, 0)] * len(readings)
                for position, (_, askers) in zip(positions, batch.values(), strict=True):
                    for asked in askers:
                        self._waiting -= 1
                        asked.answered = True
                        self._answer(asked.connection, asked.conversation, asked.ref, position.code, position.seq)

    async def _tell_typing(self) -> None:
        while True:
            await self._work["typing"].wait()
            self._work["typing"].clear()
            while self._typing:
                keys = list(self._typing)[:TYPING_BATCH]
                signals = [Typing(*key, self._typing.pop(key)) for key in keys]
                try:
                    await self._msg.typing(signals)
                except Unavailable:
                    metrics.DROPPED.labels("typing").inc(len(signals))

    def _answer(
        self, connection: Connection, conversation: str, ref: int, code: int, seq: int = 0, retry_ms: int = 0
    ) -> None:
        if self._shard.connections.get(connection.conn_id) is connection and connection.phase is Phase.LIVE:
            frame = answers.read_ack(code, connection.conn_id, ref, conversation, seq, retry_ms)
            self._downlink.send(connection.conn_id, frame)
