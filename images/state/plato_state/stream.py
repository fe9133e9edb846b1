"""Hop 5's outgoing half of one gateway stream: frames for many connections become columns.

    add(conn_id, frame, suffix, flag) ─▸ columns per worker, payloads shared ─▸ sealed batches ─▸ ≤ 2 untaken on the wire

Answers in a row for one connection, as a burst of uplinks gets them, are one entry: a run, which the worker writes as it is.
The next batch fills while two are untaken. Memory: HARD_BYTES; pushes are refused past PUSH_BYTES already, so that
answers and closes still find room.
"""

from __future__ import annotations

import asyncio
import struct
import sys
from array import array
from collections import deque
from typing import Final

from plato.core.ids import slot_of
from plato.wire.v1 import state_pb2

MAX_UNTAKEN: Final = 2
BATCH_BYTES: Final = 524_288
PUSH_BYTES: Final = 4_194_304
HARD_BYTES: Final = 8_388_608
ENTRY_BYTES: Final = 24
"""Charged per frame besides its bytes."""

SEND: Final = 0
SEND_AND_CLOSE: Final = 1
RUN: Final = 2
"""The flags of one frame, of a connection's last one, and of several (WorkerFrames)."""

_LENGTH: Final = struct.Struct(">I")
_COUNT: Final = struct.Struct("<I")
_SWAP: Final = sys.byteorder != "little"


def u64_column(raw: bytes) -> array[int]:
    """A column of 64-bit little-endian numbers. Raises ValueError if its length is no multiple of 8."""
    return _column("Q", raw)


def u32_column(raw: bytes) -> array[int]:
    """A column of 32-bit little-endian numbers. Raises ValueError if its length is no multiple of 4."""
    return _column("I", raw)


def column_bytes(column: array[int]) -> bytes:
    """The bytes of a column, little-endian."""
    if _SWAP:
        column = array(column.typecode, column)
        column.byteswap()
    return column.tobytes()


def _column(code: str, raw: bytes) -> array[int]:
    column = array(code)
    column.frombytes(raw)
    if _SWAP:
        column.byteswap()
    return column


class _Worker:
    """The columns of one worker in the batch that fills."""

    __slots__ = ("conn_ids", "flags", "payload_index", "suffix_data", "suffix_lengths")

    def __init__(self) -> None:
        self.conn_ids = array("Q")
        self.payload_index = array("I")
        self.suffix_lengths = bytearray()
        self.suffix_data = bytearray()
        self.flags = bytearray()


class _Notice:
    """A notice in the batch that fills: the newest of its conversation, and who waits for it."""

    __slots__ = ("conn_ids", "index", "seq")

    def __init__(self, index: int, seq: int) -> None:
        self.index = index
        self.seq = seq
        self.conn_ids: set[int] = set()


