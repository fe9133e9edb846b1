"""The live run: 300 people talk at 50 messages/s from outside the cluster while everything that can happen to it happens.

≥ 99 % is acknowledged within 10 s, nothing is lost, doubled or out of order, and nobody reconnects but by a Redirect or
since the process at the other end was killed. The figures are printed and kept (report.txt among the evidence).
"""

from __future__ import annotations

import pytest

from e2e.frame.dependencies import Dependencies
from e2e.frame.kube import Kube
from e2e.frame.platform import Images, Platform
from e2e.live import scene, steps
from e2e.testbed.layout import Layout

NAMESPACE = "e2e-live"
STEPS = (
    steps.scale_up,
    steps.roll,
    steps.scale_down,
    steps.drain_node,
    steps.kill_kubelet,
    steps.lose_node,
    steps.restart_shards,
    steps.add_and_remove_a_shard,
    steps.restart_operator,
    steps.quiet,
)
"""What changes gateways comes first: the id of one that is gone rests for two minutes, and its return to the record is a
write, so the quiet minute cannot begin before."""


@pytest.fixture(scope="module")
def platform(
    kube: Kube, images: Images, dependencies: Dependencies, tmp_path_factory: pytest.TempPathFactory
) -> Platform:
    """A platform of its own, Ready."""
    made = Platform(kube, "live", images, dependencies, tmp_path_factory.mktemp("live"))
    made.install_operator()
    made.create(steps.SPEC)
    return made


@pytest.mark.nodes
@pytest.mark.timeout(1_500)
def test_nobody_notices_what_is_done_to_the_cluster(
    platform: Platform, testbed: Layout | None, capsys: pytest.CaptureFixture[str]
) -> None:
    """All of it, in one run of about ten minutes."""
    with capsys.disabled():
        print()
        report = scene.run(platform, testbed, STEPS)
    scene.judge(report)
