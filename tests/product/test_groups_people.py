"""Groups by people, on real processes: made, changed, left and come back to, on every device, while msg is killed."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack
from pathlib import Path

import asyncpg
import pytest
from plato.client import Message, Refused, Role
from plato.core.codes import Code
from plato.local.cluster import LocalCluster
from plato.wire.v1 import client_pb2 as wire

from tests.faults.load import Person
from tests.faults.people import person
from tests.faults.raw import Raw
from tests.faults.waiting import until
from tests.product import pages

SETTINGS = {
    "local.shards": 2,
    "local.msgs": 2,
    "gateway.workers": 1,
    "state.reconnect_delay_ms": 100,
    "state.repeat_min_ms": 300,
    "msg.member_stale_ms": 500,
}
pytestmark = pytest.mark.timeout(180)


@pytest.fixture(scope="module")
def town(new_cluster: Callable[..., LocalCluster]) -> Iterator[LocalCluster]:
    made = new_cluster(SETTINGS)
    yield made
    made.down()


def kept(device: Person, conversation_id: str) -> list[tuple[int, bytes]]:
    """What a device was shown of a conversation: each (seq, body) once."""
    return sorted({(row.seq, row.body) for row in device.shown if row.conversation_id == conversation_id})


def alive(cluster: LocalCluster, dead: list[int]) -> bool:
    """Whether all msg processes serve, and none of the dead is one of them."""
    entries = cluster.processes("msg")
    return all(entry["ready"] and entry["pid"] not in dead for entry in entries)


async def all_rows(device: Person, conversation_id: str) -> list[Message]:
    return await device.client.history(conversation_id, limit=500)


async def test_every_device_shows_the_same_group_and_who_left_shows_it_up_to_the_leave(
    town: LocalCluster, tmp_path: Path
) -> None:
    async with AsyncExitStack() as stack:

        async def enter(user: str, device: str) -> Person:
            return await stack.enter_async_context(person(town, user, tmp_path / device))

        ann, tablet = await enter("ann", "ann"), await enter("ann", "ann-tablet")
        ben, cid, eve = await enter("ben", "ben"), await enter("cid", "cid"), await enter("eve", "eve")
        made = await ann.client.create_group("hikers", ["ben"])
        group = made.conversation_id
        await made.settled()
        await (await ann.client.add(group, ["cid", "ben"])).settled()
        await (await cid.client.send("hello", conversation_id=group)).settled()
        with pytest.raises(Refused) as refused:
            await (await cid.client.add(group, ["eve"])).settled()
        assert refused.value.code == Code.NOT_ALLOWED
        with pytest.raises(Refused) as refused:
            await (await eve.client.rename(group, "mine")).settled()
        assert refused.value.code == Code.NOT_A_MEMBER
        await (await ann.client.give_role(group, "ben", Role.ADMINISTRATOR)).settled()
        await (await ben.client.remove(group, ["cid", "nobody"])).settled()
        await (await ann.client.rename(group, "walkers")).settled()
        with pytest.raises(Refused) as refused:
            await (await cid.client.send("still here?", conversation_id=group)).settled()
        assert refused.value.code == Code.NOT_A_MEMBER
        left = await (await ann.client.leave(group)).settled()
        assert left.seq == 7

        for device in (ann, tablet, ben):
            await until(lambda d=device: len(kept(d, group)) == 7, 20, f"{device.store}: {kept(device, group)}")  # type: ignore[misc]  # mypy: a default
        assert kept(ann, group) == kept(tablet, group) == kept(ben, group), (
            "the device that sent it shows what was done"
        )
        await until(lambda: len(kept(cid, group)) == 4)
        assert kept(cid, group) == kept(ben, group)[1:5], "from the message that added to the one that removed"
        assert kept(eve, group) == []
        done = [m.operation for m in await all_rows(ann, group) if m.operation is not None]
        assert [(o.users, o.owner) for o in done] == [
            (("ann", "ben"), "ann"),
            (("cid",), ""),
            (("ben",), ""),
            (("cid",), ""),
            ((), ""),
            (("ann",), "ben"),
        ]
        await (await ben.client.add(group, ["ann"])).settled()
        await until(lambda: len(kept(tablet, group)) == 8)
        fresh = await enter("cid", "cid-new")
        await until(lambda: fresh.client.conversation(group), 20)
        assert [m.seq for m in await all_rows(fresh, group)] == [2, 3, 4, 5]
        again = await enter("ann", "ann-new")
        await until(lambda: again.client.conversation(group), 20)
        assert [m.seq for m in await all_rows(again, group)] == [8], "nothing from before the return"

        host, port = town.gateways[0].rsplit(":", 1)
        for user, where in (("eve", group), ("eve", "g:no-such"), ("cid", "g:no-such")):
            async with await Raw.open(host, int(port)) as raw:
                await raw.enter(town.token(user))
                await raw.send(wire.PULL, wire.PullMsg(ref=7, conversation_id=where, from_seq=1))
                answer = await raw.until(wire.PULLED, wire.PulledMsg, ref=7)
                assert (answer.code, list(answer.rows), answer.newest_seq) == (Code.NOT_A_MEMBER, [], 0)


async def test_changes_of_a_group_are_done_once_and_alike_everywhere_while_msg_is_killed(
    town: LocalCluster, tmp_path: Path
) -> None:
    chance = random.Random(6)
    async with AsyncExitStack() as stack:
        names = ["fay", "gus", "hal", "ida"]
        people = {name: await stack.enter_async_context(person(town, name, tmp_path / f"p-{name}")) for name in names}
        phone = await stack.enter_async_context(person(town, "fay", tmp_path / "p-fay-phone"))
        made = await people["fay"].client.create_group("", names[1:])
        group = made.conversation_id
        await made.settled()
        stopped, n = False, 0

        async def kill() -> None:
            nonlocal n
            while not stopped:
                dead = town.kill(f"plato-msg-{n % 2}")
                await until(lambda dead=dead: alive(town, dead), 60)  # type: ignore[misc]  # mypy: a default
                n += 1

        async def change(person: Person) -> list[bytes]:
            """What one person does to the group until msg was killed three times; what was accepted, by client_msg_id."""
            client, done = person.client, []
            others = [name for name in names[1:] if name != person.user]
            turns = itertools.count()
            while n < 3:
                step = chance.random()
                if step < 0.4:
                    sent = await client.send(f"{person.user} {next(turns)}", conversation_id=group)
                elif step < 0.6:
                    sent = await client.add(group, others)
                elif step < 0.75:
                    sent = await client.remove(group, [chance.choice(others)])
                elif step < 0.85:
                    sent = await client.rename(group, f"{person.user} {next(turns)}")
                elif person.user == "fay":
                    sent = await client.give_role(group, chance.choice(others), Role(chance.randrange(2)))
                else:
                    sent = await client.leave(group)
                with contextlib.suppress(Refused):
                    await sent.settled()
                    done.append(sent.client_msg_id)
            return done

        killing = asyncio.create_task(kill())
        done = await asyncio.gather(*(change(people[name]) for name in names))
        stopped = True
        await killing
        database = await asyncpg.connect(
            town.database_uri, server_settings={"search_path": town.settings.database.schema_name}
        )
        try:
            rows = await database.fetch(
                "SELECT seq, prev_seq, from_user, client_msg_id, body FROM im_message"
                " WHERE conversation_id = $1 ORDER BY seq",
                group,
            )
            members = await database.fetch(
                "SELECT user_id, joined_seq, role FROM im_member WHERE conversation_id = $1", group
            )
            former = await database.fetch("SELECT user_id FROM im_former_member WHERE conversation_id = $1", group)
            count = await database.fetchval("SELECT members FROM im_conversation WHERE conversation_id = $1", group)
        finally:
            await database.close()
        assert [row["prev_seq"] for row in rows] == [0, *(row["seq"] for row in rows)][:-1]
        accepted = [made.client_msg_id, *(client_msg_id for of_one in done for client_msg_id in of_one)]
        stored = [bytes(row["client_msg_id"]) for row in rows]
        assert sorted(accepted) == sorted(stored), "each once, none besides"
        everything = [(row["seq"], bytes(row["body"])) for row in rows]
        for device in (people["fay"], phone):
            await until(lambda d=device: len(kept(d, group)) == len(rows), 30)  # type: ignore[misc]  # mypy: a default
            assert kept(device, group) == everything
        now = set(names[:1])
        for message in await all_rows(phone, group):
            operation = message.operation
            if operation is not None and operation.users:
                went = {1001: now.update, 1000: now.update, 1002: now.difference_update, 1003: now.difference_update}
                went.get(int(operation.kind), lambda users: None)(operation.users)
        assert {row["user_id"] for row in members} == now, "who is in follows from the messages"
        assert {row["user_id"] for row in former} == set(names) - now
        assert count == len(now)
        assert [row["user_id"] for row in members if row["role"] == Role.OWNER] == ["fay"]


def test_the_example_of_the_page_prints_what_the_page_says(town: LocalCluster, tmp_path: Path) -> None:
    pages.check_program(town, "groups.md", tmp_path)
