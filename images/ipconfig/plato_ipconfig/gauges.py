"""plato_ipconfig_* gauges, read when they are scraped: how evenly the gateways are filled, who is heard, the switch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from plato_ipconfig.core.balance import imbalance
from plato_ipconfig.core.rank import Group
from plato_ipconfig.dispatch import Dispatch


class Gauges(Collector):
    """Of one dispatch."""

    def __init__(self, dispatch: Dispatch) -> None:
        self._dispatch = dispatch

    def collect(self) -> Iterable[Metric]:
        """See prometheus_client."""
        dispatch = self._dispatch
        filled = dispatch.filled()
        yield GaugeMetricFamily(
            "plato_ipconfig_imbalance_ratio",
            "Share filled of the fullest gateway over that of all together; 1 is even.",
            value=imbalance(filled),
        )
        yield GaugeMetricFamily(
            "plato_ipconfig_connections",
            "Connections of the gateways that are heard.",
            value=sum(g.connections for g in filled.values()),
        )
        groups = Counter(place.group for place in dispatch.ranking(None).places)
        family = GaugeMetricFamily(
            "plato_ipconfig_gateways", "Gateways of the topology, by how they are seen.", labels=["group"]
        )
        for group in Group:
            family.add_metric([group.name.lower()], groups[group])
        yield family
        yield GaugeMetricFamily(
            "plato_ipconfig_override", "1: a manual override is on.", value=float(dispatch.switch.override is not None)
        )
        yield GaugeMetricFamily(
            "plato_ipconfig_map_loaded", "1: an .mmdb file tells distances.", value=float(dispatch.geo.loaded)
        )
