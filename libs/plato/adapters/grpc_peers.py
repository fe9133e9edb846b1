"""gRPC channels to peers that the topology names: one per peer, made at the first call, re-made for a new process.

A peer that restarts on its address is reached again within some 200 ms: channels try again that often, and share no back-off
with former ones. A peer that hung gets a new channel too, since its connection may be a dead one that nobody closed.
Memory: one channel per peer in use, and for some seconds those that were replaced.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Sequence
from typing import Final, TypeVar

import grpc
from grpc import aio

from plato.core.errors import Unavailable
from plato.runtime.grpc_options import CHANNEL
from plato.runtime.tls import InternalTls
from plato.runtime.tls import channel as new_channel

MAX_MESSAGE_BYTES: Final = 64 * 1024 * 1024
_GRACE_S: Final = 10.0  # longer than any call of ours
_OPTIONS: Final[Sequence[tuple[str, int]]] = (
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    *CHANNEL,
)

T = TypeVar("T")


class PeerUnavailable(Unavailable):
    """A call failed. `away` tells that the peer did not answer, and not that it answered with an error."""

    def __init__(self, message: str, *, away: bool) -> None:
        super().__init__(message)
        self.away = away


_AWAY: Final = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.CANCELLED)


class Peers:
    """The channels of one kind of peer ("shard", "msg")."""

    def __init__(self, kind: str, tls: InternalTls | None = None) -> None:
        self._kind = kind
        self._tls = tls
        self._channels: dict[str, tuple[tuple[str, str, int], aio.Channel]] = {}
        self._closing: set[asyncio.Task[None]] = set()
        self._closed = False

    def channel(self, name: str, addr: str, uid: str) -> aio.Channel:
        """The channel of the peer `name`, which is process `uid` at `addr` now."""
        if self._closed:
            raise PeerUnavailable(f"{self._kind} {name}: the channels were closed", away=True)
        known = self._channels.get(name)
        version = self._tls.version if self._tls is not None else 0
        if known is not None and known[0] == (addr, uid, version):
            return known[1]
        self._retire(name)
        channel = new_channel(self._tls, addr, _OPTIONS)
        self._channels[name] = ((addr, uid, self._tls.version if self._tls is not None else 0), channel)
        return channel

    async def answer(self, name: str, channel: aio.Channel, call: Awaitable[T]) -> T:
        """The reply of a call on that channel. Raises PeerUnavailable for whatever goes wrong with it."""
        try:
            return await call
        except aio.AioRpcError as e:
            if e.code() == grpc.StatusCode.DEADLINE_EXCEEDED and self._channels.get(name, (None, None))[1] is channel:
                self._retire(name)
            words = f"{self._kind} {name}: {e.code().name}: {e.details()}"
            raise PeerUnavailable(words, away=e.code() in _AWAY) from e
        except aio.UsageError as e:
            raise PeerUnavailable(f"{self._kind} {name}: {e}", away=True) from e
        except asyncio.CancelledError as e:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            # Nobody cancelled us: the channel was closed under the call.
            raise PeerUnavailable(f"{self._kind} {name}: the channel was closed", away=True) from e

    async def close(self) -> None:
        """Closes every channel; calls on their way raise Unavailable. Idempotent."""
        self._closed = True
        for task in self._closing:
            task.cancel()
        await asyncio.gather(*self._closing, return_exceptions=True)
        channels, self._channels = self._channels, {}
        for _, channel in channels.values():
            await channel.close(None)

    def _retire(self, name: str) -> None:
        known = self._channels.pop(name, None)
        if known is not None:
            task = asyncio.get_running_loop().create_task(known[1].close(_GRACE_S), name=f"close {self._kind} {name}")
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)
