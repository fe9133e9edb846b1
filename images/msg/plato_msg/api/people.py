"""People: the caller's own devices, who is online, and, for servers, ending somebody's sessions.

A device that is kicked gets KICK with its code and must log in again; a token that is still valid lets it do so, so
whoever locks somebody out stops issuing tokens first.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Final

from fastapi import APIRouter, Query
from plato.core.codes import Code
from plato.core.conversations import is_user_id
from pydantic import Field

from plato_msg.api.auth import Person, Server
from plato_msg.api.fields import NumberPath, UserIdPath
from plato_msg.api.models import Answer
from plato_msg.api.problems import Problem
from plato_msg.devices import Devices

DEVICES: Final = "/v1/me/devices"
PRESENCE_USERS: Final = 100


class DeviceOut(Answer):
    """A device that is logged in."""

    device_id: str
    platform: str = Field(description="As its client says.")
    network: str = Field(description="As its client says.")
    since: int = Field(description="When it connected, Unix ms.")


class DevicesOut(Answer):
    """Devices."""

    devices: list[DeviceOut]


class KickedOut(Answer):
    """Whose sessions ended."""

    device_ids: list[str]


class OnlineOut(Answer):
    """Who is online. Who shares no conversation with the caller is left out, as is who does not exist."""

    online: dict[str, bool]


def router(devices: Devices) -> APIRouter:
    """The routes."""
    routes = APIRouter(tags=["people"])

    @routes.get(DEVICES, response_model=DevicesOut)
    async def list_devices(user: Person) -> Any:
        """The caller's devices that are logged in."""
        rows = await devices.of(user)
        return {
            "devices": [
                {
                    "device_id": str(row.device_id),
                    "platform": row.platform,
                    "network": row.network,
                    "since": row.since_ms,
                }
                for row in rows
            ]
        }

    @routes.delete(f"{DEVICES}/{{device_id}}", response_model=KickedOut)
    async def kick_one(user: Person, device_id: NumberPath) -> Any:
        """Log one device out. Nothing to do where it is not logged in."""
        return _kicked(await devices.kick(user, device_id=device_id))

    @routes.delete(DEVICES, response_model=KickedOut)
    async def kick_all(
        user: Person, keep: Annotated[str | None, Query(description="A device_id that stays logged in.")] = None
    ) -> Any:
        """Log out everywhere, or everywhere else."""
        if keep is not None and not (keep.isascii() and keep.isdecimal() and len(keep) <= 20 and int(keep) < 2**64):
            raise Problem(Code.MALFORMED, "query.keep: must be a device_id")
        return _kicked(await devices.kick(user, keep=None if keep is None else int(keep)))

    @routes.get("/v1/presence", response_model=OnlineOut)
    async def presence(
        user: Person,
        users: Annotated[list[str], Query(max_length=PRESENCE_USERS, description="user_ids, the parameter repeated.")],
    ) -> Any:
        """Who is online."""
        if not all(map(is_user_id, users)):
            raise Problem(Code.MALFORMED, "query.users: must be user_ids")
        return {"online": await devices.online(user, list(dict.fromkeys(users)))}

    @routes.post("/v1/users/{user}/kick", response_model=KickedOut)
    async def kick(_: Server, user: UserIdPath) -> Any:
        """End all sessions of a user. For servers."""
        return _kicked(await devices.kick(user))

    return routes


def _kicked(device_ids: Sequence[int]) -> dict[str, Any]:
    return {"device_ids": [str(device_id) for device_id in device_ids]}
