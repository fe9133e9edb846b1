"""What state asks of msg, over its Msg service: Sync pages, pulls, read positions and typing, answered by any msg process.

A call goes to the next process by turns. One that does not answer is asked last for a second, and the call moves on to
the next; after a round that nobody answered it begins again, 100 ms later, until its 4.5 s are over. The client's SyncMsg
and PullMsg are embedded as the bytes they came in, and the answers returned as they came back: nothing is decoded here.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Final

from google.protobuf.message import DecodeError

from plato.adapters.grpc_peers import Peers, PeerUnavailable
from plato.core.errors import Unavailable
from plato.ports import Position, Reading, TopologySource, Typing
from plato.runtime.tls import InternalTls
from plato.topology.record import Msg
from plato.wire.v1 import client_pb2, msg_pb2
from plato.wire.v1.suffix import varint

TOTAL_S: Final = 4.5
ATTEMPT_S: Final = 2.0
ASIDE_S: Final = 1.0
TYPING_S: Final = 0.5
_PAUSE_S: Final = 0.1


class GrpcMsgs:
    """MsgClient over gRPC; processes come from the topology at each round."""

    def __init__(self, topology: TopologySource, tls: InternalTls | None = None) -> None:
        self._topology = topology
        self._peers = Peers("msg", tls)
        self._turn = 0
        self._aside: dict[str, float] = {}  # uid → until when (monotonic) it is asked last; pruned at each round

    async def sync(self, user: str, sync: bytes) -> bytes:
        """See the port."""
        return await self._ask("/plato.wire.v1.Msg/Sync", _embed(user, sync))

    async def pull(self, user: str, pull: bytes) -> bytes:
        """See the port."""
        return await self._ask("/plato.wire.v1.Msg/Pull", _embed(user, pull))

    async def read(self, reads: Sequence[Reading]) -> list[Position]:
        """See the port."""
        request = msg_pb2.ReadRequest(
            reads=[msg_pb2.UserRead(user_id=r.user, conversation_id=r.conversation_id, seq=r.seq) for r in reads]
        )
        encoded = await self._ask("/plato.wire.v1.Msg/Read", request.SerializeToString())
        try:
            results = msg_pb2.ReadReply.FromString(encoded).results
        except DecodeError as e:
            raise Unavailable("a msg process answered what cannot be read") from e
        if len(results) != len(reads):
            raise Unavailable(f"a msg process answered {len(results)} positions of {len(reads)}")
        return [Position(result.code, result.seq) for result in results]

    async def typing(self, signals: Sequence[Typing]) -> None:
        """See the port. One process is asked once: a late signal is worth nothing."""
        request = msg_pb2.TypingRequest(
            typing=[
                msg_pb2.UserTyping(
                    user_id=t.user, typing=client_pb2.TypingMsg(conversation_id=t.conversation_id, stopped=t.stopped)
                )
                for t in signals
            ]
        )
        processes = self._order()
        if not processes:
            raise Unavailable("the topology names no msg process")
        name, process = processes[0]
        channel = self._peers.channel(name, process.addr, process.uid)
        call = channel.unary_unary("/plato.wire.v1.Msg/Typing", None, None)
        try:
            await self._peers.answer(name, channel, call(request.SerializeToString(), timeout=TYPING_S))
        except PeerUnavailable as e:
            if e.away:
                self._aside[process.uid] = time.monotonic() + ASIDE_S
            raise

    async def close(self) -> None:
        """Closes the channels; calls on their way raise Unavailable."""
        await self._peers.close()

    async def _ask(self, method: str, request: bytes) -> bytes:
        deadline = time.monotonic() + TOTAL_S
        while True:
            failures = []
            for name, process in self._order():
                left_s = deadline - time.monotonic()
                if left_s <= 0:
                    break
                channel = self._peers.channel(name, process.addr, process.uid)
                call = channel.unary_unary(method, None, None)(request, timeout=min(ATTEMPT_S, left_s))
                try:
                    reply: bytes = await self._peers.answer(name, channel, call)
                except PeerUnavailable as e:
                    failures.append(e)
                    if e.away:
                        self._aside[process.uid] = time.monotonic() + ASIDE_S
                else:
                    self._aside.pop(process.uid, None)
                    return reply
            refused = bool(failures) and not any(failure.away for failure in failures)
            if refused or time.monotonic() + _PAUSE_S >= deadline:
                words = "; ".join(str(failure) for failure in failures) or "the topology names no msg process"
                raise Unavailable(words) from (failures[-1] if failures else None)
            await asyncio.sleep(_PAUSE_S)

    def _order(self) -> list[tuple[str, Msg]]:
        """Every process, the next one by turns first, those that lately did not answer last."""
        now = time.monotonic()
        self._aside = {uid: until for uid, until in self._aside.items() if until > now}
        processes = sorted(self._topology.current().msgs.items())
        if not processes:
            return []
        self._turn = (self._turn + 1) % len(processes)
        turned = processes[self._turn :] + processes[: self._turn]
        return sorted(turned, key=lambda process: process[1].uid in self._aside)


def _embed(user: str, message: bytes) -> bytes:
    """SyncRequest or PullRequest: user_id = 1, the message = 2."""
    name = user.encode()
    return b"\x0a" + varint(len(name)) + name + b"\x12" + varint(len(message)) + message
