"""The drain in the link: what workers are told, whom a shard is named, what the report says, when a SIGTERM's is over."""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from plato.runtime.settings import Settings
from plato.topology.record import Drain as Order
from plato.topology.record import Gateway, Topology, even_ranges
from plato_gateway import term
from plato_gateway.core import lanes
from plato_gateway.core.drain import Mode
from plato_gateway.drain import GatewayDrain
from plato_gateway.load import LinkCollector, Load

MakeSettings = Callable[..., Settings]
OWN = Gateway("uid-0", 3, 1, ("s0",), "10.0.0.1", 8900, 8901, "10.0.0.1:8909")
OTHER = replace(OWN, uid="uid-1", worker_id=4)


class FakeLane:
    def __init__(self, index: int = 0, boot: int = 1) -> None:
        self.index, self.boot = index, boot
        self.modes: list[int] = []
        self._reader = lanes.LaneReader()

    def send(self, message: bytes) -> None:
        self.modes += [m.mode for m in self._reader.feed(message) if isinstance(m, lanes.Drain)]


class FakeStream:
    def __init__(self, group: int = 0) -> None:
        self.group = group
        self.idle = True
        self.takes = True
        self.named: list[int] = []

    def redirect(self, conn_ids: list[int]) -> bool:
        if self.takes:
            self.named += conn_ids
        return self.takes


