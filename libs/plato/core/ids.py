"""Ids: their 64 bits, and the minter that never gives one twice (design: minting).

    63   62 … 22            21 … 12     11 … 0
    0    ms since EPOCH_MS   worker_id   sequence; for a conn_id its low 10 bits are the slot

A minter stamps max(now, last stamp), + 1 when the sequence is used up, and always below its window. The caller
brings the clock's reading; a clock that steps back changes nothing but `lag_ms`.
"""

from __future__ import annotations

from typing import Final

EPOCH_MS: Final = 1_700_000_000_000
SLOTS: Final = 1024
WORKER_IDS: Final = 1024
MAX_ID: Final = (1 << 63) - 1


def slot_of(conn_id: int) -> int:
    """The slot (0..1023) of a conn_id."""
    return conn_id & 0x3FF


def worker_id_of(any_id: int) -> int:
    """The worker_id (0..1023) that minted a conn_id or msg_id."""
    return (any_id >> 12) & 0x3FF


def stamp_ms_of(any_id: int) -> int:
    """Unix milliseconds of an id's stamp. For display: stamps may run ahead of the clock."""
    return (any_id >> 22) + EPOCH_MS


def make_id(unix_ms: int, worker_id: int, sequence: int) -> int:
    """Packs the three parts. unix_ms ≥ EPOCH_MS; worker_id 0..1023; sequence 0..4095."""
    return ((unix_ms - EPOCH_MS) << 22) | (worker_id << 12) | sequence


class OutOfReservation(Exception):
    """No id may be given now: the window is used up or was never granted."""


class MsgIdMinter:
    """Gives msg_ids of one worker_id. Not thread-safe; one per process."""

    def __init__(self, worker_id: int) -> None:
        self._worker_id = worker_id
        self._from_ms = EPOCH_MS  # below it ids would be negative
        self._until_ms = 0  # exclusive
        self._stamp_ms = 0
        self._sequence = 4096  # used up: the first id takes a new stamp
        self.lag_ms = 0
        """How far the last clock reading lay behind the last stamp; > 5 ms means that the clock stepped back."""

    def grant(self, from_ms: int, until_ms: int) -> None:
        """Allows stamps in [from_ms, until_ms), Unix ms. Windows only move forward; one that goes on where the last one
        ended extends it, one behind a gap replaces it."""
        if from_ms > self._until_ms:
            self._from_ms = from_ms
        self._until_ms = max(self._until_ms, until_ms)

    def mint(self, now_ms: int) -> int:
        """A new id. Raises OutOfReservation, and then has changed nothing: a clock that leapt may come back."""
        floor = max(now_ms, self._from_ms)
        stamp_ms, sequence = self._stamp_ms, self._sequence
        self.lag_ms = max(0, stamp_ms - floor)
        if floor > stamp_ms:
            stamp_ms, sequence = floor, 0
        elif sequence >= 4096:
            stamp_ms, sequence = stamp_ms + 1, 0
        if stamp_ms >= self._until_ms:
            raise OutOfReservation
        self._stamp_ms, self._sequence = stamp_ms, sequence + 1
        return make_id(stamp_ms, self._worker_id, sequence)


class ConnIdMinter:
    """Gives conn_ids of one gateway worker, spread over its home slots.

    Per stamp and slot there are 4 ids; the minter walks the home slots round, and moves the stamp on when each slot gave 4.
    """

    def __init__(self) -> None:
        self._worker_id = 0
        self._slots: tuple[int, ...] = ()
        self._from_ms = EPOCH_MS  # below it ids would be negative
        self._until_ms = 0
        self._stamp_ms = 0
        self._given = 0  # ids given at this stamp
        self._turn = 0  # where the walk over the slots stands
        self.lag_ms = 0

    def assign(self, worker_id: int, slots: tuple[int, ...]) -> None:
        """Sets who mints and in which slots. A change of either starts a new stamp, so no id can repeat."""
        if (worker_id, slots) != (self._worker_id, self._slots):
            self._worker_id, self._slots = worker_id, slots
            self._stamp_ms += 1
            self._given = 0

    def grant(self, from_ms: int, until_ms: int) -> None:
        """Allows stamps in [from_ms, until_ms), Unix ms. Windows only move forward; one that goes on where the last one
        ended extends it, one behind a gap replaces it."""
        if from_ms > self._until_ms:
            self._from_ms = from_ms
        self._until_ms = max(self._until_ms, until_ms)

    def mint(self, now_ms: int) -> int:
        """A new id. Raises OutOfReservation (no window, or no home slots), and then has changed nothing."""
        count = len(self._slots)
        floor = max(now_ms, self._from_ms)
        stamp_ms, given = self._stamp_ms, self._given
        self.lag_ms = max(0, stamp_ms - floor)
        if floor > stamp_ms:
            stamp_ms, given = floor, 0
        elif given >= 4 * count:
            stamp_ms, given = stamp_ms + 1, 0
        if not count or stamp_ms >= self._until_ms:
            raise OutOfReservation
        slot = self._slots[self._turn % count]
        self._stamp_ms, self._given = stamp_ms, given + 1
        self._turn = (self._turn + 1) % count
        # Each slot is met once per `count` ids of a stamp, so its n-th id there is n-th // count.
        return make_id(stamp_ms, self._worker_id, ((given // count) << 10) | slot)
