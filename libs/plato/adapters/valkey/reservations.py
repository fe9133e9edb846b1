"""Reservations of worker_ids in the store: one hash each, <prefix>{w<worker_id>}: uid, boot, from, until, call."""

from __future__ import annotations

import secrets
from typing import Final

from plato.adapters.valkey.client import Client, Script, evaluate
from plato.ports import Window

# Keys: the reservation. Arguments: uid, boot, now, ahead, call. `call` is random per call of ours: a call that runs twice,
# because its answer was lost, gets the same window, and not an empty one behind it. Times stay below 2^53, so Lua's
# doubles hold them; boot is compared as text.
_RESERVE: Final = Script("""
local held = redis.call('HMGET', KEYS[1], 'uid', 'boot', 'until', 'call', 'from')
if held[4] == ARGV[5] then return {held[5], held[3]} end
local now, ahead = tonumber(ARGV[3]), tonumber(ARGV[4])
local begin, stop
if not held[1] then
  begin = now
  stop = now + ahead
else
  local upto = tonumber(held[3])
  if held[1] == ARGV[1] and held[2] == ARGV[2] then
    begin = upto
    stop = math.max(upto, now + ahead)
  elseif held[1] ~= ARGV[1] and now < upto then
    return false
  else
    begin = math.max(upto, now)
    stop = begin + ahead
  end
end
begin, stop = string.format('%.0f', begin), string.format('%.0f', stop)
redis.call('HSET', KEYS[1], 'uid', ARGV[1], 'boot', ARGV[2], 'until', stop, 'call', ARGV[5], 'from', begin)
return {begin, stop}
""")


class ValkeyReservationStore:
    """ReservationStore on Valkey."""

    def __init__(self, client: Client, prefix: str) -> None:
        self._client = client
        self._prefix = prefix

    async def reserve(self, worker_id: int, uid: str, boot: int, now_ms: int, ahead_ms: int) -> Window | None:
        """See the port."""
        arguments = (uid, boot, now_ms, ahead_ms, secrets.token_hex(8))
        (window,) = await self._client.run([evaluate(_RESERVE, [f"{self._prefix}{{w{worker_id}}}"], arguments)])
        return None if window is None else Window(int(window[0]), int(window[1]))