class LinkStream:
    """One attached gateway link. Lives from its hello to the end of its stream."""

    def __init__(self, hello: state_pb2.LinkHello) -> None:
        self.gateway = hello.gateway
        self.worker_id = hello.worker_id
        self.workers = max(1, hello.workers)
        self._runs = hello.runs
        self.announced: set[int] = set()
        """Workers that announced themselves completely on this stream."""
        self.wake = asyncio.Event()
        """Set when `next_batch` may have something, or the stream is to end."""
        self.closed_why = ""
        """Why the stream is to end; "" while it lives."""
        self.handled = 0
        """Greatest LinkBatch.batch_no that was handled; written by uplink."""
        self.queued_bytes = 0
        self._told = 0
        self._taken = 0
        self._batch_no = 0
        self._not_owner_epoch = 0
        self._serves: tuple[int, bytes] | None = None
        self._sealed: deque[tuple[state_pb2.StateBatch, int]] = deque()
        self._payloads: list[bytes | bytearray] = []
        self._lengths = array("I")
        self._shared: dict[bytes, int] = {}
        self._notices: dict[str, _Notice] = {}
        self._columns: dict[int, _Worker] = {}
        self._size = 0
        self._last_id = 0
        """Whose the newest payload and its only entry are, if one more of its frames may follow there; else 0."""

    @property
    def has_room(self) -> bool:
        """True if pushes are taken."""
        return self.queued_bytes < PUSH_BYTES and not self.closed_why

    def add(self, conn_id: int, frame: bytes, flag: int = SEND) -> bool:
        """Queues a frame for one connection. False: there is no room, it is dropped."""
        if flag == SEND and self._runs:
            if conn_id == self._last_id:
                return self._join(conn_id, frame)
            if not self._add(conn_id, frame, b"", flag, len(self._payloads), HARD_BYTES):
                return False
            if self._size:  # else this frame filled the batch, it is sealed
                self._last_id = conn_id
            return True
        return self._add(conn_id, frame, b"", flag, len(self._payloads), HARD_BYTES)

    def push(self, conn_id: int, frame: bytes, suffix: bytes) -> bool:
        """Queues a frame that others may get too, with this connection's suffix. False: no room, it is dropped."""
        return self._add(conn_id, frame, suffix, SEND, self._shared.get(frame, -1), PUSH_BYTES)

    def renew(self, conn_id: int, conversation_id: str, seq: int, frame: bytes) -> bool:
        """Whether a notice about that conversation waits for this connection, unsent: then the newer of both goes out under
        its number. A newer one takes its place for everybody whom it waits for."""
        notice = self._notices.get(conversation_id)
        if notice is None:
            return False
        if seq > notice.seq:
            old = self._payloads[notice.index]
            self._payloads[notice.index] = frame
            self._lengths[notice.index] = len(frame)
            self._shared.pop(bytes(old), None)
            self._shared[frame] = notice.index
            self._size += len(frame) - len(old)
            self.queued_bytes += len(frame) - len(old)
            notice.seq = seq
        return conn_id in notice.conn_ids

    def push_notice(self, conn_id: int, conversation_id: str, seq: int, frame: bytes, suffix: bytes) -> bool:
        """`push` of a notice, which `renew` may renew while it is unsent."""
        if not self.push(conn_id, frame, suffix):
            return False
        index = self._shared.get(frame)  # None: this frame filled the batch, it is sealed
        if index is not None:
            notice = self._notices.get(conversation_id)
            if notice is None or notice.index != index:
                notice = self._notices[conversation_id] = _Notice(index, seq)
            notice.conn_ids.add(conn_id)
        return True

    def not_owner(self, epoch: int) -> None:
        """Frames of slots that are not ours at `epoch` came, and were dropped."""
        if epoch > self._not_owner_epoch:
            self._not_owner_epoch = epoch
            self.wake.set()

    def serves(self, epoch: int, slots: bytes) -> None:
        """These slots (a bitmap) are loaded here, by the topology of `epoch`: the link sends frames of no others."""
        self._serves = epoch, slots
        self.wake.set()

    def handled_batch(self, batch_no: int) -> None:
        """A LinkBatch was handled: the link may send another one."""
        if batch_no > self.handled:
            self.handled = batch_no
            self.wake.set()

    def taken(self, batch_no: int) -> None:
        """The link took our batches up to this one."""
        if batch_no > self._taken:
            self._taken = batch_no
            self.wake.set()

    def close(self, why: str) -> None:
        """Has the stream end; what is queued is dropped (R3)."""
        if not self.closed_why:
            self.closed_why = why
            self.wake.set()

    def next_batch(self) -> state_pb2.StateBatch | None:
        """What to write now: frames while ≤ 2 batches are untaken, else what was handled; None: nothing."""
        batch: state_pb2.StateBatch | None = None
        if self._batch_no - self._taken < MAX_UNTAKEN:
            if not self._sealed and self._size:
                self._seal()
            if self._sealed:
                batch, size = self._sealed.popleft()
                self.queued_bytes -= size
                self._batch_no += 1
                batch.batch_no = self._batch_no
        if batch is None:
            if self.handled == self._told and not self._not_owner_epoch and self._serves is None:
                return None
            batch = state_pb2.StateBatch()
        batch.taken = self._told = self.handled
        batch.not_owner_epoch, self._not_owner_epoch = self._not_owner_epoch, 0
        if self._serves is not None:
            (batch.serves_epoch, batch.serves), self._serves = self._serves, None
        return batch

    def _add(self, conn_id: int, frame: bytes, suffix: bytes, flag: int, index: int, limit: int) -> bool:
        if self.queued_bytes >= limit or self.closed_why:
            return False
        self._last_id = 0
        fresh = index < 0 or index == len(self._payloads)
        if fresh:
            if index < 0:
                self._shared[frame] = len(self._payloads)
            index = len(self._payloads)
            self._payloads.append(frame)
            self._lengths.append(len(frame))
        number = slot_of(conn_id) % self.workers
        columns = self._columns.get(number)
        if columns is None:
            columns = self._columns[number] = _Worker()
        columns.conn_ids.append(conn_id)
        columns.payload_index.append(index)
        columns.suffix_lengths.append(len(suffix))
        columns.suffix_data += suffix
        columns.flags.append(flag)
        size = ENTRY_BYTES + len(suffix) + (len(frame) if fresh else 0)
        if not self._size:
            self.wake.set()
        self._size += size
        self.queued_bytes += size
        if self._size >= BATCH_BYTES:
            self._seal()
        return True

    def _join(self, conn_id: int, frame: bytes) -> bool:
        """One more frame for the connection whose answer came last."""
        if self.queued_bytes >= HARD_BYTES or self.closed_why:
            return False
        columns = self._columns[slot_of(conn_id) % self.workers]
        run = self._payloads[-1]
        if isinstance(run, bytearray):
            (count,) = _COUNT.unpack_from(columns.suffix_data, len(columns.suffix_data) - _COUNT.size)
            _COUNT.pack_into(columns.suffix_data, len(columns.suffix_data) - _COUNT.size, count + 1)
        else:
            run = self._payloads[-1] = bytearray(_LENGTH.pack(len(run)) + run)
            columns.flags[-1] = RUN
            columns.suffix_lengths[-1] = _COUNT.size
            columns.suffix_data += _COUNT.pack(2)
        run += _LENGTH.pack(len(frame))
        run += frame
        self._lengths[-1] = len(run)
        size = ENTRY_BYTES + len(frame)
        self._size += size
        self.queued_bytes += size
        if self._size >= BATCH_BYTES:
            self._seal()
        return True

    def _seal(self) -> None:
        batch = state_pb2.StateBatch(
            payload_lengths=column_bytes(self._lengths),
            payload_data=b"".join(self._payloads),
        )
        for number, columns in self._columns.items():
            batch.frames.add(
                worker=number,
                conn_ids=column_bytes(columns.conn_ids),
                payload_index=column_bytes(columns.payload_index),
                suffix_lengths=bytes(columns.suffix_lengths),
                suffix_data=bytes(columns.suffix_data),
                flags=bytes(columns.flags),
            )
        self._sealed.append((batch, self._size))
        self._payloads = []
        self._lengths = array("I")
        self._shared = {}
        self._notices = {}
        self._columns = {}
        self._size = self._last_id = 0
