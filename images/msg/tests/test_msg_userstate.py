"""What a user's devices share, against a real PostgreSQL: positions rise and stay within what is there, versions have no
gaps, every device is told, and what nobody was told of is told again."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import pytest
from msg_harness import Cluster, cluster, until, written
from plato.core.codes import Code
from plato.core.conversations import dialogue_id
from plato.ports import Position, Reading, Typing
from plato.wire.v1 import client_pb2 as wire
from plato_msg import userstate
from plato_msg.history import History
from plato_msg.userstate import FOREVER_MS, UserStates
from plato_msg.userstate_pg import ENTRIES

ALICE_BOB = dialogue_id("alice", "bob")


@asynccontextmanager
async def running(postgres_uri: str, processes: int = 1) -> AsyncIterator[tuple[Cluster, list[UserStates]]]:
    """A cluster with msg processes, without their pipelines."""
    async with cluster(postgres_uri) as c:
        services = [c.build(f"msg-{n}").service for n in range(processes)]
        tasks = [asyncio.create_task(service.downlink.run()) for service in services]
        await asyncio.sleep(0)
        tasks += [asyncio.create_task(service.states.run()) for service in services]
        try:
            yield c, [service.states for service in services]
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


def told(c: Cluster, conn_id: int) -> list[wire.StateMsg]:
    """The STATEs that a connection got."""
    cmds = [wire.MsgCmd.FromString(p.frame) for p in c.shards.taken[conn_id]]
    return [wire.StateMsg.FromString(cmd.Payload) for cmd in cmds if cmd.Type == wire.STATE]


def hints(c: Cluster, conn_id: int) -> list[tuple[str, str, int]]:
    """The READs that a connection got: (who, conversation, seq)."""
    cmds = [wire.MsgCmd.FromString(p.frame) for p in c.shards.taken[conn_id]]
    reads = [wire.ReadMsg.FromString(cmd.Payload) for cmd in cmds if cmd.Type == wire.READ]
    return [(read.user, read.conversation_id, read.seq) for read in reads]


async def read_one(states: UserStates, user: str, conversation_id: str, seq: int) -> tuple[int, int]:
    (position,) = await states.read([Reading(user, conversation_id, seq)])
    return position.code, position.seq


async def test_a_position_rises_is_clamped_and_never_falls(postgres_uri: str) -> None:
    async with running(postgres_uri) as (c, [states]):
        await written(c, "g:x", ["bob"] * 5, {"alice": 0, "bob": 0})
        assert await read_one(states, "alice", "g:x", 3) == (Code.OK, 3)
        assert await read_one(states, "alice", "g:x", 2) == (Code.OK, 3)
        assert await read_one(states, "alice", "g:x", 99) == (Code.OK, 5)
        assert (await states.since("alice", 0)).version == 2, "what changes nothing raises no version"


async def test_strangers_and_nobodys_conversations_are_refused_alike(postgres_uri: str) -> None:
    async with running(postgres_uri) as (c, [states]):
        await written(c, "g:x", ["bob"], {"bob": 0})
        asked = [("g:x", 1), ("g:none", 1), ("", 1), ("g:x", 0)]
        answers = await states.read([Reading("eve", conversation_id, seq) for conversation_id, seq in asked])
        refused = Position(Code.NOT_A_MEMBER, 0)
        assert answers == [refused, refused, Position(Code.BAD_CONVERSATION, 0), Position(Code.BAD_RANGE, 0)]
        assert await states.pin("eve", "g:x", True) == await states.pin("eve", "g:none", True)
        assert await states.readers("eve", "g:x", 1) == await states.readers("eve", "g:none", 1)
        assert await states.conversation("eve", "g:x") == await states.conversation("eve", "g:none")
        assert await c.fetch("SELECT count(*) FROM im_user") == [0]


async def test_every_device_of_a_user_is_told_numbered_by_versions(postgres_uri: str) -> None:
    async with running(postgres_uri) as (c, [states]):
        await written(c, ALICE_BOB, ["bob", "bob"], {"alice": 0, "bob": 0}, kind="dialogue")
        phone, desk = c.connect("alice", 1), c.connect("alice", 2, shard="s1")
        bobs = c.connect("bob", 1)
        assert await read_one(states, "alice", ALICE_BOB, 2) == (Code.OK, 2)
        await states.pin("alice", ALICE_BOB, True)
        for conn_id in (phone, desk):
            first, second = told(c, conn_id)
            assert (first.prev_version, first.version, second.prev_version, second.version) == (0, 1, 1, 2)
            assert first.conversations[0].read_seq == 2
            assert second.conversations[0].pinned_at_ms
        (theirs,) = told(c, bobs)
        assert theirs.conversations[0].peer_read_seq == 2, "a dialogue's other user keeps it as well"
        await until(lambda: hints(c, bobs) == [("alice", ALICE_BOB, 2)])
        assert hints(c, phone) == []


async def test_what_is_cleared_hidden_and_muted_stands_once_and_for_all_devices(postgres_uri: str) -> None:
    async with running(postgres_uri) as (c, [states]):
        await written(c, "g:x", ["bob"] * 5, {"alice": 2, "bob": 0}, left={"carol": 3})
        cleared = await states.clear("alice", "g:x", 4)
        assert cleared.state is not None
        assert cleared.state.cleared_seq == 4
        assert (await states.clear("alice", "g:x", 1)).state == cleared.state, "it only rises"
        assert (await states.hide("alice", "g:x", [1, 2, 3, 5, 9])).code == Code.OK
        until_ms = 4_102_444_800_123
        muted = await states.mute("alice", "g:x", until_ms)
        assert muted.state is not None
        assert muted.state.muted_until_ms == until_ms
        await states.mute("alice", "g:x", FOREVER_MS)
        assert (await states.mute("alice", "g:x", FOREVER_MS + 1)).code == Code.BAD_RANGE
        assert (await states.hide("alice", "g:x", [])).code == Code.BAD_RANGE
        state = await states.since("alice", 0)
        assert [(h.conversation_id, h.seq) for h in state.hidden] == [("g:x", 3), ("g:x", 5)], "only what may be read"
        assert (state.version, state.prev_version, state.more) == (4, 0, False)
        assert state.conversations[0].muted_until_ms == FOREVER_MS
        assert not (await states.since("alice", 4)).conversations
        assert await states.since("alice", 99) == state, "a version that never was is none"
        assert await read_one(states, "carol", "g:x", 9) == (Code.OK, 3), "who left reads up to the leave"
        await asyncio.gather(states.pin("bob", "g:x", True), states.pin("bob", "g:x", False))
        assert not (await states.since("bob", 0)).conversations, "the last word of a batch counts"


async def test_a_page_of_changes_ends_between_versions(postgres_uri: str) -> None:
    """Many entries in one transaction become several versions; all of them come, page by page."""
    async with running(postgres_uri) as (c, [states]):
        groups = [f"g:{n:03}" for n in range(2 * ENTRIES + 30)]
        async with c._database.connection() as connection:
            await connection.execute(
                "INSERT INTO im_conversation (conversation_id, kind, last_seq)"
                " SELECT g, 'group', 9 FROM unnest($1::text[]) g",
                groups,
            )
            await connection.execute(
                "INSERT INTO im_member (conversation_id, user_id) SELECT g, 'alice' FROM unnest($1::text[]) g", groups
            )
        phone = c.connect("alice")
        await states.read([Reading("alice", group, 9) for group in groups])
        frames = told(c, phone)
        assert [(s.prev_version, s.version) for s in frames] == [(0, 1), (1, 2), (2, 3)]
        version, seen, pages = 0, set(), 0
        while True:
            page = await states.since("alice", version, limit=1)
            assert len(page.conversations) <= ENTRIES + 1
            seen |= {entry.conversation_id for entry in page.conversations}
            assert page.version > version
            version, pages = page.version, pages + 1
            if not page.more:
                break
        assert (version, seen, pages) == (3, set(groups), 3)


async def test_r2_a_device_that_was_away_has_all_after_its_sync(postgres_uri: str) -> None:
    async with running(postgres_uri) as (c, [states]):
        await written(c, ALICE_BOB, ["bob"] * 3, {"alice": 0, "bob": 0}, kind="dialogue")
        history = History(c.build("msg-9").service.history._store, max_frame_bytes=65_536)
        history.states = states
        await states.pin("alice", ALICE_BOB, True)
        await read_one(states, "alice", ALICE_BOB, 2)
        page = await history.sync("alice", wire.SyncMsg(ref=1, want_state=True))
        assert [item.conversation_id for item in page.items] == [ALICE_BOB]
        assert (page.state.version, page.state.conversations[0].read_seq) == (2, 2)
        assert page.state.conversations[0].pinned_at_ms
        assert not (await history.sync("alice", wire.SyncMsg(ref=2))).HasField("state"), (
            "who does not want it gets none"
        )
        newer = await history.sync("alice", wire.SyncMsg(ref=3, want_state=True, state_version=2))
        assert (newer.state.version, len(newer.state.conversations)) == (2, 0)


async def test_positions_are_monotonic_and_clamped_under_any_order_of_requests(postgres_uri: str) -> None:
    """Three processes, two users of a dialogue and of a group, every request several times and in any order."""
    chance = random.Random(7)
    async with running(postgres_uri, 3) as (c, processes):
        last = {ALICE_BOB: 9, "g:x": 6}
        await written(c, ALICE_BOB, ["bob"] * 9, {"alice": 0, "bob": 0}, kind="dialogue")
        await written(c, "g:x", ["bob"] * 6, {"alice": 0, "bob": 0})
        devices = {(user, n): c.connect(user, n, shard=f"s{n}") for user in ("alice", "bob") for n in (0, 1)}
        asked = [
            Reading(user, conversation, chance.randint(1, 12))
            for user in ("alice", "bob")
            for conversation in last
            for _ in range(15)
        ] * 2
        chance.shuffle(asked)
        answers: dict[tuple[str, str], list[tuple[int, int]]] = {}

        async def worker(states: UserStates, mine: list[Reading]) -> None:
            for reading in mine:
                (position,) = await states.read([reading])
                assert position.code == Code.OK
                answers.setdefault((reading.user, reading.conversation_id), []).append((reading.seq, position.seq))

        await asyncio.gather(*(worker(processes[n % 3], asked[n::12]) for n in range(12)))
        for (_, conversation), pairs in answers.items():
            assert all(min(seq, last[conversation]) <= stands <= last[conversation] for seq, stands in pairs)
        for user in ("alice", "bob"):
            state = await processes[0].since(user, 0)
            best = {conv: max(min(seq, last[conv]) for seq, _ in answers[user, conv]) for conv in last}
            assert {entry.conversation_id: entry.read_seq for entry in state.conversations} == best
            for n in (0, 1):
                frames = [s for s in told(c, devices[user, n]) if s.prev_version < s.version]
                frames.sort(key=lambda s: s.version)
                versions = list(dict.fromkeys((s.prev_version, s.version) for s in frames))
                assert versions == [(v - 1, v) for v in range(1, state.version + 1)], "each version was told"
                for conversation in last:
                    positions = [
                        e.read_seq for s in frames for e in s.conversations if e.conversation_id == conversation
                    ]
                    assert positions == sorted(positions)
                    assert positions[-1] == best[conversation]


async def test_what_nobody_was_told_of_is_told_at_the_repeat(postgres_uri: str) -> None:
    """A process dies between its commit and its fan-out. The client has no answer, and asks another one."""
    async with running(postgres_uri, 2) as (c, [states, dying]):
        await written(c, ALICE_BOB, ["bob"] * 3, {"alice": 0, "bob": 0}, kind="dialogue")
        await states.pin("alice", ALICE_BOB, True)
        phone, bobs = c.connect("alice"), c.connect("bob")

        async def hang(users: Sequence[str]) -> None:
            await asyncio.Event().wait()

        c.routes.on_read = hang
        looks = len(c.routes.reads)
        lost = asyncio.create_task(dying.read([Reading("alice", ALICE_BOB, 3)]))
        await until(lambda: len(c.routes.reads) > looks)  # it has committed, and is held for good
        c.routes.on_read = lambda users: None
        lost.cancel()
        assert not told(c, phone)
        for _ in range(2):
            assert await read_one(states, "alice", ALICE_BOB, 3) == (Code.OK, 3)
        # Which version there is, and nothing of it: a device that has an older one has missed something, and syncs.
        assert told(c, phone) == [wire.StateMsg(version=2, prev_version=2)], "and once"
        assert told(c, bobs) == [wire.StateMsg(version=1, prev_version=1)]


async def test_authors_of_what_was_newly_read_are_told_the_latest_twenty(postgres_uri: str) -> None:
    async with running(postgres_uri) as (c, [states]):
        authors = [f"u{n:02}" for n in range(30)]
        members = dict.fromkeys([*authors, "alice"], 0)
        del members["u29"]
        await written(c, "g:x", [*authors, "alice", "u10"], members, left={"u29": 31})
        conn_ids = {user: c.connect(user) for user in [*authors, "alice"]}
        await read_one(states, "alice", "g:x", 99)
        latest = [f"u{n}" for n in range(10, 29)]
        await until(lambda: all(hints(c, conn_ids[user]) for user in latest))
        heard = [user for user, conn_id in conn_ids.items() if hints(c, conn_id)]
        # The latest twenty are u10 and u29 to u11; of them u29 has left.
        assert heard == latest
        assert hints(c, conn_ids["u10"]) == [("alice", "g:x", 32)]
        await read_one(states, "alice", "g:x", 99)
        await read_one(states, "bob", "g:x", 1)
        assert hints(c, conn_ids["u10"]) == [("alice", "g:x", 32)], "a repeat and a stranger tell nobody"


async def test_an_author_is_not_told_of_thousands_who_open_a_group_at_once(postgres_uri: str) -> None:
    async with running(postgres_uri) as (c, [states]):
        members = [f"u{n}" for n in range(100)]
        await written(c, "g:x", ["bob"], dict.fromkeys([*members, "bob"], 0))
        bobs = c.connect("bob")
        await states.read([Reading(user, "g:x", 1) for user in members])
        await until(lambda: len(hints(c, bobs)) >= userstate.READS_HEARD)
        assert len(hints(c, bobs)) == userstate.READS_HEARD
        assert await states.read_counts("bob", "g:x", [1]) == {1: 100}


async def test_typing_reaches_members_who_are_online_and_nobody_of_a_large_group(postgres_uri: str) -> None:
    async with running(postgres_uri) as (c, [states]):
        await written(c, "g:x", ["bob"], dict.fromkeys(("alice", "bob", "carol"), 0), left={"dave": 1})
        await written(c, "g:large", ["bob"], dict.fromkeys([f"u{n}" for n in range(500)] + ["alice", "bob"], 0))
        conn_ids = {user: c.connect(user) for user in ("alice", "bob", "dave", "eve")}

        def typed(user: str) -> list[tuple[str, str, bool]]:
            cmds = [wire.MsgCmd.FromString(p.frame) for p in c.shards.taken[conn_ids[user]]]
            found = [wire.TypingMsg.FromString(cmd.Payload) for cmd in cmds if cmd.Type == wire.TYPING]
            return [(t.user, t.conversation_id, t.stopped) for t in found]

        where = [
            ("alice", "g:x"),
            ("eve", "g:x"),
            ("dave", "g:x"),
            ("alice", "g:large"),
            ("alice", "g:no"),
            ("alice", ""),
        ]
        await states.typing([Typing(user, conversation, False) for user, conversation in where])
        await states.typing([Typing("alice", "g:x", True)])
        await until(lambda: len(typed("bob")) == 2)
        assert typed("bob") == [("alice", "g:x", False), ("alice", "g:x", True)]
        assert not typed("alice") + typed("dave") + typed("eve")
        c.shards.away = {"s0"}
        await states.typing([Typing("alice", "g:x", False)])
        await until(lambda: not states._teller._hints)
        assert await c.fetch("SELECT shard FROM bus_dirty") == [], "a signal that is lost is no doubt"


async def test_r7_a_state_that_no_shard_took_makes_it_dirty_before_the_answer(postgres_uri: str) -> None:
    async with running(postgres_uri) as (c, [states]):
        await written(c, "g:x", ["bob"], {"alice": 0})
        c.connect("alice")
        c.shards.away = {"s0"}
        await read_one(states, "alice", "g:x", 1)
        assert await c.fetch("SELECT shard FROM bus_dirty") == ["s0"]


async def test_more_changes_than_may_wait_are_put_off(postgres_uri: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(userstate, "WAITING", 2)
    async with running(postgres_uri) as (c, [states]):
        await written(c, "g:x", ["bob"], {"alice": 0})
        answers = await asyncio.gather(*(read_one(states, "alice", "g:x", 1) for _ in range(5)), return_exceptions=True)
        assert [a for a in answers if not isinstance(a, Exception)] == [(Code.OK, 1)] * 2
