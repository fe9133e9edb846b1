"""overload: what the full path still does when several times as many want something as it can serve.

Some people find the peak: each has one message on its way all the time. Then many times as many do the same, more than
can be served within the times that the limiters call calm. What is over is told to wait, and waits. The times are set
shorter than by default, so that a few thousand people are an overload.
"""

from __future__ import annotations

from bench.cluster import cluster, crowd, order
from bench.loading import Options, folder
from bench.programs import Programs
from bench.report import Figure, Result

TIMES = 8
"""So many times the people who find the peak."""
WANTED_OF_PEAK = 0.9
CALM = {"state.bus_calm_ms": 100, "state.receipt_calm_ms": 500, "state.logins_per_s": 2_000}


def measure(programs: Programs, options: Options) -> Result:
    """Runs it."""
    seconds = max(1.0, options.seconds * 4)
    few = max(2, options.people // 8 * 2)
    many = TIMES * few
    result = Result(
        "overload", f"full path under overload, bus {options.bus}: {few:,} people find the peak, {many:,} go beyond it"
    )
    peaks: list[float] = []
    beyond: list[list[float]] = []
    ratios: list[float] = []
    with (
        folder() as where,
        folder() as elsewhere,
        cluster(where, {"bus.type": options.bus, **CALM}) as made,
        crowd(programs, made, where, few) as some,
        crowd(programs, made, elsewhere, many, first=few) as all_of_them,
    ):
        for people in (some, all_of_them):
            order(people, "enter", "ready")
            order(people, f"talk {seconds / 2} 0 {options.payload_bytes}", "done")  # conversations are made
        for _ in range(options.rounds):
            for people, found in ((some, None), (all_of_them, beyond)):
                measured = order(people, f"talk {seconds} 0 {options.payload_bytes}", "done")
                if found is None:
                    peaks.append(measured[0] / measured[1])
                else:
                    found.append(measured)
            ratios.append(beyond[-1][0] / beyond[-1][1] / peaks[-1])
    result.figures.append(Figure("peak", "messages/s", tuple(peaks)))
    result.figures.append(Figure("beyond it", "messages/s", tuple(b[0] / b[1] for b in beyond)))
    result.figures.append(Figure("beyond it, of the peak", "", tuple(ratios), (">=", WANTED_OF_PEAK)))
    result.figures.append(Figure("  UP to ACK, p99, the waiting included", "ms", tuple(b[5] for b in beyond)))
    result.figures.append(Figure("  uplinks sent again", "per message", tuple(b[6] / max(1, b[0]) for b in beyond)))
    result.notes.append("without limiters the messages wait behind the bus instead: docs/overload.md")
    return result
