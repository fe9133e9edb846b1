"""Conversations of a person: the list, what is set in it (read, pinned, muted, deleted), who has read, and the messages.

Messages are read by the same code as the frame PULL (plato_msg.history), with its codes, bounds and covered ranges.
What is set here is told to all devices of the person at once.
"""

from __future__ import annotations

from typing import Annotated, Any, Final, Protocol

from fastapi import APIRouter, Query
from plato.core.codes import Code
from plato.core.ids import MAX_ID
from plato.ports import Reading
from plato.wire.v1 import client_pb2 as wire
from pydantic import Field

from plato_msg.api import problems, render
from plato_msg.api.auth import Person
from plato_msg.api.fields import ConversationId
from plato_msg.api.models import Answer, AttachmentOut, Given, Page
from plato_msg.api.problems import Problem
from plato_msg.history import MAX_PAGE, PAGE
from plato_msg.lists_pg import Item
from plato_msg.userstate import FOREVER_MS, LIST_MAX, READERS_MAX, Stands, UserStates

PATH: Final = "/v1/conversations"
ONE: Final = "/v1/conversations/{conversation_id}"
READ_COUNTS: Final = 100


class Pulls(Protocol):
    """Who answers pulls (plato_msg.reads.Reads)."""

    async def pull(self, user: str, pull: wire.PullMsg) -> wire.PulledMsg:
        """Raises Unavailable; refusals are codes in the answer."""


class LastOut(Answer):
    """The newest message as a list shows it."""

    msg_id: str
    seq: int
    from_user: str = Field(alias="from")
    type: int
    server_at: int
    recalled: bool
    text: str | None = Field(None, description="Its beginning.")
    attachments: list[AttachmentOut] | None = None
    operation: dict[str, Any] | None = None


class ConversationOut(Answer):
    """A conversation in the caller's list."""

    conversation_id: str
    kind: str = Field(description="dialogue, group or open.")
    title: str = Field(description="A group's.")
    peer: str = Field(description="A dialogue's other user.")
    members: int = Field(description="A group's; 0 for who left.")
    last: LastOut | None = None
    newest_seq: int
    unread: int = Field(description="Own messages never count; 1000 means so many or more.")
    read_seq: int
    peer_read_seq: int = Field(description="A dialogue's other user has read up to here.")
    pinned_at: int = Field(description="Unix ms; 0: not pinned.")
    muted_until: int = Field(description="Unix ms; 0: not muted.")
    left: bool


class ConversationsOut(Answer):
    """A page of the list: pinned ones first, then by the newest message. cursor: of the next page, if there is one."""

    conversations: list[ConversationOut]
    cursor: str | None = None
    unread: int | None = Field(None, description="Of all conversations that are not muted; on the first page only.")


class ReadIn(Given):
    """Read up to here."""

    seq: int = Field(ge=1, le=MAX_ID)


class ReadOut(Answer):
    """The position that stands: it only rises, and is never above the newest message."""

    read_seq: int


class PinIn(Given):
    """Pinned to the top, or not."""

    pinned: bool = True


class MuteIn(Given):
    """Muted until then (Unix ms); 0: not; none: until it is lifted."""

    until: int | None = Field(None, ge=0, le=FOREVER_MS)


class StateOut(Answer):
    """What is set now."""

    conversation_id: str
    read_seq: int
    pinned_at: int
    muted_until: int
    cleared_seq: int = Field(description="Messages up to here are hidden from the caller.")


class ReadersOut(Answer):
    """Members who have read a message, without its author, by id. more: ask on with after = the last one's."""

    users: list[str]
    more: bool


class ReadCountsOut(Answer):
    """{seq: how many members have read it}; messages that the caller may not read are left out."""

    counts: dict[str, int]


