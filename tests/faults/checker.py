"""The history checker: what was sent, what is stored, what each client was shown, and whether the three agree.

In goes one History, read after everything came to rest: every message as the load generator handed it to a client, every
row of `im_message`, and per client its SQLite rows and the stream that its user saw. Out comes a list of findings; an
empty list is the proof of invariants 1 to 5 (design §3) for that run. Pure: no clock, no database, no file.

    sent   ──▸ each has one row (LOST, DOUBLED) with its body and conversation (WRONG), in its device's order (UPLINK_ORDER)
    rows   ──▸ each was sent (PHANTOM); seq rises, prev_seq chains, msg_id is unique (CHAIN)
    client ──▸ the rows of its conversations, each once, by rising seq, nothing else: in its stream and in its SQLite
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum


class Kind(Enum):
    """What is wrong."""

    LOST = "lost"
    DOUBLED = "doubled"
    OUT_OF_ORDER = "out of order"
    PHANTOM = "phantom"
    WRONG = "wrong content"
    UPLINK_ORDER = "uplink order"
    CHAIN = "chain"


@dataclass(frozen=True, slots=True)
class Sent:
    """A message as its sender's device took it. `order` rises by 1 per device and conversation, in order of sending.

    refused: the platform said "stop" for good, so it must have no row.
    """

    user: str
    device_id: int
    conversation_id: str
    client_msg_id: bytes
    body: bytes
    order: int
    refused: bool = False


@dataclass(frozen=True, slots=True)
class Row:
    """A row of im_message, or a client's copy of it: the same fields, so that they compare."""

    conversation_id: str
    seq: int
    prev_seq: int
    msg_id: int
    from_user: str
    client_msg_id: bytes
    body: bytes


@dataclass(frozen=True, slots=True)
class Client:
    """One installation: whose conversations it must hold, what its user was shown in order, what its SQLite holds."""

    user: str
    device_id: int
    conversations: frozenset[str]
    shown: tuple[Row, ...]
    stored: tuple[Row, ...]


@dataclass(frozen=True, slots=True)
class History:
    """A whole run."""

    sent: tuple[Sent, ...]
    rows: tuple[Row, ...]
    clients: tuple[Client, ...] = field(default=())


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is wrong: what, where ("database", "alice/7 stream", …) and which message."""

    kind: Kind
    where: str
    what: str

    def __str__(self) -> str:
        return f"{self.kind.value} [{self.where}] {self.what}"


def check(history: History) -> list[Finding]:
    """Every finding, the database's first. Empty: the history is good."""
    rows = sorted(history.rows, key=lambda r: (r.conversation_id, r.seq))
    by_conversation: dict[str, list[Row]] = {}
    for row in rows:
        by_conversation.setdefault(row.conversation_id, []).append(row)
    findings = _sent_against_rows(history.sent, rows)
    for chain in by_conversation.values():
        findings += _chain(chain)
    findings += _unique_msg_ids(rows)
    for client in history.clients:
        findings += _client(client, by_conversation)
    return findings


def summary(findings: Iterable[Finding]) -> dict[str, int]:
    """{kind: how many}, each kind named, so that a table shows its zeros."""
    counts = Counter(f.kind for f in findings)
    return {kind.value: counts[kind] for kind in Kind}


