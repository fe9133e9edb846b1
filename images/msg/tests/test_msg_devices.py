"""Devices: who is connected, what a kick ends, who may know who is online; and that a push to one's other devices waits for
no read."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from msg_harness import Cluster, cluster, until, up, written
from plato.core.codes import Code
from plato.core.conversations import dialogue_id
from plato.core.ids import slot_of, stamp_ms_of
from plato.fakes.store import FakeSessionStore
from plato.ports import Fence, Route, Session
from plato.router import Router
from plato_msg.devices import Device, Devices

FENCE = Fence(1, 1, "t", "s0")


def devices_of(c: Cluster) -> Devices:
    return Devices(c._database, Router(c.routes), FakeSessionStore(c.memory), c.shards, c.topology)


async def session(c: Cluster, user: str, device_id: int) -> int:
    """A device with a session; its conn_id."""
    conn_id = c.connect(user, device_id)
    store, slot = FakeSessionStore(c.memory), slot_of(conn_id)
    await store.acquire({slot: FENCE}, {slot: None})
    gen = c.memory.routes[user, device_id].gen
    await store.put(slot, FENCE, [Session(conn_id, user, device_id, b"s", gen, False, f"os{device_id}", "wifi")])
    return conn_id


async def test_a_kick_ends_what_it_names_and_tells_the_shard(postgres_uri: str) -> None:
    async with cluster(postgres_uri) as c:
        devices = devices_of(c)
        conn_ids = {n: await session(c, "alice", n) for n in (1, 2, 3)}
        bobs = await session(c, "bob", 1)
        c.memory.routes["alice", 4] = Route(0, 9)  # logged out long ago
        assert await devices.of("alice") == [Device(n, f"os{n}", "wifi", stamp_ms_of(conn_ids[n])) for n in (1, 2, 3)]
        assert await devices.kick("alice", device_id=2) == [2]
        assert await devices.kick("alice", device_id=2) == [], "it has none any more"
        assert await devices.kick("alice", keep=3) == [1]
        assert [device.device_id for device in await devices.of("alice")] == [3]
        assert c.shards.told_replaced == [("s0", conn_ids[n], 0, Code.KICKED) for n in (2, 1)]
        assert await devices.kick("alice") == [3]
        assert await devices.of("alice") == []
        assert c.memory.routes["bob", 1].conn_id == bobs, "nobody else's"
        assert all(not c.memory.routes["alice", n].conn_id for n in (1, 2, 3, 4))


async def test_a_kick_meets_the_session_that_stands_and_needs_no_shard(postgres_uri: str) -> None:
    async with cluster(postgres_uri) as c:
        devices = devices_of(c)
        await session(c, "alice", 1)
        read_many = c.routes.read_many
        raced: list[int] = []

        async def read_then_race(users: Sequence[str]) -> list[dict[int, Route]]:
            routes = await read_many(users)
            if not raced:
                raced.append(c.connect("alice", 1))  # it commits again between our look and our write
            return routes

        c.routes.read_many = read_then_race  # type: ignore[method-assign]  # a login in between
        c.shards.away = {"s0"}
        assert await devices.kick("alice") == [1]
        assert c.memory.routes["alice", 1].conn_id == 0
        assert raced


async def test_online_is_told_to_who_shares_a_conversation_or_is_a_friend(postgres_uri: str) -> None:
    async with cluster(postgres_uri) as c:
        devices = devices_of(c)
        await written(c, dialogue_id("alice", "bob"), ["bob"], {"alice": 0, "bob": 0}, kind="dialogue")
        await written(c, "g:x", ["bob"], dict.fromkeys(("alice", "carol", "blocker"), 0), left={"gone": 1})
        await c.execute(
            "INSERT INTO im_friend (user_id, other_id, version, relation, blocked) VALUES ('alice', 'friend', 1, 3, false),"
            " ('alice', 'asked', 1, 1, false), ('blocker', 'alice', 1, 0, true)"
        )
        for user in ("bob", "friend", "asked", "eve", "gone", "blocker"):
            c.connect(user)
        c.memory.routes["carol", 1] = Route(0, 9)
        asked = ["bob", "carol", "friend", "asked", "eve", "gone", "blocker", "nobody", "", "bob"]
        known = {"bob": True, "carol": False, "friend": True, "blocker": False}
        assert await devices.online("alice", asked) == known
        assert await devices.online("eve", asked) == {}


async def test_a_push_to_the_senders_other_devices_waits_for_no_read(postgres_uri: str) -> None:
    """What a device sends goes to the others from the batch that stored it: every connection for reads is taken here, as
    where a replica that answers them lags or is away."""
    async with cluster(postgres_uri) as c:
        node = await c.start()
        await until(lambda: not node.service.not_ready())
        reads = node.databases[1]
        taken = [reads.connection() for _ in range(reads._free._value)]
        await asyncio.gather(*(connection.__aenter__() for connection in taken))
        assert reads._free.locked()
        phone, desk = c.connect("alice", 1), c.connect("alice", 2)
        await c.send(up("alice", "bob", device_id=1))
        await until(lambda: bool(c.pushes(desk)) and bool(c.receipts(phone)))
        assert reads._free.locked()
        for connection in taken:
            await connection.__aexit__(None, None, None)
