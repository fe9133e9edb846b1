"""A whole state shard over its ports: what `__main__` runs with adapters and tests run with fakes."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

from plato.guards import Guard, GuardedRoutes, GuardedSessions
from plato.ports import (
    BusProducer,
    MsgClient,
    ReservationStore,
    RouteStore,
    SessionStore,
    ShardClient,
    TokenVerifier,
    TopologySource,
)
from plato.router import Router
from plato.runtime import logs
from plato.runtime.process import forever
from plato.runtime.report import ranges
from plato.runtime.settings import Settings
from plato.runtime.tls import InternalTls

from plato_state import metrics
from plato_state.downlink import Downlink
from plato_state.ownership import Ownership
from plato_state.recovery import Recovery
from plato_state.redirect import Redirects
from plato_state.server import StateService, make_server
from plato_state.sessions import Sessions
from plato_state.shard import Shard
from plato_state.signals import Signals
from plato_state.timers import Timers
from plato_state.uplink import Uplink

STOP_S = 0.2


@dataclass(frozen=True, slots=True)
class Ports:
    """Everything outside of a shard."""

    sessions: SessionStore
    routes: RouteStore
    reservations: ReservationStore
    bus: BusProducer
    tokens: TokenVerifier
    topology: TopologySource
    shards: ShardClient
    msg: MsgClient


class StateShard:
    """`bind`, then `main` until cancelled, then `stop`."""

    def __init__(self, settings: Settings, ports: Ports, tls: InternalTls | None = None) -> None:
        self._settings = settings
        name = settings.process.name
        self.shard = Shard(name, settings.state, settings.auth.guests, settings.gateway.max_frame_bytes)
        router = Router(ports.routes)
        self.downlink = Downlink(self.shard)
        self.guard = Guard("the store", metrics.BREAKER_REFUSED.labels("store").inc)
        self.sessions = Sessions(
            self.shard,
            self.downlink,
            GuardedSessions(ports.sessions, self.guard),
            Router(GuardedRoutes(ports.routes, self.guard)),
            ports.shards,
            ports.msg,
            ports.topology,
        )
        self.signals = Signals(self.shard, self.downlink, self.sessions, ports.msg)
        self.uplink = Uplink(self.shard, self.downlink, self.sessions, self.signals, ports.bus, ports.tokens)
        self.uplink.redirect = Redirects(self.shard, self.sessions, ports.topology).handle
        recovery = Recovery(self.shard, self.uplink, self.sessions, self.downlink, ports.sessions, router)
        self.ownership = Ownership(self.shard, settings.process.uid, recovery, ports.sessions, ports.topology)
        self.sessions.suspect = self.ownership.suspect
        self.timers = Timers(
            self.shard, self.uplink, self.sessions, self.downlink, self.ownership.tick, self.guard, self.signals
        )
        self._service = StateService(self.shard, self.uplink, self.sessions, self.downlink, ports.reservations)
        self._tls = tls
        self._log = logs.get("state")
        self.port = 0
        """The port of the gRPC service, once bound."""

    def bind(self, port: int | None = None) -> int:
        """Takes the gRPC port (the settings' one by default; 0: any), without serving yet. Raises OSError."""
        state = self._settings.state
        self.server, self.port = make_server(self._service, state.host, state.port if port is None else port, self._tls)
        return self.port

    def not_ready(self) -> str:
        """Why this shard does not serve now; "" when it does."""
        return self.ownership.not_ready()

    def report(self) -> dict[str, Any]:
        """What /v1/report says. epoch_seen is of the record that the slots stand for."""
        shard = self.shard
        ours = {n: slot for n, slot in shard.slots.items() if n in shard.assigned}
        outbid, deserted, fence = self.ownership.outbid()
        return {
            "epoch_seen": shard.topology_epoch,
            "slots": {
                "acquired": ranges(n for n, slot in ours.items() if slot.loaded),
                "loading": ranges(n for n in shard.assigned if n not in ours or not ours[n].loaded),
                "released": ranges(self.ownership.released),
                "outbid": ranges(outbid),
                "deserted": ranges(deserted),
                "fence": fence,
            },
            "connections": shard.live,
            "serving": not self.not_ready(),
        }

    async def main(self) -> None:
        """Acquires and loads its slots, then serves, until cancelled. Raises an ExceptionGroup if a part of it fails."""
        async with asyncio.TaskGroup() as group:
            group.create_task(forever("timers", self.timers.main()), name="timers")
            group.create_task(forever("sessions", self.sessions.main()), name="sessions")
            group.create_task(forever("uplink", self.uplink.main()), name="uplink")
            group.create_task(forever("signals", self.signals.main()), name="signals")
            group.create_task(forever("ownership", self.ownership.main()), name="ownership")
            group.create_task(forever("server", self._serve()), name="server")

    async def _serve(self) -> None:
        # Only now: a gateway that reaches this port may take its slots as served (R5).
        await self.ownership.started.wait()
        await self.server.start()
        # Not wait_for_termination: to cancel that cancels the server's own future, and `stop` could not wait for it.
        await asyncio.Event().wait()

    async def stop(self) -> None:
        """Closes the streams and gives the slots back."""
        await self.ownership.release()
        await self.server.stop(STOP_S)
