"""Operations: messages that change their conversation (content.proto). Who may do what, as of the record, and what follows.

    read    a body → Op, or None (BAD_OPERATION); limits of its fields
    judge   Op, who asks, the conversation as it stands → Verdict: joins, leaves, roles, title, the message that is meant
    stored  Op → the body that is kept and pushed: users are those who really joined or left, owner and seq are filled in

Roles bind people; `authority` (administrators, application servers) is bound by none. The owner is one member: who takes the
place by GROUP_ROLE, else, when the owner goes, the senior administrator, else the senior member (least joined_seq, then the
id). A group that only authority made has no owner until it is given one. docs/groups.md prints the table, a test compares.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from google.protobuf.message import DecodeError
from plato.core.codes import Code
from plato.core.conversations import GROUP_PREFIX, group_id, is_title, is_user_id
from plato.core.ids import MAX_ID
from plato.wire.v1 import content_pb2 as content

from plato_msg.core.policy import GROUP, Rules

MAX_USERS: Final = 500
FIRST: Final = 1000
LAST: Final = 1999
_GROUP_KINDS: Final = frozenset(range(content.GROUP_CREATE, content.GROUP_ROLE + 1))
_EDITABLE: Final = (content.TEXT, content.RICH)


class Op(NamedTuple):
    """An operation, read. Fields that its kind does not use are empty. users: each once."""

    kind: int
    """MsgType."""
    title: str = ""
    users: tuple[str, ...] = ()
    role: int = 0
    msg_id: int = 0
    seq: int = 0
    msg_type: int = 0
    body: bytes = b""
    owner: str = ""


class Target(NamedTuple):
    """The message that a RECALL or an EDIT means, as it stands. fresh: of this very batch, its seq is not known yet."""

    msg_id: int
    conversation_id: str
    seq: int
    from_user: str
    msg_type: int
    server_at_ms: int
    recalled: bool = False
    fresh: bool = False


class Effect(NamedTuple):
    """What an accepted operation changes beside who is a member."""

    op: Op
    """As it will be stored; its seq comes with the numbers."""
    roles: Mapping[str, int] = {}
    title: str | None = None
    target: Target | None = None


class Verdict(NamedTuple):
    """OK, or the code of the refusal. kind: of the conversation, that it gets or has."""

    code: Code
    kind: str = ""
    joins: tuple[str, ...] = ()
    """Users that become members by this record."""
    leaves: tuple[str, ...] = ()
    """Users that are members no more."""
    effect: Effect | None = None


@dataclass(slots=True)
class Standing:
    """A conversation while a batch is judged: as stored, plus what the batch changed. members: {user: joined_seq}; of a
    large group those who are named, and as many seniors as could be needed."""

    kind: str | None
    members: Mapping[str, int]
    roles: Mapping[str, int] = field(default_factory=dict)
    """Of those of `members` that lead."""
    count: int = 0
    last_seq: int = 0
    accepted: int = 0
    """Messages of the batch so far."""
    joined: dict[str, int] = field(default_factory=dict)
    """By the batch: {user: rank}; ranks order like joined_seqs, which are not known yet."""
    left: set[str] = field(default_factory=set)
    given: dict[str, int] = field(default_factory=dict)
    """Roles that the batch gave and took."""

    def has(self, user: str) -> bool:
        """Whether that is a member now."""
        return user in self.joined or (user in self.members and user not in self.left)

    def role(self, user: str) -> int:
        """A member's role now."""
        return self.given.get(user, self.roles.get(user, content.MEMBER))

    def rank(self, user: str) -> int:
        """A member's joined_seq, or what stands for it."""
        joined = self.joined.get(user)
        return self.members[user] if joined is None else joined

    def owner(self) -> str:
        """The owner's id; "": there is none."""
        for roles in (self.given, self.roles):
            for user, role in roles.items():
                if role == content.OWNER and self.role(user) == content.OWNER:
                    return user
        return ""

    def heir(self, without: Collection[str]) -> str:
        """Who becomes the owner when `without` are gone; "": nobody is left."""
        candidates = [user for user in {*self.members, *self.joined} if user not in without and self.has(user)]
        key = lambda user: (self.role(user) == content.MEMBER, self.rank(user), user)  # noqa: E731  # used once
        return min(candidates, key=key, default="")

    def take(self, verdict: Verdict) -> None:
        """An accepted record's joins, leaves and roles."""
        self.kind = verdict.kind
        self.count += len(verdict.joins) - len(verdict.leaves)
        rank = self.last_seq + self.accepted
        for user in verdict.joins:
            self.joined[user] = rank
            self.given[user] = content.MEMBER
        for user in verdict.leaves:
            self.joined.pop(user, None)
            self.left.add(user)
            self.given[user] = content.MEMBER
        if verdict.effect is not None:
            self.given.update(verdict.effect.roles)
        self.accepted += 1


