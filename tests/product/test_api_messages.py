"""The HTTP API of people and application servers on a real cluster: what is sent, read, changed and listed."""

from __future__ import annotations

import base64
import uuid
from collections.abc import Callable, Iterator

import pytest
from plato.core.codes import Code
from plato.core.conversations import dialogue_id
from plato.local.cluster import LocalCluster

from tests.product.api import Api, person, quoted, server

SETTINGS = {"gateway.workers": 1, "msg.events": "true"}
pytestmark = pytest.mark.timeout(120)
MESSAGES = "/v1/messages"


@pytest.fixture(scope="module")
def town(new_cluster: Callable[..., LocalCluster]) -> Iterator[LocalCluster]:
    made = new_cluster(SETTINGS)
    yield made
    made.down()


def fresh(*names: str) -> list[str]:
    """Users that no other test knows."""
    tail = uuid.uuid4().hex[:8]
    return [f"{name}-{tail}" for name in names]


async def said(api: Api, to: str, text: str) -> str:
    """Sends; returns its msg_id."""
    return str((await api.ok("POST", MESSAGES, {"to": to, "text": text}))["msg_id"])


async def test_what_is_sent_is_read_by_both_and_by_nobody_else(town: LocalCluster) -> None:
    alice, bob, eve = fresh("alice", "bob", "eve")
    a, b = person(town, alice), person(town, bob)
    sent = await a.told("POST", MESSAGES, {"to": bob, "text": "hello 你好"})
    assert sent.status == 201
    conversation_id = dialogue_id(alice, bob)
    assert sent.body["conversation_id"] == conversation_id
    assert sent.body["seq"] == 1
    path = f"/v1/conversations/{quoted(conversation_id)}/messages"
    for reader in (a, b):
        page = await reader.ok("GET", path)
        (message,) = page["messages"]
        assert (message["text"], message["from"], message["msg_id"]) == ("hello 你好", alice, sent.body["msg_id"])
        assert (page["covered_from"], page["covered_to"], page["newest_seq"]) == (1, 1, 1)
        assert await reader.ok("GET", f"{MESSAGES}/{message['msg_id']}") == message
    await person(town, eve).refused(404, Code.NOT_A_MEMBER, "GET", path)
    await person(town, eve).refused(404, Code.MESSAGE_UNKNOWN, "GET", f"{MESSAGES}/{sent.body['msg_id']}")


async def test_a_message_that_is_sent_again_is_stored_once(town: LocalCluster) -> None:
    alice, bob = fresh("alice", "bob")
    a = person(town, alice)
    body = {"to": bob, "text": "once", "client_msg_id": str(uuid.uuid4())}
    first = await a.ok("POST", MESSAGES, body)
    assert await a.ok("POST", MESSAGES, body) == first
    keyed = [
        await a.ok("POST", MESSAGES, {"to": bob, "text": "keyed"}, {"Idempotency-Key": "order-17"}) for _ in range(2)
    ]
    assert keyed[0] == keyed[1]
    page = await a.ok("GET", f"/v1/conversations/{quoted(first['conversation_id'])}/messages")
    assert [m["text"] for m in page["messages"]] == ["once", "keyed"]


async def test_a_rich_message_quotes_what_it_answers_and_foreign_bodies_come_back_as_they_were(
    town: LocalCluster,
) -> None:
    alice, bob = fresh("alice", "bob")
    a, b = person(town, alice), person(town, bob)
    question = await said(a, bob, "who?")
    rich = {"text": "me", "reply_to": question, "mentions": [alice]}
    answer = await b.ok("POST", MESSAGES, {"to": alice, "rich": rich})
    found = await a.ok("GET", f"{MESSAGES}/{answer['msg_id']}")
    assert found["reply"] == {"msg_id": question, "seq": 1, "from": alice, "text": "who?"}
    assert (found["text"], found["mentions"], found["type"]) == ("me", [alice], 1)
    raw = bytes(range(256))
    own = await a.ok("POST", MESSAGES, {"to": bob, "type": 7, "body": base64.b64encode(raw).decode()})
    shown = await b.ok("GET", f"{MESSAGES}/{own['msg_id']}")
    assert (shown["type"], base64.b64decode(shown["body"])) == (7, raw)
    await b.refused(
        404, Code.MESSAGE_UNKNOWN, "POST", MESSAGES, {"to": "eve", "rich": {"text": "?", "reply_to": question}}
    )


