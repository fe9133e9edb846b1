"""What an application sees of the client: messages, receipts, states and errors.

ClientError
├── Refused       the platform refused this message for good; carries the code
├── Stopped       the connection ended with a final code (replaced, kicked, logged out) or the client was closed
├── Unreachable   the HTTP API did not answer; whether it did what was asked is unknown
├── OutboxFull    more waits to be sent than the outbox may hold; nothing was written
└── StoreError    the store cannot be used
    ├── StoreInUse    another process has it open
    └── StoreForeign  it belongs to another user, or to a newer version
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from plato.client.content import QUOTE_CHARACTERS, Operation, Quote, Rich, operation_of, rich_of, text_of
from plato.core.codes import text


class ClientError(Exception):
    """Root of what the client raises."""


class Refused(ClientError):
    """The message was refused for good with `code`; it left the outbox and will not be sent again."""

    def __init__(self, code: int, detail: str = "") -> None:
        super().__init__(f"{text(code)}{': ' + detail if detail else ''} (code {code})")
        self.code = code
        self.detail = detail
        """The platform's words, where they say more than the code's own: a hook's, say."""


class Stopped(ClientError):
    """The client stays away: `code` is the final one, or None when it was closed by its own user."""

    def __init__(self, code: int | None, detail: str = "") -> None:
        super().__init__("the client is closed" if code is None else f"{detail or text(code)} (code {code})")
        self.code = code


class Unreachable(ClientError):
    """The HTTP API did not answer, or is too busy; the same again later."""


class OutboxFull(ClientError):
    """The outbox holds as many messages or bytes as it may; try again when some are settled."""


class StoreError(ClientError):
    """The client's store cannot be used; says why and the way out."""


class StoreInUse(StoreError):
    """Another process has this store open."""


class StoreForeign(StoreError):
    """The store belongs to another user or to a newer version of the client."""


class Phase(Enum):
    """Where the connection stands."""

    OFFLINE = "offline"  # waiting for the next attempt; sending works, the outbox keeps it
    CONNECTING = "connecting"  # looking for a gateway or opening a socket
    LOGGING_IN = "logging in"  # Login, ReConn or the committing Sync is on its way
    ONLINE = "online"  # committed: pushes come
    STOPPED = "stopped"  # a final code, a logout or close: no further attempt


@dataclass(frozen=True, slots=True)
class State:
    """The connection's state. code: the last code that changed it, if any. gateway: its address while there is one.

    OFFLINE because a token was refused, or none was given, or ipconfig gives no list, it says so: `reason`. Without one it
    is the network. detail: words that say more than the code's own, or that stand for one, else "".
    """

    phase: Phase
    code: int | None = None
    gateway: str | None = None
    user: str | None = None
    detail: str = ""

    @property
    def reason(self) -> str:
        """Why it is so, in words; "" when no code came."""
        return self.detail or (text(self.code) if self.code else "")

    def __str__(self) -> str:
        where = f" via {self.gateway}" if self.gateway and self.phase is Phase.ONLINE else ""
        why = f": {self.reason}" if self.reason else ""
        return f"{self.phase.value}{where}{why}"


class Delivery(Enum):
    """How far a message is."""

    QUEUED = "queued"  # in the durable outbox of this device
    ACCEPTED = "accepted"  # the platform holds it durably
    STORED = "stored"  # it has its place in the conversation; every foreign message is
    REFUSED = "refused"  # refused for good


