"""Operations, and what a user's devices share: clients on a platform in memory, and their stores."""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from itertools import permutations
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest
from aiohttp import web
from plato.client import (
    Attachment,
    Change,
    Client,
    Conversation,
    ConversationChanged,
    Friend,
    FriendChanged,
    FriendStatus,
    Message,
    MessageChanged,
    MsgType,
    Overflowed,
    Phase,
    Quote,
    ReadBy,
    Refused,
    Rich,
    Role,
    Typing,
    Unreachable,
    changes,
)
from plato.client.changes import ChangeStream
from plato.client.content import Operation, operation_of, rich_of, text_of
from plato.client.core.model import Place, Revision, Row, Shared, Writes
from plato.client.store import _SCHEMA_1, Store
from plato.core.codes import Code
from plato.core.conversations import dialogue_id
from plato.fakes.platform import Platform
from plato.fakes.platform_server import PlatformServer
from plato.wire.v1 import client_pb2 as pb

TOLD = pb.ACKMsg(heartbeat_ms=400, repeat_min_ms=80, repeat_max_ms=400, reconnect_delay_ms=20)
PAIR = dialogue_id("alice", "bob")


async def until(condition: Callable[[], object], what: str = "") -> None:
    deadline = time.monotonic() + 40
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(what or "the condition never came true")
        await asyncio.sleep(0.005)


@asynccontextmanager
async def town(folder: Path) -> AsyncIterator[tuple[PlatformServer, Client, Client, Client]]:
    """Alice on two devices, bob on one."""
    async with (
        PlatformServer(Platform(told=TOLD)) as server,
        Client("alice", folder / "a.db", [server.address], user="alice") as phone,
        Client("alice", folder / "b.db", [server.address], user="alice") as laptop,
        Client("bob", folder / "c.db", [server.address], user="bob") as bob,
    ):
        await until(lambda: all(c.state.phase is Phase.ONLINE for c in (phone, laptop, bob)))
        yield server, phone, laptop, bob


class Changes:
    """An application that notes what changes."""

    def __init__(self, who: Client) -> None:
        self.seen: list[Change] = []
        self._stream = who.changes()
        self.task = asyncio.create_task(self._read())

    async def _read(self) -> None:
        async for change in self._stream:
            self.seen.append(change)


def conversation(who: Client, conversation_id: str) -> Conversation:
    """As this device shows it; something empty where it does not know it."""
    return who.conversation(conversation_id) or Conversation(conversation_id, "", 0, 0, 0)


async def on_each(condition: Callable[[Client], object], *devices: Client) -> None:
    await until(lambda: all(condition(d) for d in devices))


def stored(who: Client, conversation_id: str) -> list[tuple[int, str, bool]]:
    known = who.conversation(conversation_id)
    found = [who.message(conversation_id, seq) for seq in range(1, known.cursor + 1)] if known else []
    return [(m.seq, m.text, m.recalled) for m in found if m is not None and m.operation is None]


async def test_what_is_edited_and_recalled_is_the_same_on_every_device(tmp_path: Path) -> None:
    async with town(tmp_path) as (_, phone, laptop, bob):
        seen = Changes(bob)
        ticket = await phone.create_group("tea", ["bob"])
        group = ticket.conversation_id
        first = await (await phone.send("one", conversation_id=group)).settled()  # behind the making, not after it
        await until(lambda: bob.message(group, first.seq), "the group did not come to bob")
        asked = bob.message(group, first.seq)
        assert asked is not None
        picture = Attachment("att-1", "cat.png", "image/png", 2_000, 20, 10, True)
        answer = Rich("yes", reply=asked.quote(), attachments=(picture,), mentions=("alice",))
        second = await (await bob.send(answer, conversation_id=group)).settled()
        await (await bob.edit(second.msg_id, "no")).settled()
        third = await (await laptop.send("three", conversation_id=group)).settled()
        await until(lambda: phone.message(group, third.seq), "the other device's message did not come")
        await (await phone.recall(third.msg_id)).settled()
        with pytest.raises(Refused) as refused:
            await (await bob.recall(first.msg_id)).settled()
        assert refused.value.code == Code.NOT_ALLOWED
        want = [(first.seq, "one", False), (second.seq, "no", False), (third.seq, "", True)]
        await on_each(lambda who: stored(who, group) == want, phone, laptop, bob)
        changed = laptop.message_of(second.msg_id)
        assert changed is not None
        assert changed.edited
        assert changed.rich == Rich("no", Quote(first.msg_id, first.seq, "alice", "one"), (picture,), ("alice",))
        told = {MessageChanged(group, second.seq), MessageChanged(group, third.seq)}
        await until(lambda: told <= set(seen.seen), "its application reads behind it")
        assert [m.text for m in await laptop.history(group, before=third.seq + 1, limit=2)] == ["", ""]
        seen.task.cancel()


