"""Who may write where: membership as of the record. No look at the wire, none at the database. Operations: operations.py.

dialogue  "d:…"  the first message names to_user and must fit dialogue_id(from_user, to_user); it makes both members.
                 Later ones need membership only. A dialogue with oneself has one member.
open      no prefix  while guests are let in, whoever writes first joins, up to the cap; members may go on afterwards.
group     "g:…"  operations make it and say who its members are; nobody joins by writing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from plato.core.codes import Code
from plato.core.conversations import DIALOGUE_PREFIX, dialogue_id, is_open_id, is_user_id

DIALOGUE: Final = "dialogue"
OPEN: Final = "open"
GROUP: Final = "group"


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
    push_members: int = 500
    """Larger groups get no pushes: they are notified."""
    recall_limit_ms: int = 120_000
    """So old a message is not recalled by its sender any more."""
    edit_limit_ms: int = 86_400_000
    """Nor edited."""


def judge(
    rules: Rules, conversation_id: str, from_user: str, to_user: str, kind: str | None, is_member: bool, members: int
) -> tuple[Code, str, tuple[str, ...]]:
    """The verdict on one message: OK or the refusal, the kind of conversation that it gets or has, and who becomes a member
    by it. kind: None where the conversation does not exist yet; members: how many it has."""
    if is_member:
        return Code.OK, kind or "", ()
    if conversation_id.startswith(DIALOGUE_PREFIX):
        if not to_user:
            return Code.NOT_A_MEMBER, "", ()
        if not is_user_id(to_user):
            return Code.BAD_TO_USER, "", ()
        if dialogue_id(from_user, to_user) != conversation_id:
            return Code.BAD_CONVERSATION, "", ()
        if kind is not None:  # looked at last: whom it does not fit is told the same whether it exists or not
            return Code.NOT_A_MEMBER, "", ()
        return Code.OK, DIALOGUE, (from_user,) if to_user == from_user else (from_user, to_user)
    if is_open_id(conversation_id) and rules.guests and members < rules.open_members:
        return Code.OK, OPEN, (from_user,)
    return Code.NOT_A_MEMBER, "", ()
