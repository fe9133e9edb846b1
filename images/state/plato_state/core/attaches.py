"""R6: who may speak for which connections. Attaching announces.

A worker of a gateway is (worker_id, worker). What it sends is named by its boot (random per worker process) and an
attach number that rises within the boot. Each attach begins by naming the living connections of the slots it covers:

    BEGIN slots    boot and attach number become the current ones; events of any other are dropped from now on
    NAMED id …     this connection lives (a socket that opens meanwhile says OPENED, one that ends CLOSED, in order)
    END            → what was named: unknown ones get a login timer; what was last heard through this very boot, in
                   these slots, and was not named counts as closed

A slot that is not loaded at END is announced again to the caller when it is: what lives there is kept until then.
Connections of an older boot are not "gone" by this: they age, since only their own boot could tell.

Memory: 8-byte ids of an announcement while it runs, and of slots that are not loaded yet.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass

SLOT_BITMAP_BYTES = 128


@dataclass(frozen=True, slots=True)
class Announced:
    """A complete announcement of `slots`: `named` live; `boot` is what "last heard through" is compared with."""

    worker_id: int
    worker: int
    boot: int
    slots: frozenset[int]
    named: frozenset[int]


class Attach:
    """The current attach of one worker."""

    __slots__ = ("attach", "boot", "named", "open", "pending", "slots", "void", "worker", "worker_id")

    def __init__(self, worker_id: int, worker: int, boot: int, attach: int) -> None:
        self.worker_id = worker_id
        self.worker = worker
        self.boot = boot
        self.attach = attach
        self.open = False
        """True from BEGIN to END."""
        self.slots: frozenset[int] = frozenset()
        """Slots that the announcement covers."""
        self.named: set[int] = set()
        """conn_ids of those slots that were named since BEGIN and live; emptied at END."""
        self.pending: dict[int, set[int]] = {}
        """By slot that is not loaded: the connections that live there. Taken when the slot loads."""
        self.void = False
        """True once the stream ended: only a new BEGIN may speak."""


class Attaches:
    """The attaches of all workers that speak to this shard."""

    def __init__(self) -> None:
        self._current: dict[tuple[int, int], Attach] = {}

    def accept(self, worker_id: int, worker: int, boot: int, attach: int, begins: bool) -> Attach | None:
        """The attach that these events belong to; None: they are of an older one, or of none, and are dropped.

        begins: the first event is BEGIN.
        """
        current = self._current.get((worker_id, worker))
        if current is not None and current.boot == boot:
            if attach < current.attach:
                return None
            if attach == current.attach and not current.void:
                return current
            if not begins:
                return None
            current.attach = attach
            current.void = False
            return current
        if not begins:
            return None
        made = self._current[worker_id, worker] = Attach(worker_id, worker, boot, attach)
        return made

    @staticmethod
    def begin(attach: Attach, slots: frozenset[int]) -> None:
        """BEGIN: an announcement of `slots` starts. What is kept about other slots stands."""
        attach.open = True
        attach.slots = slots
        attach.named = set()
        for slot in slots:
            attach.pending.pop(slot, None)

    @staticmethod
    def lives(attach: Attach, conn_id: int, loaded: bool) -> None:
        """NAMED or OPENED: this connection lives. loaded: its slot is."""
        slot = conn_id & 0x3FF
        if attach.open and slot in attach.slots:
            attach.named.add(conn_id)
        elif not loaded:
            attach.pending.setdefault(slot, set()).add(conn_id)

    @staticmethod
    def closed(attach: Attach, conn_id: int) -> None:
        """CLOSED: it does not any more."""
        attach.named.discard(conn_id)
        waiting = attach.pending.get(conn_id & 0x3FF)
        if waiting is not None:
            waiting.discard(conn_id)

    @staticmethod
    def end(attach: Attach, loaded: Callable[[int], bool]) -> Announced | None:
        """END: what can be judged now; slots that are not loaded wait for `loaded_slot`. None: there was no BEGIN."""
        if not attach.open:
            return None
        ready = frozenset(s for s in attach.slots if loaded(s))
        named = attach.named
        attach.open = False
        attach.named = set()
        for slot in attach.slots - ready:
            attach.pending[slot] = set()
        for conn_id in named:
            if conn_id & 0x3FF not in ready:
                attach.pending[conn_id & 0x3FF].add(conn_id)
        here = frozenset(c for c in named if c & 0x3FF in ready)
        return Announced(attach.worker_id, attach.worker, attach.boot, ready, here)

    def loaded_slot(self, slot: int) -> list[Announced]:
        """`slot` was loaded: what its workers said about it meanwhile."""
        out: list[Announced] = []
        for attach in self._current.values():
            named = attach.pending.pop(slot, None)
            if named is not None and not attach.void:
                out.append(
                    Announced(attach.worker_id, attach.worker, attach.boot, frozenset((slot,)), frozenset(named))
                )
        return out

    def lost(self, slots: Collection[int]) -> None:
        """These slots went to another shard: what lives there is that one's to hear, in its own announcement."""
        for attach in self._current.values():
            for slot in slots:
                attach.pending.pop(slot, None)

    def detach(self, worker_id: int) -> None:
        """The stream of a gateway ended: until its workers announce again nobody speaks for them."""
        for (owner, _), attach in self._current.items():
            if owner == worker_id:
                attach.void = True
                attach.open = False
                attach.named = set()
                attach.pending = {}


def bitmap_of_slots(slots: Iterable[int]) -> bytes:
    """BEGIN's 128 bytes of these slots."""
    bits = 0
    for slot in slots:
        bits |= 1 << slot
    return bits.to_bytes(SLOT_BITMAP_BYTES, "little")


def slots_of_bitmap(bitmap: bytes) -> frozenset[int]:
    """The slots of BEGIN's 128 bytes: bit s % 8 of byte s // 8. Other lengths give what their bytes say, ≤ 1023."""
    return frozenset(
        byte * 8 + bit
        for byte, value in enumerate(bitmap[:SLOT_BITMAP_BYTES])
        if value
        for bit in range(8)
        if value >> bit & 1
    )
