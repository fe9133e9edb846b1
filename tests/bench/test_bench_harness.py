"""The benchmarks' harness works: figures are what they say, and a short run of the real programs gives one."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from bench import subjects
from bench.__main__ import MEASURES
from bench.loading import folder, run
from bench.programs import Programs
from bench.report import Figure, Result, ratios, table
from tests.repo.tracked import ROOT, text


def test_a_ratio_compares_neighbours_in_time() -> None:
    assert ratios([2.0, 30.0], [4.0, 10.0]) == (0.5, 3.0)
    with pytest.raises(ValueError, match="longer"):
        ratios([1.0], [1.0, 2.0])


def test_a_figure_shows_its_median_spread_and_whether_the_target_is_met() -> None:
    least = Figure("worker ÷ C", "ratio", (0.5, 0.9, 0.7), (">=", 0.75))
    most = Figure("bytes", "bytes", (300.0,), ("<=", 512.0))
    free = Figure("C", "frames/CPU s", (123_456.0,))
    assert (least.median, least.met, most.met, free.met) == (0.7, False, True, None)
    lines = table(Result("echo", "echo", [least, most, free], ["a note"])).splitlines()
    assert lines[2].split("   ")[:1] == ["worker ÷ C"]
    assert "0.70" in lines[2]
    assert "0.50 … 0.90" in lines[2]
    assert lines[2].endswith("missed")
    assert lines[3].endswith("met")
    assert "123,456" in lines[4]
    assert lines[5] == "   a note"
    assert json.loads(json.dumps(least.as_json()))["samples"] == [0.5, 0.9, 0.7]


def test_what_a_machine_lacks_is_said_in_words(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("shutil.which", lambda *_, **__: None)
    found = Programs()
    assert (found.c, found.nats, found.mosquitto) == ({}, None, None)
    assert "no C compiler" in found.missing["C compiler"]
    assert "no `go` on the PATH" in found.missing["NATS"]
    assert "no `mosquitto` on the PATH" in found.missing["mosquitto"]
    assert subjects.there(found) == [subjects.C, subjects.WORKER, subjects.GATEWAY]


def test_a_short_run_of_the_real_programs_gives_figures() -> None:
    ours = Programs(peers=False)
    if not ours.c:
        pytest.skip(ours.missing["C compiler"])
    with folder() as where:
        for name in (subjects.C, subjects.WORKER):
            with subjects.started(name, ours, where) as subject:
                echo = run(ours, subject, "echo", 20, 0.1, 100, 16)
                # Whole rounds of 16 frames on 20 connections; each part's CPU is told.
                assert echo.count >= 16 * 20
                assert echo.count % 16 == 0
                assert set(echo.cpu_s) == set(subject.pids)
                fan_out = run(ours, subject, "fanout", 50, 0.1, 200, subject.suffix_bytes)
                assert fan_out.count >= 50
                assert fan_out.count % 50 == 0
                assert run(ours, subject, "storm", 60, 16, 100).count == 60


def test_the_page_and_the_help_name_every_measurement() -> None:
    page = text("docs/benchmarks.md")
    assert [name for name in MEASURES if f"`{name}`" not in page] == []
    said = subprocess.run(
        [sys.executable, "-m", "bench", "--help"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert all(name in said.stdout for name in MEASURES)
