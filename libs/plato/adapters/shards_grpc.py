"""What msg and other shards ask of a state shard, over its State service: frames, dirty counts, replaced sessions."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Awaitable, Callable, Sequence
from typing import Final, TypeVar

from plato.adapters.grpc_peers import Peers, PeerUnavailable
from plato.core.errors import Unavailable
from plato.ports import Delivery, Payload, TopologySource
from plato.runtime.tls import InternalTls
from plato.topology.record import Shard
from plato.wire.v1 import state_pb2, state_pb2_grpc

DEADLINE_S: Final = 2.0

T = TypeVar("T")


class GrpcShards:
    """ShardClient over gRPC; addresses come from the topology at each call."""

    def __init__(self, topology: TopologySource, tls: InternalTls | None = None) -> None:
        self._topology = topology
        self._peers = Peers("shard", tls)
        self._silent: dict[str, Shard] = {}
        """Shards whose process did not answer at its address, as the topology named them then."""

    async def deliver(self, shard: str, payloads: Sequence[Payload], entries: Sequence[Delivery]) -> list[int]:
        """See the port."""
        request = state_pb2.DeliverRequest(
            payloads=[payload.frame for payload in payloads],
            trace_ids=[payload.trace_id for payload in payloads],
            conn_ids=_column("Q", [entry.conn_id for entry in entries]),
            payload_index=_column("I", [entry.payload for entry in entries]),
        )
        reply = await self._ask(shard, lambda stub: stub.Deliver(request, timeout=DEADLINE_S))
        return _indexes(reply.untaken, len(entries))

    async def dirty(self, shard: str, count: int) -> int:
        """See the port."""
        request = state_pb2.DirtyRequest(count=count)
        reply = await self._ask(shard, lambda stub: stub.Dirty(request, timeout=DEADLINE_S))
        return reply.done

    async def replaced(self, shard: str, conn_id: int, by_conn_id: int, code: int) -> None:
        """See the port."""
        request = state_pb2.ReplacedRequest(conn_id=conn_id, by_conn_id=by_conn_id, code=code)
        await self._ask(shard, lambda stub: stub.Replaced(request, timeout=DEADLINE_S))

    async def close(self) -> None:
        """Closes the channels; calls on their way raise Unavailable."""
        await self._peers.close()

    async def _ask(self, shard: str, call: Callable[[state_pb2_grpc.StateAsyncStub], Awaitable[T]]) -> T:
        """The answer of the shard's process, at the address where the topology saw it, or by its name where that one did
        not answer: by turns, until the topology says something else. Raises Unavailable."""
        found = self._topology.current().shards.get(shard)
        if found is None or not found.addr:
            raise Unavailable(f"shard {shard} is not in the topology")
        by_name = self._silent.get(shard) == found
        channel = self._peers.channel(shard, found.addr if by_name else found.at, found.uid)
        try:
            return await self._peers.answer(shard, channel, call(state_pb2_grpc.StateStub(channel)))
        except PeerUnavailable as e:
            if e.away and by_name:
                self._silent.pop(shard, None)
            elif e.away and found.at != found.addr:
                self._silent[shard] = found
            raise


def _column(kind: str, numbers: list[int]) -> bytes:
    """Little-endian integers: Q of 8 bytes, I of 4."""
    column = array(kind, numbers)
    if sys.byteorder == "big":
        column.byteswap()
    return column.tobytes()


def _indexes(column: bytes, count: int) -> list[int]:
    """Indexes below `count`, little-endian, 4 bytes each."""
    if len(column) % 4:
        raise Unavailable(f"a shard answered {len(column)} bytes of indexes")
    indexes = array("I", column)
    if sys.byteorder == "big":
        indexes.byteswap()
    found = indexes.tolist()
    if found and max(found) >= count:
        raise Unavailable(f"a shard answered index {max(found)} of {count}")
    return found
