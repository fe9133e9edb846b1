"""What the operator counts, for /metrics."""

from __future__ import annotations

import contextlib
from typing import Final

from prometheus_client import Counter, Gauge, Histogram

PASSES: Final = Counter(
    "plato_operator_passes_total", "Passes over a cluster, by result: done, refused or failed.",
    ["namespace", "cluster", "result"],
)  # fmt: skip
PASS_SECONDS: Final = Histogram(
    "plato_operator_pass_seconds", "How long a pass takes, from the first look to the last write.",
    buckets=(0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30),
)  # fmt: skip
REFUSALS: Final = Counter("plato_operator_refusals_total", "Writes that the API server refused, by kind.", ["kind"])
WRITES: Final = Counter("plato_operator_writes_total", "Writes that were done, by kind.", ["kind"])
REPORTS_FAILED: Final = Counter(
    "plato_operator_reports_failed_total", "Answers of /v1/report that did not come, or were another process's.",
    ["namespace", "cluster"],
)  # fmt: skip
DRAINS: Final = Gauge("plato_operator_drains", "Gateways that are being drained.", ["namespace", "cluster"])
DRAINS_STARTED: Final = Counter(
    "plato_operator_drains_started_total", "Drains that were ordered.", ["namespace", "cluster"]
)
MOVES: Final = Gauge("plato_operator_moves", "Open moves of slots: 0 or 1.", ["namespace", "cluster"])
MOVES_OPENED: Final = Counter("plato_operator_moves_opened_total", "Moves that were opened.", ["namespace", "cluster"])
READY: Final = Gauge("plato_operator_cluster_ready", "Whether the cluster is Ready.", ["namespace", "cluster"])
LEASE_HELD: Final = Gauge("plato_operator_lease_held", "Whether this process holds the Lease.")


def forget(namespace: str, cluster: str) -> None:
    """Takes out the lines of a cluster that is gone: where clusters come and go, they would add up for ever."""
    for metric in (DRAINS, MOVES, READY, DRAINS_STARTED, MOVES_OPENED, REPORTS_FAILED):
        with contextlib.suppress(KeyError):
            metric.remove(namespace, cluster)
    for result in ("done", "refused", "failed"):
        with contextlib.suppress(KeyError):
            PASSES.remove(namespace, cluster, result)
