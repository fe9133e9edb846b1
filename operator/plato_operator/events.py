"""Kubernetes events: one object per thing that is told, its count raised when it is told again, at most once per AGAIN_S.

Best effort: an event that cannot be written is a log line. Bounded by MOST remembered events.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final

from plato.runtime import logs

from plato_operator.core.orders import Event
from plato_operator.kube import KINDS, MANAGER, Kube, KubeError, Object, Refused

AGAIN_S: Final = 60.0
FORGET_S: Final = 1800.0
"""After this long the same thing is news again; well before the API server forgets the event (1 h)."""
MOST: Final = 1000

_log = logs.get("events")


@dataclass(slots=True)
class _Told:
    """An event that was written: its name, how often it happened, when it was last written and last happened."""

    name: str
    count: int
    written_at: float
    at: float


class Events:
    """Events about the objects of one namespace."""

    def __init__(self, kube: Kube, namespace: str, me: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._kube, self._namespace, self._clock = kube, namespace, clock
        self._instance = me[-128:]
        self._told: dict[tuple[str, Event], _Told] = {}

    async def tell(self, event: Event, objects: Mapping[tuple[str, str], Object]) -> None:
        """Writes an event about one of the objects; about one that is not there it writes none."""
        meta = objects.get((event.kind, event.name), {}).get("metadata", {})
        now = self._clock()
        key = (meta.get("uid", ""), event)
        told = self._told.get(key)
        if told is None or now - told.written_at >= AGAIN_S:
            _log.info("event", about=f"{event.kind} {event.name}", reason=event.reason, message=event.message)
        if not meta:
            return
        try:
            if told is None or now - told.at > FORGET_S:
                name = f"{event.name}.{uuid.uuid4().hex[:12]}"
                await self._kube.create("Event", self._namespace, self._object(name, event, meta))
                self._told.pop(key, None)
                self._told[key] = _Told(name, 1, now, now)
                while len(self._told) > MOST:
                    del self._told[next(iter(self._told))]
                return
            told.count, told.at = told.count + 1, now
            if now - told.written_at >= AGAIN_S:
                told.written_at = now
                series = {"count": told.count, "lastObservedTime": _micro()}
                await self._kube.merge("Event", self._namespace, told.name, {"series": series})
        except KubeError as e:
            if isinstance(e, Refused) and e.status == 404:
                self._told.pop(key, None)
            _log.warning("the event was not written", why=str(e))

    def _object(self, name: str, event: Event, meta: Object) -> Object:
        return {
            "apiVersion": "events.k8s.io/v1", "kind": "Event", "metadata": {"name": name, "namespace": self._namespace},
            "eventTime": _micro(), "type": event.type, "reason": event.reason, "note": _note(event.message),
            "action": event.reason, "reportingController": f"plato.im/{MANAGER}", "reportingInstance": self._instance,
            "regarding": {
                "apiVersion": KINDS[event.kind].api_version, "kind": event.kind, "name": event.name,
                "namespace": self._namespace, "uid": meta["uid"], "resourceVersion": meta.get("resourceVersion", ""),
            },
        }  # fmt: skip


def _micro() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def _note(message: str) -> str:
    """As much as an event may hold: 1,024 bytes."""
    return message.encode()[:1024].decode(errors="ignore")