def router(pulls: Pulls, states: UserStates) -> APIRouter:
    """The routes."""
    routes = APIRouter(tags=["conversations"])

    @routes.get(PATH, response_model=ConversationsOut, response_model_exclude_none=True)
    async def conversations(
        user: Person,
        cursor: Annotated[str, Query(max_length=256, description="Of the page before.")] = "",
        limit: Annotated[int, Query(ge=1, le=LIST_MAX)] = 50,
    ) -> Any:
        """The caller's conversations."""
        found = await states.conversations(user, cursor, limit)
        if found is None:
            raise Problem(Code.MALFORMED, "query.cursor: is none of this list's")
        said: dict[str, Any] = {"conversations": [conversation_out(item) for item in found.items]}
        if found.cursor:
            said["cursor"] = found.cursor
        if not cursor:
            said["unread"] = await states.unread(user)
        return said

    @routes.get(ONE, response_model=ConversationOut, response_model_exclude_none=True)
    async def conversation(user: Person, conversation_id: ConversationId) -> Any:
        """One conversation."""
        found = await states.conversation(user, conversation_id)
        if found is None:
            raise Problem(Code.NOT_A_MEMBER)
        return conversation_out(found)

    @routes.delete(ONE, response_model=StateOut)
    async def clear(
        user: Person,
        conversation_id: ConversationId,
        upto_seq: Annotated[int, Query(ge=0, le=MAX_ID, description="Up to here; 0: all that is there by now.")] = 0,
    ) -> Any:
        """Delete a conversation from the caller's list, and its messages for the caller. It comes back with the next one."""
        return state_out(await states.clear(user, conversation_id, upto_seq))

    @routes.put(f"{ONE}/read", response_model=ReadOut)
    async def read(user: Person, conversation_id: ConversationId, position: ReadIn) -> Any:
        """Say what has been read."""
        (stands,) = await states.read([Reading(user, conversation_id, position.seq)])
        problems.check(stands.code)
        return {"read_seq": stands.seq}

    @routes.put(f"{ONE}/pin", response_model=StateOut)
    async def pin(user: Person, conversation_id: ConversationId, pin: PinIn) -> Any:
        """Pin to the top of the list, or no more."""
        return state_out(await states.pin(user, conversation_id, pin.pinned))

    @routes.put(f"{ONE}/mute", response_model=StateOut)
    async def mute(user: Person, conversation_id: ConversationId, mute: MuteIn) -> Any:
        """Mute: nothing rings, and it counts in no total."""
        return state_out(await states.mute(user, conversation_id, FOREVER_MS if mute.until is None else mute.until))

    @routes.get(f"{ONE}/readers", response_model=ReadersOut)
    async def readers(
        user: Person,
        conversation_id: ConversationId,
        seq: Annotated[int, Query(ge=1, le=MAX_ID, description="Of the message.")],
        after: Annotated[str, Query(max_length=64, description="Only members whose ids sort after it.")] = "",
        limit: Annotated[int, Query(ge=1, le=READERS_MAX - 1)] = 100,
    ) -> Any:
        """Who has read a message."""
        found = await states.readers(user, conversation_id, seq, after, limit + 1)
        if found is None:
            raise Problem(Code.NOT_A_MEMBER)
        return {"users": found[:limit], "more": len(found) > limit}

    @routes.get(f"{ONE}/read_counts", response_model=ReadCountsOut)
    async def read_counts(
        user: Person,
        conversation_id: ConversationId,
        seqs: Annotated[
            list[Annotated[int, Field(ge=1, le=MAX_ID)]],
            Query(max_length=READ_COUNTS, description="Of messages, the parameter repeated."),
        ],
    ) -> Any:
        """How many have read each message."""
        found = await states.read_counts(user, conversation_id, seqs)
        if found is None:
            raise Problem(Code.NOT_A_MEMBER)
        return {"counts": {str(seq): count for seq, count in found.items()}}

    @routes.get(f"{ONE}/messages", response_model=Page, response_model_exclude_none=True)
    async def messages(
        user: Person,
        conversation_id: ConversationId,
        from_seq: Annotated[int, Query(ge=0, le=2**64 - 1, description="From here, this one too.")] = 0,
        to_seq: Annotated[int, Query(ge=0, le=2**64 - 1, description="Up to here, this one too; 0: the newest.")] = 0,
        limit: Annotated[int, Query(ge=0, le=2**32 - 1, description=f"At most {MAX_PAGE}; 0: {PAGE}.")] = 0,
        newest_first: Annotated[bool, Query(description="The newest of the range instead of the oldest.")] = False,
    ) -> Any:
        """Messages of a conversation, by rising seq. Pages are bound by size too: go on at covered_to + 1, or, with
        newest_first, below covered_from."""
        pull = wire.PullMsg(
            conversation_id=conversation_id,
            from_seq=from_seq,
            to_seq=to_seq,
            limit=limit,
            newest_first=newest_first,
        )
        found = await pulls.pull(user, pull)
        problems.check(found.code, retry_ms=found.retry_ms)
        return page(found)

    return routes


def page(found: wire.PulledMsg) -> dict[str, Any]:
    """A PULLED in JSON."""
    return {
        "conversation_id": found.conversation_id,
        "messages": [render.message(row) for row in found.rows],
        "covered_from": found.covered_from,
        "covered_to": found.covered_to,
        "newest_seq": found.newest_seq,
    }


def state_out(stands: Stands) -> dict[str, Any]:
    """What stands, in JSON. Raises Problem for a refusal."""
    problems.check(stands.code)
    state = stands.state if stands.state is not None else wire.ConversationState()
    return {
        "conversation_id": state.conversation_id,
        "read_seq": state.read_seq,
        "pinned_at": state.pinned_at_ms,
        "muted_until": state.muted_until_ms,
        "cleared_seq": state.cleared_seq,
    }


def conversation_out(item: Item) -> dict[str, Any]:
    """An item of the list in JSON."""
    said: dict[str, Any] = {
        "conversation_id": item.conversation_id,
        "kind": item.kind,
        "title": item.title,
        "peer": item.peer,
        "members": item.members,
        "newest_seq": item.newest_seq,
        "unread": item.unread,
        "read_seq": item.read_seq,
        "peer_read_seq": item.peer_read_seq,
        "pinned_at": item.pinned_at_ms,
        "muted_until": item.muted_until_ms,
        "left": item.left,
    }
    if item.last is not None:
        said["last"] = render.beginning(item.last)
    return said
