"""What a chat shows: stored messages by seq, then own ones on their way, each with its tick; and the connection. Pure.

Memory: `KEPT` stored messages; the outbox is bounded by the client.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import date, datetime
from typing import Final

from plato.client import Delivery, Message, Phase, State
from plato.core.codes import Action, Code, action
from plato.core.codes import text as code_text

KEPT: Final = 1_000
_TICKS: Final = {Delivery.QUEUED: "…", Delivery.ACCEPTED: "✓", Delivery.STORED: "✓✓", Delivery.REFUSED: "✗"}


@dataclass(frozen=True, slots=True)
class Line:
    """One message as it is shown. day, time ("HH:MM:SS"): local; None and "" before it has its place. tick: "" for foreign
    messages."""

    day: date | None
    time: str
    who: str
    text: str
    tick: str
    mine: bool


def printable(text: str) -> str:
    """Text that can do nothing to a terminal: control characters other than newline and tab become U+FFFD."""
    return "".join(c if c in "\n\t" or (c >= " " and not "\x7f" <= c <= "\x9f") else "�" for c in text)


def one_line(text: str) -> str:
    """Text on one line of a pipe: backslash, newline, return and tab escaped, other control characters as U+FFFD."""
    for raw, shown in (("\\", "\\\\"), ("\n", "\\n"), ("\r", "\\r"), ("\t", "\\t")):
        text = text.replace(raw, shown)
    return printable(text)


def line_of(message: Message) -> Line:
    """One message as a line."""
    when = datetime.fromtimestamp(message.server_at_ms / 1000) if message.server_at_ms else None
    tick = _TICKS[message.delivery] if message.mine else ""
    if message.delivery is Delivery.REFUSED:
        tick += f" {code_text(message.code)}"
    day, clock = (when.date(), when.strftime("%H:%M:%S")) if when else (None, "")
    return Line(day, clock, printable(message.from_user), printable(message.text), tick, message.mine)


def new_days(lines: Iterable[Line], today: date) -> list[date | None]:
    """For each line the day that is to be announced above it, or None. Today needs no word until another day was shown."""
    shown, found = today, list[date | None]()
    for line in lines:
        changed = line.day is not None and line.day != shown
        found.append(line.day if changed else None)
        shown = line.day or shown
    return found


def state_words(state: State, next_try_s: float | None) -> str:
    """The connection in words for its user. A code is told where it says something to them; most words are for programs."""
    match state.phase:
        case Phase.ONLINE:
            return str(state)
        case Phase.OFFLINE:
            when = "trying again" if next_try_s is None else f"next try in {max(1, math.ceil(next_try_s))} s"
            if state.code == Code.GATEWAY_FULL:
                return f"offline, {when}: the platform is full"
            return f"offline, {when}" + (f": {state.reason}" if action(state.code or 0) is Action.LOGIN else "")
        case Phase.STOPPED if state.code == Code.REPLACED:
            return f"stopped: {state.reason}; a second chat of the same user needs --device NAME"
        case Phase.STOPPED if state.reason:
            return f"stopped: {state.reason}"
        case _:
            return str(state.phase.value)


class Transcript:
    """One conversation on the screen."""

    def __init__(self) -> None:
        self._stored: dict[int, Message] = {}  # by seq
        self._refused: Sequence[Message] = ()
        self._unsettled: Sequence[Message] = ()

    @property
    def first_seq(self) -> int | None:
        """The oldest stored message that is shown; None: there is none."""
        return min(self._stored, default=None)

    def add(self, messages: Iterable[Message]) -> bool:
        """Takes in stored messages; the oldest go when there are too many. True: something is new."""
        before = len(self._stored)
        for message in messages:
            self._stored[message.seq] = message
        grown = len(self._stored) > before
        for seq in sorted(self._stored)[: max(0, len(self._stored) - KEPT)]:
            del self._stored[seq]
        return grown

    def waiting(self, unsettled: Sequence[Message], refused: Sequence[Message]) -> bool:
        """Takes in what has no place: on its way, or refused. True: something changed."""
        if list(unsettled) == list(self._unsettled) and list(refused) == list(self._refused):
            return False
        self._unsettled, self._refused = unsettled, refused
        return True

    def lines(self) -> list[Line]:
        """Everything, in order."""
        stored = [self._stored[seq] for seq in sorted(self._stored)]
        keys = {m.client_msg_id for m in stored if m.mine}
        waiting = [m for m in self._unsettled if m.client_msg_id not in keys]
        return [line_of(m) for m in (*stored, *self._refused[-20:], *waiting)]
