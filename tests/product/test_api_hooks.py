"""Hooks on a real cluster: an application that refuses and changes messages, one that is told of them and is away
in between, pushes for who is not online, and the feed, while msg is killed with -9."""

from __future__ import annotations

import asyncio
import json
import threading
import time
import urllib.request
import uuid
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from plato.client import Refused
from plato.core import webhooks
from plato.core.codes import Code
from plato.core.conversations import dialogue_id
from plato.local.cluster import LocalCluster

from tests.faults import looking
from tests.faults.people import person as client
from tests.faults.waiting import until
from tests.product.api import Api, person, quoted, server

SECRET = b"a secret of the application, long enough"
MESSAGES = "/v1/messages"
pytestmark = pytest.mark.timeout(180)


class Application:
    """Receives what Plato posts, on a port that stays its own while it is away."""

    def __init__(self) -> None:
        self.got: dict[str, list[Any]] = {"/before": [], "/after": [], "/push": []}
        self.unsigned = 0
        self.answer_500 = False
        self.port = 0
        self._server: ThreadingHTTPServer | None = None
        self.start()

    def start(self) -> None:
        application = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                if not webhooks.verify(SECRET, self.headers.get(webhooks.HEADER, ""), body, int(time.time())):
                    application.unsigned += 1
                    self.send_response(403)
                    self.end_headers()
                    return
                status, said = application.answer(self.path, json.loads(body))
                raw = json.dumps(said).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(raw)))
                self.end_headers()
                self.wfile.write(raw)

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", self.port), Handler)
        self._server.daemon_threads = True
        self.port = self._server.server_address[1]
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def stop(self) -> None:
        assert self._server is not None
        self._server.shutdown()
        self._server.server_close()

    def answer(self, path: str, said: Any) -> tuple[int, Any]:
        if self.answer_500:
            return 500, {}
        self.got[path].append(said)
        if path != "/before":
            return 200, {}
        refuse, replace = {}, {}
        for message in said["messages"]:
            text = message.get("text") or message.get("operation", {}).get("text", "")
            if "spam" in text:
                refuse[str(message["index"])] = "no advertisements here"
            elif "darn" in text:
                replace[str(message["index"])] = text.replace("darn", "****")
        return 200, {"refuse": refuse, "replace": replace}

    def events(self) -> list[Any]:
        """What the after-hook told, in order."""
        return [event for post in self.got["/after"] for event in post["events"]]

    def pushes(self) -> list[Any]:
        return [push for post in self.got["/push"] for push in post["pushes"]]


@pytest.fixture(scope="module")
def application() -> Iterator[Application]:
    made = Application()
    yield made
    made.stop()


