"""A bus that does not answer is told where a person looks, by processes that go on serving what they can."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from aiokafka.errors import KafkaConnectionError
from plato.adapters import bus as buses
from plato.adapters import bus_kafka, bus_kafka_reader
from plato.adapters.bus_kafka import KafkaBusProducer
from plato.adapters.bus_kafka_config import KafkaConfig
from plato.adapters.bus_kafka_reader import KafkaBusReader
from plato.cli.show import status_lines
from plato.core.errors import Unavailable
from plato.local import doctor, probe
from plato.local.bus_watch import BusWatch
from plato.local.folder import DataFolder
from plato.local.keeper import ServiceKeeper
from plato.local.ports import PortUse
from plato.local.specs import Spec
from plato.runtime import admin
from plato.runtime.settings import BusSettings

WHY = "read of plato-uplinks, Kafka at k:9092: no broker lets us in"


class Gone:
    """A client of a Kafka that is away."""

    def __init__(self, **_: Any) -> None:
        pass

    async def start(self) -> None:
        """See aiokafka."""
        raise KafkaConnectionError("no connection")

    async def stop(self) -> None:
        """See aiokafka."""


async def test_both_sides_of_the_bus_know_that_it_is_away_and_that_it_came_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = KafkaConfig(BusSettings(type="kafka", servers="127.0.0.1:1", partitions=2))
    monkeypatch.setattr(bus_kafka, "AIOKafkaProducer", Gone)
    monkeypatch.setattr(bus_kafka_reader, "AIOKafkaConsumer", Gone)
    producer, reader = KafkaBusProducer(config, 2), KafkaBusReader(config)
    assert buses.away(producer) == buses.away(reader) == {}
    with pytest.raises(Unavailable):
        await producer.append({0: [b"x"]})
    with pytest.raises(Unavailable):
        await reader.read_many({0: 0}, 10, 1_000)
    for side in (producer, reader):
        assert "no broker lets us in" in buses.away(side)["bus"]

    async def taken(*_: object) -> Any:
        return []

    monkeypatch.setattr(producer, "_append", taken)
    monkeypatch.setattr(reader, "_read_many", taken)
    await producer.append({0: [b"x"]})
    await reader.read_many({0: 0}, 10, 1_000)
    assert buses.away(producer) == buses.away(reader) == {}
    reader.away = WHY
    await reader.wait([], 0)
    assert reader.away == "", "who owns no partition does not know"
    await producer.close()
    await reader.close()


async def test_readyz_tells_of_the_bus_and_stays_ready() -> None:
    """A pod that serves reads must not be taken from its service."""
    application = httpx.ASGITransport(admin.app(lambda: "", info=lambda: {"bus": WHY}))
    async with httpx.AsyncClient(transport=application, base_url="http://h") as client:
        answer = await client.get("/readyz")
    assert (answer.status_code, answer.json()) == (200, {"ready": True, "reason": "", "bus": WHY})


@pytest.mark.parametrize(
    ("answer", "asked"),
    [
        ((200, {"ready": True, "reason": "", "bus": WHY}), ("", WHY)),
        ((200, {"ready": True, "reason": ""}), ("", "")),
        ((503, {"ready": False, "reason": "draining", "bus": WHY}), ("draining", WHY)),
        ((503, ["what"]), ("/readyz answers 503", "")),
        ((0, None), ("it does not answer", "")),
    ],
)
async def test_the_supervisor_hears_what_readyz_says(
    monkeypatch: pytest.MonkeyPatch, answer: tuple[int, Any], asked: tuple[str, str]
) -> None:
    async def get(*_: object) -> tuple[int, bytes]:
        return answer[0], json.dumps(answer[1]).encode()

    monkeypatch.setattr(probe, "get", get)
    assert await probe.ask("h", 1) == asked


def test_one_line_when_it_begins_and_one_when_it_ends() -> None:
    watch = BusWatch()
    assert watch.look({"plato-msg-0": "", "plato-s0": ""}, 10) is None
    began = watch.look({"plato-msg-0": WHY, "plato-s0": ""}, 20)
    assert (
        began == f"the bus does not answer plato-msg-0: {WHY}; what is sent waits for it; what was stored can be read"
    )
    assert watch.look({"plato-msg-0": WHY, "plato-s0": WHY}, 21) is None
    assert watch.look({"plato-msg-0": "", "plato-s0": WHY}, 30) is None, "one still sees it"
    assert watch.look({"plato-msg-0": "", "plato-s0": ""}, 65) == "the bus answers again, after 45 s"
    assert watch.look({"plato-msg-0": "", "plato-s0": ""}, 66) is None


def status(bus: str) -> dict[str, Any]:
    entry = {"kind": "msg", "pid": 7, "ready": True, "restarts": 0, "since": 0.0, "reason": ""}
    return {
        "version": "1",
        "phase": "up",
        "supervisor_pid": 1,
        "data_dir": "/d",
        "ports": {},
        "durability": "node",
        "processes": [{**entry, "name": "plato-msg-0", "bus": bus}, {**entry, "name": "edge-0/worker-0"}],
    }


def test_status_and_doctor_tell_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shown = "\n".join(status_lines(status(WHY)))
    assert f"the bus does not answer plato-msg-0: {WHY}" in shown
    assert "yes, without the bus" in shown
    assert "bus" not in "\n".join(status_lines(status("")))
    folder = DataFolder(tmp_path)
    for why, level in ((WHY, doctor.Level.BAD), ("", None)):
        monkeypatch.setattr(DataFolder, "read_status", lambda _, why=why: status(why))
        found = [finding.level for finding in doctor._cluster(folder) if "the bus does not answer" in finding.text]
        assert found == ([level] if level is not None else [])


def test_a_keeper_passes_on_what_its_process_says_of_the_bus(tmp_path: Path) -> None:
    """Kept ready; and a process that ended says nothing of the bus any more."""

    class Turned(ServiceKeeper):
        def turn(self, why: str, bus: str) -> None:
            self._turn(not why, why, bus)

    marks: list[int] = []
    spec = Spec("plato-msg-0", "msg", ("/bin/true",), tmp_path / "log", PortUse("a", "b", "127.0.0.1", 1))
    kept = Turned(spec, None, print, lambda: marks.append(1))  # type: ignore[arg-type]  # it is never started
    kept.turn("", WHY)
    assert (kept.ready, kept.bus, len(marks)) == (True, WHY, 1)
    kept.turn("", WHY)
    assert len(marks) == 1
    kept.turn("it ended", "")
    assert (kept.ready, kept.bus) == (False, "")
