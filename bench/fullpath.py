"""fullpath: messages from one person's UP to the other's PUSH, durable, through every process, on the machine's cores.

First as fast as they go (each person has one message on its way all the time), then at half of that. CPU per message of
each process comes from the first part, latencies from the second.
"""

from __future__ import annotations

from bench.cluster import cluster, crowd, order, parts, spent_s
from bench.loading import Options, folder
from bench.programs import Programs
from bench.report import Figure, Result

WANTED_PER_S = 3_000


def measure(programs: Programs, options: Options) -> Result:
    """Runs it."""
    seconds = max(1.0, options.seconds * 4)
    result = Result(
        "fullpath",
        f"full path, durable, bus {options.bus}: {options.people:,} people in pairs, {options.payload_bytes}-byte bodies",
    )
    rates: list[float] = []
    costs: dict[str, list[float]] = {}
    halves: list[list[float]] = []
    repeats = 0.0
    with (
        folder() as where,
        cluster(where, {"bus.type": options.bus}) as made,
        crowd(programs, made, where, options.people) as people,
    ):
        _, entered_s = order(people, "enter", "ready")
        order(people, f"talk {seconds / 2} 0 {options.payload_bytes}", "done")  # conversations and pools are made
        for _ in range(options.rounds):
            pids = parts(made)
            before = spent_s(pids)
            pushes, took_s, *_, repeated = order(people, f"talk {seconds} 0 {options.payload_bytes}", "done")
            after = spent_s(pids)
            rates.append(pushes / took_s)
            repeats += repeated
            for part in pids:
                costs.setdefault(part, []).append((after[part] - before[part]) / pushes * 1e6)
            half = rates[-1] / 2
            halves.append(order(people, f"talk {seconds} {half:.0f} {options.payload_bytes}", "done"))
    result.figures.append(Figure("messages", "per s", tuple(rates), (">=", WANTED_PER_S)))
    for part, us in sorted(costs.items(), key=lambda item: -max(item[1])):
        if max(us) >= 1:
            result.figures.append(Figure(f"  {part}", "µs CPU/message", tuple(us)))
    names = ("UP to PUSH, p50", "UP to PUSH, p99", "UP to ACK, p50", "UP to ACK, p99")
    result.figures.append(Figure("at half load", "per s", tuple(h[0] / h[1] for h in halves)))
    for at, name in enumerate(names, 2):
        result.figures.append(Figure(f"  {name}", "ms", tuple(h[at] for h in halves)))
    result.notes.append(
        f"{options.people:,} came in within {entered_s:.1f} s; {repeats:.0f} uplinks were repeated at full load"
    )
    result.notes.append("the people share the cores with the cluster: their own CPU is not counted, but taken")
    return result
