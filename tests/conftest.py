"""Fixtures for tests on a whole embedded cluster: `plato up` as a subprocess, in a folder and on ports of its own.

What the supervisor prints stands in <data_dir>/up.log, what its children say in <data_dir>/logs/.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from plato.local.cluster import LocalCluster

_READY_S = 60.0


@pytest.fixture(scope="session")
def new_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., LocalCluster]]:
    """new_cluster({"section.key": value}, ready=True) → a running cluster; all are stopped after the last test."""
    clusters: list[LocalCluster] = []

    def make(settings: Mapping[str, Any] | None = None, *, ready: bool = True) -> LocalCluster:
        cluster = LocalCluster.launch(tmp_path_factory.mktemp("plato") / "data", settings)
        clusters.append(cluster)
        if ready:
            cluster.wait_ready(_READY_S)
        return cluster

    yield make
    for cluster in clusters:
        cluster.down()


@pytest.fixture(scope="session")
def cluster(new_cluster: Callable[..., LocalCluster]) -> LocalCluster:
    """One cluster with default settings, shared by every test that leaves it whole."""
    return new_cluster()


@pytest.fixture(scope="session")
def checkout() -> Path:
    """The folder of the project."""
    return Path(__file__).resolve().parent.parent
