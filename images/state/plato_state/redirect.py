"""The drain of a gateway, and clients that are asked to go to an emptier one, at the shards: the link names connections,
each session is told where else to go.

    LinkBatch.redirect ─▸ conn_ids ─▸ the connection machine ─▸ REDIRECT (it stays) · close (guest, no session)
    LinkBatch.shed     ─▸ conn_ids ─▸ the connection machine ─▸ REDIRECT to the gateways named · nothing

At most once: what is lost here, or comes while its slot loads, the link names again. Nothing is kept.
"""

from __future__ import annotations

import random

from plato.core.codes import Code
from plato.core.errors import Unavailable
from plato.core.ids import slot_of, worker_id_of
from plato.ports import TopologySource
from plato.runtime import logs
from plato.topology.record import SERVING
from plato.wire.v1.client_pb2 import LOGIN
from plato.wire.v1.state_pb2 import LinkBatch

from plato_state import metrics
from plato_state.core import answers
from plato_state.core.redirects import candidates
from plato_state.sessions import Sessions
from plato_state.shard import Shard
from plato_state.stream import SEND_AND_CLOSE, LinkStream, u64_column


class Redirects:
    """Tells clients of draining gateways where to go."""

    def __init__(self, shard: Shard, sessions: Sessions, topology: TopologySource) -> None:
        self._shard = shard
        self._sessions = sessions
        self._topology = topology
        self._log = logs.get("redirect")

    def handle(self, link: LinkStream, batch: LinkBatch) -> None:
        """Whatever of it a batch carries."""
        if batch.redirect:
            self.order(link, batch.redirect)
        if batch.HasField("shed"):
            self.shed(link, batch.shed.conn_ids, list(batch.shed.to))

    def shed(self, link: LinkStream, raw: bytes, to: list[str]) -> None:
        """The conn_ids (u64 LE) that a link would have at the gateways `to`; only its own gateway's count."""
        try:
            conn_ids = u64_column(raw)
            gateways = self._topology.current().gateways
        except (ValueError, Unavailable) as e:
            self._log.warning("clients could not be asked to go", gateway=link.gateway, error=str(e))
            return
        others = [(n, gateways[n]) for n in to if n in gateways and n != link.gateway and gateways[n].state == SERVING]
        if not others:
            return
        frame = answers.redirect(others)
        for conn_id in conn_ids:
            slot = self._shard.slots.get(slot_of(conn_id))
            if slot is None or not slot.loaded or worker_id_of(conn_id) != link.worker_id:
                continue
            connection = self._shard.connections.get(conn_id)
            if connection is not None and (actions := connection.invited(frame)):
                self._sessions.run(connection, actions)
                metrics.REDIRECTS.labels("invited").inc()

    def order(self, link: LinkStream, raw: bytes) -> None:
        """The conn_ids (u64 LE) that a link names; only its own gateway's count."""
        try:
            conn_ids = u64_column(raw)
            topology = self._topology.current()
        except (ValueError, Unavailable) as e:
            self._log.warning("a redirect could not be handled", gateway=link.gateway, error=str(e))
            return
        for conn_id in conn_ids:
            slot = self._shard.slots.get(slot_of(conn_id))
            if slot is None or not slot.loaded or worker_id_of(conn_id) != link.worker_id:
                continue
            connection = self._shard.connections.get(conn_id)
            if connection is None:  # it never logged in here
                link.add(conn_id, answers.error(Code.GATEWAY_CLOSING, LOGIN), SEND_AND_CLOSE)
                metrics.REDIRECTS.labels("closed").inc()
                continue
            others = candidates(topology, link.gateway, random.random)
            actions = connection.redirected(answers.redirect(others) if others else b"")
            self._sessions.run(connection, actions)
            if actions:
                metrics.REDIRECTS.labels("sent" if connection.socket else "closed").inc()
