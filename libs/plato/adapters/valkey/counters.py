"""Counters of seqs in the store: one hash per conversation, <prefix>{q<0..63>}:<conversation_id>: n, run. Never with a TTL.

`run` is the run_id of the server that the counter was begun under, compared inside the script: a counter that came through
a restart or a failover, and so may lag what it gave, is told by itself, whatever stands between us and the server.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import Final

from plato.adapters.valkey.client import Call, Client, Script, evaluate

TAGS: Final = 64
"""Counters are spread over so many hash tags; a batch pays one script call for each tag that it touches."""
KEYS_PER_CALL: Final = 100

# Keys: counters of one tag. Arguments: "begin" or "take", then count and above of each. Numbers stay below 2^53, so Lua's
# doubles hold them. A call that runs twice, because its answer was lost, leaves a hole and no harm.
_ADD: Final = Script("""
local run = string.match(redis.call('INFO', 'server'), 'run_id:(%x+)')
local firsts = {}
for i, key in ipairs(KEYS) do
  local count, above = tonumber(ARGV[2 * i]), tonumber(ARGV[2 * i + 1])
  local held = redis.call('HMGET', key, 'n', 'run')
  if ARGV[1] == 'begin' or held[2] == run then
    local last = math.max(tonumber(held[1] or 0), above)
    redis.call('HSET', key, 'n', string.format('%.0f', last + count), 'run', run)
    firsts[i] = string.format('%.0f', last + 1)
  else
    firsts[i] = false
  end
end
return firsts
""")


class ValkeySeqCounters:
    """SeqCounters on Valkey."""

    def __init__(self, client: Client, prefix: str) -> None:
        self._client = client
        self._prefix = prefix

    async def take(self, wanted: Mapping[str, tuple[int, int]]) -> dict[str, int]:
        """See the port."""
        return await self._add("take", wanted)

    async def begin(self, wanted: Mapping[str, tuple[int, int]]) -> dict[str, int]:
        """See the port."""
        return await self._add("begin", wanted)

    async def _add(self, how: str, wanted: Mapping[str, tuple[int, int]]) -> dict[str, int]:
        by_tag: dict[int, list[str]] = {}
        for conversation in wanted:
            by_tag.setdefault(zlib.crc32(conversation.encode()) % TAGS, []).append(conversation)
        calls: list[Call] = []
        chunks: list[list[str]] = []
        for tag, conversations in by_tag.items():
            for at in range(0, len(conversations), KEYS_PER_CALL):
                chunk = conversations[at : at + KEYS_PER_CALL]
                arguments: list[str | bytes | int] = [how, *(number for c in chunk for number in wanted[c])]
                keys = [f"{self._prefix}{{q{tag}}}:{c}" for c in chunk]
                calls.append(evaluate(_ADD, keys, arguments, weight=len(chunk)))
                chunks.append(chunk)
        firsts: dict[str, int] = {}
        for chunk, reply in zip(chunks, await self._client.run(calls), strict=True):
            firsts |= {c: int(first) for c, first in zip(chunk, reply, strict=True) if first is not None}
        return firsts
