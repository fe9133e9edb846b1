"""People who talk: real clients on a real cluster, and a record of everything they sent and were shown.

Crowd ─ Person × n ─ plato.client.Client (its own SQLite) ─▸ cluster
talk()   sends at a steady rate between random pairs and notes when each message was accepted
rest()   waits until everything is settled and shown everywhere, or a deadline passes
history() gives the checker its History: sent, rows of the database, streams, SQLite files
"""

from __future__ import annotations

import asyncio
import random
import re
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Literal

from plato.client import Client, Message, Phase, Refused
from plato.client import Sent as Ticket
from plato.client.client import DELIVERED_S
from plato.core.conversations import dialogue_id

from tests.faults import checker
from tests.faults.waiting import until

Transport = Literal["tcp", "ws"]
MakeClient = Callable[[str, Path, Transport], Client]
"""(user, store path, "tcp" or "ws") → a client that is not yet entered."""


@dataclass(slots=True)
class Flight:
    """One message on its way. Times are of time.monotonic()."""

    sent: checker.Sent
    began: float
    accepted: float | None = None
    settled: float | None = None


@dataclass(slots=True)
class Person:
    """One user on one device."""

    user: str
    store: Path
    transport: Transport
    client: Client
    shown: list[checker.Row] = field(default_factory=list)
    shown_at: dict[bytes, float] = field(default_factory=dict)
    """time.monotonic() of each message's first showing, by client_msg_id."""
    onlines: list[float] = field(default_factory=list)
    """time.monotonic() of each time the client came online."""
    tasks: list[asyncio.Task[None]] = field(default_factory=list)
    noted: Phase | None = None
    """The phase that was noted last: what is in `onlines` already."""

    @property
    def port(self) -> int:
        """The gateway's port while online, else 0. Addresses come as "host:port", "tcp://…" or "ws://…/ws"."""
        found = re.search(r":(\d+)(?:/|$)", self.client.state.gateway or "")
        return int(found[1]) if found and self.client.state.phase is Phase.ONLINE else 0

    @property
    def reconnects(self) -> int:
        """How often the client came online after the first time."""
        return max(0, len(self.onlines) - 1)

    async def watch(self) -> None:
        """Starts to note what is shown and when the client comes online."""
        self.noted = None
        self.tasks = [asyncio.create_task(self._read()), asyncio.create_task(self._states())]

    async def unwatch(self) -> None:
        """Stops that."""
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        self.tasks = []

    async def _read(self) -> None:
        async for message in self.client.messages():
            self.shown.append(row_of(message))
            self.shown_at.setdefault(message.client_msg_id, time.monotonic())

    async def _states(self) -> None:
        async for state in self.client.states():
            if state.phase is Phase.ONLINE and self.noted is not Phase.ONLINE:
                self.onlines.append(time.monotonic())
            self.noted = state.phase


def row_of(message: Message) -> checker.Row:
    """A message as the checker compares it."""
    return checker.Row(
        message.conversation_id,
        message.seq,
        message.prev_seq,
        message.msg_id,
        message.from_user,
        message.client_msg_id,
        message.body,
    )


