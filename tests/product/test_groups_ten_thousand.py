"""A group of 10,000 that a person made: nobody is flooded by its making, its members are listed in pages, one message,
one recall and one leave reach who is online by notices and pulls, and what is written does not grow with the members."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from urllib.parse import quote

import asyncpg
import pytest
from plato.local.cluster import LocalCluster
from plato.wire.v1 import client_pb2 as wire
from plato.wire.v1 import content_pb2 as content

from tests.faults.people import person
from tests.faults.raw import Raw
from tests.faults.town import Member
from tests.faults.waiting import until
from tests.product.api import Api

pytestmark = pytest.mark.timeout(240)
MEMBERS, ONLINE, PAGE = 10_000, 100, 1_000
OPERATIONS = 20
REPEAT_S = 5.0
NOTIFY_WINDOW_MAX_MS = 1_000
A_FEW = 30
"""Rows that a step may write beside its own: counters, leases, where somebody is."""


class Ledger:
    """Counts the rows that a step wrote: those that bear its transactions."""

    def __init__(self, cluster: LocalCluster) -> None:
        self._cluster = cluster
        self._since = 0

    async def begin(self) -> None:
        """Rows count from here on."""
        connection = await asyncpg.connect(self._cluster.database_uri)
        try:
            self._since = await connection.fetchval("SELECT pg_snapshot_xmax(pg_current_snapshot())::text::bigint")
        finally:
            await connection.close()

    async def rows(self) -> int:
        """How many rows, of all tables, were written since; one that was written twice counts once."""
        schema = self._cluster.settings.database.schema_name
        connection = await asyncpg.connect(self._cluster.database_uri)
        try:
            tables = await connection.fetch("SELECT tablename FROM pg_tables WHERE schemaname = $1", schema)
            counts = [
                await connection.fetchval(
                    f"SELECT count(*) FROM {schema}.{table['tablename']} WHERE xmin::text::bigint >= $1", self._since
                )
                for table in tables
            ]
        finally:
            await connection.close()
        return sum(counts)


@pytest.fixture(scope="module")
def city(new_cluster: Callable[..., LocalCluster]) -> Iterator[LocalCluster]:
    made = new_cluster({"gateway.workers": 1, "msg.notify_window_max_ms": NOTIFY_WINDOW_MAX_MS})
    yield made
    made.down()


async def test_ten_thousand_are_one_group(city: LocalCluster, tmp_path: Path) -> None:
    figures: dict[str, float] = {}
    api = Api(city.api_url, city.token("founder"))
    names = [f"n{n:05}" for n in range(MEMBERS - 1)]
    host, port = city.gateways[0].rsplit(":", 1)
    async with AsyncExitStack() as stack:
        founder = await stack.enter_async_context(person(city, "founder", tmp_path / "founder"))
        raws = []
        for name in names[:: len(names) // ONLINE][:ONLINE]:
            raw = await stack.enter_async_context(await Raw.open(host, int(port)))
            await raw.enter(city.token(name))
            raws.append((name, raw))
        begun = making = time.monotonic()
        made = await founder.client.create_group("city", names)
        group = made.conversation_id
        members = [Member(raw, group, n) for n, (_, raw) in enumerate(raws)]
        tasks = [asyncio.create_task(member.run()) for member in members]
        stack.callback(lambda: [task.cancel() for task in tasks])
        info = f"/v1/groups/{quote(group)}"
        await made.settled()

        async def whole() -> bool:
            return bool((await api.ask("GET", info)).body["members"] == MEMBERS)

        await until(whole, 60)
        figures["made_s"] = round(time.monotonic() - begun, 2)

        begun = time.monotonic()
        listed: list[str] = []
        pages = 0
        while True:
            after = quote(listed[-1]) if listed else ""
            page = (await api.ask("GET", f"{info}/members?limit={PAGE}&after={after}")).body
            listed += [member["user"] for member in page["members"]]
            pages += 1
            if not page["more"]:
                break
        figures["page_of_1000_ms"] = round((time.monotonic() - begun) * 1_000 / pages, 1)
        assert listed == ["founder", *names]
        assert pages == MEMBERS // PAGE

        def everybody_has(seq: int) -> bool:
            return all(member.seq == seq for member in members)

        await until(lambda: everybody_has(OPERATIONS), 60)
        windows = (time.monotonic() - making) * 1_000 / NOTIFY_WINDOW_MAX_MS
        for name, member in zip((name for name, _ in raws), members, strict=True):
            place = names.index(name) + 1
            first = member.rows[0]
            assert name in content.Operation.FromString(first.Content).users, "the first row is the one that added them"
            assert first.seq == place // 500 + 1
            assert member.pushes <= 1, "only a group that is small yet is pushed to"
            assert len(member.notices) <= max(12, windows + 2), (
                "twenty operations are a few notices, one a window at most"
            )

        ledger = Ledger(city)
        await ledger.begin()
        begun = time.monotonic()
        said = await (await founder.client.send("hello, city", conversation_id=group)).settled()
        figures["settled_ms"] = round((time.monotonic() - begun) * 1_000, 1)
        await until(lambda: everybody_has(said.seq), 30)
        figures["shown_to_all_online_s"] = round(time.monotonic() - begun, 2)
        figures["rows_for_a_message"] = await ledger.rows()
        assert figures["rows_for_a_message"] <= A_FEW, "of 10,000 members, 100 online: one message, not one row each"

        await ledger.begin()
        begun = time.monotonic()
        asked_at = 0.0
        counts = f"/v1/conversations/{quote(group)}/read_counts?seqs={said.seq}"

        async def all_read() -> bool:
            nonlocal asked_at
            if time.monotonic() - asked_at > REPEAT_S:  # as a client repeats what it knows no answer to
                asked_at = time.monotonic()
                for n, (_, raw) in enumerate(raws):
                    raw.post(wire.READ, wire.ReadMsg(ref=1_000 + n, conversation_id=group, seq=said.seq))
            return bool((await api.ask("GET", counts)).body["counts"].get(str(said.seq), 0) >= ONLINE)

        await until(all_read, 30, "not all who read are counted")
        figures["all_online_read_s"] = round(time.monotonic() - begun, 2)
        figures["rows_for_100_readers"] = await ledger.rows()
        assert figures["rows_for_100_readers"] <= 2 * ONLINE + A_FEW, "a reader's own rows, and none of the others'"

        await (await founder.client.recall(said.msg_id, conversation_id=group)).settled()
        begun = time.monotonic()
        left = await (await founder.client.leave(group)).settled()
        figures["owner_leaves_ms"] = round((time.monotonic() - begun) * 1_000, 1)
        await until(lambda: everybody_has(left.seq), 30)
        last = content.Operation.FromString(members[0].rows[-1].Content)
        assert (list(last.users), last.owner) == (["founder"], names[0]), "the senior one follows, of ten thousand"
        await until(lambda: founder.shown and founder.shown[-1].seq == left.seq, 30, "who left is told of it")
        assert all(member.rows[-3].Content == b"hello, city" or member.rows[-3].recalled for member in members)

        late = await stack.enter_async_context(await Raw.open(host, int(port)))
        await late.enter(city.token(names[1]))
        await late.send(wire.PULL, wire.PullMsg(ref=9, conversation_id=group, from_seq=said.seq, to_seq=said.seq))
        (row,) = (await late.until(wire.PULLED, wire.PulledMsg, ref=9)).rows
        assert (row.Content, row.recalled, row.changed_seq) == (b"", True, left.seq - 1)
        print(figures)
