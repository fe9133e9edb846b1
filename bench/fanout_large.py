"""fanoutlarge: a group of 10,000 members, 2,000 of them online, beside dialogues: what do the dialogues notice?

    python -m bench fanoutlarge

First the dialogues alone, then with SPEAK_PER_S messages a second to the group, at the same pace of their own; from the same
connections in the same run. Latency is from the UP to the PUSH on the peer's connection (dialogues), and from the UP to the
row on a member's (the group). The members are Python in a process of their own, on the same cores as the cluster.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Iterator
from contextlib import AsyncExitStack
from typing import Any

from plato.core.codes import Code
from plato.core.conversations import dialogue_id
from plato.local.cluster import LocalCluster
from plato.wire.v1 import client_pb2 as wire

from bench.cluster import cluster, parts, spent_s
from bench.loading import Options, folder
from bench.processes import BenchError
from bench.programs import Programs
from bench.report import Figure, Result
from tests.faults.load import quantile
from tests.faults.looking import metric
from tests.faults.raw import Raw
from tests.faults.town import Member
from tests.faults.waiting import until

SPEAK_PER_S = 10
DIALOGUES = 20
DIALOGUE_PER_S = 50
TOWN = "g:town"
GROUP_USERS = 500
"""Of one operation."""
ENTERING = 32
ANSWER_S = 120.0
TRIES = 40
QUANTILES = (0.5, 0.99)


def measure(_programs: Programs, options: Options) -> Result:
    """Runs it."""
    quick = options.people < 1_000
    members, online, seconds = (1_000, 100, 2.0) if quick else (10_000, 2_000, 30.0)
    with folder() as where, cluster(where, {"bus.type": options.bus, "gateway.poll_port": 0}) as made:
        return asyncio.run(_measure(made, members, online, seconds, options))


async def _measure(made: LocalCluster, members: int, online: int, seconds: float, options: Options) -> Result:
    names = [f"town-{n:05}" for n in range(members)]
    begun = time.monotonic()
    order = json.dumps({"name": "town", "members": names})
    answer = await asyncio.to_thread(made.ask_msg, "POST", "/admin/v1/groups", order)
    if answer["code"] or answer["pending"]:
        raise BenchError(f"the group could not be made: {answer}")
    made_s = time.monotonic() - begun
    port = made.ports["edge-0.tcp"]
    async with AsyncExitStack() as stack:
        made_by = -(-members // GROUP_USERS)
        town = await Town.start(port, [made.token(name) for name in names[:online]], made_by)
        stack.push_async_callback(town.stop)

        async def enter(name: str) -> Raw:
            return await stack.enter_async_context(await _entered(port, made.token(name)))

        speaker = Speaker(await enter(names[online]))
        pairs = [Pair(await enter(f"a{n}"), await enter(f"b{n}"), f"a{n}", f"b{n}") for n in range(DIALOGUES)]
        tasks = [asyncio.create_task(run()) for run in [speaker.run, *(p.run for p in pairs)]]
        try:
            await _talk(pairs, 2.0)  # conversations and pools are made
            quiet = await _talk(pairs, seconds)
            pids = parts(made)
            before = spent_s(pids)
            speaking = asyncio.create_task(speaker.speak(seconds))
            beside = await _talk(pairs, seconds)
            await speaking
            said = await town.report(speaker.sent)
            after = spent_s(pids)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
    result = Result(
        "fanoutlarge",
        f"a group of {members:,}, {online:,} online, {SPEAK_PER_S} messages/s, beside {DIALOGUE_PER_S} messages/s of"
        f" dialogues; bus {options.bus}",
    )
    quantiles = {
        "dialogues alone": [1_000 * quantile(quiet, q) for q in QUANTILES],
        "dialogues beside the group": [1_000 * quantile(beside, q) for q in QUANTILES],
        "the group": said["ms"],
    }
    for name, values in quantiles.items():
        for q, value in zip(QUANTILES, values, strict=True):
            result.figures.append(Figure(f"{name}, p{q * 100:.0f}", "ms", (value,)))
    ratio = quantile(beside, 0.99) / quantile(quiet, 0.99)
    result.figures.append(Figure("dialogues' p99, beside : alone", "", (ratio,), ("<=", 2.0)))
    for part in pids:
        spent = (after[part] - before[part]) / seconds
        if spent >= 0.01:
            result.figures.append(Figure(f"  {part}", "cores", (spent,)))
    result.figures.append(Figure("  the members' own process", "cores", (said["cpu_s"] / seconds,)))
    notices = metric(made, "plato-msg-0", "plato_msg_notices_total", "http")
    result.notes.append(
        f"{len(speaker.sent)} messages became {notices:.0f} notices, {said['notices']:.1f} to a member; {said['refused']}"
        f" pulls were answered later; {said['pushes']} pushes"
    )
    result.notes.append(f"pushes of dialogues that were lost and pulled: {sum(pair.healed for pair in pairs)}")
    result.notes.append(f"the group was made within {made_s:.1f} s; members share the cores with the cluster")
    return result


class Town:
    """The members that are online, in a process of their own: what they do must not delay who measures the dialogues."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    @classmethod
    async def start(cls, port: int, tokens: list[str], made_by: int) -> Town:
        """All of them are in when it returns. made_by: how many operations made the group."""
        command = [sys.executable, "-m", "bench.fanout_large", str(port), str(made_by)]
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe, limit=1 << 24)
        made = cls(process)
        await made._ask(tokens)
        return made

    async def report(self, sent: list[float]) -> dict[str, Any]:
        """What they saw, once they have every message. sent: time.monotonic() of each UP."""
        said: dict[str, Any] = await self._ask(sent)
        return said

    async def stop(self) -> None:
        """Ends it."""
        if self._process.returncode is None:
            self._process.kill()
        await self._process.wait()

    async def _ask(self, what: object) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(what).encode() + b"\n")
        line = await asyncio.wait_for(self._process.stdout.readline(), ANSWER_S)
        if not line:
            raise BenchError("the members' process ended")
        return json.loads(line)


