"""What the connection machine asks its caller to do; the edge does it (`plato_state.sessions`), in order."""

from __future__ import annotations

from dataclasses import dataclass

from plato.ports import Route, Session

from plato_state.core.answers import Kind


@dataclass(frozen=True, slots=True)
class Send:
    """Send this frame on the connection."""

    frame: bytes


@dataclass(frozen=True, slots=True)
class Close:
    """Send this frame and close the socket, in one item."""

    frame: bytes


@dataclass(frozen=True, slots=True)
class Arm:
    """Set the connection's one life timer to `after_ms`; it calls `expired`."""

    after_ms: int


@dataclass(frozen=True, slots=True)
class Forget:
    """Take the connection out of all tables and cancel its timers."""


@dataclass(frozen=True, slots=True)
class AskRoute:
    """Read the route; call `route_read` or `unavailable` with `serial`."""

    user: str
    device_id: int
    serial: int


@dataclass(frozen=True, slots=True)
class AskSession:
    """Find session `conn_id`, the route of its user and device, and the session that this names; call `session_found`
    or `unavailable` with `serial`."""

    conn_id: int
    serial: int


@dataclass(frozen=True, slots=True)
class Commit:
    """Put `session` under its fence, then set the route from `seen` to it; call `committed` with how it ended. Where
    `seen` is None its gen is 0 still: `first_statement` gives it one."""

    session: Session
    seen: Route | None


@dataclass(frozen=True, slots=True)
class Remove:
    """Delete this session in the store; it never became, or no longer is, what the route names."""

    session: Session


@dataclass(frozen=True, slots=True)
class End:
    """End the route where it still names this session, then delete it; repeat until done, then forget the connection."""

    session: Session


@dataclass(frozen=True, slots=True)
class TellReplaced:
    """Tell the owner of `conn_id` that this connection took its place."""

    conn_id: int


@dataclass(frozen=True, slots=True)
class AskSync:
    """Ask msg for a page (SyncMsg encoding); answer SYNCED, PENDING before if it takes long; then `request_done`."""

    request: bytes
    ref: int


@dataclass(frozen=True, slots=True)
class AskPull:
    """Ask msg for rows (PullMsg encoding); answer PULLED, PENDING before if it takes long; then `request_done`."""

    request: bytes
    ref: int
    conversation: str


@dataclass(frozen=True, slots=True)
class CheckRoute:
    """Read the route with the others of this round; call `route_checked`."""


@dataclass(frozen=True, slots=True)
class RestoreRoute:
    """Write this session's route again: what stood there was `seen`, nothing or an older statement."""

    session: Session
    seen: Route | None


@dataclass(frozen=True, slots=True)
class Replay:
    """Handle these frames of the connection now: they waited for the commit."""

    frames: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class Await:
    """A Login or ReConn (ref 0), or a Sync that waits for its commit: if `awaits` still says so in time, answer PENDING."""

    kind: Kind
    ref: int


Action = (
    Send
    | Close
    | Arm
    | Forget
    | AskRoute
    | AskSession
    | Commit
    | Remove
    | End
    | TellReplaced
    | AskSync
    | AskPull
    | CheckRoute
    | RestoreRoute
    | Replay
    | Await
)
