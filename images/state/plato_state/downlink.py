"""Hop 5: frames for connections, from msg (Deliver), from ourselves (answers), and again (repeats, doubts).

    msg ─▸ deliver ─▸ number (run, push_no) ─▸ the gateway's stream, payload shared, suffix per connection
                           └─ newest frame kept until it is acknowledged ─▸ repeats ─▸ heartbeats carry the numbers

What a stream has no room for is dropped, and that session is in doubt: its run ends, and an empty Notify of the next
one follows when there is room, at a pace (R4). READ and TYPING are sent once, without a number, and lost where there is no
room. A notice about a large group that is the session's newest frame and still
unsent is not followed by the next one but replaced by it. Memory: one frame per connection, shared in a fan-out; `owed`
holds a conn_id per session in doubt.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Final

from plato.runtime import logs
from plato.wire.v1.client_pb2 import NOTIFY
from plato.wire.v1.suffix import push_suffix

from plato_state import metrics
from plato_state.core.answers import EMPTY_NOTIFY, LAST_PUBLIC_TYPE, UNNUMBERED, notice_of, type_of
from plato_state.core.pushes import gap_ms
from plato_state.core.session import Connection, Phase
from plato_state.shard import Shard, ticks
from plato_state.stream import SEND, SEND_AND_CLOSE

OWED_PER_TICK: Final = 50
"""Empty Notifies per tick: 2,000 a second, so that a shard's sessions sync over seconds instead of at once."""
REPEATS_PER_TICK: Final = 500
PARSED: Final = 64


