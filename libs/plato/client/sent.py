"""Handles of messages on their way: what `send` returns."""

from __future__ import annotations

import asyncio

from plato.client.api import ClientError, Receipt, Refused


class Sent:
    """A message in the durable outbox. It is sent and settled whether or not this handle is kept."""

    __slots__ = ("__weakref__", "_accepted", "_outcome", "_woken", "client_id", "client_msg_id", "conversation_id")

    def __init__(self, conversation_id: str, client_id: int, client_msg_id: bytes) -> None:
        self.conversation_id = conversation_id
        self.client_id = client_id
        self.client_msg_id = client_msg_id
        """16 bytes, a UUID."""
        self._accepted = False
        self._outcome: Receipt | ClientError | None = None
        self._woken: asyncio.Event | None = None

    async def accepted(self) -> None:
        """Returns when the platform holds the message durably. Raises Refused, or Stopped if the client stops before."""
        while not self._accepted:
            if isinstance(self._outcome, ClientError):
                raise self._outcome
            await self._wait()
        if isinstance(self._outcome, Refused):
            raise self._outcome

    async def settled(self) -> Receipt:
        """Returns the message's place in its conversation. Raises Refused, or Stopped if the client stops before."""
        while self._outcome is None:
            await self._wait()
        if isinstance(self._outcome, ClientError):
            raise self._outcome
        return self._outcome

    @property
    def done(self) -> bool:
        """Whether `settled` would return or raise at once."""
        return self._outcome is not None

    def note_accepted(self) -> None:
        """The client's call."""
        self._accepted = True
        self._wake()

    def note_outcome(self, outcome: Receipt | ClientError) -> None:
        """The client's call. A receipt implies the acceptance."""
        if self._outcome is None:
            self._outcome = outcome
            self._accepted = self._accepted or isinstance(outcome, Receipt)
            self._wake()

    async def _wait(self) -> None:
        if self._woken is None:
            self._woken = asyncio.Event()
        await self._woken.wait()

    def _wake(self) -> None:
        if self._woken is not None:
            self._woken.set()
            self._woken = None
