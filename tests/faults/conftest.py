"""One real cluster per module of fault tests: made with the module's FAULT_SETTINGS, shared by its tests."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from plato.local.cluster import LocalCluster


@pytest.fixture(scope="module")
def fault_cluster(request: pytest.FixtureRequest, new_cluster: Callable[..., LocalCluster]) -> LocalCluster:
    """The module's cluster."""
    return new_cluster(getattr(request.module, "FAULT_SETTINGS", {}))