class Downlink:
    """Sends on the streams of a shard."""

    def __init__(self, shard: Shard) -> None:
        self._shard = shard
        self._log = logs.get("downlink").bind()
        self._owed: deque[int] = deque()
        self._parsed: dict[bytes, tuple[str, int] | None] = {}
        settings = shard.settings
        self._gaps = [
            ticks(gap_ms(n, settings.repeat_min_ms, max(settings.repeat_min_ms, settings.repeat_max_ms)))
            for n in range(8)
        ]

    @property
    def owed(self) -> int:
        """Sessions that wait for an empty Notify."""
        return len(self._owed)

    # ── answers ──────────────────────────────────────────────────────────────────────────────────────────────

    def send(self, conn_id: int, frame: bytes) -> None:
        """Sends a frame that is not numbered."""
        link = self._shard.stream_of(conn_id)
        if link is None or not link.add(conn_id, frame, SEND):
            metrics.DROPPED.labels("answer").inc()

    def close(self, conn_id: int, frame: bytes) -> None:
        """Sends the last frame and has the socket closed, in one item (R3)."""
        link = self._shard.stream_of(conn_id)
        if link is None or not link.add(conn_id, frame, SEND_AND_CLOSE):
            metrics.DROPPED.labels("close").inc()

    # ── pushes ───────────────────────────────────────────────────────────────────────────────────────────────

    def deliver(
        self,
        payloads: Sequence[bytes],
        conn_ids: Sequence[int],
        indexes: Sequence[int],
        trace_ids: Sequence[bytes] = (),
    ) -> list[int]:
        """Hands frames to connections. Returns the indexes of the entries that have no place here."""
        untaken: list[int] = []
        connections = self._shard.connections
        push, debug = self.push, self._log.debug
        admission, now_ms = self._shard.admission, self._shard.now_ms
        probes = admission.probes
        for entry, (conn_id, index) in enumerate(zip(conn_ids, indexes, strict=True)):
            connection = connections.get(conn_id)
            if connection is None or not connection.takes_pushes or index >= len(payloads):
                untaken.append(entry)
            else:
                push(connection, payloads[index])
                if conn_id in probes:
                    admission.arrived(conn_id, payloads[index], now_ms)
                if index < len(trace_ids) and trace_ids[index]:
                    debug("pushed", conn_id=conn_id, trace_id=trace_ids[index])
        metrics.PUSHES.inc(len(conn_ids) - len(untaken))
        return untaken

    def push(self, connection: Connection, frame: bytes) -> None:
        """Numbers a frame and sends it, if the connection is live; counts it while a later Sync will cover it."""
        pushes = connection.pushes
        if connection.phase is not Phase.LIVE and connection.phase is not Phase.COMMITTING:
            return
        if pushes is None:
            self._push_guest(connection, frame)
            return
        if type_of(frame) in UNNUMBERED:
            self._push_once(connection, frame)
            return
        if connection.phase is Phase.COMMITTING:
            pushes.skip()
            return
        conn_id = connection.conn_id
        link = self._shard.stream_of(conn_id)
        notice = self._notice_of(frame)
        if notice is not None and link is not None and not connection.doubtful:
            newest = self._notice_of(pushes.frame) if pushes.frame else None
            if newest is not None and newest[0] == notice[0] and link.renew(conn_id, *notice, frame):
                pushes.frame = frame if notice[1] > newest[1] else pushes.frame
                return
        pushes.push(frame)
        self._shard.repeats.arm(conn_id, self._shard.now + self._gaps[0])
        if link is None:
            return  # nobody speaks for it now: the newest is repeated when its worker announces it
        suffix = push_suffix(pushes.run, pushes.push_no)
        if link.push(conn_id, frame, suffix) if notice is None else link.push_notice(conn_id, *notice, frame, suffix):
            connection.doubtful = False  # a frame of the new run is the hint already
        else:
            metrics.DROPPED.labels("push").inc()
            self.doubt(connection)

    def acknowledged(self, connection: Connection, run: int, push_no: int) -> None:
        """The client stored everything up to (run, push_no). A guest means its one push."""
        if connection.pushes is not None:
            if connection.pushes.acknowledged(run, push_no):
                self._shard.repeats.cancel(connection.conn_id)
        elif connection.guest_pushes is not None and connection.guest_pushes.frame:
            self._send_guest(connection, connection.guest_pushes.acknowledged())

    def _notice_of(self, frame: bytes) -> tuple[str, int] | None:
        """`notice_of`; the same frames go to many in a row, so what they say is kept."""
        if type_of(frame) != NOTIFY:
            return None
        if frame not in self._parsed:
            if len(self._parsed) >= PARSED:
                self._parsed.clear()
            self._parsed[frame] = notice_of(frame)
        return self._parsed[frame]

    def _push_once(self, connection: Connection, frame: bytes) -> None:
        link = self._shard.stream_of(connection.conn_id)
        if connection.phase is Phase.LIVE and link is not None and not link.push(connection.conn_id, frame, b""):
            metrics.DROPPED.labels("signal").inc()

    def _push_guest(self, connection: Connection, frame: bytes) -> None:
        guest_pushes = connection.guest_pushes
        if guest_pushes is None or type_of(frame) > LAST_PUBLIC_TYPE:
            return
        now, taken = guest_pushes.push(frame)
        if not taken:
            metrics.DROPPED.labels("guest").inc()
        elif now:
            self._send_guest(connection, now)

    def _send_guest(self, connection: Connection, frame: bytes) -> None:
        conn_id = connection.conn_id
        if not frame:
            self._shard.repeats.cancel(conn_id)
            return
        repeats = connection.guest_pushes.repeats if connection.guest_pushes is not None else 0
        self._shard.repeats.arm(conn_id, self._shard.now + self._gaps[repeats])
        link = self._shard.stream_of(conn_id)
        if link is not None:
            link.push(conn_id, frame, b"")

    # ── again ────────────────────────────────────────────────────────────────────────────────────────────────

    def named(self, connection: Connection) -> None:
        """Its worker announced a live connection: what waited for that goes on."""
        if connection.doubtful:
            self._owed.append(connection.conn_id)
        elif connection.pushes is not None and connection.pushes.frame:
            self._shard.repeats.arm(connection.conn_id, self._shard.now + 1)

    def repeat(self) -> None:
        """One tick of the repeat timers."""
        shard = self._shard
        for conn_id in shard.repeats.advance(REPEATS_PER_TICK):
            connection = shard.connections.get(conn_id)
            if connection is None or connection.phase not in (Phase.COMMITTING, Phase.LIVE):
                continue
            link = shard.stream_of(conn_id)
            if link is None or not link.has_room:
                shard.repeats.arm(conn_id, shard.now + self._gaps[-1])
                continue
            pushes = connection.pushes
            if pushes is None:
                if connection.guest_pushes is not None:
                    metrics.REPEATS.inc()
                    self._send_guest(connection, connection.guest_pushes.repeat())
                continue
            frame = pushes.repeat()
            if frame:
                metrics.REPEATS.inc()
                shard.repeats.arm(conn_id, shard.now + self._gaps[pushes.repeats])
                link.push(conn_id, frame, push_suffix(pushes.run, pushes.push_no))

    def doubt(self, connection: Connection) -> None:
        """Frames of this session may have been lost unnoticed: a new run begins, an empty Notify is owed."""
        pushes = connection.pushes
        if pushes is None or connection.phase is not Phase.LIVE:
            return
        metrics.DOUBTS.inc()
        pushes.doubt()
        self._shard.repeats.cancel(connection.conn_id)
        self.owe(connection)

    def owe(self, connection: Connection) -> None:
        """An empty Notify of the session's run is owed."""
        if not connection.doubtful and connection.pushes is not None:
            connection.doubtful = True
            self._owed.append(connection.conn_id)

    def doubt_all(self) -> None:
        """Every session of the shard begins a new run (Dirty)."""
        for connection in self._shard.connections.values():
            self.doubt(connection)

    def pay(self) -> None:
        """One tick of owed Notifies."""
        shard = self._shard
        for _ in range(min(OWED_PER_TICK, len(self._owed))):
            conn_id = self._owed.popleft()
            connection = shard.connections.get(conn_id)
            if connection is None or not connection.doubtful or connection.phase is not Phase.LIVE:
                continue
            link = shard.stream_of(conn_id)
            if link is None or not connection.boot:
                continue  # still doubtful: its worker's announcement puts it back
            if not link.has_room:
                self._owed.append(conn_id)
                continue
            connection.doubtful = False
            self.push(connection, EMPTY_NOTIFY)
