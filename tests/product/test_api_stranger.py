"""A stranger to a conversation gets nothing of it through any door, not even whether it exists; who left gets nothing
of what came after. The test walks every route of openapi.json and every frame type: asked about what is there, and about
what is not, the answers are equal to the byte."""

from __future__ import annotations

import asyncio
import itertools
import json
import re
import urllib.request
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import pytest
from plato.core.conversations import dialogue_id
from plato.local.cluster import LocalCluster
from plato.wire.v1 import client_pb2 as wire
from plato.wire.v1 import content_pb2 as content

from tests.faults.raw import Raw
from tests.product.api import Answer, Api, person, quoted

SETTINGS = {"gateway.workers": 1, "msg.events": "true", "msg.api_user_per_s": 10_000}
pytestmark = pytest.mark.timeout(180)
SECRET_WORD = "xylophone"


@dataclass(frozen=True)
class Place:
    """What a stranger asks about. Fields of one that exists, or of one that never did."""

    conversation_id: str
    msg_id: str
    attachment_id: str
    user: str
    word: str


@pytest.fixture(scope="module")
def town(new_cluster: Callable[..., LocalCluster]) -> Iterator[LocalCluster]:
    made = new_cluster(SETTINGS)
    yield made
    made.down()


def json_body(place: Place, method: str, path: str) -> list[Any]:
    """What is sent to a route that takes JSON: each of these. KeyError: a new route; say here what it is asked."""
    rich = {"text": "?", "reply_to": place.msg_id}
    attached = {"text": "?", "attachments": [{"attachment_id": place.attachment_id}]}
    bodies: dict[str, list[Any]] = {
        "POST /v1/messages": [
            {"conversation_id": place.conversation_id, "text": "?"},
            {"conversation_id": place.conversation_id, "rich": rich},
            {"conversation_id": place.conversation_id, "rich": attached},
            {"to": "somebody", "rich": rich},
            {"to": "somebody", "rich": attached},
        ],
        "PATCH /v1/messages/{msg_id}": [{"text": "?"}, {"rich": rich}],
        "PUT /v1/conversations/{conversation_id}/read": [{"seq": 1}],
        "PUT /v1/conversations/{conversation_id}/pin": [{"pinned": True}],
        "PUT /v1/conversations/{conversation_id}/mute": [{}],
        "POST /v1/groups": [{"name": place.conversation_id.removeprefix("g:")}],
        "PATCH /v1/groups/{conversation_id}": [{"title": "?"}],
        "POST /v1/groups/{conversation_id}/members": [{"users": ["somebody"]}],
        "PUT /v1/groups/{conversation_id}/roles/{user}": [{"role": "owner"}],
        "PUT /v1/me/settings": [{"friends_only": None}],
        "POST /v1/friends/{other}/request": [{}],
    }
    return bodies[f"{method} {path}"]


def filled(path: str, place: Place) -> str:
    """A route's path with its ids."""
    by_name = {
        "conversation_id": quoted(place.conversation_id),
        "msg_id": place.msg_id,
        "attachment_id": place.attachment_id,
        "user": quoted(place.user),
        "other": quoted(place.user),
        "device_id": "7",
    }
    return re.sub(r"\{(\w+)\}", lambda name: by_name[name[1]], path)


def queries(operation: Mapping[str, Any], place: Place) -> list[str]:
    """Query strings: the required parameters alone, and with each of the others that name something."""
    values = {
        "conversation": place.conversation_id,
        "conversation_id": place.conversation_id,
        "users": place.user,
        "seq": "1",
        "seqs": "1",
        "q": place.word,
        "from_user": place.user,
        "after": place.user,
        "for": "me",
        "newest_first": "true",
    }
    given = [p for p in operation.get("parameters", []) if p["in"] == "query"]
    needed = [f"{p['name']}={quoted(values[p['name']])}" for p in given if p.get("required")]
    rest = [f"{p['name']}={quoted(values[p['name']])}" for p in given if not p.get("required") and p["name"] in values]
    return ["&".join(needed), *("&".join([*needed, one]) for one in rest)]


