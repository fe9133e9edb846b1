"""Decisions on a batch of bus records (R9): records and what is known → outcomes, rows and numbers. Everything comes in.

decode   a record's bytes → Uplink, or Undecodable: such a record is kept by (partition, position) and skipped
judge    duplicates, of this batch too, before anything else; then policy, or operations; nothing has a seq yet
number   seq = max(allocated, last_seq + 1), prev_seq, msg_id for what was accepted; refusals take none
again    what was decided before, as it is stored now, to be fanned out again
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple, TypeAlias

from google.protobuf.message import DecodeError
from plato.core.codes import Code
from plato.core.conversations import GROUP_PREFIX, is_conversation_id, is_user_id, partition_of
from plato.ports import BusRecord
from plato.wire.v1 import content_pb2 as content
from plato.wire.v1.bus_pb2 import GroupChange, Record

from plato_msg.core import operations, policy
from plato_msg.core.gates import Gates
from plato_msg.core.operations import Op, Standing, Target, Verdict

_CHANGES: Final[Mapping[int, int]] = {
    GroupChange.CREATE: content.GROUP_CREATE,
    GroupChange.ADD: content.GROUP_ADD,
    GroupChange.REMOVE: content.GROUP_REMOVE,
}

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
    operation: Op | None = None
    """What an operation says; None too where that could not be read."""
    authority: bool = False
    """Of administrators and application servers."""

    @property
    def key(self) -> Key:
        """What a duplicate shares with the first."""
        return (self.conversation_id, self.from_user, self.client_msg_id)

    @property
    def named(self) -> tuple[str, ...]:
        """Whose membership decides about it."""
        op = self.operation
        return (self.from_user,) if op is None else (self.from_user, *op.users, *((op.owner,) if op.owner else ()))


class Outcome(NamedTuple):
    """What stands for a key. Of a refusal, all numbers are 0."""

    code: int
    msg_id: int = 0
    seq: int = 0
    prev_seq: int = 0
    server_at_ms: int = 0
    words: str = ""
    """What the application said when it refused."""


@dataclass(slots=True)
class Conversation:
    """A conversation as stored. members: {user_id: joined_seq}, all of them; of a large group those that the batch names."""

    kind: str
    last_seq: int
    members: Mapping[str, int]
    size: int = 0
    """How many members a group has."""
    roles: Mapping[str, int] = field(default_factory=dict)
    """Of those of `members` who lead."""
    title: str = ""

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
    targets: Mapping[int, Target] = field(default_factory=dict)
    """{msg_id: message} of what the operations of the batch mean."""
    rows: Mapping[Key, Row] = field(default_factory=dict)
    """How the messages of these keys are stored now: of repeated operations, and of all that is fanned out again."""
    gates: Gates = field(default_factory=Gates)


class Row(NamedTuple):
    """What of a message may differ from its uplink: an operation was filled in, a message was edited or recalled."""

    msg_type: int
    body: bytes
    changed_seq: int = 0
    recalled: bool = False


class Judged(NamedTuple):
    """A record before numbering: a repetition of `first` (in this batch) or of `stored`, or new with this verdict."""

    uplink: Uplink
    verdict: Verdict
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
    """Who is pushed to: who left by this record is one of them."""
    large: int = 0
    """How many members, where these are too many to be pushed to: they are notified, `members` are only who left by it."""
    row: Row | None = None
    """As it is stored, where that may differ from the uplink."""

    @property
    def msg_type(self) -> int:
        """Of the message as it is stored."""
        return self.uplink.msg_type if self.row is None else self.row.msg_type

    @property
    def body(self) -> bytes:
        """Of the message as it is stored."""
        return self.uplink.body if self.row is None else self.row.body


class Edit(NamedTuple):
    """What an older message becomes by the newest operation on it. seq: its own."""

    msg_id: int
    conversation_id: str
    seq: int
    row: Row


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
    joins: list[tuple[str, str, int, int]] = field(default_factory=list)
    """(conversation_id, user_id, joined_seq, role). Of a user who also leaves: afterwards."""
    leaves: list[tuple[str, str]] = field(default_factory=list)
    """(conversation_id, user_id) of stored members who left, though they may have come back."""
    former: list[tuple[str, str, int, int, str]] = field(default_factory=list)
    """(conversation_id, user_id, joined_seq, left_seq, the title then) of who is no member in the end."""
    roles: list[tuple[str, str, int]] = field(default_factory=list)
    """(conversation_id, user_id, role) of stored members that stay."""
    groups: dict[str, int] = field(default_factory=dict)
    """{conversation_id: members} of the groups that were made or changed."""
    titles: dict[str, str] = field(default_factory=dict)
    """{conversation_id: title} of those that were named."""
    edits: dict[int, Edit] = field(default_factory=dict)
    """{msg_id: what it becomes} of messages that were edited or recalled."""
    edited: list[tuple[str, int, int]] = field(default_factory=list)
    """(conversation_id, seq of the message, seq of the EDIT)."""
    changed: dict[str, int] = field(default_factory=dict)
    """{conversation_id: seq of the newest operation that changed an older message}."""


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
    msg_type, body, authority = r.msg_type, r.body, r.authority
    if r.HasField("group"):  # of the version before operations
        if r.group.kind not in _CHANGES or not r.conversation_id.startswith(GROUP_PREFIX):
            raise Undecodable(f"no change of a group: kind {r.group.kind} of {r.conversation_id!r}")
        msg_type, authority = _CHANGES[r.group.kind], True
        body = content.Operation(users=r.group.users).SerializeToString()
    operation = operations.read(msg_type, body, authority) if operations.is_operation(msg_type) else None
    return Uplink(
        record.partition,
        record.position,
        r.conversation_id,
        r.from_user,
        r.device_id,
        r.client_id,
        r.client_msg_id,
        r.to_user,
        msg_type,
        body,
        r.trace_id,
        r.guest,
        operation,
        authority,
    )


def judge(
    uplinks: Sequence[Uplink],
    known: Known,
    rules: policy.Rules,
    unstorable: Collection[tuple[int, int]] = (),
    msg_ids: Sequence[int] = (),
    now_ms: int = 0,
    refused: Collection[tuple[int, int]] = (),
) -> list[Judged]:
    """One Judged per uplink, in order. unstorable: (partition, position) that the database refused when they stood alone;
    msg_ids, now_ms: those that `number` will be given; refused: what the before-hook does not want."""
    judged: list[Judged] = []
    seen: dict[Key, int] = {}
    now: dict[str, Standing] = {}
    targets = _Targets(known.targets, msg_ids, now_ms) if any(_means(u) for u in uplinks) else None
    for place, u in enumerate(uplinks):
        key = u.key
        first = seen.setdefault(key, place)
        if first != place:
            judged.append(Judged(u, judged[first].verdict, first=first))
            continue
        stored = known.outcomes.get(key)
        if stored is not None:
            judged.append(Judged(u, Verdict(Code.OK), stored=stored))
            continue
        if (u.partition, u.position) in unstorable:
            judged.append(Judged(u, Verdict(Code.NOT_STORABLE)))
            continue
        if (u.partition, u.position) in refused:
            judged.append(Judged(u, Verdict(Code.REFUSED_BY_HOOK)))
            continue
        standing = now.get(u.conversation_id)
        if standing is None:
            held = known.conversations.get(u.conversation_id)
            standing = now[u.conversation_id] = (
                Standing(held.kind, held.members, held.roles, held.count, held.last_seq) if held else Standing(None, {})
            )
        verdict = _judge_one(u, standing, rules, targets, now_ms, known.gates)
        if verdict.code == Code.OK and (code := known.gates.judge(u)) != Code.OK:
            verdict = Verdict(code)
        if verdict.code == Code.OK:
            standing.take(verdict)
            if targets is not None:
                targets.take(u, verdict, standing)
        judged.append(Judged(u, verdict))
    return judged


def _judge_one(
    u: Uplink, now: Standing, rules: policy.Rules, targets: _Targets | None, now_ms: int, gates: Gates
) -> Verdict:
    if not operations.is_operation(u.msg_type):
        member = now.has(u.from_user)
        code, kind, users = policy.judge(rules, u.conversation_id, u.from_user, u.to_user, now.kind, member, now.count)
        return Verdict(code, kind, tuple(user for user in users if not now.has(user)) if users else users)
    if u.operation is None:
        return Verdict(Code.BAD_OPERATION)
    op = gates.invited(u).operation
    assert op is not None  # it was there
    if u.guest:
        return Verdict(Code.NOT_ALLOWED if now.has(u.from_user) else Code.NOT_A_MEMBER)
    target = targets.of.get(op.msg_id) if targets is not None else None
    return operations.judge(
        op, rules, u.conversation_id, u.from_user, u.client_msg_id, u.authority, now, target, now_ms
    )


def _means(u: Uplink) -> bool:
    return u.operation is not None and bool(u.operation.msg_id)


class _Targets:
    """The messages that operations of a batch may mean: those that are stored, and those that the batch accepts."""

    def __init__(self, stored: Mapping[int, Target], msg_ids: Sequence[int], now_ms: int) -> None:
        self.of = dict(stored)
        self._msg_ids = iter(msg_ids)
        self._now_ms = now_ms

    def take(self, u: Uplink, verdict: Verdict, now: Standing) -> None:
        """An accepted record: what it changes, and it is a message itself."""
        effect = verdict.effect
        if effect is not None and effect.target is not None:
            op, target = effect.op, effect.target
            recalled = op.kind == content.RECALL
            self.of[op.msg_id] = target._replace(recalled=recalled, msg_type=0 if recalled else op.msg_type)
        msg_id = next(self._msg_ids, 0)
        rank = now.last_seq + now.accepted
        self.of[msg_id] = Target(msg_id, u.conversation_id, rank, u.from_user, u.msg_type, self._now_ms, fresh=True)


def wanted(judged: Iterable[Judged]) -> dict[str, int]:
    """How many seqs each conversation needs."""
    counts: dict[str, int] = {}
    for j in judged:
        if j.accepted:
            conversation_id = j.uplink.conversation_id
            counts[conversation_id] = counts.get(conversation_id, 0) + 1
    return counts


class _Numbering:
    """A conversation while a batch is numbered: how far it is, and who is told of its messages."""

    def __init__(self, held: Conversation | None, push_members: int) -> None:
        self.last_seq = held.last_seq if held is not None else 0
        self.title = held.title if held is not None else ""
        self.count = held.count if held is not None else 0
        self.joined = held.members if held is not None else {}
        """{user: joined_seq} as stored."""
        self.members: Mapping[str, int] = held.members if held is not None and held.whole else {}
        self.large = held is not None and not held.whole
        self._push_members = push_members

    def take(self, kind: str, joins: Sequence[str], leaves: Sequence[str]) -> Mapping[str, int]:
        """Who is pushed to by a record that has these join and leave: before its seq is given."""
        self.count += len(joins) - len(leaves)
        self.large = self.large or (kind == policy.GROUP and self.count > self._push_members)
        if self.large:
            self.members = {}
            return dict.fromkeys(leaves, 0)
        # A new mapping: decisions before this one keep the members of their time.
        told = {**self.members, **dict.fromkeys(joins, self.last_seq)}
        gone = set(leaves)
        self.members = {user: joined for user, joined in told.items() if user not in gone} if gone else told
        return told


class _Roll:
    """Who is in the groups at the end of a batch, and what is to be written for that."""

    def __init__(self) -> None:
        self.joins: dict[tuple[str, str], int] = {}
        self.leaves: dict[tuple[str, str], None] = {}
        self.former: dict[tuple[str, str], tuple[int, int, str]] = {}
        self.roles: dict[tuple[str, str], int] = {}

    def join(self, conversation_id: str, user: str, seq: int) -> None:
        key = conversation_id, user
        self.joins[key] = seq
        self.former.pop(key, None)
        self.roles.pop(key, None)

    def leave(self, conversation_id: str, user: str, stored_seq: int, seq: int, title: str) -> None:
        key = conversation_id, user
        joined_seq = self.joins.pop(key, None)
        if joined_seq is None:
            self.leaves[key] = None
            joined_seq = stored_seq
        self.former[key] = joined_seq, seq, title
        self.roles.pop(key, None)

    def write(self, plan: Plan) -> None:
        plan.joins = [(*key, seq, self.roles.pop(key, 0)) for key, seq in self.joins.items()]
        plan.leaves = list(self.leaves)
        plan.former = [(*key, *row) for key, row in self.former.items()]
        plan.roles = [(*key, role) for key, role in self.roles.items()]


def number(
    judged: Sequence[Judged],
    known: Known,
    allocated: Mapping[str, int],
    msg_ids: Iterable[int],
    now_ms: int,
    push_members: int = 500,
) -> Plan:
    """Gives numbers and lays out the rows.

    allocated: per conversation of `wanted` the first of its consecutive seqs. msg_ids: at least as many as are accepted.
    push_members: of groups with more of them, members are not pushed to.
    """
    plan = Plan()
    ids = iter(msg_ids)
    offered = dict(allocated)
    now: dict[str, _Numbering] = {}
    roll = _Roll()
    for j in judged:
        u = j.uplink
        conversation_id = u.conversation_id
        at = now.get(conversation_id)
        if at is None:
            at = now[conversation_id] = _Numbering(known.conversations.get(conversation_id), push_members)
        large = max(1, at.count) if at.large else 0
        if j.first is not None:
            first = plan.decisions[j.first]
            plan.decisions.append(first._replace(uplink=u, repeated=True))
            continue
        if j.stored is not None:
            plan.decisions.append(Decision(u, j.stored, True, at.members, large, known.rows.get(u.key)))
            continue
        if j.verdict.code != Code.OK:
            refusal = Decision(u, Outcome(int(j.verdict.code)), False, at.members)
            plan.decisions.append(refusal)
            plan.outcomes.append(refusal)
            continue
        verdict = j.verdict
        prev_seq = at.last_seq
        seq = max(offered[conversation_id], prev_seq + 1)
        offered[conversation_id] = seq + 1
        told = at.members
        if verdict.joins or verdict.leaves:
            told = at.take(verdict.kind, verdict.joins, verdict.leaves)
            for user in verdict.joins:
                roll.join(conversation_id, user, prev_seq)
            for user in verdict.leaves:
                roll.leave(conversation_id, user, at.joined.get(user, 0), seq, at.title)
            if verdict.kind == policy.GROUP:
                plan.groups[conversation_id] = at.count
            large = max(1, at.count) if at.large else 0
        at.last_seq = seq
        outcome = Outcome(int(Code.OK), next(ids), seq, prev_seq, now_ms)
        row = None
        if verdict.effect is not None:
            row = _take_effect(plan, roll, at, conversation_id, seq, verdict.effect)
        accepted = Decision(u, outcome, False, told, large, row)
        plan.decisions.append(accepted)
        plan.outcomes.append(accepted)
        plan.messages.append(accepted)
        plan.conversations[conversation_id] = (verdict.kind or known.conversations[conversation_id].kind, seq)
    roll.write(plan)
    return plan


def _take_effect(
    plan: Plan, roll: _Roll, at: _Numbering, conversation_id: str, seq: int, effect: operations.Effect
) -> Row:
    """Lays out what an operation of this seq changes; how it is stored itself."""
    op = effect.op
    for user, role in effect.roles.items():
        roll.roles[conversation_id, user] = role
    if effect.title is not None:
        at.title = plan.titles[conversation_id] = effect.title
    target = effect.target
    if target is not None:
        of = target.seq
        if target.fresh:
            of = next(d.outcome.seq for d in plan.messages if d.outcome.msg_id == target.msg_id)
        recalled = op.kind == content.RECALL
        row = Row(target.msg_type if recalled else op.msg_type, b"" if recalled else op.body, seq, recalled)
        plan.edits[op.msg_id] = Edit(op.msg_id, conversation_id, of, row)
        plan.changed[conversation_id] = seq
        if not recalled:
            plan.edited.append((conversation_id, of, seq))
        op = op._replace(seq=of)
    return Row(op.kind, operations.stored(op))


def again(uplinks: Iterable[Uplink], known: Known, push_members: int = 500) -> list[Decision]:
    """What was decided before, to be fanned out again: the first record of a key as if it were new, the others as
    repetitions. A record without a stored outcome was skipped then, and nobody waits for it."""
    decisions: list[Decision] = []
    seen: set[Key] = set()
    for u in uplinks:
        outcome = known.outcomes.get(u.key)
        if outcome is None:
            continue
        at = _Numbering(known.conversations.get(u.conversation_id), push_members)
        told, row = at.members, known.rows.get(u.key)
        if u.msg_type in (content.GROUP_REMOVE, content.GROUP_LEAVE) and row is not None:
            # Who left by it is no member now; who came back since reads nothing of it.
            left = operations.read_users(row.body)
            told = {**told, **{user: 0 for user in left if user not in at.joined}}
        decisions.append(Decision(u, outcome, u.key in seen, told, at.count if at.large else 0, row))
        seen.add(u.key)
    return decisions
