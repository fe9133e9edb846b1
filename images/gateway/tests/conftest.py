"""Settings for a gateway under test: free ports, a folder of its own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from plato.runtime.settings import Settings, load

from tests.ports import free_ports


@pytest.fixture
def make_settings(tmp_path: Path) -> Callable[..., Settings]:
    """make_settings(key=value …) gives Settings whose gateway section has these keys."""

    def make(**gateway: Any) -> Settings:
        tcp, ws, admin = free_ports(3)
        return load(
            None,
            environ={},
            flags={
                "process.name": "edge-0",
                "process.uid": "uid-0",
                "topology.path": str(tmp_path / "topology.json"),
                "gateway.tcp_port": tcp,
                "gateway.ws_port": ws,
                "gateway.admin_port": admin,
                "gateway.run_dir": str(tmp_path / "run"),
                "gateway.workers": 1,
                "gateway.poll_port": 0,
                **{f"gateway.{key}": value for key, value in gateway.items()},
            },
        )

    return make
