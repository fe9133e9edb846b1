"""Objects in, lines out: what `kubectl plato status` and `slots` print. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from plato.topology.record import LOST, SERVING, Topology
from plato.topology.slots import counts, targets

_GOOD_WHEN_FALSE = frozenset(
    {"Stalled", "ConfigurationWarning", "Resharding", "Reconciling", "Paused", "Draining", "DrainBlocked", "Unschedulable",
     "Degraded", "NodeLost", "Evacuating"}
)  # fmt: skip
"""Conditions that call for a look while they are True; the others while they are not."""


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> list[str]:
    """Columns as wide as their widest cell, two blanks between; no rows give no lines."""
    cells = [[str(cell) for cell in row] for row in rows]
    if not cells:
        return []
    widths = [max(len(row[i]) for row in (*cells, list(head))) for i in range(len(head))]
    lines = [list(head), *cells]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in lines]


def condition(resource: Mapping[str, Any], type_: str) -> Mapping[str, Any]:
    """A condition of a resource, {} if it has none of that type."""
    found = (c for c in resource.get("status", {}).get("conditions", ()) if c.get("type") == type_)
    return next(found, {})


def is_ready(resource: Mapping[str, Any]) -> bool:
    """Ready is True, and said of the newest generation."""
    ready = condition(resource, "Ready")
    newest = ready.get("observedGeneration") == resource["metadata"].get("generation")
    return ready.get("status") == "True" and newest


def worth_a_look(resource: Mapping[str, Any]) -> list[str]:
    """One line per condition that a person should read, Ready first."""
    lines = []
    for c in resource.get("status", {}).get("conditions", ()):
        good = "False" if c["type"] in _GOOD_WHEN_FALSE else "True"
        if c.get("status") != good:
            lines.append(f"{c['type']}={c.get('status')} {c.get('reason', '')}: {c.get('message', '')}")
    if not lines and not is_ready(resource):
        lines.append("Ready=Unknown: the operator has not looked at the newest spec yet; is it running?")
    return lines


def drain_text(gateway: Any) -> str:
    """What a gateway is being drained for, "" if it is not."""
    return f"{gateway.drain.reason}, {gateway.drain.pace_per_s}/s" if gateway.drain is not None else ""


def status(
    cluster: Mapping[str, Any],
    pools: Sequence[Mapping[str, Any]],
    shards: Sequence[Mapping[str, Any]],
    topology: Topology | None,
) -> list[str]:
    """A cluster at a glance: what it is, what is not well, its shards, pools and gateways."""
    meta, state = cluster["metadata"], cluster.get("status", {})
    lines = [
        f"{meta['namespace']}/{meta['name']}: {state.get('phase', 'not looked at yet')}, "
        f"{'Ready' if is_ready(cluster) else 'NOT ready'}; version {state.get('version') or '?'} "
        f"(wanted {cluster['spec'].get('version', '?')}), epoch {state.get('epoch', '?')}, "
        f"{state.get('connections', 0)} connections"
    ]
    for resource in (cluster, *pools, *shards):
        name = resource["metadata"]["name"]
        lines += [f"  ! {name}: {text}" for text in worth_a_look(resource)]
    lines += _indented(table(
        ("SHARD", "PHASE", "SLOTS", "WEIGHT", "POD", "CONNECTIONS"),
        (
            (s["metadata"]["name"], s.get("status", {}).get("phase", "?"), s.get("status", {}).get("slotCount", 0),
             s["spec"].get("weight", 100), s.get("status", {}).get("pod", ""), s.get("status", {}).get("connections", 0))
            for s in shards
        ),
    ))  # fmt: skip
    lines += _indented(table(
        ("POOL", "WANTED", "READY", "UPDATED", "DRAINING", "CONNECTIONS"),
        (
            (p["metadata"]["name"], p["spec"].get("replicas", 2), p.get("status", {}).get("readyReplicas", 0),
             p.get("status", {}).get("updatedReplicas", 0), p.get("status", {}).get("drainingReplicas", 0),
             p.get("status", {}).get("connections", 0))
            for p in pools
        ),
    ))  # fmt: skip
    if topology is None:
        return [*lines, "", "  no topology record yet"]
    lines += _indented(table(
        ("GATEWAY", "STATE", "ADDRESS", "NODE", "ZONE", "WORKER ID", "DRAIN"),
        (
            (name, g.state if g.state in (SERVING, LOST) else g.state.upper(), f"{g.ip}:{g.tcp}", g.node or "-",
             g.zone or "-", g.worker_id, drain_text(g) or "-")
            for name, g in sorted(topology.gateways.items())
        ),
    ))  # fmt: skip
    return lines


def slots(topology: Topology, weights: Mapping[str, int], acquired: Mapping[str, int]) -> list[str]:
    """Who has which slots, what each should have, and the open move.

    weights: {shard: weight} of its StateShards; acquired: {shard: slots that it says it serves}.
    """
    owned = counts(topology)
    want = targets(owned, weights)
    ranges: dict[str, list[str]] = {}
    for r in topology.slots:
        ranges.setdefault(r.shard, []).append(f"{r.first}-{r.last}" if r.last > r.first else f"{r.first}")
    lines = table(
        ("SHARD", "WEIGHT", "SLOTS", "SERVED", "TARGET", "RANGES"),
        (
            (name, weights.get(name, "-"), owned.get(name, 0), acquired.get(name, "?"), want.get(name, 0),
             " ".join(ranges.get(name, ())) or "-")
            for name in sorted({*owned, *weights})
        ),
    )  # fmt: skip
    left = sum(max(0, owned.get(name, 0) - want.get(name, 0)) for name in owned)
    if (move := topology.move) is not None:
        moved = ", ".join(f"{a}-{b}" if b > a else str(a) for a, b in move.slots)
        back = ", going back" if move.undo else ""
        lines += ["", f"moving now: slots {moved} from {move.source} to {move.target} (move {move.id}{back})"]
    lines += ["", f"{left} slots are not where the weights want them" if left else "every slot is where it should be"]
    return lines


def _indented(lines: list[str]) -> list[str]:
    return ["", *(f"  {line}" for line in lines)] if lines else []
