"""Protocols at the borders of the services. adapters/ holds the real ones, fakes/ their twins in memory; one contract
suite (tests/contract) runs both. Errors: every method may raise Unavailable (away, or the outcome is unknown: repeat) and,
where it says so, Fenced (a newer owner: step down). Nothing else escapes.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from plato.topology.record import Topology

# ── control plane ────────────────────────────────────────────────────────────────────────────────────────────


class TopologySource(Protocol):
    """The newest topology this process has seen. Epochs never go back."""

    def current(self) -> Topology:
        """The newest record. Raises Unavailable before the first one was read."""

    async def changed(self, after_epoch: int) -> Topology:
        """Waits for, and returns, a record whose epoch is greater than `after_epoch`."""

    @property
    def gone(self) -> bool:
        """Whether the record was removed, or taken from our sight: the cluster is being deleted. The newest one stands."""


@dataclass(frozen=True, slots=True)
class Claims:
    """What a token says: user is its `sub`, scope the words of its `scope`."""

    user: str
    scope: frozenset[str]


class TokenVerifier(Protocol):
    """Says who a token speaks for."""

    def verify(self, token: str) -> str:
        """The token's user_id (`sub`). Raises PeerError with TOKEN_EXPIRED, TOKEN_NOT_YET_VALID or TOKEN_INVALID."""

    def claims(self, token: str) -> Claims:
        """All of it. Raises as `verify`."""


# ── store: routes, sessions, fences, reservations (design §7) ────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class Route:
    """Where a device is: conn_id (0: nowhere, its session ended) and the generation of that statement."""

    conn_id: int
    gen: int


class RouteStore(Protocol):
    """Routes (user, device) → Route. Keys carry the user's hash tag. A user's record is bounded: where it is full, a new
    device has the ended routes dropped. The greatest gen of what was dropped stays as the user's floor, and a route that
    is written where none is must be above it: so a statement of before a drop never stands again."""

    async def read_many(self, users: Sequence[str]) -> list[dict[int, Route]]:
        """Per user, in order: {device_id: Route}. One pipeline. Unknown users give {}."""

    async def compare_and_set(
        self, user: str, device_id: int, expected: Route | None, new: Route, most: int = 0
    ) -> bool:
        """Writes `new` if the stored route equals `expected` (None: there is none). One atomic step. True as well where
        `new` stands already: the repeat of a write whose answer was lost is told that it was done. With expected None also
        False: new.gen is not above the floor; or the user has `most` live routes (0: any number are let in)."""

    async def floor(self, user: str) -> int:
        """The greatest gen of the routes that were dropped from the user's record; 0: none was."""


@dataclass(frozen=True, slots=True)
class Fence:
    """Who owns a slot: ordered by (epoch, start); token tells two of the same apart. start is unix ms, rising.

    owner and token name the proof counter: an owner proves *all* its fences by proof(owner, token).
    """

    epoch: int
    start: int
    token: str
    owner: str


@dataclass(frozen=True, slots=True)
class Session:
    """A committed session as the store keeps it. One hash per conn_id, under its slot's hash tag."""

    conn_id: int
    user: str
    device_id: int
    secret: bytes
    gen: int
    guest: bool
    platform: str = ""
    network: str = ""


@dataclass(frozen=True, slots=True)
class FenceView:
    """What stands in a slot: its fence (None: never owned, or wiped), whether released, and the owner's proof counter
    (None: no counter). A successor takes over what it saw unchanged (fence and proof) for 10 s, or 3 s after an order."""

    fence: Fence | None
    released: bool
    proof: int | None


class SessionStore(Protocol):
    """Slots of connection state. Every write names its fence; a smaller one, or an equal number with another token, is
    refused with Fenced, a missing or smaller stored one too (the caller then acquires and writes all again)."""

    async def look(self, slots: Sequence[int]) -> list[FenceView]:
        """The fences of `slots`, in order."""

    async def acquire(self, fences: Mapping[int, Fence], seen: Mapping[int, Fence | None]) -> dict[int, Fence]:
        """Per slot: sets the fence, with start = max(stored start + 1, given start), if what is stored still equals
        `seen[slot]` and is smaller in (epoch, start). Returns the fences that stand for the slots that were acquired;
        slots that lost the race are absent."""

    async def release(self, fences: Mapping[int, Fence]) -> None:
        """Marks the slots as released, where the fence still is ours. A hint that saves time."""

    async def prove(self, owner: str, token: str) -> bool:
        """Raises the owner's proof counter. False: it was missing (the store was wiped); it is begun anew."""

    async def load(self, slot: int) -> list[Session]:
        """Every session of a slot, read in batches."""

    async def put(self, slot: int, fence: Fence, sessions: Sequence[Session]) -> None:
        """Writes sessions (new or again); none at all asks whether the fence stands. Raises Fenced."""

    async def remove(self, slot: int, fence: Fence, conn_ids: Sequence[int]) -> None:
        """Deletes sessions; absent ones do no harm. Raises Fenced."""

    async def get(self, conn_id: int) -> Session | None:
        """One session, of any slot, whoever owns it. For ReConn."""


@dataclass(frozen=True, slots=True)
class Window:
    """Stamps that a minter may use: [from_ms, until_ms), Unix ms."""

    from_ms: int
    until_ms: int


class ReservationStore(Protocol):
    """Reservations of worker_ids: worker_id → (uid, boot, reserved_until_ms). Never with a TTL."""

    async def reserve(self, worker_id: int, uid: str, boot: int, now_ms: int, ahead_ms: int) -> Window | None:
        """Raises the reservation by compare-and-set. The same boot goes on: [old until, max(old until, now + ahead)); the
        first time, and another boot, begin at max(old until, now) and get at least `ahead_ms`. None: another *uid* holds it
        and its reservation has not passed (now < until): refuse to serve."""


