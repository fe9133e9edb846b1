"""Who may write where: membership as of the record. No look at the wire, none at the database.

dialogue  "d:…"  the first message names to_user and must fit dialogue_id(from_user, to_user); it makes both members.
                 Later ones need membership only. A dialogue with oneself has one member.
open      no prefix  while guests are let in, whoever writes first joins, up to the cap; members may go on afterwards.
group     "g:…"  an administrator's records make it and say who its members are; nobody joins by writing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal, NamedTuple, TypeAlias

from plato.core.codes import Code
from plato.core.conversations import DIALOGUE_PREFIX, dialogue_id, is_open_id, is_user_id

DIALOGUE: Final = "dialogue"
OPEN: Final = "open"
GROUP: Final = "group"
ChangeKind: TypeAlias = Literal["create", "add", "remove"]


@dataclass(frozen=True, slots=True)
class Rules:
    """What the settings allow."""

    guests: bool
    """Open conversations may be made and joined."""
    open_members: int = 10_000
    """Most members of an open conversation."""
    group_members: int = 10_000
    """Most members of a group."""
    friends_only: bool = False
    """Only friends may write to a user who did not choose."""


class Verdict(NamedTuple):
    """OK, or the code of the refusal. joins, leaves: users that become members, and that are none any more,
    by this record; kind: of the conversation."""

    code: Code
    kind: str = ""
    joins: tuple[str, ...] = ()
    leaves: tuple[str, ...] = ()


def judge(
    rules: Rules, conversation_id: str, from_user: str, to_user: str, kind: str | None, is_member: bool, members: int
) -> Verdict:
    """The verdict on one record. kind: None where the conversation does not exist yet; members: how many it has."""
    if is_member:
        return Verdict(Code.OK, kind or "")
    if conversation_id.startswith(DIALOGUE_PREFIX):
        if kind is not None or not to_user:
            return Verdict(Code.NOT_A_MEMBER)
        if not is_user_id(to_user):
            return Verdict(Code.BAD_TO_USER)
        if dialogue_id(from_user, to_user) != conversation_id:
            return Verdict(Code.BAD_CONVERSATION)
        return Verdict(Code.OK, DIALOGUE, (from_user,) if to_user == from_user else (from_user, to_user))
    if is_open_id(conversation_id) and rules.guests and members < rules.open_members:
        return Verdict(Code.OK, OPEN, (from_user,))
    return Verdict(Code.NOT_A_MEMBER)


def judge_change(rules: Rules, change: ChangeKind, kind: str | None, members: int) -> Code:
    """The verdict on one change of a group. kind: None where it does not exist yet; members: how many it would have."""
    if change == "create" and kind is not None:
        return Code.GROUP_EXISTS
    if change != "create" and kind != GROUP:
        return Code.GROUP_UNKNOWN
    return Code.GROUP_FULL if change != "remove" and members > rules.group_members else Code.OK
