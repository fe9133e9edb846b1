"""What the core remembers and what it asks of its edge.

A call into the machine changes memory and collects one `Effects`. The edge makes its `writes` durable first, in order, and
only then sends its frames and tells its notices; so nothing is acknowledged, sent or shown that a crash could forget.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from plato.client.api import (
    ConversationChanged,
    Friend,
    FriendChanged,
    MessageChanged,
    Overflowed,
    ReadBy,
    State,
    Typing,
)

UNPLACED: Final = -1
"""Cursor of a conversation whose first cursor no Sync has told yet."""


@dataclass(frozen=True, slots=True)
class Row:
    """One stored message, as the platform numbered it. server_at_ms: Unix ms, for display only. msg_type and body are those
    that the operation at changed_seq left (0: none changed them)."""

    conversation_id: str
    seq: int
    prev_seq: int
    msg_id: int
    from_user: str
    msg_type: int
    body: bytes
    client_msg_id: bytes
    server_at_ms: int
    changed_seq: int = 0
    recalled: bool = False


@dataclass(frozen=True, slots=True)
class Revision:
    """What an operation makes of an older row. Of all that is known of a row, what has the greatest changed_seq holds.

    seq: the row's place as the operation names it, 0 if it does not. msg_type: None, it stays as it is."""

    conversation_id: str
    msg_id: int
    seq: int
    changed_seq: int
    recalled: bool
    msg_type: int | None
    body: bytes


@dataclass(frozen=True, slots=True)
class Membership:
    """Somebody's place in a group from `seq` on; role None: none. added: who is in already keeps the role. A new owner takes
    the place of the one before, who becomes an administrator."""

    conversation_id: str
    user: str
    seq: int
    role: int | None
    added: bool = False


@dataclass(slots=True)
class Entry:
    """One message in the outbox. client_id and client_msg_id never change; accepted: ACKed in this run of the client."""

    conversation_id: str
    client_id: int
    client_msg_id: bytes
    to_user: str
    msg_type: int
    body: bytes
    accepted: bool = False


@dataclass(frozen=True, slots=True)
class Place:
    """A conversation as the store keeps it: cursor (or UNPLACED), the newest seq heard of, the next client_id (from 1); of a
    group what holds as of group_seq."""

    conversation_id: str
    peer: str
    cursor: int
    newest_seq: int
    next_client_id: int
    title: str = ""
    members: int = 0
    left: bool = False
    group_seq: int = 0


@dataclass(slots=True)
class Shared:
    """Of one conversation, what this user's devices share. wanted_seq: read here up to there, and the platform does not know
    it yet; else 0."""

    conversation_id: str
    read_seq: int = 0
    wanted_seq: int = 0
    pinned_at_ms: int = 0
    muted_until_ms: int = 0
    peer_read_seq: int = 0
    cleared_seq: int = 0

    @property
    def position(self) -> int:
        """Up to where this user has read, as this device shows it."""
        return max(self.read_seq, self.wanted_seq)


@dataclass(frozen=True, slots=True)
class Session:
    """The last session whose Sync was answered; what ReConn names."""

    conn_id: int
    secret: bytes


@dataclass(slots=True)
class Learnt:
    """What is known of one kind of network: the heartbeat interval that stands, the least idle time after which a flow was
    dropped (0: never), how often that happened, and answered beats since the interval was set. A store keeps the first four.
    """

    network: str
    interval_ms: int = 0
    broken_ms: int = 0
    drops: int = 0
    beats: int = 0


@dataclass(frozen=True, slots=True)
class Snapshot:
    """All that a store holds at start, save the messages. gateways: the last list heard, best first."""

    device_id: int
    user: str | None = None
    session: Session | None = None
    gateways: tuple[str, ...] = ()
    last_gateway: str | None = None
    places: tuple[Place, ...] = ()
    outbox: tuple[Entry, ...] = ()  # by (conversation_id, client_id)
    learnt: tuple[Learnt, ...] = ()  # the network used last at the end
    state_version: int = 0
    shared: tuple[Shared, ...] = ()


