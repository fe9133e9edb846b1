"""How the commands print things."""

from __future__ import annotations

import re
import time
from typing import Any

from plato.local.bus_watch import words


def status_lines(status: dict[str, Any], override: str = "") -> list[str]:
    """The status as a table for people, then what it promises. override: that of the list of gateways, in words."""
    rows = [("process", "kind", "pid", "serves", "restarts", "since")]
    for entry in status["processes"]:
        without = ", without the bus" if entry.get("bus") else ""
        serves = f"yes{without}" if entry["ready"] else f"no: {entry['reason']}"
        pid = "–" if entry["pid"] is None else str(entry["pid"])
        rows.append((entry["name"], entry["kind"], pid, serves, str(entry["restarts"]), ago(entry["since"])))
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    table = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    ports = status["ports"]
    tcp = ", ".join(str(port) for key, port in ports.items() if key.endswith(".tcp"))
    ws = ", ".join(str(port) for key, port in ports.items() if key.endswith(".ws"))
    polls = ", ".join(str(port) for key, port in ports.items() if key.endswith(".poll"))
    polled = f"; long polling {polls}" if polls else ""
    bus = words({entry["name"]: entry.get("bus", "") for entry in status["processes"]})
    return [
        f"Plato {status['version']} is {status['phase']}; supervisor {status['supervisor_pid']}",
        f"data: {status['data_dir']}",
        f"clients: TCP {tcp}; WebSocket {ws}{polled}; list of gateways: port {ports.get('ipconfig', '–')}",
        f"durability: {status['durability']}",
        *([bus] if bus else []),
        *([f"override of the list of gateways: {override}; `plato override --clear` ends it"] if override else []),
        "",
        *table,
    ]


def ago(since: float) -> str:
    """A length of time since a Unix second, in its largest unit."""
    seconds = max(0, int(time.time() - since))
    for unit, length in (("d", 86_400), ("h", 3_600), ("min", 60)):
        if seconds >= length:
            return f"{seconds // length} {unit}"
    return f"{seconds} s"


def without_passwords(text: str) -> str:
    """Settings as text, with the passwords in URIs starred out."""
    return re.sub(r"(://[^:/@\s]*:)[^@\s]+(@)", r"\1***\2", text)
