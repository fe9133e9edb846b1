"""Decisions on a batch of bus records (R9): records and what is known → outcomes, rows and numbers. Everything comes in.

decode   a record's bytes → Uplink, or Undecodable: such a record is kept by (partition, position) and skipped
judge    duplicates, of this batch too, before anything else; then policy; nothing is numbered yet
number   seq = max(allocated, last_seq + 1), prev_seq, msg_id for what was accepted; refusals take none
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple, TypeAlias

from google.protobuf.message import DecodeError
from plato.core.codes import Code
from plato.core.conversations import GROUP_PREFIX, is_conversation_id, is_user_id, partition_of
from plato.ports import BusRecord
from plato.wire.v1.bus_pb2 import GroupChange, Record

from plato_msg.core import policy

_CHANGES: Final[Mapping[int, policy.ChangeKind]] = {
    GroupChange.CREATE: "create",
    GroupChange.ADD: "add",
    GroupChange.REMOVE: "remove",
}

Key: TypeAlias = tuple[str, str, bytes]
"""(conversation_id, from_user, client_msg_id): what makes two records the same uplink."""


class Undecodable(Exception):
    """The record cannot be read, or no outcome of it could be kept; says why."""


class Change(NamedTuple):
    """Who is in a group changes. users: each once."""

    kind: policy.ChangeKind
    users: tuple[str, ...]


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
    change: Change | None = None
    """Not None: no message, it takes no seq and nobody is told."""

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
    """A conversation as stored. members: {user_id: joined_seq}, all of them; of a large group those that the batch names."""

    kind: str
    last_seq: int
    members: Mapping[str, int]
    size: int = 0
    """How many members a group has."""

    @property
    def whole(self) -> bool:
        """`members` holds all of them."""
        return self.kind != policy.GROUP or self.size == len(self.members)

    @property
    def count(self) -> int:
        """How many members it has."""
        return self.size if self.kind == policy.GROUP else len(self.members)


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
        new = self.first is None and self.stored is None and self.uplink.change is None
        return new and self.verdict.code == Code.OK


class Decision(NamedTuple):
    """A record's end: its outcome, whether that stood before, and the members as of the record ({user_id: joined_seq})."""

    uplink: Uplink
    outcome: Outcome
    repeated: bool
    members: Mapping[str, int]
    large: int = 0
    """How many members, where these are too many to be pushed to: `members` is empty then, and they are notified."""


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
    """(conversation_id, user_id, joined_seq). Of a user who also leaves: afterwards."""
    leaves: list[tuple[str, str]] = field(default_factory=list)
    """(conversation_id, user_id)."""
    groups: dict[str, int] = field(default_factory=dict)
    """{conversation_id: members} of the groups that were made or changed."""


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
    change = None
    if r.HasField("group"):
        users = tuple(dict.fromkeys(r.group.users))
        if r.group.kind not in _CHANGES or not r.conversation_id.startswith(GROUP_PREFIX):
            raise Undecodable(f"no change of a group: kind {r.group.kind} of {r.conversation_id!r}")
        if not all(map(is_user_id, users)):
            raise Undecodable("a user_id of the change is not well formed")
        change = Change(_CHANGES[r.group.kind], users)
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
        change,
    )


@dataclass(slots=True)
class _Now:
    """A conversation while a batch is judged: as stored, plus what the batch added."""

    kind: str | None
    members: Mapping[str, int]
    count: int = 0
    joined: set[str] = field(default_factory=set)
    left: set[str] = field(default_factory=set)

    def has(self, user: str) -> bool:
        """Whether that is a member now."""
        return user in self.joined or (user in self.members and user not in self.left)

    def take(self, verdict: policy.Verdict) -> None:
        """An accepted record's joins and leaves."""
        self.kind = verdict.kind
        self.count += len(verdict.joins) - len(verdict.leaves)
        self.joined.update(verdict.joins)
        self.left.difference_update(verdict.joins)
        self.joined.difference_update(verdict.leaves)
        self.left.update(verdict.leaves)


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
            conversation = now[u.conversation_id] = (
                _Now(held.kind, held.members, held.count) if held else _Now(None, {})
            )
        verdict = _judge_one(u, conversation, rules)
        if verdict.code == Code.OK:
            conversation.take(verdict)
        judged.append(Judged(u, verdict))
    return judged


