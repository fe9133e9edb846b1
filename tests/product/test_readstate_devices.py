"""What one person's devices share, on real processes: positions, pins, deletions and kicks are the same on all of them, also
on one that was away, and while gateways, state and msg are killed in between. Raw frames and HTTP only."""

from __future__ import annotations

import asyncio
import itertools
import random
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path

import asyncpg
import pytest
from plato.core.codes import Code
from plato.core.conversations import dialogue_id
from plato.local.cluster import LocalCluster

from tests.faults import looking
from tests.faults.raw import Raw
from tests.faults.waiting import until
from tests.product.api import Api, person
from tests.product.shared_device import Device

SETTINGS = {
    "local.shards": 2,
    "local.msgs": 2,
    "gateway.workers": 1,
    "state.repeat_min_ms": 300,
    "msg.member_stale_ms": 500,
}
ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.timeout(400)
people = itertools.count(1)


@pytest.fixture(scope="module")
def town(new_cluster: Callable[..., LocalCluster]) -> Iterator[LocalCluster]:
    made = new_cluster(SETTINGS)
    yield made
    made.down()


def names(count: int) -> list[str]:
    """Persons whom no other test knows."""
    return [f"p{next(people)}" for _ in range(count)]


async def said(api: Api, to: str, count: int) -> tuple[str, list[str]]:
    """Messages of one person to another: their conversation and msg_ids."""
    sent = [await api.ok("POST", "/v1/messages", {"to": to, "text": f"m{n}"}) for n in range(count)]
    return sent[0]["conversation_id"], [one["msg_id"] for one in sent]


def alike(*devices: Device) -> bool:
    """Whether all of them show the same."""
    return all(device.shown() == devices[0].shown() for device in devices)


def knows_positions(author: Device, read: dict[str, int]) -> bool:
    """Whether a dialogue's other side shows how far it was read."""
    return bool(author.state) and all(s.peer_read_seq == read[c] for c, s in author.state.items())


async def stored(cluster: LocalCluster, user: str) -> dict[str, int]:
    """The positions as the database has them."""
    connection = await asyncpg.connect(cluster.database_uri)
    try:
        rows = await connection.fetch(
            f"SELECT conversation_id, read_seq FROM {cluster.settings.database.schema_name}.im_user_state"
            " WHERE user_id = $1",
            user,
        )
    finally:
        await connection.close()
    return dict(tuple(row) for row in rows)


async def test_two_devices_show_the_same_positions_pins_and_deletions_also_after_one_was_away(
    town: LocalCluster,
) -> None:
    ann, bob = names(2)
    api, bobs = person(town, ann), person(town, bob)
    talk, msg_ids = await said(bobs, ann, 5)
    assert talk == dialogue_id(ann, bob)
    async with Device(town, ann, 1) as phone, Device(town, ann, 2) as desk, Device(town, bob, 3) as other:
        for seq in (1, 2, 3):
            answer = await phone.read(talk, seq)
            assert (answer.Code, answer.expected) == (Code.OK, seq)
        await until(lambda: desk.state.get(talk) is not None and desk.state[talk].read_seq == 3)
        await until(lambda: other.heard)  # each is told at most once
        assert {(r.user, r.seq) for r in other.heard} <= {(ann, 1), (ann, 2), (ann, 3)}
        await until(lambda: other.state[talk].peer_read_seq == 3)
        assert (await desk.read(talk, 1)).expected == 3, "it never falls"
        assert (await desk.read(talk, 99)).expected == 5, "and never passes what is there"
        await api.ok("PUT", f"/v1/conversations/{talk}/pin", {"pinned": True})
        await until(lambda: alike(phone, desk) and phone.state[talk].read_seq == 5 and phone.state[talk].pinned_at_ms)
        assert desk.syncs == 0, "each change was pushed"

        await desk.leave()
        await api.ok("DELETE", f"/v1/messages/{msg_ids[4]}?for=me", None, {"Idempotency-Key": "k"})
        await api.ok("PUT", f"/v1/conversations/{talk}/mute", {"until": 4_102_444_800_000})
        await api.ok("DELETE", f"/v1/conversations/{talk}?upto_seq=2")
        await api.ok("PUT", f"/v1/conversations/{talk}/pin", {"pinned": False})
        assert desk.state[talk].pinned_at_ms
        desk.come_back()
        await until(lambda: desk.live.is_set() and alike(phone, desk) and not desk.state[talk].pinned_at_ms)
        assert desk.hidden == {(talk, 5)}
        assert (desk.state[talk].cleared_seq, desk.state[talk].muted_until_ms) == (2, 4_102_444_800_000)
        async with Device(town, ann, 4) as tablet:
            assert alike(phone, tablet), "a new one has all of it"


