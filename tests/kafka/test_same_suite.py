"""Both buses pass the same tests: what PostgreSQL's is asked, Kafka's is asked too, and as many of its own."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path


def test_the_contract_suite_asks_both_buses_the_same(checkout: Path) -> None:
    found = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "--collect-only",
            "-q",
            "-p",
            "no:cacheprovider",
            "tests/contract/test_bus_contract.py",
        ],
        cwd=checkout,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    asked = {
        bus: {re.sub(rf"\b{bus}\b", "BUS", line) for line in found.splitlines() if re.search(rf"\[{bus}\b", line)}
        for bus in ("postgres", "kafka")
    }
    assert len(asked["postgres"]) >= 11
    assert asked["kafka"] == asked["postgres"]
