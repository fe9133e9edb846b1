"""The client. Skeleton: signatures only, filled in by the next commits."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Literal

from plato.client.api import Conversation, Message, Receipt, State

TokenProvider = Callable[[], Awaitable[str]]


class Sent:
    """A message in the durable outbox."""

    client_msg_id: bytes
    conversation_id: str
    client_id: int

    async def accepted(self) -> None:
        """Returns when the platform holds the message durably. Raises Refused or Stopped."""
        raise NotImplementedError

    async def settled(self) -> Receipt:
        """Returns the message's place. Raises Refused or Stopped."""
        raise NotImplementedError


class Client:
    """One device of one user."""

    def __init__(
        self,
        token: TokenProvider | str,
        store_path: Path | str,
        gateways: Sequence[str] = (),
        *,
        ipconfig_url: str | None = None,
        device_id: int | None = None,
        user: str | None = None,
        transport: Literal["tcp", "ws"] = "tcp",
        platform: str = "python",
    ) -> None:
        raise NotImplementedError

    async def __aenter__(self) -> Client:
        raise NotImplementedError

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        raise NotImplementedError

    @property
    def state(self) -> State:
        """The connection's state now."""
        raise NotImplementedError

    def states(self) -> AsyncIterator[State]:
        """The state now and each later one; a slow reader misses some in between, never the last."""
        raise NotImplementedError

    async def send(
        self, body: bytes | str, *, to: str | None = None, conversation_id: str | None = None, msg_type: int = 0
    ) -> Sent:
        """Puts a message into the durable outbox; it is sent whenever there is a connection."""
        raise NotImplementedError

    def messages(self) -> AsyncIterator[Message]:
        """Each message of every conversation once, in order per conversation, own ones included."""
        raise NotImplementedError

    async def history(self, conversation_id: str, before: int | None = None, limit: int = 50) -> list[Message]:
        """At most `limit` messages with seq < before (None: the newest), by rising seq."""
        raise NotImplementedError

    def conversations(self) -> list[Conversation]:
        """Every conversation that this device knows."""
        raise NotImplementedError

    def unsettled(self, conversation_id: str) -> list[Message]:
        """Own messages that have no place yet, in order: queued or accepted."""
        raise NotImplementedError

    async def logout(self) -> None:
        """Ends the session on the platform and stops."""
        raise NotImplementedError
