"""`make bench`, `python -m bench [NAME …]`: measures Plato beside C, NATS and mosquitto; prints tables, writes JSON.

    python -m bench                     everything, in the order of MEASURES
    python -m bench echo fanout         some of it
    python -m bench --quick             a second of each: tries the harness, the figures mean nothing
    python -m bench --rounds 9 echo     more pairs

Results lie in bench/results/<date>-<names>.json, which git ignores. It reports and judges nothing: exit code 0 unless a
measurement could not be taken; what this machine lacks (Go, mosquitto, a C compiler) is said in words. The page about it is
docs/benchmarks.md.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

from bench import echo, fanout, fanout_large, fullpath, idle, loginstorm, overload, storm
from bench.loading import Options
from bench.processes import BenchError
from bench.programs import HERE, Programs, versions
from bench.report import Result, table

MEASURES: dict[str, Callable[[Programs, Options], Result]] = {
    "echo": echo.measure,
    "fanout": fanout.measure,
    "storm": storm.measure,
    "idle": idle.measure,
    "fullpath": fullpath.measure,
    "loginstorm": loginstorm.measure,
    "fanoutlarge": fanout_large.measure,
    "overload": overload.measure,
}
QUICK = Options(
    rounds=1, seconds=0.3, connections=100, fan_out_connections=500, storm_connections=500, people=100, storm_people=100
)


def machine() -> dict[str, str | int | float]:
    """What kind of machine this is; no names of it."""
    model = [
        line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line
    ]
    return {
        "processor": model[0] if model else platform.machine(), "cores": os.cpu_count() or 0,
        "memory_gib": round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / (1 << 30)),
        "kernel": platform.release(), "python": platform.python_version(), "load_before": os.getloadavg()[0],
    }  # fmt: skip


def main() -> int:
    """Entry point; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m bench")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(MEASURES)}; default: all")
    parser.add_argument("--rounds", type=int, help="interleaved rounds (default 5)")
    parser.add_argument("--seconds", type=float, help="of each run (default 1.5)")
    parser.add_argument("--connections", type=int, help="of echo (default 1,000)")
    parser.add_argument(
        "--bus", default="postgres", help="bus.type of the cluster that path and login start (postgres)"
    )
    parser.add_argument("--quick", action="store_true", help="tries the harness only")
    given = parser.parse_args()
    if unknown := set(given.names) - set(MEASURES):
        parser.error(f"{', '.join(sorted(unknown))}: there are {', '.join(MEASURES)}")
    chosen = {key: getattr(given, key) for key in ("rounds", "seconds", "connections", "bus") if getattr(given, key)}
    options = replace(QUICK if given.quick else Options(), **chosen)
    programs = Programs()
    for name, why in programs.missing.items():
        print(f"not here: {name}: {why}", flush=True)
    if not programs.c:
        return 1
    began, about = datetime.datetime.now(datetime.UTC), machine()
    print(
        f"{about['processor']}, {about['cores']} cores, load {about['load_before']:.1f}; {options.rounds} rounds",
        flush=True,
    )
    results, failed = [], []
    for name in given.names or MEASURES:
        start_s = time.monotonic()
        try:
            results.append(MEASURES[name](programs, options))
        except (BenchError, OSError) as e:
            failed.append(name)
            print(f"\n── {name}: could not be measured: {e}", flush=True)
            continue
        print(f"\n{table(results[-1])}\n   ({time.monotonic() - start_s:.0f} s)", flush=True)
    folder = HERE / "results"
    folder.mkdir(exist_ok=True)
    path = folder / f"{began:%Y%m%dT%H%M%SZ}-{'-'.join(given.names) or 'all'}.json"
    written = {
        "date": began.isoformat(timespec="seconds"), "command": " ".join(["python -m bench", *sys.argv[1:]]),
        "machine": about, "options": asdict(options), "peers": versions(programs), "missing": programs.missing,
        "failed": failed, "results": [result.as_json() for result in results],
    }  # fmt: skip
    path.write_text(json.dumps(written, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    print(f"\nwritten: {path}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
