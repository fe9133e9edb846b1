"""A worker process of the live load: its share of the people, each a real client, all in one event loop.

Started by driver.py as `python -m e2e.live.worker PLAN NUMBER`. Orders come as JSON lines on standard input, each is
answered by one line on standard output; the end of the input ends the process.

    {"do": "enter"}          open every client, wait until all are online           → {"online": n}
    {"do": "talk"}           send at the plan's rate until told otherwise           → {"talking": true}
    {"do": "hush"}           send no more, wait until what was sent has its place   → {"unsettled": n}
    {"do": "hear", "n": {}}  wait until each user was shown so many messages        → {"lacking": {user: n}}
    {"do": "leave"}          close every client                                     → {"left": n}

What happens is written to the history as it happens (history.py). Memory: one entry per message that is not settled yet.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import sys
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any, Final

from plato.adapters.tokens import DEV_KID, issue
from plato.client import Client, ClientError, Phase, Refused
from plato.client import Sent as Ticket
from plato.core.conversations import dialogue_id

from e2e.live.plan import Plan
from tests.faults.waiting import until

ONLINE_S: Final = 120.0
SETTLE_S: Final = 90.0
HEAR_S: Final = 60.0
TICK_S: Final = 0.25
LAG_S: Final = 0.5
"""The loop's own lateness is noted from here on: it explains what else looks like the platform's."""

Note = Callable[..., None]


class Voice:
    """One user on one device."""

    def __init__(self, plan: Plan, number: int, note: Note) -> None:
        self.user = plan.user(number)
        self._plan = plan
        self._note = note
        transport = "ws" if plan.ws_every and number % plan.ws_every == plan.ws_every - 1 else "tcp"
        self.client = Client(
            self._token,
            plan.store(self.user),
            plan.gateways,
            ipconfig_url=plan.ipconfig_url or None,
            user=self.user,
            transport=transport,  # type: ignore[arg-type]  # one of the two, as the line above says
        )
        self.heard: set[bytes] = set()
        self._gateway = ""
        """Of the connection that stands, else of the last one."""
        self._since: float | None = None
        """When it was lost; None while one stands, or before the first."""
        self._cause = "start"
        self._moves = 0
        self._tasks: list[asyncio.Task[None]] = []

    def _token(self) -> str:
        plan = self._plan
        return issue(plan.keys_dir, DEV_KID, self.user, plan.issuer, plan.audience, plan.token_ttl_s)

    async def enter(self) -> None:
        """Opens the client; it connects by itself."""
        await self.client.__aenter__()
        self._tasks = [asyncio.create_task(self._listen()), asyncio.create_task(self._watch())]

    async def leave(self) -> None:
        """Closes it."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.client.__aexit__(None, None, None)

    async def _listen(self) -> None:
        async for m in self.client.messages():
            self.heard.add(m.client_msg_id)
            self._note(
                "shown",
                user=self.user,
                conv=m.conversation_id,
                seq=m.seq,
                prev=m.prev_seq,
                msg=m.msg_id,
                id=m.client_msg_id.hex(),
                body=m.text,
                **{"from": m.from_user},
            )

    async def _watch(self) -> None:
        """Notes each connection and why the one before it ended."""
        async for state in self.client.states():
            if state.phase is not Phase.ONLINE:
                if self._gateway and self._since is None:
                    self._since = time.monotonic()
                    self._cause = f"code {state.code}" if state.code else "broken"
                    self._note("offline", user=self.user, gateway=self._gateway, code=state.code or 0)
                elif self._since is not None and state.code and self._cause == "broken":
                    self._cause = f"code {state.code}"  # it came with the attempts that followed
                continue
            gateway = state.gateway or ""
            if gateway == self._gateway and self._since is None:
                continue
            if self._gateway and self._since is None:
                # A break so short that its states were never seen would look the same, but for this count.
                self._cause = "redirect" if self.client.moves > self._moves else "broken"
            self._moves = self.client.moves
            gap_s = time.monotonic() - self._since if self._since is not None else 0.0
            self._note("online", user=self.user, gateway=gateway, cause=self._cause, lost=self._gateway, gap=gap_s)
            self._gateway, self._since = gateway, None


