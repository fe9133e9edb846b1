"""The lane between a worker and the link: messages over a Unix stream socket, both ways.

A message is `length` (u32 little-endian, of what follows), `type` (u8), body. Columns are those of WorkerEvents and
WorkerFrames in wire/v1/state.proto, byte for byte, so the link moves them between lane and stream without opening them.

    worker → link   HELLO  once, first: who I am
                    EVENTS one group's events of an epoll round, in order (the data lane)
                    STATS  each second
                    HELD   the answer to DRAIN: which connections are here
    link → worker   CONFIG    worker_id, the slots this worker mints in, the stamps it may use
                    SLOTS     slot → group (255: nobody); a group is the link's small number for a shard
                    ANNOUNCE  the group's stream is up: take this attach number, name what lives, read on
                    HOLD      slots to hold: read none of their connections; of those that are held no more: name what
                              lives there to their group, then read on
                    SUSPEND   the group's stream is down: stop reading its connections, forget what waits
                    CREDIT    the shard took that much; events cost `cost()` each
                    FRAMES    payloads once, then who gets which
                    DRAIN     let newcomers in, refuse them, or close everybody

Memory: a reader holds at most one unfinished message, of at most MAX_MESSAGE_BYTES.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Final

VERSION: Final = 3
MAX_MESSAGE_BYTES: Final = 1 << 26
NO_GROUP: Final = 255
SLOT_BITS_BYTES: Final = 128

HELLO: Final = 1
EVENTS: Final = 2
STATS: Final = 3
HELD: Final = 4
CONFIG: Final = 16
SLOTS: Final = 17
ANNOUNCE: Final = 18
SUSPEND: Final = 19
CREDIT: Final = 20
FRAMES: Final = 21
DRAIN: Final = 22
HOLD: Final = 23

OPENED: Final = 1
DATA: Final = 2
CLOSED: Final = 3
BEGIN: Final = 4
NAMED: Final = 5
END: Final = 6

CLOSE_AFTER: Final = 1
"""Bit of a frame's flags: close when it is written."""
RUN: Final = 2
"""Bit of a frame's flags: the payload is whole frames with their lengths, the suffix their number, u32 little-endian."""

EVENT_COST_BYTES: Final = 13
"""What an event costs of a group's credit beyond its data: the columns' bytes."""

_HEAD = struct.Struct("<IB")
_HELLO = struct.Struct("<HBQIIQ")
_EVENTS = struct.Struct("<BQI")
_CONFIG = struct.Struct("<HQQ")
_ANNOUNCE = struct.Struct("<BQQ")
_SUSPEND = struct.Struct("<B")
_CREDIT = struct.Struct("<BQ")
_FRAMES = struct.Struct("<III")
_DRAIN = struct.Struct("<B")
_HELD = struct.Struct("<BI")


class LaneError(Exception):
    """The bytes are no lane message of this version. The only error that escapes this module's readers."""


@dataclass(frozen=True, slots=True)
class Hello:
    """Worker → link: index 0..W-1, boot (random per process), pid, live connections, greatest attach number so far."""

    index: int
    boot: int
    pid: int
    connections: int
    attach: int


@dataclass(frozen=True, slots=True)
class Events:
    """Worker → link: columns of WorkerEvents for one group, named by the group's attach number."""

    group: int
    attach: int
    kinds: bytes
    conn_ids: bytes
    lengths: bytes
    data: bytes


STATS_FIELDS: Final = (
    "connections",
    "accepted",
    "refused",
    "slow_closed",
    "login_timeouts",
    "bad_frames",
    "bytes_in",
    "bytes_out",
    "events",
    "frames_out",
    "frames_unknown",
    "lane_errors",
    "polled",
    "loop_lag_ms",
    "clock_lag_ms",
)
"""Figures of a worker in the order of the wire. All but connections and the two lags only rise."""

_STATS = struct.Struct(f"<{len(STATS_FIELDS)}Q")


@dataclass(slots=True)
class Stats:
    """Worker → link: a worker's figures since its start; frames_unknown counts frames for connections not held here."""

    connections: int = 0
    accepted: int = 0
    refused: int = 0
    slow_closed: int = 0
    login_timeouts: int = 0
    bad_frames: int = 0
    bytes_in: int = 0
    bytes_out: int = 0
    events: int = 0
    frames_out: int = 0
    frames_unknown: int = 0
    lane_errors: int = 0
    polled: int = 0
    loop_lag_ms: int = 0
    clock_lag_ms: int = 0


@dataclass(frozen=True, slots=True)
class Config:
    """Link → worker: mint as worker_id in `slots` (sorted) with stamps in [from_ms, until_ms); no slots: refuse."""

    worker_id: int
    slots: tuple[int, ...]
    from_ms: int
    until_ms: int


@dataclass(frozen=True, slots=True)
class Slots:
    """Link → worker: 1024 bytes, the group of each slot."""

    groups: bytes


@dataclass(frozen=True, slots=True)
class Announce:
    """Link → worker: the group's stream is up; its events carry `attach` from BEGIN on; its credit is `credit_bytes`."""

    group: int
    attach: int
    credit_bytes: int


