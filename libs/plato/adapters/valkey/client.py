"""One connection to the store, shared by every caller of a process: calls → queue → one pipeline at a time → replies.

Whoever calls puts commands into the queue. A task that lives while the queue is not empty takes as much as a pipeline
may carry, writes it, reads its replies, hands them out, and goes on; what came meanwhile is the next pipeline. So a
busy process pays a few µs a command and an idle one has nothing running, and all commands are first-in first-out.

What fails, and then:

    a script is not cached           its call is sent again with the text; costs one more round
    the connection broke             a new one, and what has no reply is sent again, once
    that failed too, or a time-out   Unavailable to everybody in the pipeline and in the queue: nobody waits in line for
                                     an outage to end. The next call begins with a new connection.

A command may therefore run twice; all of ours bear that (see the scripts). Memory: the callers' own commands and one
pipeline's replies. A call waits at most for the rest of the pipeline before it, a connect and its own pipeline.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final
from urllib.parse import urlsplit

import hiredis
from redis.asyncio.connection import ConnectionPool
from redis.exceptions import AuthenticationError, NoPermissionError, NoScriptError, RedisError, ResponseError
from redis.exceptions import TimeoutError as RedisTimeoutError

from plato.core.errors import Unavailable
from plato.runtime.settings import SettingsError

CONNECT_TIMEOUT_S: Final = 1.0
COMMAND_TIMEOUT_S: Final = 2.0
PIPELINE_WEIGHT: Final = 500
"""How much one pipeline carries; a plain command weighs 1."""


class Script:
    """A Lua script: sent by its digest, with the text where the store does not know that."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.digest = hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest()


class Call:
    """One command on its way; packed when it is made, so that what cannot be packed fails its own caller only."""

    __slots__ = ("answered", "arguments", "packed", "reply", "script", "weight")

    def __init__(self, arguments: tuple[str | bytes | int, ...], script: Script | None = None, weight: int = 1) -> None:
        self.arguments = arguments
        self.script = script
        self.weight = weight
        self.packed = _pack(arguments if script is None else ("EVALSHA", script.digest, *arguments))
        self.answered = False
        self.reply: Any = None
        """As hiredis gives it: bytes, int, list or None; where the store answered an error, that ResponseError."""

    def with_text(self) -> None:
        """Has the script's text sent instead of its digest."""
        assert self.script is not None
        self.packed = _pack(("EVAL", self.script.text, *self.arguments))
        self.answered = False


def _pack(arguments: tuple[str | bytes | int, ...]) -> bytes:
    packed: bytes = hiredis.pack_command(arguments)  # type: ignore[arg-type]  # its stub allows one argument only
    return packed


def command(*arguments: str | bytes | int, weight: int = 1) -> Call:
    """A plain command."""
    return Call(arguments, weight=weight)


def evaluate(
    script: Script, keys: Sequence[str], arguments: Sequence[str | bytes | int] = (), *, weight: int = 1
) -> Call:
    """A script's call."""
    return Call((len(keys), *keys, *arguments), script, weight)


