"""The records of a live load, one JSON object per line. `t` is time.monotonic(), which all processes of a machine share.

sent      a message was handed to a client and is in its outbox: user, to, conv, id, order, body
accepted  the platform acknowledged it; settled: it has its place; refused: it was refused for good: user, id
shown     a client showed a message to its user: user, conv, seq, prev, msg, from, id, body
online    a client's connection stands: user, gateway, cause ("start", "redirect", "code N", "broken"),
              lost (the gateway before), gap (seconds without one)
offline   it does not stand any more: user, gateway, code
lag       the worker itself was late by so many seconds: s
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.faults.checker import Row


@dataclass(slots=True)
class Spoken:
    """One message on its way. Times are of time.monotonic(); None: not yet."""

    user: str
    to: str
    conversation_id: str
    client_msg_id: bytes
    body: bytes
    order: int
    at: float
    accepted: float | None = None
    settled: float | None = None
    refused: bool = False


@dataclass(frozen=True, slots=True)
class Connected:
    """A client came online. lost: the gateway that it had before, "" at its start; gap_s: how long it had none."""

    at: float
    user: str
    gateway: str
    cause: str
    lost: str
    gap_s: float


@dataclass(slots=True)
class Records:
    """Everything that the workers wrote down."""

    spoken: dict[tuple[str, bytes], Spoken] = field(default_factory=dict)
    """By (user, client_msg_id)."""
    shown: dict[str, list[tuple[float, Row]]] = field(default_factory=dict)
    """Per user, in the order of showing."""
    connected: list[Connected] = field(default_factory=list)
    offline: dict[str, float] = field(default_factory=dict)
    """Who is offline at the end of the records, and since when."""
    lags_s: list[float] = field(default_factory=list)

    def take(self, lines: Iterable[dict[str, Any]]) -> None:
        """Takes in one worker's lines, in their order."""
        for line in lines:
            getattr(self, f"_{line['e']}")(line)

    def _sent(self, line: dict[str, Any]) -> None:
        key = (line["user"], bytes.fromhex(line["id"]))
        self.spoken[key] = Spoken(
            line["user"], line["to"], line["conv"], key[1], line["body"].encode(), line["order"], line["t"]
        )

    def _accepted(self, line: dict[str, Any]) -> None:
        self.spoken[line["user"], bytes.fromhex(line["id"])].accepted = line["t"]

    def _settled(self, line: dict[str, Any]) -> None:
        self.spoken[line["user"], bytes.fromhex(line["id"])].settled = line["t"]

    def _refused(self, line: dict[str, Any]) -> None:
        self.spoken[line["user"], bytes.fromhex(line["id"])].refused = True

    def _shown(self, line: dict[str, Any]) -> None:
        row = Row(
            line["conv"],
            line["seq"],
            line["prev"],
            line["msg"],
            line["from"],
            bytes.fromhex(line["id"]),
            line["body"].encode(),
        )
        self.shown.setdefault(line["user"], []).append((line["t"], row))

    def _online(self, line: dict[str, Any]) -> None:
        self.offline.pop(line["user"], None)
        self.connected.append(
            Connected(line["t"], line["user"], line["gateway"], line["cause"], line["lost"], line["gap"])
        )

    def _offline(self, line: dict[str, Any]) -> None:
        self.offline.setdefault(line["user"], line["t"])

    def _lag(self, line: dict[str, Any]) -> None:
        self.lags_s.append(line["s"])


class Tail:
    """Reads one worker's file from where the last reading ended. A line that is not whole yet waits for the next one."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._at = 0

    def read(self, records: Records) -> None:
        """Takes what is new into the records."""
        if not self._path.exists():
            return
        with self._path.open("rb") as file:
            file.seek(self._at)
            new = file.read()
        whole = new[: new.rfind(b"\n") + 1]
        self._at += len(whole)
        records.take(json.loads(line) for line in whole.splitlines())