@dataclass(frozen=True, slots=True)
class Hold:
    """Link → worker: all slots that are held now."""

    slots: frozenset[int]


@dataclass(frozen=True, slots=True)
class Suspend:
    """Link → worker: the group's stream is down."""

    group: int


@dataclass(frozen=True, slots=True)
class Credit:
    """Link → worker: so many bytes more for this group."""

    group: int
    credit_bytes: int


@dataclass(frozen=True, slots=True)
class Frames:
    """Link → worker, opened: entry i sends payloads[index[i]] and its suffix to conn_ids[i].

    conn_ids: array of u64; index: array of u32; suffix_lengths and flags: one byte each; suffix_data: joined.
    """

    payloads: list[bytes]
    conn_ids: array[int]
    index: array[int]
    suffix_lengths: bytes
    suffix_data: bytes
    flags: bytes


@dataclass(frozen=True, slots=True)
class Drain:
    """Link → worker: the Mode of core/drain.py; kept until the next one, also while the link is away."""

    mode: int


@dataclass(frozen=True, slots=True)
class Held:
    """Worker → link: the mode that is in force, every connection that is here, and how many CUT closed so far."""

    mode: int
    cut: int
    conn_ids: array[int]


Message = Hello | Events | Stats | Held | Config | Slots | Announce | Hold | Suspend | Credit | Frames | Drain


def _message(kind: int, *parts: bytes) -> bytes:
    return b"".join((_HEAD.pack(1 + sum(map(len, parts)), kind), *parts))


def pack_hello(hello: Hello) -> bytes:
    """The HELLO message."""
    return _message(HELLO, _HELLO.pack(VERSION, hello.index, hello.boot, hello.pid, hello.connections, hello.attach))


def pack_events(group: int, attach: int, kinds: bytes, conn_ids: bytes, lengths: bytes, data: bytes) -> bytes:
    """The EVENTS message of one group's columns."""
    return _message(EVENTS, _EVENTS.pack(group, attach, len(kinds)), kinds, conn_ids, lengths, data)


def pack_stats(stats: Stats) -> bytes:
    """The STATS message."""
    return _message(STATS, _STATS.pack(*(getattr(stats, name) for name in STATS_FIELDS)))


def pack_config(config: Config) -> bytes:
    """The CONFIG message."""
    return _message(CONFIG, _CONFIG.pack(config.worker_id, config.from_ms, config.until_ms), slot_bits(config.slots))


def pack_slots(groups: bytes) -> bytes:
    """The SLOTS message."""
    return _message(SLOTS, groups)


def pack_announce(group: int, attach: int, credit_bytes: int) -> bytes:
    """The ANNOUNCE message."""
    return _message(ANNOUNCE, _ANNOUNCE.pack(group, attach, credit_bytes))


def pack_hold(slots: Iterable[int]) -> bytes:
    """The HOLD message."""
    return _message(HOLD, slot_bits(slots))


def pack_suspend(group: int) -> bytes:
    """The SUSPEND message."""
    return _message(SUSPEND, _SUSPEND.pack(group))


def pack_credit(group: int, credit_bytes: int) -> bytes:
    """The CREDIT message."""
    return _message(CREDIT, _CREDIT.pack(group, credit_bytes))


def pack_drain(mode: int) -> bytes:
    """The DRAIN message."""
    return _message(DRAIN, _DRAIN.pack(mode))


def pack_held(mode: int, cut: int, conn_ids: Iterable[int]) -> bytes:
    """The HELD message."""
    return _message(HELD, _HELD.pack(mode, cut), array("Q", conn_ids).tobytes())


