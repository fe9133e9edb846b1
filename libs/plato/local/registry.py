"""The topology record of the embedded cluster and its only writer.

A process gets a new uid at each start, written before it is spawned: the supervisor knows that the one before is gone, so
a restarted shard takes its slots at once. Slot ranges keep the epoch of their assignment over restarts; only another
number of shards assigns anew. `move` gives slots to another shard in one write, `drain` orders a gateway to move its clients
away, as the operator does.
"""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Final

from plato.local.folder import LocalError
from plato.local.ports import PortUse, gateway_name, msg_name, shard_name
from plato.runtime.settings import Settings
from plato.topology.record import (
    DRAINING,
    SERVING,
    SLOTS,
    Drain,
    Gateway,
    Move,
    Msg,
    Shard,
    Topology,
    TopologyError,
    dumps,
    even_ranges,
    loads,
    next_epoch,
)
from plato.topology.slots import reassigned, spans

FIRST_MSG_WORKER_ID: Final = 600


class Registry:
    """Keeps the record in memory and on disk. Each change is on disk when its method returns."""

    def __init__(self, path: Path, cluster_uid: str, settings: Settings, ports: dict[str, PortUse]) -> None:
        """Raises LocalError when the stored record cannot be read or is another cluster's."""
        self._path = path
        self._settings = settings
        self._ports = ports
        shards = [shard_name(i) for i in range(settings.local.shards)]
        old = self._read(cluster_uid)
        epoch = next_epoch(old.epoch if old is not None else 0, int(time.time()))
        owners = {r.shard for r in old.slots} if old is not None else set()
        # A shard that gave all its slots away is known by its record only.
        keep = owners == set(shards) or (old is not None and owners < set(shards) == set(old.shards))
        slots = old.slots if old is not None and keep else even_ranges(shards, epoch)
        self._topology = Topology(cluster_uid, epoch, slots)

    @property
    def topology(self) -> Topology:
        """The record as it stands."""
        return self._topology

    def renew(self, names: Iterable[str]) -> dict[str, str]:
        """New uids for processes that are about to start: one write for all. Returns {name: uid}; names that the topology
        does not know (ipconfig) get a uid and no record."""
        topology = self._topology
        shards, gateways, msgs = dict(topology.shards), dict(topology.gateways), dict(topology.msgs)
        uids = {name: uuid.uuid4().hex for name in names}
        local = self._settings.local
        for i in range(local.shards):
            if (name := shard_name(i)) in uids:
                shards[name] = Shard(self._addr(f"{name}.grpc"), uids[name])
        for i in range(local.gateways):
            if (name := gateway_name(i)) in uids:
                gateways[name] = self._gateway(i, uids[name])
        for i in range(local.msgs):
            if (name := msg_name(i)) in uids:
                msgs[name] = Msg(uids[name], FIRST_MSG_WORKER_ID + i, self._addr(f"{name}.grpc"))
        if uids.keys() & (shards.keys() | gateways.keys() | msgs.keys()):
            epoch = next_epoch(topology.epoch, int(time.time()))
            self._topology = replace(topology, epoch=epoch, shards=shards, gateways=gateways, msgs=msgs)
            self._write()
        return uids

    def move(self, slots: Iterable[int], target: str) -> list[int]:
        """Gives slots of one shard to another; returns those that were not there already. Raises LocalError."""
        topology = self._topology
        if target not in topology.shards:
            raise LocalError(f"{target} is no shard; known: {', '.join(sorted(topology.shards))}")
        moved = [slot for slot in sorted(set(slots)) if topology.owner(slot).shard != target]
        sources = sorted({topology.owner(slot).shard for slot in moved})
        if len(sources) > 1:
            raise LocalError(f"one move takes slots of one shard; these belong to {' and '.join(sources)}")
        if moved:
            epoch = next_epoch(topology.epoch, int(time.time()))
            self._topology = replace(
                topology,
                epoch=epoch,
                slots=reassigned(topology.owners, dict.fromkeys(moved, target), epoch),
                move=Move(epoch, spans(moved), sources[0], target, epoch),
            )
            self._write()
        return moved

    def drain(self, name: str, pace_per_s: int, settle_s: int, deadline_s: int) -> None:
        """Orders a gateway to move its clients to the others; an order that stands gets new figures. Raises LocalError."""
        gateway = self._known_gateway(name)
        epoch = next_epoch(self._topology.epoch, int(time.time()))
        drain_id = gateway.drain.id if gateway.drain is not None else epoch
        within_ms = deadline_s * 1000
        order = Drain(drain_id, "Manual", pace_per_s, settle_s, int(time.time() * 1000) + within_ms, within_ms)
        self._put(name, replace(gateway, state=DRAINING, drain=order), epoch)

    def serve(self, name: str) -> None:
        """Takes a gateway's drain back. Raises LocalError."""
        gateway = self._known_gateway(name)
        epoch = next_epoch(self._topology.epoch, int(time.time()))
        self._put(name, replace(gateway, state=SERVING, drain=None), epoch)

    def _known_gateway(self, name: str) -> Gateway:
        gateways = self._topology.gateways
        if name not in gateways:
            raise LocalError(f"{name} is no gateway; known: {', '.join(sorted(gateways))}")
        return gateways[name]

    def _put(self, name: str, gateway: Gateway, epoch: int) -> None:
        gateways = {**self._topology.gateways, name: gateway}
        self._topology = replace(self._topology, epoch=epoch, gateways=gateways)
        self._write()

    def _gateway(self, i: int, uid: str) -> Gateway:
        name, settings = gateway_name(i), self._settings
        return Gateway(
            uid=uid,
            worker_id=i,
            workers=settings.gateway.workers,
            homes=homes(i, settings.local.gateways, settings.local.shards),
            ip=_reachable(settings.gateway.host),
            tcp=self._ports[f"{name}.tcp"].port,
            ws=self._ports[f"{name}.ws"].port,
            admin=self._addr(f"{name}.admin"),
            poll=self._ports[f"{name}.poll"].port if settings.gateway.poll_port else 0,
        )

    def _addr(self, key: str) -> str:
        use = self._ports[key]
        host = _reachable(use.host)
        return f"[{host}]:{use.port}" if ":" in host else f"{host}:{use.port}"

    def _read(self, cluster_uid: str) -> Topology | None:
        try:
            topology = loads(self._path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        except (OSError, UnicodeDecodeError, TopologyError) as e:
            raise LocalError(f"{self._path} cannot be read ({e}); move it away: a new one will be written") from e
        if topology.cluster_uid != cluster_uid:
            raise LocalError(f"{self._path} is another cluster's; move it away: a new one will be written")
        return topology

    def _write(self) -> None:
        new = self._path.with_suffix(".new")
        with new.open("w", encoding="utf-8") as file:
            file.write(dumps(self._topology))
            file.flush()
            os.fsync(file.fileno())
        new.replace(self._path)


def homes(gateway: int, gateways: int, shards: int) -> tuple[str, ...]:
    """The shards in whose slots a gateway mints: spread so that each shard is some gateway's home and none is idle."""
    own = [shard_name(s) for s in range(shards) if s % gateways == gateway]
    return tuple(own) or (shard_name(gateway % shards),)


def _reachable(host: str) -> str:
    """An address to connect to for an address to listen on."""
    return {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}.get(host, host)


def parse_slots(text: str) -> list[int]:
    """The slots of "0-15,20". Raises LocalError."""
    found: list[int] = []
    try:
        for span in text.split(","):
            first, _, last = span.partition("-")
            found += range(int(first), int(last or first) + 1)
    except ValueError:
        raise LocalError(f"{text!r} names no slots; write them as 0-15 or 0-15,20") from None
    if not found or not 0 <= min(found) <= max(found) < SLOTS:
        raise LocalError(f"{text!r}: slots go from 0 to {SLOTS - 1}")
    return found
