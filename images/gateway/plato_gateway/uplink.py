"""Hop 1 in a worker: bytes from sockets, as runs of whole frames, into one set of columns per group.

    socket ─recv 16 KB→ whole frames of (rest + data) ─→ the group's columns ─once per round→ lane
                                └ a cut frame stays in rest

A group is the link's number for a shard. It has an attach number while its stream is up, and a credit: the bytes that it
may still be sent. Without either its connections are not read; the kernel's buffers and TCP hold the peers. Only
connections that have something to say are taken out of epoll, so pausing a group costs nothing for the idle ones. Between
two returns of credit one connection may use up a SHARE of it; past that it waits for the next, and the others do not.

Memory: per group at most its credit, its CLOSED and OPENED events, an announcement (one event per connection) and a number
per connection that spoke since credit was returned.
"""

from __future__ import annotations

import os
import struct
from array import array
from collections.abc import Callable
from typing import Final

from plato.core.codes import Code
from plato.core.errors import PeerError
from plato.core.frames import whole_bytes
from plato.core.ids import SLOTS

from .core import lanes, websocket
from .downlink import Downlink
from .sockets import CLOSING, FRESH, PAUSED, READ_BYTES, Sockets

FIRST_READ_BYTES: Final = 4_096
"""Most reads bring less than this; asking for it first spares a large buffer, which costs as much as the rest in Python."""
FLUSH_BYTES: Final = 262_144
"""A group's columns are sent within a round already, when they are this large: messages stay far below gRPC's 4 MiB."""
NAMED_PER_MESSAGE: Final = 4_096
SHARE: Final = 16
"""Credit is returned per LinkBatch; two of them and the one that fills hold a connection's share each, so that one which
says as much as it can keeps 3/16 of the group's credit at most."""
_COST = lanes.EVENT_COST_BYTES
_DATA = lanes.DATA
_length = struct.Struct(">I").unpack_from


class Group:
    """One shard, as this worker knows it."""

    __slots__ = (
        "attach",
        "conn_ids",
        "credit_bytes",
        "data",
        "kinds",
        "number",
        "paused",
        "share_bytes",
        "size_bytes",
        "used_bytes",
    )

    def __init__(self, number: int) -> None:
        self.number = number
        self.attach = 0
        """0: its stream is down."""
        self.credit_bytes = 0
        self.kinds = bytearray()
        self.conn_ids: list[int] = []
        self.data: list[bytes] = []
        self.size_bytes = 0
        self.paused: dict[int, int] = {}
        """fd → serial of those that wait for credit or a stream."""
        self.share_bytes = READ_BYTES
        self.used_bytes: dict[int, int] = {}
        """conn_id → what it said since credit was last returned."""

    def add(self, kind: int, conn_id: int, data: bytes) -> None:
        """Appends an event; a group whose stream is down has nobody to tell: R6 will."""
        if not self.attach:
            return
        n = len(data)
        self.kinds.append(kind)
        self.conn_ids.append(conn_id)
        self.data.append(data)
        self.size_bytes += n + _COST
        self.credit_bytes -= n + _COST

    def clear(self) -> None:
        """Forgets the columns."""
        self.kinds.clear()
        self.conn_ids.clear()
        self.data.clear()
        self.size_bytes = 0


