"""What a gateway says of itself: the load figures that ipconfig polls, and the Prometheus metrics.

Workers send their figures each second; the link keeps the newest per worker. Counters of a worker that restarted go on
from where the one before stood.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Protocol

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from .core import lanes
from .stream import Counts

_COUNTERS = {
    "accepted": "Connections let in.",
    "refused": "Connections refused: full, closing, too many of one address, a bad upgrade, or out of file descriptors.",
    "slow_closed": "Connections closed because their peer read too slowly.",
    "login_timeouts": "Connections closed because no whole frame came in time.",
    "bad_frames": "Connections closed for a frame of a bad size or form.",
    "bytes_in": "Bytes read from clients.",
    "bytes_out": "Bytes written to clients.",
    "events": "Events sent to the link: opened, runs of frames, closed, named.",
    "frames_out": "Frames written to clients.",
    "frames_unknown": "Frames for connections that were not here any more.",
    "lane_errors": "Messages of the link that could not be read.",
    "polled": "Connections let in by long polling.",
}
_NAMES = {"bytes_in": "received_bytes", "bytes_out": "sent_bytes"}


@dataclass(slots=True)
class _Worker:
    index: int
    boot: int = 0
    pid: int = 0
    live: bool = False
    newest: lanes.Stats = field(default_factory=lanes.Stats)
    before: dict[str, int] = field(default_factory=lambda: dict.fromkeys(_COUNTERS, 0))
    """Sums of the processes that were at this index before."""
    at_s: float = 0.0
    bytes_per_s: float = 0.0

    def total(self, name: str) -> int:
        return self.before[name] + int(getattr(self.newest, name))


class Load:
    """The newest figures of each worker of one gateway."""

    def __init__(self, max_connections: int, max_bytes_per_s: int = 0) -> None:
        """max_bytes_per_s: what the network carries, both ways together; 0: nobody said."""
        self.max_connections = max_connections
        self.max_bytes_per_s = max_bytes_per_s
        self._workers: dict[int, _Worker] = {}

    def hello(self, hello: lanes.Hello) -> None:
        """A worker connected, a new process or again."""
        worker = self._workers.setdefault(hello.index, _Worker(hello.index))
        if worker.boot != hello.boot:
            for name in _COUNTERS:
                worker.before[name] = worker.total(name)
            worker.newest, worker.at_s, worker.bytes_per_s = lanes.Stats(connections=hello.connections), 0.0, 0.0
        worker.boot, worker.pid, worker.live = hello.boot, hello.pid, True

    def gone(self, index: int) -> None:
        """A worker's lane ended."""
        worker = self._workers[index]
        worker.live = False
        worker.bytes_per_s = 0.0

    def stats(self, index: int, stats: lanes.Stats, now_s: float) -> None:
        """A worker's figures; now_s by a monotonic clock."""
        worker = self._workers[index]
        moved = stats.bytes_in + stats.bytes_out - worker.newest.bytes_in - worker.newest.bytes_out
        if worker.at_s and now_s > worker.at_s:
            worker.bytes_per_s = moved / (now_s - worker.at_s)
        worker.at_s, worker.newest = now_s, stats

    @property
    def workers(self) -> list[_Worker]:
        """By index."""
        return [self._workers[i] for i in sorted(self._workers)]

    @property
    def connections(self) -> int:
        """Live connections of the gateway."""
        return sum(w.newest.connections for w in self._workers.values() if w.live)

    def report(self, name: str, uid: str, serving: bool) -> dict[str, Any]:
        """The body of GET /v1/load: what is left, and of what. bytes_per_s_left: null without a limit."""
        live = [w for w in self.workers if w.live]
        connections = self.connections
        bytes_per_s = round(sum(w.bytes_per_s for w in live))
        bytes_left = max(0, self.max_bytes_per_s - bytes_per_s) if serving else 0
        return {
            "name": name,
            "uid": uid,
            "serving": serving,
            "connections": connections,
            "connections_left": max(0, self.max_connections - connections) if serving else 0,
            "bytes_per_s": bytes_per_s,
            "bytes_per_s_left": bytes_left if self.max_bytes_per_s else None,
            "max_connections": self.max_connections,
            "max_bytes_per_s": self.max_bytes_per_s,
            "loop_lag_ms": max((w.newest.loop_lag_ms for w in live), default=0),
            "workers": [
                {
                    "index": w.index,
                    "pid": w.pid,
                    "connections": w.newest.connections,
                    "bytes_per_s": round(w.bytes_per_s),
                    "loop_lag_ms": w.newest.loop_lag_ms,
                    "clock_lag_ms": w.newest.clock_lag_ms,
                }
                for w in live
            ],
        }


