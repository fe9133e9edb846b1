"""Routes in the store: one hash per user, <prefix>{u<hash>}:<user>, device_id → "conn_id:gen". Never deleted."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Final

from plato.adapters.valkey.client import Client, Script, command, evaluate
from plato.ports import Route

# Keys: the user's hash. Arguments: device_id, expected ("" for none), new. What already is `new` counts as written, so
# that the repeat of a write whose answer was lost is told the truth.
_COMPARE_AND_SET: Final = Script("""
local stored = redis.call('HGET', KEYS[1], ARGV[1]) or ''
if stored ~= ARGV[2] and stored ~= ARGV[3] then return 0 end
redis.call('HSET', KEYS[1], ARGV[1], ARGV[3])
return 1
""")


class ValkeyRouteStore:
    """RouteStore on Valkey."""

    def __init__(self, client: Client, prefix: str) -> None:
        self._client = client
        self._prefix = prefix

    async def read_many(self, users: Sequence[str]) -> list[dict[int, Route]]:
        """See the port."""
        replies = await self._client.run([command("HGETALL", self._key(user)) for user in users])
        return [
            {int(device_id): _unpack(route) for device_id, route in zip(reply[::2], reply[1::2], strict=True)}
            for reply in replies
        ]

    async def compare_and_set(self, user: str, device_id: int, expected: Route | None, new: Route) -> bool:
        """See the port."""
        arguments = (device_id, "" if expected is None else _pack(expected), _pack(new))
        (written,) = await self._client.run([evaluate(_COMPARE_AND_SET, [self._key(user)], arguments)])
        return bool(written)

    def _key(self, user: str) -> str:
        # A hash in the braces, since a user_id may hold braces of its own.
        tag = hashlib.blake2s(user.encode(), digest_size=6).hexdigest()
        return f"{self._prefix}{{u{tag}}}:{user}"


def _pack(route: Route) -> str:
    return f"{route.conn_id}:{route.gen}"


def _unpack(text: bytes) -> Route:
    conn_id, _, gen = text.partition(b":")
    return Route(int(conn_id), int(gen))
