"""Fifty people talk while every kind of process is killed by -9, five times each: nothing lost, doubled or out of order.

On Kafka the same is done by tests/kafka/test_kill_on_kafka.py, its broker among the rest.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from plato.local.cluster import LocalCluster

from tests.faults import night

FAULT_SETTINGS = night.SETTINGS


@pytest.mark.timeout(420)
async def test_nothing_is_lost_while_everything_is_killed(
    fault_cluster: LocalCluster, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    await night.spend(fault_cluster, tmp_path, capsys)
