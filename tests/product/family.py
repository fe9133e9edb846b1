"""A family on its devices: people with several devices each and a bot share a group and dialogues, and do what people do.

Home ─ Device × n ─ plato.client.Client (its own SQLite) ─▸ cluster
Terminal: a device on which `plato chat` runs, in lines, with the group; what it prints is what its user was shown
Window: a browser with the chat page (family_browser.py)
live()     says, answers, quotes, edits, recalls, reads, types, pins, mutes, hides, renames, at a steady rate
rest()     waits until the checker finds nothing, or a deadline passes; what it found is the answer
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import io
import math
import random
import sqlite3
import time
import uuid
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Final

import asyncpg
from plato.cli.chat_plain import PlainChat
from plato.client import Client, ClientError, Conversation, Message, Phase, Refused, Rich, Sent
from plato.client.content import is_operation
from plato.core.conversations import dialogue_id
from plato.local.cluster import LocalCluster

from tests.faults import checker
from tests.faults.load import row_of
from tests.faults.waiting import until
from tests.product import family_checker
from tests.product.browser import Person, browsers
from tests.product.family_browser import Window

ASKED: Final = "?"
"""What the bot answers begins with it."""
ANSWERS: Final = uuid.uuid5(uuid.NAMESPACE_URL, "https://plato.example/family")
WINDOWS_FROM: Final = 1_000
"""Number of the first browser; devices have those below."""
WINDOW_PAUSE_S: Final = 0.5
OWED_S: Final = 90.0
"""How long a browser may go on after the evening, to do what each one must have done; on a busy machine it does little."""
MINE: Final = 20
"""How far back somebody edits or recalls."""


@dataclass(slots=True)
class Device:
    """One installation of one person."""

    user: str
    number: int
    client: Client
    store: Path
    late: bool = False  # it only looks
    terminal: Terminal | None = None
    shown: list[checker.Row] = field(default_factory=list)
    tasks: list[asyncio.Task[None]] = field(default_factory=list)


class Noting(Client):
    """A client that tells what was put into its outbox, whoever did it."""

    note: Callable[[Sent, bytes], None]

    async def _post(
        self, conversation_id: str, msg_type: int, body: bytes, to: str = "", key: uuid.UUID | None = None
    ) -> Sent:
        sent = await super()._post(conversation_id, msg_type, body, to, key)
        self.note(sent, body)
        return sent


class Terminal:
    """`plato chat` of one device, in lines, with the group."""

    def __init__(self, client: Client, group: str) -> None:
        self.out, self.err = io.StringIO(), io.StringIO()
        self._typed: asyncio.Queue[str] = asyncio.Queue()
        self._chat = PlainChat(client, group, None, self.out, self.err)

    def type(self, line: str) -> None:
        """A line, and Enter."""
        self._typed.put_nowait(line)

    async def run(self) -> None:
        """Until it is cancelled."""
        await self._chat.run(self._lines(), asyncio.Event())

    async def _lines(self) -> AsyncIterator[str]:
        while True:
            yield await self._typed.get()

    def seqs(self) -> list[int]:
        """The places of what it printed, in order."""
        return [int(line[1 : line.index("]")]) for line in self.out.getvalue().splitlines()]


class Home:
    """Use as `async with Home(cluster, folder, {"alice": 2, …}) as home:`; everybody is online when the block begins, and
    everybody is in the group. The bot is the person named "bot"."""

    def __init__(
        self,
        cluster: LocalCluster,
        folder: Path,
        people: Mapping[str, int],
        terminals: Sequence[str] = (),
        windows: Sequence[str] = (),
    ) -> None:
        """people: how many devices each of them has. terminals: whose last one of them is a terminal. windows: who has a
        browser as well."""
        self._cluster = cluster
        self._folder = folder
        self.people = tuple(people)
        self.devices: list[Device] = []
        for user, count in people.items():
            for _ in range(count):
                self.devices.append(self._device(user))
        self.sent: list[checker.Sent] = []
        self.refused: list[Refused] = []
        self.acts: dict[str, int] = {}
        self.group = ""
        self._orders: dict[tuple[int, str], int] = {}
        self._noted: dict[bytes, int] = {}
        self._following: set[asyncio.Task[None]] = set()
        self.windows: list[Window] = []
        self._terminals = terminals
        self._with_windows = windows
        self._stack = AsyncExitStack()

    def _device(self, user: str) -> Device:
        number = len(self.devices)
        store = self._folder / f"{user}-{number}.sqlite"

        async def token() -> str:
            return self._cluster.token(user)

        client = Noting(
            token,
            store,
            ipconfig_url=self._cluster.ipconfig_url,
            user=user,
            transport="ws" if number % 2 else "tcp",
            api_url=self._cluster.api_url,
        )
        device = Device(user, number, client, store)
        client.note = lambda ticket, body: self._note(device, ticket, body)
        return device

    async def __aenter__(self) -> Home:
        for device in self.devices:
            await self._enter(device)
        if self._with_windows:
            browser = await self._stack.enter_async_context(browsers())
            for user in self._with_windows:
                person = await Person.enter(browser, self._cluster, user)
                others = tuple(p for p in self.people if p != user)
                self.windows.append(Window(person, WINDOWS_FROM + len(self.windows), others))
        first = self.devices[0]
        ticket = await first.client.create_group("family", [p for p in self.people if p != first.user])
        self.group = ticket.conversation_id
        await until(
            lambda: all(d.client.conversation(self.group) for d in self.devices), 60.0, "the group came nowhere"
        )
        for window in self.windows:
            window.group = self.group
        for device in filter(self._chats, self.devices):
            device.terminal = Terminal(device.client, self.group)
            device.tasks.append(asyncio.create_task(device.terminal.run()))
        return self

    async def __aexit__(
        self, _: type[BaseException] | None, __: BaseException | None, ___: TracebackType | None
    ) -> None:
        tasks = [*self._following, *(task for device in self.devices for task in device.tasks)]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._stack.aclose()

    async def _enter(self, device: Device) -> None:
        await self._stack.enter_async_context(device.client)
        if not self._chats(device):
            device.tasks.append(asyncio.create_task(self._read(device)))
        await until(lambda: device.client.state.phase is Phase.ONLINE, 60.0, f"{device.user} does not come online")

    def _chats(self, device: Device) -> bool:
        numbers = [d.number for d in self.devices if d.user == device.user and not d.late]
        return device.user in self._terminals and device.number == numbers[-1]

    async def late(self) -> None:
        """One more device for everybody: it must come to the same by what the platform tells a newcomer."""
        for user in self.people:
            device = self._device(user)
            device.late = True
            self.devices.append(device)
            await self._enter(device)

    async def _read(self, device: Device) -> None:
        """The application: notes what it is shown. The bot answers with a quote; its key follows from the question."""
        async for message in device.client.messages():
            device.shown.append(row_of(message))
            if device.user == "bot" and not device.late and not message.mine and message.text.startswith(ASKED):
                rich = Rich(f"you asked: {message.text[1:]}", reply=message.quote())
                key = uuid.uuid5(ANSWERS, str(message.msg_id))
                await device.client.send(rich, conversation_id=message.conversation_id, client_msg_id=key)
                device.client.read(message.conversation_id, message.seq)

    # ── what they do ─────────────────────────────────────────────────────────────────────────────────────

    async def live(self, per_s: float, done: Callable[[], bool], seed: int) -> None:
        """Everybody does something, `per_s` times a second in all, and each browser what it can, until `done()`."""
        browsing = [asyncio.create_task(self._browse(w, done, random.Random(seed + w.number))) for w in self.windows]
        try:
            await self._live(per_s, done, random.Random(seed))
            await asyncio.gather(*browsing)
        finally:
            for task in browsing:
                task.cancel()

    async def _browse(self, window: Window, done: Callable[[], bool], chance: random.Random) -> None:
        end = math.inf
        while not done() or (window.owed() and time.monotonic() < end):
            if end == math.inf and done():
                end = time.monotonic() + OWED_S
            await window.act(chance)
            await self._written(window)
            await asyncio.sleep(chance.uniform(0, 2 * WINDOW_PAUSE_S))  # a person's pace

    async def _written(self, window: Window) -> None:
        """Notes what a browser wrote: what stands in its store as its person's, and no other device has noted."""
        for entry in await window.written():
            if entry.client_msg_id not in self._noted:
                if entry.client_id > self._orders.get((window.number, entry.conversation_id), 0) + 1:
                    continue  # one before it is on its way between two stores; the next look finds both
                self._count(window.user, window.number, entry.conversation_id, entry.client_msg_id, entry.body)
            place = self._noted[entry.client_msg_id]
            if entry.refused and not self.sent[place].refused:
                self.sent[place] = replace(self.sent[place], refused=True)

    async def _live(self, per_s: float, done: Callable[[], bool], chance: random.Random) -> None:
        due = time.monotonic()
        acts = [self._say] * 8 + [self._ask] * 2 + [self._answer] * 2 + [self._edit] * 3 + [self._recall] * 2
        acts += [self._look] * 5 + [self._type, self._pin, self._mute, self._hide, self._rename]
        while not done():
            device = chance.choice([d for d in self.devices if d.user != "bot"])
            act = chance.choice(acts)
            self.acts[act.__name__.strip("_")] = self.acts.get(act.__name__.strip("_"), 0) + 1
            await act(device, chance)
            due = max(due + 1 / per_s, time.monotonic() - 1.0)
            await asyncio.sleep(max(0.0, due - time.monotonic()))

    def _where(self, device: Device, chance: random.Random) -> str:
        if chance.random() < 0.7:
            return self.group
        return dialogue_id(device.user, chance.choice([p for p in self.people if p != device.user]))

    async def _send(self, device: Device, conversation_id: str, body: str | Rich) -> None:
        other = next((p for p in self.people if dialogue_id(p, device.user) == conversation_id), None)
        if other is not None:
            await device.client.send(body, to=other)
        else:
            await device.client.send(body, conversation_id=conversation_id)

    async def _say(self, device: Device, chance: random.Random) -> None:
        words, where = (
            f"no {len(self.sent)} of {device.user}: {'x' * chance.randrange(100)}",
            self._where(device, chance),
        )
        if device.terminal is not None and where == self.group:
            device.terminal.type(words)
        else:
            await self._send(device, where, words)

    async def _ask(self, device: Device, chance: random.Random) -> None:
        await self._send(device, self.group, f"{ASKED}no {len(self.sent)} of {device.user}")

    async def _answer(self, device: Device, chance: random.Random) -> None:
        found = await self._recent(device, chance, mine=False)
        if found is not None:
            rich = Rich(f"no {len(self.sent)} answers", reply=found.quote(), mentions=(found.from_user,))
            await self._send(device, found.conversation_id, rich)

    async def _edit(self, device: Device, chance: random.Random) -> None:
        found = await self._recent(device, chance, mine=True)
        if found is not None:
            if device.terminal is not None and found.conversation_id == self.group:
                device.terminal.type(f"/edit #{found.seq} {found.text[:40]} edited")
            else:
                await device.client.edit(found.msg_id, f"{found.text[:40]} edited")

    async def _recall(self, device: Device, chance: random.Random) -> None:
        found = await self._recent(device, chance, mine=True)
        if found is not None:
            await device.client.recall(found.msg_id)

    async def _rename(self, device: Device, chance: random.Random) -> None:
        if device.user == self.devices[0].user:  # who made the group leads it
            await device.client.rename(self.group, f"family {len(self.sent)}")

    async def _look(self, device: Device, chance: random.Random) -> None:
        conversation_id = self._where(device, chance)
        known = device.client.conversation(conversation_id)
        if known is not None and known.cursor:
            device.client.read(conversation_id, chance.randint(max(1, known.cursor - 5), known.cursor))

    async def _type(self, device: Device, chance: random.Random) -> None:
        device.client.typing(self._where(device, chance), stopped=chance.random() < 0.3)

    async def _pin(self, device: Device, chance: random.Random) -> None:
        self._by_http(device.client.http.pin(self._where(device, chance), chance.random() < 0.6))

    async def _mute(self, device: Device, chance: random.Random) -> None:
        self._by_http(device.client.http.mute(self._where(device, chance), chance.choice([0, None])))

    async def _hide(self, device: Device, chance: random.Random) -> None:
        found = await self._recent(device, chance, mine=False)
        if found is not None:
            self._by_http(device.client.http.hide(found.msg_id))

    async def _recent(self, device: Device, chance: random.Random, mine: bool) -> Message | None:
        """Something that this device shows, of late."""
        known = device.client.conversation(self._where(device, chance))
        if known is None:
            return None
        seqs = range(max(1, known.cursor - MINE), known.cursor + 1)
        found = [m for seq in seqs if (m := device.client.message(known.conversation_id, seq)) is not None]
        fit = [m for m in found if m.mine is mine and not m.recalled and not is_operation(m.msg_type)]
        return chance.choice(fit) if fit else None

    # ── what became of it ────────────────────────────────────────────────────────────────────────────────

    def _by_http(self, asked: Coroutine[Any, Any, None]) -> None:
        """Whether it was done nobody knows, while msg is killed; every device must show what the database holds."""

        async def ask() -> None:
            with contextlib.suppress(ClientError):
                await asked

        self._spawn(ask())

    def _note(self, device: Device, ticket: Sent, body: bytes) -> None:
        place = len(self.sent)
        sent = self._count(device.user, device.number, ticket.conversation_id, ticket.client_msg_id, body)

        async def follow() -> None:
            try:
                await ticket.settled()
            except Refused as e:
                self.refused.append(e)
                self.sent[place] = replace(sent, refused=True)

        self._spawn(follow())

    def _count(self, user: str, number: int, conversation_id: str, client_msg_id: bytes, body: bytes) -> checker.Sent:
        lane = number, conversation_id
        self._orders[lane] = self._orders.get(lane, 0) + 1
        sent = checker.Sent(user, number, conversation_id, client_msg_id, body, self._orders[lane])
        self._noted[client_msg_id] = len(self.sent)
        self.sent.append(sent)
        return sent

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._following.add(task)
        task.add_done_callback(self._following.discard)

    async def rest(self, deadline_s: float) -> tuple[list[family_checker.Finding], family_checker.Family]:
        """Waits until all is settled and the checker finds nothing; else what it found when the deadline passed."""
        end = time.monotonic() + deadline_s
        while True:
            quiet = not self._following and not any(
                d.client.unsettled(c.conversation_id) for d in self.devices for c in d.client.conversations()
            )
            quiet = quiet and not [w for w in self.windows if await w.unsettled()]
            family = await self.look()
            findings = family_checker.check(family)
            if (quiet and not findings) or time.monotonic() > end:
                if not quiet:
                    where = [str(d.client.state) for d in self.devices]
                    findings.append(
                        family_checker.Finding(family_checker.Kind.MESSAGES, "outbox", f"unsettled: {where}")
                    )
                return findings, family
            await asyncio.sleep(0.25)  # between two looks at everything

    async def look(self) -> family_checker.Family:
        """Everything for the checker: the database's tables, the devices' stores and what they say."""
        truth = await _database(self._cluster)
        devices = tuple(self._seen(device, truth.members) for device in self.devices)
        for window in self.windows:
            await self._written(window)
        devices += tuple([await window.seen() for window in self.windows])
        return replace(truth, sent=tuple(self.sent), devices=devices)

    def _seen(self, device: Device, conversations: Iterable[str]) -> family_checker.Device:
        stored: list[family_checker.Row] = []
        seen: dict[str, family_checker.Seen] = {}
        for conversation_id in conversations:
            known = device.client.conversation(conversation_id)
            if known is None:
                continue
            for seq in range(1, known.cursor + 1):
                message = device.client.message(conversation_id, seq)
                if message is not None:
                    stored.append(_row(message))
            seen[conversation_id] = family_checker.Seen(
                _shared(known),
                device.client.unread(conversation_id),
                known.title,
                {user: int(role) for user, role in device.client.members(conversation_id).items()},
            )
        hidden = frozenset(_hidden(device.store))
        if device.terminal is not None:
            printed = {r.row.seq: r.row for r in stored if r.row.conversation_id == self.group}
            device.shown = [r.row for r in stored if r.row.conversation_id != self.group]
            seqs = _with(device.terminal.seqs(), {seq for where, seq in hidden if where == self.group})
            device.shown += [printed[seq] for seq in seqs if seq in printed]
        return family_checker.Device(device.user, device.number, tuple(device.shown), tuple(stored), hidden, seen)