class Uplink:
    """Reads the connections of one worker. `send` takes packed lane messages."""

    def __init__(
        self,
        sockets: Sockets,
        downlink: Downlink,
        stats: lanes.Stats,
        max_frame_bytes: int,
        send: Callable[[bytes], None],
    ) -> None:
        self._sockets = sockets
        self._downlink = downlink
        self._stats = stats
        self._limit_bytes = max_frame_bytes
        self._send = send
        self._nobody = Group(lanes.NO_GROUP)
        self._groups: dict[int, Group] = {}
        self._table = bytes([lanes.NO_GROUP]) * SLOTS
        self._held: frozenset[int] = frozenset()
        self._closed: dict[int, int] = {}
        """conn_id → code of those that ended while their slot was held: their next shard has not heard of them."""
        self._group_of: list[Group] = [self._nobody] * SLOTS  # by slot; nobody's while it is held
        self.attach = 0
        """The greatest attach number taken so far, of any group."""

    # ── what the link says ───────────────────────────────────────────────────────────────────────────────────

    def detach_all(self) -> None:
        """The lane broke: no stream is known, nothing that waited is sent."""
        waiting = [self._nobody, *self._groups.values()]
        self._groups.clear()
        self._held = frozenset()
        self._closed.clear()
        self._nobody = Group(lanes.NO_GROUP)
        self._group_of = [self._nobody] * SLOTS
        for group in waiting:
            self._nobody.paused.update(group.paused)

    def set_slots(self, table: bytes) -> None:
        """Slot → group. Everybody who is paused may try again: its group may be another one now."""
        self.flush()
        numbers = set(table) - {lanes.NO_GROUP}
        waiting = [self._nobody, *self._groups.values()]
        for number in [n for n in self._groups if n not in numbers]:
            del self._groups[number]
        for number in numbers:
            if number not in self._groups:
                self._groups[number] = Group(number)
        self._table = table
        self._assign()
        for group in waiting:
            self._resume(group)

    def hold(self, slots: frozenset[int]) -> None:
        """These slots are held from now on. Those that were, and are no more, are named to their group, then read (R6)."""
        self.flush()
        released, self._held = self._held - slots, slots
        self._assign()
        for group in self._groups.values():
            if group.attach:
                theirs = [slot for slot in sorted(released) if self._group_of[slot] is group]
                if theirs:
                    self._name(group, theirs)
        self._closed = {c: code for c, code in self._closed.items() if c & 0x3FF in slots}
        if released:
            for group in (self._nobody, *self._groups.values()):
                self._resume(group)

    def _assign(self) -> None:
        self._group_of = [
            self._nobody if slot in self._held else self._groups.get(number, self._nobody)
            for slot, number in enumerate(self._table)
        ]

    def announce(self, number: int, attach: int, credit_bytes: int) -> None:
        """R6: takes the attach number and names what lives, between BEGIN and END, before anything else is said."""
        group = self._groups.get(number)
        if group is None:
            return
        self._flush(group)
        self.attach = max(self.attach, attach)
        group.attach = attach
        group.credit_bytes = credit_bytes
        group.share_bytes = max(READ_BYTES, credit_bytes // SHARE)
        group.used_bytes.clear()
        self._name(group, [slot for slot in range(SLOTS) if self._group_of[slot] is group])
        self._resume(group)

    def _name(self, group: Group, slots: list[int]) -> None:
        """Says which connections of these slots live, and of which it was kept that they ended."""
        group.add(lanes.BEGIN, 0, lanes.slot_bits(slots))
        named, peer = set(slots), self._sockets.peer
        for conn_id, fd in self._sockets.fd_of.items():
            if conn_id & 0x3FF in named:
                group.add(lanes.NAMED, conn_id, peer(fd))
                if len(group.kinds) >= NAMED_PER_MESSAGE:
                    self._flush(group)
        group.add(lanes.END, 0, b"")
        for conn_id, code in self._closed.items():
            if conn_id & 0x3FF in named:
                group.add(lanes.CLOSED, conn_id, code.to_bytes(2, "big"))
        self._flush(group)

    def suspend(self, number: int) -> None:
        """The group's stream is down: its connections are kept and not read."""
        group = self._groups.get(number)
        if group is not None:
            group.attach = 0
            group.credit_bytes = 0
            group.clear()

    def credit(self, number: int, credit_bytes: int) -> None:
        """The shard took bytes."""
        group = self._groups.get(number)
        if group is not None and group.attach:
            group.credit_bytes += credit_bytes
            group.used_bytes.clear()
            if group.credit_bytes > 0 and group.paused:
                self._resume(group)

    # ── what sockets say ─────────────────────────────────────────────────────────────────────────────────────

    def opened(self, fd: int, conn_id: int, peer: bytes = b"") -> None:
        """A connection was let in. peer: what OPENED says of it, if that is known."""
        self._group_of[conn_id & 0x3FF].add(lanes.OPENED, conn_id, peer or self._sockets.peer(fd))

    def closed(self, conn_id: int, code: int) -> None:
        """A connection ended."""
        if conn_id & 0x3FF in self._held:
            self._closed[conn_id] = code
        self._group_of[conn_id & 0x3FF].add(lanes.CLOSED, conn_id, code.to_bytes(2, "big"))

    def read_tcp(self, fd: int) -> None:
        """Takes one read's worth of a TCP connection."""
        sockets = self._sockets
        conn_id = sockets.conn[fd]
        group = self._group_of[conn_id & 0x3FF]
        used = group.used_bytes.get(conn_id, 0)
        if group.credit_bytes <= 0 or used >= group.share_bytes:
            self._pause(fd, group)
            return
        secure = fd in sockets.tls
        try:
            data = sockets.read(fd, FIRST_READ_BYTES) if secure else os.read(fd, FIRST_READ_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        n = len(data)
        if not n:
            self._downlink.drop(fd)
            return
        if n == FIRST_READ_BYTES and not secure:
            data = _read_on(fd, data)
            n = len(data)
        stats = self._stats
        stats.bytes_in += n
        if fd in sockets.rest:
            run = self._joined(fd, data)
            if not run:
                return
            n = len(run)
        elif n > 4 and _length(data)[0] == n - 4 <= self._limit_bytes:
            run = data  # one whole frame: the usual case
        else:
            try:
                n = whole_bytes(data, self._limit_bytes)
            except PeerError as e:
                self._bad_frame(fd, e.code)
                return
            if n != len(data):
                sockets.rest[fd] = bytearray(data[n:])
                if not n:
                    return
            run = data[:n]
        if sockets.flags[fd] & FRESH:
            sockets.flags[fd] &= ~FRESH
        group.kinds.append(_DATA)
        group.conn_ids.append(conn_id)
        group.data.append(run)
        n += _COST
        group.used_bytes[conn_id] = used + n
        group.credit_bytes -= n
        group.size_bytes += n
        if group.size_bytes >= FLUSH_BYTES:
            self._flush(group)

    def read_ws(self, fd: int) -> None:
        """Takes one read's worth of a WebSocket connection."""
        conn_id = self._sockets.conn[fd]
        group = self._group_of[conn_id & 0x3FF]
        if group.credit_bytes <= 0 or group.used_bytes.get(conn_id, 0) >= group.share_bytes:
            self._pause(fd, group)
            return
        try:
            data = self._sockets.read(fd, READ_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._downlink.drop(fd)
            return
        self._stats.bytes_in += len(data)
        self.take_ws(fd, data)

    def take_ws(self, fd: int, data: bytes) -> None:
        """Takes bytes that came after the upgrade."""
        sockets = self._sockets
        inbound = sockets.inbound.pop(fd, None) or websocket.Inbound(self._limit_bytes)
        taken = inbound.feed(data)
        if taken.run:
            sockets.flags[fd] &= ~FRESH
            group = self._group_of[sockets.conn[fd] & 0x3FF]
            conn_id = sockets.conn[fd]
            group.add(lanes.DATA, conn_id, taken.run)
            group.used_bytes[conn_id] = group.used_bytes.get(conn_id, 0) + len(taken.run) + _COST
            if group.size_bytes >= FLUSH_BYTES:
                self._flush(group)
        if taken.close is not None:
            if taken.close == websocket.TOO_BIG and not taken.answered:
                self._bad_frame(fd, Code.FRAME_SIZE)
                return
            bad = not taken.answered
            self._stats.bad_frames += bad
            self._downlink.close_ws(
                fd, Code.MALFORMED if bad else 0, taken.close, answered=taken.answered, last=taken.answers
            )
            return
        if not inbound.idle:
            sockets.inbound[fd] = inbound
        if taken.answers:
            self._downlink.send(fd, taken.answers)

    def discard(self, fd: int) -> None:
        """Reads a closing socket to see its end."""
        try:
            if os.read(fd, READ_BYTES):
                return
        except BlockingIOError:
            return
        except OSError:
            pass
        self._sockets.end(fd)

    def hung_up(self, fd: int) -> None:
        """The socket is dead in both directions."""
        if self._sockets.kind[fd] == CLOSING:
            self._sockets.end(fd)
        else:
            self._downlink.drop(fd)

    def flush(self) -> None:
        """Sends what the round gathered."""
        for group in self._groups.values():
            if group.kinds:
                self._flush(group)

    # ── inside ───────────────────────────────────────────────────────────────────────────────────────────────

    def _flush(self, group: Group) -> None:
        if not group.kinds:
            return
        self._send(
            lanes.pack_events(
                group.number,
                group.attach,
                bytes(group.kinds),
                array("Q", group.conn_ids).tobytes(),
                array("I", map(len, group.data)).tobytes(),
                b"".join(group.data),
            )
        )
        self._stats.events += len(group.kinds)
        group.clear()

    def _joined(self, fd: int, data: bytes) -> bytes:
        """Whole frames of the cut one and `data`; b"" while it is cut still, or when it was bad and closed."""
        rest = self._sockets.rest[fd]
        rest += data
        # Without this look the scan below would copy a large frame once per arriving byte.
        length = int.from_bytes(rest[:4], "big") if len(rest) >= 4 else 1
        if 1 <= length <= self._limit_bytes and len(rest) < 4 + length:
            return b""
        try:
            n = whole_bytes(rest, self._limit_bytes)
        except PeerError as e:
            self._bad_frame(fd, e.code)
            return b""
        run = bytes(rest[:n])
        if n == len(rest):
            del self._sockets.rest[fd]
        else:
            del rest[:n]
        return run

    def _bad_frame(self, fd: int, code: Code) -> None:
        self._stats.bad_frames += 1
        self._downlink.close(fd, code)

    def _pause(self, fd: int, group: Group) -> None:
        sockets = self._sockets
        sockets.flags[fd] |= PAUSED
        sockets.watch(fd)
        group.paused[fd] = sockets.serial[fd]

    def _resume(self, group: Group) -> None:
        sockets = self._sockets
        for fd, serial in group.paused.items():
            if sockets.serial[fd] == serial and sockets.flags[fd] & PAUSED:
                sockets.flags[fd] &= ~PAUSED
                sockets.watch(fd)
                if fd in sockets.tls:
                    sockets.again.append((fd, serial))
        group.paused.clear()


def _read_on(fd: int, data: bytes) -> bytes:
    """`data` and what follows it, up to READ_BYTES; an end or error of the socket is left for the next event to find."""
    try:
        return data + os.read(fd, READ_BYTES - len(data))
    except OSError:
        return data