async def walk(api: Api, document: Mapping[str, Any], place: Place, methods: Sequence[str]) -> dict[str, Answer]:
    """Every route once per way to ask it: {what was asked, without ids: the answer}."""
    found = {}
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            if method.upper() not in methods:
                continue
            content_types = operation.get("requestBody", {}).get("content", {})
            bodies: list[Any] = [None]
            if "application/json" in content_types:
                bodies = json_body(place, method.upper(), path)
            elif content_types:
                continue  # an upload names nothing that is there already
            for (n, body), (m, query) in itertools.product(enumerate(bodies), enumerate(queries(operation, place))):
                asked = f"{filled(path, place)}{'?' if query else ''}{query}"
                again = {"Idempotency-Key": f"{path} {n} {m}"}
                answer = await api.ask(method.upper(), asked, body, again)
                while answer.status == 202:  # a matter of time
                    answer = await api.ask(method.upper(), asked, body, again)
                if answer.status >= 400 and method != "head":
                    assert answer.headers["content-type"] == "application/problem+json", f"{method} {path}"
                    assert answer.body["status"] == answer.status
                found[f"{method.upper()} {path} body {n} query {m}"] = answer
    return found


def same(there: Mapping[str, Answer], absent: Mapping[str, Answer]) -> None:
    """Both walks were answered alike."""
    assert there.keys() == absent.keys()
    differing = {
        asked: (a.status, a.raw, absent[asked].status, absent[asked].raw)
        for asked, a in there.items()
        if (a.status, a.raw, headers(a)) != (absent[asked].status, absent[asked].raw, headers(absent[asked]))
    }
    assert not differing


def headers(answer: Answer) -> dict[str, str]:
    """Without the clock's."""
    return {name: value for name, value in answer.headers.items() if name not in ("date", "last-modified")}


@dataclass
class World:
    """Conversations of alice and bob, which a stranger knows by name alone."""

    alice: Api
    document: dict[str, Any]
    there: list[Place]
    absent: list[Place]


@pytest.fixture(scope="module")
def world(town: LocalCluster) -> World:
    return asyncio.run(made(town))


async def made(town: LocalCluster) -> World:
    """Something in a group and in a dialogue, and the same shapes of what never was."""
    tail = uuid.uuid4().hex[:8]
    alice, bob = f"alice-{tail}", f"bob-{tail}"
    a = person(town, alice)
    picture = await asyncio.to_thread(upload, a)
    rich = {"text": f"the {SECRET_WORD}", "attachments": [{"attachment_id": picture}]}
    group = await a.ok("POST", "/v1/groups", {"title": "Tea", "members": [bob]})
    in_group = await a.ok("POST", "/v1/messages", {"conversation_id": group["conversation_id"], "rich": rich})
    in_dialogue = await a.ok("POST", "/v1/messages", {"to": bob, "rich": rich})
    there = [
        Place(sent["conversation_id"], sent["msg_id"], picture, alice, SECRET_WORD) for sent in (in_group, in_dialogue)
    ]
    nobody = Place(
        "g:" + group["conversation_id"][2:][::-1],
        str(int(in_group["msg_id"]) + 4096),
        picture[::-1],
        f"nobody-{tail}",
        "zebrafish",
    )
    absent = [nobody, Place(dialogue_id("no", "body"), *list(nobody.__dict__.values())[1:])]
    document = await a.ok("GET", "/openapi.json")
    return World(a, document, there, absent)


def upload(api: Api) -> str:
    """An attachment of some bytes; its id."""
    request = urllib.request.Request(
        f"{api.base}/v1/attachments?name=a.bin",
        bytes(range(256)),
        {"Authorization": f"Bearer {api.token}", "Content-Type": "application/octet-stream"},
        method="POST",
    )
    with urllib.request.urlopen(request, timeout=30) as answer:
        return str(json.loads(answer.read())["attachment_id"])