class SeqCounters(Protocol):
    """One counter per conversation, in the store (design §8, allocator `redis`). Never with a TTL. A counter stands only
    under the run of the server that it was begun under: after a restart or a failover it may lag, and nobody can tell."""

    async def take(self, wanted: Mapping[str, tuple[int, int]]) -> dict[str, int]:
        """{conversation: (count, above)} → the first of `count` consecutive numbers, all greater than `above` and than any
        that this counter gave. Absent: its counter is missing, or of another run of the server; `begin` it."""

    async def begin(self, wanted: Mapping[str, tuple[int, int]]) -> dict[str, int]:
        """As `take`; missing counters and those of another run are made to stand, above both `above` and what they hold."""


# ── bus (design §8, R7, R8) ──────────────────────────────────────────────────────────────────────────────────


class BusProducer(Protocol):
    """Appends to the bus."""

    @property
    def partitions(self) -> int:
        """P: how many partitions the bus has."""

    async def append(self, batches: Mapping[int, Sequence[bytes]]) -> None:
        """Durably appends records per partition (0..P-1), each partition's in the order given; returns when all are
        durable. Raises Unavailable when the outcome is unknown or nothing was written: repeat the same batches."""


@dataclass(frozen=True, slots=True)
class BusRecord:
    """One record as read: position rises by order of commit within a partition, from 1; gaps are legal."""

    partition: int
    position: int
    value: bytes


class BusReader(Protocol):
    """Reads the bus. Keeps no position: the owner's row in the database does (R7)."""

    @property
    def stopped(self) -> Mapping[int, str]:
        """Partitions that cannot be read on, and why: the log lacks the position that is next. They are left out of
        `read_many`, until the log has it again."""

    async def read(self, partition: int, after: int, limit: int) -> list[BusRecord]:
        """The records with position > after, by rising position, at most `limit`. Raises OutOfRange where it is stopped."""

    def newest(self, partition: int) -> int | None:
        """The newest position that this reader heard of, for display; None: it does not hear of it. Asks nobody."""

    async def read_many(self, after: Mapping[int, int], limit: int, limit_bytes: int) -> list[BusRecord]:
        """`read` for several partitions {partition: after} at once, sorted by partition and position. Per partition at
        most `limit` records and at most `limit_bytes` of values, but always the first one."""

    async def wait(self, partitions: Iterable[int], timeout_s: float) -> set[int]:
        """Waits until one of `partitions` may have new records, or the time-out; returns the hinted ones (maybe none)."""

    async def trim(self, partition: int, upto: int, older_than_s: int) -> int:
        """Deletes records with position ≤ upto that are older; returns how many."""


# ── attachments ──────────────────────────────────────────────────────────────────────────────────────────────


class BlobStore(Protocol):
    """Bytes by key: letters, digits, -, _, and . but not first. Raises Unavailable, also for a key that is not there."""

    async def put(self, key: str, source: Path) -> None:
        """Stores the bytes of a file: whole, or not at all. Durable on return; the same again does no harm."""

    def read(self, key: str, first: int, last: int) -> AsyncIterator[bytes]:
        """The bytes from `first` to `last`, both included, in pieces. last < first: none."""

    async def delete(self, key: str) -> None:
        """Removes it; one that is not there does no harm."""

    async def close(self) -> None:
        """Closes connections."""


# ── between services ─────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class Delivery:
    """One frame for one connection: `payload` indexes the batch's payloads."""

    conn_id: int
    payload: int


@dataclass(frozen=True, slots=True)
class Payload:
    """A MsgCmd encoding without run and push_no, shared by every connection that gets it; its trace id for the logs."""

    frame: bytes
    trace_id: bytes


class ShardClient(Protocol):
    """What msg (and another shard) may ask of the state shards, by shard name."""

    async def deliver(self, shard: str, payloads: Sequence[Payload], entries: Sequence[Delivery]) -> list[int]:
        """Hands frames to a shard; returns the indexes of the entries that it did not take (slot not owned or not loaded
        there, connection unknown). Raises Unavailable when the shard does not answer."""

    async def dirty(self, shard: str, count: int) -> int:
        """Tells the shard its dirty count; returns the count that it has done."""

    async def replaced(self, shard: str, conn_id: int, by_conn_id: int, code: int) -> None:
        """A newer session stands; the old connection is to be closed with `code`. A hint."""


@dataclass(frozen=True, slots=True)
class Reading:
    """`user` has read a conversation up to `seq`."""

    user: str
    conversation_id: str
    seq: int


@dataclass(frozen=True, slots=True)
class Position:
    """What became of a Reading: the position that stands, 0 for a refusal."""

    code: int
    seq: int


@dataclass(frozen=True, slots=True)
class Typing:
    """`user` writes, or has stopped to."""

    user: str
    conversation_id: str
    stopped: bool


class MsgClient(Protocol):
    """What state asks of msg, whichever process answers. Requests and answers are wire encodings."""

    async def sync(self, user: str, sync: bytes) -> bytes:
        """SyncMsg in, SyncedMsg out. Raises Unavailable."""

    async def pull(self, user: str, pull: bytes) -> bytes:
        """PullMsg in, PulledMsg out. Raises Unavailable."""

    async def read(self, reads: Sequence[Reading]) -> list[Position]:
        """Raises read positions, many users' at once; in order. Raises Unavailable: repeat, it does no harm."""

    async def typing(self, signals: Sequence[Typing]) -> None:
        """Tells the other members who are online, at most once. Raises Unavailable: they are lost."""