def pack_frames(
    payload_lengths: bytes,
    payload_data: bytes,
    conn_ids: bytes,
    payload_index: bytes,
    suffix_lengths: bytes,
    suffix_data: bytes,
    flags: bytes,
) -> bytes:
    """The FRAMES message: a batch's payload table and one worker's columns, both as StateBatch carries them."""
    head = _FRAMES.pack(len(payload_lengths) // 4, len(payload_data), len(conn_ids) // 8)
    return _message(
        FRAMES, head, payload_lengths, payload_data, conn_ids, payload_index, suffix_lengths, flags, suffix_data
    )


def cost(events: Events) -> int:
    """What these events cost of their group's credit, bytes."""
    return len(events.kinds) + len(events.conn_ids) + len(events.lengths) + len(events.data)


def slot_bits(slots: Iterable[int]) -> bytes:
    """Slots as 128 bytes, bit s % 8 of byte s // 8."""
    bits = 0
    for slot in slots:
        bits |= 1 << slot
    return bits.to_bytes(SLOT_BITS_BYTES, "little")


def slots_of_bits(bits: bytes) -> tuple[int, ...]:
    """The sorted slots of 128 bytes."""
    value = int.from_bytes(bits, "little")
    return tuple(slot for slot in range(8 * SLOT_BITS_BYTES) if value >> slot & 1)


class LaneReader:
    """Joins bytes as they come into messages."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []
        self._have_bytes = 0
        self._need_bytes = _HEAD.size

    def feed(self, data: bytes) -> list[Message]:
        """The messages that `data` completed, in order. Raises LaneError; the lane is then broken."""
        self._parts.append(data)
        self._have_bytes += len(data)
        if self._have_bytes < self._need_bytes:
            return []
        buffer = data if len(self._parts) == 1 else b"".join(self._parts)
        messages: list[Message] = []
        at, end = 0, len(buffer)
        need = _HEAD.size
        while end - at >= _HEAD.size:
            length, kind = _HEAD.unpack_from(buffer, at)
            if not 1 <= length <= MAX_MESSAGE_BYTES:
                raise LaneError(f"message of {length} bytes")
            if end - at < 4 + length:
                need = 4 + length
                break
            messages.append(_unpack(kind, buffer[at + _HEAD.size : at + 4 + length]))
            at += 4 + length
        self._parts = [buffer[at:]] if at < end else []
        self._have_bytes = end - at
        self._need_bytes = need
        return messages


def _unpack(kind: int, body: bytes) -> Message:
    try:
        return _UNPACK[kind](body)
    except KeyError:
        raise LaneError(f"message type {kind} is unknown") from None
    except struct.error as e:
        raise LaneError(f"message type {kind}: {e}") from None


def _hello(body: bytes) -> Hello:
    version, index, boot, pid, connections, attach = _HELLO.unpack(body)
    if version != VERSION:
        raise LaneError(f"version {version} of the lane, here {VERSION}")
    return Hello(index, boot, pid, connections, attach)


def _events(body: bytes) -> Events:
    group, attach, count = _EVENTS.unpack_from(body)
    a = _EVENTS.size + count
    b = a + 8 * count
    c = b + 4 * count
    if len(body) < c:
        raise LaneError("events: columns are cut")
    return Events(group, attach, body[_EVENTS.size : a], body[a:b], body[b:c], body[c:])


def _stats(body: bytes) -> Stats:
    return Stats(*_STATS.unpack(body))


def _config(body: bytes) -> Config:
    if len(body) != _CONFIG.size + SLOT_BITS_BYTES:
        raise LaneError("config: wrong length")
    worker_id, from_ms, until_ms = _CONFIG.unpack_from(body)
    return Config(worker_id, slots_of_bits(body[_CONFIG.size :]), from_ms, until_ms)


def _slots(body: bytes) -> Slots:
    if len(body) != 8 * SLOT_BITS_BYTES:
        raise LaneError("slots: wrong length")
    return Slots(body)


def _announce(body: bytes) -> Announce:
    return Announce(*_ANNOUNCE.unpack(body))


def _hold(body: bytes) -> Hold:
    if len(body) != SLOT_BITS_BYTES:
        raise LaneError("hold: wrong length")
    return Hold(frozenset(slots_of_bits(body)))


def _suspend(body: bytes) -> Suspend:
    return Suspend(*_SUSPEND.unpack(body))


def _credit(body: bytes) -> Credit:
    return Credit(*_CREDIT.unpack(body))


def _drain(body: bytes) -> Drain:
    return Drain(*_DRAIN.unpack(body))


def _held(body: bytes) -> Held:
    mode, cut = _HELD.unpack_from(body)
    if (len(body) - _HELD.size) % 8:
        raise LaneError("held: a conn_id is cut")
    return Held(mode, cut, array("Q", body[_HELD.size :]))


def _frames(body: bytes) -> Frames:
    payload_count, payload_bytes, count = _FRAMES.unpack_from(body)
    at = _FRAMES.size
    suffix_at = at + 4 * payload_count + payload_bytes + 14 * count
    if len(body) < suffix_at:
        raise LaneError("frames: columns are cut")
    # The supported machines are little-endian, as the columns are.
    payload_lengths = array("I", body[at : at + 4 * payload_count])
    at += 4 * payload_count
    if sum(payload_lengths) != payload_bytes:
        raise LaneError("frames: payload lengths do not fit their data")
    ends = list(accumulate(payload_lengths, initial=at))
    payloads = [body[a:b] for a, b in pairwise(ends)]
    at += payload_bytes
    conn_ids = array("Q", body[at : at + 8 * count])
    at += 8 * count
    index = array("I", body[at : at + 4 * count])
    at += 4 * count
    suffix_lengths = body[at : at + count]
    flags = body[at + count : suffix_at]
    if count and max(index) >= payload_count:
        raise LaneError("frames: an index is beyond the payloads")
    if sum(suffix_lengths) != len(body) - suffix_at:
        raise LaneError("frames: suffix lengths do not fit their data")
    return Frames(payloads, conn_ids, index, suffix_lengths, body[suffix_at:], flags)


_UNPACK: dict[int, Callable[[bytes], Message]] = {
    HELLO: _hello,
    EVENTS: _events,
    STATS: _stats,
    HELD: _held,
    CONFIG: _config,
    SLOTS: _slots,
    ANNOUNCE: _announce,
    HOLD: _hold,
    SUSPEND: _suspend,
    CREDIT: _credit,
    FRAMES: _frames,
    DRAIN: _drain,
}
