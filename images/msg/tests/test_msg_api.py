"""The HTTP API's own rules, on the ASGI application: who is let in, what refusals look like, what ids may hold; and that a
read by HTTP and one by frame are one contract, on the same histories."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msg_harness import Cluster, cluster, until
from plato.core import webhooks
from plato.core.codes import Action, Code
from plato.core.errors import Unavailable, Unstorable
from plato.fakes.tokens import FakeTokens
from plato.wire.v1 import client_pb2 as wire
from plato.wire.v1 import content_pb2 as content
from plato_msg import hooks
from plato_msg import webhooks as webhooks_of_msg
from plato_msg.api import app, auth, conversations, problems, render
from plato_msg.api.auth import Door
from plato_msg.core import cursors
from plato_msg.core.batch import Uplink
from plato_msg.history import History
from plato_msg.reads import Reads
from plato_msg.store_pg import PgMsgStore
from prometheus_client import generate_latest
from test_msg_history import fill

PATH = "/v1/conversations/room/messages"


class Pulls:
    """Answers every pull with one row; or raises."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, wire.PullMsg]] = []
        self.fault: Exception | None = None

    async def pull(self, user: str, pull: wire.PullMsg) -> wire.PulledMsg:
        self.asked.append((user, pull))
        if self.fault is not None:
            raise self.fault
        row = wire.PushMsg(MsgID=2**60, seq=1, Content=b"hi", conversation_id=pull.conversation_id)
        return wire.PulledMsg(conversation_id=pull.conversation_id, rows=[row], newest_seq=1)