class Crowd:
    """Use as `async with Crowd(users, folder, make) as crowd:`; every client is online when the block begins."""

    def __init__(self, users: Sequence[str], folder: Path, make: MakeClient, *, ws_every: int = 2) -> None:
        """ws_every: each n-th person comes by WebSocket; 0: none."""
        self._make = make
        self.people = []
        for n, user in enumerate(users):
            transport: Transport = "ws" if ws_every and n % ws_every == ws_every - 1 else "tcp"
            store = folder / f"{user}.sqlite"
            self.people.append(Person(user, store, transport, make(user, store, transport)))
        self.flights: list[Flight] = []
        self._orders: dict[tuple[str, str], int] = {}
        self._awaiting: set[asyncio.Task[None]] = set()
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Crowd:
        await self._enter()
        return self

    async def __aexit__(
        self, _: type[BaseException] | None, __: BaseException | None, ___: TracebackType | None
    ) -> None:
        for task in list(self._awaiting):
            task.cancel()
        await asyncio.gather(*self._awaiting, return_exceptions=True)
        await self._leave()

    async def _enter(self) -> None:
        for person in self.people:
            await self._stack.enter_async_context(person.client)
            await person.watch()
        await self.online()

    async def _leave(self) -> None:
        for person in self.people:
            await person.unwatch()
        await self._stack.aclose()

    async def online(self, deadline_s: float = 60.0) -> None:
        """Waits until every client is online, and that is noted: `onlines` holds it, so what comes behind is news. Raises
        TimeoutError, which names those who are not."""

        def all_online() -> bool:
            return all(p.client.state.phase is p.noted is Phase.ONLINE for p in self.people)

        try:
            await until(all_online, deadline_s)
        except TimeoutError:
            off = [f"{p.user} ({p.transport}): {p.client.state}" for p in self.people]
            raise TimeoutError(f"not online after {deadline_s} s: {[o for o in off if 'online' not in o]}") from None

    async def reopen(self) -> None:
        """Closes every client and opens it again from its store; what is shown again counts as doubled."""
        await asyncio.sleep(2 * DELIVERED_S)  # what was taken is noted by then; a close gives a slow disk seconds only
        await self._leave()
        for person in self.people:
            person.client = self._make(person.user, person.store, person.transport)
        await self._enter()

    async def say(self, sender: Person, to: str, body: bytes) -> Flight:
        """Sends one message and notes it; does not wait for its acceptance."""
        conversation_id = dialogue_id(sender.user, to)
        lane = (sender.user, conversation_id)
        began = time.monotonic()
        # send() writes the outbox before it returns, so the number and the outbox's order are the same.
        self._orders[lane] = order = self._orders.get(lane, 0) + 1
        ticket = await sender.client.send(body, to=to)
        sent = checker.Sent(sender.user, 0, conversation_id, ticket.client_msg_id, body, order)
        flight = Flight(sent, began)
        self.flights.append(flight)
        task = asyncio.create_task(self._follow(flight, ticket))
        self._awaiting.add(task)
        task.add_done_callback(self._awaiting.discard)
        return flight

    async def _follow(self, flight: Flight, ticket: Ticket) -> None:
        try:
            await ticket.accepted()
            flight.accepted = time.monotonic()
            await ticket.settled()
            flight.settled = time.monotonic()
        except Refused:
            flight.sent = replace(flight.sent, refused=True)
            flight.settled = time.monotonic()

    async def talk(self, per_s: float, done: Callable[[], bool], seed: int) -> None:
        """Sends `per_s` messages a second in all, until `done()`: most to the own neighbour, some to anybody."""
        chance = random.Random(seed)
        due = time.monotonic()
        while not done():
            n = chance.randrange(len(self.people))
            to = n ^ 1 if chance.random() < 0.7 and n ^ 1 < len(self.people) else chance.randrange(len(self.people))
            if to != n:
                sender, other = self.people[n], self.people[to]
                body = f"{sender.user} to {other.user}, no {len(self.flights)}: {'x' * chance.randrange(200)}"
                await self.say(sender, other.user, body.encode())
                due += 1 / per_s
            await asyncio.sleep(max(0.0, due - time.monotonic()))

    def expected(self) -> dict[str, set[bytes]]:
        """{user: client_msg_ids that this user must be shown}."""
        wanted: dict[str, set[bytes]] = {p.user: set() for p in self.people}
        by_conversation = {
            dialogue_id(a.user, b.user): (a.user, b.user)
            for n, a in enumerate(self.people)
            for b in self.people[n + 1 :]
        }
        for flight in self.flights:
            if not flight.sent.refused:
                for user in by_conversation[flight.sent.conversation_id]:
                    wanted[user].add(flight.sent.client_msg_id)
        return wanted

    async def rest(self, deadline_s: float = 60.0) -> bool:
        """Waits until all is settled and shown. False when the deadline passed first: the checker then says what lacks."""

        def all_shown() -> bool:
            if not all(f.settled for f in self.flights):
                return False
            wanted = self.expected()
            return all(wanted[p.user] <= {r.client_msg_id for r in p.shown} for p in self.people)

        try:
            await until(all_shown, deadline_s)
        except TimeoutError:
            return False
        return True

    async def history(
        self,
        read_rows: Callable[[], Awaitable[Sequence[checker.Row]]],
        read_store: Callable[[Path], Sequence[checker.Row]],
    ) -> checker.History:
        """Everything for the checker."""
        rows = await read_rows()
        mine: dict[str, set[str]] = {p.user: set() for p in self.people}
        for n, a in enumerate(self.people):
            for b in self.people[n + 1 :]:
                conversation_id = dialogue_id(a.user, b.user)
                mine[a.user].add(conversation_id)
                mine[b.user].add(conversation_id)
        clients = tuple(
            checker.Client(p.user, 0, frozenset(mine[p.user]), tuple(p.shown), tuple(read_store(p.store)))
            for p in self.people
        )
        return checker.History(tuple(f.sent for f in self.flights), tuple(rows), clients)


def latencies_s(flights: Sequence[Flight]) -> list[float]:
    """Seconds from `send` to the acceptance, sorted; a message that was never accepted counts as for ever."""
    return sorted((f.accepted - f.began) if f.accepted is not None else float("inf") for f in flights)


def quantile(values: Sequence[float], q: float) -> float:
    """The q-th quantile of sorted values; 0.0 of none."""
    return values[min(len(values) - 1, int(q * len(values)))] if values else 0.0
