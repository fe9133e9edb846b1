"""Routes in the store: one hash per user, and beside it the floor of what was dropped from it (see the port).

<prefix>{u<hash>}:<user>    hash     device_id → "conn_id:gen"
<prefix>{u<hash>}f:<user>   string   the floor; there once something was dropped
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Final

from plato.adapters.valkey.client import Client, Script, command, evaluate
from plato.ports import Route

# Keys: the user's hash and floor. Arguments: device_id, expected ("" for none), new, its gen, most (0: any number). What
# already is `new` counts as written, so that the repeat of a write whose answer was lost is told the truth. Only the first
# statement of a device costs more than a look at its field; only one that finds the hash full looks at the other fields.
_COMPARE_AND_SET: Final = Script("""
local stored = redis.call('HGET', KEYS[1], ARGV[1]) or ''
if stored ~= ARGV[2] and stored ~= ARGV[3] then return 0 end
if stored == '' then
  local gen, most = tonumber(ARGV[4]), tonumber(ARGV[5])
  local floor = tonumber(redis.call('GET', KEYS[2]) or '0')
  if most > 0 and redis.call('HLEN', KEYS[1]) >= most then
    local all, dropped = redis.call('HGETALL', KEYS[1]), 0
    for i = 1, #all, 2 do
      local ended = string.match(all[i + 1], '^0:(%d+)$')
      if ended then
        dropped = dropped + redis.call('HDEL', KEYS[1], all[i])
        floor = math.max(floor, tonumber(ended))
      end
    end
    if dropped > 0 then redis.call('SET', KEYS[2], string.format('%.0f', floor)) end
    if #all / 2 - dropped >= most then return 0 end
  end
  if gen <= floor then return 0 end
end
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

    async def compare_and_set(
        self, user: str, device_id: int, expected: Route | None, new: Route, most: int = 0
    ) -> bool:
        """See the port."""
        keys = [self._key(user), self._key(user, "f")]
        arguments = (device_id, "" if expected is None else _pack(expected), _pack(new), new.gen, most)
        (written,) = await self._client.run([evaluate(_COMPARE_AND_SET, keys, arguments)])
        return bool(written)

    async def floor(self, user: str) -> int:
        """See the port."""
        (stored,) = await self._client.run([command("GET", self._key(user, "f"))])
        return int(stored or 0)

    def _key(self, user: str, kind: str = "") -> str:
        # A hash in the braces, since a user_id may hold braces of its own.
        tag = hashlib.blake2s(user.encode(), digest_size=6).hexdigest()
        return f"{self._prefix}{{u{tag}}}{kind}:{user}"


def _pack(route: Route) -> str:
    return f"{route.conn_id}:{route.gen}"


def _unpack(text: bytes) -> Route:
    conn_id, _, gen = text.partition(b":")
    return Route(int(conn_id), int(gen))