def _with(printed: list[int], hidden: set[int]) -> list[int]:
    """What a terminal printed, with what its user had hidden on another device before it came here, each in its place: that
    is not printed."""
    seqs = list(printed)
    for seq in sorted(hidden - set(printed)):
        seqs.insert(next((i for i, other in enumerate(seqs) if other > seq), len(seqs)), seq)
    return seqs


def _row(message: Message) -> family_checker.Row:
    return family_checker.Row(row_of(message), message.msg_type, message.changed_seq, message.recalled)


def _shared(known: Conversation) -> family_checker.Shared:
    return family_checker.Shared(
        known.read_seq, known.pinned_at_ms, known.muted_until_ms, known.peer_read_seq, known.cleared_seq
    )


def _hidden(store: Path) -> Sequence[tuple[str, int]]:
    connection = sqlite3.connect(f"file:{store}?mode=ro", uri=True)
    try:
        return connection.execute("SELECT conversation_id, seq FROM hidden").fetchall()
    finally:
        connection.close()


async def _database(cluster: LocalCluster) -> family_checker.Family:
    schema = cluster.settings.database.schema_name
    connection = await asyncpg.connect(cluster.database_uri)
    try:
        rows = await connection.fetch(
            "SELECT conversation_id, seq, prev_seq, msg_id, from_user, client_msg_id, body, msg_type, changed_seq, recalled"
            f" FROM {schema}.im_message"
        )
        members = await connection.fetch(f"SELECT conversation_id, user_id, role FROM {schema}.im_member")
        titles = await connection.fetch(f"SELECT conversation_id, title FROM {schema}.im_conversation")
        shared = await connection.fetch(
            "SELECT user_id, conversation_id, read_seq, pinned_at, muted_until, peer_read_seq, cleared_seq"
            f" FROM {schema}.im_user_state"
        )
        hidden = await connection.fetch(f"SELECT user_id, conversation_id, seq FROM {schema}.im_hidden")
    finally:
        await connection.close()
    who: dict[str, dict[str, int]] = {}
    for r in members:
        who.setdefault(r["conversation_id"], {})[r["user_id"]] = r["role"]
    gone: dict[str, set[tuple[str, int]]] = {}
    for r in hidden:
        gone.setdefault(r["user_id"], set()).add((r["conversation_id"], r["seq"]))
    return family_checker.Family(
        (),
        tuple(family_checker.Row(checker.Row(*r[:7]), r["msg_type"], r["changed_seq"], r["recalled"]) for r in rows),
        who,
        {r["conversation_id"]: r["title"] for r in titles},
        {
            (r["user_id"], r["conversation_id"]): family_checker.Shared(
                r["read_seq"], _ms(r["pinned_at"]), _ms(r["muted_until"]), r["peer_read_seq"], r["cleared_seq"]
            )
            for r in shared
        },
        {user: frozenset(found) for user, found in gone.items()},
        (),
    )


def _ms(moment: object) -> int:
    if not isinstance(moment, datetime.datetime):
        return 0
    since = moment - datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)
    us = since // datetime.timedelta(microseconds=1)
    return (us + 500) // 1_000  # halves away from zero, as PostgreSQL rounds them