@dataclass(slots=True)
class Writes:
    """One transaction. Later values of a key replace earlier ones; rows and entries keep their order."""

    rows: list[Row] = field(default_factory=list)
    revisions: list[Revision] = field(default_factory=list)  # after the rows
    memberships: list[Membership] = field(default_factory=list)
    places: dict[str, Place] = field(default_factory=dict)
    queued: dict[bytes, Entry] = field(default_factory=dict)  # by client_msg_id
    unqueued: list[Entry] = field(default_factory=list)  # settled: they leave the outbox
    refused: list[tuple[Entry, int, str]] = field(default_factory=list)  # and stay in sight: the code, and words
    meta: dict[str, str] = field(default_factory=dict)  # "" deletes
    delivered: int = 0  # local number of the last row that the application has taken
    forgotten: bool = False  # what is hidden and who is a friend, before this: a platform that was set back
    shared: dict[str, Shared] = field(default_factory=dict)  # by conversation
    hidden: dict[tuple[str, int], None] = field(default_factory=dict)  # (conversation, seq)
    friends: dict[str, Friend] = field(default_factory=dict)  # by user

    def __bool__(self) -> bool:
        return any(getattr(self, name) for name in self.__slots__)

    def forget_shared(self) -> None:
        """Nothing is hidden and nobody is a friend, until what comes after this."""
        self.forgotten = True
        self.hidden.clear()
        self.friends.clear()

    def join(self, later: Writes) -> None:
        """Takes in what comes after, so that both are one transaction."""
        self.rows += later.rows
        self.places |= later.places
        self.queued |= later.queued
        self.unqueued += later.unqueued
        self.refused += later.refused
        self.meta |= later.meta
        self.delivered = max(self.delivered, later.delivered)
        self.revisions += later.revisions
        self.memberships += later.memberships
        if later.forgotten:
            self.forget_shared()
        self.shared |= later.shared
        self.hidden |= later.hidden
        self.friends |= later.friends


@dataclass(frozen=True, slots=True)
class Accepted:
    """The platform holds this message of ours."""

    client_msg_id: bytes


@dataclass(frozen=True, slots=True)
class Settled:
    """This message of ours has its place."""

    conversation_id: str
    client_msg_id: bytes
    msg_id: int
    seq: int


@dataclass(frozen=True, slots=True)
class RefusedMessage:
    """This message of ours was refused for good."""

    client_msg_id: bytes
    code: int
    detail: str = ""  # words that say more than the code's own


@dataclass(frozen=True, slots=True)
class HistoryPage:
    """The answer to a history request; rows None: it could not be had, use what is local."""

    ref: int
    rows: tuple[Row, ...] | None


@dataclass(frozen=True, slots=True)
class StateChanged:
    """The connection's state is another one."""

    state: State


News = MessageChanged | ConversationChanged | ReadBy | Typing | FriendChanged | Overflowed
Notice = Accepted | Settled | RefusedMessage | HistoryPage | StateChanged | News


@dataclass(slots=True)
class Effects:
    """What the edge does next: writes, then everything else, in this order."""

    writes: Writes = field(default_factory=Writes)
    link_no: int = 0
    """The link that `frames` and `close` belong to; frames of an older link are dropped."""
    frames: list[bytes] = field(default_factory=list)
    close: bool = False
    notices: list[Notice] = field(default_factory=list)
    give_up: list[int] = field(default_factory=list)
    """Attempts at a link that are not wanted any more, by their numbers."""
    connects: list[tuple[int, str]] = field(default_factory=list)
    """Begin to open links of these numbers to these addresses; the machine takes the first that opens."""
    go_over: bool = False
    """The second link takes the place of the first, which is closed; `frames` and `close` are the new one's."""
    second_close: bool = False
    second: tuple[int, str] | None = None
    """Open a second link, which leaves the first as it is: of this number, to this address."""
    second_frames: list[bytes] = field(default_factory=list)
    polls: dict[str, int] = field(default_factory=dict)
    """Ports of long polling that a REDIRECT told, by the gateway's address."""
    want_list: bool = False
    want_token: bool = False
    fresh_token: bool = False
    """With want_token: the last one was refused, ask the provider for another."""

    def __bool__(self) -> bool:
        return bool(
            self.writes
            or self.frames
            or self.close
            or self.notices
            or self.give_up
            or self.connects
            or self.go_over
            or self.second_close
            or self.second
            or self.second_frames
            or self.want_list
            or self.want_token
        )