async def test_groups_are_led_and_who_left_hears_no_more(tmp_path: Path) -> None:
    async with town(tmp_path) as (server, phone, laptop, bob):
        group = (await phone.create_group("tea", [f"user{n}" for n in range(510)])).conversation_id
        await (await phone.add(group, ["bob"])).settled()
        await until(lambda: bob.conversation(group), "not added")
        made = [operation_of(r.msg_type, r.Content) for r in server.platform.conversations[group].rows]
        assert [len(o.users) for o in made if o is not None] == [501, 10, 1]
        await (await phone.give_role(group, "bob", Role.OWNER)).settled()
        await (await bob.rename(group, "coffee")).settled()
        await on_each(lambda who: conversation(who, group).title == "coffee", phone, laptop)
        for who in (phone, laptop):
            assert who.members(group)["bob"] is Role.OWNER
            assert who.members(group)["alice"] is Role.ADMINISTRATOR
            known = who.conversation(group)
            assert known is not None
            assert known.members == len(who.members(group)) == 512
        await (await bob.remove(group, ["alice"])).settled()
        await on_each(lambda who: conversation(who, group).left, phone, laptop)
        await (await bob.send("alone", conversation_id=group)).settled()
        with pytest.raises(Refused):
            await (await phone.send("still there?", conversation_id=group)).settled()
        known = laptop.conversation(group)
        assert known is not None
        assert known.newest_seq == server.platform.conversations[group].former["alice"][1]
        await (await bob.rename(group, "water")).settled()
        await (await bob.add(group, ["alice"])).settled()
        # What happened meanwhile is told, though its messages are not.
        await on_each(lambda who: conversation(who, group).title == "water", phone, laptop)
        assert not conversation(phone, group).left
        await (await bob.leave(group)).settled()
        await until(lambda: phone.members(group).get("bob") is None)


async def test_a_read_position_is_shared_told_and_survives_a_restart(tmp_path: Path) -> None:
    async with town(tmp_path) as (server, phone, laptop, bob):
        for n in range(5):
            await (await bob.send(f"no {n}", to="alice")).settled()
        await (await phone.send("mine", to="bob")).settled()
        seen = Changes(bob)

        def kept() -> list[tuple[int, int]]:
            with contextlib.closing(sqlite3.connect(f"file:{tmp_path / 'b.db'}?mode=ro", uri=True)) as file:
                return file.execute("SELECT read_seq, wanted_seq FROM shared").fetchall()

        await until(lambda: phone.unread(PAIR) == laptop.unread(PAIR) == 5, "own messages never count")
        phone.read(PAIR, 3)
        phone.read(PAIR, 2)  # nothing: it only rises
        assert phone.unread(PAIR) == 2
        await until(lambda: laptop.unread(PAIR) == 2)
        await until(lambda: conversation(bob, PAIR).peer_read_seq == 3)
        await until(lambda: ReadBy(PAIR, "alice", 3) in seen.seen)
        server.refusing = True
        server.cut()
        laptop.read(PAIR)
        assert laptop.unread(PAIR) == 0
        await laptop.__aexit__(None, None, None)
        async with Client("alice", tmp_path / "b.db", [server.address], user="alice") as again:
            assert again.unread(PAIR) == 0
            server.refusing = False
            await until(lambda: server.platform.user("alice").of(PAIR).read_seq == 6)
            await until(lambda: phone.unread(PAIR) == 0)
            await until(lambda: kept() == [(6, 0)], "the answer comes on another socket than the phone's news")
        seen.task.cancel()
        assert kept() == [(6, 0)]


