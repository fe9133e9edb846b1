"""The gRPC service Msg: Sync, Pull, read positions and typing, whichever msg process is asked. No state of its own."""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import Any, Final, NoReturn

import grpc
from plato.core.errors import Unavailable
from plato.ports import Reading, Typing
from plato.runtime.grpc_options import SERVER
from plato.runtime.settings import SettingsError
from plato.runtime.tls import InternalTls, add_port
from plato.wire.v1 import client_pb2, msg_pb2, msg_pb2_grpc

from plato_msg.reads import Reads
from plato_msg.userstate import UserStates

STOP_GRACE_S: Final = 1.0


class MsgServicer(msg_pb2_grpc.MsgServicer):
    """Answers UNAVAILABLE while the process does not serve, and when the database is away: the caller tries the next one."""

    def __init__(self, reads: Reads, states: UserStates, not_ready: Callable[[], str]) -> None:
        self._reads = reads
        self._states = states
        self._not_ready = not_ready

    async def Sync(
        self, request: msg_pb2.SyncRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> client_pb2.SyncedMsg:
        """See msg.proto."""
        await self._check(context)
        try:
            return await self._reads.sync(request.user_id, request.sync)
        except Unavailable as e:
            await _abort(context, str(e))

    async def Pull(
        self, request: msg_pb2.PullRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> client_pb2.PulledMsg:
        """See msg.proto."""
        await self._check(context)
        try:
            return await self._reads.pull(request.user_id, request.pull)
        except Unavailable as e:
            await _abort(context, str(e))

    async def Read(
        self, request: msg_pb2.ReadRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> msg_pb2.ReadReply:
        """See msg.proto."""
        await self._check(context)
        try:
            found = await self._states.read([Reading(r.user_id, r.conversation_id, r.seq) for r in request.reads])
        except Unavailable as e:
            await _abort(context, str(e))
        return msg_pb2.ReadReply(results=[msg_pb2.ReadResult(code=p.code, seq=p.seq) for p in found])

    async def Typing(
        self, request: msg_pb2.TypingRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> msg_pb2.TypingReply:
        """See msg.proto."""
        await self._check(context)
        await self._states.typing(
            [Typing(t.user_id, t.typing.conversation_id, t.typing.stopped) for t in request.typing]
        )
        return msg_pb2.TypingReply()

    async def _check(self, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        if why := self._not_ready():
            await _abort(context, why)


async def _abort(context: grpc.aio.ServicerContext[Any, Any], why: str) -> NoReturn:
    await context.abort(grpc.StatusCode.UNAVAILABLE, why)
    raise AssertionError("abort raises")


async def start(
    servicer: MsgServicer, host: str, port: int, tls: InternalTls | None = None
) -> tuple[grpc.aio.Server, int]:
    """Serves; returns the server and its port (chosen, if `port` is 0). Raises SettingsError when the port is in use."""
    server = grpc.aio.server(options=SERVER)
    msg_pb2_grpc.add_MsgServicer_to_server(servicer, server)
    try:
        _probe(host, port)  # gRPC writes lines of its own about a port in use
        bound = add_port(tls, server, f"{host}:{port}")
    except (OSError, RuntimeError) as e:
        why = e.strerror if isinstance(e, OSError) else e
        raise SettingsError(
            f"msg.grpc_port: {port} cannot be used on {host}: {why}; free it or choose another one"
        ) from e
    await server.start()
    return server, bound


def _probe(host: str, port: int) -> None:
    """Raises OSError where nobody could listen."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind((host.strip("[]"), port))