async def test_every_device_ends_alike_while_processes_are_killed(town: LocalCluster) -> None:
    """Both devices read as fast as they may, each conversation up and down, while one process after the other dies."""
    chance = random.Random(11)
    ann, *friends = names(4)
    talks = {}
    for friend in friends:
        talk, _ = await said(person(town, friend), ann, 30)
        talks[talk] = friend
    asked: dict[str, int] = dict.fromkeys(talks, 0)
    over = asyncio.Event()

    async def reader(device: Device) -> int:
        count = 0
        while not over.is_set():
            talk, seq = chance.choice(list(talks)), chance.randint(1, 35)
            asked[talk] = max(asked[talk], min(seq, 30))
            answer = await device.read(talk, seq)
            assert answer.Code == Code.OK, answer
            assert min(seq, 30) <= answer.expected <= 30, answer
            count += 1
        return count

    async with AsyncExitStack() as stack:
        phone, desk = [await stack.enter_async_context(Device(town, ann, n)) for n in (1, 2)]
        authors = [await stack.enter_async_context(Device(town, friend, 9)) for friend in friends]
        readers = [asyncio.create_task(reader(device)) for device in (phone, desk)]
        for target in ("plato-msg-0", "plato-s0", "plato-msg-1", "plato-s1", "edge-0"):
            dead = town.kill(target)
            await until(partial(looking.back, town, target, dead), 60)
        over.set()
        counts = await asyncio.gather(*readers)
        assert min(counts) > 5, "both went on meanwhile"
        await until(lambda: alike(phone, desk), 60, f"{phone.shown()} and {desk.shown()}")
        positions = await stored(town, ann)
        assert {c: s.read_seq for c, s in phone.state.items()} == positions == asked
        for author in authors:
            await until(partial(knows_positions, author, asked), 60)


async def test_a_kicked_device_is_out_and_stays_out_and_the_others_stay_in(town: LocalCluster) -> None:
    (ann,) = names(1)
    api = person(town, ann)
    host, _, port = town.gateways[0].rpartition(":")
    async with Device(town, ann, 1) as phone, Device(town, ann, 2) as desk, Device(town, ann, 3) as tablet:
        async with await Raw.open(host, int(port)) as away:
            await away.enter(town.token(ann), 4)
        listed = (await api.ok("GET", "/v1/me/devices"))["devices"]
        assert [(d["device_id"], d["platform"]) for d in listed] == [(str(n), "test") for n in (1, 2, 3, 4)]
        assert await api.ok("DELETE", "/v1/me/devices/2") == {"device_ids": ["2"]}
        await until(lambda: desk.kicked == Code.KICKED)
        assert await api.ok("DELETE", "/v1/me/devices?keep=1") == {"device_ids": ["3", "4"]}
        await until(lambda: tablet.kicked == Code.KICKED)
        async with await Raw.open(host, int(port)) as back:
            ack = await back.reconn(away.conn_id, away.secret)
            assert ack.Code == Code.SESSION_UNKNOWN, "a device that was offline cannot resume"
        await until(phone.live.is_set)  # it logs in again by itself where a busy machine kept it waiting
        assert not phone.kicked
        assert [d["device_id"] for d in (await api.ok("GET", "/v1/me/devices"))["devices"]] == ["1"]
        await api.ok("DELETE", "/v1/me/devices")
        await until(lambda: phone.kicked == Code.KICKED)


async def test_typing_and_online_are_told_to_who_shares_the_conversation_only(town: LocalCluster) -> None:
    ann, bob, eve = names(3)
    talk, _ = await said(person(town, bob), ann, 1)
    async with Device(town, ann, 1) as hers, Device(town, bob, 2) as his, Device(town, eve, 3) as strangers:
        await strangers.type(talk)
        async with asyncio.timeout(60):
            while not his.typing:  # each is told at most once
                await hers.type(talk)
                await asyncio.sleep(0.5)  # one in two seconds is taken
        assert {(t.user, t.conversation_id, t.stopped) for t in his.typing} == {(ann, talk, False)}
        asked = f"/v1/presence?users={ann}&users={bob}&users={eve}"
        assert await person(town, ann).ok("GET", asked) == {"online": {ann: True, bob: True}}
        refused = await strangers.read(talk, 1)
        unknown = await strangers.read("g:nobody", 1)
        assert (refused.Code, refused.Msg) == (unknown.Code, unknown.Msg) == (Code.NOT_A_MEMBER, refused.Msg)
        assert not strangers.heard
        assert not strangers.typing
        assert not hers.typing


async def test_the_programs_of_the_pages_print_what_the_pages_say(town: LocalCluster) -> None:
    page = (ROOT / "docs" / "read-state.md").read_text(encoding="utf-8")
    program, output = re.findall(r"```(?:python)?\n(.*?)```", page, re.DOTALL)
    for _ in range(2):  # also where they have talked already
        assert await ran(program, town.api_url, town.token("alice"), town.token("bob")) == output
    (program,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "devices.md").read_text("utf-8"), re.DOTALL)
    async with Device(town, "alice", 1) as first, Device(town, "alice", 2) as second:
        printed = await ran(program, town.api_url, town.token("alice"))
        assert printed == "test -\ntest -\nlogged out: 1\nleft: 1\nalice is online: True\n"
        await until(lambda: second.kicked == Code.KICKED)
        await until(first.live.is_set)
        assert not first.kicked


async def ran(program: str, *arguments: str) -> str:
    """What a program of a page prints."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", program, *arguments, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    out, err = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode == 0, err.decode()
    return out.decode()