def is_operation(msg_type: int) -> bool:
    """Whether uplinks of this msg_type are operations."""
    return FIRST <= msg_type <= LAST


def read(kind: int, body: bytes, authority: bool) -> Op | None:
    """A body as its msg_type `kind` wants it; None: it cannot be read, or a field is out of bounds. Only authority may name
    a group's owner."""
    try:
        o = content.Operation.FromString(body)
    except DecodeError:
        return None
    if kind in (content.RECALL, content.EDIT):
        if not 0 < o.msg_id <= MAX_ID:
            return None
        if kind == content.RECALL:
            return Op(kind, msg_id=o.msg_id)
        return Op(kind, msg_id=o.msg_id, msg_type=o.msg_type, body=o.body) if o.msg_type in _EDITABLE else None
    if kind == content.GROUP_LEAVE:
        return Op(kind)
    if kind == content.GROUP_RENAME:
        return Op(kind, title=o.title) if o.title and is_title(o.title) else None
    if kind not in _GROUP_KINDS or len(o.users) > MAX_USERS or not all(map(is_user_id, o.users)):
        return None
    users = tuple(dict.fromkeys(o.users))
    if kind == content.GROUP_CREATE:
        fits = is_title(o.title) and (not o.owner or is_user_id(o.owner))
        return Op(kind, title=o.title, users=users, owner=o.owner if authority else "") if fits else None
    if not users:
        return None
    if kind == content.GROUP_ROLE:
        fits = o.role in content.Role.values() and (o.role != content.OWNER or len(users) == 1)
        return Op(kind, users=users, role=o.role) if fits else None
    return Op(kind, users=users)


def read_users(body: bytes) -> Sequence[str]:
    """The users of an operation as it is stored; none where it is not there any more."""
    return content.Operation.FromString(body).users


def stored(op: Op) -> bytes:
    """The body that is kept and pushed."""
    return content.Operation(
        title=op.title,
        users=op.users,
        role=content.Role.ValueType(op.role),
        msg_id=op.msg_id,
        seq=op.seq,
        msg_type=op.msg_type,
        body=op.body,
        owner=op.owner,
    ).SerializeToString()


def judge(
    op: Op,
    rules: Rules,
    conversation_id: str,
    from_user: str,
    client_msg_id: bytes,
    authority: bool,
    now: Standing,
    target: Target | None,
    now_ms: int,
) -> Verdict:
    """The verdict on one operation. target: the message of op.msg_id, None where there is none; now_ms: what the operation
    will be stamped with."""
    if op.kind == content.GROUP_CREATE:
        return _create(op, rules, conversation_id, from_user, client_msg_id, authority, now)
    if not authority and not now.has(from_user):
        return Verdict(Code.NOT_A_MEMBER)
    if op.kind not in _GROUP_KINDS:
        return _change_message(op, rules, conversation_id, from_user, authority, now, target, now_ms)
    if not conversation_id.startswith(GROUP_PREFIX):
        return Verdict(Code.NOT_ALLOWED)
    if now.kind != GROUP:
        return Verdict(Code.GROUP_UNKNOWN)
    if op.kind == content.GROUP_LEAVE:
        return _go(op, (from_user,), now) if now.has(from_user) else Verdict(Code.NOT_A_MEMBER)
    role = content.OWNER if authority else now.role(from_user)
    if role == content.MEMBER:
        return Verdict(Code.NOT_ALLOWED)
    if op.kind == content.GROUP_ADD:
        joins = tuple(user for user in op.users if not now.has(user))
        if now.count + len(joins) > rules.group_members:
            return Verdict(Code.GROUP_FULL)
        return Verdict(Code.OK, GROUP, joins, effect=Effect(op._replace(users=joins)))
    if op.kind == content.GROUP_RENAME:
        return Verdict(Code.OK, GROUP, effect=Effect(op, title=op.title))
    if op.kind == content.GROUP_REMOVE:
        leaves = tuple(user for user in op.users if now.has(user))
        if not authority and (from_user in leaves or any(now.role(user) >= role for user in leaves)):
            return Verdict(Code.NOT_ALLOWED)
        return _go(op, leaves, now)
    return _give_role(op, role, now)


