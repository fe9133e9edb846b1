"""Friends, and who may write to the caller.

    GET    /v1/friends?status=&cursor=&limit=       whom the caller asked, who waits, friends, blocked users
    GET    /v1/friends/{user}                       one of them; status none for everybody else
    POST   /v1/friends/{user}/request {"words"}     also /accept, /refuse, /block, /unblock; all may be repeated
    DELETE /v1/friends/{user}                       no friend any more; takes a request back, too
    GET, PUT /v1/me/settings {"friends_only": true} null: as the platform says

Answers show the caller's own side only, so nothing in them tells that the other one blocks him.
"""

from __future__ import annotations

import base64
import binascii
from typing import Annotated, Any, Final, Literal

from fastapi import APIRouter, Query
from plato.core.codes import Code
from plato.core.conversations import is_user_id
from pydantic import Field

from plato_msg.api.auth import Person
from plato_msg.api.fields import UserIdPath
from plato_msg.api.models import Answer, Given
from plato_msg.api.problems import Problem
from plato_msg.core.friendship import Act
from plato_msg.friends import WORDS_MAX, Friends, MySettings
from plato_msg.friends_pg import Friend, Impossible

PAGE: Final = 100
MAX_PAGE: Final = 500
StatusName = Literal["none", "asked", "waiting", "friends", "blocked"]
_NAMES: Final[tuple[StatusName, ...]] = ("none", "asked", "waiting", "friends", "blocked")


class FriendOut(Answer):
    """Another user, as the caller sees him."""

    user: str
    status: StatusName = Field(description="asked: the caller did; waiting: the other one asks the caller.")
    words: str = Field(description="Of the request, while there is one.")


class FriendsOut(Answer):
    """A page, by user_id. cursor: of the next page, if there is one."""

    friends: list[FriendOut]
    cursor: str | None = None


class RequestIn(Given):
    """What the other one reads with the request."""

    words: str = Field("", max_length=WORDS_MAX)


class MySettingsIn(Given):
    """friends_only null: as the platform says."""

    friends_only: bool | None


class MySettingsOut(Answer):
    """What holds for the caller."""

    friends_only: bool = Field(description="Only friends may write to the caller in a dialogue.")
    chosen: bool | None = Field(description="What the caller chose; null: nothing, so the platform's setting holds.")


def router(friends: Friends) -> APIRouter:
    """The routes."""
    routes = APIRouter(tags=["friends"])

    async def act(name: Act, user: str, other: str, words: str = "") -> dict[str, Any]:
        try:
            return _shown(await friends.act(name, user, other, words))
        except Impossible as e:
            raise Problem(e.code, e.why, status=409) from e

    @routes.get("/v1/friends", response_model=FriendsOut, response_model_exclude_none=True)
    async def list_friends(
        user: Person,
        status: Annotated[StatusName | None, Query(description="These only.")] = None,
        cursor: Annotated[str, Query(max_length=128, description="Of the page before.")] = "",
        limit: Annotated[int, Query(ge=1, le=MAX_PAGE)] = PAGE,
    ) -> Any:
        """Whom the caller asked, who waits for an answer, friends, and blocked users."""
        wanted = None if status is None else _NAMES.index(status)
        found = await friends.page(user, wanted, _after(cursor), limit + 1)
        said: dict[str, Any] = {"friends": [_shown(one) for one in found[:limit]]}
        if len(found) > limit:
            said["cursor"] = base64.urlsafe_b64encode(found[limit - 1].user.encode()).decode().rstrip("=")
        return said

    @routes.get("/v1/friends/{other}", response_model=FriendOut)
    async def show(user: Person, other: UserIdPath) -> Any:
        """One other user. Who is nothing to the caller, and who does not exist, has status none."""
        return _shown(await friends.friend(user, other) or Friend(other, 0, ""))

    @routes.post("/v1/friends/{other}/request", response_model=FriendOut)
    async def request(user: Person, other: UserIdPath, body: RequestIn | None = None) -> Any:
        """Ask somebody. Who is asked already becomes a friend at once."""
        return await act("request", user, other, body.words if body is not None else "")

    @routes.post("/v1/friends/{other}/accept", response_model=FriendOut)
    async def accept(user: Person, other: UserIdPath) -> Any:
        """Take a request."""
        return await act("accept", user, other)

    @routes.post("/v1/friends/{other}/refuse", response_model=FriendOut)
    async def refuse(user: Person, other: UserIdPath) -> Any:
        """Turn a request down; the other one may ask again."""
        return await act("refuse", user, other)

    @routes.delete("/v1/friends/{other}", response_model=FriendOut)
    async def remove(user: Person, other: UserIdPath) -> Any:
        """End a friendship, or take a request back, on both sides."""
        return await act("remove", user, other)

    @routes.post("/v1/friends/{other}/block", response_model=FriendOut)
    async def block(user: Person, other: UserIdPath) -> Any:
        """Take no message of a dialogue from this user any more. He is not told."""
        return await act("block", user, other)

    @routes.post("/v1/friends/{other}/unblock", response_model=FriendOut)
    async def unblock(user: Person, other: UserIdPath) -> Any:
        """As before the block, and what the other one did meanwhile shows."""
        return await act("unblock", user, other)

    @routes.get("/v1/me/settings", response_model=MySettingsOut)
    async def my_settings(user: Person) -> Any:
        """The caller's settings."""
        return _settings(await friends.settings(user))

    @routes.put("/v1/me/settings", response_model=MySettingsOut)
    async def change_my_settings(user: Person, body: MySettingsIn) -> Any:
        """Change them. Messages that are judged from now on go by it."""
        return _settings(await friends.choose(user, body.friends_only))

    return routes


def _shown(friend: Friend) -> dict[str, Any]:
    return {"user": friend.user, "status": _NAMES[friend.status], "words": friend.words}


def _settings(found: MySettings) -> dict[str, Any]:
    return {"friends_only": found.friends_only, "chosen": found.chosen}


def _after(cursor: str) -> str:
    if not cursor:
        return ""
    try:
        after = base64.urlsafe_b64decode(cursor + "=" * (-len(cursor) % 4)).decode()
    except (binascii.Error, ValueError):
        after = ""
    if not is_user_id(after):
        raise Problem(Code.MALFORMED, "query.cursor: is none of this list's")
    return after
