"""All routers of the API, and what each of them stands on. The OpenAPI document is written from the same list."""

from __future__ import annotations

from dataclasses import dataclass

from fastapi import APIRouter

from plato_msg.api import attachments, conversations, events, friends, groups, messages, people, search
from plato_msg.attachments import Attachments
from plato_msg.conversations import Conversations
from plato_msg.devices import Devices
from plato_msg.feed import Feed
from plato_msg.friends import Friends
from plato_msg.operations import Operations
from plato_msg.search import Search
from plato_msg.userstate import UserStates


@dataclass(frozen=True, slots=True)
class Parts:
    """Who answers. search, feed: None where the settings switch them off."""

    pulls: conversations.Pulls
    states: UserStates
    operations: Operations
    conversations: Conversations
    devices: Devices
    friends: Friends
    attachments: Attachments
    search: Search | None
    feed: Feed | None
    body_max_bytes: int


def routers(parts: Parts) -> list[APIRouter]:
    """One per noun."""
    return [
        messages.router(parts.operations, parts.conversations, parts.states, parts.body_max_bytes),
        conversations.router(parts.pulls, parts.states),
        groups.router(parts.operations, parts.conversations),
        people.router(parts.devices),
        friends.router(parts.friends),
        attachments.router(parts.attachments),
        search.router(parts.search),
        events.router(parts.feed),
    ]