class StreamView(Protocol):
    """What the metrics need of a shard's stream."""

    name: str
    attached: bool
    counts: Counts


class DrainView(Protocol):
    """What the metrics need of the drain."""

    redirects: int
    cut: int

    def status(self) -> dict[str, Any] | None:
        """None: no drain runs."""

    @property
    def left_s(self) -> float:
        """Seconds until the rest is closed."""


class LinkCollector(Collector):
    """plato_gateway_* of one link, read when scraped."""

    def __init__(self, load: Load, streams: dict[str, Any], drain: DrainView, reserved_ahead_s: Any) -> None:
        self._load = load
        self._drain = drain
        self._streams: dict[str, StreamView] = streams
        self._reserved_ahead_s = reserved_ahead_s

    def collect(self) -> Iterable[Metric]:
        """See prometheus_client."""
        workers = self._load.workers
        connections = GaugeMetricFamily("plato_gateway_connections", "Live connections.", labels=["worker"])
        lag = GaugeMetricFamily(
            "plato_gateway_loop_lag_seconds", "Longest round of the last second.", labels=["worker"]
        )
        clock = GaugeMetricFamily(
            "plato_gateway_clock_lag_seconds",
            "How far the clock stands behind the newest conn_id; above 0.005: it stepped back.",
            labels=["worker"],
        )
        for w in workers:
            label = [str(w.index)]
            connections.add_metric(label, w.newest.connections if w.live else 0)
            lag.add_metric(label, w.newest.loop_lag_ms / 1000)
            clock.add_metric(label, w.newest.clock_lag_ms / 1000)
        yield from (connections, lag, clock)
        for name, words in _COUNTERS.items():
            counter = CounterMetricFamily(f"plato_gateway_{_NAMES.get(name, name)}", words, labels=["worker"])
            for w in workers:
                counter.add_metric([str(w.index)], w.total(name))
            yield counter
        yield GaugeMetricFamily("plato_gateway_workers", "Workers attached.", value=sum(w.live for w in workers))
        yield GaugeMetricFamily(
            "plato_gateway_reserved_ahead_seconds", "Reserved stamps ahead of now.", value=self._reserved_ahead_s()
        )
        yield from self._of_drain()
        yield from self._of_streams()

    def _of_drain(self) -> Iterable[Metric]:
        drain, status = self._drain, self._drain.status()
        remaining = status["remaining"] if status is not None else 0
        yield GaugeMetricFamily("plato_gateway_drain_running", "1: a drain runs.", value=float(status is not None))
        yield GaugeMetricFamily("plato_gateway_drain_remaining", "Connections that are still to go.", value=remaining)
        yield GaugeMetricFamily("plato_gateway_drain_left_seconds", "Until the rest is closed.", value=drain.left_s)
        yield CounterMetricFamily(
            "plato_gateway_drain_redirects", "Connections named for a REDIRECT; who stays is named again.",
            value=drain.redirects,
        )  # fmt: skip
        yield CounterMetricFamily(
            "plato_gateway_drain_cut", "Connections that were closed at a drain's deadline.", value=drain.cut
        )

    def _of_streams(self) -> Iterable[Metric]:
        attached = GaugeMetricFamily("plato_gateway_stream_attached", "1: the shard's stream is up.", labels=["shard"])
        counters = {
            "attaches": "Streams opened.",
            "batches_up": "Batches sent to the shard.",
            "batches_down": "Batches received from the shard.",
            "bytes_up": "Bytes of events sent to the shard.",
            "events_dropped": "Events dropped because the stream was down (the ends repeat).",
            "frames_dropped": "Frames dropped because their worker was away or took nothing.",
        }
        families = {
            name: CounterMetricFamily(f"plato_gateway_stream_{name}", words, labels=["shard"])
            for name, words in counters.items()
        }
        for stream in self._streams.values():
            attached.add_metric([stream.name], float(stream.attached))
            for name, family in families.items():
                family.add_metric([stream.name], getattr(stream.counts, name))
        yield attached
        yield from families.values()
