"""The jars of a Kafka broker: fetched by Maven once, kept outside of the checkout, compared with their SHA-256 at each use.

    python -m tools.kafka_broker.jars     fetches them if need be and prints their folder

The folder's name is the hash of pom.xml and jars.sha256, so that another version lies beside this one. `missing` says why a
machine cannot; with the jars there already, Maven is not needed.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

from plato.local.kafka import java

HERE = Path(__file__).resolve().parent
POM = HERE / "pom.xml"
SUMS = HERE / "jars.sha256"


class JarsError(Exception):
    """The jars cannot be had, or are not the ones that were pinned: one line."""


def folder() -> Path:
    """Where they lie, or will."""
    cache = Path(os.environ.get("PLATO_CACHE") or "~/.cache/plato").expanduser()
    key = hashlib.sha256(POM.read_bytes() + SUMS.read_bytes()).hexdigest()[:16]
    return cache / "kafka" / key


def missing() -> str:
    """What this machine lacks to run a broker, in words; "" when it can."""
    if not java():
        return "no Kafka broker can run here: there is no Java (install one, 17 or later, or set JAVA_HOME)"
    if not folder().exists() and shutil.which("mvn") is None:
        return "no Kafka broker can be had here: there is no Maven to fetch its jars (install mvn)"
    return ""


def jars() -> Path:
    """The folder of the jars, fetched first where they are not there. Raises JarsError."""
    place = folder()
    place.parent.mkdir(parents=True, exist_ok=True)
    with (place.parent / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not place.exists():
            new = place.with_name(f"{place.name}.unfinished")
            shutil.rmtree(new, ignore_errors=True)
            _fetch(new)
            _compare(new)
            new.rename(place)
    _compare(place)
    return place


def _fetch(into: Path) -> None:
    program = shutil.which("mvn")
    if program is None:
        raise JarsError(missing())
    command = [program, "-B", "-q", "-f", str(POM), "dependency:copy-dependencies", f"-DoutputDirectory={into}"]
    try:
        run = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=300, cwd=into.parent, check=False
        )
    except subprocess.TimeoutExpired as e:
        raise JarsError("Maven did not end within 300 s") from e
    if run.returncode != 0:
        lines = [line for line in (run.stdout + run.stderr).splitlines() if "ERROR" in line]
        raise JarsError(f"Maven could not fetch the jars: {lines[0] if lines else f'code {run.returncode}'}")


def _compare(place: Path) -> None:
    pinned = {name: digest for digest, name in map(str.split, SUMS.read_text(encoding="utf-8").splitlines())}
    found = {jar.name: hashlib.sha256(jar.read_bytes()).hexdigest() for jar in sorted(place.glob("*.jar"))}
    if found != pinned:
        odd = sorted(name for name in pinned.keys() | found.keys() if pinned.get(name) != found.get(name))
        raise JarsError(f"{place} does not hold the pinned jars: {', '.join(odd[:5])}; remove the folder and try again")


if __name__ == "__main__":
    try:
        print(missing() or jars())
    except JarsError as e:
        sys.exit(str(e))
