"""What a client must ask for before it can connect: its user's token, and the list of gateways."""

from __future__ import annotations

import asyncio
import base64
import binascii
import inspect
import json
import logging
from collections.abc import Awaitable, Callable
from typing import Final

from plato.client import discovery
from plato.core.codes import Code
from plato.core.conversations import is_user_id

TokenProvider = Callable[[], Awaitable[str] | str]
"""Gives the user's token, whenever one is needed: at the first login, and when the last one was refused or expired. A
coroutine function, or a plain function; the plain one runs on the event loop, so it must not block. Whatever it raises is
logged, and it is asked again after a back-off."""
TOKEN_S: Final = 30.0
_log = logging.getLogger("plato.client")


class Access:
    """The token's provider and ipconfig. A failure of either is an answer (None), never an exception: it is asked again."""

    def __init__(self, token: TokenProvider | str, ipconfig_url: str | None, transport: str) -> None:
        self._provider = token
        self._ipconfig_url = ipconfig_url
        self._transport = transport
        self._last: str | None = None  # the last one that the provider gave
        self._asking: asyncio.Task[str] | None = None  # one question at a time, whoever waits for it
        self.polls: dict[str, int] = {}
        """Ports of long polling that the last list told, by a gateway's address."""
        self.list_code: int | None = None
        """With which code the last question for a list was refused."""
        self.list_detail = ""
        """Why it brought none, in words."""
        self.token_detail = ""
        """Why the provider gave none the last time."""

    async def token(self, fresh: bool) -> str | None:
        """The user's token. fresh: the last one was refused, ask for another."""
        provider = self._provider
        if isinstance(provider, str):
            return provider
        if self._last is not None and not fresh:
            return self._last
        if self._asking is None:
            self._asking = asyncio.create_task(_ask(provider))
        asking = self._asking
        try:
            self._last = await asyncio.shield(asking)
            self.token_detail = ""
        except Exception as e:  # whatever the application's provider raises
            _log.warning("no token: %r", e)
            self.token_detail = f"no token: the provider raised {type(e).__name__}: {e}"
            return None
        finally:
            if asking.done() and self._asking is asking:
                self._asking = None
        return self._last

    async def gateways(self) -> list[str] | None:
        """The gateways' addresses, best first; None if ipconfig does not answer. A refused token is renewed once."""
        if self._ipconfig_url is None:
            return None
        self.list_code, self.list_detail = None, ""
        for fresh in (False, True):
            token = await self.token(fresh)
            try:
                found, self.polls = await discovery.fetch(self._ipconfig_url, token or "", self._transport)
                self.list_code, self.list_detail = None, ""
                return found
            except discovery.ListRefused as e:
                _log.debug("no list of gateways: %s", e)
                self.list_code = int(Code.TOKEN_INVALID)
                self.list_detail = f"ipconfig at {self._ipconfig_url} refuses the token: wrong or expired"
            except OSError as e:
                _log.debug("no list of gateways: %s", e)
                self.list_code = None
                self.list_detail = f"ipconfig at {self._ipconfig_url} gives no list of gateways; is that its address?"
                return None
        return None

    async def close(self) -> None:
        """Nobody waits for the provider any more."""
        if self._asking is not None:
            self._asking.cancel()
            await asyncio.gather(self._asking, return_exceptions=True)


async def _ask(provider: TokenProvider) -> str:
    given = provider()
    token = given
    if inspect.isawaitable(given):
        async with asyncio.timeout(TOKEN_S):
            token = await given
    if not isinstance(token, str):
        raise TypeError(f"the token provider gave {type(token).__name__}, not str")
    return token


def subject(token: str) -> str | None:
    """The `sub` of a JWT, unverified: the platform verifies it, we only need to know who we are before the first login."""
    parts = token.split(".")
    if len(parts) != 3:
        return None
    try:
        claims = json.loads(base64.urlsafe_b64decode(parts[1] + "=" * (-len(parts[1]) % 4)))
    except (binascii.Error, ValueError, RecursionError):
        return None
    found = claims.get("sub") if isinstance(claims, dict) else None
    return found if isinstance(found, str) and is_user_id(found) else None
