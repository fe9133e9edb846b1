"""A state shard that is played, so that a gateway can be measured: it sends every frame back over the real gRPC stream.

`python -m bench.shard` prints its port and serves until its input ends. Like a real shard it keeps at most two batches
untaken; what comes meanwhile fills the next one; and frames in a row for one connection go as one run. A payload that begins
with "F" goes to every connection, once as payload, with a suffix of 10 bytes each. Whoever asks has any worker_id reserved.
"""

from __future__ import annotations

import asyncio
import sys
import time
from array import array
from typing import Any

import grpc
from plato.fakes.alone import Alone
from plato.wire.v1 import state_pb2, state_pb2_grpc
from plato_gateway.core import lanes

UNTAKEN = 2
SUFFIX = b"S" * 10
_FAN_OUT = ord("F")


class _Waiting:
    """Columns of the batch that fills."""

    def __init__(self) -> None:
        self.lengths = array("I")
        self.payloads: list[bytes] = []
        self.conn_ids = array("Q")
        self.index = array("I")
        self.suffix_lengths = bytearray()
        self.suffix_data = bytearray()
        self.flags = bytearray()

    def batch(self) -> state_pb2.StateBatch:
        """All of it, for worker 0."""
        batch = state_pb2.StateBatch(payload_lengths=self.lengths.tobytes(), payload_data=b"".join(self.payloads))
        batch.frames.add(
            worker=0,
            conn_ids=self.conn_ids.tobytes(),
            payload_index=self.index.tobytes(),
            suffix_lengths=bytes(self.suffix_lengths),
            suffix_data=bytes(self.suffix_data),
            flags=bytes(self.flags),
        )
        return batch

    def add(self, conn_id: int, number: int, suffix: bytes, flag: int) -> None:
        """One entry."""
        self.conn_ids.append(conn_id)
        self.index.append(number)
        self.suffix_lengths.append(len(suffix))
        self.suffix_data += suffix
        self.flags.append(flag)


class Reflecting(Alone):
    """The service."""

    async def Attach(self, requests: Any, context: Any) -> Any:
        """One gateway's stream."""
        wake = asyncio.Event()
        waiting = _Waiting()
        live: dict[int, None] = {}
        taken = taken_said = sent = answered = 0

        async def read() -> None:
            nonlocal taken, answered
            async for batch in requests:
                answered = max(answered, batch.taken)
                for events in batch.events:
                    self._take(events, waiting, live)
                taken = max(taken, batch.batch_no)
                wake.set()

        reader = asyncio.create_task(read())
        try:
            yield state_pb2.StateBatch(serves_epoch=1, serves=lanes.slot_bits(range(1024)))
            while not reader.done():
                await wake.wait()
                wake.clear()
                while True:
                    if waiting.index and sent - answered < UNTAKEN:
                        full, waiting = waiting, _Waiting()
                        sent += 1
                        batch = full.batch()
                        batch.batch_no = sent
                    elif taken > taken_said:
                        batch = state_pb2.StateBatch()
                    else:
                        break
                    batch.taken = taken_said = taken
                    yield batch
        finally:
            reader.cancel()

    def _take(self, events: state_pb2.WorkerEvents, to: _Waiting, live: dict[int, None]) -> None:
        at, data = 0, events.data
        conn_ids, lengths = array("Q", events.conn_ids), array("I", events.lengths)
        for kind, conn_id, n in zip(events.kinds, conn_ids, lengths, strict=True):
            end = at + n
            if kind == lanes.DATA:
                start, frames = at, 0
                while at < end:
                    size = int.from_bytes(data[at : at + 4], "big")
                    frames += 1
                    at += 4 + size
                number = len(to.lengths)
                run = frames > 1
                to.payloads.append(data[start if run else start + 4 : end])
                to.lengths.append(len(to.payloads[-1]))
                if data[start + 4] == _FAN_OUT:
                    for each in live:
                        to.add(each, number, SUFFIX, 0)
                elif run:
                    to.add(conn_id, number, frames.to_bytes(4, "little"), lanes.RUN)
                else:
                    to.add(conn_id, number, b"", 0)
            elif kind in (lanes.OPENED, lanes.NAMED):
                live[conn_id] = None
            elif kind == lanes.CLOSED:
                live.pop(conn_id, None)
            at = end

    async def Reserve(self, request: state_pb2.ReserveRequest, context: Any) -> state_pb2.ReserveReply:
        """Always yes."""
        now_ms = time.time_ns() // 1_000_000
        return state_pb2.ReserveReply(ok=True, from_ms=now_ms, until_ms=now_ms + request.ahead_ms)


async def main() -> None:
    """Serves until the input ends."""
    server = grpc.aio.server(
        options=[("grpc.max_receive_message_length", 64 << 20), ("grpc.max_send_message_length", 64 << 20)]
    )
    state_pb2_grpc.add_StateServicer_to_server(Reflecting(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    print(port, flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await server.stop(None)


if __name__ == "__main__":
    asyncio.run(main())
