"""The product's part of the platform in memory: operations, and what a user's devices share. No frames, no connections.

Roles as the real platform has them, by the shortest means: owners and administrators add, remove and rename;
the owner gives roles; authors recall and edit, and whoever leads the group recalls.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Final

from plato.core.codes import Code
from plato.core.conversations import group_id
from plato.wire.v1 import client_pb2 as pb
from plato.wire.v1 import content_pb2 as content

OPERATIONS: Final = range(1_000, 2_000)
_FIELDS: Final = ("read_seq", "pinned_at_ms", "muted_until_ms", "peer_read_seq", "cleared_seq")


@dataclass(slots=True)
class Conversation:
    """Members and rows, seq 1 first; a row's place is its seq unless numbers were skipped."""

    members: set[str] = field(default_factory=set)
    rows: list[pb.PushMsg] = field(default_factory=list)
    last_seq: int = 0
    outcomes: dict[tuple[str, bytes], pb.ReceiptMsg] = field(default_factory=dict)
    title: str = ""
    roles: dict[str, int] = field(default_factory=dict)
    joined: dict[str, int] = field(default_factory=dict)  # the seq before the first one that they may read
    former: dict[str, tuple[int, int]] = field(default_factory=dict)  # user → (joined, left)

    def range_of(self, user: str) -> tuple[int, int] | None:
        """The seqs (after, up to) that a user may read; None: nothing, not even that there is something."""
        if user in self.members:
            return self.joined.get(user, 0), self.last_seq
        return self.former.get(user)


@dataclass(slots=True)
class Done:
    """An operation that was accepted: its body as it is stored."""

    body: bytes


def operate(
    conversation: Conversation, conversation_id: str, user: str, up: pb.UPMsg, seq: int, authority: bool = False
) -> Done | Code:
    """Judges an operation, and does it where it is allowed; its row is to have this seq."""
    try:
        asked = content.Operation.FromString(up.UPMsgBody)
        kind = content.MsgType.Name(content.MsgType.ValueType(up.msg_type))
    except ValueError:
        return Code.BAD_OPERATION
    if kind == "GROUP_CREATE":
        if conversation.members or conversation_id != group_id(user, up.client_msg_id):
            return Code.NOT_A_MEMBER
        conversation.title = asked.title
        conversation.roles[user] = content.OWNER
        asked = content.Operation(title=asked.title, users=dict.fromkeys([user, *asked.users]), owner=user)
        _join(conversation, asked.users, seq)
        return Done(asked.SerializeToString())
    if user not in conversation.members and not authority:
        return Code.NOT_A_MEMBER
    if kind in ("RECALL", "EDIT"):
        return _revise(conversation, user, asked, kind, seq)
    leads = authority or conversation.roles.get(user, 0) >= content.ADMINISTRATOR
    if not conversation_id.startswith("g:"):
        return Code.BAD_OPERATION
    if kind == "GROUP_LEAVE":
        asked = content.Operation(users=[user], owner=_heir(conversation, user))
        _part(conversation, {user}, seq)
        return Done(asked.SerializeToString())
    if not leads or (kind == "GROUP_ROLE" and conversation.roles.get(user, 0) != content.OWNER and not authority):
        return Code.NOT_ALLOWED
    if kind == "GROUP_ADD":
        asked = content.Operation(users=sorted(set(asked.users) - conversation.members))
        _join(conversation, asked.users, seq)
    elif kind == "GROUP_REMOVE":
        asked = content.Operation(users=sorted(set(asked.users) & conversation.members))
        if any(conversation.roles.get(u, 0) >= conversation.roles.get(user, 0) for u in asked.users) and not authority:
            return Code.NOT_ALLOWED
        _part(conversation, asked.users, seq)
    elif kind == "GROUP_RENAME":
        conversation.title = asked.title
    elif kind == "GROUP_ROLE":
        return _give_role(conversation, asked)
    return Done(asked.SerializeToString())


def _heir(conversation: Conversation, user: str) -> str:
    """Who takes the owner's place where this user goes; "": they have none, or nobody is left."""
    others = sorted(conversation.members - {user}, key=lambda u: (not conversation.roles.get(u), u))
    if conversation.roles.get(user) != content.OWNER or not others:
        return ""
    conversation.roles[others[0]] = content.OWNER
    return others[0]


