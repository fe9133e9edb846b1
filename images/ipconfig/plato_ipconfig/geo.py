"""Where an address is on the map: the user's own .mmdb file (GeoLite2-City, DB-IP City, or any with `location`).

The file is held in memory whole, so that no look-up reads a disk and a file that is replaced underneath harms nobody. It is
looked at each LOOK_S; a newer one is read beside the loop and put in place when it is whole. What cannot be read leaves the
last good one, or none: then zones alone tell distances. Memory: the file, twice while a newer one is read, and CACHED
answers.
"""

from __future__ import annotations

import asyncio
from math import isfinite
from pathlib import Path
from typing import Final

import maxminddb
from plato.runtime import logs

from plato_ipconfig.core.address import Address

LOOK_S: Final = 5.0
CACHED: Final = 50_000
_log = logs.get("geo")


class Geo:
    """`where` is called by requests; `run` follows the file until cancelled. path None: nothing is ever known."""

    def __init__(self, path: Path | None, look_s: float = LOOK_S) -> None:
        self._path = path
        self._look_s = look_s
        self._reader: maxminddb.Reader | None = None
        self._cache: dict[Address, tuple[float, float] | None] = {}
        self._stamp: tuple[int, int, int] | None = None
        self.trouble = "" if path is not None else "ipconfig.geoip_path is not set"
        """Why no file is used, or why the newest one is not; "" while all is well."""
        self.version = 0
        """Counts the files that were taken."""

    @property
    def loaded(self) -> bool:
        """Whether there is a file to go by."""
        return self._reader is not None

    def where(self, address: Address | None) -> tuple[float, float] | None:
        """(latitude, longitude) in degrees, or None where the file does not say."""
        if self._reader is None or address is None:
            return None
        try:
            return self._cache[address]
        except KeyError:
            pass
        if len(self._cache) >= CACHED:
            self._cache.clear()
        found = self._cache[address] = _look_up(self._reader, address)
        return found

    def load(self) -> None:
        """Reads the file, if it is another one than before; blocks. For a start, before anybody asks."""
        if self._path is None:
            return
        stamp = self._seen()
        if stamp is not None and stamp != self._stamp:
            self._take(stamp, self._open())

    async def run(self) -> None:
        """Looks for a newer file."""
        while True:
            await asyncio.sleep(self._look_s)
            if self._path is not None and (stamp := self._seen()) is not None and stamp != self._stamp:
                self._take(stamp, await asyncio.to_thread(self._open))

    def _seen(self) -> tuple[int, int, int] | None:
        assert self._path is not None
        try:
            facts = self._path.stat()
        except OSError as e:
            self._complain(f"{self._path}: {e.strerror}")
            return None
        return facts.st_ino, facts.st_mtime_ns, facts.st_size

    def _open(self) -> maxminddb.Reader | str:
        """The file, or why not."""
        assert self._path is not None
        try:
            reader = maxminddb.open_database(self._path, maxminddb.MODE_MEMORY)
            reader.get("192.0.2.1")  # a tree that is cut shows here
        # The reader takes what it reads for granted: bytes that are no database come out as any of these.
        except (maxminddb.InvalidDatabaseError, OSError, ValueError, TypeError, LookupError, RecursionError) as e:
            return f"{self._path}: {e}"
        return reader

    def _take(self, stamp: tuple[int, int, int], found: maxminddb.Reader | str) -> None:
        self._stamp = stamp  # a broken one is not read again until it is another
        if isinstance(found, str):
            self._complain(found)
            return
        self._reader, self.trouble = found, ""
        self._cache = {}
        self.version += 1
        facts = found.metadata()
        _log.info("the map is read", path=str(self._path), kind=facts.database_type, built=facts.build_epoch)

    def _complain(self, trouble: str) -> None:
        if trouble != self.trouble:
            kept = "the last good one stands" if self.loaded else "distances go by zones alone"
            _log.warning(f"the map cannot be read; {kept}", reason=trouble)
        self.trouble = trouble


def _look_up(reader: maxminddb.Reader, address: Address) -> tuple[float, float] | None:
    try:
        record = reader.get(address)
    except (maxminddb.InvalidDatabaseError, ValueError, TypeError, LookupError, RecursionError):
        return None  # no place for IPv6 in a file of IPv4; or damage in this one record
    place = record.get("location") if isinstance(record, dict) else None
    if not isinstance(place, dict):
        return None
    latitude, longitude = place.get("latitude"), place.get("longitude")
    if not isinstance(latitude, int | float) or not isinstance(longitude, int | float):
        return None
    if not (isfinite(latitude) and isfinite(longitude) and abs(latitude) <= 90 and abs(longitude) <= 180):
        return None
    return float(latitude), float(longitude)
