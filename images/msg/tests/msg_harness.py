"""Msg processes under test: real PostgreSQL (bus and messages), the rest in memory. A node is killed by cancelling it: its
connections break in the middle of what they do, and nothing is given back."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any
from uuid import uuid4

import asyncpg
import structlog
from plato.adapters.bus_pg import PgBusProducer, PgBusReader
from plato.adapters.pg import Database
from plato.adapters.schema_pg import migrate
from plato.core.conversations import dialogue_id, partition_of
from plato.core.ids import make_id
from plato.fakes.shards import FakeShards
from plato.fakes.store import FakeReservationStore, FakeRouteStore, MemoryStore
from plato.fakes.topology import FakeTopology
from plato.ports import Route
from plato.topology.record import Msg, Shard, Topology, even_ranges
from plato.wire.v1 import client_pb2 as wire
from plato.wire.v1.bus_pb2 import Record
from plato_msg.core.allocator import Allocator
from plato_msg.core.policy import Rules
from plato_msg.service import MsgService, Options

structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))

PARTITIONS = 8
SHARDS = ("s0", "s1")
TICK_S = 0.02
STALE_MS = 3_000
"""In own ticks; so long that no busy machine makes one of two processes silent for the other."""
CONN_MS = 1_800_000_000_000


async def until(condition: Callable[[], bool | Awaitable[bool]], deadline_s: float = 60.0) -> None:
    """Waits for a condition."""
    async with asyncio.timeout(deadline_s):
        while True:
            held = condition()
            if await held if isinstance(held, Awaitable) else held:
                return
            await asyncio.sleep(0.01)


class Crash(Exception):
    """Raised by a hook: the process ends here."""


class Routes(FakeRouteStore):
    """Routes with a hook before each read."""

    def __init__(self, memory: MemoryStore) -> None:
        super().__init__(memory)
        self.reads: list[list[str]] = []
        self.on_read: Callable[[Sequence[str]], Awaitable[None] | None] = lambda users: None

    async def read_many(self, users: Sequence[str]) -> list[dict[int, Route]]:
        """See the port."""
        self.reads.append(list(users))
        hooked = self.on_read(users)
        if hooked is not None:
            await hooked
        return await super().read_many(users)


@dataclass
class Node:
    """One msg process."""

    name: str
    uid: str
    service: MsgService
    databases: list[Database]
    bus: PgBusReader
    task: asyncio.Task[None] = field(init=False)

    @property
    def partitions(self) -> set[int]:
        return set(self.service.owners.held)

    async def kill(self) -> None:
        """kill -9."""
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)
        await self.kill_connections()

    async def kill_connections(self) -> None:
        """Ends the connections of a node, running or only built."""
        await self.bus.close()
        for database in self.databases:
            await database.close()

    async def stop(self) -> None:
        """SIGTERM."""
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)
        await self.service.leave()
        await self.kill()

    async def ended(self) -> BaseException | None:
        """Waits until the process ended by itself; what it died of. Its connections break."""
        await asyncio.wait([self.task])
        await self.kill()
        return self.task.exception()


class Cluster:
    """A database, a store, two shards, a topology, and any number of msg processes."""

    def __init__(self, uri: str, schema: str) -> None:
        self.uri, self.schema = uri, schema
        self.memory = MemoryStore()
        self.routes = Routes(self.memory)
        self.shards = FakeShards()
        shards = {name: Shard(f"{name}:1", f"uid-{name}") for name in SHARDS}
        self.topology = FakeTopology(Topology("test", 1, even_ranges(SHARDS, 1), shards=shards))
        self.nodes: list[Node] = []
        self._database = Database(uri, schema)
        self._producer = PgBusProducer(self._database, PARTITIONS)
        self._connections = 0
        self._built: list[Node] = []

    # ── processes ────────────────────────────────────────────────────────────────────────────────────────────

    async def start(
        self,
        name: str = "msg-0",
        *,
        guests: bool = False,
        allocator: Allocator | None = None,
        batch_records: int = 500,
        database: Callable[[Database], Database] = lambda d: d,
        tick_s: float = TICK_S,
        push_members: int = 500,
        stale_ms: int = STALE_MS,
    ) -> Node:
        """Starts a process under a new uid, and has the topology name it. database: may wrap the pipeline's."""
        node = self.build(
            name,
            guests=guests,
            allocator=allocator,
            batch_records=batch_records,
            database=database,
            tick_s=tick_s,
            push_members=push_members,
            stale_ms=stale_ms,
        )
        self.name(node)
        node.task = asyncio.create_task(node.service.run())
        self.nodes.append(node)
        return node

    def build(
        self,
        name: str = "msg-0",
        *,
        guests: bool = False,
        allocator: Allocator | None = None,
        batch_records: int = 500,
        database: Callable[[Database], Database] = lambda d: d,
        tick_s: float = TICK_S,
        push_members: int = 500,
        stale_ms: int = STALE_MS,
    ) -> Node:
        """As start, without running it."""
        uid = uuid4().hex
        own = [Database(self.uri, self.schema), Database(self.uri, self.schema)]
        bus = PgBusReader(own[0])
        options = Options(
            name,
            uid,
            PARTITIONS,
            Rules(guests),
            batch_records=batch_records,
            member_stale_ms=stale_ms,
            tick_s=tick_s,
            push_members_max=push_members,
            notify_window_max_ms=100,
        )
        service = MsgService(
            options,
            self.topology,
            bus,
            database(own[0]),
            own[1],
            self.routes,
            self.shards,
            FakeReservationStore(self.memory),
            allocator,
        )
        node = Node(name, uid, service, own, bus)
        self._built.append(node)
        return node

    def name(self, node: Node) -> None:
        """Writes the node's uid into the topology, in place of an older process of that name."""
        now = self.topology.current()
        # A new worker_id each time: the reservation of a killed process need not pass first.
        record = Msg(node.uid, 100 + len(self._built), "")
        self.topology.set(replace(now, epoch=now.epoch + 1, msgs={**now.msgs, node.name: record}))

    def unname(self, name: str) -> None:
        """Takes a msg process out of the topology."""
        now = self.topology.current()
        msgs = {n: m for n, m in now.msgs.items() if n != name}
        self.topology.set(replace(now, epoch=now.epoch + 1, msgs=msgs))

    # ── clients ──────────────────────────────────────────────────────────────────────────────────────────────

    def connect(self, user: str, device_id: int = 1, shard: str = "s0") -> int:
        """Gives a device a route to a new connection in a slot of `shard`; its conn_id."""
        self._connections += 1
        slot = self._connections % 512 + (0 if shard == "s0" else 512)
        conn_id = make_id(CONN_MS + self._connections, 1, slot)
        old = self.memory.routes.get((user, device_id), Route(0, 0))
        self.memory.routes[user, device_id] = Route(conn_id, old.gen + 1)
        return conn_id

    def frames(self, conn_id: int) -> list[wire.PushMsg | wire.ReceiptMsg]:
        """What a connection was sent, notices left out."""
        found: list[wire.PushMsg | wire.ReceiptMsg] = []
        for payload in self.shards.taken[conn_id]:
            cmd = wire.MsgCmd.FromString(payload.frame)
            if cmd.Type == wire.NOTIFY:
                continue
            kind = wire.PushMsg if cmd.Type == wire.PUSH else wire.ReceiptMsg
            found.append(kind.FromString(cmd.Payload))
        return found

    def pushes(self, conn_id: int) -> list[wire.PushMsg]:
        """The pushes among them."""
        return [f for f in self.frames(conn_id) if isinstance(f, wire.PushMsg)]

    def notices(self, conn_id: int, conversation_id: str) -> list[int]:
        """The seqs that it was notified of."""
        cmds = [wire.MsgCmd.FromString(payload.frame) for payload in self.shards.taken[conn_id]]
        cursors = [c for cmd in cmds if cmd.Type == wire.NOTIFY for c in wire.NotifyMsg.FromString(cmd.Payload).newest]
        return [cursor.seq for cursor in cursors if cursor.conversation_id == conversation_id]

    def receipts(self, conn_id: int) -> list[wire.ReceiptMsg]:
        """The receipts among them."""
        return [f for f in self.frames(conn_id) if isinstance(f, wire.ReceiptMsg)]

    # ── bus and database ─────────────────────────────────────────────────────────────────────────────────────

    async def send(self, *records: Record) -> None:
        """Appends records, each to its conversation's partition, in order, in one append."""
        batches: dict[int, list[bytes]] = {}
        for r in records:
            batches.setdefault(partition_of(r.conversation_id, PARTITIONS), []).append(r.SerializeToString())
        await self._producer.append(batches)

    async def append(self, partition: int, *values: bytes) -> None:
        """Appends raw values."""
        await self._producer.append({partition: values})

    async def fetch(self, sql: str, *args: Any) -> list[Any]:
        """Rows of a query in the schema; of one column, its values."""
        async with self._database.connection() as connection:
            rows = await connection.fetch(sql, *args)
        return [row[0] if len(row) == 1 else tuple(row) for row in rows]

    async def execute(self, sql: str) -> None:
        """Runs statements in the schema."""
        async with self._database.connection() as connection:
            await connection.execute(sql)

    async def connection(self) -> asyncpg.Connection[asyncpg.Record]:
        """A connection of its own, without Plato's time-outs."""
        return await asyncpg.connect(self.uri, server_settings={"search_path": self.schema})

    async def settled(self) -> bool:
        """Every record has its outcome and is fanned out, as the database says."""
        return not await self.fetch(
            "SELECT 1 FROM bus_owner JOIN bus_head USING (partition) WHERE fanned_out < next_position - 1"
        )

    async def owners(self) -> set[str]:
        """The uids that own partitions."""
        return set(await self.fetch("SELECT owner FROM bus_owner"))

    async def close(self) -> None:
        """Kills what runs."""
        for node in self.nodes:
            await node.kill()
        for node in self._built:
            await node.kill_connections()
        await self._database.close()


