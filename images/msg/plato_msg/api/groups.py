"""Groups: make, look at, rename, who is in them, roles, leave. Every change is a message of its own in the conversation.

A person's change is bound by the person's role; a server that acts for nobody is bound by none, and its changes are from
"admin". More users than one operation takes become several, one after the other; the first refusal ends it.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import Annotated, Any, Final

from fastapi import APIRouter, Query, Response
from plato.core.codes import Code
from plato.core.conversations import GROUP_PREFIX, group_id, is_conversation_id, is_title
from plato.wire.v1 import content_pb2 as content
from pydantic import AfterValidator, Field

from plato_msg.api.auth import AnyCaller, Caller, Person
from plato_msg.api.fields import ConversationId, Key, UserIdPath, user_id
from plato_msg.api.messages import PENDING, SentOut, told
from plato_msg.api.models import Answer, Given, RoleName, UserId
from plato_msg.api.problems import Problem
from plato_msg.conversations import Conversations, Info
from plato_msg.operations import ADMIN, Operations, Sent

PATH: Final = "/v1/groups"
ONE: Final = "/v1/groups/{conversation_id}"
OPERATION_USERS: Final = 500
MOST_USERS: Final = 10_000
PAGE: Final = 1_000
ROLES: Final = ("member", "administrator", "owner")

Users = Annotated[list[Annotated[UserId, AfterValidator(user_id)]], Field(min_length=1, max_length=MOST_USERS)]


def _title(given: str) -> str:
    if not is_title(given):
        raise ValueError(
            "must be at most 128 bytes of UTF-8 that are seen: no control characters, nothing that is invisible or turns the"
            " direction of text"
        )
    return given


Title = Annotated[str, AfterValidator(_title)]


class GroupIn(Given):
    """A new group. Its maker becomes the owner."""

    title: Title = Field("", max_length=128, description="At most 128 bytes of UTF-8.")
    members: list[Annotated[UserId, AfterValidator(user_id)]] = Field([], max_length=MOST_USERS)
    name: str | None = Field(None, description="Servers only: the group's id is g: and this name, 1 to 62 bytes.")


class GroupChange(Given):
    """What is changed of a group."""

    title: Title = Field(max_length=128, description="At most 128 bytes of UTF-8.")


class UsersIn(Given):
    """Some users."""

    users: Users


class RoleIn(Given):
    """A role; owner: it takes the place of the owner of before."""

    role: RoleName


class GroupOut(Answer):
    """A group as its member sees it. Of one that was left: as it was then."""

    conversation_id: str
    title: str
    owner: str = Field(description="A user_id; empty: none.")
    members: int
    role: RoleName = Field(description="The caller's.")
    joined_seq: int = Field(description="The caller reads what comes after it.")
    newest_seq: int
    left: bool


class MemberOut(Answer):
    """A member."""

    user: str
    role: RoleName


class MembersOut(Answer):
    """A page of members by id. more: ask on with after = the last one's."""

    members: list[MemberOut]
    more: bool


