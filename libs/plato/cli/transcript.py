"""What a chat shows: stored messages by seq, then own ones on their way, each with its tick; and the connection. Pure.

Memory: `KEPT` stored messages; the outbox is bounded by the client.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import date, datetime
from typing import Final

from plato.client import Conversation, Delivery, Message, MsgType, Phase, Quote, Role, State
from plato.client.content import is_operation
from plato.core.codes import Action, Code, action
from plato.core.codes import text as code_text
from plato.core.conversations import DIALOGUE_PREFIX, GROUP_PREFIX

KEPT: Final = 1_000
USERS_SHOWN: Final = 10
_DONE_ELSEWHERE: Final = (MsgType.RECALL, MsgType.EDIT)
"""Stored operations that show in the message that they mean."""
_TICKS: Final = {Delivery.QUEUED: "…", Delivery.ACCEPTED: "✓", Delivery.STORED: "✓✓", Delivery.REFUSED: "✗"}


@dataclass(frozen=True, slots=True)
class Line:
    """One message as it is shown. day, time ("HH:MM:SS"): local; None and "" before it has its place. tick: "" for foreign
    messages. event: an operation in words, `who` is in them. quote: what it answers. seq: 0 before it has its place."""

    day: date | None
    time: str
    who: str
    text: str
    tick: str
    mine: bool
    event: bool = False
    quote: str = ""
    seq: int = 0


def printable(text: str) -> str:
    """Text that can do nothing to a terminal: control characters other than newline and tab become U+FFFD."""
    return "".join(c if c in "\n\t" or (c >= " " and not "\x7f" <= c <= "\x9f") else "�" for c in text)


def one_line(text: str) -> str:
    """Text on one line of a pipe: backslash, newline, return and tab escaped, other control characters as U+FFFD."""
    for raw, shown in (("\\", "\\\\"), ("\n", "\\n"), ("\r", "\\r"), ("\t", "\\t")):
        text = text.replace(raw, shown)
    return printable(text)


def line_of(message: Message, reply: Quote | None = None) -> Line:
    """One message as a line. reply: what it answers, as it may be shown."""
    when = datetime.fromtimestamp(message.server_at_ms / 1000) if message.server_at_ms else None
    event = is_operation(message.msg_type)
    tick = _TICKS[message.delivery] if message.mine and not (event and message.seq) else ""
    if message.delivery is Delivery.REFUSED:
        tick += f" {code_text(message.code)}" + (f": {printable(message.detail)}" if message.detail else "")
    day, clock = (when.date(), when.strftime("%H:%M:%S")) if when else (None, "")
    words = operation_words(message) if event else message_words(message)
    who, quote = printable(message.from_user), printable(quote_words(reply)) if reply is not None else ""
    return Line(day, clock, who, words, tick, message.mine, event, quote, message.seq)


def quote_words(reply: Quote) -> str:
    """What is answered, by whom."""
    return f"{reply.from_user}: {reply.text or '(recalled)'}"


def message_words(message: Message) -> str:
    """What a message says, for a terminal: its text, what is attached, what became of it."""
    if message.recalled:
        return "(recalled)"
    rich = message.rich
    parts = [message.text] if message.text or rich is None else []
    for a in rich.attachments if rich is not None else ():
        parts.append(f"[{a.name or a.attachment_id}, {max(1, a.size_bytes // 1_000)} kB]")
    return printable(" ".join(parts)) + (" (edited)" if message.edited else "")


def operation_words(message: Message) -> str:
    """How a message changed its conversation: alice added bob."""
    who, done = message.from_user, message.operation
    if message.recalled:
        return printable(f"{who} edited a message that was recalled")
    if done is None:
        return printable(f"{who} changed something that this program is too old to show")
    users = ", ".join(done.users[:USERS_SHOWN]) + (
        f" and {len(done.users) - USERS_SHOWN} more" if len(done.users) > USERS_SHOWN else ""
    )
    heir = f"; {done.owner} leads the group now" if done.owner else ""
    meant = f"[{done.seq}]" if done.seq else "a message"
    match done.kind:
        case MsgType.GROUP_CREATE:
            others = ", ".join(u for u in done.users[:USERS_SHOWN] if u != who)
            words = f"{who} made the group '{done.title}'" + (f" with {others}" if others else "")
        case MsgType.GROUP_ADD:
            words = f"{who} added {users or 'nobody'}"
        case MsgType.GROUP_REMOVE:
            words = f"{who} removed {users or 'nobody'}{heir}"
        case MsgType.GROUP_LEAVE:
            words = f"{who} left{heir}"
        case MsgType.GROUP_RENAME:
            words = f"{who} named the group '{done.title}'"
        case MsgType.GROUP_ROLE:
            role = {Role.MEMBER: "a plain member", Role.ADMINISTRATOR: "an administrator", Role.OWNER: "the owner"}
            words = f"{who} made {users or 'nobody'} {role[done.role]}"
        case MsgType.RECALL:
            words = f"{who} recalled {meant}"
        case MsgType.EDIT:
            words = f"{who} edited {meant}"
        case _:
            words = who
    return printable(words)


def conversation_name(conversation: Conversation) -> str:
    """What a conversation is called in a list."""
    return printable(conversation.title or conversation.peer or conversation.conversation_id)


def where_words(conversation_id: str, known: Conversation | None) -> str:
    """Where somebody else wrote, for who is in another conversation."""
    if known is not None and known.title:
        return f"in '{printable(known.title)}'"
    if conversation_id.startswith(DIALOGUE_PREFIX):
        return "to you"
    return (
        "in a group without a title" if conversation_id.startswith(GROUP_PREFIX) else f"in {printable(conversation_id)}"
    )


def conversation_words(conversation: Conversation) -> str:
    """A conversation in one line of a list."""
    notes = [f"{conversation.unread} unread"] if conversation.unread else []
    notes += ["pinned"] if conversation.pinned_at_ms else []
    notes += ["muted"] if conversation.muted_until_ms else []
    notes += ["left"] if conversation.left else []
    return conversation_name(conversation) + (f" ({', '.join(notes)})" if notes else "")


def in_order(conversations: Iterable[Conversation]) -> list[Conversation]:
    """As a list shows them: pinned ones first, then those with something unread, then by name."""
    return sorted(conversations, key=lambda c: (-c.pinned_at_ms, not c.unread, conversation_name(c)))


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
            return f"offline, {when}" + (
                f": {state.reason}" if state.detail or action(state.code or 0) is Action.LOGIN else ""
            )
        case Phase.STOPPED if state.code == Code.REPLACED:
            return f"stopped: {state.reason}; a second chat of the same user needs --device NAME"
        case Phase.STOPPED if state.reason:
            return f"stopped: {state.reason}"
        case _:
            return str(state.phase.value)


class Transcript:
    """One conversation on the screen."""

    def __init__(self, reply_of: Callable[[Message], Quote | None] = lambda message: None) -> None:
        """reply_of: what a message answers, as it may be shown."""
        self._reply_of = reply_of
        self._stored: dict[int, Message] = {}  # by seq
        self._refused: Sequence[Message] = ()
        self._unsettled: Sequence[Message] = ()
        self._read: dict[str, int] = {}  # others → up to where they have read

    @property
    def first_seq(self) -> int | None:
        """The oldest stored message that is shown; None: there is none."""
        return min(self._stored, default=None)

    @property
    def last_seq(self) -> int | None:
        """The newest stored message that is shown; None: there is none."""
        return max(self._stored, default=None)

    def add(self, messages: Iterable[Message]) -> bool:
        """Takes in stored messages, hidden ones out; the oldest go when there are too many. True: something is different."""
        before = dict(self._stored)
        for message in messages:
            known = self._stored.get(message.seq)
            if message.hidden:
                self._stored.pop(message.seq, None)
            elif known is None or known.changed_seq <= message.changed_seq:
                self._stored[message.seq] = message
        grown = self._stored != before
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
        """Everything, in order; without the recalls and edits that are done: the messages that they mean show them."""
        stored = [self._stored[s] for s in sorted(self._stored) if self._stored[s].msg_type not in _DONE_ELSEWHERE]
        keys = {m.client_msg_id for m in stored if m.mine}
        waiting = [m for m in self._unsettled if m.client_msg_id not in keys]
        lines = [line_of(m, self._reply_of(m)) for m in (*stored, *self._refused[-20:], *waiting)]
        newest = {
            user: max((n.seq for n in lines if n.mine and 0 < n.seq <= upto), default=0)
            for user, upto in self._read.items()
        }
        return [self._ticked(line, [user for user, seq in newest.items() if seq == line.seq > 0]) for line in lines]

    def clear(self, upto_seq: int) -> bool:
        """What stands up to here was deleted by its user. True: some of it was shown."""
        gone = [seq for seq in self._stored if seq <= upto_seq]
        for seq in gone:
            del self._stored[seq]
        return bool(gone)

    def read_by(self, user: str, seq: int) -> bool:
        """Somebody else has read up to here. True: that is news."""
        if seq <= self._read.get(user, 0):
            return False
        self._read[user] = seq
        return True

    def _ticked(self, line: Line, readers: list[str]) -> Line:
        """At the newest own message that somebody has read it says so."""
        names = ", ".join(map(printable, sorted(readers)))
        return replace(line, tick=f"{line.tick} read by {names}") if names and line.tick else line
