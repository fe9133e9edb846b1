"""The checker of several devices: whatever happened, every device of every person shows the same, and it is what is true.

Messages as in tests/faults/checker.py (nothing lost, doubled, out of order, invented), with what operations made of them
left out there and looked at here:

    message     each device's copy is the database's: its text, edited or recalled, by which operation
    operation   in the database, the newest RECALL or EDIT of a message is what the message is like
    shared      each device's read positions, pins, mutes and deletions are the database's
    follows     each device's unread counts, titles and members follow from the above, by the rules

Pure: no clock, no database, no file.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Final

from plato.client import MsgType
from plato.client.content import is_operation, operation_of

from tests.faults import checker


class Kind(Enum):
    """What is wrong."""

    MESSAGES = "messages"  # lost, doubled, out of order: the words tell which
    CONTENT = "content"
    OPERATION = "operation"
    SHARED = "shared"
    UNREAD = "unread"
    GROUP = "group"


@dataclass(frozen=True, slots=True)
class Row:
    """A message as it is now."""

    row: checker.Row
    msg_type: int
    changed_seq: int
    recalled: bool


@dataclass(frozen=True, slots=True)
class Shared:
    """Of one person and conversation."""

    read_seq: int = 0
    pinned_at_ms: int = 0
    muted_until_ms: int = 0
    peer_read_seq: int = 0
    cleared_seq: int = 0


@dataclass(frozen=True, slots=True)
class Seen:
    """A conversation on a device. members: {user: role}, of groups; None: this device keeps only count, how many."""

    shared: Shared
    unread: int
    title: str
    members: Mapping[str, int] | None
    count: int = 0


@dataclass(frozen=True, slots=True)
class Device:
    """One installation: what its user was shown in order, what its store holds, what it says of its conversations, and how
    far it counts what is unread (0: to the end)."""

    user: str
    number: int
    shown: tuple[checker.Row, ...]
    stored: tuple[Row, ...]
    hidden: frozenset[tuple[str, int]]
    seen: Mapping[str, Seen]
    unread_most: int = 0


@dataclass(frozen=True, slots=True)
class Family:
    """A whole run. shared: {(user, conversation): what the database holds}. seen conversations are those of `members`:
    {conversation: {user: role}}."""

    sent: tuple[checker.Sent, ...]
    rows: tuple[Row, ...]
    members: Mapping[str, Mapping[str, int]]
    titles: Mapping[str, str]
    shared: Mapping[tuple[str, str], Shared]
    hidden: Mapping[str, frozenset[tuple[str, int]]]
    devices: tuple[Device, ...]


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is wrong, and where."""

    kind: Kind
    where: str
    what: str

    def __str__(self) -> str:
        return f"{self.kind.value} [{self.where}] {self.what}"


GONE: Final = b""


def check(family: Family) -> list[Finding]:
    """Every finding; none is the proof, for that run."""
    findings = [Finding(Kind.MESSAGES, f.where, f"{f.kind.value}: {f.what}") for f in checker.check(_history(family))]
    findings += _operations(family.rows)
    for device in family.devices:
        findings += _device(device, family)
    return findings


def _history(family: Family) -> checker.History:
    """The messages, as if nothing had changed any: what was changed has no body, wherever it stands. An operation's body is
    the platform's."""
    changed = {r.row.client_msg_id for r in family.rows if r.changed_seq or is_operation(r.msg_type)}

    def plain(row: checker.Row) -> checker.Row:
        return replace(row, body=GONE) if row.client_msg_id in changed else row

    sent = tuple(replace(s, body=GONE) if s.client_msg_id in changed else s for s in family.sent)
    clients = tuple(
        checker.Client(
            d.user,
            d.number,
            frozenset(c for c, members in family.members.items() if d.user in members),
            tuple(plain(r) for r in d.shown),
            tuple(plain(r.row) for r in d.stored),
        )
        for d in family.devices
    )
    return checker.History(sent, tuple(plain(r.row) for r in family.rows), clients)


def _operations(rows: Sequence[Row]) -> list[Finding]:
    """Each one that stands has been done, and the newest one holds."""
    found: list[Finding] = []
    by_id = {r.row.msg_id: r for r in rows}
    newest: dict[int, Row] = {}
    for row in sorted(rows, key=lambda r: r.row.seq):
        operation = operation_of(row.msg_type, row.row.body)
        if operation is not None and operation.msg_id:
            newest[operation.msg_id] = row
    for msg_id, row in newest.items():
        operation = operation_of(row.msg_type, row.row.body)
        assert operation is not None
        target = by_id.get(msg_id)
        name = f"{row.row.conversation_id} seq {row.row.seq}"
        if target is None:
            found.append(Finding(Kind.OPERATION, "database", f"{name} means a message that is not there"))
            continue
        recalled = operation.kind is MsgType.RECALL
        body = GONE if recalled else operation.body
        if (target.changed_seq, target.recalled, target.row.body) != (row.row.seq, recalled, body):
            found.append(Finding(Kind.OPERATION, "database", f"{name} is not done on seq {target.row.seq}"))
    return found


def _device(device: Device, family: Family) -> list[Finding]:
    where = f"{device.user}/{device.number}"
    found: list[Finding] = []
    true = {r.row.msg_id: r for r in family.rows}
    for row in device.stored:
        if (want := true.get(row.row.msg_id)) is not None and row != want:
            found.append(Finding(Kind.CONTENT, where, f"{row} differs from {want}"))
    hidden = family.hidden.get(device.user, frozenset())
    if device.hidden != hidden:
        found.append(Finding(Kind.SHARED, where, f"hidden differ: {sorted(device.hidden ^ hidden)}"))
    for conversation_id, members in family.members.items():
        if device.user not in members:
            continue
        seen = device.seen.get(conversation_id)
        if seen is None:
            found.append(Finding(Kind.GROUP, where, f"{conversation_id} is not there"))
            continue
        want_shared = family.shared.get((device.user, conversation_id), Shared())
        if seen.shared != want_shared:
            found.append(Finding(Kind.SHARED, where, f"{conversation_id}: {seen.shared}, not {want_shared}"))
        unread = sum(_unread(row, device.user, conversation_id, want_shared, hidden) for row in family.rows)
        if seen.unread != (min(unread, device.unread_most) if device.unread_most else unread):
            found.append(Finding(Kind.UNREAD, where, f"{conversation_id}: {seen.unread}, not {unread}"))
        if conversation_id.startswith("g:"):
            if seen.title != family.titles.get(conversation_id):
                found.append(Finding(Kind.GROUP, where, f"{conversation_id}: title {seen.title!r}"))
            if seen.members is None and seen.count != len(members):
                found.append(Finding(Kind.GROUP, where, f"{conversation_id}: {seen.count} members, not {len(members)}"))
            if seen.members is not None and dict(seen.members) != dict(members):
                found.append(Finding(Kind.GROUP, where, f"{conversation_id}: members {seen.members}, not {members}"))
    return found


def _unread(row: Row, user: str, conversation_id: str, shared: Shared, hidden: frozenset[tuple[str, int]]) -> bool:
    r = row.row
    return (
        r.conversation_id == conversation_id
        and r.seq > max(shared.read_seq, shared.cleared_seq)
        and r.from_user != user
        and row.msg_type < 1_000
        and not row.recalled
        and (conversation_id, r.seq) not in hidden
    )
