"""R11 without a broker: what a bus's settings promise together with the database's, and whose positions a database keeps."""

from __future__ import annotations

import re
from pathlib import Path
from uuid import uuid4

import asyncpg
import pytest
from plato.adapters import schema_pg
from plato.adapters.bus import both
from plato.adapters.bus_kafka_topic import judge_durability
from plato.adapters.schema_pg import Durability
from plato.runtime.settings import SettingsError

PARTITIONS = 4


@pytest.mark.parametrize(
    ("replication", "in_sync", "unclean", "level", "words"),
    [
        (3, 2, "false", "node", "survives the loss of one node"),
        (5, 3, "false", "node", "survives the loss of one node"),
        (3, 3, "false", "node", "takes nothing while one is away"),
        (2, 2, "false", "node", "takes nothing while one is away"),
        (3, 1, "false", "process", "on one node alone: promises process crashes only"),
        (1, 1, "false", "process", "single node (replication 1): promises process crashes only"),
        (3, 2, "true", "none", "unclean.leader.election.enable is on"),
    ],
)
def test_r11_what_settings_of_a_topic_promise(
    replication: int, in_sync: int, unclean: str, level: str, words: str
) -> None:
    config = {"min.insync.replicas": str(in_sync), "unclean.leader.election.enable": unclean}
    found = judge_durability(replication, config)
    assert found.level == level
    assert words in found.promise


def test_r11_a_topic_whose_settings_may_not_be_read_promises_nothing() -> None:
    assert judge_durability(3, {}).level == "none"


def test_r11_a_message_is_worth_what_the_weaker_of_bus_and_database_promises() -> None:
    node, process = Durability("node", "three"), Durability("process", "one")
    assert both(node, process) == Durability("process", "three; database: one")
    assert both(process, node).level == "process"
    assert both(node, node).level == "node"


async def test_a_database_keeps_the_bus_that_its_positions_are_of(postgres_uri: str) -> None:
    schema = f"bus_{uuid4().hex[:12]}"
    await schema_pg.migrate(postgres_uri, schema, PARTITIONS)
    await schema_pg.check(postgres_uri, schema, PARTITIONS, "kafka one plato-uplinks")
    await schema_pg.check(postgres_uri, schema, PARTITIONS, "kafka one plato-uplinks")
    for other in ("kafka two plato-uplinks", "kafka one another", schema_pg.POSTGRES_BUS):
        with pytest.raises(SettingsError, match="belongs to the bus"):
            await schema_pg.check(postgres_uri, schema, PARTITIONS, other)


async def test_the_page_says_how_a_database_changes_its_bus_and_how_a_stopped_partition_goes_on(
    postgres_uri: str, checkout: Path
) -> None:
    schema = f"bus_{uuid4().hex[:12]}"
    page = (checkout / "docs" / "kafka.md").read_text(encoding="utf-8").replace("plato.", f"{schema}.")
    go_on, change = re.findall(r"^ *```sql\n(.*?)^ *```$", page, re.MULTILINE | re.DOTALL)
    await schema_pg.migrate(postgres_uri, schema, 8)
    connection = await asyncpg.connect(postgres_uri)
    try:
        await connection.execute(f"UPDATE {schema}.bus_head SET next_position = 7")
        await connection.execute(go_on)
        moved = await connection.fetch(f"SELECT partition FROM {schema}.bus_owner WHERE position = 1200 AND epoch > 0")
        assert [row["partition"] for row in moved] == [5]
        with pytest.raises(SettingsError, match=r"belongs to the bus .postgres."):
            await schema_pg.check(postgres_uri, schema, 8, "kafka one plato-uplinks")
        await connection.execute(change)
        await schema_pg.check(postgres_uri, schema, 8, "kafka one plato-uplinks")
        assert await connection.fetchval(f"SELECT max(position) FROM {schema}.bus_owner") == 0
    finally:
        await connection.close()