class Rig:
    """A GatewayDrain between fakes; the test steps it."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        settings.gateway.run_dir.mkdir(exist_ok=True)
        self.lanes: dict[int, FakeLane] = {}
        self.streams = {"s0": FakeStream()}
        self.gone = False
        self.overs = 0
        self.drain = GatewayDrain(settings, self.lanes, self.streams, lambda _: 0, lambda: self.gone, self._over)
        self.epoch = 1

    def _over(self) -> None:
        self.overs += 1

    def record(self, own: Gateway | None, other: Gateway | None = OTHER) -> None:
        self.epoch += 1
        gateways = {name: g for name, g in (("edge-0", own), ("edge-1", other)) if g is not None}
        self.drain.topology(Topology("c", self.epoch, even_ranges(["s0"], 1), {}, gateways), own)

    def worker(self, boot: int = 1, connections: int = 0) -> FakeLane:
        lane = self.lanes[0] = FakeLane(0, boot)
        self.drain.hello(lane, lanes.Hello(0, boot, 1, connections, 0))
        return lane

    def held(self, mode: int, *conn_ids: int, cut: int = 0) -> None:
        self.drain.held(self.lanes[0], lanes.Held(mode, cut, array("Q", conn_ids)))

    def steps(self, done: Callable[[], Any]) -> None:
        """Steps, as `run` does, until something is true."""
        end_s = time.monotonic() + 10
        while not done():
            assert time.monotonic() < end_s
            self.drain._look_for_term()
            self.drain._step()
            if self.drain._asked_ms is not None and self.drain._over():
                self.drain._on_over()
            time.sleep(0.005)


def ordered(*, settle_s: int = 0, deadline_s: float = 60, drain_id: int = 41, within_s: int = 0) -> Gateway:
    deadline_ms = int(time.time() * 1000 + deadline_s * 1000)
    order = Order(drain_id, "Manual", 1_000, settle_s, deadline_ms, within_s * 1000)
    return replace(OWN, state="draining", drain=order)


@pytest.mark.parametrize("behind_s", [300, -300])
def test_a_drain_that_comes_lasts_as_long_as_it_says_whatever_the_clocks_are(
    make_settings: MakeSettings, behind_s: int
) -> None:
    """An operator five minutes behind would have every client cut at once, one ahead nobody in time."""
    rig = Rig(make_settings())
    lane = rig.worker()
    rig.record(OWN)
    order = ordered(deadline_s=60 - behind_s, within_s=60)
    rig.record(order)
    assert lane.modes[-1] == Mode.REFUSE
    assert 50 < rig.drain.left_s <= 60
    rig.record(order)
    assert lane.modes[-1] == Mode.REFUSE, "the same order again is no new one, and does not end it"
    again = Rig(make_settings())
    late = again.worker()
    again.record(order)
    if behind_s > 0:
        assert late.modes[-1] == Mode.CUT, "an order that was there before this process is as old as its time says"
    else:
        assert 50 < again.drain.left_s <= 60


def test_a_drain_refuses_newcomers_at_once_names_who_is_here_and_is_drained_when_nobody_is(
    make_settings: MakeSettings,
) -> None:
    rig = Rig(make_settings())
    lane = rig.worker()
    assert lane.modes == [], "nothing is known yet: the worker keeps what the link before said"
    rig.record(OWN)
    assert lane.modes == [Mode.SERVE]
    assert (rig.drain.why, rig.drain.status()) == ("", None)
    rig.record(ordered())
    assert lane.modes[-1] == Mode.REFUSE
    assert rig.drain.why == "draining"
    rig.held(Mode.REFUSE, 5, 6, 7)
    rig.steps(lambda: sorted(rig.streams["s0"].named) == [5, 6, 7])
    assert rig.drain.status() == {"id": 41, "phase": "draining", "remaining": 3, "cut": 0}
    rig.held(Mode.REFUSE)
    rig.streams["s0"].idle = False
    assert not rig.drain.drained, "a batch is under way to the shard"
    rig.streams["s0"].idle = True
    assert rig.drain.status() == {"id": 41, "phase": "drained", "remaining": 0, "cut": 0}


def metrics(rig: Rig) -> dict[str, float]:
    """{name: value} of plato_gateway_drain_*."""
    families = LinkCollector(Load(10), {}, rig.drain, lambda: 0.0).collect()
    return {
        s.name.removeprefix("plato_gateway_drain_"): s.value for f in families for s in f.samples if "_drain_" in s.name
    }


def test_a_drain_is_counted_and_its_counts_stay_when_it_is_over(make_settings: MakeSettings) -> None:
    """A gauge falls back to 0; who was named or cut is counted over all drains, each cut once."""
    rig = Rig(make_settings())
    rig.worker()
    rig.record(OWN)
    none = {"running": 0, "remaining": 0, "left_seconds": 0, "redirects_total": 0, "cut_total": 0}
    assert metrics(rig) == none
    rig.record(ordered())
    rig.held(Mode.REFUSE, 5, 6, 7)
    rig.steps(lambda: len(rig.streams["s0"].named) == 3)
    found = metrics(rig)
    assert 0 < found.pop("left_seconds") <= 60
    assert found == {"running": 1, "remaining": 3, "redirects_total": 3, "cut_total": 0}
    for _ in range(2):
        rig.held(Mode.CUT, cut=2)
    rig.record(OWN)
    assert metrics(rig) == {**none, "redirects_total": 3, "cut_total": 2}
    rig.record(ordered(drain_id=42))
    rig.held(Mode.CUT, cut=1)
    assert metrics(rig)["cut_total"] == 3


def test_a_worker_that_has_not_confirmed_is_not_drained(make_settings: MakeSettings) -> None:
    rig = Rig(make_settings())
    rig.worker()
    rig.record(ordered())
    assert not rig.drain.drained
    rig.held(Mode.REFUSE)
    assert rig.drain.drained
    del rig.lanes[0]
    assert not rig.drain.drained, "a worker that is gone starts again, and what it holds is not known"
    assert rig.worker(boot=2).modes == [Mode.REFUSE], "told before anything lets it take connections in"


def test_the_rest_is_cut_at_the_deadline_and_counted(make_settings: MakeSettings) -> None:
    rig = Rig(make_settings())
    lane = rig.worker()
    rig.record(ordered(settle_s=5, deadline_s=0.1))
    rig.held(Mode.REFUSE, 5, 6)
    rig.steps(lambda: lane.modes[-1] == Mode.CUT)
    rig.held(Mode.CUT, cut=2)
    assert rig.drain.status() == {"id": 41, "phase": "drained", "remaining": 0, "cut": 2}
    assert rig.streams["s0"].named == []
    rig.record(OWN)
    assert lane.modes[-1] == Mode.SERVE
    assert rig.drain.status() is None


def test_a_shard_that_is_down_is_named_its_connections_when_it_is_back(make_settings: MakeSettings) -> None:
    rig = Rig(make_settings())
    rig.worker()
    rig.streams["s0"].takes = False
    rig.record(ordered())
    rig.held(Mode.REFUSE, 5)
    end_s = time.monotonic() + 0.2
    rig.steps(lambda: time.monotonic() > end_s)
    rig.streams["s0"].takes = True
    rig.steps(lambda: rig.streams["s0"].named == [5])


def test_no_target_holds(make_settings: MakeSettings) -> None:
    rig = Rig(make_settings())
    rig.worker()
    rig.record(ordered(), other=replace(OTHER, state="draining"))
    rig.held(Mode.REFUSE, 5)
    end_s = time.monotonic() + 0.2
    rig.steps(lambda: time.monotonic() > end_s)
    assert rig.streams["s0"].named == []
    rig.record(ordered(), other=OTHER)
    rig.steps(lambda: rig.streams["s0"].named == [5])


def test_leaving_and_lost_go_on_with_their_order(make_settings: MakeSettings) -> None:
    for state in ("leaving", "lost"):
        rig = Rig(make_settings())
        rig.worker()
        rig.record(replace(ordered(), state=state))
        assert rig.drain.why == "draining"
    rig.record(None)
    assert rig.drain.why == "draining", "a record that names us no more takes nothing back"


def test_a_sigterm_is_a_drain_with_the_own_settings_and_over_when_nobody_is_left(make_settings: MakeSettings) -> None:
    rig = Rig(make_settings(drain_settle_s=0, drain_pace_per_s=1_000))
    lane = rig.worker()
    rig.record(OWN)
    term.ask(rig.settings.gateway.run_dir, time.monotonic_ns() // 1_000_000)
    rig.steps(lambda: lane.modes[-1] == Mode.REFUSE)
    rig.held(Mode.REFUSE, 5)
    rig.steps(lambda: rig.streams["s0"].named == [5])
    assert rig.overs == 0
    rig.record(OWN)
    assert rig.drain.status() == {"id": 0, "phase": "draining", "remaining": 1, "cut": 0}, "it is not taken back"
    rig.record(ordered())
    assert rig.drain.status() == {"id": 41, "phase": "draining", "remaining": 1, "cut": 0}
    rig.held(Mode.REFUSE)
    rig.steps(lambda: rig.overs > 1)


def test_a_sigterm_is_over_at_once_where_nobody_can_come_or_the_record_is_gone(make_settings: MakeSettings) -> None:
    rig = Rig(make_settings())
    rig.worker(connections=7)
    rig.record(OWN, other=None)
    term.ask(rig.settings.gateway.run_dir, time.monotonic_ns() // 1_000_000)
    rig.steps(lambda: rig.overs)

    rig = Rig(make_settings())
    rig.worker(connections=7)
    rig.record(OWN)
    rig.gone = True
    rig.steps(lambda: rig.overs)


def test_on_kubernetes_a_sigterm_waits_for_another_gateway(make_settings: MakeSettings) -> None:
    settings = make_settings()
    topology = settings.topology.model_copy(update={"config_map": "plato-topology"})
    rig = Rig(settings.model_copy(update={"topology": topology}))
    rig.worker(connections=1)
    rig.record(OWN, other=None)
    term.ask(rig.settings.gateway.run_dir, time.monotonic_ns() // 1_000_000)
    end_s = time.monotonic() + 0.2
    rig.steps(lambda: time.monotonic() > end_s)
    assert rig.overs == 0
    assert rig.drain.why == "draining"