def router(operations: Operations, conversations: Conversations) -> APIRouter:
    """The routes."""
    routes = APIRouter(tags=["groups"])
    answered: dict[str, Any] = {"response_model": SentOut, "response_model_exclude_none": True, "responses": PENDING}

    async def change(
        who: Caller, conversation_id: str, kind: int, changes: Sequence[content.Operation], key: bytes
    ) -> Sent:
        """One operation after the other; the outcome of the last, or the first that is none."""
        sent = Sent(int(Code.OK))
        for n, one in enumerate(changes):
            part_key = uuid.uuid5(uuid.UUID(bytes=key), str(n)).bytes if n else key
            # A new group's first operation makes it, the others add to it.
            part = content.GROUP_ADD if n and kind == content.GROUP_CREATE else kind
            sent = await operations.operate(
                who.user or ADMIN, conversation_id, part, one, part_key, authority=who.authority
            )
            if sent.code != Code.OK:
                break
        return sent

    async def looked_at(who: Caller, conversation_id: str) -> Info:
        """The group; for everything else, and for strangers, the same Problem."""
        group = is_conversation_id(conversation_id) and conversation_id.startswith(GROUP_PREFIX)
        found = await conversations.info(None if who.authority else who.user, conversation_id) if group else None
        if found is None or found.kind != "group":
            raise Problem(Code.NOT_A_MEMBER)
        return found

    @routes.post(PATH, status_code=201, **answered)
    async def create(who: AnyCaller, key: Key, group: GroupIn, response: Response) -> Any:
        """Make a group. The answer has its conversation_id."""
        if group.name is not None:
            if not who.server:
                raise Problem(Code.NOT_ALLOWED, "only servers give groups their names")
            conversation_id = f"{GROUP_PREFIX}{group.name}"
            who = Caller("", True) if not who.user else who
        elif who.authority:
            raise Problem(Code.MALFORMED, "give the group a name, or an owner by the header Plato-User")
        else:
            conversation_id = group_id(who.user, key)
        if not is_conversation_id(conversation_id) or conversation_id == GROUP_PREFIX:
            raise Problem(Code.BAD_CONVERSATION)
        users = list(dict.fromkeys(group.members))
        changes = _parts(users) or [content.Operation()]
        changes[0].title = group.title
        if group.name is not None and who.user:
            # A named group of an owner: made with authority, for only that may name it; then it is the owner's.
            return told(
                response, conversation_id, key, await _given(operations, who.user, conversation_id, changes, key)
            )
        return told(
            response, conversation_id, key, await change(who, conversation_id, content.GROUP_CREATE, changes, key)
        )

    @routes.get(ONE, response_model=GroupOut)
    async def look(who: AnyCaller, conversation_id: ConversationId) -> Any:
        """A group."""
        return group_out(await looked_at(who, conversation_id))

    @routes.patch(ONE, **answered)
    async def rename(
        who: AnyCaller, key: Key, conversation_id: ConversationId, changed: GroupChange, response: Response
    ) -> Any:
        """Rename a group."""
        await looked_at(who, conversation_id)
        one = content.Operation(title=changed.title)
        return told(
            response, conversation_id, key, await change(who, conversation_id, content.GROUP_RENAME, [one], key)
        )

    @routes.get(f"{ONE}/members", response_model=MembersOut)
    async def members(
        who: AnyCaller,
        conversation_id: ConversationId,
        after: Annotated[str, Query(max_length=64, description="Only members whose ids sort after it.")] = "",
        limit: Annotated[int, Query(ge=1, le=PAGE)] = 100,
    ) -> Any:
        """A page of a group's members."""
        await looked_at(who, conversation_id)
        asker = None if who.authority else who.user
        page = await conversations.members(asker, conversation_id, after, limit + 1)
        if page is None:
            raise Problem(Code.NOT_A_MEMBER)
        shown = [{"user": member.user, "role": ROLES[member.role]} for member in page[:limit]]
        return {"members": shown, "more": len(page) > limit}

    @routes.post(f"{ONE}/members", **answered)
    async def add(who: AnyCaller, key: Key, conversation_id: ConversationId, added: UsersIn, response: Response) -> Any:
        """Add members; they read what comes from now on."""
        await looked_at(who, conversation_id)
        parts = _parts(list(dict.fromkeys(added.users)))
        return told(response, conversation_id, key, await change(who, conversation_id, content.GROUP_ADD, parts, key))

    @routes.delete(f"{ONE}/members/{{user}}", **answered)
    async def remove(
        who: AnyCaller, key: Key, conversation_id: ConversationId, user: UserIdPath, response: Response
    ) -> Any:
        """Remove a member."""
        await looked_at(who, conversation_id)
        one = content.Operation(users=[user])
        return told(
            response, conversation_id, key, await change(who, conversation_id, content.GROUP_REMOVE, [one], key)
        )

    @routes.put(f"{ONE}/roles/{{user}}", **answered)
    async def give_role(
        who: AnyCaller,
        key: Key,
        conversation_id: ConversationId,
        user: UserIdPath,
        given: RoleIn,
        response: Response,
    ) -> Any:
        """Give a member a role."""
        await looked_at(who, conversation_id)
        one = content.Operation(users=[user], role=content.Role.Value(given.role.upper()))
        return told(response, conversation_id, key, await change(who, conversation_id, content.GROUP_ROLE, [one], key))

    @routes.post(f"{ONE}/leave", **answered)
    async def leave(user: Person, key: Key, conversation_id: ConversationId, response: Response) -> Any:
        """Leave a group. What came until now can still be read."""
        await looked_at(Caller(user), conversation_id)
        one = content.Operation()
        sent = await change(Caller(user), conversation_id, content.GROUP_LEAVE, [one], key)
        return told(response, conversation_id, key, sent)

    return routes


async def _given(
    operations: Operations, owner: str, conversation_id: str, changes: Sequence[content.Operation], key: bytes
) -> Sent:
    """Makes a named group with authority, then makes somebody its owner."""
    if owner not in changes[0].users:
        changes[0].users.insert(0, owner)
    steps = [(content.GROUP_CREATE, changes[0]), *((content.GROUP_ADD, one) for one in changes[1:])]
    steps.insert(1, (content.GROUP_ROLE, content.Operation(users=[owner], role=content.OWNER)))
    sent = Sent(int(Code.OK))
    for n, (kind, one) in enumerate(steps):
        part_key = uuid.uuid5(uuid.UUID(bytes=key), str(n)).bytes if n else key
        sent = await operations.operate(ADMIN, conversation_id, kind, one, part_key, authority=True)
        if sent.code != Code.OK:
            break
    return sent


def _parts(users: Sequence[str]) -> list[content.Operation]:
    """Operations of at most OPERATION_USERS each; one is left free for an owner in the first."""
    size = OPERATION_USERS - 1
    return [content.Operation(users=users[at : at + size]) for at in range(0, len(users), size)]


def group_out(found: Info) -> dict[str, Any]:
    """A group in JSON."""
    return {
        "conversation_id": found.conversation_id,
        "title": found.title,
        "owner": found.owner,
        "members": found.members,
        "role": ROLES[found.role],
        "joined_seq": found.joined_seq,
        "newest_seq": found.newest_seq,
        "left": found.left,
    }