class World:
    def __init__(self, pulls: Any = None, per_s: int = 2) -> None:
        self.tokens = FakeTokens()
        self.pulls = pulls or Pulls()
        self.now_ms = 0.0
        self.why = ""
        states: Any = None  # asked by none of these routes
        self.app = app.application(
            Door(self.tokens, per_s, 10, lambda: self.now_ms),
            [conversations.router(self.pulls, states)],
            lambda: self.why,
        )

    @asynccontextmanager
    async def client(self, token: str = "fake:alice") -> AsyncIterator[httpx.AsyncClient]:
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        transport = httpx.ASGITransport(self.app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://api", headers=headers) as client:
            yield client


def refused(answer: httpx.Response, status: int, code: int) -> dict[str, Any]:
    assert answer.headers["content-type"] == problems.MEDIA_TYPE
    said: dict[str, Any] = answer.json()
    assert said.keys() == {"type", "title", "status", "detail", "code", "retry_ms"}
    assert (answer.status_code, said["status"], said["code"]) == (status, status, code)
    return said


# ── who is let in ────────────────────────────────────────────────────────────────────────────────────────────


async def test_a_persons_token_acts_for_that_person_alone() -> None:
    world = World()
    async with world.client() as client:
        assert (await client.get(PATH)).status_code == 200
        assert (await client.get(PATH, headers={"Plato-User": "alice"})).status_code == 200
        refused(await client.get(PATH, headers={"Plato-User": "bob"}), 403, Code.NOT_ALLOWED)
    assert {user for user, _ in world.pulls.asked} == {"alice"}


async def test_a_server_names_whom_it_acts_for_in_utf8() -> None:
    world = World()
    async with world.client("fake+server:shop") as client:
        refused(await client.get(PATH), 400, Code.MALFORMED)
        assert (await client.get(PATH, headers=[(b"Plato-User", "жук".encode())])).status_code == 200
        for nobody in ("x" * 65, "admin", "guest:1"):
            refused(await client.get(PATH, headers={"Plato-User": nobody}), 400, Code.MALFORMED)
    assert [user for user, _ in world.pulls.asked] == ["жук"]


@pytest.mark.parametrize("code", [Code.TOKEN_EXPIRED, Code.TOKEN_NOT_YET_VALID, Code.TOKEN_INVALID])
async def test_a_refused_token_is_401_with_its_code(code: Code) -> None:
    world = World()
    world.tokens.refuse("fake:alice", code)
    async with world.client() as client:
        answer = await client.get(PATH)
    refused(answer, 401, code)
    assert answer.headers["www-authenticate"] == "Bearer"


async def test_who_asks_too_often_is_told_when_to_come_back_and_others_are_not_held_up() -> None:
    world = World()
    async with world.client() as client:
        for _ in range(8):  # two a second, four seconds' worth at once
            assert (await client.get(PATH)).status_code == 200
        answer = await client.get(PATH)
        assert 0 < refused(answer, 429, Code.TOO_FAST)["retry_ms"] <= 500
        assert answer.headers["retry-after"] == "1"
        async with world.client("fake:bob") as bob:
            assert (await bob.get(PATH)).status_code == 200
        world.now_ms += 500
        assert (await client.get(PATH)).status_code == 200


async def test_of_one_user_some_reads_go_at_a_time_more_wait_and_too_many_are_refused_and_others_go_on() -> None:
    gate = asyncio.Event()

    class Slow(Pulls):
        async def pull(self, user: str, pull: wire.PullMsg) -> wire.PulledMsg:
            found = await super().pull(user, pull)
            await gate.wait()
            return found

    world = World(Slow(), per_s=100)
    async with world.client() as client, world.client("fake:bob") as bob:
        door: Door = world.app.state.door
        asked = [asyncio.create_task(client.get(PATH)) for _ in range(auth.READS_IN_ALL)]
        await until(lambda: door.reads.under_way("alice") == auth.READS_IN_ALL)
        await until(lambda: len(world.pulls.asked) >= auth.READS_AT_ONCE)
        assert len(world.pulls.asked) == auth.READS_AT_ONCE
        answer = await client.get(PATH)
        assert refused(answer, 429, Code.TOO_FAST)["retry_ms"] == auth.RETRY_MS
        assert "under way" in answer.json()["detail"]
        others = asyncio.create_task(bob.get(PATH))
        await until(lambda: ("bob", door.reads.under_way("bob")) == (world.pulls.asked[-1][0], 1))
        gate.set()
        assert {(await one).status_code for one in [*asked, others]} == {200}
        assert len(door.reads) == 0


# ── refusals ─────────────────────────────────────────────────────────────────────────────────────────────────


async def test_every_refusal_is_a_problem() -> None:
    world = World()
    async with world.client("fake+server:shop") as client:
        client.headers["Plato-User"] = "alice"
        refused(await client.get("/v1/nothing"), 404, Code.MALFORMED)
        refused(await client.delete(PATH), 405, Code.MALFORMED)
        assert refused(await client.get(f"{PATH}?limit=x"), 400, Code.MALFORMED)["detail"].startswith("query.limit: ")
        read = "/v1/conversations/room/read"
        refused(await client.put(read, content=b"{", headers={"Content-Type": "application/json"}), 400, Code.MALFORMED)
        refused(await client.put(read, json={"seq": 1, "sequence": 2}), 400, Code.MALFORMED)
        refused(await client.put(read, content=b"x" * (app.BODY_MAX_BYTES + 1)), 413, Code.BODY_TOO_LARGE)
        world.pulls.fault = Unavailable("the database's own words")
        assert "own words" not in (await client.get(PATH)).text
        refused(await client.get(PATH), 503, Code.UNAVAILABLE)
        world.pulls.fault = RuntimeError("a fault's own words")
        answer = await client.get(PATH)
        refused(answer, 500, Code.UNAVAILABLE)
        assert "own words" not in answer.text
        world.why = "not yet"
        refused(await client.get(PATH), 503, Code.UNAVAILABLE)


@pytest.mark.parametrize("code", [c for c in Code if problems.Problem(c).status >= 300])
def test_a_code_has_a_status_of_its_kind(code: Code) -> None:
    status = problems.status_of(code)
    wanted = {1: (429, 503), 2: (503,), 3: (401,), 4: (400, 403, 404, 409, 413, 415)}[int(code.action)]
    assert status in wanted


ASKED_BY_FRAME = {
    Code.EXPECTED, Code.SYNC_FIRST, Code.NOT_READY, Code.TRY_AGAIN, Code.FOREIGN_CONN_ID, Code.KICKED, Code.LOGGED_OUT,
    Code.REPLACED, Code.LOGIN_FIRST, Code.SESSION_UNKNOWN, Code.SECRET_WRONG, Code.TOO_MANY_DEVICES,
}  # fmt: skip
"""What only a connection can be told."""


@pytest.mark.parametrize(
    "code",
    [c for c in Code if problems.status_of(c) >= 300 and c not in ASKED_BY_FRAME and c.action != Action.RECONNECT],
)
def test_a_title_speaks_of_requests_not_of_frames(code: Code) -> None:
    words = problems.title(code).lower()
    assert not [w for w in ("frame", "log in", "login", "connection", "socket", "sync") if w in words], words


async def test_what_the_database_cannot_hold_is_the_askers_fault() -> None:
    world = World()
    world.pulls.fault = Unstorable("a NUL")
    async with world.client() as client:
        refused(await client.get(PATH), 400, Code.MALFORMED)


@pytest.mark.parametrize(("token", "code"), [("", Code.TOKEN_INVALID), ("bad", Code.TOKEN_INVALID)])
async def test_of_who_is_not_let_in_no_body_is_read(token: str, code: Code) -> None:
    read = 0

    async def body() -> AsyncIterator[bytes]:
        nonlocal read
        read += 1
        yield b'{"seq": 1}'

    path = PATH.replace("/messages", "/read")
    async with World().client(token) as client:
        refused(await client.put(path, content=body()), 401, code)
    assert read == 0


async def test_a_method_that_is_made_up_is_counted_as_other() -> None:
    async with World().client() as client:
        await client.request("MADEUP", PATH)
    assert b"MADEUP" not in generate_latest()


async def test_an_origin_of_loopback_may_ask_and_another_one_may_not() -> None:
    async with World().client() as client:
        for origin, allowed in (("http://localhost:8903", True), ("https://evil.example", False)):
            asked = {"Origin": origin, "Access-Control-Request-Method": "GET"}
            answer = await client.options(PATH, headers=asked)
            assert (answer.headers.get("access-control-allow-origin") == origin) is allowed


async def test_the_page_that_asked_may_read_every_refusal() -> None:
    """Else a browser shows its person a server that is away."""
    world = World(per_s=1)
    page = "http://localhost:8903"
    read = PATH.replace("/messages", "/read")
    seen = []

    async def told(method: str, path: str, token: str = "fake+server:shop", later_ms: int = 1_000, **more: Any) -> None:
        for origin, allowed in ((page, True), ("https://evil.example", False)):
            world.now_ms += later_ms
            async with world.client(token) as client:
                client.headers.update({"Origin": origin} | ({"Plato-User": "alice"} if "server" in token else {}))
                answer = await client.request(method, path, **more)
            seen.append(answer.status_code)
            assert (answer.headers.get("access-control-allow-origin") == page) is allowed, (method, path, answer)
            assert answer.headers["content-type"] == problems.MEDIA_TYPE

    await told("GET", "/v1/nothing")
    await told("DELETE", PATH)
    await told("PUT", read, content=b"x" * (app.BODY_MAX_BYTES + 1))  # its length is told
    await told("PUT", read, content=b"{", headers={"Content-Type": "application/json"})
    await told("PUT", read, token="bad", json={"seq": 1})  # before the body is read
    await told("GET", PATH, token="bad")
    await told("GET", PATH.replace("room", "%00"))
    world.pulls.fault = RuntimeError("a fault of ours")
    await told("GET", PATH)
    async with world.client() as client:
        while (await client.get(PATH)).status_code != 429:
            pass
    await told("GET", PATH, token="fake:alice", later_ms=0)
    world.why = "not yet"
    await told("GET", PATH)
    assert {400, 401, 404, 405, 413, 429, 500, 503} <= set(seen)


async def test_an_id_may_hold_a_slash() -> None:
    world = World()
    async with world.client() as client:
        answer = await client.get("/v1/conversations/g%3Aa%2Fb%25/messages")
    assert answer.json()["conversation_id"] == "g:a/b%"
    assert answer.json()["messages"][0]["msg_id"] == str(2**60), "ids are text"


@pytest.mark.parametrize(
    "odd",
    ["%01", "%00", "%0A", "%7F", "%C2%85", "%FF", "%C3", "%ED%A0%80", "a%2Fb%01"],
    ids=lambda odd: odd.replace("%", "_"),
)
async def test_a_path_with_what_no_id_holds_is_refused_in_words(odd: str) -> None:
    world = World()
    async with world.client() as client:
        for path in (f"/v1/conversations/g%3Aa{odd}b/messages", f"/v1/conversations/room/messages{odd}", f"/v1/{odd}"):
            assert "control character" in refused(await client.get(path), 400, Code.MALFORMED)["detail"]
        assert not world.pulls.asked
        assert (await client.get("/v1/conversations/%D0%B6%20%25/messages")).json()["conversation_id"] == "ж %"


# ── one contract with PULL ───────────────────────────────────────────────────────────────────────────────────


async def test_a_read_by_http_is_a_pull(postgres_uri: str) -> None:
    async with cluster(postgres_uri) as c:
        await walked(c)


async def walked(c: Cluster) -> None:
    draw = random.Random(7)
    seqs = sorted(draw.sample(range(1, 60), 25))
    await fill(c, "room", seqs, members={"alice": 0, "bob": 20}, last_seq=70, body=b"x" * 300)
    reads = Reads(History(PgMsgStore(c._database), max_frame_bytes=8_192), 1_000)
    world = World(reads)
    bounds = [0, 1, 2, 20, 21, 35, 59, 60, 70, 71, 500, 2**62, 2**64 - 1]
    async with world.client("fake+server:shop") as client:
        for _ in range(60):
            user, conversation_id = (
                draw.choice(["alice", "alice", "bob", "eve"]),
                draw.choice(["room"] * 5 + ["no", "x" * 65]),
            )
            asked: dict[str, Any] = {
                "from_seq": draw.choice(bounds),
                "to_seq": draw.choice(bounds),
                "limit": draw.choice([0, 1, 3, 500, 501]),
                "newest_first": draw.random() < 0.5,
            }
            world.now_ms += 1_000
            frame = await reads.pull(user, wire.PullMsg(conversation_id=conversation_id, **asked))
            answer = await client.get(
                f"/v1/conversations/{conversation_id}/messages", params=asked, headers={"Plato-User": user}
            )
            if frame.code:
                refused(answer, problems.status_of(frame.code), frame.code)
                continue
            page = answer.json()
            assert page == conversations.page(frame)
            assert [m["seq"] for m in page["messages"]] == [row.seq for row in frame.rows]
            assert (page["covered_from"], page["covered_to"]) == (frame.covered_from, frame.covered_to)


# ── pure parts ───────────────────────────────────────────────────────────────────────────────────────────────


@given(st.lists(st.integers(0, 2**63 - 1), min_size=1, max_size=70))
def test_a_cursor_comes_back_as_it_was(positions: list[int]) -> None:
    assert cursors.decode(cursors.encode(positions), len(positions)) == positions
    assert cursors.decode(cursors.encode(positions), len(positions) + 1) is None


@given(st.text(max_size=40) | st.binary(max_size=40).map(lambda raw: raw.hex()))
def test_nonsense_is_no_cursor(text: str) -> None:
    found = cursors.decode(text, 3)
    assert found is None or len(found) == 3


def test_a_signature_holds_for_its_body_and_its_time() -> None:
    header = webhooks.sign(b"s" * 32, 1_000, b"{}")
    assert webhooks.verify(b"s" * 32, header, b"{}", 1_100)
    assert not webhooks.verify(b"t" * 32, header, b"{}", 1_100)
    assert not webhooks.verify(b"s" * 32, header, b"{ }", 1_100)
    assert not webhooks.verify(b"s" * 32, header, b"{}", 1_301), "too old"
    for nonsense in ("", "t=,v1=", "t=x,v1=y", "v1=0", f"t=1000,v1={'é'}"):
        assert not webhooks.verify(b"s" * 32, nonsense, b"{}", 1_000)


def test_what_cannot_be_read_is_shown_as_bytes() -> None:
    assert render.body(content.TEXT, b"\xff") == {"body": "/w=="}
    assert render.body(content.RICH, b"\xff") == {"body": "/w=="}
    assert render.body(7, b"\x00") == {"body": "AA=="}


def edit(msg_type: int, body: bytes) -> bytes:
    return content.Operation(msg_id=1, msg_type=msg_type, body=body).SerializeToString()


class Receiver:
    """Answers every POST of a hook alike."""

    def __init__(self, answer: bytes) -> None:
        self.answer = answer

    async def send(self, said: Any) -> bytes:
        return self.answer


@pytest.mark.parametrize(
    "answer",
    [b"[" * 100_000, b'{"refuse": {"' + b"9" * 5_000 + b'": "no"}}', b"\xff", b"[]", b'{"replace": {"0": 1}}'],
    ids=["deep", "huge index", "not UTF-8", "no object", "no text"],
)
async def test_a_hook_that_answers_nonsense_is_a_hook_without_an_answer(answer: bytes) -> None:
    asked = Uplink(0, 1, "d:x", "alice", 1, 1, b"m" * 16, "bob", content.TEXT, b"hi", b"t" * 16, guest=False)
    receiver: Any = Receiver(answer)
    hook = hooks.BeforeHook(receiver, accept=False, body_max_bytes=1_000)
    assert (await hook.ask([asked])).refused == {(0, 1): ""}


async def test_a_hooks_words_can_be_stored() -> None:
    asked = Uplink(0, 1, "d:x", "alice", 1, 1, b"m" * 16, "bob", content.TEXT, b"hi", b"t" * 16, guest=False)
    receiver: Any = Receiver(b'{"refuse": {"0": "a\\u0000b\\ud800"}}')
    hook = hooks.BeforeHook(receiver, accept=True, body_max_bytes=1_000)
    assert (await hook.ask([asked])).refused == {(0, 1): "ab?"}


async def test_an_edit_within_edits_is_shown_to_the_hook_as_far_as_edits_go() -> None:
    body = b"x"
    while len(body) < 20_000:
        body = edit(content.EDIT, body)
    asked = Uplink(0, 1, "d:x", "alice", 1, 1, b"m" * 16, "", content.EDIT, body, b"t" * 16, guest=False)
    receiver: Any = Receiver(b"")
    hook = hooks.BeforeHook(receiver, accept=False, body_max_bytes=100_000)
    assert await hook.ask([asked]) == hooks.NOTHING
    assert render.body(content.EDIT, edit(content.TEXT, b"new"))["operation"]["text"] == "new"


async def test_a_mention_that_is_no_name_is_nobodys() -> None:
    body = content.Rich(mentions=["", "\x00", "bob", "b" * 65, "bob"]).SerializeToString()
    assert webhooks_of_msg._mentions(content.RICH, body) == ["bob"]
