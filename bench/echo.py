"""echo: frames that come back, per CPU second, with one and with 16 of them in flight on each connection.

Every round measures each subject once, one after the other, so that a ratio compares neighbours in time.
"""

from __future__ import annotations

import contextlib

from bench import subjects
from bench.loading import Options, Run, folder, run
from bench.programs import Programs
from bench.report import Figure, Result, ratios

BURSTS = (1, 16)
TARGETS = {("worker", 1): 0.75, ("worker", 16): 0.55, ("gateway", 1): 0.55, ("gateway", 16): 0.40}
PEERS = {subjects.MOSQUITTO: 1.2, subjects.NATS: 1.6}


def measure(programs: Programs, options: Options) -> Result:
    """Runs it."""
    size = f"{options.connections} connections, {options.payload_bytes}-byte payloads"
    result = Result("echo", f"echo: {size}; per CPU second, against C")
    names = subjects.there(programs)
    runs: dict[tuple[str, int], list[Run]] = {(name, burst): [] for name in names for burst in BURSTS}
    with folder() as where, contextlib.ExitStack() as stack:
        running = {name: stack.enter_context(subjects.started(name, programs, where)) for name in names}
        for name in names:  # first times are slower everywhere
            run(programs, running[name], "echo", options.connections, options.seconds / 4, options.payload_bytes, 16)
        for _ in range(options.rounds):
            for burst in BURSTS:
                for name in names:
                    about = options.connections, options.seconds, options.payload_bytes, burst
                    runs[name, burst].append(run(programs, running[name], "echo", *about))
    for burst in BURSTS:
        rates = {name: [r.per_cpu_s for r in runs[name, burst]] for name in names}
        flight = f"{burst} in flight"
        result.figures.append(Figure(f"C, {flight}", "frames/CPU s", tuple(rates[subjects.C])))
        for name in names[1:]:
            goal = TARGETS.get((name, burst))
            figure = ratios(rates[name], rates[subjects.C])
            result.figures.append(Figure(f"{name} ÷ C, {flight}", "ratio", figure, (">=", goal) if goal else None))
            for part in runs[name, burst][0].cpu_s:
                us = tuple(r.part_us(part) for r in runs[name, burst])
                result.figures.append(Figure(f"  {name}: {part}, {flight}", "µs CPU/frame", us))
        for peer, goal in PEERS.items():
            if peer in names:
                against = ratios(rates[subjects.WORKER], rates[peer])
                result.figures.append(Figure(f"worker ÷ {peer}, {flight}", "ratio", against, (">=", goal)))
    result.notes += [f"{name}: {why}" for name, why in programs.missing.items()]
    return result
