"""Messages: send, look up by msg_id, edit, recall, hide.

    send → a body's bytes → one record on the bus (plato_msg.operations) → 201 with its place within 2 s, else 202

What is sent again with the same client_msg_id, or the same Idempotency-Key, is answered with the first outcome.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import Annotated, Any, Final, Literal, Protocol

from fastapi import APIRouter, Query, Response
from google.protobuf.message import DecodeError
from plato.core.codes import Code
from plato.core.conversations import dialogue_id, is_conversation_id, why_unreachable
from plato.wire.v1 import content_pb2 as content
from pydantic import Field

from plato_msg.api import problems, render
from plato_msg.api.auth import AnyCaller, Caller, Person
from plato_msg.api.fields import QUOTED_CHARACTERS, Body, BodyIn, Key, MsgIdPath
from plato_msg.api.models import Answer, MessageOut, UserId
from plato_msg.api.problems import Problem
from plato_msg.conversations import Conversations, Found
from plato_msg.operations import ADMIN, Operations, Sent

PATH: Final = "/v1/messages"
ONE: Final = "/v1/messages/{msg_id}"


class Hides(Protocol):
    """Who deletes messages for one user (plato_msg.userstate.UserStates)."""

    async def hide(self, user: str, conversation_id: str, seqs: Sequence[int]) -> Any:
        """Raises Unavailable."""


class Outgoing(BodyIn):
    """A message to a user (`to`) or into a conversation."""

    to: UserId | None = Field(None, description="A user_id: the dialogue with that user, which it may begin.")
    conversation_id: str | None = None
    client_msg_id: uuid.UUID | None = Field(None, description="Names the message: sent again, it is stored once.")


class SentOut(Answer):
    """The place of what was sent; while it is pending it has none yet."""

    conversation_id: str
    client_msg_id: str
    pending: bool = False
    msg_id: str | None = None
    seq: int | None = None
    server_at: int | None = Field(None, description="Unix ms.")


PENDING: Final[dict[int | str, dict[str, Any]]] = {
    202: {"model": SentOut, "description": "It is on its way and will be decided; the same again tells its outcome."}
}


def router(operations: Operations, conversations: Conversations, hides: Hides, body_max_bytes: int) -> APIRouter:
    """The routes. body_max_bytes: of one message."""
    routes = APIRouter(tags=["messages"])

    async def found(who: Caller, msg_id: int) -> Found:
        """The message; for what is not there, and for what the caller may not see, the same Problem."""
        message = await conversations.message(None if who.authority else who.user, msg_id) if msg_id else None
        if message is None:
            raise Problem(Code.MESSAGE_UNKNOWN)
        return message

    async def complete(user: str, conversation_id: str, body: Body) -> bytes:
        """The body's bytes with what it answers."""
        if body.rich is None or not body.reply_to:
            return body.raw
        quoted = await conversations.message(user, body.reply_to)
        if quoted is None or quoted.conversation_id != conversation_id or quoted.message.recalled:
            raise Problem(Code.MESSAGE_UNKNOWN)
        row = quoted.message
        reply = content.Quote(
            msg_id=row.msg_id, seq=row.seq, from_user=row.from_user, text=quote(row.msg_type, row.body)
        )
        return body.rich.content(reply).SerializeToString()

    async def first(user: str, conversation_id: str, client_msg_id: bytes, refused: Problem) -> Sent:
        """What was answered to the same request before. Raises the refusal where there was none."""
        sent = await operations.first(user, conversation_id, client_msg_id)
        if sent is None:
            raise refused
        return sent

    async def changed_before(who: Caller, msg_id: int, key: bytes, refused: Problem) -> tuple[str, Sent]:
        """`first` of a change of a message that the caller may not see any more, and its conversation. It tells of nothing
        but the caller's own."""
        message = await conversations.message(None, msg_id) if msg_id else None
        if message is None:
            raise refused
        return message.conversation_id, await first(who.user or ADMIN, message.conversation_id, key, refused)

    @routes.post(PATH, status_code=201, response_model=SentOut, response_model_exclude_none=True, responses=PENDING)
    async def send(user: Person, key: Key, message: Outgoing, response: Response) -> Any:
        """Send a message."""
        if (message.to is None) == (message.conversation_id is None):
            raise Problem(Code.MALFORMED, "give exactly one of to and conversation_id")
        if message.to is not None:
            if why := why_unreachable(message.to):
                raise Problem(Code.BAD_TO_USER, f"to {why}")
            conversation_id = dialogue_id(user, message.to)
        else:
            conversation_id = message.conversation_id or ""
            if not is_conversation_id(conversation_id):
                raise Problem(Code.BAD_CONVERSATION)
        body = message.read(body_max_bytes)
        client_msg_id = message.client_msg_id.bytes if message.client_msg_id is not None else key
        try:
            raw = await complete(user, conversation_id, body)
        except Problem as e:  # what it answers was recalled, maybe after it was sent
            return told(response, conversation_id, client_msg_id, await first(user, conversation_id, client_msg_id, e))
        sent = await operations.send(user, conversation_id, body.msg_type, raw, client_msg_id, to_user=message.to or "")
        return told(response, conversation_id, client_msg_id, sent)

    @routes.get(ONE, response_model=MessageOut, response_model_exclude_none=True)
    async def look_up(who: AnyCaller, msg_id: MsgIdPath) -> Any:
        """One message, wherever it is. A server that acts for nobody sees all."""
        return message_out(await found(who, msg_id))

    @routes.patch(ONE, response_model=SentOut, response_model_exclude_none=True, responses=PENDING)
    async def edit(user: Person, key: Key, msg_id: MsgIdPath, changed: BodyIn, response: Response) -> Any:
        """Edit an own message: its text, or all of it with rich. The answer tells the place of the edit itself."""
        body = changed.read(body_max_bytes)
        try:
            old = await found(Caller(user), msg_id)
        except Problem as e:
            conversation_id, sent = await changed_before(Caller(user), msg_id, key, e)
            return told(response, conversation_id, key, sent)
        if body.msg_type == content.TEXT and old.message.msg_type == content.RICH:
            # New words of a rich message; what it answers and carries stays.
            try:
                rich = content.Rich.FromString(old.message.body)
            except DecodeError:
                rich = content.Rich()
            rich.text = body.raw.decode()
            msg_type, raw = int(content.RICH), rich.SerializeToString()
        else:
            try:
                msg_type, raw = body.msg_type, await complete(user, old.conversation_id, body)
            except Problem as e:
                return told(response, old.conversation_id, key, await first(user, old.conversation_id, key, e))
        operation = content.Operation(msg_id=msg_id, msg_type=msg_type, body=raw)
        sent = await operations.operate(user, old.conversation_id, content.EDIT, operation, key)
        return told(response, old.conversation_id, key, sent)

    @routes.delete(ONE, response_model=SentOut, response_model_exclude_none=True, responses=PENDING)
    async def delete(
        who: AnyCaller,
        key: Key,
        msg_id: MsgIdPath,
        response: Response,
        scope: Annotated[
            Literal["all", "me"], Query(alias="for", description="all: recall it; me: hide it from me.")
        ] = "all",
    ) -> Any:
        """Recall a message, or hide it from oneself."""
        try:
            old = await found(who, msg_id)
        except Problem as e:
            if scope == "me":
                raise
            conversation_id, sent = await changed_before(who, msg_id, key, e)
            return told(response, conversation_id, key, sent)
        if scope == "me":
            if who.authority:
                raise Problem(Code.MALFORMED, "name the user that this request acts for in the header Plato-User")
            stands = await hides.hide(who.user, old.conversation_id, [old.message.seq])
            problems.check(stands.code)
            return {"conversation_id": old.conversation_id, "client_msg_id": str(uuid.UUID(bytes=key))}
        operation = content.Operation(msg_id=msg_id)
        sent = await operations.operate(
            who.user or ADMIN, old.conversation_id, content.RECALL, operation, key, authority=who.authority
        )
        return told(response, old.conversation_id, key, sent)

    return routes


def told(response: Response, conversation_id: str, client_msg_id: bytes, sent: Sent) -> dict[str, Any]:
    """The answer on a write. Raises Problem for a refusal."""
    name = {"conversation_id": conversation_id, "client_msg_id": str(uuid.UUID(bytes=client_msg_id))}
    if sent.code == Code.PENDING:
        response.status_code = 202
        return {**name, "pending": True}
    problems.check(sent.code, sent.words)
    return {**name, "msg_id": str(sent.msg_id), "seq": sent.seq, "server_at": sent.server_at_ms}


def quote(msg_type: int, body: bytes) -> str:
    """Enough of a message to be shown under an answer to it."""
    shown = render.body(msg_type, body)
    text = shown.get("text") or next((one["name"] for one in shown.get("attachments", ())), "")
    return str(text)[:QUOTED_CHARACTERS]


def message_out(found: Found) -> dict[str, Any]:
    """A message that was found."""
    return render.stored(found.conversation_id, found.message)
