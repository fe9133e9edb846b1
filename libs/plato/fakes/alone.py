"""A played shard's half that faces msg and other shards, for tests and the bench of what faces gateways."""

from __future__ import annotations

from typing import Any, NoReturn

import grpc

from plato.wire.v1 import state_pb2_grpc


class Alone(state_pb2_grpc.StateServicer):
    """Refuses, in words, what only msg and other shards call: nobody is to call it here."""

    async def Deliver(self, request: Any, context: Any) -> NoReturn:
        """From msg."""
        await _refuse(context)

    async def Dirty(self, request: Any, context: Any) -> NoReturn:
        """From msg."""
        await _refuse(context)

    async def Replaced(self, request: Any, context: Any) -> NoReturn:
        """From another shard."""
        await _refuse(context)


async def _refuse(context: Any) -> NoReturn:
    await context.abort(grpc.StatusCode.UNIMPLEMENTED, "this shard is played: it has no msg and no other shards")
    raise AssertionError("abort raises")
