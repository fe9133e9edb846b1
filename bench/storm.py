"""storm: connects whose first frame is answered, per CPU second; they all stay open to the end."""

from __future__ import annotations

import contextlib

from bench import subjects
from bench.loading import Options, Run, folder, run
from bench.programs import Programs
from bench.report import Figure, Result, ratios

TARGETS = {subjects.WORKER: 0.7}


def measure(programs: Programs, options: Options) -> Result:
    """Runs it."""
    size = f"{options.storm_connections:,} connections, {options.storm_window} under way at a time"
    result = Result("storm", f"connection storm: {size}, first frame answered; per CPU second, against C")
    names = subjects.there(programs)
    runs: dict[str, list[Run]] = {name: [] for name in names}
    with folder() as where, contextlib.ExitStack() as stack:
        running = {name: stack.enter_context(subjects.started(name, programs, where)) for name in names}
        for _ in range(options.rounds):
            for name in names:
                about = options.storm_connections, options.storm_window, options.payload_bytes
                runs[name].append(run(programs, running[name], "storm", *about))
    rates = {name: [r.per_cpu_s for r in runs[name]] for name in names}
    result.figures.append(Figure("C", "connects/CPU s", tuple(rates[subjects.C])))
    for name in names[1:]:
        goal = TARGETS.get(name)
        result.figures.append(
            Figure(f"{name} ÷ C", "ratio", ratios(rates[name], rates[subjects.C]), (">=", goal) if goal else None)
        )
    for name in names:
        for part in runs[name][0].cpu_s:
            us = tuple(r.part_us(part) for r in runs[name])
            result.figures.append(Figure(f"  {name}: {part}", "µs CPU/connect", us))
        result.figures.append(Figure(f"  {name}: wall", "connects/s", tuple(r.count / r.wall_s for r in runs[name])))
    result.notes.append("NATS and mosquitto: with their opening and one subscription, which their protocols ask for")
    result.notes += [f"{name}: {why}" for name, why in programs.missing.items()]
    return result