async def _live(port: int, made_by: int) -> None:
    """The members' process."""
    gate = asyncio.Semaphore(ENTERING)
    members: list[Member] = []

    async def enter(n: int, token: str) -> asyncio.Task[None]:
        async with gate:
            raw = await _entered(port, token)
        members.append(Member(raw, TOWN, n, made_by))
        return asyncio.create_task(members[-1].run())

    async def heard() -> Any:
        return json.loads(await asyncio.to_thread(sys.stdin.readline))

    def say(what: object) -> None:
        print(json.dumps(what), flush=True)

    running = await asyncio.gather(*(enter(n, token) for n, token in enumerate(await heard())))
    cpu_s = time.process_time()
    say({"ready": len(running)})
    sent = await heard()

    def all_here() -> bool:
        return all(member.seq == made_by + len(sent) for member in members)

    await until(all_here, ANSWER_S - 5)
    took = sorted(
        at - sent[row.seq - made_by - 1]
        for member in members
        for row, at in zip(member.rows, member.pulled_at, strict=True)
    )
    say(
        {
            "ms": [1_000 * quantile(took, q) for q in QUANTILES],
            "notices": sum(len(member.notices) for member in members) / len(members),
            "refused": sum(member.refused for member in members),
            "pushes": sum(member.pushes for member in members),
            "cpu_s": time.process_time() - cpu_s,
        }
    )


async def _entered(port: int, token: str) -> Raw:
    """A connection that is in. What is answered "later", or not within Raw's time, is asked again."""
    last = "nothing was answered"
    for _ in range(TRIES):
        raw = await Raw.open("127.0.0.1", port)
        retry_ms = 250
        try:
            ack = await raw.login(token)
            if ack.Code == Code.OK:
                ack, _ = await raw.sync()
            if ack.Code == Code.OK:
                return raw
            last, retry_ms = ack.Msg, ack.retry_ms or retry_ms
        except (TimeoutError, EOFError) as e:
            last = str(e) or last
        raw.writer.transport.abort()
        await asyncio.sleep(retry_ms / 1_000)
    raise BenchError(f"no login within {TRIES} tries: {last}")


