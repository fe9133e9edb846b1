"""Connections to PostgreSQL that are usable again at once after it was killed, and the one place where its errors are
translated.

    with connection → taken from the idle ones, or opened → the caller's commands → back to the idle ones
                                                          └ any error → the connection is thrown away, never reset

Own and small instead of a pool that resets connections on return: a reset waits for a server that may be frozen.
Bounds: `size` connections; opening takes at most 2 s, a command 10 s on both ends.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from typing import Final, TypeAlias

import asyncpg

from plato.core.errors import Unavailable, Unstorable

Connection: TypeAlias = "asyncpg.Connection[asyncpg.Record]"

CONNECT_TIMEOUT_S: Final = 2.0
COMMAND_TIMEOUT_S: Final = 10.0

_SESSION: Final = {
    "application_name": "plato",
    # A server's default may be weaker; with a synchronous standby "on" waits for it (R11).
    "synchronous_commit": "on",
    "jit": "off",
    # Every statement looks few keys up. A plan made while a table was small would scan it for a minute after it grew.
    "enable_seqscan": "off",
    "enable_hashjoin": "off",
    "enable_mergejoin": "off",
    # A client that froze within a transaction must not hold a partition's row for ever (R7: the successor waits for it).
    "idle_in_transaction_session_timeout": "5000",
    "statement_timeout": str(int(COMMAND_TIMEOUT_S * 1000)),
    "client_connection_check_interval": "2000",
    "tcp_keepalives_idle": "10",
    "tcp_keepalives_interval": "5",
    "tcp_keepalives_count": "3",
}


@contextlib.contextmanager
def translated() -> Iterator[None]:
    """Turns what asyncpg and the socket raise into Unstorable (SQLSTATE classes 22 and 23) or Unavailable."""
    try:
        yield
    except asyncpg.PostgresError as e:
        state = e.sqlstate or ""
        kind = Unstorable if state[:2] in ("22", "23") else Unavailable
        raise kind(f"PostgreSQL: {e} (SQLSTATE {state})") from e
    except asyncpg.InterfaceError as e:
        # An argument that no PostgreSQL value can hold is refused before it is sent: the data's fault, as class 22.
        kind = Unstorable if isinstance(e, ValueError) else Unavailable
        raise kind(f"PostgreSQL: {e}") from e
    except (OSError, asyncpg.InternalClientError) as e:  # OSError: TimeoutError too
        raise Unavailable(f"PostgreSQL does not answer: {e!r}") from e


async def connect(
    uri: str,
    schema: str | None = None,
    *,
    timeout_s: float = CONNECT_TIMEOUT_S,
    command_timeout_s: float | None = COMMAND_TIMEOUT_S,
) -> Connection:
    """One connection with Plato's session settings. Raises what asyncpg raises."""
    settings = {**_SESSION, "search_path": schema} if schema else dict(_SESSION)
    return await asyncpg.connect(uri, timeout=timeout_s, command_timeout=command_timeout_s, server_settings=settings)


class Database:
    """Up to `size` connections to one schema. Not thread-safe; of one loop."""

    def __init__(self, uri: str, schema: str, *, size: int = 4) -> None:
        self.uri = uri
        self.schema = schema
        self._idle: list[Connection] = []
        self._free = asyncio.Semaphore(size)
        self._closed = False

    @contextlib.asynccontextmanager
    async def connection(self) -> AsyncIterator[Connection]:
        """A connection for the time of the block. Raises Unavailable and Unstorable, from opening and from the block."""
        async with self._free:
            with translated():
                connection = self._take_idle() or await connect(self.uri, self.schema)
                try:
                    yield connection
                except BaseException as e:
                    connection.terminate()
                    if not isinstance(e, asyncpg.PostgresError):
                        self._drop_idle()  # the others most likely broke with it; a repeat must not meet each of them
                    raise
                if self._closed or connection.is_closed() or connection.is_in_transaction():
                    connection.terminate()
                else:
                    self._idle.append(connection)

    async def close(self) -> None:
        """Closes what is idle; connections in use close when they come back."""
        self._closed = True
        for connection in self._idle:
            with contextlib.suppress(asyncpg.PostgresError, asyncpg.InterfaceError, OSError, TimeoutError):
                await connection.close(timeout=1.0)
        self._idle.clear()

    def _take_idle(self) -> Connection | None:
        while self._idle:
            connection = self._idle.pop()
            if not connection.is_closed():
                return connection
        return None

    def _drop_idle(self) -> None:
        for connection in self._idle:
            connection.terminate()
        self._idle.clear()
