"""Decisions on a batch of bus records (R9): records and what is known → outcomes, rows and numbers. Everything comes in.

decode   a record's bytes → Uplink, or Undecodable: such a record is kept by (partition, position) and skipped
judge    duplicates, of this batch too, before anything else; then policy; nothing is numbered yet
number   seq = max(allocated, last_seq + 1), prev_seq, msg_id for what was accepted; refusals take none
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

from google.protobuf.message import DecodeError
from plato.core.codes import Code
from plato.core.conversations import is_conversation_id, is_user_id, partition_of
from plato.ports import BusRecord
from plato.wire.v1.bus_pb2 import Record

from plato_msg.core import policy

Key: TypeAlias = tuple[str, str, bytes]
"""(conversation_id, from_user, client_msg_id): what makes two records the same uplink."""


class Undecodable(Exception):
    """The record cannot be read, or no outcome of it could be kept; says why."""


class Uplink(NamedTuple):
    """A decoded record. client_msg_id is 16 bytes; the ids are well formed."""

    partition: int
    position: int
    conversation_id: str
    from_user: str
    device_id: int
    client_id: int
    client_msg_id: bytes
    to_user: str
    msg_type: int
    body: bytes
    trace_id: bytes
    guest: bool

    @property
    def key(self) -> Key:
        """What a duplicate shares with the first."""
        return (self.conversation_id, self.from_user, self.client_msg_id)


class Outcome(NamedTuple):
    """What stands for a key. Of a refusal, all numbers are 0."""

    code: int
    msg_id: int = 0
    seq: int = 0
    prev_seq: int = 0
    server_at_ms: int = 0


@dataclass(slots=True)
class Conversation:
    """A conversation as stored. members: {user_id: joined_seq}, all of them."""

    kind: str
    last_seq: int
    members: Mapping[str, int]


@dataclass(slots=True)
class Known:
    """What the database holds on the keys and conversations of a batch; what is absent does not exist."""

    outcomes: Mapping[Key, Outcome] = field(default_factory=dict)
    conversations: Mapping[str, Conversation] = field(default_factory=dict)


class Judged(NamedTuple):
    """A record before numbering: a repetition of `first` (in this batch) or of `stored`, or new with this verdict."""

    uplink: Uplink
    verdict: policy.Verdict
    first: int | None = None
    stored: Outcome | None = None

    @property
    def accepted(self) -> bool:
        """It becomes a message."""
        return self.first is None and self.stored is None and self.verdict.code == Code.OK


class Decision(NamedTuple):
    """A record's end: its outcome, whether that stood before, and the members as of the record ({user_id: joined_seq})."""

    uplink: Uplink
    outcome: Outcome
    repeated: bool
    members: Mapping[str, int]


@dataclass(slots=True)
class Plan:
    """What one transaction writes, and what is fanned out after it."""

    decisions: list[Decision] = field(default_factory=list)
    messages: list[Decision] = field(default_factory=list)
    """Accepted and new."""
    outcomes: list[Decision] = field(default_factory=list)
    """Accepted or refused, and new."""
    conversations: dict[str, tuple[str, int]] = field(default_factory=dict)
    """{conversation_id: (kind, last_seq)} of those that got a message."""
    joins: list[tuple[str, str, int]] = field(default_factory=list)
    """(conversation_id, user_id, joined_seq)."""


def decode(record: BusRecord, partitions: int) -> Uplink:
    """Reads a record. Raises Undecodable, also for ids that state never lets through and for a foreign partition, in which
    this owner is not the only writer."""
    try:
        r = Record.FromString(record.value)
    except DecodeError as e:
        raise Undecodable(f"no protobuf record: {e}") from e
    if not is_conversation_id(r.conversation_id):
        raise Undecodable(f"conversation_id {r.conversation_id!r} is not well formed")
    if not is_user_id(r.from_user):
        raise Undecodable(f"from_user {r.from_user!r} is not well formed")
    if len(r.client_msg_id) != 16:
        raise Undecodable(f"client_msg_id has {len(r.client_msg_id)} bytes instead of 16")
    if partition_of(r.conversation_id, partitions) != record.partition:
        raise Undecodable(f"conversation_id {r.conversation_id!r} belongs to another partition")
    return Uplink(
        record.partition,
        record.position,
        r.conversation_id,
        r.from_user,
        r.device_id,
        r.client_id,
        r.client_msg_id,
        r.to_user,
        r.msg_type,
        r.body,
        r.trace_id,
        r.guest,
    )


@dataclass(slots=True)
class _Now:
    """A conversation while a batch is judged: as stored, plus what the batch added."""

    kind: str | None
    members: Mapping[str, int]
    joined: set[str] = field(default_factory=set)