class Speaker:
    """Who writes to the group."""

    def __init__(self, raw: Raw) -> None:
        self._raw = raw
        self.sent: list[float] = []
        """Of each message: time.monotonic() of its UP. Its seq is its place, behind the operations that made the group."""

    async def speak(self, seconds: float) -> None:
        """At a steady pace."""
        for due in _pace(SPEAK_PER_S, seconds):
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            self.sent.append(time.monotonic())
            await self._raw.up(TOWN, len(self.sent), b"x" * 200, acked=len(self.sent) - 1)

    async def run(self) -> None:
        """Acknowledges what comes."""
        while (cmd := await self._raw.receive(3_600)) is not None:
            if cmd.run:
                await self._raw.send(wire.ACK, wire.ACKMsg(Type=wire.PUSH, run=cmd.run, push_no=cmd.push_no))


class Pair:
    """A dialogue: a writes, b reads."""

    def __init__(self, a: Raw, b: Raw, name: str, peer: str) -> None:
        self._a, self._b = a, b
        self._conversation_id, self._peer = dialogue_id(name, peer), peer
        self.sent: list[float] = []
        self.took: dict[int, float] = {}
        """By the message's number: how long until its first push, s."""
        self.refused: list[int] = []
        """Codes of refusals; what was refused is not sent again."""
        self.healed = 0
        """How often something was lost on the way, and pulled."""

    async def say(self) -> None:
        """One message."""
        self.sent.append(time.monotonic())
        no = len(self.sent)
        await self._a.up(self._conversation_id, no, b"%d" % (no - 1), to_user=self._peer, acked=no - 1)

    async def run(self) -> None:
        """Both ends."""
        await asyncio.gather(self._read(self._a), self._read(self._b))

    async def _read(self, raw: Raw) -> None:
        run, push_no = 0, 0
        while (cmd := await raw.receive(3_600)) is not None:
            if cmd.Type == wire.PUSH:
                self._came(wire.PushMsg.FromString(cmd.Payload))
            elif cmd.Type == wire.PULLED:
                for row in wire.PulledMsg.FromString(cmd.Payload).rows:
                    self._came(row)
            elif cmd.Type == wire.ACK:
                ack = wire.ACKMsg.FromString(cmd.Payload)
                if ack.Type == wire.UP and ack.Code not in (Code.OK, Code.DUPLICATE, Code.PENDING):
                    self.refused.append(ack.Code)
            if cmd.run:
                if (cmd.run, cmd.push_no) > (run, push_no + 1) and run:  # something was lost on the way
                    self.healed += 1
                    pull = wire.PullMsg(ref=1, conversation_id=self._conversation_id, limit=500, newest_first=True)
                    await raw.send(wire.PULL, pull)
                run, push_no = max((run, push_no), (cmd.run, cmd.push_no))
                await raw.send(wire.ACK, wire.ACKMsg(Type=wire.PUSH, run=run, push_no=push_no))

    def _came(self, row: wire.PushMsg) -> None:
        no = int(row.Content)
        self.took.setdefault(no, time.monotonic() - self.sent[no])


async def _talk(pairs: list[Pair], seconds: float) -> list[float]:
    """The dialogues for so long; how long each message took, s, sorted. Raises BenchError when one did not come."""
    before = {id(pair): len(pair.sent) for pair in pairs}
    for n, due in enumerate(_pace(DIALOGUE_PER_S, seconds)):
        await asyncio.sleep(max(0.0, due - time.monotonic()))
        await pairs[n % len(pairs)].say()

    def all_came() -> bool:
        return all(len(pair.took) == len(pair.sent) for pair in pairs)

    try:
        await until(all_came, 30)
    except TimeoutError:
        lost = sum(len(pair.sent) - len(pair.took) for pair in pairs)
        codes = sorted({code for pair in pairs for code in pair.refused})
        raise BenchError(f"{lost} messages of dialogues did not come; codes of refusals: {codes}") from None
    return sorted(took for pair in pairs for no, took in pair.took.items() if no >= before[id(pair)])


def _pace(per_s: float, seconds: float) -> Iterator[float]:
    begun = time.monotonic()
    for n in range(int(per_s * seconds)):
        yield begun + n / per_s


if __name__ == "__main__":
    asyncio.run(_live(int(sys.argv[1]), int(sys.argv[2])))
