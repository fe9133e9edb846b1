"""What an application sees of the client: messages, receipts, states and errors.

ClientError
├── Refused       the platform refused this message for good; carries the code
├── Stopped       the connection ended with a final code (replaced, kicked, logged out) or the client was closed
├── OutboxFull    more waits to be sent than the outbox may hold; nothing was written
└── StoreError    the store cannot be used
    ├── StoreInUse    another process has it open
    └── StoreForeign  it belongs to another user, or to a newer version
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from plato.core.codes import text


class ClientError(Exception):
    """Root of what the client raises."""


class Refused(ClientError):
    """The message was refused for good with `code`; it left the outbox and will not be sent again."""

    def __init__(self, code: int, detail: str = "") -> None:
        super().__init__(f"{text(code)}{': ' + detail if detail else ''} (code {code})")
        self.code = code


class Stopped(ClientError):
    """The client stays away: `code` is the final one, or None when it was closed by its own user."""

    def __init__(self, code: int | None, detail: str = "") -> None:
        super().__init__("the client is closed" if code is None else f"{detail or text(code)} (code {code})")
        self.code = code


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

    detail: words that say more than the code's own, else "".
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

    client_msg_id: 16 bytes. code: why it was refused, else 0. mine: sent by this user, from whichever device.
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

    @property
    def text(self) -> str:
        """The body as text; bytes that are no UTF-8 are shown as U+FFFD."""
        return self.body.decode("utf-8", "replace")


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

    peer: a dialogue's other user, "" when unknown. cursor: every message up to this seq is in the store.
    newest_seq: the greatest seq heard of. unsettled: messages in the outbox.
    """

    conversation_id: str
    peer: str
    cursor: int
    newest_seq: int
    unsettled: int