async def test_what_is_arranged_elsewhere_comes_to_every_device(tmp_path: Path) -> None:
    async with town(tmp_path) as (server, phone, laptop, bob):
        places = [(await (await bob.send(f"no {n}", to="alice")).settled()).seq for n in range(3)]
        seen = Changes(phone)
        platform, state = server.platform, server.platform.user("alice")
        platform.tell_state("alice", state.change(PAIR, pinned_at_ms=7, muted_until_ms=8))
        platform.tell_state("alice", state.hide(PAIR, places[1]))
        asked = pb.FriendState(user="carol", status=pb.FriendState.WAITING, words="hi")
        platform.tell_state("alice", state.befriend(asked))
        state.change(PAIR, cleared_seq=0, pinned_at_ms=9)  # a STATE that is lost: the next one shows the gap
        platform.tell_state("alice", state.hide(PAIR, places[2]))
        server.flush()
        await on_each(lambda who: conversation(who, PAIR).pinned_at_ms == 9 and who.unread(PAIR) == 1, phone, laptop)
        for who in (phone, laptop):
            known = who.conversation(PAIR)
            assert known is not None
            assert (known.muted_until_ms, known.unread) == (8, 1)
            assert [m.text for m in await who.history(PAIR)] == ["no 0"]
            hidden = who.message(PAIR, places[1])
            assert hidden is not None
            assert hidden.hidden
            assert who.friends() == [Friend("carol", FriendStatus.WAITING, "hi")]
        friend = FriendChanged(Friend("carol", FriendStatus.WAITING, "hi"))
        told = {ConversationChanged(PAIR), MessageChanged(PAIR, places[1]), friend}
        await until(lambda: told <= set(seen.seen), "its application reads behind it")
        seen.task.cancel()