def _sent_against_rows(sent: Sequence[Sent], rows: Sequence[Row]) -> list[Finding]:
    """R1, R8, R9: one row per message that was taken, as it was sent, in the device's order."""
    found: list[Finding] = []
    by_key: dict[tuple[str, bytes], list[Row]] = {}
    for row in rows:
        by_key.setdefault((row.from_user, row.client_msg_id), []).append(row)
    reached: dict[tuple[str, int, str], tuple[int, int]] = {}
    for message in sorted(sent, key=lambda m: (m.user, m.device_id, m.conversation_id, m.order)):
        name = f"{message.conversation_id} from {message.user}/{message.device_id} no {message.order}"
        its = by_key.pop((message.user, message.client_msg_id), [])
        if message.refused:
            found += [Finding(Kind.PHANTOM, "database", f"{name} was refused, yet has seq {r.seq}") for r in its]
            continue
        if not its:
            found.append(Finding(Kind.LOST, "database", name))
            continue
        if len(its) > 1:
            found.append(Finding(Kind.DOUBLED, "database", f"{name} has seqs {[r.seq for r in its]}"))
        row = its[0]
        if (row.conversation_id, row.body) != (message.conversation_id, message.body):
            found.append(Finding(Kind.WRONG, "database", f"{name} differs from {row.conversation_id} seq {row.seq}"))
        lane = (message.user, message.device_id, message.conversation_id)
        last_order, last_seq = reached.get(lane, (0, 0))
        if row.seq < last_seq:
            found.append(
                Finding(Kind.UPLINK_ORDER, "database", f"{name} has seq {row.seq}, no {last_order} {last_seq}")
            )
        reached[lane] = (message.order, max(row.seq, last_seq))
    for its in by_key.values():
        found += [Finding(Kind.PHANTOM, "database", f"{_name(r)} was never sent") for r in its]
    return found


def _chain(chain: Sequence[Row]) -> list[Finding]:
    """Invariant 3: seq from 1 on, strictly rising, and a hole only where the next prev_seq jumps it."""
    found: list[Finding] = []
    last = 0
    for row in chain:
        if row.seq == last:
            found.append(Finding(Kind.CHAIN, "database", f"{_name(row)}: its seq is taken twice"))
        elif row.prev_seq != last:
            found.append(
                Finding(Kind.CHAIN, "database", f"{_name(row)}: prev_seq {row.prev_seq}, before it stands {last}")
            )
        last = row.seq
    return found


def _unique_msg_ids(rows: Sequence[Row]) -> list[Finding]:
    counts = Counter(row.msg_id for row in rows)
    return [Finding(Kind.CHAIN, "database", f"msg_id {m} is given {n} times") for m, n in counts.items() if n > 1]


def _client(client: Client, by_conversation: dict[str, list[Row]]) -> list[Finding]:
    """Invariant 5, for the stream (order as it came) and for the SQLite (a set, so order is only that of its seqs)."""
    name = f"{client.user}/{client.device_id}"
    expected = [row for conversation in sorted(client.conversations) for row in by_conversation.get(conversation, [])]
    stored = sorted(client.stored, key=lambda r: (r.conversation_id, r.seq))
    return [*_copy(f"{name} stream", client.shown, expected), *_copy(f"{name} sqlite", stored, expected)]


def _copy(where: str, seen: Sequence[Row], expected: Sequence[Row]) -> list[Finding]:
    """`seen` must be `expected`, each once, by rising seq within a conversation. seqs name places, msg_ids messages."""
    found: list[Finding] = []
    by_msg_id = {row.msg_id: row for row in expected}
    times: Counter[int] = Counter()
    last_seq: dict[str, int] = {}
    for row in seen:
        true = by_msg_id.get(row.msg_id)
        if true is None:
            found.append(Finding(Kind.PHANTOM, where, f"{_name(row)} is not in the database"))
            continue
        times[row.msg_id] += 1
        if times[row.msg_id] > 1:
            found.append(Finding(Kind.DOUBLED, where, _name(row)))
            continue
        # A message under another one's seq is a matter of order, whatever its own fields say.
        if (row.conversation_id, row.seq) != (true.conversation_id, true.seq):
            found.append(Finding(Kind.OUT_OF_ORDER, where, f"{_name(row)} stands at seq {true.seq}"))
        elif row.seq < last_seq.get(row.conversation_id, 0):
            found.append(Finding(Kind.OUT_OF_ORDER, where, f"{_name(row)} after {last_seq[row.conversation_id]}"))
        elif row != true:
            found.append(Finding(Kind.WRONG, where, f"{_name(row)} differs from the database"))
        last_seq[row.conversation_id] = max(row.seq, last_seq.get(row.conversation_id, 0))
    found += [Finding(Kind.LOST, where, _name(row)) for row in expected if not times[row.msg_id]]
    return found


def _name(row: Row) -> str:
    return f"{row.conversation_id} seq {row.seq} msg_id {row.msg_id} from {row.from_user}"
