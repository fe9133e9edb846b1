"""Search in the caller's conversations, the newest hits first.

GET /v1/search?q=&conversation=&from=&after=&before=&cursor=&limit=
"""

from __future__ import annotations

from typing import Annotated, Any, Final

from fastapi import APIRouter, Query
from plato.core.codes import Code
from plato.core.conversations import is_conversation_id, is_user_id
from plato.core.errors import PeerError
from plato.core.ids import MAX_ID
from plato.wire.v1 import client_pb2 as wire
from pydantic import Field

from plato_msg.api import render
from plato_msg.api.auth import Person
from plato_msg.api.models import Answer, MessageOut
from plato_msg.api.problems import Problem
from plato_msg.search import Hit, Question, Search
from plato_msg.turns import TooMany

PAGE: Final = 30
MAX_PAGE: Final = 100
QUERY_MAX: Final = 256


class HitOut(MessageOut):
    """A message that was found."""

    snippet: str = Field(description="A part of what it says, with the first place that was found.")
    matches: list[tuple[int, int]] = Field(
        description="Where in the snippet the words stand: from (included) and to (not), in Unicode characters."
    )


class HitsOut(Answer):
    """A page. cursor: of the next one, if there may be one."""

    messages: list[HitOut]
    cursor: str | None = None
    left_out: str | None = Field(None, description="Where not everything was searched: what was, in words.")


def router(search: Search | None) -> APIRouter:
    """The route. None: no index is kept here."""
    routes = APIRouter(tags=["search"])

    @routes.get("/v1/search", response_model=HitsOut, response_model_exclude_none=True)
    async def find(
        user: Person,
        q: Annotated[
            str,
            Query(
                min_length=1,
                max_length=QUERY_MAX,
                description="Words, all of which must be there; each is found where a word begins with it. Chinese,"
                " Japanese, Korean and Thai are found anywhere.",
            ),
        ],
        conversation: Annotated[str, Query(description="In this conversation only.")] = "",
        sender: Annotated[str, Query(alias="from", description="By this user only.")] = "",
        after: Annotated[int, Query(ge=0, le=MAX_ID, description="Later than this, Unix ms.")] = 0,
        before: Annotated[int, Query(ge=0, le=MAX_ID, description="Earlier than this, Unix ms.")] = 0,
        cursor: Annotated[str, Query(max_length=20, description="Of the page before.")] = "",
        limit: Annotated[int, Query(ge=1, le=MAX_PAGE)] = PAGE,
    ) -> Any:
        """Messages that hold these words, the newest first. One that was just sent may take a second to be found."""
        if search is None:
            raise Problem(Code.NOT_ALLOWED, "search is off here: msg.search", status=501)
        if conversation and not is_conversation_id(conversation):
            raise Problem(Code.BAD_CONVERSATION)
        if sender and not is_user_id(sender):
            raise Problem(Code.MALFORMED, "query.from: must be a user_id")
        if cursor and not (cursor.isascii() and cursor.isdecimal() and 0 < int(cursor) <= MAX_ID):
            raise Problem(Code.MALFORMED, "query.cursor: is none of this list's")
        question = Question(q, conversation, sender, after, before)
        try:
            page = await search.page(user, question, int(cursor) if cursor else MAX_ID, limit)
        except TooMany as e:
            raise Problem(e.code, e.words, retry_ms=e.retry_ms) from e
        except PeerError as e:
            raise Problem(e.code, str(e).partition(": ")[2]) from e
        said: dict[str, Any] = {"messages": [_shown(hit) for hit in page.hits]}
        if page.below:
            said["cursor"] = str(page.below)
        if page.left_out:
            said["left_out"] = page.left_out
        return said

    return routes


def _shown(hit: Hit) -> dict[str, Any]:
    row = hit.message
    shown = render.message(
        wire.PushMsg(
            MsgID=row.msg_id,
            Content=row.body,
            conversation_id=row.conversation_id,
            seq=row.seq,
            prev_seq=row.prev_seq,
            from_user=row.from_user,
            msg_type=row.msg_type,
            client_msg_id=row.client_msg_id,
            server_at_ms=row.server_at_ms,
            changed_seq=row.changed_seq,
        )
    )
    return {**shown, "snippet": hit.snippet, "matches": hit.matches}
