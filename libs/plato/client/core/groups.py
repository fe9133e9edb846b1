"""What operations do: each one, read in its place, changes older rows or what is known of its group. Pure.

A device reads a conversation's rows in order, so it applies the same operations in the same order as every other. What a
Sync told of a group holds as of its newest_seq: operations up to there are in it already.
"""

from __future__ import annotations

from plato.client.content import MsgType, Role, operation_of
from plato.client.core.inbox import Thread
from plato.client.core.model import Membership, Revision, Row
from plato.wire.v1 import client_pb2 as pb


def revision_of(row: Row) -> Revision | None:
    """What this row, an operation, makes of the message that it means; None: it means none (any more: of a recalled message
    the edits are emptied too)."""
    found = operation_of(row.msg_type, row.body)
    if found is None or not 0 < found.msg_id < 1 << 63:
        return None
    if found.kind is MsgType.RECALL:
        return Revision(row.conversation_id, found.msg_id, found.seq, row.seq, True, None, b"")
    if found.kind is MsgType.EDIT:
        return Revision(row.conversation_id, found.msg_id, found.seq, row.seq, False, found.msg_type, found.body)
    return None


def memberships_of(row: Row) -> list[Membership]:
    """Whose place in the group this row changes."""
    found = operation_of(row.msg_type, row.body)
    if found is None:
        return []

    def place(user: str, role: Role | None, added: bool = False) -> Membership:
        return Membership(row.conversation_id, user, row.seq, role, added)

    match found.kind:
        case MsgType.GROUP_CREATE:
            found_places = [place(u, Role.MEMBER) for u in found.users]
        case MsgType.GROUP_ADD:
            found_places = [place(u, Role.MEMBER, added=True) for u in found.users]
        case MsgType.GROUP_REMOVE:
            found_places = [place(u, None) for u in found.users]
        case MsgType.GROUP_LEAVE:
            found_places = [place(row.from_user, None)]
        case MsgType.GROUP_ROLE if found.role is not Role.OWNER:
            found_places = [place(u, found.role) for u in found.users]
        case _:
            found_places = []
    return [*found_places, place(found.owner, Role.OWNER)] if found.owner else found_places


def operate(thread: Thread, row: Row, user: str | None) -> bool:
    """A group's operation, read in its place: what is known of the group follows. False: that was known, or it is none."""
    found = operation_of(row.msg_type, row.body)
    if found is None or row.seq <= thread.group_seq:
        return False
    match found.kind:
        case MsgType.GROUP_CREATE:
            thread.title = found.title
            thread.members = len(found.users)
            thread.left = False
        case MsgType.GROUP_RENAME:
            thread.title = found.title
        case MsgType.GROUP_ADD:
            thread.members += len(found.users)
            if user in found.users:  # again: what happened meanwhile only a Sync tells
                thread.left, thread.members = False, 0
        case MsgType.GROUP_REMOVE:
            thread.members = max(0, thread.members - len(found.users))
            if user in found.users:
                thread.left = True
        case MsgType.GROUP_LEAVE:
            thread.members = max(0, thread.members - 1)
            if user == row.from_user:
                thread.left = True
        case MsgType.GROUP_ROLE:
            pass
        case _:
            return False
    thread.group_seq = row.seq
    return True


def told(thread: Thread, item: pb.SyncedItem, newest_seq: int) -> bool:
    """A Sync told what holds of a group as of newest_seq. False: later things are known, or nothing is new."""
    if newest_seq < thread.group_seq or not (item.title or item.members or item.left):
        return False
    before = thread.title, thread.members, thread.left
    thread.title, thread.members, thread.left = item.title, item.members, item.left
    thread.group_seq = newest_seq
    return before != (thread.title, thread.members, thread.left)
