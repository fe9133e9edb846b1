"""How the commands show and change what ipconfig does: explain, override, rebalance. For `plato` and `kubectl plato`."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from typing import Any
from urllib.parse import urlencode


def explain_path(address: str, zone: str, region: str) -> str:
    """What to ask ipconfig's internal port for."""
    given = {"address": address, "zone": zone, "region": region}
    query = urlencode({key: value for key, value in given.items() if value})
    return f"/explain?{query}" if query else "/explain"


def explained(found: dict[str, Any]) -> list[str]:
    """The answer of /explain for people: who is listed in which order, and why."""
    caller, lines = found["caller"], []
    where = [f"{key} {caller[key]}" for key in ("zone", "region") if caller[key]]
    if caller["map"] is not None:
        where.append(f"at {caller['map'][0]:.2f}, {caller['map'][1]:.2f}")
    lines.append(
        f"for a caller {caller['address'] or 'of no known address'}: {', '.join(where) or 'nobody knows where'}"
    )
    if found["map"]["trouble"]:
        lines.append(f"map: {found['map']['trouble']}")
    if found["override"] is not None:
        lines.append(f"override: {overridden(found['override'])}")
    rows = [("", "gateway", "zone", "group", "active", "static", "why")]
    for gateway in found["gateways"]:
        place = "–" if gateway["place"] is None else str(gateway["place"])
        scores = (f"{gateway['active']:.2f}", f"{gateway['static']:.0f}")
        rows.append((place, gateway["name"], gateway["zone"] or "–", gateway["group"], *scores, gateway["why"]))
    return [*lines, "", *table(rows)]


def overridden(override: dict[str, Any] | None) -> str:
    """An override in one line."""
    if override is None:
        return "none"
    parts = [f"by {override['by']}"] if override["by"] != "load" else []
    parts += [f"{key} {', '.join(override[key])}" for key in ("first", "never") if override[key]]
    if override["until_ms"]:
        left_s = max(0, round(override["until_ms"] / 1000 - time.time()))
        parts.append(f"for {left_s} s more")
    if override["reason"]:
        parts.append(f"because: {override['reason']}")
    return "; ".join(parts)


def override_body(by: str, first: Sequence[str], never: Sequence[str], for_s: int, reason: str) -> str:
    """The JSON of PUT /override."""
    return json.dumps({"by": by, "first": list(first), "never": list(never), "for_s": for_s, "reason": reason})


def rebalance_body(dry_run: bool, pace: int | None, least: int) -> str:
    """The JSON of POST /rebalance."""
    return json.dumps({"dry_run": dry_run, "least": least, **({"pace_per_s": pace} if pace is not None else {})})


def rebalanced(found: dict[str, Any], dry_run: bool, known: Sequence[str] = ()) -> list[str]:
    """The answer of /rebalance for people. known: the gateways that there are."""
    rows = [("gateway", "zone", "connections", "of")]
    for name, g in sorted(found["gateways"].items()):
        rows.append((name, g["zone"] or "–", str(g["connections"]), str(g["most"])))
    lines = [*table(rows), "", f"the fullest is {found['imbalance']:.2f} times as full as all of them together"]
    if left_out := sorted(set(known) - set(found["gateways"])):
        lines.append(f"not counted: {', '.join(left_out)}; stopped, drained, or back for some seconds only")
    for shift in found["shifts"]:
        why = found["refused"].get(shift["from"])
        said = f": {shift['from']} refused: {why}" if why else ""
        lines.append(f"{shift['clients']} clients of {shift['from']} go to {shift['to']}{said}")
    if not found["shifts"]:
        lines.append("nothing is to be moved")
    elif dry_run:
        lines.append("nothing was changed (--dry-run)")
    return lines


def table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Columns side by side."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
