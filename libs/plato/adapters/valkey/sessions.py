"""Slots of connection state in the store.

    <prefix>{s17}:fence        hash    epoch, start, token, owner, released, call
    <prefix>{s17}:live         hash    parts (how many sets), open (the one that is filled now)
    <prefix>{s17}:live:0 …     sets    conn_ids, at most 5,000 each
    <prefix>{s17}:c:<conn_id>  hash    user, device, secret, gen, guest, platform, network, part (its set)
    <prefix>{o<owner>}         hash    raised, and per token the count of its last proof

Everything of a slot carries its tag, so a script reads the fence and writes the sessions in one step: whoever lost
the slot writes nothing. A conn_id stays in the set that it entered. Loading reads the sets, then the hashes in batches;
it needs no fence.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, TypeVar

from plato.adapters.valkey.client import Call, Client, Script, command, evaluate
from plato.core.errors import Fenced
from plato.core.ids import slot_of
from plato.ports import Fence, FenceView, Session

_T = TypeVar("_T")

BATCH: Final = 200
"""Sessions per script: a script stops the whole store, some 5 µs per session."""

MAX_SET_MEMBERS: Final = 5000

# Keys: fence. Arguments: seen epoch, start, token, owner ("" each where nothing was seen); epoch, start, token, owner of
# the new one; call. Numbers stay below 2^53. The stored start + 1 makes the new fence the greater one whenever its epoch
# is not smaller. `call` is random per call: one that runs twice, because its answer was lost, finds itself.
_ACQUIRE: Final = Script("""
local held = redis.call('HMGET', KEYS[1], 'epoch', 'start', 'token', 'owner', 'call')
if held[5] == ARGV[9] then return held[2] end
local start = ARGV[6]
if held[1] then
  for i = 1, 4 do
    if held[i] ~= ARGV[i] then return false end
  end
  if tonumber(ARGV[5]) < tonumber(held[1]) then return false end
  if tonumber(start) <= tonumber(held[2]) then
    start = string.format('%.0f', tonumber(held[2]) + 1)
  end
elseif ARGV[1] ~= '' then
  return false
end
redis.call('HSET', KEYS[1], 'epoch', ARGV[5], 'start', start, 'token', ARGV[7], 'owner', ARGV[8],
  'released', '0', 'call', ARGV[9])
return start
""")

# Begins every script that writes under a fence: arguments 1 to 4 are it.
_FENCED: Final = """
local held = redis.call('HMGET', KEYS[1], 'epoch', 'start', 'token', 'owner')
for i = 1, 4 do
  if held[i] ~= ARGV[i] then return 0 end
end
"""

_RELEASE: Final = Script(f"""{_FENCED}
redis.call('HSET', KEYS[1], 'released', '1')
return 1
""")

# Keys: fence, live, then one per session. Arguments: the fence, how many members a set may have, then 8 per session.
_PUT: Final = Script(f"""{_FENCED}
local most = tonumber(ARGV[5])
local known = redis.call('HMGET', KEYS[2], 'parts', 'open')
local parts, open = tonumber(known[1] or '1'), tonumber(known[2] or '0')
local function room()
  for _ = 1, parts do
    if redis.call('SCARD', KEYS[2] .. ':' .. open) < most then return open end
    open = (open + 1) % parts
  end
  open = parts
  parts = parts + 1
  return open
end
for i = 3, #KEYS do
  local a = 6 + (i - 3) * 8
  local part = redis.call('HGET', KEYS[i], 'part') or room()
  redis.call('SADD', KEYS[2] .. ':' .. part, ARGV[a])
  redis.call('HSET', KEYS[i], 'user', ARGV[a + 1], 'device', ARGV[a + 2], 'secret', ARGV[a + 3], 'gen', ARGV[a + 4],
    'guest', ARGV[a + 5], 'platform', ARGV[a + 6], 'network', ARGV[a + 7], 'part', part)
