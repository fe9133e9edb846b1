"""The feed of events for application servers (plato_msg.feed): everything that is said, by a cursor."""

from __future__ import annotations

from typing import Annotated, Any, Final

from fastapi import APIRouter, Query
from plato.core.codes import Code
from plato.core.conversations import is_conversation_id

from plato_msg.api import render
from plato_msg.api.auth import WAITS, Server
from plato_msg.api.models import Answer, MessageOut
from plato_msg.api.problems import Problem
from plato_msg.feed import Busy, Feed, Foreign, Gone

PATH: Final = WAITS
NOW: Final = "now"
MAX_WAIT_S: Final = 60.0


class EventsOut(Answer):
    """Messages and operations, of each conversation by rising seq, as they are now. cursor: to ask on with, also where there
    was nothing."""

    events: list[MessageOut]
    cursor: str


def router(feed: Feed | None) -> APIRouter:
    """The route. feed: None where msg.events is off."""
    routes = APIRouter(tags=["events"])

    @routes.get(PATH, response_model=EventsOut, response_model_exclude_none=True)
    async def events(
        _: Server,
        after: Annotated[
            str, Query(max_length=16_384, description="A cursor; none: the oldest that is kept; now: what is to come.")
        ] = "",
        conversation: Annotated[str, Query(description="A conversation_id: of this one only.")] = "",
        limit: Annotated[int, Query(ge=1, le=500)] = 100,
        wait_s: Annotated[float, Query(ge=0, le=MAX_WAIT_S, description="Wait so long where there is nothing.")] = 0.0,
    ) -> Any:
        """What was said. For servers; needs the setting msg.events."""
        if feed is None:
            raise Problem(Code.UNAVAILABLE, "the setting msg.events is off", status=501)
        if conversation and not is_conversation_id(conversation):
            raise Problem(Code.BAD_CONVERSATION)
        try:
            cursor = await feed.now() if after == NOW else after
            found, cursor = await feed.wait(cursor, conversation, limit, wait_s)
        except Foreign as e:
            raise Problem(Code.MALFORMED, "query.after: is no cursor of this cluster") from e
        except Gone as e:
            words = "what came after this cursor is older than msg.events_retention_h, and was removed; begin anew"
            raise Problem(Code.BAD_RANGE, words, status=410) from e
        except Busy as e:
            raise Problem(Code.BUSY) from e
        return {"events": [render.stored(one.conversation_id, one.message) for one in found], "cursor": cursor}

    return routes
