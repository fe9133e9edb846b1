"""One real cluster per module of fault tests, made with the module's FAULT_SETTINGS and stopped after its last test."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from plato.local.cluster import LocalCluster


@pytest.fixture(scope="module")
def fault_cluster(request: pytest.FixtureRequest, new_cluster: Callable[..., LocalCluster]) -> Iterator[LocalCluster]:
    """The module's cluster."""
    cluster = new_cluster(getattr(request.module, "FAULT_SETTINGS", {}))
    yield cluster
    cluster.down()  # a cluster that stands idle still costs the next module its time