def _create(
    op: Op, rules: Rules, conversation_id: str, from_user: str, client_msg_id: bytes, authority: bool, now: Standing
) -> Verdict:
    if not conversation_id.startswith(GROUP_PREFIX):
        return Verdict(Code.NOT_ALLOWED if authority or now.has(from_user) else Code.NOT_A_MEMBER)
    if not authority and conversation_id != group_id(from_user, client_msg_id):
        return Verdict(Code.BAD_CONVERSATION)  # the same to everybody, whether there is a group of that id or not
    if now.kind is not None:
        return Verdict(Code.GROUP_EXISTS if authority or now.has(from_user) else Code.NOT_A_MEMBER)
    owner = op.owner if authority else from_user
    joins = tuple(dict.fromkeys([owner, *op.users] if owner else op.users))
    if len(joins) > rules.group_members:
        return Verdict(Code.GROUP_FULL)
    effect = Effect(op._replace(users=joins, owner=owner), {owner: content.OWNER} if owner else {}, op.title)
    return Verdict(Code.OK, GROUP, joins, effect=effect)


def _go(op: Op, leaves: tuple[str, ...], now: Standing) -> Verdict:
    """They leave; where the owner is one of them, another one takes the place."""
    heir = now.heir(leaves) if now.owner() in leaves else ""
    effect = Effect(op._replace(users=leaves, owner=heir), {heir: content.OWNER} if heir else {})
    return Verdict(Code.OK, GROUP, leaves=leaves, effect=effect)


def _give_role(op: Op, role: int, now: Standing) -> Verdict:
    users = tuple(user for user in op.users if now.has(user))
    owner = now.owner()
    if role != content.OWNER or (op.role != content.OWNER and owner in users):
        return Verdict(Code.NOT_ALLOWED)
    if op.role != content.OWNER:
        users = tuple(user for user in users if now.role(user) != op.role)
        return Verdict(Code.OK, GROUP, effect=Effect(op._replace(users=users), dict.fromkeys(users, op.role)))
    if not users:
        return Verdict(Code.BAD_OPERATION)  # no member: nobody can take the place
    # The order counts: of whom is the owner already nothing is taken.
    roles = {**({owner: content.ADMINISTRATOR} if owner else {}), users[0]: content.OWNER}
    return Verdict(Code.OK, GROUP, effect=Effect(op._replace(owner=users[0]), roles))


def _change_message(
    op: Op,
    rules: Rules,
    conversation_id: str,
    from_user: str,
    authority: bool,
    now: Standing,
    target: Target | None,
    now_ms: int,
) -> Verdict:
    if target is None or target.conversation_id != conversation_id or target.recalled:
        return Verdict(Code.MESSAGE_UNKNOWN)
    if not authority and target.seq <= now.rank(from_user):
        return Verdict(Code.MESSAGE_UNKNOWN)  # from before this member's time
    mine = target.from_user == from_user
    if is_operation(target.msg_type):
        return Verdict(Code.NOT_ALLOWED)
    if op.kind == content.RECALL:
        allowed = authority or (now.kind == GROUP and now.role(from_user) != content.MEMBER)
        limit_ms = rules.recall_limit_ms
    else:
        if not mine or target.msg_type not in _EDITABLE:
            return Verdict(Code.NOT_ALLOWED)
        allowed, limit_ms = authority, rules.edit_limit_ms
    if not allowed and not mine:
        return Verdict(Code.NOT_ALLOWED)
    if not allowed and now_ms - target.server_at_ms >= limit_ms:
        return Verdict(Code.TOO_LATE)
    return Verdict(Code.OK, now.kind or "", effect=Effect(op, target=target))
