"""What is sent again by HTTP gets its first answer, whatever happened since. On the ASGI application, without a database."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator, Collection
from typing import Any

import httpx
import pytest
from plato.core.codes import Code
from plato.core.conversations import dialogue_id
from plato.fakes.tokens import FakeTokens
from plato.wire.v1 import content_pb2 as content
from plato.wire.v1.bus_pb2 import Record
from plato_msg.api import app, messages
from plato_msg.api.auth import Door
from plato_msg.conversations import Found
from plato_msg.core.batch import Key, Outcome
from plato_msg.operations import Operations
from plato_msg.store_reads import Message

PAIR = dialogue_id("alice", "bob")
STORED = Outcome(Code.OK, 7_000, 5, 4, 1_800_000_000_000)


class World:
    """Messages as they are, who sees them, outcomes as they stand; records that come get STORED."""

    partitions = 8

    def __init__(self) -> None:
        self.rows = {1: Message(1, 1, 0, "bob", content.TEXT, b"lunch?", b"k" * 16, 1, 0, False)}
        self.rows[2] = self.rows[1]._replace(msg_id=2, seq=2, from_user="alice")
        self.strangers: set[str] = set()
        self.decided: dict[Key, Outcome] = {}
        self.appended = 0

    async def append(self, records: dict[int, list[bytes]]) -> None:
        for values in records.values():
            for value in values:
                self.appended += 1
                r = Record.FromString(value)
                self.decided.setdefault((r.conversation_id, r.from_user, r.client_msg_id), STORED)

    async def outcomes(self, keys: Collection[Key]) -> dict[Key, Outcome]:
        return {key: self.decided[key] for key in keys if key in self.decided}

    async def message(self, user: str | None, msg_id: int) -> Found | None:
        row = self.rows.get(msg_id)
        return Found(PAIR, row) if row is not None and user not in self.strangers else None

    def recall(self, msg_id: int) -> None:
        self.rows[msg_id] = self.rows[msg_id]._replace(recalled=True, body=b"")


@pytest.fixture
def world() -> World:
    return World()


@pytest.fixture
async def alice(world: World) -> AsyncIterator[httpx.AsyncClient]:
    anything: Any = world
    door = Door(FakeTokens(), 1_000, 1_000, lambda: 0.0)
    router = messages.router(Operations(anything, anything), anything, anything, 60_000)
    transport = httpx.ASGITransport(app.application(door, [router]))
    headers = {"Authorization": "Bearer fake:alice"}
    async with httpx.AsyncClient(transport=transport, base_url="http://api", headers=headers) as client:
        yield client


async def again(client: httpx.AsyncClient, world: World, *asked: Any, moves: Any, **more: Any) -> None:
    """Asks, has the world move on, asks the same: the same answer, and nothing new."""
    first = await client.request(*asked, **more)
    assert first.status_code in (200, 201), first.text
    moves()
    second = await client.request(*asked, **more)
    assert (second.status_code, second.json()) == (first.status_code, first.json())
    other = {**more, "headers": {"Idempotency-Key": "another"}}
    if "client_msg_id" in other.get("json", {}):
        other["json"] = {**other["json"], "client_msg_id": str(uuid.uuid4())}
    refused = await client.request(*asked, **other)
    assert (refused.status_code, refused.json()["code"]) == (404, Code.MESSAGE_UNKNOWN), "a new one is refused"


async def test_an_answer_to_a_message_that_was_recalled_since(world: World, alice: httpx.AsyncClient) -> None:
    body = {"to": "bob", "rich": {"text": "yes", "reply_to": "1"}, "client_msg_id": str(uuid.uuid4())}
    await again(alice, world, "POST", "/v1/messages", json=body, moves=lambda: world.recall(1))


async def test_an_edit_that_answers_a_message_that_was_recalled_since(world: World, alice: httpx.AsyncClient) -> None:
    body = {"rich": {"text": "yes", "reply_to": "1"}}
    key = {"Idempotency-Key": "edit"}
    await again(alice, world, "PATCH", "/v1/messages/2", json=body, headers=key, moves=lambda: world.recall(1))


@pytest.mark.parametrize(("method", "body"), [("PATCH", {"text": "new"}), ("DELETE", None)])
async def test_a_change_of_a_message_that_its_author_does_not_see_any_more(
    world: World, alice: httpx.AsyncClient, method: str, body: dict[str, str] | None
) -> None:
    more: dict[str, Any] = {"json": body} if body is not None else {}
    key = {"Idempotency-Key": "change"}
    moves = lambda: world.strangers.add("alice")  # noqa: E731  # used once
    await again(alice, world, method, "/v1/messages/2", headers=key, moves=moves, **more)


async def test_nobody_learns_of_a_message_by_asking_again(world: World, alice: httpx.AsyncClient) -> None:
    world.strangers.add("alice")
    answers = [await alice.delete(f"/v1/messages/{n}", headers={"Idempotency-Key": "x"}) for n in (1, 2, 99)]
    assert len({answer.text for answer in answers}) == 1
    assert not world.appended
