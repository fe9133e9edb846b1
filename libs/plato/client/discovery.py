"""The list of gateways, asked from ipconfig: GET /ip/list with the user's token."""

from __future__ import annotations

import json
from typing import Any, Final

import aiohttp

from plato.api.names import POLL_PATH, WS_PATH

TIMEOUT_S: Final = 2.0
LIMIT_BYTES: Final = 65_536

_WAYS: Final = {"tcp": ("tcp", "port", ""), "ws": ("ws", "ws_port", WS_PATH), "poll": ("http", "poll_port", POLL_PATH)}


class ListRefused(Exception):
    """ipconfig knows the caller's token for none of its own."""


async def fetch(url: str, token: str, transport: str) -> tuple[list[str], dict[str, int]]:
    """The gateways' addresses for `transport` ("tcp", "ws", "poll"), best first, and {address: port of long polling}. url:
    ipconfig's base, or the list's own URL.

    Raises ListRefused (401, 403), OSError (no answer in time, or none that can be read).
    """
    target = url if url.endswith("/ip/list") else url.rstrip("/") + "/ip/list"
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    try:
        async with (
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=TIMEOUT_S)) as session,
            session.get(target, headers=headers) as response,
        ):
            if response.status in (401, 403):
                raise ListRefused(f"{target}: {response.status}")
            if response.status != 200:
                raise OSError(f"{target}: status {response.status}")
            body = await response.content.read(LIMIT_BYTES)
            if not response.content.at_eof():
                raise OSError(f"{target}: more than {LIMIT_BYTES} bytes")
            answer = json.loads(body)
            return addresses(answer, transport), polls(answer, transport)
    except (aiohttp.ClientError, TimeoutError, ValueError, RecursionError) as e:
        raise OSError(f"{target}: {e!r}") from e


def addresses(answer: Any, transport: str) -> list[str]:
    """Reads `{"message", "code", "data": [{"ip", "port", "ws_port", …}]}`; entries that cannot be used are left out.

    Raises ValueError if it is no such answer.
    """
    if not isinstance(answer, dict) or not isinstance(answer.get("data"), list):
        raise ValueError("no list of gateways")
    return [address for entry in answer["data"] if (address := _address(entry, transport))]


def polls(answer: Any, transport: str) -> dict[str, int]:
    """{address as `addresses` gives it: poll_port} of what `addresses` has read."""
    found = {_address(e, transport): str(e.get("poll_port")) for e in answer["data"] if isinstance(e, dict)}
    return {address: int(port) for address, port in found.items() if address and port.isdecimal()}


def _address(entry: Any, transport: str) -> str:
    """ "" where the entry cannot be used."""
    if not isinstance(entry, dict):
        return ""
    scheme, key, path = _WAYS[transport]
    ip, port = entry.get("ip"), entry.get(key)
    if not isinstance(ip, str) or not str(port).isdecimal():
        return ""
    return f"{scheme}://{f'[{ip}]' if ':' in ip else ip}:{port}{path}"
