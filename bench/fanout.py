"""fanout: one payload to all connections, again when all have it; deliveries per CPU second."""

from __future__ import annotations

import contextlib

from bench import subjects
from bench.loading import Options, Run, folder, run
from bench.programs import Programs
from bench.report import Figure, Result, ratios

TARGETS = {subjects.C: 0.8, subjects.NATS: 1.6, subjects.MOSQUITTO: 2.6}


def measure(programs: Programs, options: Options) -> Result:
    """Runs it."""
    size = f"one {options.fan_out_bytes}-byte payload to {options.fan_out_connections:,} connections"
    result = Result("fanout", f"fan-out: {size}; per CPU second")
    names = subjects.there(programs)
    runs: dict[str, list[Run]] = {name: [] for name in names}
    with folder() as where, contextlib.ExitStack() as stack:
        running = {name: stack.enter_context(subjects.started(name, programs, where)) for name in names}
        for _ in range(options.rounds):
            for name in names:
                about = options.fan_out_connections, options.seconds, options.fan_out_bytes, running[name].suffix_bytes
                runs[name].append(run(programs, running[name], "fanout", *about))
    rates = {name: [r.per_cpu_s for r in runs[name]] for name in names}
    result.figures.append(Figure("C", "deliveries/CPU s", tuple(rates[subjects.C])))
    for name in names:
        for part in runs[name][0].cpu_s:
            us = tuple(r.part_us(part) for r in runs[name])
            result.figures.append(Figure(f"  {name}: {part}", "µs CPU/delivery", us))
    for ours in (subjects.WORKER, subjects.GATEWAY):
        for base, goal in TARGETS.items():
            if base in names:
                figure = ratios(rates[ours], rates[base])
                aim = (">=", goal) if ours == subjects.WORKER else None
                result.figures.append(Figure(f"{ours} ÷ {base}", "ratio", figure, aim))
    for peer in (subjects.NATS, subjects.MOSQUITTO):
        if peer in names:
            result.figures.append(Figure(f"{peer} ÷ C", "ratio", ratios(rates[peer], rates[subjects.C])))
    result.notes.append(
        f"behind the payload, worker and gateway send {subjects.SUFFIX_BYTES} bytes that differ per connection"
    )
    result.notes += [f"{name}: {why}" for name, why in programs.missing.items()]
    return result
