"""The map: what a file of the user's says, and that a broken, missing or replaced one harms nobody."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import Callable
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import pytest
from ipconfig_harness import BERLIN, FRANKFURT, NEW_YORK, SYDNEY, WORLD, city, mmdb
from plato_ipconfig.geo import Geo


def loaded(path: Path) -> Geo:
    geo = Geo(path)
    geo.load()
    return geo


def place(geo: Geo, text: str) -> tuple[float, float] | None:
    return geo.where(ip_address(text))


async def until(condition: Callable[[], Any], why: str) -> None:
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end, why
        await asyncio.sleep(0.01)


def test_an_address_of_either_kind_is_looked_up_by_its_network(tmp_path: Path) -> None:
    path = tmp_path / "world.mmdb"
    path.write_bytes(mmdb(WORLD))
    geo = loaded(path)
    assert (geo.loaded, geo.trouble) == (True, "")
    assert place(geo, "198.51.100.127") == FRANKFURT
    assert place(geo, "198.51.100.128") == BERLIN
    assert place(geo, "203.0.113.255") == SYDNEY
    assert place(geo, "2001:db8:1:ffff::1") == NEW_YORK
    assert place(geo, "2001:db8:2::1") is None
    assert place(geo, "192.0.2.1") is None, "a country without a place"
    assert place(geo, "10.0.0.1") is None
    assert geo.where(None) is None


def test_without_a_file_nothing_is_known_and_nothing_fails(tmp_path: Path) -> None:
    for geo, word in ((Geo(None), "not set"), (loaded(tmp_path / "none.mmdb"), "No such file"), (loaded(tmp_path), "")):
        assert (geo.loaded, place(geo, "198.51.100.7")) == (False, None)
        assert word in geo.trouble
        assert geo.trouble


@pytest.mark.parametrize(
    "record",
    [
        {"location": "somewhere"},
        {"location": {}},
        {"location": {"latitude": 1.0}},
        {"location": {"latitude": "1", "longitude": 2.0}},
        {"location": {"latitude": 91.0, "longitude": 2.0}},
        {"location": {"latitude": float("nan"), "longitude": 2.0}},
        {"location": {"latitude": 1.0, "longitude": float("inf")}},
        "text",
        7,
        [1.0, 2.0],
    ],
)
def test_a_record_of_another_shape_says_nothing(tmp_path: Path, record: Any) -> None:
    path = tmp_path / "odd.mmdb"
    path.write_bytes(mmdb({"198.51.100.0/24": record}))
    geo = loaded(path)
    assert geo.loaded
    assert place(geo, "198.51.100.7") is None


def test_damage_anywhere_in_the_file_is_a_refusal_or_an_unknown_place_and_no_error(tmp_path: Path) -> None:
    whole, chance = mmdb(WORLD), random.Random(11)
    path = tmp_path / "damaged.mmdb"
    for _ in range(300):
        bad = bytearray(whole[: chance.randrange(len(whole))] if chance.random() < 0.3 else whole)
        for _ in range(chance.randrange(1, 6)):
            if bad:
                bad[chance.randrange(len(bad))] = chance.randrange(256)
        path.write_bytes(bad)
        geo = loaded(path)
        for text in ("198.51.100.7", "203.0.113.200", "2001:db8:1::1", "10.0.0.1"):
            found = place(geo, text)
            assert found is None or (abs(found[0]) <= 90 and abs(found[1]) <= 180)
        assert geo.loaded != bool(geo.trouble)


async def test_a_newer_file_is_taken_a_broken_one_is_not_and_is_read_once(tmp_path: Path) -> None:
    path, new = tmp_path / "world.mmdb", tmp_path / "new"
    path.write_bytes(mmdb({"198.51.100.0/24": city(*BERLIN)}))
    geo = Geo(path, look_s=0.02)
    geo.load()
    task = asyncio.create_task(geo.run())
    try:
        assert place(geo, "198.51.100.7") == BERLIN
        new.write_bytes(mmdb({"198.51.100.0/24": city(*SYDNEY)}))
        new.replace(path)
        await until(lambda: geo.version == 2, "the newer file was not taken")
        assert place(geo, "198.51.100.7") == SYDNEY, "what was remembered of the old one is forgotten"
        path.write_bytes(b"half a fi")  # in place, as a careless copy does it
        await until(lambda: "half" in geo.trouble or "valid MaxMind" in geo.trouble, "the damage was not seen")
        assert (geo.loaded, geo.version, place(geo, "198.51.100.9")) == (True, 2, SYDNEY)
        path.unlink()
        await until(lambda: "No such file" in geo.trouble, "its end was not seen")
        assert place(geo, "198.51.100.10") == SYDNEY
        new.write_bytes(mmdb({"198.51.100.0/24": city(*FRANKFURT)}))
        new.replace(path)
        await until(lambda: geo.version == 3, "the newest file was not taken")
        assert (place(geo, "198.51.100.7"), geo.trouble) == (FRANKFURT, "")
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