@pytest.fixture(scope="module")
def town(
    new_cluster: Callable[..., LocalCluster], application: Application, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[LocalCluster]:
    secret: Path = tmp_path_factory.mktemp("secret") / "hook"
    secret.write_bytes(SECRET)
    base = f"http://127.0.0.1:{application.port}"
    made = new_cluster(
        {
            "gateway.workers": 1,
            "local.msgs": 2,
            "msg.member_stale_ms": 500,
            "msg.events": "true",
            "msg.hook_url": f"{base}/before",
            "msg.hook_timeout_ms": 10_000,  # the application shares a busy machine: late is no answer
            "msg.after_url": f"{base}/after",
            "msg.push_url": f"{base}/push",
            "msg.hook_secret_file": secret,
        }
    )
    yield made
    made.down()


def fresh(*names: str) -> list[str]:
    tail = uuid.uuid4().hex[:8]
    return [f"{name}-{tail}" for name in names]


def upload(api: Api) -> str:
    """An attachment; its id."""
    headers = {"Authorization": f"Bearer {api.token}", "Content-Type": "application/octet-stream"}
    request = urllib.request.Request(f"{api.base}/v1/attachments?name=a.bin", b"bytes", headers, method="POST")
    with urllib.request.urlopen(request, timeout=30) as answer:
        return str(json.loads(answer.read())["attachment_id"])


async def test_the_application_refuses_a_word_with_words_and_replaces_another(town: LocalCluster) -> None:
    alice, bob = fresh("alice", "bob")
    a = person(town, alice)
    told = await a.refused(403, Code.REFUSED_BY_HOOK, "POST", MESSAGES, {"to": bob, "text": "buy spam"})
    assert told["detail"] == "no advertisements here"
    picture = await asyncio.to_thread(upload, a)
    rich = {"text": "spam with a picture", "attachments": [{"attachment_id": picture}]}
    await a.refused(403, Code.REFUSED_BY_HOOK, "POST", MESSAGES, {"to": bob, "rich": rich})
    sent = await a.ok("POST", MESSAGES, {"to": bob, "text": "darn it"})
    assert sent["seq"] == 1, "a refusal takes no place"
    path = f"{MESSAGES}/{sent['msg_id']}"
    assert (await person(town, bob).ok("GET", path))["text"] == "**** it"
    await a.refused(403, Code.REFUSED_BY_HOOK, "PATCH", path, {"text": "spam after all"})
    await a.ok("PATCH", path, {"text": "darn again"})
    assert (await person(town, bob).ok("GET", path))["text"] == "**** again"


async def test_messages_by_socket_are_asked_about_too_and_others_are_pushed_the_replacement(
    town: LocalCluster, tmp_path: Path
) -> None:
    alice, bob = fresh("alice", "bob")
    async with client(town, alice, tmp_path / "a.db") as a, client(town, bob, tmp_path / "b.db") as b:
        ticket = await a.client.send(b"darn", to=bob)
        await ticket.settled()
        await until(lambda: [row.body for row in b.shown] == [b"****"], 20)
        refused = await a.client.send(b"spam", to=bob)
        with pytest.raises(Refused) as e:
            await refused.settled()
        assert e.value.code == Code.REFUSED_BY_HOOK


async def test_what_is_told_afterwards_comes_in_order_though_the_application_is_away_and_msg_is_killed(
    town: LocalCluster, application: Application
) -> None:
    alice, bob = fresh("alice", "bob")
    a, conversation_id = person(town, alice), dialogue_id(alice, bob)

    def told() -> list[str]:
        """The texts, each once: a crash between an answer and its note repeats."""
        texts = [e["text"] for e in application.events() if e["conversation_id"] == conversation_id]
        return list(dict.fromkeys(texts))

    async def say(texts: list[str]) -> None:
        for text in texts:
            await said(a, bob, text)

    await say([f"t{n}" for n in range(5)])
    await until(lambda: len(told()) == 5, 30)
    application.stop()
    await say([f"t{n}" for n in range(5, 8)])  # without an answer of the before-hook messages are accepted
    town.kill("msg")
    application.start()
    await say([f"t{n}" for n in range(8, 12)])
    await until(lambda: len(told()) == 12, 60)
    assert told() == [f"t{n}" for n in range(12)]
    assert application.unsigned == 0


async def said(api: Api, to: str, text: str) -> None:
    """Sends until it is stored: msg may be dead, or say that it is pending."""
    body = {"to": to, "text": text, "client_msg_id": str(uuid.uuid4())}

    async def stored() -> bool:
        try:
            return (await api.ask("POST", MESSAGES, body)).status == 201
        except OSError:
            return False

    await until(stored, 60)


async def test_who_is_away_is_pushed_to_once_and_who_is_online_or_muted_it_is_not(
    town: LocalCluster, application: Application, tmp_path: Path
) -> None:
    alice, bob, carol, dave = fresh("alice", "bob", "carol", "dave")
    a = person(town, alice)
    made = await a.ok("POST", "/v1/groups", {"title": "Tea", "members": [bob, carol, dave]})
    group = made["conversation_id"]
    await person(town, dave).ok("PUT", f"/v1/conversations/{quoted(group)}/mute", {})
    async with client(town, carol, tmp_path / "c.db") as c:
        application.answer_500 = True  # and the before-hook's failures accept
        sent = await a.ok("POST", MESSAGES, {"conversation_id": group, "text": "tea?"})
        await until(lambda: any(row.body == b"tea?" for row in c.shown), 20)
        dead = town.kill("msg")
        await until(lambda: looking.back(town, "msg", dead), 60)
        application.answer_500 = False
        await until(lambda: any(p["push_id"] == f"{sent['msg_id']}:{bob}" for p in application.pushes()), 60)
        await said(a, bob, "the end")  # behind all that could still come of the group
        await until(lambda: any(p["message"].get("text") == "the end" for p in application.pushes()), 60)
    # What was told and not noted before a kill is told again, by the same id.
    mine = list({p["push_id"]: p for p in application.pushes() if p["message"]["msg_id"] == sent["msg_id"]}.values())
    assert [p["user"] for p in mine] == [bob]
    assert mine[0]["conversation"] == {"conversation_id": group, "kind": "group", "title": "Tea"}
    assert (mine[0]["message"]["text"], mine[0]["unread"]) == ("tea?", 1)


async def test_the_feed_misses_nothing_and_repeats_nothing_while_msg_is_killed(town: LocalCluster) -> None:
    alice, bob = fresh("alice", "bob")
    a, conversation_id = person(town, alice), dialogue_id(alice, bob)
    cursor = (await server(town).ok("GET", "/v1/events?after=now"))["cursor"]
    got: list[str] = []

    async def read() -> None:
        nonlocal cursor
        shop = server(town)
        while len(got) < 30:
            try:
                page = await shop.ask("GET", f"/v1/events?after={cursor}&limit=7&wait_s=1")
            except OSError:
                continue
            if page.status == 200:
                got.extend(e["text"] for e in page.body["events"] if e["conversation_id"] == conversation_id)
                cursor = page.body["cursor"]

    async def write() -> None:
        for n in range(30):
            await said(a, bob, f"n{n}")
            if n in (8, 19):
                town.kill("plato-msg-0" if n == 8 else "plato-msg-1")

    async with asyncio.timeout(120), asyncio.TaskGroup() as tasks:
        tasks.create_task(read())
        tasks.create_task(write())
    assert got == [f"n{n}" for n in range(30)]
