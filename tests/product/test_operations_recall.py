"""Recall and edit on real processes: every device of everybody shows the same, though msg is killed right behind it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack
from pathlib import Path

import asyncpg
import pytest
from plato.client import Refused
from plato.core.codes import Code
from plato.core.conversations import dialogue_id
from plato.local.cluster import LocalCluster

from tests.faults.people import person
from tests.faults.waiting import until
from tests.product import pages

SETTINGS = {
    "local.msgs": 2,
    "gateway.workers": 1,
    "state.reconnect_delay_ms": 100,
    "state.repeat_min_ms": 300,
    "msg.member_stale_ms": 500,
    "msg.recall_limit_s": 60,
}
pytestmark = pytest.mark.timeout(180)
PAIR = dialogue_id("ann", "ben")
ROUNDS = 6


@pytest.fixture(scope="module")
def town(new_cluster: Callable[..., LocalCluster]) -> Iterator[LocalCluster]:
    made = new_cluster(SETTINGS)
    yield made
    made.down()


async def test_what_was_recalled_is_gone_everywhere_though_msg_is_killed(town: LocalCluster, tmp_path: Path) -> None:
    async with AsyncExitStack() as stack:
        ann = await stack.enter_async_context(person(town, "ann", tmp_path / "ann"))
        phone = await stack.enter_async_context(person(town, "ann", tmp_path / "ann-phone"))
        ben = await stack.enter_async_context(person(town, "ben", tmp_path / "ben"))
        expected: dict[int, tuple[str, bool]] = {}
        for n in range(ROUNDS):
            kept = await (await ann.client.send(f"kept {n}", to="ben")).settled()
            gone = await (await ann.client.send(f"secret {n}", to="ben")).settled()
            await (await ann.client.edit(gone.msg_id, f"secret, edited {n}", conversation_id=PAIR)).settled()
            edited = await ann.client.edit(kept.msg_id, f"edited {n}", conversation_id=PAIR)
            recalled = await ann.client.recall(gone.msg_id, conversation_id=PAIR)
            town.kill("msg")  # both: whatever was committed is fanned out by a successor
            await asyncio.gather(edited.settled(), recalled.settled())
            expected[kept.seq], expected[gone.seq] = (f"edited {n}", False), ("", True)
        with pytest.raises(Refused) as refused:
            await (await ben.client.recall(kept.msg_id, conversation_id=PAIR)).settled()
        assert refused.value.code == Code.NOT_ALLOWED
        with pytest.raises(Refused) as refused:
            await (await ann.client.recall(gone.msg_id, conversation_id=PAIR)).settled()
        assert refused.value.code == Code.MESSAGE_UNKNOWN

        for device in (ann, phone, ben):

            def shows(device=device) -> bool:  # type: ignore[no-untyped-def]  # of this turn of the loop
                found = {seq: device.client.message(PAIR, seq) for seq in expected}
                return all(m is not None and (m.text, m.recalled) == expected[seq] for seq, m in found.items())

            await until(shows, 30, f"{device.store} shows something else")
        fresh = await stack.enter_async_context(person(town, "ben", tmp_path / "ben-new"))
        await until(lambda: len(fresh.shown) == 5 * ROUNDS, 30)
        assert not [row for row in fresh.shown if b"secret" in row.body], "who comes later finds nothing of it"
        database = await asyncpg.connect(
            town.database_uri, server_settings={"search_path": town.settings.database.schema_name}
        )
        try:
            assert (
                await database.fetchval(
                    "SELECT count(*) FROM im_message WHERE position('secret' IN encode(body, 'escape')) > 0"
                )
                == 0
            )
            assert await database.fetchval("SELECT count(*) FROM im_message") == 5 * ROUNDS
        finally:
            await database.close()


def test_the_example_of_the_page_prints_what_the_page_says(town: LocalCluster, tmp_path: Path) -> None:
    pages.check_program(town, "messages.md", tmp_path)