async def test_edit_recall_and_hide(town: LocalCluster) -> None:
    alice, bob = fresh("alice", "bob")
    a, b = person(town, alice), person(town, bob)
    first, second, third = [await said(a, bob, text) for text in ("teh", "secret", "loud")]
    await a.ok("PATCH", f"{MESSAGES}/{first}", {"text": "the"})
    found = await b.ok("GET", f"{MESSAGES}/{first}")
    assert (found["text"], found["edited"]) == ("the", True)
    await b.refused(403, Code.NOT_ALLOWED, "PATCH", f"{MESSAGES}/{first}", {"text": "mine"})
    await b.refused(403, Code.NOT_ALLOWED, "DELETE", f"{MESSAGES}/{second}")
    await a.ok("DELETE", f"{MESSAGES}/{second}")
    found = await b.ok("GET", f"{MESSAGES}/{second}")
    assert found["recalled"]
    assert "text" not in found
    await b.ok("DELETE", f"{MESSAGES}/{third}?for=me")
    assert (await a.ok("GET", f"{MESSAGES}/{third}"))["text"] == "loud"
    page = await a.ok("GET", f"/v1/conversations/{quoted(dialogue_id(alice, bob))}/messages?from_seq=4")
    kinds = [m["operation"]["kind"] for m in page["messages"]]
    assert kinds == ["edit", "recall"]
    assert [m["operation"]["msg_id"] for m in page["messages"]] == [first, second]


async def test_the_list_counts_what_is_unread_and_read_pin_mute_and_clear_change_it(town: LocalCluster) -> None:
    alice, bob, carol = fresh("alice", "bob", "carol")
    a, b = person(town, alice), person(town, bob)
    await said(b, alice, "one")
    await said(b, alice, "two")
    await said(person(town, carol), alice, "three")
    listed = await a.ok("GET", "/v1/conversations")
    assert [(c["peer"], c["unread"], c["last"]["text"]) for c in listed["conversations"]] == [
        (carol, 1, "three"),
        (bob, 2, "two"),
    ]
    assert listed["unread"] == 3
    path = f"/v1/conversations/{quoted(dialogue_id(alice, bob))}"
    assert await a.ok("PUT", f"{path}/read", {"seq": 99}) == {"read_seq": 2}
    assert await a.ok("PUT", f"{path}/read", {"seq": 1}) == {"read_seq": 2}
    assert await b.ok("GET", f"{path}/readers?seq=2") == {"users": [alice], "more": False}
    assert (await b.ok("GET", f"{path}/read_counts?seqs=1&seqs=2"))["counts"] == {"1": 1, "2": 1}
    assert (await a.ok("PUT", f"{path}/pin", {"pinned": True}))["pinned_at"] > 0
    assert (await a.ok("PUT", f"{path}/mute", {}))["muted_until"] > 0
    first = await a.ok("GET", "/v1/conversations?limit=1")
    assert [c["peer"] for c in first["conversations"]] == [bob]
    rest = await a.ok("GET", f"/v1/conversations?limit=1&cursor={first['cursor']}")
    assert [c["peer"] for c in rest["conversations"]] == [carol]
    await a.ok("DELETE", path)
    assert [c["peer"] for c in (await a.ok("GET", "/v1/conversations"))["conversations"]] == [carol]
    assert (await b.ok("GET", path))["newest_seq"] == 2