@pytest.mark.parametrize("kind", [0, 1], ids=["group", "dialogue"])
async def test_a_stranger_learns_nothing_by_any_route(town: LocalCluster, world: World, kind: int) -> None:
    methods = ("GET", "HEAD", "PUT", "POST", "PATCH", "DELETE")
    mallory, mallet = (person(town, f"{name}-{uuid.uuid4().hex[:8]}") for name in ("mallory", "mallory"))
    there = await walk(mallory, world.document, world.there[kind], methods)
    absent = await walk(mallet, world.document, world.absent[kind], methods)
    same(blurred(there, mallory, world.there[kind]), blurred(absent, mallet, world.absent[kind]))
    leaks = [asked for asked, answer in there.items() if SECRET_WORD.encode() in answer.raw or b"Tea" in answer.raw]
    assert not leaks
    routes = {f"{m.upper()} {path}" for path, operations in world.document["paths"].items() for m in operations}
    assert len(routes) > 25, "the document lists the routes"


def blurred(found: Mapping[str, Answer], api: Api, place: Place) -> dict[str, Answer]:
    """Without what the stranger said itself: whom it asked about, and the ids and times of what it wrote to somebody."""
    out = {}
    for asked, answer in found.items():
        raw = answer.raw
        if re.match(r"POST /v1/messages body [34]|.* /v1/(friends|me)\b|GET /v1/conversations body", asked):
            raw = raw.replace(place.user.encode(), b"<user>")
            raw = re.sub(
                rb'"(msg_id|client_msg_id|conversation_id|cursor|server_at|since)":("[^"]*"|\d+)', rb'"\1":0', raw
            )
            raw = re.sub(rb'"from":"[^"]*"', b'"from":0', raw)
        kept = {name: value for name, value in answer.headers.items() if name != "content-length" or raw is answer.raw}
        out[asked] = Answer(answer.status, raw, kept)
    return out


async def test_who_left_gets_nothing_of_what_came_after(town: LocalCluster, world: World) -> None:
    carol = f"carol-{uuid.uuid4().hex[:8]}"
    conversation_id = world.there[0].conversation_id
    path = f"/v1/groups/{quoted(conversation_id)}"
    await world.alice.ok("POST", f"{path}/members", {"users": [carol]})
    await world.alice.ok("DELETE", f"{path}/members/{carol}")
    c = person(town, carol)
    before = await walk(c, world.document, world.there[0], ("GET", "HEAD"))
    later = await world.alice.ok(
        "POST", "/v1/messages", {"conversation_id": conversation_id, "text": f"{SECRET_WORD} 2"}
    )
    await world.alice.ok("PATCH", path, {"title": "Coffee"})
    await world.alice.ok("POST", f"{path}/members", {"users": ["dave"]})
    await world.alice.ok("PUT", f"/v1/conversations/{quoted(conversation_id)}/read", {"seq": later["seq"]})
    same(before, await walk(c, world.document, world.there[0], ("GET", "HEAD")))
    missed = Place(conversation_id, later["msg_id"], "none", "dave", SECRET_WORD)
    unborn = Place(conversation_id, str(int(later["msg_id"]) + 4096), "none", "nobody", "zebrafish")
    of_message = {path: ops for path, ops in world.document["paths"].items() if "{msg_id}" in path}
    every = ("GET", "PATCH", "DELETE")
    same(await walk(c, {"paths": of_message}, missed, every), await walk(c, {"paths": of_message}, unborn, every))
    for method, rest, body in (
        ("POST", "/members", {"users": ["eve"]}),
        ("PATCH", "", {"title": "?"}),
        ("POST", "/leave", None),
    ):
        assert (await c.told(method, path + rest, body)).status in (403, 404)
    assert (await c.told("POST", "/v1/messages", {"conversation_id": conversation_id, "text": "?"})).status == 404


# ── frames ───────────────────────────────────────────────────────────────────────────────────────────────────