class Worker:
    """All voices of this process, and the orders that it takes."""

    def __init__(self, plan: Plan, number: int, records: IO[str]) -> None:
        self._plan = plan
        self._number = number
        self._records = records
        self._voices = [Voice(plan, n, self.note) for n in plan.share(number)]
        self._orders: dict[tuple[str, str], int] = {}
        self._following: set[asyncio.Task[None]] = set()
        self._background: list[asyncio.Task[None]] = []
        self._talking: asyncio.Task[None] | None = None
        self._hushed = False

    def note(self, event: str, **fields: object) -> None:
        """One line of the history."""
        self._records.write(json.dumps({"t": round(time.monotonic(), 4), "e": event, **fields}) + "\n")

    async def obey(self, order: dict[str, Any]) -> dict[str, Any]:
        """Does what is asked and returns the answer."""
        match order["do"]:
            case "enter":
                return await self._enter()
            case "talk":
                self._talking = asyncio.create_task(self._talk())
                return {"talking": True}
            case "hush":
                return await self._hush()
            case "hear":
                return await self._hear(order["n"])
            case "leave":
                return await self._leave()
        raise ValueError(f"an unknown order: {order}")

    async def _enter(self) -> dict[str, Any]:
        self._background.append(asyncio.create_task(self._pulse()))
        for voice in self._voices:
            await voice.enter()
        with contextlib.suppress(TimeoutError):
            await until(lambda: all(v.client.state.phase is Phase.ONLINE for v in self._voices), ONLINE_S)
        off = {v.user: str(v.client.state) for v in self._voices if v.client.state.phase is not Phase.ONLINE}
        return {"online": len(self._voices) - len(off), "off": dict(list(off.items())[:5])}

    async def _talk(self) -> None:
        """Most to the own neighbour, by name or by the conversation that they have; some to anybody."""
        plan, chance = self._plan, random.Random(self._plan.seed + self._number)
        numbers = plan.share(self._number)
        pause_s = plan.workers / plan.rate_per_s
        due = time.monotonic() + chance.random() * pause_s
        while not self._hushed:
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            due += pause_s
            at = chance.randrange(len(numbers))
            mine = numbers[at]
            to = mine ^ 1 if chance.random() < 0.7 else chance.randrange(plan.users)
            if to != mine and to < plan.users:
                await self._say(self._voices[at], plan.user(to), "x" * chance.randrange(200), chance.random() < 0.5)

    async def _say(self, voice: Voice, to: str, filler: str, by_name: bool) -> None:
        conversation_id = dialogue_id(voice.user, to)
        lane = (voice.user, conversation_id)
        first = lane not in self._orders
        self._orders[lane] = order = self._orders.get(lane, 0) + 1
        key = uuid.uuid4()
        body = f"{voice.user} to {to}, no {order}: {filler}"
        # Written first: what stands here and nowhere else was lost, what stands elsewhere and not here was made up.
        self.note("sent", user=voice.user, to=to, conv=conversation_id, id=key.bytes.hex(), order=order, body=body)
        try:
            if by_name or first:
                ticket = await voice.client.send(body, to=to, client_msg_id=key)
            else:
                ticket = await voice.client.send(body, conversation_id=conversation_id, client_msg_id=key)
        except ClientError:
            self.note("refused", user=voice.user, id=key.bytes.hex())
            return
        task = asyncio.create_task(self._follow(voice.user, key.bytes.hex(), ticket))
        self._following.add(task)
        task.add_done_callback(self._following.discard)

    async def _follow(self, user: str, key: str, ticket: Ticket) -> None:
        try:
            await ticket.accepted()
            self.note("accepted", user=user, id=key)
            await ticket.settled()
            self.note("settled", user=user, id=key)
        except Refused:
            self.note("refused", user=user, id=key)
        except ClientError:
            pass  # the client ended first; the message counts as unsettled

    async def _pulse(self) -> None:
        """Notes when this process itself was late, and keeps the records on the disk."""
        while True:
            before = time.monotonic()
            await asyncio.sleep(TICK_S)
            late_s = time.monotonic() - before - TICK_S
            if late_s > LAG_S:
                self.note("lag", s=round(late_s, 3))
            self._records.flush()

    async def _hush(self) -> dict[str, Any]:
        self._hushed = True  # not cancelled: what is being handed over is to be followed, too
        if self._talking is not None:
            await self._talking
        with contextlib.suppress(TimeoutError):
            await until(lambda: not self._following, SETTLE_S)
        self._records.flush()
        return {"unsettled": len(self._following)}

    async def _hear(self, wanted: dict[str, int]) -> dict[str, Any]:
        def lacking() -> dict[str, int]:
            counts = {v.user: wanted.get(v.user, 0) - len(v.heard) for v in self._voices}
            return {user: n for user, n in counts.items() if n > 0}

        with contextlib.suppress(TimeoutError):
            await until(lambda: not lacking(), HEAR_S)
        return {"lacking": lacking()}

    async def _leave(self) -> dict[str, Any]:
        for task in [*self._background, *self._following]:
            task.cancel()
        await asyncio.gather(*self._background, *self._following, return_exceptions=True)
        await asyncio.gather(*(voice.leave() for voice in self._voices))
        self._records.flush()
        return {"left": len(self._voices)}


async def serve(plan: Plan, number: int) -> None:
    """Takes orders until the input ends."""
    loop = asyncio.get_running_loop()
    orders = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(orders), sys.stdin)
    with plan.history(number).open("a", encoding="utf-8") as records:
        worker = Worker(plan, number, records)
        async for line in orders:
            answer = await worker.obey(json.loads(line))
            print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    asyncio.run(serve(Plan.loads(Path(sys.argv[1]).read_text(encoding="utf-8")), int(sys.argv[2])))
