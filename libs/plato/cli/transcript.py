"""What a chat shows: stored messages by seq, then own ones on their way, each with its tick. Pure.

Memory: `KEPT` stored messages; the outbox is bounded by the client.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Final

from plato.client import Delivery, Message
from plato.core.codes import text as code_text

KEPT: Final = 1_000
_TICKS: Final = {Delivery.QUEUED: "…", Delivery.ACCEPTED: "✓", Delivery.STORED: "✓✓", Delivery.REFUSED: "✗"}


@dataclass(frozen=True, slots=True)
class Line:
    """One message as it is shown. time: "HH:MM:SS" or "". tick: "" for foreign messages."""

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
    when = datetime.fromtimestamp(message.server_at_ms / 1000).strftime("%H:%M:%S") if message.server_at_ms else ""
    tick = _TICKS[message.delivery] if message.mine else ""
    if message.delivery is Delivery.REFUSED:
        tick += f" {code_text(message.code)}"
    return Line(when, message.from_user, printable(message.text), tick, message.mine)


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
