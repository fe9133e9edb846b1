"""A gateway dies under 5,000 clients: the real machines and the shards' real turns, on a clock of the test's own.

What is simulated is the way between them: a frame arrives at once, a dead gateway refuses. So the counts are exact: who
comes when, how often each asks, how many are let in within any second, and where everybody is at the end.
"""

from __future__ import annotations

import heapq
import random
from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence

from plato.client import Phase
from plato.client.core.model import Session, Snapshot
from plato.client.core.session import Machine
from plato.core.codes import Code
from plato.runtime.settings import StateSettings
from plato.wire.v1 import client_pb2 as pb
from plato_state.core.turns import BURST_MS, Turns

SHARDS = 2
GATEWAYS = ("tcp://a", "tcp://b", "tcp://c")
HELLOS = (pb.LOGIN, pb.RECONN)


def ack(**fields: int) -> bytes:
    inner = pb.ACKMsg(**fields)  # type: ignore[arg-type]  # numbers only
    return pb.MsgCmd(Type=pb.ACK, Payload=inner.SerializeToString()).SerializeToString()


class Storm:
    """Everybody, the gateways that live, and a heap of who has something to do when."""

    def __init__(self, clients: int, *, delay_ms: int, per_s: int) -> None:
        self.now_ms = 1_000
        self.alive = set(GATEWAYS)
        self.turns = [Turns(per_s) for _ in range(SHARDS)]
        self.capped = False
        self.connects: list[tuple[int, str]] = []  # (when, where)
        self.hellos: list[tuple[int, int]] = []  # (when, who)
        self.let_in: list[list[int]] = [[] for _ in range(SHARDS)]
        told = {"reconnect_delay_ms": delay_ms, "heartbeat_ms": 240_000, "repeat_min_ms": 2_000}
        self._welcome = ack(Type=pb.RECONN, ConnID=2, **told)
        self._committed = ack(Type=pb.SYNC, ref=1, run=1)
        self._due: list[tuple[int, int]] = []
        self.machines = [self._made(n) for n in range(clients)]
        for n in range(clients):
            self.machines[n].start(self.now_ms)
            self._round(n)

    def _made(self, n: int) -> Machine:
        snapshot = Snapshot(n + 1, "u", Session(1, b"s"), last_gateway=GATEWAYS[0])
        return Machine(snapshot, gateways=GATEWAYS, listing=False, chance=random.Random(n).random)

    def _round(self, n: int) -> None:
        machine = self.machines[n]
        while effects := machine.take(self.now_ms):
            for link_no, address in effects.connects:
                self.connects.append((self.now_ms, address))
                if address in self.alive:
                    machine.opened(link_no, self.now_ms)
                else:
                    machine.closed(link_no, self.now_ms)
            for frame in effects.frames:
                self._arrived(n, pb.MsgCmd.FromString(frame))
        due_ms = machine.deadline_ms()
        if due_ms is not None:
            heapq.heappush(self._due, (due_ms, n))

    def _arrived(self, n: int, cmd: pb.MsgCmd) -> None:
        machine = self.machines[n]
        answer = b""
        if cmd.Type in HELLOS:
            self.hellos.append((self.now_ms, n))
            shard = n % SHARDS
            wait_ms = self.turns[shard].ask(n, self.now_ms) if self.capped else 0
            if wait_ms:
                answer = ack(Type=cmd.Type, Code=int(Code.LOGIN_LATER), retry_ms=wait_ms)
            else:
                self.let_in[shard].append(self.now_ms)
                answer = self._welcome
        elif cmd.Type == pb.SYNC:
            ref = pb.SyncMsg.FromString(cmd.Payload).ref
            answer = self._committed if ref == 1 else ack(Type=pb.SYNC, ref=ref, run=1)
        if answer:
            machine.frames(machine.link_no, [answer], self.now_ms)

    def breaks(self, *, dies: bool) -> int:
        """Every connection of the first gateway breaks; it dies, or lives on. Returns when."""
        assert self.online() == len(self.machines)
        assert {m.state.gateway for m in self.machines} == {GATEWAYS[0]}
        self.connects.clear()
        self.hellos.clear()
        self.let_in = [[] for _ in range(SHARDS)]
        self.capped = True
        self._due.clear()
        if dies:
            self.alive.discard(GATEWAYS[0])
        self.now_ms += 60_000
        for n, machine in enumerate(self.machines):
            machine.closed(machine.link_no, self.now_ms)
            self._round(n)
        return self.now_ms

    def run(self, ms: int) -> None:
        """Time passes until everybody is back, or it is over."""
        end_ms = self.now_ms + ms
        while self._due and self._due[0][0] <= end_ms and sum(map(len, self.let_in)) < len(self.machines):
            due_ms, n = heapq.heappop(self._due)
            self.now_ms = max(self.now_ms, due_ms)
            machine = self.machines[n]
            again_ms = machine.deadline_ms()
            if again_ms is not None and again_ms <= self.now_ms:  # else it was put off since
                machine.tick(self.now_ms)
                self._round(n)

    def online(self) -> int:
        return sum(m.state.phase is Phase.ONLINE for m in self.machines)


def most_within(moments: Sequence[int], window_ms: int) -> int:
    """The greatest number of moments in any window of this length."""
    ordered = sorted(moments)
    return max(bisect_right(ordered, m + window_ms - 1) - n for n, m in enumerate(ordered))


def test_5000_clients_come_back_at_the_pace_that_the_shards_keep() -> None:
    per_s = StateSettings().logins_per_s
    storm = Storm(5_000, delay_ms=1_000, per_s=per_s)
    begun_ms = storm.breaks(dies=True)
    storm.run(60_000)
    assert storm.online() == 5_000
    assert most_within([at for at, _ in storm.hellos], 1_000) > 4 * per_s * SHARDS, "the crowd that the cap is for"
    for moments in storm.let_in:
        assert most_within(moments, 1_000) <= per_s + per_s * BURST_MS // 1_000, "logins a second, under the cap"
    assert storm.now_ms - begun_ms <= 1_000 + 5_000 // SHARDS * 1_000 // per_s, "no longer than the cap asks for"
    asks = Counter(n for _, n in storm.hellos)
    assert max(asks.values()) <= 2, "who came too early was told when, and came then"
    where = Counter(m.state.gateway for m in storm.machines)
    assert set(where) == set(GATEWAYS[1:])
    assert min(where.values()) > 5_000 // 4, "not all went to one"
    assert len(storm.connects) == 2 * 5_000, "the dead one refused, the next one took it"


def test_all_go_back_to_a_gateway_that_lives_spread_over_the_told_delay() -> None:
    storm = Storm(1_000, delay_ms=8_000, per_s=500)
    storm.breaks(dies=False)
    storm.run(60_000)
    assert Counter(m.state.gateway for m in storm.machines) == {GATEWAYS[0]: 1_000}
    assert len(storm.connects) == len(storm.hellos) == 1_000
    assert most_within([at for at, _ in storm.connects], 1_000) <= 1.5 * 1_000 / 8
