"""Conversations of a person, and the messages in them.

Messages are read by the same code as the frame PULL (plato_msg.history), with its codes, bounds and covered ranges.
"""

from __future__ import annotations

from typing import Annotated, Any, Final, Protocol

from fastapi import APIRouter, Path, Query
from plato.core.ids import MAX_ID
from plato.wire.v1 import client_pb2 as wire

from plato_msg.api import problems, render
from plato_msg.api.auth import Person
from plato_msg.api.models import Page
from plato_msg.history import MAX_PAGE, PAGE

ConversationId = Annotated[str, Path(description="1 to 64 bytes of UTF-8.", examples=["g:town"])]
MESSAGES: Final = "/v1/conversations/{conversation_id}/messages"


class Pulls(Protocol):
    """Who answers pulls (plato_msg.reads.Reads)."""

    async def pull(self, user: str, pull: wire.PullMsg) -> wire.PulledMsg:
        """Raises Unavailable; refusals are codes in the answer."""


def router(pulls: Pulls) -> APIRouter:
    """The routes."""
    routes = APIRouter(tags=["conversations"])

    @routes.get(MESSAGES, response_model=Page, response_model_exclude_none=True)
    async def messages(
        user: Person,
        conversation_id: ConversationId,
        from_seq: Annotated[int, Query(ge=0, le=MAX_ID, description="From here, this one too.")] = 0,
        to_seq: Annotated[int, Query(ge=0, le=MAX_ID, description="Up to here, this one too; 0: the newest.")] = 0,
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