@contextlib.asynccontextmanager
async def cluster(postgres_uri: str) -> AsyncIterator[Cluster]:
    """A cluster in a schema of its own."""
    schema = f"msg_{uuid4().hex[:12]}"
    await migrate(postgres_uri, schema, PARTITIONS)
    made = Cluster(postgres_uri, schema)
    try:
        yield made
    finally:
        await made.close()


def up(
    from_user: str,
    to_user: str,
    body: bytes = b"hi",
    *,
    conversation_id: str | None = None,
    client_msg_id: bytes | None = None,
    client_id: int = 1,
    device_id: int = 1,
    guest: bool = False,
) -> Record:
    """A record of a dialogue, or of `conversation_id`."""
    return Record(
        conversation_id=dialogue_id(from_user, to_user) if conversation_id is None else conversation_id,
        from_user=from_user,
        device_id=device_id,
        client_id=client_id,
        client_msg_id=uuid4().bytes if client_msg_id is None else client_msg_id,
        to_user=to_user,
        msg_type=1,
        body=body,
        trace_id=uuid4().bytes,
        guest=guest,
    )


async def written(
    c: Cluster,
    conversation_id: str,
    authors: Iterable[str],
    members: dict[str, int],
    *,
    kind: str = "group",
    msg_type: int = 1,
    left: dict[str, int] | None = None,
) -> None:
    """A conversation with a message of each author, at seq 1, 2, …; members {user: joined_seq}; left {user: left_seq}."""
    authors = list(authors)
    async with c._database.connection() as connection:
        await connection.execute(
            "INSERT INTO im_conversation (conversation_id, kind, last_seq, members, title) VALUES ($1, $2, $3, $4, 'T')",
            conversation_id,
            kind,
            len(authors),
            len(members) if kind == "group" else 0,
        )
        await connection.executemany(
            "INSERT INTO im_member (conversation_id, user_id, joined_seq) VALUES ($1, $2, $3)",
            [(conversation_id, user, joined) for user, joined in members.items()],
        )
        await connection.executemany(
            "INSERT INTO im_former_member VALUES ($1, $2, 0, $3)",
            [(conversation_id, user, seq) for user, seq in (left or {}).items()],
        )
        first = await connection.fetchval("SELECT coalesce(max(msg_id), 0) + 1 FROM im_message")
        await connection.executemany(
            "INSERT INTO im_message (msg_id, conversation_id, seq, prev_seq, from_user, msg_type, body, client_msg_id,"
            " server_at) VALUES ($1, $2, $3, $4, $5, $6, $7, $8, now())",
            [
                (
                    first + i,
                    conversation_id,
                    i + 1,
                    i,
                    author,
                    msg_type,
                    b"m%d" % (i + 1),
                    (first + i).to_bytes(16, "big"),
                )
                for i, author in enumerate(authors)
            ],
        )