end
redis.call('HSET', KEYS[2], 'parts', parts, 'open', open)
return 1
""")

# Keys: fence, live, then one per session. Arguments: the fence, then the conn_ids.
_REMOVE: Final = Script(f"""{_FENCED}
for i = 3, #KEYS do
  local part = redis.call('HGET', KEYS[i], 'part')
  if part then
    redis.call('SREM', KEYS[2] .. ':' .. part, ARGV[2 + i])
    redis.call('DEL', KEYS[i])
  end
end
return 1
""")

# Keys: live. Arguments: a part. Answers the number of parts and the members of that one.
_LIST: Final = Script("""
return {redis.call('HGET', KEYS[1], 'parts'), redis.call('SMEMBERS', KEYS[1] .. ':' .. ARGV[1])}
""")

_READ: Final = Script("""
local found = {}
for i = 1, #KEYS do
  found[i] = redis.call('HMGET', KEYS[i], 'user', 'device', 'secret', 'gen', 'guest', 'platform', 'network')
end
return found
""")

# Keys: an owner's proofs. Arguments: token. One count over all tokens, so that the least is the one proven longest ago;
# of those of former processes the last 16 are kept.
_PROVE: Final = Script("""
local token = 't:' .. ARGV[1]
local known = redis.call('HEXISTS', KEYS[1], token)
redis.call('HSET', KEYS[1], token, redis.call('HINCRBY', KEYS[1], 'raised', 1))
if known == 0 and redis.call('HLEN', KEYS[1]) > 17 then
  local all, least, oldest = redis.call('HGETALL', KEYS[1]), nil, nil
  for i = 1, #all, 2 do
    local count = tonumber(all[i + 1])
    if all[i] ~= 'raised' and (not least or count < least) then least, oldest = count, all[i] end
  end
  redis.call('HDEL', KEYS[1], oldest)
