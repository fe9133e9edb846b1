"""The short live run, for each change: scale, roll and drain with real pods, while 300 people talk. See test_live.py.

It needs no node of ours, so it runs on any cluster whose nodes' addresses are reached from here.
"""

from __future__ import annotations

import pytest

from e2e.frame.dependencies import Dependencies
from e2e.frame.kube import Kube
from e2e.frame.platform import Images, Platform
from e2e.live import scene, steps
from e2e.testbed.layout import Layout

NAMESPACE = "e2e-live-fast"
STEPS = (steps.scale_up, steps.roll, steps.scale_down, steps.drain_node)


@pytest.fixture(scope="module")
def platform(
    kube: Kube, images: Images, dependencies: Dependencies, tmp_path_factory: pytest.TempPathFactory
) -> Platform:
    """A platform of its own, Ready."""
    made = Platform(kube, "fast", images, dependencies, tmp_path_factory.mktemp("fast"))
    made.install_operator()
    made.create(steps.SPEC)
    return made


@pytest.mark.timeout(1_500)
def test_nobody_notices_a_scale_a_roll_and_a_drain(
    platform: Platform, testbed: Layout | None, capsys: pytest.CaptureFixture[str]
) -> None:
    """Three minutes of it."""
    with capsys.disabled():
        print()
        report = scene.run(platform, testbed, STEPS)
    scene.judge(report)
