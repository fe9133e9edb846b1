"""What an uplink that its conversation would take is refused for all the same: its recipient does not want it, or it
references what its sender may not read. And whom its sender may bring into groups. All as of the record."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING

from plato.core.codes import Code
from plato.core.conversations import DIALOGUE_PREFIX, dialogue_id
from plato.wire.v1 import content_pb2 as content

from plato_msg.core import references

if TYPE_CHECKING:
    from plato_msg.core.batch import Uplink


@dataclass(slots=True)
class Gates:
    """What the database holds on that."""

    unwelcome: Collection[tuple[str, str]] = ()
    """(conversation_id, sender) of dialogues whose other user takes nothing of the sender."""
    uninvited: Collection[tuple[str, str]] = ()
    """(user, who wants to bring him into a group) of users who take nothing of that one."""
    readable: Collection[tuple[str, str]] = ()
    """(user, attachment_id) of the attachments that the batch references, by whom."""

    def judge(self, u: Uplink) -> Code:
        """OK, or why it is refused."""
        if self.unwelcome and _asks(u) and (u.conversation_id, u.from_user) in self.unwelcome:
            return Code.NOT_WELCOME
        named = references.of(u)
        if len(named) > references.MOST or (named and references.misleads(u)):
            return Code.BAD_OPERATION
        if any((u.from_user, attachment_id) not in self.readable for attachment_id in named):
            return Code.ATTACHMENT_UNKNOWN
        return Code.OK

    def invited(self, u: Uplink) -> Uplink:
        """As it is done: without those who take nothing of its sender. In silence, as with those who are members already: an
        answer about one of several would tell more than a dialogue's does."""
        if not self.uninvited or not _brings(u) or u.operation is None:
            return u
        users = tuple(user for user in u.operation.users if (user, u.from_user) not in self.uninvited)
        return u._replace(operation=u.operation._replace(users=users))


def _brings(u: Uplink) -> bool:
    """It brings people into a group, and they are asked: not by what servers do."""
    return not u.authority and u.msg_type in (content.GROUP_CREATE, content.GROUP_ADD)


def invitations(uplinks: Collection[Uplink]) -> Collection[tuple[str, str]]:
    """(user, who wants to bring him into a group) to look up."""
    return {
        (user, u.from_user): None
        for u in uplinks
        if _brings(u) and u.operation is not None
        for user in u.operation.users
        if user != u.from_user
    }


def _asks(u: Uplink) -> bool:
    """The recipient is asked: not about what servers say, and not where a message is taken back."""
    return u.conversation_id.startswith(DIALOGUE_PREFIX) and not u.authority and u.msg_type != content.RECALL


def dialogues(uplinks: Collection[Uplink]) -> Collection[tuple[str, str, str]]:
    """(conversation_id, sender, the other user or "") to look up: the other one is named by a dialogue's first message,
    else he is the other member."""
    found: dict[tuple[str, str, str], None] = {}
    for u in uplinks:
        if _asks(u):
            to_user = u.to_user
            # Else a name that is not his would tell about a third one.
            if to_user and dialogue_id(u.from_user, to_user) != u.conversation_id:
                to_user = ""
            found[u.conversation_id, u.from_user, to_user] = None
    return found


def named(uplinks: Collection[Uplink]) -> Collection[tuple[str, str]]:
    """(sender, attachment_id) to look up. An id with a NUL is nobody's, and the database could not look for it: one such
    record would have the whole batch refused."""
    return {
        (u.from_user, attachment_id): None
        for u in uplinks
        for attachment_id in references.of(u)[: references.MOST]
        if "\x00" not in attachment_id
    }