async def test_typing_is_told_at_once_once_in_a_while_or_never(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with town(tmp_path) as (server, phone, _, bob):
        await (await phone.send("hello", to="bob")).settled()
        told: list[pb.TypingMsg] = []
        frame = server.platform._typing

        def note(conn: Any, typing: pb.TypingMsg) -> None:
            told.append(typing)
            frame(conn, typing)

        monkeypatch.setattr(server.platform, "_typing", note)
        seen = Changes(bob)
        for _ in range(5):
            phone.typing(PAIR)
            await asyncio.sleep(0)
        await until(lambda: Typing(PAIR, "alice", False) in seen.seen)
        phone.typing(PAIR, stopped=True)
        phone.typing(PAIR, stopped=True)
        await until(lambda: Typing(PAIR, "alice", True) in seen.seen)
        assert [t.stopped for t in told] == [False, True]
        server.refusing = True
        server.cut()
        await until(lambda: phone.state.phase is Phase.OFFLINE)
        phone.typing(PAIR)
        server.refusing = False
        await until(lambda: phone.state.phase is Phase.ONLINE)
        await (await phone.send("there", to="bob")).settled()
        assert len(told) == 2
        seen.task.cancel()


async def test_bad_operations_are_refused_at_once(tmp_path: Path) -> None:
    async with town(tmp_path) as (_, phone, _, _):
        with pytest.raises(ValueError, match="without 1,000 to 1,999"):
            await phone.send("x", to="bob", msg_type=MsgType.RECALL)
        with pytest.raises(ValueError, match="not stored on this device"):
            await phone.recall(12)
        with pytest.raises(ValueError, match="at most 128"):
            await phone.create_group("x" * 129)
        with pytest.raises(ValueError, match="not one"):
            await phone.add("g:x", "bob")
        with pytest.raises(ValueError, match="at least one"):
            await phone.remove("g:x", [])
        with pytest.raises(ValueError, match="invisible characters"):
            await phone.create_group("x", ["a\nb"])
        with pytest.raises(ValueError, match="at most 10"):
            await phone.send(Rich("x", attachments=(Attachment("a"),) * 11), to="bob")
        with pytest.raises(ValueError, match="api_url"):
            _ = phone.http


def test_bodies_that_cannot_be_read_are_nobodys_operation() -> None:
    assert operation_of(MsgType.RECALL, b"\xff") is None
    assert operation_of(1_900, b"") is None, "of a newer platform"
    assert rich_of(MsgType.RICH, b"\xff") is None
    assert (text_of(MsgType.RICH, b"\xff"), text_of(0, b"\xff"), text_of(1_900, b"x")) == ("\ufffd", "\ufffd", "")


async def test_a_slow_reader_of_changes_is_told_that_it_missed_some(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(changes, "MOST", 50)
    stream = ChangeStream(lambda s: None)
    for n in range(50):
        stream.put(MessageChanged("c", n))
        stream.put(Typing("c", "bob", bool(n % 2)))  # the later one takes the earlier one's place
    assert await anext(stream) == Overflowed()
    stream.put(ConversationChanged("c"))
    stream.end(None)
    left = [change async for change in stream]
    assert left[-1] == ConversationChanged("c")
    assert len(left) < 50


# ── the store ────────────────────────────────────────────────────────────────────────────────────────────────


def row(seq: int, body: bytes, msg_type: int = 0, changed_seq: int = 0, recalled: bool = False) -> Row:
    return Row("c", seq, seq - 1, 100 + seq, "bob", msg_type, body, bytes(16), 0, changed_seq, recalled)


def test_whichever_order_they_come_in_the_newest_operation_holds() -> None:
    """A row as it was pushed, as it was pulled later, and the operations: the same is stored in every order, once it is."""
    edit = row(2, Operation(MsgType.EDIT, msg_id=101, body=b"second").encode(), MsgType.EDIT)
    gone = row(2, b"", MsgType.EDIT, 3, True)
    recall = row(3, Operation(MsgType.RECALL, msg_id=101).encode(), MsgType.RECALL)
    steps = [
        Writes(rows=[row(1, b"second", changed_seq=2)]),
        Writes(rows=[row(1, b"", changed_seq=3, recalled=True), gone]),
        Writes(rows=[edit], revisions=[Revision("c", 101, 1, 2, False, 0, b"second")]),
        Writes(rows=[recall], revisions=[Revision("c", 101, 1, 3, True, None, b"")]),
    ]
    first = Writes(
        rows=[row(1, b"first")]
    )  # no operation is read before the row that it means: the cursor is in between
    for order in permutations(steps):
        store = Store(":memory:", 5)
        try:
            for writes in (first, *order):
                store.apply(writes)
            held = [r for _, r, _ in store.after(0, 10)]
            assert sorted(held, key=lambda r: r.seq) == [row(1, b"", changed_seq=3, recalled=True), gone, recall]
        finally:
            store.close()


def test_a_store_of_version_1_goes_on_and_does_what_it_received(tmp_path: Path) -> None:
    file = sqlite3.connect(tmp_path / "old.db")
    file.executescript(f"{_SCHEMA_1} INSERT INTO meta VALUES ('device_id', '7'); PRAGMA user_version = 1;")
    file.execute("INSERT INTO meta VALUES ('user', 'bob')")
    made = Operation(MsgType.GROUP_CREATE, title="tea", users=("alice", "bob"))
    for seq, kind, body in (
        (1, MsgType.GROUP_CREATE, pb_owner(made, "alice")),
        (2, MsgType.TEXT, b"one"),
        (3, MsgType.EDIT, Operation(MsgType.EDIT, msg_id=102, body=b"two").encode()),
        (4, MsgType.TEXT, b"three"),
        (5, MsgType.RECALL, Operation(MsgType.RECALL, msg_id=104).encode()),
    ):
        values = ("g:c", seq, seq - 1, 100 + seq, "alice", int(kind), body, bytes(16), 0)
        file.execute("INSERT INTO message VALUES (NULL,?,?,?,?,?,?,?,?,?)", values)
    file.execute("INSERT INTO conversation VALUES ('g:c', '', 5, 5, 1)")
    file.commit()
    file.close()
    for _ in range(2):
        store = Store(tmp_path / "old.db", 1)
        snapshot = store.load()
        assert (snapshot.device_id, snapshot.user, snapshot.state_version) == (7, "bob", 0)
        assert snapshot.places == (Place("g:c", "", 5, 5, 1, "tea", 2, False, 1),)
        assert [(r.seq, r.body, r.recalled) for _, r, _ in store.after(0, 10) if r.msg_type == 0] == [
            (2, b"two", False), (4, b"", True),
        ]  # fmt: skip
        assert store.members("g:c") == {"alice": Role.OWNER, "bob": Role.MEMBER}
        store.apply(Writes(shared={"g:c": Shared("g:c", 2)}, hidden={("g:c", 4): None}))
        assert store.unread("g:c", "bob", 2) == 0
        store.close()


def pb_owner(operation: Operation, owner: str) -> bytes:
    from plato.wire.v1 import content_pb2

    body = content_pb2.Operation.FromString(operation.encode())
    body.owner = owner
    return body.SerializeToString()


# ── the HTTP API ─────────────────────────────────────────────────────────────────────────────────────────────


async def test_the_http_api_is_asked_as_this_user(tmp_path: Path) -> None:
    asked: list[tuple[str, str, Any, str]] = []
    answers = [
        (200, {"pinned_at": 5}),
        (401, {"code": 303}),
        (200, {}),
        (404, {"code": 435, "detail": "no"}),
        (503, {}),
    ]

    async def handle(request: web.Request) -> web.Response:
        body = await request.json() if request.can_read_body else None
        asked.append((request.method, unquote(request.path_qs), body, request.headers["Authorization"]))
        status, answer = answers.pop(0)
        return web.json_response(answer, status=status)

    application = web.Application()
    application.router.add_route("*", "/{tail:.*}", handle)
    runner = web.AppRunner(application, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    tokens = iter(["first", "second", "third"])
    url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    async with Client(lambda: next(tokens), tmp_path / "a.db", ["x:1"], user="alice", api_url=url) as alice:
        await alice.http.pin("g:tea time")
        await alice.http.hide(12)
        with pytest.raises(Refused) as refused:
            await alice.http.clear("c")
        assert refused.value.code == Code.MESSAGE_UNKNOWN
        with pytest.raises(Unreachable):
            await alice.http.mute("c", 5)
        await runner.cleanup()
        with pytest.raises(Unreachable):
            await alice.http.mute("c", 5)
    assert [(method, path, body) for method, path, body, _ in asked] == [
        ("PUT", "/v1/conversations/g:tea time/pin", {"pinned": True}),
        ("DELETE", "/v1/messages/12?for=me", None),
        ("DELETE", "/v1/messages/12?for=me", None),
        ("DELETE", "/v1/conversations/c", None),
        ("PUT", "/v1/conversations/c/mute", {"until": 5}),
    ]
    assert asked[1][3] != asked[2][3], "a refused token is renewed once"


def test_a_message_says_what_it_is() -> None:
    plain = Message("c", 1, 0, 9, "bob", 0, b"hello", bytes(16), 0, False)
    assert (plain.quote(), plain.rich, plain.operation) == (Quote(9, 1, "bob", "hello"), None, None)
    long = Message("c", 1, 0, 9, "bob", 0, b"x" * 999, bytes(16), 0, False)
    assert len(long.quote().text) == 256