@dataclass(slots=True)
class _Request:
    calls: list[Call]
    done: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class Client:
    """The connection. Not for use from two event loops."""

    def __init__(self, url: str) -> None:
        self.where = _without_password(url)
        """The store in words."""
        try:
            # No time-out of its own on replies: one covers the whole pipeline, at a fifth of the cost.
            pool = ConnectionPool.from_url(
                url, protocol=2, socket_timeout=None, socket_connect_timeout=CONNECT_TIMEOUT_S, driver_info=None
            )
            # Any: redis-py's connections are not fully annotated.
            self._connection: Any = pool.make_connection()  # type: ignore[no-untyped-call]
        except (ValueError, TypeError, RedisError) as e:
            raise SettingsError(f"store.url: {self.where!r} cannot be used: {e}; write redis://host:port/0") from e
        self._queue: deque[_Request] = deque()
        self._task: asyncio.Task[None] | None = None
        self._closed = False

    async def run(self, calls: Sequence[Call]) -> list[Any]:
        """The replies of `calls`, in order. Larger than a pipeline: sent in several, each after the one before.

        Raises Unavailable, also when the store answered a command with an error.
        """
        replies: list[Any] = []
        for chunk in _chunks(calls):
            if self._closed:
                raise Unavailable(f"store {self.where}: the connection was closed")
            request = _Request(chunk)
            self._queue.append(request)
            if self._task is None:
                self._task = asyncio.get_running_loop().create_task(self._work(), name="store pipeline")
            await request.done
            for call in chunk:
                if isinstance(call.reply, ResponseError):
                    raise Unavailable(f"store {self.where}: {call.reply}") from call.reply
                replies.append(call.reply)
        return replies

    async def ping(self) -> None:
        """Raises Unavailable unless the store answers."""
        await self.run([command("PING")])

    async def check(self) -> None:
        """Raises SettingsError or Unavailable with one line that says what is wrong and the way out."""
        try:
            (info,) = await self.run([command("INFO")])
        except Unavailable as e:
            if isinstance(e.__cause__, AuthenticationError):
                raise SettingsError(
                    f"store.url: {self.where} refuses the password: {e.__cause__}; correct the password in store.url"
                ) from e
            if isinstance(e.__cause__, NoPermissionError):
                raise SettingsError(
                    f"store.url: {self.where} lacks a permission: {e.__cause__}; let this user run every command"
                ) from e
            raise
        facts = dict(line.partition(":")[::2] for line in info.decode(errors="replace").splitlines())
        self._check_facts(facts)

    def _check_facts(self, facts: dict[str, str]) -> None:
        valkey = facts.get("valkey_version")
        name, least = ("Valkey", 8) if valkey else ("Redis", 7)
        version = valkey or facts.get("redis_version", "0")
        if int(version.partition(".")[0]) < least:
            raise SettingsError(
                f"store.url: {self.where} is {name} {version}; Plato needs Valkey 8 or Redis 7, or newer"
            )
        policy = facts.get("maxmemory_policy", "noeviction")
        if int(facts.get("maxmemory", "0")) and policy != "noeviction":
            raise SettingsError(
                f"store.url: {self.where} evicts keys (maxmemory-policy {policy}) and would lose sessions; "
                "set maxmemory-policy noeviction"
            )
        if facts.get("redis_mode") == "cluster":
            raise SettingsError(f"store.url: {self.where} is a cluster's node; name a single server")

    async def close(self) -> None:
        """Fails what is on its way and ends the connection. Idempotent."""
        self._closed = True
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
        # A task that was cancelled before it began has failed nobody.
        self._fail([], Unavailable(f"store {self.where}: the connection was closed"))
        await self._connection.disconnect(nowait=False)

    # ── the task ─────────────────────────────────────────────────────────────────────────────────────────────

    async def _work(self) -> None:
        batch: list[_Request] = []
        try:
            while self._queue:
                if not (batch := self._take()):
                    break
                await self._pipeline([call for request in batch for call in request.calls])
                for request in batch:
                    if not request.done.done():
                        request.done.set_result(None)
        except asyncio.CancelledError:
            self._fail(batch, Unavailable(f"store {self.where}: the connection was closed"))
            raise
        except Exception as e:  # Unavailable, or a bug here, which must not leave callers waiting for ever
            self._fail(batch, e)
        finally:
            self._task = None

    def _take(self) -> list[_Request]:
        """The next requests; those whose caller gave up are dropped unsent. Empty: nobody waits any more."""
        batch: list[_Request] = []
        weight = 0
        while self._queue:
            request = self._queue[0]
            weight += sum(call.weight for call in request.calls)
            if batch and weight > PIPELINE_WEIGHT:
                break
            self._queue.popleft()
            if not request.done.done():
                batch.append(request)
        return batch

    def _fail(self, batch: list[_Request], error: Exception) -> None:
        waiting = [*batch, *self._queue]
        self._queue.clear()
        for request in waiting:
            if not request.done.done():
                # One exception object per caller: they are raised in several tasks.
                copy = type(error)(*error.args)
                copy.__cause__ = error.__cause__ or error
                request.done.set_exception(copy)

    async def _pipeline(self, calls: list[Call]) -> None:
        """Has every call answered. Raises Unavailable."""
        try:
            try:
                await self._exchange(calls)
            except (RedisError, OSError) as e:
                if isinstance(e, (TimeoutError, RedisTimeoutError, AuthenticationError)):
                    raise
                await self._exchange([call for call in calls if not call.answered])
            unknown = [call for call in calls if isinstance(call.reply, NoScriptError)]
            if unknown:
                for call in unknown:
                    call.with_text()
                await self._exchange(unknown)
        except (TimeoutError, RedisTimeoutError) as e:
            raise Unavailable(f"store {self.where}: no answer in time") from e
        except (RedisError, OSError) as e:
            raise Unavailable(f"store {self.where}: {e}") from e

    async def _exchange(self, calls: list[Call]) -> None:
        """Writes the calls and reads their replies. After any failure the connection is gone."""
        connection = self._connection
        try:
            # Readable before anything was asked: the other end closed it, or it is out of step.
            if not connection.is_connected or await connection.can_read():
                await connection.disconnect(nowait=True)
                async with asyncio.timeout(CONNECT_TIMEOUT_S):
                    await connection.connect()
            async with asyncio.timeout(COMMAND_TIMEOUT_S):
                await connection.send_packed_command(b"".join([call.packed for call in calls]), check_health=False)
                for call in calls:
                    try:
                        call.reply = await connection.read_response()
                    except ResponseError as e:
                        call.reply = e
                    call.answered = True
        except BaseException:
            await connection.disconnect(nowait=True)
            raise


def _chunks(calls: Sequence[Call]) -> list[list[Call]]:
    chunks: list[list[Call]] = []
    weight = PIPELINE_WEIGHT
    for call in calls:
        weight += call.weight
        if weight > PIPELINE_WEIGHT or not chunks:
            chunks.append([])
            weight = call.weight
        chunks[-1].append(call)
    return chunks


def _without_password(url: str) -> str:
    try:
        parts = urlsplit(url)
        host = parts.netloc.rpartition("@")[2]
        return f"{parts.scheme}://{host}{parts.path}"
    except ValueError:
        return "(unreadable)"
