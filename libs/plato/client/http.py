"""The HTTP API, for what frames have no words for: pins, mutes, deletions for oneself, and whatever else /v1 offers.

What is changed here comes back to every device of the user, this one included, as a change of `Client.changes()`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final
from urllib.parse import quote

import aiohttp

from plato.client.access import Access
from plato.client.api import Refused, Unreachable

TIMEOUT_S: Final = 15.0


class Http:
    """The API as this client's user. Each call is one request; nothing is repeated but a login with a fresh token."""

    def __init__(self, url: str, access: Access) -> None:
        """url: the API's base, such as http://127.0.0.1:8903."""
        self._url = url.rstrip("/")
        self._access = access

    async def pin(self, conversation_id: str, pinned: bool = True) -> None:
        """To the top of the list, or no more. Raises Refused, Unreachable."""
        await self.ask("PUT", f"/v1/conversations/{_name(conversation_id)}/pin", {"pinned": pinned})

    async def mute(self, conversation_id: str, until_ms: int | None = None) -> None:
        """Mutes a conversation until then (Unix ms; 0: not; None: until it is lifted). Raises Refused, Unreachable."""
        await self.ask("PUT", f"/v1/conversations/{_name(conversation_id)}/mute", {"until": until_ms})

    async def hide(self, msg_id: int) -> None:
        """Deletes a message for this user; others keep it. Raises Refused, Unreachable."""
        await self.ask("DELETE", f"/v1/messages/{msg_id}?for=me")

    async def clear(self, conversation_id: str) -> None:
        """Deletes a conversation from this user's list, and what is in it by now. Raises Refused, Unreachable."""
        await self.ask("DELETE", f"/v1/conversations/{_name(conversation_id)}")

    async def ask(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """One request of /v1 and its answer. Raises Refused (with the code), Unreachable (also: it is too busy)."""
        timeout = aiohttp.ClientTimeout(total=TIMEOUT_S)
        try:
            async with aiohttp.ClientSession(timeout=timeout) as session:
                for fresh in (False, True):
                    headers = {"Authorization": f"Bearer {await self._access.token(fresh) or ''}"}
                    async with session.request(method, self._url + path, json=body, headers=headers) as answer:
                        if answer.status == 401 and not fresh:
                            continue
                        return _read(answer.status, await answer.read())
        except (TimeoutError, aiohttp.ClientError, OSError) as e:
            raise Unreachable(f"{method} {self._url}{path}: {e or type(e).__name__}") from e
        raise AssertionError("the second answer was returned")


def _read(status: int, data: bytes) -> dict[str, Any]:
    try:
        found = json.loads(data or b"{}")
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise Unreachable(f"status {status}, and no answer of the API")
    if status < 400:
        return found
    if status >= 500 or status == 429:
        raise Unreachable(f"status {status}: {found.get('detail') or found.get('title')}")
    code = found.get("code")
    raise Refused(code if isinstance(code, int) else 0, str(found.get("detail", "")))


def _name(conversation_id: str) -> str:
    return quote(conversation_id, safe="")
