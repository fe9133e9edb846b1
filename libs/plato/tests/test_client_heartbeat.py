"""The learnt heartbeat: the whole course through networks that drop idle flows, on a clock of the test's own."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from plato.client import Phase
from plato.client.core.heartbeat import NETWORKS_MAX, PROBE_FIRST, Heartbeat, read
from plato.client.core.model import Learnt, Snapshot, Writes
from plato.client.core.repeats import Timing
from plato.client.core.session import Machine
from plato.client.store import Store
from plato.wire.v1 import client_pb2 as pb

NEVER_MS = 1 << 40
START_MS, FLOOR_MS, CEILING_MS = 30_000, 15_000, 240_000
HOUR_MS = 3_600_000


class Network:
    """A machine, a server that grants wishes within its bounds, and a network between them that forgets idle flows."""

    def __init__(
        self, drop_after_ms: int, *, snapshot: Snapshot | None = None, seed: int = 1, network: str = ""
    ) -> None:
        self.drop_after_ms = drop_after_ms
        self.down = False
        """A tunnel: nothing goes through, no connection opens."""
        self.now_ms = 1_000
        self.machine = Machine(
            snapshot or Snapshot(5, "alice"),
            gateways=["here"],
            listing=False,
            chance=random.Random(seed).random,
            network=network,
        )
        self.granted: list[tuple[int, int]] = []  # (when, interval) as the server told it
        self.resumes: list[int] = []  # when a connection was committed
        self.wishes: list[int] = []  # of Logins and ReConns
        self.written = ""
        self._link_no = 0
        self._active_ms = 0
        self._dead = True
        self.machine.start(self.now_ms)
        self.round()

    def round(self) -> None:
        while effects := self.machine.take(self.now_ms):
            self.written = effects.writes.meta.get("learnt", self.written)
            if effects.want_token:
                self.machine.tokened("token", self.now_ms)
            if effects.frames and effects.link_no == self._link_no:
                for frame in effects.frames:
                    self.carry(pb.MsgCmd.FromString(frame))
            for link_no, _ in effects.connects:
                if self.down:
                    self.machine.closed(link_no, self.now_ms)
                else:
                    self._link_no, self._dead, self._active_ms = link_no, False, self.now_ms
                    assert self.machine.opened(link_no, self.now_ms)

    def passes(self) -> bool:
        """Whether a byte gets through now."""
        self._dead = self._dead or self.down or self.now_ms - self._active_ms > self.drop_after_ms
        if not self._dead:
            self._active_ms = self.now_ms
        return not self._dead

    def carry(self, cmd: pb.MsgCmd) -> None:
        if not self.passes():
            return
        ack = pb.ACKMsg(Type=cmd.Type, user_id="alice")
        if cmd.Type in (pb.LOGIN, pb.RECONN, pb.HEARTBEAT):
            body: Any = {pb.LOGIN: pb.LoginMsg, pb.RECONN: pb.ReConnMsg, pb.HEARTBEAT: pb.HeartbeatMsg}[cmd.Type]
            wish = body.FromString(cmd.Payload).heartbeat_ms
            ack.heartbeat_ms = min(max(wish, FLOOR_MS), CEILING_MS) if wish else START_MS
            self.granted.append((self.now_ms, ack.heartbeat_ms))
            if cmd.Type != pb.HEARTBEAT:
                self.wishes.append(wish)
                ack.heartbeat_floor_ms, ack.heartbeat_ceiling_ms, ack.ConnID = FLOOR_MS, CEILING_MS, self._link_no
        elif cmd.Type == pb.SYNC:
            ack.ref = pb.SyncMsg.FromString(cmd.Payload).ref
            ack.run = self._link_no
            self.resumes.append(self.now_ms)
        else:
            return
        self.arrives(pb.ACK, ack)
        if cmd.Type == pb.SYNC:
            self.arrives(pb.SYNCED, pb.SyncedMsg(ref=ack.ref))

    def arrives(self, kind: pb.CmdType.ValueType, body: Any) -> None:
        frame = pb.MsgCmd(Type=kind, Payload=body.SerializeToString()).SerializeToString()
        self.machine.frames(self._link_no, [frame], self.now_ms)

    def run(self, ms: int) -> None:
        """Time passes."""
        end_ms = self.now_ms + ms
        while (due_ms := self.machine.deadline_ms()) is not None and due_ms <= end_ms:
            self.now_ms = max(self.now_ms, due_ms)
            self.machine.tick(self.now_ms)
            self.round()
        self.now_ms = end_ms

    @property
    def interval_ms(self) -> int:
        return self.machine.timing.heartbeat_ms

    def mostly_ms(self, since_ms: int) -> list[int]:
        """The intervals that stood since then, by how long they did, the longest first."""
        spans: dict[int, int] = {}
        later = [*self.granted[1:], (self.now_ms, 0)]
        for (begun, interval), (ended, _) in zip(self.granted, later, strict=True):
            if ended > since_ms:
                spans[interval] = spans.get(interval, 0) + ended - max(begun, since_ms)
        return sorted(spans, key=lambda i: -spans[i])


@pytest.mark.parametrize("seed", range(5))
def test_a_network_that_drops_flows_after_70_s_settles_it_below(seed: int) -> None:
    net = Network(70_000, seed=seed)
    net.run(2 * HOUR_MS)
    assert START_MS < net.interval_ms < 70_000
    begun, lost = net.now_ms, len(net.resumes)
    assert lost <= 3, "the first connection, and two that were dropped"
    net.run(24 * HOUR_MS)
    assert len(net.resumes) - lost <= 2, "a longer interval is hardly ever tried again"
    beats = [interval for at, interval in net.granted if at >= begun]
    assert sum(interval < 70_000 for interval in beats) >= 0.99 * len(beats)
    assert 45_000 <= net.mostly_ms(begun)[0] < 70_000


def test_the_course_is_to_grow_by_half_until_it_is_dropped_and_to_take_two_thirds() -> None:
    net = Network(70_000)
    net.run(HOUR_MS // 2)
    course = [net.granted[0][1]]
    course += [b for (_, a), (_, b) in zip(net.granted, net.granted[1:], strict=False) if a != b]
    assert course[:4] == [30_000, 45_000, 67_500, 101_250]
    assert 55_000 <= course[4] <= 67_500


def test_a_network_that_drops_nothing_reaches_the_ceiling_and_stays() -> None:
    net = Network(NEVER_MS)
    net.run(4 * HOUR_MS)
    assert net.interval_ms == CEILING_MS
    assert len(net.resumes) == 1


def test_a_network_that_drops_below_the_default_is_learnt_downwards() -> None:
    net = Network(22_000)
    net.run(HOUR_MS)
    assert FLOOR_MS <= net.interval_ms < 22_000
    lost = len(net.resumes)
    net.run(HOUR_MS)
    assert len(net.resumes) - lost <= 1


def test_below_the_floor_there_is_nothing_to_learn() -> None:
    net = Network(5_000)
    net.run(HOUR_MS)
    assert net.interval_ms == FLOOR_MS


def test_a_tunnel_teaches_nothing() -> None:
    net = Network(NEVER_MS)
    net.run(120_000)
    before = net.interval_ms
    net.down = True
    net.run(200_000)
    net.down = False
    net.run(20_000)
    assert net.machine.state.phase is Phase.ONLINE
    assert len(net.resumes) == 2
    assert net.interval_ms >= before
    assert net.wishes[1] == before, "a resume wishes for what is known"


def test_a_drop_that_had_another_reason_is_soon_forgotten() -> None:
    net = Network(NEVER_MS)
    net.run(300_000)
    net._dead = True  # the gateway died just as the flow stood idle; another one answers at once
    net.run(200_000)
    assert len(net.resumes) == 2
    assert net.interval_ms < 101_250
    net.run(8 * HOUR_MS)
    assert net.interval_ms == CEILING_MS


def test_a_network_that_becomes_better_is_noticed() -> None:
    net = Network(70_000)
    net.run(2 * HOUR_MS)
    net.drop_after_ms = NEVER_MS
    net.run(24 * HOUR_MS)
    assert net.interval_ms > 101_250


def test_pushes_on_an_idle_flow_do_not_hide_what_is_dropped() -> None:
    """Something comes every 20 s for a while: no idleness, nothing is learnt from it."""
    net = Network(70_000)
    for _ in range(60):
        net.run(20_000)
        net.arrives(pb.NOTIFY, pb.NotifyMsg())
        net._active_ms = net.now_ms
        net.round()
    assert net.interval_ms == START_MS


def test_each_kind_of_network_is_learnt_for_itself_and_outlives_a_restart(tmp_path: Path) -> None:
    net = Network(70_000, network="cellular")
    net.run(2 * HOUR_MS)
    learnt = net.interval_ms
    assert learnt < 70_000
    net.machine.network_changed("wifi\n", net.now_ms)
    net.drop_after_ms = NEVER_MS
    net.round()
    net.run(4 * HOUR_MS)
    assert net.interval_ms == CEILING_MS
    store = Store(tmp_path / "a.db", 5)
    store.apply(Writes(meta={"learnt": net.written}))
    store.close()
    store = Store(tmp_path / "a.db", 5)
    again = Network(70_000, snapshot=store.load(), network="cellular")
    store.close()
    assert again.interval_ms in range(learnt - 1, learnt + 1)
    assert [one.network for one in read(net.written)] == ["tcp cellular", "tcp wifi"]
    lost = len(again.resumes)
    again.run(PROBE_FIRST * 10_000)
    assert len(again.resumes) == lost


def test_a_changed_network_is_left_and_resumed_at_once() -> None:
    net = Network(NEVER_MS, network="wifi")
    net.run(100_000)
    net._dead = True
    net.machine.network_changed("wifi", net.now_ms)
    net.round()
    assert len(net.resumes) == 1, "nothing changed"
    net.machine.network_changed("cellular", net.now_ms)
    net.round()
    net.run(10)
    assert len(net.resumes) == 2
    assert net.machine.state.phase is Phase.ONLINE


def test_a_server_without_bounds_is_followed() -> None:
    timing = Timing()
    timing.tune(pb.ACKMsg(heartbeat_ms=20_000))
    beat = Heartbeat([], "", timing, lambda: 0.0)
    beat.enter("tcp")
    beat.granted()
    beat.begin(0, at_once=True)
    now_ms = 0
    for _ in range(50):
        now_ms += 20_000
        beat.spoke(now_ms)
        beat.heard(now_ms)
    assert beat.wish() == 20_000
    assert beat.take() is None


def test_the_store_keeps_the_networks_that_were_used_last() -> None:
    timing = Timing(heartbeat_ms=30_000)
    beat = Heartbeat([Learnt("tcp old", 40_000)], "", timing, lambda: 0.0)
    for n in range(NETWORKS_MAX):
        beat.move(f"net {n}")
        beat.enter("tcp")
        beat.granted()
        beat.begin(0, at_once=True)
        beat.spoke(60_000)
        beat.lost(silent=True)
        beat.begin(61_000, at_once=True)
    written = beat.take()
    assert written is not None
    known = list(read(written))
    assert [one.network for one in known] == [f"tcp net {n}" for n in range(NETWORKS_MAX)]
    assert {(one.broken_ms, one.drops) for one in known} == {(60_000, 1)}


def test_polls_teach_nothing_about_sockets() -> None:
    timing = Timing(heartbeat_ms=120_000)
    beat = Heartbeat([Learnt("tcp wifi", 60_000)], "wifi", timing, lambda: 0.0)
    beat.enter("poll")
    assert beat.wish() == 0
    beat.granted()
    assert beat.next_ms(0) == 120_000
    beat.enter("tcp")
    assert beat.next_ms(0) == 60_000, "what is learnt holds at once, granted or not"
    assert beat.wish() == 60_000
    beat.enter("ws")
    assert beat.next_ms(0) == 30_000, "nothing is known: not as long as the one before"
    assert beat.wish() == 0
