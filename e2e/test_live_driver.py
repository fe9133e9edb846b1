"""The live load proves itself on the embedded cluster, before it is trusted on Kubernetes.

It needs no Kubernetes: whatever a gateway's death or a doctored history must show, shows here.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from pathlib import Path

import pytest
from plato.local.cluster import LocalCluster

from e2e.live.balancer import Balancer
from e2e.live.driver import LiveLoad
from e2e.live.history import Connected, Records, Spoken, Tail
from e2e.live.plan import Plan
from e2e.live.report import Excuse, Mark, Report, make_report
from tests.faults import doctored, looking
from tests.faults.checker import Kind, Row, check
from tests.faults.waiting import until_sync


def plan_of(cluster: LocalCluster, folder: Path) -> Plan:
    """A small load on an embedded cluster."""
    auth = cluster.settings.auth
    return Plan(folder, cluster.folder.keys, auth.issuer, auth.audience, cluster.ipconfig_url, users=40, workers=2)


@pytest.mark.timeout(240)
def test_the_load_sees_a_killed_gateway_and_nothing_is_lost(
    new_cluster: Callable[..., LocalCluster], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A killed gateway's clients are counted, excused while it is said, and the histories agree with the database."""
    cluster = new_cluster()
    load = LiveLoad(plan_of(cluster, tmp_path))
    try:
        load.start()
        until_sync(lambda: len(load.so_far().spoken) > 200, 60)
        with load.step("a link dies"):
            excuse = load.excuse("127.0.0.1", "the link of edge-0 was killed")
            cluster.kill("edge-0")
            until_sync(lambda: any(c.cause != "start" for c in load.so_far().connected), 60, "nobody reconnected")
        until_sync(cluster.ready, 60)
        until_sync(lambda: not load.so_far().offline, 60)
        report = load.stop(lambda: asyncio.run(looking.rows(cluster)))
    finally:
        load.kill()
    with capsys.disabled():
        print(f"\n{report}")
    assert report.findings == ()
    assert report.messages > 200
    assert report.in_time >= 0.99
    assert report.unannounced == ()
    assert report.excused > 0
    assert report.unsettled == 0
    assert report.offline == ()
    assert excuse.why
    for place in doctored.PLACES:
        assert Kind.LOST in {f.kind for f in check(doctored.lose(report.history, place))}, place
        assert Kind.DOUBLED in {f.kind for f in check(doctored.double(report.history, place))}, place
        found = {f.kind for f in check(doctored.swap(report.history, place))}
        assert found & {Kind.OUT_OF_ORDER, Kind.UPLINK_ORDER}, place


def _report(connected: list[Connected], excuses: list[Excuse], accepted: float | None = 11.0) -> Report:
    plan = Plan(Path(), Path(), "", "", "", users=2)
    row = Row("c", 1, 0, 7, "u000", b"k" * 16, b"hello")
    records = Records(connected=connected)
    records.spoken["u000", b"k" * 16] = Spoken("u000", "u001", "c", b"k" * 16, b"hello", 1, 10.0, accepted, 11.5)
    records.shown = {"u000": [(11.5, row)], "u001": [(12.0, row)]}
    return make_report(plan, records, [row], {"u000": [row], "u001": [row]}, [Mark("start", 9.0)], excuses, 60.0)


def _came(cause: str, lost: str = "tcp://10.0.0.1:8900", at: float = 30.0, gap_s: float = 2.0) -> Connected:
    return Connected(at, "u000", "tcp://10.0.0.2:8900", cause, lost, gap_s)


def test_only_a_redirect_or_a_killed_gateway_explains_a_reconnect() -> None:
    """A code or a broken socket is unannounced unless its own gateway was killed at that time."""
    assert _report([_came("start"), _came("redirect")], []).unannounced == ()
    assert len(_report([_came("code 206"), _came("broken")], []).unannounced) == 2
    killed = Excuse("10.0.0.1", "node1 was lost", 27.0, 40.0)
    assert _report([_came("broken")], [killed]).unannounced == ()
    assert _report([_came("broken")], [killed]).excused == 1
    assert len(_report([_came("broken", lost="tcp://10.0.0.3:8900")], [killed]).unannounced) == 1
    assert len(_report([_came("broken", at=28.0)], [killed]).unannounced) == 1
    assert len(_report([_came("broken", at=50.0)], [killed]).unannounced) == 1
    assert _report([_came("broken", lost="ws://10.0.0.1:8901/ws")], [killed]).unannounced == ()


def test_late_acks_gaps_and_deliveries_are_measured() -> None:
    """An acknowledgement that never came is late, and who is offline at the end has a gap until then."""
    good = _report([_came("redirect", gap_s=0.0)], [])
    assert (good.in_time, good.acks_s, good.slowest_delivery_s, good.longest_gap_s) == (1.0, (1.0,), 2.0, 0.0)
    assert good.findings == ()
    late = _report([_came("broken")], [], accepted=20.5)
    assert (late.late, late.in_time, late.longest_gap_s) == (1, 0.0, 2.0)
    assert _report([], [], accepted=None).acks_s == (float("inf"),)


def test_records_are_read_on_from_where_they_ended(tmp_path: Path) -> None:
    """A line that its worker has not finished waits for the next reading."""
    path, records = tmp_path / "history.jsonl", Records()
    tail = Tail(path)
    tail.read(records)
    path.write_text('{"t": 1, "e": "offline", "user": "a", "gateway": "g", "code": 0}\n{"t": 2, "e": "lag", ')
    tail.read(records)
    assert (records.offline, records.lags_s) == ({"a": 1}, [])
    with path.open("a") as file:
        file.write('"s": 0.7}\n')
    tail.read(records)
    assert records.lags_s == [0.7]


def test_the_balancer_leads_to_whoever_answers() -> None:
    """A dead target is passed over; bytes go both ways, and the end of one side is the end of both."""
    with socket.create_server(("127.0.0.1", 0)) as dead:
        closed = dead.getsockname()
    with socket.create_server(("127.0.0.1", 0)) as server, Balancer([closed, server.getsockname()]) as balancer:
        for _ in range(2):
            with socket.create_connection(("127.0.0.1", balancer.port), timeout=10) as client:
                peer, _ = server.accept()
                with peer:
                    client.sendall(b"ask")
                    assert peer.recv(3) == b"ask"
                    peer.sendall(b"answer")
                assert client.recv(6) == b"answer"
                assert client.recv(1) == b""
