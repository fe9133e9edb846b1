"""Who may write where: membership as of the record. No look at the wire, none at the database.

dialogue  "d:…"  the first message names to_user and must fit dialogue_id(from_user, to_user); it makes both members.
                 Later ones need membership only. A dialogue with oneself has one member.
open      no prefix  while guests are let in, whoever writes first joins, up to the cap; members may go on afterwards.
group     "g:…"  nobody is a member yet.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, NamedTuple

from plato.core.codes import Code
from plato.core.conversations import DIALOGUE_PREFIX, dialogue_id, is_open_id, is_user_id

DIALOGUE: Final = "dialogue"
OPEN: Final = "open"


@dataclass(frozen=True, slots=True)
class Rules:
    """What the settings allow."""

    guests: bool
    """Open conversations may be made and joined."""
    open_members: int = 10_000
    """Most members of an open conversation."""


class Verdict(NamedTuple):
    """OK, or the code of the refusal. joins: users that become members by this record; kind: of the conversation."""

    code: Code
    kind: str = ""
    joins: tuple[str, ...] = ()


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