def frames(place: Place) -> dict[str, list[tuple[wire.CmdType.ValueType, Any]]]:
    """Every frame type that a client sends, as far as it names something."""
    conversation_id = place.conversation_id
    operations = [
        (kind, content.Operation(users=["somebody"], title="?", msg_id=int(place.msg_id), msg_type=0, body=b"?"))
        for kind in content.MsgType.values()
        if kind >= 1000
    ]

    def up(msg_type: int, body: bytes, to_user: str = "") -> wire.UPMsg:
        head = wire.UPMsgHead(ClientID=1, SessionId=conversation_id)
        return wire.UPMsg(
            Head=head, UPMsgBody=body, client_msg_id=uuid.UUID(int=7).bytes, to_user=to_user, msg_type=msg_type
        )

    return {
        "text": [(wire.UP, up(0, b"?"))],
        "text to a member": [(wire.UP, up(0, b"?", place.user))],
        **{f"operation {kind}": [(wire.UP, up(kind, said.SerializeToString()))] for kind, said in operations},
        "pull": [(wire.PULL, wire.PullMsg(ref=5, conversation_id=conversation_id))],
        "pull backwards": [
            (wire.PULL, wire.PullMsg(ref=5, conversation_id=conversation_id, newest_first=True, limit=3))
        ],
        "sync": [
            (wire.SYNC, wire.SyncMsg(ref=5, cursors=[wire.Cursor(conversation_id=conversation_id)], want_state=True))
        ],
        "read": [(wire.READ, wire.ReadMsg(ref=5, conversation_id=conversation_id, seq=1))],
        "typing": [(wire.TYPING, wire.TypingMsg(conversation_id=conversation_id))],
    }


ENDS: Final = {
    wire.UP: {wire.RECEIPT},
    wire.PULL: {wire.PULLED, wire.ERROR},
    wire.SYNC: {wire.SYNCED, wire.ERROR},
    wire.READ: {wire.ERROR},
    wire.TYPING: set(wire.CmdType.values()),
}
"""What ends the answer to a frame, beside a refusal in its ACK. Nothing answers TYPING: the heartbeat behind it does."""


async def asked(town: LocalCluster, said: Sequence[tuple[wire.CmdType.ValueType, Any]]) -> list[bytes]:
    """What a stranger who is online gets for these frames, up to the answer of the heartbeat behind them and the end of
    theirs: another process answers these. Without numbers of its own session."""
    host, port = town.gateways[0].rsplit(":", 1)
    user = f"mallory-{uuid.uuid4().hex[:12]}"
    got = []
    async with await Raw.open(host, int(port)) as raw:
        await raw.enter(town.token(user))
        for kind, body in said:
            await raw.send(kind, body)
        await raw.send(wire.HEARTBEAT, wire.HeartbeatMsg(Head=wire.HeartbeatMsgHead()))
        beaten, settled = False, said[0][0] == wire.TYPING
        accepted = said[0][0] != wire.UP  # an UP has two answers, from two processes, in any order
        while not (beaten and settled and accepted):
            cmd = await raw.receive(20)
            assert cmd is not None
            if cmd.Type == wire.ACK:
                ack = wire.ACKMsg.FromString(cmd.Payload)
                if ack.Type == wire.HEARTBEAT:
                    beaten = True
                    continue
                if ack.Code == 2:
                    continue  # pending: a matter of time
                settled |= ack.Code >= 400 or ack.Type == wire.READ
                accepted = True
                ack.ClearField("ConnID")
                ack.ClearField("run")
                ack.ClearField("push_no")
                cmd.Payload = ack.SerializeToString()
            settled |= cmd.Type in ENDS[said[0][0]]
            got.append(bytes((cmd.Type,)) + anonymous(cmd.Payload, user))
    return sorted(set(got))  # what is not acknowledged in time is repeated


def anonymous(payload: bytes, user: str) -> bytes:
    return payload.replace(user.encode(), b"<user>")


@pytest.mark.parametrize("kind", [0, 1], ids=["group", "dialogue"])
async def test_a_stranger_learns_nothing_by_any_frame(town: LocalCluster, world: World, kind: int) -> None:
    there, absent = world.there[kind], world.absent[kind]
    for name, said in frames(there).items():
        a = await asked(town, said)
        b = await asked(town, frames(absent)[name])
        plain = [[blank(one, place) for one in got] for got, place in ((a, there), (b, absent))]
        assert plain[0] == plain[1], name
        assert not any(SECRET_WORD.encode() in one for one in a), name


def blank(frame: bytes, place: Place) -> bytes:
    """Without the asked id, which is said back, and the draw of a trace id."""
    kind, payload = frame[0], frame[1:]
    if kind == wire.RECEIPT:
        receipt = wire.ReceiptMsg.FromString(payload)
        receipt.ClearField("trace_id")
        payload = receipt.SerializeToString()
    return bytes((kind,)) + payload.replace(place.conversation_id.encode(), b"<id>")