def judge(
    uplinks: Sequence[Uplink], known: Known, rules: policy.Rules, unstorable: Collection[tuple[int, int]] = ()
) -> list[Judged]:
    """One Judged per uplink, in order. unstorable: (partition, position) that the database refused when they stood alone."""
    judged: list[Judged] = []
    seen: dict[Key, int] = {}
    now: dict[str, _Now] = {}
    for place, u in enumerate(uplinks):
        key = u.key
        first = seen.setdefault(key, place)
        if first != place:
            judged.append(Judged(u, judged[first].verdict, first=first))
            continue
        stored = known.outcomes.get(key)
        if stored is not None:
            judged.append(Judged(u, policy.Verdict(Code.OK), stored=stored))
            continue
        if (u.partition, u.position) in unstorable:
            judged.append(Judged(u, policy.Verdict(Code.NOT_STORABLE)))
            continue
        conversation = now.get(u.conversation_id)
        if conversation is None:
            held = known.conversations.get(u.conversation_id)
            conversation = now[u.conversation_id] = _Now(held.kind, held.members) if held else _Now(None, {})
        is_member = u.from_user in conversation.members or u.from_user in conversation.joined
        verdict = policy.judge(
            rules,
            u.conversation_id,
            u.from_user,
            u.to_user,
            conversation.kind,
            is_member,
            len(conversation.members) + len(conversation.joined),
        )
        if verdict.code == Code.OK:
            conversation.kind = verdict.kind
            conversation.joined.update(user for user in verdict.joins if user not in conversation.members)
        judged.append(Judged(u, verdict))
    return judged


def wanted(judged: Iterable[Judged]) -> dict[str, int]:
    """How many seqs each conversation needs."""
    counts: dict[str, int] = {}
    for j in judged:
        if j.accepted:
            conversation_id = j.uplink.conversation_id
            counts[conversation_id] = counts.get(conversation_id, 0) + 1
    return counts


def number(
    judged: Sequence[Judged], known: Known, allocated: Mapping[str, int], msg_ids: Iterable[int], now_ms: int
) -> Plan:
    """Gives numbers and lays out the rows.

    allocated: per conversation of `wanted` the first of its consecutive seqs. msg_ids: at least as many as are accepted.
    """
    plan = Plan()
    ids = iter(msg_ids)
    last: dict[str, int] = {}
    offered = dict(allocated)
    members: dict[str, dict[str, int] | Mapping[str, int]] = {}
    for j in judged:
        u = j.uplink
        conversation_id = u.conversation_id
        if conversation_id not in last:
            held = known.conversations.get(conversation_id)
            last[conversation_id] = held.last_seq if held else 0
            members[conversation_id] = held.members if held else {}
        if j.first is not None:
            first = plan.decisions[j.first]
            plan.decisions.append(Decision(u, first.outcome, True, first.members))
            continue
        if j.stored is not None:
            plan.decisions.append(Decision(u, j.stored, True, members[conversation_id]))
            continue
        if j.verdict.code != Code.OK:
            refusal = Decision(u, Outcome(int(j.verdict.code)), False, members[conversation_id])
            plan.decisions.append(refusal)
            plan.outcomes.append(refusal)
            continue
        prev_seq = last[conversation_id]
        joins = [user for user in j.verdict.joins if user not in members[conversation_id]]
        if joins:
            # A new mapping: decisions before this one keep the members of their time.
            members[conversation_id] = {**members[conversation_id], **dict.fromkeys(joins, prev_seq)}
            plan.joins += [(conversation_id, user, prev_seq) for user in joins]
        seq = max(offered[conversation_id], prev_seq + 1)
        offered[conversation_id] = seq + 1
        last[conversation_id] = seq
        outcome = Outcome(int(Code.OK), next(ids), seq, prev_seq, now_ms)
        accepted = Decision(u, outcome, False, members[conversation_id])
        plan.decisions.append(accepted)
        plan.outcomes.append(accepted)
        plan.messages.append(accepted)
        kind = j.verdict.kind or known.conversations[conversation_id].kind
        plan.conversations[conversation_id] = (kind, seq)
    return plan


def again(uplinks: Iterable[Uplink], known: Known) -> list[Decision]:
    """What was decided before, to be fanned out again: the first record of a key as if it were new, the others as
    repetitions. A record without a stored outcome was skipped then, and nobody waits for it."""
    decisions: list[Decision] = []
    seen: set[Key] = set()
    for u in uplinks:
        outcome = known.outcomes.get(u.key)
        if outcome is not None:
            held = known.conversations.get(u.conversation_id)
            decisions.append(Decision(u, outcome, u.key in seen, held.members if held else {}))
            seen.add(u.key)
    return decisions