@dataclass(frozen=True, slots=True)
class Message:
    """One message. seq, prev_seq, msg_id and server_at_ms (Unix ms, for display only) are 0 before it is STORED.

    client_msg_id: 16 bytes. code: why it was refused, else 0; detail: words for it that say more than the code's own. mine:
    sent by this user, from whichever device. msg_type and body are those of now; changed_seq: the seq of the newest
    operation that changed them, 0 if none did. recalled: it stays, its body is gone. hidden: this user deleted it for
    themselves.
    """

    conversation_id: str
    seq: int
    prev_seq: int
    msg_id: int
    from_user: str
    msg_type: int
    body: bytes
    client_msg_id: bytes
    server_at_ms: int
    mine: bool
    delivery: Delivery = Delivery.STORED
    code: int = 0
    changed_seq: int = 0
    recalled: bool = False
    hidden: bool = False
    detail: str = ""

    @property
    def text(self) -> str:
        """The body as text; of a rich message its text, of an operation nothing. What is no UTF-8 is shown as U+FFFD."""
        return text_of(self.msg_type, self.body)

    @property
    def rich(self) -> Rich | None:
        """The reply, attachments and mentions of a message of MsgType.RICH."""
        return rich_of(self.msg_type, self.body)

    @property
    def operation(self) -> Operation | None:
        """How this message changed its conversation; None: it is an ordinary one, or newer than this client."""
        return operation_of(self.msg_type, self.body)

    @property
    def edited(self) -> bool:
        """Whether its body is not the first one."""
        return bool(self.changed_seq) and not self.recalled

    def quote(self) -> Quote:
        """This message as the `reply` of another one."""
        return Quote(self.msg_id, self.seq, self.from_user, self.text[:QUOTE_CHARACTERS])


@dataclass(frozen=True, slots=True)
class Receipt:
    """The place that the platform gave to a message of ours."""

    conversation_id: str
    client_msg_id: bytes
    msg_id: int
    seq: int


@dataclass(frozen=True, slots=True)
class Conversation:
    """One conversation as this device knows it.

    peer: a dialogue's other user, "" when unknown. cursor: every message up to this seq is in the store, or is being written
    to it; `history` waits for that.
    newest_seq: the greatest seq heard of. unsettled: messages in the outbox. title, members (how many), left (no member
    any more): a group's. The rest is the same on all devices of this user, as soon as they heard of it: read_seq, unread
    (own messages and operations never are), pinned_at_ms (0: not; the latest stands first), muted_until_ms (0: not),
    peer_read_seq (a dialogue's other user has read up to here), cleared_seq (deleted from the list: what stands up to here
    is hidden).
    """

    conversation_id: str
    peer: str
    cursor: int
    newest_seq: int
    unsettled: int
    title: str = ""
    members: int = 0
    left: bool = False
    read_seq: int = 0
    unread: int = 0
    pinned_at_ms: int = 0
    muted_until_ms: int = 0
    peer_read_seq: int = 0
    cleared_seq: int = 0


class FriendStatus(Enum):
    """What another user is to this one."""

    NONE = 0  # was removed, refused or withdrawn
    ASKED = 1  # this user asked
    WAITING = 2  # the other one asks this user
    FRIENDS = 3
    BLOCKED = 4  # by this user


@dataclass(frozen=True, slots=True)
class Friend:
    """Another user, and the words of the request."""

    user: str
    status: FriendStatus
    words: str = ""


# ── what changed; `Client.changes()` ─────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class MessageChanged:
    """A message that is older than this was edited, recalled, or hidden by this user; `Client.message()` shows it."""

    conversation_id: str
    seq: int


@dataclass(frozen=True, slots=True)
class ConversationChanged:
    """Anything of `Conversation` that is no message: title, members, own or the peer's read position, pin, mute, …"""

    conversation_id: str


@dataclass(frozen=True, slots=True)
class ReadBy:
    """Another member has read up to here. Told at most once; not told at all to who is offline."""

    conversation_id: str
    user: str
    seq: int


@dataclass(frozen=True, slots=True)
class Typing:
    """Another member writes, or stopped to."""

    conversation_id: str
    user: str
    stopped: bool


@dataclass(frozen=True, slots=True)
class FriendChanged:
    """A request came, was answered, or somebody was removed or blocked."""

    friend: Friend


@dataclass(frozen=True, slots=True)
class Overflowed:
    """The reader was too slow, what came before is lost, or the platform was set back and what is shared begins anew: look
    at everything."""


Change = MessageChanged | ConversationChanged | ReadBy | Typing | FriendChanged | Overflowed