async def test_a_group_is_led_by_its_maker_and_read_by_its_members(town: LocalCluster) -> None:
    alice, bob, carol, eve = fresh("alice", "bob", "carol", "eve")
    a, b, c = (person(town, user) for user in (alice, bob, carol))
    made = await a.ok("POST", "/v1/groups", {"title": "Tea", "members": [bob]})
    path = f"/v1/groups/{quoted(made['conversation_id'])}"
    group = await b.ok("GET", path)
    assert (group["title"], group["owner"], group["members"], group["role"]) == ("Tea", alice, 2, "member")
    await b.refused(403, Code.NOT_ALLOWED, "PATCH", path, {"title": "Coffee"})
    await a.ok("PATCH", path, {"title": "Coffee"})
    await a.ok("POST", f"{path}/members", {"users": [carol, eve]})
    await a.ok("PUT", f"{path}/roles/{bob}", {"role": "administrator"})
    await b.ok("DELETE", f"{path}/members/{eve}")
    members = await c.ok("GET", f"{path}/members")
    assert {m["user"]: m["role"] for m in members["members"]} == {
        alice: "owner",
        bob: "administrator",
        carol: "member",
    }
    await c.ok("POST", f"{path}/leave")
    left = await c.ok("GET", path)
    assert left["left"]
    await c.refused(404, Code.NOT_A_MEMBER, "GET", f"{path}/members")
    kinds = [
        m["operation"]["kind"]
        for m in (await a.ok("GET", f"/v1/conversations/{quoted(made['conversation_id'])}/messages"))["messages"]
    ]
    assert kinds == ["group_create", "group_rename", "group_add", "group_role", "group_remove", "group_leave"]


async def test_a_server_acts_for_whom_it_names_and_with_authority_for_nobody(town: LocalCluster) -> None:
    alice, bob = fresh("alice", "bob")
    shop, for_alice = server(town), server(town, alice)
    sent = await for_alice.ok("POST", MESSAGES, {"to": bob, "text": "from the shop"})
    assert (await person(town, bob).ok("GET", f"{MESSAGES}/{sent['msg_id']}"))["from"] == alice
    assert (await shop.ok("GET", f"{MESSAGES}/{sent['msg_id']}"))["text"] == "from the shop"
    await shop.refused(400, Code.MALFORMED, "POST", MESSAGES, {"to": bob, "text": "?"})
    said = await for_alice.refused(400, Code.BAD_TO_USER, "POST", MESSAGES, {"to": "admin", "text": "anybody?"})
    assert "administrators" in said["detail"], "nobody could ever read it"
    await shop.ok("DELETE", f"{MESSAGES}/{sent['msg_id']}")
    name = f"shop/{uuid.uuid4().hex[:8]}"
    made = await server(town, alice).ok("POST", "/v1/groups", {"name": name, "members": [bob], "title": "Sale"})
    assert made["conversation_id"] == f"g:{name}"
    group = await person(town, bob).ok("GET", f"/v1/groups/{quoted(f'g:{name}')}")
    assert (group["owner"], group["title"]) == (alice, "Sale")
    other = Api(town.api_url, town.token(alice), bob)
    await other.refused(403, Code.NOT_ALLOWED, "GET", "/v1/conversations")
    await person(town, alice).refused(403, Code.NOT_ALLOWED, "POST", f"/v1/users/{bob}/kick")
    assert await shop.ok("POST", f"/v1/users/{bob}/kick") == {"device_ids": []}


async def test_the_feed_has_every_message_once_in_order(town: LocalCluster) -> None:
    alice, bob = fresh("alice", "bob")
    a, shop = person(town, alice), server(town)
    cursor = (await shop.ok("GET", "/v1/events?after=now"))["cursor"]
    for n in range(7):
        await said(a, bob, f"event {n}")
    conversation_id = dialogue_id(alice, bob)
    got: list[str] = []
    while len(got) < 7:
        page = await shop.ok("GET", f"/v1/events?after={cursor}&limit=3&wait_s=5")
        got += [e["text"] for e in page["events"] if e["conversation_id"] == conversation_id]
        cursor = page["cursor"]
    assert got == [f"event {n}" for n in range(7)]
    only = await shop.ok("GET", f"/v1/events?conversation={quoted(conversation_id)}&limit=4")
    rest = await shop.ok("GET", f"/v1/events?conversation={quoted(conversation_id)}&limit=4&after={only['cursor']}")
    assert [e["seq"] for e in only["events"] + rest["events"]] == list(range(1, 8))
    await a.refused(403, Code.NOT_ALLOWED, "GET", "/v1/events")
    await shop.refused(400, Code.MALFORMED, "GET", "/v1/events?after=AQAAAA")