def _give_role(conversation: Conversation, asked: content.Operation) -> Done | Code:
    named = [user for user in asked.users if user in conversation.members]
    owner = next((u for u, role in conversation.roles.items() if role == content.OWNER), "")
    if asked.role != content.OWNER and owner in named:
        return Code.NOT_ALLOWED
    if asked.role == content.OWNER:
        if not named:
            return Code.BAD_OPERATION
        conversation.roles[owner] = content.ADMINISTRATOR
        asked.owner = named[0]
    for user in named:
        conversation.roles[user] = asked.role
    return Done(content.Operation(users=named, role=asked.role, owner=asked.owner).SerializeToString())


def _join(conversation: Conversation, users: Iterable[str], seq: int) -> None:
    for user in users:
        conversation.members.add(user)
        conversation.joined[user] = seq - 1
        conversation.former.pop(user, None)


def _part(conversation: Conversation, users: Iterable[str], seq: int) -> None:
    for user in users:
        conversation.members.discard(user)
        conversation.roles.pop(user, None)
        conversation.former[user] = (conversation.joined.pop(user, 0), seq)


def _revise(conversation: Conversation, user: str, asked: content.Operation, kind: str, seq: int) -> Done | Code:
    row = next((r for r in conversation.rows if r.MsgID == asked.msg_id), None)
    if row is None or row.recalled or row.msg_type in OPERATIONS or row.seq <= conversation.joined.get(user, 0):
        return Code.MESSAGE_UNKNOWN
    leads = conversation.roles.get(user, 0) >= content.ADMINISTRATOR
    if row.from_user != user and not (leads and kind == "RECALL"):
        return Code.NOT_ALLOWED
    row.changed_seq = seq
    if kind == "RECALL":
        for gone in (row, *(r for r in conversation.rows if _edits(r, row.MsgID))):
            gone.Content, gone.recalled, gone.changed_seq = b"", True, seq
    else:
        row.Content, row.msg_type = asked.body, asked.msg_type
    asked.seq = row.seq
    return Done(asked.SerializeToString())


def _edits(row: pb.PushMsg, msg_id: int) -> bool:
    return row.msg_type == content.EDIT and content.Operation.FromString(row.Content).msg_id == msg_id


@dataclass(slots=True)
class UserState:
    """What one user's devices share. Each entry is (the version of its last change, what holds)."""

    version: int = 0
    conversations: dict[str, tuple[int, pb.ConversationState]] = field(default_factory=dict)
    hidden: dict[tuple[str, int], tuple[int, pb.HiddenMessage]] = field(default_factory=dict)
    friends: dict[str, tuple[int, pb.FriendState]] = field(default_factory=dict)

    def of(self, conversation_id: str) -> pb.ConversationState:
        """What holds of a conversation."""
        return self.conversations.get(conversation_id, (0, pb.ConversationState(conversation_id=conversation_id)))[1]

    def change(self, conversation_id: str, **fields: int) -> pb.StateMsg | None:
        """Sets these fields; read positions only rise. None: they were so before."""
        before = self.of(conversation_id)
        after = pb.ConversationState()
        after.CopyFrom(before)
        for name, value in fields.items():
            assert name in _FIELDS
            setattr(after, name, max(value, getattr(before, name)) if name.endswith("read_seq") else value)
        if after == before:
            return None
        self.version += 1
        self.conversations[conversation_id] = (self.version, after)
        return self._state(conversations=[after])

    def hide(self, conversation_id: str, seq: int) -> pb.StateMsg:
        """Deletes a message for this user."""
        self.version += 1
        message = pb.HiddenMessage(conversation_id=conversation_id, seq=seq)
        self.hidden[conversation_id, seq] = (self.version, message)
        return self._state(hidden=[message])

    def befriend(self, friend: pb.FriendState) -> pb.StateMsg:
        """Sets what another user is to this one."""
        self.version += 1
        self.friends[friend.user] = (self.version, friend)
        return self._state(friends=[friend])

    def newer(self, version: int, limit: int) -> pb.StateMsg:
        """What changed after a version, at most so much of it, for a Sync."""
        found: list[tuple[int, str, object]] = []
        for name in ("conversations", "hidden", "friends"):
            found += [(v, name, what) for v, what in getattr(self, name).values() if v > version]
        found.sort(key=lambda entry: entry[0])
        state = pb.StateMsg(version=self.version, more=len(found) > limit)
        for v, name, what in found[:limit]:
            getattr(state, name).add().CopyFrom(what)
            if state.more:
                state.version = v
        return state

    def _state(self, **what: Any) -> pb.StateMsg:
        return pb.StateMsg(version=self.version, prev_version=self.version - 1, **what)
