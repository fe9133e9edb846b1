"""A gateway's children: which of them serve, and what a person hears of those that end at their start."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from plato.local import pods

WHY = "tls.client_dir: /x has no usable tls.crt"


class Gateway:
    """pids.json, a clock, and what is told."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.path = folder / "pids.json"
        self.now = 1_000.0
        self.stamp = 0
        self.living: set[int] = set()
        self.died: list[tuple[str, str]] = []
        self.said: list[str] = []
        monkeypatch.setattr("plato.local.pods.time.time", lambda: self.now)
        monkeypatch.setattr(pods, "_alive", lambda pid: pid in self.living)
        self.watch = pods.PodWatch(
            "edge-0", self.path, lambda name, how: self.died.append((name, how)), self.said.append
        )

    def write(self, worker: int, code: int | None = None, words: str = "", pod: int = 1) -> None:
        """What the gateway says of its only worker: its pid, how the one before ended and why."""
        said = {
            "pod": pod,
            "link": 0,
            "workers": [worker],
            "ended": {} if code is None else {"worker-0": code},
            "words": {"worker-0": words} if words else {},
        }
        self.living = {worker}
        self.stamp += 1
        self.path.write_text(json.dumps(said))
        os.utime(self.path, ns=(self.stamp, self.stamp))
        self.watch.look()

    def worker(self, *, stopped: bool = False) -> dict[str, Any]:
        """Its entry."""
        (found,) = self.watch.processes(True, "", stopped)
        return found


@pytest.fixture
def gateway(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Gateway:
    return Gateway(tmp_path, monkeypatch)


def test_a_worker_that_ends_at_its_start_again_and_again_does_not_serve_and_its_reason_is_told(
    gateway: Gateway,
) -> None:
    gateway.write(100)
    assert gateway.worker()["ready"]
    for n in range(1, 10):
        gateway.now += 7  # a slow machine: longer than any start should take
        gateway.write(100 + n, code=3, words=WHY)
        entry = gateway.worker()
        assert (entry["ready"], entry["restarts"]) == (False, n)
        assert entry["reason"] == f"it ended {n} × at its start: exit code 3: {WHY}"
    assert gateway.died == [("edge-0/worker-0", f"exit code 3: {WHY}")] * 2
    assert gateway.said == [f"edge-0/worker-0 ended {n} times before it served: exit code 3: {WHY}" for n in (3, 4, 8)]
    gateway.now += 13
    assert not gateway.worker()["ready"], "the ones before it lasted nearly as long"
    gateway.now += 2
    assert gateway.worker()["ready"], "it outlasted them"


def test_a_worker_that_was_killed_serves_again_at_once(gateway: Gateway) -> None:
    gateway.write(100)
    gateway.now += 60
    gateway.write(101, code=-9)
    assert gateway.worker()["ready"]
    gateway.now += 1
    gateway.write(102, code=-9)
    assert gateway.worker()["ready"], "somebody may kill it twice"
    assert gateway.died == [("edge-0/worker-0", "signal 9")] * 2
    assert gateway.said == []


def test_what_crashes_at_its_start_is_no_better_than_what_refuses_it(gateway: Gateway) -> None:
    gateway.write(100)
    for n in range(1, 4):
        gateway.now += 1
        gateway.write(100 + n, code=-11)
    assert not gateway.worker()["ready"]
    assert gateway.said == ["edge-0/worker-0 ended 3 times before it served: signal 11"]


def test_between_its_end_and_the_next_start_it_says_why_it_ended(gateway: Gateway) -> None:
    gateway.write(100)
    gateway.write(0, code=3, words=WHY)
    entry = gateway.worker()
    assert (entry["ready"], entry["pid"]) == (False, None)
    assert entry["reason"] == f"it ended (exit code 3: {WHY}); its gateway starts it again"


def test_what_ended_with_a_stopped_gateway_is_not_called_ended(gateway: Gateway) -> None:
    """Nor counted as started again after an end, once the gateway is."""
    gateway.write(100)
    gateway.living = set()
    assert gateway.worker(stopped=True)["reason"] == "it ended with its gateway, which was stopped with `plato stop`"
    gateway.now += 60
    gateway.write(200, pod=2)
    entry = gateway.worker()
    assert (entry["ready"], entry["restarts"], entry["since"]) == (True, 0, gateway.now)
    assert gateway.died == []
