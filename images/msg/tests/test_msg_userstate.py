"""What a user's devices share, against a real PostgreSQL: positions rise and stay within what is there, versions have no
gaps, every device is told, and what nobody was told of is told again."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager

import pytest
from msg_harness import Cluster, Node, cluster, until
from plato.core.codes import Code
from plato.core.conversations import dialogue_id
from plato.core.errors import Unavailable
from plato.ports import Position, Reading, Typing
from plato.wire.v1 import client_pb2 as wire
from plato_msg import userstate
from plato_msg.userstate import UserStates
from plato_msg.userstate_pg import ENTRIES

ALICE_BOB = dialogue_id("alice", "bob")


async def fill(
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


def states_of(c: Cluster, *nodes: Node) -> list[UserStates]:
    return [node.service.states for node in nodes]


@asynccontextmanager
async def running(postgres_uri: str) -> AsyncIterator[tuple[Cluster, UserStates]]:
    """A cluster with one process, without its pipeline."""
    async with cluster(postgres_uri) as c:
        node = c.build()
        tasks = [asyncio.create_task(node.service.downlink.run())]
        await asyncio.sleep(0)
        tasks.append(asyncio.create_task(node.service.states.run()))
        try:
            yield c, node.service.states
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
    async with running(postgres_uri) as (c, states):
        await fill(c, "g:x", ["bob"] * 5, {"alice": 0, "bob": 0})
        assert await read_one(states, "alice", "g:x", 3) == (Code.OK, 3)
        assert await read_one(states, "alice", "g:x", 2) == (Code.OK, 3)
        assert await read_one(states, "alice", "g:x", 99) == (Code.OK, 5)
        assert (await states.since("alice", 0)).version == 2, "what changes nothing raises no version"


async def test_strangers_and_nobodys_conversations_are_refused_alike(postgres_uri: str) -> None:
    async with running(postgres_uri) as (c, states):
        await fill(c, "g:x", ["bob"], {"bob": 0})
        asked = [("g:x", 1), ("g:none", 1), ("", 1), ("g:x", 0)]
        answers = await states.read([Reading("eve", conversation_id, seq) for conversation_id, seq in asked])
        refused = Position(Code.NOT_A_MEMBER, 0)
        assert answers == [refused, refused, Position(Code.BAD_CONVERSATION, 0), Position(Code.BAD_RANGE, 0)]
        assert await states.pin("eve", "g:x", True) == await states.pin("eve", "g:none", True)
        assert await states.readers("eve", "g:x", 1) == await states.readers("eve", "g:none", 1)
        assert await states.conversation("eve", "g:x") == await states.conversation("eve", "g:none")
        assert await c.fetch("SELECT count(*) FROM im_user") == [0]


async def test_every_device_of_a_user_is_told_numbered_by_versions(postgres_uri: str) -> None:
    async with running(postgres_uri) as (c, states):
        await fill(c, ALICE_BOB, ["bob", "bob"], {"alice": 0, "bob": 0}, kind="dialogue")
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