def _judge_one(u: Uplink, now: _Now, rules: policy.Rules) -> policy.Verdict:
    if u.change is None:
        member = now.has(u.from_user)
        verdict = policy.judge(rules, u.conversation_id, u.from_user, u.to_user, now.kind, member, now.count)
        return verdict._replace(joins=tuple(user for user in verdict.joins if not now.has(user)))
    removes = u.change.kind == "remove"
    users = tuple(user for user in u.change.users if now.has(user) == removes)
    code = policy.judge_change(rules, u.change.kind, now.kind, now.count + (0 if removes else len(users)))
    if code != Code.OK:
        return policy.Verdict(code)
    return policy.Verdict(code, policy.GROUP, leaves=users) if removes else policy.Verdict(code, policy.GROUP, users)


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
    members: dict[str, Mapping[str, int]] = {}
    large: dict[str, int] = {}
    joins: dict[tuple[str, str], int] = {}
    leaves: dict[tuple[str, str], None] = {}
    for j in judged:
        u = j.uplink
        conversation_id = u.conversation_id
        if conversation_id not in last:
            held = known.conversations.get(conversation_id)
            last[conversation_id] = held.last_seq if held else 0
            members[conversation_id], large[conversation_id] = _addressees(held)
        if j.first is not None:
            first = plan.decisions[j.first]
            plan.decisions.append(first._replace(uplink=u, repeated=True))
            continue
        if j.stored is not None:
            plan.decisions.append(Decision(u, j.stored, True, members[conversation_id], large[conversation_id]))
            continue
        if j.verdict.code != Code.OK:
            refusal = Decision(u, Outcome(int(j.verdict.code)), False, members[conversation_id])
            plan.decisions.append(refusal)
            plan.outcomes.append(refusal)
            continue
        prev_seq = last[conversation_id]
        verdict = j.verdict
        if verdict.joins or verdict.leaves:
            for user in verdict.joins:
                joins[conversation_id, user] = prev_seq
            for user in verdict.leaves:
                joins.pop((conversation_id, user), None)
                leaves[conversation_id, user] = None
            if large[conversation_id]:
                large[conversation_id] += len(verdict.joins) - len(verdict.leaves)
            else:
                # A new mapping: decisions before this one keep the members of their time.
                gone = set(verdict.leaves)
                stay = {user: joined for user, joined in members[conversation_id].items() if user not in gone}
                members[conversation_id] = {**stay, **dict.fromkeys(verdict.joins, prev_seq)}
        if u.change is not None:
            held = known.conversations.get(conversation_id)
            count = plan.groups.get(conversation_id, held.count if held else 0)
            plan.groups[conversation_id] = count + len(verdict.joins) - len(verdict.leaves)
            changed = Decision(u, Outcome(int(Code.OK)), False, {})
            plan.decisions.append(changed)
            plan.outcomes.append(changed)
            continue
        seq = max(offered[conversation_id], prev_seq + 1)
        offered[conversation_id] = seq + 1
        last[conversation_id] = seq
        outcome = Outcome(int(Code.OK), next(ids), seq, prev_seq, now_ms)
        accepted = Decision(u, outcome, False, members[conversation_id], large[conversation_id])
        plan.decisions.append(accepted)
        plan.outcomes.append(accepted)
        plan.messages.append(accepted)
        plan.conversations[conversation_id] = (verdict.kind or known.conversations[conversation_id].kind, seq)
    plan.joins = [(conversation_id, user, seq) for (conversation_id, user), seq in joins.items()]
    plan.leaves = list(leaves)
    return plan


def _addressees(held: Conversation | None) -> tuple[Mapping[str, int], int]:
    """Who is pushed to, and 0; or nobody, and how many are notified."""
    if held is None:
        return {}, 0
    return (held.members, 0) if held.whole else ({}, held.size)


def again(uplinks: Iterable[Uplink], known: Known) -> list[Decision]:
    """What was decided before, to be fanned out again: the first record of a key as if it were new, the others as
    repetitions. A record without a stored outcome was skipped then, and nobody waits for it."""
    decisions: list[Decision] = []
    seen: set[Key] = set()
    for u in uplinks:
        outcome = known.outcomes.get(u.key)
        if outcome is not None:
            held = known.conversations.get(u.conversation_id)
            decisions.append(Decision(u, outcome, u.key in seen, *_addressees(held)))
            seen.add(u.key)
    return decisions
