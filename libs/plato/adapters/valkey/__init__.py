"""The store on Valkey or Redis: sessions, fences, routes, reservations, counters (design §7).

    plato.adapters.valkey.client         one shared pipeline: batches, retry once, scripts, errors
    plato.adapters.valkey.sessions       SessionStore       {s<slot>}  and the proofs {o<owner>}
    plato.adapters.valkey.routes         RouteStore         {u<hash of the user>}
    plato.adapters.valkey.reservations   ReservationStore   {w<worker_id>}
    plato.adapters.valkey.counters       SeqCounters        {q<0..63>}
    plato.adapters.valkey.mark           whose all this is  {cluster}

Each script touches keys of one hash tag only, so that a cluster may spread them. No key has a TTL.
"""

from __future__ import annotations

from plato.adapters.owner import Owner
from plato.adapters.valkey.client import Client
from plato.adapters.valkey.counters import ValkeySeqCounters
from plato.adapters.valkey.mark import ValkeyMark
from plato.adapters.valkey.reservations import ValkeyReservationStore
from plato.adapters.valkey.routes import ValkeyRouteStore
from plato.adapters.valkey.sessions import ValkeySessionStore

__all__ = ["ValkeyStore"]


class ValkeyStore:
    """One process's way to the store: four ports over one connection. Usable again at once after any outage."""

    def __init__(self, client: Client, prefix: str) -> None:
        self._client = client
        self.sessions = ValkeySessionStore(client, prefix)
        self.routes = ValkeyRouteStore(client, prefix)
        self.reservations = ValkeyReservationStore(client, prefix)
        self.counters = ValkeySeqCounters(client, prefix)
        self._mark = ValkeyMark(client, prefix)

    @classmethod
    async def connect(cls, url: str, prefix: str = "") -> ValkeyStore:
        """The store at `url` (redis://, rediss:// or unix://), its keys beginning with `prefix`.

        The connection is made by the first call; use `check` to begin with a word. Raises SettingsError for a bad URL.
        """
        return cls(Client(url), prefix)

    async def check(self, owner: Owner | None = None) -> None:
        """Says whether this store can be used, by this owner if there is one. Raises SettingsError (wrong password, too old,
        evicts keys; NotAlone: another one's; waiting does not help) or Unavailable (it does not answer now), each in one
        line."""
        await self._client.check()
        if owner is not None:
            await self._mark.check(owner)

    async def claim(self, owner: Owner) -> None:
        """Marks the keys with this prefix as the owner's. Raises NotAlone for another one's, and Unavailable."""
        await self._mark.claim(owner)

    async def ping(self) -> None:
        """Raises Unavailable unless the store answers."""
        await self._client.ping()

    async def close(self) -> None:
        """Ends the connection; calls on their way raise Unavailable."""
        await self._client.close()
