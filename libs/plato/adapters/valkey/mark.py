"""The mark of the PlatoCluster that a key prefix belongs to: one string, <prefix>{cluster}."""

from __future__ import annotations

from typing import Final

from plato.adapters.owner import Owner
from plato.adapters.valkey.client import Client, Script, command, evaluate

# Key: the mark. Arguments: who claims, and each whose it adopts. Answers whose it is now; run twice, it answers the same.
_CLAIM: Final = Script("""
local held = redis.call('GET', KEYS[1])
if held then
  local ours = false
  for _, name in ipairs(ARGV) do ours = ours or name == held end
  if not ours then return held end
end
redis.call('SET', KEYS[1], ARGV[1])
return ARGV[1]
""")


class ValkeyMark:
    """Whose the keys with this prefix are."""

    def __init__(self, client: Client, prefix: str) -> None:
        self._client = client
        self._prefix = prefix
        self._key = f"{prefix}{{cluster}}"

    async def claim(self, owner: Owner) -> None:
        """Marks them as the owner's. Raises NotAlone for another one's, and Unavailable."""
        (held,) = await self._client.run([evaluate(_CLAIM, [self._key], [owner.cluster, *owner.adopted])])
        self._compare(owner, held)

    async def check(self, owner: Owner) -> None:
        """Raises NotAlone where they are marked as another one's, and Unavailable. Writes nothing."""
        (held,) = await self._client.run([command("GET", self._key)])
        self._compare(owner, held)

    def _compare(self, owner: Owner, held: bytes | None) -> None:
        what = f"store {self._client.where}, key prefix {self._prefix!r},"
        owner.check(None if held is None else held.decode(errors="replace"), what, "store.keyPrefix")
