"""Writes statuses: only what changed, at most once per EVERY_S and object, with the resourceVersion that was looked at.

A conflict is nobody's harm: the next pass writes what is true then.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, Final

from plato.api.cluster import PlatoClusterStatus
from plato.api.objects import ApiError, from_object, to_object
from plato.api.pool import GatewayPoolStatus
from plato.api.shard import StateShardStatus
from plato.api.shared import Condition
from plato.runtime import logs

from plato_operator import metrics, reading
from plato_operator.core.conditions import bounded, kept_times
from plato_operator.kube import Kube, Object, Refused

EVERY_S: Final = 5.0

_log = logs.get("status")

Status = PlatoClusterStatus | GatewayPoolStatus | StateShardStatus


class Statuses:
    """The statuses of one cluster and its pools and shards. `written` is {uid: when}, of living objects only."""

    def __init__(self, kube: Kube, clock: Callable[[], float] = time.monotonic) -> None:
        self._kube, self._clock = kube, clock
        self._written: dict[str, float] = {}

    def keep(self, uids: Iterable[str]) -> None:
        """Forgets all other objects."""
        wanted = set(uids)
        self._written = {uid: at for uid, at in self._written.items() if uid in wanted}

    async def write(self, kind: str, obj: Object, status: Status, now_ms: int) -> float:
        """Writes if it is due. Returns in how many seconds it will be; 0: nothing waits. Raises KubeError."""
        old = obj.get("status") or {}
        new = replace(status, conditions=kept_times(_conditions(old), status.conditions, now_ms))
        return await self._put(kind, obj, to_object(new))

    async def stalled(self, kind: str, obj: Object, reason: str, message: str, now_ms: int) -> float:
        """Says in conditions that nothing is done for this object, and why; the rest of its status stays."""
        old = obj.get("status") or {}
        generation, message = reading.meta(obj).get("generation", 0), bounded(message)
        told = [
            Condition("Ready", "Unknown", reason, message, generation),
            Condition("Stalled", "True", reason, message, generation),
        ]
        others = [c for c in _conditions(old) if c.type not in ("Ready", "Stalled")]
        conditions = kept_times(_conditions(old), [*told, *others], now_ms)
        return await self._put(kind, obj, {**old, "conditions": to_object(conditions)})

    async def _put(self, kind: str, obj: Object, new: Any) -> float:
        meta = reading.meta(obj)
        if (obj.get("status") or {}) == new:
            return 0
        wait_s = self._written.get(meta["uid"], float("-inf")) + EVERY_S - self._clock()
        if wait_s > 0:
            return wait_s
        gone = dict.fromkeys((obj.get("status") or {}).keys() - new.keys())
        body: Object = {"metadata": {"resourceVersion": meta["resourceVersion"]}, "status": {**new, **gone}}
        try:
            await self._kube.merge(kind, meta["namespace"], meta["name"], body, "status")
        except Refused as e:
            if e.status in (404, 409):
                return EVERY_S
            raise
        self._written[meta["uid"]] = self._clock()
        metrics.WRITES.labels(f"{kind}/status").inc()
        return 0


def _conditions(status: object) -> list[Condition]:
    raw = status.get("conditions") if isinstance(status, dict) else None
    found = []
    for condition in raw or ():
        try:
            found.append(from_object(Condition, condition))
        except ApiError:
            continue  # somebody else's
    return found