end
return known
""")


class ValkeySessionStore:
    """SessionStore on Valkey."""

    def __init__(self, client: Client, prefix: str) -> None:
        self._client = client
        self._prefix = prefix

    async def look(self, slots: Sequence[int]) -> list[FenceView]:
        """See the port. Two rounds: the fences, then the proofs of their owners."""
        fields = ("epoch", "start", "token", "owner", "released")
        rows = await self._client.run([command("HMGET", self._fence_key(slot), *fields) for slot in slots])
        fences = [_fence(row) for row in rows]
        provers = list({(fence.owner, fence.token) for fence in fences if fence is not None})
        counts = await self._client.run(
            [command("HGET", self._owner_key(owner), f"t:{token}") for owner, token in provers]
        )
        proofs = dict(zip(provers, counts, strict=True))
        views = []
        for fence, row in zip(fences, rows, strict=True):
            count = None if fence is None else proofs[fence.owner, fence.token]
            views.append(FenceView(fence, row[4] == b"1", None if count is None else int(count)))
        return views

    async def acquire(self, fences: Mapping[int, Fence], seen: Mapping[int, Fence | None]) -> dict[int, Fence]:
        """See the port."""
        calls = []
        for slot, fence in fences.items():
            before = seen[slot]
            arguments = (*(("", "", "", "") if before is None else _plain(before)), *_plain(fence))
            calls.append(evaluate(_ACQUIRE, [self._fence_key(slot)], (*arguments, secrets.token_hex(8))))
        starts = await self._client.run(calls)
        return {
            slot: replace(fence, start=int(start))
            for (slot, fence), start in zip(fences.items(), starts, strict=True)
            if start is not None
        }

    async def release(self, fences: Mapping[int, Fence]) -> None:
        """See the port."""
        await self._client.run(
            [evaluate(_RELEASE, [self._fence_key(slot)], _plain(fence)) for slot, fence in fences.items()]
        )

    async def prove(self, owner: str, token: str) -> bool:
        """See the port."""
        (known,) = await self._client.run([evaluate(_PROVE, [self._owner_key(owner)], [token])])
        return bool(known)

    async def load(self, slot: int) -> list[Session]:
        """See the port."""
        live = self._live_key(slot)
        ((parts, members),) = await self._client.run([evaluate(_LIST, [live], [0], weight=25)])
        more = [command("SMEMBERS", f"{live}:{part}", weight=25) for part in range(1, int(parts or 1))]
        for reply in await self._client.run(more):
            members.extend(reply)
        conn_ids = [int(member) for member in members]
        sessions: list[Session] = []
        for batch in _batches(conn_ids):
            keys = [self._session_key(slot, conn_id) for conn_id in batch]
            (rows,) = await self._client.run([evaluate(_READ, keys, weight=len(keys) // 8 + 1)])
            sessions.extend(_session(c, row) for c, row in zip(batch, rows, strict=True) if row[0] is not None)
        return sessions

    async def put(self, slot: int, fence: Fence, sessions: Sequence[Session]) -> None:
        """See the port. In scripts of 200 sessions; none at all still asks whether the fence stands."""
        calls = []
        for batch in _batches(sessions) or [()]:
            keys = [self._fence_key(slot), self._live_key(slot)]
            arguments: list[str | bytes | int] = [*_plain(fence), MAX_SET_MEMBERS]
            for s in batch:
                keys.append(self._session_key(slot, s.conn_id))
                arguments += (s.conn_id, s.user, s.device_id, s.secret, s.gen, int(s.guest), s.platform, s.network)
            calls.append(evaluate(_PUT, keys, arguments, weight=len(batch) // 8 + 1))
        await self._write(slot, fence, calls)

    async def remove(self, slot: int, fence: Fence, conn_ids: Sequence[int]) -> None:
        """See the port."""
        calls = []
        for batch in _batches(conn_ids) or [()]:
            keys = [self._fence_key(slot), self._live_key(slot)]
            keys += [self._session_key(slot, conn_id) for conn_id in batch]
            calls.append(evaluate(_REMOVE, keys, [*_plain(fence), *batch], weight=len(batch) // 8 + 1))
        await self._write(slot, fence, calls)

    async def get(self, conn_id: int) -> Session | None:
        """See the port."""
        ((row,),) = await self._client.run([evaluate(_READ, [self._session_key(slot_of(conn_id), conn_id)])])
        return _session(conn_id, row) if row[0] is not None else None

    async def _write(self, slot: int, fence: Fence, calls: list[Call]) -> None:
        if not all(await self._client.run(calls)):
            raise Fenced(f"slot {slot}: {fence} is not the fence that stands")

    def _fence_key(self, slot: int) -> str:
        return f"{self._prefix}{{s{slot}}}:fence"

    def _live_key(self, slot: int) -> str:
        return f"{self._prefix}{{s{slot}}}:live"

    def _session_key(self, slot: int, conn_id: int) -> str:
        return f"{self._prefix}{{s{slot}}}:c:{conn_id}"

    def _owner_key(self, owner: str) -> str:
        return f"{self._prefix}{{o{owner}}}"


def _batches(items: Sequence[_T]) -> list[Sequence[_T]]:
    return [items[i : i + BATCH] for i in range(0, len(items), BATCH)]


def _plain(fence: Fence) -> tuple[int, int, str, str]:
    return fence.epoch, fence.start, fence.token, fence.owner


def _fence(row: list[Any]) -> Fence | None:
    if row[0] is None:
        return None
    return Fence(int(row[0]), int(row[1]), row[2].decode(), row[3].decode())


def _session(conn_id: int, row: list[Any]) -> Session:
    user, device, secret, gen, guest, platform, network = row
    return Session(
        conn_id=conn_id,
        user=user.decode(),
        device_id=int(device),
        secret=secret,
        gen=int(gen),
        guest=guest == b"1",
        platform=platform.decode(),
        network=network.decode(),
    )
