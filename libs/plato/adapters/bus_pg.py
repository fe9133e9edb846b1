"""The bus on PostgreSQL: one call appends to several partitions in one transaction and one round trip.

    append → bus_append(): the partitions' heads are locked in ascending order and held to commit, so position order is
             commit order (R8); NOTIFY rides on the same commit
    wait   → NOTIFY says which partitions; the caller polls beneath it, since a notification may be lost with its connection

Memory: one append's records per call; of the hints at most one number per partition.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from plato.adapters.pg import Connection, Database, connect, translated
from plato.core.errors import Unavailable
from plato.ports import BusRecord

_TRIM_CHUNK: Final = 2_000


def channel(schema: str) -> str:
    """The NOTIFY channel of a schema's bus; payloads are partition numbers, comma-separated."""
    return f"plato_bus_{schema}"


class PgBusProducer:
    """BusProducer on PostgreSQL. One append call is one transaction: all its partitions, or none."""

    def __init__(self, database: Database, partitions: int) -> None:
        self._database = database
        self._partitions = partitions
        self._channel = channel(database.schema)

    @property
    def partitions(self) -> int:
        """See the port."""
        return self._partitions

    async def close(self) -> None:
        """Nothing to do: the database is its owner's to close."""

    async def append(self, batches: Mapping[int, Sequence[bytes]]) -> None:
        """See the port."""
        numbers: list[int] = []
        values: list[bytes] = []
        for partition, records in sorted(batches.items()):
            if not 0 <= partition < self._partitions:
                raise ValueError(f"partition {partition} is outside 0..{self._partitions - 1}")
            numbers += [partition] * len(records)
            values += records
        if not values:
            return
        async with self._database.connection() as connection:
            await connection.execute("SELECT bus_append($1, $2, $3)", numbers, values, self._channel)


class PgBusReader:
    """BusReader on PostgreSQL, with a listening connection of its own that is opened by `wait`."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._channel = channel(database.schema)
        self._listening: Connection | None = None
        self._hinted: set[int] = set()
        self._woken = asyncio.Event()

    @property
    def stopped(self) -> Mapping[int, str]:
        """See the port: rows leave by `trim` alone, which passes by no position that is still next."""
        return {}

    async def read(self, partition: int, after: int, limit: int) -> list[BusRecord]:
        """See the port."""
        async with self._database.connection() as connection:
            rows = await connection.fetch(
                "SELECT partition, position, value FROM bus_record"
                " WHERE partition = $1 AND position > $2 ORDER BY position LIMIT $3",
                partition,
                after,
                limit,
            )
        return [BusRecord(*row) for row in rows]

    def newest(self, partition: int) -> int | None:
        """See the port: the heads lie beside the owners' rows, which are read anyway."""
        return None

    async def read_many(self, after: Mapping[int, int], limit: int, limit_bytes: int) -> list[BusRecord]:
        """See the port."""
        if not after:
            return []
        async with self._database.connection() as connection:
            rows = await connection.fetch(
                "SELECT found.partition, found.position, found.value"
                " FROM unnest($1::integer[], $2::bigint[]) AS asked(partition, after)"
                " CROSS JOIN LATERAL ("
                "   SELECT r.partition, r.position, r.value,"
                "          sum(octet_length(r.value)) OVER (ORDER BY r.position) AS bytes,"
                "          row_number() OVER (ORDER BY r.position) AS nth"
                "   FROM (SELECT * FROM bus_record b WHERE b.partition = asked.partition AND b.position > asked.after"
                "         ORDER BY b.position LIMIT $3) r"
                " ) found WHERE found.nth = 1 OR found.bytes <= $4"
                " ORDER BY found.partition, found.position",
                list(after.keys()),
                list(after.values()),
                limit,
                limit_bytes,
            )
        return [BusRecord(*row) for row in rows]

    async def wait(self, partitions: Iterable[int], timeout_s: float) -> set[int]:
        """See the port."""
        wanted = set(partitions)
        deadline = asyncio.get_running_loop().time() + timeout_s
        if self._listening is None or self._listening.is_closed():
            try:
                await self._listen()
            except Unavailable:
                self._hinted.clear()
            else:
                return wanted  # what came while nobody listened was not heard
        while not self._hinted & wanted:
            self._woken.clear()
            try:
                async with asyncio.timeout_at(deadline):
                    await self._woken.wait()
            except TimeoutError:
                break
            if self._listening is None:  # it broke: heard again after the next wait
                return wanted
        hinted = self._hinted & wanted
        self._hinted -= hinted
        return hinted

    async def trim(self, partition: int, upto: int, older_than_s: int) -> int:
        """See the port."""
        deleted = 0
        while True:
            async with self._database.connection() as connection:
                # Only the oldest are looked at, so that a call that finds nothing to do costs one short index scan.
                tag = await connection.execute(
                    "DELETE FROM bus_record r USING ("
                    "   SELECT partition, position, at FROM bus_record"
                    "   WHERE partition = $1 AND position <= $2 ORDER BY position LIMIT $4) oldest"
                    " WHERE r.partition = oldest.partition AND r.position = oldest.position"
                    "   AND oldest.at < now() - make_interval(secs => $3)",
                    partition,
                    upto,
                    float(older_than_s),
                    _TRIM_CHUNK,
                )
            count = int(tag.split()[-1])
            deleted += count
            if count < _TRIM_CHUNK:
                return deleted

    async def close(self) -> None:
        """Closes the listening connection."""
        if self._listening is not None:
            self._listening.terminate()
            self._listening = None

    async def _listen(self) -> None:
        with translated():
            connection = await connect(self._database.uri, self._database.schema)
            try:
                await connection.add_listener(self._channel, self._heard)
            except BaseException:
                connection.terminate()
                raise
        connection.add_termination_listener(self._broke)
        self._listening = connection

    def _heard(self, _connection: Any, _pid: int, _channel: str, payload: object) -> None:
        self._hinted.update(int(number) for number in str(payload).split(",") if number)
        self._woken.set()

    def _broke(self, connection: Any) -> None:
        if connection is self._listening:
            self._listening = None
            self._woken.set()
